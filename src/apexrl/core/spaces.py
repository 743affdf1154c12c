"""Spaces as plain values, which checkpoints and JSON files can hold."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class EncodedBox(spaces.Box):
    """The Box of the vectors that observations of another space, ``source``, are encoded as."""

    def __init__(self, source: gym.Space[Any], low: Any, high: Any) -> None:
        super().__init__(low, high, dtype=np.float32)
        self.source = source


def space_to_plain(space: gym.Space[Any]) -> dict[str, Any] | None:
    """Return what ``space_from_plain`` needs; None for a space that no policy takes."""
    plain: dict[str, Any] = {"kind": type(space).__name__}
    match space:
        case EncodedBox():
            box = spaces.Box(space.low, space.high)
            return {**(space_to_plain(box) or {}), "source": space_to_plain(space.source)}
        case spaces.Box():
            shape, dtype = list(space.shape), space.dtype.name
            return plain | {"shape": shape, "dtype": dtype, "low": _bound(space.low), "high": _bound(space.high)}
        case spaces.Discrete():
            return plain | {"n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return plain | {"nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": space.dtype.name}
        case spaces.MultiBinary():
            return plain | {"n": list(space.shape)}
        case spaces.Dict():
            return plain | {"spaces": {key: space_to_plain(part) for key, part in space.spaces.items()}}
    return None


def space_from_plain(plain: Mapping[str, Any]) -> gym.Space[Any]:
    """Return the space that ``space_to_plain`` was given."""
    match plain:
        case {"kind": "Box", "shape": shape, "dtype": dtype, "low": low, "high": high}:
            lowest, highest = _array(low, -math.inf, shape, dtype), _array(high, math.inf, shape, dtype)
            if "source" in plain:
                return EncodedBox(space_from_plain(plain["source"]), lowest, highest)
            return spaces.Box(lowest, highest, dtype=np.dtype(dtype).type)
        case {"kind": "Discrete", "n": n, "start": start}:
            return spaces.Discrete(n, start=start)
        case {"kind": "MultiDiscrete", "nvec": nvec, "start": start, "dtype": dtype}:
            return spaces.MultiDiscrete(nvec, np.dtype(dtype).type, start=start)
        case {"kind": "MultiBinary", "n": n}:
            return spaces.MultiBinary(n)
        case {"kind": "Dict", "spaces": parts}:
            return spaces.Dict(OrderedDict((key, space_from_plain(part)) for key, part in parts.items()))
    raise ValueError(f"no space: {plain!r:.80}")


def _bound(values: np.ndarray[Any, Any]) -> Any:
    """Return a list of bounds, or one number where all are equal; None where there is no bound."""
    numbers = [None if math.isinf(number) else number for number in values.ravel().tolist()]
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _array(bound: Any, unbounded: float, shape: list[int], dtype: str) -> np.ndarray[Any, Any]:
    numbers = [unbounded if number is None else number for number in (bound if isinstance(bound, list) else [bound])]
    flat = np.array(numbers, dtype)
    return np.broadcast_to(flat, math.prod(shape)).reshape(shape)
