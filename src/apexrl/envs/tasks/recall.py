"""Remember a cue: a task that a policy without memory cannot solve."""

from __future__ import annotations

from typing import Final

import gymnasium as gym
import torch
from torch import Tensor

from apexrl.core.errors import ConfigError
from apexrl.core.metrics import MetricSpec
from apexrl.envs.tasks.base import TensorTask, Transition
from apexrl.envs.tasks.canvas import BLUE, GREEN, GRID, MUTED, ORANGE, RED, STEEL, Canvas

COLORS: Final = (BLUE, ORANGE, GREEN, RED)


class Recall(TensorTask):
    """Remember a cue that is shown once, and name it when asked.

    The first observation shows the cue, ``delay`` blank ones follow, then a go flag asks for the action that
    equals the cue: it earns 1, and right or wrong the episode ends. Other steps earn nothing, so without
    memory the best mean return is ``1 / num_cues``. The state is ``(cue, clock)``; the observation is the cue
    as one-hot and the go flag, ``[N, num_cues + 1]``.

    Args:
        num_cues: how many cues there are, 2 to 4.
        delay: blank steps between the cue and the question.
    """

    state_size = 2
    metrics = (MetricSpec("success", reduce="max"),)

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", *, num_cues: int = 2, delay: int = 5) -> None:
        if not 2 <= num_cues <= len(COLORS):
            raise ConfigError(f"Recall.num_cues must lie in [2, {len(COLORS)}], got {num_cues}")
        if delay < 0:
            raise ConfigError(f"Recall.delay must not be negative, got {delay}")
        self.num_cues = num_cues
        self.delay = delay
        self.observation_space = gym.spaces.Box(0.0, 1.0, (num_cues + 1,))
        self.action_space = gym.spaces.Discrete(num_cues)
        self.max_episode_steps = delay + 2
        super().__init__(num_envs, device, num_cues=num_cues, delay=delay)
        self._cues = torch.arange(num_cues, dtype=torch.float32, device=self.device)

    def _draw(self) -> Tensor:
        fresh = torch.zeros_like(self.state)
        fresh[:, 0].random_(0, self.num_cues, generator=self.generator)
        return fresh

    def _advance(self, state: Tensor, action: Tensor) -> Transition:
        cue, clock = state.chunk(2, 1)
        asked = clock > self.delay
        correct = (asked & (action == cue)).float()
        # A copy, because the reward and the metric are two outputs.
        return Transition(torch.cat((cue, clock + 1), 1), correct, asked, {"success": correct.clone()})

    def _observe(self, state: Tensor) -> Tensor:
        cue, clock = state.chunk(2, 1)
        shown = (clock == 0) & (cue == self._cues)
        # The successor of the last step lies past the question and is blank again.
        go = clock == self.delay + 1
        return torch.cat((shown, go), 1).float()

    def _render(self, canvas: Canvas, state: list[float]) -> None:
        cue, clock = int(state[0]), int(state[1])
        canvas.look_at((0.0, 0.0), 100.0)
        for i in range(self.num_cues):
            x = 0.85 * (i - (self.num_cues - 1) / 2)
            visible = clock == 0 and i == cue
            canvas.disc((x, 0.15), 0.32, COLORS[i] if visible else GRID)
            canvas.text((x, 0.15), str(i), (255, 255, 255) if visible else MUTED, size=22)
        stage = "remember" if clock == 0 else "which one?" if clock > self.delay else "wait"
        canvas.text((0.0, -0.6), stage, STEEL, size=18)
        spacing = min(0.18, 3.4 / (self.delay + 1))
        for i in range(self.delay + 2):
            x = spacing * (i - (self.delay + 1) / 2)
            canvas.disc((x, -1.05), 0.3 * spacing, STEEL if i <= clock else GRID)
