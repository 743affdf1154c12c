"""Gymnasium's MuJoCo tasks, version 5, as array operations over N environments.

Options have the names, defaults and meaning that they have in Gymnasium, and every formula keeps Gymnasium's order
of operations, so that the numbers agree to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

from apexrl.core.metrics import MetricSpec

NumpyArray: TypeAlias = NDArray[Any]
Fields: TypeAlias = Mapping[str, NumpyArray]
"""Arrays of ``MjData`` and ``MjModel`` by name, each with the environments as its first dimension."""
Parts: TypeAlias = Sequence[NumpyArray] | Mapping[str, "Parts"]
"""Arrays ``[N, k]`` that make one observation side by side, or groups of these."""


class Outcome(NamedTuple):
    """What a step of N environments earned, and which episodes it ended."""

    reward: NumpyArray
    """``[N]``"""
    terminated: NumpyArray
    """``[N]`` bool"""
    metric: Mapping[str, NumpyArray]
    """``[N]`` for each of the task's ``metrics``."""


@dataclass(frozen=True, kw_only=True)
class MujocoTask(ABC):
    """A task on a MuJoCo model: how an episode begins, what is seen, what is earned, and when it ends.

    A task holds no state. What an episode needs beyond positions and velocities (a command, say) belongs in
    ``data.userdata``, which is saved and restored with the rest of the simulation; ``remember`` may change it at
    every step.
    """

    data_fields: ClassVar[tuple[str, ...]] = ("qpos", "qvel")
    """Arrays of ``MjData`` that are read after every step. Those computed from the state are as ``mj_step``
    leaves them, which is one substep behind it."""
    model_fields: ClassVar[tuple[str, ...]] = ()
    """Arrays of ``MjModel`` that are read after every step."""
    metrics: ClassVar[tuple[MetricSpec, ...]]
    """What is reported besides the reward, such as its parts."""
    needs_contact_forces: ClassVar[bool] = False
    """Whether ``cfrc_ext`` and other results of ``mj_rnePostConstraint`` are read."""
    changes_model: ClassVar[bool] = False
    """Whether ``begin`` changes the model, so that every environment needs its own."""
    episode_steps: ClassVar[int] = 1000
    """Steps after which an episode is truncated unless told."""

    frame_skip: int = 5
    """Simulation steps for one action."""

    @abstractmethod
    def load(self) -> Any:
        """Return the ``MjModel`` of the task."""

    @abstractmethod
    def begin(self, model: Any, data: Any, rng: np.random.Generator) -> None:
        """Draw the first state of an episode into ``data``, which has just been set to the model's default."""

    @abstractmethod
    def observe(self, fields: Fields) -> Parts:
        """Return the parts of the observation."""

    @abstractmethod
    def outcome(self, before: Fields, after: Fields, action: NumpyArray, dt: NumpyArray) -> Outcome:
        """Judge one step by the fields before and after it, actions ``[N, A]`` within bounds, and seconds ``[N]``."""

    def check_episode(self, max_episode_steps: int) -> None:
        """Refuse options that do not fit episodes of this length."""
        return

    def change_models(
        self, models: Sequence[Any], elapsed: NumpyArray, generators: Sequence[np.random.Generator]
    ) -> None:
        """Change models within their episodes, after a step and before it is judged and observed.

        ``elapsed [N]`` are the steps of each environment's episode, this one included.
        """
        return

    def remember(
        self, fields: Fields, action: NumpyArray, generators: Sequence[np.random.Generator]
    ) -> NumpyArray | None:
        """Return what ``data.userdata`` is to hold after a step, ``[N, nuserdata]``, or None to leave it.

        A task that changes it has ``userdata`` among its ``data_fields``. ``outcome`` has judged the fields, and
        ``observe`` will see them.
        """
        return None


def asset_path(xml: str) -> str:
    """Return where Gymnasium keeps a model."""
    return str(Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / xml)


def reward_metrics(*names: str) -> tuple[MetricSpec, ...]:
    """Declare parts of the reward."""
    return tuple(MetricSpec(name) for name in names)


FORWARD_SPEED = MetricSpec("forward_speed", reduce="mean", group="task")
"""m/s, the mean over an episode."""
WALK = (FORWARD_SPEED, MetricSpec("fail"))
"""Of a robot that has fallen, or failed, when it is not healthy."""


def for_one_robot(model: Any) -> Any:
    """Return the model without the searches that find nothing where one robot of few bodies is alone."""
    import mujoco

    # It is one island of constraints: to look for more costs 7 %.
    for flag in ("mjDSBL_ISLAND", "mjDSBL_MIDPHASE"):
        model.opt.disableflags |= int(getattr(mujoco.mjtDisableBit, flag, 0))  # older versions lack the first
    return model


