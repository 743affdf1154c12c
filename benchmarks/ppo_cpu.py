"""PPO on one CPU thread: ours, Stable-Baselines3, rsl_rl, and the environment alone.

    python benchmarks/ppo_cpu.py [--quick]
    python benchmarks/ppo_cpu.py --only-mujoco      MujocoVecEnv and Gymnasium's stepping alone, in turns

HalfCheetah-v5: 8 environments, 256 steps, 10 epochs of 32 minibatches; ours also on MujocoVecEnv with 64 environments,
simulated by some threads and learned from by one. CartPole-v1: 8 environments, 128 steps, 4 epochs of 4 minibatches.
Networks 64-64. Last, the rollout of the tensor task ``cartpole`` with 4,096 environments. A machine's speed changes by
the minute, so ``--only-mujoco`` times both in turns, and divides each figure by the one just before it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import report
import torch

from apexrl.algorithms import PPO, PPOConfig
from apexrl.collectors import SyncCollector
from apexrl.core.system.acceleration import Acceleration
from apexrl.envs import make_env
from apexrl.envs.mujoco.simulation import num_cores
from apexrl.policies import ActorCritic


@dataclass(frozen=True)
class Work:
    task: str
    num_envs: int
    num_steps: int
    epochs: int
    minibatches: int


CHEETAH = Work("HalfCheetah-v5", 8, 256, 10, 32)
CARTPOLE = Work("CartPole-v1", 8, 128, 4, 4)
MANY = Work("mujoco/HalfCheetah-v5", 64, 256, 10, 32)
NAME = f"ours, compiled, {MANY.num_envs} envs, {num_cores()} cores"


def environment_alone(work: Work, total: int) -> float:
    env = gym.make_vec(work.task, num_envs=work.num_envs, vectorization_mode="sync")
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]
    started = time.perf_counter()
    for i in range(total // work.num_envs):
        env.step(actions[i % 64])
    return total / (time.perf_counter() - started)


@contextlib.contextmanager
def learner(work: Work, *, compile_it: bool, **env_options: Any) -> Iterator[Callable[[int], float]]:
    """Give a function that learns from about so many steps and returns how many it took a second."""
    torch.manual_seed(0)
    acceleration = Acceleration(compile=compile_it)
    with patch.dict(os.environ, {} if work is MANY else {"OMP_NUM_THREADS": "1"}):  # also of the simulation
        env = make_env(work.task, work.num_envs, **env_options)
    policy = ActorCritic.for_env(env)
    cfg = PPOConfig(
        num_steps=work.num_steps,
        num_epochs=work.epochs,
        num_minibatches=work.minibatches,
        normalize_advantage="minibatch",
    )
    algorithm = PPO(policy=policy, cfg=cfg, acceleration=acceleration)
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=0, acceleration=acceleration)

    def speed(total: int) -> float:
        iterations = max(1, total // (work.num_steps * work.num_envs))
        started = time.perf_counter()
        for _ in range(iterations):
            algorithm.update(collector.collect(work.num_steps))
        return iterations * work.num_steps * work.num_envs / (time.perf_counter() - started)

    with contextlib.closing(env):
        speed(3 * work.num_steps * work.num_envs)
        yield speed


def ours(work: Work, total: int, *, compile_it: bool, **env_options: Any) -> float:
    with learner(work, compile_it=compile_it, **env_options) as speed:
        return speed(total)


def sb3(work: Work, total: int) -> float:
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env(work.task, n_envs=work.num_envs, seed=0)
    batch = work.num_steps * work.num_envs
    model = stable_baselines3.PPO(
        "MlpPolicy", env, n_steps=work.num_steps, batch_size=batch // work.minibatches, n_epochs=work.epochs,
        device="cpu", seed=0,
    )  # fmt: skip
    model.learn(batch)
    started = time.perf_counter()
    model.learn(total)
    return total / (time.perf_counter() - started)


def rsl(work: Work, total: int) -> float:
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    class Env:
        def __init__(self) -> None:
            self.inner = gym.make_vec(work.task, num_envs=work.num_envs, vectorization_mode="sync")
            self.num_envs, self.device, self.max_episode_length = work.num_envs, "cpu", 1000
            self.num_actions = int(np.prod(self.inner.single_action_space.shape or (1,)))
            self.episode_length_buf = torch.zeros(work.num_envs)
            self.cfg: dict[str, Any] = {}
            self.obs, _ = self.inner.reset(seed=0)

        def get_observations(self) -> TensorDict:
            obs = torch.as_tensor(self.obs, dtype=torch.float32)
            return TensorDict({"policy": obs}, batch_size=[work.num_envs])

        def step(self, action: torch.Tensor) -> tuple[Any, ...]:
            self.obs, reward, terminated, truncated, _ = self.inner.step(action.numpy().clip(-1, 1))
            done, late = torch.as_tensor(terminated | truncated), torch.as_tensor(truncated)
            return self.get_observations(), torch.as_tensor(reward, dtype=torch.float32), done, {"time_outs": late}

    model = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    cfg = {
        "num_steps_per_env": work.num_steps, "save_interval": 10**9, "check_for_nan": False,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {
            "class_name": "PPO", "num_learning_epochs": work.epochs, "num_mini_batches": work.minibatches
        },
        "actor": {**model, "distribution_cfg": gaussian}, "critic": dict(model),
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(Env(), cfg, log_dir=None, device="cpu")
        runner.learn(1)
        started = time.perf_counter()
        runner.learn(max(1, total // (work.num_steps * work.num_envs)))
    return total / (time.perf_counter() - started)


def tensor_rollout(num_envs: int = 4096, num_steps: int = 64) -> float:
    env = make_env("cartpole", num_envs)
    collector = SyncCollector(env, ActorCritic.for_env(env), keep={"observation", "action"}, seed=0)
    collector.collect(num_steps)
    started = time.perf_counter()
    for _ in range(3):
        collector.collect(num_steps)
    return 3 * num_steps * num_envs / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: for a look, not for a figure")
    parser.add_argument("--only-mujoco", action="store_true", help="into a record of its own")
    parser.add_argument("--turns", type=int, default=9, help="of --only-mujoco")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    total = 8192 if options.quick else 32768
    rows: list[dict[str, Any]] = []

    def add(task: str, name: str, speed: float, base: float | None) -> float:
        rows.append({"task": task, "name": name, "steps_per_second": speed, "ratio": speed / base if base else None})
        ratio = f"{speed / base:6.2f} x" if base else ""
        print(f"{task:24} {name:52} {speed:12,.0f} steps/s {ratio}", flush=True)
        return speed

    if options.only_mujoco:
        bases: list[float] = []
        ratios: list[float] = []
        with learner(MANY, compile_it=True) as speed:
            for _ in range(options.turns):
                bases.append(add(CHEETAH.task, "environment alone", environment_alone(CHEETAH, total), None))
                ratios.append(add(MANY.task, NAME, speed(4 * total), bases[-1]) / bases[-1])
        for threads in (2, 4, 8, 16):
            if threads <= num_cores():
                found = ours(MANY, 4 * total, compile_it=True, num_threads=threads)
                add(MANY.task, f"{NAME}, {threads} simulate", found, float(np.median(bases)))
        print(f"median of {len(ratios)} ratios {np.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
        summary = {"median_ratio": float(np.median(ratios)), "quick": options.quick}
        print(f"wrote {report.write('ppo_mujoco', {'rows': rows, **summary})}")
        return
    for work in (CHEETAH, CARTPOLE):
        alone = add(work.task, "environment alone", environment_alone(work, total), None)
        base = add(work.task, "Stable-Baselines3", sb3(work, total), None)
        if work is CHEETAH:
            add(work.task, "rsl_rl", rsl(work, total), base)
        add(work.task, "ours", ours(work, total, compile_it=False), base)
        add(work.task, "ours, compiled", ours(work, total, compile_it=True), base)
        if work is CHEETAH:
            print("ratio to Gymnasium's stepping alone:")
            add(MANY.task, NAME, ours(MANY, 4 * total, compile_it=True), alone)
    add("cartpole (tensors)", "rollout, 4,096 environments", tensor_rollout(), None)
    print(f"wrote {report.write('ppo_cpu', {'rows': rows, 'quick': options.quick})}")


if __name__ == "__main__":
    main()
