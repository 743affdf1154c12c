"""Demonstrations that are learned from beside something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.algorithms.terms.base import Term
from apexrl.core.errors import ConfigError
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import ACTION, OBSERVATION
from apexrl.policies import Policy

DEMONSTRATIONS = "demonstrations"


class Imitation(Term):
    """The mean squared error of demonstrated chunks, so that what they taught is not forgotten.

    Args:
        policy: what learns.
        weight: its factor.
        batch_size: demonstrated chunks of one gradient step, sampled with replacement.
        acceleration: precision of the networks.
    """

    name = "imitation_loss"

    def __init__(self, policy: Policy, weight: float, batch_size: int, acceleration: Acceleration) -> None:
        super().__init__(policy)
        self.weight, self.batch_size, self.acceleration = weight, batch_size, acceleration
        self.demonstrations: TensorDict | None = None
        """Samples ``[M]``, as ``load_demos`` returns them, on the policy's device."""

    def augment(self, minibatch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add demonstrated chunks."""
        assert self.demonstrations is not None
        count, here = self.demonstrations.shape[0], self.policy.device
        return {**minibatch, DEMONSTRATIONS: self.demonstrations[torch.randint(count, (self.batch_size,), device=here)]}

    def loss(self, minibatch: Mapping[str, Any], evaluation: Any) -> Tensor:
        """Return their error."""
        with self.acceleration.autocast(self.policy.device):
            return imitation_error(self.policy, dict(minibatch[DEMONSTRATIONS].items()))


def imitation_loss(policy: Policy, batch: Mapping[str, Any]) -> Tensor:
    """Return the mean of the policy's own loss of demonstrated chunks, or else of minus their log-probability."""
    own: Callable[[Mapping[str, Any]], Tensor] | None = getattr(policy, "imitation_loss", None)
    if own is not None:
        return own(batch).float().mean()
    log_prob, _ = policy.evaluate_actions(batch[OBSERVATION], batch[ACTION])
    return -log_prob.float().mean()


def imitation_error(policy: Policy, batch: Mapping[str, Any]) -> Tensor:
    """Return the mean squared error of demonstrated chunks, a mean over their numbers; it does not see σ.

    The policy's own (of a vla, on normalised actions), or that of the mode; of discrete actions minus their
    log-probability.
    """
    own: Callable[[Mapping[str, Any]], Tensor] | None = getattr(policy, "imitation_error", None)
    if own is not None:
        return own(batch).float().mean()
    if batch[ACTION].is_floating_point():
        return squared_error(policy, batch).float().mean()
    return imitation_loss(policy, batch)


def squared_error(policy: Policy, batch: Mapping[str, Any]) -> Tensor:
    """Return the squared error of the mode, ``[B, chunk * A]``."""
    distribution: Any = getattr(policy, "distribution", None)
    if distribution is None:
        name = type(policy).__name__
        raise ConfigError(
            f"algo.loss mse and algo.imitation_coef need a policy with distribution(obs), {name} has none: give it "
            "that method, or imitation_error(batch) of its own."
        )
    error: Tensor = (distribution(batch[OBSERVATION]).mode - batch[ACTION]).square()
    return error
