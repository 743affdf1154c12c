"""Policies: networks that act, evaluate actions, and value states."""

from apexrl.policies.actor_critic import ActorCritic
from apexrl.policies.base import Policy
from apexrl.policies.recurrent import RecurrentActorCritic

__all__ = ["ActorCritic", "Policy", "RecurrentActorCritic"]
