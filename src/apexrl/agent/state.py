"""What a run is at a moment: saved in checkpoints, and gone on from."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from apexrl.agent import checkpoint
from apexrl.agent.loggers import ConsoleLogger, Logger
from apexrl.agent.recipe import RECIPE, write_recipe
from apexrl.agent.schedule import TrainingConfig, env_seed
from apexrl.algorithms.base import BaseAlgorithm
from apexrl.collectors.base import BaseCollector
from apexrl.core.errors import CheckpointError, EnvStateError, RunDirError
from apexrl.core.system import distributed
from apexrl.envs import VecEnv
from apexrl.policies.base import Policy

SLOW_ITERATION, SNAPSHOT_SHARE, MAX_SNAPSHOT_BYTES = 0.5, 0.05, 2**30
"""An iteration of more seconds than this may have to be given up; what it begins with is then kept, if that takes no
more than this share of it, and no more memory than this."""


class ResumableTraining:
    """Networks, environments and counters of a run, which checkpoints hold.

    Args:
        env: the training environments.
        policy: the networks.
        algorithm: turns batches into updates.
        cfg: the schedule.
        collector: how batches are made.
        loggers: where messages go.
        save_dir: where checkpoints go; None saves none.
        config: the whole configuration as plain values, stored in checkpoints.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        algorithm: BaseAlgorithm,
        cfg: TrainingConfig,
        *,
        collector: BaseCollector,
        loggers: Sequence[Logger],
        save_dir: Path | str | None,
        config: Mapping[str, Any] | None,
    ) -> None:
        self.env = env
        self.policy, self.algorithm = policy, algorithm
        self.cfg = cfg
        self.collector = collector
        self.loggers = list(loggers) if distributed.is_main_process() else []
        self.save_dir = Path(save_dir) if save_dir is not None else None
        self.config = dict(config or {})
        self._recipe = write_recipe(env, algorithm, cfg)
        self.iteration = 0
        """Finished iterations."""
        self.total_steps = 0
        """Environment steps so far, summed over environments."""
        self.num_evaluations = 0
        self.optimizer_steps: int | None = 0
        """Optimizer steps so far; None where the algorithm does not report them (``updates``)."""
        self._saved_iteration: int | None = None
        self._scheduled: list[Path] = []
        """Checkpoints that were saved on schedule, oldest first; only these are ever deleted."""
        self._named: set[Path] = set()
        """Checkpoints that somebody asked for."""
        self._snapshot: dict[str, Any] | None = None
        """A checkpoint of the beginning of this iteration, where it is likely to take long."""
        self._snapshot_seconds = 0.0
        self._iteration_seconds = {False: 0.0, True: math.inf}
        """Of the last iteration without and the last with an evaluation."""
        self._between_steps = True
        """False while a rollout or an update is under way, when there is no state worth saving."""
        self._told: set[str] = set()

    def save_checkpoint(self, name: str | Path | None = None) -> Path:
        """Save everything needed to go on; a relative name lies in ``save_dir``.

        Of several processes that learn together, all call this; the first one writes the states of all into one file.
        """
        path = self._save(name or checkpoint.checkpoint_name(self.iteration))
        self._named.add(path)
        if path in self._scheduled:
            self._scheduled.remove(path)
        return path

    def _save(self, name: str | Path) -> Path:
        if not Path(name).is_absolute():
            self._prepare_directories()
        path = self._checkpoint_path(name)
        with self.collector.quiet():  # until it is written: a state may be memory that the environment works in
            content = self._content()
            own = {name: content[name] for name in checkpoint.OWN_KEYS}
            own["algorithm"] = {name: content["algorithm"][name] for name in self.algorithm.own_keys}
            peers = distributed.gather_object(own if not distributed.is_main_process() else {})[1:]
            if peers:
                content[checkpoint.PEERS] = peers
            distributed.on_main_process(lambda: checkpoint.save(path, content))
        if content["env"] is None and content["collector"]:
            self.tell(
                f"{type(self.env).__name__} cannot save its state: a resumed run will start new episodes there.",
                once=True,
            )
        return path

    def _prepare_directories(self) -> None:
        """Get ready for the first file."""
        return

    def _content(self) -> dict[str, Any]:
        return {
            **self._learning_state(),
            "env": self.env.state_dict(),
            "rng": checkpoint.rng_state(),
            "iteration": self.iteration,
            "total_steps": self.total_steps,
            "num_evaluations": self.num_evaluations,
            "optimizer_steps": self.optimizer_steps,
            "config": self.config,
            **({} if self.config else {RECIPE: self._recipe}),
        }

    def _learning_state(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "collector": self.collector.state_dict(),
        }

    def load_checkpoint(self, name: str | Path) -> None:
        """Go on from a checkpoint: weights, optimizer, counters, random states, environments.

        A relative name lies in ``save_dir``, or else in the working directory, as what ``save_checkpoint`` returned.

        Raises:
            CheckpointError: when a part of it cannot be used; policy, algorithm and collector then stay as they were.
        """
        path = self._found_checkpoint(name)
        content = checkpoint.of_rank(checkpoint.load(path), distributed.rank(), distributed.world_size(), path)
        with self.collector.quiet():
            before = copy.deepcopy(self._learning_state())
            try:
                self._restore(content, path, before["collector"])
            except Exception:
                self.policy.load_state_dict(before["policy"])
                self.algorithm.load_state_dict(before["algorithm"])
                self.collector.load_state_dict(before["collector"])
                raise
            self.iteration, self.total_steps = content["iteration"], content["total_steps"]
            self.num_evaluations, self.optimizer_steps = content["num_evaluations"], content["optimizer_steps"]
            if content["rng"] is None:
                distributed.seed_per_rank(self.cfg.seed, self.total_steps)
            else:
                checkpoint.set_rng_state(content["rng"])
        if path.parent == self.save_dir and path.name == checkpoint.checkpoint_name(self.iteration):
            self._saved_iteration = self.iteration

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

    def _save_once(self) -> None:
        """Save the numbered checkpoint of this iteration, unless that was done, and delete old ones."""
        if self.save_dir is None or self._saved_iteration == self.iteration:
            return
        path = self._save(checkpoint.checkpoint_name(self.iteration))
        self._note_saved(path)

    def _note_saved(self, path: Path) -> None:
        self._saved_iteration = self.iteration
        if path in self._scheduled:
            self._scheduled.remove(path)
        if path not in self._named:
            self._scheduled.append(path)
        while self.cfg.keep_checkpoints and len(self._scheduled) > self.cfg.keep_checkpoints:
            old = self._scheduled.pop(0)
            if distributed.is_main_process():
                old.unlink(missing_ok=True)

    def adopt_checkpoints(self) -> None:
        """Take the numbered checkpoints in ``save_dir`` for this run's own, which give way to newer ones."""
        if self.save_dir is not None:
            self._scheduled = checkpoint.numbered(self.save_dir, self.iteration)

    def _take_snapshot(self) -> None:
        """Keep what the next iteration begins with, where it is likely to take long and the checkpoint is older."""
        self._snapshot = None
        expected = self._iteration_seconds[self._evaluates(self.iteration + 1)]
        too_dear = self._snapshot_seconds > SNAPSHOT_SHARE * expected
        if self.save_dir is None or self._saved_iteration == self.iteration or not distributed.is_main_process():
            return
        if expected < SLOW_ITERATION or too_dear:
            return
        begin = time.monotonic()
        with self.collector.quiet():
            content = self._content() if distributed.world_size() == 1 else self._content_alone()
            if checkpoint.num_bytes(content) > MAX_SNAPSHOT_BYTES:
                self._snapshot_seconds = math.inf
                return
            self._snapshot = checkpoint.copied(content)
        self._snapshot_seconds = time.monotonic() - begin

    def _save_snapshot(self) -> None:
        """Go back to the beginning of the iteration that was given up, and save it if that was kept."""
        if self._snapshot is None or self.save_dir is None:
            return
        content, self._snapshot = self._snapshot, None
        self.iteration, self.total_steps = content["iteration"], content["total_steps"]
        path = self.save_dir / checkpoint.checkpoint_name(self.iteration)
        checkpoint.save(path, content)
        self._note_saved(path)

    def _save_in_time(self) -> None:
        """Save what the running iteration began with, if that was kept; it goes on meanwhile, in another thread."""
        content = self._snapshot
        if content is not None and self.save_dir is not None:
            with suppress(RunDirError):
                checkpoint.save(self.save_dir / checkpoint.checkpoint_name(content["iteration"]), content)

    def _save_before_leaving(self) -> None:
        """Save after an exception, if that still makes sense and works; it must not hide what went wrong."""
        try:
            if not self._between_steps:
                self._save_snapshot()
            elif distributed.world_size() == 1:
                self._save_once()
            elif (
                distributed.is_main_process() and self.save_dir is not None and self._saved_iteration != self.iteration
            ):
                self._save_alone(self.save_dir)
        except Exception as error:
            self.tell(f"No checkpoint could be saved at iteration {self.iteration}: {error} {self._last_good()}")

    def _content_alone(self) -> dict[str, Any]:
        return {**self._content(), "env": None, checkpoint.PEERS: [None] * (distributed.world_size() - 1)}

    def _save_alone(self, save_dir: Path) -> None:
        """Save without the states of the other processes, which may be gone; whoever resumes starts new episodes."""
        with self.collector.quiet():
            checkpoint.save(save_dir / checkpoint.checkpoint_name(self.iteration), self._content_alone())

    def _checkpoint_path(self, name: str | Path) -> Path:
        path = Path(name)
        if path.is_absolute():
            return path
        if self.save_dir is None:
            raise CheckpointError(
                f"Checkpoint '{name}' has no place: give the runner a save_dir, or an absolute path here."
            )
        return self.save_dir / path

    def _found_checkpoint(self, name: str | Path) -> Path:
        in_save_dir = self.save_dir is not None and (self.save_dir / name).exists()
        return Path(name) if Path(name).exists() and not in_save_dir else self._checkpoint_path(name)

    def _last_good(self) -> str:
        paths = checkpoint.numbered(self.save_dir, self.iteration) if self.save_dir is not None else []
        return f"The last good checkpoint is {paths[-1]}." if paths else "No checkpoint had been saved."

    def _evaluates(self, iteration: int) -> bool:
        return self.cfg.eval_interval > 0 and iteration % self.cfg.eval_interval == 0

    def tell(self, text: str, once: bool = False) -> None:
        """Show a line to the user, on the console or else as a warning; with ``once`` only the first time."""
        if (once and text in self._told) or not distributed.is_main_process():
            return
        self._told.add(text)
        for logger in self.loggers:
            logger.message(text)
        if not any(isinstance(logger, ConsoleLogger) for logger in self.loggers):
            logging.getLogger("apexrl").warning(text)
