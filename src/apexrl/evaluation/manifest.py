"""Manifests: files that pin the episodes of an evaluation, so that anyone can run the same ones again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from apexrl.core.errors import ConfigError
from apexrl.core.system.files import write_json
from apexrl.envs.base import EpisodeStart, SeedEpisode, VecEnv
from apexrl.envs.suites.base import StateEpisode

MANIFEST_VERSION = 1
MAX_EPISODE_SEED = 2**32


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
        episodes = [episode._asdict() for episode in self.episodes]
        return {"version": MANIFEST_VERSION, "task": self.task, "options": dict(self.options), "episodes": episodes}

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
        """Read a file."""
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
            raise ConfigError(f"{path}: 'task' must be a string and 'options' a mapping.")
        if not isinstance(raw["episodes"], list) or not raw["episodes"]:
            raise ConfigError(f"{path}: 'episodes' must be a list with at least one episode.")
        kind: Any = SeedEpisode if "seed" in dict_or_empty(raw["episodes"][0]) else StateEpisode
        episodes = [_episode(kind, entry, f"{path}: episode {i}") for i, entry in enumerate(raw["episodes"])]
        return cls(raw["task"], raw["options"], episodes, path)

    def starts(self, env: VecEnv) -> Sequence[EpisodeStart]:
        """Return where the episodes start in an environment of the task, as ``evaluate`` takes it."""
        if not all(isinstance(episode, env.episode_type) for episode in self.episodes):
            raise ConfigError(
                f"The manifest does not name the episodes of '{self.task}' by {', '.join(env.episode_type._fields)}; "
                "write a new one with 'apexrl manifest'."
            )
        return env.find_starts(self.episodes)


def make_manifest(
    env: VecEnv, task: str, num_episodes: int, *, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Manifest:
    """Sample episodes of a task: distinct seeds, or for a suite distinct validation states, as many of each task.

    Manifests of different seeds have different episodes, but for rare coincidences.

    Raises:
        ConfigError: when a suite has fewer validation states.
    """
    return Manifest(task, options or {}, env.sample_episodes(num_episodes, np.random.default_rng(seed)))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON file that holds a mapping; anything else gives an empty one."""
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
            raise ConfigError(
                f"{where}: '{name}' must be {'an integer' if wanted is int else 'a string'}, got {value!r}."
            )
        if wanted is int and not 0 <= value < MAX_EPISODE_SEED:
            raise ConfigError(f"{where}: '{name}' must lie in [0, {MAX_EPISODE_SEED}), got {value}.")
    return kind(**entry)
