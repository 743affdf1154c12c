"""Algorithms: each turns a batch into a parameter update."""

from apexrl.algorithms.base import BaseAlgorithm
from apexrl.algorithms.ppo import PPO, PPOConfig

ALGORITHMS: dict[str, tuple[type[BaseAlgorithm], type]] = {"ppo": (PPO, PPOConfig)}
"""Name in a configuration -> algorithm class and configuration class."""

__all__ = ["ALGORITHMS", "PPO", "BaseAlgorithm", "PPOConfig"]
