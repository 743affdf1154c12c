"""Learning on HalfCheetah-v5: ours against Stable-Baselines3 with the same hyper-parameters.

    python benchmarks/ppo_learning.py [--seeds 0,1,2] [--steps 300000] [--episodes 20] [--jobs 1]

Both: one environment, 2048 steps, 32 minibatches, 10 epochs, learning rate 3e-4 falling to 0, networks 64-64 tanh,
observations and rewards normalised. Our value loss has the factor one half that theirs lacks, hence our coefficient
1.0 for their 0.5. Evaluation on the raw reward: deterministic, and with sampled actions.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from typing import Any

import numpy as np
import report
import torch

from apexrl import PPO, Trainer, make_env
from apexrl.agent import TrainingConfig
from apexrl.config import load_config
from apexrl.run import make_policy

TASK = "HalfCheetah-v5"


def ours(seed: int, steps: int, episodes: int) -> tuple[float, float]:
    config = load_config("halfcheetah_ppo")
    torch.manual_seed(seed)
    env = make_env(TASK, 1)
    policy = make_policy(config.policy, env, torch.device("cpu"))
    trainer = Trainer(env, policy, PPO(policy=policy, cfg=config.algo), TrainingConfig(seed=seed, eval_num_envs=5))
    trainer.learn(steps)
    result = float(trainer.evaluate(episodes)), float(trainer.evaluate(episodes, deterministic=False))
    trainer.close()
    return result


def sb3(seed: int, steps: int, episodes: int) -> tuple[float, float]:
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(make_vec_env(TASK, 1, seed=seed))
    model = stable_baselines3.PPO(
        "MlpPolicy", env, learning_rate=lambda left: 3e-4 * left, n_steps=2048, batch_size=64, n_epochs=10,
        ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5, seed=seed, device="cpu",
    )  # fmt: skip
    model.learn(steps)
    env.training, env.norm_reward = False, False
    env.seed(seed + 1_000_003)
    mode, _ = evaluate_policy(model, env, episodes, deterministic=True)
    sampled, _ = evaluate_policy(model, env, episodes, deterministic=False)
    return float(np.mean(mode)), float(np.mean(sampled))


CONTENDERS = {"stable-baselines3": sb3, "apexrl": ours}


def run(job: tuple[str, int, int, int]) -> dict[str, Any]:
    """Train and evaluate one contender from one seed."""
    name, seed, steps, episodes = job
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    started = time.perf_counter()
    result, sampled = CONTENDERS[name](seed, steps, episodes)
    seconds = time.perf_counter() - started
    print(
        f"{name:18} seed {seed:2}  return {result:8.1f}  with sampled actions {sampled:8.1f}  {seconds:6.0f} s",
        flush=True,
    )
    return {"library": name, "seed": seed, "return": result, "sampled": sampled, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each on one thread")
    parser.add_argument("--only", choices=tuple(CONTENDERS), help="run one of the two, write nothing")
    options = parser.parse_args()
    names = [options.only] if options.only else list(CONTENDERS)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    jobs = [(name, seed, options.steps, options.episodes) for name in names for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        rows = pool.map(run, jobs, chunksize=1)
    for name in names:
        mode, drawn = (np.array([row[key] for row in rows if row["library"] == name]) for key in ("return", "sampled"))
        print(
            f"{name:18} mean    return {mode.mean():8.1f} (standard error {mode.std(ddof=1) / len(mode) ** 0.5:.0f}), "
            f"median {np.median(mode):8.1f}; with sampled actions {drawn.mean():8.1f}; over {len(mode)} seeds"
        )
    if not options.only:
        print(f"wrote {report.write('ppo_learning', {'task': TASK, 'steps': options.steps, 'rows': rows})}")


if __name__ == "__main__":
    main()
