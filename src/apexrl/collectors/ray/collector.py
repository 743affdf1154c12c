"""Collection in Ray actors, on this machine or on a cluster."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from apexrl.collectors.base import BaseCollector, SyncCollector, WarmUp
from apexrl.collectors.ray import session
from apexrl.collectors.ray.workers import RayWorkers
from apexrl.core.errors import ConfigError
from apexrl.core.metrics import EpisodeMetrics, MetricSpec, fold_episodes
from apexrl.core.system.seeding import ENV, POLICY, spawn_seed
from apexrl.core.types import DONE, METRIC, NEXT_OBSERVATION, NEXT_VALUE, POLICY_VERSION, REWARD, VALUE
from apexrl.envs.base import VecEnv
from apexrl.envs.options import check_at_least
from apexrl.policies.base import Policy


class RayCollector(BaseCollector):
    """Collects in Ray actors, each with its own environments and a copy of the policy.

    A batch ``[T, N]`` is one rollout of every worker side by side, always in the same columns. Every call of
    ``collect`` publishes the current weights as the next version, once, through Ray's object store, and orders one
    rollout with them from every worker. With ``max_staleness`` 0 it waits for these; otherwise it hands out those
    that were ordered that many calls ago, while the workers continue. Every transition is stamped with its version
    (``policy_version``), each rollout is handed out once, in order, and none is older than ``max_staleness`` versions.
    States are valued here, with the current weights.

    A worker that dies, or gives no rollout for ``rollout_timeout`` seconds, is replaced. The rollout that it was
    collecting is lost; its successor starts new episodes and collects in its place, so the batch is still whole.

    Joins the Ray that the program or ``RAY_ADDRESS`` names, or else starts one on this machine, which ends with the
    last collector. Each worker draws from a seed of its own, and which weights collect which rollout does not depend
    on speed: as long as no worker dies, a run repeats.

    Other arguments are those of ``SyncCollector``.

    Args:
        make_env: makes the environments of one worker, all of the same number; must be picklable.
        policy: its weights are published.
        num_workers: actors.
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
        check_at_least("RayCollector.", 0, max_staleness=max_staleness)
        tell = on_message or logging.getLogger("apexrl").warning
        self._workers = RayWorkers(_Actor, num_workers, rollout_timeout, worker_options, tell)
        self.policy, self.max_staleness = policy, max_staleness
        self.device = torch.device(device) if device is not None else policy.device
        self.wants_value = keep is None or VALUE in keep
        self._version, self._n_steps, self._dropped = -1, 0, 0
        self._ages: list[int] = []
        self._seconds: list[float] = []
        """Of the rollouts handed out since ``metrics``: their age in versions, and what they took."""
        self._failure: BaseException | None = None
        self._warm_up = WarmUp()
        self._told_of_state = False
        self._places = [_Place(index) for index in range(num_workers)]
        try:
            factory, sent = self._put(make_env, "make_env"), self._put(session.portable(policy), "policy")
            self._weights = sent  # until the first collect
            self._describe(self._workers.start(factory, sent, None if keep is None else frozenset(keep)))
        except BaseException:
            self.close()
            raise
        self._plan_start(int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed)

    @property
    def on_message(self) -> Callable[[str], None]:
        """Told which workers die, and what else people should know."""
        return self._workers.on_message

    @on_message.setter
    def on_message(self, tell: Callable[[str], None]) -> None:
        self._workers.on_message = tell

    @property
    def num_envs(self) -> int:
        """Environments of all workers together, N of the batch."""
        return len(self._places) * self._envs_per_worker

    def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
        """Publish the weights and return a rollout ``[n_steps, N]`` of all workers; waits for it.

        Another ``n_steps`` than before, ``reset``, or a normaliser that has seen its first observations since then,
        drops what was ordered ahead.

        Raises:
            EnvError: when workers die again and again, or the collector is closed.
            Exception: what an environment or the policy raised in a worker; also at every later call.
        """
        self._raise_if_over()
        oldest = min((place.orders[0].version for place in self._places if place.orders), default=self._version)
        is_stale = self._version - oldest >= self.max_staleness
        if self._warm_up.ends(self.policy) or reset or n_steps != self._n_steps or is_stale:
            self._drop_all()
        if reset:
            self._start_over()
        self._n_steps = n_steps
        self._version += 1
        self._weights = self._put(session.weights_of(self.policy), "weights")
        for place in self._places:
            while len(place.orders) <= self.max_staleness:
                self._order(place)
        rollouts = self._take()
        self._ages += [self._version - rollout.version for rollout in rollouts]
        self._seconds += [rollout.seconds for rollout in rollouts]
        batch = self._fold(rollouts)
        self.policy.eval()
        batch = batch.to(self.policy.device)
        if self.wants_value:
            with torch.no_grad():
                batch[VALUE], batch[NEXT_VALUE] = self.policy.values(batch)
            del batch[NEXT_OBSERVATION]
        return batch.to(self.device)

    def metrics(self) -> dict[str, float]:
        """Return how the workers do.

        ``collect/staleness``: mean age in versions of the rollouts handed out, since the last call of this method.
        ``collect/worker_seconds``: mean time that a worker took for one of them. ``collect/lost_rollouts`` and
        ``collect/dropped``: rollouts that died with their workers, and that were collected in vain, so far.
        """
        numbers = {"collect/lost_rollouts": float(self._workers.lost), "collect/dropped": float(self._dropped)}
        if self._ages:
            numbers |= {"collect/staleness": fmean(self._ages), "collect/worker_seconds": fmean(self._seconds)}
            self._ages, self._seconds = [], []
        return numbers

    def follow(self, policy: Policy) -> None:
        """Act with this policy from the next rollout on; what was ordered ahead with the old one is dropped."""
        if policy is not self.policy:
            self._raise_if_over()
            self._drop_all()
            self.policy, self._warm_up = policy, WarmUp()
            factory, _, keep = self._workers.arguments
            sent = self._put(session.portable(policy), "policy")
            self._workers.arguments = factory, sent, keep
            for actor in self._workers.actors:
                actor.follow.remote(sent)

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
            "num_starts": max(place.num_starts for place in self._places),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, or that of another collector; every worker starts episodes that are new."""
        self._raise_if_over()
        if state.get("version", 0) >= 0:
            self.on_message("Ray workers start new episodes, so this run will differ from an uninterrupted one.")
        self._drop_all()
        self.episode_metrics.load_state_dict(state["episode_metrics"], torch.device("cpu"))
        self._version = state.get("version", -1)
        for place in self._places:
            place.num_starts = state.get("num_starts", place.num_starts)
        self._start_over()

    def close(self) -> None:
        """End the workers, also in the middle of a rollout."""
        self._workers.close()

    # Orders

    def _put(self, value: Any, name: str) -> Any:
        return self._workers.ray.put(value, name)

    def _describe(self, found: list[_Description]) -> None:
        """Learn what the environments are."""
        if len({description.num_envs for description in found}) > 1:
            raise ConfigError(f"make_env must always make the same number, got {[d.num_envs for d in found]}.")
        self._envs_per_worker: int = found[0].num_envs
        if not found[0].gives_final_obs:
            hidden = "hides the last state of an episode; values at time limits use the last visible one."
            warnings.warn(f"{found[0].name} {hidden}", stacklevel=3)

    def _plan_start(self, seed: int) -> None:
        self.seed = seed
        for place in self._places:
            place.num_starts = 0
        self._start_over()

    def _start_over(self) -> None:
        """Let every worker start new episodes with its next rollout."""
        self.episode_metrics.restart()
        for place in self._places:
            place.starts_over = True

    def _order(self, place: _Place) -> None:
        seed = None
        if place.starts_over:
            assert self.seed is not None
            seed = spawn_seed(self.seed, place.index, place.num_starts)
            place.starts_over = False
            place.num_starts += 1
        ref = self._workers.actors[place.index].collect.remote(self._n_steps, self._version, self._weights, seed)
        place.orders.append(_Order(ref, self._version))

    def _take(self) -> list[_ActorRollout]:
        """Wait for the oldest order of every worker, and replace workers that die meanwhile."""
        refs = {place.index: place.orders[0].ref for place in self._places}
        try:
            found = self._workers.gather(refs, self._order_again)
        except Exception as error:
            self._failure = error
            raise
        for place in self._places:
            place.orders.popleft()
        return [found[place.index] for place in self._places]

    def _order_again(self, index: int) -> Any:
        """Order from a new worker what was ordered from the lost one, with the newest weights."""
        place = self._places[index]
        self._cut(slice(index * self._envs_per_worker, (index + 1) * self._envs_per_worker))
        place.starts_over = True
        lost, place.orders = place.orders, deque()
        for _ in lost:
            self._order(place)
        return place.orders[0].ref

    def _drop_all(self) -> None:
        """Wait for what was ordered ahead; only its episodes count."""
        while any(place.orders for place in self._places):
            self._dropped += len(self._places)
            self._fold(self._take())

    def _raise_if_over(self) -> None:
        self._workers.require_open()
        if self._failure is not None:
            raise self._failure

    # What came

    def _fold(self, rollouts: list[_ActorRollout]) -> TensorDict:
        """Join rollouts over their environments, and count the episodes that ended."""
        batch = session.side_by_side_arrays([rollout.arrays for rollout in rollouts])
        versions = torch.tensor([rollout.version for rollout in rollouts]).repeat_interleave(self._envs_per_worker)
        batch[POLICY_VERSION] = versions.view(1, -1, 1).repeat(batch.shape[0], 1, 1)
        # Workers find metrics at different times.
        specs = {name: spec for rollout in rollouts for name, spec in rollout.metric_specs.items()}
        fold_episodes(batch, specs, self.episode_metrics)
        return batch

    def _cut(self, columns: slice) -> None:
        """Forget the running episodes of some environments: they are now as they are when an episode begins."""
        if not self.episode_metrics.unfinished:
            return
        step = torch.zeros(1, columns.stop - columns.start, 1)
        specs, fresh = self.episode_metrics.specs, EpisodeMetrics()
        unknown = {name: torch.full_like(step, torch.nan) for name in specs}
        fold_episodes({REWARD: step, DONE: torch.ones_like(step, dtype=torch.bool), METRIC: unknown}, specs, fresh)
        for name, value in self.episode_metrics.unfinished.items():
            value[columns] = fresh.unfinished[name]


class _Order(NamedTuple):
    ref: Any
    version: int


@dataclass
class _Place:
    """One of the workers, whichever actor it is now."""

    index: int
    orders: deque[_Order] = field(default_factory=deque)
    """Oldest first; an actor takes them one after another."""
    num_starts: int = 0
    """Times that it started new episodes, each from another seed."""
    starts_over: bool = True
    """Whether the next order starts new episodes."""


class _Description(NamedTuple):
    name: str
    num_envs: int
    gives_final_obs: bool


class _ActorRollout(NamedTuple):
    version: int
    seconds: float
    arrays: session.Arrays
    metric_specs: dict[str, MetricSpec]


class _Actor:
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
        return _Description(type(env).__name__, env.num_envs, env.gives_final_obs)

    def follow(self, policy: Policy) -> None:
        self.policy = copy.deepcopy(policy)
        self.collector.follow(self.policy)

    def collect(self, n_steps: int, version: int, weights: session.Weights, seed: int | None) -> _ActorRollout:
        collector, begin = self.collector, time.perf_counter()
        session.load_weights(self.policy, weights)
        if seed is not None:
            session.seed_everything(spawn_seed(seed, POLICY))
            collector.restart(spawn_seed(seed, ENV))
            collector.start()
        batch = collector.take_steps(n_steps)
        return _ActorRollout(
            version, time.perf_counter() - begin, session.pack(batch), dict(collector.env.metric_specs)
        )
