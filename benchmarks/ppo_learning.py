"""Learning on HalfCheetah-v5: ours against Stable-Baselines3 with the same hyper-parameters.

    python benchmarks/ppo_learning.py [--seeds 0,1,2] [--steps 300000] [--episodes 20] [--jobs 1]

Both: one environment, 2048 steps, 32 minibatches, 10 epochs, learning rate 3e-4 falling to 0, networks 64-64 tanh,
observations and rewards normalised. Our value loss has the factor one half that theirs lacks, hence our coefficient
1.0 for their 0.5. Evaluation on the raw reward: deterministic, and with sampled actions.
"""

from __future__ import annotations

import sys

import compare_learning
import torch

from apexrl import PPO, PPOConfig, Trainer, make_env
from apexrl.agent import TrainingConfig
from apexrl.config import load_config
from apexrl.graphs import Acceleration
from apexrl.run import make_policy

TASK = "HalfCheetah-v5"


def ours(seed: int, steps: int, episodes: int) -> tuple[float, float]:
    config = load_config("halfcheetah_ppo")
    assert isinstance(config.algo, PPOConfig)
    torch.manual_seed(seed)
    env = make_env(TASK, 1)
    policy = make_policy(config.policy, env, torch.device("cpu"))
    algorithm = PPO(policy=policy, cfg=config.algo, acceleration=Acceleration(compile=True))
    trainer = Trainer(env, policy, algorithm, TrainingConfig(seed=seed, eval_num_envs=5))
    trainer.learn(steps)
    result = float(trainer.evaluate(episodes)), float(trainer.evaluate(episodes, deterministic=False))
    trainer.close()
    return result


def sb3(seed: int, steps: int, episodes: int) -> tuple[float, float]:
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(make_vec_env(TASK, 1, seed=seed))
    model = stable_baselines3.PPO(
        "MlpPolicy", env, learning_rate=lambda left: 3e-4 * left, n_steps=2048, batch_size=64, n_epochs=10,
        ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5, seed=seed, device="cpu",
    )  # fmt: skip
    model.learn(steps)
    env.training, env.norm_reward = False, False
    return compare_learning.sb3_returns(model, env, seed, episodes)


if __name__ == "__main__":
    compare_learning.compare(
        "ppo_learning", TASK, 300_000, {"stable-baselines3": sb3, "apexrl": ours}, __doc__, sys.argv[1:]
    )
