"""Seeds of independent random streams: of environments, processes, and policies beside environments."""

from __future__ import annotations

from numpy.random import SeedSequence

ENV, POLICY = 0, 1
"""First part of a key: what the stream is for."""


def spawn_seed(seed: int, *key: int) -> int:
    """Return the seed of the stream with a key, such as ``(ENV, rank)``."""
    return spawn_seeds(seed, 1, *key)[0]


def spawn_seeds(seed: int, count: int, *key: int) -> list[int]:
    """Return seeds of ``count`` streams below ``2**31``, those of environments 0, 1, …

    Neighbouring seeds share none, as ``seed + i`` would: numpy's ``SeedSequence`` mixes seed, key and index. The first
    seeds do not depend on ``count``.
    """
    sequence = SeedSequence(seed % 2**63, spawn_key=key)
    return [int(word) >> 1 for word in sequence.generate_state(count)]
