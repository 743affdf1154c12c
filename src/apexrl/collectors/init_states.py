"""Where episodes of a suite start: the init states, the order they are sampled in, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch.utils.data import Dataset, _utils
from typing_extensions import TypedDict

from apexrl.core.errors import ConfigError, RunDirError
from apexrl.core.system import files
from apexrl.core.validation import Natural, checked
from apexrl.envs.options import check_at_least
from apexrl.envs.suites.base import Split, TaskSuite, own_split
from apexrl.envs.suites.base import hash_init_state as hash_init_state

HISTORY_LENGTH = 100
"""Outcomes remembered of each init state."""


class InitSample(TypedDict):
    """One draw: a task and the full state of its simulator."""

    task_id: int
    init_state: NDArray[np.float64]


class _Sample(dict[str, Any]):
    """A sample that PyTorch's ``DataLoader`` can put into a batch with others, whose states may have other lengths."""


def _collate(samples: Sequence[InitSample], **_: Any) -> dict[str, Any]:
    """Return ``task_id [B]`` and ``init_state [B, D]``, or a list of states where their lengths differ."""
    states = [torch.tensor(sample["init_state"]) for sample in samples]
    same = len({len(state) for state in states}) == 1
    return {
        "task_id": torch.tensor([sample["task_id"] for sample in samples]),
        "init_state": torch.stack(states) if same else states,
    }


_utils.collate.default_collate_fn_map[_Sample] = _collate


class InitStateDataset(Dataset[InitSample]):
    """The init states of one split of a suite, task after task; those of a task are loaded when first asked for."""

    def __init__(self, suite: TaskSuite, split: Split = "train") -> None:
        self.suite, self.split = suite, own_split(split)
        self._states: dict[int, list[NDArray[np.float64]]] = {}

    def states(self, task_id: int) -> list[NDArray[np.float64]]:
        """Return the init states of a task; none is a ConfigError."""
        if task_id not in self._states:
            states = list(self.suite.init_states(task_id, self.split))
            if not states:
                task = f"'{self.suite.task_names[task_id]}' of task.benchmark_name '{self.suite.name}'"
                advice = "Leave it out of task.task_names_to_use."
                raise ConfigError(f"The task {task} has no init states in its {self.split} split. {advice}")
            self._states[task_id] = states
        return self._states[task_id]

    def __len__(self) -> int:
        return sum(len(self.states(task_id)) for task_id in range(self.suite.num_tasks))

    def __getitem__(self, index: int) -> InitSample:
        rest = index + len(self) if index < 0 else index
        for task_id in range(self.suite.num_tasks) if rest >= 0 else ():
            states = self.states(task_id)
            if rest < len(states):
                return cast("InitSample", _Sample(task_id=task_id, init_state=states[rest]))
            rest -= len(states)
        raise IndexError(f"init state {index} of {len(self)}")


class InitStateSampler(Iterator[InitSample]):
    """Samples init states without end: the tasks in turn, those of a task in an order shuffled again in every round.

    Draw ``k`` follows from the seed and ``k`` alone, so the two are the whole state.
    """

    def __init__(self, dataset: InitStateDataset, seed: int = 0) -> None:
        self.dataset = dataset
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Begin again with another seed."""
        self.seed, self.num_drawn = int(seed), 0
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}
        """Of each task: the number of the round, and the order in it."""

    def __next__(self) -> InitSample:
        turn, task_id = divmod(self.num_drawn, self.dataset.suite.num_tasks)
        states = self.dataset.states(task_id)
        number, place = divmod(turn, len(states))
        if task_id not in self._orders or self._orders[task_id][0] != number:
            order = np.random.default_rng([self.seed % 2**63, task_id, number]).permutation(len(states))
            self._orders[task_id] = number, order
        self.num_drawn += 1
        return InitSample(task_id=task_id, init_state=states[self._orders[task_id][1][place]])

    def state_dict(self) -> dict[str, int]:
        """Return what is needed to continue."""
        return {"seed": self.seed, "num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from ``state_dict``."""
        self.restart(state["seed"])
        self.num_drawn = int(state["num_drawn"])


def endless(loader: Iterable[Any], num_tasks: int) -> Iterator[InitSample]:
    """Draw from a loader of samples, of lists of them or of collated ones, again from its start where it ends.

    Where there is one task, a sample may be the state alone, and a batch of them ``[B, D]``.
    """
    while True:
        num_samples = 0
        for item in loader:
            for sample in _init_samples(item, num_tasks):
                num_samples += 1
                yield sample
        if not num_samples:
            raise ConfigError("init_state_dataloader gives no samples.")


