"""A process that answers calls: how it starts, answers within a deadline, is found dead, and ends.

What a loss means is up to the caller: the Gymnasium workers abort, those of a suite are replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from apexrl.core.errors import EnvError

START_TIMEOUT = 300.0
"""Seconds a worker may take to start, or to put environments into a saved or a first state."""
CLOSE_TIMEOUT = 0.7
"""Seconds the workers get to end by themselves before they are killed."""


class WorkerLostError(Exception):
    """The process is gone, or did not answer in time."""


class Deadline:
    """A number of seconds from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(self.end - time.monotonic(), 0.0)


class WorkerProcess:
    """A module in a process of its own, ``python -m MODULE CONNECTION_FD DESCRIPTOR …``, which calls ``serve``.

    The process starts while others do: nothing waits until an answer is wanted. From the arguments ``make`` it makes
    the object whose methods are called; ``descriptors`` are of open files that it shares.
    """

    def __init__(self, module: str, name: str, make: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
        self.name = name
        self.connection, theirs = Pipe()
        passed = (theirs.fileno(), *descriptors)
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        # -P keeps the working directory off the worker's path, unless it is on ours.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, passed)],
            pass_fds=passed,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.calls = 0
        self.is_made = False
        self.send("make", *make)

    def send(self, method: str, *arguments: Any) -> None:
        """Begin a call; a process that is gone is found when the answer is wanted."""
        self.calls += 1
        with contextlib.suppress(ConnectionError):
            self.connection.send((self.calls, method, arguments))

    def wait_until_made(self) -> None:
        """Wait until it has made its object; raises as ``receive``."""
        if not self.is_made:
            self.is_made = True
            self._answer_to(1, Deadline(START_TIMEOUT))

    def receive(self, deadline: Deadline) -> Any:
        """Return the answer of the last call; an EnvError tells what it raised, and the worker lives on."""
        self.wait_until_made()
        return self._answer_to(self.calls, deadline)

    def _answer_to(self, call: int, deadline: Deadline) -> Any:
        answered = -1
        try:
            while answered != call:  # an interrupted call has left its answer
                if not self.connection.poll(deadline.left()):
                    raise WorkerLostError(f"did not answer within {deadline.seconds:g} s (step_timeout)")
                answered, succeeded, answer = self.connection.recv()
        except (EOFError, ConnectionError):
            raise WorkerLostError(self._cause_of_death()) from None
        if not succeeded:
            raise EnvError(f"{self.name} raised an exception.\n{answer}")
        return answer

    def _cause_of_death(self) -> str:
        self.close()
        self.join(Deadline(CLOSE_TIMEOUT))
        code = self.process.returncode
        return f"died with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def close(self) -> None:
        """Close the pipe, on which the process ends by itself."""
        self.connection.close()

    def join(self, deadline: Deadline) -> None:
        """Wait until the process has ended, and kill it at the deadline."""
        try:
            self.process.wait(deadline.left())
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


class LocalWorker:
    """An object in this process, called as those in worker processes are."""

    def __init__(self, served: Any) -> None:
        self.served, self.answer = served, None

    def send(self, method: str, *arguments: Any) -> None:
        """Make the call."""
        try:
            self.answer = getattr(self.served, method)(*arguments)
        except Exception as error:
            raise EnvError(f"A simulator raised an exception.\n{traceback.format_exc()}") from error

    def receive(self, _: Deadline) -> Any:
        """Return the answer of the call."""
        return self.answer

    def close(self) -> None:
        """Close the object."""
        self.served.close()

    def join(self, _: Deadline) -> None:
        """There is nothing to wait for."""


Worker: TypeAlias = WorkerProcess | LocalWorker


def receive_all(
    workers: Mapping[int, Worker], timeout: float, on_loss: Callable[[int, WorkerLostError], None]
) -> dict[int, Any]:
    """Return the answers of the last calls by worker; those of lost workers are missing, and ``on_loss`` is told.

    What the first call raised that failed is raised once all have answered: nothing is left in their pipes.
    """
    deadline = Deadline(timeout)
    answers: dict[int, Any] = {}
    failures: list[EnvError] = []
    for index, worker in workers.items():
        try:
            answers[index] = worker.receive(deadline)
        except WorkerLostError as error:
            on_loss(index, error)
        except EnvError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return answers


def stop(workers: Sequence[Worker]) -> None:
    """Ask all workers to end, and end those that do not."""
    for worker in workers:
        worker.close()
    deadline = Deadline(CLOSE_TIMEOUT)
    for worker in workers:
        worker.join(deadline)


def serve(connection_fd: int, make: Callable[..., Any]) -> Any:
    """Answer ``(call, method, arguments)`` with ``(call, ok, result or traceback)`` until the parent is gone.

    The first call, ``make``, makes the object whose methods the others call; it is returned.
    """
    # The parent decides what Ctrl-C means, and what a cluster means that tells every process to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(connection_fd)
    served, result = None, None
    while True:
        try:
            call, method, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return served
        try:
            if method == "make":
                served = make(*arguments)
            else:
                result = getattr(served, method)(*arguments)
            answer = (call, True, result)
        except Exception:
            answer = (call, False, traceback.format_exc())
        try:
            connection.send(answer)
        except ConnectionError:
            return served
