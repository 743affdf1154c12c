"""Teacher and student against what has no teacher; the same episodes for all.

    python benchmarks/roa.py [--task payload] [--seeds 0,1,2,3,4]
    python benchmarks/roa.py --task walker --jobs 9 --device cpu
    python benchmarks/roa.py --draw docs/images/roa.png    shows and draws what was measured last

The presets ``payload_roa`` and ``walker_roa``. A score is the mean reward a step over whole episodes, deterministic; an
episode that ends by a fall earns nothing from there on. At equal environment steps: memoryless PPO (the newest frame),
PPO on the stacked history (what the student sees), and the student with its latent fixed to the mean of what it
guesses. Every critic sees the privileged groups. Then the physics change in the middle of an episode, and the student
has to notice.

Every arm of every seed is a job; ``--jobs`` of them run at once, each a process with one thread. What a job measured is
kept in ``--parts``, so that a second call continues where the first was stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import report
import torch
from adaptation import LARGE_CHANGES, guessed_and_true, mean_rewards, with_fixed_latent
from torch import Tensor, nn

from apexrl import PPO, PPOROA, ActorCritic, PPOConfig, PPOROAConfig, ROAPolicy, SyncCollector, Trainer, make_env
from apexrl.agent import TrainingConfig
from apexrl.core.functional.intervals import mean_interval
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import OBS_KEY, OBSERVATION
from apexrl.envs import VecEnv
from apexrl.policies import Policy
from apexrl.policies.config import PolicyConfig
from apexrl.policies.networks import MLPActor
from apexrl.rollout import make_actor, rollout
from apexrl.run.build import make_policy
from apexrl.run.config import Config
from apexrl.run.loading import load_config


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured where."""

    id: str
    preset: str
    record: str
    """Name of the JSON file."""
    seeds: str
    frame: int
    """Numbers of a frame of the history."""
    episodes: int
    length: int
    """Steps of an episode."""
    change_step: int
    changes: tuple[str, ...]
    """What changes in the middle of an episode."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of every environment."""

    def make_env(self, num_envs: int, device: str, **options: Any) -> VecEnv:
        return make_env(self.id, num_envs, device=device, **self.options, **options)


TASKS: Final = {
    "payload": Task(
        id="payload",
        preset="payload_roa",
        record="roa",
        seeds="0,1,2,3,4",
        frame=4,
        episodes=1024,
        length=200,
        change_step=100,
        changes=("mass", "gain"),
    ),
    "walker": Task(
        id="mujoco/WalkerPayload",
        preset="walker_roa",
        record="roa_walker",
        seeds="0,1,2,3,4",
        frame=13,
        episodes=256,
        length=500,
        change_step=250,
        changes=("payload", "strength"),
        options={"num_threads": 1},
    ),
}
AFTER: Final = slice(50, 75)
"""Steps after a change by which the student has to be back."""


class Job(NamedTuple):
    task: str
    arm: str
    seed: int
    steps: int | None
    device: str
    overrides: tuple[tuple[str, str], ...] = ()

    @property
    def config(self) -> Config:
        steps = [("training.total_timesteps", str(self.steps))] if self.steps else []
        return load_config(TASKS[self.task].preset, [*steps, *self.overrides])


def newest_frame_actor(frame: int) -> type[MLPActor]:
    """Return an actor that sees the newest frame of the window alone."""

    class NewestFrameActor(MLPActor):
        def __init__(self, observation_space: gym.spaces.Dict, action_space: Any, **options: Any) -> None:
            space = gym.spaces.Box(-np.inf, np.inf, (frame,))
            super().__init__(gym.spaces.Dict({**observation_space.spaces, OBS_KEY: space}), action_space, **options)

        def forward(self, obs: Any) -> Any:
            newest = obs.copy()
            newest[OBS_KEY] = obs[OBS_KEY][..., -frame:]
            return super().forward(newest)

    return NewestFrameActor


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


def plain_ppo(job: Job, actor_class: type[nn.Module]) -> Policy:
    """Train PPO with an actor that lacks the privileged group, for as many steps as both phases together."""
    config = job.config
    torch.manual_seed(job.seed)
    env = TASKS[job.task].make_env(config.task.num_envs, job.device)
    assert isinstance(config.policy, PolicyConfig)
    layers = {"hidden_dims": config.policy.hidden_dims, "activation": config.policy.activation}
    groups = ["policy", "command", "object"]
    policy = ActorCritic.for_env(
        env,
        actor_class=actor_class,
        actor_cfg={**layers, "groups": groups, "init_std": config.policy.init_std},
        critic_cfg=layers,
        normalize_obs=config.policy.normalize_obs,
    ).to(job.device)
    assert isinstance(config.algo, PPOROAConfig)
    shared = {name: getattr(config.algo, name) for name in (entry.name for entry in fields(PPOConfig))}
    shared.pop("name")
    algorithm = PPO(policy=policy, cfg=PPOConfig(**shared), acceleration=Acceleration(compile=job.device == "cpu"))
    train(env, policy, algorithm, config.training.total_timesteps, job.seed)
    return policy


