"""``apexrl list`` and ``apexrl check-env``."""

from __future__ import annotations

import argparse

from apexrl.cli.common import AddCommand, Overrides, positive
from apexrl.core.errors import ConfigError


def register(command: AddCommand) -> None:
    """Add the commands."""
    command("list", "List presets, tasks and algorithms.", _list)

    check = command("check-env", "Check that an environment keeps the contract.", _check_env)
    check.add_argument(
        "id", help="a task of the package, a Gymnasium id, or a simulator's task such as maniskill/PickCube-v1"
    )
    check.add_argument("--num-envs", type=positive, default=4, metavar="N", help="default 4")


def _list(_: argparse.Namespace, __: Overrides) -> int:
    from apexrl.algorithms import ALGORITHMS
    from apexrl.envs.mujoco.env import MUJOCO_TASKS as MUJOCO_TASKS
    from apexrl.envs.mujoco.tasks import GYMNASIUM_TASKS as GYMNASIUM_TASKS
    from apexrl.envs.registry import SIMULATORS
    from apexrl.envs.suites import SUITES
    from apexrl.envs.tasks import TASKS
    from apexrl.run.loading import preset_names, preset_summary

    print("Presets (apexrl train NAME):")
    for name in preset_names():
        print(f"  {name:18} {preset_summary(name)}")
    print("Tasks (--task.id NAME; any Gymnasium id works too):")
    for name, task in TASKS.items():
        print(f"  {name:18} {(task.__doc__ or '').splitlines()[0]}")
    for name in [name for name in MUJOCO_TASKS if name not in GYMNASIUM_TASKS]:
        print(f"  {f'mujoco/{name}':18} {(MUJOCO_TASKS[name].__doc__ or '').splitlines()[0]}")
    print(f"  {'mujoco/NAME':18} Gymnasium's {', '.join(GYMNASIUM_TASKS)}, faster and with threads.")
    print("Tasks of other simulators, where they are installed (docs/simulators.md):")
    print(f"  {', '.join(f'{name}/NAME' for name in SIMULATORS)}")
    print("Suites of tasks (--task.benchmark_name NAME, for rloo and bc):")
    print(f"  {', '.join(SUITES)}, and metaworld:TASK for one task")
    print("Algorithms (--algo.name NAME):")
    for name, (algorithm, _config) in ALGORITHMS.items():
        print(f"  {name:18} {(algorithm.__doc__ or '').splitlines()[0]}")
    return 0


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
