"""Task metrics: what a task declares, how steps fold into episodes, and how the results are named in the logs.

Training and evaluation share these definitions. Every step writes its metrics into ``[T, N, 1]`` storage on the
device; after the rollout ``fold_episodes`` folds the storage once into the episodes that ended in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.errors import ConfigError
from apexrl.core.types import DONE, INFO, METRIC, REWARD, TRUNCATED

Reduce = Literal["sum", "mean", "max", "min", "last"]
RESERVED_NAMES = frozenset({"reward", "done", "return", "episode_len", "success_once", "success_at_end", "fail_once"})
"""Fields that every episode has; no metric may take their names."""
EVENT_FIELDS = {"success": ("success_once", "success_at_end"), "fail": ("fail_once",)}
"""The episode fields of the metrics that have more, or others, than one of their own name."""
TASK_SUCCESS = "success_once of "
"""Begins the name of an episode field that is the success of one task of several; the task's name follows."""


@dataclass(frozen=True)
class MetricSpec:
    """Declares one metric of a task.

    The names ``success`` and ``fail`` are special: both are events, and an episode reports ``success_once`` (at any
    step), ``success_at_end`` (at its last step) and ``fail_once`` instead of one folded number.
    """

    name: str
    reduce: Reduce = "sum"
    """How the steps of an episode become one number."""
    group: str = "reward"
    """The prefix under which training logs it; evaluation logs it under ``eval_reward/``."""
    event: bool = False
    """Reported only when it happens: once it was reported at all, an ended episode that did not report it counts 0.
    Without this, such an episode is left out of the mean."""
    at_most: float | None = None
    """Of the group ``task``: the summary of an evaluation says in how many episodes the number was no larger."""

    def __post_init__(self) -> None:
        if self.name in EVENT_FIELDS:
            object.__setattr__(self, "event", True)
        if self.name in RESERVED_NAMES:
            raise ConfigError(
                f"A metric cannot be called '{self.name}': every episode has a field of that name. Rename it."
            )
        if self.reduce not in get_args(Reduce):
            raise ConfigError(
                f"MetricSpec.reduce of '{self.name}' must be one of {get_args(Reduce)}, got '{self.reduce}'."
            )


@dataclass(frozen=True)
class FinishedEpisodes:
    """The episodes that ended inside one rollout: row ``k`` of column ``n`` is the k-th of environment ``n``."""

    ended: Tensor
    """``[K, N]`` bool: which entries are real."""
    value: dict[str, Tensor]
    """``[K, N]`` float64 for each episode field; NaN where a metric was never reported."""
    events: frozenset[str]
    """The fields among them that are events: NaN there means that none was reported before the end of the rollout."""


