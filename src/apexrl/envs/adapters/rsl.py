"""Simulators that speak the dialect of rsl_rl, Isaac Lab and mjlab as a ``VecEnv``.

Such a simulator has ``num_envs``, ``num_actions``, ``get_observations()`` and
``step(actions) -> (obs, reward, done, extras)``. The keys of ``extras`` that are read:

- ``time_outs`` ``[N]``: which ended episodes met the time limit; they are truncated, the others terminated.
- ``reward_components``: a dictionary of ``[N]``, summed over each episode. One whose name has a meaning of its own
  (``success``, ``fail``, ``reward``, ``return``, …) is called ``<name>_reward``.
- ``success``, ``fail`` ``[N]``: task metrics.
- ``log``: a dictionary of numbers for the logs; of a tensor its mean.
- ``final_observation`` or ``final_obs``: the last observation of ended episodes, ``[N]``, with the groups of the
  observation. A plain tensor beside grouped observations is that of the group ``policy``.
- ``observations``: further groups, of older versions that return one tensor.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from apexrl.core.errors import EnvError, EnvStateError
from apexrl.core.metrics import RESERVED_NAMES, MetricSpec, begun_before
from apexrl.core.observations import leaves
from apexrl.core.types import OBS_KEY, OBSERVATION, EnvStep, Observation
from apexrl.envs.adapters.simulators import space_of
from apexrl.envs.base import RunningEpisodes, VecEnv

_NEEDED = ("num_envs", "num_actions", "get_observations", "step")
_WRAPPERS: WeakValueDictionary[int, RslVecEnv] = WeakValueDictionary()
"""By the id of the simulator, which lives as long as its wrapper."""


def wrapper_of(simulator: Any) -> RslVecEnv:
    """Return the wrapper that a simulator has, or wrap it; its users share one, which knows the running episodes."""
    return _WRAPPERS.get(id(simulator)) or RslVecEnv(simulator)


def is_rsl_env(simulator: Any) -> bool:
    """Whether an object has what ``RslVecEnv`` needs."""
    return all(hasattr(simulator, name) for name in _NEEDED)


class RslVecEnv(VecEnv):
    """Wraps one simulator that steps N environments and resets those that end by itself.

    Most of these simulators hide the last observation of an episode; ``gives_final_obs`` is then False. One that
    gives it for the group ``policy`` alone hides the other groups: their last visible values stand in.

    One without ``reset`` may be in the middle of its episodes: the first of each environment is not counted.

    A seed reaches the simulator when its ``reset`` takes one or it has a ``seed`` method; else it is ignored.

    Args:
        simulator: the object to wrap.
        make: makes another simulator of its kind with the given number of environments, for evaluation; without it
            the simulator is copied.

    Raises:
        EnvError: when the object lacks something the dialect needs.
    """

    metric_specs: Mapping[str, MetricSpec] = {}
    """Those seen so far; simulators of this dialect do not declare them."""

    def __init__(self, simulator: Any, *, make: Callable[[int], Any] | None = None) -> None:
        missing = [name for name in _NEEDED if not hasattr(simulator, name)]
        if missing:
            raise EnvError(f"RslVecEnv needs {list(_NEEDED)}; {type(simulator).__name__} lacks {missing}.")
        self.simulator = simulator
        self.running = None
        self._make = make
        self.num_envs = int(simulator.num_envs)
        self.device = torch.device(getattr(simulator, "device", "cpu"))
        limit = getattr(simulator, "max_episode_length", None)
        self.max_episode_steps = None if limit is None else int(torch.as_tensor(limit).max())
        self.capturable = bool(getattr(simulator, "capturable", False))
        self.gives_final_obs = bool(getattr(simulator, "gives_final_obs", False))
        self.can_reset = hasattr(simulator, "reset")
        obs = self._current()
        self.observation_space = space_of(obs)
        self.action_space = _action_space(simulator)
        # Written in place, so that a captured step finds it where it left it.
        self._last = None if isinstance(obs, Tensor) else obs.clone()
        _WRAPPERS[id(simulator)] = self

    @property
    def running(self) -> RunningEpisodes | None:
        """The running episodes, set by whoever stepped last through this wrapper."""
        return self._running

    @running.setter
    def running(self, running: RunningEpisodes | None) -> None:
        self._running = running
        lengths = getattr(self.simulator, "episode_length_buf", None)
        self._lengths = None if lengths is None or running is None else torch.as_tensor(lengths).clone()

    def find_moved(self) -> RunningEpisodes | None:
        """Return where the simulator stands, if its ``episode_length_buf`` changed or, without one, what it shows."""
        running, lengths = self._running, getattr(self.simulator, "episode_length_buf", None)
        if running is None or self.capturable:
            return None
        if lengths is not None:
            lengths = torch.as_tensor(lengths)
            if self._lengths is None or torch.equal(lengths, self._lengths):
                return None
            obs, has_begun = self._current(), (lengths > 0).to(self.device)
        else:
            before, obs = self._current().clone(), self._current()
            is_noisy = not _are_equal(before, obs)  # then it tells nothing
            if is_noisy or _are_equal(obs, running.carry[OBSERVATION]):
                return None
            has_begun = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        return RunningEpisodes({OBSERVATION: obs.clone()}, begun_before(has_begun))

    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere, where the simulator can."""
        reset = getattr(self.simulator, "reset", None)
        takes_seed = reset is not None and "seed" in inspect.signature(reset).parameters
        if seed is not None and not takes_seed and callable(getattr(self.simulator, "seed", None)):
            self.simulator.seed(seed)
        returned = None if reset is None else reset(seed=seed) if takes_seed else reset()
        return self._remember(self._current() if returned is None else self._observation(*_pair(returned)))

    def step(self, action: Tensor) -> EnvStep:
        """Apply one action ``[N, A]`` to each environment."""
        raw, reward, done, extras = self.simulator.step(action)
        done = self._column(done, torch.bool)
        time_out = extras.get("time_outs")
        truncated = torch.zeros_like(done) if time_out is None else done & self._column(time_out, torch.bool)
        final = extras.get("final_observation", extras.get("final_obs"))
        if final is not None:
            self.gives_final_obs = True
            final = self._final(final)
        log = extras.get("log", {}).items()
        return EnvStep(
            obs=self._remember(self._observation(raw, extras)),
            reward=self._column(reward, torch.float32),
            terminated=done & ~truncated,
            truncated=truncated,
            final_obs=final,
            metric=self._metrics(extras),
            log={key.lstrip("/"): x.float().mean() if isinstance(x, Tensor) else float(x) for key, x in log},
        )

    def spawn(self, num_envs: int) -> RslVecEnv:
        """Make another simulator, or copy this one with as many environments as it has."""
        if self._make is not None:
            return RslVecEnv(self._make(num_envs), make=self._make)
        try:
            return RslVecEnv(copy.deepcopy(self.simulator))
        except Exception as error:
            raise EnvError(
                f"{type(self.simulator).__name__} cannot be copied for evaluation ({error}); pass eval_env."
            ) from error

    def state_dict(self) -> dict[str, Any] | None:
        """Return the simulator's own state, when it can give and take one."""
        if not (hasattr(self.simulator, "state_dict") and hasattr(self.simulator, "load_state_dict")):
            return None
        state: dict[str, Any] = self.simulator.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the simulator a state of its own."""
        if not hasattr(self.simulator, "load_state_dict"):
            raise EnvStateError(f"{type(self.simulator).__name__} has no load_state_dict.")
        try:
            self.simulator.load_state_dict(state)
        except Exception as error:
            raise EnvStateError(f"{type(self.simulator).__name__} refused its state: {error}") from error
        if self._last is not None:
            self._remember(self._current())

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Render environment ``index``; a simulator that renders only one image renders environment 0."""
        image = self.simulator.render() if hasattr(self.simulator, "render") else None
        if image is None:
            raise EnvError(f"{type(self.simulator).__name__} cannot render.")
        images = np.asarray(image, np.uint8).reshape(-1, *np.shape(image)[-3:])
        if index >= len(images):
            raise EnvError(f"{type(self.simulator).__name__} renders {len(images)} images, not number {index}.")
        return np.asarray(images[index])

    def close(self) -> None:
        """Close the simulator, where it can be closed."""
        if hasattr(self.simulator, "close"):
            self.simulator.close()

    def _current(self) -> Observation:
        return self._observation(*_pair(self.simulator.get_observations()))

    def _observation(self, raw: Any, extras: Mapping[str, Any]) -> Observation:
        groups = dict(extras.get("observations", {}))
        if isinstance(raw, Tensor) and set(groups) - {OBS_KEY}:
            raw = {OBS_KEY: raw} | groups
        return self._groups(raw)

    def _remember(self, obs: Observation) -> Observation:
        """Keep a copy of the groups, which stand in for those that a final observation lacks."""
        if self._last is not None and not isinstance(obs, Tensor):
            self._last.copy_(obs)
        return obs

    def _final(self, raw: Any) -> Observation:
        final = self._groups(raw)
        if self._last is None or not isinstance(final, Tensor):
            return final
        if OBS_KEY not in self._last or final.shape != self._last[OBS_KEY].shape:
            raise EnvError(
                f"A final observation that is one tensor needs the shape of the group '{OBS_KEY}'; it is "
                f"{list(final.shape)}, the observation has the groups {sorted(self._last.keys())}. Give all groups."
            )
        groups = self._last.clone()
        groups[OBS_KEY] = final
        return groups

    def _groups(self, raw: Any) -> Observation:
        if isinstance(raw, TensorDict):
            return raw
        if isinstance(raw, Mapping | TensorDictBase):
            groups = {key: self._groups(part) for key, part in raw.items()}
            return TensorDict(groups, batch_size=[self.num_envs], device=self.device)
        return torch.as_tensor(raw, device=self.device)

    def _column(self, value: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, device=self.device).reshape(self.num_envs, 1).to(dtype)

    def _metrics(self, extras: Mapping[str, Any]) -> dict[str, Tensor]:
        given = extras.get("reward_components", {})
        parts = {_component_name(name, given): value for name, value in given.items()}
        new = {name: MetricSpec(name, "sum", "reward_components") for name in parts}
        for name in ("success", "fail"):
            if name in extras:
                parts[name], new[name] = extras[name], MetricSpec(name)
        if not self.metric_specs.keys() >= new.keys():
            # A new dictionary, with the old specs first: another thread may be reading the old one.
            self.metric_specs = {**self.metric_specs, **new, **self.metric_specs}
        return {name: self._column(value, torch.float32) for name, value in parts.items()}


def _are_equal(a: Observation, b: Observation) -> bool:
    ours, theirs = leaves(a), leaves(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[path], theirs[path]) for path in ours)


def _component_name(name: str, others: Mapping[str, Any]) -> str:
    if name in RESERVED_NAMES | {"success", "fail"}:
        name += "_reward"
        while name in others:
            name += "_reward"
    return name


def _pair(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split what ``get_observations`` or ``reset`` returned into the observation and its extras."""
    return (returned[0], returned[1] or {}) if isinstance(returned, tuple) else (returned, {})


def _action_space(simulator: Any) -> gym.Space[Any]:
    single, space = (getattr(simulator, name, None) for name in ("single_action_space", "action_space"))
    if isinstance(single, gym.Space):
        return single
    if isinstance(space, spaces.Box) and len(space.shape) == 2 and space.shape[0] == int(simulator.num_envs):
        return spaces.Box(space.low[0], space.high[0], dtype=space.low.dtype.type)
    return space if isinstance(space, gym.Space) else spaces.Box(-np.inf, np.inf, (int(simulator.num_actions),))
