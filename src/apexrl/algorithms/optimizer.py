"""One optimizer for a whole module: its parameters are views of one flat tensor.

Clipping and Adam are then a few operations, whatever the number of layers; the learning rate is a tensor, and a step
can be skipped, without reading anything back to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apexrl.core.errors import ConfigError

BETA_MEAN, BETA_SQUARE = 0.9, 0.999


def flatten(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Move parameters into one flat tensor, of which they become views."""
    parameters = list(parameters)
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    return flat


class FlatAdam:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) over parameters that are kept as views of one tensor.

    m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²,  θ ← θ − α (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

    Make it after the module is on its device; ``module.load_state_dict`` keeps working because it copies in place.

    Args:
        named_parameters: as ``module.named_parameters()`` gives them; those that need no gradient are left out.
        learning_rate: α at the start.
        eps: ε.
        max_grad_norm: gradients are scaled down to this norm.
        separate_clip_prefix: parameters whose names begin so are clipped by themselves, as if they had an optimizer of
            their own.
        weight_decay: share of a weight that is taken off at every step, times the learning rate (Loshchilov and Hutter
            2019, arXiv 1711.05101).

    Raises:
        ConfigError: when no parameter needs a gradient.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        learning_rate: float,
        eps: float,
        max_grad_norm: float,
        separate_clip_prefix: str | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        trained = [(name, p) for name, p in named_parameters if p.requires_grad]
        if not trained:
            raise ConfigError(
                "Nothing is left to train: no parameter needs a gradient. Shorten policy.freeze, or give the policy "
                "parameters."
            )
        together = [
            (name, p)
            for name, p in trained
            if separate_clip_prefix is None or not name.startswith(separate_clip_prefix)
        ]
        self.parameters = dict(together + [pair for pair in trained if pair[0] not in dict(together)])
        self._num_together = sum(p.numel() for _, p in together)
        self.eps, self.max_grad_norm, self.weight_decay = eps, max_grad_norm, weight_decay
        self.flat = flatten(self.parameters.values())
        self.gradient = torch.zeros_like(self.flat)
        for name, gradient in self.views(self.gradient).items():
            self.parameters[name].grad = gradient
        self.learning_rate = torch.tensor(learning_rate, device=self.flat.device)
        self.state = {
            "mean": torch.zeros_like(self.flat),
            "square": torch.zeros_like(self.flat),
            # β₁ᵗ and β₂ᵗ, kept because a compiled step would compute the powers again for every few parameters; in
            # float64, because 1 − β₂ᵗ is a small difference at the first steps; not 0-d, because torch.compile loses
            # in-place changes of 0-d float64 tensors on the CPU.
            "mean_decay": torch.ones(1, device=self.flat.device, dtype=torch.float64),
            "square_decay": torch.ones(1, device=self.flat.device, dtype=torch.float64),
        }

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut a flat tensor into the parameters' shapes, by name."""
        parts = torch.split(flat, [p.numel() for p in self.parameters.values()])
        return {name: part.view(p.shape) for part, (name, p) in zip(parts, self.parameters.items(), strict=True)}

    @torch.no_grad()
    def step(self, gradient: Tensor, gradient_norm: Tensor, skip: Tensor) -> None:
        """Clip and step; where ``skip`` (0-d, 0 or 1) is 1, parameters and state stay as they are."""
        taken = 1.0 - skip
        if self._num_together < len(gradient):
            parts = gradient[: self._num_together], gradient[self._num_together :]
            gradient_norm = torch.cat([part.norm().expand(len(part)) for part in parts])
        scale = (self.max_grad_norm / (gradient_norm + 1e-6)).clamp(max=1.0)
        # A skipped gradient may be NaN, and 0 · NaN is NaN: choose, do not multiply.
        self.gradient.copy_(torch.where(skip > 0, 0.0, gradient * scale))
        mean, square = self.state["mean"], self.state["square"]
        mean.lerp_(self.gradient, (1.0 - BETA_MEAN) * taken)
        square.mul_(1.0 - (1.0 - BETA_SQUARE) * taken).addcmul_(self.gradient, self.gradient, value=1.0 - BETA_SQUARE)
        mean_decay, square_decay = self.state["mean_decay"], self.state["square_decay"]
        mean_decay.mul_(1.0 - (1.0 - BETA_MEAN) * taken.double())
        square_decay.mul_(1.0 - (1.0 - BETA_SQUARE) * taken.double())
        # A first step that was skipped leaves 1 − β⁰ = 0 below: any number does, because its size is 0.
        unbias_mean = (1.0 - mean_decay).clamp(min=1.0 - BETA_MEAN).float()
        unbias_square = (1.0 - square_decay).clamp(min=1.0 - BETA_SQUARE).float()
        if self.weight_decay:
            self.flat.mul_(1.0 - self.learning_rate * self.weight_decay * taken)
        size = self.learning_rate * taken / unbias_mean
        self.flat.sub_(size * mean / ((square / unbias_square).sqrt() + self.eps))

    def state_dict(self) -> dict[str, Any]:
        """Return moments, their decays and the learning rate as plain tensors."""
        state = {name: value.clone() for name, value in self.state.items()}
        return {"learning_rate": self.learning_rate.clone(), "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        for name, value in self.state.items():
            saved = state["state"][name].shape
            if saved != value.shape:  # copying would stretch some of them silently
                raise ValueError(f"optimizer.state.{name} is {list(saved)} there and {list(value.shape)} here")
        self.learning_rate.copy_(state["learning_rate"])
        for name, value in self.state.items():
            value.copy_(state["state"][name])
