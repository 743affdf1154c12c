"""SAC against numbers worked by hand, and each option with a test that fails when the option is ignored."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import scipy.stats
import torch
from tensordict import TensorDict
from tests.learning.tasks import DictTask
from tests.refusals import refused
from tests.scripted import ScriptedEnv
from torch import Tensor

from apexrl import SAC, ActorCritic, GymVecEnv, QEnsemble, SACConfig, SACPolicy, SyncCollector, VecEnv, make_env
from apexrl.algorithms.sac import TemperatureLoss
from apexrl.core.errors import ConfigError, DivergenceError
from apexrl.core.functional import soft_target
from apexrl.core.system.acceleration import Acceleration
from apexrl.run.build import make_trainer
from apexrl.run.loading import load_config

SMALL = {"num_steps": 4, "batch_size": 8, "learning_starts": 1, "buffer_size": 1000, "learning_rate": 1e-3}


def make_sac(
    env: VecEnv, hidden_dims: tuple[int, ...] = (16,), acceleration: Acceleration | None = None, **options: Any
) -> SAC:
    cfg = SACConfig(**{**SMALL, **options})
    torch.manual_seed(0)
    policy = SACPolicy.for_env(
        env,
        actor_cfg={"hidden_dims": (16,)},
        critic_cfg={"hidden_dims": hidden_dims, **SAC.critic_options(cfg)},
        normalize_obs=True,
    )
    return SAC(policy=policy, cfg=cfg, acceleration=acceleration)


def setup(**options: Any) -> tuple[SAC, SyncCollector]:
    """A SAC and a collector of its policy on the pendulum, the same every time."""
    env = make_env("pendulum", 2)
    algorithm = make_sac(env, **options)
    return algorithm, SyncCollector(env, algorithm.policy, keep=SAC.required_keys, seed=0)


def run(algorithm: SAC, collector: SyncCollector, num_updates: int = 1) -> dict[str, Tensor]:
    for _ in range(num_updates):
        metrics = algorithm.update(collector.collect(4))
    return metrics


def weights(algorithm: SAC) -> Tensor:
    parts = [*algorithm.policy.parameters(), algorithm.log_temperature]
    return torch.cat([part.detach().flatten() for part in parts])


def updated(num_updates: int = 2, **options: Any) -> Tensor:
    algorithm, collector = setup(**options)
    run(algorithm, collector, num_updates)
    return weights(algorithm)


def make_constant(critics: Any, values: list[float]) -> None:
    """Let critic k value everything at ``values[k]``."""
    with torch.no_grad():
        for parameter in critics.parameters():
            parameter.zero_()
        critics.layers[-1].bias.copy_(torch.tensor(values).view(-1, 1, 1))


def seen_targets(algorithm: SAC, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Tensor]]:
    """Return a list to which every gradient step adds its batch and target."""
    seen: list[tuple[dict[str, Any], Tensor]] = []
    loss = algorithm.critic_step.loss.forward

    def spy(batch: Any) -> Any:
        seen.append((dict(batch), batch["target"]))
        return loss(batch)

    monkeypatch.setattr(algorithm.critic_step.loss, "forward", spy)
    return seen


# The mathematics


def test_the_soft_target() -> None:
    # 1 + 0.5 * (4 - 0.25 * -2) = 3.25; after a terminated step the discount is 0.
    target = soft_target(
        torch.ones(2, 1), torch.tensor([[0.5], [0.0]]), torch.full((2, 1), 4.0), torch.full((2, 1), -2.0),
        torch.tensor([0.25]),
    )  # fmt: skip
    assert target.tolist() == [[3.25], [1.0]]


def test_the_temperature_falls_while_the_entropy_is_above_its_target() -> None:
    # Entropy 2, target -1: -mean(log π + H̄) = -mean(-2, -4) = 3. Entropy -2: -mean(1) = -1.
    log_temperature = torch.nn.Parameter(torch.zeros(1))
    for log_prob, gradient in ((torch.tensor([[-1.0], [-3.0]]), 3.0), (torch.full((2, 1), 2.0), -1.0)):
        loss, _, _ = TemperatureLoss(log_temperature, -1.0, Acceleration())({"sample_log_prob": log_prob})
        assert torch.autograd.grad(loss, log_temperature)[0].tolist() == [gradient]


@pytest.mark.parametrize(("target_entropy", "step"), [(-100.0, -1e-3), (100.0, 1e-3), (None, -1e-3)])
def test_the_temperature_takes_adams_first_step_towards_its_target(target_entropy: float | None, step: float) -> None:
    # The first step of Adam is the learning rate. A new policy has about the entropy of its Gaussian, far above -1.
    algorithm, collector = setup(utd_ratio=0.125, target_entropy=target_entropy)
    metrics = run(algorithm, collector)
    assert metrics["temperature"] == 1.0
    assert float(algorithm.log_temperature.detach()) == pytest.approx(step, rel=1e-4)


def test_a_temperature_that_is_not_learned_stays() -> None:
    algorithm, collector = setup(learn_temperature=False, temperature=0.2)
    run(algorithm, collector, 2)
    assert float(algorithm.log_temperature.detach().exp()) == pytest.approx(0.2)


def test_truncated_steps_bootstrap_from_their_true_successor_and_terminated_ones_from_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The critics' value of a state is its first number, 100 n + t; γ is ½ and the entropy weighs nothing. Step t of an
    # episode pays t + 1. Environment 0 is cut after its step 2, in state 3; environment 1 terminates there.
    env = ScriptedEnv([3, 3], [True, False])
    algorithm = make_sac(env, hidden_dims=(), gamma=0.5, temperature=1e-30, batch_size=64, utd_ratio=0.125)
    algorithm.policy.normalizer = None
    target_critics: Any = algorithm.policy.target_critics
    make_constant(target_critics, [0.0, 0.0])
    with torch.no_grad():
        target_critics.layers[0].weight[:, 0] = 1.0
    collector = SyncCollector(env, algorithm.policy, keep=SAC.required_keys, seed=0)
    seen = seen_targets(algorithm, monkeypatch)
    run(algorithm, collector)
    batch, target = seen[0]
    found = {(float(obs), float(y)) for obs, y in zip(batch["observation"][:, 0], target[:, 0], strict=True)}
    assert found == {(0, 1.5), (1, 3), (2, 3 + 0.5 * 3), (100, 1 + 50.5), (101, 2 + 51), (102, 3)}


def test_the_critics_take_the_gradient_of_the_written_out_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, collector = setup(utd_ratio=0.125)
    before = copy.deepcopy(algorithm.policy)
    seen = seen_targets(algorithm, monkeypatch)
    run(algorithm, collector)
    batch, target = seen[0]
    values = before.critics(batch["observation"], batch["action"] / 2.0)  # the pendulum's actions lie in ±2
    loss = sum(0.5 * (value - target).square().mean() for value in values)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(before.critics.parameters()))])
    torch.testing.assert_close(algorithm.optimizers["critics"].gradient, expected)


def test_target_critics_follow_by_tau() -> None:
    algorithm, collector = setup(utd_ratio=0.125)
    with torch.no_grad():
        algorithm.target_flat.normal_()
    old = algorithm.target_flat.clone()
    run(algorithm, collector)
    new = algorithm.optimizers["critics"].flat
    torch.testing.assert_close(algorithm.target_flat, 0.995 * old + 0.005 * new, rtol=1e-6, atol=1e-7)
    algorithm, collector = setup(tau=1.0)
    run(algorithm, collector)
    for critic, target in zip(
        algorithm.policy.critics.parameters(), algorithm.policy.target_critics.parameters(), strict=True
    ):
        assert torch.equal(critic, target)


# How many gradient steps, and of what


def test_gradient_steps_that_are_not_whole_are_carried_over() -> None:
    algorithm, collector = setup(utd_ratio=0.3125)  # 8 steps of the environment earn 2.5
    taken = []
    for _ in range(4):
        run(algorithm, collector)
        taken.append(algorithm.state_dict()["num_updates"])
    assert taken == [2, 5, 7, 10]


def test_learning_waits_for_its_steps_and_does_not_make_up_for_them() -> None:
    algorithm, collector = setup(learning_starts=17)
    before = weights(algorithm)
    for _ in range(2):
        metrics = run(algorithm, collector)
        assert math.isnan(metrics["critic_loss"].item())
        assert metrics["nonfinite"] == 0
    assert torch.equal(weights(algorithm), before)
    assert run(algorithm, collector)["critic_loss"].isfinite()
    assert algorithm.state_dict()["num_updates"] == 8


def test_actions_are_uniform_until_learning_starts() -> None:
    algorithm, collector = setup(learning_starts=2 * 4 * 200, buffer_size=10_000, utd_ratio=1e-9)
    head: Any = algorithm.policy.actor.action_head
    with torch.no_grad():  # an actor that would push to one side, hardly varied
        head.head.bias.copy_(torch.tensor([1.5, -5.0]))
    chosen = []
    for _ in range(400):
        batch = collector.collect(4)
        chosen.append(batch["action"].flatten())
        algorithm.update(batch)
    first, then = torch.cat(chosen[:200]) / 2.0, torch.cat(chosen[200:]) / 2.0  # the pendulum's bound is 2
    assert scipy.stats.kstest(first.numpy(), "uniform", (-1.0, 2.0)).pvalue > 0.01
    assert then.min() > 0.5
    assert algorithm.policy.act({"observation": torch.zeros(1, 3)}, deterministic=True)["action"].item() > 1.0


def test_the_policy_acts_from_the_start_when_asked_or_when_learning_starts_at_once() -> None:
    for options in ({"uniform_start": False, "learning_starts": 100}, {"learning_starts": 0}):
        algorithm, _ = setup(**options)
        assert not algorithm.policy.acts_uniformly
    algorithm, _ = setup(learning_starts=100)
    assert algorithm.policy.acts_uniformly


def test_a_run_that_starts_from_another_lets_its_policy_act(tmp_path: Path) -> None:
    config = load_config("pendulum_sac", [("training.device", "cpu")])
    first = make_trainer(config, tmp_path)
    assert first.policy.acts_uniformly
    weights_file = first.save_checkpoint(str(tmp_path / "first.pt"))
    second = make_trainer(config, tmp_path, init_from=str(weights_file))
    assert not second.policy.acts_uniformly
    for trainer in (first, second):
        trainer.close()


def test_the_actor_waits_for_its_interval() -> None:
    algorithm, collector = setup(utd_ratio=0.125, policy_delay=3)  # one gradient step an update
    names = ("actor", "critics", "temperature")
    before = {name: algorithm.optimizers[name].flat.clone() for name in names}
    moved = []
    for _ in range(6):
        metrics = run(algorithm, collector)
        moved.append([not torch.equal(algorithm.optimizers[name].flat, before[name]) for name in names])
        assert metrics["actor_loss"].isfinite() == moved[-1][0]
        before = {name: algorithm.optimizers[name].flat.clone() for name in names}
    assert moved == [[False, True, False], [False, True, False], [True, True, True]] * 2


# Ensembles, layer normalisation, dropout


@pytest.mark.parametrize(
    "options",
    [
        {"num_critics": 10, "actor_value": "mean", "utd_ratio": 2.0},  # REDQ
        {"dropout": 0.01, "layer_norm": True, "actor_value": "mean"},  # DroQ
        {"num_critics": 1, "target_subset": 1},
        {"n_step": 3, "priority_exponent": 0.6},
    ],
    ids=str,
)
def test_every_kind_of_critic_learns(options: dict[str, Any]) -> None:
    algorithm, collector = setup(**options)
    before = weights(algorithm)
    metrics = run(algorithm, collector, 2)
    assert {name for name, value in metrics.items() if not value.isfinite()} == set()
    assert metrics["nonfinite"] == 0
    assert not torch.equal(weights(algorithm), before)
    assert len(algorithm.policy.critics(torch.zeros(5, 3), torch.zeros(5, 1))) == algorithm.cfg.num_critics


@pytest.mark.parametrize(("subset", "smallest", "largest"), [(1, 0, 9), (2, 0, 8), (9, 0, 1), (10, 0, 0)])
def test_the_target_is_the_minimum_of_a_subset_drawn_anew_at_every_step(
    subset: int, smallest: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Target critic k says k. The largest minimum of m different ones of ten is 10 - m.
    algorithm, collector = setup(
        num_critics=10, target_subset=subset, tau=1e-9, gamma=1.0, temperature=1e-30, learn_temperature=False,
        utd_ratio=12.0, reward_scale=1e-30,
    )  # fmt: skip
    make_constant(algorithm.policy.target_critics, [9.0, 4.0, 0.0, 7.0, 3.0, 1.0, 8.0, 2.0, 6.0, 5.0])
    seen = seen_targets(algorithm, monkeypatch)
    run(algorithm, collector)
    minima = [set(target.round(decimals=3).flatten().tolist()) for _, target in seen]
    assert all(len(values) == 1 for values in minima)
    drawn = {value for values in minima for value in values}
    assert (min(drawn), max(drawn)) == (smallest, largest)


@pytest.mark.parametrize(("actor_value", "loss"), [("min", -1.0), ("mean", -2.5)])
def test_the_actor_climbs_the_minimum_or_the_mean(actor_value: str, loss: float) -> None:
    algorithm, collector = setup(actor_value=actor_value, temperature=1e-30, learning_rate=1e-12, utd_ratio=0.125)
    make_constant(algorithm.policy.critics, [4.0, 1.0])
    assert float(run(algorithm, collector)["actor_loss"]) == pytest.approx(loss, rel=1e-5)


def test_critics_are_independent() -> None:
    torch.manual_seed(0)
    critics = QEnsemble(gym.spaces.Box(-1, 1, (3,)), 2, hidden_dims=(8, 8), num_critics=4, layer_norm=True)
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    before = critics(obs, action)
    assert not torch.allclose(before[0], before[1])
    for name, parameter in critics.named_parameters():
        with torch.no_grad():
            parameter[2].add_(torch.randn_like(parameter[2]))
        changed = (critics(obs, action) != before).flatten(1).any(1)
        assert changed.tolist() == [False, False, True, False], name


def test_layer_normalisation_comes_before_the_activation() -> None:
    torch.manual_seed(0)
    critics = QEnsemble(gym.spaces.Box(-1, 1, (3,)), 2, hidden_dims=(8,), activation="tanh", layer_norm=True)
    layers: Any = critics.layers
    first, norm, _, last = layers
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    values = critics(obs, action)
    for k in range(2):
        w, b, g, c, v, d = (
            getattr(layer, name)[k] for layer in (first, norm, last) for name in ("weight", "bias")
        )  # fmt: skip
        h = torch.cat((obs, action), 1) @ w + b
        h = (h - h.mean(1, keepdim=True)) / (h.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt() * g + c
        torch.testing.assert_close(values[k], h.tanh() @ v + d)


def test_dropout_drops_its_share_in_training_only() -> None:
    # 4,096 hidden units of 1, whose mean is the value: those that stay count 1 / (1 - 0.25).
    critics: Any = QEnsemble(gym.spaces.Box(-1, 1, (3,)), 2, hidden_dims=(4096,), dropout=0.25)
    make_constant(critics, [0.0, 0.0])
    with torch.no_grad():
        critics.layers[0].bias.fill_(1.0)
        critics.layers[-1].weight.fill_(1 / 4096)
    obs, action = torch.zeros(6, 3), torch.zeros(6, 2)
    torch.manual_seed(0)
    training = critics.train()(obs, action)
    assert len(training.unique()) > 6  # each critic and each sample has a mask of its own
    share = training * 0.75
    assert ((share > 0.70) & (share < 0.80)).all()
    torch.testing.assert_close(critics.eval()(obs, action), torch.ones(2, 6, 1))


def test_nothing_is_dropped_outside_updates() -> None:
    algorithm, collector = setup(dropout=0.5)
    run(algorithm, collector)
    obs = torch.randn(5, 3)
    assert torch.equal(algorithm.policy.get_value(obs), algorithm.policy.get_value(obs))


# Observations


class PixelReach(gym.Env[Any, Any]):
    """An image and a privileged number; the reward is the action."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {"camera": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8), "priv": gym.spaces.Box(-1, 1, (2,))}
        )
        self.action_space = gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32))
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.observe(), float(action[0]), False, self.time == 20, {}

    def observe(self) -> dict[str, Any]:
        image = self.np_random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        return {"camera": image, "priv": self.np_random.uniform(-1, 1, 2).astype(np.float32)}


