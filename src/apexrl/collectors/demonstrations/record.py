"""Experts, scripted or learned, recorded as demonstrations in the HDF5 layout of robomimic and LIBERO.

One file a task, ``<task>_demo.hdf5``::

    data                        attributes: num_demos, total, env_args, problem_info (both JSON; the latter holds
                                language_instruction), and ours: demonstrator, expert or policy
    data/demo_0                 attributes: num_samples, init_state
    data/demo_0/obs/<group>     [n, ...] what was seen before each action
    data/demo_0/actions         [n, A] in [-1, 1]
    data/demo_0/states          [n, S] full state of the simulator before each action
    data/demo_0/rewards, dones  [n] 1 at the last step
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from apexrl.collectors.demonstrations.samples import SUFFIX, hdf5
from apexrl.core.errors import ConfigError, EnvError
from apexrl.core.system import files
from apexrl.envs.options import check_at_least
from apexrl.envs.suites.base import Simulator, TaskSuite

if TYPE_CHECKING:
    import h5py

Plans: TypeAlias = Sequence[Mapping[int, NDArray[np.float32]]]
"""For each task, by the number of the training state, actions ``[n, A]`` that lead to the goal."""
NO_PLAN = np.zeros((0, 0), np.float32)
"""Of a state from which the goal was not reached."""
_OTHER_TASKS = "leave the task out (--tasks), raise its horizon ({}; --horizon), or begin with another state (--start)."


class Recorded(NamedTuple):
    """What recording one task came to."""

    path: Path
    num_demos: int
    num_failures: int
    """Initial states from which the expert did not reach the goal; they are skipped."""
    num_steps: int


class _Demo(NamedTuple):
    init_state: NDArray[np.float64]
    obs: dict[str, NDArray[Any]]
    actions: NDArray[np.float32]
    states: NDArray[np.float64]


def record_demos(
    suite: TaskSuite,
    path: Path | str,
    per_task: int,
    *,
    num_workers: int = 0,
    start: int = 0,
    plans: Plans | None = None,
    on_progress: Callable[[str, Recorded], None] | None = None,
) -> dict[str, Recorded]:
    """Record experts from the training states of a suite, one file a task.

    States from which an expert fails are skipped and counted, and the next one is taken. A file that is there is
    replaced whole, once the new one is complete.

    Args:
        suite: with scripted experts, unless there are plans.
        path: directory of the files; made when it is not there.
        per_task: demonstrations of each task.
        num_workers: processes that each record a task; 0 records here, or in one process when the suite renders.
        start: number of the initial state to begin with.
        plans: actions to take instead of asking the scripted experts, such as ``TrainedPolicy.plans``; whoever made
            them may have seen something else than this suite shows and is recorded.
        on_progress: called with a task's name and what was recorded, as each is done.

    Returns:
        By task name what was recorded; less than ``per_task`` where the training states ran out.

    Raises:
        ConfigError: for impossible numbers.
        EnvError: when a suite has no experts, or an expert solves a task from none of its training states.
    """
    check_at_least("", 1, per_task=per_task)
    check_at_least("", 0, num_workers=num_workers, start=start)
    if plans is not None:
        _check_plans(suite, plans)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    plans_of = [None] * suite.num_tasks if plans is None else plans
    jobs = [
        functools.partial(_record_task, suite, task_id, directory, per_task, start, plans_of[task_id])
        for task_id in range(suite.num_tasks)
    ]
    results: dict[str, Recorded] = {}

    def done(task_id: int, recorded: Recorded) -> None:
        results[suite.task_names[task_id]] = recorded
        if on_progress is not None:
            on_progress(suite.task_names[task_id], recorded)

    if num_workers == 0 and not suite.renders:
        for task_id, job in enumerate(jobs):
            done(task_id, job())
    else:
        _record_in_processes(suite, directory, jobs, num_workers, done)
    return {name: results[name] for name in suite.task_names}


def _record_in_processes(
    suite: TaskSuite,
    directory: Path,
    jobs: Sequence[Callable[[], Recorded]],
    num_workers: int,
    done: Callable[[int, Recorded], None],
) -> None:
    """Record every task in a process; Ctrl-C is for this one, which then ends the others at once."""
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    count = min(max(1, num_workers), suite.num_tasks)
    # Where it renders, a new process for every task: a graphics context dies with its process.
    with ProcessPoolExecutor(count, context, max_tasks_per_child=1 if suite.renders else None) as pool:
        try:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes begin with what is blocked
            try:
                tasks = {pool.submit(job): task_id for task_id, job in enumerate(jobs)}
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for future in as_completed(tasks):
                done(tasks[future], future.result())
        except KeyboardInterrupt:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            for name in suite.task_names:
                _unfinished(directory / f"{name}{SUFFIX}").unlink(missing_ok=True)
            raise
        except BrokenProcessPool as error:
            raise EnvError(f"A process that recorded '{suite.name}' died; use fewer (--num-workers).") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _check_plans(suite: TaskSuite, plans: Plans) -> None:
    """Raise before a file is replaced."""
    shapes = {plan.shape[1:] for of_task in plans for plan in of_task.values()}
    if len(plans) != suite.num_tasks or shapes - {suite.action_space.shape}:
        needed = f"{suite.num_tasks} tasks with actions {suite.action_space.shape}"
        raise ConfigError(f"record_demos needs plans for {needed}, got {len(plans)} with {sorted(shapes)}.")
    if empty := [name for name, of_task in zip(suite.task_names, plans, strict=True) if not of_task]:
        raise EnvError(
            f"The policy reached the goal of {', '.join(empty)} from none of the training states it began with; train "
            f"it longer, or {_OTHER_TASKS.format(suite.horizon)}"
        )


def _record_task(
    suite: TaskSuite,
    task_id: int,
    directory: Path,
    per_task: int,
    start: int,
    plans: Mapping[int, NDArray[np.float32]] | None,
) -> Recorded:
    """Record one task into its file."""
    name = suite.task_names[task_id]
    demos: list[_Demo] = []
    failures = 0
    with contextlib.closing(suite.make_simulator(task_id)) as simulator:
        for number, init_state in enumerate(suite.init_states(task_id, "train")[start:], start):
            demo = _demonstrate(suite, simulator, init_state, None if plans is None else plans.get(number, NO_PLAN))
            if demo is None:
                failures += 1
            else:
                demos.append(demo)
            if len(demos) == per_task:
                break
    if not demos:
        raise EnvError(
            f"The expert of '{name}' reached its goal from none of {failures} training states (beginning with number "
            f"{start}); {_OTHER_TASKS.format(suite.horizon)}"
        )
    target = directory / f"{name}{SUFFIX}"
    _write_file(target, suite, task_id, demos, "expert" if plans is None else "policy")
    return Recorded(target, len(demos), failures, sum(len(demo.actions) for demo in demos))


def _demonstrate(
    suite: TaskSuite, simulator: Simulator, init_state: NDArray[np.float64], plan: NDArray[np.float32] | None
) -> _Demo | None:
    """Let the expert act from a state, or follow a plan; returns None when the goal is not reached in time."""
    simulator.restore(init_state)
    seen: list[dict[str, NDArray[Any]]] = []
    actions: list[NDArray[np.float32]] = []
    states: list[NDArray[np.float64]] = []
    low, high = suite.action_space.low, suite.action_space.high
    for step in range(suite.horizon if plan is None else len(plan)):
        seen.append({name: np.array(value) for name, value in simulator.observe().items()})
        states.append(np.array(simulator.state()))
        try:
            action = simulator.expert_action() if plan is None else plan[step]
        except NotImplementedError as error:
            advice = "use demonstrations recorded elsewhere"
            raise EnvError(f"'{suite.name}' has no scripted experts; {advice}.") from error
        actions.append(np.clip(action, low, high).astype(np.float32))
        if simulator.advance(actions[-1]):
            obs = {name: np.stack([step[name] for step in seen]) for name in seen[0]}
            return _Demo(np.array(init_state), obs, np.stack(actions), np.stack(states))
    return None


def _write_file(path: Path, suite: TaskSuite, task_id: int, demos: Sequence[_Demo], demonstrator: str) -> None:
    """Write a file under another name, force it to the disk, and rename it."""
    name, instruction = suite.task_names[task_id], suite.instructions[task_id]
    temporary = _unfinished(path)
    try:
        with files.writing(path), hdf5().File(temporary, "w") as file:
            data = file.create_group("data")
            data.attrs["num_demos"] = len(demos)
            data.attrs["demonstrator"] = demonstrator
            data.attrs["total"] = sum(len(demo.actions) for demo in demos)
            data.attrs["env_args"] = json.dumps(
                {"env_name": name, "type": "apexrl", "env_kwargs": {"suite": suite.name, "horizon": suite.horizon}}
            )
            data.attrs["problem_info"] = json.dumps({"problem_name": name, "language_instruction": instruction})
            for number, demo in enumerate(demos):
                _write_demo(data.create_group(f"demo_{number}"), demo)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _write_demo(group: h5py.Group, demo: _Demo) -> None:
    count = len(demo.actions)
    last = np.zeros(count, np.uint8)
    last[-1] = 1
    group.attrs["num_samples"] = count
    group.attrs["init_state"] = demo.init_state
    for name, values in (("actions", demo.actions), ("states", demo.states), ("rewards", last), ("dones", last)):
        group.create_dataset(name, data=values)
    for name, values in demo.obs.items():
        # Images differ little from one step to the next; vectors are too small to gain.
        options = {"compression": "gzip", "compression_opts": 1} if values.dtype == np.uint8 else {}
        group.create_dataset(f"obs/{name}", data=values, **options)
