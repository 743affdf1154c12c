"""Minibatches: where a shuffled batch is cut."""

from __future__ import annotations

import itertools


def bounds(count: int, num_parts: int) -> list[tuple[int, int]]:
    """Cut 0 … count − 1 into parts as equal as possible; returns start and end of each."""
    size, more = divmod(count, num_parts)
    cuts = [part * size + min(part, more) for part in range(num_parts + 1)]
    return list(itertools.pairwise(cuts))
