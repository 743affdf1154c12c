"""LIBERO's five suites: a Panda arm moves household objects, asked in words.

The simulation is LIBERO's own (robosuite on MuJoCo), with its tasks and its initial states; images are rendered by
MuJoCo directly, so that a control step renders nothing and several simulators may live in a process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import multiprocessing.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from apexrl.core.errors import ConfigError, EnvError, EnvStateError
from apexrl.envs.camera import Camera
from apexrl.envs.display import render_without_display
from apexrl.envs.options import check_at_least, check_known
from apexrl.envs.suites.base import RENDER_SIZE, Simulator, Split, TaskSuite, camera_space, own_split

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Control steps an episode may take, as is usual for each suite."""

CAMERAS = {"agentview": "agentview", "eye_in_hand": "robot0_eye_in_hand"}
"""Observation groups, and what MuJoCo calls their cameras."""

SETTLE_STEPS = 10
"""Null actions after an initial state: objects were recorded slightly above the table."""

NULL_ACTION = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""No motion, gripper open."""

NUM_TRAIN_STATES = 40
"""Of the 50 initial states of a task the first 40 are for training, the last 10 for validation."""

ASSETS_VARIABLE = "APEXRL_LIBERO_ASSETS"
"""Names the folder of scene files where they are not in one of LIBERO's own places."""

_PACKAGES = ("libero", "robosuite", "bddl", "numba", "cv2", "easydict", "future", "termcolor")
_INSTALL = (
    "'make install-libero' in a source tree, or: pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1 "
    "&& pip install 'apexrl[libero]'"
)
_PLACEMENT_SEED = 0
_MEASURED = (
    "ee_pos", "ee_ori_mat", "ee_pos_vel", "ee_ori_vel", "joint_pos", "joint_vel", "J_pos", "J_ori", "J_full",
    "mass_matrix",
)  # fmt: skip

Rendering = Literal["fast", "full"]