@pytest.mark.parametrize("task", [DictTask, PixelReach])
def test_named_groups_and_images(task: Any) -> None:
    env = GymVecEnv([task] * 2)
    algorithm = make_sac(env)
    collector = SyncCollector(env, algorithm.policy, keep=SAC.required_keys, seed=0)
    before = weights(algorithm)
    metrics = run(algorithm, collector, 3)
    assert metrics["nonfinite"] == 0
    assert metrics["critic_loss"].isfinite()
    assert not torch.equal(weights(algorithm), before)
    rollout = collector.collect(4)
    low, high = torch.as_tensor(env.action_space.low), torch.as_tensor(env.action_space.high)  # type: ignore[attr-defined]
    assert ((rollout["action"] >= low) & (rollout["action"] <= high)).all()
    assert algorithm.policy.get_value(rollout["observation"]).shape == (4, 2, 1)


def test_the_critics_alone_see_privileged_groups_and_images_are_kept_as_bytes() -> None:
    env = GymVecEnv([PixelReach])
    algorithm = make_sac(env)
    policy = algorithm.policy
    obs = SyncCollector(env, policy, keep=SAC.required_keys, seed=0).collect(2)["observation"][0]
    other = obs.clone()
    other["priv"] = other["priv"] + 1
    assert torch.equal(policy.distribution(obs).mode, policy.distribution(other).mode)
    action = torch.zeros(1, 2)
    assert not torch.equal(policy.critics(obs, action), policy.critics(other, action))
    run(algorithm, SyncCollector(env, policy, keep=SAC.required_keys, seed=0))
    assert algorithm.replay.sample(2)["observation"]["camera"].dtype == torch.uint8


