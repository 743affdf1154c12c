import math

import pytest
import torch
from torch import Tensor

from apexrl.core.functional import (
    approx_kl,
    clipped_surrogate,
    discounted_sum,
    explained_variance,
    gae,
    normalize,
    probability_ratio,
    value_loss,
)


def column(*values: float | bool) -> Tensor:
    """``[T, 1, 1]``"""
    return torch.tensor(values).view(-1, 1, 1)


def test_gae_of_a_terminated_step_bootstraps_nothing() -> None:
    # delta_1 = 3 - 2 = 1; delta_0 = 1 + 0.5 * 2 - 4 = -2; A_0 = -2 + 0.5 * 1 = -1.5. V(s'_1) = 100 is not used.
    advantage, target = gae(
        reward=column(1.0, 3.0), value=column(4.0, 2.0), next_value=column(2.0, 100.0),
        terminated=column(False, True), done=column(False, True), gamma=0.5, gae_lambda=1.0,
    )  # fmt: skip
    torch.testing.assert_close(advantage, column(-1.5, 1.0))
    torch.testing.assert_close(target, column(2.5, 3.0))


def test_gae_bootstraps_a_truncated_step_and_stops_there() -> None:
    # Step 0 hits the time limit in a state worth 10: 1 + 0.5 * 10 = 6. Step 1 belongs to another episode.
    advantage, _ = gae(
        reward=column(1.0, 5.0), value=column(0.0, 0.0), next_value=column(10.0, 0.0),
        terminated=column(False, True), done=column(True, True), gamma=0.5, gae_lambda=1.0,
    )  # fmt: skip
    torch.testing.assert_close(advantage, column(6.0, 5.0))


def test_gae_of_mixed_endings() -> None:
    # gamma 0.5, gae_lambda 0.5, trace factor 0.25. Steps: goes on, terminated, truncated, goes on.
    # delta_3 = 1 + 0.5 * 4 - 1 = 2, A_3 = 2
    # delta_2 = 1 + 0.5 * 6 - 1 = 3, truncated: A_2 = 3
    # delta_1 = 1 - 1 = 0, terminated: A_1 = 0
    # delta_0 = 1 + 0.5 * 1 - 1 = 0.5, A_0 = 0.5 + 0.25 * 0 = 0.5
    advantage, _ = gae(
        reward=column(1.0, 1.0, 1.0, 1.0), value=column(1.0, 1.0, 1.0, 1.0), next_value=column(1.0, 9.0, 6.0, 4.0),
        terminated=column(False, True, False, False), done=column(False, True, True, False), gamma=0.5, gae_lambda=0.5,
    )  # fmt: skip
    torch.testing.assert_close(advantage, column(0.5, 0.0, 3.0, 2.0))


@pytest.mark.parametrize("num_steps", [1, 2, 7, 64, 129])
def test_gae_equals_the_sum_over_all_later_steps(num_steps: int) -> None:
    generator = torch.Generator().manual_seed(num_steps)
    shape = (num_steps, 5, 1)
    reward, value, next_value = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    terminated = torch.rand(shape, generator=generator) < 0.1
    done = terminated | (torch.rand(shape, generator=generator) < 0.1)
    advantage, target = gae(reward, value, next_value, terminated, done, gamma=0.97, gae_lambda=0.9)

    expected = torch.zeros(shape, dtype=torch.float64)
    for n in range(shape[1]):
        for t in range(num_steps):
            weight = 1.0
            for k in range(t, num_steps):
                bootstrap = 0.0 if terminated[k, n] else 0.97 * next_value[k, n].item()
                expected[t, n] += weight * (reward[k, n].item() + bootstrap - value[k, n].item())
                if done[k, n]:
                    break
                weight *= 0.97 * 0.9
    torch.testing.assert_close(advantage, expected)
    torch.testing.assert_close(target, expected + value)


