"""The command line on task suites: what its commands produce, what they say when something is wrong, kills and resumes.

The runs that are killed are forked as in ``test_resume.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import imageio.v3 as iio
import pytest
import torch
from PIL import Image
from tests.contract.test_resume import AFTER_EVALUATION_RECORD, AFTER_SAVE, Kill, command
from tests.point_suite import PointSuite
from tests.refusals import refused
from tests.suite_session import FAILING, RLOO, SMALL, TASKS, entries, imitate, options, train

from apexrl import BC
from apexrl.agent import checkpoint
from apexrl.cli.main import main
from apexrl.collectors.demonstrations import record as demos
from apexrl.core.errors import ConfigError
from apexrl.core.system.files import read_json_lines
from apexrl.envs.suites.base import Split, TaskSuite
from apexrl.envs.suites.metaworld import MetaWorldSuite
from apexrl.run import directory, trained_policy
from apexrl.run import suite as suite_run
from apexrl.run.suite import SuiteConfig

pytestmark = pytest.mark.slow

CLOCK = ("time/", "collect/seconds", "collect/control_steps_per_second", "collect/envs_")
"""Names of numbers that depend on the clock, or on which simulators a process has already made."""
KILLED = {
    **RLOO,
    "task.task_names_to_use": f"[{TASKS[0]}]",
    "training.num_train_steps": "5",
    "training.save_interval": "2",
    "training.final_eval_episodes": "2",
    "logging.log_freq": "2",
    "features.save_video": "false",
}
IMITATED = {"task.num_demos": "1", "algo.imitation_updates": "12", "algo.imitation_batch_size": "8"}
"""On top of RLOO: it begins with a short imitation of demonstrations that it records."""
UPDATE, IMITATION_UPDATE, STATS = "apexrl:RLOO.update", "apexrl:BC.update", "apexrl:RolloutStats.write"
RECORDED = "apexrl.collectors.demonstrations.record:Recorded"
"""What is made once the file of a task is written."""


@pytest.fixture(scope="module")
def bc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of imitation, with its demonstrations and its file beside it. Not to be changed."""
    return imitate(tmp_path_factory.mktemp("suites_cli"))


@pytest.fixture(scope="module")
def rloo(bc: Path) -> Path:
    """A finished run of RLOO from there. Not to be changed."""
    values = {**RLOO, "training.init_from": str(bc), "logging.log_freq": "1", "training.final_eval_episodes": "4"}
    assert train("stage11_ript_vla", bc.parent / "rloo", {**values, "features.save_plot": "true"}) == 0
    return bc.parent / "rloo"


