import pytest
import torch

from apexrl.core.functional import clipped_surrogate
from apexrl.core.functional.rloo import group_std, leave_one_out, reverse_kl


def test_each_episode_is_compared_with_the_mean_of_the_others_of_its_group() -> None:
    # Group 0: 1 against (0 + 0 + 1) / 3, 0 against (1 + 0 + 1) / 3. Group 1: 3 against 1.
    returns = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    expected = torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3, 2.0, -2.0])
    torch.testing.assert_close(leave_one_out(returns, group), expected)


def test_groups_of_different_sizes_may_lie_in_any_order_under_any_number() -> None:
    # Group 7: 6 against (0 + 3) / 2, 0 against 4.5, 3 against 3. Group 2: 1 against 5.
    returns = torch.tensor([6.0, 1.0, 0.0, 5.0, 3.0])
    group = torch.tensor([7, 2, 7, 2, 7])
    torch.testing.assert_close(leave_one_out(returns, group), torch.tensor([4.5, -4.0, -4.5, 4.0, 0.0]))


def test_equal_outcomes_and_single_episodes_have_no_advantage() -> None:
    returns, group = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 1, 1, 2])
    assert torch.equal(leave_one_out(returns, group), torch.zeros(6))


@pytest.mark.parametrize("value", [0.1, 0.7, 1e6 + 0.1])
def test_equal_returns_that_no_float_holds_exactly_have_no_advantage(value: float) -> None:
    # Three, seven and eleven times the number are rounded.
    group = torch.tensor([0] * 3 + [1] * 7 + [2] * 11)
    returns = torch.full((21,), value)
    assert torch.equal(leave_one_out(returns, group), torch.zeros(21))
    assert torch.equal(group_std(returns, group), torch.zeros(21))


def test_the_advantages_of_a_group_sum_to_zero() -> None:
    torch.manual_seed(0)
    returns, group = torch.randn(60, dtype=torch.float64), torch.arange(60) % 7
    advantage = leave_one_out(returns, group)
    for number in range(7):
        assert advantage[group == number].sum().abs() < 1e-12
        assert advantage[group == number].abs().max() > 0.1


def test_one_group_of_all_episodes_is_the_baseline_of_the_whole_batch() -> None:
    # 1 against (0 + 0 + 2) / 3 and so on, whatever the groups were.
    returns = torch.tensor([1.0, 0.0, 0.0, 2.0])
    expected = torch.tensor([1 / 3, -1.0, -1.0, 5 / 3])
    torch.testing.assert_close(leave_one_out(returns, torch.zeros(4, dtype=torch.long)), expected)


def test_the_standard_deviation_is_that_of_each_group() -> None:
    # Group 0: mean 2, squares 4 + 4, over 1. Group 1: mean 1/2 of four, squares 4 · 1/4, over 3.
    returns = torch.tensor([0.0, 1.0, 4.0, 0.0, 0.0, 1.0, 9.0])
    group = torch.tensor([0, 1, 0, 1, 1, 1, 2])
    one, two = (1 / 3) ** 0.5, 8**0.5
    torch.testing.assert_close(group_std(returns, group), torch.tensor([two, one, two, one, one, one, 0.0]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.1, 2.0, -2.2),  # inside
        (1.5, 2.0, -2.8),  # too likely already: 1.4 · 2
        (1.5, -2.0, 3.0),  # a bad sample is never protected from above
        (0.5, -2.0, 1.6),  # unlikely enough already: 0.8 · 2
        (0.5, 2.0, -1.0),  # a good sample may come back
    ],
)
def test_the_surrogate_is_clipped_on_the_side_where_it_would_gain(ratio: float, advantage: float, loss: float) -> None:
    found = clipped_surrogate(torch.tensor(ratio), torch.tensor(advantage), clip_coef=0.2, clip_coef_high=0.4)
    torch.testing.assert_close(found, torch.tensor(loss))


def test_the_estimate_of_the_divergence_has_the_right_mean() -> None:
    # Between N(0, 1) and N(0.3, 1) it is 0.3² / 2 = 0.045.
    torch.manual_seed(0)
    here, there = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.3, 1.0)
    sample = here.sample((400_000,))
    log_prob = here.log_prob(sample)
    estimate = reverse_kl(log_prob, there.log_prob(sample), log_prob)
    assert (estimate > -1e-6).all()
    assert estimate.mean().item() == pytest.approx(0.045, abs=3e-4)


def test_the_gradient_of_the_divergence_is_right_also_for_samples_of_another_policy() -> None:
    # The same divergence of N(m, 1) from N(0.3, 1) at m = 0, with samples of N(0.2, 1): its derivative is m - 0.3.
    torch.manual_seed(0)
    mean = torch.zeros((), requires_grad=True)
    here, actor = torch.distributions.Normal(mean, 1.0), torch.distributions.Normal(0.2, 1.0)
    sample = actor.sample((400_000,))
    there = torch.distributions.Normal(0.3, 1.0).log_prob(sample)
    estimate = reverse_kl(here.log_prob(sample), there, actor.log_prob(sample)).mean()
    assert estimate.item() == pytest.approx(0.045, abs=1e-3)
    (gradient,) = torch.autograd.grad(estimate, mean)
    assert gradient.item() == pytest.approx(-0.3, abs=5e-3)


@pytest.mark.parametrize("moved", [-500.0, 500.0])
def test_the_divergence_is_finite_where_the_policy_moved_far(moved: float) -> None:
    # π went where the sample is exp(500) times less or more likely, and the reference did not: gradient -r ρ.
    log_prob = torch.tensor(moved, requires_grad=True)
    estimate = reverse_kl(log_prob, torch.tensor(0.0), torch.tensor(0.0))
    (gradient,) = torch.autograd.grad(estimate, log_prob)
    assert estimate.isfinite()
    assert gradient.square().isfinite()
    assert (gradient > 0) == (moved > 0)
