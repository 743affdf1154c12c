"""Checkpoints: plain tensors and values, written atomically, read without executing anything."""

from __future__ import annotations

import random
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from apexrl.core.errors import CheckpointError, EnvStateError
from apexrl.core.system import files

KEYS: dict[str, tuple[type, ...]] = {
    "policy": (dict,),
    "algorithm": (dict,),
    "collector": (dict,),
    "env": (dict, type(None)),
    "rng": (dict,),
    "iteration": (int,),
    "total_steps": (int,),
    "num_evaluations": (int,),
    "optimizer_steps": (int, type(None)),
    "config": (dict,),
}
"""What every checkpoint holds, and as what."""
OWN_KEYS = ("collector", "env", "rng")
"""What differs between processes that learn together, besides parts of the algorithm."""
PEERS, CHANGED = "peers", "changed"
"""A list with what processes 1, 2, … have of their own, None for one that is lost; and, when a checkpoint is read for
another number of processes, what changed."""
CHECKPOINT_FORMAT = 8
"""Raised when a key is removed, renamed or changes meaning; other formats are not read."""
_NUMBERED = re.compile(r"iteration_(\d{6,})\.pt")
_CODE = re.compile(r"unsupported global:? (?:GLOBAL )?([\w.]+)", re.IGNORECASE)
"""How PyTorch names what a file wanted to run."""
T = TypeVar("T")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that nobody can read; the one before it may do.

    Args:
        problem: what is wrong with which file.
        advice: what to do.
    """

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem} {advice}")
        self.problem = problem


def checkpoint_name(iteration: int) -> str:
    """Name of the checkpoint after an iteration."""
    return f"iteration_{iteration:06d}.pt"


def is_numbered(path: Path) -> bool:
    """Whether a file has the name of a checkpoint after some iteration."""
    return _NUMBERED.fullmatch(path.name) is not None


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint; a kill leaves the old file or the new one.

    Raises:
        RunDirError: when it cannot be written.
    """
    with files.replacing(path) as file:
        torch.save({"format": CHECKPOINT_FORMAT, **content}, file)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Only tensors and plain values are accepted; nothing in it can run.

    Raises:
        DamagedCheckpointError: when the file is truncated or damaged, or holds anything else.
        CheckpointError: when it is missing, foreign, or of a version that is not supported.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    damaged = f"{path} is not a readable checkpoint: it is truncated or damaged, or was not written by apexrl."
    try:
        with zipfile.ZipFile(path) as archive:
            if name := archive.testzip():  # by the checksums (CRC-32) that PyTorch wrote beside the content
                raise zipfile.BadZipFile(f"{name} differs from its checksum")
        with warnings.catch_warnings(action="ignore"):
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # PyTorch's own text advises to switch the protection off; it stays in the cause.
        if found := _CODE.search(str(error)):
            damaged = (
                f"{path} is not a readable checkpoint: it holds code ({found[1]}), which was not written by apexrl and "
                "is never run."
            )
        raise DamagedCheckpointError(damaged, _advice(path)) from error
    content: dict[str, Any] = loaded if isinstance(loaded, dict) else {}
    number = content.get("format")
    if type(number) is not int:
        raise CheckpointError(f"{path} was not written by apexrl: it has no format number.")
    if number != CHECKPOINT_FORMAT:
        fix = "Update apexrl." if number > CHECKPOINT_FORMAT else "Start a new run."
        raise CheckpointError(
            f"{path} has checkpoint format {number}, but this apexrl reads only {CHECKPOINT_FORMAT}. {fix}"
        )
    missing = [key for key in KEYS if key not in content]
    if missing:
        raise CheckpointError(f"{path} was not written by apexrl: it lacks {', '.join(missing)}.")
    for key, kinds in KEYS.items():
        value = content[key]
        if not isinstance(value, kinds) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            wanted = "a count" if int in kinds else "a mapping"
            raise CheckpointError(f"{path} is damaged: its '{key}' must be {wanted}, got {value!r}. {_advice(path)}")
    return content


