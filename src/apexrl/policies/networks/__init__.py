"""Networks, distributions and normalisers: what policies are built from."""

from apexrl.policies.networks.distributions import DiagGaussian, Distribution, MultiCategorical, SquashedGaussian
from apexrl.policies.networks.mlp import ActionHead, MLPActor, MLPCritic, ObservationEncoder
from apexrl.policies.networks.normalizer import ObservationNormalizer, RewardScaler, RunningNormalizer
from apexrl.policies.networks.q_function import QEnsemble

__all__ = [
    "ActionHead",
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
]
