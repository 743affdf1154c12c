"""A run that is killed and resumed writes what an uninterrupted one would have written, number for number.

Most runs here are forked from one clean process that has the package loaded; they kill themselves with SIGKILL at an
exact place. Two tests send real signals to a real ``apexrl train``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apexrl.agent import checkpoint
from apexrl.core.system.files import read_json_lines

pytestmark = pytest.mark.slow

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["apexrl.cli", "apexrl.run.directory", "apexrl.experiments.plots", "torch.utils.tensorboard", "pytest"]
)

COMMON = {
    "policy.hidden_dims": "[8]",
    "algo.num_epochs": "2",
    "algo.num_minibatches": "2",
    "training.save_interval": "3",
    "training.eval_interval": "4",
    "training.eval_episodes": "3",
    "training.eval_num_envs": "2",
    "training.final_eval_episodes": "4",
    "training.device": "cpu",
    "features.save_video": "false",
    "features.save_plot": "false",
}
LIFT = {
    "algo.schedule": "adaptive",
    **COMMON,
    "task.num_envs": "4",
    "task.kwargs.max_episode_steps": "12",
    "algo.num_steps": "8",
    "training.total_timesteps": "288",
}
CARTPOLE = {**COMMON, "task.num_envs": "3", "algo.num_steps": "16", "training.total_timesteps": "384"}
HALFCHEETAH = {
    **COMMON,
    "task.num_envs": "2",
    "task.kwargs.max_episode_steps": "30",
    "algo.num_steps": "20",
    "training.total_timesteps": "288",
}
RECALL = {**LIFT, "task.id": "recall", "task.kwargs": "{delay: 2}", "policy.kind": "gru", "policy.rnn_hidden_dim": "8"}
RECALL.pop("task.kwargs.max_episode_steps")
SAC = {
    "policy.hidden_dims": "[8]",
    "algo.batch_size": "16",
    "algo.learning_starts": "10",
    "algo.utd_ratio": "0.6",
    "algo.policy_delay": "2",
    "algo.buffer_size": "60",
    "algo.priority_exponent": "0.6",
    "algo.n_step": "2",
    "algo.save_replay": "true",
    "task.num_envs": "2",
    "training.total_timesteps": "96",
    "logging.log_interval": "1",
    **{name: value for name, value in COMMON.items() if name.split(".")[0] in ("training", "features")},
}
ROA = {
    **COMMON,
    "policy.encoder_dims": "[8]",
    "policy.adapt_dims": "[8]",
    "policy.normalize_obs": "true",
    "algo.num_steps": "8",
    "algo.adapt_minibatches": "2",
    "algo.train_share": "0.55",  # nine iterations after the normaliser's rollout: the fifth is the last of train
    "algo.encoder_penalty": "0.1",
    "task.num_envs": "4",
    "task.kwargs.max_episode_steps": "13",
    "training.total_timesteps": "320",
}
LONG_LIFT = {**LIFT, "training.total_timesteps": "4800", "training.save_interval": "7", "training.eval_interval": "0"}


@dataclass(frozen=True)
class Kill:
    """Die by SIGKILL before or after a call of a function, counted in the process."""

    function: str
    call: int
    when: Literal["before", "after"] = "after"


LINE, EVALUATION_RECORD = "apexrl.agent.loggers:append_json_line", "apexrl.agent.trainer:append_json_line"
SAVE, EVALUATION_ROLLOUT = "apexrl.agent.checkpoint:save", "apexrl.evaluation.evaluate:rollout"
UPDATE = "apexrl:PPO.update"

AFTER_LINE_2 = Kill(LINE, 2)
AFTER_SAVE = Kill(SAVE, 1)
BEFORE_SAVE = Kill(SAVE, 1, "before")
IN_SAVE = Kill("torch:save", 1)
IN_EVALUATION = Kill(EVALUATION_ROLLOUT, 1)
AFTER_EVALUATION_RECORD = Kill(EVALUATION_RECORD, 1)
IN_ITERATION = Kill(UPDATE, 2, "before")


def options(values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def arm(kill: Kill) -> None:
    module_name, _, path = kill.function.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for part in owners:
        owner = getattr(owner, part)
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def armed(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.call and kill.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **keywords)
        if calls == kill.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, armed)


def _run_command(arguments: list[str], kill: Kill | None, output: str) -> None:
    from apexrl.cli.main import main

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if kill is not None:
        arm(kill)
    sys.exit(main(arguments))


def command(arguments: list[str], directory: Path, kill: Kill | None = None) -> int:
    """Run the command line in a process of its own; returns its exit code, negative for a signal."""
    process = FORKS.Process(target=_run_command, args=(arguments, kill, str(directory / "output.txt")))
    process.start()
    process.join(60)
    assert process.exitcode is not None, "still running after a minute"
    return process.exitcode


def train(preset: str, values: dict[str, str], run_dir: Path, kill: Kill | None = None) -> int:
    return command(["train", preset, "--run-dir", str(run_dir), *options(values)], run_dir.parent, kill)


def resume(run_dir: Path, kill: Kill | None = None, *more: str) -> int:
    return command(["train", "--resume", str(run_dir), *more], run_dir.parent, kill)


def numbers(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the lines of a log without what depends on the clock."""
    lines = read_json_lines(run_dir / name)
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def assert_same_run(resumed: Path, whole: Path) -> None:
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert numbers(resumed, name) == numbers(whole, name), name
    ours, theirs = (checkpoint.load(checkpoint.latest(run / "checkpoints")) for run in (resumed, whole))
    assert ours["iteration"] == theirs["iteration"]
    for name, weights in theirs["policy"].items():
        assert torch.equal(ours["policy"][name], weights), name