def test_values_have_the_leading_dimensions_of_their_states() -> None:
    algorithm, _ = setup()
    obs = torch.randn(3, 4, 3)
    output = algorithm.policy(obs)
    assert [part.shape for part in output] == [(3, 4, 1)] * 3
    torch.testing.assert_close(algorithm.policy.get_value(obs)[1], algorithm.policy.get_value(obs[1]))
    assert algorithm.policy.get_value(obs[0, 0]).shape == (1,)


def test_log_probabilities_are_those_of_actions_scaled_to_one() -> None:
    # Actions of the pendulum lie in ±2: on the scale ±1 densities are twice as large.
    algorithm, _ = setup()
    obs = torch.randn(200, 3)
    distribution = algorithm.policy.distribution(obs)
    action, log_prob = algorithm.policy.draw_unit_action(distribution)
    inside = action.abs() < 0.999
    assert inside.sum() > 100
    expected, _ = algorithm.policy.evaluate_actions(obs, 2.0 * action)
    torch.testing.assert_close(log_prob[inside], (expected + math.log(2.0))[inside], rtol=1e-3, atol=1e-3)


# Replay


def test_targets_of_several_steps_reach_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, collector = setup(n_step=3, gamma=0.5, batch_size=64)
    seen = seen_targets(algorithm, monkeypatch)
    run(algorithm, collector, 2)
    # Windows are shorter only before the newest step.
    assert set(seen[-1][0]["discount"].flatten().tolist()) == {0.5, 0.25, 0.125}


