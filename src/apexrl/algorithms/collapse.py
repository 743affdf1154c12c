"""Restores the best policy after a collapse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from apexrl.algorithms.optimizer import FlatAdam


class CollapseGuard:
    """Keeps the weights that did best, and puts them back when sampled success collapses.

    A policy that never succeeds has only uniform groups, so no gradient leads out again. The best is judged by a
    running mean of success, because one batch may be lucky. A policy that was put back and fails again is taken at its
    word: training continues from there with its success as the new best, so that it cannot be put back forever.

    Args:
        ratio: share of the best success below which a batch counts as collapsed.
        optimizer: holds the weights.
    """

    smoothing = 0.5
    """Weight of the newest batch in the running mean."""
    _numbers = ("best", "running", "was_put_back")

    def __init__(self, ratio: float, optimizer: FlatAdam) -> None:
        self.ratio, self.optimizer = ratio, optimizer
        self.best = self.running = 0.0
        self.weights = optimizer.flat.detach().clone()
        self.was_put_back = False

    def check(self, success: float) -> bool:
        """Look at the success of a batch that the current weights sampled; returns whether others were put back."""
        if success < self.ratio * self.best:
            if not self.was_put_back:
                self._put_back()
                return True
            self.best = self.running = success
            self._keep()
        self.running += self.smoothing * (success - self.running) if self.best else success - self.running
        if self.running >= self.best:
            self.best = self.running
            self._keep()
        self.was_put_back = False
        return False

    @torch.no_grad()
    def _keep(self) -> None:
        self.weights.copy_(self.optimizer.flat)

    @torch.no_grad()
    def _put_back(self) -> None:
        self.optimizer.flat.copy_(self.weights)
        # The moments point to where it collapsed.
        for name, value in self.optimizer.state.items():
            value.fill_(1.0 if name.endswith("decay") else 0.0)
        self.running, self.was_put_back = self.best, True

    def state_dict(self) -> dict[str, Any]:
        """Return the best weights and the numbers."""
        return {"weights": self.weights.clone(), **{name: getattr(self, name) for name in self._numbers}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.weights.copy_(state["weights"])
        for name in self._numbers:
            setattr(self, name, state[name])