@dataclass(frozen=True, kw_only=True)
class _Locomotion(MujocoTask):
    """What Gymnasium's walking tasks have in common."""

    xml: ClassVar[str]
    gaussian_velocity: ClassVar[bool] = False
    """Whether the first velocities are drawn from a normal distribution instead of a uniform one."""
    num_hidden_positions: ClassVar[int] = 1
    """Coordinates along which the task does not change."""

    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 1e-3
    reset_noise_scale: float = 5e-3
    exclude_current_positions_from_observation: bool = True

    def load(self) -> Any:
        import mujoco

        return for_one_robot(mujoco.MjModel.from_xml_path(asset_path(self.xml)))

    def begin(self, model: Any, data: Any, rng: np.random.Generator) -> None:
        scale = self.reset_noise_scale
        data.qpos[:] = model.qpos0 + rng.uniform(-scale, scale, model.nq)
        gaussian = self.gaussian_velocity
        data.qvel[:] = scale * rng.standard_normal(model.nv) if gaussian else rng.uniform(-scale, scale, model.nv)

    def _position(self, fields: Fields) -> NumpyArray:
        hidden = self.num_hidden_positions if self.exclude_current_positions_from_observation else 0
        return fields["qpos"][:, hidden:]

    def _control_cost(self, action: NumpyArray) -> Any:
        return self.ctrl_cost_weight * np.square(action).sum(1)


def _within(value: NumpyArray, bounds: tuple[float, float]) -> Any:
    return (bounds[0] < value) & (value < bounds[1])


def _forward_speed(before: Fields, after: Fields, dt: NumpyArray) -> Any:
    return (after["qpos"][:, 0] - before["qpos"][:, 0]) / dt


@dataclass(frozen=True, kw_only=True)
class HalfCheetah(_Locomotion):
    """HalfCheetah-v5."""

    xml = "half_cheetah.xml"
    gaussian_velocity = True
    metrics = (*reward_metrics("reward_forward", "reward_ctrl"), FORWARD_SPEED)

    ctrl_cost_weight: float = 0.1
    reset_noise_scale: float = 0.1

    def observe(self, fields: Fields) -> Parts:
        """Positions without x, and velocities."""
        return self._position(fields), fields["qvel"]

    def outcome(self, before: Fields, after: Fields, action: NumpyArray, dt: NumpyArray) -> Outcome:
        """The speed forward, less the cost of control; it never ends."""
        speed, control = _forward_speed(before, after, dt), self._control_cost(action)
        forward = self.forward_reward_weight * speed
        metric = {"reward_forward": forward, "reward_ctrl": -control, "forward_speed": speed}
        return Outcome(forward - control, np.zeros(len(forward), np.bool_), metric)


@dataclass(frozen=True, kw_only=True)
class _Healthy(_Locomotion):
    """A body that earns something for being healthy, and whose episode ends where it is not."""

    healthy_reward: float = 1.0
    terminate_when_unhealthy: bool = True

    def _judge(
        self, healthy: NumpyArray, speed: NumpyArray, control: NumpyArray, contact: NumpyArray | float = 0.0
    ) -> Outcome:
        forward, survive = self.forward_reward_weight * speed, healthy * self.healthy_reward
        metric: dict[str, Any] = {"reward_forward": forward, "reward_survive": survive, "reward_ctrl": -control}
        metric |= {"reward_contact": -contact, "forward_speed": speed, "fail": ~healthy}
        return Outcome(forward + survive - (control + contact), ~healthy & self.terminate_when_unhealthy, metric)


@dataclass(frozen=True, kw_only=True)
class _Upright(_Healthy):
    """A planar body that must not fall."""

    metrics = (*reward_metrics("reward_forward", "reward_ctrl", "reward_survive"), *WALK)

    frame_skip: int = 4
    healthy_z_range: tuple[float, float] = (0.8, 2.0)
    healthy_angle_range: tuple[float, float] = (-1.0, 1.0)

    def observe(self, fields: Fields) -> Parts:
        """Positions without x, and velocities within ±10."""
        return self._position(fields), fields["qvel"].clip(-10, 10)

    def _is_healthy(self, fields: Fields) -> Any:
        z, angle = fields["qpos"][:, 1], fields["qpos"][:, 2]
        return _within(z, self.healthy_z_range) & _within(angle, self.healthy_angle_range)

    def outcome(self, before: Fields, after: Fields, action: NumpyArray, dt: NumpyArray) -> Outcome:
        """The speed forward and a bonus for staying upright, less the cost of control."""
        return self._judge(self._is_healthy(after), _forward_speed(before, after, dt), self._control_cost(action))


@dataclass(frozen=True, kw_only=True)
class Walker2d(_Upright):
    """Walker2d-v5."""

    xml = "walker2d_v5.xml"


@dataclass(frozen=True, kw_only=True)
class Hopper(_Upright):
    """Hopper-v5."""

    xml = "hopper.xml"

    healthy_z_range: tuple[float, float] = (0.7, float("inf"))
    healthy_angle_range: tuple[float, float] = (-0.2, 0.2)
    healthy_state_range: tuple[float, float] = (-100.0, 100.0)

    def _is_healthy(self, fields: Fields) -> Any:
        healthy = super()._is_healthy(fields)
        healthy &= _within(fields["qpos"][:, 2:], self.healthy_state_range).all(1)
        return healthy & _within(fields["qvel"], self.healthy_state_range).all(1)