def test_a_rollout_that_begins_with_a_reset_does_not_follow_the_one_before() -> None:
    # Document 003 collects with reset=True: every rollout runs from state 0 to state 4 and leads to no other.
    env = ScriptedEnv([100], [True])
    algorithm = make_sac(env)
    collector = SyncCollector(env, algorithm.policy, keep=SAC.required_keys, seed=0)
    for _ in range(2):
        algorithm.update(collector.collect(4, reset=True))
    sample = algorithm.replay.sample(200)
    pairs = zip(sample["observation"][:, 0].tolist(), sample["next_observation"][:, 0].tolist(), strict=True)
    assert set(pairs) == {(0, 1), (1, 2), (2, 3), (3, 4)}


def test_errors_become_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, collector = setup(priority_exponent=1.0, utd_ratio=0.125, batch_size=64)
    drawn: list[tuple[Tensor, Tensor]] = []
    set_priorities = algorithm.replay.set_priorities

    def spy(index: Tensor, td_error: Tensor, weight: Tensor) -> None:
        drawn.append((index, td_error))
        set_priorities(index, td_error, weight)

    monkeypatch.setattr(algorithm.replay, "set_priorities", spy)
    seen = seen_targets(algorithm, monkeypatch)
    critics = copy.deepcopy(algorithm.policy.critics)
    run(algorithm, collector)
    (batch, target), (index, td_error) = seen[0], drawn[0]
    error = critics(batch["observation"], batch["action"] / 2.0) - target
    torch.testing.assert_close(td_error, error.abs().mean(0))
    storage: Any = algorithm.replay._storage
    for leaf in index.unique():  # of one drawn several times, any of its errors may stay
        errors = td_error[index == leaf, 0].double() + 1e-6
        assert (errors - storage.tree.get(leaf.view(1))).abs().min() < 1e-9
    run(algorithm, collector)
    assert seen[1][0]["weight"].min() < 1.0 == seen[1][0]["weight"].max()


