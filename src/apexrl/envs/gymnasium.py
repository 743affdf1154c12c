"""Gymnasium environments as a ``VecEnv``, in this process or in worker processes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import load_env_creator
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from apexrl.envs import gym_group
from apexrl.envs.base import VecEnv
from apexrl.envs.gym_group import Buffers, EnvGroup, MakeFn, Tree, make_buffers, map_tree
from apexrl.errors import EnvError, EnvStateError, did_you_mean
from apexrl.metrics import MetricSpec
from apexrl.types import EnvStep, Observation

START_TIMEOUT = 300.0
"""Seconds a worker may take to make its environments, or to put them back into a saved state."""

T = TypeVar("T")


class GymVecEnv(VecEnv):
    """Gymnasium environments stepped together.

    Observations become float32 tensors (pictures stay uint8), Discrete ones one-hot vectors, Tuple ones
    groups named ``"0"``, ``"1"``, …. Actions are clipped to their bounds. Numbers in ``info`` named
    ``success``, ``fail``, or with ``reward`` at either end of their name are reported as metrics.

    Args:
        make_fns: functions that each make one environment; all need the same spaces.
        num_workers: processes that share the environments; 0 steps them in this process, which is faster
            unless one step takes about a millisecond or more.
        metrics: further numbers to take from ``info``, or other ways to fold those found.
        device: where the tensors are wanted; the simulators run on the CPU.
        step_timeout: seconds after which a worker that has not answered a step is given up.

    Raises:
        EnvError: when an environment cannot be made or has a space that is not supported.
    """

    def __init__(
        self,
        make_fns: Sequence[MakeFn],
        *,
        num_workers: int = 0,
        metrics: Sequence[MetricSpec] | None = None,
        device: torch.device | str = "cpu",
        step_timeout: float = 60.0,
    ) -> None:
        if not make_fns:
            raise EnvError("GymVecEnv needs at least one function that makes an environment.")
        self.num_envs = len(make_fns)
        self.device = torch.device(device)
        self._make_fns = list(make_fns)
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "metrics": metrics,
            "step_timeout": step_timeout,
        }
        self._group: _LocalGroup | _Workers
        if num_workers > 0:
            self._group = _Workers(self._make_fns, min(num_workers, self.num_envs), step_timeout)
        else:
            self._group = _LocalGroup(self._make_fns)
        group = self._group
        self.observation_space, self.action_space = group.observation_space, group.action_space
        self.max_episode_steps = group.max_episode_steps
        specs = {name: MetricSpec(name) for name in group.probe()} | {spec.name: spec for spec in metrics or ()}
        self._metric_specs = specs
        buffers = group.bind(list(specs))
        self._action = torch.from_numpy(buffers.action)
        self._obs = _observation(buffers.obs, self.num_envs)
        # The tensors share memory with the buffers, so these two tuples serve every step.
        self._running = EnvStep(
            obs=self._obs,
            reward=torch.from_numpy(buffers.reward),
            terminated=torch.from_numpy(buffers.terminated),
            truncated=torch.from_numpy(buffers.truncated),
            metric={name: torch.from_numpy(buffers.metric[m]) for m, name in enumerate(specs)},
        )
        self._ended = self._running._replace(final_obs=_observation(buffers.final_obs, self.num_envs))
        self._must_copy = self.device.type != "cpu"

    @property
    def metric_specs(self) -> Mapping[str, MetricSpec]:
        """The metrics found in ``info``, and those asked for."""
        return self._metric_specs

    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere; environment ``i`` gets ``seed + i``."""
        self._group.reset(seed)
        return self._obs.to(self.device) if self._must_copy else self._obs

    def step(self, action: Tensor) -> EnvStep:
        """Apply one action ``[N, A]`` to each environment."""
        if action.shape != self._action.shape:
            raise EnvError(f"step needs actions {list(self._action.shape)}, got {list(action.shape)}.")
        self._action.copy_(action.detach())
        step = self._ended if self._group.step() else self._running
        return _to_device(step, self.device) if self._must_copy else step

    def spawn(self, num_envs: int) -> GymVecEnv:
        """Make an independent environment of the same kind, with the make functions in turn."""
        make_fns = [self._make_fns[i % self.num_envs] for i in range(num_envs)]
        return GymVecEnv(make_fns, device=self.device, **self._options)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of every environment; None before the first reset or when it cannot be saved."""
        states = self._group.state()
        return None if states is None else {"envs": [_map_values(torch.from_numpy, np.ndarray, s) for s in states]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put every environment back into its saved state.

        Gymnasium's MuJoCo tasks are set directly. Any other environment begins its episode again with the
        same random numbers and repeats its actions; the observation must then be the saved one.

        Raises:
            EnvStateError: when an environment does not come back exactly.
        """
        if len(state["envs"]) != self.num_envs:
            raise EnvStateError(f"The state is of {len(state['envs'])} environments, there are {self.num_envs} here.")
        self._group.load([_map_values(_to_numpy, Tensor, s) for s in state["envs"]])

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Draw environment ``index`` as an ``[H, W, 3]`` picture."""
        return self._group.render(index)

    def close(self) -> None:
        """Close the environments and end the workers."""
        self._group.close()


def _observation(tree: Tree, num_envs: int) -> Observation:
    """Wrap the arrays of an observation as tensors that share their memory."""
    if not isinstance(tree, Mapping):
        return torch.from_numpy(tree)
    groups = TensorDict(
        {key: _observation(part, num_envs) for key, part in tree.items()}, batch_size=[num_envs], device="cpu"
    )
    groups.lock_()  # every step returns this object, so a key added by one reader would stay
    return groups


def _to_device(step: EnvStep, device: torch.device) -> EnvStep:
    return EnvStep(
        obs=step.obs.to(device),
        reward=step.reward.to(device),
        terminated=step.terminated.to(device),
        truncated=step.truncated.to(device),
        final_obs=None if step.final_obs is None else step.final_obs.to(device),
        metric={name: value.to(device) for name, value in step.metric.items()},
    )


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy()


def _map_values(function: Callable[[Any], Any], kind: type, value: Any) -> Any:
    return map_tree(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, value)


class _LocalGroup:
    """One ``EnvGroup`` in this process, with errors of the package."""

    def __init__(self, make_fns: Sequence[MakeFn]) -> None:
        self.num_envs = len(make_fns)
        self.group = group = _checked("make", EnvGroup, make_fns)
        self.observation_space, self.action_space = group.observation_space, group.action_space
        self.max_episode_steps = group.max_episode_steps

    def probe(self) -> list[str]:
        return _checked("try", self.group.probe)

    def bind(self, metrics: Sequence[str]) -> Buffers:
        buffers, _ = make_buffers(self.observation_space, self.action_space, self.num_envs, len(metrics))
        self.group.bind(buffers, metrics)
        return buffers

    def reset(self, seed: int | None) -> None:
        _checked("reset", self.group.reset, seed)

    def step(self) -> bool:
        try:
            return self.group.step()
        except Exception as error:
            raise EnvError(_describe("step", error)) from error

    def state(self) -> list[dict[str, Any]] | None:
        try:
            return self.group.state()
        except gym_group.StateError:
            return None

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        try:
            self.group.load(states)
        except Exception as error:
            raise EnvStateError(str(error)) from error

    def render(self, index: int) -> NDArray[np.uint8]:
        return _checked("draw", self.group.render, index)

    def close(self) -> None:
        self.group.close()


def _checked(verb: str, function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except Exception as error:
        raise EnvError(_describe(verb, error)) from error


def _describe(verb: str, error: Exception) -> str:
    note = " ".join(getattr(error, "__notes__", ()))
    return f"Could not {verb} the environment: {type(error).__name__}: {error} {note}".rstrip()


class _Workers:
    """The environments split over processes, which write their results into memory shared with this one."""

    def __init__(self, make_fns: Sequence[MakeFn], num_workers: int, step_timeout: float) -> None:
        self.num_envs = len(make_fns)
        self.step_timeout = step_timeout
        bounds = [round(w * self.num_envs / num_workers) for w in range(num_workers + 1)]
        self.ranges = [range(bounds[w], bounds[w + 1]) for w in range(num_workers)]
        self.memory_fd = _anonymous_file()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection[Any, Any]] = []
        self.close = weakref.finalize(self, _stop, self.processes, self.connections, self.memory_fd)
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
        # -P keeps this folder off the worker's path, where our gymnasium.py would hide Gymnasium.
        process = subprocess.Popen(
            [sys.executable, "-P", gym_group.__file__, str(theirs.fileno()), str(self.memory_fd)],
            pass_fds=(theirs.fileno(), self.memory_fd),
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.processes.append(process)
        self.connections.append(ours)

    def probe(self) -> list[str]:
        names: list[str] = self._call("probe", [()], START_TIMEOUT)[0]
        return names

    def bind(self, metrics: Sequence[str]) -> Buffers:
        layout = (self.observation_space, self.action_space, self.num_envs, len(metrics))
        _, size = make_buffers(*layout)
        os.ftruncate(self.memory_fd, size)
        buffers, _ = make_buffers(*layout, mmap.mmap(self.memory_fd, size))
        self._call("bind", [(self.num_envs, size, metrics)] * len(self.ranges))
        return buffers

    def reset(self, seed: int | None) -> None:
        self._call("reset", [(seed,)] * len(self.ranges))

    def step(self) -> bool:
        return any(self._call("step", [()] * len(self.ranges)))

    def state(self) -> list[dict[str, Any]] | None:
        try:
            groups = self._call("state", [()] * len(self.ranges))
        except _WorkerError as error:
            if "StateError" in str(error):
                return None
            raise
        return [state for group in groups for state in group]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._call("load", [(states[envs.start : envs.stop],) for envs in self.ranges], START_TIMEOUT)
        except EnvError as error:
            raise EnvStateError(str(error)) from error

    def render(self, index: int) -> NDArray[np.uint8]:
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


def _stop(processes: list[subprocess.Popen[bytes]], connections: list[Connection[Any, Any]], memory_fd: int) -> None:
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


def find_gym_id(env_id: str) -> str | None:
    """Return the id by which ``gymnasium.make`` finds it in any process; None when it is unknown."""
    if env_id in gym.registry:
        return env_id
    module, _, name = env_id.rpartition(":")
    for package in [module] if module else ["gymnasium_robotics"]:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # one of its dependencies advertises itself there
                importlib.import_module(package)
        except (ImportError, TypeError, ValueError):  # there is none, or it is no module's name
            return None
        if name in gym.registry:
            return f"{package}:{name}"
    return None


def gym_make_fns(env_id: str, num_envs: int, **kwargs: Any) -> list[MakeFn]:
    """Return functions that make a registered environment, able to draw pictures where it can.

    Args:
        env_id: an id of Gymnasium's registry, or ``module:id``.
        num_envs: how many functions.
        **kwargs: passed to ``gymnasium.make``.

    Raises:
        EnvError: for an unknown id, with the nearest known one, or when a package is missing.
    """
    found = find_gym_id(env_id)
    if found is None:
        raise EnvError(f"Gymnasium has no environment {env_id!r}.{did_you_mean(env_id, gym.registry)}")
    entry_point = gym.registry[found.rpartition(":")[2]].entry_point
    try:
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise EnvError(f"{env_id} needs a package that is not installed: {error}{_extra(error)}") from error
    # Nothing is drawn until render is called.
    if "rgb_array" in getattr(creator, "metadata", {}).get("render_modes", ()):
        kwargs = {"render_mode": "rgb_array"} | kwargs
    # Of gymnasium itself, so that a worker needs no import of this package to call it.
    return [functools.partial(gym.make, found, **{"disable_env_checker": True} | kwargs)] * num_envs


def _extra(error: Exception) -> str:
    for word, extra in (("robotics", "robotics"), ("mujoco", "mujoco"), ("pygame", "classic")):
        if word in str(error).lower():
            return f" Install it with: pip install 'apexrl[{extra}]'"
    return ""
