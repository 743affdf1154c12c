"""``apexrl manifest`` and ``apexrl compare``."""

from __future__ import annotations

import argparse
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from apexrl.cli.common import AddCommand, Overrides, positive, seed_number
from apexrl.cli.evaluate import add_device, check_output, run_manifest
from apexrl.core.errors import ConfigError

if TYPE_CHECKING:
    from apexrl.evaluation.compare import Comparison, Difference
    from apexrl.evaluation.manifest import Manifest
    from apexrl.experiments.results import Results
    from apexrl.run.config import Config
    from apexrl.run.trained_policy import TrainedPolicy

NUM_EPISODES = 100
_LABELS = {"return": "return", "success_once": "success", "success_at_end": "at the end", "episode_len": "length"}


def register(command: AddCommand) -> None:
    """Add the commands."""
    manifest = command("manifest", "Write a file that pins the episodes of an evaluation.", _manifest)
    manifest.add_argument("source", metavar="TASK|PRESET|RUN_DIR", help="what to evaluate on, such as lift or mt10")
    _add_draw(manifest)
    manifest.add_argument("--output", type=Path, required=True, metavar="FILE.json", help="the file to write")

    compare = command("compare", "Run two policies on the same episodes and say whether they differ.", _compare)
    for name in ("a", "b"):
        compare.add_argument(
            name, type=Path, metavar=name.upper(), help="run directory, checkpoint, or results (.json)"
        )
    compare.add_argument("--manifest", type=Path, metavar="FILE", help="of the episodes; drawn anew when left out")
    _add_draw(compare)
    compare.add_argument("--num-envs", type=positive, metavar="N", help="default training.eval_num_envs")
    add_device(compare)
    compare.add_argument("--output", type=Path, metavar="FILE.json", help="write the comparison")


def _add_draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=positive, metavar="N", help=f"to draw, default {NUM_EPISODES}")
    parser.add_argument("--seed", type=seed_number, metavar="N", help="of the draw, default 0")


def _manifest(options: argparse.Namespace, overrides: Overrides) -> int:
    check_output(options.output)
    manifest = _drawn(_task_config(options.source, overrides), options)
    manifest.write(options.output)
    print(f"{options.output}: {len(manifest.episodes)} episodes of '{manifest.task}' ({manifest.hash[:16]})")
    return 0


def _task_config(source: str, overrides: Overrides) -> Config:
    from apexrl.envs.suites import SUITES
    from apexrl.run.config import make_config
    from apexrl.run.directory import resumed_config
    from apexrl.run.loading import load_config, preset_names, with_overrides

    for name, _ in overrides:
        if not name.startswith("task."):
            raise ConfigError(f"'--{name}' changes nothing in a manifest, which takes fields of task alone.")
    if Path(source).is_dir():
        return make_config(with_overrides(resumed_config(Path(source)).to_dict(), overrides))
    if source in preset_names() or Path(source).suffix in (".yaml", ".yml"):
        return load_config(source, overrides)
    if source in SUITES or source.startswith("metaworld:"):
        return make_config(with_overrides({"task": {"benchmark_name": source}, "algo": {"name": "bc"}}, overrides))
    return make_config(with_overrides({"task": {"id": source}}, overrides))


def _drawn(config: Config, options: argparse.Namespace) -> Manifest:
    from apexrl.evaluation.manifest import make_manifest

    env = config.task.make_env("cpu", 1)
    try:
        return make_manifest(
            env,
            config.task.id,
            options.episodes or NUM_EPISODES,
            seed=options.seed or 0,
            options=config.task.options,
        )
    finally:
        env.close()


