"""Numbers of a run directory, read without trust: one that is damaged is left out, with a note about file and field."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apexrl.core.result import RATE_FIELDS
from apexrl.core.system.files import parse_json_lines

LARGEST = 1e100
"""Of a number; sums and products of larger ones need not be numbers."""
_RATES = {*RATE_FIELDS, "success_rate", "fail_rate"}
_SHARES = ("time/rollout_share", "time/update_share")
_IDENTITY = ("iteration", "step", "episodes", "per_task")
"""Entries of an evaluation record that are no episode fields."""
NUMBER, RATE, COUNT = f"a number up to {LARGEST:g}", "a rate from 0 to 1", "a count"


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class LoggedEvaluation:
    """One line of ``evaluations.jsonl``."""

    iteration: int
    step: int
    episodes: int
    fields: dict[str, Estimate]
    """Episode field -> its mean over the episodes."""
    tasks: dict[str, tuple[int, int]]
    """Task of a suite -> successful episodes, and all."""


@dataclass(frozen=True)
class Start:
    """One line of ``starts.jsonl``, as text."""

    time: str
    iteration: int
    """That the run started from."""
    commit: str
    machine: str
    versions: str


@dataclass(frozen=True)
class Log:
    """What a run has logged while it trained."""

    columns: dict[str, NDArray[np.float64]]
    """Name in ``metrics.jsonl`` -> one value a line, NaN where a line does not have it."""
    evaluations: list[LoggedEvaluation]

    def trained(self, name: str, axis: str = "total_steps") -> dict[float, float]:
        """Return steps, or iterations -> what training saw, in order; of two lines at one place the later."""
        places, values = (self.columns.get(column, np.empty(0)) for column in (axis, name))
        known = [pair for pair in zip(places.tolist(), values.tolist(), strict=False) if not any(map(math.isnan, pair))]
        return dict(sorted(dict(known).items()))

    def evaluated(self, name: str, axis: str = "total_steps") -> dict[int, Estimate]:
        """Return steps, or iterations -> what evaluations gave, in order; of two at one place the later."""
        known = [entry for entry in self.evaluations if name in entry.fields]
        places = {entry.step if axis == "total_steps" else entry.iteration: entry.fields[name] for entry in known}
        return dict(sorted(places.items()))


def error_bars(estimates: Iterable[Estimate]) -> list[list[float]]:
    """Return how far intervals reach below their means, and how far above."""
    found = list(estimates)
    below, above = [entry.mean - entry.low for entry in found], [entry.high - entry.mean for entry in found]
    return [[max(0.0, value) for value in values] for values in (below, above)]


class Damage:
    """What cannot be used of a file: of every field the first value, and how many there are."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._found: dict[str, tuple[str, int]] = {}

    def add(self, field: str, wanted: str, value: Any) -> None:
        """Remember a value that is not what was wanted."""
        text, count = self._found.get(field, ("", 0))
        name = _shown(field, 200).strip('"')
        self._found[field] = text or f"'{name}' must be {wanted}, got {_shown(value)}", count + 1

    def notes(self) -> list[str]:
        """Return a sentence about every field."""
        found = ((text, f" {count} times" if count > 1 else "") for text, count in self._found.values())
        return [f"{self.file}: {text}; left out{times}." for text, times in found]


