"""Draw items with probabilities proportional to weights that change all the time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

FANOUT = 32
"""Children of a node: a million leaves are four levels below the root, each a few operations."""
JUST_BELOW = 1.0 - 2.0**-53
"""x · JUST_BELOW is the float64 next below x > 0."""


class SumTree:
    """Weights at the leaves, and at every other node the sum of its children.

    float64, because a leaf among ten million is 1e-7 of the total, where float32 rounds. Sums are recomputed from the
    children, never corrected by differences, so they do not drift. Nothing is read back to the host.

    Args:
        num_leaves: weights, all 0 at first.
        device: where they are.
    """

    def __init__(self, num_leaves: int, device: torch.device | str = "cpu") -> None:
        self.num_leaves = num_leaves
        sizes, count = [], num_leaves
        while count > 1:
            count = -(-count // FANOUT)
            sizes.append(count * FANOUT)
        # From the leaves, filled up to whole nodes, to the root.
        self.levels = [torch.zeros(size, dtype=torch.float64, device=device) for size in (*sizes, 1)]

    @property
    def total(self) -> Tensor:
        """The sum of all weights, 0-d."""
        return self.levels[-1].view(())

    def get(self, index: Tensor) -> Tensor:
        """Return the weights ``[B]`` of leaves ``[B]``."""
        return self.levels[0].index_select(0, index)

    def set(self, index: Tensor, weight: Tensor) -> None:
        """Give leaves ``[B]`` the weights ``[B]``, not negative; of a leaf named twice, either weight may stay."""
        self.levels[0].index_copy_(0, index, weight)
        for below, above in itertools.pairwise(self.levels):
            index = index // FANOUT
            above.index_copy_(0, index, below.view(-1, FANOUT).index_select(0, index).sum(1))

    def sample(self, batch_size: int) -> Tensor:
        """Draw leaves ``[B]``, one from each of B equal parts of the total; a leaf of weight 0 is never drawn."""
        device = self.levels[0].device
        part = torch.arange(batch_size, device=device)
        target = (part + torch.rand(batch_size, dtype=torch.float64, device=device)) * (self.total / batch_size)
        target, node = target.unsqueeze(1), torch.zeros_like(part).unsqueeze(1)
        for level in reversed(self.levels[:-1]):
            children = level.view(-1, FANOUT).index_select(0, node.squeeze(1))
            # Rounding may put an end anywhere near its neighbours', so empty children are excluded outright, and the
            # target is kept below the last end whatever the level above thought of the sum.
            end = children.cumsum(1) * children.sign()
            target = torch.minimum(target, end.amax(1, keepdim=True) * JUST_BELOW)
            child = (end > target).byte().argmax(1, keepdim=True)
            target = (target - (end - children).gather(1, child)).clamp_min_(0.0)
            node = node * FANOUT + child
        return node.squeeze(1)

    def state(self, num_filled: int) -> list[Tensor]:
        """Copy what the first leaves, and the nodes above them, hold; all others must be 0."""
        return [level[: -(-num_filled // FANOUT**depth)].clone() for depth, level in enumerate(self.levels)]

    def load_state(self, state: Sequence[Tensor]) -> None:
        """Continue from ``state`` of a tree with as many leaves."""
        for level, saved in zip(self.levels, state, strict=True):
            level.zero_()
            level[: len(saved)].copy_(saved)
