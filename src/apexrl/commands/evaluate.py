"""``apexrl eval`` and ``apexrl play``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from apexrl.commands.common import AddCommand, Overrides, positive, progress, seed_number
from apexrl.errors import ConfigError

if TYPE_CHECKING:
    from apexrl.envs import VecEnv
    from apexrl.evaluation import EvaluationResult
    from apexrl.policies import Policy


def register(command: AddCommand) -> None:
    """Add the commands."""
    evaluate = command("eval", "Evaluate a trained policy on whole episodes.", _eval)
    evaluate.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    evaluate.add_argument("--episodes", type=positive, default=100, metavar="N", help="default 100")
    evaluate.add_argument("--num-envs", type=positive, default=None, metavar="N", help="default training.eval_num_envs")
    evaluate.add_argument("--seed", type=seed_number, metavar="N", help="of the episodes; default as in training")
    evaluate.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mode")
    evaluate.add_argument("--csv", type=Path, metavar="DIR", help="write one table of steps for each environment")

    play = command("play", "Write a video of a trained policy.", _play)
    play.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    play.add_argument("--episodes", type=positive, default=3, metavar="N", help="default 3")
    play.add_argument("--output", type=Path, metavar="FILE.mp4", help="default video.mp4 in the run directory")
    play.add_argument("--seed", type=seed_number, default=1_000_003, metavar="N", help="of the episodes")


def _eval(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.agent.trainer import EVAL_SEED_OFFSET
    from apexrl.evaluation import evaluate, save_step_csvs
    from apexrl.run import load_trained

    trained = load_trained(options.source)
    seed = trained.config.training.seed + EVAL_SEED_OFFSET if options.seed is None else options.seed
    num_envs = min(options.num_envs or trained.config.training.eval_num_envs, options.episodes)
    env = trained.make_env(num_envs)
    with progress("Evaluating", options.episodes) as tell:
        result = evaluate(
            env,
            trained.policy,
            options.episodes,
            deterministic=not options.stochastic,
            seed=seed,
            record_steps=options.csv is not None,
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


def _play(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.run import load_trained

    trained = load_trained(options.source)
    directory = options.source if options.source.is_dir() else options.source.parent
    path = options.output or directory / "video.mp4"
    if path.suffix != ".mp4":
        raise ConfigError(f"--output {path} must end in .mp4.")
    write_video(trained.make_env(1), trained.policy, path, options.seed, options.episodes)
    return 0


def show_tasks(result: EvaluationResult, directory: Path, draw: bool) -> None:
    """Print the success of every task of a suite, and draw it as bars."""
    from apexrl.plots import plot_tasks

    tasks = result.record().get("per_task", {})
    for name, task in tasks.items():
        low, high = task["interval"]
        rate = f"{100 * task['success_rate']:5.1f} % ({100 * low:.0f} to {100 * high:.0f} %)"
        print(f"  {name:28} {rate} over {task['episodes']} episodes")
    if tasks and draw:
        print(f"Success of each task: {plot_tasks(tasks, directory / 'tasks.png')}")


def write_video(env: VecEnv, policy: Policy, path: Path, seed: int, episodes: int) -> None:
    """Write a video of whole episodes and close the environment."""
    from apexrl.evaluation import record_video

    try:
        print(f"Video: {record_video(env, policy, path, seed=seed, num_episodes=episodes)}")
    finally:
        env.close()
