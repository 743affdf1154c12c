"""The contract of an addition to a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn


class Term(nn.Module, ABC):
    """Something that is added to a loss, without the algorithm knowing what.

    The loss of a minibatch becomes L + Σ ``weight`` · ``loss(minibatch, evaluation)``. A term that needs networks of
    the policy holds them as modules; they learn if the optimizer has them. All methods but ``loss`` may be left as they
    are.
    """

    name: str
    """What its value is logged as, under ``train/``."""
    weight: Tensor | float
    """Its factor: a number, or a 0-d buffer if it changes while training, so that compiled code and graphs see that."""

    def reward(self, batch: TensorDict) -> Tensor | float:
        """Return what is added to the rewards of a batch ``[T, N]``, before its advantages are computed."""
        return 0.0

    def augment(self, minibatch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a minibatch with what else the loss should see: further samples, or entries of its own."""
        return minibatch

    @abstractmethod
    def loss(self, minibatch: Mapping[str, Any], evaluation: Any) -> Tensor:
        """Return the value of the term, 0-d, given what the policy says of the minibatch."""

    def follow(self, progress: float) -> None:
        """Follow a schedule over the whole training; ``progress`` runs from 0 to 1."""
        return

    def own_state(self) -> dict[str, Tensor]:
        """Return what a resumed run needs: the buffers of the term itself."""
        return {name: buffer.clone() for name, buffer in self.named_buffers(recurse=False)}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``own_state``."""
        for name, buffer in self.named_buffers(recurse=False):
            buffer.copy_(state[name])
