"""The one place where a policy and an environment alternate."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.errors import ConfigError
from apexrl.core.metrics import begun_before
from apexrl.core.types import (
    ACTION,
    DONE,
    INFO,
    METRIC,
    NEXT_OBSERVATION,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Actor,
    Carry,
    Observation,
)
from apexrl.envs.base import RunningEpisodes, VecEnv, choose
from apexrl.policies.base import NOISE_KEYS, Policy

LOG = "log"
OUTCOME_KEYS = frozenset({REWARD, TERMINATED, TRUNCATED, DONE, METRIC, LOG, INFO})
"""Always kept: enough for episode statistics."""


@torch.no_grad()
def rollout(
    env: VecEnv,
    actor: Actor,
    carry: Carry,
    num_steps: int,
    *,
    keep: Collection[str] | None = None,
    drop: Collection[str] = (),
    until_done: bool = False,
) -> tuple[TensorDict, Carry]:
    """Alternate actor and environment.

    Whoever wants others to continue the episodes sets ``env.running`` afterwards.

    Args:
        env: already reset.
        actor: maps the carry to ``action``, the next recurrent state, and whatever else should be stored.
        carry: ``observation`` and the recurrent state, ``[N]``.
        num_steps: steps to take.
        keep: keys to store besides the outcomes, the metrics, the log and the control data; None stores everything.
            ``next_observation`` is the true successor of each step, also where an episode ended.
        drop: keys that are not stored even so; a dropped ``next_observation`` is never built.
        until_done: stop early, once every environment has finished an episode.

    Returns:
        The batch ``[T, N]`` and the carry after its last step.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps must be at least 1, got {num_steps}.")
    env.running = None
    keeps_successors = NEXT_OBSERVATION not in drop and (keep is None or NEXT_OBSERVATION in keep)
    columns = _Columns(num_steps, None if keep is None else OUTCOME_KEYS.union(keep), NOISE_KEYS.union(drop))
    pending = torch.ones(env.num_envs, 1, dtype=torch.bool, device=env.device)
    for t in range(num_steps):
        output = actor(carry)
        # Simulators reuse their buffers, so the observation is copied before the step.
        columns.put(t, {**output, **carry})
        step = env.step(output[ACTION])
        done = step.terminated | step.truncated
        columns.put(t, {REWARD: step.reward, TERMINATED: step.terminated, TRUNCATED: step.truncated, DONE: done})
        log = {name: torch.as_tensor(x, device=env.device).float().mean().view(1, 1) for name, x in step.log.items()}
        columns.put(t, {METRIC: step.metric, LOG: log, INFO: step.info})
        if keeps_successors:
            is_known = step.final_obs is not None and env.gives_final_obs
            successor = choose(done.squeeze(-1), step.final_obs, step.obs) if is_known else step.obs
            columns.put(t, {NEXT_OBSERVATION: successor})
        carry = {name: step.obs if name == OBSERVATION else _zeroed(output[name], done) for name in carry}
        if until_done:
            pending &= ~done
            if not pending.any():
                num_steps = t + 1
                break
    batch = TensorDict({}, batch_size=[num_steps, env.num_envs], device=env.device)
    for key, column in columns.stored.items():
        value = column[:num_steps]
        batch[key] = value.expand(num_steps, env.num_envs, 1) if key[0] == LOG else value
    if keeps_successors and not env.gives_final_obs:
        # The last state that was seen of an episode stands in for the hidden one; that after the reset never does.
        batch[NEXT_OBSERVATION] = choose(batch[DONE].squeeze(-1), batch[OBSERVATION], batch[NEXT_OBSERVATION])
    return batch, carry


def _zeroed(state: Tensor, done: Tensor) -> Tensor:
    """Return a recurrent state with zeros where an episode ended."""
    return state.masked_fill(done.view(-1, *[1] * (state.ndim - 1)), 0)


def make_actor(policy: Policy, env_device: torch.device, *, deterministic: bool = False) -> Actor:
    """Let a policy act on an environment; data crosses devices only where the two differ."""

    def act_across(carry: Carry) -> dict[str, Tensor]:
        output = policy.act({name: value.to(policy.device) for name, value in carry.items()}, deterministic)
        return {name: value.to(env_device) for name, value in output.items()}

    return partial(policy.act, deterministic=deterministic) if policy.device == env_device else act_across


def initial_state(policy: Policy, env: VecEnv) -> dict[str, Tensor]:
    """Return the policy's recurrent state at the start of an episode, on the environment's device."""
    return {name: value.to(env.device) for name, value in policy.initial_state(env.num_envs).items()}


def new_episodes(env: VecEnv, policy: Policy, obs: Observation) -> RunningEpisodes:
    """Return the episodes that begin with what ``env.reset`` returned.

    Where the environment cannot reset, they may have begun before, and their ends are not counted.
    """
    unfinished = {} if env.can_reset else begun_before(torch.ones(env.num_envs, dtype=torch.bool, device=env.device))
    return RunningEpisodes({OBSERVATION: obs.clone(), **initial_state(policy, env)}, unfinished)


def continued(running: RunningEpisodes, env: VecEnv, policy: Policy) -> RunningEpisodes:
    """Return running episodes for a policy: as they are, or with an empty memory where another policy acted."""
    state = initial_state(policy, env)
    if running.carry.keys() == {OBSERVATION, *state}:
        return running
    carry = {name: running.carry.get(name, value) for name, value in state.items()}
    return RunningEpisodes({OBSERVATION: running.carry[OBSERVATION], **carry}, running.unfinished)


@contextmanager
def evaluation_mode(policy: Policy, seed: int) -> Iterator[None]:
    """Put a policy into evaluation mode for a while, with random numbers of its own."""
    was_training = policy.training
    policy.eval()
    cuda = [policy.device] if policy.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(seed)
            yield
    finally:
        policy.train(was_training)


@dataclass
class _Columns:
    """Storage ``[T, N, ...]`` for every key, allocated when the key is first seen."""

    num_steps: int
    keep: Collection[str] | None
    drop: Collection[str]
    stored: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    rows: dict[tuple[str, ...], tuple[Tensor, ...]] = field(default_factory=dict)
    """The columns cut into steps once, which is faster than an index at every step."""

    def put(self, t: int, values: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
        """Write what is kept of the values of step ``t``, ``[N, ...]``, and of the groups among them."""
        for name, value in values.items():
            key = (*path, name)
            if key not in self.rows:
                if not path and (name in self.drop or (self.keep is not None and name not in self.keep)):
                    continue
                if not isinstance(value, Tensor):
                    self.put(t, value, key)
                    continue
                if path and path[0] in (METRIC, LOG):  # may be missing at other steps, and is NaN there
                    column = torch.full((self.num_steps, *value.shape), torch.nan, device=value.device)
                else:
                    column = torch.empty((self.num_steps, *value.shape), dtype=value.dtype, device=value.device)
                self.stored[key], self.rows[key] = column, column.unbind()
            self.rows[key][t].copy_(value)
