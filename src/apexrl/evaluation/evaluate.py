"""Evaluation: whole episodes on environments of their own, with intervals, step tables and videos."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from apexrl.core.errors import EnvError
from apexrl.core.metrics import EpisodeMetrics, FinishedEpisodes, end_info, fold_episodes
from apexrl.core.result import EvaluationResult, StepRows, without_lost
from apexrl.core.system.seeding import ENV, POLICY, spawn_seed
from apexrl.core.types import DONE, EPISODE_ID, TRUNCATED, Actor, Carry, Observation
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
        policy: evaluated as it is, normalisers frozen.
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
    counted = _Counted({index: [] for index in range(runner.num_envs)} if record_steps else None)
    try:
        with evaluation_mode(policy, spawn_seed(seed, POLICY)):
            actor = make_actor(policy, env.device, deterministic=deterministic)
            groups = (
                _of_each(runner, actor, starts, seed, deterministic)
                if isinstance(starts, int)
                else _from_starts(runner, actor, starts)
            )
            for group in groups:
                _run_group(runner, policy, group, counted, max_steps, on_progress)
    finally:
        if runner is not env:
            runner.close()
    episodes, info = counted.columns(events)
    truncated = info.pop(TRUNCATED)
    if not isinstance(starts, int):
        episodes[TRUNCATED], order = truncated, np.argsort(info[EPISODE_ID])
        episodes, info = ({name: values[order] for name, values in part.items()} for part in (episodes, info))
    return without_lost(episodes, info, env.task_names, counted.rows)


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
        streams = [_stream(group[number]) for number in order]
        yield _Group(obs, _one_by_one(actor, streams), (numbers >= 0).astype(np.int64), first + numbers)


def _stream(start: EpisodeStart) -> np.random.Generator:
    entropy: Any = getattr(start, "entropy", start)
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=(1,)))


def _one_by_one(actor: Actor, streams: Sequence[np.random.Generator]) -> Actor:
    """Let an actor see one environment at a time, each with its own random numbers."""

    def act_alone(carry: Carry, index: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(int(streams[index].integers(2**63)))
        # Copies, because where a row lies in memory decides how a product of matrices is computed.
        return actor({name: value[index : index + 1].clone() for name, value in carry.items()})

    def act(carry: Carry) -> dict[str, torch.Tensor]:
        rows = [act_alone(carry, index) for index in range(len(streams))]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    return act


_Columns = dict[str, NDArray[np.float64]]
"""One value per episode for each name."""


class _Counted:
    """The episodes that count, over all groups.

    Args:
        rows: where one row per step goes, when wanted.
    """

    def __init__(self, rows: StepRows | None) -> None:
        self.rows = rows
        self.events: set[str] = set()
        """The fields that are events."""
        self.num_episodes = 0
        self._episodes: list[_Columns] = []
        self._infos: list[_Columns] = []

    def add(
        self,
        finished: FinishedEpisodes,
        info: Mapping[str, torch.Tensor],
        room: NDArray[np.int64],
        numbers: NDArray[np.int64] | None,
    ) -> NDArray[np.int64]:
        """Bring finished episodes with their control data to the host, and keep those that there is room for.

        Returns:
            How many of each environment were kept, ``[N]`` as ``room``.
        """
        table = torch.stack([finished.ended.double(), *finished.value.values(), *info.values()]).cpu().numpy()
        ended = table[0] > 0
        keep = ended & (ended.cumsum(0) <= room)
        values, ends = table[1 : 1 + len(finished.value)], table[1 + len(finished.value) :]
        self._episodes.append({name: value[keep] for name, value in zip(finished.value, values, strict=True)})
        self._infos.append({name: value[keep] for name, value in zip(info, ends, strict=True)})
        if numbers is not None:
            self._infos[-1][EPISODE_ID] = numbers[np.nonzero(keep)[1]].astype(np.float64)
        self.events |= finished.events
        self.num_episodes += int(keep.sum())
        kept: NDArray[np.int64] = keep.sum(0)
        return kept

    def columns(self, known: Collection[str]) -> tuple[_Columns, _Columns]:
        """Return fields and control data of the episodes.

        An event counts 0 in the episodes that did not report it, if it is ``known`` or any episode did.
        """
        episodes, info = _join_columns(self._episodes), _join_columns(self._infos)
        never = np.full(len(episodes["return"]), np.nan)
        for name in [name for name in episodes if name in self.events] + sorted(set(known) - set(episodes)):
            values = episodes.get(name, never)
            if name in known or not np.isnan(values).all():
                episodes[name] = np.where(np.isnan(values), 0.0, values)
        return episodes, info


def _run_group(
    env: VecEnv,
    policy: Policy,
    group: _Group,
    counted: _Counted,
    max_steps: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Step environments in which episodes begin until every quota is full."""
    running = new_episodes(env, policy, group.obs)
    carry, episode_metrics, num_steps = running.carry, EpisodeMetrics(), 0
    episode_metrics.unfinished = running.unfinished
    rows: StepRows = {index: [] for index in counted.rows or ()}
    room = group.quota.copy()
    while room.any():
        if num_steps >= max_steps:
            raise EnvError(
                f"Evaluation gave up: {(group.quota - room).sum()} of {group.quota.sum()} episodes ended within "
                f"{max_steps} steps of each environment. Give the task a time limit (task.kwargs.max_episode_steps)."
            )
        batch, carry = rollout(env, group.actor, carry, min(1000, max_steps), keep=(), until_done=True)
        if rows:
            extend_rows(rows, batch)
        finished = fold_episodes(batch, env.metric_specs, episode_metrics)
        room -= counted.add(finished, end_info(batch), room, group.numbers)
        num_steps += batch.shape[0]
        if on_progress is not None:
            on_progress(counted.num_episodes)
    if counted.rows is not None:
        for index, env_rows in rows.items():
            # Past its quota an environment continues until the others are done; what began before is not counted.
            ends = [0] if env.can_reset else []
            ends += [t + 1 for t, row in enumerate(env_rows) if row[DONE]]
            for row in env_rows[ends[0] : ends[group.quota[index]]] if group.quota[index] else ():
                counted.rows[index].append({**row, "step": len(counted.rows[index])})


def _join_columns(parts: Sequence[_Columns]) -> _Columns:
    """Join columns; NaN where a part has none."""
    names = dict.fromkeys(name for part in parts for name in part)
    lengths = [len(next(iter(part.values()))) for part in parts]
    return {
        name: np.concatenate([part.get(name, np.full(n, np.nan)) for n, part in zip(lengths, parts, strict=True)])
        for name in names
    }
