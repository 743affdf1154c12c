import math

import pytest
import torch

from apexrl.core.functional import approx_kl, clipped_surrogate, explained_variance, probability_ratio, value_loss


def test_surrogate_clips_gains_but_not_losses() -> None:
    # Ratio 1.5, A 1: min(1.5, 1.2) = 1.2. Ratio 1.5, A -1: min(-1.5, -1.2) = -1.5. Ratio 0.5, A 1: 0.5.
    ratio = torch.tensor([1.5, 1.5, 0.5])
    advantage = torch.tensor([1.0, -1.0, 1.0])
    torch.testing.assert_close(clipped_surrogate(ratio, advantage, clip=0.2), torch.tensor(-(1.2 - 1.5 + 0.5) / 3))


def test_surrogate_has_no_gradient_where_it_is_clipped() -> None:
    ratio = torch.tensor([1.5, 1.1], requires_grad=True)
    clipped_surrogate(ratio, torch.ones(2), clip=0.2).backward()
    assert ratio.grad is not None
    torch.testing.assert_close(ratio.grad, torch.tensor([0.0, -0.5]))


@pytest.mark.parametrize(("advantage", "pushes_back"), [(1.0, False), (0.0, False), (-1.0, True)])
@pytest.mark.parametrize("log_ratio", [30.0, 500.0])
def test_a_ratio_too_large_for_float32_gives_a_finite_gradient_that_leads_back(
    log_ratio: float, advantage: float, pushes_back: bool
) -> None:
    x = torch.tensor([log_ratio], requires_grad=True)
    loss = clipped_surrogate(probability_ratio(x), torch.tensor([advantage]), clip=0.2)
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.isfinite()
    assert gradient.square().isfinite()
    assert (gradient.item() > 0) == pushes_back
    assert approx_kl(x).isfinite()


def test_the_ratio_is_the_exponential_where_policies_are_near() -> None:
    log_ratio = torch.linspace(-100.0, 19.0, 50)
    assert torch.equal(probability_ratio(log_ratio), log_ratio.exp())


def test_value_loss_is_half_the_squared_error() -> None:
    loss = value_loss(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.0]), clip=None)
    torch.testing.assert_close(loss, torch.tensor(2.0))


def test_clipped_value_loss_takes_the_worse_of_the_two() -> None:
    # Clipped output 0 + 0.2: error (0.2 - 1)^2 = 0.64; unclipped (0.9 - 1)^2 = 0.01. Half of the larger: 0.32.
    loss = value_loss(torch.tensor([0.9]), torch.tensor([1.0]), torch.tensor([0.0]), clip=0.2)
    torch.testing.assert_close(loss, torch.tensor(0.32))


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
