"""How policies draw actions and evaluate stored ones. The noise of gSDE travels with the carry, as a memory does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.types import ACTION, PRE_TANH, SAMPLE_LOG_PROB, Carry
from apexrl.policies.networks import Distribution, SquashedGaussian
from apexrl.policies.networks.distributions import StateDependentGaussian

NOISE_KEYS = NOISE, NOISE_AGE = "noise", "noise_age"
"""Carried, but too large to be stored with a batch: ε ``[N, F, A]``, and the steps that it was used for, ``[N, 1]``."""


def initial_noise(head: nn.Module, num_envs: int) -> dict[str, Tensor]:
    """Return the noise at the start of an episode: zeros, of age 0, which ``explore`` replaces by a draw."""
    if getattr(head, "gsde_interval", None) is None:
        return {}
    weights: Tensor = head.log_std  # type: ignore[assignment]
    zeros = torch.zeros(num_envs, *weights.shape, device=weights.device)
    return {NOISE: zeros, NOISE_AGE: torch.zeros(num_envs, 1, device=weights.device)}


def explore(distribution: Distribution, carry: Carry, deterministic: bool) -> dict[str, Tensor]:
    """Return ``action``, ``sample_log_prob``, of squashed actions ``pre_tanh``, and with gSDE the next step's noise.

    Noise of age 0 is drawn again; its age returns to 0 after the interval and, as all that is carried, where an
    episode ends. A draw at every step, kept only there, spares the device a question.
    """
    state = {name: carry[name] for name in NOISE_KEYS if name in carry}
    if isinstance(distribution, SquashedGaussian):
        u = distribution.base.mode if deterministic else distribution.base.sample()
        return {ACTION: distribution.squash(u), SAMPLE_LOG_PROB: distribution.log_prob_before_tanh(u), PRE_TANH: u}
    if deterministic:
        action = distribution.mode
    elif isinstance(distribution, StateDependentGaussian) and state:
        noise, age = state[NOISE], state[NOISE_AGE]
        noise = torch.where(age.unsqueeze(-1) == 0, torch.randn_like(noise), noise)
        action = distribution.sample_with(noise)
        after = age + 1.0
        state = {NOISE: noise, NOISE_AGE: after % distribution.interval if distribution.interval else after}
    else:
        action = distribution.sample()
    return {ACTION: action, SAMPLE_LOG_PROB: distribution.log_prob(action), **state}


def stored_log_prob(distribution: Distribution, batch: Mapping[str, Any] | TensorDict) -> Tensor:
    """Return the log-probability of the actions of a batch, of squashed ones from ``pre_tanh`` where it has that."""
    if isinstance(distribution, SquashedGaussian) and PRE_TANH in batch.keys():  # noqa: SIM118
        return distribution.log_prob_before_tanh(batch[PRE_TANH])
    return distribution.log_prob(batch[ACTION])
