"""Every kind of policy learns a small task, from several seeds, with a margin below what was seen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from tests.learning.tasks import DictTask, MultiBinaryTask, MultiDiscreteTask, PixelTask, PrivilegedTask

from apexrl import PPO, ActorCritic, GymVecEnv, Policy, PPOConfig, RecurrentActorCritic, Trainer, VecEnv, make_env
from apexrl.agent import TrainingConfig
from apexrl.evaluation.evaluate import EvaluationResult
from apexrl.run.build import make_policy, make_trainer
from apexrl.run.loading import load_config

pytestmark = [pytest.mark.learning, pytest.mark.slow]
FAST = PPOConfig(num_steps=16, num_epochs=4, num_minibatches=4, learning_rate=3e-3, gamma=0.5, entropy_coef=0.01)


def train(
    env: VecEnv, make_policy: Callable[[VecEnv], Policy], cfg: PPOConfig, total_timesteps: int, seed: int
) -> EvaluationResult:
    torch.manual_seed(seed)
    policy = make_policy(env)
    trainer = Trainer(env, policy, PPO(policy=policy, cfg=cfg), TrainingConfig(seed=seed, eval_num_envs=8))
    trainer.learn(total_timesteps)
    result = trainer.evaluate(40)
    trainer.close()
    return result


def gym_env(task: type[gym.Env[Any, Any]]) -> VecEnv:
    return GymVecEnv([task] * 8)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("task", "learning_rate", "steps", "at_least"),
    [
        (PixelTask, 3e-3, 6_000, 0.95),  # 0.5 by chance
        (MultiDiscreteTask, 3e-3, 8_000, 0.95),  # 0.42 by chance
        (MultiBinaryTask, 3e-3, 6_000, 0.95),  # 0.5 by chance
        (DictTask, 1e-3, 25_000, 0.9),  # 0.55 for the best action that ignores one of the groups
    ],
)
def test_every_kind_of_observation_and_action(
    task: Any, learning_rate: float, steps: int, at_least: float, seed: int
) -> None:
    cfg = replace(FAST, learning_rate=learning_rate)
    assert train(gym_env(task), ActorCritic.for_env, cfg, steps, seed).mean("reward") >= at_least


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("critic_groups", "explains"), [(None, True), (["policy"], False)])
def test_a_critic_with_privileged_observations_explains_what_the_actor_cannot_see(
    critic_groups: list[str] | None, explains: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    env = gym_env(PrivilegedTask)
    policy = ActorCritic.for_env(env, critic_cfg={"groups": critic_groups})
    algorithm = PPO(policy=policy, cfg=replace(FAST, gamma=0.0))
    trainer = Trainer(env, policy, algorithm, TrainingConfig(seed=seed))
    explained: list[float] = []
    trainer.add_callback("post_iteration", lambda _, stats: explained.append(stats["train/explained_variance"]))
    trainer.learn(8_000)
    assert (sum(explained[-10:]) / 10 > 0.9) == explains
    if explains:
        cue = torch.tensor([[-1.0], [1.0]])
        for offset in (-1.0, 1.0):
            obs = TensorDict({"policy": cue, "priv": torch.full((2, 1), offset)}, batch_size=[2])
            assert policy(obs, deterministic=True).action.flatten().tolist() == [0, 1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_recurrent_policy_remembers_and_a_memoryless_one_cannot(seed: int) -> None:
    cfg = PPOConfig(num_steps=32, num_epochs=4, num_minibatches=4, learning_rate=3e-3, gamma=0.9, entropy_coef=0.01)
    env = make_env("recall", 32)
    assert train(env, RecurrentActorCritic.for_env, cfg, 60_000, seed).mean("success_once") >= 0.95
    if seed == 0:
        assert train(make_env("recall", 32), ActorCritic.for_env, cfg, 60_000, seed).mean("success_once") <= 0.8


def train_preset(name: str, seed: int) -> EvaluationResult:
    """Train a preset for as long as it says."""
    config = load_config(name)

    def policy_for(env: VecEnv) -> Policy:
        return make_policy(config.policy, env, torch.device("cpu"))

    env = make_env(config.task.id, config.task.num_envs)
    assert isinstance(config.algo, PPOConfig)
    return train(env, policy_for, config.algo, config.training.total_timesteps, seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_reaches_475_within_100_000_steps(seed: int) -> None:
    assert load_config("cartpole_ppo").training.total_timesteps == 100_000
    assert train_preset("cartpole_ppo", seed).mean("return") >= 475


@pytest.mark.parametrize(("distribution", "seed"), [("gaussian", 0), ("squashed_gaussian", 1)])
def test_pendulum_swings_up(distribution: str, seed: int) -> None:
    cfg = load_config("pendulum_ppo").algo
    assert isinstance(cfg, PPOConfig)
    result = train(
        make_env("pendulum", 64),
        lambda env: ActorCritic.for_env(env, actor_cfg={"distribution": distribution}),
        cfg,
        300_000,
        seed,
    )
    assert result.mean("return") >= -250


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lift_with_the_preset(seed: int) -> None:
    assert train_preset("lift_ppo", seed).mean("success_once") >= 0.95


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sac_swings_pendulum_v1_up_within_6_000_steps(seed: int, tmp_path: Path) -> None:
    """The preset as it is; compiled, which computes the same in less time."""
    overrides = {"training.seed": str(seed), "training.eval_interval": "0", "features.compile": "true"}
    config = load_config("pendulum_sac", overrides.items())
    assert (config.task.id, config.training.total_timesteps) == ("Pendulum-v1", 6_000)
    trainer = make_trainer(config, tmp_path)
    trainer.learn()
    assert trainer.total_steps == 6_000
    result = trainer.evaluate(20)
    trainer.close()
    # A new policy has about -1,200. Compiled code that rounds otherwise moved seed 0 from -168 to -213, and the mean of
    # seeds 0 to 4 from -141 to -151.
    assert result.mean("return") >= -250
