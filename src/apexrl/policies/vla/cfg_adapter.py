"""Advantage-conditioned flow matching, for classifier-free guidance at inference (the idea: arXiv 2505.23458)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.errors import ConfigError
from apexrl.policies.vla.flow import CONDITIONAL, UNCONDITIONAL, masked_mean_square
from apexrl.policies.vla.policy import VLAPolicy
from apexrl.types import OBSERVATION, VALID


class PI0_CFG_Adapter:  # noqa: N801  the name that the recipe gives it
    """Turns advantages into a flow-matching loss.

    L_i = 1[A_i > 0] · ℓ_c(i) + w_u · ℓ_u(i),   ℓ = ‖v(x_t, t) − (a − ε)‖² / D

    The conditional branch learns from samples that did better than their group, the unconditional one from all of
    them. Both terms are squares with weights of at least zero: a negative advantage takes the conditional term away
    and is never multiplied into it, so no step can gain by making the field worse without end. At inference
    v = v_u + s (v_c − v_u) leads away from what is merely usual and towards what did better.

    Args:
        policy: with a flow head.
        unconditional_weight: w_u.
    """

    def __init__(self, policy: VLAPolicy, unconditional_weight: float = 0.1) -> None:
        if getattr(policy, "flow", None) is None:
            raise ConfigError("PI0_CFG_Adapter needs a vla policy with policy.head flow.")
        if unconditional_weight < 0.0:
            raise ConfigError(f"unconditional_weight must be at least 0, got {unconditional_weight}.")
        self.policy, self.unconditional_weight = policy, unconditional_weight

    def sample_losses(self, batch: Mapping[str, Any] | TensorDict, advantages: Tensor) -> Tensor:
        """Return L_i ``[B]`` of every sample of a batch, its leading dimensions made one.

        Args:
            batch: ``observation``, ``action [..., chunk * A]``, and perhaps ``valid_steps [..., 1]``.
            advantages: one number a sample, ``[...]`` or ``[..., 1]``.
        """
        policy, flow = self.policy, self.policy.flow
        assert flow is not None
        action, mask = policy.targets(batch)
        prefix = policy.read(batch[OBSERVATION])
        # Both branches see the same noise and time, and share the prefix.
        point, time, target = flow.interpolate(action)
        conditional, unconditional = (
            masked_mean_square(flow.branch(policy.expert, prefix, point, time, branch).squeeze(1) - target, mask)
            for branch in (CONDITIONAL, UNCONDITIONAL)
        )
        better = (advantages.reshape(-1) > 0.0).to(conditional.dtype)
        return better * conditional + self.unconditional_weight * unconditional

    def compute_weighted_loss(self, batch: Mapping[str, Any] | TensorDict, advantages: Tensor) -> Tensor:
        """Return the mean of L_i over the samples that ``valid [..., 1]`` keeps; all when there is no such key."""
        losses = self.sample_losses(batch, advantages)
        if VALID not in batch.keys():  # noqa: SIM118
            return losses.mean()
        valid: Tensor = batch[VALID].reshape(-1)
        return torch.where(valid, losses, 0.0).sum() / valid.sum().clamp_min(1)
