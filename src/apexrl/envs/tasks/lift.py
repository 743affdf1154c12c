"""Reach, grasp and lift a block with a planar gripper."""

from __future__ import annotations

from typing import Final

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from apexrl.core.errors import ConfigError
from apexrl.core.metrics import MetricSpec
from apexrl.envs.tasks.base import TensorTask, Transition
from apexrl.envs.tasks.canvas import GREEN, INK, LIGHT, MUTED, ORANGE, STEEL, WOOD, Canvas

# Lengths in metres, speeds in metres a second. In one step a finger moves at most (0.5 + 0.2) * 0.05 = 0.035,
# less than the 0.04 between the centres of a finger and the narrowest block in touch: nothing tunnels.
DT: Final = 0.05
GRAVITY: Final = 9.81
MAX_SPEED: Final = (0.5, 0.25)
FINGER_SPEED: Final = 0.2
LAG: Final = 0.5
"""Share of the way to the commanded velocity that the gripper covers in one step."""
MAX_GAP: Final = 0.065
"""Distance from the gripper's axis to a finger's inner face when fully open."""
FINGER_WIDTH: Final = 0.02
FINGER_LENGTH: Final = 0.1
X_LIMIT: Final = 0.5
Y_LIMIT: Final = 0.4
MAX_TARGET: Final = 0.3
"""What fingers that only just hold the largest block still reach."""
TABLE_EDGE: Final = 0.5
DROP_HEIGHT: Final = 0.1
"""A block that is let go higher than this and reaches the table was dropped."""
TOUCH: Final = 1e-5
"""Slack of the contact tests, far above float32 rounding."""

REACH_WEIGHT: Final = 0.1
REACH_SCALE: Final = 5.0
GRASP_WEIGHT: Final = 0.2
LIFT_WEIGHT: Final = 0.7

COLUMNS: Final = {
    "x": 0,  # gripper axis
    "y": 1,  # finger tips
    "block_x": 2,  # block centre
    "block_y": 3,  # block foot
    "size": 4,  # half the side of the square block
    "vx": 5,
    "vy": 6,
    "block_vx": 7,
    "block_vy": 8,
    "gap": 9,  # gripper axis to a finger's inner face
    "held": 10,  # 0 or 1
    "held_y": 11,  # height at which the block was last held, 0 once it rests
}
"""The columns of the state."""
START_LOW: Final = (-0.2, 0.2, -0.25, 0.0, 0.03)
START_HIGH: Final = (0.2, 0.3, 0.25, 0.0, 0.04)
"""The range of the first five columns at the start; the others are 0, and the gripper is open."""

# Of the first eleven columns, and of the block's place seen from the finger tips.
OBSERVATION_SCALE: Final = (2.0, 3.0, 2.0, 4.0, 200.0, 2.0, 2.0, 2.0, 1.0, 14.0, 1.0, 10.0, 10.0)
MEAN_SIZE: Final = 0.035


