"""``apexrl train``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apexrl.cli.common import AddCommand, Overrides, positive, progress, warn
from apexrl.cli.evaluate import show_tasks, write_video
from apexrl.cli.seeds import resume_seeds, start_seeds
from apexrl.core.errors import ConfigError, EnvError, RunDirError

if TYPE_CHECKING:
    from apexrl.agent import Trainer
    from apexrl.run.config import Config


def register(command: AddCommand) -> None:
    """Add the commands."""
    train = command("train", "Train a policy.", _train)
    train.more_help = _field_list
    train.add_argument("preset", nargs="?", help="a preset (see 'apexrl list') or a YAML file; default lift_ppo")
    train.add_argument("--config_path", "--config-path", metavar="FILE", help="a YAML file, instead of a preset")
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="a new directory; default runs/<preset>-<time>")
    train.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on from the newest checkpoint of a run")
    train.add_argument("--seeds", metavar="N|A,B,…", help="train N seeds, or these, and say what they give together")
    train.add_argument("--jobs", type=positive, metavar="N", help="seeds that are trained at once; default 1")


def _train(options: argparse.Namespace, overrides: Overrides) -> int:
    from apexrl.agent.loggers import ConsoleLogger
    from apexrl.agent.trainer import NO_EVALUATION
    from apexrl.experiments import seeds
    from apexrl.run import directory as run
    from apexrl.run.loading import DEFAULT_PRESET, load_config

    if options.preset and options.config_path:
        raise ConfigError("Give a preset or --config_path, not both.")
    source = options.config_path or options.preset
    is_seeds = options.seeds is not None or (options.resume is not None and (options.resume / seeds.FILE).is_file())
    if options.jobs is not None and not is_seeds:
        raise ConfigError(f"--jobs {options.jobs} is for several seeds; add --seeds, or leave it out.")
    if is_seeds:
        return _train_seeds(options, source, overrides)
    console = ConsoleLogger()
    if options.resume is not None:
        run_dir = options.resume
        _require_no_run_dir(options)
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
    if (trainer.cfg.eval_interval or trainer.cfg.final_eval_episodes) and not trainer.can_evaluate:
        trainer.tell(NO_EVALUATION, once=True)
    try:
        trainer.learn()
        console.close()
        _finish(trainer, run.resumed_config(run_dir), run_dir)
    except (KeyboardInterrupt, SystemExit) as stop:
        console.close()
        where = f"iteration {trainer.iteration:,}, step {trainer.total_steps:,}"
        print(f"\nStopped at {where}. Resume with: apexrl train --resume {run_dir}")
        return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130
    finally:
        trainer.close()
    return 0


def _train_seeds(options: argparse.Namespace, source: str | None, overrides: Overrides) -> int:
    """Train several seeds, new ones or those of a directory."""
    from apexrl.run.loading import DEFAULT_PRESET, load_config

    if options.resume is None:
        source = source or DEFAULT_PRESET
        config = load_config(source, overrides)
        return start_seeds(config, options.seeds, options.run_dir, Path(source).stem, options.jobs or 1)
    _require_no_run_dir(options)
    if source is not None:
        raise ConfigError(f"--resume {options.resume} knows what its seeds train; leave '{source}' out.")
    return resume_seeds(options.resume, options.seeds, overrides, options.jobs or 1)


def _require_no_run_dir(options: argparse.Namespace) -> None:
    if options.run_dir is not None:
        raise ConfigError(f"--resume {options.resume} goes on in its own directory; leave --run-dir out.")


def _check_same_run(asked: Config, source: str, run_dir: Path) -> None:
    from apexrl.run.directory import resumed_config

    stored = resumed_config(run_dir)
    if (asked.task.id, asked.algo.name) != (stored.task.id, stored.algo.name):
        raise ConfigError(
            f"--resume {run_dir} trains {stored.task.id} with {stored.algo.name}, but '{source}' is {asked.task.id} "
            f"with {asked.algo.name}; leave '{source}' out."
        )


def _finish(trainer: Trainer, config: Config, run_dir: Path) -> None:
    """Show what came out: evaluation, picture, video; of several processes that learned together, the first shows."""
    from apexrl.core.system import distributed
    from apexrl.experiments.plots import plot_runs

    episodes = trainer.cfg.final_eval_episodes if trainer.can_evaluate else 0
    if episodes:
        with progress("Evaluating", episodes) as tell:
            result = trainer.evaluate(episodes, on_progress=tell)
    if not distributed.is_main_process():
        return
    if episodes:
        print(f"Evaluation: {result.summary()}")
        show_tasks(result, run_dir, config.features.save_plot)
    if (results := config.task.write_results(run_dir, trainer)) is not None:
        print(f"Results: {results}")
    if config.features.save_plot:
        try:
            print(f"Learning curve: {plot_runs([run_dir], run_dir / 'curve.png', warn)}")
        except RunDirError as error:
            print(f"No learning curve: {error}")
    if config.features.save_video:
        try:
            write_video(trainer.env.spawn(1), trainer.policy, run_dir / "video.mp4", config.training.seed, 3)
        except EnvError as error:
            print(f"No video: {error}")
    print(f"Run directory: {run_dir} (apexrl eval {run_dir}, apexrl play {run_dir}, tensorboard --logdir {run_dir})")
    if trainer.no_step_warning():
        print("WARNING: nothing was learned: this run took no optimizer step; its last message above says what to do.")


def _field_list() -> str:
    from dataclasses import fields

    from apexrl.run.config import CONFIG_SECTIONS, SECTION_CHOICES, field_help

    lines = ["", "configuration (--section.key value):"]
    for section, cls in ((section, cls) for section, classes in CONFIG_SECTIONS.items() for cls in classes):
        texts, defaults = field_help(cls), cls()
        if len(CONFIG_SECTIONS[section]) > 1:
            lines.append(f"{SECTION_CHOICES[cls]}:")
        for entry in fields(cls):
            default = _default_text(getattr(defaults, entry.name))
            lines.append(f"  --{section}.{entry.name}  [{default}]  {texts[entry.name]}")
    return "\n".join(lines) + "\n"


def _default_text(value: Any) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)
