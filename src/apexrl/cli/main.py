"""The command line: reads the arguments, runs the command, and turns problems into one message."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module

from apexrl import __version__
from apexrl.cli import arguments
from apexrl.cli.arguments import Parser, add_commands
from apexrl.cli.common import Command, Overrides
from apexrl.core import plugins
from apexrl.core.errors import ApexRLError, ConfigError, did_you_mean
from apexrl.run import sources

_NO_MEMORY = re.compile(r"allocate memory|not enough memory|out of memory|Storage size", re.IGNORECASE)
"""How PyTorch says it; its exception is a plain RuntimeError on the CPU."""
_CLOSING = {"[": "]", "{": "}"}
DESCRIPTION = """\
Train robot policies with reinforcement learning.

  apexrl train                                 train the default preset (walker_ppo)
  apexrl train cartpole_ppo --task.id Acrobot-v1 --training.seed 3
  apexrl train my_run.yaml --run-dir runs/mine
  apexrl train --resume runs/mine              resume after a kill, a crash or Ctrl-C
  apexrl train lift_ppo --seeds 5              five seeds, aggregated
  apexrl sweep my_sweep.yaml                   search hyperparameters
  apexrl eval runs/mine --episodes 200         success and return, with intervals
  apexrl manifest lift --output lift.json      pin the episodes of an evaluation: eval --manifest repeats them
  apexrl compare runs/a runs/b                 compare them on the same episodes
  apexrl play runs/mine                        write a video
  apexrl export runs/mine                      write policy.onnx and policy.pt for a robot
  apexrl plot runs/a runs/b                    plot learning curves
  apexrl report runs/a runs/b                  write one HTML page about them
  apexrl demos mt10 --per-task 10              record demonstrations to imitate
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; problems that the user can fix give one message and exit code 2."""
    try:
        if words is None:
            gc.disable()  # until all is imported, of which nothing becomes garbage
            os.environ.setdefault("PYTHONSAFEPATH", "1")  # no child of this process imports from the current directory
        with _plain_warnings():
            return _run_command(list(sys.argv[1:] if words is None else words))
    except ApexRLError as error:
        return _end(str(error))
    except BrokenPipeError:
        # Whoever read our output has gone; nothing must be written when Python flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _end(f"{error.strerror or error}{where}")
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        return _end(
            "There is not enough memory. Lower task.num_envs, algo.num_steps, policy.hidden_dims, "
            "policy.critic_hidden_dims, policy.rnn_hidden_dim or algo.buffer_size; on a suite of tasks "
            "task.num_parallel_envs, task.max_cached_envs, algo.minibatch_size, algo.micro_batch_size or policy.size."
        )
    except KeyboardInterrupt:
        print("apexrl: interrupted.", file=sys.stderr)
        return 130
    finally:
        if words is None:
            gc.freeze()  # the process ends: a last search for garbage would take most of a second


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Write each warning as one line, once, without the source that raised it."""
    before = warnings.formatwarning
    lines: set[str] = set()

    def one_line(message: Warning | str, *_: object, **__: object) -> str:
        line = f"apexrl: {message}\n"
        shown = "" if line in lines else line
        lines.add(line)
        return shown

    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = before


def _end(message: str) -> int:
    """Say why the command ends; under torchrun, every rank but 0 with its number."""
    rank = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    print(f"apexrl: {message}" if rank == "0" else f"apexrl: Rank {rank}: {message}", file=sys.stderr)
    return 2


def _run_command(words: list[str]) -> int:
    parser, children = _parser()
    if words and not words[0].startswith("-") and words[0] not in children:
        raise ConfigError(
            f"Unknown command '{words[0]}'; commands are {', '.join(children)}.{did_you_mean(words[0], children)}"
        )
    command = shlex.join(["apexrl", *(word for word in words if word not in ("-h", "--help"))])
    # Before argparse, which would take the value of an option that it does not know for the preset.
    overrides, words = _split_overrides(words)
    options, rest = parser.parse_known_args(words)
    if options.command is None:
        parser.print_help()
        return 0
    overrides += [(field, name) for field, name in arguments.short_overrides(options) if name is not None]
    rest += [f"--{name}" for name, _ in overrides if options.command not in ("train", "manifest")]
    if rest:
        raise ConfigError(_unknown(rest[0], options.command))
    if options.command == "train":
        if options.preset and options.config_path:
            raise ConfigError("Give a preset or --config_path, not both.")
        if source := options.config_path or options.preset:
            sources.require_source(source)
    _import_plugins(options, overrides)
    if options.command == "train" and (options.help or options.help_all):
        from apexrl.cli.help import train_help

        source = options.config_path or options.preset
        print(train_help(children["train"].format_help(), source, overrides, options.help_all, command))
        return 0
    module, _, function = options.run.partition(".")
    run: Command = getattr(import_module(f"apexrl.cli.{module}"), function)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    return run(options, overrides)


def _import_plugins(options: argparse.Namespace, overrides: Overrides) -> None:
    """Import what ``--import`` names. What is typed is trusted, what a file says is not."""
    imports = getattr(options, "imports", [])
    plugins.trust([*imports, *(value for name, value in overrides if name in plugins.FIELDS)])
    if getattr(options, "allow_imports", False):
        plugins.allow_imports()
    plugins.import_all(imports)


def _parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser and those of its commands."""
    formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=120)
    parser = Parser("apexrl", description=DESCRIPTION, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"apexrl {__version__}")
    children = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, help_text: str, run: str) -> Parser:
        child = children.add_parser(
            name,
            help=help_text,
            description=help_text,
            formatter_class=formatter,
            allow_abbrev=False,
            conflict_handler="resolve",
        )
        child.set_defaults(run=run)
        return child

    add_commands(command)
    return parser, children.choices


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
        if value[:1] in _CLOSING and _CLOSING[value[0]] not in value:
            closing = _CLOSING[value[0]]
            whole = " ".join([value, *itertools.takewhile(lambda word: not word.startswith("--"), remaining)])
            if closing in whole:
                raise ConfigError(f'The shell has split the value of {name}; quote it: {name} "{whole}"')
            raise ConfigError(f'{name} has no closing bracket, got {value}; write {name} "{value}{closing}"')
        overrides.append((name[2:], value))
    return overrides, others


def _unknown(word: str, command: str) -> str:
    """Return a message about an argument that no command takes."""
    if not word.startswith("-"):
        return f"Unexpected argument '{word}'; quote a value with spaces. 'apexrl {command} --help' shows how."
    name, hint = word.partition("=")[0], ""
    if command == "train":
        from apexrl.run.config import field_paths

        own = ["run-dir", "resume", "config_path", "seeds", "jobs", "help-all", "import", "allow-imports"]
        hint = sources.nearest_option(name.lstrip("-"), own + field_paths())
    return f"Unknown option '{name}'.{hint} 'apexrl {command} --help{'-all' if command == 'train' else ''}' lists all."
