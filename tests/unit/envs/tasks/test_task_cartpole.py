from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from torch import Tensor

from apexrl.envs.tasks import CartPole


def test_trajectories_rewards_and_ends_equal_gymnasiums() -> None:
    N = 16
    task = CartPole(N)
    task.reset(0)
    references: list[Any] = []
    for i in range(N):
        reference = CartPoleEnv()
        reference.reset()
        reference.state = task.state[i].double().numpy()
        references.append(reference)
    running = set(range(N))
    generator = torch.Generator().manual_seed(1)
    num_compared = 0
    while running:
        action = torch.randint(2, (N, 1), generator=generator)
        step = task.step(action)
        assert isinstance(step.final_obs, Tensor)
        for i in sorted(running):
            obs, reward, terminated, *_ = references[i].step(int(action[i]))
            np.testing.assert_allclose(step.final_obs[i].tolist(), obs, rtol=1e-4, atol=1e-5)
            assert step.reward[i].item() == reward
            assert step.terminated[i].item() == terminated
            num_compared += 1
            if terminated:
                running.remove(i)
    assert num_compared > 10 * N


def test_first_states_and_limits_equal_gymnasiums() -> None:
    spec = gym.spec("CartPole-v1")
    task = CartPole(4096)
    reference = CartPoleEnv()
    assert task.max_episode_steps == spec.max_episode_steps
    assert task.action_space == reference.action_space
    assert task.observation_space == reference.observation_space
    first = task.reset(0)
    # Uniform in [-0.05, 0.05]: standard deviation 0.1 / sqrt(12) = 0.0289.
    assert first.abs().max() <= 0.05
    torch.testing.assert_close(first.std(0), torch.full((4,), 0.0289), atol=1e-3, rtol=0.0)
