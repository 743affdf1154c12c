"""Linear layers that can be trained through a low-rank addition alone (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional


class LoRALinear(nn.Linear):
    """``y = W x + b + (α / r) B A x`` with W and b frozen; B starts at zero, so nothing changes at first.

    Args:
        width_in: of x.
        width_out: of y.
        rank: r.
        alpha: α; the addition keeps its size when the rank changes.
    """

    def __init__(self, width_in: int, width_out: int, rank: int, alpha: float = 16.0) -> None:
        super().__init__(width_in, width_out)
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.randn(rank, width_in) * width_in**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(width_out, rank))
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., width_out]``."""
        low = functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        return functional.linear(x, self.weight, self.bias) + self.scale * low


def projection(width_in: int, width_out: int, *, rank: int = 0, gain: float = 1.0) -> nn.Linear:
    """A linear layer with normal weights of standard deviation ``gain / √width_in``; with ``rank``, a LoRA one."""
    layer = LoRALinear(width_in, width_out, rank) if rank else nn.Linear(width_in, width_out)
    nn.init.normal_(layer.weight, std=gain * width_in**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def with_adapters(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Complete the weights of a model without adapters by the adapters of ``module``.

    A policy that was trained whole can so be loaded into one with ``lora_rank``; it acts as before.
    """
    own = {name: value for name, value in module.state_dict().items() if name.endswith((".lora_a", ".lora_b"))}
    return {**own, **state}


@torch.no_grad()
def merged(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights with the additions folded in, for the same model without adapters."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for path, layer in module.named_modules():
        if isinstance(layer, LoRALinear):
            state[f"{path}.weight"] += layer.scale * layer.lora_b @ layer.lora_a
            del state[f"{path}.lora_a"], state[f"{path}.lora_b"]
    return state
