"""Minibatches: where a shuffled batch is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def bounds(count: int, num_parts: int) -> list[tuple[int, int]]:
    """Cut 0 … count − 1 into parts as equal as possible; returns start and end of each."""
    size, more = divmod(count, num_parts)
    cuts = [part * size + min(part, more) for part in range(num_parts + 1)]
    return list(itertools.pairwise(cuts))


def minibatches(batch: Mapping[str, Any], order: Tensor, num_parts: int, dim: int = 0) -> Iterator[dict[str, Any]]:
    """Shuffle all of a batch along a dimension, then cut it into minibatches."""
    before = (slice(None),) * dim
    shuffled = {name: value[(*before, order)] for name, value in batch.items()}
    for start, end in bounds(len(order), num_parts):
        yield {name: value[(*before, slice(start, end))] for name, value in shuffled.items()}


def parts_of(batch: Mapping[str, Any], num_parts: int) -> Iterator[dict[str, Any]]:
    """Cut a batch along its first dimension, without shuffling it; every entry by its own length, at least one row."""
    for part in range(num_parts):
        cut = {}
        for name, value in batch.items():
            start, end = part * len(value) // num_parts, (part + 1) * len(value) // num_parts
            cut[name] = value[start : max(start + 1, end)]
        yield cut
