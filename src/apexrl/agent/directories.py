"""The directory of a run: chosen at its first write, so that no run destroys another, and what every run has there."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from apexrl.agent import checkpoint
from apexrl.agent.schedule import Counters
from apexrl.core.errors import CheckpointError
from apexrl.core.system import distributed, files
from apexrl.core.system.provenance import add_start

CLAIM = ".run"
"""A file with the id of the run that a directory belongs to."""
CHECKPOINTS = "checkpoints"
RUN_FILES = (CLAIM, "config.yaml", "metrics.jsonl", "evaluations.jsonl", "events.out.tfevents.*", "*.pt")


class RunDirectories:
    """The directories of a run.

    Where one of them already holds a run, ``run_2`` (or ``run_3``, …) in both is used, unless a checkpoint was loaded
    from there, which continues that run. This is decided at the first write.

    Args:
        run_dir: of configuration, logs, evaluations and step tables; None writes none.
        save_dir: of checkpoints; ``checkpoints`` in ``run_dir`` when not given, and none without either.
        tell: shows a line to the user.
        lock: of ``run_dir``, held by this process: both directories are then this run's own.
        config: what ``config.yaml`` says.
        device: of the policy; recorded.
    """

    def __init__(
        self,
        run_dir: Path | str | None,
        save_dir: Path | str | None,
        tell: Callable[[str], None],
        lock: files.DirectoryLock | None = None,
        *,
        config: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.save_dir = Path(save_dir) if save_dir is not None else None
        if self.run_dir is not None and save_dir is None:
            self.save_dir = self.run_dir / CHECKPOINTS
        self._first_save_dir = self.save_dir
        self.tell, self.lock, self.config, self.device = tell, lock, dict(config), device
        self._continued_run: str | None = None
        """Id of the run in the directories, where this is the same one."""
        self._is_decided = False

    @property
    def all(self) -> list[Path]:
        """Those that there are."""
        return [path for path in (self.run_dir, self.save_dir) if path is not None]

    def prepare(self, iteration: int) -> None:
        """Get ready for the first write of a run that is at this iteration."""
        if self._is_decided:
            return
        self._is_decided = True
        if self.lock is None:
            self._choose(iteration)
        distributed.on_main_process(lambda: self._begin(iteration))

    def _choose(self, iteration: int) -> None:
        """Take the directories, or others inside of them where they hold another run."""
        name = distributed.on_main_process(lambda: _claim(self.all, self._continued_run))
        if name:
            self.run_dir = None if self.run_dir is None else self.run_dir / name
            self.save_dir = None if self.save_dir is None else self.save_dir / name
            places = ", ".join(dict.fromkeys(map(str, self.all)))
            self.tell(f"The directory holds another run; this one writes to {places}.")
        if self._continued_run is not None and self.save_dir is not None and distributed.is_main_process():
            # Their iterations come again; until then they must not be taken for the newest.
            for path in checkpoint.numbered(self.save_dir)[len(checkpoint.numbered(self.save_dir, iteration)) :]:
                path.rename(path.with_name(f"{path.name}.superseded"))

    def _begin(self, iteration: int) -> None:
        """Write what says what the run is; after a kill, delete what was left unfinished."""
        if self.run_dir is None:
            return
        for directory in self.all:
            files.remove_parts(directory)
        write_config(self.run_dir, self.config)
        add_start(self.run_dir, iteration, self.device)
        assert self.save_dir is not None
        link = self.run_dir / CHECKPOINTS
        if self.save_dir not in (self.run_dir, link):  # where every command looks for them
            with suppress(OSError):
                link.symlink_to(os.path.relpath(self.save_dir.resolve(), self.run_dir.resolve()))

    @contextmanager
    def training(self, counters: Counters, target: int) -> Iterator[None]:
        """Keep other processes out while a run trains until a number of steps, without what it wrote after now."""
        self.prepare(counters.iteration)
        if self.run_dir is None:
            yield
            return
        run_dir, lock = self.run_dir, self.lock or files.DirectoryLock(self.run_dir)

        def begin() -> None:
            lock.acquire()
            files.cut_json_lines(run_dir / "metrics.jsonl", counters.iteration)
            # The one at the end of training came after the checkpoint, which says how many came before it.
            evaluations = run_dir / "evaluations.jsonl"
            files.cut_json_lines(evaluations, counters.iteration, max_lines=counters.num_evaluations)
            training = self.config.get("training", {})
            if training.get("total_timesteps", target) != target:
                self.config["training"] = {**training, "total_timesteps": int(min(target, 2**53))}
                write_config(run_dir, self.config)

        distributed.on_main_process(begin)
        try:
            yield
        finally:
            if lock is not self.lock:
                lock.release()

    def note_loaded(self, path: Path) -> None:
        """Continue the run in the directories, if nothing was written yet and the checkpoint is from there."""
        if not self._is_decided:
            self._continued_run = _run_of(path, self.all)

    def checkpoint_path(self, name: str | Path) -> Path:
        """Return where a checkpoint is written; a relative name lies in ``save_dir``."""
        path = Path(name)
        if path.is_absolute():
            return path
        if self.save_dir is None:
            raise CheckpointError(
                f"Checkpoint '{name}' has no place: give the runner a save_dir, or an absolute path here."
            )
        return self.save_dir / path

    def find_checkpoint(self, name: str | Path) -> Path:
        """Return where a checkpoint is: in ``save_dir``, at this path, or in the directory that was first given."""
        places = (self.save_dir, Path(), self._first_save_dir)
        found = [place / name for place in places if place is not None and (place / name).exists()]
        return found[0] if found else self.checkpoint_path(name)

    def release(self) -> None:
        """Give the lock back."""
        if self.lock is not None:
            self.lock.release()


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration of a run; the file is replaced atomically."""
    files.replace_text(run_dir / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))


def _claim(directories: Sequence[Path], continued_run: str | None) -> str:
    """Take directories that hold no run, or subdirectories of them by one name; returns that name, or nothing.

    Directories of a run that is continued stay as they are.
    """
    if continued_run is not None:
        for directory in directories:
            _take(directory, continued_run)
        return ""
    run_id = uuid.uuid4().hex
    for number in itertools.count(1):
        name = f"run_{number}" if number > 1 else ""
        places = list(dict.fromkeys(directory / name for directory in directories))
        if not any(map(_holds_run, places)) and all(_take(place, run_id) for place in places):
            return name
    raise AssertionError("unreachable")


def _holds_run(directory: Path) -> bool:
    return any(next(directory.glob(pattern), None) is not None for pattern in RUN_FILES)


def _take(directory: Path, run_id: str) -> bool:
    """Write the id of a run into a directory, unless there is one."""
    with files.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with (directory / CLAIM).open("x", encoding="utf-8") as file:
                file.write(run_id)
        except FileExistsError:
            return False
    return True


def _run_of(path: Path, directories: Sequence[Path]) -> str | None:
    """Return the id of the run in the directories, if it is one run and the checkpoint is in one of them."""
    if path.parent.resolve() not in [directory.resolve() for directory in directories]:
        return None
    marks = [directory / CLAIM for directory in directories if _holds_run(directory)]
    run_ids = {mark.read_text(encoding="utf-8") if mark.is_file() else "" for mark in marks}
    return run_ids.pop() if len(run_ids) == 1 else None
