"""``apexrl train``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from apexrl.agent import Trainer
from apexrl.agent.loggers import ConsoleLogger
from apexrl.agent.trainer import NO_EVALUATION
from apexrl.cli.common import Overrides, progress
from apexrl.cli.evaluate import show_tasks, write_video
from apexrl.cli.seeds import resume_seeds, show_curve, start_seeds
from apexrl.core import plugins
from apexrl.core.errors import ConfigError, EnvError
from apexrl.core.system import distributed
from apexrl.experiments import seeds
from apexrl.run import directory as run
from apexrl.run.config import Config
from apexrl.run.loading import load_config
from apexrl.run.sources import default_source

LONG_EPISODE = 300
"""Steps; of episodes of this length or longer the video shows one, otherwise three."""


def run_train(options: argparse.Namespace, overrides: Overrides) -> int:
    """Train one seed or several, new or resumed."""
    source = options.config_path or options.preset
    if options.resume is not None and options.run_dir is not None:
        raise ConfigError(f"--resume {options.resume} stays in its own directory; leave --run-dir out.")
    if options.seeds is not None or (options.resume is not None and (options.resume / seeds.FILE).is_file()):
        return _train_seeds(options, source, overrides)
    if options.jobs is not None:
        raise ConfigError(f"--jobs {options.jobs} is for several seeds; add --seeds, or leave it out.")
    console = ConsoleLogger()
    if options.resume is not None:
        run_dir = options.resume
        if source is not None:
            # The run directory says what is trained; a preset beside it is allowed when it names the same task.
            asked, stored = load_config(source, overrides), run.resumed_config(run_dir)
            if (asked.task.id, asked.algo.name) != (stored.task.id, stored.algo.name):
                raise ConfigError(
                    f"--resume {run_dir} trains {stored.task.id} with {stored.algo.name}, but '{source}' is "
                    f"{asked.task.id} with {asked.algo.name}; leave '{source}' out."
                )
        trainer = run.resume(run_dir, overrides, [console])
        console.message(f"Resumed {run_dir} at iteration {trainer.iteration}, step {trainer.total_steps:,}.")
        if trainer.is_finished:
            field, done = "total_timesteps", trainer.total_steps
            if trainer.cfg.num_train_steps:
                field, done = "num_train_steps", trainer.iteration
            limit = getattr(trainer.cfg, field)
            console.message(
                f"This run is finished: training.{field} is {limit:,}. To train longer: "
                f"apexrl train --resume {run_dir}{plugins.flag()} --training.{field} {2 * max(limit, done)}"
            )
    else:
        config, name = _new_config(source, overrides, console.message)
        trainer = run.start(config, options.run_dir, [console], name=name)
        assert trainer.run_dir is not None
        run_dir = trainer.run_dir
        console.message(f"Training {config.task.id} with {config.algo.name} in {run_dir}")
    if (trainer.cfg.eval_interval or trainer.cfg.final_eval_episodes) and not trainer.can_evaluate:
        trainer.tell(NO_EVALUATION, once=True)
    is_complete = False
    try:
        trainer.learn()
        is_complete = True
        _finish(trainer, run.resumed_config(run_dir), run_dir)
    except (KeyboardInterrupt, SystemExit) as stop:
        shown = f"{run_dir}{plugins.flag()}"
        if is_complete:
            print(f"\nTraining is complete; 'apexrl eval {shown}' evaluates, 'apexrl play {shown}' renders the video.")
        else:
            where = f"iteration {trainer.iteration:,}, step {trainer.total_steps:,}"
            print(f"\nStopped at {where}. Resume with: apexrl train --resume {shown}")
        return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130
    finally:
        trainer.close()
    return 0


def _train_seeds(options: argparse.Namespace, source: str | None, overrides: Overrides) -> int:
    """Train several seeds, new ones or those of a directory."""
    num_jobs = options.jobs or 1
    if options.resume is None:
        config, name = _new_config(source, overrides, print)
        return start_seeds(config, options.seeds, options.run_dir, name, num_jobs)
    if source is not None:
        raise ConfigError(f"--resume {options.resume} knows what its seeds train; leave '{source}' out.")
    return resume_seeds(options.resume, options.seeds, overrides, num_jobs)


def _new_config(source: str | None, overrides: Overrides, tell: Callable[[str], None]) -> tuple[Config, str]:
    """Return the configuration of a new run, and a name for its directory; says what it starts from."""
    note = ""
    if source is None:
        source, note = default_source(overrides)
    config = load_config(source, overrides)
    if note:
        tell(note)
    return config, re.sub(r"[^\w.-]+", "-", config.task.id if source is None else Path(source).stem)


def _finish(trainer: Trainer, config: Config, run_dir: Path) -> None:
    """Show what came out: evaluation, images, video; of several processes that learned together, the first shows."""
    episodes = trainer.cfg.final_eval_episodes if trainer.can_evaluate else 0
    if episodes:
        with progress("Evaluating", episodes) as tell:
            result = trainer.evaluate(episodes, on_progress=tell)
    if not distributed.is_main_process():
        return
    if episodes:
        print(f"Evaluation: {result.summary()}")
        show_tasks(result, run_dir / "tasks.png" if config.features.save_plot else None)
    if (results := config.task.write_results(run_dir, trainer)) is not None:
        print(f"Results: {results}")
    if config.features.save_plot:
        show_curve(run_dir)
    if config.features.save_video:
        is_long = (trainer.env.max_episode_steps or LONG_EPISODE) >= LONG_EPISODE
        try:
            env, path = trainer.env.spawn(1), run_dir / "video.mp4"
            write_video(env, trainer.policy, path, config.training.seed, 1 if is_long else 3)
        except EnvError as error:
            print(f"No video: {error}")
    shown = f"{run_dir}{plugins.flag()}"
    print(f"Run directory: {run_dir} (apexrl eval {shown}, apexrl play {shown}, tensorboard --logdir {run_dir})")
    if trainer.stop_when and trainer.stop_when.warning:
        print(trainer.stop_when.warning)
    if trainer.no_step_warning():
        print("WARNING: nothing was learned: this run took no optimizer step; its last message above says what to do.")
