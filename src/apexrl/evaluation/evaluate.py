"""Evaluation: whole episodes on environments of their own, with intervals, step tables and videos."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from apexrl.core.errors import EnvError
from apexrl.core.metrics import EpisodeMetrics, FinishedEpisodes, end_info, fold_episodes
from apexrl.core.result import EvaluationResult, StepRows, without_lost
from apexrl.core.system.seeding import ENV, POLICY, spawn_seed
from apexrl.core.types import DONE, EPISODE_ID, TRUNCATED, Actor, Carry, Observation
from apexrl.envs.base import SeededVecEnv, VecEnv
from apexrl.envs.separate import SeparateEnvs
from apexrl.envs.suites.base import InitState
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.evaluation.step_csv import extend_rows
from apexrl.policies.base import Policy
from apexrl.rollout import evaluation_mode, make_actor, new_episodes, rollout

__all__ = [
    "EvaluationResult",
    "StepRows",
    "evaluate",
    "evaluate_starts",
    "extend_rows",
    "group_size",
]


def evaluate(
    env: VecEnv,
    policy: Policy,
    num_episodes: int,
    *,
    deterministic: bool = True,
    seed: int = 0,
    record_steps: bool = False,
    max_steps: int = 100_000,
    events: Collection[str] = (),
    on_progress: Callable[[int], None] | None = None,
) -> EvaluationResult:
    """Run whole episodes and return what each gave.

    Every environment has its own quota of episodes, so short episodes are not favoured. The environment is reset with
    the seed, and the global random state is left as it was. Where the environment cannot reset, the episode that runs
    in each of its environments is left out.

    Args:
        env: environments for this evaluation alone.
        policy: evaluated as it is, normalisers frozen.
        num_episodes: in all.
        deterministic: take the mode of the action distribution instead of sampling.
        seed: of the environments, and of sampling, which draw from separate streams.
        record_steps: also return one row a step for each environment.
        max_steps: an environment that takes more steps than this for its quota stops the evaluation.
        events: episode fields of events that the task is known to report, such as ``success_once``: they are 0 where no
            episode of this evaluation reports them.
        on_progress: called with the number of episodes so far.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes must be at least 1, got {num_episodes}")
    if deterministic and env.num_distinct_episodes is not None:
        # The same episode again would be the same again, and the interval too narrow.
        num_episodes = min(num_episodes, env.num_distinct_episodes)
    quota = np.full(env.num_envs, num_episodes // env.num_envs)
    quota[: num_episodes % env.num_envs] += 1
    rows: StepRows | None = {index: [] for index in range(env.num_envs)} if record_steps else None
    counted = _Counted(quota, rows, counts_first=env.can_reset)
    with evaluation_mode(policy, spawn_seed(seed, POLICY)):
        actor = make_actor(policy, env.device, deterministic=deterministic)
        _run_group(env, actor, policy, env.reset(seed=spawn_seed(seed, ENV)), counted, max_steps, on_progress)
    episodes, info = counted.episodes()
    del info[TRUNCATED]
    return without_lost(_with_events(episodes, counted.events, events), info, env.task_names, counted.rows)


def evaluate_starts(
    env: VecEnv,
    policy: Policy,
    starts: Sequence[int] | Sequence[InitState],
    *,
    max_steps: int = 100_000,
    events: Collection[str] = (),
    on_progress: Callable[[int], None] | None = None,
) -> EvaluationResult:
    """Run one deterministic episode from each start; on a CPU the result is the same for any number of environments.

    Each episode depends on its start and on the policy alone, to the last bit: the policy acts for one environment at
    a time, because a product of larger matrices rounds differently, and the environments have nothing in common. What
    a policy draws even so, such as where a flow starts, is drawn from a stream of the episode's own.

    Args:
        env: environments for this evaluation alone, all of one kind; they run the episodes in groups.
        policy: evaluated as it is, normalisers frozen.
        starts: a seed for each episode; initial states for a suite.
        max_steps: an episode that takes more steps than this stops the evaluation.
        events: as for ``evaluate``.
        on_progress: called with the number of episodes so far.

    Returns:
        The episodes in the order of their starts, with ``truncated``; ``info["episode_id"]`` is the index of the start.

    Raises:
        EnvError: when the environment cannot start an episode alone, or an episode does not end.
    """
    if not starts:
        raise ValueError("starts must name at least one episode")
    own = None
    if not isinstance(env, SeededVecEnv | SuiteVecEnv):
        own = SeparateEnvs(env, group_size(len(starts), env.num_envs))
    runner = own or env
    parts: list[_Columns] = []
    infos: list[_Columns] = []
    found: set[str] = set()
    try:
        with evaluation_mode(policy, spawn_seed(0, POLICY)):
            actor = make_actor(policy, env.device, deterministic=True)
            for first in range(0, len(starts), runner.num_envs):
                group = starts[first : first + runner.num_envs]
                counted = _Counted(np.arange(runner.num_envs) < len(group))
                tell = None if on_progress is None else _counting_on(on_progress, first)
                obs = _begin(runner, group)
                _run_group(runner, _one_by_one(actor, _streams(runner, group)), policy, obs, counted, max_steps, tell)
                found |= counted.events
                episodes, info = counted.episodes()
                # A suite chooses which of its environments begins with which episode.
                place = info[EPISODE_ID] if isinstance(runner, SuiteVecEnv) else counted.env_index()
                order = np.argsort(place)
                parts.append({name: values[order] for name, values in episodes.items()})
                infos.append({name: values[order] for name, values in info.items()})
                infos[-1][EPISODE_ID] = first + place[order]
    finally:
        if own is not None:
            own.close()
    joined = _with_events(_join_columns(parts), found, events)
    joined_info = _join_columns(infos)
    joined[TRUNCATED] = joined_info.pop(TRUNCATED)
    return without_lost(joined, joined_info, env.task_names)


def group_size(num_starts: int, num_envs: int) -> int:
    """Return how many environments run the episodes in as few groups as ``num_envs`` would, all of about one size."""
    return math.ceil(num_starts / math.ceil(num_starts / num_envs))


def _begin(env: VecEnv, group: Sequence[Any]) -> Observation:
    """Start the episodes of a group, each in one of the first environments; what the others do is not counted."""
    if isinstance(env, SuiteVecEnv):
        env.assign(group)
        return env.reset()
    assert isinstance(env, SeededVecEnv)
    return env.reset_each([*group, *[group[-1]] * (env.num_envs - len(group))])


def _streams(env: VecEnv, group: Sequence[Any]) -> list[np.random.Generator]:
    """Return for each environment the random numbers of the episode that runs in it, which follow from its start."""
    numbers = env.running_episodes if isinstance(env, SuiteVecEnv) else range(env.num_envs)
    streams = []
    for number in numbers:
        start = group[number if number < len(group) else -1]  # -1, the last, for what is not counted
        entropy = start
        if isinstance(start, InitState):
            entropy = [start.task_id, *np.ascontiguousarray(start.init_state).view(np.uint32).tolist()]
        # Apart from the numbers that the environment itself draws from its seed.
        streams.append(np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=(1,))))
    return streams


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


