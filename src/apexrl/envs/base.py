"""The environment contract: N environments stepped together on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apexrl.errors import EnvError, EnvStateError
from apexrl.graphs import Acceleration
from apexrl.metrics import MetricSpec
from apexrl.types import EnvStep, Observation


class VecEnv(ABC):
    """N environments stepped together on one device.

    The rules, each of which ``check_env`` verifies:

    - ``reset`` returns the observation ``[N, ...]``; ``step`` takes actions ``[N, A]`` and returns an ``EnvStep``.
    - An episode that ends is reset in the same step: ``obs`` is then the first observation of the next episode
      and ``final_obs`` the last one of the ended episode.
    - ``terminated`` and ``truncated`` are told apart and never both true.
    - Buffers may be reused between steps; whoever keeps an observation copies it.
    """

    num_envs: int
    device: torch.device
    observation_space: gym.Space[Any]
    """Of one environment: a Box, or a Dict of Boxes (nested Dicts are fine)."""
    action_space: gym.Space[Any]
    """Of one environment: Box, Discrete, MultiDiscrete or MultiBinary."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated; None when it is not known."""
    capturable: bool = False
    """True when ``step`` only runs fixed-shape tensor operations on ``device``, without reading a value back."""
    generators: Sequence[torch.Generator] = ()
    """Random generators that a capturable ``step`` draws from."""
    gives_final_obs: bool = True
    """False when the simulator hides the successor of an ended episode; the user is then warned once."""
    can_spawn: bool = True
    """False when it is known that ``spawn`` cannot make others in this process."""

    task_names: Sequence[str] = ()
    """When there are several tasks; a metric ``task_id`` then numbers them."""
    video_fps: float = 30.0
    """Pictures a second of a video that shows one a step."""

    @property
    def num_distinct_episodes(self) -> int | None:
        """How many different episodes there are, where every reset goes through the same list; None for no end."""
        return None

    @property
    def metric_specs(self) -> Mapping[str, MetricSpec]:
        """The metrics that ``EnvStep.metric`` may hold, by name."""
        return {}

    @abstractmethod
    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere. A seed makes everything that follows repeatable."""

    @abstractmethod
    def step(self, action: Tensor) -> EnvStep:
        """Apply one action ``[N, A]`` to each environment."""

    def accelerate(self, acceleration: Acceleration) -> None:
        """Make ``step`` faster, where the environment knows a way that changes no number but for rounding."""
        return

    def spawn(self, num_envs: int) -> VecEnv:
        """Make independent environments of the same kind, for evaluation.

        A simulator with a fixed number of environments may return that number instead.

        Raises:
            EnvError: when the environment cannot make another of its kind.
        """
        raise EnvError(f"{type(self).__name__} cannot make a second environment of its kind; pass eval_env.")

    def state_dict(self) -> dict[str, Any] | None:
        """Return everything needed to go on from here as tensors and plain values; None when that is impossible."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state from ``state_dict``.

        Raises:
            EnvStateError: when the state cannot be restored exactly.
        """
        raise EnvStateError(f"{type(self).__name__} cannot restore its state.")

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Draw environment ``index`` as an ``[H, W, 3]`` picture.

        Raises:
            EnvError: when the environment cannot be drawn.
        """
        raise EnvError(f"{type(self).__name__} cannot be drawn.")

    def close(self) -> None:
        """Free simulators and processes. The environment cannot be used afterwards."""
        return


class SeededVecEnv(VecEnv):
    """Environments that each take a seed of their own, and do not notice which others run beside them."""

    @abstractmethod
    def reset_each(self, seeds: Sequence[int]) -> Observation:
        """Start a new episode everywhere, environment ``i`` from ``seeds[i]``.

        The same seed and actions give the same numbers to the last bit, in any environment and beside any others.
        """
