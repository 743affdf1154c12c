"""The command line: train, eval, play, export, plot, demos, list, check-env, bench."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from apexrl.errors import ApexRLError, ConfigError, EnvError, RunDirError, did_you_mean

if TYPE_CHECKING:
    from apexrl.agent import Trainer
    from apexrl.config import Config
    from apexrl.envs import VecEnv
    from apexrl.evaluation import EvaluationResult
    from apexrl.policies import Policy

Overrides = list[tuple[str, str]]
"""``section.key`` and the text given for it."""
Command = Callable[[argparse.Namespace, Overrides], int]
COMMANDS = ("train", "eval", "play", "export", "plot", "list", "check-env", "bench", "demos")
_NO_MEMORY = re.compile(r"allocate memory|not enough memory|out of memory|Storage size", re.IGNORECASE)
"""How PyTorch says it; its exception is a plain RuntimeError on the CPU."""
_DEMO_OPTIONS = {"task.benchmark_name": "SUITE", "task.task_names_to_use": "--tasks", "task.cameras": "--cameras"}
"""What ``apexrl demos`` has in the place of fields that messages about suites name."""
DESCRIPTION = """\
Train robot policies with reinforcement learning.

  apexrl train                                 train the default preset (lift_ppo)
  apexrl train cartpole_ppo --task.id Acrobot-v1 --training.seed 3
  apexrl train my_run.yaml --run-dir runs/mine
  apexrl train --resume runs/mine              go on after a kill, a crash or Ctrl-C
  apexrl eval runs/mine --episodes 200         success and return, with intervals
  apexrl play runs/mine                        write a video
  apexrl export runs/mine                      write policy.onnx and policy.pt for a robot
  apexrl plot runs/a runs/b                    draw learning curves
  apexrl demos mt10 --per-task 10              record demonstrations to imitate
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; problems that the user can mend give one message and exit code 2."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except ApexRLError as error:
        print(f"apexrl: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output has gone; nothing must be written when Python flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"apexrl: {error.strerror or error}{where}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        print(
            "apexrl: There is not enough memory. Lower task.num_envs, algo.num_steps, policy.hidden_dims, "
            "policy.critic_hidden_dims, policy.memory_dim or algo.replay_capacity; on a suite of tasks "
            "task.num_parallel_envs, task.max_cached_envs, algo.minibatch_size, algo.micro_batch_size or policy.size.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("apexrl: interrupted.", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise ConfigError(
            f"Unknown command '{words[0]}'; commands are {', '.join(COMMANDS)}.{did_you_mean(words[0], COMMANDS)}"
        )
    # Before argparse, which would take the value of an option that it does not know for the preset.
    overrides, words = _split_overrides(words)
    parser = _parser()
    options, rest = parser.parse_known_args(words)
    if options.command is None:
        parser.print_help()
        return 0
    rest += [f"--{name}" for name, _ in overrides if options.command != "train"]
    if rest:
        raise ConfigError(_unknown(rest[0], options.command))
    run: Command = options.run
    return run(options, overrides)


class _Parser(argparse.ArgumentParser):
    """Reports a problem as one message, like every other error of the command line."""

    more_help: Callable[[], str] | None = None

    def format_help(self) -> str:
        return super().format_help() + (self.more_help() if self.more_help else "")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}. '{self.prog} --help' shows how.")


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser("apexrl", description=DESCRIPTION, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, help_text: str, run: Command) -> _Parser:
        child = commands.add_parser(
            name, help=help_text, description=help_text, formatter_class=formatter, allow_abbrev=False
        )
        child.set_defaults(run=run)
        return child

    train = command("train", "Train a policy.", _train)
    train.more_help = _field_list
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
    evaluate.add_argument("--seed", type=_seed, metavar="N", help="of the episodes; default as in training")
    evaluate.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mode")
    evaluate.add_argument("--csv", type=Path, metavar="DIR", help="write one table of steps for each environment")

    play = command("play", "Write a video of a trained policy.", _play)
    play.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    play.add_argument("--episodes", type=_positive, default=3, metavar="N", help="default 3")
    play.add_argument("--output", type=Path, metavar="FILE.mp4", help="default video.mp4 in the run directory")
    play.add_argument("--seed", type=_seed, default=1_000_003, metavar="N", help="of the episodes")

    export = command("export", "Write a trained policy as files for deployment.", _export)
    export.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    export.add_argument("--output", type=Path, metavar="DIR", help="default export in the run directory")
    export.add_argument(
        "--format", default="onnx,torchscript", metavar="NAMES", help="one or both of onnx,torchscript; default both"
    )

    plot = command("plot", "Draw the learning curves of runs; for PPO-ROA also how the student adapts.", _plot)
    plot.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    plot.add_argument("--output", type=Path, metavar="FILE.png", help="default curve.png in the first run directory")

    demos = command("demos", "Record demonstrations of a suite's scripted experts.", _demos)
    demos.add_argument("suite", metavar="SUITE", help="mt10, mt50, metaworld:TASK or metaworld:MT10")
    demos.add_argument("--per-task", type=_positive, default=10, metavar="K", help="default 10")
    demos.add_argument("--start", type=_not_negative, default=0, metavar="K", help="first training state, default 0")
    demos.add_argument(
        "--horizon", type=_positive, metavar="N", help="control steps of an episode; default the suite's"
    )
    demos.add_argument("--output", type=Path, metavar="DIR", help="default demos/<suite>")
    demos.add_argument("--tasks", default="", metavar="NAMES", help="some tasks of the suite, such as reach-v3,push-v3")
    demos.add_argument("--cameras", default="", metavar="NAMES", help="also record pictures, such as corner2")
    demos.add_argument("--image-size", type=_positive, default=64, metavar="N", help="edge of the pictures, default 64")
    demos.add_argument("--proprioception", action="store_true", help="leave places of objects out of the state")
    demos.add_argument("--num-workers", type=_positive, metavar="N", help="processes; default one a core")

    command("list", "List presets, tasks and algorithms.", _list)
    bench = command("bench", "Run a benchmark of the source tree against the peers it needs (make bench).", _bench)
    bench.add_argument("name", help="ppo_cpu, ppo_gpu, envs, ppo_learning or profile_iteration")
    bench.add_argument("options", nargs=argparse.REMAINDER, help="of the benchmark, such as --quick")
    check = command("check-env", "Check that an environment keeps the contract.", _check_env)
    check.add_argument("id", help="a task that ships with the package, or a Gymnasium id")
    check.add_argument("--num-envs", type=_positive, default=4, metavar="N", help="default 4")
    return parser


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


