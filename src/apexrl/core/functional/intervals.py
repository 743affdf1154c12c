"""How sure a mean, a rate or a difference is: intervals, and exact tests of paired episodes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy  # imports scipy.stats, which takes half a second, when it is first used
from numpy.typing import NDArray

from apexrl.core.errors import FewSamplesWarning, plural

CONFIDENCE = 0.95
"""The share of intervals that hold the true value."""
FEWEST = 5
"""Samples; an interval of fewer warns."""
TRIMMED = 0.25
"""What the interquartile mean leaves out at each end."""
NUM_FLIPS = 20_000
"""Of the sign-flip test; up to 14 differences all of their 2^n signs are tried instead."""


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's interval of a rate, (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)."""
    _warn_of_few(trials)
    low, high = scipy.stats.binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return float(low), float(high)


def mean_interval(values: NDArray[np.float64], *, trials: int | None = None) -> tuple[Any, Any]:
    """Return Student's t interval of the mean, x̄ ± t_{n-1} s / √n.

    Args:
        values: samples ``[n, ...]``.
        trials: of rates ``[n]``, in how many trials they were found, all together. Their interval lies within 0 and 1.
            Where they are all equal, which does not say that the next one is, it is Wilson's interval over all trials.

    Returns:
        Lower and upper end ``[...]``; NaN for one sample, which tells nothing about others.
    """
    return _of_rate(values.mean(0), *_t_interval(values.mean(0), values, len(values)), trials)


def iqm(values: NDArray[np.float64], axis: int | None = 0) -> Any:
    """Interquartile mean: the mean without the lowest and the highest quarter; of all values for ``axis=None``."""
    return scipy.stats.trim_mean(values, TRIMMED, axis=axis)


def iqm_interval(values: NDArray[np.float64], *, trials: int | None = None) -> tuple[Any, Any]:
    """Return the Winsorised t interval of the interquartile mean over seeds and tasks.

    Of the N = S K sorted values g = ⌊N / 4⌋ are left out at each end and h = N - 2g remain. Winsorised, the ends take
    the nearest value that remains; u_s is the mean of these over the tasks of seed s, and its spread over seeds gives

    IQM ± t_{m-1} (N / h) √(Σ_s (u_s - ū)² / (S (m - 1)) · m / S)    with m = S - (1 - h / N) S / √K.

    For one task m = h: the interval of Tukey and McLaughlin (1963). The tasks of a seed share a policy, so seeds are
    the independent samples; with more tasks their mean is closer to normal, and m to S. Where all u_s are equal, as
    when most seeds reach the highest score, the means of the values as they are take their place.

    Args:
        values: ``[S, K, ...]`` of seeds and tasks.
        trials: of rates ``[S, K]``, as in ``mean_interval``.

    Returns:
        Lower and upper end ``[...]``; NaN for one seed.
    """
    num_seeds, num_tasks = values.shape[:2]
    pooled = np.sort(values.reshape(-1, *values.shape[2:]), axis=0)
    num_left_out = int(TRIMMED * len(pooled))
    winsorised = np.clip(values, pooled[num_left_out], pooled[-1 - num_left_out]).mean(1)
    is_tied = np.ptp(winsorised, axis=0) <= 1e-12 * np.abs(winsorised).max(0)
    winsorised = np.where(is_tied, values.mean(1), winsorised)
    remaining = 1 - 2 * num_left_out / len(pooled)
    center = pooled[num_left_out : len(pooled) - num_left_out].mean(0)
    effective = num_seeds - (1 - remaining) * num_seeds / num_tasks**0.5
    return _of_rate(center, *_t_interval(center, winsorised / remaining, effective), trials)


def _of_rate(center: Any, low: Any, high: Any, trials: int | None) -> tuple[Any, Any]:
    if trials is None:
        return low, high
    if high - low <= 1e-12:
        return wilson_interval(round(center * trials), trials)
    return np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)


def _t_interval(center: Any, samples: NDArray[np.float64], effective: float) -> tuple[Any, Any]:
    """Return center ± t_{m-1} √(Σ (x - x̄)² / n · m / (m - 1) / n) for ``m`` effective samples of ``n``."""
    num = len(samples)
    if num < 2:
        return np.full_like(center, np.nan)[()], np.full_like(center, np.nan)[()]
    _warn_of_few(num)
    error = samples.std(0) * np.sqrt(effective / (effective - 1) / num)
    reach = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, effective - 1) * error
    return center - reach, center + reach


def paired_rate_interval(only_first: int, only_second: int, pairs: int) -> tuple[float, float]:
    """Return Tango's score interval of the difference of two rates in pairs, second minus first.

    The differences d that the score test with a continuity correction of half a pair does not reject:

    (|b - a - n d| - 1/2) / √(n (2q + d (1 - d))) <= z

    where ``a`` and ``b`` pairs succeeded in the first or the second alone, and q is the most likely rate of the first
    alone given d. It has a width for any counts.
    """
    _warn_of_few(pairs)
    z, found = scipy.stats.norm.ppf((1 + CONFIDENCE) / 2), (only_second - only_first) / pairs

    def accepted(d: float) -> bool:
        linear = (2 * pairs - only_second + only_first) * d - only_first - only_second
        root = max(linear**2 + 8 * pairs * only_first * d * (1 - d), 0.0) ** 0.5
        variance = max(pairs * ((root - linear) / (2 * pairs) + d * (1 - d)), 0.0)
        return bool(pairs * abs(found - d) - 0.5 <= z * variance**0.5)

    return _boundary(accepted, found, -1.0), _boundary(accepted, found, 1.0)


def _boundary(accepted: Callable[[float], bool], inside: float, outside: float) -> float:
    """Return how far from ``inside`` to ``outside`` values are accepted, by bisection."""
    if accepted(outside):
        return outside
    for _ in range(50):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if accepted(middle) else (inside, middle)
    return inside


def _warn_of_few(count: int) -> None:
    if count < FEWEST:
        text = f"A confidence interval of {plural(count, 'sample')} is unreliable: use at least {FEWEST}."
        warnings.warn(text, FewSamplesWarning, stacklevel=1)


def sign_flip_test(differences: NDArray[np.float64]) -> float:
    """Return how likely a mean so far from 0 is when every difference is as likely to have the other sign.

    Two-sided and exact: all signs are tried for up to 14 differences, else ``NUM_FLIPS`` drawn ones, counted so that
    the test keeps its level.
    """
    if len(differences) < 2 or not differences.any():
        return 1.0
    options = {"n_resamples": NUM_FLIPS, "vectorized": True, "batch": 1000, "rng": np.random.default_rng(0)}
    test = scipy.stats.permutation_test((differences,), np.mean, permutation_type="samples", **options)
    return float(test.pvalue)


def mcnemar_test(only_first: int, only_second: int) -> float:
    """Return the exact p-value of McNemar's test.

    Of the pairs in which one succeeded and the other failed, either is as likely to be the one that succeeded:
    two-sided binomial test of ``only_first`` in ``only_first + only_second`` with 1/2.
    """
    if only_first + only_second == 0:
        return 1.0
    return float(scipy.stats.binomtest(only_first, only_first + only_second, 0.5).pvalue)
