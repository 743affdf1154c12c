"""Episodes of a task suite in Ray actors, on this machine or on a cluster."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from apexrl.collectors.ray_session import (
    Arrays,
    Weights,
    load_weights,
    pack,
    portable,
    seed_everything,
    weights_of,
)
from apexrl.collectors.ray_workers import RayWorkers
from apexrl.collectors.suite_runner import EPISODE_ID, SuiteRunner
from apexrl.envs.suite_env import SuiteVecEnv
from apexrl.envs.suites.base import InitState
from apexrl.policies.base import Policy
from apexrl.types import DONE, METRIC, VALID


class RaySuiteRunner(SuiteRunner):
    """A ``SuiteRunner`` whose episodes are spread over Ray actors, each with environments and a copy of the policy.

    Every call sends the weights once, through Ray's object store, and each worker runs every ``num_workers``-th
    episode. A worker that dies is replaced, and its episodes are run again. The workers draw from seeds that come
    from PyTorch's generator here, so what is seeded or restored here repeats there.

    Args:
        make_env: makes the environments of one worker; must be picklable. It is also called here, for what there is
            to know of the suite; no simulator runs here, but in other environments that ``run_episodes`` is given.
        policy: its current weights act.
        num_workers: actors.
        rollout_timeout: seconds that a worker may take for its episodes of one call before it is replaced.
        worker_options: what Ray should know of an actor, such as ``num_cpus`` (1 when not given) or ``num_gpus``.
        on_message: told which workers die; the log when not given.
        random_init: as for ``SuiteRunner``; the states are drawn here.

    Raises:
        ConfigError: when Ray is not installed or not there, or an option is impossible.
        EnvError: when the workers do not start.
    """

    def __init__(
        self,
        make_env: Callable[[], SuiteVecEnv],
        policy: Policy,
        *,
        num_workers: int = 2,
        rollout_timeout: float = 3600.0,
        worker_options: Mapping[str, Any] | None = None,
        on_message: Callable[[str], None] | None = None,
        random_init: bool = False,
    ) -> None:
        self._workers = RayWorkers(
            _SuiteWorker,
            num_workers,
            timeout=rollout_timeout,
            options=worker_options,
            on_message=on_message,
            owner="RaySuiteRunner",
        )
        try:
            super().__init__(make_env(), policy, random_init=random_init)
            self.on_message = on_message or self.on_message
            factory = self._workers.ray.put(make_env, "make_env")
            self._sent = policy
            self._num_envs: int = sum(self._workers.start(factory, self._workers.ray.put(portable(policy), "policy")))
        except BaseException:
            self.close()
            raise
        self._created, self._seconds_creating = 0, 0.0

    @property
    def num_envs(self) -> int:
        """Environments of all workers together."""
        return self._num_envs

    @property
    def created(self) -> int:
        """Simulators that the workers made so far."""
        return self._created

    @property
    def seconds_creating(self) -> float:
        """Time that making them took, of all workers together."""
        return self._seconds_creating

    def metrics(self) -> dict[str, float]:
        """Return how often a worker died or hung with the episodes it was running, so far."""
        return {"collect/lost_rollouts": float(self._workers.lost)}

    @torch.no_grad()
    def run_episodes(
        self,
        episodes: Sequence[InitState],
        *,
        keep: Collection[str] | None = None,
        deterministic: bool = False,
        env: SuiteVecEnv | None = None,
        max_steps: int | None = None,
    ) -> TensorDict:
        """Run every episode to its end, as ``SuiteRunner`` does; with other environments, in those and here.

        Raises:
            EnvError: when workers die again and again.
        """
        if env is not None and env is not self.env:
            return super().run_episodes(episodes, keep=keep, deterministic=deterministic, env=env, max_steps=max_steps)
        workers = self._workers
        workers.require_open()
        workers.on_message = self.on_message
        if self.policy is not self._sent:
            self._sent = self.policy
            workers.arguments = workers.arguments[0], workers.ray.put(portable(self.policy), "policy")
            for actor in workers.actors:
                actor.follow.remote(workers.arguments[1])
        weights = workers.ray.put(weights_of(self.policy), "weights")
        size = len(workers.actors)
        calls = []
        for index in range(min(size, len(episodes))):
            seed = int(torch.randint(2**31 - 1, ()))
            part = list(episodes[index::size])
            calls.append((part, None if keep is None else frozenset(keep), deterministic, max_steps, weights, seed))

        def order(index: int) -> Any:
            return workers.actors[index].run.remote(*calls[index])

        refs = {index: order(index) for index in range(len(calls))}
        found = workers.gather(refs, order, "its episodes are run again in a new one.")
        parts: list[_Episodes] = [found[index] for index in range(len(calls))]
        self._created += sum(part.created for part in parts)
        self._seconds_creating += sum(part.seconds_creating for part in parts)
        return self._join([part.arrays for part in parts], len(episodes)).to(self.env.device)

    def release_envs(self) -> None:
        """Close the simulators of the workers, which stay."""
        for actor in self._workers.actors:
            actor.release_envs.remote()

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def _join(self, parts: list[Arrays], num_episodes: int) -> TensorDict:
        """Put the episodes back into their columns, padded with zeros to the length of the longest."""
        T = max(part[(DONE,)].shape[0] for part in parts)
        batch = TensorDict({}, batch_size=[T, num_episodes])
        for key, first in parts[0].items():
            column = np.zeros((T, num_episodes, *first.shape[2:]), first.dtype)
            for index, part in enumerate(parts):
                column[: part[key].shape[0], index :: len(self._workers.actors)] = part[key]
            batch[key] = torch.from_numpy(column)
        # Each worker numbers its own.
        batch[METRIC, EPISODE_ID] = torch.arange(float(num_episodes)).view(1, -1, 1) * batch[VALID]
        return batch


class _Episodes(NamedTuple):
    arrays: Arrays
    created: int
    """Simulators that were made for them."""
    seconds_creating: float


class _SuiteWorker:
    """What runs in an actor."""

    def __init__(self, make_env: Callable[[], SuiteVecEnv], policy: Policy) -> None:
        torch.set_num_threads(1)
        self.make_env, self.policy = make_env, copy.deepcopy(policy)
        self.made: SuiteRunner | None = None

    @property
    def runner(self) -> SuiteRunner:
        # Made by the first call, not with the actor: what make_env raises then reaches the caller as it is.
        if self.made is None:
            self.made = SuiteRunner(self.make_env(), self.policy)
        return self.made

    def describe(self) -> int:
        return self.runner.num_envs

    def follow(self, policy: Policy) -> None:
        self.policy = self.runner.policy = copy.deepcopy(policy)

    def release_envs(self) -> None:
        self.runner.release_envs()

    def run(
        self,
        episodes: list[InitState],
        keep: Collection[str] | None,
        deterministic: bool,
        max_steps: int | None,
        weights: Weights,
        seed: int,
    ) -> _Episodes:
        runner = self.runner
        before = runner.created, runner.seconds_creating
        load_weights(self.policy, weights)
        seed_everything(seed)
        arrays = pack(runner.run_episodes(episodes, keep=keep, deterministic=deterministic, max_steps=max_steps))
        return _Episodes(arrays, runner.created - before[0], runner.seconds_creating - before[1])
