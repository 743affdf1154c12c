"""Networks, distributions and normalisers: what policies are built from."""

from apexrl.models.actor import MLPActor
from apexrl.models.critic import MLPCritic
from apexrl.models.distributions import DiagGaussian, Distribution, MultiCategorical, SquashedGaussian
from apexrl.models.encoder import ObservationEncoder, leaves
from apexrl.models.normalizer import ObservationNormalizer, RewardScaler, RunningNormalizer
from apexrl.models.q_function import QEnsemble

__all__ = [
    "DiagGaussian",
    "Distribution",
    "MLPActor",
    "MLPCritic",
    "MultiCategorical",
    "ObservationEncoder",
    "ObservationNormalizer",
    "QEnsemble",
    "RewardScaler",
    "RunningNormalizer",
    "SquashedGaussian",
    "leaves",
]