def _counting_on(on_progress: Callable[[int], None], first: int) -> Callable[[int], None]:
    return lambda count: on_progress(first + count)


_Columns = dict[str, NDArray[np.float64]]
"""One value per episode for each name."""


class _Counted:
    """The episodes that count: as many of each environment as its quota says.

    Args:
        quota: ``[N]``.
        rows: where one row per step goes, when wanted.
        counts_first: whether the first episode of each environment counts; not where it had begun before.
    """

    def __init__(self, quota: NDArray[Any], rows: StepRows | None = None, *, counts_first: bool = True) -> None:
        self.quota, self.rows, self.counts_first = quota.astype(np.int64), rows, counts_first
        self.taken, self._steps = np.zeros_like(self.quota), np.zeros_like(self.quota)
        self._parts: list[_Columns] = []
        self._infos: list[_Columns] = []
        self._env_index: list[NDArray[np.int64]] = []
        self.events: set[str] = set()
        """The fields that are events."""

    @property
    def complete(self) -> bool:
        return bool((self.taken >= self.quota).all())

    def add(self, finished: FinishedEpisodes, info: Mapping[str, torch.Tensor]) -> None:
        """Bring finished episodes to the host and keep those that the quotas still have room for."""
        table = torch.stack([finished.ended.double(), *finished.value.values(), *info.values()]).cpu().numpy()
        ended = table[0] > 0
        rank = self.taken + ended.cumsum(0)
        keep = ended & (rank <= self.quota)
        self.taken += keep.sum(0)
        self.events |= finished.events
        values, ends = table[1 : 1 + len(finished.value)], table[1 + len(finished.value) :]
        self._parts.append({name: value[keep] for name, value in zip(finished.value, values, strict=True)})
        self._infos.append({name: value[keep] for name, value in zip(info, ends, strict=True)})
        self._env_index.append(np.nonzero(keep)[1])
        self._steps += np.bincount(self._env_index[-1], self._parts[-1]["episode_len"], len(keep[0])).astype(np.int64)

    def env_index(self) -> NDArray[np.float64]:
        """Return the environment in which each episode ran."""
        return np.concatenate(self._env_index).astype(np.float64)

    def episodes(self) -> tuple[_Columns, _Columns]:
        """Return fields and control data of the episodes, and cut the rows to the steps of these episodes."""
        for index, env_rows in (self.rows or {}).items():
            # Past its quota an environment continues until the others are done.
            first = self._first_step(env_rows)
            env_rows[:] = env_rows[first : first + int(self._steps[index])]
            for step, row in enumerate(env_rows):
                row["step"] = step
        return _join_columns(self._parts), _join_columns(self._infos)

    def _first_step(self, env_rows: list[dict[str, float]]) -> int:
        """Return the first step of the first episode that counts."""
        if self.counts_first:
            return 0
        return next((step + 1 for step, row in enumerate(env_rows) if row[DONE]), len(env_rows))


