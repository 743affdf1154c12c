"""Teacher and student on ``payload``, against what has no teacher; five seeds, the same episodes for all.

    python benchmarks/roa.py [--seeds 0,1,2,3,4]
    python benchmarks/roa.py --draw docs/images/roa.png    shows and draws what was measured last

The preset ``payload_roa``. Scores are the mean reward a step over 1,024 episodes of 200 steps, deterministic. At equal
environment steps: memoryless PPO (the newest frame), PPO on the stacked history (what the student sees), and the
student with its latent fixed to the mean of what it guesses. Every critic sees the privileged groups. Then the physics
change in the middle of an episode, and the student has to notice.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import report
import torch
from torch import Tensor, nn

from apexrl import PPO, PPOROA, ActorCritic, PPOConfig, PPOROAConfig, ROAPolicy, SyncCollector, Trainer, make_env
from apexrl.adaptation import LARGE_CHANGE, guessed_and_true, mean_rewards, with_fixed_latent
from apexrl.agent import TrainingConfig
from apexrl.config import Config, load_config
from apexrl.envs import VecEnv
from apexrl.graphs import Acceleration
from apexrl.models import MLPActor
from apexrl.policies import Policy
from apexrl.rollout import make_actor, rollout
from apexrl.run import make_policy
from apexrl.sections import PolicyConfig
from apexrl.types import OBS_KEY, OBSERVATION

EPISODES, LENGTH, CHANGE, FRAME = 1024, 200, 100, 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class NewestFrameActor(MLPActor):
    """An actor that sees the newest frame of the window alone."""

    def __init__(self, observation_space: gym.spaces.Dict, action_space: Any, **options: Any) -> None:
        frame = gym.spaces.Box(-np.inf, np.inf, (FRAME,))
        super().__init__(gym.spaces.Dict({**observation_space.spaces, OBS_KEY: frame}), action_space, **options)

    def forward(self, obs: Any) -> Any:
        newest = obs.copy()
        newest[OBS_KEY] = obs[OBS_KEY][..., -FRAME:]
        return super().forward(newest)


def rewards(policy: Policy, **task_options: Any) -> Tensor:
    """Return the mean reward of every step ``[LENGTH]`` over the episodes, which are the same for every policy."""
    return mean_rewards(make_env("payload", EPISODES, device=DEVICE, **task_options), policy, LENGTH)


def train(env: VecEnv, policy: Any, algorithm: Any, steps: int, seed: int, on_iteration: Any = None) -> None:
    collector = SyncCollector(
        env,
        algorithm.rollout_policy,
        keep=algorithm.required_keys,
        seed=seed,
        acceleration=algorithm.acceleration,
    )
    trainer = Trainer(env, policy, algorithm, TrainingConfig(seed=seed), collector=collector)
    if on_iteration is not None:
        trainer.add_callback("post_iteration", on_iteration)
    trainer.learn(steps)


def plain_ppo(config: Config, seed: int, actor_class: type[nn.Module]) -> Policy:
    """Train PPO with an actor that lacks the privileged group, for as many steps as both phases together."""
    torch.manual_seed(seed)
    env = make_env("payload", config.task.num_envs, device=DEVICE)
    assert isinstance(config.policy, PolicyConfig)
    layers = {"hidden_dims": config.policy.hidden_dims, "activation": config.policy.activation}
    groups = ["policy", "command", "object"]
    policy = ActorCritic.for_env(
        env,
        actor_class=actor_class,
        actor_cfg={**layers, "groups": groups, "init_std": config.policy.init_std},
        critic_cfg=layers,
    ).to(DEVICE)
    assert isinstance(config.algo, PPOROAConfig)
    shared = {name: getattr(config.algo, name) for name in (entry.name for entry in fields(PPOConfig))}
    shared.pop("name")
    algorithm = PPO(policy=policy, cfg=PPOConfig(**shared), acceleration=Acceleration())
    train(env, policy, algorithm, config.training.total_timesteps, seed)
    return policy


def one_seed(config: Config, seed: int) -> tuple[dict[str, Any], dict[str, list[float]], dict[str, Any]]:
    torch.manual_seed(seed)
    env = make_env("payload", config.task.num_envs, device=DEVICE)
    policy = make_policy(config.policy, env, DEVICE, config.algo)
    assert isinstance(policy, ROAPolicy)
    assert isinstance(config.algo, PPOROAConfig)
    algorithm = PPOROA(policy, config.algo, acceleration=Acceleration())
    started = time.perf_counter()
    before: dict[str, Any] = {}

    def at_the_boundary(trainer: Trainer, _: Any) -> None:
        if algorithm.phase == "finetune" and not before:
            before["student"] = copy.deepcopy(policy)

    train(env, policy, algorithm, config.training.total_timesteps, seed, at_the_boundary)
    contenders: dict[str, Policy] = {
        "teacher": policy.teacher,
        "student before finetune": before["student"],
        "student": policy,
        "student, latent fixed": with_fixed_latent(policy, make_env("payload", EPISODES, device=DEVICE), LENGTH),
        "memoryless PPO": plain_ppo(config, seed, NewestFrameActor),
        "PPO on the history": plain_ppo(config, seed, MLPActor),
    }
    row: dict[str, Any] = {"seed": seed, "seconds": time.perf_counter() - started}
    curves: dict[str, list[float]] = {}
    for name, contender in contenders.items():
        curves[name] = rounded(rewards(contender))
        row[name] = float(np.mean(curves[name]))
    for what in ("mass", "gain"):
        for name in ("teacher", "student", "memoryless PPO"):
            changed = rewards(contenders[name], change_step=CHANGE, change=what)
            curves[f"{name}, {what} changes"] = rounded(changed)
            row[f"{name}, {what}: back"] = float(changed[CHANGE + 50 : CHANGE + 75].mean()) - float(
                np.mean(curves[name][CHANGE + 50 : CHANGE + 75])
            )
            row[f"{name}, {what}: after"] = float(changed[CHANGE + 50 : CHANGE + 75].mean())
            row[f"{name}, {what}: dip"] = float(changed[CHANGE : CHANGE + 10].mean())
    return row, curves, latents(policy)


def latents(policy: ROAPolicy) -> dict[str, Any]:
    """Follow the privileged feature and the student's guess through one episode in which the gain falls."""
    env = make_env("payload", 1, device=DEVICE, change_step=CHANGE, **LARGE_CHANGE)
    carry = {OBSERVATION: env.reset(seed=5)}
    batch, _ = rollout(env, make_actor(policy, DEVICE, deterministic=True), carry, LENGTH, keep={OBSERVATION})
    guess, true = guessed_and_true(policy, batch[OBSERVATION].reshape(-1))
    return {"true": rounded(true), "guess": rounded(guess)}


