"""Algorithms: each turns a batch into a parameter update."""

from apexrl.algorithms.base import AlgorithmConfig, BaseAlgorithm
from apexrl.algorithms.bc import BC, BCConfig
from apexrl.algorithms.ppo import PPO, PPOConfig
from apexrl.algorithms.ppo_roa import PPOROA, PPOROAConfig
from apexrl.algorithms.rloo import RLOO, RLOOConfig
from apexrl.algorithms.sac import SAC, SACConfig

ALGORITHMS: dict[str, tuple[type[BaseAlgorithm], type]] = {
    "ppo": (PPO, PPOConfig),
    "ppo_roa": (PPOROA, PPOROAConfig),
    "sac": (SAC, SACConfig),
    "rloo": (RLOO, RLOOConfig),
    "bc": (BC, BCConfig),
}
"""Name in a configuration -> algorithm class and configuration class."""

__all__ = [
    "ALGORITHMS",
    "BC",
    "PPO",
    "PPOROA",
    "RLOO",
    "SAC",
    "AlgorithmConfig",
    "BCConfig",
    "BaseAlgorithm",
    "PPOConfig",
    "PPOROAConfig",
    "RLOOConfig",
    "SACConfig",
]
