"""What a run is between two iterations: saved to checkpoints and restored from them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from apexrl.agent import checkpoint
from apexrl.agent.directories import RunDirectories
from apexrl.agent.schedule import Counters, TrainingConfig, env_seed
from apexrl.algorithms.base import BaseAlgorithm
from apexrl.collectors.base import BaseCollector
from apexrl.core.errors import ConfigError, EnvStateError, sentences
from apexrl.core.system import distributed
from apexrl.envs import VecEnv
from apexrl.policies.base import Policy


class Checkpointer:
    """Saves the parts of a run when that is due, and restores them: all or none.

    Of several processes that learn together, all call its methods; the first one writes the states of all into one
    file, and its clock says when that is due.

    Args:
        env: the training environments.
        policy: the networks.
        algorithm: turns batches into updates.
        collector: how batches are made.
        counters: how far the run is.
        cfg: the schedule.
        directories: where checkpoints go.
        about: what else a checkpoint says: the configuration, or how the policy was created.
        tell: shows a line to the user.
        clock: seconds from anywhere.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        algorithm: BaseAlgorithm,
        collector: BaseCollector,
        counters: Counters,
        cfg: TrainingConfig,
        directories: RunDirectories,
        *,
        about: Mapping[str, Any],
        tell: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.env, self.policy, self.algorithm, self.collector = env, policy, algorithm, collector
        self.counters, self.cfg, self.directories, self.about = counters, cfg, directories, about
        self.tell, self.clock = tell, clock
        self.last_time = clock()
        """When the last checkpoint was saved on schedule; at first when the run was made."""
        self.seconds = 0.0
        """What the last save took."""
        self.is_saving = False
        self._current: Path | None = None
        """The numbered checkpoint that was saved or loaded last."""
        self._scheduled: list[Path] = []
        """Checkpoints that were saved on schedule, oldest first; only these are ever deleted."""
        self._named: set[Path] = set()
        """Checkpoints that somebody asked for."""

    def save_if_due(self) -> None:
        """Save every ``save_interval`` iterations, and when the last checkpoint is ``save_minutes`` old."""
        interval, minutes = self.cfg.save_interval, self.cfg.save_minutes
        is_due = interval > 0 and self.counters.iteration % interval == 0
        if interval and minutes and not is_due:
            is_due = distributed.on_main_process(lambda: self.clock() - self.last_time >= 60 * minutes)
        if is_due:
            self.save()

    def save(self) -> None:
        """Save the numbered checkpoint of this iteration, unless that was done, and delete old ones."""
        if self.directories.save_dir is None:
            return
        path = self.directories.save_dir / checkpoint.checkpoint_name(self.counters.iteration)
        if path == self._current:
            return
        self._write(path)
        self._current, self.last_time = path, self.clock()
        if path not in self._named:
            self._scheduled = [*(old for old in self._scheduled if old != path), path]
        while self.cfg.keep_checkpoints and len(self._scheduled) > self.cfg.keep_checkpoints:
            old = self._scheduled.pop(0)
            if distributed.is_main_process():
                old.unlink(missing_ok=True)

    def save_as(self, name: str | Path | None = None) -> Path:
        """Save a checkpoint that is never deleted; a relative name lies in ``save_dir``.

        Raises:
            ConfigError: for the name of another iteration's numbered checkpoint.
        """
        own_name = checkpoint.checkpoint_name(self.counters.iteration)
        name = name or own_name
        if checkpoint.is_numbered(Path(name)) and Path(name).name != own_name:
            raise ConfigError(
                f"The name {Path(name).name} belongs to the checkpoint of another iteration than "
                f"{self.counters.iteration}; choose another name, or leave it out."
            )
        if not Path(name).is_absolute():
            self.directories.prepare(self.counters.iteration)
        path = self.directories.checkpoint_path(name)
        self._write(path)
        self._named.add(path)
        if path in self._scheduled:
            self._scheduled.remove(path)
        return path

    def save_before_leaving(self) -> None:
        """Save after an exception, if that works: it must not hide what went wrong.

        Of several processes the first one saves its own state alone, for the others may be gone: whoever resumes
        starts new episodes.
        """
        alone = {"env": None, checkpoint.PEERS: [None] * (distributed.world_size() - 1)}
        try:
            if distributed.world_size() == 1:
                self.save()
            elif distributed.is_main_process() and self.directories.save_dir is not None:
                path = self.directories.save_dir / checkpoint.checkpoint_name(self.counters.iteration)
                if path != self._current:
                    with self.collector.quiet():
                        checkpoint.save(path, {**self._content(), **alone})
        except Exception as error:
            problem = f"No checkpoint could be saved at iteration {self.counters.iteration}: {error}"
            self.tell(sentences(problem, self.last_good()))

    def _write(self, path: Path) -> None:
        begin, self.is_saving = self.clock(), True
        try:
            with self.collector.quiet():  # until it is written: a state may be memory that the environment works in
                content = self._content()
                if distributed.world_size() == 1:
                    checkpoint.save(path, content)
                else:
                    self._write_for_all(path, content)
        finally:
            self.seconds, self.is_saving = self.clock() - begin, False
        if content["env"] is None and content["collector"]:
            self.tell(
                f"{type(self.env).__name__} cannot save its state: a resumed run will start new episodes there.",
                once=True,
            )

    def _write_for_all(self, path: Path, content: dict[str, Any]) -> None:
        """Write what the first process has, with what the others have of their own."""
        own = {name: content[name] for name in checkpoint.OWN_KEYS}
        own["algorithm"] = {name: content["algorithm"][name] for name in self.algorithm.own_keys}
        others = distributed.gather_object({} if distributed.is_main_process() else own)[1:]
        distributed.on_main_process(lambda: checkpoint.save(path, {**content, checkpoint.PEERS: others}))

    def _content(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "collector": self.collector.state_dict(),
            "env": self.env.state_dict(),
            "rng": checkpoint.rng_state(),
            **vars(self.counters),
            **self.about,
        }

    def load(self, name: str | Path) -> None:
        """Continue from a checkpoint.

        Raises:
            CheckpointError: when a part of it cannot be used; policy, algorithm and collector then stay as they were.
        """
        path = self.directories.find_checkpoint(name)
        content = checkpoint.of_rank(checkpoint.load(path), distributed.rank(), distributed.world_size(), path)
        with self.collector.quiet():
            parts: tuple[Any, ...] = (self.policy, self.algorithm, self.collector)
            before = copy.deepcopy([part.state_dict() for part in parts])
            try:
                self._restore(content, path, before[-1])
            except Exception:
                for part, state in zip(parts, before, strict=True):
                    part.load_state_dict(state)
                raise
            for counter in vars(self.counters):
                setattr(self.counters, counter, content.get(counter, ""))
            if content["rng"] is None:
                distributed.seed_per_rank(self.cfg.seed, self.counters.total_steps)
            else:
                checkpoint.set_rng_state(content["rng"])
        self._current = path
        self.directories.note_loaded(path)

    def _restore(self, content: Mapping[str, Any], path: Path, old_collector: Mapping[str, Any]) -> None:
        """Restore the parts, the environments last: what they were before could not be brought back."""
        is_changed = content[checkpoint.CHANGED]
        if content["rng"] is not None:
            with checkpoint.restoring("rng", path), checkpoint.kept_rng_state():
                checkpoint.set_rng_state(content["rng"])
        checkpoint.load_module(self.policy, content["policy"], path)
        with checkpoint.restoring("algorithm", path):
            state = content["algorithm"]
            self.algorithm.load_state_dict(self.algorithm.without_own_state(state) if is_changed else state)
        if not is_changed:
            with checkpoint.restoring("collector", path):
                self.collector.load_state_dict(content["collector"])
        try:
            if is_changed:
                raise EnvStateError(is_changed)
            if content["env"] is None:
                raise EnvStateError("the checkpoint holds no environment state")
            with checkpoint.restoring("env", path):
                self.env.load_state_dict(content["env"])
        except EnvStateError as error:
            self.tell(f"New episodes start, so this run will differ from an uninterrupted one: {error}")
            self.collector.load_state_dict(old_collector)
            # Not the first episodes over again.
            self.collector.restart(env_seed(self.cfg.seed, content["total_steps"]))

    def load_newest(self) -> None:
        """Continue a run from its newest checkpoint that can be read; the older ones give way to new ones.

        Newer ones get another name, so that nobody meets them again.
        """
        directory = self.directories.save_dir
        assert directory is not None
        newest, _, problems = checkpoint.load_newest(directory, lambda path: self.load(path.name))
        self._scheduled = checkpoint.numbered(directory, self.counters.iteration)
        for problem in problems:
            self.tell(sentences(problem, f"Resuming from {newest.name}, the newest that can be read."))
        if problems and distributed.is_main_process():
            for path in checkpoint.numbered(directory)[-len(problems) :]:
                path.rename(path.with_name(f"{path.name}.damaged"))

    def last_good(self) -> str:
        """Name the newest checkpoint that a resumed run would take."""
        directory = self.directories.save_dir
        paths = [] if directory is None else checkpoint.numbered(directory, self.counters.iteration)
        return f"The last good checkpoint is {paths[-1]}." if paths else "No checkpoint had been saved."
