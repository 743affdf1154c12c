"""An Ant that walks at a commanded velocity with an unknown load, ground, body and motors (for ``MujocoVecEnv``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from apexrl.envs.mujoco_tasks import Array, Fields, MujocoTask, Outcome, Parts, asset_path, for_one_robot
from apexrl.errors import ConfigError
from apexrl.metrics import MetricSpec
from apexrl.types import CMD_KEY, OBJECT_KEY, OBS_KEY, OBS_PRIV_KEY

TORSO, PAYLOAD = 1, 14
"""Bodies."""
FLOOR_GEOM, PAYLOAD_GEOM = 0, 14
PAYLOAD_HEIGHT: Final = 0.2
"""Of the object's middle above that of the torso, m."""
FRAME: Final = 30
"""Numbers of a frame."""
RANGES: Final = {
    "mass": (0.7, 1.5),
    "friction": (0.4, 1.2),
    "strength": (0.5, 1.3),
    "size": (0.08, 0.16),
    "density": (25.0, 150.0),
    "offset": (-0.1, 0.1),
}
"""What physics are drawn from unless told, and what the observations map to [-1, 1], whatever they are drawn from."""
LOG_PAYLOAD_RANGE: Final = (math.log(25.0 * 0.16**3), math.log(150.0 * 0.32**3))
"""The range of the object's log mass that follows from these."""


class AntPhysics(NamedTuple):
    """What differs from episode to episode."""

    mass: float
    """Of each part of the robot, in terms of Gymnasium's Ant."""
    friction: float
    """Between feet and ground."""
    strength: float
    """Of the motors, in terms of Gymnasium's Ant."""
    size: float
    """Half the edge of the object, a cube, m."""
    payload: float
    """Mass of the object, kg; the whole Ant of Gymnasium has 0.88 kg."""
    offset: tuple[float, float]
    """Of the object from the middle of the torso, forward and to the left, m."""


