"""What the tests of the simulators share: a short run of ``apexrl train``, and two environments from one seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apexrl.cli.main import main
from apexrl.core.system.files import read_json_lines
from apexrl.envs import VecEnv
from apexrl.policies import ActorCritic
from apexrl.rollout import rollout

SHORT_RUN = {
    "policy.hidden_dims": "[16]",
    "algo.num_epochs": "1",
    "algo.num_minibatches": "2",
    "training.eval_interval": "2",
    "training.eval_episodes": "2",
    "training.eval_num_envs": "2",
    "training.final_eval_episodes": "0",
    "training.device": "cpu",
    "features.save_video": "false",
    "features.save_plot": "false",
}
"""Three iterations of PPO with an evaluation, where ``algo.num_steps`` and ``training.total_timesteps`` say so."""


def train(task: str, run_dir: Path, options: dict[str, str]) -> list[dict[str, Any]]:
    """Run ``apexrl train`` with PPO and return the lines of its log."""
    words = [word for name, value in {**SHORT_RUN, **options}.items() for word in (f"--{name}", value)]
    assert main(["train", "--task.id", task, "--run-dir", str(run_dir), *words]) == 0
    return list(read_json_lines(run_dir / "metrics.jsonl"))


def logged(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The last finite number under each name."""
    return {name: value for line in lines for name, value in line.items() if isinstance(value, float | int)}


def assert_the_bootstrap_sees_the_true_successor(short: VecEnv, long: VecEnv, limit: int) -> None:
    """``short`` meets its time limit after ``limit`` steps; ``long`` is the same task with a later limit.

    From one seed and the same actions, the last step of ``short`` leads where that of ``long`` leads, and the value
    that its return is bootstrapped from is that of this state.
    """
    action = 0.1 * torch.ones(short.num_envs, *short.action_space.shape)  # type: ignore[misc]
    torch.manual_seed(0)
    policy = ActorCritic.for_env(short, actor_cfg={"hidden_dims": [8]})
    batches, after = [], []
    for env in (short, long):
        batch, carry = rollout(env, lambda _: {"action": action.clone()}, {"observation": env.reset(seed=3)}, limit)
        batches.append(batch)
        after.append(carry["observation"])
    assert batches[0]["truncated"][-1].all()
    assert not batches[1]["done"].any()
    with torch.no_grad():
        true, given = policy.get_value(after[1]), policy.values(batches[0])[1][-1]
        fresh = policy.get_value(after[0])
    torch.testing.assert_close(given, true)
    assert differ(given, fresh)


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether every row differs by more than rounding."""
    return bool(((a - b).abs() > 1e-4).all())
