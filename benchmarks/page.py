"""Makes the page of benchmarks, docs/benchmarks.md, from the records in this directory.

    python benchmarks/page.py

A record is what a benchmark wrote, ``benchmarks/NAME.json``. Its text is the docstring of the script that made it.
Every record gets a section, whatever is in it: new ones appear, missing ones do not.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apexrl.core.renamed import RENAMED

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
INTRODUCTION = """\
Appendix: every record in `benchmarks/`, with the command that repeats it. How each is measured stands at the top of its
script. With several seeds a cell holds the mean and, in parentheses, the lowest and the highest. Results that are
unfavourable to us are listed like the others; `python benchmarks/page.py` writes this page."""
COMMANDS = {
    "camera": "python benchmarks/mt10.py --presets camera",
    "mt10_images": "python benchmarks/mt10.py",
    "mt10_states_and_images": "python benchmarks/mt10.py",
    "ppo_gpu": "python benchmarks/ppo_gpu.py --iters 40",
    "ppo_mujoco": "python benchmarks/ppo_cpu.py --only-mujoco",
    "ppo_learning": "python benchmarks/ppo_learning.py --jobs 16",
    "roa_walker": "python benchmarks/roa.py --task walker --jobs 2 --device cpu",
    "sac_learning": "python benchmarks/sac.py learning",
    "sac_speed_cpu": "python benchmarks/sac.py speed",
    "sac_speed_gpu": "python benchmarks/sac.py speed",
    "torture": "python -m tests.torture.run",
}
"""Of records that the script of their name does not make, or not with its defaults."""
IMAGES = {"ppo_modes": "modes", "profile_iteration": "profile"}
"""Of records whose image has another name."""
NOTES = {
    "first_robot": "Beside other work on the two cores, but for seed 6, which took 114 s.",
    "ppo_cpu": "Ratios are to Stable-Baselines3 on the same task; with 64 environments to the environment alone.",
    "ppo_gpu": "Seconds are those of an iteration; parity is the largest difference of a weight to eager after 10.",
    "profile_iteration": "Seconds of one iteration.",
    "ript_one_task": "The columns bc, final and final sampled count successes among the episodes.",
    "sac_speed_cpu": "Ratios are to the first row.",
    "sac_speed_gpu": "Ratios are to the first row with as many environments.",
    "scaling": "Costs are seconds, bytes, and bytes a second.",
}
HEADERS = {
    "cpu_us_per_step": "CPU µs a step",
    "envs": "environments",
    "memory_mib": "MiB",
    "memory_times_rsl": "memory, times rsl_rl's",
    "milliseconds": "ms an iteration",
    "num_envs": "environments",
    "per_step": "µs a gradient step",
    "steps_per_s": "steps/s",
    "steps_per_second": "steps/s",
    "times_rsl": "times as fast as rsl_rl",
}
IDENTITY = {"demos", "envs", "num_envs", "workers"}
"""Numbers that say which row it is, not what was measured."""
WIDE = 10
"""Rows with more values than this become columns."""

Row = dict[str, Any]
Rows = list[Row]


def page(directory: Path = HERE) -> str:
    """The whole page."""
    return "\n\n".join(["# Benchmarks", INTRODUCTION, *map(section, sorted(directory.glob("*.json")))]) + "\n"


def section(path: Path) -> str:
    """One record: what it measures, its tables, the command, and where it was measured."""
    name, record = path.stem, json.loads(path.read_text(encoding="utf-8"))
    command = record.get("command") or COMMANDS.get(name, f"python benchmarks/{name}.py")
    title = description(COMMANDS.get(name, command))
    parts = [
        f"## {name}",
        f"**{title}**" if title else "",
        *(table(rows) for rows in rows_of(name, record) if rows),
    ]
    image = f"images/{IMAGES.get(name, name)}.png"
    parts += [f"![{title}]({image})"] if (PAGE.parent / image).exists() else []
    parts += [settings(record), NOTES.get(name, "")]
    # Rows that were measured by calls of their own say with which options.
    options = (row.get("options", "") for row in record.get("rows", [{}]))
    calls = dict.fromkeys(in_todays_words(command if text in command else f"{command} {text}") for text in options)
    parts += ["```bash\n" + "\n".join(calls) + "\n```", f"{where(record)} [Record](../benchmarks/{path.name})."]
    return "\n\n".join(part for part in parts if part)


def description(command: str) -> str:
    """The first paragraph of the docstring of the script that a command runs."""
    words = [*command.split(), ""]
    path = HERE.parent / (words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1])
    if not path.is_file():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


def in_todays_words(command: str) -> str:
    """A recorded command with the present names of its options."""
    return re.sub(r"(?<=[a-z]\.)\w+(?==)", lambda name: RENAMED.get(name[0], name[0]), command)


# What a record holds


def rows_of(name: str, record: Row) -> list[Rows]:
    """The tables of a record."""
    if name in FORMATS:
        return FORMATS[name](record)
    found = [record["rows"]] if record.get("rows") else []
    for value in record.values():
        if (
            isinstance(value, dict)
            and value
            and all(isinstance(entry, dict) and is_flat(entry) for entry in value.values())
        ):
            found.append([{"": key, **entry} for key, entry in value.items()])
    return found


def by_task(record: Row) -> list[Rows]:
    """Success before and after, by head and number of demonstrations, then of each task."""
    tasks: dict[str, Row] = {}
    for row in record["rows"]:
        for task, start in row.get("bc_tasks", {}).items():
            name = f"{row['head']}, demos {row['demos']}"
            change = f"{cell(start['success_rate'])} → {cell(row['rloo_tasks'][task]['success_rate'])}"
            tasks.setdefault(task, {"task": task})[name] = change
    rows = [{key: value for key, value in row.items() if key != "options"} for row in record["rows"]]
    return [rows, list(tasks.values())]


def measured(record: Row) -> list[Rows]:
    """What was measured on each task, and the inputs of the model."""
    rows = [{"task": task["task"], **row} for task in record["tasks"] for row in task["measured"]]
    return [rows, [{"task": task["task"], **task["costs"]} for task in record["tasks"]]]


def losses(record: Row) -> list[Rows]:
    """What was tried, how often, and what was lost."""
    return [[{**line, "lost": len(line["lost"]) or "nothing"} for line in record["lines"]]]


FORMATS: dict[str, Callable[[Row], list[Rows]]] = {
    "camera": by_task,
    "mt10": by_task,
    "mt10_images": by_task,
    "mt10_states_and_images": by_task,
    "scaling": measured,
    "torture": losses,
}


def is_flat(row: Row) -> bool:
    """Whether every value fits a cell."""
    return not any(isinstance(value, list | dict) for value in row.values())


def is_measure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def settings(record: Row) -> str:
    """The plain values of a record beside its tables."""
    plain = {key: value for key, value in record.items() if is_measure(value) or key == "task"}
    for key, value in record.items():
        if isinstance(value, dict) and key not in ("machine", "versions") and is_flat(value):
            plain |= {f"{key} {name}": entry for name, entry in value.items()}
    return f"Settings: {', '.join(f'{header(key)} {cell(value)}' for key, value in plain.items())}." if plain else ""


def where(record: Row) -> str:
    """Machine, versions, date and commit, as far as they were recorded."""
    machine = dict(record.get("machine", {}))
    parts = [f"{machine.get('cpu', 'a machine that was not recorded')}"]
    parts += [
        f"{machine[key]} {key if machine[key] != 1 else key[:-1]}" for key in ("cores", "threads") if machine.get(key)
    ]
    parts += [machine.get("gpu") or "no GPU"]
    versions = {"Python": machine.get("python"), **record.get("versions", {})}
    parts.append(", ".join(f"{name} {version}" for name, version in versions.items() if version))
    parts += [str(record["date"])] if record.get("date") else []
    parts.append(f"commit {record['commit']}" if record.get("commit") else "commit not recorded")
    return f"Measured on {'; '.join(part for part in parts if part)}."


# Tables


def table(rows: Rows) -> str:
    """The plain values of some rows; seeds are put together, and long rows are turned."""
    rows = over_seeds(
        [{key: value for key, value in row.items() if not isinstance(value, list | dict)} for row in rows]
    )
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[header(key) for key in keys], *([cell(row.get(key)) for key in keys] for row in rows)]
    if len(keys) > WIDE:
        lines = [list(line) for line in zip(*lines, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def over_seeds(rows: Rows) -> Rows:
    """One row for the seeds of each thing that was measured."""
    if not all("seed" in row for row in rows) or len({row["seed"] for row in rows}) == 1:
        return rows
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        name = {
            key: value for key, value in row.items() if key in IDENTITY or (not is_measure(value) and value is not None)
        }
        groups.setdefault(tuple(name.items()), []).append(row)
    return [
        {**dict(name), "seeds": len(group)}
        | {
            key: spread([row[key] for row in group if row[key] is not None])
            for key in group[0]
            if key not in dict(name) and key != "seed"
        }
        for name, group in groups.items()
    ]


def spread(values: list[float]) -> str:
    if not values:
        return ""
    mean, low, high = sum(values) / len(values), min(values), max(values)
    return cell(mean) if low == high else f"{cell(mean)} ({cell(low)} to {cell(high)})"


def header(key: str) -> str:
    return HEADERS.get(key, key.replace("_", " "))


def cell(value: Any) -> str:
    if value is None or value == "" or value != value:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
