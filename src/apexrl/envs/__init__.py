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
    "adapters.envpool": "EnvPoolVecEnv",
    "adapters.gymnasium": "GymVecEnv gym_make_fns",
    "adapters.lab": "LabSimulator",
    "adapters.maniskill": "ManiSkillVecEnv",
    "adapters.rsl": "RslVecEnv",
    "base": "VecEnv",
    "check": "check_env",
    "mujoco.env": "MujocoVecEnv",
    "registry": "as_vec_env get_metric_specs_from_env make_env",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'apexrl.envs' has no attribute '{name}'")
    return getattr(importlib.import_module(f"apexrl.envs.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
