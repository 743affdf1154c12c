"""A suite that steps in microseconds: a point moves to a goal that depends on the task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from apexrl.envs.suites.base import Simulator, Split, TaskSuite

GOALS = ((0.5, 0.0), (-0.5, 0.0), (0.0, 0.5))
WORDS = ("right", "left", "up")


class PointSimulator(Simulator):
    """State: position and the number of steps taken."""

    def __init__(self, goal: tuple[float, float], radius: float) -> None:
        self.goal, self.radius = np.array(goal), radius
        self.position, self.steps = np.zeros(2), 0.0

    def restore(self, init_state: NDArray[np.float64]) -> None:
        self.position, self.steps = init_state[:2].copy(), float(init_state[2])

    def state(self) -> NDArray[np.float64]:
        return np.array([*self.position, self.steps])

    def advance(self, action: NDArray[np.float32]) -> bool:
        self.position = np.clip(self.position + 0.1 * np.clip(action[:2], -1, 1), -1, 1)
        self.steps += 1
        return bool(np.linalg.norm(self.position - self.goal) < self.radius)

    def observe(self) -> dict[str, NDArray[Any]]:
        return {"state": self.position.astype(np.float32)}

    def render(self) -> NDArray[np.uint8]:
        image = np.full((32, 32, 3), 255, np.uint8)
        row, column = ((self.position + 1) * 15).astype(int)
        image[row : row + 2, column : column + 2] = 0
        return image

    def expert_action(self) -> NDArray[np.float32]:
        return np.clip(10 * (self.goal - self.position), -1, 1).astype(np.float32)


class PointSuite(TaskSuite):
    """Up to three tasks: go right, left, up."""

    renders = False
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    observation_space = gym.spaces.Dict({"state": gym.spaces.Box(-1, 1, (2,), np.float32)})

    def __init__(self, num_tasks: int = 2, num_states: int = 6, horizon: int = 20, radius: float = 0.15) -> None:
        self.name, self.horizon, self.radius, self.num_states = "points", horizon, radius, num_states
        self.task_names: Sequence[str] = WORDS[:num_tasks]
        self.instructions: Sequence[str] = [f"go {word}" for word in self.task_names]

    def init_states(self, task_id: int, split: Split = "train") -> list[NDArray[np.float64]]:
        draw = np.random.default_rng([task_id, split == "val"])
        return [np.array([*draw.uniform(-0.9, 0.9, 2), 0.0]) for _ in range(self.num_states)]

    def random_init_state(self, task_id: int, seed: Sequence[int]) -> NDArray[np.float64]:
        return np.array([*np.random.default_rng([task_id, 2, *seed]).uniform(-0.9, 0.9, 2), 0.0])

    def make_simulator(self, task_id: int) -> Simulator:
        return PointSimulator(GOALS[task_id], self.radius)
