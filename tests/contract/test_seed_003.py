"""Document 003: trainer, collector, algorithm, policy, as the document writes them."""

import inspect
import math
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from tests.point_suite import PointSuite
from tests.refusals import refused
from torch import Tensor, nn

from apexrl import (
    PPO,
    RLOO,
    SAC,
    ActorCritic,
    AsyncCollector,
    BaseAlgorithm,
    BaseCollector,
    GymVecEnv,
    Policy,
    PolicyOutput,
    PPOConfig,
    RLOOConfig,
    SACConfig,
    SACPolicy,
    SuiteVecEnv,
    SyncCollector,
    Trainer,
    VLAPolicy,
    make_env,
)
from apexrl.core.errors import ConfigError, EnvError
from apexrl.core.metrics import EpisodeMetrics
from apexrl.core.types import Evaluation
from apexrl.policies.base import state_values
from apexrl.policies.networks import DiagGaussian
from apexrl.run.build import make_policy
from apexrl.run.loading import load_config


def test_the_complete_training_flow(capsys: pytest.CaptureFixture[str]) -> None:
    env = make_env("pendulum", 4)
    policy = ActorCritic(env.observation_space, env.action_space)
    algorithm = PPO(policy=policy)
    device = torch.device("cpu")
    n_epochs = 2

    trainer = Trainer(
        env=env,
        policy=policy,
        algorithm=algorithm,
    )

    collector = SyncCollector(
        env=env,
        policy=policy,
        device=device,
    )

    for epoch in range(n_epochs):
        rollout = collector.collect(
            n_steps=2048,
            reset=True,
        )
        assert rollout.batch_size == torch.Size([2048, 4])

        metrics = algorithm.update(rollout)
        assert {"loss", "clip_frac"} <= set(metrics)

        eval_reward = trainer.evaluate(
            n_episodes=10,
            deterministic=True,
        )

        print(f"Epoch {epoch}: reward={eval_reward}, loss={metrics['loss']}")
        assert eval_reward.num_episodes == 10
        assert eval_reward < 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": reward=return ")[0] for line in lines] == ["Epoch 0", "Epoch 1"]


def test_the_workflow_of_a_collector() -> None:
    env = make_env("pendulum", 4)
    policy = ActorCritic.for_env(env)
    n_steps, rows = 8, []
    obs = env.reset(0)
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(n_steps):
            action, log_prob, value = policy.forward(obs, deterministic=False)
            # A copy: simulators reuse their buffers.
            row = {"observation": obs, "action": action, "value": value, "sample_log_prob": log_prob}
            rows.append({name: x.clone() for name, x in row.items()})
            obs, reward, terminated, truncated, *_ = env.step(action)
            rows[-1].update(reward=reward.clone(), done=terminated | truncated)
    by_hand = TensorDict({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, batch_size=[8, 4])
    torch.manual_seed(0)
    rollout = SyncCollector(env, policy, torch.device("cpu"), seed=0).collect(n_steps, reset=True)
    for name in by_hand.keys():  # noqa: SIM118
        torch.testing.assert_close(rollout[name], by_hand[name])


def test_deterministic_evaluation() -> None:
    env = make_env("pendulum", 4)
    policy, obs = ActorCritic.for_env(env), env.reset(0)
    dist: Any = policy.get_dist(obs)

    torch.manual_seed(0)
    action = policy.forward(obs, deterministic=False).action
    torch.manual_seed(0)
    assert torch.equal(action, dist.sample())

    action = policy.forward(obs, deterministic=True).action
    assert torch.equal(action, dist.mean)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (Trainer, ["env", "policy", "algorithm"]),
        (SyncCollector, ["env", "policy", "device"]),
        (AsyncCollector, ["env", "policy", "device"]),
        (BaseCollector.collect, ["self", "n_steps", "reset"]),
        (Trainer.evaluate, ["self", "n_episodes", "deterministic"]),
        (BaseAlgorithm.update, ["self", "rollout"]),
        (Policy.forward, ["self", "obs", "deterministic"]),
        (Policy.evaluate_actions, ["self", "obs", "action"]),
        (Policy.get_value, ["self", "obs"]),
    ],
)
def test_arguments_have_the_documents_names_and_order(function: Any, names: list[str]) -> None:
    assert list(inspect.signature(function).parameters)[: len(names)] == names


def test_the_batch_has_the_documented_keys_and_shapes() -> None:
    env = make_env("pendulum", 4)
    rollout = SyncCollector(env, ActorCritic.for_env(env)).collect(8)
    for key in ("reward", "done", "value", "sample_log_prob"):
        assert rollout[key].shape == (8, 4, 1), key
    assert rollout["observation"].shape == (8, 4, 3)
    assert rollout["action"].shape == (8, 4, 1)


