"""Each option of PPO has a test that fails when the option is ignored."""

import copy
import itertools
import math
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor

from apexrl.agent import Trainer
from apexrl.algorithms import BC, PPO, PPOROA, RLOO, SAC, PPOConfig, SACConfig
from apexrl.algorithms.ppo import PPO_METRICS
from apexrl.collectors import SyncCollector
from apexrl.core.errors import ConfigError, DivergenceError
from apexrl.core.functional import gae
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import EnvStep, Evaluation, PolicyOutput
from apexrl.envs import VecEnv, make_env
from apexrl.evaluation.evaluate import evaluate
from apexrl.policies import ActorCritic, Policy, RecurrentActorCritic, SACPolicy
from apexrl.policies.networks.mlp import ActionHead


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
    evaluate = algorithm.loss.evaluate

    def spy(minibatch: TensorDict) -> Evaluation:
        evaluation = evaluate(minibatch)
        seen.append((evaluation.log_prob - minibatch["sample_log_prob"]).exp().detach())
        return evaluation

    monkeypatch.setattr(algorithm.loss, "evaluate", spy)
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


@VecEnv.register
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
        ends = step.terminated, step.truncated
        return EnvStep(step.obs.double(), step.reward.double(), *ends, final, step.metric, step.log)


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
    inputs = (batch[key] for key in ("reward", "value", "next_value", "terminated", "done"))
    advantage, target = gae(*inputs, gamma=0.99, gae_lambda=0.95)
    # At the first step the ratio is 1, so the clipped surrogate has the gradient of -mean(A log pi).
    log_prob, entropy = policy.evaluate_actions(batch["observation"], batch["action"])
    value = policy.get_value(batch["observation"])
    loss = -(advantage * log_prob).mean() + 0.5 * (value - target).square().mean() - 0.01 * entropy.mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    algorithm.update(batch)
    torch.testing.assert_close(algorithm.optimizer.gradient, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "option",
    [
        {"gamma": 0.9},
        {"gae_lambda": 0.5},
        {"clip_coef": 0.02},
        {"value_clip_coef": 0.02},
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


def rates_after(divergences: list[float], **options: Any) -> list[float]:
    """The learning rates after the minibatches of an update that find these divergences."""
    algorithm, batch = setup(schedule="adaptive", num_epochs=1, num_minibatches=len(divergences), **options)
    rates, found = [], iter(divergences)

    def value_and_grad(_: Any) -> tuple[Tensor, Tensor, tuple[()], Tensor]:
        rates.append(algorithm.optimizer.learning_rate.item())
        metrics = torch.full((len(PPO_METRICS),), next(found))
        return metrics[0], metrics, (), torch.zeros_like(algorithm.optimizer.flat)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(algorithm.gradient_step, "value_and_grad", value_and_grad)
        algorithm.update(batch)
    return [*rates[1:], algorithm.optimizer.learning_rate.item()]


@pytest.mark.parametrize(
    ("desired", "kl", "factor"),
    [(0.01, 0.05, 1 / 1.5), (0.01, 0.001, 1.5), (0.01, 0.01, 1.0), (0.1, 0.06, 1.0), (0.1, 0.03, 1.5)],
)
def test_the_adaptive_rate_follows_the_divergence(desired: float, kl: float, factor: float) -> None:
    # The first minibatch of an update comes before the first step, so it is the second that counts.
    rates = rates_after([0.0, kl], desired_kl=desired, learning_rate=1e-3)
    assert rates == pytest.approx([1e-3, 1e-3 * factor], rel=1e-5)


@pytest.mark.parametrize(
    ("divergences", "factors"),
    [
        # Before the first step nothing has moved, so the first minibatch says nothing; the others are near.
        ([0.0, 1e-4, 1e-4], [1.0, 1.5, 2.25]),
        # 1.5 · target_kl is 0.03: the third stops the update and lowers the rate, once.
        ([0.0, 0.01, 0.05, 0.9, 0.9], [1.0, 1.0, 1 / 1.5, 1 / 1.5, 1 / 1.5]),
        # What is not finite says nothing, nor does what comes after it.
        ([0.0, 0.01, math.nan, 0.9], [1.0, 1.0, 1.0, 1.0]),
        # A stop before the first step does not come from the rate.
        ([0.9, 0.9], [1.0, 1.0]),
    ],
)
def test_the_adaptive_rate_follows_minibatches_after_a_step_up_to_the_one_that_stops(
    divergences: list[float], factors: list[float]
) -> None:
    rates = rates_after(divergences, learning_rate=1e-3, desired_kl=0.01, target_kl=0.02)
    assert rates == pytest.approx([1e-3 * factor for factor in factors], rel=1e-5)


def test_a_stop_lowers_the_adaptive_rate_also_below_the_divergence_it_aims_at() -> None:
    rates = rates_after([0.0, 0.02], learning_rate=1e-3, desired_kl=0.1, target_kl=0.01)
    assert rates == pytest.approx([1e-3, 1e-3 / 1.5])


def test_the_adaptive_rate_falls_again_with_target_kl() -> None:
    torch.manual_seed(0)
    env = make_env("lift", 16)
    policy = ActorCritic.for_env(env)
    cfg = PPOConfig(num_steps=32, schedule="adaptive", target_kl=0.01, learning_rate=1e-3)
    algorithm = PPO(policy=policy, cfg=cfg)
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=0)
    rates = [algorithm.update(collector.collect(32))["learning_rate"].item() for _ in range(15)]
    assert any(after < before for before, after in itertools.pairwise(rates)), rates
    assert rates[-1] < 5e-3, "before, it reached its bound of 1e-2 in the fourth update and stayed there"


def test_one_minibatch_per_update_says_nothing_about_the_adaptive_rate() -> None:
    algorithm, batch = setup(schedule="adaptive", learning_rate=1e-3, num_epochs=1, num_minibatches=1)
    for _ in range(3):
        assert algorithm.update(batch)["learning_rate"].item() == pytest.approx(1e-3)


def test_an_update_without_a_step_says_nothing_about_the_loss() -> None:
    algorithm, batch = setup(target_kl=0.01)
    batch["sample_log_prob"] += 0.5  # as if another policy had acted: KL exp(-0.5) - 0.5 = 0.107
    before = weights(algorithm)
    metrics = algorithm.update(batch)
    assert torch.equal(weights(algorithm), before)
    assert metrics["skipped"] == 1.0
    assert all(metrics[name].isnan() for name in PPO_METRICS)


@pytest.mark.parametrize(("start", "kl", "bound"), [(1.2e-5, 1.0, 1e-5), (9e-3, 0.0, 1e-2)])
def test_the_adaptive_rate_has_bounds(start: float, kl: float, bound: float) -> None:
    assert rates_after([0.01, kl], learning_rate=start) == pytest.approx([start, bound], rel=1e-5)


@pytest.mark.parametrize(("schedule", "expected"), [("linear", 7.5e-4), ("fixed", 1e-3), ("adaptive", 1e-3)])
def test_only_the_linear_rate_falls_with_progress(schedule: Any, expected: float) -> None:
    algorithm, _ = setup(schedule=schedule, learning_rate=1e-3)
    algorithm.adjust_learning_rate(0.25)
    assert math.isclose(algorithm.optimizer.learning_rate.item(), expected, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("learned", [0.1, 0.3, 2.0]), ("capped", [0.1, 0.3, 0.5]), ("imposed", [0.5, 0.5, 0.5])],
)
def test_sigma_follows_its_schedule(schedule: Any, expected: list[float]) -> None:
    # From 1 to 0.25 by equal ratios: a half in the middle.
    actor_cfg = {"gsde": True, "init_std": 1.0, "hidden_dims": (3,)}
    policy = ActorCritic.for_env(make_env("pendulum", 8), actor_cfg=actor_cfg)
    algorithm = PPO(policy=policy, cfg=PPOConfig(std_schedule=schedule, final_std=0.25))
    log_std = dict(policy.named_parameters())["actor.action_head.log_std"]
    with torch.no_grad():
        log_std.copy_(torch.tensor([[0.1], [0.3], [2.0]]).log())
    algorithm.adjust_learning_rate(0.5)
    torch.testing.assert_close(log_std.exp().flatten(), torch.tensor(expected))
    # The optimizer steps the same memory.
    assert log_std.untyped_storage().data_ptr() == algorithm.optimizer.flat.untyped_storage().data_ptr()


