"""Runs that differ in their seed alone: what is kept of them, aggregated."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import pydantic
from numpy.typing import NDArray
from typing_extensions import TypedDict

from apexrl.core.errors import ConfigError, FewSamplesWarning, RunDirError
from apexrl.core.functional.intervals import iqm, iqm_interval
from apexrl.core.system import files
from apexrl.core.validation import Natural, Number, checked, up_to
from apexrl.run.records import Log

FILE = "seeds.json"
SEEDS_VERSION = 1
MAX_RUN_SEED, MAX_SEEDS = 2**31, 1000
SUMMARY_FIELDS = ("return", "success_rate")
"""Of an evaluation's record, that are aggregated where every seed has them."""
State = Literal["waiting", "done", "failed"]


class _Task(TypedDict):
    success_rate: Number


_Record = TypedDict(
    "_Record",
    {
        "return": Number,
        "return_interval": NotRequired[tuple[Number, Number] | None],  # one episode has none
        "episodes": Natural,
        "success_rate": NotRequired[Number],
        "per_task": NotRequired[dict[str, _Task]],
    },
)
"""What is read of an evaluation's record."""


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(extra="forbid"))
class SeedRun:
    """One of the runs."""

    seed: Annotated[Natural, pydantic.Field(le=MAX_RUN_SEED)]
    state: State = "waiting"
    error: str = ""
    """Why it failed."""
    result: dict[str, Any] = field(default_factory=dict)
    """Record of the evaluation at the end."""

    def __post_init__(self) -> None:
        if self.state == "done":
            checked(_Record, self.result, f"result of seed {self.seed}")


class _File(TypedDict):
    version: Annotated[Natural, up_to(SEEDS_VERSION)]
    runs: list[SeedRun]
    config: dict[str, Any]


@dataclass
class SeedRuns:
    """The runs below a directory, ``seed-0``, ``seed-1`` …, and ``seeds.json`` that says how far they are."""

    directory: Path
    config: dict[str, Any]
    """Plain values of the configuration that they share."""
    runs: list[SeedRun]

    def run_dir(self, run: SeedRun) -> Path:
        """Return the directory of one of them."""
        return self.directory / f"seed-{run.seed}"

    def with_state(self, state: str) -> list[SeedRun]:
        """Return the runs that are in a state."""
        return [run for run in self.runs if run.state == state]

    def write(self) -> Path:
        """Write ``seeds.json`` with what is known by now."""
        with warnings.catch_warnings(action="ignore", category=FewSamplesWarning):  # others are still training
            aggregate = self.aggregate()
        runs = [asdict(run) for run in self.runs]
        content = {"version": SEEDS_VERSION, "aggregate": aggregate, "runs": runs, "config": self.config}
        return files.write_json(self.directory / FILE, content)

    def aggregate(self) -> dict[str, dict[str, Any]]:
        """Return interquartile mean and interval of every field that all finished runs have."""
        results = [run.result for run in self.with_state("done")]
        num_episodes = sum(result["episodes"] for result in results)
        return {
            name: summary(_by_task(results, name), num_episodes if name == "success_rate" else None)
            for name in SUMMARY_FIELDS
            if results and all(name in result for result in results)
        }


def read(directory: Path) -> SeedRuns:
    """Read ``seeds.json`` of a directory."""
    path = directory / FILE
    if not path.is_file():
        raise RunDirError(f"{directory} holds no {FILE}: name a directory that 'apexrl train --seeds' created.")
    content = checked(_File, path.read_bytes(), f"{path} is damaged", "; start the seeds again.", RunDirError)
    return SeedRuns(directory, content["config"], content["runs"])


def parse_seeds(text: str, first: int) -> list[int]:
    """Read ``5``, so many seeds from ``first`` on, or ``0,3,7``, these seeds."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--seeds must be a number of seeds, such as 5, or seeds, such as 0,1,2, got '{text}'.")
    numbers = [int(part) for part in parts]
    if len(parts) == 1:
        if not 1 <= numbers[0] <= MAX_SEEDS:
            raise ConfigError(f"--seeds must ask for 1 to {MAX_SEEDS} seeds, got '{text}'.")
        numbers = list(range(first, first + numbers[0]))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds must name each seed once, got '{text}'.")
    if max(numbers) > MAX_RUN_SEED:
        raise ConfigError(f"--seeds must be at most {MAX_RUN_SEED}, got {max(numbers)}.")
    return numbers


def summary(values: NDArray[np.float64], trials: int | None = None) -> dict[str, Any]:
    """Return interquartile mean, its interval and the mean of seeds and tasks ``[S, K]``; see ``iqm_interval``."""
    return {
        "iqm": float(iqm(values, axis=None)),
        "interval": list(map(float, iqm_interval(values, trials=trials))) if len(values) > 1 else None,
        "mean": float(values.mean()),
        "seeds": values.shape[0],
        "tasks": values.shape[1],
    }


def curve(logs: Sequence[Log], training_name: str, evaluation_name: str) -> tuple[NDArray[np.float64], ...]:
    """Return steps ``[P]`` and what runs of several seeds measured there ``[S, P]``; empty with none in common.

    Periodic evaluations are taken where every run has two or more, what training saw otherwise.
    """
    evaluated = [{step: found.mean for step, found in log.evaluated(evaluation_name).items()} for log in logs]
    for points in (evaluated, [log.trained(training_name) for log in logs]):
        curves = [np.array(list(entries.items()), np.float64).reshape(-1, 2) for entries in points]
        if curves and min(map(len, curves)) >= 2:
            first, last = max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves)
            every = np.unique(np.concatenate([c[:, 0] for c in curves]))
            grid = every[(first <= every) & (every <= last)]
            if len(grid) > 200:
                grid = np.linspace(first, last, 200)
            return grid, np.stack([np.interp(grid, c[:, 0], c[:, 1]) for c in curves])
    return np.zeros(0), np.zeros((0, 0))


def _by_task(results: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    """Return a field of every seed ``[S, 1]``; the success of every task ``[S, K]`` where all seeds have the same."""
    tasks = [result.get("per_task") or {} for result in results]
    if name != "success_rate" or not tasks[0] or any(set(found) != set(tasks[0]) for found in tasks):
        return np.array([[result[name]] for result in results], np.float64)
    return np.array([[found[task]["success_rate"] for task in tasks[0]] for found in tasks], np.float64)
