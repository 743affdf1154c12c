"""Drive at a commanded velocity with an unknown load, ground and motor: a task that rewards adapting to physics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from apexrl.core.errors import ConfigError
from apexrl.core.metrics import MetricSpec
from apexrl.core.types import CMD_KEY, OBJECT_KEY, OBS_KEY, OBS_PRIV_KEY
from apexrl.envs.options import check_change_step, check_known, is_number
from apexrl.envs.tasks.base import TensorTask, Transition
from apexrl.envs.tasks.canvas import BLUE, GREEN, GRID, INK, LIGHT, MUTED, ORANGE, STEEL, Canvas, Color, Point

# SI units.
DT: Final = 0.05
BODY_MASS: Final = 2.0
FORCE: Final = 30.0
"""Of the motor at action 1 and gain 1."""
START_SPEED: Final = 0.5
"""Standard deviation of each component of the first velocity."""
OBSERVATION_NOISE: Final = 0.02
"""Standard deviation of the noise on each observed velocity."""
NUM_FRAMES: Final = 24
FRAME_PARTS: Final = {"velocity, m/s": 2, "last action": 2}
"""What a frame holds, in this order, and how many numbers each takes."""
FRAME: Final = sum(FRAME_PARTS.values())
COMMAND_PERIOD: Final = 25
"""Steps between new commands."""
ERROR_SCALE: Final = 0.15
"""Velocity error that halves the tracking reward."""
SMOOTHNESS_WEIGHT: Final = 0.02

PARAMETERS: Final = ("mass", "friction", "drag", "gain", "latency")
"""The physics of an episode: kg with the object, m/s², N·s/m, 1, steps."""
RANGES: Final = {
    "size": (0.5, 1.5),
    "log_density": (math.log(0.25), math.log(1.8)),
    "friction": (0.0, 0.4),
    "drag": (0.5, 6.0),
    "log_gain": (math.log(0.3), math.log(2.0)),
    "latency": (0.0, 3.0),  # rounded down
    "command_x": (-1.0, 1.0),
    "command_y": (-1.0, 1.0),
    "phase": (0.0, COMMAND_PERIOD),  # rounded down
}
"""What is sampled uniformly; the object weighs density · size²."""
MASS_RANGE: Final = (BODY_MASS + 0.25 * 0.5**2, BODY_MASS + 1.8 * 1.5**2)
PRIV_LOW: Final = (math.log(MASS_RANGE[0]), 0.0, 0.5, math.log(0.3), 0.0)
PRIV_HIGH: Final = (math.log(MASS_RANGE[1]), 0.4, 6.0, math.log(2.0), 2.0)
"""The ranges of log mass, friction, drag, log gain and latency, which ``priv`` maps to [-1, 1]."""

FRAME_SECTIONS: Final = {
    "position": 2,  # nothing depends on it; the image shows it
    "velocity": 2,
    "command": 2,
    "size": 1,
    "physics": len(PARAMETERS),
    "clock": 1,  # steps since the start
    "phase": 1,  # of the commands, in steps
    "frames": NUM_FRAMES * FRAME,  # the newest last
}
"""The parts of the state and their numbers of columns."""
SECTION_SIZES: Final = list(FRAME_SECTIONS.values())


class Payload(TensorTask):
    """Follow a commanded velocity while mass, friction, motor gain and latency are unknown.

    A wheeled body of 2 kg carries an object over a plane. Every episode samples, with u uniform and log u
    log-uniform: size s = u(0.5, 1.5), density ρ = log u(0.25, 1.8), mass m = 2 + ρ s², friction μ = u(0, 0.4),
    drag c = u(0.5, 6), gain g = log u(0.3, 2), latency L of 0, 1 or 2 steps, and a velocity of 0.5 N(0, I).
    Actions in [-1, 1]² are forces along x and y. One step of dt = 0.05 s:

    v ← (v + dt 30 g a_{t-L} / m) / (1 + dt c / m), then v ← v max(0, 1 - dt μ / |v|)

    reward = 1 / (1 + |v - command|² / 0.15²) - 0.02 |a_t - a_{t-1}|²

    The command is uniform in [-1, 1]² and new every 25 steps, from a random phase. Episodes end by the time limit only.

    Observation groups:
    ``policy`` ``[N, 96]``: 24 frames, the newest last, of velocity with noise of 0.02 (2) and last action (2);
    frames from before the episode are zeros.
    ``command`` ``[N, 2]``. ``object`` ``[N, 1]``: s - 1.
    ``priv`` ``[N, 5]``: log m, μ, c, log g and L, each scaled to [-1, 1].

    Args:
        max_episode_steps: steps until the episode is truncated.
        change_step: steps of an episode after which its physics change; 0 for never.
        change: which parameter is then sampled again: ``mass`` (the size stays), ``friction``, ``drag``, ``gain``,
            ``latency`` or ``all``.
        fixed: parameters that are not sampled but always have the value given here, also outside of the ranges.
        change_to: values that changed parameters take instead of sampled ones.
    """

    history: ClassVar[int] = NUM_FRAMES
    """Frames that the group ``policy`` stacks."""
    frame_parts: ClassVar[Mapping[str, int]] = FRAME_PARTS
    """What a frame holds, and how many numbers each part takes."""
    state_size = sum(FRAME_SECTIONS.values())
    dt = DT
    metrics = (
        MetricSpec("tracking_reward"),
        MetricSpec("smoothness_reward"),
        MetricSpec("tracking_error", reduce="mean", group="task"),
    )

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        max_episode_steps: int = 200,
        change_step: int = 0,
        change: str = "all",
        fixed: Mapping[str, float] | None = None,
        change_to: Mapping[str, float] | None = None,
    ) -> None:
        self.max_episode_steps = max_episode_steps
        self.change_step = change_step
        groups: dict[str, gym.Space[Any]] = {
            OBS_KEY: gym.spaces.Box(-np.inf, np.inf, (NUM_FRAMES * FRAME,)),
            CMD_KEY: gym.spaces.Box(-1.0, 1.0, (2,)),
            OBJECT_KEY: gym.spaces.Box(-0.5, 0.5, (1,)),
            OBS_PRIV_KEY: gym.spaces.Box(-np.inf, np.inf, (len(PARAMETERS),)),
        }
        self.observation_space = gym.spaces.Dict(groups)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,))
        options = {"change_step": change_step, "change": change, "fixed": fixed, "change_to": change_to}
        super().__init__(num_envs, device, max_episode_steps=max_episode_steps, **options)
        given, given_at_change = _given_values("fixed", fixed), _given_values("change_to", change_to)
        check_change_step("Payload", change_step, max_episode_steps)
        _check_change(change, change_step, given_at_change)
        # NaN where a value is sampled.
        self._given, self._given_later = (
            torch.tensor([values.get(name, math.nan) for name in PARAMETERS], device=self.device)
            for values in (given, given | given_at_change)
        )
        self._changes = torch.tensor([change in (name, "all") for name in PARAMETERS], device=self.device)
        low, high = torch.tensor(list(RANGES.values()), device=self.device).unbind(1)
        self._low, self._span = low, high - low
        priv_low, priv_high = (torch.tensor(bounds, device=self.device) for bounds in (PRIV_LOW, PRIV_HIGH))
        self._priv_middle, self._priv_half = (priv_high + priv_low) / 2, (priv_high - priv_low) / 2

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The true physics of the running episodes by name, ``[N, 1]`` each: what no observation but ``priv`` tells."""
        physics = self.state.clone().split(SECTION_SIZES, 1)[list(FRAME_SECTIONS).index("physics")]
        return dict(zip(PARAMETERS, physics.split(1, 1), strict=True))

    def _draw(self) -> Tensor:
        size, physics, command, phase = self._draw_uniform().split((1, 5, 2, 1), 1)
        physics = self._physics(size, physics, self._given)
        velocity, noise = self._draw_normal(4).chunk(2, 1)
        velocity = START_SPEED * velocity
        still = torch.zeros_like(velocity)
        past = velocity.new_zeros(self.num_envs, (NUM_FRAMES - 1) * FRAME)
        parts = (still, velocity, command, size, physics, still[:, :1], phase.floor())
        return torch.cat((*parts, past, velocity + OBSERVATION_NOISE * noise, still), 1)

    def _draw_noise(self) -> tuple[Tensor, Tensor]:
        # Always all of it, so that episodes with and without a change differ in nothing else.
        return self._draw_uniform(), self._draw_normal(2)

    def _draw_uniform(self) -> Tensor:
        """Draw one number from each of ``RANGES``, ``[N, 9]``."""
        uniform = torch.rand(self.num_envs, len(RANGES), generator=self.generator, device=self.device)
        return torch.addcmul(self._low, self._span, uniform)

    def _draw_normal(self, num: int) -> Tensor:
        return torch.randn(self.num_envs, num, generator=self.generator, device=self.device)

    @staticmethod
    def _physics(size: Tensor, drawn: Tensor, given: Tensor) -> Tensor:
        """Return ``PARAMETERS`` ``[N, 5]`` from what was drawn, or as ``given [5]`` where that is not NaN."""
        log_density, friction, drag, log_gain, latency = drawn.chunk(5, 1)
        mass = BODY_MASS + log_density.exp() * size.square()
        physics = torch.cat((mass, friction, drag, log_gain.exp(), latency.floor()), 1)
        return torch.where(given.isnan(), physics, given)

    def _advance(self, state: Tensor, action: Tensor, uniform: Tensor, normal: Tensor) -> Transition:
        position, velocity, command, size, physics, clock, phase, frames = state.split(SECTION_SIZES, 1)
        mass, friction, drag, gain, latency = physics.chunk(len(PARAMETERS), 1)
        action = action.clamp(-1.0, 1.0)
        last_action, action_before = frames[:, -2:], frames[:, -FRAME - 2 : -FRAME]

        acting = torch.where(latency == 0, action, torch.where(latency == 1, last_action, action_before))
        velocity = (velocity + DT * FORCE * gain * acting / mass) / (1.0 + DT * drag / mass)
        speed = velocity.norm(dim=1, keepdim=True)
        # Friction stops the body at most.
        velocity = velocity * ((speed - DT * friction).clamp_min(0.0) / speed.clamp_min(1e-9))

        error = (velocity - command).norm(dim=1, keepdim=True)
        tracking = 1.0 / (1.0 + (error / ERROR_SCALE).square())
        smoothness = -SMOOTHNESS_WEIGHT * (action - last_action).square().sum(1, keepdim=True)
        metric = {"tracking_reward": tracking, "smoothness_reward": smoothness, "tracking_error": error}

        clock = clock + 1.0
        _, new_physics, new_command, _ = uniform.split((1, 5, 2, 1), 1)
        command = torch.where(torch.remainder(clock + phase, COMMAND_PERIOD) == 0, new_command, command)
        if self.change_step:
            changes = (clock == self.change_step) & self._changes
            physics = torch.where(changes, self._physics(size, new_physics, self._given_later), physics)
        frame = torch.cat((velocity + OBSERVATION_NOISE * normal, action), 1)
        parts = (position + DT * velocity, velocity, command, size, physics, clock, phase, frames[:, FRAME:], frame)
        never = torch.zeros_like(clock, dtype=torch.bool)
        return Transition(torch.cat(parts, 1), tracking + smoothness, never, metric)

    def _observe(self, state: Tensor) -> dict[str, Tensor]:
        _, _, command, size, physics, _, _, frames = state.split(SECTION_SIZES, 1)
        mass, friction, drag, gain, latency = physics.chunk(len(PARAMETERS), 1)
        priv = torch.cat((mass.log(), friction, drag, gain.log(), latency), 1)
        return {
            OBS_KEY: frames,
            CMD_KEY: command,
            OBJECT_KEY: size - 1.0,
            OBS_PRIV_KEY: (priv - self._priv_middle) / self._priv_half,
        }

    def _render(self, canvas: Canvas, state: list[float]) -> None:
        x, y, vx, vy, command_x, command_y, size, *rest = state
        physics = rest[: len(PARAMETERS)]
        canvas.look_at((0.45, 0.0), 110.0)
        # The ground moves past the body, which stays in the middle.
        for i in range(-4, 5):
            line_x, line_y = 0.5 * i - x % 0.5, 0.5 * i - y % 0.5
            canvas.line([(line_x, -1.5), (line_x, 1.5)], GRID, 1.0)
            canvas.line([(-1.5, line_y), (2.5, line_y)], GRID, 1.0)
        for corner_x, corner_y in ((-0.2, -0.24), (0.2, -0.24), (-0.2, 0.24), (0.2, 0.24)):
            canvas.box((corner_x - 0.08, corner_y - 0.05), (corner_x + 0.08, corner_y + 0.05), INK, radius=0.02)
        canvas.box((-0.3, -0.22), (0.3, 0.22), STEEL, radius=0.05)
        half = 0.13 * size
        canvas.box((-half, -half), (half, half), ORANGE, radius=0.02)
        reached = math.hypot(vx - command_x, vy - command_y) < ERROR_SCALE
        _arrow(canvas, (command_x, command_y), LIGHT, 0.045)
        _arrow(canvas, (vx, vy), GREEN if reached else BLUE, 0.02)
        canvas.text((-1.3, -1.2), "commanded", MUTED, size=11, anchor="lm")
        canvas.text((-0.55, -1.2), "velocity", GREEN if reached else BLUE, size=11, anchor="lm")

        canvas.box((1.27, -1.5), (3.0, 1.5), (255, 255, 255))
        bounds = zip((MASS_RANGE[0], *PRIV_LOW[1:3], 0.3, 0.0), (MASS_RANGE[1], *PRIV_HIGH[1:3], 2.0, 2.0), strict=True)
        units = ("kg", "m/s/s", "N s/m", "", "steps")
        for row, (name, value, unit, (low, high)) in enumerate(zip(PARAMETERS, physics, units, bounds, strict=True)):
            top = 0.95 - 0.45 * row
            canvas.text((1.35, top), f"{name}  {value:.3g} {unit}", INK, size=11, anchor="lm")
            canvas.box((1.35, top - 0.19), (2.15, top - 0.13), GRID)
            share = min(max((value - low) / (high - low), 0.02), 1.0)
            canvas.box((1.35, top - 0.19), (1.35 + 0.8 * share, top - 0.13), STEEL)


