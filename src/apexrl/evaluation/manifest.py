"""Manifests: files that pin the episodes of an evaluation, so that anyone can run the same ones again."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import ConfigError
from apexrl.core.system.files import write_json
from apexrl.envs.base import VecEnv
from apexrl.envs.suites.base import InitState, Split
from apexrl.envs.suites.env import SuiteVecEnv

MANIFEST_VERSION = 1
MAX_EPISODE_SEED = 2**32


class SeedEpisode(NamedTuple):
    """An episode of an ordinary task."""

    seed: int


class StateEpisode(NamedTuple):
    """An episode of a suite."""

    task: str
    split: str
    init_state: int
    """Index among the initial states of the task in that split."""
    hash: str
    """SHA-256 of the state itself: another version of the simulator may have another one at this index."""


@dataclass(frozen=True)
class Manifest:
    """The episodes of an evaluation, and what they are episodes of."""

    task: str
    """``task.id`` or ``task.benchmark_name``."""
    options: Mapping[str, Any]
    """``task.kwargs``; of a suite ``max_episode_length`` when it is not the suite's own."""
    episodes: Sequence[SeedEpisode] | Sequence[StateEpisode]
    path: Path | None = field(default=None, compare=False)
    """Of the file that it was read from."""

    def to_dict(self) -> dict[str, Any]:
        """Return what the file holds."""
        return {
            "version": MANIFEST_VERSION,
            "task": self.task,
            "options": dict(self.options),
            "episodes": [episode._asdict() for episode in self.episodes],
        }

    @property
    def hash(self) -> str:
        """SHA-256 of the content; spaces, line ends and the order of keys in the file do not matter."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def write(self, path: Path) -> Path:
        """Write the file atomically."""
        return write_json(path, self.to_dict())

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a file.

        Raises:
            ConfigError: when there is none, or it is no manifest.
        """
        raw = read_json(path, "manifest")
        version = raw.get("version")
        if not isinstance(version, int) or raw.keys() != {"version", "task", "options", "episodes"}:
            raise ConfigError(f"{path} is not a manifest; 'apexrl manifest TASK --output FILE' writes one.")
        if version != MANIFEST_VERSION:
            fix = "Update apexrl." if version > MANIFEST_VERSION else "Write a new one with 'apexrl manifest'."
            raise ConfigError(
                f"{path} is a manifest of version {version}; this one reads version {MANIFEST_VERSION}. {fix}"
            )
        if not isinstance(raw["task"], str) or not isinstance(raw["options"], dict):
            raise ConfigError(f"{path}: 'task' must be text and 'options' a mapping.")
        if not isinstance(raw["episodes"], list) or not raw["episodes"]:
            raise ConfigError(f"{path}: 'episodes' must be a list with at least one episode.")
        kind: Any = SeedEpisode if "seed" in dict_or_empty(raw["episodes"][0]) else StateEpisode
        episodes = [_episode(kind, entry, f"{path}: episode {i}") for i, entry in enumerate(raw["episodes"])]
        return cls(raw["task"], raw["options"], episodes, path)

    def starts(self, env: VecEnv) -> Sequence[int] | Sequence[InitState]:
        """Return where the episodes start in an environment of the task, as ``evaluate_starts`` takes it.

        Raises:
            ConfigError: when a suite lacks one of the tasks or states, or a state is another one.
        """
        seeds = [episode.seed for episode in self.episodes if isinstance(episode, SeedEpisode)]
        if isinstance(env, SuiteVecEnv) != (not seeds):
            wanted = "initial states" if isinstance(env, SuiteVecEnv) else "seeds"
            raise ConfigError(f"The manifest of '{self.task}' has no {wanted}; write a new one with 'apexrl manifest'.")
        if not isinstance(env, SuiteVecEnv):
            return seeds
        states = functools.cache(env.suite.init_states)
        names = list(env.suite.task_names)
        return [_init_state(names, states, episode) for episode in self.episodes if isinstance(episode, StateEpisode)]


