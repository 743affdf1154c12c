"""Pure mathematics on tensors: no state, no modules, no environment."""

from apexrl.core.functional.objectives import (
    approx_kl,
    clipped_surrogate,
    discounted_sum,
    explained_variance,
    gae,
    normalize,
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
