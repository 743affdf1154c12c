"""Action values: several independent critics evaluated as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from apexrl.core.types import Observation
from apexrl.policies.networks.mlp import ACTIVATIONS, ObservationEncoder


class ParallelLinear(nn.Module):
    """K linear layers side by side: ``[K, B, in]`` to ``[K, B, out]`` in one product.

    Each begins as ``nn.Linear`` does, uniform in ±1/√in.
    """

    def __init__(self, num_parallel: int, width_in: int, width_out: int) -> None:
        super().__init__()
        bound = width_in**-0.5
        self.weight = nn.Parameter(torch.empty(num_parallel, width_in, width_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_parallel, 1, width_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Apply layer k to ``x[k]``."""
        return torch.baddbmm(self.bias, x, self.weight)


class ParallelLayerNorm(nn.Module):
    """K layer normalisations side by side, each with its own scale and shift."""

    def __init__(self, num_parallel: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(num_parallel, 1, width))
        self.bias = nn.Parameter(torch.zeros(num_parallel, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x[k]`` over its last dimension."""
        return nn.functional.layer_norm(x, (self.width,)) * self.weight + self.bias


class QEnsemble(nn.Module):
    """K critics over one observation encoder. By default they also see the privileged observation groups.

    Args:
        observation_space: of one environment.
        num_actions: width of an action.
        hidden_dims: widths of the hidden layers.
        activation: between the layers.
        groups: observation groups that the critics see; None for all.
        num_critics: K.
        dropout: share of the hidden units that is dropped in training, before the normalisation.
        layer_norm: normalise each hidden layer before its activation.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        num_actions: int,
        *,
        hidden_dims: Sequence[int] = (256, 256),
        activation: str = "relu",
        groups: Sequence[str] | None = None,
        num_critics: int = 2,
        dropout: float = 0.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_critics = num_critics
        self.encoder = ObservationEncoder(observation_space, groups, privileged=True)
        layers: list[nn.Module] = []
        widths = [self.encoder.num_features + num_actions, *hidden_dims]
        for width_in, width_out in itertools.pairwise(widths):
            layers.append(ParallelLinear(num_critics, width_in, width_out))
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            if layer_norm:
                layers.append(ParallelLayerNorm(num_critics, width_out))
            layers.append(ACTIVATIONS[activation]())
        self.layers = nn.Sequential(*layers, ParallelLinear(num_critics, widths[-1], 1))

    def forward(self, obs: Observation, action: Tensor) -> Tensor:
        """Return values ``[K, ..., 1]`` of actions ``[..., A]`` in observations ``[..., *shape]``."""
        x = torch.cat((self.encoder(obs), action), dim=-1)
        flat = x.reshape(-1, x.shape[-1])
        values: Tensor = self.layers(flat.expand(self.num_critics, *flat.shape))
        return values.reshape(self.num_critics, *x.shape[:-1], 1)
