"""Document 003: trainer, collector, algorithm, policy, nearly as the document writes them."""

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl import (
    PPO,
    ActorCritic,
    BaseAlgorithm,
    BaseCollector,
    Policy,
    PolicyOutput,
    PPOConfig,
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
