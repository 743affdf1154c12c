import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from apexrl.policies.networks import ObservationNormalizer, RewardScaler, RunningNormalizer


def test_batches_merge_to_the_moments_of_everything() -> None:
    data = torch.randn(100, 3, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1]) + torch.tensor([0.0, 100.0, -3.0])
    normalizer = RunningNormalizer((3,))
    for part in data.split([1, 29, 70]):
        normalizer.update(part)
    torch.testing.assert_close(normalizer.mean, data.mean(0))
    torch.testing.assert_close(normalizer.var, data.var(0, unbiased=False))
    spread = normalizer(data).std(0, unbiased=False)
    torch.testing.assert_close(spread, torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0.0)


def test_a_fresh_normalizer_changes_nothing_and_clips() -> None:
    normalizer = RunningNormalizer((1,), clip=2.0)
    torch.testing.assert_close(normalizer(torch.tensor([[0.5], [7.0]])), torch.tensor([[0.5], [2.0]]))


def test_calling_does_not_update() -> None:
    normalizer = RunningNormalizer((1,))
    normalizer.train()
    normalizer(torch.ones(4, 1))
    assert normalizer.count.item() == 0


def test_an_update_that_does_not_apply_changes_nothing() -> None:
    normalizer = RunningNormalizer((1,))
    normalizer.update(torch.tensor([[float("nan")]]), apply=torch.tensor(False))
    assert normalizer.mean.item() == 0.0
    assert normalizer.count.item() == 0.0


def test_dict_observations_are_normalised_by_leaf_and_images_pass() -> None:
    space = gym.spaces.Dict(
        {
            "policy": gym.spaces.Box(-1, 1, (2,)),
            "camera": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "robot": gym.spaces.Dict({"joints": gym.spaces.Box(-1, 1, (1,))}),
        }
    )
    obs = TensorDict(
        {
            "policy": torch.randn(50, 2) * 3 + 1,
            "camera": torch.randint(0, 255, (50, 4, 4, 3), dtype=torch.uint8),
            "robot": {"joints": torch.randn(50, 1) + 9},
        },
        batch_size=[50],
    )
    normalizer = ObservationNormalizer(space)
    normalizer.update(obs)
    out = normalizer(obs)
    assert isinstance(out, TensorDict)
    assert torch.equal(out["camera"], obs["camera"])
    for leaf in (out["policy"], out["robot", "joints"]):
        torch.testing.assert_close(leaf.mean(0), torch.zeros(leaf.shape[-1]), atol=1e-5, rtol=0.0)
    assert obs["robot", "joints"].mean() > 5, "the observation itself must not change"


def test_reward_scaler_divides_by_the_deviation_of_discounted_returns() -> None:
    # One environment, gamma 0.5, an episode ends after step 1: returns 1, 2.5, 4 (cut), 4 (4 * 0.5 + 2).
    reward = torch.tensor([1.0, 2.0, 4.0, 2.0]).view(4, 1, 1)
    done = torch.tensor([False, True, False, False]).view(4, 1, 1)
    scaler = RewardScaler(gamma=0.5)
    returns = torch.tensor([1.0, 2.5, 4.0, 4.0])
    torch.testing.assert_close(scaler(reward, done), reward / returns.std(unbiased=False))
    # Two steps more: the running return goes on with 4 * 0.5 + 1 = 3 and 3 * 0.5 + 1 = 2.5.
    reward = torch.ones(2, 1, 1)
    scaled = scaler(reward, torch.zeros(2, 1, 1, dtype=torch.bool))
    returns = torch.tensor([1.0, 2.5, 4.0, 4.0, 3.0, 2.5])
    deviation = torch.stack((returns[:5].std(unbiased=False), returns.std(unbiased=False)))
    torch.testing.assert_close(scaled.flatten(), 1 / deviation)


def test_reward_scaler_moves_with_every_step_after_the_first_batch() -> None:
    reward, done = torch.randn(60, 3, 1) * 5 + 3, torch.rand(60, 3, 1) < 0.1
    whole, steps = RewardScaler(0.9), RewardScaler(0.9)
    for scaler in (whole, steps):
        scaler(reward[:10], done[:10])
    expected = torch.cat([steps(reward[t : t + 1], done[t : t + 1]) for t in range(10, 60)])
    found = torch.cat([whole(reward[10:30], done[10:30]), whole(reward[30:], done[30:])])
    torch.testing.assert_close(found, expected)
    running, returns = RunningNormalizer(()), torch.zeros(3, 1)
    for t in range(60):
        returns = reward[t] + 0.9 * returns
        running.update(returns)
        returns = returns * ~done[t]
    torch.testing.assert_close(found[-1], (reward[-1] / running.var.sqrt()).clamp(-10, 10).float())


def test_reward_scaler_remembers_the_running_return_between_rollouts() -> None:
    reward, done = torch.rand(10, 3, 1), torch.rand(10, 3, 1) < 0.2
    whole, parts = RewardScaler(0.9), RewardScaler(0.9)
    whole(reward, done)
    parts(reward[:4], done[:4])
    parts(reward[4:], done[4:])
    torch.testing.assert_close(whole.running, parts.running)
    torch.testing.assert_close(whole.statistics.var, parts.statistics.var)
