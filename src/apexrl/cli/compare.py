"""``apexrl manifest`` and ``apexrl compare``."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
from pathlib import Path

from apexrl.cli.arguments import NUM_EPISODES
from apexrl.cli.common import Overrides
from apexrl.cli.evaluate import check_output, evaluate_on_manifest
from apexrl.core import plugins
from apexrl.core.errors import ConfigError
from apexrl.core.system.files import write_json
from apexrl.core.system.provenance import provenance
from apexrl.envs.suites import SUITES
from apexrl.evaluation.compare import Comparison, Difference, compare
from apexrl.evaluation.manifest import Manifest, make_manifest
from apexrl.experiments.results import Results, hashed, read_results
from apexrl.run import trained_policy
from apexrl.run.config import Config, make_config
from apexrl.run.directory import resumed_config
from apexrl.run.loading import load_config, with_overrides
from apexrl.run.sources import preset_names

_LABELS = {"return": "return", "success_once": "success", "success_at_end": "at the end", "episode_len": "length"}


def run_manifest(options: argparse.Namespace, overrides: Overrides) -> int:
    """Write a manifest of sampled episodes."""
    check_output(options.output)
    manifest = _sampled(_task_config(options.source, overrides), options)
    manifest.write(options.output)
    print(f"{options.output}: {len(manifest.episodes)} episodes of '{manifest.task}' ({manifest.hash[:16]})")
    return 0


def _task_config(source: str, overrides: Overrides) -> Config:
    for name, _ in overrides:
        if not name.startswith("task."):
            raise ConfigError(f"'--{name}' changes nothing in a manifest, which takes fields of task alone.")
    if Path(source).is_dir():
        return make_config(with_overrides(resumed_config(Path(source)).to_dict(), overrides))
    if source in preset_names() or Path(source).suffix in (".yaml", ".yml"):
        return load_config(source, overrides)
    plugins.trust([source])
    if source in SUITES or source.startswith("metaworld:"):
        return make_config(with_overrides({"task": {"benchmark_name": source}, "algo": {"name": "bc"}}, overrides))
    return make_config(with_overrides({"task": {"id": source}}, overrides))


def _sampled(config: Config, options: argparse.Namespace) -> Manifest:
    num_episodes, task = options.episodes or NUM_EPISODES, config.task
    with contextlib.closing(task.make_env("cpu", 1)) as env:
        return make_manifest(env, task.id, num_episodes, seed=options.seed or 0, options=task.options)


def run_compare(options: argparse.Namespace, overrides: Overrides) -> int:
    """Compare two policies on the same episodes."""
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
    sides: list[Results | trained_policy.TrainedPolicy] = [
        read_results(path) if path.suffix == ".json" else trained_policy.load_trained(path)
        for path in (options.a, options.b)
    ]
    ready = [side for side in sides if isinstance(side, Results)]
    trained = [side for side in sides if not isinstance(side, Results)]
    tasks = [side.task if isinstance(side, Results) else side.config.task.id for side in sides]
    samples = bool(options.episodes or options.seed is not None)
    if tasks[0] != tasks[1]:
        raise ConfigError(f"A is of the task '{tasks[0]}', B of '{tasks[1]}': they have no episodes in common.")
    if options.manifest is not None and samples:
        raise ConfigError("--manifest says which episodes run; leave --episodes and --seed out.")
    if options.manifest is None and ready and (trained or samples):
        raise ConfigError("A file of results has its episodes already; give --manifest FILE, which it was made with.")
    manifest = None
    if options.manifest is not None or trained:
        manifest = Manifest.read(options.manifest) if options.manifest else _sampled(trained[0].config, options)
    wanted = ready[0].manifest_hash if manifest is None else manifest.hash
    for side in ready:
        if side.manifest_hash != wanted:
            where = "that of A" if manifest is None else str(options.manifest)
            raise ConfigError(
                f"{side.name} was evaluated on the manifest {side.manifest_hash[:16]}, not on {where} ({wanted[:16]}): "
                "their episodes cannot be paired. Evaluate it again with 'apexrl eval --manifest'."
            )

    def results(name: str, side: Results | trained_policy.TrainedPolicy) -> Results:
        if isinstance(side, Results):
            return side
        assert manifest is not None
        result = evaluate_on_manifest(side, manifest, options.num_envs, options.device, f"Evaluating {name}")
        return Results(str(side.checkpoint), manifest.task, manifest.hash, hashed(side.checkpoint), result)

    return results("A", sides[0]), results("B", sides[1])


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
    sides = [str(path) if path.suffix == ".json" else side.name for path, side in ((options.a, a), (options.b, b))]
    given = {name: getattr(options, name) for name in ("manifest", "episodes", "seed", "device")}
    more = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(["apexrl", "compare", *sides, *more]) + plugins.flag()
