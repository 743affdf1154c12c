"""Critics: from an observation to a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from torch import Tensor, nn

from apexrl.core.types import Observation
from apexrl.policies.networks.encoder import ObservationEncoder, linear, mlp


class MLPCritic(nn.Module):
    """Encoder, hidden layers, one number. By default it also sees the privileged observation groups.

    A custom critic is any module with this constructor and ``forward(obs) -> value [..., 1]``.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        *,
        hidden_dims: Sequence[int] = (64, 64),
        activation: str = "tanh",
        groups: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = ObservationEncoder(observation_space, groups, privileged=True)
        self.trunk = mlp([self.encoder.num_features, *hidden_dims], activation)
        self.head = linear([self.encoder.num_features, *hidden_dims][-1], 1, gain=1.0)

    def forward(self, obs: Observation) -> Tensor:
        """Return values ``[..., 1]``."""
        value: Tensor = self.head(self.trunk(self.encoder(obs)))
        return value
