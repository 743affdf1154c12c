"""``apexrl eval`` and ``apexrl play``."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apexrl.cli.common import AddCommand, Overrides, positive, progress, seed_number
from apexrl.core.errors import ConfigError, EnvError, RunDirError

if TYPE_CHECKING:
    from apexrl.envs import VecEnv
    from apexrl.evaluation.evaluate import EvaluationResult
    from apexrl.evaluation.manifest import Manifest
    from apexrl.policies import Policy
    from apexrl.run.trained_policy import TrainedPolicy


def register(command: AddCommand) -> None:
    """Add the commands."""
    evaluate = command("eval", "Evaluate a trained policy on whole episodes.", _eval)
    evaluate.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    evaluate.add_argument("--episodes", type=positive, metavar="N", help="default 100")
    evaluate.add_argument("--num-envs", type=positive, metavar="N", help="default training.eval_num_envs")
    evaluate.add_argument("--seed", type=seed_number, metavar="N", help="of the episodes; default as in training")
    evaluate.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mode")
    evaluate.add_argument("--csv", type=Path, metavar="DIR", help="write one table of steps for each environment")
    evaluate.add_argument(
        "--manifest", type=Path, metavar="FILE", help="run the episodes of this file, the same for any --num-envs"
    )
    evaluate.add_argument("--output", type=Path, metavar="FILE.json", help="with --manifest: write every episode")
    add_device(evaluate)

    play = command("play", "Write a video of a trained policy.", _play)
    play.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    play.add_argument("--episodes", type=positive, default=3, metavar="N", help="default 3")
    play.add_argument("--output", type=Path, metavar="FILE.mp4", help="default video.mp4 in the run directory")
    play.add_argument("--seed", type=seed_number, default=1_000_003, metavar="N", help="of the episodes")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where a manifest is run."""
    parser.add_argument(
        "--device", metavar="NAME", help="of a run on a manifest; default cpu, where results repeat to the last bit"
    )


def _eval(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.agent.trainer import EVAL_SEED_OFFSET
    from apexrl.evaluation.evaluate import evaluate
    from apexrl.evaluation.step_csv import save_step_csvs
    from apexrl.run.trained_policy import load_trained

    if options.manifest is not None:
        return _eval_manifest(options)
    for name in ("output", "device"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} needs --manifest FILE; 'apexrl manifest TASK --output FILE' writes one.")
    trained = load_trained(options.source)
    seed = trained.config.training.seed + EVAL_SEED_OFFSET if options.seed is None else options.seed
    num_episodes = options.episodes or 100
    num_envs = min(options.num_envs or trained.config.training.eval_num_envs, num_episodes)
    env = trained.make_env(num_envs)
    with progress("Evaluating", num_episodes) as tell:
        result = evaluate(
            env,
            trained.policy,
            num_episodes,
            deterministic=not options.stochastic,
            seed=seed,
            record_steps=options.csv is not None,
            events=trained.events,
            on_progress=tell,
        )
    env.close()
    print(f"{trained.checkpoint}: {result.summary()}")
    show_tasks(result, trained.checkpoint.parent, draw=False)
    for name, value in result.logs().items():
        print(f"  {name} {value:.4g}")
    if options.csv is not None and result.step_rows is not None:
        print(f"Step tables: {', '.join(map(str, save_step_csvs(result.step_rows, options.csv)))}")
    return 0


def _eval_manifest(options: argparse.Namespace) -> int:
    from apexrl.core.system.files import write_json
    from apexrl.evaluation.manifest import Manifest
    from apexrl.experiments.results import results_record
    from apexrl.run.trained_policy import load_trained

    for name in ("episodes", "seed", "stochastic", "csv"):
        if (value := getattr(options, name)) is not None and value is not False:
            raise ConfigError(f"--manifest says which episodes run, each with the policy's mode; leave --{name} out.")
    trained = load_trained(options.source)
    manifest = Manifest.read(options.manifest)
    if options.output is not None:
        check_output(options.output)
    result = run_manifest(trained, manifest, options.num_envs, options.device)
    print(f"{trained.checkpoint}: {result.summary()}")
    show_tasks(result, trained.checkpoint.parent, draw=False)
    record = result.record()
    for name in [name for name in result.episodes if f"{name}_interval" in record]:
        bounds = record[f"{name}_interval"]
        print(f"  {name} {record[name]:.4g}" + (f" ({bounds[0]:.4g} to {bounds[1]:.4g})" if bounds else ""))
    print(f"Manifest: {options.manifest} ({manifest.hash[:16]})")
    if options.output is not None:
        words = ["apexrl", "eval", str(trained.checkpoint), "--manifest", str(options.manifest)]
        words += ["--device", options.device] if options.device else []
        how = {
            "num_envs": options.num_envs or trained.config.training.eval_num_envs,
            "device": options.device or "cpu",
        }
        write_json(options.output, results_record(trained, manifest, result, shlex.join(words), **how))
        print(f"Results: {options.output}")
    return 0


def run_manifest(
    trained: TrainedPolicy, manifest: Manifest, num_envs: int | None, device: str | None, label: str = "Evaluating"
) -> EvaluationResult:
    """Evaluate a policy on a manifest and show how far it is; a problem with the manifest names its file."""
    from apexrl.experiments.results import evaluate_trained

    own, place = trained.config.task.options, _known_device(device or "cpu")
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


def _known_device(name: str) -> Any:
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device '{name}' cannot be used here; use cpu. {str(error).splitlines()[0]}") from error
    return device


def check_output(path: Path) -> None:
    """Make sure that a file can be written, before the work and not after it."""
    if path.is_dir():
        raise RunDirError(f"--output {path} is a directory; name a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"--output {path} cannot be written: {error.strerror}. Name another place.") from error
    if not os.access(path.parent, os.W_OK):
        raise RunDirError(f"--output {path} cannot be written: no permission. Name another place.")


def _play(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.run.trained_policy import load_trained

    trained = load_trained(options.source)
    directory = options.source if options.source.is_dir() else options.source.parent
    path = options.output or directory / "video.mp4"
    if path.suffix != ".mp4":
        raise ConfigError(f"--output {path} must end in .mp4.")
    write_video(trained.make_env(1), trained.policy, path, options.seed, options.episodes)
    return 0


def show_tasks(result: EvaluationResult, directory: Path, draw: bool) -> None:
    """Print the success of every task of a suite, and draw it as bars."""
    from apexrl.experiments.plots import plot_tasks

    tasks = result.record().get("per_task", {})
    for name, task in tasks.items():
        low, high = task["interval"]
        rate = f"{100 * task['success_rate']:5.1f} % ({100 * low:.0f} to {100 * high:.0f} %)"
        print(f"  {name:28} {rate} over {task['episodes']} episodes")
    if tasks and draw:
        print(f"Success of each task: {plot_tasks(tasks, directory / 'tasks.png')}")


def write_video(env: VecEnv, policy: Policy, path: Path, seed: int, episodes: int) -> None:
    """Write a video of whole episodes and close the environment."""
    from apexrl.evaluation.video import record_video

    try:
        print(f"Video: {record_video(env, policy, path, seed=seed, num_episodes=episodes)}")
    finally:
        env.close()
