"""Evaluation: whole episodes on environments of their own, with intervals, step tables and videos."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from tensordict import TensorDict

from apexrl.envs.base import VecEnv
from apexrl.errors import EnvError, RunDirError
from apexrl.metrics import (
    IDENTITY_FIELDS,
    EpisodeMetrics,
    FinishedEpisodes,
    evaluation_log_names,
    fold_episodes,
)
from apexrl.policies.base import Policy
from apexrl.rollout import initial_state, make_actor, rollout
from apexrl.types import METRIC, OBSERVATION, REWARD, Carry

RATE_FIELDS = ("success_once", "success_at_end", "fail_once")
StepRows = dict[int, list[dict[str, float]]]
"""Environment index -> one row a step."""


@dataclass(frozen=True)
class EvaluationResult:
    """What every evaluated episode gave, and summaries of it. As a number it is the mean return."""

    episodes: dict[str, NDArray[np.float64]]
    """Episode field -> one value an episode; NaN where a metric was never reported."""
    step_rows: StepRows | None = field(default=None, repr=False)
    """One row a step for each environment, when asked for."""
    task_names: Sequence[str] = ()
    """Of an environment with several tasks."""

    @property
    def num_episodes(self) -> int:
        """Episodes evaluated."""
        return len(self.episodes["return"])

    def mean(self, name: str) -> float:
        """Mean of an episode field over the episodes that reported it; NaN when none did."""
        known = self._known(name)
        return float(known.mean()) if len(known) else math.nan

    def interval(self, name: str, confidence: float = 0.95) -> tuple[float, float]:
        """Confidence interval of the mean: Wilson's for rates, the percentile bootstrap for other fields."""
        known = self._known(name)
        if name in RATE_FIELDS and len(known):
            test = stats.binomtest(int(known.sum()), len(known))
            low, high = test.proportion_ci(confidence, method="wilson")
            return float(low), float(high)
        if len(known) < 2 or known.min() == known.max():
            return self.mean(name), self.mean(name)
        means = np.random.default_rng(0).choice(known, (2000, len(known))).mean(1)
        low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
        return float(low), float(high)

    def logs(self) -> dict[str, float]:
        """Return every mean under its log name, and the spread of the returns."""
        fields = [name for name in self.episodes if name not in IDENTITY_FIELDS]
        logs = {log: self.mean(name) for name in fields for log in evaluation_log_names(name)}
        returns = self.episodes["return"]
        for name, value in (
            ("mean", returns.mean()),
            ("std", returns.std()),
            ("min", returns.min()),
            ("max", returns.max()),
        ):
            logs[f"eval/{name}_reward"] = float(value)
        return logs

    def record(self) -> dict[str, Any]:
        """Return a JSON-able summary: episodes, and mean and interval of every field."""
        record: dict[str, Any] = {"episodes": self.num_episodes}
        for name in self.episodes:
            if len(self._known(name)) and name not in IDENTITY_FIELDS:
                record[name] = self.mean(name)
                record[f"{name}_interval"] = list(self.interval(name))
        if "success_once" in record:
            record["success_rate"] = record["success_once"]
            record["success_rate_interval"] = record["success_once_interval"]
        if tasks := self.per_task():
            record["per_task"] = {
                name: {
                    "success_rate": task.mean("success_once"),
                    "interval": list(task.interval("success_once")),
                    "episodes": task.num_episodes,
                }
                for name, task in tasks.items()
            }
        return record

    def per_task(self) -> dict[str, EvaluationResult]:
        """Return the episodes of each task that had any; nothing for an environment with one task."""
        parts = {}
        for index, name in enumerate(self.task_names):
            rows = self.episodes["task_id"] == index
            if rows.any():
                parts[name] = EvaluationResult({key: values[rows] for key, values in self.episodes.items()})
        return parts

    def summary(self) -> str:
        """Return one line for people."""
        text = f"return {self.mean('return'):.2f}"
        if self.num_episodes > 1:
            low, high = self.interval("return")
            text += f" (95 % interval {low:.2f} to {high:.2f})"
        if "success_once" in self.episodes:
            text += f", success {100 * self.mean('success_once'):.1f} %"
            if self.num_episodes > 1:
                low, high = self.interval("success_once")
                text += f" ({100 * low:.1f} to {100 * high:.1f} %)"
            text += f", at the end {100 * self.mean('success_at_end'):.1f} %"
        return f"{text}, over {self.num_episodes} episode{'s' if self.num_episodes > 1 else ''}"

    def __float__(self) -> float:
        return self.mean("return")

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else self.summary()

    def __str__(self) -> str:
        return self.summary()

    def _known(self, name: str) -> NDArray[np.float64]:
        values = self.episodes[name]
        return values[~np.isnan(values)]