def _arrow(canvas: Canvas, tip: Point, color: Color, radius: float) -> None:
    """Draw an arrow from the middle, with a head of two strokes."""
    canvas.rod((0.0, 0.0), tip, radius, color)
    angle = math.atan2(tip[1], tip[0])
    for side in (-2.6, 2.6):
        barb = (tip[0] + 0.14 * math.cos(angle + side), tip[1] + 0.14 * math.sin(angle + side))
        canvas.rod(tip, barb, radius, color)


def _check_change(change: Any, change_step: int, change_to: Mapping[str, float]) -> None:
    if change not in (*PARAMETERS, "all"):
        raise ConfigError(f"Payload.change must be one of {', '.join(PARAMETERS)} or all, got {change!r}.")
    if change_to and not change_step:
        raise ConfigError("Payload.change_to needs Payload.change_step above 0, the step at which the physics change.")
    if change != "all" and (unchanged := [name for name in change_to if name != change]):
        raise ConfigError(f"Payload.change_to names {unchanged}, but Payload.change has only {change} change.")


def _given_values(option: str, values: Any) -> dict[str, float]:
    """Check the values that the user gives to parameters."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"Payload.{option} must map parameters to values, such as {{gain: 0.5}}, got {values!r}.")
    rest = f" Parameters are {', '.join(PARAMETERS)}."
    check_known(f"Payload.{option} has no", map(str, values), PARAMETERS, rest, ConfigError)
    rules = {"mass": "above 0", "gain": "above 0", "latency": "of 0, 1 or 2 steps"}
    for name, value in values.items():
        fits = is_number(value) and value >= 0 and (value > 0 or name not in ("mass", "gain"))
        if not fits or (name == "latency" and value not in (0, 1, 2)):
            rule = rules.get(name, "of at least 0")
            raise ConfigError(f"Payload.{option}.{name} must be a finite number {rule}, got {value!r}.")
    return {name: float(value) for name, value in values.items()}
