"""Minibatches of a batch."""

from __future__ import annotations

import torch
from torch import Tensor


def shuffled(count: int, num_parts: int, device: torch.device | None) -> tuple[Tensor, ...]:
    """Deal the numbers 0 … count − 1 at random into parts as equal as possible; each number comes once."""
    return torch.randperm(count, device=device).tensor_split(num_parts)
