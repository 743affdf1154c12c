"""Demonstrations in the HDF5 layout of robomimic and LIBERO: experts recorded, scripted or learned, and files read.

One file a task, ``<task>_demo.hdf5``::

    data                        attributes: num_demos, total, env_args, problem_info (both JSON; the latter holds
                                language_instruction)
    data/demo_0                 attributes: num_samples, init_state
    data/demo_0/obs/<group>     [n, ...] what was seen before each action
    data/demo_0/actions         [n, A] in [-1, 1]
    data/demo_0/states          [n, S] full state of the simulator before each action
    data/demo_0/rewards, dones  [n] 1 at the last step
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch.nn import functional

from apexrl.envs.suites.base import Simulator, TaskSuite, encode_instruction
from apexrl.errors import ConfigError, EnvError
from apexrl.models.encoder import is_picture
from apexrl.policies.vla import VALID_STEPS
from apexrl.types import ACTION, INSTRUCTION_KEY, OBSERVATION, STATE_KEY

if TYPE_CHECKING:
    import h5py

TASK_ID, DEMO_ID = "task_id", "demo_id"
SUFFIX = "_demo.hdf5"
LIBERO_STATE = ("ee_pos", "ee_ori", "gripper_states")
"""What LIBERO's files hold of our group ``state``, in this order."""
LIBERO_PICTURE = "{}_rgb"
"""What LIBERO's files call the pictures of a camera; they stand upside down."""


Plans: TypeAlias = Sequence[Mapping[int, NDArray[np.float32]]]
"""For each task, by the number of the training state, actions ``[n, A]`` that lead to the goal."""
NO_PLAN = np.zeros((0, 0), np.float32)
"""Of a state from which the goal was not reached."""


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
        num_workers: processes that each record a task; 0 records here, or in one process when the suite draws.
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
    if per_task < 1:
        raise ConfigError(f"per_task must be at least 1, got {per_task}.")
    if num_workers < 0 or start < 0:
        raise ConfigError(f"num_workers and start must not be negative, got {num_workers} and {start}.")
    if plans is not None:
        _check_plans(suite, plans)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    results: dict[str, Recorded] = {}
    plans_of: Sequence[Mapping[int, NDArray[np.float32]] | None] = [None] * suite.num_tasks if plans is None else plans

    def done(task_id: int, recorded: Recorded) -> None:
        results[suite.task_names[task_id]] = recorded
        if on_progress is not None:
            on_progress(suite.task_names[task_id], recorded)

    if num_workers == 0 and not suite.renders:
        for task_id in range(suite.num_tasks):
            done(task_id, _record_task(suite, task_id, directory, per_task, start, plans_of[task_id]))
    else:
        context = multiprocessing.get_context("spawn")
        count = min(max(1, num_workers), suite.num_tasks)
        # Where it draws, a new process for every task: a graphics context dies with its process.
        with ProcessPoolExecutor(count, context, max_tasks_per_child=1 if suite.renders else None) as pool:
            tasks = {
                pool.submit(_record_task, suite, task_id, directory, per_task, start, plans_of[task_id]): task_id
                for task_id in range(suite.num_tasks)
            }
            try:
                for future in as_completed(tasks):
                    done(tasks[future], future.result())
            except BrokenProcessPool as error:
                raise EnvError(
                    f"A process that recorded '{suite.name}' died; use fewer workers (--num-workers)."
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)
    return {name: results[name] for name in suite.task_names}


