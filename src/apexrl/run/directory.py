"""From a configuration to a running trainer: new runs, resumed runs, and trained policies."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apexrl.agent import Trainer, checkpoint
from apexrl.agent.directories import write_config
from apexrl.agent.loggers import Logger, WandbLogger
from apexrl.agent.recipe import RECIPE, Recipe, read_recipe
from apexrl.core import plugins
from apexrl.core.errors import ConfigError, RunDirError
from apexrl.core.system import distributed, files
from apexrl.run.build import decided, make_trainer, prepare_device
from apexrl.run.config import Config, make_config
from apexrl.run.loading import with_overrides
from apexrl.run.sources import is_recipe, read_config
from apexrl.run.suite import FINAL_RESULTS, IMITATION, imitation_config

# What may change when a run is resumed: how long, how often, and where to; not what is learned.
RESUMABLE_SECTIONS = ("training", "logging", "features")
RESUMABLE_FIELDS = ("algo.save_replay",)
FIXED_FIELDS = ("training.seed", "training.init_from")


def start(config: Config, run_dir: Path | None, loggers: Sequence[Logger] = (), *, name: str = "run") -> Trainer:
    """Create a trainer in a new run directory, which gets the whole configuration.

    ``run_dir`` is empty or not there yet; None creates ``runs/<name>-<time>``. ``loggers`` are besides its files.
    """
    config = _joined(config)
    made = run_dir is None or not run_dir.exists()
    run_dir = distributed.on_main_process(lambda: claim(new_run_dir(name) if run_dir is None else run_dir))
    lock = files.DirectoryLock(run_dir)
    distributed.on_main_process(lock.acquire)
    try:
        distributed.on_main_process(lambda: write_config(run_dir, config.to_dict()))
        trainer = _opened(config, run_dir, loggers, lock)
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | SystemExit) and config.records_demos
        is_kept = stopped or (run_dir / IMITATION).exists()
        if distributed.is_main_process() and not is_kept:  # delete what was written into an empty directory
            for path in run_dir.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
        lock.release()
        if distributed.is_main_process() and made and not is_kept:
            with contextlib.suppress(OSError):  # another process may still be leaving; it must not hide what went wrong
                run_dir.rmdir()
        raise
    if warning := config.algo.warning(config.training.init_from):
        trainer.tell(warning)
    return trainer


def _opened(config: Config, run_dir: Path, loggers: Sequence[Logger], lock: files.DirectoryLock) -> Trainer:
    """Create the trainer of a run directory, at its newest checkpoint; when that fails, what was opened is closed."""
    opened: Sequence[Logger | Trainer] = []
    try:
        recipe, has_any = _stored_recipe(run_dir), bool(checkpoint.numbered(checkpoint.directory_of(run_dir)))
        init_from = "" if has_any else first_weights(config, run_dir, loggers)
        online = opened = _wandb(config, run_dir)
        trainer = make_trainer(config, run_dir, [*online, *loggers], init_from=init_from, lock=lock, recipe=recipe)
        opened = [trainer]
        if has_any:
            trainer.checkpointer.load_newest()
    except BaseException:
        for each in opened:
            each.close()
        raise
    return trainer


def _joined(config: Config) -> Config:
    """Join the other processes, where there are any, and decide what the run directory shall say from now on."""
    device = prepare_device(config)
    distributed.join_ranks(device)
    return decided(config, device)


def new_run_dir(name: str) -> Path:
    """Create a directory ``runs/<name>-<time>`` of its own, also for runs that start in the same second."""
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        run_dir = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunDirError(f"{run_dir} cannot be created: {error.strerror}. Name another with --run-dir.") from error
        return run_dir
    raise AssertionError


def first_weights(config: Config, run_dir: Path, loggers: Sequence[Logger]) -> str:
    """Return the run or checkpoint that a new run takes its first weights from; an empty string draws them.

    Where the configuration asks for it, demonstrations are recorded and imitated first, which may take minutes. What
    was done before a kill is not done again: neither tasks that are recorded, nor updates before the last checkpoint.
    """

    def tell(text: str) -> None:
        for logger in loggers:
            logger.message(text)

    imitation = config.imitation
    if imitation is not None:
        # What is wrong with the run itself is better said now than after the imitation.
        make_trainer(replace(config, algo=config.algo.without_demos()), run_dir).close()
    try:
        if config.records_demos:
            distributed.on_main_process(lambda: config.task.record_demos(run_dir, tell))
        if imitation is None:
            return config.training.init_from
        return str(_imitate(imitation_config(config, imitation, run_dir), run_dir / IMITATION, loggers, tell))
    except (KeyboardInterrupt, SystemExit):
        tell(f"Stopped before the first rollout. Resume with: apexrl train --resume {run_dir}{plugins.flag()}")
        raise


def _imitate(config: Config, run_dir: Path, loggers: Sequence[Logger], tell: Callable[[str], None]) -> Path:
    """Train the imitation that a run begins with, a run in its directory; returns that when it is complete."""
    if (run_dir / FINAL_RESULTS).is_file():
        return run_dir
    if distributed.world_size() > 1:
        raise ConfigError(
            f"algo.imitation_updates is done in one process, not in {distributed.world_size()}: imitate first with "
            "--algo.name bc, without torchrun, and name that run with training.init_from."
        )
    tell(f"Imitating the demonstrations: {config.algo.num_updates:,} updates, in {run_dir}")
    loggers = [logger for logger in loggers if logger.shows_stages]
    has_begun = (run_dir / "config.yaml").is_file()
    trainer = _resume(config, run_dir, loggers) if has_begun else start(config, run_dir, loggers)
    try:
        trainer.learn()
        if episodes := trainer.cfg.final_eval_episodes:
            tell(f"After imitation: {trainer.evaluate(episodes).summary()}")
        config.task.write_results(run_dir, trainer)
    finally:
        trainer.close()
    return run_dir


def resume(run_dir: Path, overrides: Iterable[tuple[str, str]] = (), loggers: Sequence[Logger] = ()) -> Trainer:
    """Resume from the newest checkpoint of a run that can be read, or from the start when it has none yet.

    Log lines after the checkpoint are dropped, because they are written again. Nothing changes when this fails.
    """
    return _resume(resumed_config(run_dir, overrides), run_dir, loggers)


def _resume(config: Config, run_dir: Path, loggers: Sequence[Logger]) -> Trainer:
    config = _joined(config)
    lock = files.DirectoryLock(run_dir)
    distributed.on_main_process(lock.acquire)
    try:
        return _opened(config, run_dir, loggers, lock)
    except BaseException:
        lock.release()
        raise


def _stored_recipe(run_dir: Path) -> Recipe | None:
    """Return how the parts of a run that was started in Python are created; None for a run of the command line."""
    raw, found = read_config(run_dir / "config.yaml"), checkpoint.numbered(checkpoint.directory_of(run_dir))
    if not is_recipe(raw):
        return None
    if not found:
        raise RunDirError(f"{run_dir} was started in Python and has no checkpoint yet; run its script again.")
    return read_recipe({RECIPE: raw}, found[-1])


def resumed_config(run_dir: Path, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Read a run's configuration and apply what may change; what may not can be repeated as it is."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise RunDirError(f"{run_dir} is not a run directory: it has no config.yaml. Name one of 'apexrl train'.")
    recipe = _stored_recipe(run_dir)
    return changed_config(read_config(path) if recipe is None else recipe.sections(), list(overrides))


def changed_config(stored: Mapping[str, Any], overrides: Sequence[tuple[str, str]]) -> Config:
    """Apply overrides to the configuration of a run that exists; refuses what may not change."""
    before, after = make_config(stored), make_config(with_overrides(stored, overrides))
    collectors = {before.training.collector, after.training.collector}
    if len(collectors) > 1 and "ray" in collectors:
        raise ConfigError(
            f"training.collector cannot change between '{before.training.collector}' and '{after.training.collector}' "
            "when a run is resumed: the environments live elsewhere. Leave it out, or start a new run."
        )
    for name, text in overrides:
        section, key, *_ = name.split(".")
        is_fixed = (section not in RESUMABLE_SECTIONS and name not in RESUMABLE_FIELDS) or name in FIXED_FIELDS
        if is_fixed and getattr(getattr(before, section), key) != getattr(getattr(after, section), key):
            raise ConfigError(
                f"'--{name} {text}' cannot change when a run is resumed; only {', '.join(RESUMABLE_SECTIONS)} can "
                f"(not {' and '.join(FIXED_FIELDS)}). Leave it out, or start a new run from the weights of this one: "
                f"apexrl train PRESET --{name} {text} --training.init_from RUN_DIR"
            )
    return after


def _wandb(config: Config, run_dir: Path) -> list[Logger]:
    """Make the logger that sends numbers to Weights & Biases, if it is wanted."""
    mode = config.logging.wandb
    if mode == "disabled" or not distributed.is_main_process():
        return []
    path = run_dir / "wandb_id.txt"
    if not path.exists():  # the id stays with the run directory, and no other run has it
        path.write_text(uuid.uuid4().hex[:12])
    project, name, run_id = config.logging.wandb_project, run_dir.resolve().name, path.read_text().strip()
    return [WandbLogger(run_dir, project=project, mode=mode, run_id=run_id, name=name, config=config.to_dict())]


def claim(run_dir: Path) -> Path:
    """Make sure that a new run overwrites nothing and can be written; returns its directory."""
    if run_dir.exists() and not run_dir.is_dir():
        raise RunDirError(f"--run-dir {run_dir} is a file; name a new directory.")
    leftovers = (files.DirectoryLock.NAME, f".config.yaml{files.PART}")  # of a process that was killed as it began
    if run_dir.is_dir() and any(path.name not in leftovers for path in run_dir.iterdir()):
        raise RunDirError(f"--run-dir {run_dir} is not empty; name a new directory, or use --resume {run_dir}.")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(
            f"--run-dir {run_dir} cannot be created: {error.strerror}; name another directory."
        ) from error
    if not os.access(run_dir, os.W_OK):
        raise RunDirError(f"--run-dir {run_dir} cannot be written; name another directory.")
    return run_dir
