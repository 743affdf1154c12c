"""What run directories hold, read without trust: what is missing or damaged becomes a note, never an exception."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apexrl.agent.stop_when import Condition
from apexrl.collectors.init_states import read_statistics
from apexrl.core.errors import ConfigError, RunDirError
from apexrl.core.system.provenance import STARTS
from apexrl.run.records import Damage, Log, LoggedEvaluation, Start, evaluation, read_lines, read_log, starts
from apexrl.run.sources import read_config
from apexrl.run.suite import FINAL_RESULTS, METRICS_FILE, ROLLOUT_STATS

SEED = "training.seed"
_RUN_FILES = ("config.yaml", "metrics.jsonl")
_OWN_JSON = (METRICS_FILE, FINAL_RESULTS, ROLLOUT_STATS)


@dataclass(frozen=True)
class PinnedResult:
    """A file of ``apexrl eval --manifest … --output`` in the run directory."""

    file: Path
    manifest_hash: str
    evaluation: LoggedEvaluation
    command: str


@dataclass(frozen=True)
class Run(Log):
    """One run directory."""

    path: Path
    """As the user named it."""
    config: dict[str, Any]
    """``section.key`` -> value; empty where there is no readable ``config.yaml``."""
    config_text: str
    pinned: list[PinnedResult]
    init_states: dict[str, dict[str, Any]]
    """Hash of an init state -> its task, outcomes and skips."""
    videos: list[Path]
    starts: list[Start]
    """When it was started and resumed, and with what."""
    recorded: dict[str, str]
    """What the run says about versions and machine."""
    notes: list[str] = field(default_factory=list)
    """What is missing, and what to do about it."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.resolve().name

    @property
    def seed(self) -> int | None:
        """Of the training."""
        value = self.config.get(SEED)
        return value if isinstance(value, int) else None

    @property
    def shared_config(self) -> dict[str, Any]:
        """The configuration but for the seed."""
        return {name: value for name, value in self.config.items() if name != SEED}

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return int(last(self.columns.get("total_steps")))

    @property
    def iterations(self) -> int:
        """Iterations so far."""
        return int(last(self.columns.get("iteration")))

    @property
    def has_stopped_early(self) -> bool:
        """Whether ``training.stop_when`` holds for what was logged last."""
        try:
            condition = Condition.parse(str(self.config.get("training.stop_when") or ""))
        except ConfigError:
            return False
        return condition.name in self.columns and condition.holds(last(self.columns[condition.name]))

    @property
    def progress(self) -> float | None:
        """How much of the training is done, from 0 to 1; None where the configuration is not known."""
        if self.has_stopped_early:
            return 1.0
        limits = {"training.num_train_steps": self.iterations, "algo.num_updates": self.iterations}
        for name, done in {**limits, "training.total_timesteps": self.steps}.items():
            wanted = self.config.get(name)
            if isinstance(wanted, int) and wanted > 0:
                return min(1.0, done / wanted)
        return None


@dataclass(frozen=True)
class Group:
    """Runs with the same configuration but for the seed."""

    name: str
    runs: list[Run]

    @property
    def config(self) -> dict[str, Any]:
        """What its runs share."""
        return self.runs[0].shared_config


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories that are named, and those in a directory that is named or one below it.

    ``apexrl train --seeds`` creates directories of runs, and a sweep creates a directory of those.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        inside = _runs_in(path, depth=2)
        if not inside:
            missing = "does not exist" if not path.exists() else f"has neither {' nor '.join(_RUN_FILES)}"
            raise RunDirError(f"{path} is not a run directory: it {missing}. Name one, or a directory of them.")
        for run in inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_run(path: Path) -> Run:
    """Read one run directory."""
    notes: list[str] = []
    text, config = _read_config(path / "config.yaml", notes)
    log = read_log(path, notes)
    damage = Damage(path / STARTS)
    started = read_lines(damage.file, notes)
    begun = starts(started, damage)
    notes += damage.notes() + _changed_starts(begun)
    results = _read_results(path)
    pinned = []
    for file, record in results.items():
        damage = Damage(file)
        found = evaluation(record["summary"], damage)
        pinned.append(PinnedResult(file, str(record["manifest_hash"]), found, str(record.get("command", ""))))
        notes += damage.notes()
    videos = sorted(file for file in path.glob("*.mp4") if file.is_file() and not file.name.endswith(".part.mp4"))
    if not log.columns:
        notes.append("no training has been logged yet.")
    if not log.evaluations:
        notes.append(f"no evaluation yet; 'apexrl eval {path}' makes one once there is a checkpoint.")
    run = Run(
        path=path,
        config=config,
        config_text=text,
        columns=log.columns,
        evaluations=log.evaluations,
        pinned=pinned,
        init_states=_read_init_states(path, config, notes),
        videos=videos,
        starts=begun,
        recorded=_recorded([*started, *results.values()]),
        notes=notes,
    )
    if run.progress is not None and run.progress < 1 and log.columns:
        notes.append(f"stopped at {run.progress:.0%}, or still running; 'apexrl train --resume {path}' resumes it.")
    return run


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs that differ in nothing but the seed into one group, in the order in which they were named."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(repr(run.shared_config) if run.shared_config else str(run.path), []).append(run)
    groups: list[Group] = []
    for members in alike.values():
        stem, taken = _group_name(members), {group.name for group in groups}
        names = itertools.chain([stem], (f"{stem} ({number})" for number in itertools.count(2)))
        groups.append(Group(next(name for name in names if name not in taken), members))
    return groups


