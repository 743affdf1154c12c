"""The policy of soft actor-critic: a squashed Gaussian actor and critics of state and action."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.errors import ConfigError
from apexrl.core.types import ACTION, OBSERVATION, Carry, Observation
from apexrl.policies.base import Policy, state_values
from apexrl.policies.networks import MLPActor, ObservationNormalizer, QEnsemble, SquashedGaussian


class SACPolicy(Policy):
    """An actor whose actions stay inside their bounds, critics, and the slowly following copy of the critics.

    Arguments are those of ``ActorCritic``, but for:

    Args:
        action_space: of one environment; a bounded Box.
        actor_class: its distribution must be a ``SquashedGaussian``.
        critic_class: called as ``critic_class(observation_space, num_actions, **critic_cfg)``.
    """

    has_value = False  # the critics value actions
    centre: Tensor
    scale: Tensor
    acts_uniformly: Tensor
    """Bool ``[]``: actions that are not deterministic ignore the observation; ``SAC`` sets it until it learns."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        actor_class: type[nn.Module] = MLPActor,
        critic_class: type[nn.Module] = QEnsemble,
        actor_cfg: Mapping[str, Any] | None = None,
        critic_cfg: Mapping[str, Any] | None = None,
        normalize_obs: bool = False,
    ) -> None:
        super().__init__(observation_space, action_space)
        if not isinstance(action_space, gym.spaces.Box) or not _has_width(action_space):
            raise ConfigError(f"SAC needs a Box of actions with bounds on every side, got {action_space}; use PPO.")
        actor_options = {"hidden_dims": (256, 256), "activation": "relu", **(actor_cfg or {})}
        wanted = actor_options.get("distribution", "auto")
        if wanted not in ("auto", "squashed_gaussian"):
            raise ConfigError(f"policy.distribution must be auto or squashed_gaussian for SAC, got '{wanted}'.")
        actor_options |= {"distribution": "squashed_gaussian", "state_dependent_std": True}
        self.actor = actor_class(observation_space, action_space, **actor_options)
        if isinstance(self.actor, MLPActor):
            _begin_like_linear(self.actor)
        self.critics = critic_class(observation_space, int(np.prod(action_space.shape)), **(critic_cfg or {}))
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.normalizer = ObservationNormalizer(observation_space) if normalize_obs else None
        low, high = (torch.as_tensor(x, dtype=torch.float32).flatten() for x in (action_space.low, action_space.high))
        self.register_buffer("centre", 0.5 * (high + low))
        self.register_buffer("scale", 0.5 * (high - low))
        self.register_buffer("acts_uniformly", torch.zeros((), dtype=torch.bool))

    def distribution(self, obs: Observation) -> SquashedGaussian:
        """Return the action distribution for observations ``[..., *shape]``."""
        distribution: SquashedGaussian = self.actor(self.normalized(obs))
        return distribution

    def unit_action(self, action: Tensor) -> Tensor:
        """Bring actions from their bounds to [−1, 1], as the critics see them."""
        return (action - self.centre) / self.scale

    def draw_unit_action(self, distribution: SquashedGaussian) -> tuple[Tensor, Tensor]:
        """Draw an action scaled to [−1, 1], with gradients, and its log-probability on that scale."""
        action, log_prob = distribution.sample_with_log_prob()
        return self.unit_action(action), log_prob + self.scale.log().sum()

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Act with the actor alone, or without it while ``acts_uniformly``."""
        distribution = self.distribution(carry[OBSERVATION])
        return {ACTION: distribution.mode if deterministic else distribution.sample_or_uniform(self.acts_uniformly)}

    def values(self, batch: Mapping[str, Any] | TensorDict) -> tuple[Tensor, Tensor]:
        """Give states the smallest of the critics' values of the deterministic action."""
        return state_values(batch, self._value)

    def _value(self, obs: Observation) -> Tensor:
        obs = self.normalized(obs)
        value: Tensor = self.critics(obs, self.unit_action(self.actor(obs).mode)).amin(0)
        return value


def _begin_like_linear(actor: MLPActor) -> None:
    """Let linear layers begin as ``nn.Linear`` does, and as the critics do; the orthogonal ones of PPO learn slower."""
    head = actor.action_head
    shift = head.head.bias.detach().clone()
    for layer in (*actor.trunk, head.head):
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    with torch.no_grad():
        head.head.bias.add_(shift)  # the deviation to begin with


def _has_width(box: gym.spaces.Box) -> bool:
    """Say whether every side has two different, finite bounds."""
    with np.errstate(over="ignore"):
        width = box.high.astype(np.float32) - box.low.astype(np.float32)
    return bool((np.isfinite(width) & (width > 0)).all())
