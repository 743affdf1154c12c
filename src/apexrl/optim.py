"""One optimizer for a whole module: its parameters are views of one flat tensor.

Clipping and Adam are then one kernel each, whatever the number of layers; the learning rate is a tensor, and a step
can be skipped, without reading anything back to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class FlatAdam:
    """Adam over parameters that are kept as views of one tensor.

    Make it after the module is on its device; ``module.load_state_dict`` keeps working because it copies in place.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, eps: float, max_grad_norm: float
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.max_grad_norm = max_grad_norm
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters])
        self.gradient = torch.zeros_like(self.flat)
        self._offsets = [0]
        for parameter in self.parameters:
            self._offsets.append(self._offsets[-1] + parameter.numel())
        for parameter, view in zip(self.parameters, self._views(self.flat), strict=True):
            parameter.data = view
        self._attach_gradients()
        device = self.flat.device
        self.learning_rate = torch.tensor(learning_rate, device=device)
        self.state = {
            "mean": torch.zeros_like(self.flat),
            "square": torch.zeros_like(self.flat),
            "steps": torch.zeros((), device=device),
        }
        self.eps = eps

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        self.gradient.zero_()
        if self.parameters[0].grad is None:  # someone called module.zero_grad()
            self._attach_gradients()

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients together."""
        norm: Tensor = self.gradient.norm()
        return norm

    @torch.no_grad()
    def step(self, gradient_norm: Tensor, skip: Tensor) -> None:
        """Clip to ``max_grad_norm`` and step, unless ``skip`` (0-d, 0 or 1)."""
        self.gradient.mul_((self.max_grad_norm / (gradient_norm + 1e-6)).clamp(max=1.0))
        self.state["steps"].add_(1.0 - skip)
        # The kernel behind torch.optim.Adam(fused=True); it leaves everything alone where found_inf is 1.
        torch._fused_adam_(
            [self.flat],
            [self.gradient],
            [self.state["mean"]],
            [self.state["square"]],
            [],
            [self.state["steps"]],
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return moments, step count and learning rate as plain tensors."""
        state = {name: value.clone() for name, value in self.state.items()}
        return {"learning_rate": self.learning_rate.clone(), "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.learning_rate.copy_(state["learning_rate"])
        for name, value in self.state.items():
            value.copy_(state["state"][name])

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + p.numel()].view_as(p)
            for p, start in zip(self.parameters, self._offsets[:-1], strict=True)
        ]

    def _attach_gradients(self) -> None:
        for parameter, view in zip(self.parameters, self._views(self.gradient), strict=True):
            parameter.grad = view
