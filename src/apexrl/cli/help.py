"""``apexrl train --help`` and ``--help-all``: options with their values, types and choices."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

from apexrl.algorithms import ALGORITHMS
from apexrl.cli.common import Overrides
from apexrl.core.validation import field_help, field_rules
from apexrl.policies.config import POLICIES, POLICY_KINDS
from apexrl.run.config import CONFIG_SECTIONS, SECTION_CHOICES
from apexrl.run.loading import load_config
from apexrl.run.sources import default_source, read_source

COMMON = """
task.id task.num_envs task.benchmark_name task.num_parallel_envs training.total_timesteps training.seed training.device
algo.name algo.learning_rate algo.gamma policy.kind policy.size policy.hidden_dims policy.normalize_obs
algo.num_steps algo.num_epochs algo.num_minibatches algo.gae_lambda algo.clip_coef algo.entropy_coef algo.schedule
algo.batch_size algo.utd_ratio algo.num_updates algo.num_groups training.eval_interval training.init_from logging.wandb
"""
"""What most users set; of those, the fields that the algorithm and the task have are shown, while there is room."""
MAX_OPTIONS = 35
NAME_WIDTH = 44
_CHOICES: dict[str, Callable[[], list[str]]] = {
    "algo.name": ALGORITHMS.names,
    "policy.kind": lambda: [*POLICY_KINDS, *POLICIES.names()],
}
"""Fields that name what users may bring along, and what they may name besides."""


def train_help(usage: str, source: str | None, overrides: Overrides, everything: bool, command: str) -> str:
    """Return the help of ``apexrl train`` for a preset or file: the common options and what it sets, or all.

    The last line says how to list all with ``command``, what the user typed.
    """
    note = f"Values of {source}."
    if source is None:
        source, note = default_source(overrides)
    config = load_config(source, overrides)
    chosen = {} if source is None else read_source(source)
    lines = [usage.rstrip(), "", f"{note} Change one with --section.field VALUE:"]
    if everything:
        for section, classes in CONFIG_SECTIONS.items():
            own = getattr(config, section)
            for cls in dict.fromkeys((*classes, type(own))):
                if len(classes) > 1:
                    lines.append(f"{SECTION_CHOICES.get(cls, f'with --algo.name {config.algo.name}')}:")
                lines += _lines(section, own if type(own) is cls else cls(), [entry.name for entry in fields(cls)])
        return "\n".join(lines)
    shown = [f"{section}.{name}" for section in CONFIG_SECTIONS for name in chosen.get(section) or {}]
    shown += [name for name, _ in overrides]
    known = [f"{section}.{entry.name}" for section in CONFIG_SECTIONS for entry in fields(getattr(config, section))]
    if type(config.algo) not in CONFIG_SECTIONS["algo"]:
        shown += [f"algo.{entry.name}" for entry in fields(config.algo)]
    common = (path for path in COMMON.split() if path in known and path not in shown)
    shown += itertools.islice(common, max(0, MAX_OPTIONS - len(shown)))
    for section in CONFIG_SECTIONS:
        own = getattr(config, section)
        lines += _lines(section, own, [entry.name for entry in fields(own) if f"{section}.{entry.name}" in shown])
    return "\n".join([*lines, f"These are the common options; '{command} --help-all' lists all."])


def _lines(section: str, values: Any, names: Iterable[str]) -> Iterator[str]:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0  # one line each for grep
    texts, rules = field_help(type(values)), field_rules(type(values))
    for name in names:
        shown = f"--{section}.{name} {value_text(getattr(values, name))}"
        if known := _CHOICES.get(f"{section}.{name}"):
            rules[name] = f"one of {', '.join([*known(), 'module:Class'])}"
        text = texts.get(name, "").replace("``", "'")
        line = f"  {shown:{NAME_WIDTH}}  {text} ({rules[name]})"
        yield textwrap.fill(line, width, subsequent_indent=" " * (NAME_WIDTH + 4)) if width else line


def value_text(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, tuple):
        return f'"[{", ".join(map(value_text, value))}]"'
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return '""' if value == "" else f'"{value}"' if isinstance(value, dict) else str(value)
