"""Environments that raise, die, hang or return what is not a number: one message, the last checkpoint, no loss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.torture import faults
from tests.torture.harness import Outcome, Report, TinyRun, command, output_of

from apexrl.agent import checkpoint
from apexrl.core.system.files import read_json_lines

WORKERS = {"task.num_workers": "2"}
BACKGROUND = {"training.collector": "async", "training.max_staleness": "0", "training.step_timeout": "3"}
EVALUATIONS = {"training.eval_interval": "2", "training.eval_episodes": "5"}  # fewer bring a warning as well
CASES: dict[str, tuple[dict[str, str], str, str]] = {
    "raises": ({}, "raise", "the gearbox is broken"),
    "raises in a worker": (WORKERS, "raise", "the gearbox is broken"),
    "dies in a worker": (WORKERS, "die", "was killed by SIGKILL"),
    "hangs": (BACKGROUND, "hang", "hangs: no step or reset has ended"),
    "hangs in a worker": (WORKERS | BACKGROUND, "hang", "hangs: no step or reset has ended"),
    "returns NaN as an observation": ({}, "nan observation", "observation"),
    "returns NaN as a reward": ({}, "nan reward", "'reward'"),
    "returns NaN in an evaluation": (EVALUATIONS, "nan reward", "evaluated episodes is not finite"),
}
"""Name -> options, fault, and what the message must hold."""


def failing_environments(
    report: Report, work: Path, run: TinyRun, repeats: int, names: Sequence[str] = tuple(CASES)
) -> None:
    """Let the environments of a run fail in every way; then resume without the fault."""
    for name, (options, fault, part) in ((name, CASES[name]) for name in names):
        line = report.line(f"an environment that {name}, {run.values.get('algo.name', 'ppo')}")
        values = {**run.values, **options}
        changed = replace(run, name=f"{run.name}-{name.replace(' ', '-')}", values=values, seconds=0.0)
        changed.complete(work)
        for number in range(repeats):
            run_dir = work / f"{changed.name}-{number}"
            outcome = changed.start(run_dir, (faults.inflict, (fault,)))
            line.add(_problem(run_dir, outcome, part) or changed.finish(run_dir))


def _problem(run_dir: Path, outcome: Outcome, part: str) -> str:
    if outcome.code != 2:
        return f"{run_dir.name}: {outcome}"
    said = " ".join(outcome.said.split())
    named = re.search(r"The last good checkpoint is (\S+\.pt)\.", said)
    if part not in said or named is None or said.count("apexrl: ") != 1:
        return f"{run_dir.name}: the message lacks '{part}' or the last checkpoint: {outcome.said[-900:]}"
    # What a worker raised is shown with the worker's own traceback; ours never is.
    if 'apexrl/cli/main.py", line' in outcome.said:
        return f"{run_dir.name}: a traceback: {outcome.said[-900:]}"
    newest = checkpoint.latest(run_dir / "checkpoints")
    if newest != Path(named[1]):
        return f"{run_dir.name}: {named[1]} is named, the newest is {newest}"
    checkpoint.load(newest)
    return ""


def failing_for_sac(report: Report, work: Path, sac: TinyRun, repeats: int) -> None:
    """Let what an environment returns be wrong where it goes into a replay buffer."""
    values = {**sac.values, "task.id": faults.NAME, "algo.name": "sac", "training.eval_interval": "0"}
    run = replace(sac, name="gym_sac", values=values, seconds=0.0)
    failing_environments(report, work, run, repeats, [name for name in CASES if "NaN" in name])


def failing_simulators(report: Report, work: Path, run: TinyRun) -> None:
    """Let the simulators of a suite fail: a worker is replaced and training goes on, or one message says why not."""
    line = report.line("a simulator of a suite that dies, hangs or raises")
    workers = {"task.num_workers": "2", "task.step_timeout": "2"}
    run = replace(run, values={**run.values, **workers, "training.num_train_steps": "3", "logging.log_freq": "0"})
    for fault in ("die", "hang", "raise", "nan observation"):
        run_dir = work / f"simulator-{fault.split()[0]}"
        outcome = command(run.arguments(run_dir), output_of(run_dir), [*run.preparations, (faults.inflict, (fault,))])
        line.add(_problem_of_suite(run_dir, outcome, fault))


def _problem_of_suite(run_dir: Path, outcome: Outcome, fault: str) -> str:
    said = " ".join(outcome.said.split())
    if fault in ("raise", "nan observation"):
        wanted = "the gearbox is broken" if fault == "raise" else "observation"
        return "" if outcome.code == 2 and wanted in said else f"{run_dir.name}: {outcome}"
    lost = sum(line.get("collect/lost_episodes", 0) for line in read_json_lines(run_dir / "metrics.jsonl"))
    went_on = outcome.code == 0 and lost > 0 and "It is replaced" in said
    gave_up = outcome.code == 2 and "3 times in a row" in said and "checkpoint" in said
    return "" if went_on or gave_up else f"{run_dir.name}: lost {lost} episodes; {outcome}"
