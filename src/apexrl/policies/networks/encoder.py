"""From observations (one tensor, or named groups; vectors and pictures) to one feature vector."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.core.observations import is_picture, leaf_spaces, leaves, select_groups
from apexrl.core.types import OBSERVATION, Observation

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


def mlp(dims: Sequence[int], activation: str) -> nn.Sequential:
    """Linear layers of the given widths, each followed by the activation; orthogonal with gain √2."""
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"activation must be one of {sorted(ACTIVATIONS)}, got '{activation}'."
            + did_you_mean(activation, ACTIVATIONS)
        )
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(dims):
        layers += [linear(width_in, width_out, gain=2.0**0.5), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def linear(width_in: int, width_out: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(width_in, width_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class PictureEncoder(nn.Module):
    """A small convolutional network for uint8 pictures ``[..., H, W, C]`` or ``[..., C, H, W]``."""

    def __init__(self, shape: tuple[int, int, int], num_features: int) -> None:
        super().__init__()
        self.channels_last = shape[-1] < shape[0]
        channels, height, width = (shape[2], *shape[:2]) if self.channels_last else shape
        if min(height, width) >= 36:
            layers: list[nn.Module] = [
                nn.Conv2d(channels, 32, 8, stride=4), nn.ReLU(),
                nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
                nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(),
            ]  # fmt: skip
        else:
            layers = [
                nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            ]  # fmt: skip
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, channels, height, width)).shape[1]
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.orthogonal_(layer.weight, 2.0**0.5)
        self.head = nn.Sequential(linear(flat, num_features, 2.0**0.5), nn.ReLU())

    def forward(self, picture: Tensor) -> Tensor:
        """Return features ``[..., F]``."""
        batch_shape = picture.shape[:-3]
        x = picture.reshape(-1, *picture.shape[-3:])
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        features: Tensor = self.head(self.convolutions(x.float() / 255.0))
        return features.reshape(*batch_shape, -1)


class ObservationEncoder(nn.Module):
    """Joins the vectors of an observation, and the features of its pictures, into one vector."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        groups: Sequence[str] | None = None,
        *,
        privileged: bool = False,
        picture_features: int = 128,
    ) -> None:
        super().__init__()
        spaces = select_groups(leaf_spaces(observation_space), groups, privileged=privileged)
        self.paths = list(spaces)
        # nn.ModuleDict refuses dots in names.
        self.pictures = nn.ModuleDict(
            {
                path.replace(".", "/"): PictureEncoder(box.shape, picture_features)  # type: ignore[arg-type]
                for path, box in spaces.items()
                if is_picture(box)
            }
        )
        self.num_dims = {path: len(box.shape) for path, box in spaces.items()}
        self.num_features = sum(
            picture_features if is_picture(box) else int(np.prod(box.shape)) for box in spaces.values()
        )

    def forward(self, obs: Observation) -> Tensor:
        """Return features ``[..., F]`` for any leading dimensions."""
        if isinstance(obs, Tensor) and not len(self.pictures) and self.num_dims[self.paths[0]] == 1:
            return obs
        found = leaves(obs)
        return torch.cat([self._features(path, found[path]) for path in self.paths], dim=-1)

    def _features(self, path: str, value: Tensor) -> Tensor:
        name = path.replace(".", "/")
        if name in self.pictures:
            features: Tensor = self.pictures[name](value)
            return features
        num_dims = self.num_dims[path]
        if num_dims == 0:
            return value.unsqueeze(-1).float()
        return value.flatten(-num_dims).float()


class ObservationMLP(nn.Module):
    """Encoder, hidden layers and a linear layer: from an observation to some numbers."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        groups: Sequence[str] | None,
        hidden_dims: Sequence[int],
        activation: str,
        num_outputs: int,
        *,
        privileged: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = ObservationEncoder(observation_space, groups, privileged=privileged)
        widths = [self.encoder.num_features, *hidden_dims]
        self.trunk = mlp(widths, activation)
        self.head = linear(widths[-1], num_outputs, gain=1.0)

    def forward(self, obs: Observation) -> Tensor:
        """Return ``[..., num_outputs]``."""
        outputs: Tensor = self.head(self.trunk(self.encoder(obs)))
        return outputs


def map_leaves(obs: Observation, modules: Mapping[str, nn.Module]) -> Observation:
    """Apply a module to each leaf that has one; the others stay."""
    if isinstance(obs, Tensor):
        return modules[OBSERVATION](obs) if OBSERVATION in modules else obs
    out = obs.copy()
    for path, leaf in leaves(obs).items():
        if path in modules:
            out[tuple(path.split("."))] = modules[path](leaf)
    return out
