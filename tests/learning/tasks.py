"""Small Gymnasium tasks, one for each kind of observation and action that a policy must learn with."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray


class _Bandit(gym.Env[Any, Any]):
    """Episodes of 8 independent choices; reward 1 for the right one. A blind policy is right by chance only."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self.score(action)
        self.time += 1
        return self.observe(), reward, False, self.time == 8, {}

    def observe(self) -> Any:
        raise NotImplementedError

    def score(self, action: Any) -> float:
        raise NotImplementedError


class PixelTask(_Bandit):
    """A bright square stands left or right in a noisy image; the action names the side."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (16, 16, 1), np.uint8)
        self.action_space = gym.spaces.Discrete(2)

    def observe(self) -> NDArray[np.uint8]:
        self.side = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 100, (16, 16, 1), dtype=np.uint8)
        row, column = self.np_random.integers(0, 13), self.np_random.integers(0, 5) + 8 * self.side
        image[row : row + 3, column : column + 3] = 255
        return image

    def score(self, action: Any) -> float:
        return float(int(action) == self.side)


class PixelAimTask(PixelTask):
    """The same image; the action is -0.5 for left and 0.5 for right."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gym.spaces.Box(-1, 1, (1,))

    def score(self, action: Any) -> float:
        return float(1.0 - abs(action - (self.side - 0.5)).item())


class DictTask(_Bandit):
    """A goal in one group, a mirror flag in another: the action must name the goal, mirrored when asked."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {"goal": gym.spaces.Box(-1, 1, (1,)), "flags": gym.spaces.Dict({"mirror": gym.spaces.Discrete(2)})}
        )
        self.action_space = gym.spaces.Box(-1, 1, (1,))

    def observe(self) -> dict[str, Any]:
        self.goal, self.mirror = self.np_random.uniform(-0.9, 0.9, 1), int(self.np_random.integers(2))
        return {"goal": self.goal.astype(np.float32), "flags": {"mirror": self.mirror}}

    def score(self, action: Any) -> float:
        wanted = -self.goal if self.mirror else self.goal
        return float(1.0 - abs(action - wanted).item())


class MultiDiscreteTask(_Bandit):
    """Two numbers are shown; two choices must name them."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.MultiDiscrete([2, 3])
        self.action_space = gym.spaces.MultiDiscrete([2, 3])

    def observe(self) -> NDArray[np.int64]:
        self.shown = self.np_random.integers([0, 0], [2, 3])
        return self.shown

    def score(self, action: Any) -> float:
        return float((action == self.shown).mean())


class MultiBinaryTask(_Bandit):
    """Three bits are shown; three switches must repeat them."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.MultiBinary(3)
        self.action_space = gym.spaces.MultiBinary(3)

    def observe(self) -> NDArray[np.int8]:
        self.shown = self.np_random.integers(0, 2, 3).astype(np.int8)
        return self.shown

    def score(self, action: Any) -> float:
        return float((action == self.shown).mean())


class PrivilegedTask(_Bandit):
    """The reward is the action's sign match plus a large offset that only the privileged group shows.

    An actor that sees ``policy`` alone can solve it; a critic without ``priv`` cannot predict the return.
    """

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {"policy": gym.spaces.Box(-1, 1, (1,)), "priv": gym.spaces.Box(-1, 1, (1,))}
        )
        self.action_space = gym.spaces.Discrete(2)

    def observe(self) -> dict[str, Any]:
        self.cue, self.offset = self.np_random.choice([-1.0, 1.0], 1), self.np_random.choice([-1.0, 1.0], 1)
        return {"policy": self.cue.astype(np.float32), "priv": self.offset.astype(np.float32)}

    def score(self, action: Any) -> float:
        return float((int(action) == int(self.cue.item() > 0)) + 5.0 * self.offset.item())
