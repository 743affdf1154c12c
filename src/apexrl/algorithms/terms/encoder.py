"""The regulariser of regularised online adaptation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apexrl.algorithms.terms.base import Term
from apexrl.core.types import OBSERVATION
from apexrl.policies import ROAPolicy


class EncoderDistance(Term):
    """Draws the encoder towards what the adaptation module can infer: λ mean((z − sg(ẑ))²); λ rises linearly from 0.

    Args:
        policy: has both.
        final_weight: λ at the end.
        share: of the training, after which λ is there.
    """

    name = "encoder_distance"
    weight: Tensor
    policy: ROAPolicy

    def __init__(self, policy: ROAPolicy, final_weight: float, share: float) -> None:
        super().__init__(policy)
        self.final_weight, self.share = final_weight, share
        self.weight = nn.Buffer(torch.zeros((), device=policy.device))

    def loss(self, minibatch: Mapping[str, Any], evaluation: Any) -> Tensor:
        """Return the mean squared distance of the two features."""
        obs = self.policy.normalized(minibatch[OBSERVATION])
        feature = self.policy.encoder_priv(obs)
        with torch.no_grad():
            inferred = self.policy.adapt_module(obs)
        distance: Tensor = (feature - inferred).square().mean()
        return distance

    def follow(self, progress: float) -> None:
        """Raise λ."""
        self.weight.fill_(self.final_weight * min(1.0, progress / self.share))
