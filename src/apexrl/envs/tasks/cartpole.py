"""Balance a pole on a cart: the dynamics of Gymnasium's ``CartPole-v1``."""

from __future__ import annotations

import math
from typing import Final

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from apexrl.envs.tasks.base import TensorTask, Transition
from apexrl.envs.tasks.canvas import BLUE, GRID, INK, ORANGE, STEEL, Canvas

GRAVITY: Final = 9.8
POLE_MASS: Final = 0.1
TOTAL_MASS: Final = 1.1
HALF_LENGTH: Final = 0.5
FORCE: Final = 10.0
DT: Final = 0.02
X_LIMIT: Final = 2.4
ANGLE_LIMIT: Final = 12 * 2 * math.pi / 360


class CartPole(TensorTask):
    """Balance a pole by pushing its cart left (0) or right (1); the reward is 1 per step, including the last.

    The state and observation is ``(x, velocity, angle, angular velocity)``, ``[N, 4]``. An episode terminates
    when ``|x| > 2.4`` or ``|angle| > 12°``.
    """

    state_size = 4
    dt = DT

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", *, max_episode_steps: int = 500) -> None:
        high = np.array([2 * X_LIMIT, np.inf, 2 * ANGLE_LIMIT, np.inf], dtype=np.float32)
        self.observation_space = gym.spaces.Box(-high, high)
        self.action_space = gym.spaces.Discrete(2)
        self.max_episode_steps = max_episode_steps
        super().__init__(num_envs, device, max_episode_steps=max_episode_steps)

    def _draw(self) -> Tensor:
        return torch.empty_like(self.state).uniform_(-0.05, 0.05, generator=self.generator)

    def _advance(self, state: Tensor, action: Tensor) -> Transition:
        x, velocity, angle, spin = state.chunk(4, 1)
        sin, cos = angle.sin(), angle.cos()
        force = action * (2 * FORCE) - FORCE
        push = (force + POLE_MASS * HALF_LENGTH * spin.square() * sin) / TOTAL_MASS
        inertia = HALF_LENGTH * (4 / 3 - POLE_MASS * cos.square() / TOTAL_MASS)
        spin_rate = (GRAVITY * sin - cos * push) / inertia
        acceleration = push - POLE_MASS * HALF_LENGTH / TOTAL_MASS * spin_rate * cos
        rate = torch.cat((velocity, acceleration, spin, spin_rate), 1)
        successor = torch.add(state, rate, alpha=DT)
        terminated = (successor[:, 0:1].abs() > X_LIMIT) | (successor[:, 2:3].abs() > ANGLE_LIMIT)
        return Transition(successor, torch.ones_like(x), terminated, {})

    def _observe(self, state: Tensor) -> Tensor:
        return state

    def _render(self, canvas: Canvas, state: list[float]) -> None:
        x, _, angle, _ = state
        canvas.look_at((0.0, 0.65), 72.0)
        for edge in (-X_LIMIT, X_LIMIT):
            canvas.dashes((edge, 0.0), (edge, 1.6), GRID, 12)
        canvas.line([(-2.7, 0.0), (2.7, 0.0)], STEEL, 3)
        canvas.box((x - 0.3, 0.06), (x + 0.3, 0.34), BLUE, radius=0.06)
        for wheel in (x - 0.18, x + 0.18):
            canvas.disc((wheel, 0.08), 0.08, INK)
        pivot = (x, 0.34)
        tip = (x + 2 * HALF_LENGTH * math.sin(angle), 0.34 + 2 * HALF_LENGTH * math.cos(angle))
        canvas.rod(pivot, tip, 0.045, ORANGE)
        canvas.disc(pivot, 0.06, INK)
