"""``apexrl export``, ``apexrl plot`` and ``apexrl demos``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apexrl.cli.common import AddCommand, Overrides, not_negative, positive, progress, warn
from apexrl.core.errors import ConfigError

_DEMO_OPTIONS = {"task.benchmark_name": "SUITE", "task.task_names_to_use": "--tasks", "task.cameras": "--cameras"}
"""What ``apexrl demos`` has in the place of fields that messages about suites name."""


def register(command: AddCommand) -> None:
    """Add the commands."""
    export = command("export", "Write a trained policy as files for deployment.", _export)
    export.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    export.add_argument("--output", type=Path, metavar="DIR", help="default export in the run directory")
    export.add_argument(
        "--format", default="onnx,torchscript", metavar="NAMES", help="one or both of onnx,torchscript; default both"
    )

    plot = command("plot", "Draw the learning curves of runs.", _plot)
    plot.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    plot.add_argument("--output", type=Path, metavar="FILE.png", help="default curve.png in the first run directory")

    demos = command("demos", "Record demonstrations of a suite's scripted experts, or of a trained policy.", _demos)
    demos.add_argument("suite", metavar="SUITE", help="mt10, mt50, metaworld:TASK or metaworld:MT10")
    demos.add_argument(
        "--policy", type=Path, metavar="RUN_DIR|CHECKPOINT", help="record this policy instead of the scripted experts"
    )
    demos.add_argument("--per-task", type=positive, default=10, metavar="K", help="default 10")
    demos.add_argument("--start", type=not_negative, default=0, metavar="K", help="first training state, default 0")
    demos.add_argument("--horizon", type=positive, metavar="N", help="control steps; default the policy's or suite's")
    demos.add_argument("--output", type=Path, metavar="DIR", help="default demos/<suite>, or demos/<suite>_policy")
    demos.add_argument("--tasks", default="", metavar="NAMES", help="some tasks of the suite, such as reach-v3,push-v3")
    demos.add_argument("--cameras", default="", metavar="NAMES", help="also record pictures, such as corner2")
    demos.add_argument("--image-size", type=positive, metavar="N", help="edge of the pictures, default 64")
    demos.add_argument("--proprioception", action="store_true", help="leave places of objects out of the state")
    demos.add_argument("--num-workers", type=positive, metavar="N", help="processes; default one a core")


def _export(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.deploy.export import CARD, FILES, export_policy

    exported = export_policy(options.source, options.output, options.format.split(","))
    card, tried = exported.card, exported.card["verification"]
    print(f"Exported {card['checkpoint']['name']} ({card['task']['id']}, {card['algorithm']}) to {exported.directory}")
    for name, difference in tried["largest_difference"].items():
        print(f"  {FILES[name]}: largest difference {difference:.1e} on {tried['observations']} recorded observations")
    for kind in ("inputs", "outputs"):
        print(f"  {kind}: " + ", ".join(f"{entry['name']} {_shape(entry['shape'])}" for entry in card[kind]))
    print(f"  {CARD} says how to use them")
    return 0


def _shape(sizes: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _plot(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.experiments.plots import plot_runs

    print(plot_runs(options.run_dirs, options.output or options.run_dirs[0] / "curve.png", warn))
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _demos(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.collectors.demonstrations.record import Recorded, record_demos
    from apexrl.envs.mujoco.simulation import num_cores
    from apexrl.envs.suites import make_suite
    from apexrl.run.trained_policy import load_trained

    if options.image_size and not options.cameras:
        raise ConfigError("--image-size is of pictures, but --cameras names no camera that takes them; add one.")
    trained = None if options.policy is None else load_trained(options.policy)
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
        done = 0

        def note(_: str, __: Recorded) -> None:
            nonlocal done
            done += 1
            tell(done)

        recorded = record_demos(
            suite,
            output,
            options.per_task,
            num_workers=min(num_workers, suite.num_tasks),
            start=options.start,
            plans=plans,
            on_progress=note,
        )
    for name, task in recorded.items():
        failed = f", {task.num_failures} attempts failed" if task.num_failures else ""
        fewer = "; the training states ran out" if task.num_demos < options.per_task else ""
        print(f"  {name:28} {task.num_demos} demonstrations, {task.num_steps} steps{failed}{fewer}")
    print(f"Demonstrations: {output}")
    return 0
