"""Collection in the caller's thread."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.collectors.base import BaseCollector
from apexrl.envs.base import VecEnv
from apexrl.graphs import Acceleration, Captured, Compiled
from apexrl.metrics import EpisodeMetrics, fold_episodes
from apexrl.policies.base import Policy
from apexrl.rollout import initial_state, make_actor, rollout
from apexrl.types import NEXT_OBSERVATION, NEXT_VALUE, OBSERVATION, VALUE, Actor, Carry


class SyncCollector(BaseCollector):
    """Steps the environment with the policy as it is, and values the states afterwards in one batch.

    Args:
        env: the training environments.
        policy: its current weights act.
        device: where the batch is handed over; the policy's device when not given.
        keep: keys of the batch; None keeps everything that on-policy learning can use.
        seed: of the first reset.
        acceleration: how the rollout runs.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        device: torch.device | str | None = None,
        *,
        keep: Collection[str] | None = None,
        seed: int | None = None,
        acceleration: Acceleration | None = None,
    ) -> None:
        self.env, self.policy, self.seed = env, policy, seed
        self.device = torch.device(device) if device is not None else policy.device
        self.keep = None if keep is None else {*keep, *policy.initial_state(1)}
        self.wants_value = keep is None or VALUE in keep
        self.episode_metrics = EpisodeMetrics()
        self.acceleration = acceleration or Acceleration()
        self._captured: dict[int, Captured] = {}
        env.accelerate(self.acceleration)
        self.actor: Actor = self._make_actor()
        self._use(None)
        if not env.gives_final_obs:
            warnings.warn(
                f"{type(env).__name__} hides the last state of an episode; values at time limits use the last "
                "visible one.",
                stacklevel=2,
            )

    def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
        """Return a batch ``[n_steps, N]`` with ``value`` and ``next_value``; nothing in it needs gradients.

        On CUDA, where the environment allows it, the whole rollout is one graph, and the next call overwrites the
        batch.
        """
        if reset or self.carry is None:
            self.start()
        self.policy.eval()
        if n_steps not in self._captured:
            self._captured[n_steps] = Captured(
                "The rollout",
                partial(self._collect, n_steps),
                enabled=self.acceleration.graphs and self.env.capturable and self.env.device.type == "cuda",
                generators=self.env.generators,
            )
        batch: TensorDict = self._captured[n_steps]()
        return batch.to(self.device)

    @torch.no_grad()
    def _collect(self, n_steps: int) -> TensorDict:
        batch = self.take_steps(n_steps)
        fold_episodes(batch, self.env.metric_specs, self.episode_metrics)
        return self.with_values(batch)

    def take_steps(self, n_steps: int) -> TensorDict:
        """Do the first half of ``collect`` after ``start``: the steps, on the environment's device, without values."""
        assert self.carry is not None
        keep = self.keep
        if keep is not None and self.wants_value:
            keep = keep | {NEXT_OBSERVATION}
        batch, after = rollout(self.env, self.actor, self.carry, n_steps, keep=keep)
        for name, value in after.items():
            self.carry[name].copy_(value)
        return batch

    def with_values(self, batch: TensorDict) -> TensorDict:
        """Do the second half: bring a batch of ``take_steps`` to the policy, and value its states where wanted."""
        batch = batch.to(self.policy.device)
        if self.wants_value:
            add_values(batch, self.policy)
            del batch[NEXT_OBSERVATION]
        return batch

    def follow(self, policy: Policy) -> None:
        """Act with this policy from the next rollout on; the episodes go on."""
        if policy is not self.policy:
            self.policy = policy
            self.actor = self._make_actor()
            self._use(self.carry)

    def _make_actor(self) -> Actor:
        actor = make_actor(self.policy, self.env.device)
        if not self.acceleration.compile:
            return actor
        compiled = Compiled(actor, enabled=True, device=self.policy.device)

        def act(carry: Carry) -> dict[str, Tensor]:
            # Compiled for one layout in memory, while an environment may give slices of a larger tensor.
            output: dict[str, Tensor] = compiled({name: value.contiguous() for name, value in carry.items()})
            return output

        return act

    def start(self) -> None:
        """Start new episodes everywhere."""
        obs = self.env.reset(seed=self.seed)
        self.seed = None
        self.episode_metrics.restart()
        self._use({OBSERVATION: obs.clone(), **initial_state(self.policy, self.env)})

    def restart(self, seed: int) -> None:
        """Forget the running episodes; the next call of ``collect`` starts new ones from a seed."""
        super().restart(seed)
        self.forget()

    def forget(self) -> None:
        """Forget the running episodes; the next steps are the first of new ones."""
        self._use(None)

    def _use(self, carry: Carry | None) -> None:
        """Go on from a carry in memory of its own; what was captured with the old one is of no use any more."""
        self.carry = carry
        self._captured = {}
        self._compiled = False

    def state_dict(self) -> dict[str, Any]:
        """Return the carry and the episode statistics."""
        carry = {} if self.carry is None else {name: _plain(value) for name, value in self.carry.items()}
        return {"carry": carry, "episode_metrics": self.episode_metrics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; the environment is restored by whoever owns it."""
        device, num_envs = self.env.device, self.env.num_envs
        self._use({name: _restored(value, num_envs, device) for name, value in state["carry"].items()} or None)
        self.episode_metrics.load_state_dict(state["episode_metrics"], device)


@torch.no_grad()
def add_values(batch: TensorDict, policy: Policy) -> None:
    """Value all states of a batch at once, after its steps."""
    batch[VALUE], batch[NEXT_VALUE] = policy.values(batch)


def _plain(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else {k: _plain(v) for k, v in value.items()}


def _restored(value: Any, num_envs: int, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return TensorDict({k: _restored(v, num_envs, device) for k, v in value.items()}, batch_size=[num_envs])
