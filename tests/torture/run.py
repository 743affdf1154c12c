"""Everything that a run must survive, many times: ``python -m tests.torture.run``, or ``make torture``.

Ends with a table of what was tried, how often and what was lost, and writes ``benchmarks/torture.json``.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.torture import configurations, damage, disks, environments, faults, harness, kills
from tests.torture.harness import Line, Report, TinyRun

Scenario = Callable[[Report, Path, dict[str, TinyRun], random.Random], None]
ALGORITHMS = ("ppo", "sac", "ppo_roa", "rloo")


def _kills(report: Report, work: Path, runs: dict[str, TinyRun], draw: random.Random) -> None:
    for run in runs.values():
        kills.random_kills(report, work, run, 20, draw)
    for name in ALGORITHMS:
        kills.kills_in_writes(report, work, runs[name], "iteration_", 8, draw)
    kills.kills_in_writes(report, work, runs["rloo"], "rollout_stats", 12, draw)
    kills.kills_in_writes(report, work, runs["ppo"], "config.yaml", 3, draw)
    for name in ("ppo", "sac"):
        kills.slow_kills(report, work, runs[name], 6, draw)


def _preemptions(report: Report, work: Path, runs: dict[str, TinyRun], draw: random.Random) -> None:
    kills.preemptions(report, work, list(runs.values()), 12, draw)
    for name, where, slow in (
        ("gym", "rollout", (faults.inflict, ("slow 0.2",))),
        ("rloo", "rollout", (faults.inflict, ("slow 0.004",))),
        ("ppo", "update", (kills.slow_updates, (0.7,))),
        ("sac", "update", (kills.slow_updates, (0.8,))),
        ("ppo_roa", "update", (kills.slow_updates, (0.4,))),
        ("ppo", "evaluation", (kills.slow_evaluations, (1.0,))),
        ("rloo", "evaluation", (kills.slow_evaluations, (1.0,))),
    ):
        kills.slow_preemptions(report, work, runs[name], where, slow, 3)


def _rivals(report: Report, work: Path, runs: dict[str, TinyRun], draw: random.Random) -> None:
    kills.rivals(report, work, runs["ppo"], 10, draw)
    kills.rivals(report, work, runs["rloo"], 6, draw)
    kills.simultaneous_starts(report, work, runs["ppo"], 5)


def _disks(report: Report, work: Path, runs: dict[str, TinyRun], draw: random.Random) -> None:
    for name, full in (("ppo", 20), ("rloo", 20)):
        disks.disks(report, work / f"{name}-disks", runs[name], full, 3, draw.randrange(2**31))


def _damage(report: Report, work: Path, runs: dict[str, TinyRun], draw: random.Random) -> None:
    for name, count in (("ppo", 8), ("rloo", 4)):
        damage.damaged_checkpoints(report, work, runs[name], count, draw)
        damage.damaged_reads(report, work, runs[name], 1000, draw)
        damage.nothing_left(report, work, runs[name], draw)


def _code(report: Report, work: Path, runs: dict[str, TinyRun], draw: random.Random) -> None:
    damage.malicious_checkpoints(report, work, runs["ppo"], 6)
    damage.malicious_configurations(report, work, runs["ppo"], 8)
    damage.malicious_data(report, work)


def _environments(report: Report, work: Path, runs: dict[str, TinyRun], draw: random.Random) -> None:
    environments.failing_environments(report, work, runs["gym"], 3)
    environments.failing_for_sac(report, work, runs["sac"], 3)
    environments.failing_simulators(report, work, runs["rloo"])


def _configurations(report: Report, work: Path, runs: dict[str, TinyRun], draw: random.Random) -> None:
    configurations.configurations(report, work / "configurations", 1000, 60, draw.randrange(2**31))


SCENARIOS: dict[str, Scenario] = {
    "kills": _kills,
    "preemptions": _preemptions,
    "rivals": _rivals,
    "disks": _disks,
    "damage": _damage,
    "code": _code,
    "environments": _environments,
    "configurations": _configurations,
}


def main() -> int:
    """Run all scenarios or some; returns 1 when anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the moments, places and configurations")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), help="scenarios to run; writes no record")
    options = parser.parse_args()
    console, begin = Console(width=None if sys.stdout.isatty() else 118), time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="apexrl-torture-"))
    console.print(f"Seed {options.seed}. Runs are in {work}.")

    def show(line: Line) -> None:
        lost = f", {len(line.lost)} LOST" if line.lost else ""
        end = "\r" if console.is_terminal else "\n"
        console.print(f"[{time.monotonic() - begin:5.0f} s] {line.what}: {line.tried}{lost}"[:118].ljust(118), end=end,
                      markup=False, highlight=False)  # fmt: skip

    report, runs = Report(show), harness.tiny_runs()
    harness.warm_up(work)
    for name in options.only or SCENARIOS:
        SCENARIOS[name](report, work, runs, random.Random(f"{options.seed} {name}"))
    seconds = time.monotonic() - begin
    console.print(_table(report), _summary(report, seconds), sep="\n")
    if not options.only:
        _write(report, options.seed, seconds)
    if not report.losses():
        shutil.rmtree(work)
    return 1 if report.losses() else 0


def _table(report: Report) -> Table:
    table = Table("what was tried", "times", "lost", "")
    for line in report.lines:
        table.add_row(line.what, f"{line.tried:,}", str(len(line.lost) or "nothing"), line.note)
    return table


def _summary(report: Report, seconds: float) -> str:
    tried = sum(line.tried for line in report.lines)
    text = f"{tried:,} tries in {seconds / 60:.0f} minutes; "
    return text + ("nothing was lost." if not report.losses() else "LOST:\n" + "\n".join(report.losses()))


def _write(report: Report, seed: int, seconds: float) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import report as record

    lines = [{"what": line.what, "tried": line.tried, "lost": line.lost, "note": line.note} for line in report.lines]
    record.write("torture", {"command": "make torture", "seed": seed, "seconds": round(seconds), "lines": lines})


if __name__ == "__main__":
    sys.exit(main())
