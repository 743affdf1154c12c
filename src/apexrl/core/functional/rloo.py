"""Advantages and losses of episodes that are compared with each other (arXiv 2402.14740)."""

from __future__ import annotations

import torch
from torch import Tensor

from apexrl.core.functional.objectives import MAX_LOG_RATIO, probability_ratio


def leave_one_out(returns: Tensor, group: Tensor) -> Tensor:
    """Score each episode against the others of its group.

    A_i = R_i − mean_{j ≠ i, g_j = g_i} R_j

    Args:
        returns: episode returns ``[E]``.
        group: integers ``[E]``; episodes with the same one are compared. Groups may differ in size.

    Returns:
        Advantages ``[E]``; those of a group sum to zero, and are exactly 0 where its returns are equal. An episode
        alone in its group has nothing to be compared with and gets 0.
    """
    index, above, size, total = _sums(returns, group)
    others = size[index] - 1.0
    return torch.where(others > 0, above - (total[index] - above) / others.clamp_min(1.0), 0.0)


def group_std(returns: Tensor, group: Tensor) -> Tensor:
    """Return the sample standard deviation of each episode's group.

    σ_g = sqrt(Σ_{i in g} (R_i − mean_g)² / (G_g − 1)),  0 for an episode alone in its group; shapes as above.
    """
    index, above, size, total = _sums(returns, group)
    centred = above - (total / size.clamp_min(1.0))[index]
    square = torch.zeros_like(centred).index_add_(0, index, centred.square())
    std: Tensor = (square / (size - 1.0).clamp_min(1.0)).sqrt()
    return std[index]


def _sums(returns: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each episode's index of its group, how far its return lies above the lowest of the group, and sums.

    The sums, ``[E]`` with the groups first, are those of episodes and of what lies above: returns that are equal would
    be rounded.
    """
    _, index = torch.unique(group, return_inverse=True)
    above = returns - torch.empty_like(returns).scatter_reduce_(0, index, returns, "amin", include_self=False)[index]
    values = torch.stack((torch.ones_like(above), above))
    size, total = torch.zeros_like(values).index_add_(1, index, values)
    return index, above, size, total


def reverse_kl(log_prob: Tensor, reference_log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
    """Estimate KL(π ‖ π_ref) from single samples of π_old: ρ (exp(r) − 1 − r) with r = log π_ref − log π.

    Never negative, zero where both agree, and of smaller variance than −ρ r ("k3", John Schulman 2020). The ratio ρ to
    the policy that acted makes its gradient that of the divergence. ρ exp(r) = π_ref / π_old does not depend on π.
    """
    constant = (reference_log_prob - sample_log_prob).clamp(max=MAX_LOG_RATIO).exp()
    return constant - probability_ratio(log_prob - sample_log_prob) * (1.0 + reference_log_prob - log_prob)