def test_discounted_sum_of_ones_is_a_geometric_series() -> None:
    # 1 + 0.5 + 0.25 = 1.75, 1 + 0.5 = 1.5, 1
    out = discounted_sum(torch.ones(3), torch.full((3,), 0.5))
    torch.testing.assert_close(out, torch.tensor([1.75, 1.5, 1.0]))


def test_normalize_gives_mean_zero_and_deviation_one() -> None:
    torch.testing.assert_close(normalize(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([-1.0, 0.0, 1.0]))


def test_normalize_of_one_number_is_zero_not_nan() -> None:
    torch.testing.assert_close(normalize(torch.tensor([5.0])), torch.tensor([0.0]))


def test_surrogate_clips_gains_but_not_losses() -> None:
    # Ratio 1.5, A 1: min(1.5, 1.2) = 1.2. Ratio 1.5, A -1: min(-1.5, -1.2) = -1.5. Ratio 0.5, A 1: 0.5.
    ratio = torch.tensor([1.5, 1.5, 0.5])
    advantage = torch.tensor([1.0, -1.0, 1.0])
    torch.testing.assert_close(clipped_surrogate(ratio, advantage, clip_coef=0.2), torch.tensor(-(1.2 - 1.5 + 0.5) / 3))


def test_surrogate_has_no_gradient_where_it_is_clipped() -> None:
    ratio = torch.tensor([1.5, 1.1], requires_grad=True)
    clipped_surrogate(ratio, torch.ones(2), clip_coef=0.2).backward()
    assert ratio.grad is not None
    torch.testing.assert_close(ratio.grad, torch.tensor([0.0, -0.5]))


@pytest.mark.parametrize(("advantage", "pushes_back"), [(1.0, False), (0.0, False), (-1.0, True)])
@pytest.mark.parametrize("log_ratio", [30.0, 500.0])
def test_a_ratio_too_large_for_float32_gives_a_finite_gradient_that_leads_back(
    log_ratio: float, advantage: float, pushes_back: bool
) -> None:
    x = torch.tensor([log_ratio], requires_grad=True)
    loss = clipped_surrogate(probability_ratio(x), torch.tensor([advantage]), clip_coef=0.2)
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.isfinite()
    assert gradient.square().isfinite()
    assert (gradient.item() > 0) == pushes_back
    assert approx_kl(x).isfinite()


def test_the_ratio_is_the_exponential_where_policies_are_near() -> None:
    log_ratio = torch.linspace(-100.0, 19.0, 50)
    assert torch.equal(probability_ratio(log_ratio), log_ratio.exp())


def test_value_loss_is_the_mean_squared_error() -> None:
    loss = value_loss(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 2.0]), torch.zeros(2), clip_coef=None)
    torch.testing.assert_close(loss, torch.tensor(2.0))


def test_clipped_value_loss_takes_the_worse_of_the_two() -> None:
    # Clipped output 0 + 0.2: error (0.2 - 1)^2 = 0.64; unclipped (0.9 - 1)^2 = 0.01. The larger: 0.64.
    loss = value_loss(torch.tensor([0.9]), torch.tensor([1.0]), torch.tensor([0.0]), clip_coef=0.2)
    torch.testing.assert_close(loss, torch.tensor(0.64))


def test_kl_of_equal_policies_is_zero() -> None:
    assert approx_kl(torch.zeros(4)).item() == 0.0


def test_kl_estimates_that_of_two_gaussians() -> None:
    # KL(N(0, 1) || N(0.3, 1)) = 0.3^2 / 2 = 0.045
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_ratio = -0.5 * (x - 0.3) ** 2 + 0.5 * x**2
    assert math.isclose(approx_kl(log_ratio).item(), 0.045, rel_tol=0.02)


def test_explained_variance_of_perfect_and_constant_critics() -> None:
    target = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(explained_variance(target, target), torch.tensor(1.0))
    torch.testing.assert_close(explained_variance(torch.full((3,), 7.0), target), torch.tensor(0.0))
