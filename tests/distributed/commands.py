"""What the tests ask of the command line."""

from __future__ import annotations

from pathlib import Path

LIFT = {
    "policy.hidden_dims": "[8]",
    "policy.normalize_obs": "true",
    "algo.num_steps": "8",
    "algo.num_epochs": "2",
    "algo.num_minibatches": "2",
    "algo.schedule": "adaptive",
    "algo.normalize_reward": "true",
    "task.num_envs": "8",
    "task.kwargs.max_episode_steps": "12",
    "training.device": "cpu",
    "training.total_timesteps": "640",
    "training.save_interval": "2",
    "training.eval_interval": "4",
    "training.eval_episodes": "3",
    "training.final_eval_episodes": "4",
    "features.save_video": "false",
    "features.save_plot": "false",
}

HALF = {**LIFT, "training.total_timesteps": "320", "training.final_eval_episodes": "0"}


def options(values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def start_alone(directory: Path) -> list[str]:
    """Return the command line with which one process starts a run that two will resume."""
    return ["train", "lift_ppo", "--run-dir", str(directory / "grown"), *options(HALF)]


def commands(directory: Path, rank: int) -> dict[str, list[str]]:
    """Return command lines that a process runs one after the other."""
    rest = {"training.total_timesteps": "640", "training.final_eval_episodes": "4"}
    return {
        "whole": ["train", "lift_ppo", "--run-dir", str(directory / "whole"), *options(LIFT)],
        "half": ["train", "lift_ppo", "--run-dir", str(directory / "half"), *options(HALF)],
        "resumed": ["train", "--resume", str(directory / "half"), *options(rest)],
        "grown": ["train", "--resume", str(directory / "grown"), *options(rest)],
        "odd": ["train", "lift_ppo", "--run-dir", str(directory / "odd"), *options({**LIFT, "task.num_envs": "7"})],
        "each": ["plot", str(directory / f"nowhere-{rank}")],
        "alone": ["plot", str(directory / "nowhere")] if rank else ["list"],
        "bc": ["train", "mt10_bc", "--run-dir", str(directory / "bc"), "--training.device", "cpu"],
    }