def _init_samples(item: Any, num_tasks: int) -> Iterator[InitSample]:
    if isinstance(item, Mapping):
        task_ids, states = item["task_id"], item["init_state"]
        if np.ndim(task_ids) == 0:
            task_ids, states = [task_ids], [states]
    elif not isinstance(item, np.ndarray | torch.Tensor):
        for part in item:
            yield from _init_samples(part, num_tasks)
        return
    elif num_tasks > 1:
        raise ConfigError(
            f"init_state_dataloader gives init states without their task, but there are {num_tasks} tasks; let its "
            "samples be {'task_id': ..., 'init_state': ...}."
        )
    else:
        states = np.atleast_2d(item)
        task_ids = [0] * len(states)
    for task_id, state in zip(task_ids, states, strict=True):
        yield InitSample(task_id=int(task_id), init_state=np.asarray(state, np.float64))


class RolloutStats:
    """What came of the rollouts from each init state, kept in a JSON file over runs.

    The file maps the hash of a state to its ``task``, its ``outcomes`` (1 success, 0 failure, oldest first) and its
    ``skips``: how often it was left out since it is mastered. If several runs write the file at the same time, the
    last writer wins.

    Args:
        path: of the file, which is read where it exists; None remembers for this run alone.
        window: outcomes remembered of each state.
        skip_threshold: a state that was left out more often than this is forgotten, so that it is tested again.
    """

    def __init__(self, path: Path | str | None, window: int = HISTORY_LENGTH, *, skip_threshold: int = 3) -> None:
        check_at_least("RolloutStats.", 1, window=window)
        check_at_least("algo.", 0, rollout_skip_threshold=skip_threshold)
        self.path = None if path is None else Path(path)
        self.window, self.skip_threshold = window, skip_threshold
        self._states = {} if self.path is None or not self.path.exists() else read_statistics(self.path)

    def __len__(self) -> int:
        return len(self._states)

    def outcomes(self, state_hash: str) -> list[int]:
        """Return what is remembered of a state, oldest first."""
        return list(self._states.get(state_hash, {}).get("outcomes", ()))

    def skips(self, state_hash: str) -> int:
        """How often a state was left out since it is mastered."""
        return int(self._states.get(state_hash, {}).get("skips", 0))

    def record(self, state_hash: str, outcomes: Iterable[bool], task: str = "") -> None:
        """Append outcomes of rollouts from a state; ``write`` brings them to the file."""
        known = [*self.outcomes(state_hash), *map(int, outcomes)]
        self._states[state_hash] = {"task": task, "outcomes": known[-self.window :], "skips": 0}

    def is_mastered(self, state_hash: str, n: int) -> bool:
        """Whether the last ``n`` outcomes of a state are all successes."""
        last = self.outcomes(state_hash)[-n:]
        return len(last) == n and all(last)

    def skip(self, state_hash: str) -> None:
        """Count that a mastered state was left out; one that was left out too often is forgotten."""
        entry = self._states[state_hash]
        entry["skips"] += 1
        if entry["skips"] > self.skip_threshold:
            del self._states[state_hash]

    def write(self) -> None:
        """Replace the file at once: a kill at any moment leaves the old one or the new one, whole."""
        if self.path is None:
            return
        try:
            files.replace_text(self.path, json.dumps(self._states))
        except RunDirError as error:
            raise RunDirError(f"algo.rollout_stats_path {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {name: {**entry, "outcomes": list(entry["outcomes"])} for name, entry in self._states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to ``state_dict``, whatever the file says; the next ``write`` replaces it."""
        self._states = checked(_STATISTICS, dict(state), "These are no rollout statistics")


class Outcomes(TypedDict):
    """What a file of ``RolloutStats`` has of an initial state."""

    task: str
    outcomes: list[Annotated[Natural, Field(le=1)]]
    skips: Natural


_STATISTICS: Any = dict[str, Outcomes]


def read_statistics(path: Path) -> dict[str, dict[str, Any]]:
    """Read a file of ``RolloutStats``; a ConfigError when it holds anything else."""
    what = f"algo.rollout_stats_path {path} holds no rollout statistics"
    found: dict[str, dict[str, Any]] = checked(
        _STATISTICS, path.read_bytes(), what, ". Name another file, or delete this one."
    )
    return found