@pytest.mark.parametrize(
    "option",
    [
        {"batch_size": 16},
        {"utd_ratio": 0.5},
        {"learning_starts": 9},
        {"uniform_start": False},
        {"gamma": 0.5},
        {"tau": 0.5},
        {"n_step": 2},
        {"learning_rate": 1e-2},
        {"temperature": 0.1},
        {"learn_temperature": False},
        {"target_entropy": 5.0},
        {"policy_delay": 2},
        {"num_critics": 3},
        {"target_subset": 1},
        {"actor_value": "mean"},
        {"layer_norm": True},
        {"dropout": 0.1},
        {"reward_scale": 0.1},
        {"max_grad_norm": 0.01},
        {"adam_eps": 1e-2},
        {"priority_exponent": 1.0},
        {"priority_exponent": 1.0, "importance_exponent": 1.0},
        {"buffer_size": 8},
    ],
    ids=str,
)
def test_every_option_changes_the_update(option: dict[str, Any]) -> None:
    # Adam hardly notices the scale of gradients unless ε is large, and the norm is only a scale.
    common: dict[str, Any] = {"adam_eps": 0.1} if "max_grad_norm" in option else {}
    if "importance_exponent" in option:
        common["priority_exponent"] = 1.0
    changed, plain = updated(3, **{**common, **option}), updated(3, **common)
    assert changed.shape != plain.shape or not torch.allclose(changed, plain, rtol=0, atol=1e-7)