class LiberoSuite(TaskSuite):
    """One of LIBERO's suites.

    Observations: ``state`` holds the position of the end effector (3, metres), its orientation (3, axis times angle)
    and the positions of the two fingers; each camera is a group of its own, upright (LIBERO's recorded images are
    upside down). Actions: change of position (3), of orientation (3), gripper (−1 opens, 1 closes).

    Args:
        benchmark_name: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10`` or ``libero_90``.
        task_names: the tasks wanted, in this order; empty means all.
        cameras: of ``agentview`` and ``eye_in_hand``; none means state only, and nothing is rendered.
        image_size: height and width of an image.
        rendering: ``fast`` leaves out shadows, reflections and antialiasing, ``full`` renders as the benchmark does.
        horizon: control steps after which an episode is truncated; the suite's usual number by default.
        assets: folder of LIBERO's scene files; found through ``APEXRL_LIBERO_ASSETS`` or where LIBERO puts them.

    Raises:
        ConfigError: for an unknown name, or when LIBERO or its scene files are not there.
    """

    action_space = gym.spaces.Box(-1, 1, (7,), np.float32)
    control_hz = 20.0

    def __init__(
        self,
        benchmark_name: str,
        task_names: Sequence[str] = (),
        *,
        cameras: Sequence[str] = tuple(CAMERAS),
        image_size: int = 128,
        rendering: Rendering = "fast",
        horizon: int | None = None,
        assets: str | os.PathLike[str] | None = None,
    ) -> None:
        rest = f" Known are {', '.join(HORIZONS)}."
        check_known("task.benchmark_name: LIBERO has no suite", [benchmark_name], HORIZONS, rest, ConfigError)
        check_known("cameras: LIBERO has no camera", cameras, CAMERAS, f" Known are {', '.join(CAMERAS)}.", ConfigError)
        check_at_least("", 1, image_size=image_size)
        if rendering not in ("fast", "full"):
            raise ConfigError(f"rendering must be 'fast' or 'full', got '{rendering}'.")
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"task.benchmark_name {benchmark_name} needs {', '.join(missing)}. Install: {_INSTALL}")
        self.assets = str(_find_assets(assets))
        known = _import_libero("benchmark").task_maps[benchmark_name]
        subject = f"task.task_names_to_use: {benchmark_name} has no task"
        check_known(subject, task_names, known, " Leave it empty for all.", ConfigError)
        tasks = [known[name] for name in task_names or known]
        self.name = benchmark_name
        self.task_names: Sequence[str] = [task.name for task in tasks]
        self.instructions: Sequence[str] = [task.language for task in tasks]
        self.horizon = HORIZONS[benchmark_name] if horizon is None else horizon
        self.cameras, self.image_size, self.rendering = tuple(cameras), image_size, rendering
        self.renders = bool(cameras)
        self.observation_space = camera_space(8, self.cameras, image_size)
        root = _libero_root()
        self._bddl = [str(root / "bddl_files" / task.problem_folder / task.bddl_file) for task in tasks]
        self._init_files = [str(root / "init_files" / task.problem_folder / task.init_states_file) for task in tasks]

    def init_states(self, task_id: int, split: Split = "train") -> list[NDArray[np.float64]]:
        """Return LIBERO's initial states of a task: the first 40 for training, the last 10 for validation."""
        # The files are pickled arrays: only what an array is made of is let through, under its older name.
        make_array = (np.empty(0).__reduce__()[0], "numpy.core.multiarray._reconstruct")
        allowed: list[Any] = [make_array, np.ndarray, np.dtype, type(np.dtype(np.float64))]
        with torch.serialization.safe_globals(allowed):
            states = np.asarray(torch.load(self._init_files[task_id], weights_only=True), np.float64)
        return list(states[:NUM_TRAIN_STATES] if own_split(split) == "train" else states[NUM_TRAIN_STATES:])

    def make_simulator(self, task_id: int) -> LiberoSimulator:
        """Make the simulator of a task (1 to 5 s); a missing scene file is an EnvError."""
        return LiberoSimulator(self._bddl[task_id], self.assets, self.cameras, self.image_size, self.rendering)


