"""Algorithms: each turns a batch into a parameter update."""

from typing import Any

from apexrl.algorithms.base import AlgorithmConfig, BaseAlgorithm
from apexrl.algorithms.bc import BC, BCConfig
from apexrl.algorithms.ppo import PPO, PPOConfig
from apexrl.algorithms.ppo_roa import PPOROA, PPOROAConfig
from apexrl.algorithms.rloo import RLOO, RLOOConfig
from apexrl.algorithms.sac import SAC, SACConfig
from apexrl.core.plugins import Registry


def _problem(value: Any) -> str:
    if not (isinstance(value, type) and issubclass(value, BaseAlgorithm)):
        return "must be a subclass of BaseAlgorithm"
    config = value.config_class
    is_config = issubclass(config, AlgorithmConfig) and ("__init__" in vars(config) or not config.__annotations__)
    return "" if is_config else "needs a dataclass, a subclass of AlgorithmConfig, as config_class"


ALGORITHMS: Registry[type[BaseAlgorithm]] = Registry(
    "algo.name", "apexrl.algorithms", _problem, {"ppo": PPO, "ppo_roa": PPOROA, "sac": SAC, "rloo": RLOO, "bc": BC}
)
"""``algo.name`` -> class."""


def register_algorithm(name: str, cls: type[BaseAlgorithm]) -> None:
    """Let configurations use an algorithm as ``algo.name``."""
    ALGORITHMS.register(name, cls)


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
    "register_algorithm",
]