def test_the_same_seed_gives_the_same_update() -> None:
    assert torch.equal(updated(), updated())


@pytest.mark.parametrize(("schedule", "expected"), [("linear", 7.5e-4), ("fixed", 1e-3)])
def test_only_the_linear_rate_falls_with_progress(schedule: str, expected: float) -> None:
    algorithm, _ = setup(schedule=schedule)
    algorithm.adjust_learning_rate(0.25)
    for optimizer in algorithm.optimizers.values():
        assert float(optimizer.learning_rate) == pytest.approx(expected)


# Acceleration


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
def test_compiled_updates_equal_eager_ones() -> None:
    options: dict[str, Any] = {"utd_ratio": 0.5, "dropout": 0.1}
    eager = updated(5, **options)
    compiled = updated(5, acceleration=Acceleration(compile=True), **options)
    assert (eager - updated(1, **options)).abs().max() > 1e-3
    assert (compiled - eager).abs().max() < 1e-5


# What goes wrong


@pytest.mark.parametrize("key", ["reward", "observation"])
@pytest.mark.parametrize("learning_starts", [1, 1000])
def test_a_rollout_that_is_not_finite_changes_nothing_and_is_named(key: str, learning_starts: int) -> None:
    algorithm, collector = setup(learning_starts=learning_starts)
    run(algorithm, collector)
    before, batch = weights(algorithm), collector.collect(4)
    batch[key][3, 1] = float("nan")
    metrics = algorithm.update(batch)
    assert metrics["nonfinite"] == 1
    assert torch.equal(weights(algorithm), before)
    normalizer: Any = algorithm.policy.normalizer
    assert normalizer.normalizers["observation"].mean.isfinite().all()
    assert metrics["nonfinite"] > 0
    with refused(DivergenceError, f"'{key}'", "step 3", "environment 1"):
        algorithm.raise_diverged(batch)


def test_an_update_that_overflows_changes_nothing_and_is_reported() -> None:
    # The rollout is finite, its squared error is not.
    algorithm, collector = setup()
    before, batch = weights(algorithm), collector.collect(4)
    batch["reward"].fill_(1e30)
    metrics = algorithm.update(batch)
    assert torch.equal(weights(algorithm), before)
    assert metrics["nonfinite"] > 0
    with refused(DivergenceError, "loss", "algo.learning_rate"):
        algorithm.raise_diverged(batch)


