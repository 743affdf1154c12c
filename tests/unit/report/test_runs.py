"""Reading run directories: what belongs together, and what is missing or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from apexrl.collectors.init_states import RolloutStats
from apexrl.errors import RunDirError
from apexrl.evaluation_result import EvaluationResult
from apexrl.loggers import append_json_line
from apexrl.report.runs import Group, find_runs, group_runs, read_run


def make_run(path: Path, seed: int = 0, lines: int = 4, **more: Any) -> Path:
    """A run directory as training writes it; ``more`` has two underscores for a dot in the configuration."""
    config: dict[str, dict[str, Any]] = {
        "task": {"id": "lift"},
        "algo": {"name": "ppo", "learning_rate": 0.001},
        "training": {"total_timesteps": 400, "seed": seed},
    }
    for name, value in more.items():
        section, key = name.split("__")
        config[section][key] = value
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for index in range(1, lines + 1):
        line = {"iteration": index, "total_steps": 100 * index, "rollout/return": float(index + seed)}
        append_json_line(path / "metrics.jsonl", {**line, "time/fps": 50.0, "time/rollout_share": 0.25})
    return path


def evaluate_run(path: Path, step: int, **episodes: list[float]) -> None:
    """Append an evaluation as training does."""
    fields = {name: np.array(values) for name, values in episodes.items()}
    result = EvaluationResult(fields, task_names=("reach", "push") if "task_id" in fields else ())
    append_json_line(path / "evaluations.jsonl", {"iteration": step // 100, "step": step, **result.record()})


def groups_of(*paths: Path) -> list[Group]:
    return group_runs([read_run(path) for path in find_runs(paths)])


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "fast-0"), make_run(tmp_path / "fast-1", seed=1)
    other = make_run(tmp_path / "slow", algo__learning_rate=0.0001)
    groups = groups_of(first, other, second)
    assert [(group.name, [run.seed for run in group.runs]) for group in groups] == [("fast", [0, 1]), ("slow", [0])]


def test_a_directory_of_seeds_stands_for_its_runs_in_order(tmp_path: Path) -> None:
    for seed in (0, 2, 10):
        make_run(tmp_path / "lift" / f"seed-{seed}", seed)
    (tmp_path / "lift" / "notes").mkdir()
    (group,) = groups_of(tmp_path / "lift", tmp_path / "lift" / "seed-2")
    assert group.name == "lift"
    assert [run.path.name for run in group.runs] == ["seed-0", "seed-2", "seed-10"]


def test_a_sweep_stands_for_the_seeds_of_its_trials(tmp_path: Path) -> None:
    for trial, rate in enumerate((0.1, 0.2)):
        for seed in (0, 1):
            make_run(tmp_path / "sweep" / f"trial-{trial:04d}" / f"seed-{seed}", seed, algo__learning_rate=rate)
    groups = groups_of(tmp_path / "sweep")
    assert [(group.name, len(group.runs)) for group in groups] == [("trial-0000", 2), ("trial-0001", 2)]


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (("boss-1", "boss-2"), "boss"),
        (("rloo-s0", "rloo-s1"), "rloo"),
        (("run_seed10", "run_seed11"), "run"),
        (("a", "b"), "parent"),
        (("mt4a", "mt4b"), "mt4"),
    ],
)
def test_the_name_of_a_group_is_what_its_runs_share(tmp_path: Path, names: tuple[str, ...], group: str) -> None:
    paths = [make_run(tmp_path / "parent" / name, seed) for seed, name in enumerate(names)]
    assert [found.name for found in groups_of(*paths)] == [group]


def test_groups_with_the_same_name_can_be_told_apart(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", algo__learning_rate=1.0)]
    assert [group.name for group in groups_of(*paths)] == ["run", "run (2)"]


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_what_is_no_run_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("")
    with pytest.raises(RunDirError, match=rf"{path} is not a run directory"):
        find_runs([path])


def test_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", lines=2)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "total_st')
    run = read_run(path)
    assert (run.iterations, run.steps, run.progress) == (2, 200, 0.5)
    assert any(note.startswith("stopped at 50%") and f"apexrl train --resume {path}" in note for note in run.notes)
    assert any("no evaluation yet" in note for note in run.notes)


def test_a_finished_run_has_no_notes(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    evaluate_run(path, 400, **{"return": [1.0, 3.0]})
    assert read_run(path).notes == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "task: [unclosed"),
        ("config.yaml", "!!python/object/apply:os.system ['true']"),
        ("config.yaml", "just text"),
        ("metrics.jsonl", '[1, 2]\n{"iteration": "x", "total_steps": null}\n\x00\xff'),
        ("evaluations.jsonl", '{"step": 1, "return": "high", "per_task": [3]}\n{"step": "y"}\n{"per_task": {"a": 1}}'),
        ("rollout_stats.json", '{"abc": 3}'),
        ("rollout_stats.json", "{"),
        ("result.json", "[" * 100_000),
        ("result.json", '{"summary": {"return": null}, "manifest_hash": 3}'),
    ],
)
def test_a_damaged_file_costs_what_it_held_and_no_more(tmp_path: Path, name: str, content: str) -> None:
    path = make_run(tmp_path / "run")
    evaluate_run(path, 400, **{"return": [1.0, 3.0]})
    (path / name).write_text(content, encoding="latin-1")
    run = read_run(path)
    assert run.config == {} if name == "config.yaml" else run.seed == 0
    assert run.steps == (0 if name == "metrics.jsonl" else 400)
    assert run.init_states == {}
    if name == "evaluations.jsonl":
        assert [entry.fields for entry in run.evaluations] == [{}]
    else:
        assert [entry.fields["return"].mean for entry in run.evaluations] == [2.0]


def test_results_on_manifests_bring_versions_and_commit(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    summary = EvaluationResult({"return": np.array([1.0, 3.0])}).record()
    record = {"summary": summary, "manifest_hash": "abc", "command": "apexrl eval x", "commit": "0123"}
    (path / "lift.json").write_text(json.dumps({**record, "versions": {"torch": "2.0"}, "platform": "Linux"}))
    run = read_run(path)
    assert run.recorded == {"torch": "2.0", "commit": "0123", "platform": "Linux"}
    (result,) = run.pinned
    assert (result.manifest_hash, result.evaluation.fields["return"].mean) == ("abc", 2.0)


def test_statistics_of_init_states_may_lie_elsewhere(tmp_path: Path) -> None:
    stats = RolloutStats(tmp_path / "shared.json")
    stats.record("f" * 64, [True, False], "reach")
    stats.write()
    run = read_run(make_run(tmp_path / "run", algo__rollout_stats_path=str(tmp_path / "shared.json")))
    assert run.init_states == {"f" * 64: {"task": "reach", "outcomes": [1, 0], "skips": 0}}