def rounded(values: Tensor) -> list[Any]:
    numbers: list[Any] = (values.double() * 1e4).round().div(1e4).tolist()
    return numbers


def interval(values: Any) -> float:
    """Half of the 95 % confidence interval of the mean over seeds."""
    from scipy import stats

    return (
        float("nan")
        if len(values) < 2
        else float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    )


def show(rows: list[dict[str, Any]]) -> None:
    names = [name for name in rows[0] if name not in ("seed", "seconds") and ":" not in name]
    for name in names:
        values = [row[name] for row in rows]
        print(f"{name:28} {np.mean(values):.3f} ± {interval(values):.3f}   {', '.join(f'{v:.3f}' for v in values)}")
    share = [row["student"] / row["teacher"] for row in rows]
    print(f"student / its own teacher    {np.mean(share):.3f}, lowest {min(share):.3f}")
    gap = [(row["student"] - row["memoryless PPO"]) / (row["teacher"] - row["memoryless PPO"]) for row in rows]
    print(f"share of the gap closed      {np.mean(gap):.3f}, lowest {min(gap):.3f}")
    gain = [row["student"] - row["student before finetune"] for row in rows]
    print(f"gained by finetune           {np.mean(gain):+.3f}, lowest {min(gain):+.3f}")
    for what in ("mass", "gain"):
        back, after, other, dip = (
            [row[key] for row in rows]
            for key in (
                f"student, {what}: back",
                f"student, {what}: after",
                f"memoryless PPO, {what}: after",
                f"student, {what}: dip",
            )
        )
        print(
            f"{what} changes: 10 steps after it the student has {np.mean(dip):.3f}; 50 to 75 steps after it "
            f"{np.mean(after):.3f}, {np.mean(back):+.3f} from without a change (lowest {min(back):+.3f}); memoryless "
            f"{np.mean(other):.3f}"
        )


def draw(curves: list[dict[str, list[float]]], latent: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    for axis, what in zip(axes[:2], ("mass", "gain"), strict=True):
        for index, name in enumerate(("teacher", "student", "memoryless PPO")):
            values = np.array([curve[f"{name}, {what} changes"] for curve in curves])
            axis.plot(values.mean(0), color=f"C{index}", label=name)
            axis.fill_between(range(LENGTH), values.min(0), values.max(0), color=f"C{index}", alpha=0.15, linewidth=0)
        axis.axvline(CHANGE, color="gray", linestyle=":")
        axis.set(title=f"{what} changes at step {CHANGE}", xlabel="step", ylabel="mean reward", ylim=(0, 1))
        axis.legend(fontsize=8)
    true, guess = np.array(latent["true"]), np.array(latent["guess"])
    for index in np.argsort(-np.abs(true[-1] - true[0]))[:3]:
        axes[2].plot(true[:, index], color=f"C{index}", linestyle="--")
        axes[2].plot(guess[:, index], color=f"C{index}", label=f"feature {index}")
    axes[2].axvline(CHANGE, color="gray", linestyle=":")
    axes[2].set(title="privileged feature: true (dashed), guessed", xlabel="step")
    axes[2].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int, help="environment steps; those of the preset when not given")
    parser.add_argument("--draw", type=Path, help="show and draw into this file what was measured last")
    options = parser.parse_args()
    if options.draw:
        record = json.loads((Path(__file__).parent / "roa.json").read_text())
        show(record["rows"])
        draw(record["curves"], record["latent"], options.draw)
        return
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    overrides = [("training.total_timesteps", str(options.steps))] if options.steps else []
    config = load_config("payload_roa", overrides)
    rows, curves = [], []
    latent: dict[str, Any] = {}
    for seed in map(int, options.seeds.split(",")):
        row, curve, latent = one_seed(config, seed)
        rows.append(row)
        curves.append(curve)
        print(f"seed {seed}: {row['seconds']:.0f} s, student {row['student']:.3f} of {row['teacher']:.3f}", flush=True)
    content = {"task": "payload", "config": config.to_dict(), "rows": rows, "curves": curves, "latent": latent}
    print(f"wrote {report.write('roa', content)}")
    show(rows)


if __name__ == "__main__":
    main()
