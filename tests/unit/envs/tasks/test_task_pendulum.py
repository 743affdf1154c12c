from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.classic_control import PendulumEnv
from torch import Tensor

from apexrl.envs.tasks import Pendulum


def test_trajectories_and_rewards_equal_gymnasiums() -> None:
    N, T = 8, 100
    task = Pendulum(N)
    task.reset(0)
    references: list[Any] = [PendulumEnv() for _ in range(N)]
    # Torques past the limits of ±2 are clipped alike.
    actions = 6 * torch.rand(T, N, 1, generator=torch.Generator().manual_seed(1)) - 3
    for action in actions:
        # A pendulum multiplies rounding errors, so every step starts from the same state.
        for reference, state in zip(references, task.state.double().numpy(), strict=True):
            reference.state = state
        step = task.step(action)
        assert isinstance(step.obs, Tensor)
        for i, reference in enumerate(references):
            obs, reward, _, _, _ = reference.step(action[i].numpy())
            np.testing.assert_allclose(step.obs[i].tolist(), obs, rtol=0, atol=1e-5)
            np.testing.assert_allclose(step.reward[i].item(), reward, rtol=1e-5)
        assert not step.terminated.any()


def test_first_states_and_limits_equal_gymnasiums() -> None:
    task = Pendulum(4096)
    reference = PendulumEnv()
    assert task.max_episode_steps == gym.spec("Pendulum-v1").max_episode_steps
    assert task.action_space == reference.action_space
    assert task.observation_space == reference.observation_space
    task.reset(0)
    bound = torch.tensor([math.pi, 1.0])
    assert (task.state.abs() <= bound).all()
    # Uniform in [-b, b]: standard deviation b / sqrt(3).
    torch.testing.assert_close(task.state.std(0) / bound, torch.full((2,), 3**-0.5), atol=0.02, rtol=0.0)


def test_hanging_still_costs_pi_squared() -> None:
    task = Pendulum(1)
    task.reset(0)
    task.state.copy_(torch.tensor([[math.pi, 0.0]]))
    assert abs(task.step(torch.zeros(1, 1)).reward.item() + math.pi**2) < 1e-4
