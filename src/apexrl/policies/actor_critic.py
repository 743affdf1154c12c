"""The standard policy: an actor and a critic that share nothing but the observation normaliser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.types import OBSERVATION, Carry, Evaluation, Observation
from apexrl.policies.base import Policy, explore, initial_noise, state_values, stored_log_prob
from apexrl.policies.networks import Distribution, MLPActor, MLPCritic, ObservationNormalizer


class ActorCritic(Policy):
    """An actor and a critic over one observation.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        actor_class: called as ``actor_class(observation_space, action_space, **actor_cfg)``.
        critic_class: called as ``critic_class(observation_space, **critic_cfg)``.
        actor_cfg: options of the actor, such as ``hidden_dims``.
        critic_cfg: options of the critic.
        normalize_obs: keep running statistics of the observations and normalise with them.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        actor_class: type[nn.Module] = MLPActor,
        critic_class: type[nn.Module] = MLPCritic,
        actor_cfg: Mapping[str, Any] | None = None,
        critic_cfg: Mapping[str, Any] | None = None,
        normalize_obs: bool = False,
    ) -> None:
        super().__init__(observation_space, action_space)
        self.actor = actor_class(observation_space, action_space, **(actor_cfg or {}))
        self.critic = critic_class(observation_space, **(critic_cfg or {}))
        self.normalizer = ObservationNormalizer(observation_space) if normalize_obs else None

    def distribution(self, obs: Observation) -> Distribution:
        """Return the action distribution for observations ``[..., *shape]``."""
        distribution: Distribution = self.actor(self.normalized(obs))
        return distribution

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        """Return the noise of gSDE, where the actor explores so."""
        return initial_noise(getattr(self.actor, "action_head", self.actor), num_envs)

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Act without the critic, which runs once, batched, after the rollout."""
        return explore(self.actor(self.normalized(carry[OBSERVATION])), carry, deterministic)

    def evaluate(self, batch: Mapping[str, Any] | TensorDict) -> Evaluation:
        """Evaluate stored actions, normalising the observations once."""
        obs = self.normalized(batch[OBSERVATION])
        distribution: Distribution = self.actor(obs)
        return Evaluation(stored_log_prob(distribution, batch), distribution.entropy(), self.critic(obs))

    def values(self, batch: Mapping[str, Any] | TensorDict) -> tuple[Tensor, Tensor]:
        """Value states with the critic."""
        return state_values(batch, lambda obs: self.critic(self.normalized(obs)))
