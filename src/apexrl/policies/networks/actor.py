"""Actors: from an observation to an action distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from apexrl.core.errors import ConfigError
from apexrl.core.types import Observation
from apexrl.policies.networks.distributions import (
    DiagGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
    StateDependentGaussian,
    bounded,
)
from apexrl.policies.networks.encoder import ObservationEncoder, linear, mlp

DistributionName = Literal["auto", "gaussian", "squashed_gaussian", "categorical"]


class ActionHead(nn.Module):
    """From features to a distribution over an action space.

    Standard deviations are ``exp`` of a bounded logarithm, so they are positive and finite by construction. The bound
    passes gradients inwards only, so a logarithm that reached it stays near and can come back.
    """

    low: Tensor
    high: Tensor
    log_std: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        action_space: gym.Space[Any],
        *,
        distribution: DistributionName = "auto",
        init_std: float = 1.0,
        state_dependent_std: bool = False,
        min_std: float = 1e-3,
        max_std: float = 10.0,
        gsde: bool = False,
        gsde_interval: int = 4,
    ) -> None:
        super().__init__()
        if not 0.0 < min_std <= init_std <= max_std:
            raise ConfigError(
                f"policy needs 0 < min_std <= init_std <= max_std, got min_std {min_std}, init_std {init_std}, "
                f"max_std {max_std}."
            )
        self.log_std_bounds = (math.log(min_std), math.log(max_std))
        self.sizes = choice_sizes(action_space)
        self.distribution = self._resolve(distribution, action_space)
        self.init_std, self.log_std = init_std, None
        self.gsde_interval = gsde_interval if gsde else None
        if gsde and (self.distribution != "gaussian" or state_dependent_std):
            raise ConfigError(
                "policy.gsde needs policy.distribution gaussian and policy.state_dependent_std false, got "
                f"{self.distribution} and {state_dependent_std}."
            )
        if self.sizes is not None:
            self.head = linear(num_features, sum(self.sizes), gain=0.01)
            return
        assert isinstance(action_space, gym.spaces.Box)
        num_actions = int(np.prod(action_space.shape))
        self.num_actions = num_actions
        if state_dependent_std:
            self.head = linear(num_features, 2 * num_actions, gain=0.01)
            with torch.no_grad():
                self.head.bias[num_actions:] = math.log(init_std)
        else:
            self.head = linear(num_features, num_actions, gain=0.01)
            shape = (num_features, num_actions) if gsde else (num_actions,)
            self.log_std = nn.Parameter(torch.full(shape, math.log(init_std)))
        if self.distribution == "squashed_gaussian":
            self.register_buffer("low", torch.as_tensor(action_space.low, dtype=torch.float32).flatten())
            self.register_buffer("high", torch.as_tensor(action_space.high, dtype=torch.float32).flatten())

    def forward(self, features: Tensor) -> Distribution:
        """Return the distribution for features ``[..., F]``."""
        out = self.head(features)
        if self.sizes is not None:
            return MultiCategorical(out, self.sizes)
        mean, log_std = (out, self.log_std) if self.log_std is not None else out.chunk(2, dim=-1)
        log_std = bounded(log_std, *self.log_std_bounds)
        if self.distribution == "squashed_gaussian":
            return SquashedGaussian(mean, log_std, self.low, self.high)
        if self.gsde_interval is not None:
            return StateDependentGaussian(mean, log_std, features, self.gsde_interval)
        return DiagGaussian(mean, log_std)

    @torch.no_grad()
    def limit_log_std(self, low: float, high: float) -> None:
        """Bring the parameter log σ between two numbers."""
        assert self.log_std is not None
        self.log_std.clamp_(low, high)

    def _resolve(self, wanted: DistributionName, action_space: gym.Space[Any]) -> str:
        if self.sizes is not None:
            if wanted not in ("auto", "categorical"):
                raise ConfigError(
                    f"policy.distribution '{wanted}' needs a Box action space, got {action_space}; use auto."
                )
            return "categorical"
        if wanted == "categorical":
            raise ConfigError(
                f"policy.distribution 'categorical' needs discrete actions, got {action_space}; use auto."
            )
        if wanted == "squashed_gaussian" and not action_space.is_bounded():  # type: ignore[attr-defined]
            raise ConfigError(
                f"policy.distribution 'squashed_gaussian' needs bounded actions, got {action_space}; use gaussian."
            )
        return "gaussian" if wanted == "auto" else wanted


def choice_sizes(action_space: gym.Space[Any]) -> list[int] | None:
    """Return the number of options of each discrete choice; None for continuous actions."""
    if isinstance(action_space, gym.spaces.Discrete):
        return [int(action_space.n)]
    if isinstance(action_space, gym.spaces.MultiDiscrete):
        return [int(n) for n in action_space.nvec.flatten()]
    if isinstance(action_space, gym.spaces.MultiBinary):
        return [2] * int(np.prod(action_space.shape))
    if isinstance(action_space, gym.spaces.Box):
        return None
    raise ConfigError(
        f"Actions must be Box, Discrete, MultiDiscrete or MultiBinary, got {action_space}. Wrap the environment."
    )


class MLPActor(nn.Module):
    """Encoder, hidden layers, and an ``ActionHead``, which takes the other options.

    A custom actor is any module with this constructor and ``forward(obs) -> Distribution``.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden_dims: Sequence[int] = (64, 64),
        activation: str = "tanh",
        groups: Sequence[str] | None = None,
        **head_options: Any,
    ) -> None:
        super().__init__()
        self.encoder = ObservationEncoder(observation_space, groups)
        widths = [self.encoder.num_features, *hidden_dims]
        self.trunk = mlp(widths, activation)
        self.action_head = ActionHead(widths[-1], action_space, **head_options)

    def forward(self, obs: Observation) -> Distribution:
        """Return the action distribution for observations ``[..., *shape]``."""
        distribution: Distribution = self.action_head(self.trunk(self.encoder(obs)))
        return distribution