def test_the_ratio_is_one_after_the_schedule_of_sigma_moved_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    env = make_env("pendulum", 8)
    policy = ActorCritic.for_env(env, actor_cfg={"gsde": True, "init_std": 0.3})
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=16, std_schedule="imposed", final_std=0.01))
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=0)
    algorithm.update(collector.collect(16))
    algorithm.adjust_learning_rate(0.5)
    ratio = first_ratio(algorithm, collector.collect(16), monkeypatch)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{"state_dependent_std": True}, None], ids=["state_dependent_std", "discrete"])
def test_a_schedule_of_sigma_needs_a_sigma(options: dict[str, Any] | None) -> None:
    policy = ActorCritic.for_env(make_env("cartpole" if options is None else "pendulum", 2), actor_cfg=options)
    with refused(ConfigError, "algo.std_schedule", "capped", "learned"):
        PPO(policy=policy, cfg=PPOConfig(std_schedule="capped"))


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


def in_bf16(batch_policy: ActorCritic, obs: torch.Tensor, num_minibatches: int) -> dict[str, float]:
    """Act in float32, update once over everything in bfloat16, and return what was logged."""
    acted = batch_policy.act({"observation": obs})
    zero = torch.zeros(*obs.shape[:-1], 1)
    outcome = {name: zero.bool() for name in ("terminated", "truncated", "done")}
    content = {**acted, **outcome, "observation": obs, "reward": torch.randn_like(zero)}
    batch = TensorDict({**content, "value": zero, "next_value": zero}, batch_size=obs.shape[:-1]).detach()
    cfg = PPOConfig(num_epochs=1, num_minibatches=num_minibatches, learning_rate=1e-9)
    algorithm = PPO(policy=batch_policy, cfg=cfg, acceleration=Acceleration(precision="bf16"))
    return {name: value.item() for name, value in algorithm.update(batch).items()}