def test_the_update_keeps_advantage_and_return_and_leaves_the_rollout_as_it_was() -> None:
    env = make_env("pendulum", 4)
    algorithm = PPO(env, PPOConfig(normalize_advantage="none"))
    rollout = SyncCollector(env, algorithm.policy).collect(8)
    keys = set(rollout.keys())
    algorithm.update(rollout)
    batch = algorithm.batch
    assert set(rollout.keys()) == keys
    assert batch["advantage"].shape == batch["return"].shape == (8, 4, 1)
    torch.testing.assert_close(batch["return"], batch["advantage"] + rollout["value"])


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
    with refused(ConfigError, "one policy"):
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


@pytest.mark.parametrize("make", [SyncCollector, AsyncCollector])
def test_a_policy_of_the_three_methods_learns_under_ppo_with_every_collector(make: Any) -> None:
    env = make_env("pendulum", 4)
    policy = LinearPolicy(3, 1)
    before = torch.cat([p.detach().flatten().clone() for p in policy.parameters()])
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=8, num_minibatches=2))
    trainer = Trainer(env, policy, algorithm, collector=make(env, policy))
    try:
        trainer.learn(128)
        assert not torch.equal(before, torch.cat([p.detach().flatten() for p in policy.parameters()]))
        assert trainer.evaluate(2).num_episodes == 2
    finally:
        trainer.close()


class ChunkPolicy(LinearPolicy):
    """The three methods for a suite, where an observation has groups."""

    def normal(self, obs: Any) -> torch.distributions.Normal:
        return super().normal(obs["state"])

    def get_value(self, obs: Any) -> Tensor:
        return super().get_value(obs["state"])

    def forward(self, obs: Any, deterministic: bool = False) -> PolicyOutput:
        action = self.normal(obs).sample()
        return PolicyOutput(action, self.evaluate_actions(obs, action)[0], self.get_value(obs))


def test_a_policy_of_the_three_methods_learns_under_rloo_from_groups_of_episodes() -> None:
    env = SuiteVecEnv(PointSuite(), 4, chunk=5, num_workers=0)
    policy = ChunkPolicy(2, 10)
    cfg = RLOOConfig(rloo_batch_size=2, num_groups=2, oversample=1.0, enable_dynamic_sampling=False)
    trainer = Trainer(env, policy, RLOO(policy=policy, cfg=cfg))
    trainer.learn(1)
    assert trainer.evaluate(4).num_episodes == 4
    trainer.close()


