"""Gymnasium environments split over processes; each runs ``gym_group``."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import EnvError
from apexrl.core.plugins import with_imports
from apexrl.envs.workers import gym_group
from apexrl.envs.workers.arrays import Buffers, make_buffers
from apexrl.envs.workers.gym_group import MAX_METRICS, Found, MakeFn
from apexrl.envs.workers.process import START_TIMEOUT, WorkerLostError, WorkerProcess, receive_all, stop


class Workers:
    """The environments split over processes, which write their results into memory shared with this one.

    A worker that dies or hangs ends all of them: the others have stepped already.
    """

    def __init__(self, make_fns: Sequence[MakeFn], num_workers: int, step_timeout: float) -> None:
        self.num_envs = len(make_fns)
        self.step_timeout = step_timeout
        bounds = [round(w * self.num_envs / num_workers) for w in range(num_workers + 1)]
        self.ranges = [range(bounds[w], bounds[w + 1]) for w in range(num_workers)]
        self.memory_fd = _anonymous_file()
        self.workers: list[WorkerProcess] = []
        self.close = weakref.finalize(self, _close, self.workers, self.memory_fd)
        pickled = [cloudpickle.dumps(with_imports([make_fns[i] for i in envs])) for envs in self.ranges]
        for w, (envs, fns) in enumerate(zip(self.ranges, pickled, strict=True)):
            name = f"Worker {w} (environments {envs[0]} to {envs[-1]})"
            self.workers.append(WorkerProcess(gym_group.__spec__.name, name, (fns, envs[0]), [self.memory_fd]))
        try:
            found = self._call("describe", [()] * num_workers, START_TIMEOUT)
            if any(spaces[:2] != found[0][:2] for spaces in found):
                raise EnvError(f"All environments need the same spaces; the workers found {[s[:2] for s in found]}.")
        except EnvError:
            self.close()
            raise
        self.observation_space, self.action_space, _ = found[0]
        limits = [limit for *_, limit in found]
        self.max_episode_steps = None if None in limits else max(limits)

    def allocate(self, metrics: Sequence[str]) -> Buffers:
        """Make the shared buffers and let every worker write into its rows."""
        layout = (self.observation_space, self.action_space, self.num_envs, MAX_METRICS)
        _, size = make_buffers(*layout)
        os.ftruncate(self.memory_fd, size)
        buffers, _ = make_buffers(*layout, mmap.mmap(self.memory_fd, size))
        self._call_all("share", self.num_envs, size, metrics)
        return buffers

    def watch(self, metrics: Sequence[str]) -> None:
        """Let every worker read these metrics from now on."""
        self._call_all("watch", metrics)

    def reset(self, seeds: Sequence[int] | None) -> None:
        """Start a new episode everywhere; environment ``i`` gets ``seeds[i]``."""
        self._call("reset", [(None if seeds is None else seeds[envs.start : envs.stop],) for envs in self.ranges])

    def step(self) -> tuple[bool, Found]:
        """Apply the actions in the buffers; return whether any episode ended, and metrics that are not watched yet."""
        answers = self._call_all("step")
        found: Found = {}
        for envs, (_, new) in zip(self.ranges, answers, strict=True):
            for name, values in new.items():
                found.setdefault(name, {}).update({envs.start + i: value for i, value in values.items()})
        return any(ended for ended, _ in answers), found

    def state(self) -> list[dict[str, Any]]:
        """Return the state of every environment; a StateError where one cannot be saved."""
        try:
            groups = self._call_all("state")
        except EnvError as error:
            if "StateError" in str(error):
                raise gym_group.StateError(str(error)) from error
            raise
        return [state for group in groups for state in group]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Put every environment back into its saved state."""
        self._call("load", [(states[envs.start : envs.stop],) for envs in self.ranges], START_TIMEOUT)

    def render(self, index: int) -> NDArray[np.uint8]:
        """Render environment ``index``."""
        worker = next(w for w, envs in enumerate(self.ranges) if index in envs)
        return np.asarray(self._call("render", {worker: (index - self.ranges[worker].start,)})[0])

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker with the same arguments."""
        return self._call(method, [arguments] * len(self.workers))

    def _call(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | Mapping[int, tuple[Any, ...]], timeout: float = 0.0
    ) -> list[Any]:
        """Call a method of all workers, or of those that a mapping names, at once; returns their answers."""
        if not self.close.alive:
            raise EnvError("The environments are closed.")
        calls = arguments if isinstance(arguments, Mapping) else dict(enumerate(arguments))
        for worker, values in calls.items():
            self.workers[worker].send(method, *values)
        called = {worker: self.workers[worker] for worker in calls}
        return list(receive_all(called, max(timeout, self.step_timeout), self._abort).values())

    def _abort(self, worker: int, how: WorkerLostError) -> None:
        self.close()
        raise EnvError(f"{self.workers[worker].name} {how}.")


def _anonymous_file() -> int:
    """Return the descriptor of a nameless file, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("apexrl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _close(workers: Sequence[WorkerProcess], memory_fd: int) -> None:
    stop(workers)
    os.close(memory_fd)