@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_an_update_in_bf16_begins_at_ratio_one(num_minibatches: int) -> None:
    # 20 actions at σ 0.05: the rounding of their means alone is a KL of 0.024, and clips a third of the samples.
    torch.manual_seed(0)
    space, actions = gym.spaces.Box(-1, 1, (32,)), gym.spaces.Box(-1, 1, (20,))
    policy = ActorCritic(space, actions, actor_cfg={"init_std": 0.05, "hidden_dims": (128, 128)})
    head = policy.actor.action_head
    assert isinstance(head, ActionHead)
    with torch.no_grad():
        head.head.weight.mul_(100.0)  # actions as large as their bounds
    metrics = in_bf16(policy, torch.randn(16, 64, 32), num_minibatches)
    assert metrics["approx_kl"] < 1e-4
    assert metrics["clip_frac"] < 1e-3


@pytest.mark.parametrize("kind", ["mlp", "gru"])
def test_saturated_actions_are_learned_from_without_bias(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    env = make_env("pendulum", 64)
    options = {"distribution": "squashed_gaussian", "init_std": 1.0}
    policy: Any
    if kind == "gru":
        policy = RecurrentActorCritic.for_env(env, **options)
        head = policy.action_head
    else:
        policy = ActorCritic.for_env(env, actor_cfg=options)
        head = policy.actor.action_head
    with torch.no_grad():
        head.head.bias.fill_(9.0)  # float32 rounds tanh(9) to 1
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=16, num_epochs=1, num_minibatches=1))
    batch = SyncCollector(env, policy, keep=PPO.required_keys, seed=0).collect(16)
    limit = float(env.action_space.high.flat[0])  # type: ignore[attr-defined]
    assert (batch["action"] == limit).float().mean() > 0.3
    # E log N(u; μ, 1) = −½ log 2π − ½, and far out −log(2 (1 − tanh² u)) = 2 u − log 8, for actions within ±2.
    expected = -0.5 * math.log(2 * math.pi) - 0.5 + 2 * 9.0 - math.log(8.0)
    assert batch["sample_log_prob"].mean().item() == pytest.approx(expected, abs=0.15), "it was 4.6 less"
    # The score (u − μ) / σ² has mean 0, so the mean does not drift where all actions are as good as another.
    log_prob = policy.evaluate(batch).log_prob.mean()
    (score,) = torch.autograd.grad(log_prob, head.head.bias)
    assert abs(score.item()) < 0.1
    ratio = first_ratio(algorithm, batch, monkeypatch)
    assert (ratio - 1).abs().max() < 1e-4


