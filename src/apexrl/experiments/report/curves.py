"""Curves over several seeds: thinned out, and summed up as a mean with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from apexrl.core.functional.intervals import mean_interval, wilson_interval
from apexrl.experiments.report.runs import Group, Run, last
from apexrl.run.records import LARGEST, Estimate, is_rate

FloatArray = NDArray[np.float64]
Points = tuple[FloatArray, FloatArray]
"""Places on the axis and values, both ``[P]``."""
Axis = Literal["total_steps", "iteration"]


@dataclass(frozen=True)
class Curve:
    """A quantity over environment steps or iterations."""

    runs: list[Points]
    """Of every run that knows it."""
    mean: Points
    """Over the runs, as far as all of them go."""
    interval: tuple[FloatArray, FloatArray] | None
    """Lower and upper bound of the mean; None for one run."""


def common_axis(runs: Sequence[Run]) -> Axis:
    """Return what runs are plotted over: steps, or iterations where all of them learn without an environment."""
    return "total_steps" if any(run.steps for run in runs) else "iteration"


def training_curve(group: Group, name: str, axis: Axis, most: int) -> Curve:
    """Return what ``metrics.jsonl`` has under a name, at most so many points of every run."""
    found = [_logged(run, name, axis) for run in group.runs]
    return summarize([thin(points, most) for points in found if len(points[0])], is_rate(name))


def _logged(run: Run, name: str, axis: Axis) -> Points:
    """Return what a run has logged under a name; nothing where the run does not move along the axis."""
    points = run.trained(name, axis) if last(run.columns.get(axis)) else {}
    return np.array(list(points)), np.array(list(points.values()))


def evaluation_curve(group: Group, name: str, axis: Axis) -> Curve:
    """Return the evaluations of an episode field; for one run with the intervals that were recorded."""
    found = [entries for run in group.runs if (entries := run.evaluated(name, axis))]
    means = [np.array([entry.mean for entry in entries.values()]) for entries in found]
    points = [(np.array(list(entries), float), mean) for entries, mean in zip(found, means, strict=True)]
    curve = summarize(points, is_rate(name))
    if len(found) != 1:
        return curve
    low, high = np.array([(entry.low, entry.high) for entry in found[0].values()]).T
    return replace(curve, interval=(low, high))


def thin(points: Points, most: int) -> Points:
    """Replace stretches of neighbouring points by their means, so that at most ``most`` are left."""
    places, values = points
    if len(places) <= most:
        return points
    starts = np.linspace(0, len(places), most + 1).astype(int)
    sizes = np.diff(starts)
    return np.add.reduceat(places, starts[:-1]) / sizes, np.add.reduceat(values, starts[:-1]) / sizes


def summarize(runs: Sequence[Points], is_rate: bool = False) -> Curve:
    """Return the mean over runs and the interval of it, where every run has values; of a rate within 0 and 1."""
    if not runs:
        return Curve([], (np.empty(0), np.empty(0)), None)
    if len(runs) == 1:
        return Curve(list(runs), runs[0], None)
    begin, end = max(places[0] for places, _ in runs), min(places[-1] for places, _ in runs)
    if begin > end:
        return Curve(list(runs), (np.empty(0), np.empty(0)), (np.empty(0), np.empty(0)))
    longest = max((places for places, _ in runs), key=len)
    grid = np.unique(np.clip(longest, begin, end))
    table = np.stack([np.interp(grid, places, values) for places, values in runs])
    low, high = mean_interval(table)
    interval = (np.maximum(low, 0.0), np.minimum(high, 1.0)) if is_rate else (low, high)
    return Curve(list(runs), (grid, table.mean(0)), interval)


def final_estimate(group: Group, name: str) -> Estimate | None:
    """Sum up the last evaluation of every run.

    One run gives the interval that its evaluation recorded, which covers the draw of episodes; several give the
    Student's t interval over the runs, which covers the draw of seeds.
    """
    finals = [run.evaluations[-1] for run in group.runs if run.evaluations and name in run.evaluations[-1].fields]
    known = [found.fields[name] for found in finals]
    if len(known) < 2:
        return known[0] if known else None
    means = np.array([entry.mean for entry in known])
    trials = max(1, sum(found.episodes for found in finals)) if is_rate(name) else None
    low, high = mean_interval(means, trials=trials)
    return Estimate(float(means.mean()), float(low), float(high))


def task_estimates(group: Group) -> dict[str, tuple[Estimate, int]]:
    """Return the success of each task of a suite in the last evaluations, over the episodes of all runs.

    Returns task -> success rate with Wilson's interval, and the number of episodes.
    """
    counts: dict[str, tuple[int, int]] = {}
    for run in group.runs:
        for task, (successes, episodes) in (run.evaluations[-1].tasks if run.evaluations else {}).items():
            before = counts.get(task, (0, 0))
            counts[task] = before[0] + successes, before[1] + episodes
    return {
        task: (Estimate(successes / episodes, *wilson_interval(successes, episodes)), episodes)
        for task, (successes, episodes) in counts.items()
        if episodes
    }


@dataclass(frozen=True)
class Time:
    """Where the time of a run went, as far as its log says: rollouts and updates."""

    seconds: float | None
    """Of both; None where no environment was stepped."""
    steps_per_second: float | None
    rollout_share: float


def time_spent(run: Run) -> Time | None:
    """Add up the times of the logged iterations, each for the steps since the one before; None without any."""
    share = run.columns.get("time/rollout_share")
    if share is None or np.isnan(share).all():
        return None
    steps, rate = (run.columns.get(name, np.full_like(share, np.nan)) for name in ("total_steps", "time/fps"))
    known = ~np.isnan(share) & ~np.isnan(steps) & (rate > 1 / LARGEST)
    if not known.any():
        return Time(None, None, float(np.nanmean(share)))
    done = np.diff(steps[known], prepend=0.0)
    seconds = done / rate[known]
    total = float(seconds.sum())
    if not 0 < total < LARGEST:
        return Time(None, None, float(np.nanmean(share)))
    return Time(total, float(done.sum() / total), float((seconds * share[known]).sum() / total))
