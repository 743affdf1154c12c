"""The page: what its template shows, and the one file that comes of it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import shlex
import time
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from apexrl.core.errors import ConfigError, plural
from apexrl.core.functional.intervals import FEWEST
from apexrl.core.system.files import replace_text
from apexrl.core.system.provenance import provenance
from apexrl.experiments.report import figures
from apexrl.experiments.report.curves import Time, common_axis, final_estimate, time_spent
from apexrl.experiments.report.runs import Group, Run, find_runs, group_runs, read_run

MAX_VIDEO_BYTES = 20 * 2**20
"""A larger file is named instead of shown."""
PLOT_HEIGHT = 290
"""Of a plot that does not say how high it is, in pixels."""
NUM_COLORS = 8
_NO_FIELD = object()
DASHES = ("none", "7 3", "2 2.5", "9 3 2 3")
PAGE_FIELDS = {
    "success_once": ("Success", "rate"),
    "success_at_end": ("Success at the end", "rate"),
    "return": ("Return", "number"),
    "episode_len": ("Episode length", "number"),
}
"""Episode field -> its column in the table of results, and how it is shown."""


def write_report(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one HTML page about runs, or directories of runs, with everything in it; ``path`` ends in ``.html``."""
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output {path} must end in .html.")
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError("apexrl report needs plotly: pip install 'apexrl[report]'.") from error
    groups = group_runs([read_run(run) for run in find_runs(run_dirs)])
    text = _render(groups, get_plotlyjs(), shlex.join(["apexrl", "report", *map(str, run_dirs), "--output", str(path)]))
    # Half a character, as a damaged name may hold, cannot be written.
    return replace_text(path, text.encode("utf-8", "replace").decode("utf-8"))


