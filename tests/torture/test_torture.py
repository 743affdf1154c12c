"""The short form of ``make torture``: every scenario, a few times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.torture import configurations, damage, disks, environments, harness, kills
from tests.torture.harness import Report, TinyRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torture")


@pytest.fixture(scope="module")
def runs(work: Path) -> dict[str, TinyRun]:
    harness.warm_up(work)
    return harness.tiny_runs()


@pytest.fixture
def draw() -> random.Random:
    return random.Random(0)


@pytest.fixture
def report() -> Report:
    return Report()


def check(report: Report) -> None:
    assert report.losses() == []
    assert all(line.tried or line.note.startswith("not tried") for line in report.lines), report.lines


@pytest.mark.parametrize("name", ["ppo", "sac", "ppo_roa", "rloo"])
def test_kill_9(name: str, runs: dict[str, TinyRun], work: Path, report: Report, draw: random.Random) -> None:
    kills.random_kills(report, work, runs[name], 2, draw)
    check(report)


@pytest.mark.parametrize(("name", "file"), [("ppo", "iteration_"), ("rloo", "rollout_stats")])
def test_kill_9_while_a_file_is_written(
    name: str, file: str, runs: dict[str, TinyRun], work: Path, report: Report, draw: random.Random
) -> None:
    kills.kills_in_writes(report, work, runs[name], file, 2, draw)
    check(report)


def test_kill_9_in_slow_iterations(runs: dict[str, TinyRun], work: Path, report: Report, draw: random.Random) -> None:
    kills.slow_kills(report, work, runs["ppo"], 2, draw)
    check(report)


def test_sigterm_in_a_slow_update(runs: dict[str, TinyRun], work: Path, report: Report) -> None:
    kills.slow_preemptions(report, work, runs["ppo"], "update", (kills.slow_updates, (0.7,)), 1, 3.7)
    check(report)


def test_two_runs_in_one_directory(runs: dict[str, TinyRun], work: Path, report: Report, draw: random.Random) -> None:
    kills.rivals(report, work, runs["ppo"], 2, draw)
    check(report)


def test_a_full_and_a_read_only_disk(runs: dict[str, TinyRun], work: Path, report: Report) -> None:
    disks.disks(report, work / "disks", runs["ppo"], 2, 1, 0)
    check(report)


def test_damaged_files(runs: dict[str, TinyRun], work: Path, report: Report, draw: random.Random) -> None:
    damage.damaged_checkpoints(report, work, runs["ppo"], 1, draw)
    damage.damaged_reads(report, work, runs["ppo"], 40, draw)
    damage.nothing_left(report, work, runs["ppo"], draw)
    check(report)


def test_files_that_hold_code(runs: dict[str, TinyRun], work: Path, report: Report) -> None:
    damage.malicious_checkpoints(report, work, runs["ppo"], 2)
    damage.malicious_configurations(report, work, runs["ppo"], 2)
    damage.malicious_data(report, work)
    check(report)


def test_failing_environments(runs: dict[str, TinyRun], work: Path, report: Report) -> None:
    names = ("raises", "returns NaN as an observation", "returns NaN as a reward")
    environments.failing_environments(report, work, runs["gym"], 1, names)
    check(report)


def test_generated_configurations(work: Path, report: Report) -> None:
    configurations.configurations(report, work / "configurations", 120, 4, 1)
    check(report)
