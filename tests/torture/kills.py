"""``kill -9`` at random moments and in the middle of writes; SIGTERM; two runs in one directory."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from tests.torture.harness import Line, Outcome, Preparation, Report, TinyRun, end, launch, output_of, unreadable

import apexrl.evaluation
from apexrl.agent import checkpoint
from apexrl.agent.signals import GRACE_VARIABLE
from apexrl.core.system import files
from apexrl.core.system.files import read_json_lines

MOST_SECONDS = 5.0
"""That SIGTERM may take: of ordinary iterations, and where the grace period is two seconds."""


def random_kills(report: Report, work: Path, run: TinyRun, count: int, draw: random.Random) -> None:
    """Kill processes of a run at random moments, each after the other, until it is complete; then begin another."""
    line = report.line(f"kill -9 at a random moment, {run.name}")
    run.complete(work)
    number = 0
    while line.tried < count:
        number += 1
        run_dir = work / f"{run.name}-killed-{number}"
        while line.tried < count and not is_complete(run_dir, run):
            process = run.launch(run_dir)
            process.join(draw.uniform(0, run.seconds))
            process.kill()
            outcome = end(process, output_of(run_dir))
            if outcome.code == -signal.SIGKILL:
                line.add(unreadable(run_dir))
            elif outcome.code:
                line.add(f"{run_dir.name}: {outcome}")
                break
        _compare(line, run, run_dir)


def kills_in_writes(report: Report, work: Path, run: TinyRun, what: str, count: int, draw: random.Random) -> None:
    """Kill processes in the middle of writing a file whose name holds ``what``: at a byte, before and after the rename.

    They kill themselves, for the time is too short to be hit from outside.
    """
    line = report.line(f"kill -9 while {what} is written, {run.name}")
    run.complete(work)
    number = 0
    while line.tried < count:
        number += 1
        run_dir = work / f"{run.name}-{what}-{number}"
        while line.tried < count and not is_complete(run_dir, run):
            size = draw.choice((1, 200, 3000, draw.randrange(20_000)))
            where = draw.choice(("half", "half", "before rename", "after rename"))
            outcome = run.start(run_dir, (die_in_write, (what, draw.choice((1, 1, 2)), where, size)))
            if outcome.code == -signal.SIGKILL:
                line.add(unreadable(run_dir))
            elif outcome.code:
                line.add(f"{run_dir.name}: {outcome}")
                break
        _compare(line, run, run_dir)


def _compare(line: Line, run: TinyRun, run_dir: Path) -> None:
    if problem := run.finish(run_dir):
        line.lost.append(problem)


def is_complete(run_dir: Path, run: TinyRun) -> bool:
    """Whether a run has nothing left to do."""
    last = len(read_json_lines(run.whole / "evaluations.jsonl"))
    return len(read_json_lines(run_dir / "evaluations.jsonl")) >= last


def die_in_write(what: str, call: int, where: str, size: int) -> None:
    """Let this process die in the ``call``-th write of a file whose name holds ``what``; after ``size`` bytes of it."""
    original, calls = files.replacing, 0

    @contextmanager
    def replacing(path: Path) -> Iterator[Any]:
        nonlocal calls
        calls += what in path.name
        is_last = what in path.name and calls == call
        with original(path) as file:
            yield _DyingFile(file, size) if is_last and where == "half" else file
            if is_last and where != "after rename":
                file.flush()
                die()
        if is_last:
            die()

    files.replacing = replacing


class _DyingFile:
    """Takes a number of bytes to the disk and ends the process."""

    def __init__(self, file: Any, size: int) -> None:
        self.file, self.left = file, size

    def write(self, data: Any) -> int:
        if len(data) > self.left:
            self.file.write(bytes(data)[: self.left])
            self.file.flush()
            die()
        self.left -= len(data)
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def die() -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def preemptions(report: Report, work: Path, runs: list[TinyRun], count: int, draw: random.Random) -> None:
    """Send SIGTERM at random moments to ordinary iterations."""
    for run in runs:
        line = report.line(f"SIGTERM at a random moment, {run.name}")
        run.complete(work)
        slowest, number, stopped = 0.0, 0, 0
        while line.tried < count:
            number += 1
            run_dir = work / f"{run.name}-stopped-{number}"
            while line.tried < count and not is_complete(run_dir, run):
                seconds, code = _preempt(line, run, run_dir, draw.uniform(0.0, 1.0) * run.seconds)
                slowest, stopped = max(slowest, seconds), stopped + (code == 143)
            _compare(line, run, run_dir)
        line.note = f"left within {slowest:.1f} s; {stopped} times while it learned"


def slow_preemptions(
    report: Report, work: Path, run: TinyRun, where: str, slow: Preparation, times: int, after: float = 6.0
) -> None:
    """Send SIGTERM in the middle of something that takes longer than the grace period; the clock alone saves."""
    line = report.line(f"SIGTERM in a slow {where}, {run.name}")
    values = {**run.values, "training.save_interval": "1000", "training.save_minutes": "0.000001"}
    run = replace(run, name=f"{run.name}-slow-{where}", values=values, seconds=0.0)
    run.complete(work)
    run_dir = work / f"{run.name}-stopped"
    slowest = 0.0
    for _ in range(times):
        slowest = max(slowest, _preempt(line, run, run_dir, after, (wait_briefly, ()), slow)[0])
    _compare(line, run, run_dir)
    line.note = f"left within {slowest:.1f} s"


def slow_kills(report: Report, work: Path, run: TinyRun, count: int, draw: random.Random) -> None:
    """Kill a run whose iterations take longer than ``save_minutes``: what was over before the running one is saved."""
    line = report.line(f"kill -9 in slow iterations, {run.name}")
    values = {**run.values, "training.save_interval": "1000", "training.save_minutes": "0.001"}
    run = replace(run, name=f"{run.name}-slow-iterations", values=values, seconds=0.0)
    run.complete(work)
    run_dir = work / f"{run.name}-killed"
    for _ in range(count):
        process = run.launch(run_dir, (slow_updates, (0.1,)))
        process.join(draw.uniform(2.0, 5.0))
        process.kill()
        end(process, output_of(run_dir))
        finished = len(read_json_lines(run_dir / "metrics.jsonl"))
        newest = _newest_iteration(run_dir)
        # An iteration is logged before it is saved.
        lost = f"{run_dir.name}: {finished} iterations were over, {newest} saved" if newest < finished - 1 else ""
        line.add(unreadable(run_dir) or lost)
    _compare(line, run, run_dir)


def _newest_iteration(run_dir: Path) -> int:
    saved = checkpoint.numbered(run_dir / "checkpoints") if (run_dir / "checkpoints").is_dir() else []
    return int(checkpoint.load(saved[-1])["iteration"]) if saved else 0


def _preempt(line: Line, run: TinyRun, run_dir: Path, after: float, *slow: Preparation) -> tuple[float, int]:
    """Send SIGTERM once; returns the seconds until the process had ended, and its exit code."""
    process = run.launch(run_dir, *slow)
    process.join(after)
    if process.exitcode is not None:
        return 0.0, 0
    finished = len(read_json_lines(run_dir / "metrics.jsonl"))
    begin = time.monotonic()
    os.kill(process.pid or 0, signal.SIGTERM)
    outcome = end(process, output_of(run_dir))
    seconds = time.monotonic() - begin
    line.add(_problem_of_preemption(run_dir, outcome, seconds, finished))
    return seconds, outcome.code


def _problem_of_preemption(run_dir: Path, outcome: Outcome, seconds: float, finished: int) -> str:
    # Before training begins and after it has ended there is nothing to save, and the signal ends the process itself.
    if outcome.code not in (143, -signal.SIGTERM, 0) or "Traceback" in outcome.said:
        return f"{run_dir.name}: {outcome}"
    if seconds > MOST_SECONDS:
        return f"{run_dir.name}: SIGTERM took {seconds:.1f} s"
    newest = _newest_iteration(run_dir)
    return f"{run_dir.name}: {finished} iterations were over, {newest} saved" if newest < finished else ""


def wait_briefly() -> None:
    """Let SIGTERM wait two seconds for an iteration, not twenty."""
    os.environ[GRACE_VARIABLE] = "2"


def slow_updates(seconds: float) -> None:
    """Let every gradient take this long."""
    original = torch.autograd.grad

    def grad(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return original(*arguments, **options)

    torch.autograd.grad = grad


def slow_evaluations(seconds: float) -> None:
    """Let every step of an evaluation take this long."""
    original: Any = vars(apexrl.evaluation.evaluate)["make_actor"]

    def make_actor(*arguments: Any, **options: Any) -> Any:
        actor = original(*arguments, **options)

        def act(carry: Any) -> Any:
            time.sleep(seconds)
            return actor(carry)

        return act

    vars(apexrl.evaluation.evaluate)["make_actor"] = make_actor


def rivals(report: Report, work: Path, run: TinyRun, count: int, draw: random.Random) -> None:
    """Begin and resume in a directory in which a process trains, kill that one, and go on at once."""
    line = report.line(f"a second run in the directory of another, {run.name}")
    run.complete(work)
    number = 0
    while line.tried < count:
        number += 1
        run_dir = work / f"{run.name}-rivals-{number}"
        first = run.launch(run_dir, (slow_updates, (0.05,)))
        while not (run_dir / "config.yaml").exists() and first.exitcode is None:
            time.sleep(0.002)
        for kind in ("begun", "resumed"):
            line.add(_refused(run, run_dir, kind, draw))
        first.kill()
        end(first, output_of(run_dir))
        _compare(line, run, run_dir)  # the lock must have ended with its process


def _refused(run: TinyRun, run_dir: Path, kind: str, draw: random.Random) -> str:
    time.sleep(draw.uniform(0, 0.2))
    output = run_dir.with_name(f"{run_dir.name}-{kind}.txt")
    words = {"begun": [run.source, "--run-dir"], "resumed": ["--resume"]}[kind]
    arguments = ["train", *words, str(run_dir)]
    outcome = end(launch(arguments, output, run.preparations), output)
    reason = "is not empty" if kind == "begun" else "is in use: process"
    return outcome.refusal(str(run_dir), reason, names=f"{run_dir.name} {kind} twice: ")


def simultaneous_starts(report: Report, work: Path, run: TinyRun, count: int) -> None:
    """Begin the same run in the same directory in three processes at once: one of them trains, and is not troubled."""
    line = report.line(f"three runs begun at once in one directory, {run.name}")
    run.complete(work)
    for number in range(count):
        run_dir = work / f"{run.name}-at-once-{number}"
        outputs = [run_dir.with_name(f"{run_dir.name}-{i}.txt") for i in range(3)]
        arguments = run.arguments(run_dir)
        processes: list[BaseProcess] = [launch(arguments, output, run.preparations) for output in outputs]
        outcomes = [end(process, output) for process, output in zip(processes, outputs, strict=True)]
        losers = [outcome for outcome in outcomes if outcome.code != 0]
        problem = "" if len(losers) == 2 else f"{run_dir.name}: exit codes {[outcome.code for outcome in outcomes]}"
        problem = problem or "".join(loser.refusal(str(run_dir)) for loser in losers)
        line.add(problem)
        _compare(line, run, run_dir)