@dataclass(frozen=True, kw_only=True)
class Ant(_Healthy):
    """Ant-v5."""

    xml = "ant.xml"
    gaussian_velocity = True
    num_hidden_positions = 2
    data_fields = ("qpos", "qvel", "xpos", "cfrc_ext")
    metrics = (*reward_metrics("reward_forward", "reward_ctrl", "reward_contact", "reward_survive"), *WALK)
    needs_contact_forces = True

    ctrl_cost_weight: float = 0.5
    contact_cost_weight: float = 5e-4
    main_body: int = 1
    healthy_z_range: tuple[float, float] = (0.2, 1.0)
    contact_force_range: tuple[float, float] = (-1.0, 1.0)
    reset_noise_scale: float = 0.1
    include_cfrc_ext_in_observation: bool = True

    def observe(self, fields: Fields) -> Parts:
        """Positions without x and y, velocities, and contact forces."""
        state = [self._position(fields), fields["qvel"]]
        if not self.include_cfrc_ext_in_observation:
            return state
        forces = fields["cfrc_ext"][:, 1:].clip(*self.contact_force_range)
        return [*state, forces.reshape(len(forces), -1)]

    def outcome(self, before: Fields, after: Fields, action: NumpyArray, dt: NumpyArray) -> Outcome:
        """The speed of the torso and a bonus for being healthy, less the costs of control and contact."""
        z = after["qpos"][:, 2]
        healthy = np.isfinite(after["qpos"]).all(1) & np.isfinite(after["qvel"]).all(1)
        healthy &= (self.healthy_z_range[0] <= z) & (z <= self.healthy_z_range[1])
        x_before, x_after = before["xpos"][:, self.main_body, 0], after["xpos"][:, self.main_body, 0]
        forces = after["cfrc_ext"].clip(*self.contact_force_range)
        contact = self.contact_cost_weight * np.square(forces).sum((1, 2))
        return self._judge(healthy, (x_after - x_before) / dt, self._control_cost(action), contact)


@dataclass(frozen=True, kw_only=True)
class Humanoid(_Healthy):
    """Humanoid-v5."""

    xml = "humanoid.xml"
    num_hidden_positions = 2
    needs_contact_forces = True
    data_fields = ("qpos", "qvel", "xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    model_fields = ("body_mass",)
    metrics = (*reward_metrics("reward_survive", "reward_forward", "reward_ctrl", "reward_contact"), *WALK)

    forward_reward_weight: float = 1.25
    ctrl_cost_weight: float = 0.1
    contact_cost_weight: float = 5e-7
    contact_cost_range: tuple[float, float] = (-float("inf"), 10.0)
    healthy_reward: float = 5.0
    healthy_z_range: tuple[float, float] = (1.0, 2.0)
    reset_noise_scale: float = 1e-2
    include_cinert_in_observation: bool = True
    include_cvel_in_observation: bool = True
    include_qfrc_actuator_in_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    def observe(self, fields: Fields) -> Parts:
        """Positions without x and y, velocities, inertias, and forces of motors and contacts."""
        parts = [self._position(fields), fields["qvel"]]
        for name, first in (("cinert", 1), ("cvel", 1), ("qfrc_actuator", 6), ("cfrc_ext", 1)):
            if getattr(self, f"include_{name}_in_observation"):
                parts.append(fields[name][:, first:])
        return [part.reshape(len(part), -1) for part in parts]

    def outcome(self, before: Fields, after: Fields, action: NumpyArray, dt: NumpyArray) -> Outcome:
        """The speed of the centre of mass and a bonus for staying upright, less the costs of control and contact."""
        healthy = _within(after["qpos"][:, 2], self.healthy_z_range)
        speed = (_mass_center_x(after) - _mass_center_x(before)) / dt
        control = self._control_cost(action.astype(np.float64))  # Gymnasium reads it from the simulation
        contact = self.contact_cost_weight * np.square(after["cfrc_ext"]).sum((1, 2))
        return self._judge(healthy, speed, control, contact.clip(*self.contact_cost_range))


def _mass_center_x(fields: Fields) -> Any:
    """Σ_b m_b x_b / Σ_b m_b over the bodies."""
    mass = fields["body_mass"]
    return np.einsum("nb,nbj->nj", mass, fields["xipos"])[:, 0] / mass.sum(1)


GYMNASIUM_TASKS: dict[str, type[MujocoTask]] = {
    "HalfCheetah-v5": HalfCheetah,
    "Hopper-v5": Hopper,
    "Walker2d-v5": Walker2d,
    "Ant-v5": Ant,
    "Humanoid-v5": Humanoid,
}
"""The tasks by the names that they have in Gymnasium."""
