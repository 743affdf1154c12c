"""Action distributions, without the argument checks of ``torch.distributions`` that would read the device.

Every ``log_prob`` and ``entropy`` is ``[..., 1]``, summed over the action's dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class Bounded(torch.autograd.Function):
    """Clamp, with gradients that only ever lead inwards.

    At or beyond a bound, descent along a gradient that points outwards would move ``x`` without effect, and as long a
    way back; one that points inwards passes, so that ``x`` can leave the bound at once.
    """

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:
        """Clamp."""
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        """Keep what the gradient needs."""
        _, ctx.low, ctx.high = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Pass what leads inwards."""
        (clamped,) = ctx.saved_tensors
        # A step against the gradient that the bounds would take back leads outwards.
        leads_inwards = (clamped - gradient.sign()).clamp(ctx.low, ctx.high) != clamped
        return torch.where(leads_inwards, gradient, 0.0), None, None


class Distribution(Protocol):
    """What a policy needs of an action distribution."""

    @property
    def mode(self) -> Tensor:
        """The deterministic action ``[..., A]``."""

    def sample(self) -> Tensor:
        """Draw an action ``[..., A]``."""

    def log_prob(self, action: Tensor) -> Tensor:
        """``[..., 1]``"""

    def entropy(self) -> Tensor:
        """``[..., 1]``"""


class DiagGaussian:
    """Independent normal distributions: log π(a) = Σ_i −½ ((a_i − μ_i) / σ_i)² − log σ_i − ½ log 2π."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean = mean
        self.log_std = log_std.expand_as(mean)
        self.std = self.log_std.exp()
        """Standard deviations ``[..., A]``."""

    @property
    def mode(self) -> Tensor:
        """The mean."""
        return self.mean

    def sample(self) -> Tensor:
        """Draw with gradients through mean and standard deviation."""
        return self.mean + self.std * torch.randn_like(self.mean)

    def log_prob(self, action: Tensor) -> Tensor:
        """Density of an action."""
        return self.elements(action).sum(-1, keepdim=True)

    def elements(self, action: Tensor) -> Tensor:
        """Density of each dimension."""
        z = (action - self.mean) / self.std
        return -0.5 * z.square() - self.log_std - LOG_SQRT_2PI

    def entropy(self) -> Tensor:
        """Σ_i ½ + ½ log 2π + log σ_i."""
        return (0.5 + LOG_SQRT_2PI + self.log_std).sum(-1, keepdim=True)


class StateDependentGaussian(DiagGaussian):
    """Normal distributions whose noise is a linear function of the features (gSDE, Raffin et al. 2021).

    a = μ + φᵀ (σ ⊙ ε),  ε ~ N(0, 1)  [F, A]:  while ε stays the same, so does the noise in the same state. Over ε,

    a_i ~ N(μ_i, Σ_j φ_j² σ_ji²),  which is the density of ``log_prob``.

    Args:
        mean: ``[..., A]``.
        log_std: log σ of the noise's weights, ``[F, A]``.
        features: φ, ``[..., F]``; no gradient passes into them, which would teach the network how loud to be.
        interval: steps for which ε stays the same; 0 for the whole episode.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, features: Tensor, interval: int) -> None:
        self.features, self.weight_std, self.interval = features.detach(), log_std.exp(), interval
        variance = self.features.square() @ self.weight_std.square()
        super().__init__(mean, 0.5 * (variance + 1e-6).log())

    def sample(self) -> Tensor:
        """Draw with an ε of its own for each row."""
        return self.sample_with(self.mean.new_empty(*self.mean.shape[:-1], *self.weight_std.shape).normal_())

    def sample_held(self, noise: Tensor, age: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw with the ε of the last step, or a new one where its age is 0; return the action, ε and its next age."""
        noise = torch.where(age.unsqueeze(-1) == 0, torch.randn_like(noise), noise)
        after = age + 1.0
        return self.sample_with(noise), noise, after % self.interval if self.interval else after

    def sample_with(self, noise: Tensor) -> Tensor:
        """Return the actions for ε ``[..., F, A]``."""
        return self.mean + (self.features.unsqueeze(-1) * (self.weight_std * noise)).sum(-2)


class SquashedGaussian:
    """A normal distribution squashed into the action bounds: ``a = centre + scale · tanh(u)``.

    log π(a) = log N(u) − Σ_i log(scale_i (1 − tanh² u_i))

    ``log_prob`` inverts the squashing. Near the bounds, where float32 rounds ``tanh`` to ±1, u is lost: who learns
    from stored actions stores u as well, and asks ``log_prob_before_tanh``.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, low: Tensor, high: Tensor) -> None:
        self.base = DiagGaussian(mean, log_std)
        self.centre = 0.5 * (high + low)
        self.scale = 0.5 * (high - low)

    @property
    def mode(self) -> Tensor:
        """The squashed mean."""
        return self.squash(self.base.mean)

    def sample(self) -> Tensor:
        """Draw with gradients through mean and standard deviation."""
        return self.squash(self.base.sample())

    def sample_or_uniform(self, uniformly: Tensor) -> Tensor:
        """Draw, or where ``uniformly`` draw any action within the bounds alike, from the same random numbers."""
        u = self.base.sample()
        # A standard normal number lies below z with probability (1 + erf(z / √2)) / 2: erf is uniform in [−1, 1].
        unit = torch.erf((u - self.base.mean) / (math.sqrt(2.0) * self.base.std))
        return torch.where(uniformly, self.centre + self.scale * unit, self.squash(u))

    def sample_with_log_prob(self) -> tuple[Tensor, Tensor]:
        """Draw with gradients, and return the log-probability of the draw without inverting the squashing."""
        u = self.base.sample()
        return self.squash(u), self.log_prob_before_tanh(u)

    def log_prob(self, action: Tensor) -> Tensor:
        """Density of an action inside the bounds."""
        limit = 1.0 - 1e-6  # atanh is infinite at the bounds, which float32 tanh reaches
        u = torch.atanh(((action - self.centre) / self.scale).clamp(-limit, limit))
        return self.log_prob_before_tanh(u)

    def log_prob_before_tanh(self, u: Tensor) -> Tensor:
        """Density of the action for u, exact however far u is from 0."""
        return self.base.log_prob(u) - self._log_slope(u)

    def entropy(self) -> Tensor:
        """One-sample estimate ``H(base) + Σ log(scale (1 − tanh² u))``: there is no closed form."""
        return self.base.entropy() + self._log_slope(self.base.sample())

    def squash(self, u: Tensor) -> Tensor:
        """Return the action for u ``[..., A]``."""
        return self.centre + self.scale * u.tanh()

    def _log_slope(self, u: Tensor) -> Tensor:
        # log(1 - tanh(u)^2) in a form that does not round to log(0) for large u
        slope = 2.0 * (math.log(2.0) - u - functional.softplus(-2.0 * u))
        return (slope + self.scale.log()).sum(-1, keepdim=True)


