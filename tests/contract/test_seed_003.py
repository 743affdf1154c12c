"""Document 003: trainer, collector, algorithm, policy, nearly as the document writes them."""

from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl import (
    PPO,
    SAC,
    ActorCritic,
    AsyncCollector,
    BaseAlgorithm,
    BaseCollector,
    GymVecEnv,
    Policy,
    PolicyOutput,
    PPOConfig,
    SACConfig,
    SACPolicy,
    SyncCollector,
    Trainer,
    make_env,
)
from apexrl.errors import ConfigError
from apexrl.metrics import EpisodeMetrics


def test_the_complete_training_flow() -> None:
    env = make_env("pendulum", 4)
    policy = ActorCritic.for_env(env)
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=16))
    device = torch.device("cpu")

    # 1.
    trainer = Trainer(
        env=env,
        policy=policy,
        algorithm=algorithm,
    )
    # 2.
    collector = SyncCollector(
        env=env,
        policy=policy,
        device=device,
    )
    # 3.
    for epoch in range(2):
        rollout = collector.collect(
            n_steps=32,
            reset=True,
        )
        assert rollout.batch_size == torch.Size([32, 4])
        metrics = algorithm.update(rollout)
        eval_reward = trainer.evaluate(
            n_episodes=4,
            deterministic=True,
        )
        line = f"Epoch {epoch}: reward={eval_reward}, loss={metrics['loss']}"
        assert "4 episodes" in line
        assert {"loss", "clip_frac"} <= set(metrics)


def test_the_batch_has_the_documented_keys_and_shapes() -> None:
    env = make_env("pendulum", 4)
    rollout = SyncCollector(env, ActorCritic.for_env(env)).collect(8)
    for key in ("reward", "done", "value", "sample_log_prob"):
        assert rollout[key].shape == (8, 4, 1), key
    assert rollout["observation"].shape == (8, 4, 3)
    assert rollout["action"].shape == (8, 4, 1)


def test_the_update_adds_advantage_and_return_to_the_batch() -> None:
    env = make_env("pendulum", 4)
    algorithm = PPO(env, PPOConfig(normalize_advantage="none"))
    rollout = SyncCollector(env, algorithm.policy).collect(8)
    algorithm.update(rollout)
    assert rollout["advantage"].shape == rollout["return"].shape == (8, 4, 1)
    torch.testing.assert_close(rollout["return"], rollout["advantage"] + rollout["value"])


def test_the_trainer_collects_and_updates() -> None:
    env = make_env("pendulum", 4)
    policy = ActorCritic.for_env(env)
    before = torch.cat([p.detach().flatten().clone() for p in policy.parameters()])
    trainer = Trainer(env, policy, PPO(policy=policy, cfg=PPOConfig(num_steps=8)))
    trainer.learn(64)
    assert (trainer.iteration, trainer.total_steps) == (2, 64)
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in policy.parameters()]))


def test_a_trainer_with_two_policies_is_refused() -> None:
    env = make_env("pendulum", 4)
    with pytest.raises(ConfigError, match="one policy"):
        Trainer(env, ActorCritic.for_env(env), PPO(env))


