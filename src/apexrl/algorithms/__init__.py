"""Algorithms: each turns a batch into a parameter update."""

from apexrl.algorithms.base import BaseAlgorithm
from apexrl.algorithms.ppo import PPO, PPOConfig
from apexrl.algorithms.ppo_roa import PPOROA, PPOROAConfig
from apexrl.algorithms.sac import SAC, SACConfig

AlgorithmConfig = PPOConfig | PPOROAConfig | SACConfig
ALGORITHMS: dict[str, tuple[type[BaseAlgorithm], type]] = {
    "ppo": (PPO, PPOConfig),
    "ppo_roa": (PPOROA, PPOROAConfig),
    "sac": (SAC, SACConfig),
}
"""Name in a configuration -> algorithm class and configuration class."""

__all__ = [
    "ALGORITHMS",
    "PPO",
    "PPOROA",
    "SAC",
    "AlgorithmConfig",
    "BaseAlgorithm",
    "PPOConfig",
    "PPOROAConfig",
    "SACConfig",
]