class MultiCategorical:
    """Independent choices among ``sizes[i]`` options each; one choice is the plain categorical distribution.

    Actions are int64 ``[..., len(sizes)]``.
    """

    def __init__(self, logits: Tensor, sizes: Sequence[int]) -> None:
        parts = (logits,) if len(sizes) == 1 else torch.split(logits, list(sizes), dim=-1)
        self.log_probs = [part.log_softmax(-1) for part in parts]

    @property
    def mode(self) -> Tensor:
        """The likeliest option of each choice."""
        return _side_by_side([log_p.argmax(-1, keepdim=True) for log_p in self.log_probs])

    def sample(self) -> Tensor:
        """Draw by the Gumbel-max rule, which needs no check of the probabilities on the host."""
        return _side_by_side([self._gumbel_argmax(log_p) for log_p in self.log_probs])

    def log_prob(self, action: Tensor) -> Tensor:
        """Sum of the log-probabilities of the choices."""
        chosen = action.long().split(1, dim=-1)
        return _total([log_p.gather(-1, a) for log_p, a in zip(self.log_probs, chosen, strict=True)])

    def entropy(self) -> Tensor:
        """Sum of −Σ p log p over the choices."""
        return _total([-(log_p.exp() * log_p).sum(-1, keepdim=True) for log_p in self.log_probs])

    @staticmethod
    def _gumbel_argmax(log_p: Tensor) -> Tensor:
        exponential = torch.empty_like(log_p).exponential_()
        return (log_p - exponential.log()).argmax(-1, keepdim=True)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)  # type: ignore[arg-type]


def _total(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)  # type: ignore[arg-type]
