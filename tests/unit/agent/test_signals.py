"""Ctrl-C and SIGTERM: which of them wait for an iteration, and what is saved and said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused
from tests.unit.agent.test_trainer import make_trainer, names, scripted

from apexrl.agent import Trainer, TrainingConfig, checkpoint
from apexrl.agent.signals import GRACE_SECONDS, GRACE_VARIABLE, GivenUp, StopRequest, stop_on_signal
from apexrl.core.errors import ConfigError

EVERY = TrainingConfig(save_interval=1)


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def send_and_hang(*_: Any) -> None:
    """Be an iteration that does not end."""
    send(signal.SIGTERM)
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "left_by"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_iteration_saves_and_leaves_as_usual(
    number: signal.Signals, left_by: type[BaseException], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer, memory = make_trainer(scripted(), save_dir=tmp_path)

    def interrupt(_: Trainer) -> None:
        if trainer.iteration == 1:
            send(number)

    trainer.add_callback("pre_update", interrupt)
    with pytest.raises(left_by) as left:
        trainer.learn(80)
    if isinstance(left.value, SystemExit):
        assert left.value.code == 128 + number
    assert trainer.iteration == len(memory.lines) == 2
    assert names(tmp_path) == [checkpoint.checkpoint_name(2)]
    assert "Stopping after this iteration" in capfd.readouterr().err
    trainer.learn(24)  # the next call starts afresh
    assert trainer.iteration == 3


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(), save_dir=tmp_path)
    trainer.add_callback("pre_update", lambda _: send(signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.learn(80)
    assert (memory.lines, names(tmp_path)) == ([], [])


def test_ctrl_c_waits_however_long_the_iteration_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRACE_VARIABLE, "0")
    trainer, _ = make_trainer(scripted(), save_dir=tmp_path)

    def be_slow(_: Trainer) -> None:
        send(signal.SIGINT)
        time.sleep(0.1)

    trainer.add_callback("pre_update", be_slow)
    with pytest.raises(KeyboardInterrupt):
        trainer.learn(80)
    assert names(tmp_path) == [checkpoint.checkpoint_name(1)]


@pytest.mark.parametrize("place", ["collect", "update", "evaluation", "callback"])
def test_sigterm_gives_an_iteration_up_that_takes_too_long_and_names_the_last_checkpoint(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GRACE_VARIABLE, "0")
    cfg = TrainingConfig(save_interval=1, eval_interval=3, eval_episodes=2)
    trainer, memory = make_trainer(scripted(), cfg, save_dir=tmp_path, eval_env=scripted())
    trainer.learn(16)
    if place == "callback":
        trainer.add_callback("pre_iteration", send_and_hang)
    else:
        owner: Any = {"collect": trainer.collector, "update": trainer.algorithm, "evaluation": trainer.eval_env}[place]
        monkeypatch.setattr(owner, "step" if place == "evaluation" else place, send_and_hang)
    with pytest.raises(SystemExit) as left:
        trainer.learn(80)
    assert left.value.code == 128 + signal.SIGTERM
    newest = tmp_path / checkpoint.checkpoint_name(2)
    assert memory.messages[-1].endswith(
        f"takes too long to wait for; it is given up. The last good checkpoint is {newest}."
    )
    assert checkpoint.latest(tmp_path) == newest
    assert [line["iteration"] for line in memory.lines] == [1, 2]


def test_a_second_sigterm_gives_the_iteration_up_at_once(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(), EVERY, save_dir=tmp_path)
    trainer.learn(8)
    trainer.add_callback("pre_update", lambda _: send(signal.SIGTERM, signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.learn(80)
    assert f"{tmp_path / checkpoint.checkpoint_name(1)}." in memory.messages[-1]


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_checkpoint_is_written_to_its_end(scheduled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = checkpoint.save

    def interrupted(*arguments: Any) -> None:
        send(signal.SIGTERM, signal.SIGTERM)
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save", interrupted)
    trainer, memory = make_trainer(scripted(), EVERY if scheduled else TrainingConfig(), save_dir=tmp_path)
    if not scheduled:
        trainer.add_callback("pre_update", lambda _: send(signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.learn(80)
    assert names(tmp_path) == [checkpoint.checkpoint_name(1)]
    assert memory.messages == []


def test_a_save_is_part_of_the_time_that_sigterm_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GRACE_VARIABLE, raising=False)
    with stop_on_signal(lambda: 3.0, lambda: True) as stop:
        assert stop.patience() == GRACE_SECONDS - 3.0 == 17.0
    monkeypatch.setenv(GRACE_VARIABLE, "300")
    with stop_on_signal(lambda: 3.0, lambda: True) as stop:
        assert stop.patience() == 297.0


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_an_impossible_grace_period_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRACE_VARIABLE, text)
    trainer, _ = make_trainer(scripted())
    with refused(ConfigError, GRACE_VARIABLE, f"'{text}'"):
        trainer.learn(8)


def test_nothing_is_given_up_once_the_iteration_has_ended() -> None:
    stop = StopRequest(lambda: 0.0, lambda: True)
    assert not stop.requested()
    stop.signal_number = signal.SIGTERM
    with pytest.raises(GivenUp):
        stop.take(signal.SIGTERM)
    assert stop.requested()
    stop.take(signal.SIGTERM)


def test_training_outside_the_main_thread_works() -> None:
    trainer, memory = make_trainer(scripted())
    thread = threading.Thread(target=trainer.learn, args=(16,))
    thread.start()
    thread.join(30)
    assert len(memory.lines) == 2


@pytest.mark.slow
def test_a_command_that_is_told_to_end_in_a_long_iteration_leaves_and_says_with_which_checkpoint(
    tmp_path: Path,
) -> None:
    # The second iteration does not end: its environments wait for a file that never comes.
    run_dir, waits = tmp_path / "run", tmp_path / "waits"
    code = (
        "import sys, time, pathlib\n"
        "from apexrl.algorithms import PPO\n"
        "from apexrl.cli.main import main\n"
        "update, calls = PPO.update, []\n"
        "def slow(*given):\n"
        "    calls.append(None)\n"
        "    while len(calls) > 1:\n"
        f"        pathlib.Path({str(waits)!r}).touch()\n"
        "        time.sleep(0.01)\n"
        "    return update(*given)\n"
        "PPO.update = slow\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    options = ["--task.num_envs", "4", "--training.save_interval", "1", "--training.device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", "lift_ppo", "--run-dir", str(run_dir), *options],
        env={**os.environ, GRACE_VARIABLE: "0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not waits.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.terminate()
    output, errors = process.communicate(timeout=120)
    said = " ".join(output.split())
    assert process.returncode == 143, errors
    newest = run_dir / "checkpoints" / checkpoint.checkpoint_name(1)
    assert f"Iteration 2 takes too long to wait for; it is given up. The last good checkpoint is {newest}." in said
    assert f"Resume with: apexrl train --resume {run_dir}" in said
    assert "Traceback" not in errors
    assert checkpoint.latest(run_dir / "checkpoints") == newest
