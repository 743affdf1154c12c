"""The command line: train, eval, play, plot, list, check-env."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apexrl.errors import ApexRLError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from apexrl.agent import Trainer
    from apexrl.config import Config

DESCRIPTION = """\
Train robot policies with reinforcement learning.

  apexrl train                                 train the default preset (lift_ppo)
  apexrl train cartpole_ppo --task.id Acrobot-v1 --training.seed 3
  apexrl train my_run.yaml --run-dir runs/mine
  apexrl train --resume runs/mine              go on after a kill, a crash or Ctrl-C
  apexrl eval runs/mine --episodes 200         success and return, with intervals
  apexrl play runs/mine                        write a video
  apexrl plot runs/a runs/b                    draw learning curves
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; problems that the user can mend give one message and exit code 2."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        if rest and options.command != "train":
            raise ConfigError(f"Unknown option '{rest[0]}'. 'apexrl {options.command} --help' lists all.")
        run: Callable[[argparse.Namespace, list[str]], int] = options.run
        return run(options, rest)
    except ApexRLError as error:
        print(f"apexrl: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"apexrl: {error.strerror or error}{where}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("apexrl: interrupted.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("apexrl", description=DESCRIPTION, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(
        name: str, help_text: str, run: Callable[[argparse.Namespace, list[str]], int]
    ) -> argparse.ArgumentParser:
        child = commands.add_parser(
            name, help=help_text, description=help_text, formatter_class=formatter, allow_abbrev=False
        )
        child.set_defaults(run=run)
        return child

    train = command("train", "Train a policy.", _train)
    train.epilog = _LazyFieldHelp()  # type: ignore[assignment]
    train.add_argument("preset", nargs="?", help="a preset (see 'apexrl list') or a YAML file; default lift_ppo")
    train.add_argument("--config_path", "--config-path", metavar="FILE", help="a YAML file, instead of a preset")
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="a new directory; default runs/<preset>-<time>")
    train.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on from the newest checkpoint of a run")

    evaluate = command("eval", "Evaluate a trained policy on whole episodes.", _eval)
    evaluate.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    evaluate.add_argument("--episodes", type=_positive, default=100, metavar="N", help="default 100")
    evaluate.add_argument(
        "--num-envs", type=_positive, default=None, metavar="N", help="default training.eval_num_envs"
    )
    evaluate.add_argument("--seed", type=int, default=1_000_003, help="of the episodes")
    evaluate.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mode")
    evaluate.add_argument("--csv", type=Path, metavar="DIR", help="write one table of steps for each environment")

    play = command("play", "Write a video of a trained policy.", _play)
    play.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    play.add_argument("--episodes", type=_positive, default=3, metavar="N", help="default 3")
    play.add_argument("--output", type=Path, metavar="FILE.mp4", help="default video.mp4 in the run directory")
    play.add_argument("--seed", type=int, default=1_000_003, help="of the episodes")

    plot = command("plot", "Draw the learning curves of runs.", _plot)
    plot.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    plot.add_argument("--output", type=Path, metavar="FILE.png", help="default curve.png in the first run directory")

    command("list", "List presets, tasks and algorithms.", _list)
    check = command("check-env", "Check that an environment keeps the contract.", _check_env)
    check.add_argument("id", help="a task that ships with the package, or a Gymnasium id")
    check.add_argument("--num-envs", type=_positive, default=4, metavar="N", help="default 4")
    return parser


class _LazyFieldHelp:
    """The list of configuration fields, read only when the help is shown."""

    def __mod__(self, _: Any) -> str:
        from dataclasses import fields

        from apexrl.config import SECTIONS, field_help

        lines = ["configuration (--section.key value):"]
        for section, cls in SECTIONS.items():
            texts, defaults = field_help(cls), cls()
            for entry in fields(cls):
                default = _show(getattr(defaults, entry.name))
                lines.append(f"  --{section}.{entry.name}  [{default}]  {texts[entry.name]}")
        return "\n".join(lines)

    def __contains__(self, _: str) -> bool:
        return False


def _show(value: Any) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got '{text}'")
    return number


def _overrides(rest: list[str]) -> list[tuple[str, str]]:
    """Read ``--section.key value`` and ``--section.key=value``."""
    found, position = [], 0
    while position < len(rest):
        word = rest[position]
        if not word.startswith("--"):
            raise ConfigError(f"Unexpected argument '{word}'; options look like --section.key value.")
        name, has_value, value = word[2:].partition("=")
        if "." not in name:
            known = ["run-dir", "resume", "config_path", "help"]
            raise ConfigError(f"Unknown option '--{name}'.{did_you_mean(name, known)} 'apexrl train --help' lists all.")
        if not has_value:
            position += 1
            if position == len(rest) or rest[position].startswith("--"):
                raise ConfigError(f"Option '--{name}' needs a value.")
            value = rest[position]
        found.append((name, value))
        position += 1
    return found


