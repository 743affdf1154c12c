import pytest
import torch
from torch import Tensor

from apexrl.core.functional import discounted_sum, gae, normalize


def column(*values: float | bool) -> Tensor:
    """``[T, 1, 1]``"""
    return torch.tensor(values).view(-1, 1, 1)


def test_gae_of_a_terminated_step_bootstraps_nothing() -> None:
    # delta_1 = 3 - 2 = 1; delta_0 = 1 + 0.5 * 2 - 4 = -2; A_0 = -2 + 0.5 * 1 = -1.5. V(s'_1) = 100 is not used.
    advantage, target = gae(
        reward=column(1.0, 3.0), value=column(4.0, 2.0), next_value=column(2.0, 100.0),
        terminated=column(False, True), done=column(False, True), gamma=0.5, lam=1.0,
    )  # fmt: skip
    torch.testing.assert_close(advantage, column(-1.5, 1.0))
    torch.testing.assert_close(target, column(2.5, 3.0))


def test_gae_bootstraps_a_truncated_step_and_stops_there() -> None:
    # Step 0 hits the time limit in a state worth 10: 1 + 0.5 * 10 = 6. Step 1 belongs to another episode.
    advantage, _ = gae(
        reward=column(1.0, 5.0), value=column(0.0, 0.0), next_value=column(10.0, 0.0),
        terminated=column(False, True), done=column(True, True), gamma=0.5, lam=1.0,
    )  # fmt: skip
    torch.testing.assert_close(advantage, column(6.0, 5.0))


def test_gae_of_mixed_endings() -> None:
    # gamma 0.5, lam 0.5, trace factor 0.25. Steps: goes on, terminated, truncated, goes on.
    # delta_3 = 1 + 0.5 * 4 - 1 = 2, A_3 = 2
    # delta_2 = 1 + 0.5 * 6 - 1 = 3, truncated: A_2 = 3
    # delta_1 = 1 - 1 = 0, terminated: A_1 = 0
    # delta_0 = 1 + 0.5 * 1 - 1 = 0.5, A_0 = 0.5 + 0.25 * 0 = 0.5
    advantage, _ = gae(
        reward=column(1.0, 1.0, 1.0, 1.0), value=column(1.0, 1.0, 1.0, 1.0), next_value=column(1.0, 9.0, 6.0, 4.0),
        terminated=column(False, True, False, False), done=column(False, True, True, False), gamma=0.5, lam=0.5,
    )  # fmt: skip
    torch.testing.assert_close(advantage, column(0.5, 0.0, 3.0, 2.0))


@pytest.mark.parametrize("num_steps", [1, 2, 7, 64, 129])
def test_gae_equals_the_sum_over_all_later_steps(num_steps: int) -> None:
    generator = torch.Generator().manual_seed(num_steps)
    shape = (num_steps, 5, 1)
    reward, value, next_value = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    terminated = torch.rand(shape, generator=generator) < 0.1
    done = terminated | (torch.rand(shape, generator=generator) < 0.1)
    advantage, target = gae(reward, value, next_value, terminated, done, gamma=0.97, lam=0.9)

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
