"""How sure a mean, a rate or a difference is: intervals, and exact tests of paired episodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

NUM_RESAMPLES = 2000
NUM_FLIPS = 20_000
"""Of the sign-flip test; up to 14 differences all of their 2^n signs are tried instead."""


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval of a rate.

    (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)
    """
    low, high = stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(low), float(high)


def bootstrap_interval(values: NDArray[np.float64], confidence: float = 0.95) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean; the same one at every call.

    One value, or several that are equal, give an interval without width.
    """
    if len(values) < 2 or values.min() == values.max():
        return float(values.mean()), float(values.mean())
    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=NUM_RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def sign_flip_test(differences: NDArray[np.float64]) -> float:
    """Return how likely a mean so far from 0 is when every difference is as likely to have the other sign.

    Two-sided and exact: all signs are tried for up to 14 differences, else ``NUM_FLIPS`` drawn ones, counted so that
    the test keeps its level.
    """
    if len(differences) < 2 or not differences.any():
        return 1.0
    test = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        n_resamples=NUM_FLIPS,
        vectorized=True,
        batch=1000,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def mcnemar_test(only_first: int, only_second: int) -> float:
    """Return the exact p-value of McNemar's test.

    Of the pairs in which one succeeded and the other failed, either is as likely to be the one that succeeded:
    two-sided binomial test of ``only_first`` in ``only_first + only_second`` with 1/2.
    """
    if only_first + only_second == 0:
        return 1.0
    return float(stats.binomtest(only_first, only_first + only_second, 0.5).pvalue)
