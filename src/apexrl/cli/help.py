"""``apexrl train --help`` and ``--help-all``: options with their values, types and choices."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from apexrl.algorithms import ALGORITHMS
from apexrl.cli.common import Overrides
from apexrl.policies.config import POLICIES, POLICY_KINDS
from apexrl.run.config import CONFIG_SECTIONS, SECTION_CHOICES, field_help
from apexrl.run.loading import load_config
from apexrl.run.sources import default_source, read_source

COMMON = """
task.id task.num_envs task.benchmark_name task.num_parallel_envs training.total_timesteps training.seed training.device
algo.name algo.learning_rate algo.gamma policy.kind policy.size policy.hidden_dims policy.normalize_obs
algo.num_steps algo.num_epochs algo.num_minibatches algo.gae_lambda algo.clip_coef algo.entropy_coef algo.schedule
algo.batch_size algo.utd_ratio algo.num_updates algo.num_groups training.eval_interval training.init_from logging.wandb
"""
"""What most users set; of those, the fields that the algorithm and the task have are shown, while there is room."""
MAX_OPTIONS = 37
NAME_WIDTH = 44
_CHOICES: dict[str, Callable[[], list[str]]] = {
    "algo.name": ALGORITHMS.names,
    "policy.kind": lambda: [*POLICY_KINDS, *POLICIES.names()],
}
"""Fields that name what users may bring along, and what they may name besides."""
_TYPE_NAMES = {int: "integer", float: "number", bool: "true|false", str: "string", type(None): "null"}


def train_help(usage: str, source: str | None, overrides: Overrides, everything: bool) -> str:
    """Return the help of ``apexrl train`` for a preset or file: the common options and what it sets, or all."""
    note = f"Values of {source}."
    if source is None:
        source, note = default_source(overrides)
    config = load_config(source, overrides)
    chosen = {} if source is None else read_source(source)
    lines = [usage.rstrip(), "", f"{note} Change one with --section.field VALUE:"]
    if everything:
        for section, classes in CONFIG_SECTIONS.items():
            for cls in classes:
                if len(classes) > 1:
                    lines.append(f"{SECTION_CHOICES[cls]}:")
                own = getattr(config, section)
                lines += _lines(section, own if type(own) is cls else cls(), [entry.name for entry in fields(cls)])
        return "\n".join(lines)
    shown = [f"{section}.{name}" for section in CONFIG_SECTIONS for name in chosen.get(section) or {}]
    shown += [name for name, _ in overrides]
    known = [f"{section}.{entry.name}" for section in CONFIG_SECTIONS for entry in fields(getattr(config, section))]
    common = (path for path in COMMON.split() if path in known and path not in shown)
    shown += itertools.islice(common, max(0, MAX_OPTIONS - len(shown)))
    for section in CONFIG_SECTIONS:
        own = getattr(config, section)
        lines += _lines(section, own, [entry.name for entry in fields(own) if f"{section}.{entry.name}" in shown])
    return "\n".join([*lines, f"These are the common options; 'apexrl train {source or ''} --help-all' lists all."])


def _lines(section: str, values: Any, names: Iterable[str]) -> Iterator[str]:
    texts, kinds = field_help(type(values)), get_type_hints(type(values))
    for name in names:
        shown = f"--{section}.{name} {value_text(getattr(values, name))}"
        choices = _CHOICES.get(f"{section}.{name}")
        kind = "|".join([*choices(), "module:Class"]) if choices else type_text(kinds[name])
        yield f"  {shown:{NAME_WIDTH}}  {kind}. {texts.get(name, '').replace('``', chr(39))}".rstrip()


def value_text(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, tuple):
        return f'"[{", ".join(map(value_text, value))}]"'
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return '""' if value == "" else f'"{value}"' if isinstance(value, dict) else str(value)


def type_text(kind: Any) -> str:
    """Return the type of a field, or its choices, as in ``integer or null``."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "|".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return "|".join(map(type_text, inner))
    if origin is tuple:
        return f"[{type_text(inner[0])}, ...]"
    return _TYPE_NAMES.get(kind, "mapping")
