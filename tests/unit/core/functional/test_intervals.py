import itertools
import math
import warnings

import numpy as np
import pytest
from scipy import stats

from apexrl.core.errors import FewSamplesWarning
from apexrl.core.functional.intervals import (
    iqm,
    iqm_interval,
    mcnemar_test,
    mean_interval,
    paired_rate_interval,
    sign_flip_test,
    wilson_interval,
)

NUM_DRAWS = 20_000
"""Of the simulations; a coverage of 95 % has a standard error of 0.15 %."""


def test_wilson_interval_of_none_in_ten() -> None:
    # p = 0, z = 1.96: (3.8415/20 ± 1.96 √(3.8415/400)) / (1 + 0.38415) = (0.19207 ± 0.19207) / 1.38415.
    low, high = wilson_interval(0, 10)
    assert low == pytest.approx(0.0, abs=1e-12)
    assert high == pytest.approx(0.38415 / 1.38415, abs=1e-4)


def test_the_mean_of_two_values_has_the_interval_of_a_cauchy_distribution() -> None:
    # t with one degree of freedom is Cauchy: its 97.5 % quantile is tan(0.475 pi), and s / sqrt(2) is 5.
    low, high = mean_interval(np.array([0.0, 10.0]))
    assert (5 - low, high - 5) == pytest.approx((5 * math.tan(0.475 * math.pi),) * 2)


def test_equal_values_have_an_interval_without_width_and_one_value_has_none() -> None:
    assert mean_interval(np.full(5, 3.0)) == (3.0, 3.0)
    assert iqm_interval(np.full((5, 2), 3.0)) == (3.0, 3.0)
    for bounds in (mean_interval(np.array([3.0])), iqm_interval(np.array([[3.0, 4.0]]))):
        assert all(map(math.isnan, bounds))


def test_equal_rates_have_wilsons_interval_of_all_trials_and_others_lie_within_0_and_1() -> None:
    assert mean_interval(np.full(5, 0.8), trials=50) == wilson_interval(40, 50)
    assert iqm_interval(np.full((5, 2), 0.8), trials=50) == wilson_interval(40, 50)
    # The tasks differ, the seeds do not: four of six values remain, three of them 1.
    by_task = np.tile([1.0, 1.0, 0.0], (2, 1))
    low, high = iqm_interval(by_task, trials=60)
    assert (low, high) == wilson_interval(45, 60)
    assert mean_interval(np.array([0.9, 1.0, 1.0]), trials=30)[1] == 1.0
    assert math.isnan(mean_interval(np.array([0.5]), trials=10)[0])


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    # Of eight values two fall off at each end: (3 + 4 + 5 + 6) / 4.
    assert iqm(np.array([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -50.0])) == 3.5
    assert iqm(np.array([[1.0, 2.0], [3.0, 4.0]]), axis=None) == 2.5


def test_the_interval_of_the_interquartile_mean_is_tukeys_and_mclaughlins() -> None:
    # 0, 1, 2, 4, 99 are Winsorised to 1, 1, 2, 4, 4 with squares around 2.4 of 9.2 in all; h = 3 remain, with the mean
    # 7 / 3, standard error sqrt(9.2 / (3 * 2)) and two degrees of freedom (t = 4.3027).
    low, high = iqm_interval(np.array([4.0, 0.0, 99.0, 1.0, 2.0])[:, None])
    assert (low, high) == pytest.approx((7 / 3 - 4.3027 * 1.2383, 7 / 3 + 4.3027 * 1.2383), abs=1e-3)


def test_one_seed_below_the_highest_score_is_not_forgotten() -> None:
    # Winsorised, all five are 1.
    low, high = iqm_interval(np.array([1.0, 1.0, 0.2, 1.0, 1.0])[:, None])
    assert low < 0.9 < high


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(*shape, NUM_DRAWS))


def coverage(bounds: tuple[np.ndarray, np.ndarray], true: float) -> float:
    return float(((bounds[0] <= true) & (true <= bounds[1])).mean())


