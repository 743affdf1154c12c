"""What an evaluation found: a value for every field of every episode, and summaries with intervals."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.core.functional.intervals import mean_interval, wilson_interval
from apexrl.core.metrics import FinishedEpisodes, MetricSpec, evaluation_log_names
from apexrl.core.types import EPISODE_ID, LOST, TASK_ID, TRUNCATED

RATE_FIELDS = ("success_once", "success_at_end", "fail_once", TRUNCATED)
TASK_FIELDS = ("success_at_end", "return", "episode_len")
"""What the summary has of each task, besides its success."""
StepRows = dict[int, list[dict[str, float]]]
"""Environment index -> one row per step."""
Columns = dict[str, NDArray[np.float64]]
"""One value per episode for each name."""


@dataclass(frozen=True, eq=False)
class EvaluationResult(float):
    """What every evaluated episode gave, and summaries of it. It is a number, the mean return: compare and compute."""

    episodes: dict[str, NDArray[np.float64]]
    """Episode field -> one value an episode; NaN where a metric was never reported."""
    step_rows: StepRows | None = field(default=None, repr=False)
    """One row a step for each environment, when asked for."""
    task_names: Sequence[str] = ()
    """Of an environment with several tasks."""
    info: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Which episode each was: ``episode_id`` and ``task_id``, where the environment or the starts number them."""
    num_lost: int = 0
    """Episodes that are not here because their worker died: they say nothing about the policy."""
    sampled: EvaluationResult | None = field(default=None, repr=False)
    """Of the same policy with sampled actions, when asked for. Where it earns more, mean actions get stuck."""
    task_metrics: Sequence[MetricSpec] = ()
    """Metrics of the group ``task``, which the summary shows."""

    def __new__(cls, episodes: dict[str, NDArray[np.float64]], *_: Any, **__: Any) -> Self:
        """Return the mean of the returns that are known, as a number."""
        if isinstance(episodes, Real):  # ``statistics.mean`` converts its result to the class of its data
            return float(episodes)  # type: ignore[return-value]
        return super().__new__(cls, _mean(episodes["return"]))

    def __getnewargs__(self) -> tuple[Any]:
        """Let copies and other processes create it from the episodes, as here."""
        return (self.episodes,)

    @property
    def num_episodes(self) -> int:
        """Episodes evaluated, without those that were lost."""
        return len(self.episodes["return"])

    def mean(self, name: str = "return", *, axis: None = None, dtype: None = None, out: None = None) -> float:
        """Mean of an episode field over the episodes that reported it; NaN when none did.

        The other arguments are those with which ``np.mean(result)`` calls it.
        """
        return _mean(self.episodes[name])

    def interval(self, name: str) -> tuple[float, float]:
        """Confidence interval of the mean: Wilson's for rates, Student's t for other fields.

        NaN for one episode, unless it is a rate. Fewer than five episodes warn.
        """
        known = _known(self.episodes[name])
        if name in RATE_FIELDS and len(known):
            return wilson_interval(int(known.sum()), len(known))
        low, high = mean_interval(known) if len(known) > 1 else (math.nan, math.nan)
        return float(low), float(high)

    def logs(self) -> dict[str, float]:
        """Return every mean under its log name, and the spread of the returns."""
        logs = {log: self.mean(name) for name in self.episodes for log in evaluation_log_names(name)}
        returns = self.episodes["return"]
        for name in ("mean", "std", "min", "max"):
            logs[f"eval/{name}_reward"] = float(getattr(returns, name)())
        if self.sampled is not None:
            logs["eval/sampled_return"] = self.sampled.mean("return")
        return logs

    def record(self) -> dict[str, Any]:
        """Return a JSON-able summary: episodes, and mean and interval of every field; for each task as well."""
        record: dict[str, Any] = {"episodes": self.num_episodes}
        if self.num_lost:
            record["lost_episodes"] = self.num_lost
        for name in self.episodes:
            record.update(self._mean_and_interval(name))
        if "success_once" in record:
            record["success_rate"] = record["success_once"]
            record["success_rate_interval"] = record["success_once_interval"]
        if self.sampled is not None:
            found = self.sampled._mean_and_interval("return")
            record.update({f"sampled_{name}": value for name, value in found.items()})
        for task_name, task in self.per_task().items():
            row: dict[str, Any] = {"success_rate": task.mean("success_once")}
            row |= {"interval": list(task.interval("success_once")), "episodes": task.num_episodes}
            for name in TASK_FIELDS:
                row |= task._mean_and_interval(name)
            record.setdefault("per_task", {})[task_name] = row
        return record

    def _mean_and_interval(self, name: str) -> dict[str, Any]:
        """Return both under their names; nothing where no episode reported the field, no interval where one did."""
        if name not in self.episodes or not len(_known(self.episodes[name])):
            return {}
        bounds = self.interval(name)
        return {name: self.mean(name), f"{name}_interval": None if math.isnan(bounds[0]) else list(bounds)}

    def per_task(self) -> dict[str, EvaluationResult]:
        """Return the episodes of each task that had any; nothing for an environment with one task."""
        parts = {}
        for index, name in enumerate(self.task_names):
            rows = self.info[TASK_ID] == index
            if rows.any():
                parts[name] = EvaluationResult({key: values[rows] for key, values in self.episodes.items()})
        return parts

    def summary(self) -> str:
        """Return one line for people."""
        has_interval = self.num_episodes > 1
        text = f"return {self.mean('return'):.2f}"
        if has_interval:
            text += " (95 % interval {:.2f} to {:.2f})".format(*self.interval("return"))
        if self.sampled is not None:
            text += f", {self.sampled.mean('return'):.2f} with sampled actions"
        if "success_once" in self.episodes:
            text += f", success {100 * self.mean('success_once'):.1f} %"
            if has_interval:
                text += " ({:.1f} to {:.1f} %)".format(*(100 * end for end in self.interval("success_once")))
            text += f", at the end {100 * self.mean('success_at_end'):.1f} %"
        if "fail_once" in self.episodes:
            text += f", without a failure {100 - 100 * self.mean('fail_once'):.1f} %"
            if has_interval:
                text += " ({1:.1f} to {0:.1f} %)".format(*(100 - 100 * end for end in self.interval("fail_once")))
        for spec in [spec for spec in self.task_metrics if spec.name in self.episodes]:
            text += f", {spec.name} {self.mean(spec.name):.2f}"
            if spec.at_most is not None:
                share = 100 * _mean((_known(self.episodes[spec.name]) <= spec.at_most).astype(np.float64))
                text += f" (at most {spec.at_most:g} in {share:.1f} % of the episodes)"
        text += f", over {self.num_episodes} episode{'s' if self.num_episodes > 1 else ''}"
        return f"{text} ({self.num_lost} more lost: their workers died)" if self.num_lost else text

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else self.summary()

    __str__ = summary


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


