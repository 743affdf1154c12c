import math

import pytest
import torch

from apexrl.policies.networks.distributions import (
    DiagGaussian,
    MultiCategorical,
    SquashedGaussian,
    StateDependentGaussian,
)


def test_gaussian_against_torch() -> None:
    mean, log_std = torch.randn(5, 3), torch.tensor([0.1, -1.0, 0.5])
    ours, theirs = DiagGaussian(mean, log_std), torch.distributions.Normal(mean, log_std.exp())
    action = torch.randn(5, 3)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action).sum(-1, keepdim=True))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(-1, keepdim=True))
    assert torch.equal(ours.mode, mean)


def test_gaussian_samples_have_its_moments() -> None:
    torch.manual_seed(0)
    sample = DiagGaussian(torch.full((200_000, 1), 2.0), torch.tensor([math.log(0.5)])).sample()
    assert abs(sample.mean().item() - 2.0) < 0.01
    assert abs(sample.std().item() - 0.5) < 0.01


def test_state_dependent_noise_by_hand() -> None:
    # Two features, one action: σ = (0.5, 2), φ = (2, 1), so the variance is 2² · 0.5² + 1² · 2² = 5.
    weights = torch.tensor([[0.5], [2.0]])
    distribution = StateDependentGaussian(torch.tensor([[1.0]]), weights.log(), torch.tensor([[2.0, 1.0]]), interval=4)
    assert distribution.std.item() == pytest.approx(math.sqrt(5.0), rel=1e-5)
    # ε = (1, −0.5): 1 + 2 · 0.5 · 1 + 1 · 2 · (−0.5) = 1; ε = (3, 1): 1 + 2 · 0.5 · 3 + 1 · 2 · 1 = 6.
    assert distribution.sample_with(torch.tensor([[[1.0], [-0.5]]])).item() == pytest.approx(1.0)
    assert distribution.sample_with(torch.tensor([[[3.0], [1.0]]])).item() == pytest.approx(6.0)
    # log N(6; 1, 5) = −25 / 10 − ½ log 5 − ½ log 2π
    expected = -2.5 - 0.5 * math.log(5.0) - 0.5 * math.log(2.0 * math.pi)
    assert distribution.log_prob(torch.tensor([[6.0]])).item() == pytest.approx(expected, rel=1e-5)
    assert distribution.entropy().item() == pytest.approx(0.5 * math.log(2.0 * math.pi * math.e * 5.0), rel=1e-5)


def test_state_dependent_noise_has_the_moments_of_its_density_and_teaches_no_features() -> None:
    torch.manual_seed(0)
    features = torch.tensor([[1.0, -2.0, 0.5]], requires_grad=True)
    log_std = torch.tensor([[-1.0, 0.3], [-0.5, -2.0], [0.2, 0.0]], requires_grad=True)
    distribution = StateDependentGaussian(torch.tensor([[1.0, -1.0]]), log_std, features, interval=0)
    draws = StateDependentGaussian(
        torch.tensor([[1.0, -1.0]]).expand(100_000, 2), log_std, features.expand(100_000, 3), interval=0
    ).sample()
    torch.testing.assert_close(draws.mean(0), torch.tensor([1.0, -1.0]), atol=0.02, rtol=0.0)
    torch.testing.assert_close(draws.std(0), distribution.std[0], atol=0.0, rtol=0.02)
    distribution.log_prob(torch.zeros(1, 2)).backward()
    assert features.grad is None
    assert log_std.grad is not None
    assert log_std.grad.abs().min() > 0


def test_squashed_gaussian_against_torch_transforms() -> None:
    low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
    mean, log_std = torch.randn(4, 2, dtype=torch.float64), torch.tensor([-0.5, 0.2], dtype=torch.float64)
    low, high = low.double(), high.double()
    ours = SquashedGaussian(mean, log_std, low, high)
    theirs = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()),
        [
            torch.distributions.TanhTransform(),
            torch.distributions.AffineTransform((high + low) / 2, (high - low) / 2),
        ],
    )
    action = ours.sample()
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action).sum(-1, keepdim=True))


def test_squashed_gaussian_stays_inside_its_bounds_and_finite_at_them() -> None:
    low, high = torch.tensor([-1.0]), torch.tensor([3.0])
    wide = SquashedGaussian(torch.full((1000, 1), 20.0), torch.tensor([1.0]), low, high)
    action = wide.sample()
    assert (action >= low).all()
    assert (action <= high).all()
    assert wide.log_prob(action).isfinite().all()
    assert wide.entropy().isfinite().all()


