"""SAC learns from images and from groups of observations, through the encoders that PPO has."""

from typing import Any

import pytest
import torch
from tests.learning.tasks import DictTask, PixelAimTask

from apexrl import SAC, GymVecEnv, SACConfig, Trainer
from apexrl.agent import TrainingConfig

pytestmark = [pytest.mark.learning, pytest.mark.slow]
FAST = SACConfig(
    num_steps=4,
    learning_starts=200,
    batch_size=64,
    learning_rate=1e-3,
    gamma=0.5,
    utd_ratio=0.25,
    buffer_size=8_000,
)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("task", "steps", "at_least"),
    [
        (PixelAimTask, 4_000, 0.85),  # 0.5 for the best action without the image
        (DictTask, 4_000, 0.85),  # 0.55 for the best action that ignores one of the groups
    ],
)
def test_sac_learns_from_every_kind_of_observation(task: Any, steps: int, at_least: float, seed: int) -> None:
    torch.manual_seed(seed)
    env = GymVecEnv([task] * 8)
    algorithm = SAC(env, FAST, actor_cfg={"hidden_dims": (64, 64)}, critic_cfg={"hidden_dims": (64, 64)}, device="cpu")
    trainer = Trainer(env, algorithm.policy, algorithm, TrainingConfig(seed=seed, eval_num_envs=8))
    trainer.learn(steps)
    result = trainer.evaluate(40)
    trainer.close()
    assert result.mean("reward") >= at_least
