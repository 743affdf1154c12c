"""The tasks of Meta-World v3: one arm, one object, four numbers of action, from its state or from cameras."""

from __future__ import annotations

import functools
import importlib
import math
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import ConfigError, EnvError
from apexrl.envs.camera import Camera
from apexrl.envs.display import render_without_display
from apexrl.envs.options import check_at_least, check_known
from apexrl.envs.suites.base import RENDER_SIZE, Simulator, Split, TaskSuite, camera_space, own_split
from apexrl.envs.suites.instructions import INSTRUCTIONS, MT10

TASK_NAMES: tuple[str, ...] = tuple(INSTRUCTIONS)
"""All 50 tasks, in Meta-World's order."""
CAMERAS: tuple[str, ...] = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
"""What a task can be seen from; images of the corners are turned upright."""

_FRAME, _OBJECT = 18, 4  # numbers of one frame of the observation, and where the objects begin in it
_NONE = float(np.finfo(np.float64).max)  # stands for None in a state; NaN would make equal states unequal
_NUMBERS = bool | int | float | np.bool_ | np.integer | np.floating


class MetaWorldSimulator(Simulator):
    """One task of Meta-World, stepped without its wrappers.

    The state is MuJoCo's integration state, what a reset changes in the model (positions of bodies and sites), and
    every number the task keeps in Python. Among these is the last observation, which also holds the frame before.

    The arguments besides the task's name are those of ``MetaWorldSuite``.
    """

    def __init__(
        self, task_name: str, *, cameras: Sequence[str] = (), image_size: int = 64, privileged: bool = True
    ) -> None:
        environments, experts = _import("metaworld.env_dict"), _import("metaworld.policies")
        self._mujoco: Any = importlib.import_module("mujoco")
        self._cameras, self._image_size = tuple(cameras), image_size
        self._num_observed = _num_observed(privileged)
        self._camera_context: Camera | None = None
        self._expert = experts.ENV_POLICY_MAP[task_name]()
        env = self._env = environments.ALL_V3_ENVIRONMENTS[task_name]()
        env._partially_observable, env._set_task_called, env.seeded_rand_vec = False, True, True
        del env.sawyer_observation_space  # it was made for a hidden goal
        space = env.sawyer_observation_space
        self._low, self._high = space.low, space.high
        self._model, self._data = env.model, env.data
        self._pads = [self._data.geom(name).id for name in ("leftpad_geom", "rightpad_geom")]
        _speed_up(env, self._touches)
        self._hand, self._right, self._left = (
            self._data.body(name).xpos for name in ("hand", "rightclaw", "leftclaw")
        )  # views: MuJoCo writes into them
        self._integration = self._mujoco.mjtState.mjSTATE_INTEGRATION
        self._physics: NDArray[np.float64] = np.empty(self._mujoco.mj_stateSize(self._model, self._integration))
        self._scene = (self._model.body_pos, self._model.site_pos)
        self._first_scene = tuple(part.copy() for part in self._scene)
        # A first step sets the attributes that are None after a reset.
        self.start(np.random.default_rng(0))
        self.advance(np.zeros(4, np.float32))
        self._attributes = self._find_attributes()
        self.start(np.random.default_rng(0))

    def start(self, generator: np.random.Generator) -> None:
        """Begin an episode with objects and goal where ``generator`` puts them."""
        env = self._env
        for part, first in zip(self._scene, self._first_scene, strict=True):
            part[:] = first
        # Twice, as Meta-World does: the second reset finds the scene where the first one put it.
        env._np_random = generator
        for frozen in (False, True):
            env._freeze_rand_vec = frozen
            self._mujoco.mj_resetData(self._model, self._data)
            env.reset_model()
        self._mujoco.mj_forward(self._model, self._data)
        env.curr_path_length = 0
        env._prev_obs = self._frame()
        self._keep_observation(env._prev_obs)

    def restore(self, init_state: NDArray[np.float64]) -> None:  # noqa: D102
        position = self._physics.size
        physics = np.array(init_state[:position])
        for part in self._scene:
            part[:] = init_state[position : position + part.size].reshape(part.shape)
            position += part.size
        env = self._env
        for name, shape, kind in self._attributes:
            size = 1 if shape is None else int(np.prod(shape))
            value, position = init_state[position : position + size], position + size
            if shape is None:
                setattr(env, name, None if value[0] == _NONE else kind(value[0]))
            else:
                setattr(env, name, value.reshape(shape).astype(kind))
        if position != init_state.size:
            raise EnvError(f"A state of {type(env).__name__} has {position} numbers, got {init_state.size}.")
        self._mujoco.mj_setState(self._model, self._data, physics, self._integration)
        self._mujoco.mj_forward(self._model, self._data)  # positions of bodies; it leaves the state as it is

    def state(self) -> NDArray[np.float64]:  # noqa: D102
        self._mujoco.mj_getState(self._model, self._data, self._physics, self._integration)
        parts = [self._physics, *(part.ravel() for part in self._scene)]
        for name, shape, _ in self._attributes:
            value = getattr(self._env, name)
            parts.append(np.array([_NONE if value is None else value]) if shape is None else value.ravel())
        return np.concatenate(parts, dtype=np.float64)

    def advance(self, action: NDArray[np.float32]) -> bool:  # noqa: D102
        env, data = self._env, self._data
        action = np.minimum(np.maximum(np.asarray(action, np.float32), np.float32(-1)), np.float32(1))
        hand = data.mocap_pos[0] + action[:3] * np.float32(env.action_scale)
        data.mocap_pos[0] = np.minimum(np.maximum(hand, env.mocap_low), env.mocap_high)
        data.mocap_quat[0] = (1, 0, 1, 0)
        data.ctrl[0], data.ctrl[1] = action[3], -action[3]
        self._mujoco.mj_step(self._model, data, nstep=env.frame_skip)
        self._mujoco.mj_forward(self._model, data)
        env.curr_path_length += 1
        self._keep_observation(self._frame())
        return bool(env.evaluate_state(env._last_stable_obs, action)[1]["success"] >= 1)

    def observe(self) -> dict[str, NDArray[Any]]:  # noqa: D102
        observation = {"state": self._env._last_stable_obs[: self._num_observed].astype(np.float32)}
        return observation | {name: self._render(name, self._image_size) for name in self._cameras}

    def render(self) -> NDArray[np.uint8]:  # noqa: D102
        return self._render("corner2", RENDER_SIZE)

    def expert_action(self) -> NDArray[np.float32]:  # noqa: D102
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they say that an action is clipped, as it is here
            action: NDArray[np.float32] = self._expert.get_action(self._env._last_stable_obs)
        return np.clip(action, -1, 1).astype(np.float32)

    def close(self) -> None:  # noqa: D102
        if self._camera_context is not None:
            self._camera_context.close()
            self._camera_context = None

    def _frame(self) -> NDArray[np.float64]:
        """Return what Meta-World observes of this moment: hand, opening, then position and rotation of two objects."""
        frame = np.zeros(_FRAME)
        frame[:3] = self._hand
        frame[3] = min(float(np.linalg.norm(self._right - self._left)) / 0.1, 1.0)
        positions, rotations = self._env._get_pos_objects(), self._env._get_quat_objects()
        for i in range(len(positions) // 3):
            begin = _OBJECT + 7 * i
            frame[begin : begin + 3] = positions[3 * i : 3 * i + 3]
            frame[begin + 3 : begin + 7] = rotations[4 * i : 4 * i + 4]
        return frame

    def _keep_observation(self, frame: NDArray[np.float64]) -> None:
        env = self._env
        stacked = np.concatenate((frame, env._prev_obs, env._get_pos_goal()))
        env._prev_obs = frame
        env._last_stable_obs = np.minimum(np.maximum(stacked, self._low), self._high)

    def _touches(self, geom: int) -> bool:
        """Return whether both pads of the gripper press on a geom."""
        contact = self._data.contact
        pairs, rows = contact.geom, contact.efc_address
        on_geom = (pairs == geom).any(1)
        touching = (rows[on_geom & (pairs == pad).any(1)] for pad in self._pads)
        return all(self._data.efc_force[rows].sum() > 0 for rows in touching)

    def _find_attributes(self) -> list[tuple[str, tuple[int, ...] | None, Any]]:
        """Return name, shape (None for a number) and type of everything that is a number in the task's attributes.

        Attributes that look into MuJoCo's memory follow from its state and are left out.
        """
        data = self._data
        found: list[tuple[str, tuple[int, ...] | None, Any]] = []
        memory = (data.xpos, data.xquat, data.site_xpos, data.geom_xpos, *self._scene)
        for name, value in sorted(vars(self._env).items()):
            if isinstance(value, _NUMBERS):
                found.append((name, None, type(value)))
            elif isinstance(value, np.ndarray) and not any(np.shares_memory(value, part) for part in memory):
                found.append((name, value.shape, value.dtype))
        return found

    def _render(self, camera: str, size: int) -> NDArray[np.uint8]:
        context = self._camera_context or Camera(self._model, self._data, max(self._image_size, RENDER_SIZE))
        self._camera_context = context
        return context.render(camera, size, upside_down=camera.startswith("corner"))


class MetaWorldSuite(TaskSuite):
    """Tasks of Meta-World v3 with the goal visible.

    Args:
        name: what the suite is called.
        task_names: its tasks, in order.
        horizon: control steps after which an episode is truncated.
        num_init_states: initial states of a task in each split; the first ones are the same however many there are.
        privileged: whether the group ``state`` holds the 39 numbers of Meta-World (this frame and the one before: hand,
            opening, objects; then the goal), or only the hand's position and its opening, 4 numbers.
        cameras: each adds a group of its name with images; see ``CAMERAS``.
        image_size: height and width of the images.

    Raises:
        ConfigError: for an unknown task or camera, or a number that cannot be.
        EnvError: when Meta-World is not installed.
    """

    control_hz = 80.0

    def __init__(
        self,
        name: str = "mt10",
        task_names: Sequence[str] = MT10,
        *,
        horizon: int = 150,
        num_init_states: int = 50,
        privileged: bool = True,
        cameras: Sequence[str] = (),
        image_size: int = 64,
    ) -> None:
        for field, names, known in (("task_names", task_names, TASK_NAMES), ("task.cameras", cameras, CAMERAS)):
            check_known(f"{field} has no", names, known, f" Known: {', '.join(known)}.", ConfigError)
        check_at_least("", 1, horizon=horizon, num_init_states=num_init_states, image_size=image_size)
        _import("metaworld.env_dict")
        self.name, self.horizon, self.num_init_states = name, horizon, num_init_states
        self.task_names: Sequence[str] = tuple(task_names)
        self.instructions: Sequence[str] = tuple(INSTRUCTIONS[task] for task in task_names)
        self.privileged, self.cameras, self.image_size = privileged, tuple(cameras), image_size
        self.renders = bool(cameras)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.observation_space = camera_space(_num_observed(privileged), self.cameras, image_size)

    def init_states(self, task_id: int, split: Split = "train") -> list[NDArray[np.float64]]:  # noqa: D102
        return list(_init_states(self.task_names[task_id], own_split(split), self.num_init_states))

    def random_init_state(self, task_id: int, seed: Sequence[int]) -> NDArray[np.float64]:
        """Return the state after a reset of Meta-World from a seed; those of the splits have other seeds."""
        name = self.task_names[task_id]
        return _draw_state(_blind_simulator(name), name, (2, *seed))

    def make_simulator(self, task_id: int) -> MetaWorldSimulator:  # noqa: D102
        return MetaWorldSimulator(
            self.task_names[task_id], cameras=self.cameras, image_size=self.image_size, privileged=self.privileged
        )


class _Rotation:
    """What the tasks ask of SciPy's class of this name, without its checks, which took a third of a step."""

    def __init__(self, matrix: NDArray[np.float64]) -> None:
        self._matrix = matrix.tolist()

    from_matrix = classmethod(lambda cls, matrix: cls(matrix))

    def as_quat(self) -> NDArray[np.float64]:
        """Return the rotation as ``[x, y, z, w]``."""
        m = self._matrix
        diagonal = [m[0][0], m[1][1], m[2][2]]
        trace = sum(diagonal)
        # Divide by the largest of the four numbers.
        if trace >= max(diagonal):
            quat = [m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1], 1 + trace]
        else:
            i = diagonal.index(max(diagonal))
            j, k = (i + 1) % 3, (i + 2) % 3
            quat = [0.0, 0.0, 0.0, m[k][j] - m[j][k]]
            quat[i], quat[j], quat[k] = 1 - trace + 2 * m[i][i], m[j][i] + m[i][j], m[k][i] + m[i][k]
        return np.array(quat) / math.hypot(*quat)


