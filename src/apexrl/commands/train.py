"""``apexrl train``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apexrl.commands.common import AddCommand, Overrides, progress
from apexrl.commands.evaluate import show_tasks, write_video
from apexrl.errors import ConfigError, EnvError, RunDirError

if TYPE_CHECKING:
    from apexrl.agent import Trainer
    from apexrl.config import Config


def register(command: AddCommand) -> None:
    """Add the commands."""
    train = command("train", "Train a policy.", _train)
    train.more_help = _field_list
    train.add_argument("preset", nargs="?", help="a preset (see 'apexrl list') or a YAML file; default lift_ppo")
    train.add_argument("--config_path", "--config-path", metavar="FILE", help="a YAML file, instead of a preset")
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="a new directory; default runs/<preset>-<time>")
    train.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on from the newest checkpoint of a run")


def _train(options: argparse.Namespace, overrides: Overrides) -> int:
    from apexrl import run
    from apexrl.config import DEFAULT_PRESET, load_config
    from apexrl.loggers import ConsoleLogger

    if options.preset and options.config_path:
        raise ConfigError("Give a preset or --config_path, not both.")
    source = options.config_path or options.preset
    console = ConsoleLogger()
    if options.resume is not None:
        run_dir = options.resume
        if options.run_dir is not None:
            raise ConfigError(f"--resume {run_dir} goes on in its own directory; leave --run-dir out.")
        if source is not None:
            # The run directory says what is trained; a preset beside it is allowed when it names the same task.
            _check_same_run(load_config(source, overrides), source, run_dir)
        trainer = run.resume(run_dir, overrides, [console])
        console.message(f"Resumed {run_dir} at iteration {trainer.iteration}, step {trainer.total_steps:,}.")
    else:
        source = source or DEFAULT_PRESET
        config = load_config(source, overrides)
        trainer = run.start(config, options.run_dir, [console], name=Path(source).stem)
        assert trainer.run_dir is not None
        run_dir = trainer.run_dir
        console.message(f"Training {config.task.id} with {config.algo.name} in {run_dir}")
    try:
        trainer.learn()
        console.close()
        _finish(trainer, run.resumed_config(run_dir), run_dir)
    except (KeyboardInterrupt, SystemExit) as stop:
        console.close()
        print(f"\nStopped at step {trainer.total_steps:,}. Resume with: apexrl train --resume {run_dir}")
        return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130
    finally:
        trainer.close()
    return 0


def _check_same_run(asked: Config, source: str, run_dir: Path) -> None:
    from apexrl.run import resumed_config

    stored = resumed_config(run_dir)
    if (asked.task.id, asked.algo.name) != (stored.task.id, stored.algo.name):
        raise ConfigError(
            f"--resume {run_dir} trains {stored.task.id} with {stored.algo.name}, but '{source}' is {asked.task.id} "
            f"with {asked.algo.name}; leave '{source}' out."
        )


def _finish(trainer: Trainer, config: Config, run_dir: Path) -> None:
    """Show what came out: evaluation, picture, video; of several processes that learned together, the first shows."""
    from apexrl import distributed
    from apexrl.plots import plot_runs
    from apexrl.sections import SuiteConfig
    from apexrl.suite_run import write_final_results

    episodes = trainer.cfg.final_eval_episodes
    if episodes:
        with progress("Evaluating", episodes) as tell:
            result = trainer.evaluate(episodes, on_progress=tell)
    if not distributed.is_first():
        return
    if episodes:
        print(f"Evaluation: {result.summary()}")
        show_tasks(result, run_dir, config.features.save_plot)
    if isinstance(config.task, SuiteConfig):
        print(f"Results: {write_final_results(run_dir, trainer.iteration, trainer.total_steps)}")
    if config.features.save_plot:
        try:
            print(f"Learning curve: {plot_runs([run_dir], run_dir / 'curve.png')}")
        except RunDirError as error:
            print(f"No learning curve: {error}")
    if config.features.save_video:
        try:
            write_video(trainer.env.spawn(1), trainer.policy, run_dir / "video.mp4", config.training.seed, 3)
        except EnvError as error:
            print(f"No video: {error}")
    print(f"Run directory: {run_dir} (apexrl eval {run_dir}, apexrl play {run_dir}, tensorboard --logdir {run_dir})")


def _field_list() -> str:
    from dataclasses import fields

    from apexrl.config import CHOICES, SECTIONS, field_help

    lines = ["", "configuration (--section.key value):"]
    for section, cls in ((section, cls) for section, classes in SECTIONS.items() for cls in classes):
        texts, defaults = field_help(cls), cls()
        if len(SECTIONS[section]) > 1:
            lines.append(f"{CHOICES[cls]}:")
        for entry in fields(cls):
            default = _show(getattr(defaults, entry.name))
            lines.append(f"  --{section}.{entry.name}  [{default}]  {texts[entry.name]}")
    return "\n".join(lines) + "\n"


def _show(value: Any) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)
