"""``apexrl export``, ``apexrl plot``, ``apexrl report`` and ``apexrl demos``."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from apexrl.cli.common import Overrides, progress, warn
from apexrl.cli.evaluate import check_output
from apexrl.collectors.demonstrations import record
from apexrl.core.errors import ConfigError
from apexrl.deploy.export import export_policy
from apexrl.deploy.model import CARD, FILES
from apexrl.envs.mujoco.simulation import num_cores
from apexrl.envs.suites import make_suite
from apexrl.experiments import plots, report
from apexrl.run import trained_policy

_DEMO_OPTIONS = {"task.benchmark_name": "SUITE", "task.task_names_to_use": "--tasks", "task.cameras": "--cameras"}
"""What ``apexrl demos`` has in the place of fields that messages about suites name."""


def run_export(options: argparse.Namespace, overrides: Overrides) -> int:
    """Write a policy as files for deployment."""
    exported = export_policy(options.source, options.output, options.format.split(","))
    card, tried = exported.card, exported.card["verification"]
    print(f"Exported {card['checkpoint']['name']} ({card['task']['id']}, {card['algorithm']}) to {exported.directory}")
    for name, difference in tried["largest_difference"].items():
        print(f"  {FILES[name]}: largest difference {difference:.1e} on {tried['observations']} recorded observations")
    for kind in ("inputs", "outputs"):
        print(
            f"  {kind}: "
            + ", ".join(f"{entry['name']} [{', '.join(map(str, entry['shape']))}]" for entry in card[kind])
        )
    print(f"  {CARD} says how to use them")
    return 0


def run_plot(options: argparse.Namespace, overrides: Overrides) -> int:
    """Plot learning curves."""
    print(plots.plot_runs(options.run_dirs, options.output or options.run_dirs[0] / "curve.png", warn))
    return 0


def run_report(options: argparse.Namespace, overrides: Overrides) -> int:
    """Write a page about runs."""
    check_output(options.output)
    path = report.write_report(options.run_dirs, options.output or options.run_dirs[0] / "report.html")
    print(f"{path} ({path.stat().st_size / 2**20:.1f} MB)")
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def run_demos(options: argparse.Namespace, overrides: Overrides) -> int:
    """Record demonstrations."""
    if options.image_size and not options.cameras:
        raise ConfigError("--image-size needs --cameras, such as corner2.")
    trained = None if options.policy is None else trained_policy.load_trained(options.policy)
    more: dict[str, Any] = {"privileged": False} if options.proprioception else {}
    own = {} if trained is None else trained.config.task.options
    if horizon := options.horizon or own.get("max_episode_length"):
        more["horizon"] = horizon
    try:
        suite = make_suite(
            options.suite,
            _names(options.tasks),
            cameras=tuple(_names(options.cameras)),
            image_size=options.image_size or 64,
            **more,
        )
    except ConfigError as error:
        message = str(error)
        for field, option in _DEMO_OPTIONS.items():
            message = message.replace(field, option)
        raise ConfigError(message) from error
    available = len(suite.init_states(0, "train"))
    if options.start + options.per_task > available:
        raise ConfigError(
            f"--per-task {options.per_task} from --start {options.start} on needs {options.start + options.per_task} "
            f"training states, but a task of '{options.suite}' has {available}; lower one of them."
        )
    num_workers = options.num_workers or num_cores()
    plans = None
    if trained is not None:
        print("Letting the policy act ...")
        plans = trained.plans(suite, options.per_task, start=options.start, num_workers=num_workers)
    name = options.suite.replace(":", "_").lower()
    output = options.output or Path("demos") / (name if trained is None else f"{name}_policy")
    with progress("Recording", suite.num_tasks) as tell:
        done = itertools.count(1)
        recorded = record.record_demos(
            suite,
            output,
            options.per_task,
            num_workers=min(num_workers, suite.num_tasks),
            start=options.start,
            plans=plans,
            on_progress=lambda *_: tell(next(done)),
        )
    for name, task in recorded.items():
        failed = f", {task.num_failures} attempts failed" if task.num_failures else ""
        fewer = "; the training states ran out" if task.num_demos < options.per_task else ""
        print(f"  {name:28} {task.num_demos} demonstrations, {task.num_steps} steps{failed}{fewer}")
    print(f"Demonstrations: {output}")
    return 0
