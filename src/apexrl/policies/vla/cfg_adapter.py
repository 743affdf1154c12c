"""Advantage-conditioned flow matching, for classifier-free guidance at inference (the idea: arXiv 2505.23458)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.errors import ConfigError
from apexrl.core.functional.episodes import stack_episodes
from apexrl.core.types import ACTION, CONTROL_STEPS, INFO, OBSERVATION, VALID
from apexrl.policies.vla.flow import CONDITIONAL, UNCONDITIONAL, masked_mean_square
from apexrl.policies.vla.policy import VALID_STEPS, VLAPolicy

Batch = Mapping[str, Any] | TensorDict
Advantages = Tensor | NDArray[Any] | Sequence[float]


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
        self._episodes: TensorDict | None = None

    def set_episodes(self, episodes: TensorDict | Sequence[Mapping[str, Any]]) -> None:
        """Take what ``compute_weighted_loss(advantages)`` is about.

        Episodes of ``RolloutGenerator.generate_rollouts``, or a batch ``[T, E]`` of its ``collect``.
        """
        self._episodes = _one_batch(episodes)

    def sample_losses(self, batch: Batch, advantages: Tensor) -> Tensor:
        """Return L_i ``[B]`` of every sample of a batch, its leading dimensions made one.

        Args:
            batch: ``observation``, ``action [..., chunk * A]``, and perhaps ``valid_steps [..., 1]``.
            advantages: one number per sample, ``[...]`` or ``[..., 1]``; or one per episode of a batch ``[T, E]``.
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
        better = (_per_sample(advantages, batch[ACTION].shape[:-1]) > 0.0).to(conditional.dtype)
        return better * conditional + self.unconditional_weight * unconditional

    @overload
    def compute_weighted_loss(self, advantages: Advantages, /) -> Tensor: ...

    @overload
    def compute_weighted_loss(self, *, advantages: Advantages) -> Tensor: ...

    @overload
    def compute_weighted_loss(self, batch: Batch | Sequence[Mapping[str, Any]], advantages: Advantages) -> Tensor: ...

    def compute_weighted_loss(self, batch: Any = None, advantages: Any = None) -> Tensor:
        """Return the mean of L_i over the samples that ``valid [..., 1]`` keeps; all when there is no such key.

        The batch may also be the list of ``RolloutGenerator.generate_rollouts``. With the advantages alone, one per
        episode ``[E]``, the samples are those of ``set_episodes``.
        """
        if advantages is None and not isinstance(batch, Mapping | TensorDict):
            batch, advantages = self._episodes, batch
        if advantages is None:
            raise TypeError("compute_weighted_loss needs advantages: one per sample, or one per episode.")
        batch = self._episodes if batch is None else batch
        if batch is None:
            raise ValueError(
                "compute_weighted_loss(advantages) needs the episodes: call set_episodes(episodes) before, or "
                "compute_weighted_loss(batch, advantages)."
            )
        here = self.policy.device
        if isinstance(batch, Sequence):
            batch = _one_batch(batch)
        if isinstance(batch, TensorDict):
            batch = batch.to(here)
        losses = self.sample_losses(batch, torch.as_tensor(advantages, device=here))
        if VALID not in batch:
            return losses.mean()
        valid: Tensor = batch[VALID].reshape(-1)
        return torch.where(valid, losses, 0.0).sum() / valid.sum().clamp_min(1)


def _one_batch(episodes: TensorDict | Sequence[Mapping[str, Any]]) -> TensorDict:
    """Return episodes as a batch ``[T, E]`` that says how much of every chunk was executed."""
    batch = stack_episodes(episodes) if isinstance(episodes, Sequence) else episodes.copy()
    if (INFO, CONTROL_STEPS) in batch:
        batch[VALID_STEPS] = batch[INFO][CONTROL_STEPS]  # what follows the goal was never executed
    return batch


def _per_sample(advantages: Tensor, shape: torch.Size) -> Tensor:
    """Return one advantage per sample, ``[B]``, of a batch with these leading dimensions."""
    flat = advantages.reshape(-1)
    if len(flat) == shape.numel():
        return flat
    if len(shape) == 2 and len(flat) == shape[1]:
        return flat.expand(shape).reshape(-1)
    episodes = f" or one per episode [{shape[1]}]" if len(shape) == 2 else ""
    wanted, given = f"one number per sample {list(shape)}{episodes}", list(advantages.shape)
    raise ValueError(f"advantages must hold {wanted}, got {given}.")
