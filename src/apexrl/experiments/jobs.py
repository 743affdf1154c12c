"""Runs in processes of their own, several at once, that report their progress and stop on request."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from apexrl.agent.loggers import Logger
from apexrl.core import plugins
from apexrl.core.errors import ApexRLError, RunDirError
from apexrl.core.system.files import DirectoryLock, read_json_lines
from apexrl.run import directory as run
from apexrl.run.config import make_config

Kind = Literal["progress", "evaluation", "done", "failed", "stopped"]
SECONDS_BETWEEN_REPORTS = 0.2
SECONDS_FOR_OLD_OWNER = 20.0
"""How long a job waits for the process that had its directory, and that ends when it notices that nobody listens."""


@dataclass(frozen=True)
class Job:
    """A run: new, or resumed when its directory has one."""

    config: Mapping[str, Any]
    """The whole configuration as plain values."""
    run_dir: Path
    overrides: tuple[tuple[str, str], ...] = ()
    """What changes in a run that exists already."""

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")


@dataclass(frozen=True)
class Report:
    """What a job tells: ``progress``, the numbers of a periodic ``evaluation``, or, last, how it ended."""

    job: Job
    kind: Kind
    values: Mapping[str, Any]
    """Of progress ``done`` from 0 to 1 and numbers; of done the record of the last evaluation; of failed ``error``."""


def run_jobs(
    next_job: Callable[[], Job | None], on_report: Callable[[Report], bool], num_jobs: int = 1
) -> signal.Signals | None:
    """Run jobs until there is none left.

    Args:
        next_job: called whenever a process is free; None when nothing can start now.
        on_report: called with every report; returns whether the job continues, which counts after an evaluation.
        num_jobs: processes at once.

    Returns:
        The signal that stopped the jobs, after they saved; None when they ended by themselves.
    """
    was_asked = False
    with _Processes() as processes, _first_signal() as stop:
        while True:
            while stop() is None and len(processes.running) < num_jobs and (job := next_job()) is not None:
                processes.start(job)
            if not processes.running:
                return stop()
            if not was_asked and (number := stop()) is not None:
                processes.ask_to_stop(at_once=number == signal.SIGTERM)
                was_asked = True
            for connection, report in processes.reports(timeout=0.5):
                goes_on = on_report(report)
                if report.kind == "evaluation":
                    with suppress(OSError):  # it has ended meanwhile
                        connection.send(goes_on)


class _Processes:
    """The processes that run, and the pipes to them."""

    def __init__(self) -> None:
        # Forked from a process that has imported what they need, and nothing else: no threads, no device.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["apexrl.experiments.jobs"])
        self.running: dict[Connection, tuple[Job, BaseProcess]] = {}

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, (_job, process) in self.running.items():
            process.kill()
            process.join()
            connection.close()

    def start(self, job: Job) -> None:
        """Start a process for a job."""
        own, theirs = self._context.Pipe()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        process = self._context.Process(target=_work, args=(job, theirs, plugins.trusted()))
        process.start()
        theirs.close()  # so that the pipe ends with the process
        self.running[own] = (job, process)

    def reports(self, timeout: float) -> Iterator[tuple[Connection, Report]]:
        """Yield what the processes have told by now, and the pipe to answer."""
        for connection in wait(list(self.running), timeout):
            assert isinstance(connection, Connection)
            job, process = self.running[connection]
            try:
                kind, values = connection.recv()
            except (EOFError, OSError):
                process.join()
                kind, values = "failed", {"error": f"Its process ended with code {process.exitcode}; see {job.log}."}
            if kind not in ("progress", "evaluation"):
                del self.running[connection]
                process.join()
                connection.close()
            yield connection, Report(job, kind, values)

    def ask_to_stop(self, *, at_once: bool) -> None:
        """Ask every process to save and leave: at the end of its iteration, or at once."""
        for connection, (_, process) in self.running.items():
            with suppress(OSError):
                if at_once:
                    process.terminate()  # SIGTERM: the trainer leaves a slow iteration
                else:
                    connection.send(False)


@contextmanager
def _first_signal() -> Iterator[Callable[[], signal.Signals | None]]:
    """Note the first Ctrl-C or SIGTERM while the block runs; a second one ends it at once."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def handle(number: int, _: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        with suppress(OSError):
            os.write(2, b"\nStopping after the running iterations, to save; press Ctrl-C again to stop at once.\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: signal.Signals(seen[0]) if seen else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _PipeLogger(Logger):
    """Tells the process that started this one, and stops training when that says so."""

    shows_stages = True

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.seen: dict[str, float] = {}
        self.last_report = -float("inf")

    def log(self, values: Mapping[str, float]) -> None:
        """Tell the numbers of an evaluation, and wait for the answer: what follows must not depend on who is faster."""
        self.seen.update(values)
        if any(name.startswith("eval/") for name in values):
            self.connection.send(("evaluation", dict(values)))
            self._obey()

    def progress(self, values: Mapping[str, float], done: float) -> None:
        """Tell how far training is, now and then."""
        self.seen.update(values)
        now = time.monotonic()
        if now - self.last_report >= SECONDS_BETWEEN_REPORTS:
            self.last_report = now
            self.connection.send(("progress", {**self.seen, "done": done}))
        if self.connection.poll():
            self._obey()

    def message(self, text: str) -> None:
        """Write to the log of the job."""
        print(text, flush=True)

    def _obey(self) -> None:
        if not self.connection.recv():
            signal.raise_signal(signal.SIGINT)  # the trainer saves at the end of the iteration


def _work(job: Job, connection: Connection, trust: plugins.Trust) -> None:
    """Train in a process of its own; nothing of it reaches the terminal, nor the terminal's Ctrl-C it."""
    os.setpgrp()
    log = job.log.open("a", encoding="utf-8")
    for number in (1, 2):  # also what libraries write
        os.dup2(log.fileno(), number)
    outcome: tuple[Kind, dict[str, Any]]
    try:
        plugins.inherit(trust)
        outcome = "done", _train_job(job, _PipeLogger(connection))
    except (KeyboardInterrupt, SystemExit):
        outcome = "stopped", {}
    except ApexRLError as error:
        outcome = "failed", {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        outcome = "failed", {"error": f"{type(error).__name__}: {error} ({job.log} has the traceback)"}
    with suppress(OSError):  # nobody listens any more
        connection.send(outcome)


def _train_job(job: Job, logger: _PipeLogger) -> dict[str, Any]:
    """Train and evaluate; returns the record of the last evaluation, and every number that was logged last."""
    if (job.run_dir / "config.yaml").is_file():
        _await_old_owner(job.run_dir)
        trainer = run.resume(job.run_dir, job.overrides, [logger])
        for line in read_json_lines(job.run_dir / "metrics.jsonl")[-1:]:  # nothing may be left to train
            logger.seen.update(line)
    else:
        trainer = run.start(make_config(job.config), job.run_dir, [logger])
    try:
        trainer.learn()
        result = trainer.evaluate(
            trainer.cfg.final_eval_episodes,
            on_progress=lambda _: logger.progress({"total_steps": trainer.total_steps}, 1.0),
        )
        make_config(job.config).task.write_results(job.run_dir, trainer)
        return {"step": trainer.total_steps, **result.record(), "logged": logger.seen}
    finally:
        trainer.close()


def _await_old_owner(run_dir: Path) -> None:
    """Wait until a process that trained there has left."""
    lock, until = DirectoryLock(run_dir), time.monotonic() + SECONDS_FOR_OLD_OWNER
    while time.monotonic() < until:
        try:
            lock.acquire()
        except RunDirError:
            time.sleep(0.1)
        else:
            lock.release()
            return
