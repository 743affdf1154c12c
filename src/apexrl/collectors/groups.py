"""Groups of rollouts from the same init states, for algorithms that compare the rollouts of a group."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from apexrl.collectors.base import BaseCollector, Collected
from apexrl.collectors.episodes import (
    CreatedEnv,
    SuiteRunner,
    join_groups,
    lost_episodes,
    run_episodes,
    successful_episodes,
)
from apexrl.collectors.init_states import InitStateDataset, InitStateSampler, RolloutStats, endless, hash_init_state
from apexrl.core.errors import ConfigError, EnvError, plural
from apexrl.core.metrics import EpisodeMetrics, fold_episodes
from apexrl.core.types import (
    CONTROL_STEPS,
    DONE,
    EPISODE_ID,
    GROUP,
    INFO,
    LOST,
    METRIC,
    OBSERVATION,
    PRE_TANH,
    REWARD,
    SAMPLED_SUCCESS,
    TASK_ID,
    VALID,
)
from apexrl.envs.options import check_at_least
from apexrl.envs.suites.base import InitState
from apexrl.policies.base import Policy

LOGGED_COUNTS = (
    "groups_valid", "groups_dropped", "states_skipped", "episodes", "lost_episodes", "attempts", "control_steps",
    "envs_created", "envs_reused",
)  # fmt: skip
MAX_NAMED = 8
"""States that one message names."""


class _Draw(NamedTuple):
    task_id: int
    init_state: NDArray[np.float64]
    hash: str


class _Group(NamedTuple):
    draw: _Draw
    successes: list[bool]
    steps: TensorDict
    """``[T, n]``, a column for each rollout that was not lost."""

    @property
    def is_mixed(self) -> bool:
        return len(set(self.successes)) > 1


class RolloutGenerator(BaseCollector):
    """Collects batches of groups: ``rollouts_per_env`` episodes from each of ``num_envs`` init states.

    Every batch is whole episodes, ``[T, E]``: column by column the rollouts of group 0, of group 1, and so on, each
    from its first step on, then zeros (``valid`` is false there). ``group`` numbers the groups.

    With dynamic sampling a group whose rollouts all succeed, or all fail, is dropped, for it has no gradient, and
    other states are drawn in its place; a state whose last ``rollouts_per_env`` outcomes are all successes is skipped,
    where statistics are kept. After ``max_attempts`` the batch is what was found by then, but never nothing.

    Where the runner has ``random_init``, a sample says the task alone: each group starts from a state drawn at random,
    which never comes again, so that no statistics are kept.

    Args:
        env_runner: the environments and the policy.
        rollouts_per_env: episodes of a group, at least 2.
        num_envs: groups wanted in a batch.
        max_steps: control steps after which an episode is truncated; those of the environments when not given.
        agent_gpus: at most one GPU, where the batch is handed over; the policy's device when not given, or where the
            machine has none.
        init_state_dataloader: gives samples, or batches of samples, again from its start where it ends, such as
            PyTorch's ``DataLoader(init_state_dataset, shuffle=True)``; of one task also states alone. Only an
            ``InitStateSampler``, which is created when none is given, continues exactly in a resumed run.
        init_state_dataset: what there is to draw; the training split of the suite when not given.
        enable_dynamic_sampling: drop groups without a gradient, skip mastered states.
        rollout_skip_threshold: a state that was skipped more often than this is forgotten and tested again.
        enable_rollout_stats_tracking: remember the outcomes of each init state.
        rollout_stats_path: the JSON file with them, continued over runs; None keeps them in memory.
        use_val_init: draw from the validation split instead, to debug.
        reuse_envs: keep the simulators for the next batch; otherwise every batch creates its own.
        keep: keys of the batch besides the outcomes; None keeps everything that the policy returned.
        seed: of random init states, and of the order of the others where no loader is given.
        oversample: groups run for each one still missing, when some may be dropped.
        max_attempts: times that groups are run for one batch.
        max_groups: groups that a batch may have when more than wanted turn out useful; ``num_envs`` when not given.
        on_message: told which states are skipped and dropped; the log when not given.
    """

    def __init__(
        self,
        env_runner: SuiteRunner,
        rollouts_per_env: int = 8,
        num_envs: int = 8,
        max_steps: int | None = None,
        agent_gpus: Sequence[int] = (),
        init_state_dataloader: Iterable[Any] | None = None,
        init_state_dataset: InitStateDataset | None = None,
        enable_dynamic_sampling: bool = False,
        rollout_skip_threshold: int = 3,
        enable_rollout_stats_tracking: bool = False,
        rollout_stats_path: Path | str | None = None,
        use_val_init: bool = False,
        *,
        reuse_envs: bool = True,
        keep: Collection[str] | None = None,
        seed: int = 0,
        oversample: float = 1.5,
        max_attempts: int = 4,
        max_groups: int | None = None,
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        check_at_least("algo.", 2, rloo_batch_size=rollouts_per_env)
        check_at_least("algo.", 1, num_groups=num_envs, max_attempts=max_attempts, oversample=oversample)
        check_at_least("", num_envs, max_groups=max_groups or num_envs)
        check_at_least("", 1, max_steps=max_steps)
        self.env_runner, self.env = env_runner, env_runner.env
        self.max_steps, self.reuse_envs = max_steps, reuse_envs
        self.rollouts_per_env, self.num_envs = rollouts_per_env, num_envs
        self.enable_dynamic_sampling = enable_dynamic_sampling
        self.oversample = oversample if enable_dynamic_sampling else 1.0
        self.max_attempts, self.max_groups = max_attempts, max_groups or num_envs
        self.keep = keep
        self.on_message: Callable[[str], None] = on_message or logging.getLogger("apexrl").info
        self.stats: RolloutStats | None = None
        if enable_rollout_stats_tracking and not env_runner.random_init:
            self.stats = RolloutStats(rollout_stats_path, skip_threshold=rollout_skip_threshold)
        self.created_envs: dict[int, CreatedEnv] = {}
        """Task number -> its environments, for every task that has run."""
        if use_val_init and env_runner.random_init:
            raise ConfigError("algo.use_val_init needs task.random_init false: random init states are of no split.")
        if use_val_init or init_state_dataset is None:
            init_state_dataset = InitStateDataset(self.env.suite, "val" if use_val_init else "train")
            init_state_dataloader = None if use_val_init else init_state_dataloader
        self.init_state_dataset = init_state_dataset
        self.init_state_dataloader = init_state_dataloader or InitStateSampler(init_state_dataset, seed)
        self._samples = endless(self.init_state_dataloader, self.env.suite.num_tasks)
        self._random = [seed % 2**63, 0]
        """Seed of the next random init state, and how many were drawn."""
        num_gpus = torch.cuda.device_count()
        if len(agent_gpus) > 1 or any(not 0 <= gpu < max(num_gpus, 1) for gpu in agent_gpus):
            raise ConfigError(f"agent_gpus must name one of the {num_gpus} GPUs here, or none, got {list(agent_gpus)}.")
        self._device = torch.device("cuda", agent_gpus[0]) if agent_gpus and num_gpus else None
        self._counts: Counter[str] = Counter()
        self._seconds = self._seconds_creating = 0.0
        self._outcomes: list[TensorDict] = []
        self._origins: list[tuple[_Draw, bool]] = []
        """Of each column: where it started, and whether it succeeded."""
        self._skipped: dict[str, _Draw] = {}
        """By their hash."""
        self._before_step: Callable[[], None] | None = None

    @classmethod
    def from_config(cls, env_runner: SuiteRunner, cfg: Any, **options: Any) -> Self:
        """Create a generator from an ``RLOOConfig``; ``options`` are other arguments, which win."""
        own = {
            "rollouts_per_env": cfg.rloo_batch_size,
            "num_envs": cfg.num_groups,
            "enable_dynamic_sampling": cfg.enable_dynamic_sampling,
            "rollout_skip_threshold": cfg.rollout_skip_threshold,
            "enable_rollout_stats_tracking": cfg.enable_rollout_stats_tracking,
            "rollout_stats_path": cfg.rollout_stats_path or None,
            "use_val_init": cfg.use_val_init,
            "oversample": cfg.oversample,
            "max_attempts": cfg.max_attempts,
            "max_groups": math.ceil(cfg.oversample * cfg.num_groups),
        }
        return cls(env_runner, **{**own, **options})

    @property
    def policy(self) -> Policy:
        """Its current weights act."""
        return self.env_runner.policy

    @property
    def device(self) -> torch.device:
        """Where the batch is handed over."""
        return self._device or self.policy.device

    def collect(self, n_steps: int = 0, reset: bool = False) -> TensorDict:
        """Return the next batch ``[T, E]``. Episodes are always whole and new, so neither argument changes it.

        Raises:
            EnvError: when the environments lose every episode.
        """
        found = self.collect_unfolded()
        self.fold(found.outcomes, self.episode_metrics)
        return found.batch

    def collect_unfolded(self, n_steps: int = 0) -> Collected:
        """Collect as ``collect`` does, but leave the episode statistics to ``fold``."""
        self._outcomes = []
        batch = self._collect()
        return Collected(batch, self._outcomes, self.steps_in(batch), self.metrics())

    def fold(self, outcomes: Sequence[TensorDict], episodes: EpisodeMetrics) -> None:
        """Count the episodes of what ``collect_unfolded`` gave, and the success of each task."""
        for batch in outcomes:
            fold_episodes(batch, self.env.metric_specs, episodes)
            episodes.restart()  # what follows an episode here is padding
            episodes.add_task_success(successful_episodes(batch), batch[INFO, TASK_ID][0, :, 0], self.env.task_names)

    def watch(self, check: Callable[[], None]) -> None:
        """Call ``check`` before every step; what it raises ends the collection."""
        self._before_step = check

    def _collect(self) -> TensorDict:
        self.policy.eval()
        started, before = time.perf_counter(), replace(self.env.counts)
        counts = self._counts = Counter()
        mixed: list[_Group] = []
        uniform: list[_Group] = []
        outcomes: list[bool] = []
        self._skipped = {}
        while len(mixed) < self.num_envs and counts["attempts"] < self.max_attempts:
            wanted = math.ceil(self.oversample * (self.num_envs - len(mixed)))
            draws = self._draw(wanted, must=not (mixed or uniform))
            if not draws:
                break
            counts["attempts"] += 1
            for group in self._run(draws):
                outcomes += group.successes
                useful = group.is_mixed or not self.enable_dynamic_sampling
                (mixed if useful else uniform).append(group)
            del uniform[self.num_envs :]
        counts["groups_valid"] = len(mixed)
        groups = (mixed or uniform)[: self.max_groups]
        self._origins = [(group.draw, success) for group in groups for success in group.successes]
        self._seconds = time.perf_counter() - started
        self._seconds_creating = self.env.counts.seconds_creating - before.seconds_creating
        counts["envs_created"] = self.env.counts.created - before.created
        counts["envs_reused"] = max(0, counts["episodes"] - counts["envs_created"])
        self._tell_outcome(len(groups), is_mixed=bool(mixed))
        if not self.reuse_envs:
            self.created_envs.clear()
            self.env.release()
        batch = join_groups([group.steps for group in groups]).to(self.device)
        # Dropped groups too, and mastered states as what they last were: without them, a policy that masters the easy
        # states would seem to get worse. The same number everywhere, for those who watch over the policy.
        mastered = self.rollouts_per_env * len(self._skipped)
        rate = (sum(outcomes) + mastered) / (len(outcomes) + mastered)
        batch[SAMPLED_SUCCESS] = torch.full((), rate, device=self.device).expand(*batch.shape, 1)
        return batch

    def collect_for_normalizer(self, n_steps: int = 0) -> TensorDict:
        """Run one episode in every environment, not many for each state of a batch; the outcomes count nowhere."""
        self.policy.eval()
        samples = [next(self._samples) for _ in range(self.env.num_envs)]
        starts = [InitState(int(sample["task_id"]), sample["init_state"]) for sample in samples]
        batch = self._run_episodes(starts, (OBSERVATION,))
        self._counts = Counter(control_steps=int(batch[INFO, CONTROL_STEPS].sum()))
        return batch

    def generate_rollouts(self) -> list[dict[str, Any]]:
        """Collect a batch and return its episodes one by one, without padding.

        Each holds what the batch does, ``[L, ...]``, and besides ``task_id``, ``task_name``, ``instruction``,
        ``init_state``, ``init_state_hash``, ``success``, ``return``, ``length`` (in chunks) and ``control_steps``.
        """
        batch, suite = self.collect(), self.env.suite
        episodes = []
        for column, (draw, success) in enumerate(self._origins):
            steps = batch[: int(batch[VALID][:, column].sum()), column]
            told = {
                GROUP: int(steps[GROUP][0]),
                "task_id": draw.task_id,
                "task_name": suite.task_names[draw.task_id],
                "instruction": suite.instructions[draw.task_id],
                "init_state": draw.init_state,
                "init_state_hash": draw.hash,
                "success": success,
                "return": float(steps[REWARD].sum()),
                "length": steps.shape[0],
                "control_steps": int(steps[INFO, CONTROL_STEPS].sum()),
            }
            episodes.append({**dict(steps.items()), **told})
        return episodes

    def steps_in(self, batch: TensorDict) -> int:
        """Control steps taken for the last batch, also those of episodes that are not in it."""
        return self._counts["control_steps"]

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last collection.

        Groups wanted, valid (useful ones that were found) and dropped, states skipped, episodes run and lost,
        attempts, control steps and their rate, simulators made, the seconds that took, and episodes that needed none.
        """
        return {
            "collect/groups_wanted": float(self.num_envs),
            **{f"collect/{name}": float(self._counts[name]) for name in LOGGED_COUNTS},
            "collect/control_steps_per_second": self._counts["control_steps"] / max(self._seconds, 1e-9),
            "collect/seconds_creating_envs": self._seconds_creating,
        }

    def follow(self, policy: Policy) -> None:
        """Act with this policy from the next batch on."""
        self.env_runner.policy = policy

    def restart(self, seed: int) -> None:
        """Draw init states in another order from here on."""
        self._random = [seed % 2**63, 0]
        if isinstance(self.init_state_dataloader, InitStateSampler):
            self.init_state_dataloader.restart(seed)

    def cleanup(self) -> None:
        """Close the environments. The generator cannot be used afterwards."""
        self.created_envs.clear()
        self.env.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the order of init states, the statistics of each, and those of the episodes."""
        loader = self.init_state_dataloader
        return {
            "sampler": loader.state_dict() if isinstance(loader, InitStateSampler) else {},
            "random": list(self._random),
            "rollout_stats": {} if self.stats is None else self.stats.state_dict(),
            "episode_metrics": self.episode_metrics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``: statistics that a later part of the run had written are forgotten."""
        if isinstance(self.init_state_dataloader, InitStateSampler) and state["sampler"]:
            self.init_state_dataloader.load_state_dict(state["sampler"])
        self._random = list(state.get("random", self._random))
        if self.stats is not None:
            self.stats.load_state_dict(state["rollout_stats"])
        self.episode_metrics.load_state_dict(state["episode_metrics"], self.env.device)

    def _draw(self, count: int, *, must: bool) -> list[_Draw]:
        """Draw up to ``count`` states that are not mastered, seeing each state once; at least one if it ``must``."""
        skips = self.stats if self.enable_dynamic_sampling else None
        chosen: list[_Draw] = []
        mastered: list[_Draw] = []
        num_drawn = 0
        # The length of the data set needs the states of every task, so it is asked for only where some are mastered.
        while len(chosen) < count and (num_drawn < count or num_drawn < len(self.init_state_dataset)):
            num_drawn += 1
            sample = next(self._samples)
            task_id, state = int(sample["task_id"]), sample["init_state"]
            if self.env_runner.random_init:
                state = self.env.suite.random_init_state(task_id, self._random)
                self._random[1] += 1
            draw = _Draw(task_id, state, hash_init_state(state))
            is_mastered = skips is not None and skips.is_mastered(draw.hash, self.rollouts_per_env)
            (mastered if is_mastered else chosen).append(draw)
        self._skip(mastered)
        if must and not chosen:
            chosen = mastered[:count]
            self.on_message(f"Every init state is mastered; {len(chosen)} of them are tested again.")
        return chosen

    def _skip(self, mastered: list[_Draw]) -> None:
        # A batch counts a state as skipped once, however often it is drawn.
        new = {draw.hash: draw for draw in mastered if draw.hash not in self._skipped}
        self._skipped |= new
        self._counts["states_skipped"] += len(new)
        if new and self.stats is not None:
            for state_hash in new:
                self.stats.skip(state_hash)
            states, names = plural(len(new), "init state"), self._names(list(new.values()))
            self.on_message(f"Skipped {states} whose last {self.rollouts_per_env} rollouts all succeeded: {names}.")

    def _run(self, draws: list[_Draw]) -> list[_Group]:
        """Run a group from each state; returns those with at least two rollouts left."""
        names = self.env.suite.task_names
        for task_id in {draw.task_id for draw in draws} - self.created_envs.keys():
            self.created_envs[task_id] = self.env_runner.create_parallel_envs(names[task_id])
        size = self.rollouts_per_env
        starts = [InitState(draw.task_id, draw.init_state) for draw in draws for _ in range(size)]
        own = {*self.policy.initial_state(1), *self.policy.extra_keys, PRE_TANH}
        keep = None if self.keep is None else own.union(self.keep)
        batch = self._run_episodes(starts, keep)
        lost = lost_episodes(batch)
        if not lost.all():
            self._outcomes.append(batch[:, ~lost].select(REWARD, DONE, METRIC, INFO))
        if num_lost := int(lost.sum()):
            self.on_message(f"Discarded {plural(num_lost, 'episode')}: the workers that ran them died.")
        control_steps = int(batch[INFO, CONTROL_STEPS].sum())
        self._counts.update(episodes=len(starts), control_steps=control_steps, lost_episodes=num_lost)
        successes, is_lost = successful_episodes(batch).tolist(), lost.tolist()
        groups = []
        for index, draw in enumerate(draws):
            columns = [column for column in range(index * size, (index + 1) * size) if not is_lost[column]]
            outcomes = [successes[column] for column in columns]
            if self.stats is not None and outcomes:
                self.stats.record(draw.hash, outcomes, names[draw.task_id])
            if len(columns) > 1:
                steps = batch[:, columns]
                steps[INFO] = steps[INFO].exclude(EPISODE_ID, LOST)
                groups.append(_Group(draw, outcomes, steps))
        if self.stats is not None:
            self.stats.write()
        self._tell_dropped(groups)
        return groups

    def _run_episodes(self, starts: Sequence[InitState], keep: Collection[str] | None) -> TensorDict:
        limits: dict[str, Any] = {"max_steps": self.max_steps, "before_step": self._before_step}
        return run_episodes(self.env, self.policy, starts, keep=keep, **limits)

    def _tell_dropped(self, groups: list[_Group]) -> None:
        for outcome, word in ((True, "succeeded"), (False, "failed")) if self.enable_dynamic_sampling else ():
            dropped = [group.draw for group in groups if not group.is_mixed and group.successes[0] is outcome]
            self._counts["groups_dropped"] += len(dropped)
            if dropped:
                number = plural(len(dropped), "group")
                self.on_message(f"Dropped {number} whose rollouts all {word}: {self._names(dropped)}.")

    def _tell_outcome(self, found: int, *, is_mixed: bool) -> None:
        counts = self._counts
        attempts = plural(counts["attempts"], "attempt")
        if not found:
            raise EnvError(
                f"{counts['lost_episodes']} of {counts['episodes']} episodes of a batch were lost with their workers, "
                "and no group has two left. Use fewer environments (task.num_parallel_envs), or read their messages."
            )
        if counts["envs_created"]:
            self.on_message(
                f"Created {plural(counts['envs_created'], 'simulator')} in {self._seconds_creating:.1f} s; "
                f"{plural(counts['envs_reused'], 'episode')} reused one."
            )
        if not is_mixed:
            self.on_message(
                f"No group had both successes and failures after {attempts}; nothing is learned from this batch. If "
                "this continues, start from an imitated policy (training.init_from), raise policy.init_std "
                "(policy.noise_level of a flow head), or lengthen task.max_episode_length."
            )
        elif found < self.num_envs:
            wanted = f"{self.num_envs} wanted groups"
            self.on_message(f"Only {found} of {wanted} were found after {attempts}; training continues with them.")

    def _names(self, draws: list[_Draw]) -> str:
        tasks = self.env.suite.task_names
        names = [f"{tasks[draw.task_id]} {draw.hash[:8]}" for draw in draws]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return ", ".join(names[:MAX_NAMED]) + more
