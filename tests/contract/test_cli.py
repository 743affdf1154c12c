"""The command line: what its commands produce, and what they say when the user got something wrong."""

from __future__ import annotations

import csv
import gc
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import torch
import yaml
from gymnasium.envs.registration import EnvSpec
from PIL import Image
from tests.refusals import REFUSALS, Refusal, names

from apexrl.agent import checkpoint
from apexrl.algorithms import PPOConfig
from apexrl.cli.main import _plain_warnings, main
from apexrl.core.system.files import read_json_lines
from apexrl.envs.mujoco.env import MujocoVecEnv
from apexrl.envs.tasks import TASKS
from apexrl.experiments.report.runs import read_run
from apexrl.run.loading import load_config
from apexrl.run.sources import preset_names

TINY = [
    "--task.num_envs", "4",
    "--policy.hidden_dims", "[8]",
    "--algo.num_steps", "8",
    "--algo.num_epochs", "1",
    "--algo.num_minibatches", "2",
    "--training.total_timesteps", "128",
    "--training.save_interval", "2",
    "--training.eval_interval", "2",
    "--training.eval_episodes", "3",
    "--training.eval_num_envs", "2",
    "--training.final_eval_episodes", "5",
    "--training.device", "cpu",
]  # fmt: skip
TINY_LIFT = [*TINY, "--task.kwargs.max_episode_steps", "15", "--training.seed", "7"]
NO_EXTRAS = ["--features.save_video", "false", "--features.save_plot", "false", "--training.final_eval_episodes", "0"]


@pytest.fixture(scope="module")
def lift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four iterations with everything that a run leaves behind. Not to be changed."""
    run_dir = tmp_path_factory.mktemp("cli") / "lift"
    assert main(["train", "lift_ppo", "--run-dir", str(run_dir), *TINY_LIFT]) == 0
    return run_dir


@pytest.fixture
def run_copy(lift: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoilt."""
    return Path(shutil.copytree(lift, tmp_path / "run"))


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def without_time(path: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith("time/")} for line in read_json_lines(path)
    ]


# What a run leaves behind


def test_a_run_directory_holds_everything(lift: Path) -> None:
    names = {path.name for path in lift.iterdir()}
    assert {
        "config.yaml", "metrics.jsonl", "evaluations.jsonl", "checkpoints", "curve.png", "video.mp4"
    } <= names  # fmt: skip
    assert len([name for name in names if name.startswith("events.out.tfevents")]) == 1
    assert not [name for name in tree(lift) if ".part" in name]
    assert [path.name for path in checkpoint.numbered(lift / "checkpoints")] == [
        "iteration_000002.pt",
        "iteration_000004.pt",
    ]


