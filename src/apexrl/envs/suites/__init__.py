"""Suites of language-conditioned tasks, by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.envs.options import check_known
from apexrl.envs.suites.base import InitState, Simulator, Split, TaskSuite
from apexrl.envs.suites.instructions import INSTRUCTIONS, MT10

__all__ = ["SUITES", "InitState", "Simulator", "Split", "TaskSuite", "make_suite"]

_METAWORLD = {"mt10": MT10, "mt50": tuple(INSTRUCTIONS), "metaworld": tuple(INSTRUCTIONS)}
_LIBERO = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
SUITES: tuple[str, ...] = (*_METAWORLD, *_LIBERO)
"""The names ``make_suite`` knows; ``metaworld:`` and a task, such as ``metaworld:reach-v3``, is a suite of one task."""


def make_suite(benchmark_name: str, task_names: Sequence[str] | None = None, **options: Any) -> TaskSuite:
    """Make a suite by its name.

    Args:
        benchmark_name: one of ``SUITES``, or ``metaworld:NAME`` with a task's name, ``MT10`` or ``MT50``.
        task_names: the tasks wanted, in this order; all of them when None or empty.
        **options: those of ``MetaWorldSuite`` or ``LiberoSuite``, such as ``horizon`` and ``cameras``.

    Raises:
        ConfigError: for an unknown suite, task or option, with the nearest known one, or a task named twice.
        EnvError: when the suite's package is not installed.
    """
    task_names = task_names or ()
    if len(set(task_names)) < len(task_names):
        raise ConfigError(f"task.task_names_to_use must name each task once, got {list(task_names)}.")
    if benchmark_name in _LIBERO:
        return _make("libero", "LiberoSuite", benchmark_name, task_names, options)
    known = _metaworld_tasks(benchmark_name)
    rest = f" Its tasks: {', '.join(known)}. Leave it empty for all of them."
    check_known(f"task.task_names_to_use: {benchmark_name} has no task", task_names, known, rest, ConfigError)
    return _make("metaworld", "MetaWorldSuite", benchmark_name, tuple(task_names) or known, options)


def _metaworld_tasks(benchmark_name: str) -> tuple[str, ...]:
    package, _, part = benchmark_name.partition(":")
    single = {f"metaworld:{task}": (task,) for task in INSTRUCTIONS}
    tasks = {**_METAWORLD, **single}.get(benchmark_name) or (package == "metaworld" and _METAWORLD.get(part.lower()))
    if tasks:
        return tasks
    known = (*SUITES, *single)
    hint = did_you_mean(benchmark_name, known)
    every = f"{', '.join(SUITES)}, and metaworld:TASK for one task"
    raise ConfigError(f"task.benchmark_name has no {benchmark_name!r}.{hint} Suites: {every}.")


def _make(module: str, kind: str, name: str, task_names: Sequence[str], options: dict[str, Any]) -> TaskSuite:
    # Only those who ask for a suite load its package.
    suite_class = getattr(importlib.import_module(f"apexrl.envs.suites.{module}"), kind)
    parameters = inspect.signature(suite_class).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    check_known(f"{name} has no option", options, known, f" Options: {', '.join(known)}.", ConfigError)
    suite: TaskSuite = suite_class(name, task_names, **options)
    return suite
