"""Reading run directories: what belongs together, and what is missing or damaged."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.refusals import refused

from apexrl.collectors.init_states import RolloutStats
from apexrl.core.errors import RunDirError
from apexrl.core.result import EvaluationResult
from apexrl.core.system.files import append_json_line
from apexrl.core.system.provenance import STARTS, add_start
from apexrl.experiments.report.curves import task_estimates
from apexrl.experiments.report.runs import Group, find_runs, group_runs, read_run


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


def evaluate_run(path: Path, step: int, task_id: list[float] | None = None, **episodes: list[float]) -> None:
    """Append an evaluation as training does."""
    fields = {name: np.array(values) for name, values in episodes.items()}
    tasks, info = ((), {}) if task_id is None else (("reach", "push"), {"task_id": np.array(task_id)})
    result = EvaluationResult(fields, task_names=tasks, info=info)
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
    with refused(RunDirError, path):
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


def change(path: Path, line: int, field: str, value: Any) -> None:
    """Put a value into a JSON-lines file, at ``a/b/c`` where mappings are nested."""
    records = [json.loads(text) for text in path.read_text().splitlines()]
    *parents, name = field.split("|")
    place = records[line]
    for parent in parents:
        place = place[parent]
    place[name] = value
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("value", [1.7, -0.2, "high", None, math.nan, 1e300, 10**400, True, [0.5]])
@pytest.mark.parametrize("field", ["success_rate", "per_task|reach|success_rate", "success_rate_interval"])
def test_a_rate_that_is_none_is_left_out_and_named(tmp_path: Path, field: str, value: Any) -> None:
    path = make_run(tmp_path / "run")
    for step in (200, 400):
        evaluate_run(path, step, success_once=[1.0, 0.0], task_id=[0.0, 1.0], **{"return": [1.0, 2.0]})
    if field == "success_rate_interval":
        value = [0.0, value]
    change(path / "evaluations.jsonl", 1, field, value)
    (group,) = groups_of(path)
    (run,) = group.runs
    assert run.evaluations[0].fields["success_rate"] == run.evaluations[1].fields["success_once"]
    assert ("success_rate" in run.evaluations[1].fields) == (field != "success_rate")
    assert task_estimates(group).keys() == ({"push"} if "reach" in field else {"reach", "push"})
    (note,) = run.notes
    assert note.startswith(f"{path}/evaluations.jsonl: '{field.replace('|', '.')}' must be a rate from 0 to 1, got ")


@pytest.mark.parametrize(
    ("file", "field", "value", "note"),
    [
        ("metrics.jsonl", "rollout/return", 1e300, "'rollout/return' must be a number up to 1e+100, got 1e+300"),
        ("metrics.jsonl", "rollout/return", "x", "'rollout/return' must be a number up to 1e+100, got \"x\""),
        ("metrics.jsonl", "total_steps", None, "'total_steps' must be a number up to 1e+100, got null"),
        ("metrics.jsonl", "time/rollout_share", 7, "'time/rollout_share' must be a rate from 0 to 1, got 7"),
        ("evaluations.jsonl", "step", "y", "'step' must be a count, got \"y\""),
        ("evaluations.jsonl", "step", 10**400, "'step' must be a count, got 1000"),
        ("evaluations.jsonl", "episodes", -4, "'episodes' must be a count, got -4"),
        ("evaluations.jsonl", "return_interval", 3, "'return_interval' must be two numbers, got 3"),
        ("evaluations.jsonl", "per_task", [3], "'per_task' must be a mapping, got [3]"),
        ("evaluations.jsonl", "per_task|reach|episodes", 10**400, "'per_task.reach.episodes' must be a count, got 10"),
        (
            "evaluations.jsonl",
            "per_task|reach",
            3,
            "'per_task.reach.success_rate' must be a rate from 0 to 1, got null",
        ),
    ],
)
def test_a_damaged_number_costs_itself_and_is_named(
    tmp_path: Path, file: str, field: str, value: Any, note: str
) -> None:
    path = make_run(tmp_path / "run")
    evaluate_run(path, 400, success_once=[1.0, 0.0], task_id=[0.0, 1.0], **{"return": [1.0, 2.0]})
    change(path / file, -1, field, value)
    run = read_run(path)
    assert any(found.startswith(f"{path}/{file}: {note}") for found in run.notes), run.notes
    assert run.iterations == 4
    assert len(run.evaluations) == (field != "step")


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", lines=3)
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(f"{text[:20]}\n{text[:-9]}")
    run = read_run(path)
    assert run.iterations == 2
    assert f"{path}/metrics.jsonl: 2 of 4 lines are damaged or cut off; left out." in run.notes


@pytest.mark.parametrize("content", ['{"a": {"task": "", "outcomes": [1e999], "skips": 0}}', "[" * 100_000])
def test_statistics_that_are_none_are_named(tmp_path: Path, content: str) -> None:
    path = make_run(tmp_path / "run")
    (path / "rollout_stats.json").write_text(content)
    assert any(f"{path}/rollout_stats.json holds no rollout statistics" in note for note in read_run(path).notes)
    long = read_run(make_run(tmp_path / "long", algo__rollout_stats_path="x" * 5000))
    assert any(note.startswith("x" * 200 + " holds no rollout statistics") for note in long.notes)


def test_results_on_manifests_bring_versions_and_commit(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    summary = EvaluationResult({"return": np.array([1.0, 3.0])}).record()
    record = {"summary": summary, "manifest_hash": "abc", "command": "apexrl eval x", "commit": "0123"}
    (path / "lift.json").write_text(json.dumps({**record, "versions": {"torch": "2.0"}, "platform": "Linux"}))
    run = read_run(path)
    assert run.recorded == {"torch": "2.0", "commit": "0123", "platform": "Linux"}
    (result,) = run.pinned
    assert (result.manifest_hash, result.evaluation.fields["return"].mean) == ("abc", 2.0)


def test_a_resume_with_something_else_is_said(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    evaluate_run(path, 400, **{"return": [1.0, 3.0]})
    for iteration in (0, 2):
        add_start(path, iteration, torch.device("cpu"))
    run = read_run(path)
    assert [start.iteration for start in run.starts] == [0, 2]
    assert run.notes == []
    assert run.recorded["torch"] == version("torch")
    change(path / STARTS, 1, "machine|host", "elsewhere")
    change(path / STARTS, 1, "versions|torch", "1.0")
    run = read_run(path)
    assert run.notes == ["resumed at iteration 2 with other versions and another machine; see 'Repeat it'."]
    assert "host elsewhere" in run.starts[1].machine
    change(path / STARTS, 1, "iteration", "x")
    run = read_run(path)
    assert len(run.starts) == 1
    assert run.notes == [f"{path}/starts.jsonl: 'iteration' must be a count, got \"x\"; left out."]


def test_statistics_of_init_states_may_lie_elsewhere(tmp_path: Path) -> None:
    stats = RolloutStats(tmp_path / "shared.json")
    stats.record("f" * 64, [True, False], "reach")
    stats.write()
    run = read_run(make_run(tmp_path / "run", algo__rollout_stats_path=str(tmp_path / "shared.json")))
    assert run.init_states == {"f" * 64: {"task": "reach", "outcomes": [1, 0], "skips": 0}}