@dataclass(frozen=True, kw_only=True)
class AntPayload(MujocoTask):
    """Walk at a commanded velocity (an Ant) with an unknown load, ground, body and motors.

    Gymnasium's Ant carries a cube on its torso. Every episode draws anew (u uniform, log u log-uniform): the scale of
    its masses u(0.7, 1.5), friction u(0.4, 1.2), the scale of its motors u(0.5, 1.3), half the cube's edge
    h = u(0.08, 0.16) m, its density log u(25, 150) kg/m³, that is 0.1 to 4.9 kg, and its place u(-0.1, 0.1)² m.
    With v the torso's mean horizontal velocity over the step of 0.05 s, in the direction that it faces, and g the
    direction of gravity as the torso feels it:

    reward = 1 / (1 + |v - command|² / 0.4²) - 0.1 g_z - 0.01 |a|²

    The command is uniform in [-1, 1]² m/s and new every 125 steps, from a random phase. An episode ends like
    Gymnasium's, with the torso below 0.2 m or above 1 m, and also when it lies on its back, from where no Ant gets up.
    The simulation is Gymnasium's but for the integrator (implicitfast), which is 3.6 times as fast as Runge-Kutta.

    Observation groups:
    ``policy`` ``[N, 30 · history]``: frames, the newest last, of joint angles (8), joint velocities (8), g (3), angular
    velocity of the torso (3) and last action (8); frames from before the episode are zeros.
    ``command`` ``[N, 2]``: forward and to the left. ``object`` ``[N, 3]``: h and the place of the cube.
    ``priv`` ``[N, 7]``: scale of masses, friction, scale of motors, log mass of the cube; velocity of the torso in its
    own frame (3), m/s. All but velocities are scaled to [-1, 1] over the ranges above.
    """

    data_fields = ("qpos", "qvel", "userdata")
    model_fields = ("body_mass", "body_pos", "geom_friction", "geom_size", "actuator_gear")
    terms = ("tracking_reward", "upright_reward", "control_reward", "tracking_error")
    changes_model = True
    episode_steps = 500

    history: int = 10
    """Frames that the group ``policy`` stacks."""
    command_speed: float = 1.0
    """The most that is commanded along each axis, m/s."""
    command_period: int = 125
    """Steps between new commands."""
    error_scale: float = 0.4
    """Velocity error that halves the tracking reward, m/s."""
    upright_weight: float = 0.1
    """Reward for a level torso."""
    control_cost_weight: float = 0.01
    """Cost of squared actions."""
    mass_range: tuple[float, float] = RANGES["mass"]
    friction_range: tuple[float, float] = RANGES["friction"]
    strength_range: tuple[float, float] = RANGES["strength"]
    size_range: tuple[float, float] = RANGES["size"]
    density_range: tuple[float, float] = RANGES["density"]
    """Of the cube, kg/m³."""
    offset_range: tuple[float, float] = RANGES["offset"]
    """Of the cube along each axis, m."""
    reset_noise_scale: float = 0.1
    """Spread of the first positions and velocities."""

    def __post_init__(self) -> None:
        for name in ("history", "command_period", "frame_skip"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"AntPayload.{name} must be a whole number of at least 1, got {value!r}.")
        for name in ("command_speed", "upright_weight", "control_cost_weight", "reset_noise_scale"):
            if not _is_number(value := getattr(self, name)) or value < 0:
                raise ConfigError(f"AntPayload.{name} must be a finite number of at least 0, got {value!r}.")
        if not _is_number(self.error_scale) or self.error_scale <= 0:
            raise ConfigError(f"AntPayload.error_scale must be a finite number above 0, got {self.error_scale!r}.")
        for name in RANGES:
            _check_range(f"{name}_range", getattr(self, f"{name}_range"), positive=name != "offset")

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        """The parts of the reward, and the velocity error in m/s."""
        return (*super().metrics[:-1], MetricSpec("tracking_error", reduce="mean", group="task"))

    def load(self) -> Any:
        """Return Gymnasium's Ant with a cube on its torso."""
        import mujoco

        spec = mujoco.MjSpec.from_file(asset_path("ant.xml"))
        spec.nuserdata = 3 + self.history * FRAME
        spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
        body = spec.body("torso").add_body(name="payload", pos=[0.0, 0.0, PAYLOAD_HEIGHT])
        cube = {"type": mujoco.mjtGeom.mjGEOM_BOX, "size": [0.12] * 3, "mass": 1.0, "rgba": [0.9, 0.5, 0.1, 1.0]}
        # It touches nothing, so that its size is all but a hint at its mass.
        body.add_geom(name="payload", contype=0, conaffinity=0, **cube)
        return for_one_robot(spec.compile())

    @functools.cached_property
    def _nominal(self) -> Any:
        return self.load()

    def draw_physics(self, rng: np.random.Generator) -> AntPhysics:
        """Draw what differs from episode to episode."""
        mass, friction, strength, size = (
            rng.uniform(*bounds)
            for bounds in (self.mass_range, self.friction_range, self.strength_range, self.size_range)
        )
        density = math.exp(rng.uniform(*np.log(self.density_range)))
        x, y = rng.uniform(*self.offset_range, size=2)
        return AntPhysics(mass, friction, strength, size, density * (2 * size) ** 3, (x, y))

    def set_physics(self, model: Any, physics: AntPhysics, scratch: Any) -> None:
        """Change a model, within an episode too: the observations follow it.

        Args:
            model: the ``MjModel``.
            physics: its new properties.
            scratch: an ``MjData`` of the model, whose content is lost.
        """
        import mujoco

        usual = self._nominal
        model.body_mass[TORSO:PAYLOAD] = physics.mass * usual.body_mass[TORSO:PAYLOAD]
        model.body_inertia[TORSO:PAYLOAD] = physics.mass * usual.body_inertia[TORSO:PAYLOAD]
        # Two geoms in contact have the greater of their frictions, so that of the ground alone would change nothing.
        model.geom_friction[:, 0] = physics.friction
        model.actuator_gear[:] = physics.strength * usual.actuator_gear
        model.body_mass[PAYLOAD] = physics.payload
        model.body_inertia[PAYLOAD] = physics.payload * (2 * physics.size) ** 2 / 6
        model.body_pos[PAYLOAD, :2] = physics.offset
        model.geom_size[PAYLOAD_GEOM] = physics.size
        mujoco.mj_setConst(model, scratch)

    def begin(self, model: Any, data: Any, rng: np.random.Generator) -> None:
        """Draw physics, a first state like that of Gymnasium's Ant, a command and when the next one comes."""
        import mujoco

        self.set_physics(model, self.draw_physics(rng), scratch=data)
        mujoco.mj_resetData(model, data)
        noise = self.reset_noise_scale
        data.qpos[:] = model.qpos0 + rng.uniform(-noise, noise, model.nq)
        data.qpos[3:7] /= np.linalg.norm(data.qpos[3:7])
        data.qvel[:] = noise * rng.standard_normal(model.nv)
        data.userdata[:2] = self._draw_command(rng)
        data.userdata[2] = rng.integers(1, self.command_period, endpoint=True)
        data.userdata[-FRAME:] = _frame(data.qpos[None], data.qvel[None], np.zeros((1, model.nu)))[0]

    def _draw_command(self, rng: np.random.Generator) -> Array:
        return rng.uniform(-self.command_speed, self.command_speed, size=2)

    def remember(self, fields: Fields, action: Array, generators: Sequence[np.random.Generator]) -> Array:
        """Return commands, steps until the next ones, and the frames with the newest."""
        memory = fields["userdata"]
        command, steps_left, frames = memory[:, :2].copy(), memory[:, 2:3] - 1, memory[:, 3:]
        for i in np.flatnonzero(steps_left <= 0).tolist():
            command[i], steps_left[i] = self._draw_command(generators[i]), self.command_period
        frame = _frame(fields["qpos"], fields["qvel"], action)
        return np.concatenate((command, steps_left, frames[:, FRAME:], frame), 1)

    def observe(self, fields: Fields) -> Parts:
        """Return the four groups."""
        body_mass, usual = fields["body_mass"], self._nominal
        # Before the first reset there is no mass.
        payload = np.log(np.maximum(body_mass[:, PAYLOAD], 1e-3))
        priv = (
            _scaled(body_mass[:, TORSO] / usual.body_mass[TORSO], *RANGES["mass"]),
            _scaled(fields["geom_friction"][:, FLOOR_GEOM, 0], *RANGES["friction"]),
            _scaled(fields["actuator_gear"][:, 0, 0] / usual.actuator_gear[0, 0], *RANGES["strength"]),
            _scaled(payload, *LOG_PAYLOAD_RANGE),
        )
        size = _scaled(fields["geom_size"][:, PAYLOAD_GEOM, :1], *RANGES["size"])
        place = _scaled(fields["body_pos"][:, PAYLOAD, :2], *RANGES["offset"])
        velocity = np.einsum("nij,ni->nj", _rotation(fields["qpos"]), fields["qvel"][:, :3])
        return {
            OBS_KEY: [fields["userdata"][:, 3:]],
            CMD_KEY: [fields["userdata"][:, :2]],
            OBJECT_KEY: [size, place],
            OBS_PRIV_KEY: [np.stack(priv, 1), velocity],
        }

    def outcome(self, before: Fields, after: Fields, action: Array, dt: Array) -> Outcome:
        """Reward for tracking and for a level torso, less the cost of control; it ends where the Ant falls."""
        qpos = after["qpos"]
        rotation = _rotation(qpos)
        upright, height = rotation[:, 2, 2], qpos[:, 2]
        velocity = _facing(rotation, (qpos[:, :2] - before["qpos"][:, :2]) / dt[:, None])
        error = np.linalg.norm(velocity - after["userdata"][:, :2], axis=1)
        terms = {
            "tracking_reward": 1.0 / (1.0 + np.square(error / self.error_scale)),
            "upright_reward": self.upright_weight * upright,
            "control_reward": -self.control_cost_weight * np.square(action).sum(1),
            "tracking_error": error,
        }
        reward = terms["tracking_reward"] + terms["upright_reward"] + terms["control_reward"]
        stands = (height >= 0.2) & (height <= 1.0) & (upright > 0.0)
        stands &= np.isfinite(qpos).all(1) & np.isfinite(after["qvel"]).all(1)
        return Outcome(reward, ~stands, terms)


