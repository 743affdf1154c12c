"""The contract of an addition to a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.policies import Policy


class Term(nn.Module, ABC):
    """Something that is added to a loss, without the algorithm knowing what.

    The loss of a minibatch becomes L + Σ ``weight`` · ``loss(minibatch, evaluation)``. What a term registers (networks,
    buffers) is its own: the algorithm's optimizer trains it, and checkpoints hold it. All methods but ``loss`` may be
    left as they are.

    Args:
        policy: what learns; a term may use its networks, which stay the policy's own.
    """

    name: str
    """What its value is logged as, under ``train/``."""
    weight: Tensor | float
    """Its factor: a number, or a 0-d buffer if it changes while training, so that compiled code and graphs see that."""
    policy: Policy

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.__dict__["policy"] = policy  # as an attribute it would be registered

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