def of_rank(content: dict[str, Any], rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """Return what process ``rank`` of ``world_size`` resumes from; ``CHANGED`` says what changed, or is empty.

    Random states that there are none of are None.
    """
    peers = content.get(PEERS, [])
    if not isinstance(peers, list):
        raise CheckpointError(f"{path} is damaged: its '{PEERS}' must be a list. {_advice(path)}")
    changed = ""
    if len(peers) + 1 != world_size:
        changed = f"the checkpoint of {_processes(len(peers) + 1)} is resumed by {_processes(world_size)}"
    elif None in peers:
        changed = "the checkpoint was saved by process 0 alone"
    if rank == 0:
        return {**content, CHANGED: changed}
    own = peers[rank - 1] if rank <= len(peers) else None
    if own is None:
        return {**content, "rng": None, CHANGED: changed}
    try:
        return {
            **content,
            **{key: own[key] for key in OWN_KEYS},
            "algorithm": {**content["algorithm"], **own["algorithm"]},
            CHANGED: changed,
        }
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: its '{PEERS}' lacks {error}. {_advice(path)}") from error


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def numbered(directory: Path, last_iteration: float = float("inf")) -> list[Path]:
    """Return the numbered checkpoints of a directory up to an iteration, oldest first."""
    found = [(int(match[1]), path) for path in directory.glob("*.pt") if (match := _NUMBERED.fullmatch(path.name))]
    return [path for number, path in sorted(found) if number <= last_iteration]


def directory_of(run_dir: Path) -> Path:
    """Return where the checkpoints of a run lie: in ``checkpoints``, unless a script has saved beside its logs."""
    own = run_dir / "checkpoints"
    return run_dir if not own.is_dir() and numbered(run_dir) else own


def latest(directory: Path) -> Path:
    """Return the newest numbered checkpoint of a directory."""
    paths = numbered(directory)
    if not paths:
        if several := sorted(directory.glob("*/checkpoints")):
            raise CheckpointError(f"{directory} holds several runs; name one of them, such as {several[0].parent}.")
        run_dir = directory.parent if directory.name == "checkpoints" else directory
        if (run_dir / "config.yaml").is_file():
            raise CheckpointError(f"There is no checkpoint in {directory}; the run stopped before its first one.")
        if (directory / "policy.json").is_file():
            raise CheckpointError(f"{directory} is an exported policy; load it in Python with load_policy.")
        raise CheckpointError(f"{run_dir} is not a run directory: it has neither a checkpoint nor config.yaml.")
    return paths[-1]


def load_newest(directory: Path, load: Callable[[Path], T]) -> tuple[Path, T, list[str]]:
    """Load the newest numbered checkpoint of a directory that can be read.

    Returns:
        Its path, what ``load`` returned, and a sentence about each newer one that cannot be read.

    Raises:
        CheckpointError: when there is none.
    """
    problems: list[str] = []
    for path in reversed(numbered(directory)):
        try:
            return path, load(path), problems
        except DamagedCheckpointError as error:
            problems.append(error.problem)
    if not problems:
        latest(directory)  # says that there is none
    head = [f"None of the checkpoints in {directory} can be used."] if len(problems) > 1 else []
    raise DamagedCheckpointError("\n".join([*head, *problems]), _advice_without(directory))


def _advice(path: Path) -> str:
    """Say what to use in the place of a checkpoint."""
    others = [other for other in numbered(path.parent) if other != path]
    if others:
        return f"Use another one, such as {others[-1]}."
    return _advice_without(path.parent) if is_numbered(path) else "Use another one."


def _advice_without(directory: Path) -> str:
    """Say what to do where no checkpoint of a directory can be used."""
    config = directory.parent / "config.yaml"
    source = config if config.is_file() else "PRESET"
    return (
        f"No other checkpoint is left in {directory}, so the run cannot be resumed. Start a new run in another "
        f"directory: apexrl train {source} --run-dir NEW_DIR."
    )


@contextmanager
def restoring(part: str, path: Path) -> Iterator[None]:
    """Name the part and the file when something in the block fails, unless an environment itself says why."""
    try:
        yield
    except EnvStateError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be used: its '{part}' does not fit ({type(error).__name__}: {error}). {_advice(path)}"
        ) from error


def load_module(module: nn.Module, state: Mapping[str, Any], path: Path) -> None:
    """Load parameters, or change nothing and name what does not fit."""
    own = module.state_dict()
    problems = [f"'{name}' is missing" for name in own if name not in state]
    problems += [f"'{name}' is unknown" for name in state if name not in own]
    problems += [
        f"'{name}' is {list(getattr(state[name], 'shape', ()))} in the checkpoint and {list(value.shape)} here"
        for name, value in own.items()
        if name in state and getattr(state[name], "shape", None) != value.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{path} does not fit this policy: {'; '.join(problems[:3])}{more}. "
            "Use the task and the policy section that it was trained with."
        )
    module.load_state_dict(state)


def rng_state() -> dict[str, Any]:
    """Return the state of every global random generator."""
    version, numbers, gauss = random.getstate()
    mersenne: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = mersenne
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(numbers), gauss],
        "numpy": [torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Continue every global random generator from ``rng_state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))


@contextmanager
def kept_rng_state() -> Iterator[None]:
    """Leave every global random generator as it was before the block."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
