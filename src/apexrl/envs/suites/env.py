"""A task suite as a ``VecEnv`` whose step is one chunk of actions."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apexrl.core.errors import ConfigError, EnvError, EnvStateError
from apexrl.core.instructions import INSTRUCTION_BYTES, encode_instruction
from apexrl.core.metrics import MetricSpec
from apexrl.core.types import CONTROL_STEPS, EPISODE_ID, INSTRUCTION_KEY, LOST, TASK_ID, EnvStep, Observation
from apexrl.envs.base import VecEnv
from apexrl.envs.display import render_without_display
from apexrl.envs.mujoco.simulation import num_cores
from apexrl.envs.options import check_at_least
from apexrl.envs.step_buffers import StepBuffers
from apexrl.envs.suites.base import InitState, Split, StateEpisode, TaskSuite, own_split
from apexrl.envs.workers.arrays import make_buffers
from apexrl.envs.workers.suite_processes import Answer, SlotProgress, SuiteWorkers, WorkerCounts


class SuiteVecEnv(VecEnv):
    """Episodes of a task suite, stepped together in chunks of control steps.

    An action ``[chunk * A]`` holds the control steps one after another, clipped to [-1, 1]. They are taken one by one
    until the task is solved or the horizon is reached; the observation is taken once, after the last. Reward 1 and
    ``terminated`` come with success, ``truncated`` with the horizon.

    Episodes come from ``assign``; without it they come endlessly from the split: number ``e`` has task
    ``e % num_tasks`` and the initial state ``e // num_tasks`` of it, and environment ``i`` runs the numbers ``i``,
    ``i + num_envs``, …, so that the first E episodes are the same ones for any number of environments.

    ``EnvStep.info`` has ``episode_id`` and ``task_id`` (-1 where none ran), ``control_steps`` (the actions of the chunk
    that were taken) and ``lost``.

    A worker that dies or hangs is replaced; its episodes end ``truncated`` and ``lost``. Where a suite that
    renders loses one as it begins, the others assigned from the same initial state are not begun.

    Args:
        suite: the tasks.
        num_envs: episodes that run at the same time.
        chunk: control steps in an action.
        num_workers: processes that share the environments; 0 runs them in this one, None takes one per core. A suite
            that renders has a process for every simulator instead.
        max_cached_envs: simulators that a process keeps alive, one per task; None for 64. When the suite renders, of
            all processes together, at least one for every environment; None for 4, as each takes up to 2.3 GB.
        split: where episodes come from that are not assigned.
        max_steps: control steps after which an episode is truncated; None takes the suite's horizon.
        device: where the tensors are wanted; the simulators run on the CPU.
        step_timeout: seconds after which a worker that has not answered a step is replaced.

    Raises:
        ConfigError: when a number is out of range.
        EnvError: when the workers cannot be started.
    """

    episode_type = StateEpisode
    suite: TaskSuite
    metric_specs: Mapping[str, MetricSpec] = {
        "success": MetricSpec("success", "max"),
        "control_steps": MetricSpec("control_steps", "sum", "rollout"),
    }

    def __init__(
        self,
        suite: TaskSuite,
        num_envs: int,
        *,
        chunk: int = 5,
        num_workers: int | None = None,
        max_cached_envs: int | None = None,
        split: Split = "train",
        max_steps: int | None = None,
        device: torch.device | str = "cpu",
        step_timeout: float = 60.0,
    ) -> None:
        counts = {"chunk": chunk, "max_cached_envs": max_cached_envs, "max_steps": max_steps}
        check_at_least("SuiteVecEnv.", 1, num_envs=num_envs, **counts)
        check_at_least("SuiteVecEnv.", 0, num_workers=num_workers)
        if step_timeout <= 0:
            raise ConfigError(f"SuiteVecEnv.step_timeout must be above 0 seconds, got {step_timeout}.")
        self.suite, self.num_envs, self.chunk, self.split = suite, num_envs, chunk, own_split(split)
        self.task_names = tuple(suite.task_names)
        self.device = torch.device(device)
        self.horizon = max_steps or suite.horizon
        """Control steps after which an episode is truncated."""
        self.max_episode_steps = -(-self.horizon // chunk)
        self.video_fps = max(2.0, suite.control_hz / chunk)
        self._options: dict[str, Any] = {**counts, "num_workers": num_workers, "step_timeout": step_timeout}
        self._instructions = np.stack([encode_instruction(text) for text in suite.instructions])
        words = gym.spaces.Box(0, 255, (INSTRUCTION_BYTES,), np.uint8)
        self.observation_space = gym.spaces.Dict({**suite.observation_space.spaces, INSTRUCTION_KEY: words})
        self.action_space = gym.spaces.Box(-1.0, 1.0, (chunk * int(np.prod(suite.action_space.shape)),), np.float32)
        self._make_buffers()
        self._states: dict[int, list[NDArray[np.float64]]] = {}
        self._assigned: tuple[list[InitState], int] | None = None
        """Of the last ``assign``, until it is reset: the episodes, and the control steps of each."""
        self._limit = self.horizon
        """Control steps of the episodes that run."""
        self._queue: list[InitState] | None = None
        """The episodes of the last ``assign``; None when they come from the split."""
        self._waiting: dict[int, deque[int]] = {}
        """Indices in the queue of the episodes that have not begun; by task where a process holds one simulator."""
        self._was_reset = False
        render_without_display()  # before a worker imports MuJoCo
        num_workers = num_cores() if num_workers is None else num_workers
        cached = max_cached_envs or (4 if suite.renders else 64)
        self.counts = WorkerCounts()
        """What the workers have done so far, also those that were released."""
        self._start = functools.partial(SuiteWorkers, suite, num_envs, num_workers, cached, step_timeout, self.counts)
        self._started: SuiteWorkers | None = None
        self._is_closed = False

    @property
    def _workers(self) -> SuiteWorkers:
        """Started when first needed: who only asks for spaces, or learns from demonstrations, has no processes."""
        if self._is_closed:
            raise EnvError("The environment is closed; create another.")
        self._started = self._started or self._start()
        return self._started

    def _make_buffers(self) -> None:
        N = self.num_envs
        arrays, _ = make_buffers(self.observation_space, self.action_space, N, len(self.metric_specs))
        self._obs, self._terminated = arrays.obs, arrays.terminated
        integers = (EPISODE_ID, TASK_ID, CONTROL_STEPS)
        self._info: dict[str, NDArray[Any]] = {name: np.zeros((N, 1), np.int64) for name in integers}
        self._info[LOST] = np.zeros((N, 1), np.bool_)
        self._buffers = StepBuffers(arrays, self.metric_specs, self.device, self._info)
        self._episode, self._task = np.full(N, -1), np.full(N, -1)
        """Number and task of the running episode; -1 where there is none."""
        self._elapsed = np.zeros(N, np.int64)
        """Control steps of the running episode."""
        self._lost = np.zeros(N, np.bool_)
        """Whether the worker of the running episode has died since the last step."""

    @property
    def num_distinct_episodes(self) -> int:
        """Initial states of the split; as many of each task, for the tasks are polled in turn."""
        return self.suite.num_tasks * min(len(self._states_of(task)) for task in range(self.suite.num_tasks))

    @property
    def busy(self) -> bool:
        """Whether an assigned episode has not ended yet."""
        return self._assigned is not None or (self._queue is not None and bool((self._episode >= 0).any()))

    def assign(self, episodes: Sequence[InitState], max_steps: int | None = None) -> None:
        """Let the next ``reset`` start these episodes; ``episode_id`` is the index in the list.

        They are truncated after ``max_steps`` control steps, or after those of the environments when not given.

        They begin in this order, and an environment whose episode ends takes the next one. Where the suite renders, it
        takes the next of its own task, which needs no other simulator, or else of the task that has most left for each
        environment that runs it. Once there is none it idles: its observation stays, ``truncated`` is true,
        ``episode_id`` -1 and ``control_steps`` 0.

        Raises:
            EnvError: when there is none, or one is of a task that the suite does not have.
        """
        if not episodes:
            raise EnvError("SuiteVecEnv.assign needs at least one episode.")
        check_at_least("", 1, max_steps=max_steps)
        if unknown := {task for task, _ in episodes} - {*range(self.suite.num_tasks)}:
            num_tasks = f"'{self.suite.name}' has {self.suite.num_tasks}"
            raise EnvError(f"An episode of task {min(unknown)} was assigned; {num_tasks}.")
        self._assigned = list(episodes), self.horizon if max_steps is None else max_steps

    def independent(self) -> SuiteVecEnv:
        """Return these environments: an episode depends on its initial state alone."""
        return self

    def start_episodes(self, starts: Sequence[InitState]) -> tuple[Observation, Sequence[int]]:
        """Start an episode from each of at most N initial states; the other environments idle."""
        self.assign(starts)
        return self.reset(), self._episode.tolist()

    def sample_episodes(self, count: int, rng: np.random.Generator) -> Sequence[StateEpisode]:
        """Draw episodes from different validation states, as many of each task."""
        return self.suite.sample_episodes(count, rng)

    def find_starts(self, episodes: Sequence[StateEpisode]) -> Sequence[InitState]:
        """Return the initial states of the episodes of a manifest."""
        return self.suite.find_states(episodes)

    def reset(self, seed: int | None = None) -> Observation:
        """Start the assigned episodes, or those of the split from number 0; the seed changes nothing."""
        self._queue, self._limit = self._assigned or (None, self.horizon)
        self._assigned = None
        self._end_episodes()
        for number, (task, _) in enumerate(self._queue or []):
            self._waiting.setdefault(int(task) if self.suite.renders else 0, deque()).append(number)
        self._lost.fill(False)
        self._was_reset = True
        self._begin(range(self.num_envs))
        idle = self._episode < 0
        for array in self._obs.values():
            array[idle] = array[0]  # an environment that never ran looks like one that does
        return self._buffers.observation()

    def step(self, action: Tensor) -> EnvStep:
        """Take a chunk of control steps ``[N, chunk * A]`` in every environment."""
        if not self._was_reset:
            raise EnvError("Call reset before step.")
        self._buffers.take(action)
        arrays = self._buffers.arrays
        chunks = arrays.action.clip(-1.0, 1.0).reshape(self.num_envs, self.chunk, -1)
        slots = np.flatnonzero((self._episode >= 0) & ~self._lost)
        limits = np.minimum(self.chunk, self._limit - self._elapsed[slots])
        found, lost = self._call(self._workers.advance, slots.tolist(), chunks[slots], limits.tolist())
        self._lost[lost] = True
        ended = self._write(found)
        if ended.any():
            for name, array in self._obs.items():
                arrays.final_obs[name][ended] = array[ended]
            self._begin(np.flatnonzero(ended & (self._episode >= 0)).tolist())
        return self._buffers.step(bool(ended.any()))

    def _write(self, found: Sequence[SlotProgress]) -> NDArray[np.bool_]:
        """Write what a step gave into the buffers and return ``[N]`` whether the episode ended."""
        idle, info = self._episode < 0, self._info
        self._lost &= ~idle
        self._terminated.fill(False)
        for name, column in ((TASK_ID, self._task), (EPISODE_ID, self._episode), (LOST, self._lost)):
            info[name][:, 0] = column
        info[CONTROL_STEPS].fill(0)
        for slots, obs, solved, taken in found:
            self._see(slots, obs)
            self._elapsed[slots] += taken
            self._terminated[slots, 0] = solved
            info[CONTROL_STEPS][slots, 0] = taken
        arrays = self._buffers.arrays
        arrays.metric[:] = self._terminated, info[CONTROL_STEPS]  # in the order of metric_specs
        arrays.reward[:] = self._terminated
        over = idle | self._lost | (self._elapsed >= self._limit)
        arrays.truncated[:, 0] = over & ~self._terminated[:, 0]
        return over | self._terminated[:, 0]

    def _begin(self, slots: Sequence[int]) -> None:
        """Start the next episodes in these environments; where there is none, the environment idles."""
        states: dict[int, NDArray[np.float64]] = {}
        for slot in slots:
            number = self._next_number(slot)
            self._episode[slot], self._task[slot], self._elapsed[slot], self._lost[slot] = number, -1, 0, False
            if number >= 0:
                self._task[slot], states[slot] = self._init_state(number)
        if not states:
            return
        started, idle = list(states), [slot for slot in slots if slot not in states]
        tasks = self._task[started]
        found, lost = self._call(self._workers.begin, started, tasks.tolist(), list(states.values()), idle)
        self._obs[INSTRUCTION_KEY][started] = self._instructions[tasks]
        for progress in found:
            self._see(progress.slots, progress.obs)
        self._lost[lost] = True  # the next step reports it
        if self.suite.renders:
            for slot in set(lost) & set(started):
                self._give_up(int(self._task[slot]), states[slot])

    def _give_up(self, task: int, state: NDArray[np.float64]) -> None:
        """Leave out what waits to start from a state at which a simulator has just died.

        Its task's slot would try it again at once, and a worker that dies three times in a row ends the run.
        """
        numbers = self._waiting.pop(task, ())
        if kept := deque(number for number in numbers if not np.array_equal(self._init_state(number)[1], state)):
            self._waiting[task] = kept

    def _see(self, slots: Sequence[int], obs: Mapping[str, NDArray[Any]]) -> None:
        """Write what some environments observe into the buffers."""
        for name, rows in obs.items():
            self._obs[name][slots] = rows
            # No success would come of it, and a batch without any teaches nothing.
            if rows.dtype.kind == "f" and not np.isfinite(rows).all():
                bad = slots[int(np.argmin(np.isfinite(rows.reshape(len(rows), -1)).all(1)))]
                raise EnvError(
                    f"The observation '{name}' of environment {bad} is not finite after {self._elapsed[bad]} control "
                    f"steps of task '{self.task_names[self._task[bad]]}': its simulator has failed."
                )

    def _next_number(self, slot: int) -> int:
        if self._queue is None:
            return slot if self._episode[slot] < 0 else int(self._episode[slot]) + self.num_envs
        if not self._waiting:
            return -1
        task = int(self._task[slot])
        if task not in self._waiting:
            running = Counter(self._task.tolist())
            task = max(self._waiting, key=lambda other: len(self._waiting[other]) / (1 + running[other]))
        number = self._waiting[task].popleft()
        if not self._waiting[task]:
            del self._waiting[task]
        return number

    def _init_state(self, number: int) -> InitState:
        if self._queue is not None:
            return self._queue[number]
        turn, task = divmod(number, self.suite.num_tasks)
        states = self._states_of(task)
        return InitState(task, states[turn % len(states)])

    def _states_of(self, task: int) -> list[NDArray[np.float64]]:
        if task not in self._states:
            self._states[task] = self.suite.init_states(task, self.split)
        return self._states[task]

    def _call(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            return function(*arguments)
        except EnvError:
            self._was_reset = False  # some environments have stepped, others not
            self._queue = None
            raise

    def spawn(self, num_envs: int) -> SuiteVecEnv:
        """Make an environment of the same suite on the initial states of ``val``, with workers of its own."""
        return SuiteVecEnv(self.suite, num_envs, split="val", device=self.device, **self._options)

    def state_dict(self) -> dict[str, Any] | None:
        """Return an empty state when no episode runs; None otherwise: there is no way to continue from here."""
        return None if self._was_reset and (self._episode >= 0).any() else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state in which no episode ran, the only one there is; ``reset`` starts the next."""
        if state:
            raise EnvStateError(f"SuiteVecEnv has no state between episodes; this one holds {sorted(state)}.")
        self._queue = []
        self._end_episodes()

    def _end_episodes(self) -> None:
        self._waiting = {}
        self._episode.fill(-1)
        self._task.fill(-1)

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Render the scene of environment ``index``, in which an episode must run, as an ``[H, W, 3]`` image."""
        if self._episode[index] < 0:
            raise EnvError(f"There is nothing to render: environment {index} runs no episode.")
        return self._workers.render(index)

    def release(self) -> None:
        """Close the simulators and end the workers; the next ``reset`` starts others. What runs ends here."""
        if self._started is not None:
            self._started.close()
        self._started, self._was_reset, self._queue = None, False, None
        self._end_episodes()

    def close(self) -> None:
        """Close the simulators and end the workers."""
        self._is_closed = True
        if self._started is not None:
            self._started.close()
