"""``apexrl sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apexrl.cli.common import Overrides
from apexrl.cli.seeds import JobDisplay
from apexrl.core import plugins
from apexrl.core.errors import ConfigError, RunDirError
from apexrl.core.system.files import DirectoryLock
from apexrl.experiments import jobs
from apexrl.experiments.sweep_file import SweepFile

try:
    from apexrl.experiments.sweep import BEST, Sweep, find_sweep
except ModuleNotFoundError as error:
    raise ConfigError("apexrl sweep needs Optuna: pip install 'apexrl[sweep]'.") from error

NUM_SHOWN = 10
"""Trials in the table."""


def run_sweep(options: argparse.Namespace, overrides: Overrides) -> int:
    """Search, or continue a search."""
    file, directory = find_sweep(options.file, options.resume, options.dir)
    if options.trials is not None:
        file = file.with_trials(options.trials)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"{directory} cannot be created: {error.strerror}; name another with --dir.") from error
    lock = DirectoryLock(directory)
    lock.acquire()
    try:
        return _search(file, directory, options.jobs)
    finally:
        lock.release()


def _search(file: SweepFile, directory: Path, num_jobs: int) -> int:
    with JobDisplay() as display:
        sweep = Sweep(file, directory, display.line)
        done = len(sweep.write()["trials"])
        names = ", ".join(dimension.name for dimension in file.space)
        display.line(f"Searching {names} in {directory}: {file.trials} trials" + (f", {done} before" if done else ""))

        def on_report(report: jobs.Report) -> bool:
            display.show(report, sweep.label(report))
            return sweep.on_report(report)

        stopped = jobs.run_jobs(sweep.next_job, on_report, num_jobs)
    results = sweep.write()
    if stopped is not None:
        print(f"\nStopped. Resume with: apexrl sweep --resume {directory}{plugins.flag()}")
        return 128 + stopped
    _show_trials(results)
    best = results["best"]
    if best is None:
        raise RunDirError(f"No trial in {directory} was trained to its end; the messages above say why.")
    print(f"Best: trial {best['number']}, {file.objective} {best['value']:.4g}")
    if results["importance"]:
        print("Importance: " + ", ".join(f"{name} {share:.0%}" for name, share in results["importance"].items()))
    print(f"Image: {sweep.draw(results)}")
    print(f"Best configuration: {directory / BEST} (apexrl train {directory / BEST}{plugins.flag()})")
    return 0


def _show_trials(results: Mapping[str, Any]) -> None:
    """Print the best trials, and how many there are of each kind."""
    trials = results["trials"]
    complete = sorted(
        (trial for trial in trials if trial["state"] == "complete"),
        key=lambda trial: trial["value"],
        reverse=results["direction"] == "maximize",
    )
    for trial in complete[:NUM_SHOWN]:
        texts = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in trial["params"].items()}
        params = "  ".join(f"{name} {text}" for name, text in texts.items())
        print(f"  trial {trial['number']:<5} {trial['value']:<10.4g} {params}")
    counts = {state: sum(trial["state"] == state for trial in trials) for state in ("complete", "pruned", "fail")}
    print(f"{counts['complete']} trials finished, {counts['pruned']} pruned, {counts['fail']} failed")
