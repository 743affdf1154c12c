"""Policies: networks that act, evaluate actions, and value states."""

from apexrl.policies.actor_critic import ActorCritic
from apexrl.policies.base import Policy
from apexrl.policies.recurrent import RecurrentActorCritic
from apexrl.policies.roa import ROAPolicy
from apexrl.policies.sac import SACPolicy
from apexrl.policies.vla import PI0_CFG_Adapter, VLAPolicy

__all__ = [
    "ActorCritic",
    "PI0_CFG_Adapter",
    "Policy",
    "ROAPolicy",
    "RecurrentActorCritic",
    "SACPolicy",
    "VLAPolicy",
]
