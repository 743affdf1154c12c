"""Networks, distributions and normalisers: what policies are built from."""

from apexrl.models.actor import MLPActor
from apexrl.models.critic import MLPCritic
from apexrl.models.distributions import DiagGaussian, Distribution, MultiCategorical, SquashedGaussian
from apexrl.models.encoder import ObservationEncoder, leaves
from apexrl.models.normalizer import ObservationNormalizer, RewardScaler, RunningNormalizer

__all__ = [
    "DiagGaussian",
    "Distribution",
    "MLPActor",
    "MLPCritic",
    "MultiCategorical",
    "ObservationEncoder",
    "ObservationNormalizer",
    "RewardScaler",
    "RunningNormalizer",
    "SquashedGaussian",
    "leaves",
]