def _positive(text: str) -> int:
    return _whole_number(text, 1, 2**31)


def _not_negative(text: str) -> int:
    return _whole_number(text, 0, 2**31)


def _seed(text: str) -> int:
    return _whole_number(text, 0, 2**32)


def _whole_number(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got '{text}'")
    return int(text)


def _split_overrides(words: list[str]) -> tuple[Overrides, list[str]]:
    """Take ``--section.key value`` and ``--section.key=value`` out of the arguments."""
    overrides: Overrides = []
    others: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, has_value, value = word.partition("=")
        if not (name.startswith("--") and "." in name):
            others.append(word)
            continue
        if not has_value:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise ConfigError(f"Option '{name}' needs a value.")
        overrides.append((name[2:], value))
    return overrides, others


def _unknown(word: str, command: str) -> str:
    """Return a message about an argument that no command takes."""
    if not word.startswith("-"):
        return f"Unexpected argument '{word}'. 'apexrl {command} --help' shows how."
    hint = ""
    if command == "train":
        from apexrl.config import field_paths

        known = ["--run-dir", "--resume", "--config_path", *(f"--{path}" for path in field_paths())]
        same_key = [path for path in known if path.endswith(f".{word.lstrip('-')}")]
        hint = did_you_mean(word, same_key or known)
    return f"Unknown option '{word}'.{hint} 'apexrl {command} --help' lists all."


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
        with _progress("Evaluating", episodes) as tell:
            result = trainer.evaluate(episodes, on_progress=tell)
    if not distributed.is_first():
        return
    if episodes:
        print(f"Evaluation: {result.summary()}")
        _show_tasks(result, run_dir, config.features.save_plot)
    if isinstance(config.task, SuiteConfig):
        print(f"Results: {write_final_results(run_dir, trainer.iteration, trainer.total_steps)}")
    if config.features.save_plot:
        try:
            print(f"Learning curve: {plot_runs([run_dir], run_dir / 'curve.png')}")
        except RunDirError as error:
            print(f"No learning curve: {error}")
    if config.features.save_video:
        try:
            _video(trainer.env.spawn(1), trainer.policy, run_dir / "video.mp4", config.training.seed, 3)
        except EnvError as error:
            print(f"No video: {error}")
    print(f"Run directory: {run_dir} (apexrl eval {run_dir}, apexrl play {run_dir}, tensorboard --logdir {run_dir})")


def _show_tasks(result: EvaluationResult, directory: Path, draw: bool) -> None:
    """Print the success of every task of a suite, and draw it as bars."""
    from apexrl.plots import plot_tasks

    tasks = result.record().get("per_task", {})
    for name, task in tasks.items():
        low, high = task["interval"]
        rate = f"{100 * task['success_rate']:5.1f} % ({100 * low:.0f} to {100 * high:.0f} %)"
        print(f"  {name:28} {rate} over {task['episodes']} episodes")
    if tasks and draw:
        print(f"Success of each task: {plot_tasks(tasks, directory / 'tasks.png')}")


def _video(env: VecEnv, policy: Policy, path: Path, seed: int, episodes: int) -> None:
    from apexrl.evaluation import record_video

    try:
        print(f"Video: {record_video(env, policy, path, seed=seed, num_episodes=episodes)}")
    finally:
        env.close()


def _eval(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.agent.trainer import EVAL_SEED_OFFSET
    from apexrl.evaluation import evaluate, save_step_csvs
    from apexrl.run import load_trained

    trained = load_trained(options.source)
    seed = trained.config.training.seed + EVAL_SEED_OFFSET if options.seed is None else options.seed
    num_envs = min(options.num_envs or trained.config.training.eval_num_envs, options.episodes)
    env = trained.make_env(num_envs)
    with _progress("Evaluating", options.episodes) as tell:
        result = evaluate(
            env,
            trained.policy,
            options.episodes,
            deterministic=not options.stochastic,
            seed=seed,
            record_steps=options.csv is not None,
            on_progress=tell,
        )
    env.close()
    print(f"{trained.checkpoint}: {result.summary()}")
    _show_tasks(result, trained.checkpoint.parent, draw=False)
    for name, value in result.logs().items():
        print(f"  {name} {value:.4g}")
    if options.csv is not None and result.step_rows is not None:
        print(f"Step tables: {', '.join(map(str, save_step_csvs(result.step_rows, options.csv)))}")
    return 0


def _play(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.run import load_trained

    trained = load_trained(options.source)
    directory = options.source if options.source.is_dir() else options.source.parent
    path = options.output or directory / "video.mp4"
    if path.suffix != ".mp4":
        raise ConfigError(f"--output {path} must end in .mp4.")
    _video(trained.make_env(1), trained.policy, path, options.seed, options.episodes)
    return 0


def _export(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.export import CARD, FILES, export_policy

    exported = export_policy(options.source, options.output, options.format.split(","))
    card, tried = exported.card, exported.card["verification"]
    print(f"Exported {card['checkpoint']['name']} ({card['task']['id']}, {card['algorithm']}) to {exported.directory}")
    for name, difference in tried["largest_difference"].items():
        print(f"  {FILES[name]}: largest difference {difference:.1e} on {tried['observations']} recorded observations")
    for kind in ("inputs", "outputs"):
        print(f"  {kind}: " + ", ".join(f"{entry['name']} {_shape(entry['shape'])}" for entry in card[kind]))
    print(f"  {CARD} says how to use them")
    return 0


def _shape(sizes: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _plot(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.plots import plot_runs

    path = plot_runs(options.run_dirs, options.output or options.run_dirs[0] / "curve.png")
    print(path)
    for run_dir in options.run_dirs:
        _plot_adaptation(run_dir, path)
    return 0


def _plot_adaptation(run_dir: Path, curve: Path) -> None:
    """Draw how the student of a PPO-ROA run adapts, beside its learning curve."""
    from apexrl.run import resumed_config

    if not (run_dir / "config.yaml").is_file() or resumed_config(run_dir).policy.kind != "roa":
        return
    if not any((run_dir / "checkpoints").glob("*.pt")):
        print(f"{run_dir} has no checkpoint yet: no picture of teacher and student.")
        return
    from apexrl.adaptation import plot_adaptation

    print(plot_adaptation(run_dir, curve.with_name(f"{run_dir.resolve().name}-adaptation{curve.suffix}")))


def _demos(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.demos import Recorded, record_demos
    from apexrl.envs.mujoco_simulation import num_cores
    from apexrl.envs.suites import make_suite

    more: dict[str, Any] = {"privileged": False} if options.proprioception else {}
    if options.horizon is not None:
        more["horizon"] = options.horizon
    try:
        suite = make_suite(
            options.suite,
            [name for name in options.tasks.split(",") if name],
            cameras=tuple(name for name in options.cameras.split(",") if name),
            image_size=options.image_size,
            **more,
        )
    except ConfigError as error:
        message = str(error)
        for field, option in _DEMO_OPTIONS.items():
            message = message.replace(field, option)
        raise ConfigError(message) from error
    available = len(suite.init_states(0, "train"))
    if options.start + options.per_task > available:
        raise ConfigError(
            f"--per-task {options.per_task} from --start {options.start} on needs {options.start + options.per_task} "
            f"training states, but a task of '{options.suite}' has {available}; lower one of them."
        )
    output = options.output or Path("demos") / options.suite.replace(":", "_").lower()
    with _progress("Recording", suite.num_tasks) as tell:
        done = 0

        def note(_: str, __: Recorded) -> None:
            nonlocal done
            done += 1
            tell(done)

        workers = min(options.num_workers or num_cores(), suite.num_tasks)
        recorded = record_demos(
            suite, output, options.per_task, num_workers=workers, start=options.start, on_progress=note
        )
    for name, task in recorded.items():
        failed = f", {task.num_failures} attempts failed" if task.num_failures else ""
        fewer = "; the training states ran out" if task.num_demos < options.per_task else ""
        print(f"  {name:28} {task.num_demos} demonstrations, {task.num_steps} steps{failed}{fewer}")
    print(f"Demonstrations: {output}")
    return 0


def _list(_: argparse.Namespace, __: Overrides) -> int:
    from apexrl.algorithms import ALGORITHMS
    from apexrl.config import preset_names, preset_summary
    from apexrl.envs.mujoco import TASKS as MUJOCO_TASKS
    from apexrl.envs.mujoco_tasks import TASKS as GYMNASIUM_TASKS
    from apexrl.envs.suites import SUITES
    from apexrl.envs.tasks import TASKS

    print("Presets (apexrl train NAME):")
    for name in preset_names():
        print(f"  {name:18} {preset_summary(name)}")
    print("Tasks (--task.id NAME; any Gymnasium id works too):")
    for name, task in TASKS.items():
        print(f"  {name:18} {(task.__doc__ or '').splitlines()[0]}")
    for name in [name for name in MUJOCO_TASKS if name not in GYMNASIUM_TASKS]:
        print(f"  {f'mujoco/{name}':18} {(MUJOCO_TASKS[name].__doc__ or '').splitlines()[0]}")
    print(f"  {'mujoco/NAME':18} Gymnasium's {', '.join(GYMNASIUM_TASKS)}, faster and with threads.")
    print("Suites of tasks (--task.benchmark_name NAME, for rloo and bc):")
    print(f"  {', '.join(SUITES)}, and metaworld:TASK for one task")
    print("Algorithms (--algo.name NAME):")
    for name, (algorithm, _config) in ALGORITHMS.items():
        print(f"  {name:18} {(algorithm.__doc__ or '').splitlines()[0]}")
    return 0


def _bench(options: argparse.Namespace, _: Overrides) -> int:
    import subprocess

    directory = Path(__file__).parents[2] / "benchmarks"
    names = sorted(path.stem for path in directory.glob("*.py") if path.stem not in ("report", "compare_learning"))
    if not names:
        raise ConfigError("Benchmarks come with the source tree, not with the installed package: clone the repository.")
    if options.name not in names:
        hint = did_you_mean(options.name, names)
        raise ConfigError(f"Unknown benchmark '{options.name}'; benchmarks are {', '.join(names)}.{hint}")
    return subprocess.call([sys.executable, str(directory / f"{options.name}.py"), *options.options])


def _check_env(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.envs import check_env, make_env
    from apexrl.envs.suites import SUITES

    if options.id in SUITES or options.id.startswith("metaworld:"):
        raise ConfigError(
            f"'{options.id}' is a suite of tasks, not an environment: train on it with --task.benchmark_name "
            f"{options.id} (see the presets mt10_bc and mt10_rloo), record its experts with 'apexrl demos "
            f"{options.id}', or check it in Python, check_env(SuiteVecEnv(make_suite('{options.id}'), 4))."
        )
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
