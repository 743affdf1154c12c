"""Learning on HalfCheetah-v5: ours against Stable-Baselines3 with the same hyper-parameters.

    python benchmarks/ppo_learning.py [--seeds 0,1,2] [--steps 300000] [--episodes 20]

Both: one environment, 2048 steps, 32 minibatches, 10 epochs, learning rate 3e-4 falling to 0, networks 64-64 tanh,
observations and rewards normalised. Our value loss has the factor one half that theirs lacks, hence our coefficient
1.0 for their 0.5. Evaluation on the raw reward: deterministic, and with sampled actions.
"""

from __future__ import annotations

import argparse
import time
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--only", choices=("apexrl", "stable-baselines3"), help="run one of the two, write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    contenders = {"apexrl": ours, "stable-baselines3": sb3}
    if options.only:
        contenders = {options.only: contenders[options.only]}
    for seed in map(int, options.seeds.split(",")):
        for name, run in contenders.items():
            started = time.perf_counter()
            result, sampled = run(seed, options.steps, options.episodes)
            seconds = time.perf_counter() - started
            rows.append({"library": name, "seed": seed, "return": result, "sampled": sampled, "seconds": seconds})
            print(
                f"{name:18} seed {seed}  return {result:8.1f}  with sampled actions {sampled:8.1f}  {seconds:6.0f} s",
                flush=True,
            )
    for name in contenders:
        mode, drawn = ([row[key] for row in rows if row["library"] == name] for key in ("return", "sampled"))
        print(
            f"{name:18} mean    return {np.mean(mode):8.1f}  with sampled actions {np.mean(drawn):8.1f}  "
            f"over {len(mode)} seeds"
        )
    if not options.only:
        print(f"wrote {report.write('ppo_learning', {'task': TASK, 'steps': options.steps, 'rows': rows})}")


if __name__ == "__main__":
    main()
