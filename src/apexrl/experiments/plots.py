"""Images of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apexrl.core.errors import ConfigError, RunDirError
from apexrl.core.functional.intervals import iqm, iqm_interval
from apexrl.core.system import files
from apexrl.experiments import seeds
from apexrl.run.records import Estimate, Log, error_bars, read_log

_PANELS = (
    ("return", "rollout/return", "return"),
    ("success rate", "rollout/success_rate", "success_rate"),
    ("episode length", "rollout/episode_len", "episode_len"),
)
_LOGGED = ("total_steps", *(name for _, name, _ in _PANELS))


def plot_runs(run_dirs: Sequence[Path], path: Path, tell: Callable[[str], None]) -> Path:
    """Plot learning curves: of a run training as a line and evaluations as points with intervals; of several seeds
    their interquartile mean with its interval, and each seed faintly. ``tell`` gets a sentence about what is damaged.
    """
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--output {path} must end in .png, .pdf or .svg.")
    runs = [_Run(run, tell) for run in run_dirs]
    panels = [panel for panel in _PANELS if any(run.has(panel) for run in runs)]
    if not panels:
        raise RunDirError(f"Nothing to plot yet in {', '.join(map(str, run_dirs))}: no episode has ended.")
    figure, axes = _subplots(1, len(panels), (4.6 * len(panels), 3.6))
    for axis, panel in zip(axes[0], panels, strict=True):
        for index, run in enumerate(runs):
            run.draw(axis, panel, f"C{index}")
        axis.set_title(panel[0])
        axis.set_xlabel("environment steps")
        axis.grid(alpha=0.3)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        if panel[0] == "success rate":
            axis.set_ylim(-0.03, 1.03)
    if axes[0][0].get_legend_handles_labels()[0]:
        axes[0][0].legend(fontsize=7)
    return _save(figure, path)


class _Run:
    """A run, or runs that differ in their seed, to plot."""

    def __init__(self, directory: Path, tell: Callable[[str], None]) -> None:
        self.name = directory.resolve().name
        self.is_seeds = (directory / seeds.FILE).is_file()
        directories = [directory]
        if self.is_seeds:
            stored = seeds.read(directory)
            directories = [stored.run_dir(run) for run in stored.runs if run.state != "failed"]
            directories = [entry for entry in directories if entry.is_dir()]
        self.logs = [_read_log(entry, tell) for entry in directories]

    def has(self, panel: tuple[str, str, str]) -> bool:
        """Whether it has anything for a panel."""
        _, training_name, evaluation_name = panel
        return any(log.trained(training_name) or log.evaluated(evaluation_name) for log in self.logs)

    def draw(self, axis: Any, panel: tuple[str, str, str], color: str) -> None:
        """Plot it in one colour."""
        _, training_name, evaluation_name = panel
        if self.is_seeds:
            steps, values = seeds.curve(self.logs, training_name, evaluation_name)
            if len(steps):
                low, high = iqm_interval(values[:, None])
                axis.plot(steps, values.T, color=color, alpha=0.25, linewidth=0.8)
                axis.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
                label = f"{self.name}, interquartile mean of {len(values)} seeds, 95 % interval"
                axis.plot(steps, iqm(values), color=color, linewidth=1.8, label=label)
            return
        for log in self.logs:
            if points := log.trained(training_name):
                label = f"{self.name}, training"
                axis.plot(list(points), list(points.values()), color=color, alpha=0.6, linewidth=1.2, label=label)
            if estimates := log.evaluated(evaluation_name):
                places, means = list(estimates), [entry.mean for entry in estimates.values()]
                bars, label = error_bars(estimates.values()), f"{self.name}, evaluation"
                axis.errorbar(places, means, yerr=bars, color=color, marker="o", markersize=4, capsize=2, label=label)


def plot_tasks(tasks: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Plot the success rate of each task with its interval, as bars."""
    rates = [Estimate(*(100 * rate for rate in (task["success_rate"], *task["interval"]))) for task in tasks.values()]
    means, bars = [rate.mean for rate in rates], error_bars(rates)
    figure, ((axis,),) = _subplots(1, 1, (6.5, 1.2 + 0.34 * len(tasks)))
    axis.barh(list(tasks), means, xerr=bars, color="C0", alpha=0.8, error_kw={"capsize": 2, "elinewidth": 1})
    axis.invert_yaxis()
    axis.set(xlim=(0, 101), xlabel="success, % (95 % interval)")
    axis.grid(axis="x", alpha=0.3)
    return _save(figure, path)


def plot_sweep(
    trials: Sequence[Mapping[str, Any]], objective: str, importance: Mapping[str, float], path: Path
) -> Path:
    """Plot what the trials of ``sweep.json`` gave: one after another, against each parameter, and what mattered."""
    known = [trial for trial in trials if trial["value"] is not None]
    names = list(dict.fromkeys(name for trial in known for name in trial["params"]))
    count = 1 + len(names) + bool(importance)
    columns = min(3, count)
    rows = -(-count // columns)
    figure, grid = _subplots(rows, columns, (4.6 * columns, 3.4 * rows))
    axes = list(grid.flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    for state, color, marker in (("complete", "C0", "o"), ("pruned", "C1", "x")):
        chosen = [trial for trial in known if trial["state"] == state]
        values = [trial["value"] for trial in chosen]
        axes[0].scatter([trial["number"] for trial in chosen], values, color=color, marker=marker, label=state)
        for axis, name in zip(axes[1:], names, strict=False):
            axis.scatter([_coordinate(trial["params"][name]) for trial in chosen], values, color=color, marker=marker)
    best = [trial for trial in trials if trial["best"] is not None]
    axes[0].step([t["number"] for t in best], [t["best"] for t in best], where="post", color="C2", label="best so far")
    axes[0].set(title="history", xlabel="trial", ylabel=objective)
    axes[0].legend(fontsize=7)
    for axis, name in zip(axes[1:], names, strict=False):
        numbers = [trial["params"][name] for trial in known]
        if all(isinstance(x, int | float) and x > 0 for x in numbers) and max(numbers) > 20 * min(numbers):
            axis.set_xscale("log")
        axis.set(title=name, ylabel=objective)
    if importance:
        axes[count - 1].barh(list(importance), list(importance.values()), color="C0", alpha=0.8)
        axes[count - 1].invert_yaxis()
        axes[count - 1].set(title="importance", xlim=(0, 1))
    for axis in axes[:count]:
        axis.grid(alpha=0.3)
    return _save(figure, path)


def _coordinate(value: Any) -> Any:
    """Return a place on an axis: numbers as they are, anything else as text."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _subplots(rows: int, columns: int, figsize: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # pyplot, which knows screens, takes twice as long to import

    figure = Figure(figsize=figsize)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    with files.replacing(path) as file:
        figure.savefig(file, dpi=130, format=path.suffix.lstrip("."))
    return path


def _read_log(run: Path, tell: Callable[[str], None]) -> Log:
    if not any((run / name).is_file() for name in ("metrics.jsonl", "config.yaml")):
        raise RunDirError(f"{run} is not a run directory: it has neither config.yaml nor metrics.jsonl.")
    notes: list[str] = []
    log = read_log(run, notes, _LOGGED)
    for note in notes:
        tell(note)
    return log
