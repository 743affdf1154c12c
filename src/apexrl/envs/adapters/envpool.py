"""Tasks of envpool as a ``VecEnv``.

envpool resets an ended episode at the step after its end, whose action and reward mean nothing. Here ended
environments are reset at once and by themselves, so that every step is a step of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.core.metrics import MetricSpec
from apexrl.core.system.seeding import spawn_seed
from apexrl.core.types import EnvStep, Observation
from apexrl.envs.adapters.simulators import load_simulator, space_of
from apexrl.envs.base import VecEnv
from apexrl.envs.options import check_known
from apexrl.envs.workers.gym_group import METRIC_KEYS, metric_names

_INSTALL = "Install it with: pip install 'apexrl[envpool]'."


class EnvPoolVecEnv(VecEnv):
    """One envpool, which steps N environments in threads of C++.

    Observations become float32 tensors (images stay uint8), Discrete ones one-hot vectors. Actions are clipped to
    their bounds. Metrics are found in ``info`` as ``GymVecEnv`` finds them. A seed makes a new pool, since envpool
    takes one at no other time.

    Args:
        make: makes a pool with the given number of environments and seed, of the kind ``gymnasium``.
        device: where the tensors are wanted; envpool runs on the CPU.

    Raises:
        EnvError: when the pool has an action space that is not supported, or several players.
    """

    metric_specs: Mapping[str, MetricSpec] = {}
    """The metrics found in ``info``."""

    def __init__(self, make: Callable[[int, int], Any], num_envs: int, device: torch.device | str = "cpu") -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._make = make
        # Two pools differ from each other, yet both follow from torch.manual_seed.
        self._pool = make(num_envs, int(torch.randint(2**31 - 1, ())))
        self.action_space = self._pool.action_space
        if not isinstance(self.action_space, spaces.Box | spaces.Discrete):
            raise EnvError(f"envpool's action space {self.action_space} is not supported; Box and Discrete are.")
        if self._pool.config.get("max_num_players", 1) > 1:
            raise EnvError("Tasks of envpool with several players are not supported.")
        self.max_episode_steps = self._pool.config.get("max_episode_steps")
        obs, info = self._pool.reset()
        self.observation_space = space_of(self._observation(obs))
        first = {key: value[0] for key, value in info.items() if isinstance(value, np.ndarray) and value.ndim == 1}
        self.metric_specs = {name: MetricSpec(name) for name in metric_names(first)}
        self._metric_keys = {name: METRIC_KEYS.get(name, (name,)) for name in self.metric_specs}

    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere; other seeds share no stream."""
        if seed is not None:
            self._pool.close()
            self._pool = self._make(self.num_envs, spawn_seed(seed))  # its environments draw from that, that + 1, …
        return self._observation(self._pool.reset()[0])

    def step(self, action: Tensor) -> EnvStep:
        """Apply one action ``[N, A]`` to each environment."""
        raw, reward, terminated, truncated, info = self._pool.step(self._native(action))
        obs = self._observation(raw)
        ended = np.flatnonzero(terminated | truncated).astype(np.int32)
        final = None
        if len(ended):
            final = obs.clone()
            # Only these are reset; the others wait for their next action.
            fresh, where = self._pool.reset(ended)
            rows = torch.from_numpy(where["env_id"]).long().to(self.device)
            obs[rows] = self._observation(fresh)
        return EnvStep(
            obs=obs,
            reward=self._column(reward, np.float32),
            terminated=self._column(terminated, np.bool_),
            truncated=self._column(truncated & ~terminated, np.bool_),
            final_obs=final,
            metric={
                name: self._column(next(info[key] for key in keys if key in info), np.float32)
                for name, keys in self._metric_keys.items()
            },
        )

    def spawn(self, num_envs: int) -> EnvPoolVecEnv:
        """Make an independent pool of the same task."""
        return EnvPoolVecEnv(self._make, num_envs, self.device)

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Render environment ``index`` as an ``[H, W, 3]`` image; needs the option ``render_mode="rgb_array"``."""
        try:
            return np.array(self._pool.render(env_ids=index)[0], np.uint8)
        except RuntimeError as error:
            raise EnvError(f"envpool cannot render: {error}.") from error

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _native(self, action: Tensor) -> NDArray[Any]:
        """Return the actions as envpool takes them."""
        rows, space = action.detach().cpu().numpy(), self.action_space
        if isinstance(space, spaces.Discrete):
            return np.asarray(rows[:, 0] + space.start, np.int32)
        assert isinstance(space, spaces.Box)
        clipped: NDArray[Any] = rows.reshape(self.num_envs, *space.shape).clip(space.low, space.high)
        return clipped.astype(space.low.dtype, copy=False)

    def _observation(self, raw: Any) -> Observation:
        if isinstance(raw, Mapping):
            groups = {key: self._observation(part) for key, part in raw.items()}
            return TensorDict(groups, batch_size=[len(next(iter(groups.values())))], device=self.device)
        space = self._pool.observation_space
        if isinstance(space, spaces.Discrete):
            one_hot = torch.nn.functional.one_hot(torch.from_numpy(raw).long(), int(space.n))
            return one_hot.to(self.device, torch.float32)
        dtype = torch.uint8 if raw.dtype == np.uint8 and raw.ndim > 2 else torch.float32
        # Never memory of the pool, which is read-only and lives as long as its array.
        tensor = torch.tensor(raw, dtype=dtype, device=self.device)
        return tensor[:, None] if tensor.ndim == 1 else tensor

    def _column(self, value: NDArray[Any], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(value.astype(dtype).reshape(self.num_envs, 1)).to(self.device)


def make_envpool(id: str, num_envs: int = 1, *, device: torch.device | str = "cpu", **kwargs: Any) -> EnvPoolVecEnv:
    """Make a task of envpool by its name, such as ``"HalfCheetah-v5"`` or ``"Pong-v5"``.

    ``kwargs`` are passed to ``envpool.make``: ``num_threads``, ``max_episode_steps``, options of the task, …

    Raises:
        EnvError: when envpool is not installed or has no such task.
    """
    envpool = load_simulator("envpool", _INSTALL)
    check_known("envpool has no task", [id], envpool.list_all_envs())

    def make(size: int, seed: int) -> Any:
        return envpool.make(id, env_type="gymnasium", num_envs=size, seed=seed, **kwargs)

    return EnvPoolVecEnv(make, num_envs, device)
