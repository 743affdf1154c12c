"""One optimizer for a whole module: its parameters are views of one flat tensor.

Clipping and Adam are then a few operations, whatever the number of layers; the learning rate is a tensor, and a step
can be skipped, without reading anything back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BETA_MEAN, BETA_SQUARE = 0.9, 0.999


class FlatAdam:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) over parameters that are kept as views of one tensor.

    m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²,  θ ← θ − α (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

    Make it after the module is on its device; ``module.load_state_dict`` keeps working because it copies in place.

    Args:
        named_parameters: as ``module.named_parameters()`` gives them; those that need no gradient are left out.
        learning_rate: α at the start.
        eps: ε.
        max_grad_norm: gradients are scaled down to this norm.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        learning_rate: float,
        eps: float,
        max_grad_norm: float,
    ) -> None:
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self.eps, self.max_grad_norm = eps, max_grad_norm
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters.values()])
        self.gradient = torch.zeros_like(self.flat)
        views, gradients = self.views(self.flat), self.views(self.gradient)
        for name, parameter in self.parameters.items():
            parameter.data, parameter.grad = views[name], gradients[name]
        self.learning_rate = torch.tensor(learning_rate, device=self.flat.device)
        self.state = {
            "mean": torch.zeros_like(self.flat),
            "square": torch.zeros_like(self.flat),
            "steps": torch.zeros((), device=self.flat.device),
        }

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut a flat tensor into the parameters' shapes, by name."""
        parts = torch.split(flat, [p.numel() for p in self.parameters.values()])
        return {name: part.view(p.shape) for part, (name, p) in zip(parts, self.parameters.items(), strict=True)}

    def gradient_of(self, loss: Tensor) -> Tensor:
        """Return the flat gradient of a loss; parameters that it does not depend on get zeros."""
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    @torch.no_grad()
    def step(self, gradient: Tensor, gradient_norm: Tensor, skip: Tensor) -> None:
        """Clip and step; where ``skip`` (0-d, 0 or 1) is 1, parameters, moments and step count stay as they are."""
        taken = 1.0 - skip
        scale = (self.max_grad_norm / (gradient_norm + 1e-6)).clamp(max=1.0)
        # A skipped gradient may be NaN, and 0 · NaN is NaN: choose, do not multiply.
        self.gradient.copy_(torch.where(skip > 0, 0.0, gradient * scale))
        mean, square, steps = self.state["mean"], self.state["square"], self.state["steps"]
        steps.add_(taken)
        mean.lerp_(self.gradient, (1.0 - BETA_MEAN) * taken)
        square.mul_(1.0 - (1.0 - BETA_SQUARE) * taken).addcmul_(self.gradient, self.gradient, value=1.0 - BETA_SQUARE)
        # 1 − βᵗ by expm1: in float32 the plain difference would lose four digits at the first steps.
        count = steps.clamp(min=1.0)
        unbias_mean = -torch.expm1(count * math.log(BETA_MEAN))
        unbias_square = -torch.expm1(count * math.log(BETA_SQUARE))
        size = self.learning_rate * taken / unbias_mean
        self.flat.sub_(size * mean / ((square / unbias_square).sqrt() + self.eps))

    def state_dict(self) -> dict[str, Any]:
        """Return moments, step count and learning rate as plain tensors."""
        state = {name: value.clone() for name, value in self.state.items()}
        return {"learning_rate": self.learning_rate.clone(), "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.learning_rate.copy_(state["learning_rate"])
        for name, value in self.state.items():
            value.copy_(state["state"][name])
