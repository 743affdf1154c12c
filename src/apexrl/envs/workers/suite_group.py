"""The simulators of a task suite in one process, kept for the next episode of their task.

Worker processes run it, ``python -m apexrl.envs.workers.suite_group CONNECTION_FD``, and import what the suite needs,
not PyTorch.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from apexrl.envs.workers.process import serve

if TYPE_CHECKING:
    from apexrl.envs.suites.base import Simulator, TaskSuite

States: TypeAlias = Sequence[NDArray[np.float64]]
"""Full simulator states, whose lengths differ."""
SlotAnswers: TypeAlias = tuple[dict[str, Any], list[bool], list[int], int, float]
"""Of some slots: the stacked observations after the last control step, whether the task is solved, the steps taken; the
number of simulators that were made for it, and the seconds that took."""


class SimulatorCache:
    """The simulators of one process, one for each task, which the slots share.

    A slot that runs finds its task's simulator as it left it, or has its state put back into it: to restore a state is
    far cheaper than to make a simulator for every slot and task. Where ``capacity`` are alive, the one that was used
    longest ago is closed before another is made.
    """

    def __init__(self, suite: TaskSuite, capacity: int) -> None:
        self.suite, self.capacity = suite, capacity
        self.simulators: dict[int, Simulator] = {}
        """Task -> simulator; the one used longest ago comes first."""
        self.holder: dict[int, int] = {}
        """Task -> slot whose episode is in its simulator."""
        self.task_of: dict[int, int] = {}
        """Slot -> task."""
        self.saved: dict[int, NDArray[np.float64]] = {}
        """Slot -> its state, while it is not in a simulator."""
        self.made, self.seconds = 0, 0.0

    def begin(
        self, slots: Sequence[int], tasks: Sequence[int], states: States, idle: Sequence[int] = ()
    ) -> SlotAnswers:
        """Start an episode in each of the slots; those of the slots that idle are over."""
        for slot in (*idle, *slots):
            self._forget(slot)
        for slot, task, state in zip(slots, tasks, states, strict=True):
            self.task_of[slot], self.saved[slot] = task, state
        return self.advance(slots, np.empty((len(slots), 0, 0), np.float32), [0] * len(slots))

    def advance(self, slots: Sequence[int], actions: NDArray[np.float32], limits: Sequence[int]) -> SlotAnswers:
        """Take up to ``limits[k]`` of the actions ``[k, chunk, A]`` in each slot; a solved task takes no more."""
        self.made, self.seconds = 0, 0.0
        solved, taken, seen = [False] * len(slots), [0] * len(slots), []
        for k, slot in enumerate(slots):
            simulator = self._enter(slot)
            for action in actions[k, : limits[k]]:
                taken[k] += 1
                if simulator.advance(action):
                    solved[k] = True
                    break
            seen.append(simulator.observe())
        return self._stacked(seen), solved, taken, self.made, self.seconds

    def render(self, slot: int) -> NDArray[np.uint8]:
        """Render the scene of a slot."""
        return self._enter(slot).render()

    def close(self) -> None:
        """Close every simulator."""
        for simulator in self.simulators.values():
            simulator.close()
        self.simulators, self.holder, self.task_of, self.saved = {}, {}, {}, {}

    def _enter(self, slot: int) -> Simulator:
        """Return the simulator of a slot's task, with the slot's episode in it."""
        task = self.task_of[slot]
        simulator = self.simulators.pop(task, None) or self._make(task)
        self.simulators[task] = simulator  # the newest again
        holder = self.holder.get(task)
        if holder != slot:
            if holder is not None:
                self.saved[holder] = simulator.state()
            simulator.restore(self.saved.pop(slot))
            self.holder[task] = slot
        return simulator

    def _make(self, task: int) -> Simulator:
        while len(self.simulators) >= self.capacity:
            oldest = next(iter(self.simulators))
            if (holder := self.holder.pop(oldest, None)) is not None:
                self.saved[holder] = self.simulators[oldest].state()
            self.simulators.pop(oldest).close()
        start = time.perf_counter()
        simulator = self.suite.make_simulator(task)
        self.made += 1
        self.seconds += time.perf_counter() - start
        return simulator

    def _forget(self, slot: int) -> None:
        task = self.task_of.pop(slot, None)
        self.saved.pop(slot, None)
        if task is not None and self.holder.get(task) == slot:
            del self.holder[task]

    def _stacked(self, seen: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {group: np.stack([obs[group] for obs in seen]) for group in self.suite.observation_space}


def _cache_of(suite: bytes, capacity: int) -> SimulatorCache:
    return SimulatorCache(pickle.loads(suite), capacity)


if __name__ == "__main__":
    try:
        if (cache := serve(int(sys.argv[1]), _cache_of)) is not None:
            cache.close()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # graphics contexts complain when the interpreter takes them down
