"""Critics: from an observation to a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from apexrl.policies.networks.encoder import ObservationMLP


class MLPCritic(ObservationMLP):
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
        super().__init__(observation_space, groups, hidden_dims, activation, 1, privileged=True)