def test_other_actions_are_stored_as_they_are() -> None:
    _, batch = setup()
    assert "pre_tanh" not in batch.keys()  # noqa: SIM118


def stale(batch: TensorDict) -> TensorDict:
    """Mark a rollout as one of a collector that runs ahead."""
    batch["policy_version"] = torch.zeros(*batch.shape, 1, dtype=torch.long)
    return batch


@pytest.mark.parametrize(
    ("log_ratio", "weight"), [(0.0, 1.0), (math.log(1.5), 1.5), (-0.7, math.exp(-0.7)), (2.0, 2.0)]
)
def test_samples_of_older_weights_count_by_their_truncated_behaviour_ratio(log_ratio: float, weight: float) -> None:
    def policy_gradient(*, ahead: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        algorithm, batch = setup(normalize_advantage="none", value_coef=0.0, entropy_coef=0.0, max_grad_norm=1e9,
                                 num_epochs=1, num_minibatches=1, target_kl=0.01)  # fmt: skip
        if ahead:
            batch = stale(batch)
            batch["sample_log_prob"] = batch["sample_log_prob"] - log_ratio
        stored = batch["sample_log_prob"].clone()
        metrics = algorithm.update(batch)
        assert torch.equal(batch["sample_log_prob"], stored), "the caller's rollout stays as it is"
        return algorithm.optimizer.gradient.clone(), metrics

    expected, _ = policy_gradient(ahead=False)
    found, metrics = policy_gradient(ahead=True)
    # The ratio to the policy at the start is 1, so nothing is clipped and the divergence is 0.
    assert metrics["approx_kl"] < 1e-9
    assert metrics["clip_frac"] == 0.0
    assert metrics["updates"] == 1.0
    torch.testing.assert_close(found, weight * expected, rtol=1e-4, atol=1e-6)


class Wandering(ActorCritic):
    """Gives every action one log-probability where the update begins, and another in its minibatches."""

    at_start, in_minibatch = 0.0, 0.0

    def evaluate(self, batch: Any) -> Evaluation:
        found = super().evaluate(batch)
        wanted = self.in_minibatch if torch.is_grad_enabled() else self.at_start
        return Evaluation(found.log_prob - found.log_prob.detach() + wanted, found.entropy, found.value)


def wandering_update(
    at_sampling: float, at_start: float, in_minibatch: float, **options: Any
) -> tuple[PPO, dict[str, Tensor]]:
    """One minibatch of stale samples, of which each has the advantage 3."""
    torch.manual_seed(0)
    env = make_env("pendulum", 4)
    policy = Wandering.for_env(env)
    policy.at_start, policy.in_minibatch = at_start, in_minibatch
    cfg = PPOConfig(
        num_epochs=1, num_minibatches=1, normalize_advantage="none", value_coef=0.0, entropy_coef=0.0, **options
    )
    algorithm = PPO(policy=policy, cfg=cfg)
    batch = stale(SyncCollector(env, policy, keep=PPO.required_keys, seed=0).collect(4))
    batch["sample_log_prob"].fill_(at_sampling)
    for key, value in (("reward", 3.0), ("value", 0.0), ("next_value", 0.0), ("terminated", True), ("done", True)):
        batch[key].fill_(value)
    return algorithm, algorithm.update(batch)


def test_the_loss_of_a_stale_sample_by_hand() -> None:
    # π / π_start is 1.5 and clipped to 1.2; π_start / π_sample is 0.5.
    _, metrics = wandering_update(math.log(2.0) - 1.0, -1.0, math.log(1.5) - 1.0, clip_coef=0.2)
    assert metrics["policy_loss"].item() == pytest.approx(-0.5 * 1.2 * 3.0)
    assert metrics["loss"].item() == metrics["policy_loss"].item()
    assert metrics["approx_kl"].item() == pytest.approx(0.5 - math.log(1.5))
    assert metrics["clip_frac"].item() == 1.0


def test_a_stale_sample_without_weight_does_not_diverge() -> None:
    # π_start / π_sample underflows to 0, and the policy came back to the action since: π / π_start overflows.
    algorithm, metrics = wandering_update(0.0, -400.0, 0.0)
    assert metrics["nonfinite"].item() == 0.0
    assert metrics["updates"].item() == 1.0
    assert all(metrics[name].isfinite() for name in PPO_METRICS)
    assert not algorithm.optimizer.gradient.any()


@pytest.mark.parametrize("kind", [ActorCritic, RecurrentActorCritic])
def test_updates_from_rollouts_of_the_last_weights_always_take_a_step(kind: Any) -> None:
    torch.manual_seed(0)
    env = make_env("lift", 16)
    policy = kind.for_env(env)
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=32, learning_rate=1e-3, target_kl=0.01))
    behind = copy.deepcopy(policy)
    collector = SyncCollector(env, behind, keep=PPO.required_keys, seed=0)
    for _ in range(20):
        weights_before = copy.deepcopy(policy.state_dict())
        assert algorithm.update(stale(collector.collect(32)))["updates"] >= 1
        behind.load_state_dict(weights_before)


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
    assert metrics["nonfinite"] > 0
    with refused(DivergenceError, f"'{key}'", "step 3", "environment 2"):
        algorithm.raise_diverged(batch)


