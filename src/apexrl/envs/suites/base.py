"""A suite of language-conditioned tasks with exact initial states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import ConfigError

Split = Literal["train", "val", "test"]
"""``test`` is another name of ``val``: the initial states that are never trained on."""


def own_split(split: str) -> Literal["train", "val"]:
    """Return the split that a name stands for.

    Raises:
        ConfigError: when there is none of that name.
    """
    if split not in get_args(Split):
        raise ConfigError(f"split must be one of {', '.join(get_args(Split))}, got {split!r}.")
    return "train" if split == "train" else "val"


class InitState(NamedTuple):
    """Where an episode starts."""

    task_id: int
    init_state: NDArray[np.float64]
    """The full state of the simulator; its length differs between tasks."""


class Simulator(ABC):
    """One task's simulator. It lives in a worker process and may keep a rendering context."""

    @abstractmethod
    def restore(self, init_state: NDArray[np.float64]) -> None:
        """Go to a state exactly: what follows depends on it and on the actions alone."""

    @abstractmethod
    def state(self) -> NDArray[np.float64]:
        """Return the full state, as ``restore`` takes it."""

    @abstractmethod
    def advance(self, action: NDArray[np.float32]) -> bool:
        """Take one control step with an action ``[A]`` in [-1, 1]; returns whether the task is solved."""

    @abstractmethod
    def observe(self) -> dict[str, NDArray[Any]]:
        """Return every group of the suite's ``observation_space``. Pictures are drawn here and nowhere else."""

    @abstractmethod
    def picture(self) -> NDArray[np.uint8]:
        """Draw the scene for people, ``[H, W, 3]``."""

    def expert_action(self) -> NDArray[np.float32]:
        """Return what the suite's scripted expert would do now.

        Raises:
            NotImplementedError: when the suite has no scripted experts.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the simulator."""
        return


class TaskSuite(ABC):
    """Tasks that share observation and action spaces. Plain data: it is sent to worker processes."""

    name: str
    """Such as ``mt10`` or ``libero_10``."""
    task_names: Sequence[str]
    instructions: Sequence[str]
    """What a task asks for, in words; one a task."""
    horizon: int
    """Control steps after which an episode is truncated."""
    observation_space: gym.spaces.Dict
    """Group ``state`` (float32 vector), and one uint8 ``[H, W, 3]`` group for each camera."""
    action_space: gym.spaces.Box
    """Of one control step."""
    control_hz: float = 20.0
    """Control steps in a second of the simulated world."""
    renders: bool = False
    """Whether observations hold pictures: then every simulator needs a process of its own."""

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        return len(self.task_names)

    @abstractmethod
    def init_states(self, task_id: int, split: Split = "train") -> list[NDArray[np.float64]]:
        """Return the initial states of a task, the same ones at every call; those of ``val`` are never trained on.

        A suite need not know ``test``: it is asked for ``train`` and ``val`` alone.
        """

    def get_task_init_states(self, task_id: int, split: Split = "train") -> NDArray[np.float64]:
        """Return the initial states of a task as rows ``[n, D]``."""
        return np.stack(self.init_states(task_id, own_split(split)))

    def random_init_state(self, task_id: int, seed: Sequence[int]) -> NDArray[np.float64]:
        """Return an initial state of a task drawn at random, the same one for the same seed; suites that can, do.

        Raises:
            ConfigError: when the suite has none but those of its splits.
        """
        raise ConfigError(f"task.random_init: '{self.name}' has fixed initial states only; set it to false.")

    @abstractmethod
    def make_simulator(self, task_id: int) -> Simulator:
        """Make the simulator of a task; called inside a worker."""
