"""The collector contract, and the collector that steps in the caller's thread."""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.metrics import EpisodeMetrics, fold_episodes
from apexrl.core.system.acceleration import Acceleration, Compiled
from apexrl.core.types import DONE, METRIC, NEXT_OBSERVATION, NEXT_VALUE, PRE_TANH, REWARD, VALUE, Actor, Carry
from apexrl.envs import as_vec_env
from apexrl.envs.base import RunningEpisodes
from apexrl.policies.base import Policy
from apexrl.rollout import continued, make_actor, new_episodes, rollout


class Collected(NamedTuple):
    """What a collector that works in the background hands over."""

    batch: TensorDict
    """On the policy's device."""
    outcomes: list[TensorDict]
    """What episode statistics are made of, on the environment's device."""
    num_steps: int
    """Environment steps that the batch stands for."""
    metrics: dict[str, float]
    """Numbers about this batch's collection."""


class BaseCollector(ABC):
    """Collects batches ``[T, N]`` with the current policy. A new collector implements ``collect``."""

    seed: int | None = None
    """Of the next reset."""
    on_message: Callable[[str], None] = logging.getLogger("apexrl").info
    """Told what people should know of the collecting."""
    in_background: ClassVar[bool] = False
    """Whether another thread may use the policy's device at any time."""

    @cached_property
    def episode_metrics(self) -> EpisodeMetrics:
        """Episodes that ended while collecting, and the running ones; stays empty where ``collect`` adds none."""
        return EpisodeMetrics()

    @abstractmethod
    def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
        """Take ``n_steps`` in every environment; ``reset`` starts new episodes first and cuts the running ones."""

    def collect_for_normalizer(self, n_steps: int) -> TensorDict:
        """Collect what a new normaliser sees before anything is learned; nobody learns from it."""
        return self.collect(n_steps)

    def steps_in(self, batch: TensorDict) -> int:
        """Return how many environment steps a batch of ``collect`` stands for."""
        return batch.shape[0] * batch.shape[1]

    def metrics(self) -> dict[str, float]:
        """Return numbers about the collecting itself, by their full log names; read once a logged iteration."""
        return {}

    def quiet(self) -> AbstractContextManager[None]:
        """Hold the environments still for a block that reads or writes their state, or the random generators."""
        return nullcontext()

    def follow(self, policy: Policy) -> None:
        """Act with this policy from the next rollout on; collectors that only ever know one need not care."""
        return

    def adopt(self) -> None:
        """Let the first call of ``collect`` continue the episodes that run in the environment, where it can."""
        return

    def forget(self) -> None:
        """Forget the running episodes, where they last from one call of ``collect`` to the next."""
        return

    def restart(self, seed: int) -> None:
        """Forget the running episodes; the next call of ``collect`` starts new ones from a seed."""
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue, without the environment, as tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        return

    def close(self) -> None:
        """End what runs in the background; the environments stay open. The collector cannot be used afterwards."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncCollector(BaseCollector):
    """Steps the environment with the policy as it is, and values the states afterwards in one batch.

    Its first call of ``collect`` starts new episodes, unless ``adopt`` was called. Later ones continue those that run
    in the environment, also where others have stepped or reset it in between.

    Args:
        env: the training environments: a ``VecEnv``, or an object that ``as_vec_env`` can wrap.
        policy: its current weights act.
        device: where the batch is handed over; the policy's device when not given.
        keep: keys of the batch; None keeps everything that learning can use.
        seed: of the first reset.
        acceleration: how the rollout runs.
    """

    def __init__(
        self,
        env: Any,
        policy: Policy,
        device: torch.device | str | None = None,
        *,
        keep: Collection[str] | None = None,
        seed: int | None = None,
        acceleration: Acceleration | None = None,
    ) -> None:
        self.env, self.policy, self.seed = as_vec_env(env), policy, seed
        policy.check_fits(self.env)
        self.learner_device = policy.device
        self.device = torch.device(device) if device is not None else self.learner_device
        own = {*policy.initial_state(1), *policy.extra_keys, PRE_TANH}
        self.wants_value = keep is None or VALUE in keep
        self.drops_successors = keep is not None and NEXT_OBSERVATION not in keep
        self.keep = None if keep is None else own.union(keep, [NEXT_OBSERVATION] if self.wants_value else [])
        """What a rollout stores; the successors also where only their values are wanted."""
        self.episode_metrics = EpisodeMetrics()
        self.acceleration = acceleration or Acceleration()
        self._captured: dict[int, Callable[[], TensorDict]] = {}
        self._running: RunningEpisodes | None = None
        """What was captured belongs to these; None before the first episodes."""
        self.env.accelerate(self.acceleration)
        self.actor: Actor = self._make_actor()
        if not self.env.gives_final_obs:
            warnings.warn(
                f"{type(self.env).__name__} hides the last state of an episode; values at time limits use the last "
                "visible one.",
                stacklevel=2,
            )

    def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
        """Return a batch ``[n_steps, N]`` with ``value`` and ``next_value``; nothing in it needs gradients.

        On CUDA, where the environment allows it, the whole rollout is one graph, and the next call overwrites the
        tensors of the batch.
        """
        if not reset and self._running is not None and (moved := self.env.find_moved()) is not None:
            self._continue(moved)
        if reset or self.running is None:
            self.start()
        self.policy.eval()
        if n_steps not in self._captured:
            self._captured[n_steps] = self._capture(partial(self._collect, n_steps))
        batch = self._captured[n_steps]()
        # A graph writes to the same tensors again; what a caller sets in its batch must not take their place.
        return batch.copy().to(self.device)

    def _capture(self, run: Callable[[], TensorDict]) -> Callable[[], TensorDict]:
        env = self.env
        if not env.capturable:
            return run
        return self.acceleration.wrap(run, env.device, graph="The rollout", generators=env.generators)

    @property
    def running(self) -> RunningEpisodes | None:
        """The episodes that the next step continues, whoever took the last one; None when it starts new ones."""
        if self._running is None or self.env.running is None:
            return None
        if self._running is not self.env.running:
            self._continue(self.env.running)
        return self._running

    def _collect(self, n_steps: int) -> TensorDict:
        batch = self.take_steps(n_steps)
        fold_episodes(batch, self.env.metric_specs, self.episode_metrics)
        return self.with_values(batch)

    def collect_unfolded(self, n_steps: int) -> Collected:
        """Collect as ``collect`` does, but leave the episode statistics to ``fold``; nothing is captured."""
        if self.running is None:
            self.start()
        batch = self.take_steps(n_steps)
        outcomes = batch.select(REWARD, DONE, METRIC, strict=False)
        return Collected(self.with_values(batch), [outcomes], self.steps_in(batch), {})

    def fold(self, outcomes: Sequence[TensorDict], episodes: EpisodeMetrics) -> None:
        """Count the episodes that ended in what ``collect_unfolded`` gave."""
        for steps in outcomes:
            fold_episodes(steps, self.env.metric_specs, episodes)

    def watch(self, check: Callable[[], None]) -> None:
        """Call ``check`` before every step; what it raises ends the collection."""
        actor = self.actor

        def act(carry: Carry) -> dict[str, Tensor]:
            check()
            return actor(carry)

        self.actor = act

    def take_steps(self, n_steps: int) -> TensorDict:
        """Do the first half of ``collect`` after ``start``: the steps, on the environment's device, without values."""
        running = self.running
        assert running is not None
        batch, after = rollout(self.env, self.actor, running.carry, n_steps, keep=self.keep)
        running.advance(after)
        self.env.running = running
        return batch

    @torch.no_grad()
    def with_values(self, batch: TensorDict) -> TensorDict:
        """Do the second half: bring a batch of ``take_steps`` to the policy, and value its states where wanted."""
        batch = batch.to(self.learner_device)
        if self.wants_value:
            batch[VALUE], batch[NEXT_VALUE] = self.policy.values(batch)
            if self.drops_successors:
                del batch[NEXT_OBSERVATION]
        return batch

    def follow(self, policy: Policy) -> None:
        """Act with this policy from the next rollout on; the episodes continue."""
        if policy is not self.policy:
            self.policy, self.learner_device = policy, policy.device
            self.actor = self._make_actor()
            self._captured = {}
            if self.env.running is not None and self._running is not None:
                self._continue(self.env.running)

    def _make_actor(self) -> Actor:
        actor = make_actor(self.policy, self.env.device)
        if not self.acceleration.compile:
            return actor
        compiled = Compiled(actor, self.policy.device)

        def act(carry: Carry) -> dict[str, Tensor]:
            # Compiled for one layout in memory, while an environment may give slices of a larger tensor.
            output: dict[str, Tensor] = compiled({name: value.contiguous() for name, value in carry.items()})
            return output

        return act

    def start(self) -> None:
        """Start new episodes everywhere."""
        obs = self.env.reset(seed=self.seed)
        self.seed = None
        # A simulator that cannot reset is still in the middle of the episodes that are known to run in it.
        self._continue(self.env.running or new_episodes(self.env, self.policy, obs))

    def adopt(self) -> None:
        """Let the first call of ``collect`` continue the episodes that run in the environment, as later ones do."""
        if self._running is None and self.env.running is not None:
            self._continue(self.env.running)

    def restart(self, seed: int) -> None:
        """Forget the running episodes; the next call of ``collect`` starts new ones from a seed."""
        super().restart(seed)
        self.forget()

    def forget(self) -> None:
        """Forget the running episodes; the next steps are the first of new ones."""
        self.env.running = self._running = None

    def _continue(self, running: RunningEpisodes) -> None:
        """Continue these episodes; what was captured with others is of no use any more."""
        self.env.running = self._running = continued(running, self.env, self.policy)
        self.episode_metrics.unfinished = running.unfinished
        self._captured = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the carry and the episode statistics."""
        carry = {name: value.clone() for name, value in self.running.carry.items()} if self.running else {}
        plain = {name: value.to_dict() if isinstance(value, TensorDict) else value for name, value in carry.items()}
        return {"carry": plain, "episode_metrics": self.episode_metrics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; the environment is restored by whoever owns it."""
        device, num_envs = self.env.device, self.env.num_envs
        self.episode_metrics.load_state_dict(state["episode_metrics"], device)
        if state["carry"]:
            groups = {name: value for name, value in state["carry"].items() if isinstance(value, Mapping)}
            carry = {**state["carry"], **{name: TensorDict(value, [num_envs]) for name, value in groups.items()}}
            carry = {name: value.to(device) for name, value in carry.items()}
            self._continue(RunningEpisodes(carry, self.episode_metrics.unfinished))
        else:
            self.forget()


class WarmUp:
    """The time until the policy's normaliser has seen observations, for collectors that run ahead.

    What was collected before then is of no use to a policy that no longer sees observations as they are.
    """

    def __init__(self) -> None:
        self.lasts = True

    def ends(self, policy: Policy) -> bool:
        """Say, at one call, that the time is over."""
        before = self.lasts
        self.lasts = before and policy.has_new_normalizer  # which is read from the device, but not any more afterwards
        return before and not self.lasts
