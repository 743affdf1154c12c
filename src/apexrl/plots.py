"""Pictures of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apexrl import files, seeds
from apexrl.errors import ConfigError, RunDirError
from apexrl.loggers import read_json_lines

_PANELS = (
    ("return", "rollout/return", "return"),
    ("success rate", "rollout/success_rate", "success_rate"),
    ("episode length", "rollout/episode_len", "episode_len"),
)


def plot_runs(run_dirs: Sequence[Path], path: Path) -> Path:
    """Draw learning curves: of a run training as a line and evaluations as points with intervals; of several seeds
    their interquartile mean with its interval, and each seed faintly."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--output {path} must end in .png, .pdf or .svg.")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = [_Run(run) for run in run_dirs]
    panels = [panel for panel in _PANELS if any(run.has(panel) for run in runs)]
    if not panels:
        raise RunDirError(f"Nothing to draw yet in {', '.join(map(str, run_dirs))}: no episode has ended.")
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
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
    """A run, or runs that differ in their seed, to draw."""

    def __init__(self, directory: Path) -> None:
        self.name = directory.resolve().name
        self.directories = [directory]
        self.is_seeds = (directory / seeds.FILE).is_file()
        if self.is_seeds:
            stored = seeds.read(directory)
            self.directories = [stored.run_dir(run) for run in stored.runs if run.state != "failed"]
        self.records = [_records(entry) for entry in self.directories if not self.is_seeds or entry.is_dir()]
        self.directories = [entry for entry in self.directories if entry.is_dir()]

    def has(self, panel: tuple[str, str, str]) -> bool:
        """Whether it has anything for a panel."""
        _, training_name, evaluation_name = panel
        return any(
            any(training_name in line for line in lines) or any(evaluation_name in record for record in records)
            for lines, records in self.records
        )

    def draw(self, axis: Any, panel: tuple[str, str, str], color: str) -> None:
        """Draw it in one colour."""
        _, training_name, evaluation_name = panel
        if self.is_seeds:
            steps, values = seeds.curve(self.directories, training_name, evaluation_name)
            if len(steps):
                low, high = seeds.iqm_interval([values], axis=0)
                axis.plot(steps, values.T, color=color, alpha=0.25, linewidth=0.8)
                axis.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
                label = f"{self.name}, interquartile mean of {len(values)} seeds, 95 % interval"
                axis.plot(steps, seeds.iqm(values, axis=0), color=color, linewidth=1.8, label=label)
            return
        for lines, records in self.records:
            points = [(line["total_steps"], line[training_name]) for line in lines if training_name in line]
            if points:
                axis.plot(
                    *zip(*points, strict=True), color=color, alpha=0.6, linewidth=1.2, label=f"{self.name}, training"
                )
            _draw_evaluations(axis, records, evaluation_name, color, f"{self.name}, evaluation")


def plot_tasks(tasks: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Draw the success rate of each task with its interval, as bars."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(tasks)
    rates = [100 * tasks[name]["success_rate"] for name in names]
    bounds = [[100 * bound for bound in tasks[name]["interval"]] for name in names]
    below = [max(0.0, rate - low) for rate, (low, _) in zip(rates, bounds, strict=True)]
    above = [max(0.0, high - rate) for rate, (_, high) in zip(rates, bounds, strict=True)]
    figure, axis = plt.subplots(figsize=(6.5, 1.2 + 0.34 * len(names)))
    axis.barh(names, rates, xerr=[below, above], color="C0", alpha=0.8, error_kw={"capsize": 2, "elinewidth": 1})
    axis.invert_yaxis()
    axis.set(xlim=(0, 101), xlabel="success, % (95 % interval)")
    axis.grid(axis="x", alpha=0.3)
    return _save(figure, path)


def plot_sweep(
    trials: Sequence[Mapping[str, Any]], objective: str, importance: Mapping[str, float], path: Path
) -> Path:
    """Draw what the trials of a sweep gave: one after another, against each parameter, and what mattered.

    Args:
        trials: ``number``, ``state``, ``value`` (None where there is none), ``best`` so far, and ``params``.
        objective: what the values are.
        importance: share of each parameter; may be empty.
        path: of the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    known = [trial for trial in trials if trial["value"] is not None]
    names = list(dict.fromkeys(name for trial in known for name in trial["params"]))
    count = 1 + len(names) + bool(importance)
    columns = min(3, count)
    rows = -(-count // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.4 * rows), squeeze=False)
    axes = list(grid.flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    groups = [("complete", "C0", "o"), ("pruned", "C1", "x")]
    for state, color, marker in groups:
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


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    with files.replacing(path) as file:
        figure.savefig(file, dpi=130, format=path.suffix.lstrip("."))
    plt.close(figure)
    return path


def _records(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not any((run / name).is_file() for name in ("metrics.jsonl", "config.yaml")):
        raise RunDirError(f"{run} is not a run directory: it has neither config.yaml nor metrics.jsonl.")
    return read_json_lines(run / "metrics.jsonl"), read_json_lines(run / "evaluations.jsonl")


def _draw_evaluations(axis: Any, records: list[dict[str, Any]], name: str, color: str, label: str) -> None:
    known = [record for record in records if name in record and f"{name}_interval" in record]
    if not known:
        return
    means = [record[name] for record in known]
    intervals = [record[f"{name}_interval"] for record in known]
    below = [max(0.0, mean - low) for mean, (low, _) in zip(means, intervals, strict=True)]
    above = [max(0.0, high - mean) for mean, (_, high) in zip(means, intervals, strict=True)]
    steps = [record["step"] for record in known]
    axis.errorbar(steps, means, yerr=[below, above], color=color, marker="o", markersize=4, capsize=2, label=label)
