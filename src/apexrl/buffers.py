"""Minibatches of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict


def minibatches(batch: TensorDict, num_minibatches: int, *, sequential: bool) -> Iterator[TensorDict]:
    """Shuffle a batch ``[T, N]`` and hand out every sample once.

    Args:
        batch: ``[T, N]``.
        num_minibatches: parts, as equal as possible.
        sequential: split by environments and keep time whole (``[T, n]``), instead of by samples (``[B]``).
    """
    if sequential:
        for columns in torch.randperm(batch.shape[1], device=batch.device).tensor_split(num_minibatches):
            yield batch[:, columns]
        return
    flat = batch.reshape(-1)
    for rows in torch.randperm(flat.shape[0], device=batch.device).tensor_split(num_minibatches):
        yield flat[rows]
