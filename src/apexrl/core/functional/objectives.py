"""Advantages, losses, and what is logged of them."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Upper bound of the logarithm of a probability ratio: far outside every clipping range, and small enough that ratio
and squared gradient are finite in float32."""


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """ρ = exp(min(log ρ, 20)), with the gradient ρ ∇log ρ everywhere.

    In float32, exp(log ρ) overflows above 88. The loss would be infinite for a negative advantage, whose gradient must
    still lead back, and 0 · ∞ = NaN for an advantage of 0, which stale samples with a vanishing weight have.
    """
    return (log_ratio - (log_ratio.detach() - MAX_LOG_RATIO).clamp_min(0.0)).exp()


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, clip_coef: float, clip_coef_high: float | None = None
) -> Tensor:
    """PPO's pessimistic surrogate, negated to be minimised.

    L = −mean(min(ρ A, clamp(ρ, 1 − ε, 1 + ε_high) A))

    Args:
        ratio: ρ = π(a|s) / π_old(a|s), any shape.
        advantage: A, of the same shape.
        clip_coef: ε.
        clip_coef_high: ε_high; None for ε.
    """
    high = 1.0 + (clip_coef if clip_coef_high is None else clip_coef_high)
    return -torch.min(ratio * advantage, ratio.clamp(1.0 - clip_coef, high) * advantage).mean()


def value_loss(value: Tensor, target: Tensor, old_value: Tensor, clip_coef: float | None) -> Tensor:
    """Mean squared error; with ``clip_coef`` the pessimistic one around the old value.

    L = mean((V − R)²), or mean(max((V − R)², (V_old + clamp(V − V_old, ±ε) − R)²))
    """
    error = (value - target).square()
    if clip_coef is not None:
        clipped = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
        error = torch.max(error, (clipped - target).square())
    return error.mean()


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Estimate KL(π_old ‖ π) from samples of π_old: mean(ρ − 1 − log ρ).

    Unbiased, never negative, and it needs no distribution parameters in the batch.
    """
    return (probability_ratio(log_ratio) - 1.0 - log_ratio).mean()


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """1 − Var(R − V) / Var(R): 1 is a perfect critic, 0 as good as a constant, below 0 worse."""
    return 1.0 - (target - value).var() / target.var().clamp_min(1e-8)


def soft_target(reward: Tensor, discount: Tensor, value: Tensor, log_prob: Tensor, temperature: Tensor) -> Tensor:
    """SAC's target y = r + γ (Q(s', a') − α log π(a'|s')), where the discount γ is 0 after a terminated step."""
    return reward + discount * (value - temperature * log_prob)


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
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with correct time limits.

    δ_t = r_t + γ (1 − terminated_t) V(s'_t) − V(s_t)
    A_t = δ_t + γ λ (1 − done_t) A_{t+1}

    A terminated step bootstraps nothing. A truncated step bootstraps from its true successor ``s'_t``, and the trace
    stops there, because ``A_{t+1}`` belongs to another episode.

    Args:
        reward: ``[T, N, 1]``, as all tensors here.
        value: ``V(s_t)``.
        next_value: ``V(s'_t)`` of the true successor; ignored where terminated.
        terminated: bool.
        done: terminated or truncated, bool.
        gamma: discount γ.
        gae_lambda: trace decay λ.

    Returns:
        Advantages and value targets ``A + V``.
    """
    bootstrap = torch.where(terminated, torch.zeros_like(next_value), next_value)
    delta = reward + gamma * bootstrap - value
    advantage = discounted_sum(delta, gamma * gae_lambda * (~done).to(delta.dtype))
    return advantage, advantage + value


def normalize(x: Tensor, among: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """Shift and scale by mean and (sample) standard deviation of ``among``, or of ``x``; a single number becomes 0."""
    among = x if among is None else among
    centred = x - among.mean()
    return centred if among.numel() < 2 else centred / (among.std() + eps)
