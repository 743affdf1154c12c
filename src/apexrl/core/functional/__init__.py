"""Pure mathematics on tensors: no state, no modules, no environment."""

from apexrl.core.functional.advantages import discounted_sum, gae, normalize
from apexrl.core.functional.losses import (
    approx_kl,
    clipped_surrogate,
    explained_variance,
    probability_ratio,
    soft_target,
    value_loss,
)

__all__ = [
    "approx_kl",
    "clipped_surrogate",
    "discounted_sum",
    "explained_variance",
    "gae",
    "normalize",
    "probability_ratio",
    "soft_target",
    "value_loss",
]
