"""The plots of a report, as plotly.js takes them. The page gives them colours, by theme and by group.

``meta`` of a trace says whose it is (``group``) and what it shows (``role``). Texts from run directories are escaped,
because plotly.js reads some HTML in them.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from apexrl.experiments.report.curves import (
    Axis,
    Curve,
    FloatArray,
    evaluation_curve,
    task_estimates,
    time_spent,
    training_curve,
)
from apexrl.experiments.report.runs import Group, Run
from apexrl.run.records import error_bars, is_rate

Figure = dict[str, Any]
MAIN = {"return": "Return", "success_rate": "Success rate", "episode_len": "Episode length"}
"""Episode field -> title of its panel, which every report shows first."""
ALIASES = ("rollout/success_once", "rollout/fail_once", "episode/mean_reward", "episode/mean_length")
"""Second names of numbers that are plotted already."""
_OTHERS = ("iteration", "total_steps", "eval/", "eval_reward/")
"""What is no curve of training; evaluations come from their own file, with intervals."""
MAX_POINTS, FEWER_POINTS = 400, 150
"""Of one run in a main panel, and in the others."""
_AXES: dict[Axis, str] = {"total_steps": "environment steps", "iteration": "iterations"}


def main_panels(groups: Sequence[Group], axis: Axis) -> dict[str, Figure]:
    """Return title -> plot of return, success and length, as far as they are known."""
    names = {f"rollout/{field}": title for field, title in MAIN.items()}
    figures = {title: curves(groups, name, axis, MAX_POINTS) for name, title in names.items()}
    return {title: figure for title, figure in figures.items() if figure["data"]}


def more_panels(groups: Sequence[Group], axis: Axis) -> dict[str, dict[str, Figure]]:
    """Return prefix -> name -> plot of everything else that was logged."""
    shown = {f"rollout/{field}" for field in MAIN} | set(ALIASES)
    every = dict.fromkeys(name for group in groups for run in group.runs for name in run.columns)
    panels: dict[str, dict[str, Figure]] = {}
    for name in every:
        if name not in shown and not name.startswith(_OTHERS):
            panels.setdefault(name.partition("/")[0], {})[name] = curves(groups, name, axis, FEWER_POINTS)
    return dict(sorted(panels.items()))


def curves(groups: Sequence[Group], name: str, axis: Axis, most: int) -> Figure:
    """Plot training as lines and evaluations of the same field as points: mean and interval, and every run."""
    field = name.partition("/")[2]
    data: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        lines = training_curve(group, name, axis, most)
        if len(lines.runs) > 1:
            data += [_band(lines, index)]
            data += [_line(*points, index, "run") for points in lines.runs] if most == MAX_POINTS else []
        if lines.runs:
            data.append({**_line(*lines.mean, index, "mean"), **_hover(group.name, lines, name)})
        points = evaluation_curve(group, field, axis)
        if points.runs:
            data.append({**_points(points, index), **_hover(f"{group.name}, evaluation", points, name)})
    yaxis = {"tickformat": ".0%", "range": [-0.04, 1.04]} if is_rate(name) else {}
    xaxis = {"title": {"text": _AXES[axis]}, "tickformat": "~s", "hoverformat": ","}
    layout = {"xaxis": xaxis, "yaxis": yaxis, "hovermode": "x unified"}
    return {"data": data, "layout": layout}


def tasks(groups: Sequence[Group]) -> Figure | None:
    """Plot the success of each task of a suite as bars with intervals; None where no run has any."""
    found = [task_estimates(group) for group in groups]
    names = list(dict.fromkeys(name for estimates in found for name in estimates))
    if not names:
        return None
    data = []
    for index, (group, estimates) in enumerate(zip(groups, found, strict=True)):
        known = [name for name in names if name in estimates]
        if not known:
            continue
        rates = [estimates[name][0] for name in known]
        data.append({
            "type": "bar", "orientation": "h", "meta": {"group": index, "role": "bar"}, "name": escape(group.name),
            "y": [escape(name) for name in known],
            "x": _six_digits(rate.mean for rate in rates),
            "error_x": _error_bars(*error_bars(rates)),
            "customdata": [[*_six_digits((estimates[n][0].low, estimates[n][0].high)), estimates[n][1]] for n in known],
            "hovertemplate": "%{y}: %{x:.1%} [%{customdata[0]:.1%}, %{customdata[1]:.1%}], %{customdata[2]} episodes",
        })  # fmt: skip
    height = 90 + len(names) * (14 + 16 * len(data))
    layout = {
        "xaxis": {"range": [0, 1.02], "tickformat": ".0%", "title": {"text": "success, 95 % interval"}},
        "yaxis": {"autorange": "reversed", "automargin": True, "categoryarray": [escape(name) for name in names]},
        "barmode": "group",
        "height": height,
    }
    return {"data": data, "layout": layout}


def mastery(run: Run, group: int) -> Figure:
    """Plot the success from every init state: one row per task, its states from the best to the worst."""
    rows: dict[str, list[tuple[float, list[Any]]]] = {}
    for state, entry in run.init_states.items():
        outcomes = entry["outcomes"]
        if outcomes:
            detail = [state[:8], sum(outcomes), len(outcomes), entry["skips"]]
            rows.setdefault(entry["task"], []).append((sum(outcomes) / len(outcomes), detail))
    names = sorted(rows)
    width = max(map(len, rows.values()), default=0)
    for cells in rows.values():
        cells.sort(key=lambda cell: (-cell[0], cell[1]))
    data = {
        "type": "heatmap", "meta": {"group": group, "role": "heat"}, "x0": 1, "ygap": 2, "zmin": 0, "zmax": 1,
        "y": [escape(name) for name in names],
        "z": [[*_six_digits(rate for rate, _ in rows[name]), *[None] * (width - len(rows[name]))] for name in names],
        "customdata": [
            [detail for _, detail in rows[name]] + [["", 0, 0, 0]] * (width - len(rows[name])) for name in names
        ],
        "hovertemplate": "%{y}, state %{customdata[0]}: %{customdata[1]} of %{customdata[2]} succeeded, "
        "left out %{customdata[3]} times since<extra></extra>",
        "hoverongaps": False,
        "colorbar": {
            "orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "ypad": 4, "outlinewidth": 0,
            "len": 160, "lenmode": "pixels", "thickness": 8, "tickformat": ".0%", "nticks": 3,
        },
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "init states, best first"}, "showgrid": False, "zeroline": False},
        "yaxis": {"autorange": "reversed", "automargin": True, "showgrid": False},
        "height": 130 + 30 * len(names),
    }
    return {"data": [data], "layout": layout}


def time_shares(groups: Sequence[Group]) -> Figure | None:
    """Plot which share of the time went into rollouts and which into updates; None where nothing says it."""
    shares: dict[str, float] = {}
    for group in groups:
        known = [spent.rollout_share for run in group.runs if (spent := time_spent(run)) is not None]
        if known:
            shares[escape(group.name)] = float(np.mean(known))
    if not shares:
        return None
    parts = {"rollouts": list(shares.values()), "updates": [1 - share for share in shares.values()]}
    data = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": list(shares), "x": _six_digits(values),
            "meta": {"role": f"part{index}"}, "text": [f"{name} {value:.0%}" for value in values],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
            "hovertemplate": "%{x:.1%}",
        }
        for index, (name, values) in enumerate(parts.items())
    ]  # fmt: skip
    layout = {
        "barmode": "stack",
        "uniformtext": {"mode": "hide", "minsize": 11},
        "xaxis": {"range": [0, 1.01], "tickformat": ".0%", "dtick": 0.25, "showgrid": False},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "height": 70 + 44 * len(shares),
    }
    return {"data": data, "layout": layout}


def escape(text: str) -> str:
    """Make a text that plotly.js shows as it is."""
    return html.escape(text, quote=False)


def _line(places: FloatArray, values: FloatArray, group: int, role: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines" if len(places) > 1 else "markers",
        "x": _six_digits(places),
        "y": _six_digits(values),
        "meta": {"group": group, "role": role},
        "hoverinfo": "skip",
    }


def _band(curve: Curve, group: int) -> dict[str, Any]:
    """A closed line around the interval: forth along the upper bound, back along the lower."""
    assert curve.interval is not None
    places, (low, high) = curve.mean[0], curve.interval
    band = _line(np.concatenate([places, places[::-1]]), np.concatenate([high, low[::-1]]), group, "band")
    return {**band, "mode": "lines", "fill": "toself", "line": {"width": 0}}


def _points(curve: Curve, group: int) -> dict[str, Any]:
    points = {**_line(*curve.mean, group, "evaluation"), "mode": "markers"}
    if curve.interval is not None:
        (low, high), mean = curve.interval, curve.mean[1]
        points["error_y"] = _error_bars(np.maximum(mean - low, 0.0), np.maximum(high - mean, 0.0))
    return points


def _error_bars(below: Iterable[float], above: Iterable[float]) -> dict[str, Any]:
    return {"type": "data", "symmetric": False, "array": _six_digits(above), "arrayminus": _six_digits(below)}


def _hover(label: str, curve: Curve, name: str) -> dict[str, Any]:
    form = ".1%" if is_rate(name) else ".4~g"
    text: dict[str, Any] = {"name": escape(label), "hoverinfo": "all", "hovertemplate": f"%{{y:{form}}}"}
    if curve.interval is not None:
        low, high = (_six_digits(bound) for bound in curve.interval)
        text["customdata"] = list(map(list, zip(low, high, strict=True)))
        text["hovertemplate"] += f" [%{{customdata[0]:{form}}}, %{{customdata[1]:{form}}}]"
    return text


def _six_digits(values: Iterable[float]) -> list[float]:
    """Six digits are more than a plot shows, and keep the page small."""
    return [float(f"{value:.6g}") for value in values]