def _rotation(qpos: Array) -> Array:
    """Return the torso's rotations ``[N, 3, 3]``, of which the columns are its axes in the world."""
    w, x, y, z = qpos[:, 3:7].T
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return np.stack([np.stack(row, 1) for row in rows], 1)


def _facing(rotation: Array, velocity: Array) -> Array:
    """Turn horizontal velocities ``[N, 2]`` from the world's axes to where the torso faces and to its left."""
    yaw = np.arctan2(rotation[:, 1, 0], rotation[:, 0, 0])
    cos, sin, (x, y) = np.cos(yaw), np.sin(yaw), velocity.T
    return np.stack((cos * x + sin * y, cos * y - sin * x), 1)


def _frame(qpos: Array, qvel: Array, action: Array) -> Array:
    """Joint angles, joint velocities, direction of gravity and angular velocity, both in the torso's frame, action."""
    return np.concatenate((qpos[:, 7:], qvel[:, 6:], -_rotation(qpos)[:, 2], qvel[:, 3:6], action), 1)


def _scaled(value: Array, low: float, high: float) -> Array:
    """Map [low, high] to [-1, 1]."""
    scaled: Array = (2 * value - low - high) / (high - low)
    return scaled


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_range(name: str, value: Any, positive: bool) -> None:
    if not isinstance(value, Sequence) or len(value) != 2 or not all(map(_is_number, value)) or value[0] > value[1]:
        raise ConfigError(f"AntPayload.{name} must be two finite numbers, the smaller first, got {value!r}.")
    if positive and value[0] <= 0:
        raise ConfigError(f"AntPayload.{name} must be above 0, got {value!r}.")
