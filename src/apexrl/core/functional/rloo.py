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
        group: whole numbers ``[E]``; episodes with the same one are compared. Groups may differ in size.

    Returns:
        Advantages ``[E]``; those of a group sum to zero, and are exactly 0 where its returns are equal. An episode
        alone in its group has nothing to be compared with and gets 0.
    """
    _, index = torch.unique(group, return_inverse=True)
    above = _above_worst(returns, index)
    size, total = _group_sums(torch.stack((torch.ones_like(above), above)), index)
    others = size[index] - 1.0
    return torch.where(others > 0, above - (total[index] - above) / others.clamp_min(1.0), 0.0)


def group_std(returns: Tensor, group: Tensor) -> Tensor:
    """Return the sample standard deviation of each episode's group.

    σ_g = sqrt(Σ_{i in g} (R_i − mean_g)² / (G_g − 1))

    Args:
        returns: episode returns ``[E]``.
        group: whole numbers ``[E]``.

    Returns:
        ``[E]``; 0 for an episode alone in its group.
    """
    _, index = torch.unique(group, return_inverse=True)
    above = _above_worst(returns, index)
    size, total = _group_sums(torch.stack((torch.ones_like(above), above)), index)
    centred = above - (total / size.clamp_min(1.0))[index]
    square = _group_sums(centred.square().unsqueeze(0), index)[0]
    std: Tensor = (square / (size - 1.0).clamp_min(1.0)).sqrt()
    return std[index]


def _above_worst(returns: Tensor, index: Tensor) -> Tensor:
    """Return how far each return lies above the lowest of its group: a sum of equal returns would be rounded."""
    lowest = torch.empty_like(returns).scatter_reduce_(0, index, returns, "amin", include_self=False)
    return returns - lowest[index]


def _group_sums(values: Tensor, index: Tensor) -> Tensor:
    """Sum rows ``[K, E]`` within groups; returns ``[K, E]``, of which the first columns are the groups."""
    return torch.zeros_like(values).index_add_(1, index, values)


def surrogate(log_ratio: Tensor, advantage: Tensor, clip: float, clip_high: float) -> Tensor:
    """Clipped policy gradient of every sample, negated to be minimised; the two sides of the range may differ.

    L = −min(ρ A, clamp(ρ, 1 − ε, 1 + ε_high) A),  ρ = exp(log π − log π_old)

    Args:
        log_ratio: log π(a|s) − log π_old(a|s), each the **sum** over the numbers of an action chunk.
        advantage: A, of the same shape.
        clip: ε, below 1.
        clip_high: ε_high, above 1.

    Returns:
        Of the same shape.
    """
    ratio = probability_ratio(log_ratio)
    return -torch.min(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip_high) * advantage)


def reverse_kl(log_prob: Tensor, reference_log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
    """Estimate KL(π ‖ π_ref) from single samples of π_old: ρ (exp(r) − 1 − r) with r = log π_ref − log π.

    Never negative, zero where both agree, and of smaller variance than −ρ r ("k3", John Schulman 2020). The ratio ρ to
    the policy that acted makes its gradient that of the divergence. ρ exp(r) = π_ref / π_old does not depend on π.
    """
    constant = (reference_log_prob - sample_log_prob).clamp(max=MAX_LOG_RATIO).exp()
    return constant - probability_ratio(log_prob - sample_log_prob) * (1.0 + reference_log_prob - log_prob)
