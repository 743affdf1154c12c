"""What several seeds say together."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.refusals import refused

from apexrl.core.errors import ConfigError, FewSamplesWarning, RunDirError
from apexrl.core.system.files import append_json_line
from apexrl.experiments import seeds
from apexrl.experiments.seeds import SeedRun, SeedRuns, curve, parse_seeds, summary
from apexrl.run.records import read_log


def test_the_summary_has_mean_and_interval_and_one_seed_has_none() -> None:
    assert summary(np.array([[3.0]])) == {"iqm": 3.0, "interval": None, "mean": 3.0, "seeds": 1, "tasks": 1}
    found = summary(np.array([[0.5, 1.0], [0.8, 0.8]]), trials=40)
    assert (found["seeds"], found["tasks"], found["mean"], found["iqm"]) == (2, 2, pytest.approx(0.775), 0.8)
    low, high = found["interval"]
    assert 0.0 <= low < 0.8 < high <= 1.0, "a rate stays a rate"


def test_only_finished_seeds_and_common_fields_are_aggregated(tmp_path: Path) -> None:
    tasks = [{"a": {"success_rate": 0.0}, "b": {"success_rate": rate}} for rate in (1.0, 0.5)]
    runs = [
        SeedRun(0, "done", "", {"return": 1.0, "success_rate": 0.5, "episodes": 8, "per_task": tasks[0]}),
        SeedRun(1, "done", "", {"return": 3.0, "success_rate": 0.25, "episodes": 8, "per_task": tasks[1], "own": 1.0}),
        SeedRun(2, "failed", "diverged"),
    ]
    found = SeedRuns(tmp_path, {}, runs).aggregate()
    assert set(found) == {"return", "success_rate"}
    assert (found["return"]["iqm"], found["return"]["seeds"], found["return"]["tasks"]) == (2.0, 2, 1)
    # The strata 0, 0 and 1, 0.5: sorted 0, 0, 0.5, 1, without the ends 0 and 0.5.
    assert (found["success_rate"]["iqm"], found["success_rate"]["tasks"]) == (0.25, 2)


def test_seeds_that_all_succeed_have_the_interval_of_their_episodes(tmp_path: Path) -> None:
    result = {"return": 1.0, "success_rate": 1.0, "episodes": 100}
    found = SeedRuns(tmp_path, {}, [SeedRun(seed, "done", "", result) for seed in range(5)]).aggregate()
    # Wilson's interval of 500 of 500: the lower end is n / (n + z²).
    assert found["success_rate"]["interval"] == pytest.approx([500 / (500 + 1.96**2), 1.0], abs=1e-5)
    assert found["return"]["interval"] == [1.0, 1.0]  # of a return that never differs, nothing else is known


def test_few_seeds_warn_when_they_are_shown_and_not_while_others_train(tmp_path: Path) -> None:
    result = {"return": 1.0, "return_interval": [0.0, 2.0], "episodes": 8}
    stored = SeedRuns(tmp_path, {}, [SeedRun(seed, "done", "", result) for seed in range(4)])
    with pytest.warns(FewSamplesWarning) as warned:
        stored.aggregate()
    assert "4 samples" in str(warned[0].message)
    with warnings.catch_warnings(action="error"):
        stored.write()


def test_seeds_json_comes_back_as_it_was(tmp_path: Path) -> None:
    result = {"return": 1.5, "return_interval": [1.0, 2.0], "episodes": 8}
    stored = SeedRuns(tmp_path, {"training": {"seed": 3}}, [SeedRun(3, "done", "", result), SeedRun(4)])
    stored.write()
    assert seeds.read(tmp_path) == stored
    content = json.loads((tmp_path / seeds.FILE).read_text())
    assert content["aggregate"]["return"]["iqm"] == 1.5
    (tmp_path / seeds.FILE).write_text(json.dumps({**content, "version": 9}))
    with refused(RunDirError, "seeds.json", "version 9", 1, "Update apexrl"):
        seeds.read(tmp_path)
    with refused(RunDirError, tmp_path / "elsewhere", "seeds.json", "apexrl train --seeds"):
        seeds.read(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        (("version",), "new", "version"),
        (("config",), [1], "config"),
        (("runs",), 3, "runs"),
        (("runs", 0), "x", "runs.0"),
        (("runs", 0, "seed"), "../../elsewhere", "runs.0.seed"),
        (("runs", 0, "seed"), True, "runs.0.seed"),
        (("runs", 0, "state"), ["done"], "runs.0.state"),
        (("runs", 0, "more"), 1, "runs.0.more"),
        (("runs", 0, "result"), None, "runs.0.result"),
        (("runs", 0, "result"), {"return": 1.0}, "episodes"),
        (("runs", 0, "result", "return"), "high", "result of seed 3"),
        (("runs", 0, "result", "return_interval"), [1.0], "return_interval"),
        (("runs", 0, "result", "per_task"), {"reach": None}, "per_task.reach"),
        (("runs", 0, "result", "per_task"), [0.5], "per_task"),
    ],
)
def test_a_damaged_seeds_json_is_named(tmp_path: Path, field: tuple[str | int, ...], value: Any, named: str) -> None:
    result = {"return": 1.5, "return_interval": [1.0, 2.0], "episodes": 8}
    path = SeedRuns(tmp_path, {}, [SeedRun(3, "done", "", result)]).write()
    content = place = json.loads(path.read_text())
    for name in field[:-1]:
        place = place[name]
    place[field[-1]] = value
    path.write_text(json.dumps(content))
    with refused(RunDirError, path, "damaged", named, "start the seeds again"):
        seeds.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[]", b"null", b"[" * 100_000])
def test_a_seeds_json_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / seeds.FILE).write_bytes(content)
    with refused(RunDirError, tmp_path / seeds.FILE, "damaged"):
        seeds.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "first", "expected"), [("3", 0, [0, 1, 2]), ("2", 7, [7, 8]), ("4,0, 9", 5, [4, 0, 9]), ("5,6", 0, [5, 6])]
)
def test_seeds_are_a_number_or_a_list(text: str, first: int, expected: list[int]) -> None:
    assert parse_seeds(text, first) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "1,1", "a", "1,,2", "1.5", "99999"])
def test_other_seeds_are_refused(text: str) -> None:
    with refused(ConfigError, "--seeds", repr(text)):
        parse_seeds(text, 0)


def test_a_seed_that_is_too_large_is_named() -> None:
    with refused(ConfigError, "--seeds", 2**31, 2**31 + 1):
        parse_seeds(f"1,{2**31 + 1}", 0)


def test_curves_meet_at_the_steps_that_all_seeds_have(tmp_path: Path) -> None:
    for name, points in {"a": [(10, 0.0), (20, 1.0), (30, 2.0)], "b": [(10, 4.0), (30, 8.0), (40, 9.0)]}.items():
        (tmp_path / name).mkdir()
        for step, value in points:
            append_json_line(tmp_path / name / "metrics.jsonl", {"total_steps": step, "rollout/return": value})
    directories = [tmp_path / "a", tmp_path / "b"]
    steps, values = curve([read_log(path, []) for path in directories], "rollout/return", "return")
    assert steps.tolist() == [10, 20, 30]
    assert values.tolist() == [[0, 1, 2], [4, 6, 8]]
    for directory in directories:
        for step in (10, 20):
            append_json_line(directory / "evaluations.jsonl", {"step": step, "return": 5.0})
    logs = [read_log(path, []) for path in directories]
    steps, values = curve(logs, "rollout/return", "return")
    assert values.tolist() == [[5, 5], [5, 5]]
    assert curve(logs, "rollout/none", "none")[0].shape == (0,)
