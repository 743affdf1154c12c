"""Writes a small run of the package that is imported, to keep: ``python tests/versions/make.py ppo 4-now``.

Do it before a migration is added. With ``PYTHONPATH`` set to the sources of an older commit it writes what that wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path

from apexrl.cli import main
from apexrl.loggers import read_json_lines

COMMON = [
    "--policy.hidden_dims", "[4]", "--training.save_interval", "2", "--training.final_eval_episodes", "0",
    "--training.device", "cpu", "--features.save_video", "false", "--features.save_plot", "false",
    "--logging.tensorboard", "false", "--training.eval_interval", "0",
]  # fmt: skip
PPO = [
    "--task.num_envs", "2", "--algo.num_steps", "8", "--algo.num_epochs", "2", "--algo.num_minibatches", "2",
    "--training.total_timesteps", "64",
]  # fmt: skip
RUNS = {
    "ppo": ["cartpole_ppo", *PPO, "--policy.normalize_obs", "true", "--algo.normalize_reward", "true"],
    "gru": ["cartpole_ppo", *PPO, "--policy.kind", "gru", "--policy.memory_dim", "4"],
    "roa": [
        "payload_roa", *PPO, "--policy.adapt_dims", "[4]", "--policy.encoder_dims", "[4]",
        "--policy.critic_hidden_dims", "[4]", "--policy.latent_dim", "2",
    ],
    "sac": [
        "pendulum_sac", "--task.num_envs", "2", "--algo.batch_size", "4", "--algo.learning_starts", "4",
        "--training.total_timesteps", "32", "--algo.replay_capacity", "32", "--algo.save_replay", "true",
        "--algo.num_steps", "4", "--logging.log_interval", "1",
    ],
}  # fmt: skip
"""Three or four iterations each."""


def make(what: str, run_dir: Path) -> None:
    """Train, and keep what a resumed run needs and what it must reproduce: the second checkpoint, and all metrics."""
    assert main(["train", *RUNS[what], *COMMON, "--run-dir", str(run_dir)]) == 0
    assert len(read_json_lines(run_dir / "metrics.jsonl")) in (3, 4)
    for path in (run_dir / "checkpoints").glob("*.pt"):
        if path.name != "iteration_000002.pt":
            path.unlink()


if __name__ == "__main__":
    make(sys.argv[1], Path(__file__).parent / sys.argv[2])
