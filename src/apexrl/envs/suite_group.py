"""The simulators of a task suite in one process, kept for the next episode of their task.

Worker processes run this file by its path, ``python -P suite_group.py CONNECTION_FD``, and import what the suite
needs, not PyTorch. It must therefore import nothing that does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from apexrl.envs.suites.base import Simulator, TaskSuite

States: TypeAlias = Sequence[NDArray[np.float64]]
"""Full simulator states, whose lengths differ."""


class SimulatorCache:
    """The simulators of one process: one for each slot, and those kept for the next episode of their task.

    Args:
        suite: makes them.
        capacity: how many may be alive; the one that was freed longest ago is closed before another is made.
    """

    def __init__(self, suite: TaskSuite, capacity: int) -> None:
        self.suite, self.capacity = suite, capacity
        self.used: dict[int, tuple[int, Simulator]] = {}
        """Slot -> task and simulator."""
        self.free: list[tuple[int, Simulator]] = []
        """Oldest first."""

    def begin(
        self, slots: Sequence[int], tasks: Sequence[int], states: States, idle: Sequence[int] = ()
    ) -> tuple[dict[str, Any], int, float]:
        """Start an episode in each of the slots; those that idle give their simulators away.

        Returns:
            The stacked observations, the number of simulators made for it, and the seconds that took.
        """
        self.free += [self.used.pop(slot) for slot in (*idle, *slots) if slot in self.used]
        # Those that find a simulator come first: what they need must not be closed for the others.
        missing = [(slot, task) for slot, task in zip(slots, tasks, strict=True) if not self._reuse(slot, task)]
        start = time.perf_counter()
        for slot, task in missing:
            while self.free and len(self.free) + len(self.used) >= self.capacity:
                self.free.pop(0)[1].close()
            self.used[slot] = (task, self.suite.make_simulator(task))
        seconds = time.perf_counter() - start if missing else 0.0
        for slot, state in zip(slots, states, strict=True):
            self.used[slot][1].restore(state)
        return self._observe(slots), len(missing), seconds

    def advance(
        self, slots: Sequence[int], actions: NDArray[np.float32], limits: Sequence[int]
    ) -> tuple[dict[str, Any], list[bool], list[int]]:
        """Take up to ``limits[k]`` of the actions ``[k, chunk, A]`` in each slot; a solved task takes no more.

        Returns:
            The stacked observations after the last control step, whether the task is solved, and the steps taken.
        """
        solved, taken = [False] * len(slots), [0] * len(slots)
        for k, slot in enumerate(slots):
            step = self.used[slot][1].advance
            for action in actions[k, : limits[k]]:
                taken[k] += 1
                if step(action):
                    solved[k] = True
                    break
        return self._observe(slots), solved, taken

    def picture(self, slot: int) -> NDArray[np.uint8]:
        """Draw the scene of a slot."""
        return self.used[slot][1].picture()

    def close(self) -> None:
        """Close every simulator."""
        for _, simulator in [*self.used.values(), *self.free]:
            simulator.close()
        self.used, self.free = {}, []

    def _reuse(self, slot: int, task: int) -> bool:
        for k in reversed(range(len(self.free))):
            if self.free[k][0] == task:
                self.used[slot] = self.free.pop(k)
                return True
        return False

    def _observe(self, slots: Sequence[int]) -> dict[str, Any]:
        seen = [self.used[slot][1].observe() for slot in slots]
        return {group: np.stack([obs[group] for obs in seen]) for group in self.suite.observation_space}


def _import_envs_by_parts() -> None:
    """Let ``apexrl.envs.suites`` be imported without the rest of ``apexrl.envs``, which waits for PyTorch.

    Whoever asks the package for one of its names gets it as ever.
    """
    spec = importlib.util.find_spec("apexrl.envs")
    assert spec is not None
    assert spec.loader is not None
    package, loader = importlib.util.module_from_spec(spec), spec.loader

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if importlib.util.find_spec(f"apexrl.envs.{name}") is not None:
            return importlib.import_module(f"apexrl.envs.{name}")
        vars(package).pop("__getattr__", None)
        loader.exec_module(package)
        return getattr(package, name)

    vars(package)["__getattr__"] = find
    sys.modules["apexrl.envs"] = package
    vars(sys.modules["apexrl"])["envs"] = package


def serve(connection_fd: int) -> None:
    """Answer ``(call, method, arguments)`` with ``(call, ok, result or traceback)`` until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    connection: Connection[Any, Any] = Connection(connection_fd)
    _import_envs_by_parts()
    cache: SimulatorCache | None = None
    answer: tuple[int, bool, Any]
    while True:
        try:
            call, method, arguments = connection.recv()
        except (EOFError, ConnectionError):
            break
        try:
            if method == "make":
                cache = SimulatorCache(pickle.loads(arguments[0]), arguments[1])
                answer = (call, True, None)
            else:
                answer = (call, True, getattr(cache, method)(*arguments))
        except Exception:
            answer = (call, False, traceback.format_exc())
        try:
            connection.send(answer)
        except ConnectionError:
            break
    try:
        if cache is not None:
            cache.close()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # drawing contexts complain when the interpreter takes them down


if __name__ == "__main__":
    serve(int(sys.argv[1]))