def _speed_up(env: Any, touches: Callable[[int], bool]) -> None:
    """Replace what took more time than the physics, on this one environment: successes and observations stay."""
    # A part of the reward, which nobody reads; no success depends on it.
    env._gripper_caging_reward = lambda *args, **kwargs: 0.0
    env.touching_object = touches
    method = type(env)._get_quat_objects
    if "Rotation" in method.__code__.co_names:
        fast = types.FunctionType(method.__code__, method.__globals__ | {"Rotation": _Rotation})
        env._get_quat_objects = types.MethodType(fast, env)


@functools.cache
def _blind_simulator(task_name: str) -> MetaWorldSimulator:
    """Return a simulator without cameras, kept to draw random states with."""
    return MetaWorldSimulator(task_name)


def _draw_state(simulator: MetaWorldSimulator, task_name: str, seed: Sequence[int]) -> NDArray[np.float64]:
    simulator.start(np.random.default_rng((TASK_NAMES.index(task_name), *seed)))
    state = simulator.state()
    state.flags.writeable = False
    return state


@functools.cache
def _init_states(task_name: str, split: Literal["train", "val"], num_states: int) -> tuple[NDArray[np.float64], ...]:
    """Each state has a seed of its own, so it does not depend on the others or on the process."""
    simulator = MetaWorldSimulator(task_name)
    states = tuple(_draw_state(simulator, task_name, (int(split == "val"), number)) for number in range(num_states))
    simulator.close()
    return states


def _num_observed(privileged: bool) -> int:
    """Two frames and the goal, or the hand alone."""
    return 2 * _FRAME + 3 if privileged else _OBJECT


def _import(module: str) -> Any:
    render_without_display()  # before MuJoCo is imported
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvError(
            f"The tasks of Meta-World need its package ({error}). Install it with: pip install --no-deps metaworld "
            "and pip install 'apexrl[mujoco]'."
        ) from error
