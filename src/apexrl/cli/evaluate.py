"""``apexrl eval`` and ``apexrl play``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from pathlib import Path

from apexrl.agent.trainer import EVAL_SEED_OFFSET
from apexrl.cli.arguments import NUM_EPISODES
from apexrl.cli.common import Overrides, progress
from apexrl.core import plugins
from apexrl.core.errors import ConfigError, EnvError, RunDirError
from apexrl.core.system.files import write_json
from apexrl.envs import VecEnv
from apexrl.evaluation.evaluate import EvaluationResult, evaluate
from apexrl.evaluation.manifest import Manifest
from apexrl.evaluation.step_csv import save_step_csvs
from apexrl.evaluation.video import record_video
from apexrl.experiments import plots
from apexrl.experiments.results import evaluate_trained, results_record
from apexrl.policies import Policy
from apexrl.run import trained_policy
from apexrl.run.build import usable_device


def run_eval(options: argparse.Namespace, overrides: Overrides) -> int:
    """Evaluate a policy on a number of episodes, or on those of a manifest."""
    if options.manifest is not None:
        return _eval_manifest(options)
    for name in ("output", "device"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} needs --manifest FILE; 'apexrl manifest TASK --output FILE' writes one.")
    trained = trained_policy.load_trained(options.source)
    num_episodes = options.episodes or NUM_EPISODES
    env = trained.make_env(min(options.num_envs or trained.config.training.eval_num_envs, num_episodes))
    with progress("Evaluating", num_episodes) as tell:
        result = evaluate(
            env,
            trained.policy,
            num_episodes,
            deterministic=not options.stochastic,
            seed=trained.config.training.seed + EVAL_SEED_OFFSET if options.seed is None else options.seed,
            record_steps=options.csv is not None,
            events=trained.events,
            on_progress=tell,
        )
    env.close()
    print(f"{trained.checkpoint}: {result.summary()}")
    show_tasks(result)
    for name, value in result.logs().items():
        print(f"  {name} {value:.4g}")
    if options.csv is not None and result.step_rows is not None:
        print(f"Step tables: {', '.join(map(str, save_step_csvs(result.step_rows, options.csv)))}")
    return 0


def _eval_manifest(options: argparse.Namespace) -> int:
    for name in ("episodes", "seed", "stochastic", "csv"):
        if (value := getattr(options, name)) is not None and value is not False:
            raise ConfigError(f"--manifest says which episodes run, each with the policy's mode; leave --{name} out.")
    trained = trained_policy.load_trained(options.source)
    manifest = Manifest.read(options.manifest)
    check_output(options.output)
    result = evaluate_on_manifest(trained, manifest, options.num_envs, options.device)
    print(f"{trained.checkpoint}: {result.summary()}")
    show_tasks(result)
    record = result.record()
    for name in [name for name in result.episodes if f"{name}_interval" in record]:
        bounds = record[f"{name}_interval"]
        print(f"  {name} {record[name]:.4g}" + (f" ({bounds[0]:.4g} to {bounds[1]:.4g})" if bounds else ""))
    print(f"Manifest: {options.manifest} ({manifest.hash[:16]})")
    if options.output is not None:
        words = ["apexrl", "eval", str(trained.checkpoint), "--manifest", str(options.manifest)]
        words += ["--device", options.device] if options.device else []
        num_envs, device = options.num_envs or trained.config.training.eval_num_envs, options.device or "cpu"
        content = results_record(
            trained, manifest, result, shlex.join(words) + plugins.flag(), num_envs=num_envs, device=device
        )
        print(f"Results: {write_json(options.output, content)}")
    return 0


def evaluate_on_manifest(
    trained: trained_policy.TrainedPolicy,
    manifest: Manifest,
    num_envs: int | None,
    device: str | None,
    label: str = "Evaluating",
) -> EvaluationResult:
    """Evaluate a policy on a manifest with a progress bar; a problem with the manifest names its file."""
    own, place = trained.config.task.options, usable_device(device or "cpu", "--device")
    if own != manifest.options and trained.config.task.id == manifest.task:
        print(f"{trained.checkpoint} was trained with task options {own}; the manifest has {dict(manifest.options)}.")
    num_envs = num_envs or trained.config.training.eval_num_envs
    try:
        with progress(label, len(manifest.episodes)) as tell:
            return evaluate_trained(trained, manifest, num_envs, device=place, on_progress=tell)
    except (ConfigError, EnvError) as error:
        # With the options of the training, an environment that fails is not the manifest's fault.
        if manifest.path is None or (isinstance(error, EnvError) and own == manifest.options):
            raise
        kind = ConfigError if isinstance(error, ConfigError) else EnvError
        raise kind(f"{manifest.path}: {error}") from error


def check_output(path: Path | None) -> None:
    """Make sure that a file can be written, before the work and not after it."""
    if path is None:
        return
    if path.is_dir():
        raise RunDirError(f"--output {path} is a directory; name a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"--output {path} cannot be written: {error.strerror}. Name another place.") from error
    if not os.access(path.parent, os.W_OK):
        raise RunDirError(f"--output {path} cannot be written: no permission. Name another place.")


def run_play(options: argparse.Namespace, overrides: Overrides) -> int:
    """Write a video of a policy."""
    trained = trained_policy.load_trained(options.source)
    directory = options.source if options.source.is_dir() else options.source.parent
    path = options.output or directory / "video.mp4"
    if path.suffix != ".mp4":
        raise ConfigError(f"--output {path} must end in .mp4.")
    write_video(trained.make_env(1), trained.policy, path, options.seed, options.episodes)
    return 0


def show_tasks(result: EvaluationResult, image: Path | None = None) -> None:
    """Print the success of every task of a suite, and plot it as bars where an image is wanted."""
    tasks = result.record().get("per_task", {})
    for name, task in tasks.items():
        low, high = task["interval"]
        rate = f"{100 * task['success_rate']:5.1f} % ({100 * low:.0f} to {100 * high:.0f} %)"
        print(f"  {name:28} {rate} over {task['episodes']} episodes")
    if tasks and image is not None:
        print(f"Success of each task: {plots.plot_tasks(tasks, image)}")


def write_video(env: VecEnv, policy: Policy, path: Path, seed: int, episodes: int) -> None:
    """Write a video of whole episodes and close the environment."""
    with contextlib.closing(env):
        print(f"Video: {record_video(env, policy, path, seed=seed, num_episodes=episodes)}")
