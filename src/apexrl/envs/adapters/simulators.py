"""What the adapters of separate simulator packages share: loading them, and the spaces of what they return."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from apexrl.core.errors import EnvError


def load_simulator(package: str, install: str) -> ModuleType:
    """Import the package of a simulator, or one of its modules; ``install`` is how to get a missing one."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
        problem = "is not installed" if is_missing else f"cannot be loaded: {error}"
        raise EnvError(f"{name} {problem}. {install} See docs/environments.md.") from error


def space_of(obs: Any) -> spaces.Box | spaces.Dict:
    """Return the space of one environment for an observation ``[N, ...]``, a tensor or named groups of them."""
    if not isinstance(obs, Tensor):
        return spaces.Dict({key: space_of(part) for key, part in obs.items()})
    dtype = obs.new_empty(0, device="cpu").numpy().dtype
    low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
    return spaces.Box(low, high, tuple(obs.shape[1:]), dtype=dtype.type)