def evaluate(
    env: VecEnv,
    policy: Policy,
    num_episodes: int,
    *,
    deterministic: bool = True,
    seed: int = 0,
    record_steps: bool = False,
    max_steps: int = 100_000,
    on_progress: Callable[[int], None] | None = None,
) -> EvaluationResult:
    """Run whole episodes and return what each gave.

    Every environment has its own quota of episodes, so short episodes are not favoured. The environment is reset with
    the seed, and the global random state is left as it was.

    Args:
        env: environments for this evaluation alone.
        policy: evaluated as it is, normalisers frozen.
        num_episodes: in all.
        deterministic: take the mode of the action distribution instead of sampling.
        seed: of the environments, and of sampling.
        record_steps: also return one row a step for each environment.
        max_steps: an environment that takes more steps than this for its quota stops the evaluation.
        on_progress: called with the number of episodes so far.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes must be at least 1, got {num_episodes}")
    if deterministic and env.num_distinct_episodes is not None:
        # The same episode again would be the same again, and the interval too narrow.
        num_episodes = min(num_episodes, env.num_distinct_episodes)
    quota = np.full(env.num_envs, num_episodes // env.num_envs)
    quota[: num_episodes % env.num_envs] += 1
    taken, counted_steps = np.zeros_like(quota), np.zeros_like(quota)
    parts: list[dict[str, NDArray[np.float64]]] = []
    rows: StepRows = {index: [] for index in range(env.num_envs)}
    episode_metrics, num_steps = EpisodeMetrics(), 0
    cuda = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), _restored_mode(policy):
        torch.manual_seed(seed)
        carry: Carry = {OBSERVATION: env.reset(seed=seed), **initial_state(policy, env)}
        actor = make_actor(policy, env.device, deterministic=deterministic)
        while (taken < quota).any():
            if num_steps >= max_steps:
                raise EnvError(
                    f"Evaluation gave up: {int(taken.sum())} of {num_episodes} episodes ended within {max_steps} "
                    "steps of each environment. Give the task a time limit (task.kwargs.max_episode_steps)."
                )
            batch, carry = rollout(env, actor, carry, min(1000, max_steps), keep=(), until_done=True)
            if record_steps:
                extend_rows(rows, batch)
            finished = fold_episodes(batch, env.metric_specs, episode_metrics)
            parts.append(_within_quota(finished, quota, taken, counted_steps))
            num_steps += batch.shape[0]
            if on_progress is not None:
                on_progress(int(taken.sum()))
    names = dict.fromkeys(name for part in parts for name in part)
    episodes = {
        name: np.concatenate([part.get(name, np.full(len(part["return"]), np.nan)) for part in parts]) for name in names
    }
    if "lost" in episodes:  # their worker died: they say nothing about the policy
        kept = ~(episodes["lost"] > 0)
        if not kept.any():
            raise EnvError("The evaluation lost every episode: the workers died. Use fewer environments.")
        episodes = {name: values[kept] for name, values in episodes.items()}
    # Past its quota an environment goes on until the others are done; those steps belong to no counted episode.
    rows = {index: env_rows[: counted_steps[index]] for index, env_rows in rows.items()}
    return EvaluationResult(episodes, rows if record_steps else None, env.task_names)


@contextmanager
def _restored_mode(policy: Policy) -> Iterator[None]:
    """Put a policy into evaluation mode for a while."""
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)


def _within_quota(
    finished: FinishedEpisodes, quota: NDArray[Any], taken: NDArray[Any], counted_steps: NDArray[Any]
) -> dict[str, NDArray[np.float64]]:
    """Bring the finished episodes to the host and keep those that the quotas still have room for."""
    table = torch.stack([finished.ended.double(), *finished.value.values()]).cpu().numpy()
    ended = table[0] > 0
    rank = taken + ended.cumsum(0)
    keep = ended & (rank <= quota)
    taken += keep.sum(0)
    values = dict(zip(finished.value, table[1:], strict=True))
    counted_steps += np.where(keep, values["episode_len"], 0.0).sum(0).astype(counted_steps.dtype)
    return {name: value[keep] for name, value in values.items()}


def extend_rows(rows: StepRows, batch: TensorDict) -> None:
    """Append one row a step and environment, bringing the whole batch to the host at once."""
    columns = {"reward": batch[REWARD], **(dict(batch[METRIC].items()) if METRIC in batch else {})}
    table = torch.stack([column.squeeze(-1).double() for column in columns.values()]).cpu().numpy()
    for index, env_rows in rows.items():
        start = len(env_rows)
        for t in range(table.shape[1]):
            values = dict(zip(columns, table[:, t, index].tolist(), strict=True))
            env_rows.append({"step": start + t, "success": math.nan, "fail": math.nan, **values})


def save_step_csvs(step_data_per_env: StepRows, directory: Path) -> list[Path]:
    """Write ``env<M>/rewards.csv`` below ``directory``: one row a step; a value that is missing stays empty."""
    paths = []
    for index, rows in step_data_per_env.items():
        path = directory / f"env{index}" / "rewards.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        names = dict.fromkeys(["step", "reward", "success", "fail", *(name for row in rows for name in row)])
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(names))
            writer.writeheader()
            for row in rows:
                writer.writerow({name: "" if math.isnan(value) else value for name, value in row.items()})
        paths.append(path)
    return paths


def record_video(
    env: VecEnv, policy: Policy, path: Path, *, seed: int = 0, num_episodes: int = 1, fps: float | None = None
) -> Path:
    """Play deterministic episodes in environment 0 and write what it looks like as an MP4 file.

    Args:
        env: only its first environment is drawn.
        policy: acts with the mode of its distribution.
        path: of the file.
        seed: of the environments.
        num_episodes: one after another.
        fps: pictures a second; None for those of the environment, which show it as fast as it is.
    """
    import imageio.v2 as imageio

    actor = make_actor(policy, env.device, deterministic=True)
    temporary = path.with_suffix(".part.mp4")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()  # ffmpeg would fail with a page of text
        temporary.unlink()
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror}. Name another place.") from error
    policy.eval()
    writer: Any
    with imageio.get_writer(temporary, fps=fps or env.video_fps, macro_block_size=2) as writer:

        def act_and_draw(carry: Carry) -> dict[str, torch.Tensor]:
            writer.append_data(env.render(0))
            return actor(carry)

        carry: Carry = {OBSERVATION: env.reset(seed=seed), **initial_state(policy, env)}
        for _ in range(num_episodes):
            _, carry = rollout(env, act_and_draw, carry, env.max_episode_steps or 1000, keep=(), until_done=True)
    temporary.replace(path)
    return path