@pytest.mark.parametrize(
    "space", [gym.spaces.Discrete(3), gym.spaces.Box(-np.inf, np.inf, (2,)), gym.spaces.MultiBinary(2)], ids=str
)
def test_actions_without_bounds_are_refused(space: Any) -> None:
    with refused(ConfigError, "SAC", "Box", space):
        SACPolicy(gym.spaces.Box(-1, 1, (3,)), space)


def test_another_distribution_is_refused() -> None:
    with refused(ConfigError, "policy.distribution", "auto", "squashed_gaussian", "'gaussian'"):
        SACPolicy.for_env(make_env("pendulum", 1), actor_cfg={"distribution": "gaussian"})


def test_the_actor_begins_as_linear_layers_do_with_the_deviation_asked_for() -> None:
    # Orthogonal rows have norm √2; those of nn.Linear are uniform in ±1/√256, of norm √(1/3).
    actor: Any = SACPolicy.for_env(make_env("pendulum", 1), actor_cfg={"init_std": 0.3}).actor
    hidden, head = actor.trunk[2], actor.action_head.head
    for layer in (hidden, head):
        assert layer.weight.abs().max() <= 1 / 16
        assert layer.weight.norm(dim=1).mean().item() == pytest.approx(3**-0.5, rel=0.15)
    assert hidden.bias.count_nonzero() > 250
    assert abs(head.bias[1].item() - math.log(0.3)) <= 1 / 16


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("num_steps", 0, (1,)), ("batch_size", 0, (1,)), ("buffer_size", 0, (1,)), ("n_step", 0, (1,)),
     ("policy_delay", 0, (1,)), ("num_critics", 0, (1,)), ("utd_ratio", 0.0, ()), ("learning_rate", -1.0, ()),
     ("temperature", 0.0, ()), ("reward_scale", 0.0, ()), ("adam_eps", 0.0, ()), ("max_grad_norm", 0.0, ("null",)),
     ("learning_starts", -1, ()), ("learning_starts", 1_000_001, ("algo.buffer_size",)),
     ("priority_exponent", -0.1, ()), ("importance_exponent", 1.1, (0, 1)), ("gamma", 1.1, (0, 1)),
     ("tau", 0.0, ("(0, 1]",)), ("dropout", 1.0, ("[0, 1)",)), ("target_subset", 3, ("algo.num_critics", 2)),
     ("target_subset", 0, (1,)), ("actor_value", "max", ("min", "mean")),
     ("replay_device", "cuda", ("auto", "cpu")), ("schedule", "adaptive", ("fixed", "linear")),
     ("save_replay", 2, ("true", "false")), ("learn_temperature", None, ("true", "false")),
     ("layer_norm", 2, ("true", "false")), ("target_entropy", "a", ("null",)), ("batch_size", 2.5, ())],
)  # fmt: skip
def test_impossible_options_are_refused(field: str, value: Any, allowed: tuple[object, ...]) -> None:
    with refused(ConfigError, f"algo.{field}", repr(value), *allowed):
        SACConfig(**{field: value})


def test_a_rollout_that_does_not_fit_the_replay_buffer_is_refused() -> None:
    with refused(ConfigError, "algo.buffer_size", 1000, 1004):
        SACConfig(num_steps=4, buffer_size=1000).check_rollout(251, keeps_sequences=False)


def test_a_missing_key_is_named() -> None:
    algorithm, collector = setup()
    batch = collector.collect(4)
    del batch["next_observation"]
    with refused(KeyError, "SAC.update", "next_observation", "keep=SAC.required_keys"):
        algorithm.update(batch)


def test_it_is_made_from_a_policy_or_from_an_environment() -> None:
    env = make_env("pendulum", 2)
    algorithm = SAC(env, SACConfig(num_critics=3), critic_cfg={"hidden_dims": [7]}, device="cpu")
    critics: Any = algorithm.policy.critics
    assert critics.layers[0].weight.shape == (3, 4, 7)
    with refused(ConfigError, "SAC", "policy=...", "env=..."):
        SAC(env, policy=algorithm.policy)
    with refused(ConfigError, "SAC", "policy=...", "env=..."):
        SAC()


# Resume


def batches(collector: SyncCollector, count: int) -> list[TensorDict]:
    return [collector.collect(4).clone() for _ in range(count)]