def test_every_iteration_is_a_line_of_metrics(lift: Path) -> None:
    lines = [json.loads(line) for line in (lift / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    assert [line["total_steps"] for line in lines] == [32, 64, 96, 128]
    for name in ("policy_loss", "value_loss", "entropy_loss", "approx_kl", "learning_rate"):
        assert all(f"train/{name}" in line for line in lines)
    for name in ("rollout/mean_reward", "rollout/mean_value", "time/fps", "time/rollout_share", "time/update_share"):
        assert all(name in line for line in lines)
    assert {"eval/return", "eval/success_once", "eval/success_at_end", "eval_reward/lift_reward"} <= lines[1].keys()
    assert "eval/return" not in lines[0]
    assert "reward/reach_reward" in lines[-1]


def test_every_evaluation_is_recorded_with_its_intervals(lift: Path) -> None:
    records = [json.loads(line) for line in (lift / "evaluations.jsonl").read_text().splitlines()]
    assert [(record["step"], record["episodes"]) for record in records] == [(64, 3), (128, 3), (128, 5)]
    for record in records:
        low, high = record["success_rate_interval"]
        assert 0 <= low <= record["success_rate"] <= high <= 1
        assert low < high
        for name in ("return", "episode_len", "success_once", "success_at_end", "fail_once",
                     "reach_reward", "grasp_reward", "lift_reward"):  # fmt: skip
            low, high = record[f"{name}_interval"]
            assert low <= record[name] <= high
        assert 1 <= record["episode_len"] <= 15


def test_the_image_and_the_video_can_be_opened(lift: Path) -> None:
    with Image.open(lift / "curve.png") as image:
        image.load()
        assert image.width > 800
        assert image.height > 300
        assert len(image.convert("L").getcolors() or ()) > 10
    frames = iio.imread(lift / "video.mp4")
    assert 3 <= len(frames) <= 3 * 15
    assert frames.shape[1:] == (300, 400, 3)
    assert np.std(frames.astype(float)) > 1


def test_config_yaml_starts_the_same_run_again(lift: Path, tmp_path: Path) -> None:
    assert main(["train", str(lift / "config.yaml"), "--run-dir", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "config.yaml").read_bytes() == (lift / "config.yaml").read_bytes()
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert without_time(tmp_path / "again" / name) == without_time(lift / name)
    stored = yaml.safe_load((lift / "config.yaml").read_text())
    assert set(stored) == {"task", "policy", "algo", "training", "logging", "features"}
    assert stored["algo"]["gamma"] == 0.99


def test_early_stopping_ends_a_run_as_any_other_and_resuming_it_needs_another_condition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, condition = tmp_path / "run", "eval/episode_len >= 15"
    words = ["train", "lift_ppo", "--run-dir", str(run_dir), *TINY_LIFT, "--features.save_video", "false"]
    assert main([*words, "--training.stop_when", condition]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if condition in line and "iteration 2" in line]
    assert "Evaluation: " in shown
    assert (run_dir / "curve.png").is_file()
    assert [line["iteration"] for line in read_json_lines(run_dir / "metrics.jsonl")] == [1, 2]
    assert [line["iteration"] for line in read_json_lines(run_dir / "evaluations.jsonl")] == [2, 2]
    assert read_run(run_dir).progress == 1.0
    for again, iterations in ([], 2), (["--training.stop_when", "eval/episode_len > 15"], 4):
        assert main(["train", "--resume", str(run_dir), *again]) == 0
        assert [line["iteration"] for line in read_json_lines(run_dir / "metrics.jsonl")][-1] == iterations
        resume = f"apexrl train --resume {run_dir} --training.stop_when null"
        assert (resume in capsys.readouterr().out) == (iterations == 2)


def test_a_condition_without_effect_is_said_again_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "lift_ppo", "--run-dir", str(tmp_path / "run"), *TINY_LIFT, *NO_EXTRAS]
    assert main([*words, "--training.stop_when", "rollout/retrun > 1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("WARNING: training.stop_when 'rollout/retrun > 1' has no effect")


def test_a_finished_run_names_a_limit_that_is_not_reached(
    lift: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(lift, tmp_path / "run")
    assert main(["train", "--resume", str(run_dir), "--training.total_timesteps", "32", *NO_EXTRAS]) == 0
    assert "--training.total_timesteps 256" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("place", ["the graphics context", "a frame"])
def test_ctrl_c_in_the_video_leaves_a_finished_run_without_half_a_video(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        _context: Any

        def __init__(self, *_: int) -> None:
            raise KeyboardInterrupt

        def __del__(self) -> None:
            freed.append(self._context)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    freed: list[Any] = []
    if place == "a frame":
        monkeypatch.setattr(MujocoVecEnv, "render", interrupt)
    else:
        monkeypatch.setenv("MUJOCO_GL", "egl")
        monkeypatch.setitem(sys.modules, "mujoco.egl", SimpleNamespace(GLContext=Context))
    run_dir = tmp_path / "run"
    words = ["--features.save_plot", "false", "--training.final_eval_episodes", "0"]
    assert main(["train", "walker_ppo", "--run-dir", str(run_dir), *TINY, *words]) == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Training is complete")
    assert f"apexrl play {run_dir}" in last
    assert list(run_dir.glob("*.mp4")) == []
    gc.collect()
    assert freed == ([None] if place == "the graphics context" else [])


def test_a_warning_is_said_once_a_command() -> None:
    for _ in range(2):
        with _plain_warnings():
            assert [warnings.formatwarning("few", UserWarning, "a.py", 1) for _ in range(2)] == ["apexrl: few\n", ""]


def test_sac_leaves_the_same_behind_and_can_be_evaluated_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, video = tmp_path / "sac", tmp_path / "video.mp4"
    arguments = [
        "--task.id", "pendulum", "--task.num_envs", "2", "--task.kwargs.max_episode_steps", "20",
        "--policy.hidden_dims", "[8]", "--algo.batch_size", "16", "--algo.learning_starts", "16",
        "--training.total_timesteps", "64", "--training.save_interval", "4", "--training.eval_interval", "4",
        "--training.eval_episodes", "2", "--training.final_eval_episodes", "3", "--training.device", "cpu",
        "--logging.log_interval", "1",
    ]  # fmt: skip
    assert main(["train", "pendulum_sac", "--run-dir", str(run_dir), *arguments]) == 0
    lines = read_json_lines(run_dir / "metrics.jsonl")
    assert [line["total_steps"] for line in lines] == list(range(8, 72, 8))
    for name in ("critic_loss", "actor_loss", "temperature", "entropy", "q_value", "learning_rate"):
        assert [f"train/{name}" in line for line in lines[1:]] == [True] * 7, name
    assert "train/critic_loss" not in lines[0]
    assert "rollout/mean_value" not in lines[-1]
    records = read_json_lines(run_dir / "evaluations.jsonl")
    assert [(record["step"], record["episodes"]) for record in records] == [(32, 2), (64, 2), (64, 3)]
    assert {"config.yaml", "curve.png", "video.mp4"} <= {path.name for path in run_dir.iterdir()}
    assert load_config(str(run_dir / "config.yaml")).algo.name == "sac"
    capsys.readouterr()
    assert main(["eval", str(run_dir), "--episodes", "3"]) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert main(["play", str(run_dir), "--output", str(video)]) == 0
    assert len(iio.imread(video)) >= 20


def test_the_real_command_trains_another_gymnasium_task(tmp_path: Path) -> None:
    arguments = ["train", "cartpole_ppo", "--task.id", "Acrobot-v1", *TINY, *NO_EXTRAS, "--training.eval_interval=0"]
    apexrl = str(Path(sys.executable).parent / "apexrl")
    done = subprocess.run([apexrl, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"cartpole_ppo-\d{8}-\d{6}", run_dir.name)
    assert f"Training Acrobot-v1 with ppo in runs/{run_dir.name}" in done.stdout
    assert "100%  steps 128" in done.stdout
    assert load_config(str(run_dir / "config.yaml")).task.id == "Acrobot-v1"
    assert len(read_json_lines(run_dir / "metrics.jsonl")) == 4


def test_the_default_preset_needs_no_name(tmp_path: Path) -> None:
    assert main(["train", *TINY_LIFT, *NO_EXTRAS, "--run-dir", str(tmp_path / "run")]) == 0
    assert load_config(str(tmp_path / "run" / "config.yaml")).task.id == "mujoco/Walker"


def test_a_file_is_taken_by_config_path(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: {id: pendulum, num_envs: 2}\nalgo: {num_steps: 4}\n")
    arguments = ["--config_path", str(tmp_path / "mine.yaml"), *TINY, "--task.num_envs", "2", *NO_EXTRAS]
    assert main(["train", *arguments, "--training.eval_interval", "0", "--run-dir", str(tmp_path / "run")]) == 0
    config = load_config(str(tmp_path / "run" / "config.yaml"))
    assert isinstance(config.algo, PPOConfig)
    assert (config.task.id, config.task.num_envs, config.algo.num_steps) == ("pendulum", 2, 8)


def test_runs_that_start_in_the_same_second_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    for _ in range(2):
        assert main(["train", "lift_ppo", *TINY, *NO_EXTRAS, "--training.total_timesteps", "1"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "lift_ppo-20260101-000000",
        "lift_ppo-20260101-000000-2",
    ]


def test_step_tables_are_written_on_request(tmp_path: Path) -> None:
    arguments = ["train", "lift_ppo", *TINY_LIFT, *NO_EXTRAS, "--features.save_step_csv", "true"]
    assert main([*arguments, "--run-dir", str(tmp_path / "run")]) == 0
    tables = sorted(path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("rewards.csv"))
    assert tables == [Path(f"eval/eval{number}/env{env}/rewards.csv") for number in (0, 1) for env in (0, 1)]


def test_weights_and_biases_offline_stays_one_run_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    arguments = ["train", "lift_ppo", *TINY, *NO_EXTRAS, "--training.eval_interval", "0", "--logging.wandb", "offline"]
    assert main([*arguments, "--run-dir", str(tmp_path / "run")]) == 0
    assert main(["train", "--resume", str(tmp_path / "run"), "--training.total_timesteps", "160"]) == 0
    files = list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) >= 1
    assert len({file.name for file in files}) == 1
    assert any(b"train/policy_loss" in file.read_bytes() for file in files)


# The other commands


def printed_numbers(output: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^  (\S+) (\S+)$", output, re.MULTILINE)}


@pytest.mark.parametrize("of", [".", "checkpoints", "checkpoints/iteration_000004.pt"])
def test_eval_repeats_the_evaluation_that_training_recorded(
    of: str, lift: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["eval", str(lift / of), "--episodes", "5"]) == 0
    output = capsys.readouterr().out
    record = read_json_lines(lift / "evaluations.jsonl")[-1]
    shown = printed_numbers(output)
    for name in ("eval/return", "eval/success_rate", "eval/episode_len", "eval_reward/reach_reward"):
        assert shown[name] == float(f"{record[name.split('/')[1]]:.4g}")
    low, high = record["return_interval"]
    assert f"return {record['return']:.2f} (95 % interval {low:.2f} to {high:.2f})" in output
    assert "over 5 episodes" in output
    assert "iteration_000004.pt" in output


def test_eval_of_an_older_checkpoint_and_another_seed_gives_other_numbers(
    lift: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for more in ([], ["--seed", "1"], ["--stochastic"]):
        assert main(["eval", str(lift), "--episodes", "5", *more]) == 0
        shown.append(printed_numbers(capsys.readouterr().out)["eval/return"])
    assert main(["eval", str(lift / "checkpoints" / "iteration_000002.pt"), "--episodes", "5"]) == 0
    shown.append(printed_numbers(capsys.readouterr().out)["eval/return"])
    assert len(set(shown)) == 4


class Reaching(gym.Env[Any, Any]):
    """Three steps; the info of the last one has ``distance``, and ``is_success`` when it was reached."""

    observation_space = action_space = gym.spaces.Box(-1.0, 1.0, (1,))
    reaches: ClassVar[bool] = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        info: dict[str, Any] = {"distance": 0.5} if self.time == 3 else {}
        if info and Reaching.reaches:
            info["is_success"] = True
        return np.zeros(1, np.float32), 0.0, False, self.time == 3, info


def test_metrics_of_gymnasium_are_declared_logged_and_known_to_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry_point: Any = Reaching
    monkeypatch.setitem(gym.registry, "Reaching-v0", EnvSpec("Reaching-v0", entry_point=entry_point))
    run_dir = tmp_path / "run"
    options = [*TINY, *NO_EXTRAS, "--task.metrics.distance", "last", "--task.metrics.crash", "{event: true}"]
    assert main(["train", "cartpole_ppo", "--task.id", "Reaching-v0", "--run-dir", str(run_dir), *options]) == 0
    lines = read_json_lines(run_dir / "metrics.jsonl")
    assert (lines[-1]["rollout/success_rate"], lines[-1]["reward/distance"]) == (1.0, 0.5)
    assert (lines[1]["eval/success_rate"], lines[1]["eval_reward/distance"]) == (1.0, 0.5)
    assert "reward/crash" not in lines[-1], "declared and never reported"
    capsys.readouterr()
    # An evaluation without a success knows from the checkpoint that there is one.
    monkeypatch.setattr(Reaching, "reaches", False)
    assert main(["eval", str(run_dir), "--episodes", "4"]) == 0
    assert "eval/success_rate 0\n" in capsys.readouterr().out


def test_eval_writes_step_tables(lift: Path, tmp_path: Path) -> None:
    assert main(["eval", str(lift), "--episodes", "2", "--num-envs", "2", "--csv", str(tmp_path / "csv")]) == 0
    for env in (0, 1):
        with (tmp_path / "csv" / f"env{env}" / "rewards.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert {"step", "reward", "done", "success", "fail", "reach_reward", "grasp_reward", "lift_reward"} == set(
            rows[0]
        )
        assert [int(row["step"]) for row in rows] == list(range(len(rows)))
        assert 1 <= len(rows) <= 15


def test_eval_works_on_a_machine_without_the_device_of_the_training(run_copy: Path) -> None:
    path = checkpoint.latest(run_copy / "checkpoints")
    content = checkpoint.load(path)
    content["config"]["training"]["device"] = "cuda:77"
    checkpoint.save(path, content)
    assert main(["eval", str(run_copy), "--episodes", "1"]) == 0


def test_play_writes_a_video_of_the_episodes_asked_for(lift: Path, tmp_path: Path) -> None:
    before = tree(lift)
    assert main(["play", str(lift), "--episodes", "1", "--output", str(tmp_path / "videos" / "one.mp4")]) == 0
    frames = iio.imread(tmp_path / "videos" / "one.mp4")
    assert 1 <= len(frames) <= 15
    assert tree(lift) == before


def test_play_writes_into_the_run_directory_by_default(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_copy / "video.mp4").unlink()
    assert main(["play", str(run_copy)]) == 0
    assert (run_copy / "video.mp4").stat().st_size > 1000
    assert str(run_copy / "video.mp4") in capsys.readouterr().out


def test_plot_draws_several_runs(lift: Path, run_copy: Path, tmp_path: Path) -> None:
    assert main(["plot", str(lift), str(run_copy), "--output", str(tmp_path / "both.png")]) == 0
    with Image.open(tmp_path / "both.png") as both, Image.open(lift / "curve.png") as one:
        assert both.size == one.size
        assert both.tobytes() != one.tobytes()
    (run_copy / "curve.png").unlink()
    assert main(["plot", str(run_copy)]) == 0
    assert (run_copy / "curve.png").exists()


def test_list_names_presets_tasks_and_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in [*preset_names(), *TASKS, "ppo"] if f"  {name} " not in shown] == []
    tasks = shown.partition("Tasks (--task.id")[2].partition("  HalfCheetah-v5,")[0].splitlines()[1:]
    assert len({len(line) - len(re.sub(r"^  \S+  +", "", line)) for line in tasks}) == 1  # one column
    assert "``" not in shown


@pytest.mark.parametrize("task", ["CartPole-v1", "lift"])
def test_check_env_passes_what_ships(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", task, "--num-envs", "3"]) == 0
    assert f"{task}: keeps the environment contract" in capsys.readouterr().out


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "apexrl train --resume" in capsys.readouterr().out


def test_output_into_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m apexrl.cli list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


# Mistakes: one message with field, value and fix, exit code 2, nothing written


def refused_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused; returns its only message."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    # Packages that an environment needs may say something of their own before.
    messages = re.split(r"^apexrl: ", captured.err, flags=re.MULTILINE)[1:]
    assert len(messages) == 1, captured.err
    return messages[0]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "cartpol_ppo"], ["'cartpol_ppo'", "Did you mean 'cartpole_ppo'?"]),
        (["train", "nowhere.yaml"], ["nowhere.yaml", "preset"]),
        (["train", "--config_path", "nowhere.yaml"], ["nowhere.yaml"]),
        (["train", "lift_ppo", "--config_path", "x.yaml"], ["not both"]),
        (["train", "lift_ppo", "--seed", "3"], ["'--seed'", "Did you mean '--training.seed'?"]),
        (["train", "lift_ppo", "--device", "cuda"], ["'--device'", "Did you mean '--training.device'?"]),
        (["train", "lift_ppo", "--run-di", "x"], ["'--run-di'", "Did you mean '--run-dir'?"]),
        (["train", "lift_ppo", "more"], ["'more'"]),
        (["train", "--algo.gamma"], ["--algo.gamma", "needs a value"]),
        (["train", "--algo.gamma", "--algo.gae_lambda", "1"], ["--algo.gamma", "needs a value"]),
        (["train", "--policy.hidden_dims", "[1000000, 1000000]"], ["memory", "policy.hidden_dims", "task.num_envs"]),
        (["train", "--task.id", "Acrobott-v1"], ["'Acrobott-v1'", "Did you mean 'Acrobot-v1'?"]),
        (["train", "--task.id", ".x:y"], ["task.id .x:y", "cannot import .x"]),
        (["train", "--task.id", "lfit"], ["'lfit'", "Did you mean 'lift'?"]),
        (["train", "lift_ppo", "--task.kwargs.heigth", "1"], ["task.kwargs", "heigth", "lift"]),
        (["train", "lift_ppo", "--task.kwargs.target_height", "high"], ["target_height", "high"]),
        (["train", "cartpole_ppo", "--task.kwargs.heigth", "1"], ["heigth"]),
        (["train", "lift_ppo", "--task.num_workers", "1"], ["num_workers", "lift", "0"]),
        (["train", "--policy.distribution", "categorical"], ["policy.distribution", "categorical", "auto"]),
        (["train", "--policy.actor_groups", "[camera]"], ["camera"]),
        (["train", "cartpole_ppo", "--algo.name", "sac"], ["SAC needs a Box", "use PPO"]),
        (["train", "pendulum_sac", "--task.id", "CartPole-v1"], ["SAC needs a Box", "Discrete(2)", "use PPO"]),
        (["train", "pendulum_sac", "--task.id", "recall"], ["SAC needs a Box", "use PPO"]),
        (["train", "pendulum_sac", "--policy.distribution", "gaussian"], ["policy.distribution", "squashed_gaussian"]),
        (["train", "--training.device", "nonsense"], ["training.device", "'nonsense'", "cpu"]),
        (["train", "--training.device", "meta"], ["training.device", "'meta'", "cpu"]),
        (["train", "--resume", "nowhere"], ["nowhere", "config.yaml"]),
        (["train", "--resume", "a", "--run-dir", "b"], ["--run-dir"]),
        (["eval", "nowhere"], ["nowhere", "no checkpoint"]),
        (["eval"], ["RUN_DIR|CHECKPOINT", "apexrl eval --help"]),
        (["eval", "x", "--episodes", "0"], ["--episodes", "'0'", "from 1"]),
        (["eval", "x", "--episodes", "ten"], ["--episodes", "'ten'"]),
        (["eval", "x", "--seed", "-1"], ["--seed"]),
        (["eval", "x", "--algo.gamma", "1"], ["--algo.gamma", "apexrl eval --help"]),
        (["eval", "x", "--fast"], ["--fast"]),
        (["evla", "x"], ["'evla'", "Did you mean 'eval'?"]),
        (["play", "nowhere"], ["nowhere"]),
        (["plot", "nowhere"], ["nowhere", "metrics.jsonl"]),
        (["plot"], ["RUN_DIR"]),
        (["check-env", "Nothing-v0"], ["'Nothing-v0'"]),
    ],
)
def test_a_mistake_gives_one_message_and_exit_code_2(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused_command(capsys, *arguments)
    assert [part for part in parts if part not in message] == [], message
    assert tree(tmp_path) == {}
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


AT_THE_COMMAND_LINE = (
    "task.num_envs", "policy.hidden_dims", "policy.freeze", "algo.gamma", "algo.target_subset", "algo.train_share",
    "algo.rloo_batch_size", "algo.num_updates", "algo.learning_rate", "training.seed",
)  # fmt: skip
"""Fields whose first refusal of the table is tried here too: of every kind and every algorithm."""


@pytest.mark.parametrize(
    "row", [next(row for row in REFUSALS if row.field == field) for field in AT_THE_COMMAND_LINE], ids=str
)
def test_a_configuration_that_is_refused_gives_one_line(
    row: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused_command(capsys, *row.words())
    assert message.count("\n") == 1
    assert (names(message, row.field), names(message, row.value)) == (True, True), message
    assert list(tmp_path.iterdir()) == []


def test_the_real_command_refuses_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "apexrl.cli", "train", "--algo.clip_coef", "5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "apexrl: algo.clip_coef must be a number in (0, 1), got 5.\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    message = refused_command(capsys, "train", *TINY, "--training.device", "cuda", "--run-dir", str(run_dir))
    assert "training.device 'cuda' cannot be used here; use cpu." in message
    assert not run_dir.exists()


def test_a_directory_that_is_not_empty_is_left_alone(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(run_copy)
    message = refused_command(capsys, "train", "lift_ppo", *TINY, "--run-dir", str(run_copy))
    assert f"--run-dir {run_copy} is not empty" in message
    assert f"--resume {run_copy}" in message
    assert tree(run_copy) == before


def test_a_start_that_fails_leaves_the_directory_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        refused_command(capsys, "train", *TINY, "--training.device", "nonsense", "--run-dir", str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert tree(tmp_path) == {}


def test_a_video_that_cannot_be_written_is_named(
    lift: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    path = tmp_path / "file" / "video.mp4"
    assert f"{path} cannot be written" in refused_command(capsys, "play", str(lift), "--output", str(path))


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    assert f"--run-dir {file} is a file" in refused_command(capsys, "train", *TINY, "--run-dir", str(file))
    message = refused_command(capsys, "train", *TINY, "--run-dir", str(file / "below" / "run"))
    assert f"--run-dir {file}/below/run cannot be created" in message
    assert file.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be created" in refused_command(capsys, "train", *TINY, "--run-dir", str(tmp_path / "run"))


def test_the_default_directory_may_be_impossible_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    assert "--run-dir" in refused_command(capsys, "train", "lift_ppo", *TINY)


def test_a_plot_of_an_unknown_kind_is_refused(lift: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused_command(capsys, "plot", str(lift), "--output", str(tmp_path / "curve.xyz"))
    assert "curve.xyz must end in .png, .pdf or .svg" in message
    assert tree(tmp_path) == {}


# Checkpoints that cannot be loaded


class Payload:
    """Pickles as a call that makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _random_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(5000))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _malicious_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(path.parent / "payload")))


def _malicious_checkpoint(path: Path) -> None:
    content = checkpoint.load(path)
    torch.save({**content, "extra": Payload(path.parent / "payload")}, path)


def _newer_format(path: Path) -> None:
    torch.save({**checkpoint.load(path), "format": 99}, path)


def _older_format(path: Path) -> None:
    torch.save({**checkpoint.load(path), "format": 0}, path)


def _foreign(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


def _incomplete(path: Path) -> None:
    content = checkpoint.load(path)
    del content["policy"]
    torch.save(content, path)


def _other_shape(path: Path) -> None:
    content = checkpoint.load(path)
    for network in ("actor_cfg", "critic_cfg"):
        content["recipe"]["options"][network]["hidden_dims"] = [9]
    torch.save(content, path)


def _with(part: str, value: Any) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        torch.save({**checkpoint.load(path), part: value}, path)

    return spoil


def _other_moments(path: Path) -> None:
    content = checkpoint.load(path)
    content["algorithm"]["optimizer"]["state"]["mean"] = torch.zeros(1)  # a copy would stretch it
    torch.save(content, path)


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (_with("policy", None), "policy"),
        (_with("algorithm", {}), "algorithm"),
        (_other_moments, "algorithm"),
        (_with("rng", {}), "rng"),
        (_with("collector", {}), "collector"),
        (_with("iteration", "x"), "iteration"),
        (_with("config", [1]), "config"),
    ],
)
def test_a_run_is_not_resumed_from_a_checkpoint_with_a_bad_part(
    spoil: Callable[[Path], None], part: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint.latest(run_copy / "checkpoints")
    spoil(path)
    before = tree(run_copy)
    message = refused_command(capsys, "train", "--resume", str(run_copy))
    assert f"its '{part}'" in message
    assert str(path) in message
    assert tree(run_copy) == before


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (
            _truncated,
            [
                "not a readable checkpoint",
                "truncated",
                "No other checkpoint is left in",
                "config.yaml --run-dir NEW_DIR",
            ],
        ),
        (_random_bytes, ["not a readable checkpoint", "damaged"]),
        (_empty, ["not a readable checkpoint"]),
        (_malicious_pickle, ["not a readable checkpoint", "not written by apexrl"]),
        (_malicious_checkpoint, ["not a readable checkpoint", "it holds code (posix.mkdir)"]),
        (_newer_format, ["format 99", str(checkpoint.CHECKPOINT_FORMAT), "Update apexrl"]),
        (_older_format, ["format 0", str(checkpoint.CHECKPOINT_FORMAT), "Start a new run"]),
        (_foreign, ["not written by apexrl", "format number"]),
        (_incomplete, ["not written by apexrl", "policy"]),
    ],
)
@pytest.mark.parametrize("command", ["eval", "resume"])
def test_a_checkpoint_that_cannot_be_loaded_says_why(
    command: str,
    spoil: Callable[[Path], None],
    parts: list[str],
    run_copy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    *older, path = checkpoint.numbered(run_copy / "checkpoints")
    for other in older:  # a resume would go on from the one before
        other.unlink()
    spoil(path)
    before = tree(run_copy)
    arguments = ["train", "--resume", str(run_copy)] if command == "resume" else ["eval", str(path), "--episodes", "1"]
    message = refused_command(capsys, *arguments)
    assert [part for part in [*parts, str(path)] if part not in message] == [], message
    assert "weights_only" not in message  # advice to switch the protection off
    assert not (path.parent / "payload").exists()
    assert tree(run_copy) == before


def test_the_payload_would_run_if_it_were_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "payload")))
    assert (tmp_path / "payload").exists()


def test_a_checkpoint_of_another_shape_names_the_tensors(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint.latest(run_copy / "checkpoints")
    _other_shape(path)
    message = refused_command(capsys, "eval", str(path))
    for part in (str(path), "does not fit this policy", "[8, 13] in the checkpoint and [9, 13] here", "policy section"):
        assert part in message


def test_a_run_whose_config_was_changed_is_not_resumed(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load((run_copy / "config.yaml").read_text())
    config["policy"]["hidden_dims"] = [9]
    (run_copy / "config.yaml").write_text(yaml.safe_dump(config))
    before = tree(run_copy)
    assert "does not fit this policy" in refused_command(capsys, "train", "--resume", str(run_copy))
    assert tree(run_copy) == before


def test_a_missing_checkpoint_is_named(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = run_copy / "checkpoints" / "iteration_000009.pt"
    assert str(missing) in refused_command(capsys, "eval", str(missing))
    for path in checkpoint.numbered(run_copy / "checkpoints"):
        path.unlink()
    assert "no checkpoint" in refused_command(capsys, "play", str(run_copy))


@pytest.mark.parametrize(
    ("option", "value"),
    [("algo.gamma", "0.5"), ("task.num_envs", "8"), ("training.seed", "1"), ("policy.hidden_dims", "[9]")],
)
def test_what_is_learned_cannot_change_at_a_resume(
    option: str, value: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run_copy)
    message = refused_command(capsys, "train", "--resume", str(run_copy), f"--{option}", value)
    for part in (f"--{option} {value}", "cannot change", "start a new run"):
        assert part in message
    assert tree(run_copy) == before


def test_another_preset_beside_resume_is_refused(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused_command(capsys, "train", "cartpole_ppo", "--resume", str(run_copy))
    for part in (str(run_copy), "lift", "CartPole-v1", "leave 'cartpole_ppo' out"):
        assert part in message


def test_a_directory_that_is_no_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("not a run")
    assert "it has no config.yaml" in refused_command(capsys, "train", "--resume", str(tmp_path))
    assert list(tree(tmp_path)) == ["notes.txt"]
