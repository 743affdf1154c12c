"""Environments one by one, for kinds that draw the random numbers of all their environments together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.core.metrics import MetricSpec
from apexrl.core.system.seeding import spawn_seeds
from apexrl.core.types import EnvStep, Observation
from apexrl.envs.base import SeededVecEnv, VecEnv


class SeparateEnvs(SeededVecEnv):
    """N environments of one kind, each made alone and stepped in turn.

    Slower than N together. But a generator that N environments share gives each of them other numbers when N changes,
    and nothing promises that a row of a tensor operation comes out the same to the last bit when there are more rows.

    Args:
        env: makes the others; it is not used itself.
        num_envs: N.

    Raises:
        EnvError: when it cannot make another, or not one alone.
    """

    def __init__(self, env: VecEnv, num_envs: int) -> None:
        self._parts = [env.spawn(1)]
        if (found := self._parts[0].num_envs) != 1:
            self._parts[0].close()
            raise EnvError(
                f"{type(env).__name__} always has {found} environments and cannot start one alone from a seed of its "
                "own. Evaluate it with a number of episodes instead of a manifest."
            )
        self._parts += [env.spawn(1) for _ in range(num_envs - 1)]
        self.num_envs, self.device = num_envs, env.device
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.max_episode_steps, self.gives_final_obs = env.max_episode_steps, env.gives_final_obs
        self.task_names, self.video_fps = env.task_names, env.video_fps

    @property
    def metric_specs(self) -> Mapping[str, MetricSpec]:
        """Those that any of them has."""
        return {name: spec for part in self._parts for name, spec in part.metric_specs.items()}

    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere; each environment from a stream of its own."""
        if seed is None:
            return _join([part.reset() for part in self._parts])
        return self.reset_each(spawn_seeds(seed, self.num_envs))

    def reset_each(self, seeds: Sequence[int]) -> Observation:
        """Start a new episode everywhere; environment ``i`` gets ``seeds[i]``."""
        return _join([part.reset(seed=seed) for part, seed in zip(self._parts, seeds, strict=True)])

    def step(self, action: Tensor) -> EnvStep:
        """Apply one action ``[N, A]``, one environment after another."""
        # A copy lies where memory is aligned, like that of a single action.
        steps = [part.step(action[i : i + 1].clone()) for i, part in enumerate(self._parts)]
        ended = any(step.final_obs is not None for step in steps)
        return EnvStep(
            obs=_join([step.obs for step in steps]),
            reward=torch.cat([step.reward for step in steps]),
            terminated=torch.cat([step.terminated for step in steps]),
            truncated=torch.cat([step.truncated for step in steps]),
            final_obs=_join([step.final_obs if step.final_obs is not None else step.obs for step in steps])
            if ended
            else None,
            metric=_join_metrics([step.metric for step in steps], self.device),
        )

    def spawn(self, num_envs: int) -> VecEnv:
        """Make independent environments of the same kind, together."""
        return self._parts[0].spawn(num_envs)

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Draw environment ``index``."""
        return self._parts[index].render(0)

    def close(self) -> None:
        """Close each."""
        for part in self._parts:
            part.close()


def _join(parts: Sequence[Observation]) -> Observation:
    joined: Any = torch.cat(list(parts))
    observation: Observation = joined
    return observation


def _join_metrics(parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Join what each reported; NaN where one did not."""
    names = dict.fromkeys(name for part in parts for name in part)
    missing = torch.full((1, 1), torch.nan, device=device)
    return {name: torch.cat([part.get(name, missing) for part in parts]) for name in names}