def teacher_and_student(job: Job) -> tuple[ROAPolicy, ROAPolicy]:
    """Train both phases; return the policy as it was before finetune, and as it is in the end."""
    config = job.config
    torch.manual_seed(job.seed)
    env = TASKS[job.task].make_env(config.task.num_envs, job.device)
    policy = make_policy(config.policy, env, torch.device(job.device), config.algo)
    assert isinstance(policy, ROAPolicy)
    assert isinstance(config.algo, PPOROAConfig)
    algorithm = PPOROA(policy, config.algo, acceleration=Acceleration(compile=job.device == "cpu"))
    before: list[ROAPolicy] = []

    def at_the_boundary(trainer: Trainer, _: Any) -> None:
        if algorithm.phase == "finetune" and not before:
            before.append(copy.deepcopy(policy))

    train(env, policy, algorithm, config.training.total_timesteps, job.seed, at_the_boundary)
    return before[0], policy


def run(job: Job) -> dict[str, Any]:
    """Train one arm of one seed and measure it."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    task, started = TASKS[job.task], time.perf_counter()
    contenders: dict[str, Policy]
    if job.arm == "roa":
        before, policy = teacher_and_student(job)
        usual = task.make_env(task.episodes, job.device)
        contenders = {
            "teacher": before.teacher,  # whom it was distilled from, with the normaliser of that time
            "student before finetune": before,
            "student": policy,
            "student, latent fixed": with_fixed_latent(policy, usual, task.length),
        }
    else:
        actor = newest_frame_actor(task.frame) if job.arm == "memoryless PPO" else MLPActor
        contenders = {job.arm: plain_ppo(job, actor)}
    part: dict[str, Any] = {"scores": {}, "curves": {}, "latent": {}, "trained": time.perf_counter() - started}
    for name, contender in contenders.items():
        measure(job, name, contender, part)
    if job.arm == "roa":
        part["latent"] = latents(job, policy)
    return {**part, "seconds": time.perf_counter() - started}


ARMS: Final = ("roa", "memoryless PPO", "PPO on the history")


def measure(job: Job, name: str, policy: Policy, part: dict[str, Any]) -> None:
    """Add a policy's scores and curves to a part: in usual episodes, and in those whose physics change."""
    task = TASKS[job.task]

    def rewards(**options: Any) -> Tensor:
        return mean_rewards(task.make_env(task.episodes, job.device, **options), policy, task.length)

    usual = rewards()
    part["curves"][name] = rounded(usual)
    part["scores"][name] = float(usual.mean())
    if name not in ("teacher", "student", "memoryless PPO"):
        return
    for what in task.changes:
        changed = rewards(change_step=task.change_step, change=what)
        after = changed[task.change_step :]
        part["curves"][f"{name}, {what} changes"] = rounded(changed)
        part["scores"] |= {
            f"{name}, {what}: back": float(after[AFTER].mean() - usual[task.change_step :][AFTER].mean()),
            f"{name}, {what}: after": float(after[AFTER].mean()),
            f"{name}, {what}: dip": float(after[:10].mean()),
        }


def latents(job: Job, policy: ROAPolicy) -> dict[str, Any]:
    """Follow the privileged feature and the student's guess through one episode in which the motors get weak."""
    task = TASKS[job.task]
    env = task.make_env(1, job.device, change_step=task.change_step, **LARGE_CHANGES[task.id])
    carry = {OBSERVATION: env.reset(seed=5)}
    batch, _ = rollout(env, make_actor(policy, env.device, deterministic=True), carry, task.length, keep={OBSERVATION})
    guess, true = guessed_and_true(policy, batch[OBSERVATION].reshape(-1))
    return {"true": rounded(true), "guess": rounded(guess)}


def rounded(values: Tensor) -> list[Any]:
    numbers: list[Any] = (values.double() * 1e4).round().div(1e4).tolist()
    return numbers


def run_all(jobs: list[Job], num_jobs: int, folder: Path) -> dict[Job, dict[str, Any]]:
    """Return what each job measured: read where that was kept, else run now."""
    folder.mkdir(parents=True, exist_ok=True)
    # A part of other settings is not read.
    files = {job: folder / f"{job.task}-{job.seed}-{job.arm.replace(' ', '_')}.json" for job in jobs}
    parts = {}
    for job, file in files.items():
        kept = json.loads(file.read_text()) if file.exists() else {}
        if kept.get("config") == json.loads(json.dumps(job.config.to_dict())):
            parts[job] = kept
    missing = [job for job in jobs if job not in parts]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(run, job): job for job in missing}
        for future in as_completed(futures):
            job = futures[future]
            parts[job] = {**future.result(), "config": job.config.to_dict()}
            files[job].write_text(json.dumps(parts[job]))
            scores = {name: round(value, 3) for name, value in parts[job]["scores"].items() if ":" not in name}
            print(f"seed {job.seed}, {job.arm}: {parts[job]['seconds']:.0f} s, {scores}", flush=True)
    return parts


