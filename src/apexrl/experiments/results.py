"""Trained policies on manifests, and the files of their results."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import torch
from pydantic import Field
from typing_extensions import TypedDict

from apexrl.core.errors import ConfigError
from apexrl.core.system.provenance import provenance
from apexrl.core.types import EPISODE_ID, TASK_ID, TRUNCATED
from apexrl.core.validation import Natural, Number, checked, up_to
from apexrl.evaluation.evaluate import EvaluationResult, evaluate, group_size
from apexrl.evaluation.manifest import Manifest
from apexrl.run.trained_policy import TrainedPolicy

RESULTS_VERSION = 1
_ROW_FIELDS = {"return": "return", "episode_len": "length", "success_once": "success_once"}
_ROW_FIELDS |= {"success_at_end": "success_at_end", "fail_once": "fail_once"}
"""Fields of every episode, and what a row calls them; the others are metrics of the task."""


@dataclass(frozen=True)
class Results:
    """What an evaluation on a manifest gave, new or from a file."""

    name: str
    """What was evaluated."""
    task: str
    manifest_hash: str
    checkpoint: dict[str, Any]
    """``path`` and ``sha256``."""
    result: EvaluationResult


def evaluate_trained(
    trained: TrainedPolicy,
    manifest: Manifest,
    num_envs: int,
    *,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] | None = None,
) -> EvaluationResult:
    """Evaluate a trained policy on the episodes of a manifest, on a CPU unless told.

    Raises:
        ConfigError: when the manifest is of another task, or its options give other observations or actions.
    """
    config = trained.config
    if config.task.id != manifest.task:
        raise ConfigError(
            f"The manifest is of the task '{manifest.task}', the policy was trained on '{config.task.id}'. "
            f"Write one for it: apexrl manifest {config.task.id} --output FILE."
        )
    config = replace(config, task=config.task.with_options(manifest.options))
    pinned = replace(trained, config=config, device=torch.device(device))
    with contextlib.closing(pinned.make_env(group_size(len(manifest.episodes), num_envs))) as env:
        if config != trained.config:
            with contextlib.closing(trained.make_env(1)) as own:
                is_same = (own.observation_space, own.action_space) == (env.observation_space, env.action_space)
            if not is_same:
                raise ConfigError(
                    f"The options of the manifest, {dict(manifest.options)}, give other observations or actions than "
                    f"{trained.config.task.options}, with which the policy was trained. Use a manifest that fits it."
                )
        policy = trained.policy.to(device)
        return evaluate(env, policy, manifest.starts(env), events=trained.events, on_progress=on_progress)


def results_record(
    trained: TrainedPolicy, manifest: Manifest, result: EvaluationResult, command: str, **how: Any
) -> dict[str, Any]:
    """Return what a file of results holds; plain values, null for what is not known.

    ``how`` are further facts about the run, such as the number of environments; none changes a number on a CPU.
    """
    return {
        "version": RESULTS_VERSION,
        "task": manifest.task,
        "options": dict(manifest.options),
        "manifest_hash": manifest.hash,
        "checkpoint": hashed(trained.checkpoint),
        "command": command,
        "run": {**how, "threads": torch.get_num_threads()},
        **provenance(),
        "summary": _without_nan(result.record()),
        "episodes": episode_rows(manifest, result),
    }


def episode_rows(manifest: Manifest, result: EvaluationResult) -> list[dict[str, Any]]:
    """Return a row for each episode of the manifest, in its order; one that was lost has nothing but that."""
    rows: list[dict[str, Any]] = [
        {"episode": index, **entry, "lost": True} for index, entry in enumerate(manifest.to_dict()["episodes"])
    ]
    columns = {name: values.tolist() for name, values in result.episodes.items()}
    hidden = {*_ROW_FIELDS, TRUNCATED, "reward"}
    for i, index in enumerate(result.info[EPISODE_ID].astype(int)):
        row = rows[index]
        del row["lost"]
        row |= {shown: _without_nan(columns[name][i]) for name, shown in _ROW_FIELDS.items() if name in columns}
        row["length"] = int(row["length"])
        row["truncated"] = columns[TRUNCATED][i] > 0
        row["metrics"] = {name: _without_nan(values[i]) for name, values in columns.items() if name not in hidden}
    return rows


_Row = TypedDict(
    "_Row",
    {
        "episode": Natural,
        "task": NotRequired[str],
        "return": Number,
        "length": Natural,
        "truncated": bool,
        "success_once": NotRequired[Number | None],
        "success_at_end": NotRequired[Number | None],
        "fail_once": NotRequired[Number | None],
    },
)


class _Lost(TypedDict):
    episode: Natural
    lost: Literal[True]


class _File(TypedDict):
    """What is read of a file of results."""

    version: Annotated[Natural, up_to(RESULTS_VERSION)]
    task: str
    manifest_hash: str
    checkpoint: dict[str, Any]
    episodes: Annotated[list[_Lost | _Row], Field(min_length=1)]


def read_results(path: Path) -> Results:
    """Read a file that ``apexrl eval --manifest … --output`` wrote."""
    if not path.is_file():
        raise ConfigError(f"There is no file of results at {path}.")
    what = f"{path} is not a file of results, or is damaged"
    advice = "; 'apexrl eval RUN_DIR --manifest FILE --output FILE' writes one."
    found = checked(_File, path.read_bytes(), what, advice)
    rows: list[Any] = found["episodes"]
    if [row["episode"] for row in rows] != list(range(len(rows))):
        raise ConfigError(f"{what} (episodes: they are not numbered from 0){advice}")
    kept = [row for row in rows if "lost" not in row]
    if not kept:
        raise ConfigError(f"{path} has no episode that was not lost.")
    shown = {**_ROW_FIELDS, TRUNCATED: "truncated"}
    columns = {name: [row[field] for row in kept] for name, field in shown.items() if all(field in row for row in kept)}
    info = {EPISODE_ID: [row["episode"] for row in kept]}
    names = list(dict.fromkeys(row["task"] for row in kept if "task" in row))
    if names:
        info[TASK_ID] = [names.index(row["task"]) for row in kept]
    episodes, numbers = (
        {name: np.array(values, np.float64) for name, values in table.items()} for table in (columns, info)
    )
    result = EvaluationResult(episodes, task_names=names, info=numbers, num_lost=len(rows) - len(kept))
    name = str(found["checkpoint"].get("path", path))
    return Results(name, found["task"], found["manifest_hash"], found["checkpoint"], result)


def hashed(path: Path) -> dict[str, Any]:
    """Return what names a checkpoint: its path, and the hash of its content."""
    with path.open("rb") as file:
        return {"path": str(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _without_nan(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