class EpisodeMetrics(Mapping[str, NDArray[np.float64]]):
    """What unfinished episodes have so far, and running totals of the finished ones, all on the device.

    As a mapping it holds the episode fields: ``episode_metrics["return"]`` are the returns of the episodes finished
    since ``clear``, an array ``[E]``, where they are kept, else their mean, ``[1]``. ``"success"`` and ``"fail"`` are
    ``success_once`` and ``fail_once``. Values that are not known are left out.

    Args:
        keep_episodes: keep the values of every finished episode until ``clear``.
    """

    def __init__(self, keep_episodes: bool = False) -> None:
        self.finished: list[FinishedEpisodes] | None = [] if keep_episodes else None
        self.unfinished: dict[str, Tensor] = {}
        """``[N]`` partial sums and extremes of the running episodes."""
        self.totals: dict[str, Tensor] = {}
        """``[2]`` sum and count over finished episodes since ``clear``."""
        self.specs: dict[str, MetricSpec] = {}
        """Every metric folded so far; one that an environment reports again only later keeps its place."""
        self.reported: dict[str, Tensor] = {}
        """``[]`` bool: whether an event was ever reported."""

    def events(self) -> set[str]:
        """Return the episode fields of the events that were ever reported; reads them from the device."""
        reported = to_host(self.reported)
        return {field for name in self.reported if reported[name] for field in EVENT_FIELDS.get(name, (name,))}

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        field = {"success": "success_once", "fail": "fail_once"}.get(name, name)
        if field not in self.totals:
            raise KeyError(f"No episode has reported '{name}'; there are {list(self)}.")
        if self.finished is None:
            value = self.means()[field].view(1)
        else:
            value = self.episodes()[field]
            value = value[~value.isnan()]
        return np.asarray(value.cpu(), np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self.totals)

    def __len__(self) -> int:
        return len(self.totals)

    def __bool__(self) -> bool:
        return True

    def episodes(self) -> dict[str, Tensor]:
        """Return what is kept: each field of the episodes finished since ``clear``, ``[E]``; NaN where not known."""
        columns: dict[str, list[Tensor]] = {name: [] for name in self.totals}
        for part in self.finished or ():
            unknown = torch.full_like(part.value["episode_len"], torch.nan)
            for name, column in columns.items():
                column.append(part.value.get(name, unknown)[part.ended])
        joined = {name: torch.cat(column) if column else torch.empty(0) for name, column in columns.items()}
        # An event may have been reported for the first time after these episodes.
        return joined | {name: joined[name].nan_to_num(0.0) for name in self.events() if name in joined}

    def means(self) -> dict[str, Tensor]:
        """Mean of each episode field over the episodes finished since ``clear``; NaN when there were none."""
        if not self.totals:
            return {}
        sums, counts = torch.stack(list(self.totals.values())).unbind(-1)
        return dict(zip(self.totals, (sums / counts).unbind(), strict=True))

    def add_task_success(self, success: Tensor, task: Tensor, task_names: Sequence[str]) -> None:
        """Add up the successes of finished episodes, those of each task as a field of its own.

        Args:
            success: whether each succeeded, ``[E]``.
            task: the index of its task, ``[E]``.
            task_names: of all tasks.
        """
        pairs = torch.stack((success.double(), torch.ones_like(success, dtype=torch.double)), -1)
        totals = pairs.new_zeros(len(task_names), 2).index_add_(0, task, pairs)
        for name, total in zip(task_names, totals, strict=True):
            field = f"{TASK_SUCCESS}{name}"
            self.totals[field] = self.totals[field] + total if field in self.totals else total

    def count(self, name: str) -> Tensor:
        """Return how many finished episodes the mean of a field stands for."""
        return self.totals[name][1]

    def clear(self) -> None:
        """Forget the finished episodes; running ones are kept."""
        for total in self.totals.values():
            total.zero_()
        if self.finished is not None:
            self.finished.clear()

    def restart(self) -> None:
        """Forget the running episodes, because they were cut."""
        self.unfinished = {}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return running and finished totals as plain tensors, and the metrics as plain values."""
        parts = {"unfinished": self.unfinished, "totals": self.totals, "reported": self.reported}
        tensors = {part: {name: value.clone() for name, value in values.items()} for part, values in parts.items()}
        return {**tensors, "specs": {name: asdict(spec) for name, spec in self.specs.items()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        """Continue from ``state_dict``."""
        self.unfinished = {name: value.to(device) for name, value in state["unfinished"].items()}
        self.totals = {name: value.to(device) for name, value in state["totals"].items()}
        self.reported = {name: value.to(device) for name, value in state["reported"].items()}
        self.specs = {name: MetricSpec(**values) for name, values in state["specs"].items()}


def begun_before(has_begun: Tensor) -> dict[str, Tensor]:
    """Return ``EpisodeMetrics.unfinished``; episodes ``[N]`` with steps that nobody counted are left out."""
    return {"episode_len": torch.where(has_begun, torch.nan, 0.0).double()}


class _Segments:
    """Reduces ``[T, N]`` steps to ``[T + 1, N]`` episodes without leaving the device.

    The steps of environment ``n`` up to and including its first done are segment 0, and so on; the last segment is
    the episode that continues. What the unfinished episode had before this rollout enters segment 0.
    """

    NEUTRAL: ClassVar[Mapping[str, float]] = {"sum": 0.0, "amax": -torch.inf, "amin": torch.inf}
    """The ways to reduce, with the number that changes no result."""

    def __init__(self, done: Tensor, unfinished: dict[str, Tensor]) -> None:
        self.done, self.unfinished = done, unfinished
        self.segment = done.cumsum(0) - done.long()
        self.count = done.sum(0, keepdim=True)

    def reduce(self, x: Tensor, how: str, name: str = "") -> Tensor:
        """Reduce the steps ``[T, N]`` of every episode; under a ``name``, also those before this rollout."""
        out = x.new_full((len(x) + 1, x.shape[1]), self.NEUTRAL[how])
        out[0] = self.unfinished.get(name, out[0])
        out.scatter_reduce_(0, self.segment, x, how)
        if name:
            partial = out.gather(0, self.count)[0]
            # In place where it exists, so that a captured rollout finds it where it left it.
            self.unfinished[name] = self.unfinished[name].copy_(partial) if name in self.unfinished else partial
        return out


def fold_episodes(
    batch: TensorDict | Mapping[str, Any], metric_specs: Mapping[str, MetricSpec], episode_metrics: EpisodeMetrics
) -> FinishedEpisodes:
    """Fold the steps of one rollout into episodes; episodes that span rollouts are counted whole.

    Args:
        batch: ``done``, ``reward`` and, under ``metric``, the metrics of the rollout, each ``[T, N, 1]``. Without
            ``reward`` the episodes have no ``return`` and no ``reward``.
        metric_specs: how each metric folds; one that is not in the batch is left out.
        episode_metrics: receives partial sums of running episodes and totals of the finished ones.
    """
    segments = _Segments(batch[DONE].squeeze(-1), episode_metrics.unfinished)
    one = torch.ones_like(segments.done, dtype=torch.double)
    episode = {"episode_len": segments.reduce(one, "sum", "episode_len")}
    if REWARD in batch:
        total = segments.reduce(batch[REWARD].squeeze(-1).double(), "sum", "return")
        episode = {"return": total, **episode, "reward": total / episode["episode_len"]}
    metrics, reported = batch.get(METRIC, {}), episode_metrics.reported
    events: dict[str, Tensor] = {}
    episode_metrics.specs.update(metric_specs)
    for name, spec in episode_metrics.specs.items():
        # One that was reported before, but not in this rollout, still belongs to episodes that end in it.
        if name in metrics or f"{name}/seen" in episode_metrics.unfinished or name in reported:
            x = metrics[name].squeeze(-1).double() if name in metrics else torch.full_like(one, torch.nan)
            fields = _fold(spec, x, segments)
            if spec.event:
                known = (~x.isnan()).any()
                # In place where it exists, as for the unfinished episodes.
                reported[name] = reported[name].logical_or_(known) if name in reported else known
                fields = {field: torch.where(reported[name] & v.isnan(), 0.0, v) for field, v in fields.items()}
                events.update(dict.fromkeys(fields, reported[name]))
            episode.update(fields)
    totals, places = episode_metrics.totals, torch.arange(len(one) + 1, device=one.device)[:, None]
    ended = (places < segments.count) & ~episode["episode_len"].isnan()
    for name, value in episode.items():
        real = ended & ~value.isnan()
        total = torch.stack((torch.where(real, value, 0.0).sum(), real.sum()))
        totals[name] = totals[name].add_(total) if name in totals else total
        if name in events:
            # Also the episodes that ended before its first report, since ``clear``.
            totals[name][1] = totals["episode_len"][1] * events[name]
    finished = FinishedEpisodes(ended, episode, frozenset(events))
    if episode_metrics.finished is not None:
        episode_metrics.finished.append(finished)
    return finished


def aggregate_metrics(
    metrics_storage: Mapping[str, Tensor],
    metric_specs: Mapping[str, MetricSpec],
    episode_metrics: EpisodeMetrics,
) -> FinishedEpisodes:
    """``fold_episodes`` on steps whose outcomes and metrics lie side by side.

    Args:
        metrics_storage: ``done`` (or ``done_mask``), ``reward`` and every metric of the rollout, ``[T, N]`` or ``[T, N,
            1]``.
        metric_specs: how each metric folds.
        episode_metrics: receives the episodes.

    Raises:
        KeyError: when the storage has neither ``done`` nor ``done_mask``.
    """
    steps = {name: value.reshape(*value.shape[:2], 1) for name, value in metrics_storage.items()}
    done = steps.get(DONE, steps.get("done_mask"))
    if done is None:
        raise KeyError(f"aggregate_metrics needs 'done' or 'done_mask'; the storage has {sorted(steps)}.")
    return fold_episodes({**steps, DONE: done.bool(), METRIC: steps}, metric_specs, episode_metrics)


def end_info(batch: TensorDict) -> dict[str, Tensor]:
    """Return ``truncated`` and the control data at the last step of each episode, ``[K, N]`` as ``FinishedEpisodes``.

    Args:
        batch: ``[T, N]`` with ``done``, ``truncated`` and, where the environment gives any, ``info``.
    """
    segments = _Segments(batch[DONE].squeeze(-1), {})
    columns = {TRUNCATED: batch[TRUNCATED], **(dict(batch[INFO].items()) if INFO in batch else {})}
    at_ends = {name: torch.where(batch[DONE], value.double(), 0.0).squeeze(-1) for name, value in columns.items()}
    return {name: segments.reduce(value, "sum") for name, value in at_ends.items()}


def _fold(spec: MetricSpec, x: Tensor, segments: _Segments) -> dict[str, Tensor]:
    """Return the episode fields of one metric ``[T, N]``; NaN where an episode never reported it."""
    known, is_event = ~x.isnan(), spec.name in EVENT_FIELDS
    seen = segments.reduce(known.double(), "sum", f"{spec.name}/seen")
    if spec.reduce == "last" and not is_event:
        return {spec.name: segments.reduce(torch.where(segments.done, x, 0.0), "sum")}
    how = "amax" if is_event else {"max": "amax", "min": "amin"}.get(spec.reduce, "sum")
    value = segments.reduce(torch.where(known, x, segments.NEUTRAL[how]), how, spec.name)
    value = torch.where(seen > 0, value / seen if spec.reduce == "mean" else value, torch.nan)
    if not is_event:
        return {spec.name: value}
    fields = {f"{spec.name}_once": value}
    if spec.name == "success":
        fields["success_at_end"] = segments.reduce(torch.where(segments.done, x, 0.0), "sum")
    return {field: torch.where(v.isnan(), v, (v > 0).double()) for field, v in fields.items()}


# The one table of log names: episode field -> names below "rollout/" in training and "eval/" in evaluation.
# success_rate counts an episode as a success when it succeeded at any step.
_FIELD_NAMES = {
    "return": ("return",),
    "episode_len": ("episode_len",),
    "reward": ("reward",),
    "success_once": ("success_once", "success_rate"),
    "success_at_end": ("success_at_end",),
    "fail_once": ("fail_once", "fail_rate"),
}
_TRAINING_ALIASES = {"return": ["episode/mean_reward"], "episode_len": ["episode/mean_length"]}


def training_log_names(field: str, specs: Mapping[str, MetricSpec]) -> list[str]:
    """Names under which training logs an episode field."""
    if field.startswith(TASK_SUCCESS):
        return [f"rollout/success_rate/{field.removeprefix(TASK_SUCCESS)}"]
    if field not in _FIELD_NAMES:
        return [f"{specs[field].group if field in specs else 'reward'}/{field}"]
    return [f"rollout/{name}" for name in _FIELD_NAMES[field]] + _TRAINING_ALIASES.get(field, [])


def evaluation_log_names(field: str) -> list[str]:
    """Names under which evaluation logs an episode field."""
    if field not in _FIELD_NAMES:
        return [f"eval_reward/{field}"]
    return [f"eval/{name}" for name in _FIELD_NAMES[field]]


def to_host(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Bring many scalars to the host in one transfer from each device."""
    host = {name: float(value) for name, value in values.items() if not isinstance(value, Tensor)}
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            groups.setdefault((value.device, value.dtype), {})[name] = value.detach().reshape(())
    for device in {device for device, _ in groups}:
        here = [group for (place, _), group in groups.items() if place == device]
        stacked = torch.cat([torch.stack(list(group.values())).double() for group in here])
        host.update(zip([name for group in here for name in group], stacked.tolist(), strict=True))
    return {name: host[name] for name in values}