def last(values: NDArray[np.float64] | None) -> float:
    """Return the last known value, or 0."""
    if values is None or np.isnan(values).all():
        return 0.0
    return float(values[~np.isnan(values)][-1])


def _runs_in(path: Path, depth: int) -> list[Path]:
    if any((path / name).is_file() for name in _RUN_FILES):
        return [path]
    children = sorted(filter(Path.is_dir, path.iterdir()), key=_by_number) if path.is_dir() and depth else []
    return [run for child in children for run in _runs_in(child, depth - 1)]


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sort ``seed-10`` behind ``seed-9``."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", path.name)]


def _group_name(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        is_seed = re.fullmatch(r"seed-\d+", runs[0].name) is not None
        return f"{runs[0].path.resolve().parent.name}/{runs[0].name}" if is_seed else runs[0].name
    common = os.path.commonprefix([run.name for run in runs])  # noqa: RUF071 (names, not paths)
    stem = re.sub(r"[-_. ]+(seed|s)?[-_. ]*\d*$", "", common)
    return stem if stem not in ("", "seed") else runs[0].path.resolve().parent.name


def _read_config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    if not path.is_file():
        notes.append("no config.yaml, so no command can repeat it.")
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        raw = read_config(path)
    except ConfigError as error:
        notes.append(str(error))
        return text, {}
    sections = {section: values for section, values in raw.items() if isinstance(values, dict)}
    return text, {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _read_init_states(path: Path, config: Mapping[str, Any], notes: list[str]) -> dict[str, dict[str, Any]]:
    named = config.get("algo.rollout_stats_path")
    file = Path(named) if isinstance(named, str) and named else path / ROLLOUT_STATS
    try:
        return read_statistics(file) if file.exists() else {}
    except ConfigError as error:
        notes.append(str(error))
    except (OSError, OverflowError, RecursionError) as error:  # an impossible name, numbers or nesting
        notes.append(f"{str(file)[:200]} holds no rollout statistics ({type(error).__name__}); left out.")
    return {}


def _changed_starts(begun: Sequence[Start]) -> list[str]:
    """Return a sentence about every start that differs from the one before."""
    notes, names = [], {"versions": "other versions", "commit": "another commit", "machine": "another machine"}
    for before, after in itertools.pairwise(begun):
        changed = [text for name, text in names.items() if getattr(before, name) != getattr(after, name)]
        if changed:
            others = " and ".join(changed)
            notes.append(f"resumed at iteration {after.iteration} with {others}; see 'Repeat it'.")
    return notes


def _read_results(path: Path) -> dict[Path, dict[str, Any]]:
    """Return the files of results on manifests that lie in a run directory."""
    found = {}
    for file in sorted(path.glob("*.json")):
        if file.name in _OWN_JSON or file.name.startswith("."):
            continue
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("summary"), dict) and "manifest_hash" in record:
            found[file] = record
    return found


def _recorded(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Find what records say about where they were made; later ones win."""
    found: dict[str, str] = {}
    for record in records:
        for name in ("versions", "commit", "platform", "machine"):
            value = record.get(name)
            if isinstance(value, dict):
                found.update({str(key): str(inner) for key, inner in value.items() if inner is not None})
            elif isinstance(value, str):
                found[name] = value
    return found
