"""Simulators of a task suite in worker processes, which are replaced when they die; each runs ``suite_group``."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import EnvError
from apexrl.envs.suites.base import TaskSuite
from apexrl.envs.workers import suite_group
from apexrl.envs.workers.process import (
    START_TIMEOUT,
    LocalWorker,
    Worker,
    WorkerLostError,
    WorkerProcess,
    receive_all,
    stop,
)
from apexrl.envs.workers.suite_group import SimulatorCache, States

MAX_PROCESS_DEATHS = 3
"""A worker that dies this often in a row without an answer in between stops the run."""


class SlotProgress(NamedTuple):
    """What the slots of one worker did; row ``k`` of every array is of ``slots[k]``."""

    slots: list[int]
    obs: dict[str, NDArray[Any]]
    solved: NDArray[np.bool_]
    taken: NDArray[np.int64]
    """Control steps."""


Answer: TypeAlias = tuple[list[SlotProgress], list[int]]
"""What came back, and the slots whose episodes are lost because their worker died, also those that were not asked."""


@dataclass
class WorkerCounts:
    """What workers have done so far, also those that were replaced or released."""

    created: int = 0
    """Simulators."""
    seconds_creating: float = 0.0
    """Spent on that by all workers, added up."""
    replaced: int = 0
    """Workers that died or hung."""


class SuiteWorkers:
    """The slots of an environment spread over workers.

    Args:
        suite: its simulators are made in the workers. When it renders, every simulator has a process of its own,
            and a slot moves to a process that has the task it needs.
        num_slots: episodes that run at the same time.
        num_workers: processes; 0 runs everything in this one. Not read when the suite renders.
        capacity: simulators alive in each worker; when the suite renders, in all of them together, and one for every
            slot at least.
        step_timeout: seconds after which a worker that has not answered ``advance`` is replaced.
        counts: kept up to date.
    """

    def __init__(
        self,
        suite: TaskSuite,
        num_slots: int,
        num_workers: int,
        capacity: int,
        step_timeout: float,
        counts: WorkerCounts,
    ) -> None:
        self.suite, self.step_timeout, self.counts = suite, step_timeout, counts
        self.private = suite.renders
        local = num_workers == 0 and not self.private
        num_workers = num_slots if self.private else min(max(num_workers, 1), num_slots)
        self.has_warned = False
        self.capacity = max(capacity, num_slots) if self.private else capacity
        self.share = 1 if self.private else capacity
        self.worker_of = [slot % num_workers for slot in range(num_slots)]
        """Neighbours lie in different workers, so that few episodes still use all of them. -1: none, while it idles."""
        self.workers: list[Worker] = []
        self.deaths: list[int] = []
        """For each worker, how often it died since its last answer."""
        self.last_task: list[int] = []
        """For each worker, the task it began last; for a private one the task of its simulator."""
        self.last_used: list[int] = []
        self.clock = 0
        self.close = weakref.finalize(self, stop, self.workers)
        if local:
            self._add_worker(LocalWorker(SimulatorCache(suite, capacity)))
            return
        self._pickled = cloudpickle.dumps(suite)
        processes = [self._new_process(index) for index in range(num_workers)]
        for process in processes:
            self._add_worker(process)
        try:
            for process in processes:
                process.wait_until_made()
        except WorkerLostError as error:
            self.close()
            raise EnvError(f"A worker of suite '{suite.name}' {error} as it started.") from error
        except EnvError:
            self.close()
            raise

    def begin(self, slots: Sequence[int], tasks: Sequence[int], states: States, idle: Sequence[int] = ()) -> Answer:
        """Start episodes in some slots; these may take the simulators of slots that idle."""
        if self.private:
            self._find_workers(slots, tasks, idle)
        rows = self._rows_of_workers(slots)
        for worker, ks in rows.items():
            self.last_task[worker] = tasks[ks[-1]]
            resting = [slot for slot in idle if self.worker_of[slot] == worker]
            places = self._places(slots, ks)
            self._send(worker, "begin", places, [tasks[k] for k in ks], [states[k] for k in ks], resting)
        return self._progress(rows, slots, max(START_TIMEOUT, self.step_timeout))

    def advance(self, slots: Sequence[int], actions: NDArray[np.float32], limits: Sequence[int]) -> Answer:
        """Let some slots take a chunk of actions ``[len(slots), chunk, A]``, at most ``limits[k]`` control steps."""
        rows = self._rows_of_workers(slots)
        for worker, ks in rows.items():
            self._send(worker, "advance", self._places(slots, ks), actions[ks], [limits[k] for k in ks])
        before = self.counts.created
        found = self._progress(rows, slots, self.step_timeout)
        if self.counts.created > before and not self.has_warned:
            self.has_warned = True
            logging.getLogger("apexrl").warning(
                "Simulators of running episodes are made again and again: raise task.max_cached_envs (%d).", self.share
            )
        return found

    def _progress(self, rows: Mapping[int, Sequence[int]], slots: Sequence[int], timeout: float) -> Answer:
        answers, dead = self._receive(list(rows), timeout)
        found = []
        for worker, (obs, solved, taken, made, seconds) in answers.items():
            self.counts.created += made
            self.counts.seconds_creating += seconds
            here = [slots[k] for k in rows[worker]]
            found.append(SlotProgress(here, obs, np.array(solved, np.bool_), np.array(taken, np.int64)))
        return found, [slot for slot, worker in enumerate(self.worker_of) if worker in dead]

    def render(self, slot: int) -> NDArray[np.uint8]:
        """Render the scene of a slot."""
        worker = self.worker_of[slot]
        self._send(worker, "render", *self._places([slot], [0]))
        answers, dead = self._receive([worker], max(START_TIMEOUT, self.step_timeout))
        if dead:
            raise EnvError(f"The worker of environment {slot} died while it rendered.")
        return np.asarray(answers[worker])

    def _rows_of_workers(self, slots: Sequence[int]) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = {}
        for k, slot in enumerate(slots):
            rows.setdefault(self.worker_of[slot], []).append(k)
        return rows

    def _places(self, slots: Sequence[int], ks: Sequence[int]) -> list[int]:
        """What the worker calls these slots: a process of one simulator has one place for whichever slot comes."""
        return [0 if self.private else slots[k] for k in ks]

    def _find_workers(self, slots: Sequence[int], tasks: Sequence[int], idle: Sequence[int]) -> None:
        """Give each slot a worker of its own: with its task if one is free, else a new one, else the oldest."""
        self.clock += 1
        for slot in idle:
            self.worker_of[slot] = -1
        wanted = dict(zip(slots, tasks, strict=True))
        taken = {worker for slot, worker in enumerate(self.worker_of) if slot not in wanted}
        for slot, task in [*wanted.items()]:
            matching = [w for w in range(len(self.workers)) if w not in taken and self.last_task[w] == task]
            if matching:
                self._occupy(slot, max(matching, key=self.last_used.__getitem__), taken)
                del wanted[slot]
        for slot in wanted:
            free = [w for w in range(len(self.workers)) if w not in taken]
            empty = [w for w in free if self.last_task[w] < 0]
            if not empty and len(self.workers) < self.capacity:
                empty = [self._add_worker(self._new_process(len(self.workers)))]
            self._occupy(slot, empty[0] if empty else min(free, key=self.last_used.__getitem__), taken)

    def _occupy(self, slot: int, worker: int, taken: set[int]) -> None:
        taken.add(worker)
        self.worker_of[slot] = worker
        self.last_used[worker] = self.clock

    def _new_process(self, index: int) -> WorkerProcess:
        return WorkerProcess(suite_group.__spec__.name, f"Worker {index}", (self._pickled, self.share))

    def _add_worker(self, worker: Worker) -> int:
        self.workers.append(worker)
        self.deaths.append(0)
        self.last_task.append(-1)
        self.last_used.append(0)
        return len(self.workers) - 1

    def _send(self, worker: int, method: str, *arguments: Any) -> None:
        if not self.close.alive:
            raise EnvError("The environment is closed; create another.")
        self.workers[worker].send(method, *arguments)

    def _receive(self, workers: Sequence[int], timeout: float) -> tuple[dict[int, Any], set[int]]:
        """Return the answers by worker, and the workers that died; these are replaced."""
        answers = receive_all({worker: self.workers[worker] for worker in workers}, timeout, self._replace)
        for worker in answers:
            self.deaths[worker] = 0
        return answers, set(workers) - set(answers)

    def _replace(self, index: int, how: WorkerLostError) -> None:
        worker = self.workers[index]
        assert isinstance(worker, WorkerProcess)
        worker.kill()
        self.deaths[index] += 1
        if self.deaths[index] >= MAX_PROCESS_DEATHS:
            self.close()
            times = f"{MAX_PROCESS_DEATHS} times in a row. Look at what it printed, and at the free memory."
            raise EnvError(f"Worker {index} of suite '{self.suite.name}' {how}, {times}")
        self.counts.replaced += 1
        slots = [slot for slot, of in enumerate(self.worker_of) if of == index]
        logging.getLogger("apexrl").warning(
            "Worker %d %s. It is replaced; the episodes of environments %s are discarded.", index, how, slots
        )
        self.workers[index] = self._new_process(index)
        self.last_task[index] = -1
