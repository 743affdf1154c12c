"""Collection in a thread of its own, while the caller learns."""

from __future__ import annotations

import copy
import math
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from types import TracebackType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.collectors.base import BaseCollector, Collected, SyncCollector, WarmUp
from apexrl.collectors.episodes import SuiteRunner
from apexrl.collectors.groups import RolloutGenerator
from apexrl.core.errors import ConfigError, EnvError
from apexrl.core.metrics import EpisodeMetrics
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import POLICY_VERSION, VALUE
from apexrl.envs import as_vec_env
from apexrl.envs.options import check_at_least
from apexrl.policies.base import Policy

_Inner = SyncCollector | RolloutGenerator

JOIN_SECONDS = 0.8
"""How long ``close`` waits for the thread; one that hangs in its environment is left behind."""


class AsyncCollector(BaseCollector):
    """Collects the next rollout in a thread while the caller learns from the last one.

    The thread acts with a copy of the policy. Every call of ``collect`` publishes the current weights as the next
    version (the first call version 0); the thread loads the newest before each rollout, never in the middle of one,
    and stamps every transition with it (``policy_version``). Each rollout is handed out once, in order, and none that
    is more than ``max_staleness`` versions old: the thread does not begin one that could only be handed out too late,
    and one that became too old all the same (a ``collect`` that failed published weights and took nothing) is
    dropped; its episodes count in the statistics.

    It pays where the simulator leaves the interpreter free: in worker processes, or in native code that releases the
    interpreter's lock. The thread and the caller draw from the same random generators, so runs do not repeat bit for
    bit. On CUDA both use the default stream, which keeps snapshots and rollouts in order; nothing is captured as a
    graph or compiled here, and the algorithm must not capture graphs while this thread runs (``graphs=False``).

    On a task suite it collects what RLOO learns from, groups of whole episodes, with a ``RolloutGenerator`` in the
    thread; where ``keep`` has ``value``, it takes steps there as anywhere else.

    Other arguments are those of ``SyncCollector``.

    Args:
        env: the training environments; nobody else may use them outside ``quiet``.
        policy: its weights are published; the thread has a copy.
        max_staleness: how many versions old a rollout may be; 0 collects only while ``collect`` waits.
        queue_size: rollouts that may wait to be handed out before the thread pauses; ``max_staleness``, at least 1,
            when not given.
        step_timeout: seconds without the end of an environment step after which ``collect`` raises.
        generator: collects groups of episodes in ``env``, with the thread's copy of the policy; for a suite one with
            its defaults when not given. Its simulators have time limits of their own: ``step_timeout`` is not read.
    """

    in_background = True

    def __init__(
        self,
        env: Any,
        policy: Policy,
        device: torch.device | str | None = None,
        *,
        keep: Collection[str] | None = None,
        seed: int | None = None,
        max_staleness: int = 1,
        queue_size: int | None = None,
        step_timeout: float = 60.0,
        acceleration: Acceleration | None = None,
        generator: RolloutGenerator | None = None,
    ) -> None:
        queue_size = max(1, max_staleness) if queue_size is None else queue_size
        check_at_least("", 0, max_staleness=max_staleness)
        check_at_least("", 1, queue_size=queue_size)
        if step_timeout <= 0:
            raise ConfigError(f"step_timeout must be positive, got {step_timeout}.")
        self.env, self.policy, self.max_staleness = as_vec_env(env), policy, max_staleness
        acting = copy.deepcopy(policy).eval()
        wants_steps = keep is not None and VALUE in keep
        if generator is None and self.env.suite is not None and not wants_steps:
            suite_env: Any = self.env
            warnings.warn(
                "AsyncCollector collects groups with the defaults of RolloutGenerator; for those of an RLOOConfig "
                "give it generator=RolloutGenerator.from_config(SuiteRunner(env, policy), cfg).",
                stacklevel=2,
            )
            generator = RolloutGenerator(SuiteRunner(suite_env, acting), keep=keep, seed=seed or 0)
        if generator is None:
            eager = replace(acceleration or Acceleration(), graphs=False, compile=False)
            self._inner: _Inner = SyncCollector(self.env, acting, device, keep=keep, seed=seed, acceleration=eager)
        elif generator.env is not self.env:
            raise ConfigError("AsyncCollector needs one environment: generator.env is another object than env.")
        else:
            generator.follow(acting)
            self._inner, step_timeout = generator, math.inf
        self._device = None if device is None else torch.device(device)
        self.episode_metrics = self._inner.episode_metrics
        self._thread = _CollectingThread(self._inner, max_staleness, queue_size, step_timeout)
        if generator is not None:
            self.on_message = generator.on_message
            generator.on_message = self._thread.messages.append
        # The thread does not know this object, so a collector that nobody holds any more ends its thread.
        self._stop = weakref.finalize(self, self._thread.stop)
        self._ages: list[int] = []
        """Of the rollouts handed out since ``metrics``, in versions."""
        self._dropped = 0
        self._warm_up = WarmUp()
        self._last: tuple[int, dict[str, float]] = (0, {})
        """Environment steps of what was handed out last, and numbers about its collection."""

    @property
    def seed(self) -> int | None:
        """Of the next reset."""
        return self._inner.seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._inner.seed = seed

    def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
        """Publish the weights and return the next rollout ``[n_steps, N]``; waits for it where it is not ready.

        Another ``n_steps`` than before, ``reset``, or a normaliser that has seen its first observations since then,
        drops what was collected ahead.

        Raises:
            EnvError: when the environment hangs, or the collector is closed.
            Exception: what the thread raised, with its traceback; also at every later call.
        """
        thread = self._thread
        if self._warm_up.ends(self.policy) or reset or thread.n_steps not in (None, n_steps):
            self._drop_all()
        if reset:
            self._inner.forget()  # the thread waits for publish
        thread.publish(n_steps, {name: value.detach().clone() for name, value in self.policy.state_dict().items()})
        while True:
            rollout = thread.take()
            self._fold(rollout, self.episode_metrics)
            age = thread.version - rollout.version
            if age <= self.max_staleness:
                break
            self._dropped += 1
        self._ages.append(age)
        self._last = rollout.found.num_steps, rollout.found.metrics
        return rollout.found.batch.to(self._device or self._inner.device)

    def steps_in(self, batch: TensorDict) -> int:
        """Environment steps taken for the last batch, also those of episodes that are not in it."""
        return self._last[0]

    def metrics(self) -> dict[str, float]:
        """Return how the two sides keep pace.

        ``collect/staleness``: mean age in versions of the rollouts handed out, since the last call of this method.
        ``collect/overlap``: share of the collecting time in which the caller did not wait for it, since then.
        ``collect/queue``: rollouts that are ready now. ``collect/dropped``: rollouts dropped so far.
        """
        with self._thread.changed:
            queue = float(len(self._thread.ready))
        numbers = {"collect/queue": queue, "collect/dropped": float(self._dropped), **self._last[1]}
        if self._ages:
            numbers["collect/staleness"] = fmean(self._ages)
            self._ages.clear()
        overlap = self._thread.read_overlap()
        return numbers if overlap is None else {**numbers, "collect/overlap": overlap}

    def quiet(self) -> AbstractContextManager[None]:
        """Hold the environments still: wait for the end of the running rollout, and begin no other in the block."""
        return self._thread.quiet()

    def follow(self, policy: Policy) -> None:
        """Act with this policy from the next rollout on; what was collected ahead with the old one is dropped."""
        if policy is not self.policy:
            with self.quiet():
                self._drop_all()
                self.policy, self._warm_up = policy, WarmUp()
                self._inner.follow(copy.deepcopy(policy).eval())
                self._thread.watch()

    def restart(self, seed: int) -> None:
        """Forget what was collected ahead; the next call of ``collect`` starts new episodes from a seed."""
        with self.quiet():
            self._drop_all()
            self._inner.restart(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return carry, episode statistics and version, as they are when the running rollout has ended.

        A resumed run never learns from rollouts that wait to be handed out; their episodes are in the statistics.
        """
        with self.quiet():
            self._thread.raise_failure()
            episodes = copy.deepcopy(self.episode_metrics)
            for rollout in self._thread.ready:
                self._fold(rollout, episodes)
            state = {"episode_metrics": episodes.state_dict(), "version": self._thread.version}
            return {**self._inner.state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, or from that of a ``SyncCollector``, at the next call of ``collect``."""
        with self.quiet():
            self._drop_all()
            self._inner.load_state_dict(state)
            self._thread.version = state.get("version", -1)

    def close(self) -> None:
        """End the thread, also in the middle of a rollout, and return within a second."""
        self._stop()
        self._inner.close()

    def _drop_all(self) -> None:
        """Drop what was collected ahead; the thread waits for the next ``collect``."""
        with self.quiet():
            for rollout in self._thread.empty():
                self._fold(rollout, self.episode_metrics)
                self._dropped += 1

    def _fold(self, rollout: _Rollout, episodes: EpisodeMetrics) -> None:
        self._inner.fold(rollout.found.outcomes, episodes)
        if episodes is self.episode_metrics:
            for message in rollout.messages:
                self.on_message(message)


@dataclass(frozen=True)
class _Rollout:
    version: int
    found: Collected
    messages: tuple[str, ...]


class _StopError(Exception):
    """Leaves a rollout because the collector is closed."""


class _CollectingThread:
    """The thread, and what it shares with the learner.

    The lock guards every attribute but the sign of life, which a step writes; no work is done under it.
    """

    def __init__(self, collector: _Inner, max_staleness: int, queue_size: int, step_timeout: float) -> None:
        self.collector = collector
        self.messages: list[str] = []
        """Of the rollout that is being collected."""
        self.max_staleness, self.queue_size, self.step_timeout = max_staleness, queue_size, step_timeout
        self.watch()
        self.changed = threading.Condition()
        self.ready: deque[_Rollout] = deque()
        self.n_steps: int | None = None
        """Of the rollouts; None until the next ``publish``, and nothing is collected."""
        self.version = -1
        self.weights: Mapping[str, Tensor] = {}
        """The newest snapshot; never changed in place."""
        self.holds = 0
        self.rolling = False
        self.learner_waits = False
        self.stopped = False
        self.failure: tuple[BaseException, TracebackType | None] | None = None
        self.last_sign_of_life = 0.0
        """When a step ended last, or the rollout began."""
        self.accounted = self.busy = self.overlapped = 0.0
        """Until when, and how many seconds were spent collecting, in all and while the learner did not wait."""
        # A daemon, so that an environment that hangs does not keep the process alive.
        self.thread = threading.Thread(target=self._run, name="apexrl-collector", daemon=True)

    # The learner's side

    def publish(self, n_steps: int, weights: Mapping[str, Tensor]) -> None:
        """Make weights the newest version and let the thread collect."""
        with self.changed:
            if self.holds:
                raise RuntimeError("collect was called inside quiet(), where nothing is collected.")
            self.n_steps, self.weights = n_steps, weights
            self.version += 1
            self.changed.notify_all()
            if not self.stopped and self.thread.ident is None:
                self.thread.start()

    def take(self) -> _Rollout:
        """Return the oldest rollout; waits for it."""
        with self.changed:
            self._wait_until(lambda: bool(self.ready or self.failure or self.stopped))
            if not self.ready or self.stopped:
                self.raise_failure()
            rollout = self.ready.popleft()
            self.changed.notify_all()
            return rollout

    def empty(self) -> list[_Rollout]:
        """Take all that is ready, and let the thread wait for the next ``publish``."""
        with self.changed:
            rollouts = list(self.ready)
            self.ready.clear()
            self.n_steps = None
            return rollouts

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Let no rollout begin in the block, and wait for the end of the running one before it."""
        with self.changed:
            self.holds += 1
        try:
            with self.changed:
                self._wait_until(lambda: not self.rolling)
            yield
        finally:
            with self.changed:
                self.holds -= 1
                self.changed.notify_all()

    def stop(self) -> None:
        """End the thread, if it does not hang."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        # The garbage collector may call this from the thread itself.
        if self.thread.ident not in (None, threading.get_ident()):
            self.thread.join(JOIN_SECONDS)

    def raise_failure(self) -> None:
        """Raise what the thread raised, or that it was stopped."""
        if self.failure is not None:
            error, place = self.failure
            raise error.with_traceback(place)
        if self.stopped:
            raise EnvError("The AsyncCollector is closed.")

    def read_overlap(self) -> float | None:
        """Return the overlapped share of the collecting time since the last call; None when there was none."""
        with self.changed:
            self._account()
            overlap = self.overlapped / self.busy if self.busy > 0 else None
            self.busy = self.overlapped = 0.0
            return overlap

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        self._account()
        self.learner_waits = True
        self.changed.notify_all()
        try:
            while not happened():
                patience = None
                if self.rolling and not math.isinf(self.step_timeout):
                    silence = time.monotonic() - self.last_sign_of_life
                    patience = self.step_timeout - silence
                    if patience <= 0:
                        name = type(self.collector.env).__name__
                        advice = f"If one may take that long, raise step_timeout (now {self.step_timeout:g} s)."
                        raise EnvError(f"{name} hangs: no step or reset has ended for {silence:.1f} s. {advice}")
                self.changed.wait(patience)
        finally:
            self._account()
            self.learner_waits = False

    def _account(self) -> None:
        """Add up the time since the last call; comes before every change of ``rolling`` and ``learner_waits``."""
        now = time.monotonic()
        if self.rolling:
            self.busy += now - self.accounted
            self.overlapped += 0.0 if self.learner_waits else now - self.accounted
        self.accounted = now

    # The thread's side

    def _run(self) -> None:
        number = 0
        while (order := self._next_order()) is not None:
            number += 1
            rollout, failure = None, None
            try:
                rollout = self._collect(*order)
            except _StopError:
                pass
            except BaseException as error:
                name = type(self.collector.env).__name__
                error.add_note(f"Raised in the thread of AsyncCollector, in rollout {number} with {name}.")
                failure = (error, error.__traceback__)
            with self.changed:
                self._account()
                self.rolling, self.failure = False, failure
                if rollout is not None:
                    self.ready.append(rollout)
                self.changed.notify_all()
            if rollout is None:
                return

    def _next_order(self) -> tuple[int, int, Mapping[str, Tensor]] | None:
        """Wait until a rollout is wanted; return its length, version and weights, or None at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self._is_wanted())
            if self.stopped:
                return None
            assert self.n_steps is not None
            self._account()
            self.rolling = True
            self.last_sign_of_life = time.monotonic()
            self.changed.notify_all()
            return self.n_steps, self.version, self.weights

    def _is_wanted(self) -> bool:
        if self.holds or self.n_steps is None or len(self.ready) >= self.queue_size:
            return False
        # Every collect publishes a version and takes one rollout, so the age at which this one is taken is known.
        age = len(self.ready) + (0 if self.learner_waits else 1)
        return age <= self.max_staleness

    def _collect(self, n_steps: int, version: int, weights: Mapping[str, Tensor]) -> _Rollout:
        collector = self.collector
        collector.policy.load_state_dict(weights)
        self.messages.clear()
        found = collector.collect_unfolded(n_steps)
        batch = found.batch
        batch[POLICY_VERSION] = torch.full((*batch.shape, 1), version, dtype=torch.long, device=batch.device)
        return _Rollout(version, found, tuple(self.messages))

    def watch(self) -> None:
        """Notice the end of every step, and leave the rollout when the thread is to stop."""

        def check() -> None:
            self.last_sign_of_life = time.monotonic()
            if self.stopped:
                raise _StopError

        self.collector.watch(check)
