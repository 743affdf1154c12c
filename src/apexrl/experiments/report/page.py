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
from apexrl.experiments.report.runs import REPEAT, Group, PinnedResult, Run, find_runs, group_runs, read_run
from apexrl.run.records import LoggedEvaluation

MAX_VIDEO_BYTES = 20 * 2**20
"""A larger file is named instead of shown."""
PLOT_HEIGHT = 290
"""Of a plot that does not say how high it is, in pixels."""
NUM_COLORS = 8
DASHES = ("none", "7 3", "2 2.5", "9 3 2 3")
PAGE_FIELDS = {
    "success_once": ("Success", "rate"),
    "success_at_end": ("Success at the end", "rate"),
    "return": ("Return", "number"),
    "episode_len": ("Episode length", "number"),
}
"""Episode field -> its column in the table of results, and how it is shown."""
PAGE_SECTIONS = {
    "results": "Results",
    "curves": "Curves",
    "tasks": "Tasks",
    "init-states": "Init states",
    "videos": "Videos",
    "time": "Time",
    "configuration": "Configuration",
    "repeat": REPEAT,
    "versions": "Versions",
}


def write_report(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one HTML page about runs, with everything in it: plots, videos, configurations, commands.

    Args:
        run_dirs: run directories, or directories of them.
        path: of the page, which ends in ``.html``.

    Raises:
        ConfigError: when the page is no HTML file, or plotly is not installed.
        RunDirError: for a directory that is no run.
    """
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output {path} must end in .html.")
    plotly = _plotly_source()
    groups = group_runs([read_run(run) for run in find_runs(run_dirs)])
    text = _render(groups, plotly, shlex.join(["apexrl", "report", *map(str, run_dirs), "--output", str(path)]))
    # Half a character, as a damaged name may hold, cannot be written.
    return replace_text(path, text.encode("utf-8", "replace").decode("utf-8"))


def _plotly_source() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError("apexrl report needs plotly: pip install 'apexrl[report]'.") from error
    source: str = get_plotlyjs()
    return source


def _render(groups: Sequence[Group], plotly: str, command: str) -> str:
    from jinja2 import Environment, StrictUndefined

    files = resources.files("apexrl.experiments.report")
    template, css, js = ((files / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["number"] = show
    content = _content(groups)
    return environment.from_string(template).render(
        **content,
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
    """Return what the template shows about the runs."""
    runs = [run for group in groups for run in group.runs]
    axis = common_axis(runs)
    plots = _Plots()
    names = ", ".join(group.name for group in groups)
    tasks, spent = figures.tasks(groups), figures.time_shares(groups)
    is_suite = any("task.benchmark_name" in group.config for group in groups) or tasks is not None
    has_states = any(
        group.config.get("algo.name") == "rloo" or run.init_states for group in groups for run in group.runs
    )
    fields = [
        name for name in PAGE_FIELDS if any(name in entry.fields for run in runs for entry in run.evaluations[-1:])
    ]
    content: dict[str, Any] = {
        "title": names if len(names) <= 60 else plural(len(groups), "configuration"),
        "lead": _lead(groups),
        "groups": [_group_entry(group, index, fields) for index, group in enumerate(groups)],
        "fields": [{"name": name, "title": PAGE_FIELDS[name][0], "form": PAGE_FIELDS[name][1]} for name in fields],
        "pinned": [
            _pinned_entry(result, index)
            for index, group in enumerate(groups)
            for run in group.runs
            for result in run.pinned
        ],
        "notes": [*_few_seeds(groups), *((str(run.path), note) for run in runs for note in run.notes)],
        "panels": [plots.add(title, figure) for title, figure in figures.main_panels(groups, axis).items()],
        "more": [
            (prefix, [plots.add(name, figure) for name, figure in panels.items()])
            for prefix, panels in figures.more_panels(groups, axis).items()
        ],
        "tasks": (plots.add("Success of each task", tasks) if tasks else False) if is_suite else None,
        "maps": _maps(groups, plots) if has_states else None,
        "videos": [_video(run, file, index) for index, run, file in _videos(groups)],
        "time": plots.add("Shares of rollouts and updates in the time", spent) if spent else None,
        "times": [_time_row(run, index) for index, group in enumerate(groups) for run in group.runs],
        "differences": differences(groups),
        "starts": [
            (index, str(run.path), begun)
            for index, group in enumerate(groups)
            for run in group.runs
            for begun in run.starts
        ],
        "versions": _versions(runs),
    }
    left_out = {name for name, key in (("tasks", "tasks"), ("init-states", "maps")) if content[key] is None}
    content["sections"] = [(name, title) for name, title in PAGE_SECTIONS.items() if name not in left_out]
    styles = [{"color": group["color"], "dash": group["dash"]} for group in content["groups"]]
    content["data"] = {"groups": styles, "figures": plots.figures}
    return content


def _few_seeds(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Return a note about every configuration whose intervals rest on few seeds."""
    return [
        (group.name, f"The intervals of {len(group.runs)} seeds are unreliable: use at least {FEWEST} seeds.")
        for group in groups
        if 1 < len(group.runs) < FEWEST
    ]


class _Plots:
    """Collects the plots of a page."""

    def __init__(self) -> None:
        self.figures: dict[str, figures.Figure] = {}

    def add(self, title: str, figure: figures.Figure, **more: Any) -> dict[str, Any]:
        """Keep a plot and return what the template needs to place it."""
        name = f"plot{len(self.figures)}"
        self.figures[name] = figure
        return {
            "id": name,
            "title": title,
            "label": f"Plot: {title}",
            "height": figure["layout"].get("height", PLOT_HEIGHT),
            **more,
        }


def differences(groups: Sequence[Group]) -> list[tuple[str, list[str | None]]]:
    """Return the fields in which configurations differ, with the value of each; None where it has no such field."""
    names = dict.fromkeys(name for group in groups for name in group.config)
    table = [
        (name, [_null_or_text(group.config[name]) if name in group.config else None for group in groups])
        for name in names
    ]
    return [(name, values) for name, values in table if len(set(values)) > 1]


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
    tasks = dict.fromkeys(_task(group) for group in groups)
    text = plural(num_runs, "run")
    if len(groups) > 1 or num_runs > 1:
        text += f" of {plural(len(groups), 'configuration')}"
    return f"{text} on {', '.join(tasks)}."


def _task(group: Group) -> str:
    return str(group.config.get("task.benchmark_name") or group.config.get("task.id") or "an unknown task")


def _group_entry(group: Group, index: int, fields: Sequence[str]) -> dict[str, Any]:
    finals = [run.evaluations[-1] for run in group.runs if run.evaluations]
    times = [spent.seconds for run in group.runs if (spent := time_spent(run)) and spent.seconds is not None]
    return {
        "name": group.name,
        "color": index % NUM_COLORS,
        "dash": DASHES[index % len(DASHES)],
        "num_runs": len(group.runs),
        "task": _task(group),
        "algo": str(group.config.get("algo.name", "")),
        "steps": _amount([run.steps for run in group.runs]),
        "episodes": _amount([final.episodes for final in finals]),
        "time": duration(sum(times) / len(times) if times else None),
        "estimates": {name: final_estimate(group, name) for name in fields},
        "runs": [_run_entry(run, fields) for run in group.runs],
        "config": group.runs[0].config_text if group.runs[0].config else "",
        "commands": "\n".join(_commands(group)),
    }


def _run_entry(run: Run, fields: Sequence[str]) -> dict[str, Any]:
    final: LoggedEvaluation | None = run.evaluations[-1] if run.evaluations else None
    spent = time_spent(run)
    return {
        "label": run.name if run.seed is None else f"seed {run.seed}",
        "steps": f"{run.steps:,}",
        "episodes": final.episodes if final else "–",
        "time": duration(spent.seconds if spent else None),
        "estimates": {name: final.fields.get(name) if final else None for name in fields},
    }


def _pinned_entry(result: PinnedResult, group: int) -> dict[str, Any]:
    return {
        "group": group,
        "file": str(result.file),
        "hash": result.manifest_hash[:16],
        "estimates": {name: result.evaluation.fields.get(name) for name in PAGE_FIELDS},
        "episodes": result.evaluation.episodes,
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
    train = [["apexrl", "train", f"{run.path}/config.yaml", "--run-dir", f"{run.path}-again"] for run in group.runs]
    test = [
        ["apexrl", "eval", f"{run.path}", "--episodes", str(run.evaluations[-1].episodes if run.evaluations else 100)]
        for run in group.runs
    ]
    pinned = [result.command for run in group.runs for result in run.pinned if result.command]
    play = ["apexrl", "play", f"{group.runs[0].path}"]
    return [*map(shlex.join, [*train, *test]), *pinned, shlex.join(play)]


def _maps(groups: Sequence[Group], plots: _Plots) -> list[dict[str, Any]]:
    maps = []
    for index, group in enumerate(groups):
        needed = group.config.get("algo.rloo_batch_size")
        for run in group.runs:
            outcomes = [entry["outcomes"] for entry in run.init_states.values() if entry["outcomes"]]
            if not outcomes:
                continue
            text = plural(len(outcomes), "state")
            if isinstance(needed, int):
                mastered = sum(len(last) >= needed and all(last[-needed:]) for last in outcomes)
                text = f"{mastered} of {text} mastered (the last {needed} rollouts succeeded)"
            maps.append(plots.add(str(run.path), figures.mastery(run, index), text=text, group=index))
    return maps


def _videos(groups: Sequence[Group]) -> list[tuple[int, Run, Path]]:
    return [(index, run, file) for index, group in enumerate(groups) for run in group.runs for file in run.videos]


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


def _null_or_text(value: Any) -> str:
    return "null" if value is None else str(value)
