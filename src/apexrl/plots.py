"""Pictures of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apexrl.errors import ConfigError, RunDirError
from apexrl.loggers import read_json_lines

_PANELS = (
    ("return", "rollout/return", "return"),
    ("success rate", "rollout/success_rate", "success_rate"),
    ("episode length", "rollout/episode_len", "episode_len"),
)


def plot_runs(run_dirs: Sequence[Path], path: Path) -> Path:
    """Draw the learning curves of one or several runs: training as lines, evaluations as points with intervals."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--output {path} must end in .png, .pdf or .svg.")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = [(run.resolve().name, *_records(run)) for run in run_dirs]
    panels = [
        panel
        for panel in _PANELS
        if any(panel[1] in line for _, lines, _ in runs for line in lines)
        or any(panel[2] in record for _, _, records in runs for record in records)
    ]
    if not panels:
        raise RunDirError(f"Nothing to draw yet in {', '.join(map(str, run_dirs))}: no episode has ended.")
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
    for axis, (title, training_name, evaluation_name) in zip(axes[0], panels, strict=True):
        for index, (name, lines, records) in enumerate(runs):
            color = f"C{index}"
            points = [(line["total_steps"], line[training_name]) for line in lines if training_name in line]
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    color=color,
                    alpha=0.6,
                    linewidth=1.2,
                    label=f"{name}, training",
                )
            _draw_evaluations(axis, records, evaluation_name, color, f"{name}, evaluation")
        axis.set_title(title)
        axis.set_xlabel("environment steps")
        axis.grid(alpha=0.3)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        if title == "success rate":
            axis.set_ylim(-0.03, 1.03)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, dpi=130, format=path.suffix.lstrip("."))
    plt.close(figure)
    return temporary.replace(path)


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
    figure.tight_layout()
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, dpi=130, format=path.suffix.lstrip("."))
    plt.close(figure)
    return temporary.replace(path)


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
