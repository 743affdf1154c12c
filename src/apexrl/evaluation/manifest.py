"""Manifests: files that pin the episodes of an evaluation, so that anyone can run the same ones again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from apexrl.core.errors import ConfigError
from apexrl.core.system.files import write_json
from apexrl.core.validation import Natural, checked, options, up_to
from apexrl.envs.base import EpisodeStart, SeedEpisode, VecEnv
from apexrl.envs.suites.base import StateEpisode

MANIFEST_VERSION = 1


@options("")
class _File:
    """What a file holds."""

    version: Annotated[Natural, up_to(MANIFEST_VERSION)]
    task: str
    options: dict[str, Any]
    episodes: Annotated[list[dict[str, Any]], Field(min_length=1)]


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
        if not path.is_file():
            raise ConfigError(f"There is no manifest at {path}.")
        what, advice = f"{path} is not a manifest", "; 'apexrl manifest TASK --output FILE' writes one."
        found = checked(_File, path.read_bytes(), what, advice)
        has_seeds = "seed" in found.episodes[0]
        kind: Any = SeedEpisode if has_seeds else StateEpisode
        typed = checked(dict[str, list[kind]], {"episodes": found.episodes}, what, advice)
        return cls(found.task, found.options, typed["episodes"], path)

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
