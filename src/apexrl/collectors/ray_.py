"""Collection in Ray actors, on this machine or on a cluster."""

from __future__ import annotations

import copy
import logging
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from apexrl.collectors.async_ import POLICY_VERSION
from apexrl.collectors.base import BaseCollector
from apexrl.collectors.ray_session import (
    Arrays,
    RaySession,
    Weights,
    first_line,
    join,
    load_weights,
    pack,
    portable,
    seed_everything,
    weights_of,
)
from apexrl.collectors.sync import SyncCollector, add_values
from apexrl.envs.base import VecEnv
from apexrl.errors import ConfigError, EnvError
from apexrl.metrics import EpisodeMetrics, MetricSpec, aggregate_metrics, fold_episodes
from apexrl.policies.base import Policy
from apexrl.types import DONE, NEXT_OBSERVATION, REWARD, VALUE

MAX_DEATHS = 3
"""Workers in a row, in the same place, that may die without a rollout."""
POLL_SECONDS = 0.2
"""How long it may take to notice a dead worker while others still collect."""


class RayCollector(BaseCollector):
    """Collects in Ray actors, each with its own environments and a copy of the policy.

    A batch ``[T, N]`` is one rollout of every worker side by side, always in the same columns. Every call of
    ``collect`` publishes the current weights as the next version, once, through Ray's object store, and orders one
    rollout with them from every worker. With ``max_staleness`` 0 it waits for these; otherwise it hands out those
    that were ordered that many calls ago, while the workers go on. Every transition is stamped with its version
    (``policy_version``), each rollout is handed out once, in order, and none is older than ``max_staleness`` versions.
    States are valued here, with the current weights.

    A worker that dies, or gives no rollout for ``rollout_timeout`` seconds, is replaced. The rollout that it was
    collecting is lost; its successor starts new episodes and collects in its place, so the batch is still whole.

    Joins the Ray that the program or ``RAY_ADDRESS`` names, or else starts one on this machine, which ends with the
    last collector. Each worker draws from a seed of its own, and which weights collect which rollout does not depend
    on speed: as long as no worker dies, a run repeats.

    Args:
        make_env: makes the environments of one worker, all of the same number; must be picklable.
        policy: its weights are published.
        device: where the batch is handed over; the policy's device when not given.
        num_workers: actors.
        keep: keys of the batch besides ``policy_version``; None keeps everything that on-policy learning can use.
        seed: of the first episodes; None draws one.
        max_staleness: how many versions old a rollout is when it is handed out, at most.
        rollout_timeout: seconds to wait for a rollout before its worker is replaced.
        worker_options: what Ray should know of an actor, such as ``num_cpus`` (1 when not given) or ``resources``.
        on_message: told which workers die, and what else people should know; the log when not given.

    Raises:
        ConfigError: when Ray is not installed or not there, or an option is impossible.
        EnvError: when the workers do not start.
    """

    def __init__(
        self,
        make_env: Callable[[], VecEnv],
        policy: Policy,
        device: torch.device | str | None = None,
        *,
        num_workers: int = 2,
        keep: Collection[str] | None = None,
        seed: int | None = None,
        max_staleness: int = 1,
        rollout_timeout: float = 600.0,
        worker_options: Mapping[str, Any] | None = None,
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        for name, value, least in (("num_workers", num_workers, 1), ("max_staleness", max_staleness, 0)):
            if value < least:
                raise ConfigError(f"RayCollector.{name} must be at least {least}, got {value}.")
        if rollout_timeout <= 0:
            raise ConfigError(f"RayCollector.rollout_timeout must be positive, got {rollout_timeout}.")
        self.policy, self.max_staleness, self.rollout_timeout = policy, max_staleness, rollout_timeout
        self.device = torch.device(device) if device is not None else policy.device
        self.wants_value = keep is None or VALUE in keep
        self.episode_metrics = EpisodeMetrics()
        self.on_message = on_message or logging.getLogger("apexrl").warning
        self._keep = None if keep is None else frozenset(keep)
        self._options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **(worker_options or {}), "max_restarts": 0}
        self._version, self._n_steps = -1, 0
        self._lost = self._dropped = 0
        self._num_taken, self._age_sum, self._seconds_sum = 0, 0, 0.0
        """Of the rollouts handed out since ``metrics``."""
        self._failure: BaseException | None = None
        self._told_of_state = False
        self._workers: list[_Place] = []
        self._ray = RaySession(num_workers)
        self._stop = weakref.finalize(self, self._ray.leave)
        try:
            self._factory = self._ray.put(make_env, "make_env")
            self._policy = self._ray.put(portable(policy), "policy")
            self._weights = self._policy  # until the first collect
            self._workers += [_Place(index, self._new_actor()) for index in range(num_workers)]
            self._describe()
        except BaseException:
            self.close()
            raise
        self._plan_start(int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed)

    @property
    def num_envs(self) -> int:
        """Environments of all workers together, N of the batch."""
        return len(self._workers) * self._envs_per_worker

    def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
        """Publish the weights and return a rollout ``[n_steps, N]`` of all workers; waits for it.

        Another ``n_steps`` than before, or ``reset``, drops what was ordered ahead.

        Raises:
            EnvError: when workers die again and again, or the collector is closed.
            Exception: what an environment or the policy raised in a worker; also at every later call.
        """
        self._raise_if_over()
        if reset or n_steps != self._n_steps or self._version - self._oldest_order() >= self.max_staleness:
            self._drop_all()
        if reset:
            self._start_over()
        self._n_steps = n_steps
        self._version += 1
        self._weights = self._ray.put(weights_of(self.policy), "weights")
        for worker in self._workers:
            while len(worker.orders) <= self.max_staleness:
                self._order(worker)
        rollouts = self._take()
        self._num_taken += len(rollouts)
        self._age_sum += sum(self._version - rollout.version for rollout in rollouts)
        self._seconds_sum += sum(rollout.seconds for rollout in rollouts)
        batch = self._fold(rollouts)
        self.policy.eval()
        batch = batch.to(self.policy.device)
        if self.wants_value:
            add_values(batch, self.policy)
            del batch[NEXT_OBSERVATION]
        return batch.to(self.device)

    def metrics(self) -> dict[str, float]:
        """Return how the workers do.

        ``collect/staleness``: mean age in versions of the rollouts handed out, since the last call of this method.
        ``collect/worker_seconds``: mean time that a worker took for one of them. ``collect/lost_rollouts`` and
        ``collect/dropped``: rollouts that died with their workers, and that were collected in vain, so far.
        """
        numbers = {"collect/lost_rollouts": float(self._lost), "collect/dropped": float(self._dropped)}
        if self._num_taken:
            numbers["collect/staleness"] = self._age_sum / self._num_taken
            numbers["collect/worker_seconds"] = self._seconds_sum / self._num_taken
            self._num_taken, self._age_sum, self._seconds_sum = 0, 0, 0.0
        return numbers

    def follow(self, policy: Policy) -> None:
        """Act with this policy from the next rollout on; what was ordered ahead with the old one is dropped."""
        if policy is not self.policy:
            self._raise_if_over()
            self._drop_all()
            self.policy = policy
            self._policy = self._ray.put(portable(policy), "policy")
            for worker in self._workers:
                worker.actor.follow.remote(self._policy)

    def restart(self, seed: int) -> None:
        """Forget what was ordered ahead; the next call of ``collect`` starts new episodes from a seed."""
        self._raise_if_over()
        self._drop_all()
        self._plan_start(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return version and statistics of ended episodes; the state of the environments is not saved."""
        if not self._told_of_state and self._version >= 0:
            self._told_of_state = True
            self.on_message("Ray workers cannot save their state: a resumed run will start new episodes there.")
        return {
            "carry": {},  # as other collectors have it, which start new episodes then
            "episode_metrics": {**self.episode_metrics.state_dict(), "unfinished": {}},
            "version": self._version,
            "num_starts": max(worker.num_starts for worker in self._workers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, or that of another collector; every worker starts episodes that are new."""
        self._raise_if_over()
        self._drop_all()
        self.episode_metrics.load_state_dict(state["episode_metrics"], torch.device("cpu"))
        self._version = state.get("version", -1)
        for worker in self._workers:
            worker.num_starts = state.get("num_starts", worker.num_starts)
        self._start_over()

    def close(self) -> None:
        """End the workers, also in the middle of a rollout."""
        for worker in self._workers if self._stop.alive else ():
            self._ray.kill(worker.actor)
        self._stop()

    # Orders

    def _new_actor(self) -> Any:
        make = self._ray.remote(_Worker).options(**self._options)
        return make.remote(self._factory, self._policy, self._keep)

    def _describe(self) -> None:
        """Learn what the environments are, and wait until every worker has made its own."""
        refs = [worker.actor.describe.remote() for worker in self._workers]
        ready, late = self._ray.wait(refs, num_returns=len(refs), timeout=self.rollout_timeout)
        if late:
            raise EnvError(
                f"Only {len(ready)} of {len(refs)} Ray workers started within {self.rollout_timeout:g} s; Ray has "
                f"{self._ray.num_cpus:g} CPUs. Use fewer workers, or a larger cluster."
            )
        try:
            found = self._ray.get(refs)
        except self._ray.lost_errors as error:
            raise EnvError(f"A Ray worker died while it started: {first_line(error)}") from error
        if len({description.num_envs for description in found}) > 1:
            raise ConfigError(f"make_env must always make the same number, got {[d.num_envs for d in found]}.")
        self._envs_per_worker: int = found[0].num_envs
        self.metric_specs: Mapping[str, MetricSpec] = found[0].metric_specs
        if not found[0].gives_final_obs:
            warnings.warn(
                f"{found[0].name} hides the last state of an episode; values at time limits use the last visible one.",
                stacklevel=3,
            )

    def _plan_start(self, seed: int) -> None:
        self.seed = seed
        for worker in self._workers:
            worker.num_starts = 0
        self._start_over()

    def _start_over(self) -> None:
        """Let every worker start new episodes with its next rollout."""
        self.episode_metrics.restart()
        for worker in self._workers:
            worker.starts_over = True

    def _order(self, worker: _Place) -> None:
        seed = None
        if worker.starts_over:
            assert self.seed is not None
            seed = _worker_seed(self.seed, worker.index, worker.num_starts)
            worker.starts_over = False
            worker.num_starts += 1
        ref = worker.actor.collect.remote(self._n_steps, self._version, self._weights, seed)
        worker.orders.append(_Order(ref, self._version))

    def _oldest_order(self) -> int:
        return min((worker.orders[0].version for worker in self._workers if worker.orders), default=self._version)

    def _take(self) -> list[_Rollout]:
        """Wait for the oldest order of every worker, and replace workers that die meanwhile."""
        found: dict[int, _Rollout] = {}
        since = dict.fromkeys(range(len(self._workers)), time.monotonic())
        while len(found) < len(self._workers):
            missing = {w.orders[0].ref: w for w in self._workers if w.index not in found}
            ready, late = self._ray.wait(list(missing), num_returns=len(missing), timeout=POLL_SECONDS)
            for ref in ready:
                worker = missing[ref]
                try:
                    found[worker.index] = self._ray.get(ref)
                except self._ray.lost_errors as error:
                    self._replace(worker, f"died ({first_line(error)})")
                    since[worker.index] = time.monotonic()
                except Exception as error:
                    error.add_note(f"Raised in Ray worker {worker.index}.")
                    self._failure = error
                    raise
            for worker in (missing[ref] for ref in late):
                if time.monotonic() - since[worker.index] > self.rollout_timeout:
                    self._replace(worker, f"gave no rollout for {self.rollout_timeout:g} s")
                    since[worker.index] = time.monotonic()
        for worker in self._workers:
            worker.orders.popleft()
            worker.deaths = 0
        return [found[worker.index] for worker in self._workers]

    def _replace(self, worker: _Place, what: str) -> None:
        self._lost += 1
        worker.deaths += 1
        if worker.deaths > MAX_DEATHS:
            raise EnvError(
                f"Ray worker {worker.index} {what}, as did the {MAX_DEATHS} before it in this place. "
                "Look into the messages of the simulator, or give each worker more memory or fewer environments."
            )
        self.on_message(
            f"Ray worker {worker.index} {what}: the rollout it was collecting is lost, and a new worker starts new "
            "episodes in its place."
        )
        self._ray.kill(worker.actor)
        worker.actor = self._new_actor()
        self._cut(slice(worker.index * self._envs_per_worker, (worker.index + 1) * self._envs_per_worker))
        worker.starts_over = True
        # Those that had not begun are ordered again, with the newest weights.
        num_orders = len(worker.orders)
        worker.orders.clear()
        for _ in range(num_orders):
            self._order(worker)

    def _drop_all(self) -> None:
        """Wait for what was ordered ahead; only its episodes count."""
        while any(worker.orders for worker in self._workers):
            self._dropped += len(self._workers)
            self._fold(self._take())

    def _raise_if_over(self) -> None:
        if not self._stop.alive:
            raise EnvError("The RayCollector is closed.")
        if self._failure is not None:
            raise self._failure

    # What came

    def _fold(self, rollouts: list[_Rollout]) -> TensorDict:
        """Join rollouts over their environments, and count the episodes that ended."""
        batch = join([rollout.arrays for rollout in rollouts])
        versions = torch.tensor([rollout.version for rollout in rollouts]).repeat_interleave(self._envs_per_worker)
        batch[POLICY_VERSION] = versions.view(1, -1, 1).repeat(batch.shape[0], 1, 1)
        fold_episodes(batch, self.metric_specs, self.episode_metrics)
        return batch

    def _cut(self, columns: slice) -> None:
        """Forget the running episodes of some environments: they are now as they are when an episode begins."""
        if not self.episode_metrics.unfinished:
            return
        step = torch.zeros(1, columns.stop - columns.start, 1)
        storage = {REWARD: step, DONE: torch.ones_like(step, dtype=torch.bool)}
        storage.update({name: torch.full_like(step, torch.nan) for name in self.metric_specs})
        fresh = EpisodeMetrics()
        aggregate_metrics(storage, self.metric_specs, fresh)
        for name, value in self.episode_metrics.unfinished.items():
            value[columns] = fresh.unfinished[name]


class _Order(NamedTuple):
    ref: Any
    version: int


@dataclass
class _Place:
    """One of the workers, whichever actor it is now."""

    index: int
    actor: Any
    orders: deque[_Order] = field(default_factory=deque)
    """Oldest first; an actor takes them one after another."""
    num_starts: int = 0
    """Times that it started new episodes, each from another seed."""
    starts_over: bool = True
    """Whether the next order starts new episodes."""
    deaths: int = 0
    """Since the last rollout."""


class _Description(NamedTuple):
    name: str
    num_envs: int
    metric_specs: dict[str, MetricSpec]
    gives_final_obs: bool


class _Rollout(NamedTuple):
    version: int
    seconds: float
    arrays: Arrays


class _Worker:
    """What runs in an actor."""

    def __init__(self, make_env: Callable[[], VecEnv], policy: Policy, keep: Collection[str] | None) -> None:
        torch.set_num_threads(1)
        # A copy, for what comes from the object store may be read only.
        self.make_env, self.policy, self.keep = make_env, copy.deepcopy(policy), keep
        self.made: SyncCollector | None = None

    @property
    def collector(self) -> SyncCollector:
        # Made by the first call, not with the actor: what make_env raises then reaches the caller as it is.
        if self.made is None:
            with warnings.catch_warnings(action="ignore"):
                self.made = SyncCollector(self.make_env(), self.policy, keep=self.keep)
        return self.made

    def describe(self) -> _Description:
        env = self.collector.env
        return _Description(type(env).__name__, env.num_envs, dict(env.metric_specs), env.gives_final_obs)

    def follow(self, policy: Policy) -> None:
        self.policy = copy.deepcopy(policy)
        self.collector.follow(self.policy)

    def collect(self, n_steps: int, version: int, weights: Weights, seed: int | None) -> _Rollout:
        collector, begin = self.collector, time.perf_counter()
        load_weights(self.policy, weights)
        if seed is not None:
            seed_everything(seed)
            collector.restart(seed)
            collector.start()
        batch = collector.take_steps(n_steps)
        return _Rollout(version, time.perf_counter() - begin, pack(batch))


def _worker_seed(seed: int, index: int, num_starts: int) -> int:
    return int(np.random.SeedSequence([seed, index, num_starts]).generate_state(1)[0]) % 2**31
