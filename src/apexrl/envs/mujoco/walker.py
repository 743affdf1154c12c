"""A biped that walks at a commanded speed (for ``MujocoVecEnv``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from apexrl.core.errors import ConfigError
from apexrl.core.metrics import MetricSpec
from apexrl.envs.mujoco.tasks import (
    WALK,
    Fields,
    MujocoTask,
    NumpyArray,
    Outcome,
    Parts,
    asset_path,
    for_one_robot,
    reward_metrics,
)
from apexrl.envs.options import check_count, is_number

POSE: Final = (0.3, -0.6, 0.3)
"""Hip, knee and ankle of a leg that is a little bent, with its foot flat, rad."""
TORSO_HEIGHT: Final = 1.17
"""Of the torso when it stands in this pose, m."""
REACH: Final = 1.0
"""How far from the pose an action of 1 aims, rad."""
STIFFNESS, DAMPING, TORQUE = 120.0, 1.5, 100.0
"""Of the servos: N·m/rad, N·m·s/rad, and the largest torque, N·m."""
TRACKING_ERROR: Final = MetricSpec("tracking_error", reduce="mean", group="task")
"""m/s, the mean over an episode."""
FEET: Final = (4, 7)
"""Geoms of the right and the left foot."""
STANDING: Final = 0.055
"""Height of the middle of a foot on the ground, m."""


class Motion(NamedTuple):
    """What N Walkers did in a step."""

    speed: NumpyArray
    """Mean speed of the torso, m/s."""
    error: NumpyArray
    """How far that is from the command, m/s."""
    tracking: NumpyArray
    """From 0 for one that stands still to 1 for the commanded speed."""
    fell: NumpyArray
    """Bool."""


@dataclass(frozen=True, kw_only=True)
class CommandedWalker(MujocoTask):
    """Base of tasks in which Gymnasium's Walker2d has servos and is to walk at a commanded speed.

    Its hips swing both ways, by 90 degrees. Servos with little damping turn its joints from angles q to a pose with
    bent knees plus the action a in [-1, 1]⁶, with a torque of

    120 (pose + a - q) - 1.5 q̇ N·m, at most 100

    The command is uniform in [0.5, 1.5] m/s and new every 125 steps of 0.02 s, from a random phase. An episode ends
    like Gymnasium's, with the torso not between 0.8 and 2 m high or tilted by more than 1 rad. The simulation has steps
    of 4 ms and Euler's integrator.
    """

    data_fields: ClassVar[tuple[str, ...]] = ("qpos", "qvel", "userdata")

    command_range: tuple[float, float] = (0.5, 1.5)
    """Speeds that are commanded, m/s."""
    command_period: int = 125
    """Steps between new commands."""
    control_cost_weight: float = 0.01
    """Cost of squared actions."""
    reset_noise_scale: float = 0.02
    """Spread of the first positions and velocities."""

    def __post_init__(self) -> None:
        for name in ("command_period", "frame_skip"):
            check_count(f"{type(self).__name__}.{name}", getattr(self, name))
        for name in ("control_cost_weight", "reset_noise_scale"):
            if not is_number(value := getattr(self, name)) or value < 0:
                raise ConfigError(f"{type(self).__name__}.{name} must be a finite number of at least 0, got {value!r}.")
        self._check_range("command_range")

    def _check_range(self, name: str, *, positive: bool = True) -> None:
        where, value = f"{type(self).__name__}.{name}", getattr(self, name)
        if not isinstance(value, Sequence) or len(value) != 2 or not all(map(is_number, value)):
            raise ConfigError(f"{where} must be two finite numbers, got {value!r}.")
        if value[0] > value[1] or (value[0] <= 0 and positive):
            rule = "both above 0, the smaller first" if positive else "the smaller first"
            raise ConfigError(f"{where} must have {rule}, got {value!r}.")

    def _spec(self, num_remembered: int) -> Any:
        """Return the robot, to be compiled, with memory for a command, a countdown and more numbers."""
        import mujoco

        spec = mujoco.MjSpec.from_file(asset_path("walker2d_v5.xml"))
        spec.nuserdata = 2 + num_remembered
        spec.option.integrator = mujoco.mjtIntegrator.mjINT_EULER
        spec.option.timestep = 0.004
        for side in ("", "_left"):
            spec.joint(f"thigh{side}_joint").range = (-90.0, 90.0)
        for motor, angle in zip(spec.actuators, POSE * 2, strict=True):
            motor.gear[0] = 1.0
            motor.gainprm[0] = STIFFNESS * REACH
            motor.biastype = mujoco.mjtBias.mjBIAS_AFFINE
            motor.biasprm[:3] = STIFFNESS * angle, -STIFFNESS, -DAMPING
            motor.forcelimited = True
            motor.forcerange = (-TORQUE, TORQUE)
        return spec

    def begin(self, model: Any, data: Any, rng: np.random.Generator) -> None:
        """Sample a first state around the standing pose, a command and when the next one comes."""
        noise = self.reset_noise_scale
        data.qpos[:] = rng.uniform(-noise, noise, model.nq)
        data.qpos[1:] += (TORSO_HEIGHT, 0.0, *POSE, *POSE)
        data.qvel[:] = rng.uniform(-noise, noise, model.nv)
        data.userdata[0] = rng.uniform(*self.command_range)
        data.userdata[1] = rng.integers(1, self.command_period, endpoint=True)

    def remember(self, fields: Fields, action: NumpyArray, generators: Sequence[np.random.Generator]) -> NumpyArray:
        """Return commands, steps until the next ones, and the rest as it was."""
        memory: NumpyArray = fields["userdata"].copy()
        memory[:, 1] -= 1
        for i in np.flatnonzero(memory[:, 1] <= 0).tolist():
            memory[i, :2] = generators[i].uniform(*self.command_range), self.command_period
        return memory

    def _motion(self, before: Fields, after: Fields, dt: NumpyArray) -> Motion:
        qpos, command = after["qpos"], after["userdata"][:, 0]
        speed = (qpos[:, 0] - before["qpos"][:, 0]) / dt
        error = np.abs(speed - command)
        stands = (qpos[:, 1] > 0.8) & (qpos[:, 1] < 2.0) & (np.abs(qpos[:, 2]) < 1.0)
        stands &= np.isfinite(qpos).all(1) & np.isfinite(after["qvel"]).all(1)
        return Motion(speed, error, np.maximum(1.0 - error / command, 0.0), ~stands)

    def _control_reward(self, action: NumpyArray) -> Any:
        return -self.control_cost_weight * np.square(action).sum(1)


@dataclass(frozen=True, kw_only=True)
class Walker(CommandedWalker):
    """Walk at a commanded speed (a planar biped), upright and with a regular gait.

    A clock φ, which turns once in ``stride_steps``, says when each foot is in the air: its middle should be h above
    where it stands, with h = 0.1 max(0, sin φ) m for the right foot and 0.1 max(0, -sin φ) m for the left. With v the
    mean speed of the torso over a step, θ its pitch and z the heights of the feet:

    reward = 0.5 max(0, 1 - |v - command| / command) + 0.3 exp(-Σ (z - h)² / 0.05²) + 0.2 exp(-(θ / 0.2)²) - 0.01 |a|²

    The observation ``[N, 20]`` has positions without x, velocities within ±10, command, sin φ and cos φ.
    """

    data_fields = (*CommandedWalker.data_fields, "geom_xpos")
    metrics = (
        *reward_metrics("tracking_reward", "gait_reward", "upright_reward", "control_reward"),
        replace(TRACKING_ERROR, at_most=0.25),  # a robot that stands still does not fall either
        *WALK,
    )

    stride_steps: int = 40
    """Steps of the simulation in which each foot takes one step."""
    foot_lift: float = 0.1
    """How far a foot is lifted, m."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("Walker.stride_steps", self.stride_steps)
        if not is_number(self.foot_lift) or self.foot_lift < 0:
            raise ConfigError(f"Walker.foot_lift must be a finite number of at least 0, got {self.foot_lift!r}.")

    def load(self) -> Any:
        """Return the robot with memory for the clock."""
        return for_one_robot(self._spec(1).compile())

    def begin(self, model: Any, data: Any, rng: np.random.Generator) -> None:
        """Sample a first state, a command and the phase of the clock."""
        super().begin(model, data, rng)
        data.userdata[2] = rng.uniform(0.0, 2.0 * math.pi)

    def remember(self, fields: Fields, action: NumpyArray, generators: Sequence[np.random.Generator]) -> NumpyArray:
        """Return commands, steps until the next ones, and phases."""
        memory = super().remember(fields, action, generators)
        memory[:, 2] += 2.0 * math.pi / self.stride_steps
        return memory

    def observe(self, fields: Fields) -> Parts:
        """Positions without x, velocities within ±10, the command and the clock."""
        command, phase = fields["userdata"][:, :1], fields["userdata"][:, 2:]
        return fields["qpos"][:, 1:], fields["qvel"].clip(-10, 10), command, np.sin(phase), np.cos(phase)

    def outcome(self, before: Fields, after: Fields, action: NumpyArray, dt: NumpyArray) -> Outcome:
        """Reward for the commanded speed, for feet that follow the clock and for an upright torso."""
        motion, swing = self._motion(before, after, dt), np.sin(after["userdata"][:, 2:])
        height = STANDING + self.foot_lift * np.maximum(np.concatenate((swing, -swing), 1), 0.0)
        miss = np.square(after["geom_xpos"][:, FEET, 2] - height).sum(1)
        rewards = {
            "tracking_reward": 0.5 * motion.tracking,
            "gait_reward": 0.3 * np.exp(-miss / 0.05**2),
            "upright_reward": 0.2 * np.exp(-np.square(after["qpos"][:, 2] / 0.2)),
            "control_reward": self._control_reward(action),
        }
        metric = {"tracking_error": motion.error, "forward_speed": motion.speed, "fail": motion.fell}
        return Outcome(np.sum(list(rewards.values()), 0), motion.fell, {**rewards, **metric})