def _train(options: argparse.Namespace, rest: list[str]) -> int:
    from apexrl import run
    from apexrl.config import DEFAULT_PRESET, load_config
    from apexrl.loggers import ConsoleLogger

    overrides = _overrides(rest)
    console = ConsoleLogger()
    if options.resume is not None:
        if options.preset or options.config_path:
            # The run directory says what is trained; a preset beside it is allowed when it names the same task.
            _check_same_run(options.preset or options.config_path, options.resume)
        run_dir = options.resume
        trainer = run.resume(run_dir, overrides, [console])
        console.message(f"Resumed {run_dir} at iteration {trainer.iteration}, step {trainer.total_steps:,}.")
    else:
        if options.preset and options.config_path:
            raise ConfigError("Give a preset or --config_path, not both.")
        source = options.config_path or options.preset or DEFAULT_PRESET
        config = load_config(source, overrides)
        run_dir = options.run_dir or Path("runs") / f"{Path(source).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        trainer = run.start(config, run_dir, [console])
        console.message(f"Training {config.task.id} with {config.algo.name} in {run_dir}")
    try:
        trainer.learn()
        console.close()
        _finish(trainer, run.resumed_config(run_dir), run_dir)
    except KeyboardInterrupt:
        console.close()
        print(f"\nStopped at step {trainer.total_steps:,}. Resume with: apexrl train --resume {run_dir}")
        return 130
    finally:
        trainer.close()
    return 0


def _check_same_run(source: str, run_dir: Path) -> None:
    from apexrl.config import load_config
    from apexrl.run import resumed_config

    asked, stored = load_config(source), resumed_config(run_dir)
    if (asked.task.id, asked.algo.name) != (stored.task.id, stored.algo.name):
        raise ConfigError(
            f"--resume {run_dir} trains {stored.task.id} with {stored.algo.name}, but '{source}' is {asked.task.id} "
            f"with {asked.algo.name}; leave '{source}' out."
        )


def _finish(trainer: Trainer, config: Config, run_dir: Path) -> None:
    """Show what came out: evaluation, picture, video."""
    from apexrl.plots import plot_runs

    episodes = config.training.final_eval_episodes
    if episodes:
        trainer.eval_env = None
        with _progress("Evaluating", episodes) as tell:
            result = trainer.evaluate(episodes, on_progress=tell)
        print(f"Evaluation: {result.summary()}")
    if config.features.save_plot:
        print(f"Learning curve: {plot_runs([run_dir], run_dir / 'curve.png')}")
    if config.features.save_video:
        _video(trainer.env.spawn(1), trainer.policy, run_dir / "video.mp4", config.training.seed, 3)
    print(f"Run directory: {run_dir} (apexrl eval {run_dir}, apexrl play {run_dir}, tensorboard --logdir {run_dir})")


def _video(env: Any, policy: Any, path: Path, seed: int, episodes: int) -> bool:
    from apexrl.errors import EnvError
    from apexrl.evaluation import record_video

    try:
        print(f"Video: {record_video(env, policy, path, seed=seed, num_episodes=episodes)}")
    except EnvError as error:
        print(f"No video: {error}")
        return False
    finally:
        env.close()
    return True


def _eval(options: argparse.Namespace, _: list[str]) -> int:
    from apexrl.evaluation import evaluate, save_step_csvs
    from apexrl.run import load_trained

    trained = load_trained(options.source)
    num_envs = min(options.num_envs or trained.config.training.eval_num_envs, options.episodes)
    env = trained.make_env(num_envs)
    with _progress("Evaluating", options.episodes) as tell:
        result = evaluate(
            env,
            trained.policy,
            options.episodes,
            deterministic=not options.stochastic,
            seed=options.seed,
            record_steps=options.csv is not None,
            on_progress=tell,
        )
    env.close()
    print(f"{trained.checkpoint}: {result.summary()}")
    for name, value in result.logs().items():
        print(f"  {name} {value:.4g}")
    if options.csv is not None and result.step_rows is not None:
        print(f"Step tables: {', '.join(map(str, save_step_csvs(result.step_rows, options.csv)))}")
    return 0


def _play(options: argparse.Namespace, _: list[str]) -> int:
    from apexrl.run import load_trained

    trained = load_trained(options.source)
    directory = options.source if options.source.is_dir() else options.source.parent
    path = options.output or directory / "video.mp4"
    return 0 if _video(trained.make_env(1), trained.policy, path, options.seed, options.episodes) else 2


def _plot(options: argparse.Namespace, _: list[str]) -> int:
    from apexrl.plots import plot_runs

    print(plot_runs(options.run_dirs, options.output or options.run_dirs[0] / "curve.png"))
    return 0


def _list(_: argparse.Namespace, __: list[str]) -> int:
    from apexrl.algorithms import ALGORITHMS
    from apexrl.config import preset_names, preset_summary
    from apexrl.envs.tasks import TASKS

    print("Presets (apexrl train NAME):")
    for name in preset_names():
        print(f"  {name:18} {preset_summary(name)}")
    print("Tasks (--task.id NAME; any Gymnasium id works too):")
    for name, task in TASKS.items():
        print(f"  {name:18} {(task.__doc__ or '').splitlines()[0]}")
    print("Algorithms (--algo.name NAME):")
    for name, (algorithm, _config) in ALGORITHMS.items():
        print(f"  {name:18} {(algorithm.__doc__ or '').splitlines()[0]}")
    return 0


def _check_env(options: argparse.Namespace, _: list[str]) -> int:
    from apexrl.envs import check_env, make_env

    env = make_env(options.id, options.num_envs)
    problems = check_env(env)
    env.close()
    for problem in problems:
        print(f"- {problem}")
    print(f"{options.id}: {len(problems)} problems" if problems else f"{options.id}: keeps the environment contract")
    return 1 if problems else 0


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while whole episodes are counted; nothing without a terminal."""
    from rich.progress import Progress

    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.update(task, completed=count)


if __name__ == "__main__":
    sys.exit(main())
