"""Policies: networks that act, evaluate actions, and value states."""

from apexrl.policies.actor_critic import ActorCritic
from apexrl.policies.base import Policy
from apexrl.policies.recurrent import RecurrentActorCritic
from apexrl.policies.roa import ROAPolicy
from apexrl.policies.sac import SACPolicy

__all__ = ["ActorCritic", "Policy", "ROAPolicy", "RecurrentActorCritic", "SACPolicy"]
