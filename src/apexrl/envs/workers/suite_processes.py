"""Simulators of a task suite in worker processes, which are replaced when they die; each runs ``suite_group``."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import EnvError
from apexrl.envs.suites.base import TaskSuite
from apexrl.envs.workers import suite_group
from apexrl.envs.workers.suite_group import SimulatorCache, States

BEGIN_TIMEOUT = 300.0
"""Seconds a worker may take to start, or to make simulators and put them into their first states."""
CLOSE_TIMEOUT = 0.7
"""Seconds the workers get to close their simulators before they are killed."""
MAX_PROCESS_DEATHS = 3
"""A worker that dies this often in a row without an answer in between stops the run."""


class SlotProgress(NamedTuple):
    """What the slots of one worker did; row ``k`` of every array is of ``slots[k]``."""

    slots: list[int]
    obs: dict[str, NDArray[Any]]
    solved: NDArray[np.bool_]
    taken: NDArray[np.int64]
    """Control steps."""


class WorkerLostError(Exception):
    """The process is gone, or did not answer in time."""


class Worker(Protocol):
    """Holds a ``SimulatorCache``; one call at a time, answered later."""

    def send(self, method: str, *arguments: Any) -> None:
        """Begin a call of a method of the cache."""

    def receive(self, deadline: float) -> Any:
        """Return the answer of the call."""

    def close(self) -> None:
        """Release the simulators."""


class LocalWorker:
    """The simulators in this process."""

    def __init__(self, suite: TaskSuite, capacity: int) -> None:
        self.cache = SimulatorCache(suite, capacity)
        self.answer: Any = None

    def send(self, method: str, *arguments: Any) -> None:
        """Make the call."""
        try:
            self.answer = getattr(self.cache, method)(*arguments)
        except Exception as error:
            raise EnvError(f"A simulator raised an exception.\n{traceback.format_exc()}") from error

    def receive(self, deadline: float) -> Any:
        """Return the answer of the call."""
        return self.answer

    def close(self) -> None:
        """Close the simulators."""
        self.cache.close()


class ProcessWorker:
    """The simulators in a process of their own, which starts while others do.

    Args:
        suite: pickled.
        capacity: of its cache.
        index: for messages.
    """

    def __init__(self, suite: bytes, capacity: int, index: int) -> None:
        self.index = index
        self.connection, theirs = Pipe()
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        # -P keeps the working directory off the worker's path, unless it is on ours.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", suite_group.__spec__.name, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.started = False
        self.calls = 0
        self.send("make", suite, capacity)

    def send(self, method: str, *arguments: Any) -> None:
        """Begin a call; a process that is gone is found when the answer is wanted."""
        self.calls += 1
        try:
            self.connection.send((self.calls, method, arguments))
        except ConnectionError:
            return

    def wait_until_started(self) -> None:
        """Wait until the suite has arrived.

        Raises:
            WorkerLostError: when it does not.
        """
        if not self.started:
            self.started = True
            self._answer_to(1, time.monotonic() + BEGIN_TIMEOUT)

    def receive(self, deadline: float) -> Any:
        """Return the answer of the last call.

        Raises:
            WorkerLostError: when the process is gone or the time is over.
            EnvError: with the traceback of what the call raised.
        """
        self.wait_until_started()
        return self._answer_to(self.calls, deadline)

    def _answer_to(self, call: int, deadline: float) -> Any:
        answered = -1
        try:
            while answered != call:  # an interrupted call has left its answer
                if not self.connection.poll(max(deadline - time.monotonic(), 0.0)):
                    raise WorkerLostError("did not answer in time (step_timeout)")
                answered, succeeded, answer = self.connection.recv()
        except (EOFError, ConnectionError):
            self._report_death()
        if not succeeded:
            raise EnvError(f"Worker {self.index} raised an exception.\n{answer}")
        return answer

    def _report_death(self) -> NoReturn:
        self.kill()
        code = self.process.returncode
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        raise WorkerLostError(how)

    def kill(self) -> None:
        """End the process at once."""
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Tell the process to end."""
        self.connection.close()


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
    """

    def __init__(self, suite: TaskSuite, num_slots: int, num_workers: int, capacity: int, step_timeout: float) -> None:
        self.suite, self.step_timeout = suite, step_timeout
        self.private = suite.renders
        local = num_workers == 0 and not self.private
        num_workers = 1 if local else num_slots if self.private else min(max(num_workers, 1), num_slots)
        self.created, self.seconds_creating, self.replaced = 0, 0.0, 0
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
        self.close = weakref.finalize(self, _stop, self.workers)
        self._pickled = b"" if local else cloudpickle.dumps(suite)
        for _ in range(num_workers):
            self._add_worker(local=local)
        try:
            self._wait_until_started()
        except EnvError:
            self.close()
            raise

    def begin(
        self, slots: Sequence[int], tasks: Sequence[int], states: States, idle: Sequence[int] = ()
    ) -> tuple[list[SlotProgress], list[int]]:
        """Start episodes in some slots; these may take the simulators of slots that idle.

        Returns:
            What came back, and the slots whose episodes are lost because their worker died; these may be others too.
        """
        if self.private:
            self._find_workers(slots, tasks, idle)
        rows = self._rows_of_workers(slots)
        for worker, ks in rows.items():
            self.last_task[worker] = tasks[ks[-1]]
            resting = [slot for slot in idle if self.worker_of[slot] == worker]
            places = self._places(slots, ks)
            self._send(worker, "begin", places, [tasks[k] for k in ks], [states[k] for k in ks], resting)
        answers, dead = self._receive(list(rows), max(BEGIN_TIMEOUT, self.step_timeout))
        found = []
        for worker, (obs, made, seconds) in answers.items():
            self.created += made
            self.seconds_creating += seconds
            here = [slots[k] for k in rows[worker]]
            found.append(SlotProgress(here, obs, np.zeros(len(here), np.bool_), np.zeros(len(here), np.int64)))
        return found, [slot for slot, worker in enumerate(self.worker_of) if worker in dead]

    def advance(
        self, slots: Sequence[int], actions: NDArray[np.float32], limits: Sequence[int]
    ) -> tuple[list[SlotProgress], list[int]]:
        """Let some slots take a chunk of actions ``[len(slots), chunk, A]``, at most ``limits[k]`` control steps.

        Returns:
            What came back, and the slots whose episodes are lost because their worker died.
        """
        rows = self._rows_of_workers(slots)
        for worker, ks in rows.items():
            self._send(worker, "advance", self._places(slots, ks), actions[ks], [limits[k] for k in ks])
        answers, dead = self._receive(list(rows), self.step_timeout)
        found = []
        for worker, (obs, solved, taken, made, seconds) in answers.items():
            self.created += made
            self.seconds_creating += seconds
            if made and not self.has_warned:
                self.has_warned = True
                logging.getLogger("apexrl").warning(
                    "Simulators of running episodes are closed and made again: more tasks run in a process than "
                    "task.max_cached_envs (%d) allows. Raise it.", self.share,
                )  # fmt: skip
            here = [slots[k] for k in rows[worker]]
            found.append(SlotProgress(here, obs, np.array(solved, np.bool_), np.array(taken, np.int64)))
        return found, [slot for slot, worker in enumerate(self.worker_of) if worker in dead]

    def picture(self, slot: int) -> NDArray[np.uint8]:
        """Draw the scene of a slot."""
        worker = self.worker_of[slot]
        self._send(worker, "picture", *self._places([slot], [0]))
        answers, dead = self._receive([worker], max(BEGIN_TIMEOUT, self.step_timeout))
        if dead:
            raise EnvError(f"The worker of environment {slot} died while it drew.")
        picture: NDArray[np.uint8] = answers[worker]
        return picture

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
                self._occupy(slot, max(matching, key=lambda w: self.last_used[w]), taken)
                del wanted[slot]
        for slot in wanted:
            free = [w for w in range(len(self.workers)) if w not in taken]
            empty = [w for w in free if self.last_task[w] < 0]
            if not empty and len(self.workers) < self.capacity:
                empty = [self._add_worker(local=False)]
            self._occupy(slot, empty[0] if empty else min(free, key=lambda w: self.last_used[w]), taken)

    def _occupy(self, slot: int, worker: int, taken: set[int]) -> None:
        taken.add(worker)
        self.worker_of[slot] = worker
        self.last_used[worker] = self.clock

    def _add_worker(self, *, local: bool) -> int:
        index = len(self.workers)
        self.workers.append(
            LocalWorker(self.suite, self.share) if local else ProcessWorker(self._pickled, self.share, index)
        )
        self.deaths.append(0)
        self.last_task.append(-1)
        self.last_used.append(0)
        return index

    def _wait_until_started(self) -> None:
        for index, worker in enumerate(self.workers):
            try:
                if isinstance(worker, ProcessWorker):
                    worker.wait_until_started()
            except WorkerLostError as error:
                raise EnvError(f"Worker {index} of suite '{self.suite.name}' {error} as it started.") from error

    def _send(self, worker: int, method: str, *arguments: Any) -> None:
        if not self.close.alive:
            raise EnvError("The environment is closed; make another.")
        self.workers[worker].send(method, *arguments)

    def _receive(self, workers: Sequence[int], timeout: float) -> tuple[dict[int, Any], set[int]]:
        """Return the answers by worker, and the workers that died; these are replaced."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        failures: list[EnvError] = []
        dead: set[int] = set()
        for worker in workers:
            try:
                answers[worker] = self.workers[worker].receive(deadline)
                self.deaths[worker] = 0
            except WorkerLostError as error:
                dead.add(worker)
                self._replace(worker, str(error))
            except EnvError as error:  # the others answer too; nothing may be left in their pipes
                failures.append(error)
        if failures:
            raise failures[0]
        return answers, dead

    def _replace(self, index: int, what: str) -> None:
        worker = self.workers[index]
        assert isinstance(worker, ProcessWorker)
        worker.kill()
        self.deaths[index] += 1
        if self.deaths[index] >= MAX_PROCESS_DEATHS:
            self.close()
            raise EnvError(
                f"Worker {index} of suite '{self.suite.name}' {what}, {MAX_PROCESS_DEATHS} times in a row. "
                "Look at what it printed, and at the free memory."
            )
        self.replaced += 1
        slots = [slot for slot, of in enumerate(self.worker_of) if of == index]
        logging.getLogger("apexrl").warning(
            "Worker %d %s. It is replaced; the episodes of environments %s are discarded.", index, what, slots
        )
        self.workers[index] = ProcessWorker(self._pickled, self.share, index)
        self.last_task[index] = -1


def _stop(workers: list[Worker]) -> None:
    """Close the pipes, on which the processes exit by themselves, and kill those that do not."""
    for worker in workers:
        worker.close()
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for worker in workers:
        if isinstance(worker, ProcessWorker):
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                worker.kill()
