"""Gymnasium environments split over processes; each runs ``gym_group``."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import EnvError, EnvStateError
from apexrl.envs.workers import gym_group
from apexrl.envs.workers.gym_group import MAX_METRICS, Buffers, Found, MakeFn, make_buffers

START_TIMEOUT = 300.0
"""Seconds a worker may take to make its environments, or to put them back into a saved state."""


class Workers:
    """The environments split over processes, which write their results into memory shared with this one."""

    def __init__(self, make_fns: Sequence[MakeFn], num_workers: int, step_timeout: float) -> None:
        self.num_envs = len(make_fns)
        self.step_timeout = step_timeout
        bounds = [round(w * self.num_envs / num_workers) for w in range(num_workers + 1)]
        self.ranges = [range(bounds[w], bounds[w + 1]) for w in range(num_workers)]
        self.memory_fd = _anonymous_file()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection[Any, Any]] = []
        self.close = weakref.finalize(self, _stop_processes, self.processes, self.connections, self.memory_fd)
        calls = [(cloudpickle.dumps([make_fns[i] for i in envs]), envs[0]) for envs in self.ranges]
        for _ in self.ranges:
            self._start()
        try:
            found = self._call("make", calls, START_TIMEOUT)
        except EnvError:
            self.close()
            raise
        if any(spaces[:2] != found[0][:2] for spaces in found):
            self.close()
            raise EnvError(f"All environments need the same spaces; the workers found {[s[:2] for s in found]}.")
        self.observation_space, self.action_space, _ = found[0]
        limits = [limit for *_, limit in found]
        self.max_episode_steps = None if None in limits else max(limits)

    def _start(self) -> None:
        ours, theirs = Pipe()
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        # -P keeps the working directory off the worker's path, unless it is on ours.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", gym_group.__spec__.name, str(theirs.fileno()), str(self.memory_fd)],
            pass_fds=(theirs.fileno(), self.memory_fd),
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.processes.append(process)
        self.connections.append(ours)

    def bind(self, metrics: Sequence[str]) -> Buffers:
        """Make the shared buffers and let every worker write into its rows."""
        layout = (self.observation_space, self.action_space, self.num_envs, MAX_METRICS)
        _, size = make_buffers(*layout)
        os.ftruncate(self.memory_fd, size)
        buffers, _ = make_buffers(*layout, mmap.mmap(self.memory_fd, size))
        self._call("bind", [(self.num_envs, size, metrics)] * len(self.ranges))
        return buffers

    def watch(self, metrics: Sequence[str]) -> None:
        """Let every worker read these metrics from now on."""
        self._call("watch", [(metrics,)] * len(self.ranges))

    def reset(self, seeds: Sequence[int] | None) -> None:
        """Start a new episode everywhere; environment ``i`` gets ``seeds[i]``."""
        self._call("reset", [(None if seeds is None else seeds[envs.start : envs.stop],) for envs in self.ranges])

    def step(self) -> tuple[bool, Found]:
        """Apply the actions in the buffers; return whether any episode ended, and metrics that are not watched yet."""
        answers = self._call("step", [()] * len(self.ranges))
        found: Found = {}
        for envs, (_, new) in zip(self.ranges, answers, strict=True):
            for name, values in new.items():
                found.setdefault(name, {}).update({envs.start + i: value for i, value in values.items()})
        return any(ended for ended, _ in answers), found

    def state(self) -> list[dict[str, Any]] | None:
        """Return the state of every environment; None when one cannot be saved."""
        try:
            groups = self._call("state", [()] * len(self.ranges))
        except _WorkerError as error:
            if "StateError" in str(error):
                return None
            raise
        return [state for group in groups for state in group]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Put every environment back into its saved state."""
        try:
            self._call("load", [(states[envs.start : envs.stop],) for envs in self.ranges], START_TIMEOUT)
        except EnvError as error:
            raise EnvStateError(str(error)) from error

    def render(self, index: int) -> NDArray[np.uint8]:
        """Draw environment ``index``."""
        worker = next(w for w, envs in enumerate(self.ranges) if index in envs)
        self._send(worker, "render", (index - self.ranges[worker].start,))
        picture: NDArray[np.uint8] = self._receive(worker, self.step_timeout)
        return picture

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float = 0.0) -> list[Any]:
        """Call a method of the first ``len(arguments)`` workers at once and return their answers."""
        for worker, values in enumerate(arguments):
            self._send(worker, method, values)
        timeout = max(timeout, self.step_timeout)
        begin = time.monotonic()
        answers, failures = [], []
        for worker in range(len(arguments)):
            try:
                answers.append(self._receive(worker, begin + timeout - time.monotonic()))
            except _WorkerError as error:  # the others answer too; nothing may be left in their pipes
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def _send(self, worker: int, method: str, arguments: tuple[Any, ...]) -> None:
        if not self.close.alive:
            raise EnvError("The environments are closed.")
        try:
            self.connections[worker].send((method, arguments))
        except ConnectionError:
            self._give_up(worker)

    def _receive(self, worker: int, timeout: float) -> Any:
        connection = self.connections[worker]
        try:
            if not connection.poll(max(timeout, 0.0)):
                self._give_up(worker, f"did not answer within step_timeout ({self.step_timeout:g} s)")
            succeeded, answer = connection.recv()
        except (EOFError, ConnectionError):
            self._give_up(worker)
        if not succeeded:
            raise _WorkerError(f"{self._name(worker)} raised an exception.\n{answer}")
        return answer

    def _give_up(self, worker: int, what: str = "") -> NoReturn:
        """End every worker: the others have stepped already, so the group cannot go on."""
        self.close()
        code = self.processes[worker].returncode
        died = f"died with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        raise EnvError(f"{self._name(worker)} {what or died}.")

    def _name(self, worker: int) -> str:
        envs = self.ranges[worker]
        return f"Worker {worker} (environments {envs[0]} to {envs[-1]})"


class _WorkerError(EnvError):
    """A call failed inside a worker, which is still alive."""


def _anonymous_file() -> int:
    """Return the descriptor of a nameless file, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("apexrl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _stop_processes(
    processes: list[subprocess.Popen[bytes]], connections: list[Connection[Any, Any]], memory_fd: int
) -> None:
    """Close the pipes, on which the workers exit by themselves, and kill those that do not."""
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + 1.0
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    os.close(memory_fd)