def killed_and_resumed(preset: str, values: dict[str, str], run_dir: Path, kills: list[Kill]) -> None:
    """Start a run, kill it at each place in turn, and let the last resumed process finish."""
    assert train(preset, values, run_dir, kills[0]) == -signal.SIGKILL
    for kill in kills[1:]:
        assert resume(run_dir, kill) == -signal.SIGKILL, f"{kill} was not reached"
    assert resume(run_dir) == 0


@pytest.fixture(scope="module")
def lift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of nine iterations: checkpoints at 3, 6 and 9, evaluations at 4, 8 and at the end."""
    run_dir = tmp_path_factory.mktemp("lift") / "whole"
    assert train("lift_ppo", LIFT, run_dir) == 0
    return run_dir


@pytest.fixture(scope="module")
def long_lift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("long_lift") / "whole"
    assert train("lift_ppo", LONG_LIFT, run_dir) == 0
    return run_dir


# The same numbers


def test_the_whole_run_is_what_the_other_tests_take_it_for(lift: Path) -> None:
    lines = numbers(lift)
    assert [line["iteration"] for line in lines] == list(range(1, 10))
    assert any("rollout/return" in line for line in lines)
    assert [record["iteration"] for record in numbers(lift, "evaluations.jsonl")] == [4, 8, 9]
    assert [path.name for path in checkpoint.numbered(lift / "checkpoints")] == [
        f"iteration_{number:06d}.pt" for number in (3, 6, 9)
    ]


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(lift: Path, tmp_path: Path) -> None:
    assert train("lift_ppo", LIFT, tmp_path / "same") == 0
    assert train("lift_ppo", {**LIFT, "training.seed": "1"}, tmp_path / "other") == 0
    assert_same_run(tmp_path / "same", lift)
    assert numbers(tmp_path / "other")[0] != numbers(lift)[0]


def test_lift_survives_kills_at_every_kind_of_moment(lift: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    killed_and_resumed(
        "lift_ppo",
        LIFT,
        run_dir,
        [
            AFTER_LINE_2,  # before the first checkpoint
            AFTER_SAVE,
            IN_EVALUATION,
            AFTER_EVALUATION_RECORD,  # evaluated, but the log line is missing
            IN_ITERATION,  # between two checkpoints
            BEFORE_SAVE,  # the log line of iteration 6 is there, its checkpoint is not
            IN_SAVE,  # the temporary file is there, not yet renamed
            AFTER_SAVE,  # iteration 6: what comes next was evaluated in another process
            AFTER_SAVE,  # iteration 9: training is over, the last evaluation is not
            Kill(EVALUATION_ROLLOUT, 1, "before"),
        ],
    )
    assert_same_run(run_dir, lift)


def test_tensorboard_shows_every_step_of_a_resumed_run_once(lift: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    killed_and_resumed("lift_ppo", LIFT, run_dir, [Kill(LINE, 5)])
    events = EventAccumulator(str(run_dir))
    events.Reload()
    shown = [event.step for event in events.Scalars("train/policy_loss")]
    assert shown == [line["total_steps"] for line in numbers(lift)]


def test_every_start_of_a_run_is_recorded(tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    killed_and_resumed("lift_ppo", LIFT, run_dir, [AFTER_LINE_2, Kill(LINE, 5)])
    starts = read_json_lines(run_dir / "starts.jsonl")
    assert [start["iteration"] for start in starts] == [0, 0, 3]
    assert all(start["versions"]["torch"] == importlib.metadata.version("torch") for start in starts)
    assert all(start["machine"]["device"] == "cpu" for start in starts)


def test_cartpole_v1_replays_its_episodes(tmp_path: Path) -> None:
    values = {**CARTPOLE, "logging.log_interval": "2"}
    assert train("cartpole_ppo", values, tmp_path / "whole") == 0
    kills = [Kill(UPDATE, 2), AFTER_SAVE, IN_EVALUATION, IN_ITERATION]
    killed_and_resumed("cartpole_ppo", values, tmp_path / "killed", kills)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert [line["iteration"] for line in numbers(tmp_path / "whole")] == [1, 2, 4, 6, 8]
    assert all("rollout/return" in line for line in numbers(tmp_path / "whole"))


def test_halfcheetah_comes_back_with_its_physics_and_its_normalisers(tmp_path: Path) -> None:
    assert train("halfcheetah_ppo", HALFCHEETAH, tmp_path / "whole") == 0
    kills = [AFTER_LINE_2, AFTER_SAVE, BEFORE_SAVE]
    killed_and_resumed("halfcheetah_ppo", HALFCHEETAH, tmp_path / "killed", kills)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_state_dependent_noise_and_the_schedule_of_sigma_come_back(tmp_path: Path) -> None:
    values = {
        **LIFT,
        "policy.gsde": "true",
        "policy.gsde_interval": "5",  # no divisor of the rollout: noise lasts across checkpoints
        "policy.init_std": "0.2",
        "algo.std_schedule": "capped",
        "algo.final_std": "0.05",
        "training.eval_sampled": "true",
    }
    assert train("lift_ppo", values, tmp_path / "whole") == 0
    killed_and_resumed("lift_ppo", values, tmp_path / "killed", [AFTER_SAVE, IN_ITERATION])
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert all("sampled_return" in record for record in numbers(tmp_path / "whole", "evaluations.jsonl"))


def test_a_policy_with_memory_comes_back_with_what_it_remembers(tmp_path: Path) -> None:
    assert train("lift_ppo", RECALL, tmp_path / "whole") == 0
    killed_and_resumed("lift_ppo", RECALL, tmp_path / "killed", [AFTER_SAVE, IN_ITERATION])
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_environments_in_worker_processes_come_back(tmp_path: Path) -> None:
    values = {**CARTPOLE, "training.eval_interval": "0", "training.final_eval_episodes": "0"}
    assert train("cartpole_ppo", values, tmp_path / "whole") == 0
    values["task.num_workers"] = "2"
    killed_and_resumed("cartpole_ppo", values, tmp_path / "killed", [Kill(UPDATE, 5)])
    # Workers change where the environments run, not what they do.
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_sac_comes_back_with_its_replay_buffer(tmp_path: Path) -> None:
    assert train("pendulum_sac", SAC, tmp_path / "whole") == 0
    kills = [Kill("apexrl:SAC.update", 4), IN_EVALUATION, AFTER_SAVE, BEFORE_SAVE]
    killed_and_resumed("pendulum_sac", SAC, tmp_path / "killed", kills)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    lines = numbers(tmp_path / "whole")
    # 8 steps an iteration: the first is too short to learn from; the ring of 60 is full after the eighth.
    assert ["train/critic_loss" in line for line in lines] == [False] + [True] * 11


def test_sac_without_its_replay_buffer_goes_on_and_says_what_is_missing(tmp_path: Path) -> None:
    values = {**SAC, "algo.save_replay": "false", "training.total_timesteps": "48"}
    assert train("pendulum_sac", values, tmp_path / "killed", AFTER_SAVE) == -signal.SIGKILL
    assert resume(tmp_path / "killed") == 0
    said = " ".join((tmp_path / "output.txt").read_text().split())
    assert "learning resumes once 10 new steps are collected" in said
    learned = {line["iteration"]: "train/critic_loss" in line for line in numbers(tmp_path / "killed")}
    assert learned == {1: False, 2: True, 3: True, 4: False, 5: True, 6: True}


def test_ppo_roa_comes_back_in_its_phase(tmp_path: Path) -> None:
    assert train("payload_roa", ROA, tmp_path / "whole") == 0
    # Killed in train before and after its checkpoint, between that and the boundary, right behind it, and in finetune.
    update = "apexrl:PPOROA.update"
    kills = [AFTER_LINE_2, AFTER_SAVE, Kill(update, 2), Kill(update, 3), AFTER_SAVE, Kill(update, 2, "before")]
    killed_and_resumed("payload_roa", ROA, tmp_path / "killed", kills)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    lines = numbers(tmp_path / "whole")
    assert ["train/imitation_loss" in line for line in lines] == [True] * 5 + [False] * 4


# Real signals to a real command


def _start(run_dir: Path) -> subprocess.Popen[str]:
    arguments = ["train", "lift_ppo", "--run-dir", str(run_dir), *options(LONG_LIFT)]
    return subprocess.Popen(
        [sys.executable, "-m", "apexrl.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for_lines(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(read_json_lines(run_dir / "metrics.jsonl")) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_kill_9_from_outside(long_lift: Path, tmp_path: Path) -> None:
    process = _start(tmp_path / "killed")
    _wait_for_lines(process, tmp_path / "killed", 17)
    process.kill()
    process.communicate()
    assert len(numbers(tmp_path / "killed")) < len(numbers(long_lift)), "the run was over before the kill"
    assert resume(tmp_path / "killed") == 0
    assert_same_run(tmp_path / "killed", long_lift)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_resume(
    number: signal.Signals, code: int, long_lift: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "stopped"
    process = _start(run_dir)
    _wait_for_lines(process, run_dir, 10)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert f"apexrl train --resume {run_dir}" in output
    assert "Stopping after this iteration" in errors
    assert ("press Ctrl-C again" in errors) == (number == signal.SIGINT)
    assert "Traceback" not in errors
    saved = checkpoint.load(checkpoint.latest(run_dir / "checkpoints"))
    assert saved["iteration"] == numbers(run_dir)[-1]["iteration"] < 150
    assert resume(run_dir) == 0
    assert_same_run(run_dir, long_lift)


# What a resumed run may do


def test_a_line_that_was_cut_off_is_written_again(lift: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    assert train("lift_ppo", LIFT, run_dir, Kill(LINE, 4)) == -signal.SIGKILL
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        path = run_dir / name
        path.write_bytes(path.read_bytes()[:-20])
    assert resume(run_dir) == 0
    assert_same_run(run_dir, lift)


def test_a_finished_run_can_be_resumed_without_harm(lift: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "finished"
    assert train("lift_ppo", LIFT, run_dir) == 0
    files = [run_dir / "metrics.jsonl", run_dir / "evaluations.jsonl", run_dir / "config.yaml"]
    files += checkpoint.numbered(run_dir / "checkpoints")
    before = [path.read_bytes() for path in files]
    for _ in range(2):
        assert resume(run_dir) == 0
    assert [path.read_bytes() for path in files] == before
    assert_same_run(run_dir, lift)


def test_a_finished_run_goes_on_when_it_may_train_longer(lift: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "short"
    assert train("lift_ppo", {**LIFT, "training.total_timesteps": "160"}, run_dir) == 0
    assert len(numbers(run_dir)) == 5
    assert resume(run_dir, None, "--training.total_timesteps", "288") == 0
    assert_same_run(run_dir, lift)
    # The longer target is what the next resume goes by.
    assert "total_timesteps: 288" in (run_dir / "config.yaml").read_text()


def test_the_command_that_started_a_run_resumes_it_too(lift: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    assert train("lift_ppo", LIFT, run_dir, AFTER_SAVE) == -signal.SIGKILL
    assert command(["train", "lift_ppo", "--resume", str(run_dir), *options(LIFT)], tmp_path) == 0
    assert_same_run(run_dir, lift)


@pytest.mark.parametrize("why", ["truncated", "shape"])
def test_a_resume_that_fails_changes_nothing(why: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    assert train("lift_ppo", LIFT, run_dir, Kill(LINE, 5)) == -signal.SIGKILL
    newest = checkpoint.latest(run_dir / "checkpoints")
    if why == "truncated":
        newest.write_bytes(newest.read_bytes()[:1000])
    else:
        content = checkpoint.load(newest)
        name = next(iter(content["policy"]))
        content["policy"][name] = torch.zeros(1, 2, 3)
        torch.save(content, newest)
    (run_dir / ".lock").unlink()  # of the process that was killed
    files = sorted(path for path in run_dir.rglob("*") if path.is_file())
    before = [path.read_bytes() for path in files]
    assert resume(run_dir) == 2
    assert str(newest) in (tmp_path / "output.txt").read_text()
    assert sorted(path for path in run_dir.rglob("*") if path.is_file()) == files
    assert [path.read_bytes() for path in files] == before
