"""Advantages and discounted sums along time."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sum(x: Tensor, decay: Tensor) -> Tensor:
    """Solve ``y_t = x_t + decay_t * y_{t+1}`` backwards from ``y_T = 0``.

    Doubles the span of each partial sum, so it takes ``log2(T)`` whole-tensor operations instead of ``T`` small ones.

    Args:
        x: ``[T, ...]``.
        decay: ``[T, ...]``, the weight of what comes after each step; 0 cuts the sum there.

    Returns:
        ``[T, ...]``.
    """
    span = 1
    while span < x.shape[0]:
        head = x[:-span] + decay[:-span] * x[span:]
        decay = torch.cat((decay[:-span] * decay[span:], decay[-span:]))
        x = torch.cat((head, x[-span:]))
        span *= 2
    return x


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with correct time limits.

    δ_t = r_t + γ (1 − terminated_t) V(s'_t) − V(s_t)
    A_t = δ_t + γ λ (1 − done_t) A_{t+1}

    A terminated step bootstraps nothing. A truncated step bootstraps from its true successor ``s'_t``, and the trace
    stops there, because ``A_{t+1}`` belongs to another episode.

    Args:
        reward: ``[T, N, 1]``.
        value: ``V(s_t)``, ``[T, N, 1]``.
        next_value: ``V(s'_t)`` of the true successor, ``[T, N, 1]``; ignored where terminated.
        terminated: ``[T, N, 1]`` bool.
        done: terminated or truncated, ``[T, N, 1]`` bool.
        gamma: discount γ.
        lam: trace decay λ.

    Returns:
        Advantages and value targets ``A + V``, both ``[T, N, 1]``.
    """
    bootstrap = torch.where(terminated, torch.zeros_like(next_value), next_value)
    delta = reward + gamma * bootstrap - value
    advantage = discounted_sum(delta, gamma * lam * (~done).to(delta.dtype))
    return advantage, advantage + value


def normalize(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and (sample) standard deviation 1; a single number becomes 0."""
    centred = x - x.mean()
    if x.numel() < 2:
        return centred
    return centred / (x.std() + eps)