@pytest.mark.parametrize("mean", [0.5, 9.0, -40.0])
def test_the_density_of_a_saturated_action_follows_from_what_was_squashed(mean: float) -> None:
    # log N(u; μ, σ) − log(2 (1 − tanh² u)), with 1 − tanh² u = 4 / (eᵘ + e⁻ᵘ)²: far out, log 4 − 2 |u|.
    u = torch.tensor([[mean + 0.3]])
    distribution = SquashedGaussian(
        torch.tensor([[mean]]), torch.tensor([math.log(0.5)]), -torch.ones(1), 3 * torch.ones(1)
    )
    normal = -0.5 * (0.3 / 0.5) ** 2 - math.log(0.5) - 0.5 * math.log(2.0 * math.pi)
    slope = math.log(2.0) + math.log(4.0) - 2.0 * math.log(math.exp(u.item()) + math.exp(-u.item()))
    assert distribution.log_prob_before_tanh(u).item() == pytest.approx(normal - slope, rel=1e-4)
    if abs(mean) < 5:  # tanh of the others is 1 in float32, from where there is no way back
        found = distribution.log_prob(distribution.squash(u))
        torch.testing.assert_close(found, distribution.log_prob_before_tanh(u), rtol=1e-4, atol=1e-4)


def test_squashed_or_uniform_draws_come_from_the_same_numbers() -> None:
    mean, low, high = torch.tensor([[3.0, -0.5]]).expand(20_000, 2), torch.tensor([-1.0, 2.0]), torch.tensor([1.0, 6.0])
    distribution = SquashedGaussian(mean, torch.tensor([-1.0, 0.5]), low, high)
    torch.manual_seed(0)
    sampled = distribution.sample()
    torch.manual_seed(0)
    assert torch.equal(distribution.sample_or_uniform(torch.tensor(False)), sampled)
    torch.manual_seed(0)
    uniform = distribution.sample_or_uniform(torch.tensor(True))
    torch.testing.assert_close(uniform.mean(0), torch.tensor([0.0, 4.0]), atol=0.03, rtol=0.0)
    torch.testing.assert_close(uniform.var(0), torch.tensor([4.0, 16.0]) / 12.0, atol=0.03, rtol=0.0)
    # Both rise with the random number behind them.
    for column in range(2):
        order = uniform[:, column].argsort()
        assert (sampled[order, column].diff() >= -1e-5).all()


def test_squashed_entropy_estimates_the_integral() -> None:
    torch.manual_seed(0)
    low, high = torch.tensor([-2.0]), torch.tensor([2.0])
    single = SquashedGaussian(torch.tensor([[0.3]]), torch.tensor([-0.7]), low, high)
    grid = torch.linspace(-1.9999, 1.9999, 200_001).unsqueeze(-1)
    log_p = single.log_prob(grid)
    integral = -(log_p.exp() * log_p).sum().item() * (4.0 / 200_001)
    many = SquashedGaussian(torch.full((100_000, 1), 0.3), torch.tensor([-0.7]), low, high)
    assert abs(many.entropy().mean().item() - integral) < 0.01


def test_categorical_against_torch() -> None:
    logits = torch.randn(6, 4)
    ours, theirs = MultiCategorical(logits, [4]), torch.distributions.Categorical(logits=logits)
    action = torch.randint(4, (6, 1))
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action.squeeze(-1)).unsqueeze(-1))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().unsqueeze(-1))
    assert torch.equal(ours.mode.squeeze(-1), logits.argmax(-1))


def test_categorical_samples_by_its_probabilities() -> None:
    torch.manual_seed(0)
    probabilities = torch.tensor([0.1, 0.6, 0.3])
    sample = MultiCategorical(probabilities.log().expand(100_000, 3), [3]).sample()
    frequency = torch.bincount(sample.flatten(), minlength=3) / 100_000
    torch.testing.assert_close(frequency, probabilities, atol=0.01, rtol=0.0)


def test_multi_categorical_is_a_product() -> None:
    logits = torch.randn(7, 5)
    joint = MultiCategorical(logits, [2, 3])
    first, second = MultiCategorical(logits[:, :2], [2]), MultiCategorical(logits[:, 2:], [3])
    action = joint.sample()
    assert action.shape == (7, 2)
    torch.testing.assert_close(joint.log_prob(action), first.log_prob(action[:, :1]) + second.log_prob(action[:, 1:]))
    torch.testing.assert_close(joint.entropy(), first.entropy() + second.entropy())


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_shapes_for_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    gaussian = DiagGaussian(torch.zeros(*leading, 4), torch.zeros(4))
    assert gaussian.log_prob(gaussian.sample()).shape == (*leading, 1)
    choice = MultiCategorical(torch.zeros(*leading, 5), [2, 3])
    assert choice.log_prob(choice.sample()).shape == (*leading, 1)
