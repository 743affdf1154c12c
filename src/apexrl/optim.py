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
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]))
        self.flat.grad = torch.zeros_like(self.flat)
        self._offsets = [0]
        for parameter in self.parameters:
            self._offsets.append(self._offsets[-1] + parameter.numel())
        for parameter, view in zip(self.parameters, self._views(self.flat.data), strict=True):
            parameter.data = view
        self._attach_gradients()
        self.learning_rate = torch.tensor(learning_rate, device=self.flat.device)
        self.adam = torch.optim.Adam(
            [self.flat], lr=self.learning_rate, eps=eps, fused=True, capturable=self.flat.is_cuda
        )

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        assert self.flat.grad is not None
        self.flat.grad.zero_()
        if self.parameters[0].grad is None:  # someone called module.zero_grad()
            self._attach_gradients()

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients together."""
        assert self.flat.grad is not None
        norm: Tensor = self.flat.grad.norm()
        return norm

    def step(self, gradient_norm: Tensor, skip: Tensor) -> None:
        """Clip to ``max_grad_norm`` and step, unless ``skip`` (0-d, 0 or 1)."""
        assert self.flat.grad is not None
        self.flat.grad.mul_((self.max_grad_norm / (gradient_norm + 1e-6)).clamp(max=1.0))
        # The fused kernel leaves parameters, moments and step count alone where this is 1.
        self.adam.found_inf = skip  # type: ignore[attr-defined]
        self.adam.step()

    def state_dict(self) -> dict[str, Any]:
        """Return moments, step count and learning rate as plain tensors."""
        moments = self.adam.state.get(self.flat, {})
        return {
            "learning_rate": self.learning_rate.clone(),
            "state": {name: value.clone() for name, value in moments.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.learning_rate.copy_(state["learning_rate"])
        self.adam.state[self.flat] = {name: value.to(self.flat.device) for name, value in state["state"].items()}
        if not state["state"]:
            del self.adam.state[self.flat]

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + p.numel()].view_as(p)
            for p, start in zip(self.parameters, self._offsets[:-1], strict=True)
        ]

    def _attach_gradients(self) -> None:
        assert self.flat.grad is not None
        for parameter, view in zip(self.parameters, self._views(self.flat.grad), strict=True):
            parameter.grad = view
