"""Encoders of observations, and the actors and critics on top of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.core.observations import is_image, leaf_spaces, leaves, select_groups
from apexrl.core.types import OBSERVATION, Observation
from apexrl.policies.networks.distributions import (
    Bounded,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
    StateDependentGaussian,
)

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
        hint = did_you_mean(activation, ACTIVATIONS)
        raise ConfigError(f"activation must be one of {sorted(ACTIVATIONS)}, got '{activation}'.{hint}")
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


class ImageEncoder(nn.Module):
    """A small convolutional network for uint8 images ``[..., H, W, C]`` or ``[..., C, H, W]``."""

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

    def forward(self, image: Tensor) -> Tensor:
        """Return features ``[..., F]``."""
        batch_shape = image.shape[:-3]
        x = image.reshape(-1, *image.shape[-3:])
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        features: Tensor = self.head(self.convolutions(x.float() / 255.0))
        return features.reshape(*batch_shape, -1)


class ObservationEncoder(nn.Module):
    """Joins the vectors of an observation, and the features of its images, into one vector."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        groups: Sequence[str] | None = None,
        *,
        privileged: bool = False,
        image_features: int = 128,
    ) -> None:
        super().__init__()
        spaces = select_groups(leaf_spaces(observation_space), groups, privileged=privileged)
        self.paths = list(spaces)
        # nn.ModuleDict refuses dots in names.
        self.images = nn.ModuleDict(
            {
                path.replace(".", "/"): ImageEncoder(box.shape, image_features)  # type: ignore[arg-type]
                for path, box in spaces.items()
                if is_image(box)
            }
        )
        self.num_dims = {path: len(box.shape) for path, box in spaces.items()}
        sizes = (image_features if is_image(box) else int(np.prod(box.shape)) for box in spaces.values())
        self.num_features = sum(sizes)

    def forward(self, obs: Observation) -> Tensor:
        """Return features ``[..., F]`` for any leading dimensions."""
        if isinstance(obs, Tensor) and not len(self.images) and self.num_dims[self.paths[0]] == 1:
            return obs
        found = leaves(obs)
        return torch.cat([self._features(path, found[path]) for path in self.paths], dim=-1)

    def _features(self, path: str, value: Tensor) -> Tensor:
        name = path.replace(".", "/")
        if name in self.images:
            features: Tensor = self.images[name](value)
            return features
        num_dims = self.num_dims[path]
        return (value.flatten(-num_dims) if num_dims else value.unsqueeze(-1)).float()


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


def map_leaves(obs: Observation, functions: Mapping[str, Callable[[Tensor], Tensor]]) -> Observation:
    """Apply a function to each leaf that has one; the others stay."""
    if isinstance(obs, Tensor):
        return functions[OBSERVATION](obs) if OBSERVATION in functions else obs
    out = obs.copy()
    for path, leaf in leaves(obs).items():
        if path in functions:
            out[tuple(path.split("."))] = functions[path](leaf)
    return out


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
            raise ConfigError(f"policy needs 0 < min_std <= init_std <= max_std, got {min_std}, {init_std}, {max_std}.")
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
        num_actions = int(np.prod(action_space.shape or ()))
        self.head = linear(num_features, 2 * num_actions if state_dependent_std else num_actions, gain=0.01)
        if state_dependent_std:
            with torch.no_grad():
                self.head.bias[num_actions:] = math.log(init_std)
        else:
            shape = (num_features, num_actions) if gsde else (num_actions,)
            self.log_std = nn.Parameter(torch.full(shape, math.log(init_std)))
        if self.distribution == "squashed_gaussian":
            for name in ("low", "high"):
                bound = torch.as_tensor(getattr(action_space, name), dtype=torch.float32)
                self.register_buffer(name, bound.flatten())

    def forward(self, features: Tensor) -> Distribution:
        """Return the distribution for features ``[..., F]``."""
        out = self.head(features)
        if self.sizes is not None:
            return MultiCategorical(out, self.sizes)
        mean, log_std = (out, self.log_std) if self.log_std is not None else out.chunk(2, dim=-1)
        # Without gradients a plain clamp is the same, and ten times as fast.
        clamp: Any = Bounded.apply if torch.is_grad_enabled() else torch.clamp
        log_std = clamp(log_std, *self.log_std_bounds)
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
        actual = ("gaussian" if self.sizes is None else "categorical") if wanted == "auto" else wanted
        needed = ""
        if (actual == "categorical") != (self.sizes is not None):
            needed = "discrete actions" if self.sizes is None else "a Box action space"
        elif actual == "squashed_gaussian" and not action_space.is_bounded():  # type: ignore[attr-defined]
            needed = "bounded actions"
        if needed:
            raise ConfigError(f"policy.distribution '{actual}' needs {needed}, got {action_space}; use auto.")
        return actual


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
    kinds = "Box, Discrete, MultiDiscrete or MultiBinary"
    raise ConfigError(f"Actions must be {kinds}, got {action_space}. Wrap the environment.")


class MLPActor(nn.Module):
    """Encoder, hidden layers, which may see ``num_latents`` other features, and an ``ActionHead`` with other options.

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
        num_latents: int = 0,
        **head_options: Any,
    ) -> None:
        super().__init__()
        self.encoder = ObservationEncoder(observation_space, groups)
        widths = [self.encoder.num_features + num_latents, *hidden_dims]
        self.trunk = mlp(widths, activation)
        self.action_head = ActionHead(widths[-1], action_space, **head_options)

    def forward(self, obs: Observation) -> Distribution:
        """Return the action distribution for observations ``[..., *shape]``."""
        distribution: Distribution = self.action_head(self.trunk(self.encoder(obs)))
        return distribution


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
