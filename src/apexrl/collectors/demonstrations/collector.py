"""Demonstrations as batches, for the trainer to drive imitation like any other algorithm."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from apexrl.collectors.base import BaseCollector


class DemoCollector(BaseCollector):
    """Draws samples ``[B, 1]`` from demonstrations, with replacement; no environment is stepped.

    Args:
        samples: ``[M]``, as ``load_demos`` returns them.
        batch_size: B.
    """

    def __init__(self, samples: TensorDict, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    def steps_in(self, batch: TensorDict) -> int:
        """Return 0: nothing was simulated."""
        return 0

    def collect(self, n_steps: int = 1, reset: bool = False) -> TensorDict:
        """Return the next samples; they are drawn by PyTorch's global generator, whose state a checkpoint holds."""
        rows = torch.randint(len(self.samples), (self.batch_size,))
        batch: TensorDict = self.samples[rows].unsqueeze(-1)
        return batch
