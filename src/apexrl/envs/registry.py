"""Environments by name: tasks of the package, of Gymnasium's registry, and of other simulators."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from apexrl.core.errors import EnvError, did_you_mean
from apexrl.core.metrics import MetricSpec
from apexrl.core.plugins import accepted, imports_allowed, module_hint
from apexrl.envs.adapters.envpool import make_envpool
from apexrl.envs.adapters.gymnasium import GymVecEnv, find_gym_id, gym_make_fns, own_make_fns
from apexrl.envs.adapters.lab import make_isaaclab, make_mjlab
from apexrl.envs.adapters.maniskill import make_maniskill
from apexrl.envs.adapters.rsl import is_rsl_env, wrapper_of
from apexrl.envs.base import VecEnv
from apexrl.envs.mujoco.env import MUJOCO_TASKS as MUJOCO_TASKS
from apexrl.envs.mujoco.env import MujocoVecEnv
from apexrl.envs.mujoco.tasks import GYMNASIUM_TASKS

SIMULATORS: dict[str, Callable[..., VecEnv]] = {
    "maniskill": make_maniskill,
    "mjlab": make_mjlab,
    "isaaclab": make_isaaclab,
    "envpool": make_envpool,
}
"""What makes a task of a simulator that is a package of its own, by the prefix of the task's name."""


def as_vec_env(env: Any) -> VecEnv:
    """Return ``env`` as a ``VecEnv``: as it is, or wrapped when it speaks the dialect of rsl_rl; refuse others."""
    if isinstance(env, VecEnv):
        return env
    if is_rsl_env(env):
        return wrapper_of(env)
    if isinstance(env, gym.Env | gym.vector.VectorEnv):
        advice = "Pass the functions that make it, GymVecEnv([make, make, ...]), or its name, make_env(id, num_envs)."
        raise EnvError(f"{type(env).__name__} is one of Gymnasium's own environments. {advice}")
    needed = "a VecEnv, or to have num_envs, num_actions, get_observations() and step(actions) as those of rsl_rl have"
    raise EnvError(f"{type(env).__name__} is not an environment: it needs to be {needed}.")


def get_metric_specs_from_env(env: Any) -> dict[str, MetricSpec]:
    """Return the metrics that an environment declares, by name; of a raw simulator those that it has reported."""
    return dict(as_vec_env(env).metric_specs)


def make_env(
    id: str,
    num_envs: int = 1,
    *,
    device: torch.device | str = "cpu",
    num_workers: int = 0,
    metrics: Sequence[MetricSpec] = (),
    **kwargs: Any,
) -> VecEnv:
    """Make a task of the package, of Gymnasium's registry or of another simulator by its name.

    Args:
        id: for example ``"lift"``, ``"HalfCheetah-v5"`` or ``"FetchReach-v4"``; ``"maniskill/PickCube-v1"`` is a task
            of another simulator, ``"my_envs:Reach"`` a Gymnasium id, class or function of a module, as
            ``register_task`` takes it. Gymnasium's MuJoCo tasks run on ``MujocoVecEnv``, which gives the same numbers
            faster, unless they are asked for more than it knows: ``num_workers``, ``metrics``, other ``kwargs``.
        num_envs: N, environments stepped together.
        device: where the tensors are wanted.
        num_workers: processes that share Gymnasium environments; 0 steps them in this process.
        metrics: numbers to take from the ``info`` of Gymnasium environments; others declare their metrics themselves.
        **kwargs: passed to the task, or to ``gymnasium.make``.

    Raises:
        EnvError: for an unknown name, with the nearest known one, or when a package or the module is missing.
    """
    from apexrl.envs.tasks import TASKS  # only those who ask for a task load them all

    makers: dict[str, Callable[..., Any]] = {
        f"mujoco/{name}": functools.partial(MujocoVecEnv, name) for name in MUJOCO_TASKS
    }
    simulator, _, name = id.partition("/")
    if simulator in SIMULATORS:
        makers[id] = functools.partial(SIMULATORS[simulator], name)
    maker = makers.get(id) or TASKS.get(id)
    is_known = maker is None and find_gym_id(id) is not None
    if maker is None and not is_known:
        with imports_allowed():  # the caller has named the module
            maker = TASKS.find(id)
    if maker is not None and _makes_several(maker):
        if num_workers:
            raise EnvError(f"{id} runs all its environments at once and takes no workers; set num_workers to 0.")
        if metrics:
            names = [spec.name for spec in metrics]
            raise EnvError(f"{id} declares its metrics itself and takes no others; leave metrics {names} out.")
        env = as_vec_env(maker(num_envs, **accepted(maker, {"device": device}), **kwargs))
    elif maker is not None:
        make_fns = own_make_fns(maker, id, num_envs, **kwargs)
        env = GymVecEnv(make_fns, num_workers=num_workers, metrics=metrics, device=device)
    elif not is_known:
        there = [f"{space}/{name}" for space in SIMULATORS if name]  # if such a simulator has it
        others = ", ".join(f"{space}/NAME" for space in ("mujoco", *SIMULATORS))
        if hint := module_hint(id):
            raise EnvError(f"There is no environment {id!r}.{hint}")
        raise EnvError(
            f"There is no environment {id!r}.{did_you_mean(id, [*makers, *TASKS.names(), *gym.registry, *there])} "
            f"Tasks: {', '.join(sorted(TASKS.names()))}. Tasks of simulators: {others}."
        )
    elif not num_workers and not metrics and _is_known_to_mujoco(id, kwargs):
        seed = int(np.random.SeedSequence().generate_state(1)[0])  # drawn as Gymnasium does
        env = MujocoVecEnv(id, num_envs, device=device, seed=seed, **kwargs)
    else:
        make_fns = gym_make_fns(id, num_envs, **kwargs)
        env = GymVecEnv(make_fns, num_workers=num_workers, metrics=metrics, device=device)
    declared = {spec.name: {"reduce": spec.reduce, "group": spec.group, "event": spec.event} for spec in metrics}
    env.made_from = {"id": id, "kwargs": kwargs, "metrics": declared}
    return env


def _makes_several(maker: Callable[..., Any]) -> bool:
    """Whether a class or a function makes a ``VecEnv``, not one environment of Gymnasium."""
    if inspect.isclass(maker) and issubclass(maker, VecEnv):
        return True
    is_one = inspect.isclass(maker) and issubclass(maker, gym.Env)
    return not is_one and "num_envs" in inspect.signature(maker).parameters


def _is_known_to_mujoco(id: str, options: Mapping[str, Any]) -> bool:
    """Whether an id is one of Gymnasium's MuJoCo tasks as Gymnasium registers it, with options that are its own."""
    if id not in GYMNASIUM_TASKS:
        return False
    spec, task = gym.spec(id), GYMNASIUM_TASKS[id]
    is_changed = bool(spec.kwargs or spec.additional_wrappers) or spec.max_episode_steps != task.episode_steps
    known = {"max_episode_steps", *(field.name for field in dataclasses.fields(task))}
    is_own = str(spec.entry_point).startswith("gymnasium.envs.mujoco.") and not is_changed
    return is_own and options.keys() <= known and options.get("max_episode_steps") != -1  # which means no limit there
