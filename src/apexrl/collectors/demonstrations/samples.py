"""Demonstrations read as samples, from files in the HDF5 layout of robomimic and LIBERO."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch.nn import functional

from apexrl.core.errors import ApexRLError, ConfigError
from apexrl.core.instructions import encode_instruction
from apexrl.core.observations import is_image
from apexrl.core.types import ACTION, INSTRUCTION_KEY, OBSERVATION, STATE_KEY, TASK_ID
from apexrl.envs.options import check_at_least
from apexrl.envs.suites.base import TaskSuite
from apexrl.policies.vla import VALID_STEPS

if TYPE_CHECKING:
    import h5py

DEMO_ID = "demo_id"
SUFFIX = "_demo.hdf5"
LIBERO_STATE = ("ee_pos", "ee_ori", "gripper_states")
"""What LIBERO's files hold of our group ``state``, in this order."""
LIBERO_IMAGE = "{}_rgb"
"""What LIBERO's files call the images of a camera; they stand upside down."""


def load_demos(
    path: Path | str, space: TaskSuite | gym.spaces.Dict, chunk: int, *, per_task: int | None = None
) -> TensorDict:
    """Read demonstrations as samples, one for every control step.

    The action of a sample is the next ``chunk`` actions, row by row. At the end of a demonstration, where fewer are
    left, the last one is repeated; ``valid_steps`` says how many are real.

    LIBERO's own files are read too: ``state`` is made of ``ee_pos``, ``ee_ori`` and ``gripper_states``, the images
    of a camera are ``<camera>_rgb`` turned upright. Images of another size are resized.

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
    check_at_least("", 1, chunk=chunk, per_task=per_task)
    suite = space if isinstance(space, TaskSuite) else None
    groups = suite.observation_space if suite is not None else space
    assert isinstance(groups, gym.spaces.Dict)
    wanted = {name: box for name, box in groups.spaces.items() if name != INSTRUCTION_KEY}
    size = None if suite is None else int(np.prod(suite.action_space.shape))
    with ExitStack() as stack:
        found: list[_Found] = []
        for task_id, file in _files(Path(path), suite):
            content = stack.enter_context(_opened(file))
            with _naming(file):
                demos = _demo_groups(content, file)[:per_task]
                if suite is not None:
                    _check_task(content, file, suite.task_names[task_id])
                text = _instruction(content, file) if suite is None else suite.instructions[task_id]
                words = torch.from_numpy(encode_instruction(text).copy())
                found += [_Found(task_id, file, words, demo, _actions(demo, file, size)) for demo in demos]
        if len(widths := {demo.actions.shape[1] for demo in found}) > 1:
            raise ConfigError(f"{path}: the files hold actions of different sizes, {sorted(widths)}.")
        # Images may fill most of the memory, so all of it is taken at once and each demonstration read to its place.
        total, filled = sum(len(demo.actions) for demo in found), 0
        samples = TensorDict(batch_size=[total])
        for demo_id, demo in enumerate(found):
            with _naming(demo.file):
                part = _samples(demo, wanted, chunk)
            part[DEMO_ID] = torch.full((len(part), 1), demo_id)
            samples = samples if filled else part.new_empty(torch.Size([total]))
            samples[filled : filled + len(part)] = part
            filled += len(part)
    return samples


class _Found(NamedTuple):
    """A demonstration in an open file, of which the actions alone have been read."""

    task_id: int
    file: Path
    words: torch.Tensor
    group: h5py.Group
    actions: torch.Tensor


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
    if suite is not None:
        found = [path / f"{name}{SUFFIX}" for name in suite.task_names]
    for task_id, file in enumerate(found):
        if not file.is_file():
            raise ConfigError(
                f"{path} has no demonstrations of '{file.name.removesuffix(SUFFIX)}' ({file.name}); record them with "
                "'apexrl demos', or leave the task out of task.task_names_to_use."
            )
        yield task_id, file


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file, with one clear message when it is none."""
    try:
        file = hdf5().File(path, "r")
    except OSError as error:
        raise ConfigError(f"{path} is not a readable HDF5 file: {error}. Use another one.") from error
    with file:
        yield file


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Name the file of what HDF5 raises on damaged content, and NumPy on content that is not of this layout."""
    try:
        yield
    except ApexRLError:
        raise
    except (OSError, RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} holds something else than demonstrations, or is damaged: {error}") from error


def _demo_groups(content: h5py.File, file: Path) -> list[h5py.Group]:
    """Return the demonstrations of a file in the order of their numbers."""
    data, kind = content.get("data"), hdf5().Group
    names = [name for name in data if name.startswith("demo")] if isinstance(data, kind) else []
    found = [data[name] for name in sorted(names, key=lambda name: (len(name), name))]
    if not (demos := [demo for demo in found if isinstance(demo, kind)]):
        raise ConfigError(f"{file} has no group 'data/demo_0': it is not in the layout of robomimic and LIBERO.")
    return demos


def _check_task(content: h5py.File, file: Path, name: str) -> None:
    """Refuse a file that says that it was recorded here, of another task."""
    try:
        made = json.loads(content["data"].attrs.get("env_args", "{}"))
    except ValueError:  # others may write there what they like
        return
    if isinstance(made, dict) and made.get("type") == "apexrl" and made.get("env_name") != name:
        raise ConfigError(f"{file} holds demonstrations of '{made.get('env_name')}', not of '{name}'; use that task's.")


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
    actions = torch.from_numpy(_read(demo, "actions", file, np.float32))
    if actions.ndim != 2 or not len(actions) or (size is not None and actions.shape[1] != size):
        needed = "[n, A]" if size is None else f"[n, {size}]"
        raise ConfigError(f"{file}: {demo.name}/actions must be {needed}, got {list(actions.shape)}.")
    return actions


def _samples(demo: _Found, wanted: dict[str, gym.Space[Any]], chunk: int) -> TensorDict:
    """Return one sample for every control step of a demonstration."""
    count = len(demo.actions)
    later = torch.arange(count).unsqueeze(-1) + torch.arange(chunk)
    obs = {name: _group(demo.group, name, box, demo.file, count) for name, box in wanted.items()}
    return TensorDict(
        {
            OBSERVATION: TensorDict({**obs, INSTRUCTION_KEY: demo.words.expand(count, -1)}, batch_size=[count]),
            ACTION: demo.actions[later.clamp_max(count - 1)].flatten(1),
            VALID_STEPS: (count - torch.arange(count)).clamp_max(chunk).unsqueeze(-1),
            TASK_ID: torch.full((count, 1), demo.task_id),
        },
        batch_size=[count],
    )


def _group(demo: h5py.Group, name: str, box: gym.Space[Any], file: Path, count: int) -> torch.Tensor:
    """Return one group of the observations, in our names or in LIBERO's."""
    assert isinstance(box, gym.spaces.Box)
    libero_image = f"obs/{LIBERO_IMAGE.format(name)}"
    if name == STATE_KEY and f"obs/{name}" not in demo and f"obs/{LIBERO_STATE[0]}" in demo:
        values = np.concatenate([_read(demo, f"obs/{part}", file, box.dtype) for part in LIBERO_STATE], axis=-1)
    elif f"obs/{name}" not in demo and libero_image in demo:
        values = _read(demo, libero_image, file, box.dtype)[:, ::-1]
    else:
        values = _read(demo, f"obs/{name}", file, box.dtype)
    group = torch.from_numpy(np.ascontiguousarray(values))
    if is_image(box) and group.ndim == 4 and group.shape[1:] != box.shape and group.shape[-1] == box.shape[-1]:
        channels_first = group.permute(0, 3, 1, 2).float()
        resized = functional.interpolate(channels_first, box.shape[:2], mode="area")
        group = resized.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    if group.shape != (count, *box.shape):
        raise ConfigError(
            f"{file}: {demo.name}/obs/{name} must be {[count, *box.shape]}, got {list(group.shape)}. "
            "Use the suite that it was recorded with, or one with the same options."
        )
    return group


def _read(demo: h5py.Group, name: str, file: Path, dtype: Any) -> NDArray[Any]:
    """Return a dataset as numbers of a dtype; bytes, such as images, must be bytes, and others finite."""
    found, named = demo.get(name), f"the dataset '{demo.name}/{name}'"
    if not isinstance(found, hdf5().Dataset):
        there = sorted(demo["obs"]) if name.startswith("obs/") and "obs" in demo else sorted(demo)
        raise ConfigError(f"{file} has no dataset '{demo.name}/{name}'; there are {there}.")
    if dtype == np.uint8 and found.dtype != np.uint8:
        raise ConfigError(f"{file}: {named} must be bytes (uint8, 0 to 255), got {found.dtype}; convert it.")
    try:
        values = np.asarray(found[()]).astype(dtype, copy=False)
    except (OSError, MemoryError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: {named} is damaged or holds no numbers: {error}. Use another file.") from error
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ConfigError(f"{file}: {named} holds numbers that are not finite.")
    return values


def hdf5() -> Any:
    """Load the library of these files, which only demonstrations need."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise ConfigError("Demonstrations need h5py. Install it with: pip install 'apexrl[suites]'") from error
