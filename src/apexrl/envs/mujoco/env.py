"""MuJoCo tasks as a ``VecEnv``: simulated in threads, with array operations for everything around the simulation."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.utils import seeding
from numpy.typing import NDArray
from torch import Tensor

from apexrl.core.errors import EnvError, EnvStateError
from apexrl.core.metrics import MetricSpec
from apexrl.core.system.seeding import spawn_seeds
from apexrl.core.types import EnvStep, Observation
from apexrl.envs.base import VecEnv
from apexrl.envs.camera import Camera
from apexrl.envs.display import render_without_display
from apexrl.envs.mujoco.payload import WalkerPayload
from apexrl.envs.mujoco.simulation import Threads, make_models, model_differences, num_cores, set_model_differences
from apexrl.envs.mujoco.tasks import GYMNASIUM_TASKS, MujocoTask, NumpyArray, Parts
from apexrl.envs.mujoco.walker import Walker
from apexrl.envs.options import check_count, check_known
from apexrl.envs.step_buffers import StepBuffers
from apexrl.envs.workers.arrays import Tree, make_buffers, tree_leaves

MUJOCO_TASKS: dict[str, type[MujocoTask]] = {**GYMNASIUM_TASKS, "Walker": Walker, "WalkerPayload": WalkerPayload}
"""The tasks by name."""

IMAGE_SIZE = 480
"""Height and width of rendered images."""
LOCK_SECONDS = 8e-6
"""How long a thread that simulates one environment after the other holds the interpreter's lock for each."""