@pytest.fixture(scope="module")
def whole(bc: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run: checkpoints at 2, 4 and 5, evaluations at 2, 4 and at the end."""
    run_dir = tmp_path_factory.mktemp("suites_killed") / "whole"
    assert start(run_dir, bc) == 0
    return run_dir


def start(run_dir: Path, bc: Path, kill: Kill | None = None, **more: str) -> int:
    values = {**KILLED, "training.init_from": str(bc), **{k.replace("__", "."): v for k, v in more.items()}}
    arguments = ["train", "stage11_ript_vla", "--run-dir", str(run_dir), *options(values)]
    return command(arguments, run_dir.parent, kill)


def resume(run_dir: Path, kill: Kill | None = None) -> int:
    return command(["train", "--resume", str(run_dir)], run_dir.parent, kill)


def numbers(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = read_json_lines(run_dir / name)
    return [{key: value for key, value in line.items() if not key.startswith(CLOCK)} for line in lines]


def assert_same_run(resumed: Path, whole: Path) -> None:
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert numbers(resumed, name) == numbers(whole, name), name
    for name in ("metrics.json", "rollout_stats.json"):
        assert entries(resumed / name) == entries(whole / name), name
    ours, theirs = (checkpoint.load(checkpoint.latest(run / "checkpoints")) for run in (resumed, whole))
    assert ours["iteration"] == theirs["iteration"]
    for name, weights in theirs["policy"].items():
        assert torch.equal(ours["policy"][name], weights), name


# What the commands produce


def test_rloo_holds_on_to_the_demonstrations_that_imitation_used(bc: Path, tmp_path: Path) -> None:
    values = {**RLOO, "training.init_from": str(bc), "training.num_train_steps": "1"}
    anchor = {"algo.imitation_coef": "0.1", "task.demos": str(bc.parent / "demos")}
    assert train("stage11_ript_vla", tmp_path / "rloo", {**values, **anchor}) == 0
    (line,) = read_json_lines(tmp_path / "rloo" / "metrics.jsonl")
    assert line["train/imitation_loss"] != 0


def test_rloo_collects_in_the_background(bc: Path, tmp_path: Path) -> None:
    values = {**RLOO, "training.collector": "async", "training.init_from": str(bc), "training.num_train_steps": "3"}
    assert train("stage11_ript_vla", tmp_path / "run", values) == 0
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert all(0 <= line["collect/staleness"] <= 1 and line["collect/groups_wanted"] == 2 for line in lines)
    assert lines[-1]["total_steps"] == sum(line["collect/control_steps"] for line in lines)
    assert main(["train", "--resume", str(tmp_path / "run"), "--training.num_train_steps", "4"]) == 0
    assert [line["iteration"] for line in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_demos_records_files_in_the_layout_of_libero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demos", f"metaworld:{TASKS[0]}", "--per-task", "2", "--num-workers", "1"]
    assert main([*arguments, "--output", str(tmp_path / "demos")]) == 0
    assert "2 demonstrations" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "demos").iterdir()] == [f"{TASKS[0]}_demo.hdf5"]
    with h5py.File(tmp_path / "demos" / f"{TASKS[0]}_demo.hdf5") as file:
        assert list(file["data"]) == ["demo_0", "demo_1"]
        for demo in file["data"].values():
            steps = demo.attrs["num_samples"]
            assert demo["actions"].shape == (steps, 4)
            assert demo["obs/state"].shape == (steps, 39)
            assert [demo[name][-1] for name in ("rewards", "dones")] == [1, 1]


def test_demos_begins_with_the_state_and_keeps_the_horizon_that_are_asked_for(tmp_path: Path) -> None:
    arguments = ["demos", f"metaworld:{TASKS[0]}", "--per-task", "1", "--num-workers", "1"]
    assert main([*arguments, "--start", "3", "--horizon", "120", "--output", str(tmp_path)]) == 0
    with h5py.File(tmp_path / f"{TASKS[0]}_demo.hdf5") as file:
        state = MetaWorldSuite("one", (TASKS[0],)).init_states(0)[3]
        assert (file["data/demo_0"].attrs["init_state"][:] == state).all()
        assert json.loads(file["data"].attrs["env_args"])["env_kwargs"]["horizon"] == 120


def test_demos_shows_others_what_a_policy_did(bc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demos", f"metaworld:{TASKS[0]}", "--policy", str(bc), "--per-task", "2", "--num-workers", "2"]
    assert main([*arguments, "--start", "3", "--proprioception", "--output", str(tmp_path)]) == 0
    assert "2 demonstrations" in capsys.readouterr().out
    suite = MetaWorldSuite(f"metaworld:{TASKS[0]}", (TASKS[0],), horizon=45)
    (plans,) = trained_policy.load_trained(bc).plans(suite, 2, start=3)
    assert min(plans) >= 3
    with h5py.File(tmp_path / f"{TASKS[0]}_demo.hdf5") as file:
        assert json.loads(file["data"].attrs["env_args"])["env_kwargs"]["horizon"] == 45  # of the policy's episodes
        for demo, (number, actions) in zip(file["data"].values(), plans.items(), strict=True):
            # The policy saw 39 numbers; of these the hand and its opening are recorded.
            assert demo["obs/state"].shape == (len(actions), 4)
            assert (demo.attrs["init_state"] == suite.init_states(0)[number]).all()
            assert (demo["actions"][:] == actions.clip(-1, 1)).all()


def test_a_policy_that_cannot_act_on_a_suite_is_refused(
    bc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_suite = SuiteConfig.make_suite

    def make(task: SuiteConfig, **options: Any) -> TaskSuite:
        return PointSuite() if task.benchmark_name == "points" else make_suite(task, **options)

    monkeypatch.setattr(SuiteConfig, "make_suite", make)
    with refused(ConfigError, "'points'", "observations or actions"):
        trained_policy.load_trained(bc).plans(PointSuite(), 1)
    assert main(["train", "cartpole_ppo", "--training.total_timesteps", "64", "--run-dir", str(tmp_path / "ppo")]) == 0
    with refused(ConfigError, "'CartPole-v1'", "suite"):
        trained_policy.load_trained(tmp_path / "ppo").plans(PointSuite(), 1)


def test_demos_says_when_the_states_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(suite: MetaWorldSuite, path: Path, per_task: int, **_: Any) -> dict[str, demos.Recorded]:
        return {name: demos.Recorded(path, per_task - 1, 5, 100) for name in suite.task_names}

    monkeypatch.setattr(demos, "record_demos", record)
    assert main(["demos", f"metaworld:{TASKS[0]}", "--per-task", "46", "--output", str(tmp_path)]) == 0
    assert "45 demonstrations, 100 steps, 5 attempts failed; the training states ran out" in capsys.readouterr().out


def test_a_run_that_has_logged_nothing_yet_is_a_run(
    rloo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(rloo / "config.yaml", tmp_path)
    assert main(["plot", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"apexrl: Nothing to plot yet in {tmp_path}: no episode has ended.\n"
    assert main(["plot", str(rloo), str(tmp_path), "--output", str(tmp_path / "curve.png")]) == 0


def test_a_lack_of_memory_names_what_a_suite_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(directory, "start", out_of_memory)
    assert main(["train", "mt10_rloo"]) == 2
    said = capsys.readouterr().err
    for name in ("task.num_parallel_envs", "task.max_cached_envs", "algo.minibatch_size", "algo.micro_batch_size"):
        assert name in said
    assert "policy.size" in said


def test_a_run_directory_holds_everything(rloo: Path) -> None:
    names = {path.name for path in rloo.iterdir()}
    assert {
        "config.yaml", "metrics.jsonl", "evaluations.jsonl", "checkpoints", "curve.png", "tasks.png", "metrics.json",
        "final_training_results.json", "rollout_stats.json",
    } <= names  # fmt: skip
    assert not [path for path in rloo.rglob("*") if ".part" in path.name]
    with Image.open(rloo / "tasks.png") as image:
        image.load()
        assert image.width > 300
    final = entries(rloo / "final_training_results.json")
    lines = read_json_lines(rloo / "metrics.jsonl")
    assert [line["train/mixed"] for line in final["training_metrics"]] == [line["train/mixed"] for line in lines]
    assert final["total_steps"] == final["training_metrics"][-1]["total_steps"] == len(lines) == 2
    steps = sum(line["collect/control_steps"] for line in lines)
    assert final["environment_steps"] == final["training_metrics"][-1]["environment_steps"] == steps
    assert final["optimizer_steps"] == sum(line["train/updates"] for line in lines) > 0
    assert final["evaluations"] == entries(rloo / "metrics.json")
    assert all("eval/return" in line for line in lines)


def test_eval_gives_what_the_end_of_training_gave(
    rloo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(rloo), "--episodes", "4", "--csv", str(tmp_path / "csv")]) == 0
    said = capsys.readouterr().out
    last = entries(rloo / "metrics.json")[-1]
    assert f"success {100 * last['overall_success_rate']:.1f} %" in said
    for name, task in last["per_task"].items():
        line = next(line for line in said.splitlines() if line.split()[0] == name)
        assert f"{100 * task['success_rate']:.1f} %" in line
        assert "over 2 episodes" in line
    assert len(list((tmp_path / "csv").rglob("rewards.csv"))) == 2  # training.eval_num_envs


def test_eval_does_not_run_on_states_that_the_policy_was_trained_from(
    rloo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    original = MetaWorldSuite.init_states

    def init_states(self: MetaWorldSuite, task_id: int, split: Split = "train") -> Any:
        asked.add(split)
        return original(self, task_id, split)

    monkeypatch.setattr(MetaWorldSuite, "init_states", init_states)
    assert main(["eval", str(rloo), "--episodes", "2"]) == 0
    assert asked == {"val"}


def test_play_and_plot(rloo: Path, tmp_path: Path) -> None:
    assert main(["play", str(rloo), "--episodes", "1", "--output", str(tmp_path / "video.mp4")]) == 0
    frames = iio.imread(tmp_path / "video.mp4")
    assert 1 <= len(frames) <= 45 // 5
    assert frames.std() > 1
    assert iio.immeta(tmp_path / "video.mp4")["fps"] == 80 / 5  # control steps a second, and those of a chunk
    assert main(["plot", str(rloo), str(rloo.parent / "bc"), "--output", str(tmp_path / "curve.png")]) == 0
    with Image.open(tmp_path / "curve.png") as image:
        image.load()


def test_list_names_suites_and_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    for name in (
        "mt10",
        "libero_10",
        "metaworld:TASK",
        "stage11_ript_vla",
        "stage12_libero10",
        "mt10_bc",
        "rloo",
        "bc",
    ):
        assert name in said


def test_bc_uses_all_of_its_updates_and_is_evaluated_when_asked(bc: Path, tmp_path: Path) -> None:
    assert entries(bc / "final_training_results.json")["total_steps"] == 200
    values = {**SMALL, "algo.num_updates": "6", "logging.log_freq": "3", "logging.log_interval": "1"}
    assert train(str(bc.parent / "bc.yaml"), tmp_path / "run", values) == 0
    assert [entry["step"] for entry in entries(tmp_path / "run" / "metrics.json")] == [3, 6]
    assert [line["iteration"] for line in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


# What is wrong


RUN = [
    "train", "stage11_ript_vla", "--task.benchmark_name", f"metaworld:{TASKS[0]}", "--task.num_workers", "0",
    "--task.num_parallel_envs", "4", "--training.device", "cpu",
]  # fmt: skip
BARE = ["--task.num_demos", "0", "--algo.imitation_updates", "0"]
IMITATE = ["train", "BC", "--task.benchmark_name", f"metaworld:{TASKS[0]}", "--task.num_workers", "0"]
FREEZE = [
    "train", "mt10_rloo", "--task.benchmark_name", f"metaworld:{TASKS[0]}", "--task.num_workers", "0",
    "--training.device", "cpu", "--policy.learn_std", "false", "--policy.freeze",
]  # fmt: skip
EXPERT = ["demos", f"metaworld:{TASKS[0]}", "--per-task", "1", "--num-workers", "1"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([*RUN, "--task.benchmark_name", "mt11"], ["task.benchmark_name", "mt11", "mt10"]),
        ([*RUN, "--task.benchmark_name", "metaworld:reach"], ["task.benchmark_name", "metaworld:reach-v3"]),
        ([*RUN, "--task.task_names_to_use", "[handle]"], ["task.task_names_to_use", "'handle'", TASKS[0]]),
        ([*RUN, "--task.task_names_to_use", f"[{TASKS[0]}, {TASKS[0]}]"], ["task.task_names_to_use", "once", TASKS[0]]),
        ([*RUN, "--task.cameras", "[corner9]"], ["cameras", "corner9", "corner2"]),
        ([*RUN, "--policy.kind", "mlp", "--policy.actor_groups", "[image]"], ["actor_groups", "image", "state"]),
        ([*RUN, "--algo.loss", "weighted_flow"], ["algo.loss", "weighted_flow", "policy.head flow"]),
        ([*RUN, "--training.init_from", "nowhere"], ["training.init_from", "no checkpoint", "nowhere"]),
        ([*RUN, "--algo.rollout_stats_path", "BAD/rollout_stats.json"], ["algo.rollout_stats_path", "another file"]),
        ([*RUN, "--algo.rollout_stats_path", "BAD/rollout_stats.json/deeper"], ["algo.rollout_stats_path", "written"]),
        (["train", "mt10_bc", "--task.num_workers", "0"], ["algo.name bc", "task.demos", "apexrl demos"]),
        ([*RUN, *BARE, "--algo.imitation_coef", "0.1"], ["algo.imitation_coef needs task.demos", "apexrl demos"]),
        ([*RUN, "--task.num_demos", "51"], ["task.num_demos must be at most 50", "got 51"]),
        ([*RUN, "--task.max_episode_length", "3"], ["task.num_demos: The expert", TASKS[0], "task.max_episode_length"]),
        ([*IMITATE, "--task.demos", "nowhere"], ["task.demos", "nowhere", "record"]),
        ([*IMITATE, "--task.demos", "BAD"], ["task.demos", f"{TASKS[0]}_demo.hdf5", "HDF5"]),
        ([*IMITATE, "--task.demos", "DEMOS", "--task.privileged", "false"], ["task.demos", "state", ", 4]", ", 39]"]),
        ([*IMITATE, "--task.benchmark_name", "metaworld:reach-v3"], ["task.demos", "no demonstrations", "reach-v3"]),
        ([*FREEZE, "[text, state, prefix, expert]"], ["Nothing is left to train", "policy.freeze"]),
        (["demos", "mt11"], ["SUITE has no 'mt11'", "mt10"]),
        (["demos", "mt10", "--tasks", "reach"], ["--tasks", "no task 'reach'", "reach-v3"]),
        (["demos", "mt10", "--cameras", "nose"], ["--cameras has no 'nose'", "corner2"]),
        (["demos", "mt10", "--tasks", "reach-v3, push-v3,reach-v3"], ["--tasks must name each task once", "push-v3"]),
        (["demos", "mt10", "--image-size", "32"], ["--image-size", "--cameras"]),
        (["demos", "mt10", "--per-task", "60"], ["--per-task 60", "'mt10' has 50", "lower"]),
        (["demos", "mt10", "--start", "45"], ["--per-task 10", "--start 45", "needs 55", "has 50"]),
        (["demos", "mt10", "--start", "-1"], ["--start", "'-1'"]),
        (["demos", "mt10", "--horizon", "0"], ["--horizon", "'0'"]),
        ([*EXPERT, "--horizon", "3"], [TASKS[0], "from none of 50", "3; --horizon", "--start", "--tasks"]),
        ([*EXPERT, "--policy", "nowhere"], ["nowhere", "no checkpoint"]),
        ([*EXPERT, "--policy", "RUN", "--horizon", "3"], ["The policy", TASKS[0], "from none", "(3;", "--tasks"]),
        (["check-env", "mt10"], ["'mt10' is a suite", "--task.benchmark_name mt10", "apexrl demos mt10"]),
        (["check-env", "metaworld:reach-v3"], ["is a suite", "--task.benchmark_name metaworld:reach-v3"]),
        (["demos", "mt10", "--per-task", "0"], ["--per-task", "'0'"]),
        (["eval", "nowhere"], ["no checkpoint", "nowhere"]),
        (["play", "RUN", "--output", "video.txt"], ["--output", "video.txt", ".mp4"]),
        (["plot", "nowhere"], ["nowhere", "not a run directory"]),
        (["train", "--resume", "RUN", "--task.chunk_size", "4"], ["--task.chunk_size 4", "cannot change"]),
        (["train", "--resume", "RUN", "--algo.num_groups", "4"], ["--algo.num_groups 4", "cannot change"]),
    ],
)
def test_one_message_says_what_is_wrong_and_nothing_is_left_behind(
    words: list[str],
    parts: list[str],
    bc: Path,
    rloo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / f"{TASKS[0]}_demo.hdf5").write_text("no HDF5")
    (tmp_path / "bad" / "rollout_stats.json").write_text("[1, 2")
    places = {"BC": bc.parent / "bc.yaml", "DEMOS": bc.parent / "demos", "RUN": rloo, "BAD": tmp_path / "bad"}
    before = {path: path.read_bytes() for folder in (tmp_path, rloo) for path in folder.rglob("*") if path.is_file()}
    named = [str(places.get(word, word)).replace("BAD/", f"{places['BAD']}/") for word in words]
    assert main(named) == 2
    out, err = capsys.readouterr()
    assert err.startswith("apexrl: ")
    assert "Traceback" not in err
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
    assert "Training" not in out
    after = {path: path.read_bytes() for folder in (tmp_path, rloo) for path in folder.rglob("*") if path.is_file()}
    assert after == before
    assert not list(tmp_path.glob("runs/*"))


def test_a_damaged_demonstration_is_named(bc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said_about(spoil: Callable[[h5py.File], None]) -> str:
        demos = Path(shutil.copytree(bc.parent / "demos", tmp_path / "demos", dirs_exist_ok=True))
        with h5py.File(demos / f"{TASKS[1]}_demo.hdf5", "a") as file:
            spoil(file)
        assert train(str(bc.parent / "bc.yaml"), tmp_path / "run", SMALL, task__demos=str(demos)) == 2
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    def without_actions(file: h5py.File) -> None:
        del file["data/demo_1/actions"]

    def not_finite(file: h5py.File) -> None:
        file["data/demo_0/actions"][0] = float("nan")

    def without_demos(file: h5py.File) -> None:
        del file["data"]

    for spoil, part in (
        (without_actions, "/data/demo_1/actions"),
        (not_finite, "not finite"),
        (without_demos, "demo_0"),
    ):
        said = said_about(spoil)
        assert f"{TASKS[1]}_demo.hdf5" in said
        assert part in said
        assert said.startswith("apexrl: task.demos")


# Kills and resumes


def test_the_whole_run_is_what_the_other_tests_take_it_for(whole: Path) -> None:
    assert [line["iteration"] for line in numbers(whole)] == [1, 2, 3, 4, 5]
    assert [entry["step"] for entry in entries(whole / "metrics.json")] == [2, 4, 5]
    assert any(0 < line["train/success"] < 1 for line in numbers(whole))
    assert any("train/policy_loss" in line for line in numbers(whole)), "no batch had a gradient"


def test_a_run_that_is_killed_writes_what_a_whole_one_does(bc: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    # In the first iteration, whose outcomes the statistics already hold, and after the next one's evaluation.
    assert start(run_dir, bc, Kill(UPDATE, 1, "before")) == -signal.SIGKILL
    assert sum(len(entry["outcomes"]) for entry in entries(run_dir / "rollout_stats.json").values()) > 0
    assert resume(run_dir, AFTER_EVALUATION_RECORD) == -signal.SIGKILL
    assert resume(run_dir, AFTER_SAVE) == -signal.SIGKILL
    # Between two checkpoints, with statistics of two batches that are run again.
    assert resume(run_dir, Kill(UPDATE, 2, "before")) == -signal.SIGKILL
    outcomes = sum(len(entry["outcomes"]) for entry in entries(run_dir / "rollout_stats.json").values())
    saved = checkpoint.load(checkpoint.latest(run_dir / "checkpoints"))
    kept = saved["collector"]["rollout_stats"]
    assert saved["iteration"] == 2
    assert outcomes > sum(len(entry["outcomes"]) for entry in kept.values())
    assert resume(run_dir, Kill(STATS, 1)) == -signal.SIGKILL
    # What was written after the checkpoint is gone, and the batch behind it stands once.
    again = entries(run_dir / "rollout_stats.json")
    assert sum(len(entry["outcomes"]) for entry in again.values()) < outcomes
    assert resume(run_dir) == 0
    assert_same_run(run_dir, whole)


def test_statistics_of_another_place_come_back_too(bc: Path, tmp_path: Path) -> None:
    found = []
    for name, kills in (("whole", []), ("killed", [Kill(UPDATE, 1, "before"), Kill(UPDATE, 1)])):
        path = tmp_path / f"{name}.json"
        # What an earlier run knew of a state.
        path.write_text('{"%s": {"task": "other", "outcomes": [1, 0], "skips": 0}}' % ("0" * 64))
        more = {"algo__rollout_stats_path": str(path), "training__num_train_steps": "1", "logging__log_freq": "0"}
        more["training__final_eval_episodes"] = "0"
        first = kills[0] if kills else None
        assert start(tmp_path / name, bc, first, **more) == (-signal.SIGKILL if kills else 0)
        for kill in kills[1:]:
            assert resume(tmp_path / name, kill) == -signal.SIGKILL
        if kills:
            assert resume(tmp_path / name) == 0
        found.append(entries(path))
    whole, killed = found
    assert whole == killed
    assert whole["0" * 64] == {"task": "other", "outcomes": [1, 0], "skips": 0}


def test_imitation_that_is_killed_goes_on_exactly(bc: Path, tmp_path: Path) -> None:
    def imitation(run_dir: Path, kill: Kill | None = None) -> int:
        values = {**SMALL, "algo.num_updates": "12", "logging.log_interval": "1", "training.save_interval": "4"}
        arguments = ["train", str(bc.parent / "bc.yaml"), "--run-dir", str(run_dir), *options(values)]
        return command(arguments, tmp_path, kill)

    assert imitation(tmp_path / "whole") == 0
    assert imitation(tmp_path / "killed", Kill(IMITATION_UPDATE, 7)) == -signal.SIGKILL
    assert resume(tmp_path / "killed") == 0
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert len(numbers(tmp_path / "whole")) == 12


def _start_command(run_dir: Path, bc: Path) -> subprocess.Popen[str]:
    values = {**KILLED, "task.num_workers": "1", "training.init_from": str(bc)}
    return subprocess.Popen(
        [sys.executable, "-m", "apexrl.cli", "train", "stage11_ript_vla", "--run-dir", str(run_dir), *options(values)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _wait_for_lines(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(read_json_lines(run_dir / "metrics.jsonl")) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _children(process: subprocess.Popen[str]) -> list[Path]:
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return [Path("/proc") / number for number in found.stdout.split()]


def _gone(processes: Iterable[Path]) -> bool:
    deadline = time.monotonic() + 20
    while any(process.exists() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(process.exists() for process in processes)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["ctrl-c", "kill-9"])
def test_signals_from_outside_leave_no_process_and_the_run_goes_on(
    number: signal.Signals, code: int, bc: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "stopped"
    process = _start_command(run_dir, bc)
    _wait_for_lines(process, run_dir, 1)
    workers = _children(process)
    assert workers
    os.killpg(process.pid, number)  # as a terminal does it
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    if number == signal.SIGINT:
        assert f"apexrl train --resume {run_dir}" in output
        saved = checkpoint.load(checkpoint.latest(run_dir / "checkpoints"))
        assert saved["iteration"] == numbers(run_dir)[-1]["iteration"] < 5
    assert _gone(workers)
    # Workers change where episodes run, not what they are.
    assert resume(run_dir) == 0
    assert_same_run(run_dir, whole)


# Tests may run in the background of a shell, which lets what it starts there ignore Ctrl-C.
AS_IN_A_TERMINAL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from apexrl.cli import main
sys.exit(main())
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("files", [0, 1], ids=["processes start", "processes record"])
def test_ctrl_c_ends_a_recording_at_once_and_leaves_whole_files_alone(files: int, tmp_path: Path) -> None:
    words = ["demos", "mt10", "--per-task", "45", "--num-workers", "2", "--output", str(tmp_path)]
    (tmp_path / ".window-close-v3_demo.hdf5.part").touch()  # what a process that is ended while it writes leaves
    process = subprocess.Popen(
        [sys.executable, "-c", AS_IN_A_TERMINAL, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline, workers = time.monotonic() + 120, set[Path]()
    while len(workers) < 3 or len(list(tmp_path.glob("*.hdf5"))) < files:  # two, and the one that tracks resources
        workers = set(_children(process))
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    before = len(list(tmp_path.glob("*.hdf5")))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert _gone(workers)
    found = [path.name for path in tmp_path.iterdir()]
    assert before <= len(found) <= before + 1  # neither of the two tasks under way is finished first, but by chance
    assert all(name.endswith("-v3_demo.hdf5") and not name.startswith(".") for name in found)


def test_a_run_that_is_killed_while_it_records_imitates_and_begins_is_the_same(tmp_path: Path) -> None:
    values = {**KILLED, **IMITATED, "task.task_names_to_use": f"[{', '.join(TASKS)}]", "training.num_train_steps": "2"}

    def begin(run_dir: Path, kill: Kill | None = None) -> int:
        arguments = ["train", "stage11_ript_vla", "--run-dir", str(run_dir), *options(values)]
        return command(arguments, run_dir.parent, kill)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert begin(whole) == 0
    assert begin(killed, Kill(RECORDED, 1)) == -signal.SIGKILL
    (first,) = (killed / "demos").glob("*.hdf5")  # of two tasks
    recorded = first.stat().st_mtime_ns
    assert resume(killed, Kill(IMITATION_UPDATE, 7, "before")) == -signal.SIGKILL
    assert len(list((killed / "demos").glob("*.hdf5"))) == 2
    assert first.stat().st_mtime_ns == recorded
    assert checkpoint.latest(killed / "imitation" / "checkpoints").name == checkpoint.checkpoint_name(6)
    assert resume(killed, Kill(UPDATE, 1, "before")) == -signal.SIGKILL
    assert not (killed / "checkpoints").exists()
    imitated = (killed / "imitation" / "final_training_results.json").stat().st_mtime_ns
    assert resume(killed) == 0
    assert (killed / "imitation" / "final_training_results.json").stat().st_mtime_ns == imitated
    assert_same_run(killed, whole)
    assert numbers(killed / "imitation") == numbers(whole / "imitation")
    assert [line["iteration"] for line in numbers(whole / "imitation")] == list(range(1, 13))


@pytest.mark.parametrize(("owner", "stage"), [(suite_run, "record_demos"), (BC, "update")], ids=["record", "imitate"])
def test_ctrl_c_before_the_first_rollout_keeps_what_was_done_and_says_how_to_resume(
    owner: Any, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    values = {**RLOO, **IMITATED, "task.task_names_to_use": f"[{TASKS[0]}]", "training.num_train_steps": "1"}
    with monkeypatch.context() as patch:
        patch.setattr(owner, stage, interrupt)
        assert train("stage11_ript_vla", tmp_path / "run", values) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert f"Resume with: apexrl train --resume {tmp_path / 'run'}" in said
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert entries(tmp_path / "run" / "final_training_results.json")["total_steps"] == 1


def test_a_run_of_bc_records_its_own_demonstrations(bc: Path, tmp_path: Path) -> None:
    values = {**SMALL, "task.demos": "''", "task.num_demos": "2", "algo.num_updates": "3", "logging.log_interval": "1"}
    assert train(str(bc.parent / "bc.yaml"), tmp_path / "run", values) == 0
    for name in TASKS:
        with h5py.File(tmp_path / "run" / "demos" / f"{name}_demo.hdf5") as file:
            assert list(file["data"]) == ["demo_0", "demo_1"]
            assert json.loads(file["data"].attrs["env_args"])["env_kwargs"]["horizon"] == 45
    assert entries(tmp_path / "run" / "final_training_results.json")["optimizer_steps"] == 3


def test_a_policy_to_start_from_takes_the_place_of_imitation(bc: Path, tmp_path: Path) -> None:
    values = {**RLOO, **IMITATED, **FAILING, "training.init_from": str(bc), "training.num_train_steps": "1"}
    assert train("stage11_ript_vla", tmp_path / "run", values) == 0
    assert not (tmp_path / "run" / "demos").exists()
    assert not (tmp_path / "run" / "imitation").exists()


def test_what_is_wrong_with_a_run_is_said_before_it_imitates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {**RLOO, **IMITATED, "algo.loss": "weighted_flow"}
    assert train("stage11_ript_vla", tmp_path / "run", values) == 2
    assert "Recording" not in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_finished_run_can_be_resumed_and_made_longer(whole: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    assert resume(run_dir) == 0
    assert_same_run(run_dir, whole)
    longer = ["train", "--resume", str(run_dir), "--training.num_train_steps", "6"]
    assert command(longer, tmp_path) == 0
    assert [line["iteration"] for line in numbers(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert numbers(run_dir)[:5] == numbers(whole)
    assert entries(run_dir / "final_training_results.json")["total_steps"] == 6


def test_a_manifest_repeats_an_evaluation_for_any_number_of_environments(
    bc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "suite.json"
    assert main(["manifest", str(bc), "--episodes", "4", "--output", str(manifest)]) == 0
    content = entries(manifest)
    assert content["options"] == {"max_episode_length": int(SMALL["task.max_episode_length"])}
    assert [episode["task"] for episode in content["episodes"]] == [*TASKS, *TASKS]
    for num_envs in ("1", "3"):
        words = ["--manifest", str(manifest), "--num-envs", num_envs, "--output", str(tmp_path / f"{num_envs}.json")]
        assert main(["eval", str(bc), *words]) == 0
    one, three = entries(tmp_path / "1.json"), entries(tmp_path / "3.json")
    assert one["episodes"] == three["episodes"]
    assert one["summary"]["per_task"].keys() == set(TASKS)
    task = one["summary"]["per_task"][TASKS[0]]
    assert {"success_rate", "interval", "success_at_end", "return", "return_interval", "episode_len"} <= task.keys()
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "1.json"), str(tmp_path / "3.json")]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*TASKS, "success", "at the end"))
    assert "did the same in each of 4 paired episodes" in shown
