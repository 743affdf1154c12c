"""Swing up a pendulum: the dynamics of Gymnasium's ``Pendulum-v1``."""

from __future__ import annotations

import math
from typing import Final

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from apexrl.envs.tasks.base import TensorTask, Transition
from apexrl.envs.tasks.canvas import BLUE, GREEN, GRID, INK, ORANGE, PAPER, Canvas

GRAVITY: Final = 10.0
DT: Final = 0.05
MAX_TORQUE: Final = 2.0
MAX_SPEED: Final = 8.0


class Pendulum(TensorTask):
    """Swing up a pendulum of mass and length 1 with a torque in [-2, 2]; episodes never terminate.

    reward = -(angle² + 0.1 speed² + 0.001 torque²) of the state before the step, with the angle from
    upright in [-π, π). The state is ``(angle, speed)``; the observation is ``(cos, sin, speed)``, ``[N, 3]``.
    """

    state_size = 2
    dt = DT

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", *, max_episode_steps: int = 200) -> None:
        high = np.array([1.0, 1.0, MAX_SPEED], dtype=np.float32)
        self.observation_space = gym.spaces.Box(-high, high)
        self.action_space = gym.spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,))
        self.max_episode_steps = max_episode_steps
        super().__init__(num_envs, device, max_episode_steps=max_episode_steps)
        self._start = torch.tensor([math.pi, 1.0], device=self.device)

    def _draw(self) -> Tensor:
        return torch.empty_like(self.state).uniform_(-1.0, 1.0, generator=self.generator) * self._start

    def _advance(self, state: Tensor, action: Tensor) -> Transition:
        angle, speed = state.chunk(2, 1)
        torque = action.clamp(-MAX_TORQUE, MAX_TORQUE)
        upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = upright.square() + 0.1 * speed.square() + 0.001 * torque.square()
        faster = speed + (1.5 * GRAVITY * angle.sin() + 3.0 * torque) * DT
        faster = faster.clamp(-MAX_SPEED, MAX_SPEED)
        successor = torch.cat((angle + faster * DT, faster), 1)
        return Transition(successor, -cost, torch.zeros_like(angle, dtype=torch.bool), {})

    def _observe(self, state: Tensor) -> Tensor:
        angle, speed = state.chunk(2, 1)
        return torch.cat((angle.cos(), angle.sin(), speed), 1)

    def _render(self, canvas: Canvas, state: list[float]) -> None:
        angle, _ = state
        canvas.look_at((0.0, 0.0), 105.0)
        canvas.disc((0.0, 0.0), 1.0, PAPER, edge=GRID)
        canvas.dashes((0.0, 0.0), (0.0, 1.0), GRID, 10)
        tip = (math.sin(angle), math.cos(angle))
        up = math.cos(angle) > 0.95
        canvas.rod((0.0, 0.0), tip, 0.07, GREEN if up else BLUE)
        canvas.disc(tip, 0.14, ORANGE)
        canvas.disc((0.0, 0.0), 0.05, INK)