def make_manifest(
    env: VecEnv, task: str, num_episodes: int, *, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Manifest:
    """Draw episodes: distinct seeds, or for a suite distinct validation states, as many of each task.

    Args:
        env: an environment of the task.
        task: its name.
        num_episodes: how many.
        seed: of the draw. Manifests of different seeds have different episodes, but for rare coincidences.
        options: of the task.

    Raises:
        ConfigError: when a suite has fewer validation states.
    """
    rng = np.random.default_rng(seed)
    if not isinstance(env, SuiteVecEnv):
        seeds = rng.choice(2**31, num_episodes, replace=False)
        return Manifest(task, options or {}, [SeedEpisode(int(value)) for value in seeds])
    suite = env.suite
    if num_episodes > env.num_distinct_episodes:
        raise ConfigError(
            f"--episodes {num_episodes} is more than the validation states of '{task}': it has "
            f"{env.num_distinct_episodes} for {suite.num_tasks} tasks. Ask for fewer."
        )
    states = [suite.init_states(task_id, "val") for task_id in range(suite.num_tasks)]
    orders = [rng.permutation(len(of_task)) for of_task in states]
    episodes = []
    for number in range(num_episodes):
        turn, task_id = divmod(number, suite.num_tasks)
        index = int(orders[task_id][turn])
        episodes.append(StateEpisode(suite.task_names[task_id], "val", index, _state_hash(states[task_id][index])))
    return Manifest(task, options or {}, episodes)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON file that holds a mapping.

    Raises:
        ConfigError: when there is none, or it holds something else.
    """
    if not path.is_file():
        raise ConfigError(f"There is no {what} at {path}.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a {what}: it is not JSON ({error}).") from error
    return dict_or_empty(raw)


def dict_or_empty(value: Any) -> dict[str, Any]:
    """Return a mapping as it is, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def _episode(kind: Any, entry: Any, where: str) -> Any:
    types = get_type_hints(kind)
    if not isinstance(entry, dict) or entry.keys() != types.keys():
        raise ConfigError(f"{where} must have {', '.join(types)} and nothing else, got {entry!r}.")
    for name, wanted in types.items():
        value = entry[name]
        if isinstance(value, bool) or not isinstance(value, wanted):
            kind_of = "a whole number" if wanted is int else "text"
            raise ConfigError(f"{where}: '{name}' must be {kind_of}, got {value!r}.")
        if wanted is int and not 0 <= value < MAX_EPISODE_SEED:
            raise ConfigError(f"{where}: '{name}' must lie in [0, {MAX_EPISODE_SEED}), got {value}.")
    return kind(**entry)


def _init_state(
    names: list[str], states: Callable[[int, Split], list[NDArray[np.float64]]], episode: StateEpisode
) -> InitState:
    if episode.task not in names:
        raise ConfigError(
            f"The manifest has the task '{episode.task}', which this suite of {len(names)} tasks lacks: "
            f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}."
        )
    if episode.split not in get_args(Split):
        raise ConfigError(f"The manifest has the split '{episode.split}'; there are {' and '.join(get_args(Split))}.")
    task_id = names.index(episode.task)
    known = states(task_id, "val" if episode.split == "val" else "train")
    if episode.init_state >= len(known) or _state_hash(known[episode.init_state]) != episode.hash:
        raise ConfigError(
            f"Initial state {episode.init_state} of '{episode.task}' ({episode.split}) is not the one that the "
            "manifest means: the simulator here is of another version. Install the version that the manifest was "
            "written with, or write a new one with 'apexrl manifest'."
        )
    return InitState(task_id, known[episode.init_state])


def _state_hash(state: NDArray[np.float64]) -> str:
    return hashlib.sha256(np.ascontiguousarray(state, "<f8").tobytes()).hexdigest()
