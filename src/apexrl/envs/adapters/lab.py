"""Isaac Lab and mjlab by the names of their tasks.

Both build an environment from managers and step it as ``(obs, reward, terminated, truncated, extras)``. This becomes
the dialect of rsl_rl, which ``RslVecEnv`` wraps.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.envs.adapters.rsl import RslVecEnv
from apexrl.envs.adapters.simulators import load_simulator
from apexrl.envs.options import check_known

_INSTALL_MJLAB = "mjlab has an environment of its own: pip install mjlab==1.6.0."
_INSTALL_ISAACLAB = "Isaac Lab has an environment of its own, with Isaac Sim: follow Isaac Lab's installation guide."


class LabSimulator:
    """An environment of Isaac Lab or mjlab, made by ``gymnasium.make`` or ``ManagerBasedRlEnv``, in rsl_rl's dialect.

    Where an episode ends, these simulators return the first observation of the next one; the last one is lost. mjlab
    can leave the reset to its user: an environment with ``cfg.auto_reset`` False is reset here, and gives
    ``final_observation``.
    """

    def __init__(self, env: Any) -> None:
        self.wrapped = env
        inner = env.unwrapped
        self.num_envs, self.device = int(inner.num_envs), torch.device(inner.device)
        self.max_episode_length = inner.max_episode_length
        self.single_action_space = inner.single_action_space
        self.num_actions = math.prod(self.single_action_space.shape)
        self.gives_final_obs = not getattr(inner.cfg, "auto_reset", True)
        self._endless = not getattr(inner.cfg, "is_finite_horizon", False)
        self.reset()

    def get_observations(self) -> TensorDict:
        """Return what the last reset or step returned."""
        return self._obs

    def reset(self, seed: int | None = None) -> tuple[TensorDict, Mapping[str, Any]]:
        """Start a new episode everywhere."""
        with _quiet():  # it prints the seed
            obs, extras = self.wrapped.reset(seed=seed)
        self._obs = self._groups(obs)
        return self._obs, extras

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Apply one action to each environment; those that end are reset."""
        raw, reward, terminated, truncated, extras = self.wrapped.step(actions)
        obs, done = self._groups(raw), terminated | truncated
        outcome: dict[str, Any] = {}
        if self._endless:
            outcome["time_outs"] = truncated & ~terminated
        if self.gives_final_obs and done.any():
            outcome["final_observation"] = obs = obs.clone()
            fresh, extras = self._reset_ended(done)
            # The rows of running episodes may have got new noise.
            obs = self._groups(fresh).where(done, obs)
        self._obs = obs
        return obs, reward, done, {"log": extras.get("log", {}), **outcome}

    def render(self) -> Any:
        """Draw the first environment, where the simulator can; otherwise None."""
        return None if self.wrapped.render_mode is None else self.wrapped.render()

    def close(self) -> None:
        """Close the environment."""
        self.wrapped.close()

    def _reset_ended(self, done: Tensor) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Reset some environments; for the others nothing has happened."""
        inner = self.wrapped.unwrapped
        terms = [inner.command_manager.get_term(name) for name in inner.command_manager.active_terms]
        # mjlab adds the error of following a command once more for every environment, also where none was reset.
        before = [{name: value.clone() for name, value in term.metrics.items()} for term in terms]
        fresh, extras = inner.reset(env_ids=done.nonzero().flatten())
        for term, metrics in zip(terms, before, strict=True):
            for name, value in metrics.items():
                term.metrics[name][~done] = value[~done]
        return fresh, extras

    def _groups(self, obs: Mapping[str, Any]) -> TensorDict:
        return TensorDict(dict(obs), batch_size=[self.num_envs], device=self.device)


def make_mjlab(
    id: str, num_envs: int = 1, *, device: torch.device | str = "cpu", play: bool = False, **fields: Any
) -> RslVecEnv:
    """Make a task of mjlab by its name, such as ``"Mjlab-Velocity-Flat-Unitree-Go1"``; it simulates on ``device``.

    Args:
        play: take the task's configuration for showing a policy in place of that for training.
        **fields: of the task's configuration, such as ``episode_length_s``, ``seed`` and ``render_mode``. With
            ``auto_reset=True`` the last observations are hidden, and a step in which an episode ends is cheaper.

    Raises:
        EnvError: when mjlab is not installed, has no such task, or its configuration no such field.
    """
    load_simulator("mjlab.tasks", _INSTALL_MJLAB)
    registry = load_simulator("mjlab.tasks.registry", _INSTALL_MJLAB)
    check_known("mjlab has no task", [id], registry.list_tasks())
    env_class = load_simulator("mjlab.envs", _INSTALL_MJLAB).ManagerBasedRlEnv
    render_mode = fields.pop("render_mode", None)

    def make(size: int) -> LabSimulator:
        cfg = registry.load_env_cfg(id, play=play)
        _set_fields(cfg, {"auto_reset": False} | fields, id)
        cfg.scene.num_envs = size
        with _quiet():
            return LabSimulator(env_class(cfg=cfg, device=str(device), render_mode=render_mode))

    return RslVecEnv(make(num_envs), make=make)


def make_isaaclab(id: str, num_envs: int = 1, *, device: torch.device | str = "cuda:0", **fields: Any) -> RslVecEnv:
    """Make a task of Isaac Lab by its name, such as ``"Isaac-Velocity-Flat-Anymal-C-v0"``; one process holds one.

    It simulates on ``device``; ``fields`` are of the task's configuration, such as ``episode_length_s`` and ``seed``.

    Raises:
        EnvError: when Isaac Lab is not installed, has no such task, or its configuration no such field.
    """
    _start_isaac_sim(str(device))
    load_simulator("isaaclab_tasks", _INSTALL_ISAACLAB)  # registers its tasks with Gymnasium
    check_known("Isaac Lab has no task", [id], [name for name in gym.registry if name.startswith("Isaac")])
    parse = load_simulator("isaaclab_tasks.utils", _INSTALL_ISAACLAB).parse_env_cfg
    cfg = parse(id, device=str(device), num_envs=num_envs)
    _set_fields(cfg, fields, id)
    env = RslVecEnv(LabSimulator(gym.make(id, cfg=cfg)), make=_only_one)
    env.can_spawn = False
    return env


@functools.cache
def _start_isaac_sim(device: str) -> Any:
    """Start Isaac Sim; its modules can be imported only afterwards."""
    return load_simulator("isaaclab.app", _INSTALL_ISAACLAB).AppLauncher(headless=True, device=device).app


def _only_one(_: int) -> LabSimulator:
    raise EnvError("Isaac Sim holds one simulation a process, so there is no second one to evaluate or render with.")


def _set_fields(cfg: Any, fields: Mapping[str, Any], id: str) -> None:
    check_known(f"The configuration of {id} has no field", fields, dir(cfg))
    for name, value in fields.items():
        setattr(cfg, name, value)


def _quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """Keep the tables that the simulators print off the screen."""
    return contextlib.redirect_stdout(io.StringIO())
