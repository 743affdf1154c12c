"""Observations: their tensors and spaces by name, and the groups that a network sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.core.types import OBS_PRIV_KEY, OBSERVATION, Observation

# Groups that only the critic sees unless the actor's groups are named: what the real robot cannot measure.
PRIVILEGED_GROUPS = (OBS_PRIV_KEY, "privileged", "critic")


def leaves(obs: Observation) -> dict[str, Tensor]:
    """Return the tensors of an observation by dotted path; a plain tensor is called ``observation``."""
    if isinstance(obs, Tensor):
        return {OBSERVATION: obs}
    found: dict[str, Tensor] = {}
    for key, value in obs.items():
        if isinstance(value, Tensor):
            found[key] = value
        else:
            assert isinstance(value, TensorDict)
            found.update({f"{key}.{path}": leaf for path, leaf in leaves(value).items()})
    return found


def leaf_spaces(space: gym.Space[Any]) -> dict[str, gym.spaces.Box]:
    """Return the Boxes of an observation space by the same paths as ``leaves``."""
    if isinstance(space, gym.spaces.Box):
        return {OBSERVATION: space}
    if isinstance(space, gym.spaces.Dict):
        found: dict[str, gym.spaces.Box] = {}
        for key, child in space.spaces.items():
            inner = leaf_spaces(child)
            found.update(
                {key if isinstance(child, gym.spaces.Box) else f"{key}.{path}": box for path, box in inner.items()}
            )
        return found
    raise ConfigError(f"An observation space must be a Box or a Dict of Boxes, got {space}.")


def is_image(space: gym.spaces.Box) -> bool:
    """Images are uint8 with three dimensions."""
    return space.dtype == np.uint8 and len(space.shape) == 3


def select_groups(
    spaces: dict[str, gym.spaces.Box], groups: Sequence[str] | None, *, privileged: bool
) -> dict[str, gym.spaces.Box]:
    """Keep the named top-level groups; None means all, without the privileged ones unless ``privileged``."""
    available = list(dict.fromkeys(path.split(".")[0] for path in spaces))
    if groups is None:
        groups = [name for name in available if privileged or name not in PRIVILEGED_GROUPS] or available
    for name in groups:
        if name not in available:
            raise ConfigError(
                f"Observation group '{name}' (of actor_groups or critic_groups) does not exist; there are {available}."
                + did_you_mean(name, available)
            )
    return {path: box for path, box in spaces.items() if path.split(".")[0] in groups}