class Lift(TensorTask):
    """Grasp a block, lift it from a table to the target height and hold it there.

    Actions in [-1, 1]: velocity along x, velocity along y, and the finger command (positive closes, negative
    opens). Fingers push the block when they meet its side and stop on its top; when both touch it, it is held
    until they open, and then it falls. Success is holding the block at or above the target height; the
    episode continues until the time limit. An episode terminates as failed when the block passes the edge of
    the table, or falls on the table from more than 10 cm.

    reward = 0.1 reach + 0.2 grasp + 0.7 lift, each in [0, 1]:
    reach = 1 - tanh(5 · distance of the finger tips from the block's foot), 1 while held;
    grasp = 1 while held, up to 0.5 for closing the fingers around the block before that;
    lift = min(height / target_height, 1) while held.

    The observation ``[N, 13]``, scaled to order 1: gripper x, y; block x, y, size; gripper velocity (2);
    block velocity (2); opening; 1 while held; block seen from the finger tips (2).

    Args:
        target_height: height of the block's foot that counts as lifted, metres in (0.1, 0.3].
        max_episode_steps: steps of 0.05 s until the episode is truncated.
    """

    state_size = len(COLUMNS)
    dt = DT
    metrics = (
        MetricSpec("reach_reward"),
        MetricSpec("grasp_reward"),
        MetricSpec("lift_reward"),
        MetricSpec("success", reduce="max"),
        MetricSpec("fail", reduce="max"),
    )

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        target_height: float = 0.25,
        max_episode_steps: int = 100,
    ) -> None:
        if not DROP_HEIGHT < target_height <= MAX_TARGET:
            raise ConfigError(f"Lift.target_height must lie in ({DROP_HEIGHT}, {MAX_TARGET}], got {target_height}")
        self.target_height = target_height
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (len(OBSERVATION_SCALE),))
        self.action_space = gym.spaces.Box(-1.0, 1.0, (3,))
        self.max_episode_steps = max_episode_steps
        super().__init__(num_envs, device, target_height=target_height, max_episode_steps=max_episode_steps)
        self._low = torch.tensor(START_LOW, device=self.device)
        self._span = torch.tensor(START_HIGH, device=self.device) - self._low
        self._rest = torch.zeros(num_envs, len(COLUMNS) - len(START_LOW), device=self.device)
        self._rest[:, COLUMNS["gap"] - len(START_LOW)] = MAX_GAP
        self._max_speed = torch.tensor(MAX_SPEED, device=self.device)
        self._scale = torch.tensor(OBSERVATION_SCALE, device=self.device)
        self._shift = torch.zeros_like(self._scale)
        self._shift[COLUMNS["size"]] = -MEAN_SIZE * self._scale[COLUMNS["size"]]

    def _draw(self) -> Tensor:
        uniform = torch.rand(self.num_envs, len(START_LOW), generator=self.generator, device=self.device)
        return torch.cat((self._low + self._span * uniform, self._rest), 1)

    def _advance(self, state: Tensor, action: Tensor) -> Transition:
        _, y, block_x, block_y, size, _, _, _, block_vy, gap, held, held_y = state.chunk(len(COLUMNS), 1)
        action = action.clamp(-1.0, 1.0)
        was_held = held > 0
        top = block_y + 2 * size

        # The gripper alone, with nothing but the table below it.
        velocity = torch.lerp(state[:, 5:7], self._max_speed * action[:, :2], LAG)
        new_x, new_y = torch.add(state[:, :2], velocity, alpha=DT).chunk(2, 1)
        new_x, new_y = new_x.clamp(-X_LIMIT, X_LIMIT), new_y.clamp(0.0, Y_LIMIT)
        new_gap = torch.add(gap, action[:, 2:], alpha=-DT * FINGER_SPEED).clamp(0.0, MAX_GAP)
        offset = (block_x - new_x).abs()

        # Finger tips that come from above stop on the block; a held block stops on the table.
        over = (offset - new_gap - FINGER_WIDTH / 2).abs() < size + (FINGER_WIDTH / 2 - TOUCH)
        lands = over & (y >= top - TOUCH) & ~was_held
        floor = torch.where(was_held, y - block_y, top * lands)
        new_y = torch.maximum(new_y, floor)

        # Fingers beside the block: both touching hold it, one pushes it.
        beside = was_held | (new_y < top - TOUCH)
        between = beside & (offset < new_gap + FINGER_WIDTH / 2)
        new_held = between & (new_gap <= size)
        new_gap = torch.where(between, torch.maximum(new_gap, size), new_gap)
        room, clear = new_gap - size, new_gap + FINGER_WIDTH + size
        within = torch.maximum(torch.minimum(block_x, new_x + room), new_x - room)
        new_block_x = torch.where(between, within, block_x)
        # Pushed to the side where it is.
        left, right = torch.minimum(block_x, new_x - clear), torch.maximum(block_x, new_x + clear)
        pushed = torch.where(block_x < new_x, left, right)
        new_block_x = torch.where(beside & ~between, pushed, new_block_x)

        # The block follows the gripper, or falls.
        fallen = block_y + DT * block_vy - DT * DT * GRAVITY
        new_block_y = torch.where(new_held, block_y + (new_y - y), fallen).clamp_min(0.0)
        rests = ~new_held & (new_block_y <= 0.0)
        new_held_y = torch.where(new_held, new_block_y, held_y)
        off_table = ~new_held & (new_block_x.abs() > TABLE_EDGE)
        fail = off_table | (rests & (new_held_y > DROP_HEIGHT))
        new_held_y = new_held_y.masked_fill(rests, 0.0)

        place = torch.cat((new_x, new_y, new_block_x, new_block_y), 1)
        speed = (place - state[:, :4]) / DT
        successor = torch.cat((place, size, speed, new_gap, new_held, new_held_y), 1)
        metric = self._metrics(successor, fail)
        reward = metric["reach_reward"] + metric["grasp_reward"] + metric["lift_reward"]
        return Transition(successor, reward, fail, metric)

    def _metrics(self, state: Tensor, fail: Tensor) -> dict[str, Tensor]:
        x, y, block_x, block_y, size, _, _, _, _, gap, held, _ = state.chunk(len(COLUMNS), 1)
        away_x, away_y = (block_x - x).abs(), (block_y - y).abs()
        near = 1.0 - torch.tanh(REACH_SCALE * torch.hypot(away_x, away_y))
        room = gap - size
        around = (away_x < room + TOUCH) & (y < block_y + 2 * size)
        closing = 0.5 * around * (1.0 - room / (MAX_GAP - size))
        height = block_y * held
        return {
            "reach_reward": REACH_WEIGHT * torch.maximum(near, held),
            "grasp_reward": GRASP_WEIGHT * torch.maximum(closing, held),
            "lift_reward": (height * (LIFT_WEIGHT / self.target_height)).clamp_max(LIFT_WEIGHT),
            "success": (height >= self.target_height).float(),
            "fail": fail.float(),
        }

    def _observe(self, state: Tensor) -> Tensor:
        seen = torch.cat((state[:, :11], state[:, 2:4] - state[:, 0:2]), 1)
        return torch.addcmul(self._shift, seen, self._scale)

    def _render(self, canvas: Canvas, state: list[float]) -> None:
        x, y, block_x, block_y, size, _, _, _, _, gap, held, _ = state
        success = bool(held) and block_y >= self.target_height
        canvas.look_at((0.0, 0.22), 330.0)
        line_color = GREEN if success else MUTED
        canvas.dashes((-0.56, self.target_height), (0.56, self.target_height), line_color, 40)
        canvas.text((0.56, self.target_height + 0.028), "target", line_color, size=11, anchor="rm")
        canvas.box((-TABLE_EDGE, -0.03), (TABLE_EDGE, 0.0), WOOD, radius=0.006)
        for leg in (-0.42, 0.42):
            canvas.box((leg - 0.02, -0.3), (leg + 0.02, -0.03), WOOD)
        palm = y + FINGER_LENGTH
        canvas.box((x - 0.014, palm + 0.03), (x + 0.014, 0.8), LIGHT)
        block_color = GREEN if success else ORANGE
        canvas.box((block_x - size, block_y), (block_x + size, block_y + 2 * size), block_color, radius=0.006)
        canvas.box((x - MAX_GAP - 0.03, palm), (x + MAX_GAP + 0.03, palm + 0.04), STEEL, radius=0.01)
        for left in (x - gap - FINGER_WIDTH, x + gap):
            canvas.box((left, y), (left + FINGER_WIDTH, palm + 0.01), INK, radius=0.005)
