"""Gymnasium environments as a ``VecEnv``, in this process or in worker processes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import load_env_creator
from numpy.typing import NDArray
from torch import Tensor

from apexrl.core import plugins
from apexrl.core.errors import ConfigError, EnvError, EnvStateError, did_you_mean
from apexrl.core.metrics import MetricSpec
from apexrl.core.system.seeding import spawn_seeds
from apexrl.core.types import EnvStep, Observation
from apexrl.envs.base import VecEnv
from apexrl.envs.display import MUJOCO_HINT, render_without_display
from apexrl.envs.step_buffers import StepBuffers
from apexrl.envs.workers.arrays import map_tree
from apexrl.envs.workers.gym_group import MAX_METRICS, EnvGroup, Found, MakeFn, StateError, users_frames
from apexrl.envs.workers.gym_processes import Workers

T = TypeVar("T")


class GymVecEnv(VecEnv):
    """Gymnasium environments stepped together.

    Observations become float32 tensors (images stay uint8), Discrete ones one-hot vectors, Tuple ones
    groups named ``"0"``, ``"1"``, …. Actions are clipped to their bounds. Numbers in ``info`` named
    ``success``, ``fail``, or with ``reward`` at either end of their name are reported as metrics, from the step on at
    which the first environment has them.

    Args:
        make_fns: functions that each make one environment; all need the same spaces.
        num_workers: processes that share the environments; 0 steps them in this process, which is faster
            unless one step takes about a millisecond or more.
        metrics: further numbers to take from ``info``, or other ways to fold those found.
        device: where the tensors are wanted; the simulators run on the CPU.
        step_timeout: seconds after which a worker that has not answered a step is given up.

    Raises:
        EnvError: when an environment cannot be made or has a space that is not supported.
    """

    own_seeds = True
    metric_specs: Mapping[str, MetricSpec] = {}
    """Those asked for, and those found in ``info`` so far."""

    def __init__(
        self,
        make_fns: Sequence[MakeFn],
        *,
        num_workers: int = 0,
        metrics: Sequence[MetricSpec] | None = None,
        device: torch.device | str = "cpu",
        step_timeout: float = 60.0,
    ) -> None:
        if not make_fns:
            raise EnvError("GymVecEnv needs at least one function that makes an environment.")
        render_without_display()  # before the functions import MuJoCo
        self.num_envs = len(make_fns)
        self.device = torch.device(device)
        self._make_fns = list(make_fns)
        self._options: dict[str, Any] = {"num_workers": num_workers, "step_timeout": step_timeout}
        self._group: EnvGroup | Workers
        if num_workers > 0:
            self._group = Workers(self._make_fns, min(num_workers, self.num_envs), step_timeout)
        else:
            self._group = _naming_errors("make", EnvGroup, self._make_fns)
        self.observation_space, self.action_space = self._group.observation_space, self._group.action_space
        self.max_episode_steps = self._group.max_episode_steps
        self.metric_specs = {spec.name: spec for spec in metrics or ()}
        if len(self.metric_specs) > MAX_METRICS:
            raise EnvError(f"GymVecEnv takes at most {MAX_METRICS} metrics, got {len(self.metric_specs)}.")
        self._buffers = StepBuffers(self._group.allocate(list(self.metric_specs)), self.metric_specs, self.device)

    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere; each environment from a stream of its own."""
        return self._begin(None if seed is None else spawn_seeds(seed, self.num_envs))

    def reset_each(self, seeds: Sequence[int]) -> Observation:
        """Start a new episode everywhere; environment ``i`` gets ``seeds[i]``."""
        return self._begin(seeds)

    def _begin(self, seeds: Sequence[int] | None) -> Observation:
        _naming_errors("reset", self._group.reset, seeds)
        return self._buffers.observation()

    def step(self, action: Tensor) -> EnvStep:
        """Apply one action ``[N, A]`` to each environment."""
        self._buffers.take(action)
        any_ended, found = _naming_errors("step", self._group.step)
        if found:
            self._add_metrics(found)
        return self._buffers.step(any_ended)

    def _add_metrics(self, found: Found) -> None:
        """Give metrics that just appeared a row each, with what this step reported."""
        # A new dictionary: another thread may be reading the old one.
        specs = dict(self.metric_specs)
        for name, values in found.items():
            if len(specs) == MAX_METRICS:
                advice = "Give the same number the same key of info at every step."
                warnings.warn(f"More than {MAX_METRICS} metrics: later ones are left out. {advice}", stacklevel=3)
                break
            row = self._buffers.arrays.metric[len(specs)]
            row.fill(np.nan)
            row[list(values), 0] = list(values.values())
            self._buffers.metric[name] = torch.from_numpy(row)
            specs[name] = MetricSpec(name)
        self.metric_specs = specs
        self._group.watch(list(specs))

    def spawn(self, num_envs: int) -> GymVecEnv:
        """Make an independent environment of the same kind, with the make functions in turn."""
        make_fns = [self._make_fns[i % self.num_envs] for i in range(num_envs)]
        return GymVecEnv(make_fns, device=self.device, metrics=list(self.metric_specs.values()), **self._options)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of every environment; None before the first reset or when it cannot be saved."""
        try:
            states = self._group.state()
        except StateError:
            return None
        return {"envs": [_map_leaves(np.ndarray, torch.from_numpy, state) for state in states]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put every environment back into its saved state.

        Gymnasium's MuJoCo tasks are set directly. Any other environment begins its episode again with the
        same random numbers and repeats its actions; the observation must then be the saved one.

        Raises:
            EnvStateError: when an environment does not come back exactly.
        """
        if len(state["envs"]) != self.num_envs:
            raise EnvStateError(f"The state is of {len(state['envs'])} environments, there are {self.num_envs} here.")
        try:
            self._group.load([_map_leaves(Tensor, lambda tensor: tensor.cpu().numpy(), s) for s in state["envs"]])
        except Exception as error:
            raise EnvStateError(str(error)) from error

    def step_time(self) -> tuple[float | None, float | None]:
        """Return what another environment of the kind says: its ``dt``, and ``render_fps`` of its metadata."""
        with contextlib.closing(self._make_fns[0]()) as one:
            seconds, fps = getattr(one.unwrapped, "dt", None), one.metadata.get("render_fps")
        return seconds if isinstance(seconds, int | float) and seconds > 0 else None, fps

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Render environment ``index`` as an ``[H, W, 3]`` image."""
        try:
            return _naming_errors("render", self._group.render, index)
        except EnvError as error:
            if "mujoco" not in sys.modules:
                raise
            raise EnvError(f"{error}\n{MUJOCO_HINT}") from error

    def close(self) -> None:
        """Close the environments and end the workers."""
        self._group.close()


def _map_leaves(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of one type."""
    return map_tree(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)