@pytest.mark.parametrize("priority_exponent", [0.0, 0.6])
def test_with_its_replay_buffer_it_goes_on_exactly(priority_exponent: float) -> None:
    options: dict[str, Any] = {
        "save_replay": True, "utd_ratio": 0.3125, "policy_delay": 2, "priority_exponent": priority_exponent
    }  # fmt: skip
    first, collector = setup(**options)
    run(first, collector, 3)
    second, _ = setup(**options)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    more = batches(collector, 3)
    for algorithm in (first, second):
        torch.manual_seed(5)
        for batch in more:
            algorithm.update(batch)
    assert torch.equal(weights(first), weights(second))


def test_the_importance_exponent_rises_to_1_over_training() -> None:
    algorithm, collector = setup(priority_exponent=1.0, importance_exponent=0.4, save_replay=True)
    run(algorithm, collector)
    index = torch.arange(len(algorithm.replay))
    algorithm.replay.set_priorities(index, 1.0 + index.double() % 3)  # priorities 1, 2 and 3
    for progress, beta in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0), (1.2, 1.0)):
        algorithm.adjust_learning_rate(progress)
        sample = algorithm.replay.sample(64)
        expected = (1.0 + sample["index"].double() % 3) ** -beta
        torch.testing.assert_close(sample["weight"].squeeze(1), (expected / expected.max()).float())
    algorithm.adjust_learning_rate(0.25)
    other, _ = setup(priority_exponent=1.0, importance_exponent=0.4, save_replay=True)
    other.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    assert float(other.replay.importance_exponent) == pytest.approx(0.55)


def test_without_its_replay_buffer_it_says_so_and_waits() -> None:
    first, collector = setup(learning_starts=16)
    run(first, collector, 2)
    second, _ = setup(learning_starts=16)
    second.policy.load_state_dict(first.policy.state_dict())
    with pytest.warns(UserWarning, match=r"no replay buffer.*\b16\b"):
        second.load_state_dict(first.state_dict())
    num_updates = second.state_dict()["num_updates"]
    before = weights(second)
    run(second, collector)
    assert torch.equal(weights(second), before)
    run(second, collector)
    assert second.state_dict()["num_updates"] == num_updates + 8


def test_the_replay_buffers_of_other_processes_are_left_out_and_it_says_why() -> None:
    first, collector = setup(learning_starts=16, save_replay=True)
    run(first, collector, 2)
    second, _ = setup(learning_starts=16, save_replay=True)
    with pytest.warns(UserWarning, match=r"replay buffer.*processes.*\b16\b"):
        second.load_state_dict(second.without_own_state(first.state_dict()))
    assert len(second.replay) == 0


def test_a_state_from_before_learning_needs_no_warning_and_can_be_returned_to() -> None:
    algorithm, collector = setup(save_replay=True)
    start = copy.deepcopy(algorithm.state_dict())
    run(algorithm, collector)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        algorithm.load_state_dict(start)
    assert len(algorithm.replay) == 0


def test_critics_are_logged_also_where_no_step_trains_the_actor() -> None:
    algorithm, collector = setup(policy_delay=100, utd_ratio=0.125)
    metrics = run(algorithm, collector)
    assert metrics["critic_loss"].isfinite()
    assert metrics["loss"] == metrics["critic_loss"]
    assert metrics["actor_loss"].isnan()


def test_the_memory_is_stated() -> None:
    algorithm, collector = setup(buffer_size=1_000_000)
    text = algorithm.notice(collector.collect(4)) or ""
    assert "1,000,000 transitions" in text
    assert "MB on cpu" in text
    assert "algo.save_replay" in text


def test_an_update_without_a_gradient_step_reports_the_loss_of_the_critics_and_changes_nothing() -> None:
    algorithm, collector = setup(learning_starts=1000)
    batch = collector.collect(4)
    before, state = [p.clone() for p in algorithm.policy.parameters()], torch.get_rng_state()
    losses = [float(algorithm.update(batch)["loss"]) for _ in range(2)]
    assert all(loss > 0 for loss in losses)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, algorithm.policy.parameters(), before))


def test_a_policy_that_sac_cannot_train_is_refused() -> None:
    env = make_env("pendulum", 2)
    with refused(ConfigError, "SAC", "ActorCritic", "SACPolicy.for_env"):
        SAC(policy=ActorCritic.for_env(env))  # type: ignore[arg-type]
    with refused(ConfigError, "SAC(policy=...)"):
        SAC(SACPolicy.for_env(env))
