"""A Walker that keeps a commanded speed with an unknown load, ground, body and motors (for ``MujocoVecEnv``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from apexrl.core.errors import ConfigError
from apexrl.core.metrics import MetricSpec
from apexrl.core.types import CMD_KEY, OBJECT_KEY, OBS_KEY, OBS_PRIV_KEY
from apexrl.envs.mujoco.tasks import Fields, MujocoTask, NumpyArray, Outcome, Parts, asset_path, for_one_robot
from apexrl.envs.options import check_change_step, check_count, is_number

TORSO, PAYLOAD = 1, 8
"""Bodies."""
FLOOR_GEOM, PAYLOAD_GEOM = 0, 8
PAYLOAD_HEIGHT: Final = 0.25
"""Of the object's middle above that of the torso, m."""
FRAME_PARTS: Final = {"pitch, rad": 1, "joint angles, rad": 6, "last action": 6}
"""What a frame holds, in this order, and how many numbers each takes."""
FRAME: Final = sum(FRAME_PARTS.values())
POSE: Final = (0.3, -0.6, 0.3)
"""Hip, knee and ankle of a leg that is a little bent, with its foot flat, rad."""
TORSO_HEIGHT: Final = 1.17
"""Of the torso when it stands in this pose, m."""
REACH: Final = 1.0
"""How far from the pose an action of 1 aims, rad."""
STIFFNESS, DAMPING, TORQUE = 120.0, 1.5, 100.0
"""Of the servos of a robot of strength 1: N·m/rad, N·m·s/rad, and the most that they give, N·m."""
SERVO_FIELDS: Final = ("actuator_gainprm", "actuator_biasprm", "actuator_forcerange")
"""What their strength scales."""
RANGES: Final = {
    "mass": (0.8, 1.3),
    "friction": (0.5, 1.5),
    "strength": (0.6, 1.4),
    "size": (0.08, 0.14),
    "density": (100.0, 600.0),
    "offset": (-0.1, 0.1),
}
"""What physics are sampled from by default, and what the observations map to [-1, 1] in any case."""
LOG_PAYLOAD_RANGE: Final = (math.log(100.0 * 0.16**3), math.log(600.0 * 0.28**3))
"""The range of the object's log mass that follows from these."""
CHANGES: Final = ("mass", "friction", "strength", "payload", "offset")


class WalkerPhysics(NamedTuple):
    """What differs from episode to episode."""

    mass: float
    """Of each part of the robot, in terms of Gymnasium's Walker2d, which has 24 kg."""
    friction: float
    """Between feet and ground."""
    strength: float
    """Of the servos: stiffness, damping and most torque."""
    size: float
    """Half the edge of the object, a cube, m."""
    payload: float
    """Mass of the object, kg."""
    offset: float
    """Of the object from the middle of the torso, forward, m."""