def _run_group(
    env: VecEnv,
    actor: Actor,
    policy: Policy,
    obs: Observation,
    counted: _Counted,
    max_steps: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Step environments that were reset until every quota is full."""
    running = new_episodes(env, policy, obs)
    carry, episode_metrics, num_steps = running.carry, EpisodeMetrics(), 0
    episode_metrics.unfinished = running.unfinished
    while not counted.complete:
        if num_steps >= max_steps:
            raise EnvError(
                f"Evaluation gave up: {counted.taken.sum()} of {counted.quota.sum()} episodes ended within {max_steps} "
                "steps of each environment. Give the task a time limit (task.kwargs.max_episode_steps)."
            )
        batch, carry = rollout(env, actor, carry, min(1000, max_steps), keep=(), until_done=True)
        if counted.rows is not None:
            extend_rows(counted.rows, batch)
        counted.add(fold_episodes(batch, env.metric_specs, episode_metrics), end_info(batch))
        num_steps += batch.shape[0]
        if on_progress is not None:
            on_progress(int(counted.taken.sum()))


def _join_columns(parts: Sequence[_Columns]) -> _Columns:
    """Join columns; NaN where a part has none."""
    names = dict.fromkeys(name for part in parts for name in part)
    lengths = [len(next(iter(part.values()))) for part in parts]
    return {
        name: np.concatenate([part.get(name, np.full(n, np.nan)) for n, part in zip(lengths, parts, strict=True)])
        for name in names
    }


def _with_events(episodes: _Columns, events: Collection[str], known: Collection[str]) -> _Columns:
    """Count 0 for an event in the episodes that did not report it, if it is ``known`` or any episode did."""
    never = np.full(len(episodes["return"]), np.nan)
    filled = dict(episodes)
    for name in [name for name in episodes if name in events] + sorted(set(known) - set(episodes)):
        values = episodes.get(name, never)
        if name in known or not np.isnan(values).all():
            filled[name] = np.where(np.isnan(values), 0.0, values)
    return filled
