"""Where numbers go, read back from there."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.refusals import refused

from apexrl import OnPolicyRunner, make_env
from apexrl.agent.loggers import ConsoleLogger, JsonlLogger, TensorBoardLogger, WandbLogger
from apexrl.core.errors import ConfigError
from apexrl.core.system.files import append_json_line, cut_json_lines, read_json_lines

# JSON lines


def test_every_number_comes_back_exactly(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    lines = [{"iteration": 1, "total_steps": 10, "a/b": 0.1 + 0.2}, {"iteration": 2, "total_steps": 20, "a/b": 1e-300}]
    for line in lines:
        logger.log(line)
    assert read_json_lines(tmp_path / "metrics.jsonl") == lines
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_json_does_not_know_is_left_out(tmp_path: Path) -> None:
    record = {"iteration": 1, "a": math.nan, "b": math.inf, "c": [0.5, math.nan], "d": [0.5, 1.0], "e": 2.0}
    append_json_line(tmp_path / "a.jsonl", record)
    line = (tmp_path / "a.jsonl").read_text()
    refuse: Callable[[str], Any] = pytest.fail
    assert json.loads(line, parse_constant=refuse) == {"iteration": 1, "d": [0.5, 1.0], "e": 2.0}


def test_lines_that_a_kill_or_an_editor_spoilt_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"iteration": 1}\n\n[3]\n{"iteration": 2}\n\xff\xfe\n{"iteration": 3, "tot')
    assert read_json_lines(path) == [{"iteration": 1}, {"iteration": 2}]
    assert read_json_lines(tmp_path / "missing.jsonl") == []


def test_lines_after_an_iteration_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"iteration": number, "x": 0.1 * number} for number in (2, 4, 4, 6)]
    for record in records:
        append_json_line(path, record)
    with path.open("a") as file:
        file.write('{"iteration": "4"}\n{"iteration": null}\n{"iteration": 4, "torn')
    cut_json_lines(path, 4)
    assert read_json_lines(path) == records[:3]
    assert path.read_text().endswith("}\n")
    cut_json_lines(path, 4, max_lines=2)
    assert read_json_lines(path) == records[:2]
    cut_json_lines(path, 4, max_lines=9)
    assert read_json_lines(path) == records[:2]
    cut_json_lines(tmp_path / "missing.jsonl", 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


# TensorBoard


def _scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_every_number_over_environment_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log({"iteration": 1, "total_steps": 64, "train/policy_loss": 0.5, "rollout/return": 3.0})
    logger.log({"iteration": 2, "total_steps": 128, "train/policy_loss": 0.25})
    logger.close()
    assert _scalars(tmp_path) == {"train/policy_loss": [(64, 0.5), (128, 0.25)], "rollout/return": [(64, 3.0)]}


def test_tensorboard_hides_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    first = TensorBoardLogger(tmp_path)
    for steps in (10, 20, 30):
        first.log({"iteration": steps, "total_steps": steps, "train/x": 1.0})
    first.close()
    second = TensorBoardLogger(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # nothing is written before there is a number
    second.log({"iteration": 20, "total_steps": 20, "train/x": 2.0})
    second.close()
    # The newer file must not be taken for the older one when both were made in the same second.
    assert _scalars(tmp_path)["train/x"] == [(10, 1.0), (20, 2.0)]


# Weights & Biases


@pytest.fixture
def wandb_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep everything that wandb writes in a directory of the test, and keep it from asking anyone."""
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    return tmp_path


def test_wandb_offline_leaves_files_that_can_be_sent_later(wandb_at_home: Path) -> None:
    run_dir = wandb_at_home / "run"
    run_dir.mkdir()
    logger = WandbLogger(
        run_dir, project="tests", mode="offline", run_id="abc123", name="my run", config={"task": {"id": "lift"}}
    )
    logger.log({"iteration": 1, "total_steps": 640, "train/policy_loss": 0.123456})
    logger.log({"iteration": 2, "total_steps": 1280, "train/policy_loss": 0.25})
    logger.close()
    (file,) = run_dir.glob("wandb/offline-run-*/run-abc123.wandb")
    parts = (b"train/policy_loss", b"0.123456", b"1280", b"tests", b"my run", b"lift")
    # W&B's own process writes the file, on a busy machine a little later.
    end = time.monotonic() + 30.0
    while time.monotonic() < end and not all(part in file.read_bytes() for part in parts):
        time.sleep(0.1)
    for part in parts:
        assert part in file.read_bytes(), part


def test_wandb_that_cannot_start_says_what_to_do(wandb_at_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with refused(ConfigError, "logging.wandb", "online", "No API key configured", "wandb login", "offline"):
        WandbLogger(wandb_at_home, project="tests", mode="online", run_id="a")


def test_wandb_that_is_not_installed_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused(ConfigError, "pip install 'apexrl[wandb]'"):
        WandbLogger(tmp_path, project="tests", mode="offline", run_id="a")


# Console

NUMBERS = {
    "iteration": 3,
    "total_steps": 1500,
    "time/fps": 12345.6,
    "rollout/return": 12.34,
    "rollout/success_rate": 0.256,
}


def _console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=160, color_system=None, legacy_windows=False), file