def _mean(values: NDArray[np.float64]) -> float:
    known = _known(values)
    return float(known.mean()) if len(known) else math.nan


class CountedEpisodes:
    """The ended episodes that an evaluation counts, on the host."""

    def __init__(self) -> None:
        self.num_episodes = 0
        self._events: set[str] = set()
        """The fields that are events."""
        self._episodes: list[Columns] = []
        self._infos: list[Columns] = []

    def add(
        self,
        finished: FinishedEpisodes,
        info: Mapping[str, Tensor],
        room: NDArray[Any],
        numbers: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Bring finished episodes with their control data to the host, and keep those that there is room for.

        Args:
            finished: the episodes.
            info: their control data.
            room: episodes that are still wanted of each environment, ``[N]``.
            numbers: their ``episode_id``, ``[N]``.

        Returns:
            How many of each environment were kept, ``[N]``.
        """
        table = torch.stack([finished.ended.double(), *finished.value.values(), *info.values()]).cpu().numpy()
        ended = table[0] > 0
        keep = ended & (ended.cumsum(0) <= room)
        values, ends = table[1 : 1 + len(finished.value)], table[1 + len(finished.value) :]
        self._episodes.append({name: value[keep] for name, value in zip(finished.value, values, strict=True)})
        self._infos.append({name: value[keep] for name, value in zip(info, ends, strict=True)})
        if numbers is not None:
            self._infos[-1][EPISODE_ID] = numbers[np.nonzero(keep)[1]].astype(np.float64)
        self._events |= finished.events
        self.num_episodes += int(keep.sum())
        kept: NDArray[np.int64] = keep.sum(0)
        return kept

    def result(
        self,
        task_names: Sequence[str],
        rows: StepRows | None = None,
        *,
        events: Collection[str] = (),
        in_order: bool = False,
        num_never_begun: int = 0,
    ) -> EvaluationResult:
        """Return the episodes without those whose worker died.

        Args:
            task_names: of an environment with several tasks.
            rows: one row per step for each environment.
            events: fields of events that are known to be reported. An event counts 0 in the episodes that did not
                report it, if it is known or any episode did.
            in_order: sort the episodes by ``episode_id``, and say of each whether it was ``truncated``.
            num_never_begun: episodes that are lost as well.

        Raises:
            EnvError: when none is left, or a return is not finite.
        """
        episodes, info = _join_columns(self._episodes), _join_columns(self._infos)
        never = np.full(self.num_episodes, np.nan)
        for name in [name for name in episodes if name in self._events] + sorted(set(events) - set(episodes)):
            values = episodes.get(name, never)
            if name in events or not np.isnan(values).all():
                episodes[name] = np.where(np.isnan(values), 0.0, values)
        truncated = info.pop(TRUNCATED)
        if in_order:
            episodes[TRUNCATED], order = truncated, np.argsort(info[EPISODE_ID])
            episodes, info = ({name: values[order] for name, values in part.items()} for part in (episodes, info))
        lost = info.pop(LOST, np.zeros(self.num_episodes)) > 0
        if lost.all():
            raise EnvError("The evaluation lost every episode: the workers died. Use fewer environments.")
        kept, known = ({name: values[~lost] for name, values in part.items()} for part in (episodes, info))
        if num_bad := int((~np.isfinite(kept["return"])).sum()):
            what = f"The return of {num_bad} of {len(kept['return'])} evaluated episodes is not finite"
            raise EnvError(f"{what}: the environment or the policy produced it. Try 'apexrl check-env'.")
        return EvaluationResult(kept, rows, task_names, known, int(lost.sum()) + num_never_begun)


def _join_columns(parts: Sequence[Columns]) -> Columns:
    """Join columns; NaN where a part has none."""
    names = dict.fromkeys(name for part in parts for name in part)
    lengths = [len(next(iter(part.values()))) for part in parts]
    return {
        name: np.concatenate([part.get(name, np.full(n, np.nan)) for n, part in zip(lengths, parts, strict=True)])
        for name in names
    }