def test_a_missing_key_is_named() -> None:
    algorithm, batch = setup()
    del batch["value"]
    with refused(KeyError, "PPO.update", "value", "keep=PPO.required_keys"):
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
    [("clip_coef", 0.0), ("clip_coef", 1.0), ("gamma", 1.1), ("gae_lambda", -0.1), ("num_epochs", 0),
     ("learning_rate", 0.0), ("target_kl", 0.0), ("value_clip_coef", -1.0), ("entropy_coef", -0.1),
     ("max_grad_norm", 0.0), ("final_std", 0.0)],
)  # fmt: skip
def test_impossible_options_are_refused(field: str, value: float) -> None:
    with refused(ConfigError, f"algo.{field}", value):
        PPOConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("num_steps", 2.5, ()), ("num_epochs", True, ()), ("clip_coef", "a", ()), ("target_kl", "a", ("null",)),
     ("normalize_reward", 2, ("true", "false")),
     ("schedule", "liner", ("fixed, linear, adaptive", "Did you mean 'linear'")),
     ("normalize_advantage", None, ("batch, minibatch, none",))],
)  # fmt: skip
def test_values_of_another_kind_are_refused(field: str, value: Any, allowed: tuple[object, ...]) -> None:
    with refused(ConfigError, f"algo.{field}", repr(value), *allowed):
        PPOConfig(**{field: value})


@pytest.mark.parametrize(("recurrent", "limit", "parts"), [(False, 24, "24 samples"), (True, 8, "8 sequences")])
def test_more_minibatches_than_parts_are_refused(recurrent: bool, limit: int, parts: str) -> None:
    env = make_env("recall", 8)
    policy = (RecurrentActorCritic if recurrent else ActorCritic).for_env(env)
    batch = SyncCollector(env, policy, keep=PPO.required_keys, seed=0).collect(3)
    metrics = PPO(policy=policy, cfg=PPOConfig(num_minibatches=limit, normalize_advantage="none")).update(batch)
    assert metrics["nonfinite"] == 0
    with refused(ConfigError, "num_minibatches", limit + 1, parts):
        PPO(policy=policy, cfg=PPOConfig(num_minibatches=limit + 1)).update(batch)