class LiberoSimulator(Simulator):
    """One LIBERO task, described by a ``bddl_file``; the other arguments are those of ``LiberoSuite``."""

    def __init__(
        self, bddl_file: str, assets: str, cameras: Sequence[str], image_size: int, rendering: Rendering
    ) -> None:
        self._cameras, self._image_size, self._rendering = tuple(cameras), image_size, rendering
        self._camera_context: Camera | None = None
        self._task = _make_libero_task(bddl_file, assets)
        # robosuite would read every sensor at every substep; we read the eight numbers that are wanted.
        self._task._observables = {}
        self._task.visualize(dict.fromkeys(self._task._visualizations, False))
        self._mujoco = importlib.import_module("mujoco")
        self._model, self._data = self._task.sim.model._model, self._task.sim.data._data
        self._robot = self._task.robots[0]
        controller = self._robot.controller
        self._reset_pose = {name: np.array(getattr(controller, name)) for name in _MEASURED}
        self._hand = self._model.body(self._robot.robot_model.eef_name).id
        self._full_state = self._mujoco.mjtState.mjSTATE_INTEGRATION
        self._num_full = self._mujoco.mj_stateSize(self._model, self._full_state)
        self._num_init = 1 + self._model.nq + self._model.nv
        self.restore(np.concatenate(([0.0], self._data.qpos, self._data.qvel)))
        if cameras:
            self._camera_context = self._make_camera_context()

    def restore(self, init_state: NDArray[np.float64]) -> None:
        """Go to a state exactly.

        One of LIBERO's initial states (time, positions, velocities) is followed by ten null actions, in which the
        objects come to rest; what ``state`` returned is gone to as it is.
        """
        if len(init_state) == self._num_init:
            self._restore_init(init_state)
            for _ in range(SETTLE_STEPS):
                self.advance(NULL_ACTION)
        elif len(init_state) == self._num_full + 14:
            self._restore_full(init_state)
        else:
            sizes = f"{self._num_init} numbers (initial) or {self._num_full + 14} (full)"
            raise EnvStateError(f"This LIBERO task has states of {sizes}; {len(init_state)} are of another task.")

    def _restore_init(self, state: NDArray[np.float64]) -> None:
        self._mujoco.mj_resetData(self._model, self._data)
        num_positions = self._model.nq
        self._data.time = state[0]
        self._data.qpos[:], self._data.qvel[:] = state[1 : 1 + num_positions], state[1 + num_positions :]
        self._set_controller(self._reset_pose["ee_ori_mat"], self._reset_pose["ee_pos"], np.zeros(2))
        # As after LIBERO's own reset: the first null action still pulls towards the pose in which the robot was made.
        for name, value in self._reset_pose.items():
            setattr(self._robot.controller, name, value.copy())
        self._robot.controller.new_update = False

    def _restore_full(self, state: NDArray[np.float64]) -> None:
        physics, controller = state[: self._num_full], state[self._num_full :]
        self._mujoco.mj_resetData(self._model, self._data)
        self._mujoco.mj_setState(self._model, self._data, physics, self._full_state)
        self._set_controller(controller[:9].reshape(3, 3), controller[9:12], controller[12:])

    def _set_controller(
        self, orientation: NDArray[np.float64], position: NDArray[np.float64], gripper: NDArray[np.float64]
    ) -> None:
        """Put back what robosuite remembers between steps: a null action keeps the orientation asked for before."""
        controller = self._robot.controller
        controller.goal_ori, controller.goal_pos, controller.new_update = orientation.copy(), position.copy(), True
        self._robot.gripper.current_action = gripper.copy()
        self._task._post_process()  # a stove glows when it is on

    def state(self) -> NDArray[np.float64]:
        """Return MuJoCo's full state and what the controller remembers."""
        physics = np.empty(self._num_full)
        self._mujoco.mj_getState(self._model, self._data, physics, self._full_state)
        controller = self._robot.controller
        return np.concatenate(
            (physics, controller.goal_ori.ravel(), controller.goal_pos, self._robot.gripper.current_action)
        )

    def advance(self, action: NDArray[np.float32]) -> bool:
        """Take one control step (1/20 s)."""
        _, _, solved, _ = self._task.step(np.clip(np.asarray(action, np.float64), -1, 1))
        return bool(solved)

    def observe(self) -> dict[str, NDArray[Any]]:
        """Return ``state`` and the cameras' images; what follows does not depend on whether this was called."""
        self._place()
        gripper = self._data.qpos[self._robot._ref_gripper_joint_pos_indexes]
        position = self._data.site_xpos[self._robot.eef_site_id]
        state = np.concatenate((position, _axis_angle(self._data.xquat[self._hand]), gripper))
        images = {}
        if self._camera_context is not None:
            images = {name: self._camera_context.render(CAMERAS[name], self._image_size) for name in self._cameras}
        return {"state": state.astype(np.float32), **images}

    def render(self) -> NDArray[np.uint8]:
        """Render what the camera ``agentview`` sees."""
        self._place()
        self._camera_context = self._camera_context or self._make_camera_context()
        return self._camera_context.render(CAMERAS["agentview"], RENDER_SIZE)

    def _place(self) -> None:
        """Compute where things are: MuJoCo's positions lag the state by a substep. The dynamics are untouched."""
        self._mujoco.mj_kinematics(self._model, self._data)
        self._mujoco.mj_comPos(self._model, self._data)
        self._mujoco.mj_camlight(self._model, self._data)

    def _make_camera_context(self) -> Camera:
        # Not robosuite's: a second one in the process would take over the images of the first. Group 0 are shapes for
        # collisions.
        size, fast = max(self._image_size, RENDER_SIZE), self._rendering == "fast"
        return Camera(self._model, self._data, size, fast=fast, hidden_groups=(0,))

    def close(self) -> None:
        """Free the simulation and its graphics context; a second call does nothing."""
        if self._camera_context is not None:
            self._camera_context.close()
            self._camera_context = None
        if self._task is not None:
            self._task.close()
            self._task = self._robot = self._model = self._data = None