def test_without_a_terminal_there_are_plain_lines() -> None:
    console, file = _console(False)
    logger = ConsoleLogger(console, seconds_between_lines=0)
    logger.message("Training [lift] in /a/b[c]")
    logger.progress({**NUMBERS, "iteration": 1, "total_steps": 500}, 500 / 3000)
    logger.progress(NUMBERS, 0.5)
    logger.close()
    first, *lines = file.getvalue().splitlines()
    assert first == "Training [lift] in /a/b[c]"
    assert lines[0].startswith(" 17%  steps 500  iteration 1  steps/s 12,346")
    assert lines[0].endswith("left ?")
    assert lines[1].startswith(" 50%  steps 1,500  iteration 3  steps/s 12,346  return 12.3  success 26%")
    assert "\x1b" not in file.getvalue()


def test_plain_lines_come_every_few_seconds_and_at_the_end() -> None:
    console, file = _console(False)
    logger = ConsoleLogger(console, seconds_between_lines=1000)
    for steps in (100, 200, 300):
        logger.progress({**NUMBERS, "total_steps": steps}, steps / 300)
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["33%", "100%"]


def test_numbers_of_iterations_that_had_none_are_remembered() -> None:
    console, file = _console(False)
    logger = ConsoleLogger(console, seconds_between_lines=0)
    logger.log({**NUMBERS, "eval/return": 99.94, "eval/success_rate": 1.0})
    logger.progress({"iteration": 4, "total_steps": 2000}, 2 / 3)
    assert "iteration 4  steps/s 12,346  return 12.3  success 26%  eval 99.9  eval success 100%" in file.getvalue()


def test_the_time_left_follows_from_the_speed_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    console, file = _console(False)
    logger = ConsoleLogger(console, seconds_between_lines=0)
    logger.progress({**NUMBERS, "total_steps": 1000}, 0.2)  # a resumed run begins here
    now = 30.0
    logger.progress({**NUMBERS, "total_steps": 2000}, 0.4)  # 1000 steps in 30 s, 3000 to go
    assert file.getvalue().splitlines()[-1].endswith("left 1:30")


def test_what_follows_another_stage_is_shown_from_its_own_beginning() -> None:
    console, file = _console(False)
    logger = ConsoleLogger(console, seconds_between_lines=1000)
    logger.progress({"iteration": 9, "total_steps": 0, "eval/return": 7.0}, 1.0)
    logger.close()
    logger.progress({"iteration": 1, "total_steps": 20}, 0.25)
    line = file.getvalue().splitlines()[-1]
    assert line.split() == ["25%", "steps", "20", "iteration", "1", "left", "?"]


def test_a_terminal_gets_a_bar() -> None:
    console, file = _console(True)
    logger = ConsoleLogger(console)
    logger.progress(NUMBERS, 0.5)
    logger.message("a message above the bar")
    logger.progress({**NUMBERS, "iteration": 6, "total_steps": 3000}, 1.0)
    logger.close()
    shown = file.getvalue()
    for part in ("50%", "100%", "iteration 3", "iteration 6", "return 12.3", "success 26%", "left", "a message above"):
        assert part in shown
    assert "steps 1,500" not in shown
    assert shown.rstrip("\n").endswith("\x1b[?25h")  # the cursor is shown again
    logger.close()  # twice does no harm


class Cell:
    """Stands for a notebook: what its cell shows, one text for each display."""

    def __init__(self) -> None:
        self.shown: list[list[str]] = []

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert raw
        assert display_id
        self.shown.append([content["text/plain"]])
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown[-1].append(content["text/plain"])


def test_a_notebook_gets_one_line_that_updates_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=cell.display))
    logger = ConsoleLogger(Console(force_jupyter=True), seconds_between_lines=0)
    logger.progress(NUMBERS, 0.5)
    logger.progress({**NUMBERS, "iteration": 6, "total_steps": 3000}, 1.0)
    logger.flush()  # what follows has a line of its own
    logger.progress(NUMBERS, 0.5)
    assert [[line.split()[0] for line in lines] for lines in cell.shown] == [["50%", "100%"], ["50%"]]


@pytest.mark.parametrize(
    ("progress", "is_terminal", "shows"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_a_trainer_shows_progress_where_somebody_sees_it(
    progress: bool | None, is_terminal: bool, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    runner = OnPolicyRunner(make_env("pendulum", 2), device="cpu", progress=progress)
    assert any(isinstance(logger, ConsoleLogger) for logger in runner.log.loggers) == shows


def test_a_console_that_is_given_stays_the_only_one() -> None:
    console = ConsoleLogger(_console(False)[0])
    runner = OnPolicyRunner(make_env("pendulum", 2), device="cpu", progress=True, loggers=[console])
    assert [logger for logger in runner.log.loggers if isinstance(logger, ConsoleLogger)] == [console]