def _check_plans(suite: TaskSuite, plans: Plans) -> None:
    """Raise before a file is replaced."""
    shapes = {plan.shape[1:] for of_task in plans for plan in of_task.values()}
    if len(plans) != suite.num_tasks or shapes - {suite.action_space.shape}:
        raise ConfigError(
            f"record_demos needs plans for {suite.num_tasks} tasks with actions {suite.action_space.shape}, got "
            f"{len(plans)} with {sorted(shapes)}."
        )
    if empty := [name for name, of_task in zip(suite.task_names, plans, strict=True) if not of_task]:
        raise EnvError(
            f"The policy reached the goal of {', '.join(empty)} from none of the training states it began with; leave "
            f"the task out (--tasks), give it more time ({suite.horizon} control steps; --horizon), begin with an "
            "earlier state (--start), or train it longer."
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
    simulator = suite.make_simulator(task_id)
    try:
        for number, init_state in enumerate(suite.init_states(task_id, "train")[start:], start):
            demo = _demonstrate(suite, simulator, init_state, None if plans is None else plans.get(number, NO_PLAN))
            if demo is None:
                failures += 1
            else:
                demos.append(demo)
            if len(demos) == per_task:
                break
    except NotImplementedError as error:
        raise EnvError(f"'{suite.name}' has no scripted experts; use demonstrations recorded elsewhere.") from error
    finally:
        simulator.close()
    if not demos:
        raise EnvError(
            f"The expert of '{name}' reached its goal from none of {failures} training states (beginning with number "
            f"{start}); leave the task out (--tasks), raise its horizon ({suite.horizon}; --horizon), or begin with an "
            "earlier state (--start)."
        )
    target = directory / f"{name}{SUFFIX}"
    _write(target, suite, task_id, demos, "expert" if plans is None else "policy")
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
        action = simulator.expert_action() if plan is None else plan[step]
        actions.append(np.clip(action, low, high).astype(np.float32))
        if simulator.advance(actions[-1]):
            obs = {name: np.stack([step[name] for step in seen]) for name in seen[0]}
            return _Demo(np.array(init_state), obs, np.stack(actions), np.stack(states))
    return None


def _write(path: Path, suite: TaskSuite, task_id: int, demos: Sequence[_Demo], demonstrator: str) -> None:
    """Write a file under another name, force it to the disk, and rename it."""
    name, instruction = suite.task_names[task_id], suite.instructions[task_id]
    temporary = path.with_name(f".{path.name}.part")
    try:
        with _hdf5().File(temporary, "w") as file:
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


def _write_demo(group: h5py.Group, demo: _Demo) -> None:
    count = len(demo.actions)
    last = np.zeros(count, np.uint8)
    last[-1] = 1
    group.attrs["num_samples"] = count
    group.attrs["init_state"] = demo.init_state
    group.create_dataset("actions", data=demo.actions)
    group.create_dataset("states", data=demo.states)
    group.create_dataset("rewards", data=last)
    group.create_dataset("dones", data=last)
    for name, values in demo.obs.items():
        # Pictures differ little from one step to the next; vectors are too small to gain.
        options = {"compression": "gzip", "compression_opts": 1} if values.dtype == np.uint8 else {}
        group.create_dataset(f"obs/{name}", data=values, **options)


def load_demos(
    path: Path | str,
    space: TaskSuite | gym.spaces.Dict,
    chunk: int,
    *,
    per_task: int | None = None,
) -> TensorDict:
    """Read demonstrations as samples, one for every control step.

    The action of a sample is the next ``chunk`` actions, row by row. At the end of a demonstration, where fewer are
    left, the last one is repeated; ``valid_steps`` says how many are real.

    LIBERO's own files are read too: ``state`` is made of ``ee_pos``, ``ee_ori`` and ``gripper_states``, the pictures
    of a camera are ``<camera>_rgb`` turned upright. Pictures of another size are resized.

    Args:
        path: a file, or a directory of files.
        space: a suite, whose tasks' files and instructions are then used, or the observation groups wanted, when all
            files of the directory are read with the instructions in them.
        chunk: actions of a sample.
        per_task: demonstrations of each file at most; None reads all.

    Returns:
        Samples ``[B]``: ``observation`` (the groups, and ``instruction`` as 96 bytes), ``action [B, chunk * A]``,
        ``valid_steps``, ``task_id`` (number of the suite's task, or of the file) and ``demo_id``, ``[B, 1]`` each.

    Raises:
        ConfigError: names the file and the dataset that is missing or does not fit.
    """
    if chunk < 1 or (per_task is not None and per_task < 1):
        raise ConfigError(f"chunk and per_task must be at least 1, got {chunk} and {per_task}.")
    suite = space if isinstance(space, TaskSuite) else None
    groups = suite.observation_space if suite is not None else space
    assert isinstance(groups, gym.spaces.Dict)
    wanted = {name: box for name, box in groups.spaces.items() if name != INSTRUCTION_KEY}
    size = None if suite is None else int(np.prod(suite.action_space.shape))
    files = list(_files(Path(path), suite))
    total = sum(_num_samples(file, per_task, size) for _, file in files)
    samples, filled, demo_id = TensorDict(batch_size=[total]), 0, 0
    for task_id, file in files:
        with _opened(file) as content:
            text = _instruction(content, file) if suite is None else suite.instructions[task_id]
            words = torch.from_numpy(encode_instruction(text).copy())
            for demo in _demos(content, file)[:per_task]:
                part = _samples(demo, file, wanted, chunk, size)
                part[OBSERVATION, INSTRUCTION_KEY] = words.expand(len(part), -1)
                part[TASK_ID] = torch.full((len(part), 1), task_id)
                part[DEMO_ID] = torch.full((len(part), 1), demo_id)
                if not demo_id:
                    samples = part.new_empty(torch.Size([total]))
                widths = sorted({samples[ACTION].shape[-1] // chunk, part[ACTION].shape[-1] // chunk})
                if len(widths) > 1:
                    raise ConfigError(f"{path}: the files hold actions of different sizes, {widths}.")
                samples[filled : filled + len(part)] = part
                filled, demo_id = filled + len(part), demo_id + 1
    return samples


def _num_samples(file: Path, per_task: int | None, size: int | None) -> int:
    """Count before anything is read, for pictures may fill most of the memory: they are then read to their place."""
    with _opened(file) as content:
        return sum(len(_actions(demo, file, size)) for demo in _demos(content, file)[:per_task])


def _files(path: Path, suite: TaskSuite | None) -> Iterator[tuple[int, Path]]:
    """Yield the number of a task and its file."""
    if path.is_file():
        names = [] if suite is None else list(suite.task_names)
        stem = path.name.removesuffix(SUFFIX)
        if suite is not None and stem not in names and len(names) > 1:
            raise ConfigError(f"{path} is of none of the tasks of '{suite.name}'; name it <task>{SUFFIX}.")
        yield (names.index(stem) if stem in names else 0), path
        return
    found = sorted(path.glob("*.hdf5")) if path.is_dir() else []
    if not found:
        raise ConfigError(f"{path} holds no demonstrations (*.hdf5); record some with 'apexrl demos'.")
    if suite is None:
        yield from enumerate(found)
        return
    for task_id, name in enumerate(suite.task_names):
        file = path / f"{name}{SUFFIX}"
        if not file.is_file():
            raise ConfigError(
                f"{path} has no demonstrations of '{name}' ({file.name}); record them with 'apexrl demos', "
                "or leave the task out of task.task_names_to_use."
            )
        yield task_id, file


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file, with one clear message when it is none."""
    try:
        file = _hdf5().File(path, "r")
    except OSError as error:
        raise ConfigError(f"{path} is not a readable HDF5 file: {error}. Use another one.") from error
    with file:
        yield file


def _demos(content: h5py.File, file: Path) -> list[h5py.Group]:
    """Return the demonstrations of a file in the order of their numbers."""
    data = content.get("data")
    names = [] if not isinstance(data, _hdf5().Group) else [name for name in data if name.startswith("demo")]
    if not names:
        raise ConfigError(f"{file} has no dataset 'data/demo_0': it is not in the layout of robomimic and LIBERO.")
    return [data[name] for name in sorted(names, key=lambda name: (len(name), name))]


def _instruction(content: h5py.File, file: Path) -> str:
    """Return the instruction of a file: of its problem_info, of its BDDL text, or of its name, as LIBERO makes them."""
    attributes = content["data"].attrs if "data" in content else {}
    text: Any = ""
    if "problem_info" in attributes:
        try:
            text = json.loads(attributes["problem_info"]).get("language_instruction", "")
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: the attribute 'problem_info' of 'data' is no JSON mapping.") from error
    if isinstance(text, list):
        text = "".join(text)
    if not text and (found := re.search(r"\(:language\s+([^)]*)\)", str(attributes.get("bddl_file_content", "")))):
        text = found[1]
    if not text:
        text = re.sub(r"^[A-Z_]+_SCENE\d+_", "", file.name.removesuffix(SUFFIX).removesuffix(".hdf5")).replace("_", " ")
    return str(text).strip().strip('"')


def _actions(demo: h5py.Group, file: Path, size: int | None) -> torch.Tensor:
    actions = torch.from_numpy(_read(demo, "actions", file).astype(np.float32))
    if actions.ndim != 2 or not len(actions) or (size is not None and actions.shape[1] != size):
        needed = "[n, A]" if size is None else f"[n, {size}]"
        raise ConfigError(f"{file}: {demo.name}/actions must be {needed}, got {list(actions.shape)}.")
    if not actions.isfinite().all():
        raise ConfigError(f"{file}: {demo.name}/actions holds numbers that are not finite.")
    return actions


def _samples(
    demo: h5py.Group, file: Path, wanted: dict[str, gym.Space[Any]], chunk: int, size: int | None
) -> TensorDict:
    """Return one sample for every control step of a demonstration."""
    actions = _actions(demo, file, size)
    count = len(actions)
    later = torch.arange(count).unsqueeze(-1) + torch.arange(chunk)
    obs = {name: _group(demo, name, box, file, count) for name, box in wanted.items()}
    return TensorDict(
        {
            OBSERVATION: TensorDict(obs, batch_size=[count]),
            ACTION: actions[later.clamp_max(count - 1)].flatten(1),
            VALID_STEPS: (count - torch.arange(count)).clamp_max(chunk).unsqueeze(-1),
        },
        batch_size=[count],
    )


def _group(demo: h5py.Group, name: str, box: gym.Space[Any], file: Path, count: int) -> torch.Tensor:
    """Return one group of the observations, in our names or in LIBERO's."""
    assert isinstance(box, gym.spaces.Box)
    libero_picture = f"obs/{LIBERO_PICTURE.format(name)}"
    if name == STATE_KEY and f"obs/{name}" not in demo and f"obs/{LIBERO_STATE[0]}" in demo:
        values = np.concatenate([_read(demo, f"obs/{part}", file) for part in LIBERO_STATE], axis=-1)
    elif f"obs/{name}" not in demo and libero_picture in demo:
        values = _read(demo, libero_picture, file)[:, ::-1]
    else:
        values = _read(demo, f"obs/{name}", file)
    group = torch.from_numpy(np.ascontiguousarray(values, dtype=box.dtype))
    if is_picture(box) and group.ndim == 4 and group.shape[1:] != box.shape and group.shape[-1] == box.shape[-1]:
        channels_first = group.permute(0, 3, 1, 2).float()
        resized = functional.interpolate(channels_first, box.shape[:2], mode="area")
        group = resized.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    if group.shape != (count, *box.shape):
        raise ConfigError(
            f"{file}: {demo.name}/obs/{name} must be {[count, *box.shape]}, got {list(group.shape)}. "
            "Use the suite that it was recorded with, or one with the same options."
        )
    return group


def _read(demo: h5py.Group, name: str, file: Path) -> NDArray[Any]:
    found = demo.get(name)
    if not isinstance(found, _hdf5().Dataset):
        there = sorted(demo["obs"]) if name.startswith("obs/") and "obs" in demo else sorted(demo)
        raise ConfigError(f"{file} has no dataset '{demo.name}/{name}'; there are {there}.")
    try:
        values: NDArray[Any] = found[()]
    except OSError as error:
        raise ConfigError(f"{file}: the dataset '{demo.name}/{name}' is damaged: {error}. Use another file.") from error
    return values


def _hdf5() -> Any:
    """Load the library of these files, which only demonstrations need."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise ConfigError("Demonstrations need h5py. Install it with: pip install 'apexrl[suites]'") from error
