import math

import numpy as np
import pytest

from apexrl.intervals import bootstrap_interval, mcnemar_test, sign_flip_test, wilson_interval


def test_wilson_interval_of_none_in_ten() -> None:
    # p = 0, z = 1.96: (3.8415/20 ± 1.96 √(3.8415/400)) / (1 + 0.38415) = (0.19207 ± 0.19207) / 1.38415.
    low, high = wilson_interval(0, 10)
    assert low == pytest.approx(0.0, abs=1e-12)
    assert high == pytest.approx(0.38415 / 1.38415, abs=1e-4)


def test_bootstrap_interval_of_two_values() -> None:
    # Resampled means are 0 (1/4), 5 (1/2) and 10 (1/4), so the 2.5 % quantiles are the ends.
    assert bootstrap_interval(np.array([0.0, 10.0])) == (0.0, 10.0)
    # A confidence of 40 % leaves 30 % on either side, which is past the quarters.
    assert bootstrap_interval(np.array([0.0, 10.0]), confidence=0.4) == (5.0, 5.0)


def test_equal_values_have_an_interval_without_width() -> None:
    assert bootstrap_interval(np.array([3.0])) == (3.0, 3.0)
    assert bootstrap_interval(np.full(5, 3.0)) == (3.0, 3.0)


def test_bootstrap_interval_repeats() -> None:
    values = np.random.default_rng(1).normal(size=30)
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_mcnemar_of_one_against_nine() -> None:
    # Of 10 pairs that differ, at most one on either side: 2 (1 + 10) / 2^10.
    assert mcnemar_test(1, 9) == pytest.approx(22 / 1024)
    assert mcnemar_test(9, 1) == mcnemar_test(1, 9)


def test_mcnemar_without_or_with_even_disagreement_finds_nothing() -> None:
    assert mcnemar_test(0, 0) == 1.0
    assert mcnemar_test(4, 4) == 1.0


def test_sign_flips_of_five_equal_signs() -> None:
    # Only all plus and all minus of the 2^5 give a mean so far from 0.
    assert sign_flip_test(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(2 / 32)


def test_sign_flips_count_means_that_are_as_far() -> None:
    # d = (3, 1, -1), mean 1. Signed sums of 3, 1, 1: ±5, ±3 (twice each), ±1: |sum| >= 3 in 6 of 8.
    assert sign_flip_test(np.array([3.0, 1.0, -1.0])) == pytest.approx(6 / 8)


def test_drawn_sign_flips_agree_with_the_normal_distribution() -> None:
    # The flipped mean has variance Σ d² / n²; for 200 differences it is all but normal.
    d = np.random.default_rng(3).normal(0.12, 1.0, 200)
    z = abs(d.sum()) / math.sqrt(np.square(d).sum())
    assert sign_flip_test(d) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.01)
    assert sign_flip_test(d) == sign_flip_test(d)


def test_no_difference_at_all() -> None:
    assert sign_flip_test(np.zeros(7)) == 1.0