def _compare(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.core.system.files import write_json
    from apexrl.core.system.provenance import provenance
    from apexrl.evaluation.compare import compare

    if options.output is not None:
        check_output(options.output)
    a, b = _both_results(options)
    comparison = compare(a.result, b.result)
    print(f"A: {a.name}\nB: {b.name}")
    _show_comparison(comparison)
    if options.output is not None:
        content = {
            "version": 1,
            "a": a.name,
            "b": b.name,
            "checkpoints": {"a": a.checkpoint, "b": b.checkpoint},
            "task": a.task,
            "manifest_hash": a.manifest_hash,
            **comparison.to_dict(),
            "command": _command(options, a, b),
            **provenance(),
        }
        print(f"Comparison: {write_json(options.output, content)}")
    return 0


def _both_results(options: argparse.Namespace) -> tuple[Results, Results]:
    """Return the results of A and B on one manifest, from their files or new."""
    from apexrl.evaluation.manifest import Manifest
    from apexrl.experiments.results import Results, read_results
    from apexrl.run.trained_policy import load_trained

    sides: list[Results | TrainedPolicy] = [
        read_results(path) if path.suffix == ".json" else load_trained(path) for path in (options.a, options.b)
    ]
    ready = [side for side in sides if isinstance(side, Results)]
    trained = [side for side in sides if not isinstance(side, Results)]
    tasks = [side.task if isinstance(side, Results) else side.config.task.id for side in sides]
    if tasks[0] != tasks[1]:
        raise ConfigError(f"A is of the task '{tasks[0]}', B of '{tasks[1]}': they have no episodes in common.")
    if options.manifest is not None and (options.episodes or options.seed is not None):
        raise ConfigError("--manifest says which episodes run; leave --episodes and --seed out.")
    if options.manifest is None and ready and (trained or options.episodes or options.seed is not None):
        raise ConfigError("A file of results has its episodes already; give --manifest FILE, which it was made with.")
    manifest = Manifest.read(options.manifest) if options.manifest is not None else None
    if manifest is None and trained:
        manifest = _drawn(trained[0].config, options)
    wanted = ready[0].manifest_hash if manifest is None else manifest.hash
    for side in ready:
        if side.manifest_hash != wanted:
            where = "that of A" if manifest is None else str(options.manifest)
            raise ConfigError(
                f"{side.name} was evaluated on the manifest {side.manifest_hash[:16]}, not on {where} ({wanted[:16]}): "
                "their episodes cannot be paired. Evaluate it again with 'apexrl eval --manifest'."
            )
    a, b = (
        side if isinstance(side, Results) else _new_results(side, manifest, options, f"Evaluating {name}")
        for name, side in zip("AB", sides, strict=True)
    )
    return a, b


def _new_results(trained: TrainedPolicy, manifest: Manifest | None, options: argparse.Namespace, label: str) -> Results:
    from apexrl.experiments.results import Results, hashed

    assert manifest is not None
    result = run_manifest(trained, manifest, options.num_envs, options.device, label)
    return Results(str(trained.checkpoint), manifest.task, manifest.hash, hashed(trained.checkpoint), result)


def _show_comparison(comparison: Comparison) -> None:
    print(f"{'':28} {'A':>9} {'B':>9} {'B - A':>9}   95 % interval, exact test")
    for name, label in _LABELS.items():
        if name in comparison.fields:
            _show_line(label, comparison.fields[name])
    for task, entry in comparison.per_task.items():
        _show_line(f"  {task}", entry)
    if comparison.num_left_out:
        print(f"{comparison.num_left_out} episodes were left out: A or B lost them, or got no number.")
    print(comparison.verdict())


def _show_line(label: str, entry: Difference) -> None:
    is_rate = entry.only_a is not None
    scale, unit = (100.0, " %") if is_rate else (1.0, "")
    a, b, difference, low, high = (scale * value for value in (entry.a, entry.b, entry.difference, *entry.interval))
    numbers = f"{a:9.2f} {b:9.2f} {difference:+9.2f}"
    sides = f", A alone {entry.only_a}, B alone {entry.only_b}" if is_rate else ""
    interval = "no interval" if math.isnan(low) else f"{low:+.2f} to {high:+.2f}{unit}"
    print(f"{label:28} {numbers}{unit:2} {interval}, p = {entry.p_value:.2g}{sides}")


def _command(options: argparse.Namespace, a: Results, b: Results) -> str:
    """Return what repeats it, with checkpoints in the place of run directories, whose newest one may change."""
    words = ["apexrl", "compare"]
    words += [str(path) if path.suffix == ".json" else side.name for path, side in ((options.a, a), (options.b, b))]
    for name in ("manifest", "episodes", "seed", "device"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)