def join(parts: dict[Job, dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return scores, curves and seconds of one seed."""
    ours = [part for job, part in parts.items() if job.seed == seed]
    merged: dict[str, Any] = {"seconds": sum(part["seconds"] for part in ours), "row": {}, "curves": {}}
    for part in ours:
        merged["row"] |= part["scores"]
        merged["curves"] |= part["curves"]
    return merged


def interval(values: Any) -> float:
    """Half of the 95 % confidence interval of the mean over seeds."""
    low, high = mean_interval(np.array(values))
    return float(high - low) / 2


def show(rows: list[dict[str, Any]], changes: tuple[str, ...]) -> None:
    names = [name for name in rows[0] if name not in ("seed", "seconds") and ":" not in name]
    for name in names:
        values = [row[name] for row in rows]
        print(f"{name:28} {np.mean(values):.3f} ± {interval(values):.3f}   {', '.join(f'{v:.3f}' for v in values)}")
    share = [row["student"] / row["teacher"] for row in rows]
    print(f"student / its own teacher    {np.mean(share):.3f}, lowest {min(share):.3f}")
    gap = [(row["student"] - row["memoryless PPO"]) / (row["teacher"] - row["memoryless PPO"]) for row in rows]
    print(f"share of the gap closed      {np.mean(gap):.3f}, lowest {min(gap):.3f}")
    for rival in ("memoryless PPO", "student, latent fixed", "PPO on the history"):
        ahead = [row["student"] - row[rival] for row in rows]
        print(f"student - {rival:21} {np.mean(ahead):+.3f} ± {interval(ahead):.3f}, seed by seed")
    gain = [row["student"] - row["student before finetune"] for row in rows]
    print(f"gained by finetune           {np.mean(gain):+.3f}, lowest {min(gain):+.3f}")
    for what in changes:
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


def draw(task: Task, curves: list[dict[str, list[float]]], latent: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    for axis, what in zip(axes[:2], task.changes, strict=True):
        for index, name in enumerate(("teacher", "student", "memoryless PPO")):
            values = np.array([curve[f"{name}, {what} changes"] for curve in curves])
            axis.plot(values.mean(0), color=f"C{index}", label=name)
            steps = range(values.shape[1])
            axis.fill_between(steps, values.min(0), values.max(0), color=f"C{index}", alpha=0.15, linewidth=0)
        title = f"{what} changes at step {task.change_step}"
        axis.set(title=title, xlabel="step", ylabel="mean reward", ylim=(0, 1))
        axis.legend(fontsize=8)
    true, guess = np.array(latent["true"]), np.array(latent["guess"])
    for index in np.argsort(-np.abs(true[-1] - true[0]))[:3]:
        axes[2].plot(true[:, index], color=f"C{index}", linestyle="--")
        axes[2].plot(guess[:, index], color=f"C{index}", label=f"feature {index}")
    axes[2].set(title="privileged feature: true (dashed), guessed", xlabel="step")
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.axvline(task.change_step, color="gray", linestyle=":")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="payload")
    parser.add_argument("--seeds", help="0 to 4 when not given")
    parser.add_argument("--steps", type=int, help="environment steps; those of the preset when not given")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--arms", default=",".join(ARMS), help="some of them only: trains these, writes no record")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings than the preset's")
    parser.add_argument("--parts", type=Path, default=Path("runs/roa"), help="where finished jobs are kept")
    parser.add_argument("--draw", type=Path, help="show and draw into this file what was measured last")
    options = parser.parse_args()
    task = TASKS[options.task]
    if options.draw:
        record = json.loads((Path(__file__).parent / f"{task.record}.json").read_text())
        show(record["rows"], task.changes)
        draw(task, record["curves"], record["latent"], options.draw)
        return
    seeds = [int(seed) for seed in (options.seeds or task.seeds).split(",")]
    arms, words = options.arms.split(","), [tuple(word.split("=", 1)) for word in options.set]
    jobs = [Job(options.task, arm, seed, options.steps, options.device, tuple(words)) for seed in seeds for arm in arms]
    parts = run_all(jobs, options.jobs, options.parts)
    if set(arms) != set(ARMS):
        return
    joined = {seed: join(parts, seed) for seed in seeds}
    rows = [{"seed": seed, "seconds": whole["seconds"], **whole["row"]} for seed, whole in joined.items()]
    content = {
        "task": options.task,
        "config": jobs[0].config.to_dict(),
        "rows": rows,
        "curves": [whole["curves"] for whole in joined.values()],
        "latent": next(part["latent"] for job, part in parts.items() if job.arm == "roa" and job.seed == seeds[-1]),
    }
    print(f"wrote {report.write(task.record, content)}")
    show(rows, task.changes)


if __name__ == "__main__":
    main()