def _naming_errors(verb: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function and name what an environment in this process raises; workers do that themselves."""
    try:
        return function(*arguments)
    except EnvError:
        raise
    except Exception as error:
        note = " ".join(getattr(error, "__notes__", ()))
        places = ", ".join(f"at {place}" for place in users_frames(error))
        what = f"Could not {verb} the environment: {type(error).__name__}: {error} {note}".rstrip()
        raise EnvError(f"{what} {places}".rstrip()) from error


def find_gym_id(env_id: str) -> str | None:
    """Return the id by which ``gymnasium.make`` finds it in any process; None when it is unknown."""
    if env_id in gym.registry:
        # Imported here already; a worker process has yet to do it.
        robotics = str(gym.registry[env_id].entry_point).startswith("gymnasium_robotics.")
        return f"gymnasium_robotics:{env_id}" if robotics else env_id
    module, _, name = env_id.rpartition(":")
    if module not in ("", *plugins.KNOWN_MODULES):
        try:
            plugins.import_module(module)
        except ConfigError as error:
            raise EnvError(str(error)) from error
    else:
        module = "gymnasium_robotics"
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # one of its dependencies advertises itself there
                importlib.import_module(module)
        except ImportError:
            return None
    return f"{module}:{name}" if name in gym.registry else None


def gym_make_fns(env_id: str, num_envs: int, **kwargs: Any) -> list[MakeFn]:
    """Return functions that make a registered environment, which renders images where it can.

    Args:
        env_id: an id of Gymnasium's registry, or ``module:id``.
        num_envs: how many functions.
        **kwargs: passed to ``gymnasium.make``.

    Raises:
        EnvError: for an unknown id, with the nearest known one, or when a package or the module is missing.
    """
    if (found := find_gym_id(env_id)) is None:
        raise EnvError(f"Gymnasium has no environment {env_id!r}.{did_you_mean(env_id, gym.registry)}")
    render_without_display()  # before the entry point imports MuJoCo
    return _make_fns(gym.registry[found.rpartition(":")[2]].entry_point, found, env_id, num_envs, kwargs)


def own_make_fns(maker: Callable[..., Any], env_id: str, num_envs: int, **kwargs: Any) -> list[MakeFn]:
    """Return the same for a class, or a function that makes one environment; ``max_episode_steps`` is Gymnasium's."""
    render_without_display()
    return _make_fns(maker, gym.envs.registration.EnvSpec(env_id, maker), env_id, num_envs, kwargs)


def _make_fns(
    entry_point: Any, found: str | gym.envs.registration.EnvSpec, env_id: str, num_envs: int, kwargs: Mapping[str, Any]
) -> list[MakeFn]:
    try:
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        extras = {"robotics": "robotics", "mujoco": "mujoco", "pygame": "classic"}
        extra = next((extras[word] for word in extras if word in str(error).lower()), None)
        hint = f" Install it with: pip install 'apexrl[{extra}]'" if extra else ""
        raise EnvError(f"{env_id} needs a package that is not installed: {error}{hint}") from error
    # Nothing is rendered until render is called.
    takes_mode = inspect.isfunction(creator) and "render_mode" in inspect.signature(creator).parameters
    if takes_mode or "rgb_array" in getattr(creator, "metadata", {}).get("render_modes", ()):
        kwargs = {"render_mode": "rgb_array", **kwargs}
    # Of gymnasium itself, so that a worker needs no import of this package to call it.
    return [functools.partial(gym.make, found, **{"disable_env_checker": True, **kwargs})] * num_envs
