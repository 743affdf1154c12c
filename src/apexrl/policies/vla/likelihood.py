"""The likelihood head: a distribution over chunks with a learned scale for each action dimension."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from apexrl.core.errors import ConfigError
from apexrl.policies.networks import DiagGaussian
from apexrl.policies.networks.distributions import Bounded

DistributionKind = Literal["gaussian", "laplace"]


class DiagLaplace:
    """Independent Laplace distributions: log π(a) = Σ_i −|a_i − μ_i| / b_i − log 2 b_i,   b = σ / √2."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean = mean
        self.log_scale = (log_std - 0.5 * math.log(2.0)).expand_as(mean)

    @property
    def mode(self) -> Tensor:
        """The mean."""
        return self.mean

    def sample(self) -> Tensor:
        """Draw with gradients through mean and scale: a random sign times an exponential number."""
        size = torch.empty_like(self.mean).exponential_()
        sign = 2.0 * torch.randint_like(self.mean, 2) - 1.0
        return self.mean + self.log_scale.exp() * sign * size

    def log_prob(self, action: Tensor) -> Tensor:
        """Density of an action."""
        return self.elements(action).sum(-1, keepdim=True)

    def elements(self, action: Tensor) -> Tensor:
        """Density of each dimension."""
        return -(action - self.mean).abs() * (-self.log_scale).exp() - self.log_scale - math.log(2.0)

    def entropy(self) -> Tensor:
        """Σ_i 1 + log 2 b_i."""
        return (1.0 + math.log(2.0) + self.log_scale).sum(-1, keepdim=True)


class LikelihoodHead(nn.Module):
    """Makes distributions over normalised chunks from their means.

    The scale is the exponential of a bounded logarithm, so it is positive and finite by construction. The bound passes
    gradients inwards only, so a logarithm that reached it stays near and can come back.

    Args:
        chunk: actions of a chunk.
        num_actions: numbers of one action; each has its own scale, shared by the actions of the chunk.
        distribution: ``gaussian`` or ``laplace``.
        init_std: standard deviation at the start, on normalised actions, between ``min_std`` and ``max_std``.
        learn_std: let reinforcement learning change it; imitation never does.
    """

    def __init__(
        self,
        chunk: int,
        num_actions: int,
        *,
        distribution: DistributionKind = "gaussian",
        init_std: float = 0.6,
        min_std: float = 0.01,
        max_std: float = 2.0,
        learn_std: bool = True,
    ) -> None:
        super().__init__()
        if distribution not in ("gaussian", "laplace"):
            raise ConfigError(f"policy.distribution must be gaussian or laplace for vla, got '{distribution}'.")
        if not 0.0 < min_std <= init_std <= max_std:
            limits = f"policy.min_std ({min_std}, above 0) and policy.max_std ({max_std})"
            raise ConfigError(f"policy.init_std must lie between {limits}, got {init_std}.")
        self.chunk = chunk
        self.distribution: type[DiagGaussian | DiagLaplace] = (
            DiagGaussian if distribution == "gaussian" else DiagLaplace
        )
        self.bounds = (math.log(min_std), math.log(max_std))
        self.log_std = nn.Parameter(torch.full((num_actions,), math.log(init_std)), requires_grad=learn_std)

    def forward(self, mean: Tensor) -> DiagGaussian | DiagLaplace:
        """Return the distribution of chunks with means ``[..., chunk * A]``."""
        return self.around(mean, self.log_std)

    def around(self, mean: Tensor, log_std: Tensor) -> DiagGaussian | DiagLaplace:
        """Return the distribution for a given logarithm of the scale ``[A]``."""
        log_scale: Tensor = Bounded.apply(log_std, *self.bounds)  # type: ignore[no-untyped-call]
        return self.distribution(mean, log_scale.repeat(self.chunk))

    def imitation_loss(self, mean: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        """Negative log-likelihood ``[...]`` of demonstrated chunks, over the dimensions that ``mask`` keeps.

        The scale is taken as given: imitation would shrink it to the fit of a few demonstrations, and nothing would be
        left to explore with.
        """
        elements = self.around(mean, self.log_std.detach()).elements(action)
        return -(elements * mask).sum(-1)
