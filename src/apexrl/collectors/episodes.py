"""Whole episodes of a task suite from given init states, side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.errors import ConfigError, EnvError
from apexrl.core.functional.episodes import side_by_side
from apexrl.core.metrics import EpisodeMetrics, end_info, fold_episodes
from apexrl.core.result import CountedEpisodes, EvaluationResult
from apexrl.core.types import (
    ACTION,
    CONTROL_STEPS,
    EPISODE_ID,
    GROUP,
    INFO,
    LOST,
    METRIC,
    NEXT_OBSERVATION,
    OBSERVATION,
    VALID,
    Carry,
)
from apexrl.envs.options import check_known
from apexrl.envs.suites.base import InitState, Split, own_split
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.policies.base import Policy
from apexrl.rollout import LOG, evaluation_mode, initial_state, make_actor, rollout

CreatedEnv = tuple[SuiteVecEnv, int, int]
"""The environments, the number of the task they run, and how many they are."""


class SuiteRunner:
    """The environments of a suite and the policy that acts in them: the ``env_runner`` of ``RolloutGenerator``.

    Args:
        env: the environments of the suite; each worker keeps the simulators it made.
        policy: its current weights act.
        random_init: draw initial states at random, where the suite can; the results compare with no others.
    """

    def __init__(self, env: SuiteVecEnv, policy: Policy, *, random_init: bool = False) -> None:
        self.env, self.policy, self.random_init = env, policy, random_init
        if random_init:
            env.suite.random_init_state(0, (0,))  # a suite that cannot says so at once

    def create_parallel_envs(self, task_name: str) -> CreatedEnv:
        """Return the environments of a task. Their workers make a simulator when a task first needs it, and keep it."""
        names = list(self.env.task_names)
        subject = f"task.task_names_to_use: '{self.env.suite.name}' has no task"
        check_known(subject, [task_name], names, error=ConfigError)
        return self.env, names.index(task_name), self.env.num_envs

    def run_policy_in_env(
        self,
        task_name: str,
        init_states: Sequence[NDArray[np.float64]] | None = None,
        created_env: CreatedEnv | None = None,
        **options: Any,
    ) -> TensorDict:
        """Run one episode of a task from each init state: the options, and what it returns, are of ``run_episodes``.

        Without init states there is one episode for every environment, from the first ones of the training split, or
        with ``random_init`` from random ones, drawn with PyTorch's generator.
        """
        env, task_id, env_num = created_env or self.create_parallel_envs(task_name)
        if init_states is None:
            init_states = self._init_states(task_id, "train", env_num, int(torch.randint(2**31 - 1, ())))
        return run_episodes(env, self.policy, [InitState(task_id, state) for state in init_states], **options)

    def run(
        self, episodes_per_task: int | None = None, *, split: Split = "val", deterministic: bool = True, seed: int = 0
    ) -> EvaluationResult:
        """Evaluate the policy on every task as ``evaluate`` does, but from init states that are chosen.

        Args:
            episodes_per_task: each from another init state, the first ones of the split; all of them when not given.
                With ``random_init`` as many random ones.
            split: where the init states are from.
            deterministic: take the mode of the action distribution instead of sampling.
            seed: of sampling, and of random init states.

        Returns:
            The episodes that were not lost, task after task.
        """
        if episodes_per_task is not None and episodes_per_task < 1:
            raise ValueError(f"episodes_per_task must be at least 1, got {episodes_per_task}")
        starts = [
            InitState(task_id, state)
            for task_id in range(self.env.suite.num_tasks)
            for state in self._init_states(task_id, split, episodes_per_task, seed)
        ]
        with evaluation_mode(self.policy, seed):
            batch = run_episodes(self.env, self.policy, starts, keep=(), deterministic=deterministic)
        counted = CountedEpisodes()
        # What follows an episode in its column is padding.
        episodes = fold_episodes(batch, self.env.metric_specs, EpisodeMetrics())
        counted.add(episodes, end_info(batch), np.ones(len(starts)))
        return counted.result(self.env.task_names, num_never_begun=len(starts) - counted.num_episodes)

    def _init_states(self, task_id: int, split: Split, count: int | None, seed: int) -> list[NDArray[np.float64]]:
        """Return the first states of a split, all where ``count`` is None; with ``random_init`` as many random ones."""
        suite = self.env.suite
        states = suite.init_states(task_id, own_split(split))[:count]
        if not self.random_init:
            return states
        numbers = range(len(states) if count is None else count)
        return [suite.random_init_state(task_id, (seed % 2**63, number)) for number in numbers]


@torch.no_grad()
def run_episodes(
    env: SuiteVecEnv,
    policy: Policy,
    starts: Sequence[InitState],
    *,
    keep: Collection[str] | None = None,
    deterministic: bool = False,
    max_steps: int | None = None,
    before_step: Callable[[], None] | None = None,
) -> TensorDict:
    """Run an episode from each initial state to its end; all of them share the environments and the inference.

    Args:
        env: the environments of the suite.
        policy: its current weights act.
        starts: where the episodes start.
        keep: keys to store besides the outcomes and the metrics; None stores everything but the successors.
        deterministic: take the mode of the action distribution instead of sampling.
        max_steps: control steps after which an episode is truncated; those of the environments when not given.
        before_step: called before every step; what it raises ends the episodes.

    Returns:
        ``[T, E]`` on the environments' device: column ``e`` is episode ``e`` from its first step on, then zeros
        up to the length of the longest; ``valid`` marks the steps that were taken.

    Raises:
        EnvError: when the environments do not end their episodes.
    """
    actor = make_actor(policy, env.device, deterministic=deterministic)

    def act(carry: Carry) -> dict[str, Tensor]:
        if before_step is not None:
            before_step()
        return actor(carry)

    env.assign(starts, max_steps)
    num_chunks = -(-(max_steps or env.horizon) // env.chunk)
    carry: Carry = {OBSERVATION: env.reset(), **initial_state(policy, env)}
    segments: list[TensorDict] = []
    while env.busy:
        # Every segment ends an episode in each busy environment.
        if len(segments) > len(starts):
            raise EnvError(f"{len(starts)} episodes did not end within {len(segments)} times {num_chunks} steps.")
        segment, carry = rollout(env, act, carry, num_chunks, keep=keep, drop=(NEXT_OBSERVATION, LOG), until_done=True)
        segments.append(segment)
    return pack_episodes(TensorDict.cat(segments), len(starts))


def find_plans(
    env: SuiteVecEnv, policy: Policy, states: Sequence[Sequence[NDArray[np.float64]]], per_task: int, *, seed: int = 0
) -> list[dict[int, NDArray[np.float32]]]:
    """Let a policy act as well as it can, and keep what led to the goal.

    Args:
        env: the environments of the suite.
        policy: its current weights act.
        states: for each task the init states, which are tried in this order.
        per_task: successes wanted of each task.
        seed: of what a policy draws even so.

    Returns:
        For each task, by the number of the init state, the actions ``[n, A]`` up to the goal, for ``record_demos``.
    """
    found: list[dict[int, NDArray[np.float32]]] = [{} for _ in states]
    tried = [0] * len(states)
    while True:
        numbers: list[tuple[int, int]] = []
        for task_id, known in enumerate(states):
            end = min(len(known), tried[task_id] + per_task - len(found[task_id]))
            numbers += [(task_id, number) for number in range(tried[task_id], end)]
            tried[task_id] = end
        if not numbers:
            return found
        starts = [InitState(task_id, states[task_id][number]) for task_id, number in numbers]
        with evaluation_mode(policy, seed):
            batch = run_episodes(env, policy, starts, keep=(ACTION,), deterministic=True)
        chunks = batch[ACTION].float().unflatten(-1, (env.chunk, -1)).cpu().numpy()
        taken = batch[INFO, CONTROL_STEPS].squeeze(-1).cpu().numpy()
        for column in successful_episodes(batch).nonzero().flatten().tolist():
            task_id, number = numbers[column]
            steps = zip(chunks[:, column], taken[:, column], strict=True)
            found[task_id][number] = np.concatenate([chunk[:count] for chunk, count in steps])


def pack_episodes(steps: TensorDict, num_episodes: int) -> TensorDict:
    """Sort steps ``[S, N]`` by ``episode_id`` into ``[T, E]``; those of no episode (-1) are left out.

    Column ``e`` is episode ``e`` from its first step on, zeros follow its end, and ``valid`` tells the two apart.
    """
    ids = steps[INFO, EPISODE_ID].squeeze(-1)
    slot, time = (ids.T >= 0).nonzero(as_tuple=True)
    episode = ids[time, slot]
    # An episode stays in one environment, so a stable sort keeps its steps in order.
    order = episode.argsort(stable=True)
    slot, time, episode = slot[order], time[order], episode[order]
    lengths = torch.bincount(episode, minlength=num_episodes)
    place = torch.arange(len(episode), device=ids.device) - (lengths.cumsum(0) - lengths)[episode]
    num_steps = int(lengths.max())

    def pack(x: Tensor) -> Tensor:
        packed = x.new_zeros((num_steps, num_episodes, *x.shape[2:]))
        packed[place, episode] = x[time, slot]
        return packed

    batch = steps.apply(pack, batch_size=[num_steps, num_episodes])
    assert batch is not None
    batch[VALID] = (torch.arange(num_steps, device=ids.device)[:, None] < lengths).unsqueeze(-1)
    return batch


def join_groups(groups: list[TensorDict]) -> TensorDict:
    """Put groups ``[T_p, n_p]`` side by side, padded with zeros, and number them."""
    num_steps = max(int(group[VALID].sum(0).max()) for group in groups)
    batch = side_by_side([group[:num_steps] for group in groups])
    numbers = [number for number, group in enumerate(groups) for _ in range(group.shape[1])]
    batch[GROUP] = torch.tensor(numbers, device=batch.device).view(1, -1, 1).repeat(len(batch), 1, 1)
    return batch


def lost_episodes(batch: TensorDict) -> Tensor:
    """Tell which episodes of a packed batch were cut because their worker died, ``[E]``."""
    return torch.squeeze(batch[INFO, LOST].any(0) | ~batch[VALID].any(0), -1)


def successful_episodes(batch: TensorDict) -> Tensor:
    """Tell which episodes of a packed batch reached their goal, ``[E]``."""
    return torch.squeeze((batch[METRIC, "success"] > 0).any(0), -1)
