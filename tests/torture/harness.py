"""What the scenarios share: commands in processes of their own, tiny runs, what counts as a loss, and the table."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from tests.contract.test_resume import LIFT, ROA, SAC, options
from tests.torture import faults

import apexrl.run.suite
from apexrl.agent import checkpoint
from apexrl.core.errors import CheckpointError
from apexrl.core.system.files import read_json_lines

FAULTY = {name: value for name, value in LIFT.items() if not name.startswith("task.kwargs")} | {
    "task.id": faults.NAME,
    "task.num_envs": "2",
    "training.total_timesteps": "400",
    "training.eval_interval": "0",
}
CLOCK = ("time/", "collect/seconds", "collect/control_steps_per_second", "collect/envs_")
"""Names of numbers that depend on the clock, or on which simulators a process has already made."""
PATIENCE = 120.0
"""Seconds after which a command counts as hanging."""
PRELOAD = [
    "apexrl.cli",
    "apexrl.run.directory",
    "apexrl.experiments.plots",
    "torch.utils.tensorboard",
    "tests.torture.harness",
]
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(PRELOAD)
context: Any = FORKSERVER
"""Where processes come from: one clean process that has the package loaded."""

outputs: Path | None = None
"""Where what the commands print goes, when not beside the run."""
Preparation = tuple[Callable[..., None], tuple[Any, ...]]
"""A function and its arguments, called in the new process before the command."""


@dataclass
class Line:
    """What was tried, how often, and what was lost."""

    what: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    note: str = ""
    on_change: Callable[[Line], None] = field(default=lambda _: None, repr=False)

    def add(self, problem: str = "", count: int = 1) -> None:
        """Count a try, with what was lost in it."""
        self.tried += count
        if problem:
            self.lost.append(problem)
        self.on_change(self)


class Report:
    """The lines so far."""

    def __init__(self, on_change: Callable[[Line], None] = lambda _: None) -> None:
        self.lines: list[Line] = []
        self.on_change = on_change

    def line(self, what: str) -> Line:
        """Begin a line."""
        self.lines.append(Line(what, on_change=self.on_change))
        return self.lines[-1]

    def losses(self) -> list[str]:
        """Return everything that was lost."""
        return [f"{line.what}: {problem}" for line in self.lines for problem in line.lost]


@dataclass(frozen=True)
class Outcome:
    """What a command returned, negative for a signal, and what it said."""

    code: int
    said: str

    def refusal(self, *parts: str, names: str = "") -> str:
        """Return what is wrong with this as one message that holds ``parts``; an empty text when nothing is."""
        said = " ".join(self.said.split())
        if self.code != 2:
            return f"{names}exit code {self.code} instead of 2: {self.said[-600:]}"
        warnings = self.said.count("apexrl: A confidence interval of")  # the runs evaluate few episodes
        if "Traceback" in self.said or self.said.count("apexrl: ") - warnings != 1:
            return f"{names}not one message: {self.said[-900:]}"
        missing = [part for part in parts if part not in said]
        return f"{names}the message lacks {missing}: {self.said[-600:]}" if missing else ""


def _child(arguments: Sequence[str], output: str, preparations: Sequence[Preparation]) -> None:
    from apexrl.cli.main import main

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    for prepare, values in preparations:
        prepare(*values)
    code = main(list(arguments))
    sys.stdout.flush()
    sys.exit(code)


def launch(arguments: Sequence[str], output: Path, preparations: Sequence[Preparation] = ()) -> BaseProcess:
    """Begin ``apexrl`` in a process of its own; what it prints goes to a file."""
    process: BaseProcess = context.Process(target=_child, args=(list(arguments), str(output), list(preparations)))
    process.start()
    return process


def warm_up(work: Path) -> None:
    """Start the process that the others are forked from, which takes seconds."""
    work.mkdir(parents=True, exist_ok=True)
    assert command(["list"], work / "list.txt").code == 0


def end(process: BaseProcess, output: Path, patience: float = PATIENCE) -> Outcome:
    """Wait for a command."""
    process.join(patience)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Outcome(-signal.SIGALRM, f"still running after {patience:g} s: {_text(output)}")
    return Outcome(process.exitcode, _text(output))


def command(arguments: Sequence[str], output: Path, preparations: Sequence[Preparation] = ()) -> Outcome:
    """Run ``apexrl`` in a process of its own."""
    return end(launch(arguments, output, preparations), output)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


@dataclass
class TinyRun:
    """A run of a second, and what it gives when nothing happens to it."""

    name: str
    source: str
    values: dict[str, str]
    preparations: list[Preparation] = field(default_factory=list)
    whole: Path = Path()
    seconds: float = 0.0

    def complete(self, work: Path) -> None:
        """Run it without interruption, once."""
        if not self.seconds:
            self.whole = work / f"{self.name}-whole"
            self.whole.parent.mkdir(parents=True, exist_ok=True)
            begin = time.monotonic()
            outcome = self.start(self.whole)
            assert outcome.code == 0, outcome.said
            self.seconds = time.monotonic() - begin

    def arguments(self, run_dir: Path, **more: str) -> list[str]:
        """Return the command that begins it, or goes on with it where it has begun."""
        if (run_dir / "config.yaml").exists():
            return ["train", "--resume", str(run_dir), "--allow-imports"]  # some environments are modules of the tests
        values = {**self.values, **{name.replace("__", "."): value for name, value in more.items()}}
        return ["train", self.source, "--run-dir", str(run_dir), *options(values)]

    def start(self, run_dir: Path, *more: Preparation) -> Outcome:
        """Begin it or go on with it, and wait."""
        return command(self.arguments(run_dir), output_of(run_dir), [*self.preparations, *more])

    def launch(self, run_dir: Path, *more: Preparation) -> BaseProcess:
        """Begin it or go on with it."""
        return launch(self.arguments(run_dir), output_of(run_dir), [*self.preparations, *more])

    def finish(self, run_dir: Path) -> str:
        """Let it go on to its end; returns how it then differs from the whole run, an empty text for not at all."""
        outcome = self.start(run_dir)
        if outcome.code or "Traceback" in outcome.said:
            return f"{run_dir.name}: resuming gave exit code {outcome.code}: {outcome.said[-900:]}"
        return difference(run_dir, self.whole)


def output_of(run_dir: Path) -> Path:
    """Return where the output of a run's processes goes."""
    return (outputs or run_dir.parent) / f"{run_dir.name}.txt"


