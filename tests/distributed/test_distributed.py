"""Several processes learn what one process would learn, go on exactly, and end together.

One ``torchrun`` with two processes runs all cases and commands; two more are there to lose a process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.cases import CASES
from tests.distributed.commands import LIFT, options, start_alone

from apexrl.agent import checkpoint
from apexrl.cli.main import main
from apexrl.core.system.files import read_json_lines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
TIME_LIMIT = 240.0
"""Seconds after which something hangs, on a machine that does other things besides."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have written what came of the cases and commands."""
    directory = tmp_path_factory.mktemp("distributed")
    assert main(start_alone(directory)) == 0
    command = [*TORCHRUN, "tests.distributed.worker", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    (directory / "stdout.txt").write_text(done.stdout)
    return directory


def of_ranks(directory: Path, name: str) -> list[dict[str, torch.Tensor]]:
    for rank in (0, 1):
        failure = directory / f"{name}.rank{rank}.txt"
        assert not failure.exists(), failure.read_text()
    return [torch.load(directory / f"{name}.rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_computes(name: str, directory: Path) -> None:
    first, second = of_ranks(directory, name)
    alone = CASES[name]()
    assert first.keys() == second.keys() == alone.keys()
    for key, value in alone.items():
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=0, equal_nan=True, msg=key)
        # Weights to 1e-5; what is logged is as exact as its size allows.
        logged = key.startswith(("metric.", "log."))
        rtol = 1e-4 if logged else 0.0
        torch.testing.assert_close(first[key], value, rtol=rtol, atol=1e-5, equal_nan=True, msg=key)


def test_the_cases_decide_something(directory: Path) -> None:
    # Otherwise they would not show that all processes decide alike.
    assert of_ranks(directory, "early stop")[0]["metric.skipped"] == 1.0
    assert of_ranks(directory, "adaptive rate")[0]["metric.learning_rate"] != 3e-3
    assert of_ranks(directory, "divergence")[0]["unchanged"]
    assert of_ranks(directory, "own noise")[0]["apart"]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    found = read_json_lines(run_dir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in found]


def test_a_resumed_run_of_two_processes_equals_an_uninterrupted_one(directory: Path) -> None:
    whole, resumed = (
        checkpoint.load(checkpoint.latest(directory / name / "checkpoints")) for name in ("whole", "half")
    )
    # 640 steps in iterations of 64, one of which only the normaliser sees.
    assert whole["iteration"] == 9
    for key in ("policy", "algorithm", "collector", "env", "rng", checkpoint.PEERS, "total_steps", "num_evaluations"):
        assert same(whole[key], resumed[key]), key
    assert lines(directory / "whole") == lines(directory / "half")
    assert [line["total_steps"] for line in lines(directory / "whole")] == list(range(128, 641, 64))


def test_more_processes_go_on_with_the_run_of_one_and_say_what_changed(directory: Path) -> None:
    told = " ".join((directory / "stdout.txt").read_text().split())
    assert "New episodes start" in told
    assert told.count("the checkpoint of one process is resumed by 2 processes") == 1
    content = checkpoint.load(checkpoint.latest(directory / "grown" / "checkpoints"))
    assert (content["iteration"], content["total_steps"], len(content[checkpoint.PEERS])) == (9, 640, 1)
    assert not torch.equal(content["rng"]["torch"], content[checkpoint.PEERS][0]["rng"]["torch"])


def test_every_process_has_environments_and_random_numbers_of_its_own(directory: Path) -> None:
    content = checkpoint.load(checkpoint.latest(directory / "whole" / "checkpoints"))
    (peer,) = content[checkpoint.PEERS]
    assert content["env"]["state"].shape == peer["env"]["state"].shape == (4, 12)
    assert not torch.equal(content["env"]["state"], peer["env"]["state"])
    assert not torch.equal(content["rng"]["torch"], peer["rng"]["torch"])


def test_the_first_process_alone_writes(directory: Path) -> None:
    events = list((directory / "whole").glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert len(read_json_lines(directory / "whole" / "evaluations.jsonl")) == 3


@pytest.mark.parametrize(("name", "field", "value"), [("odd", "task.num_envs", "7"), ("bc", "algo.name", "bc")])
def test_what_cannot_be_shared_is_refused_by_every_rank(name: str, field: str, value: str, directory: Path) -> None:
    for rank, (code, message) in enumerate(told(directory, name)):
        assert code == 2
        assert message.startswith("apexrl: Rank 1: " if rank else f"apexrl: {field}")
        assert {field, value} <= set(re.findall(r"[\w.]+", message))
        assert message.count("\n") == 1
    assert not (directory / name).exists()


def told(directory: Path, name: str) -> list[tuple[int, str]]:
    """Return the exit code of a command and what it wrote about errors, of both processes."""
    texts = [(directory / f"{name}.rank{rank}.txt").read_text().partition("\n") for rank in (0, 1)]
    return [(int(code), errors) for code, _, errors in texts]


def test_every_rank_prints_its_own_error(directory: Path) -> None:
    (first_code, first), (second_code, second) = told(directory, "each")
    assert first_code == second_code == 2
    assert first.startswith(f"apexrl: {directory}/nowhere-0 ")
    assert second.startswith(f"apexrl: Rank 1: {directory}/nowhere-1 ")
    (first_code, first), (second_code, second) = told(directory, "alone")
    assert (first_code, first, second_code) == (0, "", 2)
    assert second.startswith(f"apexrl: Rank 1: {directory}/nowhere ")


def wait_for(condition: Callable[[], bool], what: str, output: Path) -> None:
    end = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}:\n{output.read_text()}"
        time.sleep(0.05)


def child_of_rank(launcher: int, rank: int) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            is_wanted = f"\0RANK={rank}\0".encode() in (path / "environ").read_bytes()
        except OSError:
            continue
        if parent == launcher and is_wanted:
            return int(path.name)
    raise AssertionError(f"torchrun has no process of rank {rank}")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_losing_a_process_ends_the_run_with_a_message_and_a_checkpoint(
    how: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "output.txt"
    endless = {**LIFT, "training.total_timesteps": "100000000", "training.save_interval": "0"}
    endless |= {"training.eval_interval": "0"}
    command = [*TORCHRUN, "apexrl.cli", "train", "lift_ppo", "--run-dir", str(run_dir), *options(endless)]
    environment = {**os.environ, "APEXRL_RANK_TIMEOUT": "600" if how == signal.SIGKILL else "4"}
    with output.open("w") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: len(read_json_lines(run_dir / "metrics.jsonl")) >= 3, "the third iteration", output)
        other = child_of_rank(launcher.pid, 1)
        os.kill(other, how)
        wait_for(lambda: "apexrl: The other processes are lost" in output.read_text(), "the message", output)
        if how == signal.SIGSTOP:
            os.kill(other, signal.SIGKILL)  # torchrun gives it half a minute
        assert launcher.wait(TIME_LIMIT) != 0
    finally:
        launcher.kill()
        launcher.wait()
    path = checkpoint.latest(run_dir / "checkpoints")
    assert f"The last good checkpoint is {path}." in output.read_text()
    assert "after a kill it is torchrun's 'Root Cause'" in output.read_text()
    assert "Root Cause" in output.read_text().split("The last good checkpoint", 1)[1]
    assert "trainer.py" not in output.read_text()  # torchrun prints a traceback of its own, we print none
    iteration, steps = (checkpoint.load(path)[key] for key in ("iteration", "total_steps"))
    assert iteration >= 3

    goal = {"training.total_timesteps": str(steps + 64), "training.final_eval_episodes": "0"}
    assert main(["train", "--resume", str(run_dir), *options(goal)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "New episodes start" in told
    assert "the checkpoint of 2 processes is resumed by one process" in told
    assert checkpoint.load(checkpoint.latest(run_dir / "checkpoints"))["iteration"] == iteration + 1