def read_log(run_dir: Path, notes: list[str], names: Collection[str] | None = None) -> Log:
    """Read ``metrics.jsonl``, of which only some names may be wanted, and ``evaluations.jsonl`` of a run."""
    metrics, evaluated = (Damage(run_dir / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    lines, records = read_lines(metrics.file, notes), read_lines(evaluated.file, notes)
    log = Log(columns(lines, metrics, names), evaluations(records, evaluated))
    notes += metrics.notes() + evaluated.notes()
    return log


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Read a JSON-lines file that need not exist, with a note about the lines that are none."""
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path} cannot be read: {error.strerror or error}; left out.")
        return []
    records = parse_json_lines(content)
    num_lines = sum(bool(line.strip()) for line in content.splitlines())
    if len(records) < num_lines:
        notes.append(f"{path}: {num_lines - len(records)} of {num_lines} lines are damaged or cut off; left out.")
    return records


def columns(
    lines: Sequence[Mapping[str, Any]], damage: Damage, names: Collection[str] | None = None
) -> dict[str, NDArray[np.float64]]:
    """Return name -> one value a line, NaN where a line does not have it, of the names, or all, that have any."""
    found = {}
    for name in names or dict.fromkeys(name for line in lines for name in line):
        is_log, values = name.startswith(("rollout/", "time/")), np.full(len(lines), math.nan)
        for index, line in enumerate(lines):
            if name in line:
                value = _number_or_none(line[name], name, damage, is_rate=is_log and is_rate(name))
                values[index] = math.nan if value is None else value
        if not np.isnan(values).all():
            found[name] = values
    return found


def evaluations(records: Iterable[Mapping[str, Any]], damage: Damage) -> list[LoggedEvaluation]:
    """Return the evaluations of a file; one without a step has no place on the page."""
    return [evaluation(record, damage) for record in _placed(records, "step", damage)]


def evaluation(record: Mapping[str, Any], damage: Damage) -> LoggedEvaluation:
    """Return what a record of an evaluation says."""
    fields: dict[str, Estimate] = {}
    for name, value in record.items():
        is_field = _is_bounded_number(value) or name in _RATES or f"{name}_interval" in record
        if name in _IDENTITY or not is_field:
            continue
        mean = _number_or_none(value, name, damage, is_rate=name in _RATES)
        if mean is not None:
            bounds = _logged_interval(record, name, damage)
            fields[name] = Estimate(mean, *(bounds or (mean, mean)))
    counts = {name: record.get(name, 0) for name in ("iteration", "step", "episodes")}
    for name, value in counts.items():
        if not is_count(value):
            damage.add(name, COUNT, value)
            counts[name] = 0
    return LoggedEvaluation(**counts, fields=fields, tasks=_tasks(record, damage))


def starts(records: Iterable[Mapping[str, Any]], damage: Damage) -> list[Start]:
    """Return when, from where and with what a run was started; a line without an iteration has no place."""
    found = []
    for record in _placed(records, "iteration", damage):
        machine = ", ".join(filter(None, (text(record.get("machine")), text(record.get("platform")))))
        commit, versions = text(record.get("commit")), text(record.get("versions"))
        found.append(Start(text(record.get("time")), record["iteration"], commit, machine, versions))
    return found


def _placed(records: Iterable[Mapping[str, Any]], place: str, damage: Damage) -> Iterator[Mapping[str, Any]]:
    """Yield the records that say where in training they belong."""
    for record in records:
        if is_count(record.get(place)):
            yield record
        else:
            damage.add(place, COUNT, record.get(place))


def text(value: Any) -> str:
    """Write a value, or the names and values of a mapping, for people."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {inner}" for name, inner in value.items() if inner is not None)
    return "" if value is None else str(value)


def _logged_interval(record: Mapping[str, Any], name: str, damage: Damage) -> tuple[float, float] | None:
    key = f"{name}_interval"
    bounds = record.get(key)
    if not isinstance(bounds, list) or len(bounds) != 2:
        if bounds is not None:
            damage.add(key, "two numbers", bounds)
        return None
    low, high = (_number_or_none(bound, key, damage, is_rate=name in _RATES) for bound in bounds)
    return None if low is None or high is None else (low, high)


def _tasks(record: Mapping[str, Any], damage: Damage) -> dict[str, tuple[int, int]]:
    per_task = record.get("per_task", {})
    if not isinstance(per_task, dict):
        damage.add("per_task", "a mapping", per_task)
        return {}
    tasks = {}
    for name, task in per_task.items():
        entry = task if isinstance(task, dict) else {}
        rate = _number_or_none(entry.get("success_rate"), f"per_task.{name}.success_rate", damage, is_rate=True)
        episodes: Any = entry.get("episodes")
        if not is_count(episodes):
            damage.add(f"per_task.{name}.episodes", COUNT, episodes)
        elif rate is not None:
            tasks[name] = (round(rate * episodes), episodes)
    return tasks


def _number_or_none(value: Any, name: str, damage: Damage, *, is_rate: bool) -> float | None:
    """Return a number, or None after it was noted that it is none."""
    # Wilson's bounds may miss 0 and 1 by a rounding.
    if _is_bounded_number(value) and (not is_rate or -1e-6 <= value <= 1 + 1e-6):
        return min(max(float(value), 0.0), 1.0) if is_rate else float(value)
    damage.add(name, RATE if is_rate else NUMBER, value)
    return None


def _shown(value: Any, most: int = 40) -> str:
    """Write a value in a line of plain letters, cut off where it is long."""
    try:
        written = json.dumps(value)
    except RecursionError:  # it was read with less on the stack
        return "deeply nested values"
    return written if len(written) <= most else f"{written[:most]}…"


def is_rate(name: str) -> bool:
    """Whether a name of ``metrics.jsonl``, or an episode field, lies between 0 and 1."""
    return name in _SHARES or name.removeprefix("rollout/") in _RATES


def _is_bounded_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_count(value: Any) -> bool:
    """Whether a value is an integer of at least 0 that floating-point numbers hold exactly."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
