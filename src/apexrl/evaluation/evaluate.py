"""Evaluation: whole episodes on environments of their own, with intervals, step tables and videos."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from apexrl.core.errors import EnvError
from apexrl.core.metrics import EpisodeMetrics, end_info, fold_episodes
from apexrl.core.result import CountedEpisodes, EvaluationResult, StepRows
from apexrl.core.system.seeding import ENV, POLICY, spawn_seed
from apexrl.core.types import DONE, Actor, Carry, Observation
from apexrl.envs.base import EpisodeStart, VecEnv
from apexrl.evaluation.step_csv import extend_rows
from apexrl.policies.base import Policy
from apexrl.rollout import evaluation_mode, make_actor, new_episodes, rollout

__all__ = ["EvaluationResult", "StepRows", "evaluate", "extend_rows", "group_size"]


def evaluate(
    env: VecEnv,
    policy: Policy,
    starts: int | Sequence[EpisodeStart],
    *,
    deterministic: bool = True,
    seed: int = 0,
    record_steps: bool = False,
    max_steps: int = 100_000,
    events: Collection[str] = (),
    on_progress: Callable[[int], None] | None = None,
) -> EvaluationResult:
    """Run whole episodes and return what each gave; the global random state is left as it was.

    Of a number of episodes every environment has its own quota, so short episodes are not favoured. Where the
    environment cannot reset, the episode that runs in each of its environments is left out.

    From given starts there is one episode each, which depends on its start and on the policy alone: on a CPU the result
    is the same to the last bit for any number of environments. The policy acts for one environment at a time, because a
    product of larger matrices rounds differently, and the environments have nothing in common. What a policy draws,
    such as where a flow starts, is drawn from a stream of the episode's own.

    Args:
        env: environments for this evaluation alone.
        policy: its normalisers are frozen.
        starts: the number of episodes, or where each of them starts: a seed, of a suite an initial state.
        deterministic: take the mode of the action distribution instead of sampling.
        seed: of a number of episodes: of the environments, and of sampling, which draw from separate streams.
        record_steps: also return one row per step for each environment.
        max_steps: an environment that takes more steps than this for its episodes stops the evaluation.
        events: episode fields of events that the task is known to report, such as ``success_once``: they are 0 where no
            episode of this evaluation reports them.
        on_progress: called with the number of episodes so far.

    Returns:
        The episodes; from given starts in their order, with ``truncated``, and ``info["episode_id"]`` is the index of
        the start.

    Raises:
        EnvError: when an episode does not end, or the environment cannot start one alone.
    """
    if (starts if isinstance(starts, int) else len(starts)) < 1:
        raise ValueError(f"starts must be at least one episode, got {starts!r}")
    runner = env if isinstance(starts, int) else env.independent()
    counted = CountedEpisodes()
    rows: StepRows | None = {index: [] for index in range(runner.num_envs)} if record_steps else None
    try:
        with evaluation_mode(policy, spawn_seed(seed, POLICY)):
            actor = make_actor(policy, env.device, deterministic=deterministic)
            if isinstance(starts, int):
                groups = _of_each(runner, actor, starts, seed, deterministic)
            else:
                groups = _from_starts(runner, actor, starts)
            for group in groups:
                _run_group(runner, policy, group, counted, rows, max_steps, on_progress)
    finally:
        if runner is not env:
            runner.close()
    result = counted.result(env.task_names, rows, events=events, in_order=not isinstance(starts, int))
    return replace(result, task_metrics=[spec for spec in env.metric_specs.values() if spec.group == "task"])


def group_size(num_starts: int, num_envs: int) -> int:
    """Return how many environments run the episodes in as few groups as ``num_envs`` would, all of about one size."""
    return math.ceil(num_starts / math.ceil(num_starts / num_envs))


class _Group(NamedTuple):
    """Episodes that run side by side."""

    obs: Observation
    """The first of each."""
    actor: Actor
    quota: NDArray[np.int64]
    """``[N]`` episodes of each environment that count."""
    numbers: NDArray[np.int64] | None = None
    """``[N]`` index of the start of each episode, where it was given."""


def _of_each(env: VecEnv, actor: Actor, num_episodes: int, seed: int, deterministic: bool) -> Iterator[_Group]:
    """Begin a number of episodes, as many in each environment."""
    if deterministic and env.num_distinct_episodes is not None:
        # The same episode again would be the same again, and the interval too narrow.
        num_episodes = min(num_episodes, env.num_distinct_episodes)
    quota = np.full(env.num_envs, num_episodes // env.num_envs)
    quota[: num_episodes % env.num_envs] += 1
    yield _Group(env.reset(seed=spawn_seed(seed, ENV)), actor, quota)


def _from_starts(env: VecEnv, actor: Actor, starts: Sequence[EpisodeStart]) -> Iterator[_Group]:
    """Begin an episode from each start, as many at once as there are environments."""
    for first in range(0, len(starts), env.num_envs):
        group = starts[first : first + env.num_envs]
        obs, order = env.start_episodes(group)
        numbers = np.array(order)
        # Apart from the numbers that the environment itself draws from its start; -1 is what is not counted.
        entropies: list[Any] = [getattr(group[number], "entropy", group[number]) for number in order]
        streams = [np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=(1,))) for entropy in entropies]
        yield _Group(obs, _one_by_one(actor, streams), (numbers >= 0).astype(np.int64), first + numbers)


def _one_by_one(actor: Actor, streams: Sequence[np.random.Generator]) -> Actor:
    """Let an actor see one environment at a time, each with its own random numbers."""

    def act(carry: Carry) -> dict[str, torch.Tensor]:
        rows = []
        for index, stream in enumerate(streams):
            torch.manual_seed(int(stream.integers(2**63)))
            # Copies, because where a row lies in memory decides how a product of matrices is computed.
            rows.append(actor({name: value[index : index + 1].clone() for name, value in carry.items()}))
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    return act


def _run_group(
    env: VecEnv,
    policy: Policy,
    group: _Group,
    counted: CountedEpisodes,
    rows: StepRows | None,
    max_steps: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Step environments in which episodes begin until every quota is full."""
    running = new_episodes(env, policy, group.obs)
    carry, episode_metrics, num_steps = running.carry, EpisodeMetrics(), 0
    episode_metrics.unfinished = running.unfinished
    steps: StepRows = {index: [] for index in rows or ()}
    room = group.quota.copy()
    while room.any():
        if num_steps >= max_steps:
            raise EnvError(
                f"Evaluation gave up: {(group.quota - room).sum()} of {group.quota.sum()} episodes ended within "
                f"{max_steps} steps of each environment. Give the task a time limit (task.kwargs.max_episode_steps)."
            )
        batch, carry = rollout(env, group.actor, carry, min(1000, max_steps), keep=(), until_done=True)
        if steps:
            extend_rows(steps, batch)
        finished = fold_episodes(batch, env.metric_specs, episode_metrics)
        room -= counted.add(finished, end_info(batch), room, group.numbers)
        num_steps += batch.shape[0]
        if on_progress is not None:
            on_progress(counted.num_episodes)
    for index, env_steps in steps.items():
        # Past its quota an environment continues until the others are done; what began before is not counted.
        ends = [0] if env.can_reset else []
        ends += [t + 1 for t, row in enumerate(env_steps) if row[DONE]]
        assert rows is not None
        for row in env_steps[ends[0] : ends[group.quota[index]]] if group.quota[index] else ():
            rows[index].append({**row, "step": len(rows[index])})
