"""``apexrl list`` and ``apexrl check-env``."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

from apexrl import envs
from apexrl.algorithms import ALGORITHMS
from apexrl.cli.common import Overrides
from apexrl.core.errors import ConfigError, plural
from apexrl.core.plugins import Registry
from apexrl.envs.mujoco.env import MUJOCO_TASKS
from apexrl.envs.mujoco.tasks import GYMNASIUM_TASKS
from apexrl.envs.registry import SIMULATORS
from apexrl.envs.suites import SUITES
from apexrl.envs.tasks import TASKS
from apexrl.run import sources


def run_list(options: argparse.Namespace, overrides: Overrides) -> int:
    """Print what can be trained on, and with what."""
    print("Presets (apexrl train NAME):")
    _show({name: sources.preset_summary(name) for name in sources.preset_names()})
    print("Tasks (--task.id NAME; any Gymnasium id works too):")
    others = {f"mujoco/{name}": _summary(task) for name, task in MUJOCO_TASKS.items() if name not in GYMNASIUM_TASKS}
    _show(_summaries(TASKS) | others)
    print(f"  {', '.join(GYMNASIUM_TASKS)}: simulated in threads, with Gymnasium's results.")
    print("Tasks of other simulators, if installed (docs/environments.md):")
    print(f"  {', '.join(f'{name}/NAME' for name in SIMULATORS)}")
    print("Task suites (--task.benchmark_name NAME, for rloo and bc):")
    print(f"  {', '.join(SUITES)}, and metaworld:TASK for one task")
    print("Algorithms (--algo.name NAME):")
    _show(_summaries(ALGORITHMS))
    return 0


def _show(summaries: Mapping[str, str]) -> None:
    width = max(map(len, summaries))
    for name, summary in summaries.items():
        print(f"  {name:{width}}  {summary}")


def _summaries(registry: Registry[Any]) -> dict[str, str]:
    names = registry.names()
    return {name: _summary(registry[name]) if name in registry else "from an installed package" for name in names}


def _summary(cls: Any) -> str:
    """Return the first line of a docstring as plain text."""
    return (inspect.getdoc(cls) or "").partition("\n")[0].replace("``", "")


def run_check_env(options: argparse.Namespace, overrides: Overrides) -> int:
    """Print where an environment breaks the contract; 1 where it does."""
    if options.id in SUITES or options.id.startswith("metaworld:"):
        raise ConfigError(
            f"'{options.id}' is a suite of tasks, not an environment: train on it with --task.benchmark_name "
            f"{options.id} (see the presets mt10_bc and mt10_rloo), record its experts with 'apexrl demos "
            f"{options.id}', or check it in Python, check_env(SuiteVecEnv(make_suite('{options.id}'), 4))."
        )
    env = envs.make_env(options.id, options.num_envs)
    problems = envs.check_env(env)
    env.close()
    for problem in problems:
        print(f"- {problem}")
    print(
        f"{options.id}: {plural(len(problems), 'problem')}"
        if problems
        else f"{options.id}: keeps the environment contract"
    )
    return 1 if problems else 0
