"""``apexrl sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apexrl.cli.common import AddCommand, Overrides, positive, whole_number
from apexrl.cli.seeds import JobDisplay
from apexrl.core.errors import ConfigError, RunDirError

if TYPE_CHECKING:
    from apexrl.experiments.sweep_file import SweepFile

NUM_SHOWN = 10
"""Trials in the table."""


def register(command: AddCommand) -> None:
    """Add the commands."""
    sweep = command("sweep", "Search for a configuration with Optuna; the same command goes on with it.", _sweep)
    sweep.add_argument("file", nargs="?", type=Path, metavar="FILE.yaml", help="what is searched; see docs/sweeps.md")
    sweep.add_argument("--dir", type=Path, metavar="DIR", help="default sweeps/<name of the file>")
    sweep.add_argument("--resume", type=Path, metavar="DIR", help="go on with a sweep, without its file")
    sweep.add_argument("--trials", type=_trials, metavar="N", help="in all, instead of the number in the file")
    sweep.add_argument("--jobs", type=positive, default=1, metavar="N", help="trials at once; default 1")


def _trials(text: str) -> int:
    from apexrl.experiments.sweep_file import MAX_COUNTS

    return whole_number(text, 1, MAX_COUNTS["trials"])


def _sweep(options: argparse.Namespace, _: Overrides) -> int:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ConfigError("apexrl sweep needs Optuna: pip install 'apexrl[sweep]'.") from None
    from apexrl.core.system.files import DirectoryLock

    file, directory = _what(options)
    if options.trials is not None:
        file = file.with_trials(options.trials)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"{directory} cannot be made: {error.strerror}; name another with --dir.") from error
    lock = DirectoryLock(directory)
    lock.acquire()
    try:
        return _search(file, directory, options.jobs)
    finally:
        lock.release()


def _what(options: argparse.Namespace) -> tuple[SweepFile, Path]:
    """Return what is searched, and where."""
    from apexrl.experiments.sweep import check_same, stored_sweep
    from apexrl.experiments.sweep_file import read_sweep

    if (options.file is None) == (options.resume is None):
        raise ConfigError("Give a sweep file, or --resume and the directory of a sweep.")
    if options.resume is not None:
        if options.dir is not None:
            raise ConfigError(f"--resume {options.resume} goes on in its own directory; leave --dir out.")
        stored = stored_sweep(options.resume)
        if stored is None:
            raise RunDirError(f"{options.resume} holds no sweep; name a directory that 'apexrl sweep' made.")
        return stored, options.resume
    file = read_sweep(options.file)
    directory = options.dir or Path("sweeps") / options.file.stem
    stored = stored_sweep(directory)
    if stored is not None:
        check_same(file, stored, directory)
    return file, directory


def _search(file: SweepFile, directory: Path, num_jobs: int) -> int:
    from apexrl.experiments.jobs import Report, run_jobs
    from apexrl.experiments.sweep import BEST, Sweep

    with JobDisplay() as display:
        sweep = Sweep(file, directory, display.line)
        done = len(sweep.write()["trials"])
        names = ", ".join(dimension.name for dimension in file.space)
        display.line(f"Searching {names} in {directory}: {file.trials} trials" + (f", {done} before" if done else ""))

        def on_report(report: Report) -> bool:
            display.show(report, sweep.label(report))
            return sweep.on_report(report)

        stopped = run_jobs(sweep.next_job, on_report, num_jobs)
    results = sweep.write()
    if stopped is not None:
        print(f"\nStopped. Go on with: apexrl sweep --resume {directory}")
        return 128 + stopped
    _show_trials(results)
    best = results["best"]
    if best is None:
        raise RunDirError(f"No trial in {directory} was trained to its end; the messages above say why.")
    print(f"Best: trial {best['number']}, {file.objective} {best['value']:.4g}")
    if results["importance"]:
        print("Importance: " + ", ".join(f"{name} {share:.0%}" for name, share in results["importance"].items()))
    print(f"Picture: {sweep.draw(results)}")
    print(f"Best configuration: {directory / BEST} (apexrl train {directory / BEST})")
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
        params = "  ".join(f"{name} {_four_digits(value)}" for name, value in trial["params"].items())
        print(f"  trial {trial['number']:<5} {trial['value']:<10.4g} {params}")
    counts = {state: sum(trial["state"] == state for trial in trials) for state in ("complete", "pruned", "fail")}
    print(f"{counts['complete']} trials finished, {counts['pruned']} pruned, {counts['fail']} failed")


def _four_digits(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
