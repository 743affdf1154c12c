"""``stage12_libero10`` against LIBERO itself, made small: two tasks, a tiny model, episodes of a second."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.suite_session import entries, train

from apexrl.cli.main import main
from apexrl.collectors.init_states import hash_init_state
from apexrl.core.system.files import read_json_lines
from apexrl.envs.suites import make_suite
from apexrl.envs.suites.libero import ASSETS_VARIABLE

WHY_NOT = (
    f"{ASSETS_VARIABLE} does not name LIBERO's scene files"
    if not os.environ.get(ASSETS_VARIABLE)
    else "LIBERO is not installed (make install-libero)"
    if importlib.util.find_spec("libero") is None
    else ""
)
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.slow]

STOVE = "KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it"
SOUP = "LIVING_ROOM_SCENE2_put_both_the_alphabet_soup_and_the_tomato_sauce_in_the_basket"
SMALL = {
    "task.task_names_to_use": f"[{STOVE}, {SOUP}]",
    "task.num_workers": "0",
    "task.max_episode_length": "16",
    "task.cameras": "[]",
    "policy.size": "tiny",
    "policy.width": "32",
    "policy.depth": "1",
    "policy.num_heads": "2",
    "algo.num_epochs": "1",
    "algo.max_attempts": "1",
    "training.num_train_steps": "2",
    "training.eval_num_envs": "2",
    "training.final_eval_episodes": "0",
    "training.device": "cpu",
    "logging.log_freq": "0",
    "features.save_plot": "false",
}


def outcomes(path: Path, task: str) -> dict[str, list[int]]:
    return {state: entry["outcomes"] for state, entry in entries(path).items() if entry["task"] == task}


def hashes(task: str) -> list[str]:
    suite = make_suite("libero_10", (task,), cameras=())
    return [hash_init_state(state) for state in suite.init_states(0, "train")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs that share their statistics; before the second, every state of one task is made mastered."""
    directory = tmp_path_factory.mktemp("libero")
    stats = directory / "output" / "stage12" / "rollout_stats.json"
    values = {**SMALL, "algo.rollout_stats_path": str(stats)}
    for number in range(3):
        more = {"training__seed": str(number), "training__num_train_steps": "1" if number == 2 else "2"}
        if number == 2:
            more["training__final_eval_episodes"] = "2"
        assert train("stage12_libero10", directory / f"run{number}", values, **more) == 0
        (directory / f"stats{number}.json").write_bytes(stats.read_bytes())
        if number == 0:
            known = entries(stats)
            mastered = {"task": STOVE, "outcomes": [1] * 4, "skips": 0}
            stats.write_text(json.dumps({**known, **dict.fromkeys(hashes(STOVE), mastered)}), encoding="utf-8")
    return directory


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return read_json_lines(run_dir / "metrics.jsonl")


def test_several_tasks_give_training_steps(runs: Path) -> None:
    for number, steps in enumerate((2, 2, 1)):
        final = entries(runs / f"run{number}" / "final_training_results.json")
        assert final["total_steps"] == len(final["training_metrics"]) == steps
        assert final["environment_steps"] > 0
    # Nothing succeeds within 16 steps: 3 groups of 4 are run, dropped, and training goes on without them.
    first = lines(runs / "run0")
    assert [line["collect/control_steps"] for line in first] == [3 * 4 * 16] * 2
    assert [line["collect/groups_dropped"] for line in first] == [3, 3]
    assert {entry["task"] for entry in entries(runs / "stats0.json").values()} == {STOVE, SOUP}


def test_statistics_grow_over_three_runs(runs: Path) -> None:
    known = set(hashes(SOUP))
    sizes = [sum(map(len, outcomes(runs / f"stats{number}.json", SOUP).values())) for number in range(3)]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    assert set(outcomes(runs / "stats2.json", SOUP)) <= known


def test_the_second_run_skips_what_is_mastered(runs: Path) -> None:
    assert all(line["collect/states_skipped"] == 0 for line in lines(runs / "run0"))
    second = lines(runs / "run1")
    assert all(line["collect/states_skipped"] > 0 for line in second)
    mastered = outcomes(runs / "stats1.json", STOVE)
    assert set(mastered) == set(hashes(STOVE))
    assert all(history == [1] * 4 for history in mastered.values()), "a mastered state was run"
    assert sum(entry["skips"] for entry in entries(runs / "stats1.json").values()) == sum(
        line["collect/states_skipped"] for line in second
    )


def test_simulators_that_are_there_make_the_next_step_faster(runs: Path) -> None:
    first, second = lines(runs / "run0")
    assert first["collect/envs_created"] >= 2
    assert first["collect/seconds_creating_envs"] > 1
    assert second["collect/envs_created"] == second["collect/seconds_creating_envs"] == 0
    assert second["collect/envs_reused"] == second["collect/episodes"] == 12
    assert second["collect/control_steps_per_second"] > 1.5 * first["collect/control_steps_per_second"]


def test_both_tasks_are_evaluated(runs: Path) -> None:
    (last,) = entries(runs / "run2" / "metrics.json")
    assert (last["step"], last["overall_success_rate"]) == (1, 0)
    assert {name: task["episodes"] for name, task in last["per_task"].items()} == {STOVE: 1, SOUP: 1}


def test_a_policy_that_sees_runs_too(tmp_path: Path) -> None:
    values = {
        **SMALL,
        "task.task_names_to_use": f"[{STOVE}]",
        "task.num_parallel_envs": "1",
        "task.cameras": "[agentview, eye_in_hand]",
        "task.image_size": "32",
        "task.max_episode_length": "8",
        "algo.rloo_batch_size": "2",
        "algo.num_groups": "1",
        "algo.enable_dynamic_sampling": "false",
        "algo.entropy_coef": "0.01",  # a gradient, although every episode fails
        "training.num_train_steps": "1",
    }
    assert train("stage12_libero10", tmp_path / "run", values) == 0
    (line,) = lines(tmp_path / "run")
    assert line["collect/control_steps"] == 2 * 8
    assert line["collect/lost_episodes"] == 0
    assert line["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--task.task_names_to_use", f"[{STOVE[:-1]}]"], ["task.task_names_to_use", STOVE]),
        (["--task.cameras", "[corner2]"], ["cameras", "corner2", "agentview"]),
    ],
)
def test_what_libero_lacks_is_named(
    words: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "stage12_libero10", "--run-dir", str(tmp_path / "run"), *words]) == 2
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    assert not (tmp_path / "run").exists()
