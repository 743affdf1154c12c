"""Tasks that ship with the package: tensor operations only, on any device, without a simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apexrl.core.plugins import Registry
from apexrl.envs.tasks.base import TensorTask
from apexrl.envs.tasks.cartpole import CartPole
from apexrl.envs.tasks.lift import Lift
from apexrl.envs.tasks.payload import Payload
from apexrl.envs.tasks.pendulum import Pendulum
from apexrl.envs.tasks.recall import Recall

TASKS: Registry[Callable[..., Any]] = Registry(
    "task.id",
    "apexrl.tasks",
    lambda value: "" if callable(value) else "must be a class or a function that makes environments",
    {"cartpole": CartPole, "pendulum": Pendulum, "lift": Lift, "recall": Recall, "payload": Payload},
)
"""Name of a task -> what makes its environments; the shipped ones are made as ``task(num_envs, device, **options)``."""


def register_task(name: str, maker: Callable[..., Any]) -> None:
    """Let configurations use a task as ``task.id``.

    Args:
        name: for ``task.id`` and ``make_env``.
        maker: a class or a function. A subclass of ``VecEnv``, and whatever has a parameter ``num_envs``, makes that
            many environments, anything else one ``gymnasium.Env``. It gets ``task.kwargs``, and ``device`` where it
            takes that.
    """
    TASKS.register(name, maker)


__all__ = ["TASKS", "CartPole", "Lift", "Payload", "Pendulum", "Recall", "TensorTask", "register_task"]
