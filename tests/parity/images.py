"""A small task with image observations: bring a dot into the middle of a 16 × 16 image."""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

SIZE = 16


class DotEnv(gym.Env[NDArray[np.uint8], NDArray[np.float32]]):
    """The reward is minus the distance of the dot from the middle; an episode takes 20 steps."""

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Put the dot anywhere."""
        super().reset(seed=seed)
        self.place = self.np_random.uniform(0, SIZE - 1, 2)
        return self._image(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Move the dot by at most one pixel in each direction."""
        self.place = np.clip(self.place + np.clip(action, -1.0, 1.0), 0, SIZE - 1)
        return self._image(), -float(np.abs(self.place - SIZE / 2).mean()), False, False, {}

    def _image(self) -> NDArray[np.uint8]:
        image = np.zeros((SIZE, SIZE, 3), np.uint8)
        row, column = self.place.round().astype(int)
        image[row, column] = 255
        return image


gym.register("Dot-v0", "tests.parity.images:DotEnv", max_episode_steps=20)
