"""Each option of PPO has a test that fails when the option is ignored."""

import math
import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from apexrl.algorithms import PPO, PPOConfig
from apexrl.collectors import SyncCollector
from apexrl.envs import make_env
from apexrl.errors import ConfigError, DivergenceError
from apexrl.functional import gae
from apexrl.policies import ActorCritic, RecurrentActorCritic
from apexrl.types import Evaluation


def setup(seed: int = 0, normalize_obs: bool = False, **options: Any) -> tuple[PPO, TensorDict]:
    """A PPO and one rollout of its policy on the pendulum, the same for the same seed."""
    torch.manual_seed(seed)
    env = make_env("pendulum", 8)
    policy = ActorCritic.for_env(env, normalize_obs=normalize_obs)
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=16, **options))
    batch = SyncCollector(env, policy, keep=PPO.required_keys, seed=seed).collect(16)
    return algorithm, batch


def weights(algorithm: PPO) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in algorithm.policy.parameters()])


def updated(**options: Any) -> torch.Tensor:
    algorithm, batch = setup(**options)
    torch.manual_seed(1)
    algorithm.update(batch)
    return weights(algorithm)


def first_ratio(algorithm: PPO, batch: TensorDict, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Run an update and return the probability ratios of its first minibatch."""
    seen: list[torch.Tensor] = []
    evaluate = algorithm.policy.evaluate

    def spy(minibatch: TensorDict) -> Evaluation:
        evaluation = evaluate(minibatch)
        seen.append((evaluation.log_prob - minibatch["sample_log_prob"]).exp().detach())
        return evaluation

    monkeypatch.setattr(algorithm.policy, "evaluate", spy)
    algorithm.update(batch)
    monkeypatch.undo()
    return seen[0]


@pytest.mark.parametrize("num_updates", [1, 3])
def test_the_ratio_is_one_in_the_first_minibatch_of_every_update(
    num_updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In double precision nothing but a real difference, such as a normaliser that moved, can show.
    torch.manual_seed(0)
    env = make_env("pendulum", 8)
    policy = ActorCritic.for_env(env, normalize_obs=True).double()
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=16))
    double: Any = _Double(env)
    collector = SyncCollector(double, policy, keep=PPO.required_keys, seed=0)
    for _ in range(num_updates):
        ratio = first_ratio(algorithm, collector.collect(16), monkeypatch)
        assert (ratio - 1).abs().max() < 1e-12


class _Double:
    """Pendulum in double precision."""

    def __init__(self, env: Any) -> None:
        self.inner = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reset(self, seed: int | None = None) -> torch.Tensor:
        obs: torch.Tensor = self.inner.reset(seed).double()
        return obs

    def step(self, action: torch.Tensor) -> Any:
        step = self.inner.step(action.float())
        final = None if step.final_obs is None else step.final_obs.double()
        return step._replace(obs=step.obs.double(), final_obs=final, reward=step.reward.double())


def test_the_ratio_of_a_recurrent_policy_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    env = make_env("recall", 8)
    policy = RecurrentActorCritic.for_env(env)
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=16))
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=0)
    collector.collect(5)
    assert (first_ratio(algorithm, collector.collect(16), monkeypatch) - 1).abs().max() < 1e-5


def test_one_minibatch_follows_the_gradient_of_the_written_out_loss() -> None:
    algorithm, batch = setup(num_epochs=1, num_minibatches=1, normalize_advantage="none", value_coef=0.5,
                             entropy_coef=0.01, learning_rate=1e-3, max_grad_norm=1e9)  # fmt: skip
    policy = algorithm.policy
    advantage, target = gae(
        batch["reward"], batch["value"], batch["next_value"], batch["terminated"], batch["done"], gamma=0.99, lam=0.95
    )
    # At the first step the ratio is 1, so the clipped surrogate has the gradient of -mean(A log pi).
    log_prob, entropy = policy.evaluate_actions(batch["observation"], batch["action"])
    value = policy.get_value(batch["observation"])
    loss = -(advantage * log_prob).mean() + 0.5 * 0.5 * (value - target).square().mean() - 0.01 * entropy.mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    algorithm.update(batch)
    torch.testing.assert_close(algorithm.optimizer.gradient, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "option",
    [
        {"gamma": 0.9},
        {"lam": 0.5},
        {"clip": 0.02},
        {"clip_value": 0.02},
        {"value_coef": 0.1},
        {"entropy_coef": 0.5},
        {"max_grad_norm": 0.01},
        {"normalize_advantage": "none"},
        {"normalize_advantage": "minibatch"},
        {"num_epochs": 2},
        {"num_minibatches": 2},
        {"learning_rate": 1e-3},
        {"reward_scale": 0.1},
        {"normalize_reward": True},
        {"schedule": "adaptive"},
        {"target_kl": 1e-6},
        {"adam_eps": 1e-2},
    ],
    ids=str,
)
def test_every_option_changes_the_update(option: dict[str, Any]) -> None:
    # Adam hardly notices the scale of gradients unless ε is large, and the norm is only a scale.
    common = {"adam_eps": 0.1} if "max_grad_norm" in option else {}
    assert not torch.allclose(updated(**option, **common), updated(**common), rtol=0, atol=1e-6)


def test_the_same_seed_gives_the_same_update() -> None:
    assert torch.equal(updated(), updated())


@pytest.mark.parametrize(
    ("desired", "kl", "factor"),
    [(0.01, 0.05, 1 / 1.5), (0.01, 0.001, 1.5), (0.01, 0.01, 1.0), (0.1, 0.06, 1.0), (0.1, 0.03, 1.5)],
)
def test_the_adaptive_rate_follows_the_divergence(desired: float, kl: float, factor: float) -> None:
    algorithm, _ = setup(schedule="adaptive", desired_kl=desired, learning_rate=1e-3)
    algorithm._adapt_learning_rate(torch.tensor(kl), skip=torch.tensor(0.0))
    assert math.isclose(algorithm.optimizer.learning_rate.item(), 1e-3 * factor, rel_tol=1e-5)


def test_a_skipped_step_leaves_the_adaptive_rate_alone() -> None:
    algorithm, _ = setup(schedule="adaptive", learning_rate=1e-3)
    algorithm._adapt_learning_rate(torch.tensor(1.0), skip=torch.tensor(1.0))
    assert math.isclose(algorithm.optimizer.learning_rate.item(), 1e-3, rel_tol=1e-6)


@pytest.mark.parametrize(("start", "kl", "bound"), [(1.2e-5, 1.0, 1e-5), (9e-3, 0.0, 1e-2)])
def test_the_adaptive_rate_has_bounds(start: float, kl: float, bound: float) -> None:
    algorithm, _ = setup(schedule="adaptive", learning_rate=start)
    algorithm._adapt_learning_rate(torch.tensor(kl), skip=torch.tensor(0.0))
    assert math.isclose(algorithm.optimizer.learning_rate.item(), bound, rel_tol=1e-5)


@pytest.mark.parametrize(("schedule", "expected"), [("linear", 7.5e-4), ("fixed", 1e-3), ("adaptive", 1e-3)])
def test_only_the_linear_rate_falls_with_progress(schedule: Any, expected: float) -> None:
    algorithm, _ = setup(schedule=schedule, learning_rate=1e-3)
    algorithm.adjust_learning_rate(0.25)
    assert math.isclose(algorithm.optimizer.learning_rate.item(), expected, rel_tol=1e-6)


def test_target_kl_skips_the_rest_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first minibatch has ratio 1 and so KL 0; every later one is beyond this target.
    algorithm, batch = setup(target_kl=1e-12, learning_rate=1e-2, num_epochs=3, num_minibatches=2)
    torch.manual_seed(1)
    metrics = algorithm.update(batch)
    one_step, same_batch = setup(learning_rate=1e-2, num_epochs=1, num_minibatches=2)
    torch.manual_seed(1)
    taken: list[torch.Tensor] = []
    step = one_step.optimizer.step

    def step_once(gradient: torch.Tensor, gradient_norm: torch.Tensor, skip: torch.Tensor) -> None:
        step(gradient, gradient_norm, skip=torch.tensor(1.0 if taken else 0.0))
        taken.append(gradient_norm)

    monkeypatch.setattr(one_step.optimizer, "step", step_once)
    one_step.update(same_batch)
    torch.testing.assert_close(weights(algorithm), weights(one_step))
    assert metrics["skipped"].item() == 1.0


def test_gradients_are_clipped_to_the_norm() -> None:
    algorithm, batch = setup(max_grad_norm=0.25, num_epochs=1, num_minibatches=1)
    metrics = algorithm.update(batch)
    assert metrics["grad_norm"] > 0.25
    assert math.isclose(algorithm.optimizer.gradient.norm().item(), 0.25, rel_tol=1e-4)


@pytest.mark.parametrize("where", ["batch", "minibatch"])
def test_normalised_advantages_do_not_depend_on_the_scale_of_rewards(where: Any) -> None:
    def policy_gradient(scale: float, normalize: Any) -> torch.Tensor:
        algorithm, batch = setup(normalize_advantage=normalize, value_coef=0.0, entropy_coef=0.0, max_grad_norm=1e9,
                                 num_epochs=1, num_minibatches=1)  # fmt: skip
        for key in ("reward", "value", "next_value"):
            batch[key] = batch[key] * scale
        algorithm.update(batch)
        return algorithm.optimizer.gradient.clone()

    torch.testing.assert_close(policy_gradient(1.0, where), policy_gradient(8.0, where), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(8.0 * policy_gradient(1.0, "none"), policy_gradient(8.0, "none"), rtol=1e-3, atol=1e-4)


def test_the_normaliser_moves_after_the_update() -> None:
    algorithm, batch = setup(normalize_obs=True)
    algorithm.update(batch)
    normalizer: Any = algorithm.policy.normalizer
    torch.testing.assert_close(
        normalizer.normalizers["observation"].mean.float(), batch["observation"].flatten(0, 1).mean(0)
    )


@pytest.mark.parametrize("key", ["reward", "observation"])
def test_a_batch_that_is_not_finite_changes_nothing_and_is_named(key: str) -> None:
    algorithm, batch = setup(normalize_obs=True)
    before = weights(algorithm)
    batch[key][3, 2] = float("nan")
    metrics = algorithm.update(batch)
    assert torch.equal(weights(algorithm), before)
    normalizer: Any = algorithm.policy.normalizer
    assert normalizer.normalizers["observation"].mean.isfinite().all()
    with pytest.raises(DivergenceError, match=f"'{key}' of the rollout is not finite.*step 3, environment 2"):
        algorithm.raise_if_diverged({"nonfinite": metrics["nonfinite"].item()}, batch)


def test_a_missing_key_is_named() -> None:
    algorithm, batch = setup()
    del batch["value"]
    with pytest.raises(KeyError, match=r"PPO.update needs \['value'\].*keep=PPO.required_keys"):
        algorithm.update(batch)


def test_state_goes_on_exactly() -> None:
    first, batch = setup(schedule="adaptive", normalize_reward=True, normalize_obs=True)
    first.update(batch)
    second, _ = setup(schedule="adaptive", normalize_reward=True, normalize_obs=True)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(first.state_dict())
    for algorithm in (first, second):
        torch.manual_seed(5)
        algorithm.update(batch)
    assert torch.equal(weights(first), weights(second))


def test_other_processes_begin_with_the_statistics_of_rewards_but_not_with_the_running_episodes() -> None:
    first, batch = setup(normalize_reward=True)
    first.update(batch)
    second, batch = setup(normalize_reward=True)
    second.load_state_dict(second.without_own_state(first.state_dict()))
    assert first.reward_scaler is not None
    assert second.reward_scaler is not None
    assert torch.equal(second.reward_scaler.statistics.var, first.reward_scaler.statistics.var)
    second.reward_scaler(torch.zeros_like(batch["reward"]), torch.zeros_like(batch["done"]))
    assert torch.count_nonzero(second.reward_scaler.running) == 0  # 0 rewards, after returns of 0
    assert torch.count_nonzero(first.reward_scaler.running) > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("clip", 0.0), ("clip", 1.0), ("gamma", 1.1), ("lam", -0.1), ("num_epochs", 0), ("learning_rate", 0.0),
     ("target_kl", 0.0), ("clip_value", -1.0), ("entropy_coef", -0.1), ("max_grad_norm", 0.0)],
)  # fmt: skip
def test_impossible_options_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"algo\.{field} must .*, got {value}"):
        PPOConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [("num_steps", 2.5, "must be a whole number, got 2.5"), ("num_epochs", True, "must be a whole number, got True"),
     ("clip", "a", "must be a number, got 'a'"), ("target_kl", "a", "must be a number or null, got 'a'"),
     ("normalize_reward", 1, "must be true or false, got 1"),
     ("schedule", "liner", "must be one of ['fixed', 'linear', 'adaptive'], got 'liner'. Did you mean 'linear'?"),
     ("normalize_advantage", None, "must be one of ['batch', 'minibatch', 'none'], got None")],
)  # fmt: skip
def test_values_of_another_kind_are_refused(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"algo.{field} {rule}")):
        PPOConfig(**{field: value})


@pytest.mark.parametrize(("recurrent", "limit", "parts"), [(False, 24, "24 samples"), (True, 8, "8 sequences")])
def test_more_minibatches_than_parts_are_refused(recurrent: bool, limit: int, parts: str) -> None:
    env = make_env("recall", 8)
    policy = (RecurrentActorCritic if recurrent else ActorCritic).for_env(env)
    batch = SyncCollector(env, policy, keep=PPO.required_keys, seed=0).collect(3)
    metrics = PPO(policy=policy, cfg=PPOConfig(num_minibatches=limit, normalize_advantage="none")).update(batch)
    assert metrics["nonfinite"] == 0
    with pytest.raises(ConfigError, match=f"num_minibatches is {limit + 1}, but the rollout has {parts}"):
        PPO(policy=policy, cfg=PPOConfig(num_minibatches=limit + 1)).update(batch)


def test_it_is_made_from_a_policy_or_from_an_environment() -> None:
    env = make_env("pendulum", 2)
    algorithm = PPO(env, PPOConfig(), actor_cfg={"hidden_dims": [7]})
    assert algorithm.policy.actor.trunk[0].out_features == 7  # type: ignore[union-attr,index]
    with pytest.raises(ConfigError, match="either a policy"):
        PPO(env, policy=algorithm.policy)
