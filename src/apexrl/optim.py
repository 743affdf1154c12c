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
        for parameter, view, gradient in zip(
            self.parameters, self._views(self.flat), self._views(self.gradient), strict=True
        ):
            parameter.data, parameter.grad = view, gradient
        device = self.flat.device
        self.learning_rate = torch.tensor(learning_rate, device=device)
        self.state = {
            "mean": torch.zeros_like(self.flat),
            "square": torch.zeros_like(self.flat),
            "steps": torch.zeros((), device=device),
        }
        self.eps = eps
        # On a GPU the kernel gives each tensor few blocks, so one large tensor would leave most of the chip idle.
        num_chunks = 128 if self.flat.is_cuda else 1
        tensors = {"flat": self.flat, "gradient": self.gradient, **self.state}
        self._chunks = {
            name: list(tensor.tensor_split(num_chunks)) for name, tensor in tensors.items() if name != "steps"
        }

    def backward(self, loss: Tensor) -> None:
        """Put the gradient of a loss into ``gradient``; every parameter's ``grad`` is a view of it."""
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        torch.cat([gradient.flatten() for gradient in gradients], out=self.gradient)

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
            self._chunks["flat"],
            self._chunks["gradient"],
            self._chunks["mean"],
            self._chunks["square"],
            [],
            [self.state["steps"]] * len(self._chunks["flat"]),
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
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]