class LinearPolicy(Policy):
    """A new policy: three methods."""

    def __init__(self, num_obs: int, num_actions: int) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(num_obs, num_actions), nn.Linear(num_obs, 1)

    def normal(self, obs: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.actor(obs), 1.0)

    def forward(self, obs: Tensor, deterministic: bool = False) -> PolicyOutput:
        normal = self.normal(obs)
        action = normal.mean if deterministic else normal.sample()
        return PolicyOutput(action, normal.log_prob(action).sum(-1, keepdim=True), self.critic(obs))

    def evaluate_actions(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        normal = self.normal(obs)
        return normal.log_prob(action).sum(-1, keepdim=True), normal.entropy().sum(-1, keepdim=True)

    def get_value(self, obs: Tensor) -> Tensor:
        value: Tensor = self.critic(obs)
        return value


class Reinforce(BaseAlgorithm):
    """A new algorithm: one method."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, num_steps=16)
        self.optimizer = torch.optim.Adam(policy.parameters(), 1e-3)

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        log_prob, _ = self.policy.evaluate_actions(rollout["observation"], rollout["action"])
        loss = -(log_prob * (rollout["reward"] - rollout["reward"].mean())).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}


class TwiceCollector(BaseCollector):
    """A new collector: one method."""

    def __init__(self, inner: SyncCollector) -> None:
        self.inner = inner
        self.episode_metrics: EpisodeMetrics = inner.episode_metrics

    def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
        both = [self.inner.collect(n_steps, reset), self.inner.collect(n_steps)]
        joined: TensorDict = TensorDict.cat(both)
        return joined


def test_a_new_policy_algorithm_and_collector_are_one_subclass_each() -> None:
    env = make_env("pendulum", 4)
    policy = LinearPolicy(3, 1)
    collector = TwiceCollector(SyncCollector(env, policy))
    trainer = Trainer(env, policy, Reinforce(policy), collector=collector)
    trainer.learn(256)
    assert (trainer.iteration, trainer.total_steps) == (2, 256)
    assert trainer.evaluate(2).num_episodes == 2
    ppo = PPO(policy=LinearPolicy(3, 1))
    Trainer(env, ppo.policy, ppo).learn(128)


# The other algorithm and the other collector


def test_the_complete_training_flow_with_sac() -> None:
    env = make_env("pendulum", 4)
    algorithm = SAC(env, SACConfig(num_steps=8, batch_size=16, learning_starts=32), device="cpu")
    trainer = Trainer(env=env, policy=algorithm.policy, algorithm=algorithm)
    for _ in range(2):
        rollout = trainer.collector.collect(n_steps=8)
        assert rollout.batch_size == torch.Size([8, 4])
        metrics = algorithm.update(rollout)
        assert trainer.evaluate(n_episodes=2, deterministic=True).num_episodes == 2
        assert metrics["loss"].isfinite()
    trainer.learn(64)
    assert (trainer.iteration, trainer.total_steps) == (2, 64)
    # A replay buffer: four rollouts of 32 are all still there.
    assert len(algorithm.replay) == 4 * 32


def test_sac_has_twin_critics_soft_updates_and_an_automatic_temperature() -> None:
    env = make_env("pendulum", 4)
    algorithm = SAC(env, SACConfig(num_steps=8, batch_size=16, learning_starts=1, utd_ratio=1 / 32), device="cpu")
    policy = algorithm.policy
    assert policy.critics(torch.zeros(5, 3), torch.zeros(5, 1)).shape == (2, 5, 1)
    target = [p.clone() for p in policy.target_critics.parameters()]
    algorithm.update(SyncCollector(env, policy, keep=SAC.required_keys).collect(8))
    for old, new, critic in zip(target, policy.target_critics.parameters(), policy.critics.parameters(), strict=True):
        torch.testing.assert_close(new, 0.995 * old + 0.005 * critic.detach(), rtol=1e-5, atol=1e-7)
    assert algorithm.log_temperature.item() != 0.0


@pytest.mark.parametrize("kind", [ActorCritic, SACPolicy])
def test_policies_have_one_interface(kind: type[Policy]) -> None:
    env = make_env("pendulum", 4)
    policy, obs = kind.for_env(env), env.reset(seed=0)
    action, log_prob, value = policy(obs, deterministic=False)
    assert [x.shape for x in (action, log_prob, value)] == [(4, 1)] * 3
    again, entropy = policy.evaluate_actions(obs, action)
    torch.testing.assert_close(again, log_prob)
    assert [x.shape for x in (entropy, policy.get_value(obs))] == [(4, 1)] * 2
    assert torch.equal(policy(obs, deterministic=True).action, policy(obs, deterministic=True).action)
    assert not torch.equal(policy(obs).action, policy(obs).action)


@pytest.mark.parametrize("make", [PPO, SAC])
def test_the_async_collector_collects_in_the_background(make: type[PPO] | type[SAC]) -> None:
    env = make_env("pendulum", 4)
    cfg: Any = PPOConfig(num_steps=8) if make is PPO else SACConfig(num_steps=8, batch_size=16, learning_starts=1)
    algorithm = make(env, cfg, device="cpu")
    collector = AsyncCollector(env, algorithm.policy, keep=algorithm.required_keys, seed=0, max_staleness=1)
    trainer = Trainer(env, algorithm.policy, algorithm, collector=collector)
    versions: list[int] = []
    update = algorithm.update

    def spy(rollout: TensorDict) -> dict[str, Tensor]:
        assert rollout.batch_size == torch.Size([8, 4])
        versions.append(int(rollout["policy_version"].unique()))
        return update(rollout)

    algorithm.update = spy  # type: ignore[method-assign]
    try:
        trainer.learn(5 * 32)
        assert trainer.evaluate(2).num_episodes == 2
    finally:
        trainer.close()
    # Each rollout once, in order, and none older than one version.
    assert versions == sorted(versions)
    assert all(newest - 1 <= version <= newest for newest, version in enumerate(versions))


class BrokenEnv(gym.Env[Any, Any]):
    """Breaks at its tenth step."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Box(-1.0, 1.0, (1,))
    time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        if self.time == 10:
            raise ZeroDivisionError("the simulator broke")
        return self.observation_space.sample(), 0.0, False, False, {}


def test_an_exception_in_the_background_reaches_the_caller() -> None:
    env = GymVecEnv([BrokenEnv])
    collector = AsyncCollector(env, ActorCritic.for_env(env))
    with pytest.raises(Exception, match="the simulator broke"):
        collector.collect(16)
    collector.close()
