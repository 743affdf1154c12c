"""Trained policies on manifests, and the files of their results."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apexrl.core.errors import ConfigError
from apexrl.core.system.provenance import provenance
from apexrl.core.types import EPISODE_ID, TASK_ID, TRUNCATED
from apexrl.evaluation.evaluate import EvaluationResult, evaluate, group_size
from apexrl.evaluation.manifest import Manifest, dict_or_empty, read_json
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


def read_results(path: Path) -> Results:
    """Read a file that ``apexrl eval --manifest … --output`` wrote."""
    raw = read_json(path, "file of results")
    rows, checkpoint = raw.get("episodes"), dict_or_empty(raw.get("checkpoint"))
    is_known = raw.get("version") == RESULTS_VERSION and isinstance(raw.get("manifest_hash"), str)
    if not is_known or not isinstance(rows, list):
        raise ConfigError(
            f"{path} is not a file of results of version {RESULTS_VERSION}; "
            "'apexrl eval RUN_DIR --manifest FILE --output FILE' writes one."
        )
    try:
        if [row["episode"] for row in rows] != list(range(len(rows))):
            raise ValueError("the episodes are not numbered from 0")
        kept = [row for row in rows if not row.get("lost")]
        columns = {
            name: [row[shown] for row in kept]
            for name, shown in _ROW_FIELDS.items()
            if name in ("return", "episode_len") or all(shown in row for row in kept)
        }
        columns[TRUNCATED] = [row["truncated"] for row in kept]
        info = {EPISODE_ID: [row["episode"] for row in kept]}
        names = list(dict.fromkeys(row["task"] for row in kept if "task" in row))
        if names:
            info[TASK_ID] = [names.index(row["task"]) for row in kept]
        episodes, numbers = (
            {name: np.array(values, np.float64) for name, values in table.items()} for table in (columns, info)
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: its 'episodes' cannot be read ({error!r}).") from error
    if not kept:
        raise ConfigError(f"{path} has no episode that was not lost.")
    result = EvaluationResult(episodes, task_names=names, info=numbers, num_lost=len(rows) - len(kept))
    name = str(checkpoint.get("path", path))
    return Results(name, str(raw.get("task")), raw["manifest_hash"], checkpoint, result)


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
