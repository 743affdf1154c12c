"""Tasks that ship with the package: tensor operations only, on any device, without a simulator."""

from __future__ import annotations

from apexrl.envs.tasks.base import TensorTask
from apexrl.envs.tasks.cartpole import CartPole
from apexrl.envs.tasks.lift import Lift
from apexrl.envs.tasks.payload import Payload
from apexrl.envs.tasks.pendulum import Pendulum
from apexrl.envs.tasks.recall import Recall

TASKS: dict[str, type[TensorTask]] = {
    "cartpole": CartPole,
    "pendulum": Pendulum,
    "lift": Lift,
    "recall": Recall,
    "payload": Payload,
}
"""The shipped tasks by name; each is made as ``task(num_envs, device, **options)``."""

__all__ = ["TASKS", "CartPole", "Lift", "Payload", "Pendulum", "Recall", "TensorTask"]