class BatchPolicy(Policy):
    """A new policy: what the collectors and algorithms call."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(3, 1), nn.Linear(3, 1)

    def act(self, carry: dict[str, Any], deterministic: bool = False) -> dict[str, Tensor]:
        action = DiagGaussian(self.actor(carry["observation"]), torch.zeros(1)).sample()
        return {"action": action, "sample_log_prob": self.evaluate({**carry, "action": action}).log_prob}

    def evaluate(self, batch: Any) -> Evaluation:
        normal = DiagGaussian(self.actor(batch["observation"]), torch.zeros(1))
        return Evaluation(normal.log_prob(batch["action"]), normal.entropy(), self.critic(batch["observation"]))

    def values(self, batch: Any) -> tuple[Tensor, Tensor]:
        return state_values(batch, self.critic)


def test_the_three_methods_are_derived_from_act_evaluate_and_values() -> None:
    policy, env = BatchPolicy(), make_env("pendulum", 4)
    for obs in (env.reset(seed=0), torch.randn(2, 5, 3)):
        action, log_prob, value = policy(obs)
        again, entropy = policy.evaluate_actions(obs, action)
        torch.testing.assert_close(again, log_prob)
        torch.testing.assert_close(policy.get_value(obs), value)
        assert log_prob.shape == entropy.shape == value.shape == (*obs.shape[:-1], 1)
    Trainer(env, policy, PPO(policy=policy, cfg=PPOConfig(num_steps=8))).learn(64)


@pytest.mark.parametrize(
    ("missing", "remedy"), [("act", "forward"), ("evaluate", "distribution"), ("values", "get_value")]
)
def test_a_policy_that_lacks_a_method_is_refused(missing: str, remedy: str) -> None:
    class Lacking(BatchPolicy):
        pass

    setattr(Lacking, missing, getattr(Policy, missing))
    with refused(TypeError, "Lacking", missing, remedy):
        Lacking()


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


class PlainLinearPolicy(LinearPolicy):
    """Returns a plain tuple."""

    def forward(self, obs: Tensor, deterministic: bool = False) -> Any:
        return tuple(super().forward(obs, deterministic))


class ActorCriticLoss(Reinforce):
    """Reads the values of the rollout, without a word about keys."""

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        assert rollout["sample_log_prob"].shape == rollout["next_value"].shape == rollout["value"].shape
        rollout["reward"] = rollout["reward"] - rollout["value"]
        return super().update(rollout)


class OnlyCollect(BaseCollector):
    """One method, and no other attribute than its own."""

    def __init__(self, inner: SyncCollector) -> None:
        self.inner = inner

    def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
        return self.inner.collect(n_steps, reset)


def test_a_policy_returns_a_plain_tuple_an_update_reads_values_and_a_collector_has_only_collect() -> None:
    env = make_env("pendulum", 4)
    policy = PlainLinearPolicy(3, 1)
    trainer = Trainer(env, policy, ActorCriticLoss(policy))
    trainer.learn(64)
    assert trainer.evaluate(2).num_episodes == 2
    collector = OnlyCollect(SyncCollector(env, policy))
    trainer = Trainer(env, policy, ActorCriticLoss(policy), collector=collector)
    trainer.learn(128)
    assert (trainer.iteration, len(collector.episode_metrics.means())) == (2, 0)


class WithoutLastDimension(LinearPolicy):
    """Sums log-probabilities as most examples of PyTorch do."""

    def __init__(self, method: str) -> None:
        super().__init__(3, 1)
        self.method = method

    def forward(self, obs: Tensor, deterministic: bool = False) -> Any:
        action, log_prob, value = super().forward(obs, deterministic)
        return action, log_prob.squeeze(-1) if self.method == "forward" else log_prob, value

    def evaluate_actions(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, entropy = super().evaluate_actions(obs, action)
        return log_prob.squeeze(-1) if self.method == "evaluate_actions" else log_prob, entropy

    def get_value(self, obs: Tensor) -> Tensor:
        value = super().get_value(obs)
        return value.squeeze(-1) if self.method == "get_value" else value


@pytest.mark.parametrize("method", ["forward", "evaluate_actions", "get_value"])
def test_a_policy_whose_results_lack_the_last_dimension_is_refused_with_the_remedy(method: str) -> None:
    env = make_env("pendulum", 4)
    policy = WithoutLastDimension(method)
    with refused(ConfigError, "WithoutLastDimension", method, "keepdim"):
        Trainer(env, policy, PPO(policy=policy)).learn(64)
    batch = {"observation": torch.zeros(8, 3), "action": torch.zeros(8, 1)}
    if method != "forward":
        with refused(ConfigError, "[8, 1]", "got [8]"):
            policy.evaluate(batch)


def test_a_collector_of_no_class_of_the_package_is_refused_with_the_remedy() -> None:
    class Duck:
        def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
            raise AssertionError

    env, policy = make_env("pendulum", 4), LinearPolicy(3, 1)
    duck: Any = Duck()
    with refused(ConfigError, "BaseCollector", "Duck"):
        Trainer(env, policy, Reinforce(policy), collector=duck)


@pytest.mark.parametrize("kind", [SyncCollector, AsyncCollector])
def test_a_collector_refuses_the_policy_of_another_environment(kind: Any) -> None:
    policy = ActorCritic(gym.spaces.Box(-1.0, 1.0, (3,)), gym.spaces.Discrete(3))
    with refused(ConfigError, "Discrete(3)", "Pendulum", "Box"):
        kind(make_env("pendulum", 2), policy)


def test_a_forward_that_returns_something_else_is_named() -> None:
    class Four(LinearPolicy):
        def forward(self, obs: Tensor, deterministic: bool = False) -> Any:
            return (*super().forward(obs, deterministic), None)

    with refused(TypeError, "Four.forward", "(action, log_prob, value)", "4 values"):
        Four(3, 1)(torch.zeros(2, 3))


class Simulator:
    """Steps as ``(obs, reward, done, extras)``."""

    num_envs, num_actions, max_episode_length, device = 3, 1, 5, "cpu"

    def get_observations(self) -> Tensor:
        return torch.zeros(3, 2)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        return self.get_observations(), action[:, 0], torch.zeros(3, dtype=torch.bool), {}


@pytest.mark.filterwarnings("ignore:.*hides the last state.*")
@pytest.mark.parametrize("kind", [SyncCollector, AsyncCollector])
def test_a_collector_wraps_a_raw_simulator_and_names_what_it_cannot_wrap(kind: Any) -> None:
    policy = LinearPolicy(2, 1)
    with kind(Simulator(), policy) as collector:
        assert collector.collect(4).batch_size == torch.Size([4, 3])
    with refused(EnvError, "BrokenEnv", "GymVecEnv"):
        kind(BrokenEnv(), policy)


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


def test_the_documents_loop_with_sac_and_the_default_collector() -> None:
    env = make_env("pendulum", 4)
    algorithm = SAC(env, SACConfig(batch_size=16, learning_starts=100, utd_ratio=0.1), device="cpu")
    policy = algorithm.policy
    trainer = Trainer(env=env, policy=policy, algorithm=algorithm)
    collector = SyncCollector(env=env, policy=policy, device=torch.device("cpu"))
    best, losses = -math.inf, []
    for epoch in range(3):
        rollout = collector.collect(n_steps=16, reset=True)
        metrics = algorithm.update(rollout)
        eval_reward = trainer.evaluate(n_episodes=2, deterministic=True)
        best = max(best, eval_reward)
        assert "nan" not in f"Epoch {epoch}: reward={eval_reward}, loss={metrics['loss']}"
        losses.append(float(metrics["loss"]))
    # The first 64 transitions are too few to learn from; their loss is reported all the same.
    assert all(map(math.isfinite, losses))
    assert losses[0] > 0
    assert best < 0


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [(ActorCritic, {}), (SACPolicy, {}), (VLAPolicy, {"width": 32, "depth": 1, "num_heads": 2})],
)
def test_policies_have_one_interface(kind: type[Policy], options: dict[str, int]) -> None:
    env = make_env("pendulum", 4)
    policy, obs = kind.for_env(env, **options), env.reset(seed=0)
    action, log_prob, value = policy.forward(obs, deterministic=False)
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


@pytest.mark.parametrize("head", ["likelihood", "flow"])
def test_a_vla_takes_the_place_of_an_actor_critic(head: Any) -> None:
    env = make_env("pendulum", 4)
    torch.manual_seed(0)
    policy = VLAPolicy.for_env(env, head=head, width=32, depth=1, num_heads=2, value_head=True)
    trainer = Trainer(env=env, policy=policy, algorithm=PPO(policy=policy, cfg=PPOConfig(num_steps=8, num_epochs=1)))
    trainer.learn(64)
    action, log_prob, value = policy.forward(env.reset(seed=0), deterministic=False)
    assert [x.shape for x in (action, log_prob, value)] == [(4, 1)] * 3
    assert value.abs().min() > 0
    trainer.close()


def test_a_vla_that_ppo_trains_by_its_file_has_a_value_head() -> None:
    env = make_env("pendulum", 2)
    config = load_config("lift_ppo", [("policy.kind", "vla")])
    for algo, has_value in ((config.algo, True), (RLOOConfig(), False)):
        assert make_policy(config.policy, env, torch.device("cpu"), algo).has_value == has_value


def test_the_async_collector_serves_vla_models() -> None:
    env = SuiteVecEnv(PointSuite(), 4, chunk=5, num_workers=0)
    torch.manual_seed(0)
    policy = VLAPolicy.for_env(env, chunk=5, width=32, depth=1, num_heads=2)
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(num_epochs=1))
    device = torch.device("cpu")
    with pytest.warns(UserWarning, match=r"RolloutGenerator\.from_config"):
        collector = AsyncCollector(
            env=env,
            policy=policy,
            device=device,
        )
    for _ in range(2):
        rollout = collector.collect(n_steps=8)
        assert {"group", "valid", "policy_version"} <= set(rollout.keys())
        metrics = algorithm.update(rollout)
        assert 0 <= metrics["success"] <= 1
    collector.close()


def test_the_trainer_collects_groups_of_episodes_of_a_suite_by_itself() -> None:
    env = SuiteVecEnv(PointSuite(), 4, chunk=5, num_workers=0)
    torch.manual_seed(0)
    policy = VLAPolicy.for_env(env, chunk=5, width=32, depth=1, num_heads=2)
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(rloo_batch_size=3, num_groups=2, oversample=1.0, num_epochs=1))
    trainer = Trainer(
        env=env,
        policy=policy,
        algorithm=algorithm,
    )
    batches: list[TensorDict] = []
    update = algorithm.update
    algorithm.update = lambda rollout: batches.append(rollout) or update(rollout)  # type: ignore
    trainer.learn(2)
    assert [batch["group"][0].flatten().tolist() for batch in batches] == [[0, 0, 0, 1, 1, 1]]
    assert trainer.evaluate(n_episodes=4, deterministic=True).num_episodes == 4
    trainer.close()


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
    with refused(Exception, "the simulator broke"):
        collector.collect(16)
    collector.close()