def _axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return axis times angle of a quaternion (w, x, y, z), the angle in [0, 2π) as in LIBERO's recordings."""
    w = float(np.clip(quaternion[0], -1, 1))
    sine = np.sqrt(1 - w * w)
    if sine < 1e-8:
        return np.zeros(3)
    axis: NDArray[np.float64] = quaternion[1:] / sine
    return axis * float(2 * np.arccos(w))


def _libero_root() -> Path:
    spec: Any = importlib.util.find_spec("libero")
    return Path(spec.origin).parent / "libero"


def _find_assets(assets: str | os.PathLike[str] | None) -> Path:
    """Return the folder of LIBERO's scene files: the one asked for, or the first that is there."""
    asked = assets if assets is not None else os.environ.get(ASSETS_VARIABLE) or None
    places = [Path(asked)] if asked else [_libero_root() / "assets", Path.home() / ".cache" / "libero" / "assets"]
    for place in places:
        if (place / "scenes").is_dir():
            return place.resolve()
    raise ConfigError(
        f"LIBERO's scene files are not in {' or '.join(map(str, places))} (a folder 'scenes' is looked for). Set "
        f"{ASSETS_VARIABLE} to their folder, or download them: pip install huggingface_hub tqdm, then "
        "get_assets_path() of libero.libero."
    )


def _make_libero_task(bddl_file: str, assets: str) -> Any:
    """Make LIBERO's task, with no renderer and never done.

    Where it puts its fixtures is random and no part of a state, so the draw is always the same one.
    """
    render_without_display()
    _import_libero("")._assets_path_cache = assets
    wrapper, errors = _import_libero("envs.env_wrapper"), importlib.import_module("robosuite.utils.errors")
    random_state = np.random.get_state()
    np.random.seed(_PLACEMENT_SEED)
    try:
        for _ in range(100):
            with contextlib.suppress(errors.RandomizationError):  # objects that would overlap: the next draw
                return wrapper.ControlEnv(
                    bddl_file_name=bddl_file, use_camera_obs=False, has_offscreen_renderer=False, ignore_done=True
                ).env
    except (FileNotFoundError, ValueError) as error:
        raise EnvError(f"LIBERO's scene files in {assets} lack some of {Path(bddl_file).stem}: {error}") from error
    finally:
        np.random.set_state(random_state)
    raise EnvError(f"LIBERO found no place for the objects of {Path(bddl_file).stem} in 100 attempts.")


def _import_libero(name: str) -> Any:
    """Import a module of ``libero.libero``."""
    with _quiet_import():
        return importlib.import_module(f"libero.libero.{name}" if name else "libero.libero")


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Let LIBERO be imported without a question on standard input, a file in the home directory, or a warning.

    It asks when it finds no configuration, so it is given one in a folder of this process.
    """
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    before = {name: os.environ.get(name) for name in ("LIBERO_CONFIG_PATH", "MUJOCO_GL")}
    imported = sys.modules.get("libero.libero")
    os.environ["LIBERO_CONFIG_PATH"] = imported.libero_config_path if imported else _write_libero_config()
    try:
        yield
    finally:
        for name, value in before.items():  # robosuite sets MUJOCO_GL
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _write_libero_config() -> str:
    """Write LIBERO's configuration into a new folder that is removed when the process ends."""
    folder, root = tempfile.mkdtemp(prefix="apexrl-libero-"), _libero_root()
    # Not atexit: worker processes of multiprocessing do not run it.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    paths = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files"}
    paths |= {"datasets": root.parent / "datasets", "assets": root / "assets"}
    text = yaml.safe_dump({name: str(path) for name, path in paths.items()})
    (Path(folder) / "config.yaml").write_text(text, encoding="utf-8")
    return folder
