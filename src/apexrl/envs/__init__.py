"""Environments: the contract, the adapters, and the tasks that ship with the package.

Names are imported when first used: worker processes import parts of this package, and start without PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apexrl.envs.adapters.envpool import EnvPoolVecEnv as EnvPoolVecEnv
    from apexrl.envs.adapters.gymnasium import GymVecEnv as GymVecEnv
    from apexrl.envs.adapters.gymnasium import gym_make_fns as gym_make_fns
    from apexrl.envs.adapters.lab import LabSimulator as LabSimulator
    from apexrl.envs.adapters.maniskill import ManiSkillVecEnv as ManiSkillVecEnv
    from apexrl.envs.adapters.rsl import RslVecEnv as RslVecEnv
    from apexrl.envs.base import VecEnv as VecEnv
    from apexrl.envs.check import check_env as check_env
    from apexrl.envs.mujoco.env import MujocoVecEnv as MujocoVecEnv
    from apexrl.envs.registry import as_vec_env as as_vec_env
    from apexrl.envs.registry import get_metric_specs_from_env as get_metric_specs_from_env
    from apexrl.envs.registry import make_env as make_env

_HOME = {
    "EnvPoolVecEnv": "adapters.envpool",
    "GymVecEnv": "adapters.gymnasium",
    "gym_make_fns": "adapters.gymnasium",
    "LabSimulator": "adapters.lab",
    "ManiSkillVecEnv": "adapters.maniskill",
    "RslVecEnv": "adapters.rsl",
    "VecEnv": "base",
    "check_env": "check",
    "MujocoVecEnv": "mujoco.env",
    "as_vec_env": "registry",
    "get_metric_specs_from_env": "registry",
    "make_env": "registry",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'apexrl.envs' has no attribute '{name}'")
    return getattr(importlib.import_module(f"apexrl.envs.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
