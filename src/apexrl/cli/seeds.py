"""``apexrl train --seeds``: one configuration, several seeds, aggregated."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from apexrl.cli.common import Overrides, warn
from apexrl.core import plugins
from apexrl.core.errors import ConfigError, RunDirError, plural
from apexrl.core.system import distributed
from apexrl.core.system.files import DirectoryLock
from apexrl.experiments import jobs, plots, seeds
from apexrl.experiments.seeds import SeedRun, SeedRuns
from apexrl.experiments.sweep_file import as_text
from apexrl.run import directory as run
from apexrl.run.config import Config

SECONDS_BETWEEN_LINES = 5.0
"""About a job, where there is no terminal."""


def start_seeds(config: Config, text: str, run_dir: Path | None, name: str, num_jobs: int) -> int:
    """Train every seed in a new directory, and show what they give."""
    _require_evaluation(config)
    numbers = seeds.parse_seeds(text, config.training.seed)
    directory = run.new_run_dir(name) if run_dir is None else run.claim(run_dir)
    stored = SeedRuns(directory, config.to_dict(), [SeedRun(number) for number in numbers])
    print(f"Training {config.task.id} with {config.algo.name} and seeds {_listed(numbers)} in {directory}")
    return _train_all(stored, num_jobs)


def resume_seeds(directory: Path, text: str | None, overrides: Overrides, num_jobs: int) -> int:
    """Resume the seeds of a directory that are not finished, repeat those that failed, and add new ones."""
    stored = seeds.read(directory)
    after = run.changed_config(stored.config, overrides)
    _require_evaluation(after)
    stored.config = after.to_dict()
    known = {entry.seed for entry in stored.runs}
    new = [number for number in seeds.parse_seeds(text, after.training.seed) if number not in known] if text else []
    stored.runs += [SeedRun(number) for number in new]
    for entry in stored.runs:
        if overrides or entry.state == "failed":
            entry.state, entry.error = "waiting", ""
    waiting = [entry.seed for entry in stored.with_state("waiting")]
    print(f"Resuming {directory}: seeds {_listed(waiting)}" if waiting else f"Every seed in {directory} is done.")
    return _train_all(stored, num_jobs)


def _require_evaluation(config: Config) -> None:
    if not config.training.final_eval_episodes:
        raise ConfigError(
            "--seeds compares evaluations at the end: training.final_eval_episodes must be at least 1, got 0."
        )
    if distributed.world_size() > 1:
        raise ConfigError("--seeds starts processes itself; start it without torchrun.")


def _train_all(stored: SeedRuns, num_jobs: int) -> int:
    lock = DirectoryLock(stored.directory)
    lock.acquire()
    try:
        stored.write()
        waiting = iter(stored.with_state("waiting"))
        started: dict[Path, SeedRun] = {}

        def next_job() -> jobs.Job | None:
            entry = next(waiting, None)
            if entry is None:
                return None
            config = {**stored.config, "training": {**stored.config["training"], "seed": entry.seed}}
            run_dir = stored.run_dir(entry)
            started[run_dir] = entry
            return jobs.Job(config, run_dir, _changed_fields(config, run_dir))

        with JobDisplay() as display:

            def on_report(report: jobs.Report) -> bool:
                entry = started[report.job.run_dir]
                display.show(report, f"seed {entry.seed}")
                if report.kind in ("done", "failed"):
                    entry.state = report.kind
                    entry.error = report.values.get("error", "")
                    entry.result = {k: v for k, v in report.values.items() if k not in ("error", "logged")}
                    stored.write()
                return True

            stopped = jobs.run_jobs(next_job, on_report, num_jobs)
    finally:
        lock.release()
    if stopped is not None:
        left = _listed([entry.seed for entry in stored.with_state("waiting")])
        print(f"\nStopped; not finished: seeds {left}. Resume with: {_resume_command(stored)}")
        return 128 + stopped
    return _show_seeds(stored)


def _changed_fields(config: Mapping[str, Any], run_dir: Path) -> tuple[tuple[str, str], ...]:
    """Return what a seed that was begun must change to follow the configuration that all seeds have now."""
    if not (run_dir / "config.yaml").is_file():
        return ()
    own = run.resumed_config(run_dir).to_dict()
    return tuple(
        (f"{section}.{name}", as_text(value))
        for section, fields in config.items()
        if isinstance(fields, Mapping)
        for name, value in fields.items()
        if own.get(section, {}).get(name) != value
    )


def _show_seeds(stored: SeedRuns) -> int:
    """Print the table and the aggregate, and plot the curves."""
    for entry in stored.runs:
        if entry.state == "done":
            print(f"  seed {entry.seed:<6} {_result(entry.result)}")
        else:
            print(f"  seed {entry.seed:<6} failed: {entry.error}")
    done = stored.with_state("done")
    if not done:
        raise RunDirError(f"No seed in {stored.directory} was trained to its end; the messages above say why.")
    for name, found in stored.aggregate().items():
        scale, unit, label = (100.0, " %", "success") if name == "success_rate" else (1.0, "", name)
        interval = ""
        if found["interval"] is not None:
            low, high = (scale * bound for bound in found["interval"])
            interval = f" (95 % interval {low:.2f} to {high:.2f}{unit})"
        print(
            f"Interquartile mean of {label} over {plural(found['seeds'], 'seed')}: "
            f"{scale * found['iqm']:.2f}{unit}{interval}, mean {scale * found['mean']:.2f}{unit}"
        )
    print(f"Results: {stored.directory / seeds.FILE}")
    if stored.config["features"]["save_plot"]:
        show_curve(stored.directory)
    if failed := stored.with_state("failed"):
        print(f"{len(failed)} of {len(stored.runs)} failed. Try again with: {_resume_command(stored)}")
        return 1
    return 0


def _resume_command(stored: SeedRuns) -> str:
    return f"apexrl train --resume {stored.directory}{plugins.flag()}"


def show_curve(directory: Path) -> None:
    """Plot the learning curve of a run, or of the seeds in a directory."""
    try:
        print(f"Learning curve: {plots.plot_runs([directory], directory / 'curve.png', warn)}")
    except RunDirError as error:
        print(f"No learning curve: {error}")


def _result(record: Mapping[str, Any]) -> str:
    text = f"return {record['return']:.2f}"
    if interval := record.get("return_interval"):
        low, high = interval
        text += f" ({low:.2f} to {high:.2f})"
    if "success_rate" in record:
        text += f", success {100 * record['success_rate']:.1f} %"
    return f"{text}, over {record['episodes']} episodes"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


class JobDisplay(Progress):
    """Shows jobs that run at once: a bar each on a terminal, elsewhere a line every few seconds."""

    def __init__(self) -> None:
        console = Console()
        name, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
        columns = (name, BarColumn(bar_width=24), TaskProgressColumn(), status, TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.bars: dict[Path, TaskID] = {}
        self.last_line: dict[Path, float] = {}

    def show(self, report: jobs.Report, label: str) -> None:
        """Show a report of a job that is called ``label``."""
        key, values = report.job.run_dir, report.values
        if report.kind == "progress":
            status = _status(values)
            if key not in self.bars:
                self.bars[key] = self.add_task(label, total=1.0, status=status)
                self.last_line[key] = time.monotonic()
            self.update(self.bars[key], completed=values["done"], status=status)
            if not self.console.is_terminal and time.monotonic() - self.last_line[key] >= SECONDS_BETWEEN_LINES:
                self.last_line[key] = time.monotonic()
                self.line(f"{label}: {values['done']:.0%}  {status}")
        elif report.kind != "evaluation":
            if key in self.bars:
                self.remove_task(self.bars.pop(key))
            error = f": {values['error']}" if "error" in values else ""
            self.line(f"{label}: {_result(values) if report.kind == 'done' else report.kind + error}")

    def line(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _status(values: Mapping[str, Any]) -> str:
    shown = (
        ("total_steps", "steps", "{:,.0f}"),
        ("rollout/return", "return", "{:.1f}"),
        ("eval/return", "eval", "{:.1f}"),
        ("eval/success_rate", "eval success", "{:.0%}"),
    )
    return "  ".join(f"{label} {style.format(values[key])}" for key, label, style in shown if key in values)