class MujocoVecEnv(VecEnv):
    """Gymnasium's MuJoCo tasks, bit for bit, at the speed of the simulator alone.

    From the same seed and actions it gives the numbers that ``GymVecEnv`` gives, over any number of episodes:
    every environment draws from its own seed as Gymnasium's does.

    Each environment has its own ``MjData``, and the threads that share them hold no interpreter lock while they
    simulate. ``mujoco.rollout`` is as fast on two cores, but it returns neither where the constraint solver starts
    next, without which HalfCheetah has left Gymnasium's trajectory after a hundred steps, nor the forces and
    inertias that Ant and Humanoid observe.

    Args:
        task: the name of one of Gymnasium's tasks (``"HalfCheetah-v5"``, ``"Hopper-v5"``, ``"Walker2d-v5"``,
            ``"Ant-v5"``, ``"Humanoid-v5"``), ``"WalkerPayload"``, or a task of your own.
        device: where the tensors are wanted; the simulation runs on the CPU.
        num_threads: threads that simulate, this one included; unless told one for each core, or fewer where a step
            is so short that they would wait for each other.
        max_episode_steps: steps after which an episode is truncated; the task's ``episode_steps`` unless told.
        models: one ``MjModel`` for each environment, all of the same sizes, instead of the task's.
        randomize: called with a copy of the model and a generator for each environment when it is made, to change
            masses, friction, motor strength and the like.
        randomize_seed: environment ``i`` gets the generator ``np.random.default_rng([randomize_seed, i])``.
        seed: of the episodes until a reset has one; drawn from PyTorch's generator when not given.
        **options: of the named task; those of Gymnasium's are as ``gymnasium.make`` takes them.

    Raises:
        EnvError: for an unknown task or option, models that do not fit each other, or when MuJoCo is missing.
    """

    own_seeds = True
    metric_specs: Mapping[str, MetricSpec] = {}
    """The parts of the reward, and what else the task measures."""

    def __init__(
        self,
        task: str | MujocoTask,
        num_envs: int = 1,
        *,
        device: torch.device | str = "cpu",
        num_threads: int | None = None,
        max_episode_steps: int | None = None,
        models: Sequence[Any] | None = None,
        randomize: Callable[[Any, np.random.Generator], None] | None = None,
        randomize_seed: int = 0,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self._mujoco = _load_mujoco()
        self.task = _make_task(task, options)
        max_episode_steps = self.task.episode_steps if max_episode_steps is None else max_episode_steps
        check_count("MujocoVecEnv.num_envs", num_envs)
        check_count("MujocoVecEnv.max_episode_steps", max_episode_steps)
        self.task.check_episode(max_episode_steps)
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.max_episode_steps: int = max_episode_steps
        self._was_given_models = models is not None or randomize is not None
        self._has_own_models = self._was_given_models or self.task.changes_model
        if self.task.changes_model:
            randomize = randomize or _only_copy
        self.models, self._base = make_models(self.task.load, num_envs, models, randomize, randomize_seed)
        self._data = [self._mujoco.MjData(model) for model in self.models]
        self._fields = [self._make_fields() for _ in range(2)]
        self._make_spaces_and_buffers()
        self._elapsed = np.zeros(num_envs, np.int64)
        # Two environments differ from each other, yet both follow from torch.manual_seed.
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        self._generators = _generators(spawn_seeds(seed, num_envs))
        self._was_reset = False
        self._options: dict[str, Any] = {"num_threads": num_threads, "max_episode_steps": max_episode_steps}
        wanted = self._useful_threads() if num_threads is None else max(num_threads, 1)
        self._threads = Threads(min(wanted, num_envs))
        self._stop_threads = weakref.finalize(self, self._threads.close)
        self._camera: Camera | None = None
        self._camera_index = 0

    def _useful_threads(self) -> int:
        """Return how many threads to simulate with: a thread holds the interpreter's lock between two simulations."""
        mj_step, model, substeps = self._mujoco.mj_step, self._base, self.task.frame_skip
        data = self._mujoco.MjData(model)
        mj_step(model, data, 40 * substeps)  # until it lies on the ground
        started = time.perf_counter()
        mj_step(model, data, 10 * substeps)
        seconds = (time.perf_counter() - started) / 10
        asked = os.environ.get("OMP_NUM_THREADS", "")  # which bounds PyTorch's threads too
        most = int(asked) if asked.isdecimal() and int(asked) else num_cores()
        return max(1, min(num_cores(), most, round(seconds / LOCK_SECONDS)))

    def _make_fields(self) -> tuple[dict[str, NumpyArray], list[tuple[list[NumpyArray], NumpyArray]]]:
        """Return arrays ``[N, ...]`` for the task's fields, and what to concatenate into which to fill them."""
        views = {name: [getattr(data, name) for data in self._data] for name in self.task.data_fields}
        views |= {name: [getattr(model, name) for model in self.models] for name in self.task.model_fields}
        fields = {name: np.zeros((self.num_envs, *rows[0].shape)) for name, rows in views.items()}
        flat = [array.reshape(-1, *array.shape[2:]) for array in fields.values()]
        return fields, list(zip(views.values(), flat, strict=True))

    def _make_spaces_and_buffers(self) -> None:
        task, bounds = self.task, self.models[0].actuator_ctrlrange.astype(np.float32)
        self.observation_space = _parts_space(task.observe(self._fields[0][0]))
        self.action_space = spaces.Box(bounds[:, 0], bounds[:, 1], dtype=np.float32)
        self.metric_specs = {spec.name: spec for spec in task.metrics}
        buffers, _ = make_buffers(self.observation_space, self.action_space, self.num_envs, len(self.metric_specs))
        self._buffers = StepBuffers(buffers, tuple(self.metric_specs), self.device)
        controls = [data.ctrl for data in self._data]
        self._work = list(zip(self.models, self._data, controls, buffers.action, strict=True))

    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere; each environment from a stream of its own."""
        return self._begin_all(None if seed is None else spawn_seeds(seed, self.num_envs))

    def reset_each(self, seeds: Sequence[int]) -> Observation:
        """Start a new episode everywhere; environment ``i`` gets ``seeds[i]``. The models must not differ."""
        if self._was_given_models and (differences := model_differences(self._base, self.models)):
            names = ", ".join(sorted(differences))
            raise EnvError(f"Episodes would depend on their environments: the models differ in {names}. Use one model.")
        return self._begin_all(seeds)

    def _begin_all(self, seeds: Sequence[int] | None) -> Observation:
        if seeds is not None:
            self._generators = _generators(seeds)
        self._was_reset = True
        self._begin(range(self.num_envs))
        return self._buffers.observation()

    def step(self, action: Tensor) -> EnvStep:
        """Apply one action ``[N, A]``, clipped to its bounds, to each environment."""
        self._buffers.take(action)
        if not self._was_reset:
            raise EnvError("Call reset before step.")
        buffers, task, space = self._buffers.arrays, self.task, self.action_space
        assert isinstance(space, spaces.Box)
        np.clip(buffers.action, space.low, space.high, out=buffers.action)
        self._threads.run(functools.partial(self._simulate, iter(self._work)))
        self._elapsed += 1
        task.change_models(self.models, self._elapsed, self._generators)

        self._fields.reverse()
        (after, sources), (before, _) = self._fields
        for views, out in sources:
            np.concatenate(views, out=out)
        outcome = task.outcome(before, after, buffers.action, self._dt())
        buffers.reward[:, 0] = outcome.reward
        buffers.terminated[:, 0] = outcome.terminated
        buffers.truncated[:, 0] = (self._elapsed >= self.max_episode_steps) & ~outcome.terminated
        for m, name in enumerate(self.metric_specs):
            buffers.metric[m, :, 0] = outcome.metric[name]
        memory = task.remember(after, buffers.action, self._generators)
        if memory is not None:
            after["userdata"][...] = memory
            for data, row in zip(self._data, memory, strict=True):
                data.userdata[:] = row
        _write_parts(buffers.obs, task.observe(after))

        ended = np.flatnonzero(buffers.terminated | buffers.truncated)
        if len(ended):
            for final, obs in zip(tree_leaves(buffers.final_obs), tree_leaves(buffers.obs), strict=True):
                final[...] = obs
            self._begin(ended)
        return self._buffers.step(len(ended) > 0)

    def _simulate(self, work: Iterator[tuple[Any, Any, NumpyArray, NumpyArray]]) -> None:
        """Take environments from an iterator that several threads share, and apply their actions."""
        mj_step, num_substeps = self._mujoco.mj_step, self.task.frame_skip
        mj_forces = self._mujoco.mj_rnePostConstraint if self.task.needs_contact_forces else None
        for model, data, control, action in work:
            control[:] = action
            mj_step(model, data, num_substeps)
            if mj_forces is not None:
                mj_forces(model, data)

    def _dt(self) -> NDArray[np.float64]:
        """Seconds for each environment's step; models may be changed at any time."""
        if not self._has_own_models:
            return np.full(self.num_envs, self.models[0].opt.timestep * self.task.frame_skip)
        return np.array([model.opt.timestep for model in self.models]) * self.task.frame_skip

    def _begin(self, indices: Sequence[int] | NDArray[np.intp]) -> None:
        """Start new episodes in some environments and write their observations."""
        fields, sources = self._fields[0]
        rows = np.asarray(indices)
        for i in rows:
            model, data = self.models[i], self._data[i]
            self._mujoco.mj_resetData(model, data)
            self.task.begin(model, data, self._generators[i])
            self._mujoco.mj_forward(model, data)
            for array, (views, _) in zip(fields.values(), sources, strict=True):
                array[i] = views[i]
        self._elapsed[rows] = 0
        self._write_rows(rows)
        if self.task.changes_model:
            self._close_camera()  # it has a copy of the model as it was

    def _write_rows(self, rows: NDArray[np.intp]) -> None:
        parts = self.task.observe({name: array[rows] for name, array in self._fields[0][0].items()})
        _write_parts(self._buffers.arrays.obs, parts, rows)

    def spawn(self, num_envs: int) -> MujocoVecEnv:
        """Make independent environments of the same kind, with copies of the models in turn."""
        models = [copy.copy(self.models[i % self.num_envs]) for i in range(num_envs)]
        own_models = models if self._was_given_models else None
        return MujocoVecEnv(self.task, num_envs, device=self.device, models=own_models, **self._options)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the exact state of simulations, generators and differing models; None before the first reset."""
        if not self._was_reset:
            return None
        return {
            "task": type(self.task).__name__,
            "physics": torch.from_numpy(self._physics()),
            "fields": {name: torch.from_numpy(array.copy()) for name, array in self._fields[0][0].items()},
            "elapsed": torch.from_numpy(self._elapsed.copy()),
            "generator": [json.dumps(generator.bit_generator.state) for generator in self._generators],
            "model": model_differences(self._base, self.models) if self._has_own_models else {},
        }

    def _physics(self) -> NDArray[np.float64]:
        kind = self._mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty((self.num_envs, self._mujoco.mj_stateSize(self._base, kind)))
        for model, data, row in zip(self.models, self._data, physics, strict=True):
            self._mujoco.mj_getState(model, data, row, kind)
        return physics

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state from ``state_dict``; nothing changes when it does not fit."""
        fields = self._fields[0][0]
        self._check_state(state, fields)
        set_model_differences(self._base, self.models, state["model"])
        kind = self._mujoco.mjtState.mjSTATE_INTEGRATION
        for model, data, row in zip(self.models, self._data, state["physics"].cpu().numpy(), strict=True):
            # What MuJoCo computes from the state is computed again by the next step.
            self._mujoco.mj_setState(model, data, row, kind)
        for name, array in fields.items():
            array[...] = state["fields"][name].cpu().numpy()
        self._elapsed[...] = state["elapsed"].cpu().numpy()
        for generator, saved in zip(self._generators, state["generator"], strict=True):
            generator.bit_generator.state = json.loads(saved)
        self._was_reset = True
        self._write_rows(np.arange(self.num_envs))
        if self._has_own_models:
            self._close_camera()

    def _check_state(self, state: Mapping[str, Any], fields: Mapping[str, NumpyArray]) -> None:
        name = type(self.task).__name__
        if state.get("task") != name:
            raise EnvStateError(f"The state is of the task {state.get('task')!r}, this one is {name!r}.")
        saved_fields = state.get("fields", {})
        pairs = {"physics": (self._physics(), state.get("physics")), "elapsed": (self._elapsed, state.get("elapsed"))}
        pairs |= {f"fields.{key}": (array, saved_fields.get(key)) for key, array in fields.items()}
        for key, (ours, saved) in pairs.items():
            if not isinstance(saved, Tensor) or tuple(saved.shape) != ours.shape:
                shape = list(saved.shape) if isinstance(saved, Tensor) else repr(saved)
                raise EnvStateError(
                    f"{name} cannot restore {key!r}: it needs the shape {list(ours.shape)}, the saved state has "
                    f"{shape}. Restore with the same num_envs and models."
                )
        if len(state.get("generator", ())) != self.num_envs or "model" not in state:
            raise EnvStateError(f"{name} cannot restore a state without 'generator' for each environment and 'model'.")
        if state["model"] and not self._has_own_models:
            differences = ", ".join(sorted(state["model"]))
            raise EnvStateError(f"The saved models differ in {differences}; restore with the same models or randomize.")

    def step_time(self) -> tuple[float | None, float | None]:
        """Return the time of the physics steps in one step."""
        return self.models[0].opt.timestep * self.task.frame_skip, None

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Render environment ``index`` as a ``[480, 480, 3]`` image."""
        if not 0 <= index < self.num_envs:
            raise EnvError(f"MujocoVecEnv has environments 0 to {self.num_envs - 1}, not {index}.")
        model = self.models[index]
        if self._camera is None or (self._has_own_models and self._camera_index != index):
            self._close_camera()
            model = copy.copy(model)  # the camera changes its visual settings
            self._camera = Camera(model, self._mujoco.MjData(model), IMAGE_SIZE, reflections=True)
            self._camera_index = index
        # The positions in data lag its state by a substep, and rendering must not move them.
        ours, shown = self._data[index], self._camera.data
        shown.qpos[:], shown.qvel[:] = ours.qpos, ours.qvel
        self._mujoco.mj_forward(self._camera.model, shown)
        return self._camera.render()

    def _close_camera(self) -> None:
        if self._camera is not None:
            self._camera.close()
            self._camera = None

    def close(self) -> None:
        """End the threads and free the camera."""
        self._stop_threads()
        self._close_camera()


def _load_mujoco() -> Any:
    render_without_display()
    try:
        return importlib.import_module("mujoco")
    except ImportError as error:
        raise EnvError("MuJoCo is not installed. Install it with: pip install 'apexrl[mujoco]'") from error


def _generators(seeds: Sequence[int]) -> list[np.random.Generator]:
    return [seeding.np_random(seed)[0] for seed in seeds]


def _only_copy(model: Any, rng: np.random.Generator) -> None:
    """Leave the copy of a model as it is."""


def _make_task(task: str | MujocoTask, options: dict[str, Any]) -> MujocoTask:
    if isinstance(task, MujocoTask):
        if options:
            raise EnvError(f"Give {sorted(options)} to the task itself: {type(task).__name__}(...).")
        return task
    check_known("There is no MuJoCo task", [task], MUJOCO_TASKS, f" There are {', '.join(MUJOCO_TASKS)}.")
    check_known(f"{task} has no option", options, [field.name for field in dataclasses.fields(MUJOCO_TASKS[task])])
    return MUJOCO_TASKS[task](**options)


def _parts_space(parts: Parts) -> spaces.Box | spaces.Dict:
    if isinstance(parts, Mapping):
        return spaces.Dict({key: _parts_space(part) for key, part in parts.items()})
    return spaces.Box(-np.inf, np.inf, (sum(part.shape[1] for part in parts),), np.float32)


def _write_parts(out: Tree, parts: Parts, rows: NDArray[np.intp] | None = None) -> None:
    """Write the parts of an observation side by side into ``out``, or into some of its rows."""
    if isinstance(parts, Mapping):
        for key, part in parts.items():
            _write_parts(out[key], part, rows)
    elif rows is None:
        np.concatenate(parts, axis=1, out=out, casting="same_kind")
    else:
        out[rows] = np.concatenate(parts, axis=1)
