"""Additions to a loss, which PPO does not know."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl import PPO, ActorCritic, PPOConfig, SyncCollector, make_env
from apexrl.algorithms.terms import Term
from apexrl.core.system.acceleration import Acceleration
from apexrl.policies import Policy


class Distillation(Term):
    """Random network distillation (Burda et al. 2019): a bonus where a network cannot predict a fixed random one."""

    name = "prediction_loss"

    def __init__(self, policy: Policy, bonus: float, weight: float = 1.0) -> None:
        super().__init__(policy)
        self.bonus, self.weight = bonus, weight
        self.target, self.predictor = nn.Linear(13, 4).requires_grad_(False), nn.Linear(13, 4)

    def error(self, obs: Tensor) -> Tensor:
        error: Tensor = (self.predictor(obs) - self.target(obs)).square().mean(-1, keepdim=True)
        return error

    def reward(self, batch: TensorDict) -> Tensor:
        return self.bonus * self.error(batch["observation"])

    def loss(self, minibatch: Mapping[str, Any], evaluation: Any) -> Tensor:
        return self.error(minibatch["observation"]).mean()


class Doubled(Term):
    """Every sample twice: means stay as they are."""

    name = "doubled"
    weight = 0.0

    def augment(self, minibatch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: torch.cat((value, value)) for name, value in minibatch.items()}

    def loss(self, minibatch: Mapping[str, Any], evaluation: Any) -> Tensor:
        return torch.tensor(float(len(minibatch["action"])))


def setup(make: Any = None, *, compile_it: bool = False, **options: Any) -> tuple[PPO, SyncCollector]:
    torch.manual_seed(0)
    env = make_env("lift", 8)
    policy = ActorCritic.for_env(env)
    cfg = PPOConfig(num_steps=16, num_epochs=2, num_minibatches=2, **options)
    terms = [] if make is None else [make(policy)]
    algorithm = PPO(policy=policy, cfg=cfg, terms=terms, acceleration=Acceleration(compile=compile_it))
    torch.manual_seed(1)  # terms draw weights
    return algorithm, SyncCollector(env, policy, keep=algorithm.required_keys, seed=0)


def weights(algorithm: PPO) -> Tensor:
    return algorithm.optimizer.flat.clone()


def test_a_bonus_enters_the_advantage_and_not_the_rollout() -> None:
    plain, collector = setup(normalize_advantage="none")
    curious, _ = setup(
        lambda policy: Distillation(policy, bonus=3.0), normalize_advantage="none", gamma=0.0, gae_lambda=0.0
    )
    batch = collector.collect(16)
    reward = batch["reward"].clone()
    term: Any = curious.terms[0]
    bonus = term.reward(batch)
    curious.update(batch)
    assert torch.equal(batch["reward"], reward)
    assert float(bonus.mean()) > 0
    # With γ = 0 the advantage is r − V.
    torch.testing.assert_close(curious.batch["advantage"], reward + bonus - batch["value"])
    plain.update(batch)
    assert not torch.allclose(plain.batch["advantage"], curious.batch["advantage"])


def test_the_networks_of_a_term_learn_with_the_policys_optimizer_and_its_loss_is_logged() -> None:
    algorithm, collector = setup(lambda policy: Distillation(policy, bonus=0.0), learning_rate=1e-2)
    term: Any = algorithm.terms[0]
    fixed = term.target.weight.clone()
    losses = [float(algorithm.update(collector.collect(16))["prediction_loss"]) for _ in range(5)]
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(term.target.weight, fixed)


def test_a_term_without_weight_leaves_the_gradient_of_the_policy_alone() -> None:
    found = []
    for make in (None, lambda policy: Distillation(policy, bonus=0.0, weight=0.0)):
        algorithm, collector = setup(make, max_grad_norm=1e9)
        algorithm.update(collector.collect(16))
        found.append(torch.cat([p.detach().flatten() for p in algorithm.policy.parameters()]))
    assert torch.equal(*found)


def test_a_minibatch_may_be_augmented() -> None:
    plain, collector = setup()
    doubled, _ = setup(Doubled)
    batch = collector.collect(16)
    torch.manual_seed(1)
    plain.update(batch)
    torch.manual_seed(1)
    metrics = doubled.update(batch)
    assert float(metrics["doubled"]) == 2 * 16 * 8 / 2
    torch.testing.assert_close(weights(doubled), weights(plain), rtol=1e-4, atol=1e-5)


def test_a_resumed_term_continues_where_it_was() -> None:
    def make(policy: Policy) -> Distillation:
        return Distillation(policy, bonus=1.0)

    algorithm, collector = setup(make)
    algorithm.update(collector.collect(16))
    saved = copy.deepcopy((algorithm.state_dict(), dict(algorithm.policy.state_dict())))
    batch = collector.collect(16)
    other, _ = setup(make)
    term: Any = other.terms[0]
    term.predictor.reset_parameters()
    other.policy.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    for each in (algorithm, other):
        torch.manual_seed(2)
        each.update(batch)
    assert torch.equal(weights(other), weights(algorithm))


@pytest.mark.slow
def test_a_term_is_compiled_with_the_loss() -> None:
    found = []
    for compile_it in (False, True):
        algorithm, collector = setup(lambda policy: Distillation(policy, bonus=1.0), compile_it=compile_it)
        for _ in range(2):
            algorithm.update(collector.collect(16))
        found.append(weights(algorithm))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
