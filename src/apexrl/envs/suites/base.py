"""A suite of language-conditioned tasks with exact initial states."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from apexrl.core.errors import ConfigError
from apexrl.core.validation import Natural

Split = Literal["train", "val", "test"]
"""``test`` is another name of ``val``: the initial states that are never trained on."""

RENDER_SIZE = 256
"""Height and width of images for people, in pixels."""


def own_split(split: str) -> Literal["train", "val"]:
    """Return the split that a name stands for, or raise a ConfigError."""
    if split not in get_args(Split):
        raise ConfigError(f"split must be one of {', '.join(get_args(Split))}, got {split!r}.")
    return "train" if split == "train" else "val"


def camera_space(num_numbers: int, cameras: Sequence[str], image_size: int) -> gym.spaces.Dict:
    """Return the space of the group ``state``, and of a group of images for each camera."""
    images = {camera: gym.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8) for camera in cameras}
    return gym.spaces.Dict({"state": gym.spaces.Box(-np.inf, np.inf, (num_numbers,), np.float32), **images})


def hash_init_state(init_state: NDArray[np.float64]) -> str:
    """Name a state by the SHA-256 of its float64 bytes, without padding."""
    return hashlib.sha256(np.ascontiguousarray(init_state, "<f8").tobytes()).hexdigest()


class InitState(NamedTuple):
    """Where an episode starts."""

    task_id: int
    init_state: NDArray[np.float64]
    """The full state of the simulator; its length differs between tasks."""

    @property
    def entropy(self) -> list[int]:
        """What random numbers beside the simulator's follow from."""
        return [self.task_id, *np.ascontiguousarray(self.init_state).view(np.uint32).tolist()]


EpisodeNumber = Annotated[Natural, Field(lt=2**32)]


class StateEpisode(NamedTuple):
    """An episode of a suite, as a manifest names it."""

    task: str
    split: str
    init_state: EpisodeNumber
    """Index among the initial states of the task in that split."""
    hash: str
    """SHA-256 of the state itself: another version of the simulator may have another one at this index."""


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
        """Return every group of the suite's ``observation_space``. Images are rendered here and nowhere else."""

    @abstractmethod
    def render(self) -> NDArray[np.uint8]:
        """Render the scene for people, ``[H, W, 3]``."""

    def expert_action(self) -> NDArray[np.float32]:
        """Return what the suite's scripted expert would do now; NotImplementedError where there is none."""
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
    """What a task asks for, in words; one per task."""
    horizon: int
    """Control steps after which an episode is truncated."""
    observation_space: gym.spaces.Dict
    """Group ``state`` (float32 vector), and one uint8 ``[H, W, 3]`` group for each camera."""
    action_space: gym.spaces.Box
    """Of one control step."""
    control_hz: float = 20.0
    """Control steps in a second of the simulated world."""
    renders: bool = False
    """Whether observations hold images: then every simulator needs a process of its own."""

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
        """Return a random initial state, the same one for the same seed; a ConfigError where there are none."""
        raise ConfigError(f"task.random_init: '{self.name}' has fixed initial states only; set it to false.")

    def sample_episodes(self, count: int, rng: np.random.Generator) -> list[StateEpisode]:
        """Sample episodes from different validation states, equally many per task; a ConfigError if there are fewer."""
        states = [self.init_states(task_id, "val") for task_id in range(self.num_tasks)]
        if count > (known := self.num_tasks * min(map(len, states))):
            states_of_tasks = f"{known} validation states of the {self.num_tasks} tasks of '{self.name}'"
            raise ConfigError(f"--episodes {count} is more than the {states_of_tasks}. Ask for fewer.")
        orders = [rng.permutation(len(of_task)).tolist() for of_task in states]
        turns = (divmod(number, self.num_tasks) for number in range(count))
        drawn = [(task_id, orders[task_id][turn]) for turn, task_id in turns]
        return [StateEpisode(self.task_names[t], "val", index, hash_init_state(states[t][index])) for t, index in drawn]

    def find_states(self, episodes: Sequence[StateEpisode]) -> list[InitState]:
        """Return the initial states of the episodes of a manifest.

        Raises:
            ConfigError: when the suite lacks one of the tasks or states, or a state is another one.
        """
        states_of = functools.cache(self.init_states)
        return [self._find_state(states_of, episode) for episode in episodes]

    def _find_state(self, states_of: Any, episode: StateEpisode) -> InitState:
        names = list(self.task_names)
        if episode.task not in names:
            first = f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
            raise ConfigError(
                f"The manifest has the task '{episode.task}', which this suite of {len(names)} tasks lacks: {first}."
            )
        task_id = names.index(episode.task)
        known = states_of(task_id, own_split(episode.split))
        if episode.init_state >= len(known) or hash_init_state(known[episode.init_state]) != episode.hash:
            raise ConfigError(
                f"Initial state {episode.init_state} of '{episode.task}' ({episode.split}) differs from that of the "
                "manifest. Install the simulator's version that wrote it, or write a new one with 'apexrl manifest'."
            )
        return InitState(task_id, known[episode.init_state])

    @abstractmethod
    def make_simulator(self, task_id: int) -> Simulator:
        """Make the simulator of a task; called inside a worker."""