@dataclass(frozen=True, kw_only=True)
class WalkerPayload(MujocoTask):
    """Walk at a commanded speed (a planar biped) with an unknown load, ground, body and motors.

    Gymnasium's Walker2d carries a cube on its torso. Its hips swing both ways, by 90 degrees, and servos with little
    damping turn its joints from angles q to a pose with bent knees plus the action a in [-1, 1]⁶, with a torque of

    g (120 (pose + a - q) - 1.5 q̇) N·m, at most 100 g

    Every episode samples (u uniform, log u log-uniform): the scale of its masses u(0.8, 1.3), friction u(0.5, 1.5),
    the strength of its servos g = u(0.6, 1.4), half the cube's edge h = u(0.08, 0.14) m, its density
    log u(100, 600) kg/m³, that is 0.4 to 13 kg on a body of 24 kg, and its place u(-0.1, 0.1) m. With v the mean speed
    of the torso over the step of 0.02 s:

    reward = max(0, 1 - |v - command| / command) - 0.01 |a|²

    so that a perfect walk earns 1 a step, and a robot that stands still, or has fallen, nothing. The command is uniform
    in [0.5, 1.5] m/s and new every 125 steps, from a random phase. An episode ends like Gymnasium's, with the torso not
    between 0.8 and 2 m high or tilted by more than 1 rad. The simulation has steps of 4 ms and Euler's integrator.

    Observation groups:
    ``policy`` ``[N, 13 · history]``: frames, the newest last, of pitch (1), joint angles (6) and last action (6);
    frames from before the episode are zeros. There are no velocities: how fast anything moves is in the history.
    ``command`` ``[N, 1]``: m/s. ``object`` ``[N, 2]``: h and the place of the cube.
    ``priv`` ``[N, 7]``: scale of masses, friction, g, log mass of the cube; velocity of the torso forward and up, m/s,
    and its height, m. All but the last three are scaled to [-1, 1] over the ranges above.
    """

    data_fields = ("qpos", "qvel", "userdata")
    model_fields = ("body_mass", "body_pos", "geom_friction", "geom_size", "actuator_gainprm")
    terms = ("tracking_reward", "control_reward", "tracking_error")
    changes_model = True
    episode_steps = 500
    frame_parts: ClassVar[Mapping[str, int]] = FRAME_PARTS
    """What a frame holds, and how many numbers each part takes."""

    history: int = 10
    """Frames that the group ``policy`` stacks."""
    command_range: tuple[float, float] = (0.5, 1.5)
    """Speeds that are commanded, m/s."""
    command_period: int = 125
    """Steps between new commands."""
    control_cost_weight: float = 0.01
    """Cost of squared actions."""
    mass_range: tuple[float, float] = RANGES["mass"]
    friction_range: tuple[float, float] = RANGES["friction"]
    strength_range: tuple[float, float] = RANGES["strength"]
    size_range: tuple[float, float] = RANGES["size"]
    density_range: tuple[float, float] = RANGES["density"]
    """Of the cube, kg/m³."""
    offset_range: tuple[float, float] = RANGES["offset"]
    """Of the cube, forward, m."""
    reset_noise_scale: float = 0.02
    """Spread of the first positions and velocities."""
    change_step: int = 0
    """Steps of an episode after which its physics change; 0 for never."""
    change: str = "strength"
    """What is then sampled again: mass, friction, strength, payload (the size stays) or offset."""
    change_to: float | None = None
    """The value that it takes instead of a sampled one."""

    def __post_init__(self) -> None:
        for name in ("history", "command_period", "frame_skip"):
            check_count(f"WalkerPayload.{name}", getattr(self, name))
        check_change_step("WalkerPayload", self.change_step)
        for name in ("control_cost_weight", "reset_noise_scale"):
            if not is_number(value := getattr(self, name)) or value < 0:
                raise ConfigError(f"WalkerPayload.{name} must be a finite number of at least 0, got {value!r}.")
        for name in ("command", *RANGES):
            value = getattr(self, f"{name}_range")
            if not isinstance(value, Sequence) or len(value) != 2 or not all(map(is_number, value)):
                raise ConfigError(f"WalkerPayload.{name}_range must be two finite numbers, got {value!r}.")
            if value[0] > value[1] or (value[0] <= 0 and name != "offset"):
                rule = "the smaller first" if name == "offset" else "both above 0, the smaller first"
                raise ConfigError(f"WalkerPayload.{name}_range must have {rule}, got {value!r}.")
        if self.change not in CHANGES:
            raise ConfigError(f"WalkerPayload.change must be one of {', '.join(CHANGES)}, got {self.change!r}.")
        if (value := self.change_to) is not None and (
            not is_number(value) or (value <= 0 and self.change != "offset") or not self.change_step
        ):
            raise ConfigError(
                "WalkerPayload.change_to must be a finite number, above 0 unless it is an offset, beside a change_step "
                f"of at least 1; got {value!r} with change_step {self.change_step}."
            )

    def check_episode(self, max_episode_steps: int) -> None:
        """Refuse a change after the end."""
        check_change_step("WalkerPayload", self.change_step, max_episode_steps)

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        """The parts of the reward, and the error of the speed in m/s."""
        return (*super().metrics[:-1], MetricSpec("tracking_error", reduce="mean", group="task"))

    def load(self) -> Any:
        """Return Gymnasium's Walker2d with servos, hips that swing both ways and a cube on its torso."""
        import mujoco

        spec = mujoco.MjSpec.from_file(asset_path("walker2d_v5.xml"))
        spec.nuserdata = 2 + self.history * FRAME
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
        body = spec.body("torso").add_body(name="payload", pos=[0.0, 0.0, PAYLOAD_HEIGHT])
        cube = {"type": mujoco.mjtGeom.mjGEOM_BOX, "size": [0.1] * 3, "mass": 1.0, "rgba": [0.9, 0.5, 0.1, 1.0]}
        # It touches nothing, so that its size is all but a hint at its mass.
        body.add_geom(name="payload", contype=0, conaffinity=0, **cube)
        return for_one_robot(spec.compile())

    @functools.cached_property
    def _nominal(self) -> Any:
        return self.load()

    def draw_physics(self, rng: np.random.Generator) -> WalkerPhysics:
        """Sample what differs from episode to episode."""
        ranges = (self.mass_range, self.friction_range, self.strength_range, self.size_range, self.offset_range)
        mass, friction, strength, size, offset = (rng.uniform(*bounds) for bounds in ranges)
        density = math.exp(rng.uniform(*np.log(self.density_range)))
        return WalkerPhysics(mass, friction, strength, size, density * (2 * size) ** 3, offset)

    def physics(self, model: Any) -> WalkerPhysics:
        """Return what a model has."""
        usual = self._nominal
        return WalkerPhysics(
            mass=model.body_mass[TORSO] / usual.body_mass[TORSO],
            friction=model.geom_friction[FLOOR_GEOM, 0],
            strength=model.actuator_gainprm[0, 0] / usual.actuator_gainprm[0, 0],
            size=model.geom_size[PAYLOAD_GEOM, 0],
            payload=model.body_mass[PAYLOAD],
            offset=model.body_pos[PAYLOAD, 0],
        )

    def set_physics(self, model: Any, physics: WalkerPhysics, scratch: Any) -> None:
        """Change a model, within an episode too: the observations follow it. What its ``scratch`` data held is lost."""
        import mujoco

        usual = self._nominal
        model.body_mass[TORSO:PAYLOAD] = physics.mass * usual.body_mass[TORSO:PAYLOAD]
        model.body_inertia[TORSO:PAYLOAD] = physics.mass * usual.body_inertia[TORSO:PAYLOAD]
        # Two geoms in contact have the greater of their frictions, so that of the ground alone would change nothing.
        model.geom_friction[:, 0] = physics.friction
        for name in SERVO_FIELDS:
            getattr(model, name)[:] = physics.strength * getattr(usual, name)
        model.body_mass[PAYLOAD] = physics.payload
        model.body_inertia[PAYLOAD] = physics.payload * (2 * physics.size) ** 2 / 6
        model.body_pos[PAYLOAD, 0] = physics.offset
        model.geom_size[PAYLOAD_GEOM] = physics.size
        mujoco.mj_setConst(model, scratch)

    def begin(self, model: Any, data: Any, rng: np.random.Generator) -> None:
        """Sample physics, a first state around the standing pose, a command and when the next one comes."""
        import mujoco

        self.set_physics(model, self.draw_physics(rng), scratch=data)
        mujoco.mj_resetData(model, data)
        noise = self.reset_noise_scale
        data.qpos[:] = rng.uniform(-noise, noise, model.nq)
        data.qpos[1:] += (TORSO_HEIGHT, 0.0, *POSE, *POSE)
        data.qvel[:] = rng.uniform(-noise, noise, model.nv)
        data.userdata[0] = rng.uniform(*self.command_range)
        data.userdata[1] = rng.integers(1, self.command_period, endpoint=True)
        data.userdata[-FRAME:] = _frame(data.qpos[None], np.zeros((1, model.nu)))[0]

    def change_models(
        self, models: Sequence[Any], elapsed: NumpyArray, generators: Sequence[np.random.Generator]
    ) -> None:
        """Sample one of the physics again ``change_step`` steps after an episode began."""
        import mujoco

        for i in np.flatnonzero(elapsed == self.change_step).tolist() if self.change_step else ():
            # Numbers from far ahead in the stream: in all else the episode continues as if nothing had changed.
            stream: Any = generators[i].bit_generator
            now, new = self.physics(models[i]), self.draw_physics(np.random.Generator(stream.jumped()))
            new = new._replace(payload=new.payload * (now.size / new.size) ** 3)
            value = getattr(new, self.change) if self.change_to is None else self.change_to
            self.set_physics(models[i], now._replace(**{self.change: value}), scratch=mujoco.MjData(models[i]))

    def remember(self, fields: Fields, action: NumpyArray, generators: Sequence[np.random.Generator]) -> NumpyArray:
        """Return commands, steps until the next ones, and the frames with the newest."""
        memory = fields["userdata"]
        command, steps_left, frames = memory[:, :1].copy(), memory[:, 1:2] - 1, memory[:, 2:]
        for i in np.flatnonzero(steps_left <= 0).tolist():
            command[i], steps_left[i] = generators[i].uniform(*self.command_range), self.command_period
        frame = _frame(fields["qpos"], action)
        return np.concatenate((command, steps_left, frames[:, FRAME:], frame), 1)

    def observe(self, fields: Fields) -> Parts:
        """Return the four groups."""
        body_mass, usual = fields["body_mass"], self._nominal
        # Before the first reset there is no mass.
        payload = np.log(np.maximum(body_mass[:, PAYLOAD], 1e-3))
        priv = (
            _scaled(body_mass[:, TORSO] / usual.body_mass[TORSO], *RANGES["mass"]),
            _scaled(fields["geom_friction"][:, FLOOR_GEOM, 0], *RANGES["friction"]),
            _scaled(fields["actuator_gainprm"][:, 0, 0] / usual.actuator_gainprm[0, 0], *RANGES["strength"]),
            _scaled(payload, *LOG_PAYLOAD_RANGE),
        )
        size = _scaled(fields["geom_size"][:, PAYLOAD_GEOM, :1], *RANGES["size"])
        place = _scaled(fields["body_pos"][:, PAYLOAD, :1], *RANGES["offset"])
        return {
            OBS_KEY: [fields["userdata"][:, 2:]],
            CMD_KEY: [fields["userdata"][:, :1]],
            OBJECT_KEY: [size, place],
            OBS_PRIV_KEY: [np.stack(priv, 1), fields["qvel"][:, :2], fields["qpos"][:, 1:2]],
        }

    def outcome(self, before: Fields, after: Fields, action: NumpyArray, dt: NumpyArray) -> Outcome:
        """Reward for the commanded speed, less the cost of control; it ends where the Walker falls."""
        qpos, command = after["qpos"], after["userdata"][:, 0]
        error = np.abs((qpos[:, 0] - before["qpos"][:, 0]) / dt - command)
        terms = {
            "tracking_reward": np.maximum(1.0 - error / command, 0.0),
            "control_reward": -self.control_cost_weight * np.square(action).sum(1),
            "tracking_error": error,
        }
        stands = (qpos[:, 1] > 0.8) & (qpos[:, 1] < 2.0) & (np.abs(qpos[:, 2]) < 1.0)
        stands &= np.isfinite(qpos).all(1) & np.isfinite(after["qvel"]).all(1)
        return Outcome(terms["tracking_reward"] + terms["control_reward"], ~stands, terms)


def _frame(qpos: NumpyArray, action: NumpyArray) -> NumpyArray:
    """Pitch, joint angles, action."""
    return np.concatenate((qpos[:, 2:], action), 1)


def _scaled(value: NumpyArray, low: float, high: float) -> NumpyArray:
    """Map [low, high] to [-1, 1]."""
    return np.asarray((2 * value - low - high) / (high - low))
