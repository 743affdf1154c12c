"""Environments that fail when they are told to, in all the ways in which environments fail.

What they do is in an environment variable, so that a run that was stopped by a fault can be resumed without it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from tests.point_suite import GOALS, PointSimulator, PointSuite

from apexrl.envs.suites.base import Simulator

VARIABLE = "APEXRL_TORTURE_FAULT"
NAME = "tests.torture.faults:Faulty-v0"
FAULT_STEP = 60
"""The step of an environment, counted from the start of its process, at which it fails."""


def inflict(fault: str) -> None:
    """Let the environments of this process, and of its workers, fail; or take that long for a step: ``slow 0.1``."""
    os.environ[VARIABLE] = fault


def _fault(steps: int) -> str:
    fault = os.environ.get(VARIABLE, "")
    return fault if steps >= FAULT_STEP or fault.startswith("slow") else ""


def _misbehave(fault: str) -> None:
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(3600)
    if fault == "raise":
        raise RuntimeError("the gearbox is broken")
    if fault.startswith("slow"):
        time.sleep(float(fault.split()[1]))


class FaultyEnv(gym.Env[NDArray[np.float32], NDArray[np.float32]]):
    """A point on a line that is pulled to 0."""

    observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        self.x, self.age, self.steps = 0.0, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.age = float(self.np_random.uniform(-1, 1)), 0
        return self._obs(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self.x = float(np.clip(0.9 * self.x + 0.1 * action[0] + 0.05 * self.np_random.normal(), -5, 5))
        self.age += 1
        self.steps += 1
        fault = _fault(self.steps)
        _misbehave(fault)
        reward = float("nan") if fault == "nan reward" else -abs(self.x)
        obs = self._obs() * np.float32("nan") if fault == "nan observation" else self._obs()
        return obs, reward, False, self.age >= 15, {}

    def _obs(self) -> NDArray[np.float32]:
        return np.array([self.x, self.age / 15], np.float32)


gym.register("Faulty-v0", "tests.torture.faults:FaultyEnv", max_episode_steps=20)


class FaultySimulator(PointSimulator):
    """Fails like the environment above."""

    total_steps = 0

    def advance(self, action: NDArray[np.float32]) -> bool:
        FaultySimulator.total_steps += 1
        _misbehave(_fault(FaultySimulator.total_steps))
        return super().advance(action)

    def observe(self) -> dict[str, NDArray[Any]]:
        nan = _fault(FaultySimulator.total_steps) == "nan observation"
        return {name: value * np.float32("nan" if nan else 1) for name, value in super().observe().items()}


class FaultySuite(PointSuite):
    """Two tasks that random actions solve now and then."""

    def __init__(self) -> None:
        super().__init__(num_tasks=2, num_states=6, horizon=12, radius=0.4)

    def make_simulator(self, task_id: int) -> Simulator:
        return FaultySimulator(GOALS[task_id], self.radius)