@pytest.mark.parametrize("count", [3, 5, 10])
def test_intervals_called_95_percent_cover_about_95_percent(count: int) -> None:
    skewed = np.random.default_rng(1).exponential(size=(count, NUM_DRAWS))
    # The mean of -ln(1 - u) over the quantiles u from 0.25 to 0.75: 0.7384.
    middle = 1.0 + 2 * (0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert 0.93 <= coverage(mean_interval(normal(count)), 0.0) <= 0.98
    assert 0.93 <= coverage(iqm_interval(normal(count, 1)), 0.0) <= 0.98
    assert coverage(mean_interval(skewed), 1.0) >= 0.85
    assert coverage(iqm_interval(skewed[:, None]), middle) >= 0.85


@pytest.mark.parametrize(("seeds", "tasks"), list(itertools.product([3, 5, 10], [2, 3, 10])))
@pytest.mark.parametrize("shared", [0.0, 0.8])
def test_seeds_whose_tasks_differ_or_go_together_are_covered(seeds: int, tasks: int, shared: float) -> None:
    # A seed that is good at one task is often good at all of them; ``shared`` is how much of a deviation that makes up.
    values = math.sqrt(shared) * normal(seeds, 1) + math.sqrt(1 - shared) * normal(seeds, tasks)[:, :, ::-1]
    values += np.linspace(-1.0, 1.0, tasks)[:, None]
    assert 0.925 <= coverage(iqm_interval(values), 0.0) <= 0.985


def test_the_interval_of_paired_rates_covers_every_difference() -> None:
    pairs = 10
    counts = [(a, b) for a in range(pairs + 1) for b in range(pairs + 1 - a)]
    low, high = np.array([paired_rate_interval(a, b, pairs) for a, b in counts]).T
    assert (high - low).min() > 0.2, "no width"
    table = np.array([(a, b, pairs - a - b) for a, b in counts])
    for only_a, only_b in itertools.product(np.linspace(0.0, 1.0, 21), repeat=2):
        if only_a + only_b <= 1:
            p = stats.multinomial.pmf(table, pairs, [only_a, only_b, max(0.0, 1 - only_a - only_b)])
            inside = (low - 1e-9 <= only_b - only_a) & (only_b - only_a <= high + 1e-9)
            assert p[inside].sum() >= 0.93, (only_a, only_b)


def test_the_interval_of_paired_rates_is_tangos() -> None:
    # Without disagreement q = 0 where d > 0: (n d - 1/2)² = z² n d (1 - d), which n = 10 solves at d = 0.3447.
    low, high = paired_rate_interval(0, 0, 10)
    assert (low, high) == pytest.approx((-0.3447, 0.3447), abs=1e-3)
    assert paired_rate_interval(0, 10, 10)[1] == 1.0
    mirrored = paired_rate_interval(9, 1, 12)
    assert paired_rate_interval(1, 9, 12) == pytest.approx((-mirrored[1], -mirrored[0]))
    # For many pairs it is Wald's: 0.1 ± 1.96 sqrt((0.3 - 0.1²) / 10,000).
    assert paired_rate_interval(1000, 2000, 10_000) == pytest.approx((0.1 - 0.01055, 0.1 + 0.01055), abs=1e-4)


def test_fewer_than_five_samples_warn() -> None:
    four = np.arange(4.0)
    for interval in (
        lambda: mean_interval(four),
        lambda: iqm_interval(four[:, None]),
        lambda: wilson_interval(1, 4),
        lambda: paired_rate_interval(1, 2, 4),
    ):
        with pytest.warns(FewSamplesWarning) as warned:
            interval()
        assert "4 samples" in str(warned[0].message)
        assert "at least 5" in str(warned[0].message)
    with warnings.catch_warnings(action="error"):
        mean_interval(np.arange(5.0))
        iqm_interval(np.arange(5.0)[:, None])
        wilson_interval(1, 5)
        paired_rate_interval(1, 2, 5)


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
