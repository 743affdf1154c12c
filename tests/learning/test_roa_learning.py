"""PPO-ROA learns payload: a student that is told nothing acts almost as its teacher, and lives from its guesses."""

import pytest
import torch
from adaptation import mean_rewards, with_fixed_latent

from apexrl import PPOROA, PPOROAConfig, ROAPolicy, Trainer, make_env
from apexrl.agent import TrainingConfig

pytestmark = [pytest.mark.learning, pytest.mark.slow]
EPISODE = 100
CFG = PPOROAConfig(num_steps=16, learning_rate=1e-3, schedule="adaptive", gamma=0.95, entropy_coef=0.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_student_adapts_after_both_phases(seed: int) -> None:
    torch.manual_seed(seed)
    env = make_env("payload", 512, max_episode_steps=EPISODE)
    policy = ROAPolicy.for_env(
        env,
        history=24,
        num_features=4,
        hidden_dims=(32, 32),
        encoder_dims=(16,),
        adapt_dims=(64, 32),
        critic_cfg={"hidden_dims": (32, 32)},
        head_options={"init_std": 0.3},
    )
    test_env = env.spawn(256)
    algorithm = PPOROA(policy, CFG)
    trainer = Trainer(env, policy, algorithm, TrainingConfig(seed=seed))
    trainer.learn(1_000_000)
    assert algorithm.phase == "finetune"
    contenders = {
        "teacher": policy.teacher,
        "student": policy,
        "without its guess": with_fixed_latent(policy, test_env, EPISODE),
    }
    score = {name: float(mean_rewards(test_env, who, EPISODE).mean()) for name, who in contenders.items()}
    # Seeds 0 to 4: student 0.645 to 0.658, which is 95 to 97 % of its teacher; 0.559 to 0.582 without its guess.
    assert score["student"] >= 0.61
    assert score["student"] >= 0.9 * score["teacher"]
    assert score["student"] - score["without its guess"] >= 0.04