def _render(groups: Sequence[Group], plotly: str, command: str) -> str:
    from jinja2 import Environment, StrictUndefined

    files = resources.files("apexrl.experiments.report")
    template, css, js = ((files / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["number"] = show
    return environment.from_string(template).render(
        **_content(groups),
        css=css,
        js=js,
        plotly=base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode(),
        # Whatever a name smuggles into the page: only these two scripts run, and nothing is fetched.
        policy=f"default-src 'none'; script-src {_digest(js)} {_digest(plotly)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; media-src data:",
        command=command,
        version=metadata.version("apexrl"),
        date=time.strftime("%Y-%m-%d %H:%M"),
    )


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _content(groups: Sequence[Group]) -> dict[str, Any]:
    """Return what the template shows about the runs; ``members`` are runs with the number of their group."""
    members = [(index, run) for index, group in enumerate(groups) for run in group.runs]
    runs = [run for _, run in members]
    axis = common_axis(runs)
    shown: dict[str, figures.Figure] = {}

    def plot(title: str, figure: figures.Figure, **more: Any) -> dict[str, Any]:
        """Keep a plot and return what the template needs to place it."""
        name = f"plot{len(shown)}"
        shown[name] = figure
        return {"id": name, "title": title, "height": figure["layout"].get("height", PLOT_HEIGHT), **more}

    names = ", ".join(group.name for group in groups)
    tasks, spent = figures.tasks(groups), figures.time_shares(groups)
    is_suite = any("task.benchmark_name" in group.config for group in groups) or tasks is not None
    has_states = any(run.config.get("algo.name") == "rloo" or run.init_states for run in runs)
    finals = [run.evaluations[-1] for run in runs if run.evaluations]
    fields = [name for name in PAGE_FIELDS if any(name in final.fields for final in finals)]
    few_seeds = [
        (group.name, f"The intervals of {len(group.runs)} seeds are unreliable: use at least {FEWEST} seeds.")
        for group in groups
        if 1 < len(group.runs) < FEWEST
    ]
    entries = [_group_entry(group, index, fields) for index, group in enumerate(groups)]
    return {
        "title": names if len(names) <= 60 else plural(len(groups), "configuration"),
        "lead": _lead(groups),
        "groups": entries,
        "fields": [{"name": name, "title": PAGE_FIELDS[name][0], "form": PAGE_FIELDS[name][1]} for name in fields],
        "pinned": [(index, result) for index, run in members for result in run.pinned],
        "notes": [*few_seeds, *((str(run.path), note) for run in runs for note in run.notes)],
        "panels": [plot(title, figure) for title, figure in figures.main_panels(groups, axis).items()],
        "more": [
            (prefix, [plot(name, figure) for name, figure in panels.items()])
            for prefix, panels in figures.more_panels(groups, axis).items()
        ],
        "tasks": (plot("Success of each task", tasks) if tasks else False) if is_suite else None,
        "maps": [
            plot(str(run.path), figures.mastery(run, index), text=_mastered(run), group=index)
            for index, run in members
            if any(entry["outcomes"] for entry in run.init_states.values())
        ]
        if has_states
        else None,
        "videos": [_video(run, file, index) for index, run in members for file in run.videos],
        "time": plot("Shares of rollouts and updates in the time", spent) if spent else None,
        "times": [_time_row(run, index) for index, run in members],
        "differences": differences(groups),
        "starts": [(index, run.path, begun) for index, run in members for begun in run.starts],
        "versions": _versions(runs),
        "data": {"groups": [{"color": entry["color"], "dash": entry["dash"]} for entry in entries], "figures": shown},
    }


def differences(groups: Sequence[Group]) -> list[tuple[str, list[str | None]]]:
    """Return the fields in which configurations differ, with the value of each; None where it has no such field."""
    table = []
    for name in dict.fromkeys(name for group in groups for name in group.config):
        values = [group.config.get(name, _NO_FIELD) for group in groups]
        table.append(
            (name, [None if value is _NO_FIELD else "null" if value is None else str(value) for value in values])
        )
    return [(name, texts) for name, texts in table if len(set(texts)) > 1]


def show(value: float, form: str) -> str:
    """Write a number for people."""
    if form in ("rate", "percent"):
        return f"{100 * value:.1f}{' %' if form == 'rate' else ''}"
    return (f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}").replace("-", "−")


def duration(seconds: float | None) -> str:
    """Write a time for people."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{minutes} min" if minutes < 120 else f"{hours:.1f} h"


def _lead(groups: Sequence[Group]) -> str:
    num_runs = sum(len(group.runs) for group in groups)
    several = f" of {plural(len(groups), 'configuration')}" if num_runs > 1 else ""
    return f"{plural(num_runs, 'run')}{several} on {', '.join(dict.fromkeys(map(_task, groups)))}."


def _task(group: Group) -> str:
    return str(group.config.get("task.benchmark_name") or group.config.get("task.id") or "an unknown task")


def _group_entry(group: Group, index: int, fields: Sequence[str]) -> dict[str, Any]:
    return {
        **_row(group, fields),
        "color": index % NUM_COLORS,
        "dash": DASHES[index % len(DASHES)],
        "task": _task(group),
        "algo": str(group.config.get("algo.name", "")),
        "runs": [
            _row(Group(run.name if run.seed is None else f"seed {run.seed}", [run]), fields) for run in group.runs
        ],
        "config": group.runs[0].config_text if group.runs[0].config else "",
        "commands": "\n".join(_commands(group)),
    }


def _row(group: Group, fields: Sequence[str]) -> dict[str, Any]:
    """Return a row of the table of results: of a configuration, or of one of its runs."""
    times = [spent.seconds for run in group.runs if (spent := time_spent(run)) and spent.seconds is not None]
    return {
        "name": group.name,
        "steps": _amount([run.steps for run in group.runs]),
        "episodes": _amount([run.evaluations[-1].episodes for run in group.runs if run.evaluations]),
        "time": duration(sum(times) / len(times) if times else None),
        "estimates": {name: final_estimate(group, name) for name in fields},
    }


def _amount(numbers: Sequence[int]) -> str:
    """Write a number that several runs share, or from where to where it goes."""
    if not numbers:
        return "–"
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _commands(group: Group) -> list[str]:
    """Return the lines that train, evaluate and show its runs again."""
    if not group.config:
        return ["# It has no readable config.yaml."]
    in_python = "algorithm.class" in group.config
    train = [["apexrl", "train", f"{run.path}/config.yaml", "--run-dir", f"{run.path}-again"] for run in group.runs]
    train = [] if in_python else train
    episodes = [run.evaluations[-1].episodes if run.evaluations else 100 for run in group.runs]
    test = [
        ["apexrl", "eval", f"{run.path}", "--episodes", str(n)] for run, n in zip(group.runs, episodes, strict=True)
    ]
    pinned = [result.command for run in group.runs for result in run.pinned if result.command]
    play = ["apexrl", "play", f"{group.runs[0].path}"]
    return [*map(shlex.join, [*train, *test]), *pinned, shlex.join(play)]


def _mastered(run: Run) -> str:
    """Say how many init states there are, and of how many the last rollouts all succeeded."""
    outcomes = [entry["outcomes"] for entry in run.init_states.values() if entry["outcomes"]]
    text, needed = plural(len(outcomes), "state"), run.config.get("algo.rloo_batch_size")
    if not isinstance(needed, int):
        return text
    mastered = sum(len(last) >= needed and all(last[-needed:]) for last in outcomes)
    return f"{mastered} of {text} mastered (the last {needed} rollouts succeeded)"


def _video(run: Run, file: Path, group: int) -> dict[str, Any]:
    """Return a video as text, or a sentence about it."""
    entry = {"title": f"{run.path}/{file.name}", "group": group, "source": "", "note": ""}
    try:
        size = file.stat().st_size
        if not size:
            return {**entry, "note": "Not shown: it is empty."}
        if size > MAX_VIDEO_BYTES:
            return {**entry, "note": f"Not shown: the file has {size / 2**20:.0f} MB."}
        return {**entry, "source": f"data:video/mp4;base64,{base64.b64encode(file.read_bytes()).decode()}"}
    except OSError as error:
        return {**entry, "note": f"Not shown: {error.strerror}."}


def _time_row(run: Run, group: int) -> dict[str, Any]:
    spent = time_spent(run) or Time(None, None, 0.0)
    total = spent.seconds
    return {
        "group": group,
        "name": str(run.path),
        "rollouts": duration(None if total is None else total * spent.rollout_share),
        "updates": duration(None if total is None else total * (1 - spent.rollout_share)),
        "total": duration(total),
        "rate": "–" if spent.steps_per_second is None else f"{spent.steps_per_second:,.0f}",
    }


def _versions(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return what the runs recorded, and what made this page."""
    texts = {str(run.path): ", ".join(f"{name} {value}" for name, value in run.recorded.items()) for run in runs}
    rows = (
        [(name, text or "nothing") for name, text in texts.items()]
        if any(texts.values())
        else [("the runs", "nothing")]
    )
    here = provenance()
    versions = {**here["versions"], "plotly": metadata.version("plotly"), "platform": here["platform"]}
    return [*rows, ("this page", ", ".join(f"{name} {version}" for name, version in versions.items()))]