def test_it_is_made_from_a_policy_or_from_an_environment() -> None:
    env = make_env("pendulum", 2)
    algorithm = PPO(env, PPOConfig(), actor_cfg={"hidden_dims": [7]})
    assert algorithm.policy.actor.trunk[0].out_features == 7  # type: ignore[union-attr,index]
    with refused(ConfigError, "PPO", "policy=...", "env=..."):
        PPO(env, policy=algorithm.policy)


def test_a_policy_that_ppo_cannot_train_is_refused() -> None:
    env = make_env("pendulum", 2)
    with refused(ConfigError, "PPO", "SACPolicy", "ActorCritic", "SAC"):
        PPO(policy=SACPolicy.for_env(env))
    with refused(ConfigError, "PPO(policy=...)"):
        PPO(ActorCritic.for_env(env))
    network: Any = torch.nn.Linear(3, 1)
    with refused(ConfigError, "PPO", "Policy", "Linear", "actor_class"):
        PPO(policy=network)
    wrong: Any = ActorCritic.for_env(env)
    with refused(ConfigError, "PPOROA", "ROAPolicy", "ActorCritic"):
        PPOROA(wrong)


def test_the_options_of_another_algorithm_are_refused() -> None:
    env = make_env("pendulum", 2)
    ppo, sac = PPOConfig(), SACConfig()
    wrong: Any = sac
    with refused(ConfigError, "cfg", "PPOConfig", "SACConfig"):
        PPO(env, wrong)
    wrong = ppo
    with refused(ConfigError, "cfg", "SACConfig", "PPOConfig"):
        SAC(env, wrong)
    with refused(ConfigError, "cfg", "RLOOConfig", "PPOConfig"):
        RLOO(policy=ActorCritic.for_env(env), cfg=wrong)
    with refused(ConfigError, "cfg", "BCConfig", "PPOConfig"):
        BC(policy=ActorCritic.for_env(env), cfg=wrong)


class Constant(Policy):
    """Always does nothing; there is nothing to learn."""

    def forward(self, obs: Tensor, deterministic: bool = False) -> PolicyOutput:
        zero = torch.zeros(len(obs), 1)
        return PolicyOutput(zero, zero, zero)

    def evaluate_actions(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(action), torch.zeros_like(action)

    def get_value(self, obs: Tensor) -> Tensor:
        return torch.zeros(*obs.shape[:-1], 1)


def test_a_policy_without_parameters_acts_but_cannot_be_trained() -> None:
    env = make_env("pendulum", 2)
    assert evaluate(env, Constant(), 2).num_episodes == 2
    with refused(ConfigError, "gradient", "policy.freeze"):
        PPO(policy=Constant())


def test_a_rollout_that_is_refused_changes_nothing_for_the_next() -> None:
    results = []
    for is_disturbed in (False, True):
        algorithm, batch = setup(num_minibatches=4)
        algorithm.update(batch)
        if is_disturbed:
            with refused(ConfigError, "algo.num_minibatches", 4):
                algorithm.update(batch[:1, :2])
            with pytest.raises(KeyError):
                algorithm.update(batch.exclude("value"))
        algorithm.update(batch)
        results.append(weights(algorithm))
    assert torch.equal(*results)


def test_an_algorithm_of_ones_own_says_what_acts() -> None:
    env = make_env("pendulum", 2)
    algorithm = PPO(env, PPOConfig(num_steps=4))
    algorithm.rollout_policy = ActorCritic.for_env(env)
    trainer = Trainer(env, algorithm.policy, algorithm)
    collector: Any = trainer.collector
    assert collector.policy is algorithm.rollout_policy