def difference(run_dir: Path, whole: Path) -> str:
    """Say how a run differs from another, clocks apart; an empty text for not at all."""
    for name in ("metrics.jsonl", "evaluations.jsonl", "rollout_stats.json"):
        ours, theirs = (_numbers(run / name) for run in (run_dir, whole))
        if ours != theirs:
            return f"{run_dir.name}: {name} differs from that of the whole run"
    ours, theirs = (checkpoint.load(checkpoint.latest(run / "checkpoints")) for run in (run_dir, whole))
    place = first_difference(ours, theirs, "checkpoint")
    return f"{run_dir.name}: {place} differs from that of the whole run" if place else ""


def unreadable(run_dir: Path) -> str:
    """Name a checkpoint that is not whole; an empty text when all are."""
    for path in checkpoint.numbered(run_dir / "checkpoints") if (run_dir / "checkpoints").is_dir() else []:
        try:
            checkpoint.load(path)
        except CheckpointError as error:
            return str(error)
    return ""


def _numbers(path: Path) -> Any:
    if path.suffix == ".json":
        return _text(path)
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in read_json_lines(path)]


def first_difference(ours: Any, theirs: Any, where: str) -> str:
    """Return where two contents of checkpoints differ; an empty text for nowhere."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return "" if same and torch.equal(ours.nan_to_num(), theirs.nan_to_num()) else where
    if type(ours) is not type(theirs):
        return where
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return where
        pairs = [(f"{where}.{key}", ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            return where
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(ours, theirs, strict=True))]
    else:
        return "" if ours == theirs else where
    return next((found for place, a, b in pairs if (found := first_difference(a, b, place))), "")


def use_points() -> None:
    """Let every suite be the one that steps in microseconds."""
    apexrl.run.suite.make_suite = lambda *_, **__: faults.FaultySuite()  # type: ignore[attr-defined]


def tiny_runs() -> dict[str, TinyRun]:
    """Return a run of each algorithm."""
    rloo = {
        "task.num_parallel_envs": "4",
        "task.num_workers": "0",
        "task.chunk_size": "2",
        "task.max_episode_length": "14",
        "policy.kind": "mlp",
        "policy.hidden_dims": "[8]",
        "policy.actor_groups": "[state]",
        "policy.normalize_obs": "true",
        "algo.imitation_updates": "20",
        "algo.imitation_batch_size": "8",
        "algo.rloo_batch_size": "4",
        "algo.num_groups": "3",
        "algo.num_epochs": "1",
        "algo.max_attempts": "2",
        "training.num_train_steps": "16",
        "training.save_interval": "3",
        "training.eval_episodes": "4",
        "training.eval_num_envs": "2",
        "training.final_eval_episodes": "4",
        "training.device": "cpu",
        "logging.log_freq": "4",
        "features.save_video": "false",
        "features.save_plot": "false",
    }
    runs = (
        TinyRun("ppo", "lift_ppo", {**LIFT, "training.total_timesteps": "800"}),
        TinyRun("sac", "pendulum_sac", {**SAC, "training.total_timesteps": "192"}),
        TinyRun("ppo_roa", "payload_roa", {**ROA, "training.total_timesteps": "640"}),
        TinyRun("gym", "cartpole_ppo", FAULTY),
        TinyRun("rloo", "stage11_ript_vla", rloo, [(use_points, ())]),
    )
    return {run.name: run for run in runs}
