"""Observations and actions of Gymnasium as rows of arrays, which several processes can share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from apexrl.core.spaces import EncodedBox

Array: TypeAlias = NDArray[Any]
Tree: TypeAlias = Any
"""An array, or a dictionary of trees."""


def map_tree(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply a function to every leaf of nested dictionaries."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, value) for key, value in tree.items()}
    return function(tree)


def tree_leaves(tree: Tree) -> list[Array]:
    """Return the arrays of a tree, in the order of its keys."""
    if isinstance(tree, Mapping):
        return [leaf for key in sorted(tree) for leaf in tree_leaves(tree[key])]
    return [tree]


def flat_space(space: spaces.Space[Any]) -> spaces.Box | spaces.Dict:
    """Return the space of the arrays that observations of ``space`` become.

    Box becomes float32 (images, that is uint8 with two or more dimensions, stay uint8; a Box without
    dimensions gets one), Discrete a one-hot vector, MultiDiscrete the concatenation of its one-hot vectors,
    MultiBinary float32, Dict a Dict, and Tuple a Dict with the keys ``"0"``, ``"1"``, …. A Box of another shape than
    the observations knows their space: ``EncodedBox``.
    """
    match space:
        case spaces.Box(dtype=np.uint8) if len(space.shape) >= 2:
            return space
        case spaces.Box():
            with np.errstate(over="ignore"):  # float64 bounds beyond float32 become infinite
                low, high = (np.atleast_1d(bound).astype(np.float32) for bound in (space.low, space.high))
            return spaces.Box(low, high, dtype=np.float32) if space.shape else EncodedBox(space, low, high)
        case spaces.Discrete() | spaces.MultiDiscrete():
            ones = np.ones(choice_ranges(space)[1].sum(), np.float32)
            return EncodedBox(space, 0 * ones, ones)
        case spaces.MultiBinary():
            return spaces.Box(0.0, 1.0, space.shape)
        case spaces.Dict():
            return spaces.Dict({key: flat_space(part) for key, part in space.spaces.items()})
        case spaces.Tuple():
            return spaces.Dict({str(i): flat_space(part) for i, part in enumerate(space.spaces)})
    supported = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these are; wrap the environment"
    raise TypeError(f"Observation space {space} is not supported; {supported}.")


def choice_ranges(space: spaces.Discrete | spaces.MultiDiscrete) -> tuple[Array, Array]:
    """Return the least value of every choice, and how many values it has."""
    return np.ravel(space.start), np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def writer(space: spaces.Space[Any]) -> Callable[[Tree, Any], None]:
    """Return the function ``write(row, observation)`` that stores one observation as ``flat_space`` says."""

    def write_array(row: Tree, value: Any) -> None:
        row[...] = value

    def write_one_hot(row: Tree, value: Any) -> None:
        row[...] = 0.0
        row[np.ravel(value) + first] = 1.0

    def write_parts(row: Tree, value: Any) -> None:
        for key, write in parts:
            write(row[str(key)], value[key])

    match space:
        case spaces.Discrete() | spaces.MultiDiscrete():
            start, sizes = choice_ranges(space)
            first = np.cumsum(sizes) - sizes - start
            return write_one_hot
        case spaces.Dict() | spaces.Tuple():
            named: Any = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            parts = [(key, writer(part)) for key, part in named]
            return write_parts
    return write_array


def action_layout(space: spaces.Space[Any]) -> tuple[int, type[np.generic]]:
    """Return the width ``A`` and the type of the rows in which actions of ``space`` arrive."""
    match space:
        case spaces.Box():
            return math.prod(space.shape), np.float32
        case spaces.Discrete():
            return 1, np.int64
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            return math.prod(space.shape), np.int64
    supported = "Box, Discrete, MultiDiscrete and MultiBinary are; wrap the environment"
    raise TypeError(f"Action space {space} is not supported; {supported}.")


def decoder(space: spaces.Space[Any]) -> Callable[[Array], Array]:
    """Return the function that turns rows ``[N, A]`` into the N actions of ``space``, ``[N, *shape]``."""

    def decode_box(rows: Array) -> Array:
        clipped = rows.clip(low, high)
        whole = np.rint(clipped) if integer else clipped
        return whole.astype(space.dtype, copy=False).reshape(shape)

    def decode_integers(rows: Array) -> Array:
        return (rows + start).astype(space.dtype, copy=False).reshape(shape)

    shape = (-1, *(space.shape or ()))
    if isinstance(space, spaces.Box):
        low, high = space.low.ravel(), space.high.ravel()
        integer = np.issubdtype(space.low.dtype, np.integer)
        return decode_box
    start = np.ravel(getattr(space, "start", 0))  # MultiBinary has none
    return decode_integers


@dataclass(frozen=True)
class Buffers:
    """What a step reads and writes, for N environments and M metrics."""

    action: Array
    """``[N, A]``"""
    obs: Tree
    final_obs: Tree
    reward: Array
    """``[N, 1]`` float32"""
    terminated: Array
    """``[N, 1]`` bool"""
    truncated: Array
    """``[N, 1]`` bool"""
    metric: Array
    """``[M, N, 1]`` float32, NaN where a step did not report it"""

    def rows(self, start: int, stop: int) -> Buffers:
        """Return views of the environments ``start`` to ``stop - 1``."""
        fields = {name: map_tree(lambda x: x[start:stop], value) for name, value in vars(self).items()}
        return Buffers(**fields | {"metric": self.metric[:, start:stop]})


def make_buffers(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    num_envs: int,
    num_metrics: int,
    memory: mmap.mmap | None = None,
) -> tuple[Buffers, int]:
    """Lay the buffers out in ``memory``, or in new arrays, and return them with the bytes they take."""
    size = 0

    def array(shape: tuple[int, ...], dtype: Any) -> Array:
        nonlocal size
        start, count = size, math.prod(shape)
        size += -(-count * np.dtype(dtype).itemsize // 64) * 64  # every array starts on a cache line
        if memory is None:
            return np.zeros(shape, dtype)
        return np.frombuffer(memory, dtype, count, start).reshape(shape)

    def tree(space: spaces.Space[Any]) -> Tree:
        if isinstance(space, spaces.Dict):
            return {key: tree(part) for key, part in space.spaces.items()}
        assert space.shape is not None
        return array((num_envs, *space.shape), space.dtype)

    width, dtype = action_layout(action_space)
    buffers = Buffers(
        action=array((num_envs, width), dtype),
        obs=tree(observation_space),
        final_obs=tree(observation_space),
        reward=array((num_envs, 1), np.float32),
        terminated=array((num_envs, 1), np.bool_),
        truncated=array((num_envs, 1), np.bool_),
        metric=array((num_metrics, num_envs, 1), np.float32),
    )
    return buffers, size
