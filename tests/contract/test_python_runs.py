"""Runs that are started from Python leave a directory that every command reads, also when they are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.refusals import refused
from tests.scripted import ScriptedEnv

from apexrl import OnPolicyRunner, PPOConfig, TrainingConfig, make_env
from apexrl.cli.main import main
from apexrl.core.errors import CheckpointError, ConfigError, RunDirError
from apexrl.core.system.files import DirectoryLock, read_json_lines
from apexrl.experiments.report.runs import read_run
from apexrl.run.directory import resumed_config
from apexrl.run.loading import load_config

SCRIPT = """
import os, signal
from apexrl import *

def kill(trainer):
    if trainer.iteration == 2:
        os.kill(os.getpid(), signal.SIGKILL)

if os.fork():
    os.wait()
    env, cfg = make_env("CartPole-v1", 2), PPOConfig(num_steps=64, num_epochs=1)
    runner = OnPolicyRunner(env, cfg=cfg, actor_cfg={"hidden_dims": [8]}, log_dir="runner", save_dir="saved",
                            save_interval=1, log_interval=1, device="cpu")
else:
    env = make_env("pendulum", 2, max_episode_steps=16)
    policy = ActorCritic.for_env(env, actor_cfg={"hidden_dims": (8,)}, normalize_obs=True)
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=32, num_epochs=1))
    runner = Trainer(env, policy, algorithm, TrainingConfig(save_interval=1, eval_interval=1, eval_episodes=2),
                     run_dir="trainer")
runner.add_callback("pre_iteration", kill)
runner.learn(1024)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two runs from Python, ``trainer`` and ``runner``, killed after the second iteration."""
    directory = tmp_path_factory.mktemp("python_runs")
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=directory, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert done.stdout == ""  # no terminal
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("trainer", 64), ("runner", 128)])
def test_every_command_reads_a_killed_run_which_resumes(
    name: str, steps: int, killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = killed / name
    assert [line["iteration"] for line in read_json_lines(run_dir / "metrics.jsonl")] == [1, 2]
    assert list(run_dir.glob("events.out.tfevents.*"))
    run = read_run(run_dir)
    assert run.config["training.total_timesteps"] == 1024
    assert run.config["algo.num_steps"] == steps / 2
    assert run.progress == run.steps / 1024
    assert len(run.evaluations) == (2 if name == "trainer" else 0)
    assert main(["plot", str(run_dir), "--output", str(tmp_path / "curve.png")]) == 0
    assert main(["report", str(run_dir), "--output", str(tmp_path / "report.html")]) == 0
    assert main(["eval", str(run_dir), "--episodes", "2"]) == 0
    assert main(["export", str(run_dir), "--output", str(tmp_path / "exported"), "--format", "torchscript"]) == 0
    overrides = ["--training.final_eval_episodes", "0", "--features.save_video", "false"]
    capsys.readouterr()
    assert main(["train", "--resume", str(run_dir), *overrides]) == 0
    assert "at iteration 2" in capsys.readouterr().out
    run = read_run(run_dir)
    assert run.progress == 1.0
    lines = [line["iteration"] for line in read_json_lines(run_dir / "metrics.jsonl")]
    assert lines == list(range(1, run.iterations + 1))
    assert main(["eval", str(run_dir), "--episodes", "2"]) == 0  # still the policy that the script had created
    assert resumed_config(run_dir).training.total_timesteps == 1024


def test_a_task_that_has_no_name_is_resumed_in_python(tmp_path: Path) -> None:
    env = ScriptedEnv([3, 4], [False, True])
    runner = OnPolicyRunner(env, cfg=PPOConfig(num_steps=8), log_dir=tmp_path, device="cpu")
    runner.learn(16)
    checkpoint = tmp_path / "checkpoints" / "iteration_000001.pt"
    assert read_run(tmp_path).config["training.total_timesteps"] == 16
    with refused(CheckpointError, "ScriptedEnv", f"load_checkpoint('{checkpoint}')"):
        resumed_config(tmp_path)
    with refused(ConfigError, tmp_path / "config.yaml", "Python"):
        load_config(str(tmp_path / "config.yaml"))
    again = OnPolicyRunner(env, cfg=PPOConfig(num_steps=8), log_dir=tmp_path, device="cpu")
    again.load_checkpoint(checkpoint)
    again.learn(32)
    assert again.run_dir == tmp_path
    assert [start.iteration for start in read_run(tmp_path).starts] == [0, 1]


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    runner = OnPolicyRunner(make_env("pendulum", 2), cfg=PPOConfig(num_steps=8), log_dir=tmp_path, device="cpu")
    runner.evaluate(1)
    with refused(RunDirError, tmp_path, "no checkpoint"):
        resumed_config(tmp_path)


def test_no_other_process_trains_in_the_directory_meanwhile(tmp_path: Path) -> None:
    runner = OnPolicyRunner(make_env("pendulum", 2), cfg=PPOConfig(num_steps=8), log_dir=tmp_path, device="cpu")
    other = DirectoryLock(tmp_path)

    def try_it(*_: object) -> None:
        with refused(RunDirError, tmp_path, "in use"):
            other.acquire()

    runner.add_callback("post_iteration", try_it)
    runner.learn(16)
    other.acquire()
    with refused(RunDirError, tmp_path, "in use"):
        runner.learn(32)
    other.release()


@pytest.mark.parametrize("save_dir", [None, "", "elsewhere"])
def test_a_command_finds_the_checkpoints_from_the_run_directory(save_dir: str | None, tmp_path: Path) -> None:
    place = None if save_dir is None else tmp_path / save_dir
    training = TrainingConfig(save_interval=1, stop_when="iteration >= 1")
    runner = OnPolicyRunner(
        make_env("pendulum", 2), cfg=PPOConfig(num_steps=8), log_dir=tmp_path, save_dir=place, training=training
    )
    runner.learn(1024)
    assert read_run(tmp_path).has_stopped_early
    assert main(["eval", str(tmp_path), "--episodes", "1"]) == 0
    words = ["--training.stop_when", "null", "--training.total_timesteps", "32", "--training.final_eval_episodes", "0"]
    assert main(["train", "--resume", str(tmp_path), *words, "--features.save_video", "false"]) == 0
    assert read_run(tmp_path).iterations == 2
    assert (tmp_path / (save_dir if save_dir is not None else "checkpoints") / "iteration_000002.pt").is_file()
