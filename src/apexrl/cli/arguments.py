"""What every command takes. Nothing here imports PyTorch at once, so help and wrong options are answered quickly."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from apexrl.core.errors import ConfigError

NUM_EPISODES = 100
"""Episodes of an evaluation or a manifest when nothing else is said."""


class Parser(argparse.ArgumentParser):
    """Reports a problem as one message, like every other error of the command line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing."""
        raise ConfigError(f"{message[0].upper()}{message[1:]}. '{self.prog} --help' shows how.")


AddCommand = Callable[[str, str, str], Parser]
"""Adds a command: its name, what it does, and the ``module.function`` of ``apexrl.cli`` that runs it."""


def integer(least: int, most: int = 2**31) -> Callable[[str], int]:
    """Return a function that reads an integer between two ends."""

    def read_integer(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} to {most}, got '{text}'")
        return int(text)

    return read_integer


positive, seed_number = integer(1), integer(0, 2**32)


def add_commands(command: AddCommand) -> None:
    """Add every command, in the order of the help."""
    train = command("train", "Train a policy.", "train.run_train")
    train.usage = "apexrl train [PRESET] [--option VALUE …] [--section.field VALUE …]"
    train.add_argument("--help", "-h", action="store_true", help="the common options, and what the preset sets")
    train.add_argument("--help-all", action="store_true", help="every option")
    train.add_argument("preset", nargs="?", help="a preset (see 'apexrl list') or a YAML file; default walker_ppo")
    train.add_argument("--config_path", "--config-path", metavar="FILE", help="a YAML file, instead of a preset")
    train.add_argument("--algo", metavar="NAME", help="short for --algo.name; module:Class for one of your own")
    train.add_argument("--policy", metavar="NAME", help="short for --policy.kind; module:Class for one of your own")
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="a new directory; default runs/<preset>-<time>")
    train.add_argument("--resume", type=Path, metavar="RUN_DIR", help="continue from the newest checkpoint of a run")
    train.add_argument("--seeds", metavar="N|A,B,…", help="train N seeds, or these, and aggregate their results")
    train.add_argument("--jobs", type=positive, metavar="N", help="seeds that are trained at once; default 1")

    sweep = command("sweep", "Search hyperparameters with Optuna; the same command resumes it.", "sweep.run_sweep")
    sweep.add_argument("file", nargs="?", type=Path, metavar="FILE.yaml", help="what is searched; see docs/sweeps.md")
    sweep.add_argument("--dir", type=Path, metavar="DIR", help="default sweeps/<name of the file>")
    sweep.add_argument("--resume", type=Path, metavar="DIR", help="resume a sweep, without its file")
    sweep.add_argument("--trials", type=positive, metavar="N", help="in all, instead of the number in the file")
    sweep.add_argument("--jobs", type=positive, default=1, metavar="N", help="trials at once; default 1")

    evaluate = command("eval", "Evaluate a trained policy on whole episodes.", "evaluate.run_eval")
    evaluate.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    evaluate.add_argument("--episodes", type=positive, metavar="N", help=f"default {NUM_EPISODES}")
    evaluate.add_argument("--num-envs", type=positive, metavar="N", help="default training.eval_num_envs")
    evaluate.add_argument("--seed", type=seed_number, metavar="N", help="of the episodes; default as in training")
    evaluate.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mode")
    evaluate.add_argument("--csv", type=Path, metavar="DIR", help="write one table of steps for each environment")
    evaluate.add_argument("--manifest", type=Path, metavar="FILE", help="its episodes, the same for any --num-envs")
    evaluate.add_argument("--output", type=Path, metavar="FILE.json", help="with --manifest: write every episode")

    play = command("play", "Write a video of a trained policy.", "evaluate.run_play")
    play.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    play.add_argument("--episodes", type=positive, default=3, metavar="N", help="default 3")
    play.add_argument("--output", type=Path, metavar="FILE.mp4", help="default video.mp4 in the run directory")
    play.add_argument("--seed", type=seed_number, default=1_000_003, metavar="N", help="of the episodes")

    manifest = command("manifest", "Write a file that pins the episodes of an evaluation.", "compare.run_manifest")
    manifest.add_argument("source", metavar="TASK|PRESET|RUN_DIR", help="what to evaluate on, such as lift or mt10")
    manifest.add_argument("--output", type=Path, required=True, metavar="FILE.json", help="the file to write")

    compare = command("compare", "Compare two policies on the same episodes.", "compare.run_compare")
    for name in ("a", "b"):
        compare.add_argument(name, type=Path, metavar=name.upper(), help="run directory, checkpoint or results (.json)")
    compare.add_argument("--manifest", type=Path, metavar="FILE", help="of the episodes; sampled when left out")
    compare.add_argument("--num-envs", type=positive, metavar="N", help="default training.eval_num_envs")
    compare.add_argument("--output", type=Path, metavar="FILE.json", help="write the comparison")
    for child in (manifest, compare):
        child.add_argument("--episodes", type=positive, metavar="N", help=f"to sample, default {NUM_EPISODES}")
        child.add_argument("--seed", type=seed_number, metavar="N", help="of the sampled episodes, default 0")
    for child in (evaluate, compare):
        child.add_argument("--device", metavar="NAME", help="with a manifest; default cpu, which repeats bit for bit")

    export = command("export", "Write a trained policy as files for deployment.", "files.run_export")
    export.add_argument("source", type=Path, metavar="RUN_DIR|CHECKPOINT")
    export.add_argument("--output", type=Path, metavar="DIR", help="default export in the run directory")
    export.add_argument("--format", default="onnx,torchscript", metavar="NAMES", help="default onnx,torchscript")

    plot = command("plot", "Plot the learning curves of runs.", "files.run_plot")
    plot.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    plot.add_argument("--output", type=Path, metavar="FILE.png", help="default curve.png in the first run directory")

    report = command("report", "Write one HTML page with results, curves and videos of runs.", "files.run_report")
    report.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a run, or a directory of runs")
    report.add_argument("--output", type=Path, metavar="FILE.html", help="default report.html in the first directory")

    demos = command("demos", "Record demonstrations of scripted experts or of a trained policy.", "files.run_demos")
    demos.add_argument("suite", metavar="SUITE", help="mt10, mt50, metaworld:TASK or metaworld:MT10")
    demos.add_argument("--policy", type=Path, metavar="RUN_DIR|CHECKPOINT", help="default the scripted experts")
    demos.add_argument("--per-task", type=positive, default=10, metavar="K", help="default 10")
    demos.add_argument("--start", type=integer(0), default=0, metavar="K", help="first training state, default 0")
    demos.add_argument("--horizon", type=positive, metavar="N", help="control steps; default the policy's or suite's")
    demos.add_argument("--output", type=Path, metavar="DIR", help="default demos/<suite>, or demos/<suite>_policy")
    demos.add_argument("--tasks", default="", metavar="NAMES", help="some tasks of the suite, such as reach-v3,push-v3")
    demos.add_argument("--cameras", default="", metavar="NAMES", help="also record images, such as corner2")
    demos.add_argument("--image-size", type=positive, metavar="N", help="width and height of images, default 64")
    demos.add_argument("--proprioception", action="store_true", help="leave places of objects out of the state")
    demos.add_argument("--num-workers", type=positive, metavar="N", help="processes; default one per core")

    listed = command("list", "List presets, tasks and algorithms.", "tools.run_list")
    check = command("check-env", "Check that an environment keeps the contract.", "tools.run_check_env")
    check.add_argument("id", help="a task of 'apexrl list', a Gymnasium id, or a simulator's, as maniskill/PickCube-v1")
    check.add_argument("--num-envs", type=positive, default=4, metavar="N", help="default 4")

    for child in (train, sweep, evaluate, play, manifest, compare, export, demos, listed, check):
        text = "import a module that registers tasks, algorithms or policies; may be repeated"
        child.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=text)
    for child in (train, sweep, evaluate, play, manifest, compare, export, demos):
        text = "import the modules that a configuration, run or checkpoint names; only for files that you trust"
        child.add_argument("--allow-imports", action="store_true", help=text)


def short_overrides(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Return the fields of a configuration that have a short option, and what was given for them."""
    fields = {} if options.command != "train" else {"algo.name": options.algo, "policy.kind": options.policy}
    return list(fields.items())
