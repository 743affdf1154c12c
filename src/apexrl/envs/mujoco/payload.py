"""A Walker that keeps a commanded speed with an unknown load, ground, body and motors (for ``MujocoVecEnv``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from apexrl.core.errors import ConfigError
from apexrl.core.types import CMD_KEY, OBJECT_KEY, OBS_KEY, OBS_PRIV_KEY
from apexrl.envs.mujoco.tasks import WALK, Fields, NumpyArray, Outcome, Parts, for_one_robot, reward_metrics
from apexrl.envs.mujoco.walker import TRACKING_ERROR, CommandedWalker
from apexrl.envs.options import check_change_step, check_count, is_number

TORSO, PAYLOAD = 1, 8
"""Bodies."""
FLOOR_GEOM, PAYLOAD_GEOM = 0, 8
PAYLOAD_HEIGHT: Final = 0.25
"""Of the object's middle above that of the torso, m."""
FRAME_PARTS: Final = {"pitch, rad": 1, "joint angles, rad": 6, "last action": 6}
"""What a frame holds, in this order, and how many numbers each takes."""
FRAME: Final = sum(FRAME_PARTS.values())
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
class WalkerPayload(CommandedWalker):
    """Walk at a commanded speed (a planar biped) while load, friction, masses and motor strength are unknown.

    A ``CommandedWalker`` carries a cube on its torso. Its servos give g times the torque, at most 100 g N·m.

    Every episode samples (u uniform, log u log-uniform): the scale of its masses u(0.8, 1.3), friction u(0.5, 1.5),
    the strength of its servos g = u(0.6, 1.4), half the cube's edge h = u(0.08, 0.14) m, its density
    log u(100, 600) kg/m³, that is 0.4 to 13 kg on a body of 24 kg, and its place u(-0.1, 0.1) m. With v the mean speed
    of the torso over a step:

    reward = max(0, 1 - |v - command| / command) - 0.01 |a|²

    so that a perfect walk earns 1 per step, and a robot that stands still, or has fallen, nothing.

    Observation groups:
    ``policy`` ``[N, 13 · history]``: frames, the newest last, of pitch (1), joint angles (6) and last action (6);
    frames from before the episode are zeros. There are no velocities: how fast anything moves is in the history.
    ``command`` ``[N, 1]``: m/s. ``object`` ``[N, 2]``: h and the place of the cube.
    ``priv`` ``[N, 7]``: scale of masses, friction, g, log mass of the cube; velocity of the torso forward and up, m/s,
    and its height, m. All but the last three are scaled to [-1, 1] over the ranges above.
    """

    model_fields = ("body_mass", "body_pos", "geom_friction", "geom_size", "actuator_gainprm")
    metrics = (*reward_metrics("tracking_reward", "control_reward"), TRACKING_ERROR, *WALK)
    changes_model = True
    episode_steps = 500
    frame_parts: ClassVar[Mapping[str, int]] = FRAME_PARTS
    """What a frame holds, and how many numbers each part takes."""

    history: int = 10
    """Frames that the group ``policy`` stacks."""
    mass_range: tuple[float, float] = RANGES["mass"]
    friction_range: tuple[float, float] = RANGES["friction"]
    strength_range: tuple[float, float] = RANGES["strength"]
    size_range: tuple[float, float] = RANGES["size"]
    density_range: tuple[float, float] = RANGES["density"]
    """Of the cube, kg/m³."""
    offset_range: tuple[float, float] = RANGES["offset"]
    """Of the cube, forward, m."""
    change_step: int = 0
    """Steps of an episode after which its physics change; 0 for never."""
    change: str = "strength"
    """What is then sampled again: mass, friction, strength, payload (the size stays) or offset."""
    change_to: float | None = None
    """The value that it takes instead of a sampled one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("WalkerPayload.history", self.history)
        check_change_step("WalkerPayload", self.change_step)
        for name in RANGES:
            self._check_range(f"{name}_range", positive=name != "offset")
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

    def load(self) -> Any:
        """Return the robot with a cube on its torso, and memory for the frames."""
        import mujoco

        spec = self._spec(self.history * FRAME)
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
        """Sample physics, and the first state and command of a Walker."""
        import mujoco

        self.set_physics(model, self.draw_physics(rng), scratch=data)
        mujoco.mj_resetData(model, data)
        super().begin(model, data, rng)
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
        memory = super().remember(fields, action, generators)
        frame = _frame(fields["qpos"], action)
        return np.concatenate((memory[:, :2], memory[:, 2 + FRAME :], frame), 1)

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
        motion, control = self._motion(before, after, dt), self._control_reward(action)
        metric = {"tracking_reward": motion.tracking, "control_reward": control, "tracking_error": motion.error}
        metric |= {"forward_speed": motion.speed, "fail": motion.fell}
        return Outcome(motion.tracking + control, motion.fell, metric)


def _frame(qpos: NumpyArray, action: NumpyArray) -> NumpyArray:
    """Pitch, joint angles, action."""
    return np.concatenate((qpos[:, 2:], action), 1)


def _scaled(value: NumpyArray, low: float, high: float) -> NumpyArray:
    """Map [low, high] to [-1, 1]."""
    return np.asarray((2 * value - low - high) / (high - low))
