"""Plot how the student of a PPO-ROA run adapts: its reward beside the teacher's, its guess beside the true feature.

    python benchmarks/adaptation.py RUN_DIR [RUN_DIR ...]

Loads the newest checkpoint of each run and writes ``RUN_DIR/NAME-adaptation.png``. Where the physics of the task can
change within an episode, the motors lose most of their strength in the middle of it. The left panel has the mean reward
per step of the teacher, of the student, and of the student with its latent fixed; the right one follows the privileged
feature along one episode.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apexrl.core.errors import ApexRLError
from apexrl.core.types import DONE, OBSERVATION, REWARD
from apexrl.envs import VecEnv
from apexrl.policies import Policy, ROAPolicy
from apexrl.rollout import make_actor, rollout
from apexrl.run.tasks import TaskConfig
from apexrl.run.trained_policy import TrainedPolicy, load_trained

EPISODES, SEED, ABLATION_SEED = 256, 12345, 777
LARGE_CHANGES: dict[str, dict[str, Any]] = {
    "payload": {"change": "gain", "fixed": {"gain": 1.8}, "change_to": {"gain": 0.4}},
    "mujoco/WalkerPayload": {"change": "strength", "strength_range": [1.4, 1.4], "change_to": 0.6},
}
"""Tasks whose physics can change within an episode, and options by which motors lose most of their strength."""
CHANGE_OPTIONS = ("change_step", "change", "change_to", "fixed")
"""Options of these tasks that would contradict them."""


class Adaptation(NamedTuple):
    """What a teacher and its student did in the same episodes."""

    rewards: dict[str, NDArray[np.float64]]
    """Contender -> mean reward of every step."""
    true: NDArray[np.float64]
    """``[T, F]`` the privileged feature along one episode of the student, up to its end."""
    guess: NDArray[np.float64]
    """``[T, F]`` what the student took it for."""
    change_step: int
    """When the physics changed; 0 for never."""


class ConstantLatent(nn.Module):
    """A latent that never changes."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, obs: Any) -> Tensor:
        """Return it for every observation."""
        return self.value.expand(*obs.shape, -1)


def with_fixed_latent(policy: ROAPolicy, env: VecEnv, num_steps: int) -> Policy:
    """Return the student with its latent fixed to the mean of its guesses along its own episodes."""
    carry = {OBSERVATION: env.reset(seed=ABLATION_SEED)}
    actor = make_actor(policy, env.device, deterministic=True)
    batch, _ = rollout(env, actor, carry, num_steps, keep={OBSERVATION})
    guesses, _ = guessed_and_true(policy, batch[OBSERVATION].reshape(-1))
    blind: Any = copy.deepcopy(policy.student)
    blind.latent = ConstantLatent(guesses.mean(0))
    return blind  # type: ignore[no-any-return]


@torch.no_grad()
def guessed_and_true(policy: ROAPolicy, obs: Any) -> tuple[Tensor, Tensor]:
    """Return the student's guess of the privileged feature, and the feature, for observations ``[..., *]``."""
    normalized = policy.normalized(obs.to(policy.device))
    return policy.adapt_ema(normalized), policy.encoder_priv(normalized)


def mean_rewards(env: VecEnv, policy: Policy, num_steps: int, seed: int = SEED) -> Tensor:
    """Return the mean reward of every step ``[T]`` over the first episodes, which are the same for every policy.

    An episode that has ended earns nothing.
    """
    policy.eval()
    actor = make_actor(policy, env.device, deterministic=True)
    batch, _ = rollout(env, actor, {OBSERVATION: env.reset(seed=seed)}, num_steps, keep=())
    done = batch[DONE].int()
    runs = done.cumsum(0) == done  # no step before this one has ended it
    means: Tensor = (batch[REWARD] * runs).mean((1, 2)).cpu()
    return means


def compare(trained: TrainedPolicy, episodes: int = EPISODES) -> Adaptation:
    """Run teacher, student and the student without its guess; where the task can, the physics change midway."""
    policy = trained.policy
    assert isinstance(policy, ROAPolicy)
    usual = trained.make_env(episodes)
    num_steps = min(usual.max_episode_steps or 200, 500)
    large_change = LARGE_CHANGES.get(trained.config.task.id or "")
    change_step = num_steps // 2 if large_change else 0
    if large_change:
        changing = _with_change(trained, episodes, {"change_step": change_step, "change": large_change["change"]})
        one = _with_change(trained, 1, {"change_step": change_step, **large_change})
    else:
        changing, one = usual, trained.make_env(1)
    contenders = {
        "teacher": policy.teacher,
        "student": policy,
        "student, latent fixed": with_fixed_latent(policy, usual, num_steps),
    }
    rewards = {name: mean_rewards(changing, who, num_steps).double().numpy() for name, who in contenders.items()}
    actor = make_actor(policy, one.device, deterministic=True)
    carry = {OBSERVATION: one.reset(seed=5)}
    batch, _ = rollout(one, actor, carry, num_steps, keep={OBSERVATION}, until_done=True)
    guess, true = (x.double().cpu().numpy() for x in guessed_and_true(policy, batch[OBSERVATION].reshape(-1)))
    for env in (usual, changing, one):
        env.close()
    return Adaptation(rewards, true, guess, change_step)


def _with_change(trained: TrainedPolicy, num_envs: int, options: dict[str, Any]) -> VecEnv:
    """Make environments of the task with a change of physics in place of its own."""
    task = trained.config.task
    assert isinstance(task, TaskConfig)
    kept = {name: value for name, value in task.kwargs.items() if name not in CHANGE_OPTIONS}
    config = replace(trained.config, task=replace(task, kwargs={**kept, **options}))
    return config.task.make_env(trained.device, num_envs)


def draw(adaptation: Adaptation, path: Path) -> Path:
    """Draw the rewards, and the three features that vary most, into a file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for index, (name, values) in enumerate(adaptation.rewards.items()):
        left.plot(values, color=f"C{index}", label=f"{name}: {values.mean():.3f}")
    left.set(title="mean reward of a step", xlabel="step")
    for index in np.argsort(-adaptation.true.std(0))[:3]:
        right.plot(adaptation.true[:, index], color=f"C{index}", linestyle="--")
        right.plot(adaptation.guess[:, index], color=f"C{index}", label=f"feature {index}")
    length, num_steps = len(adaptation.true), len(next(iter(adaptation.rewards.values())))
    ended = f" (the episode ended after {length})" if length < num_steps else ""
    right.set(title="privileged feature: true (dashed), guessed", xlabel=f"step{ended}")
    for axis in (left, right):
        if adaptation.change_step:
            axis.axvline(adaptation.change_step, color="gray", linestyle=":", label="motors change")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, dpi=130, format=path.suffix.lstrip("."))
    plt.close(figure)
    return temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="runs of PPO-ROA")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of the figures; default each run's own directory")
    parser.add_argument("--format", choices=("png", "pdf", "svg"), default="png", help="default png")
    options = parser.parse_args()
    for run_dir in options.run_dirs:
        try:
            trained = load_trained(run_dir)
        except ApexRLError as error:
            parser.error(str(error))
        if not isinstance(trained.policy, ROAPolicy):
            parser.error(f"{run_dir} is not a run of PPO-ROA, so it has no student to plot.")
        name = f"{run_dir.resolve().name}-adaptation.{options.format}"
        print(draw(compare(trained), (options.output or run_dir) / name))


if __name__ == "__main__":
    main()
