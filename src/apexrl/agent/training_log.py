"""What a run tells its user: numbers by name, how long it took, and lines of text."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.agent.loggers import ConsoleLogger, JsonlLogger, Logger, TensorBoardLogger
from apexrl.collectors.base import BaseCollector
from apexrl.core.errors import ConfigError
from apexrl.core.metrics import EVENT_FIELDS, to_host, training_log_names
from apexrl.core.system import distributed
from apexrl.core.types import REWARD, VALID, VALUE
from apexrl.rollout import LOG


def tell(loggers: Sequence[Logger], text: str) -> None:
    """Show a line to the user, on the console or else as a warning."""
    if not distributed.is_main_process():
        return
    for logger in loggers:
        logger.message(text)
    if not any(isinstance(logger, ConsoleLogger) for logger in loggers):
        logging.getLogger("apexrl").warning(text)


class TrainingLog:
    """Gathers the numbers of an iteration and hands them to the loggers.

    Args:
        loggers: where numbers go; of several processes that learn together, those of the first.
        collector: whose episodes are logged.
        interval: iterations between logged ones; the first and the last are always logged.
        components: log the metrics that the task declares besides success and failure.
        progress: show it on the console; None: in a terminal or a notebook.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        collector: BaseCollector,
        interval: int,
        components: bool,
        progress: bool | None = None,
    ) -> None:
        if interval < 1:
            raise ConfigError(f"log_interval must be at least 1, got {interval}.")
        self.loggers = list(loggers) if distributed.is_main_process() else []
        if not any(isinstance(logger, ConsoleLogger) for logger in loggers):
            console = ConsoleLogger()
            is_seen = sys.stdout.isatty() or console.console.is_jupyter
            self.add(*([console] if progress or (progress is None and is_seen) else []))
        self.collector, self.interval, self.components = collector, interval, components
        self._unwritten: dict[str, float] | None = None
        """The numbers of the last iteration, where no logger has them."""
        self._is_open = False
        self._told: set[str] = set()
        self._names: dict[str, list[str]] = {}
        """Log names of each episode field."""

    def add(self, *loggers: Logger) -> None:
        """Add places for the numbers."""
        self.loggers += loggers if distributed.is_main_process() else ()

    def open(self, run_dir: Path | None, tensorboard: bool) -> None:
        """Write to ``metrics.jsonl`` and TensorBoard events in a run directory from now on."""
        if run_dir is None or self._is_open or not distributed.is_main_process():
            return
        self._is_open = True
        events = [TensorBoardLogger(run_dir)] if tensorboard else []
        self.loggers = [JsonlLogger(run_dir / "metrics.jsonl"), *events, *self.loggers]

    def tell(self, text: str, once: bool = False) -> None:
        """Show a line to the user; with ``once`` only the first time."""
        if not (once and text in self._told):
            self._told.add(text)
            tell(self.loggers, text)

    def read(self, batch: TensorDict, learned: Mapping[str, Tensor]) -> dict[str, float]:
        """Bring the numbers of a batch and of the update with it to the host, in one transfer, by their log names.

        What is not known in this iteration is left out, such as the return when no episode ended.
        """
        means: dict[str, Tensor | float] = {"rollout/num_steps": self.collector.steps_in(batch)}
        weights: dict[str, Callable[[], Tensor]] = {}  # of several processes; alone nobody asks for them
        if REWARD in batch:
            valid = batch[VALID] if VALID in batch else torch.ones_like(batch[REWARD])
            count = valid.sum()
            means["rollout/mean_reward"] = (batch[REWARD] * valid).sum() / count
            weights["rollout/mean_reward"] = lambda: count
        if VALUE in batch:
            means["rollout/mean_value"] = batch[VALUE].mean()
        episodes, names = self.collector.episode_metrics, self._names
        for field in episodes.totals.keys() - names.keys():
            names[field] = training_log_names(field, episodes.specs)
        for field, mean in episodes.means().items():
            if self.components or field not in episodes.specs:
                means.update(dict.fromkeys(names[field], mean))
                weights.update(dict.fromkeys(names[field], partial(episodes.count, field)))
        for name, value in batch.get(LOG, {}).items():
            means[f"env/{name.lstrip('/')}"] = value.nanmean()
            weights[f"env/{name.lstrip('/')}"] = partial(_count_known, value)
        means.update({f"train/{name}": value for name, value in learned.items()})
        host = to_host(means) if distributed.world_size() == 1 else self._merged(means, weights)
        return {name: value for name, value in host.items() if not math.isnan(value)}

    def _merged(
        self, means: Mapping[str, Tensor | float], weights: Mapping[str, Callable[[], Tensor]]
    ) -> dict[str, float]:
        """Bring the numbers of all processes to the host."""
        reported = self.collector.episode_metrics.reported
        fields = {field for name in reported for field in EVENT_FIELDS.get(name, (name,))}
        events = {name for field in fields for name in self._names.get(field, ())}
        known = {name: weight() for name, weight in weights.items()}
        return merged_to_host(means, known, [name for name in means if name in events])

    def write(self, stats: dict[str, float], done: float, *, always: bool) -> None:
        """Log an iteration every ``interval`` of them, and the first and the last; show how much is done, 0 to 1."""
        self._unwritten = stats
        if always or done >= 1.0 or stats["iteration"] == 1 or stats["iteration"] % self.interval == 0:
            self.flush()
        for logger in self.loggers:
            logger.progress(stats, done)

    def flush(self) -> None:
        """Log the last iteration, if that was not done."""
        if self._unwritten is None:
            return
        stats, self._unwritten = self._unwritten, None
        numbers = self.collector.metrics()
        stats.update(numbers if distributed.world_size() == 1 else merged_collection(numbers))
        for logger in self.loggers:
            logger.log(stats)
        self.collector.episode_metrics.clear()

    def close(self) -> None:
        """Close the loggers."""
        for logger in self.loggers:
            logger.close()


def _count_known(values: Tensor) -> Tensor:
    return (~values.isnan()).sum()


class Stopwatch:
    """Times phases on a device without waiting for it: marks are events, read when the work is done anyway."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        """The phases that have begun since ``clear`` or ``seconds``, and when."""

    def mark(self, phase: str) -> None:
        """Begin a phase, and with it end the one before."""
        now: Any = torch.cuda.Event(enable_timing=True) if self.on_cuda else time.perf_counter()
        if self.on_cuda:
            now.record()
        self.marks.append((phase, now))

    def clear(self) -> None:
        """Forget the phases."""
        self.marks = []

    def seconds(self) -> dict[str, float]:
        """Return how long each phase but the last took, and forget them; call it when the device has finished."""
        pairs, self.marks = itertools.pairwise(self.marks), []
        if self.on_cuda:
            return {phase: begin.elapsed_time(end) / 1e3 for (phase, begin), (_, end) in pairs}
        return {phase: end - begin for (phase, begin), (_, end) in pairs}


def merged_to_host(
    means: Mapping[str, Tensor | float], weights: Mapping[str, Tensor | float], events: Collection[str] = ()
) -> dict[str, float]:
    """Bring many scalars to the host, as means over all processes: Σ w x / Σ w over those that know the number.

    A name that one process alone knows, and a mean of nothing (NaN), are no problem: its process is left out, or counts
    0 for each of its ended episodes where the name is an event.

    Args:
        means: of this process.
        weights: how many numbers each of the means stands for; 1 where there is none.
        events: those that are 0 for the ended episodes of a process that does not know them, once another does.
    """
    own = to_host({**means, **{f"{name} weight": weight for name, weight in weights.items()}})
    everyone = distributed.all_gather_object((own, list(events)))
    events = {name: 0.0 for host, names in everyone for name in names if not math.isnan(host[name])}
    sums: dict[str, float] = {}
    totals: dict[str, float] = {}
    for host, _ in everyone:
        for name in (name for name in {**events, **host} if not name.endswith(" weight")):
            is_event = name in events
            counted = "rollout/episode_len" if is_event else name  # whose weight is the number of ended episodes
            weight = host.get(f"{counted} weight", 0.0 if is_event else 1.0)
            value = host.get(name, math.nan)
            value = 0.0 if is_event and math.isnan(value) else value
            known = weight > 0 and not math.isnan(value)
            sums[name] = sums.get(name, 0.0) + (weight * value if known else 0.0)
            totals[name] = totals.get(name, 0.0) + (weight if known else 0.0)
    return {name: value / totals[name] if totals[name] else math.nan for name, value in sums.items()}


AVERAGED = frozenset(
    f"collect/{name}" for name in ("staleness", "overlap", "worker_seconds", "attempts", "seconds_creating_envs")
)
"""Numbers about the collecting that say how it went in one process; the others are counts and rates."""


def merged_collection(values: Mapping[str, float]) -> dict[str, float]:
    """Merge numbers about the collecting over all processes: counts and rates add up, ``AVERAGED`` ones are averaged.

    A name that one process alone knows is no problem.
    """
    found: dict[str, list[float]] = {}
    for host in distributed.all_gather_object(dict(values)):
        for name, value in host.items():
            found.setdefault(name, []).append(value)
    return {name: sum(each) / (len(each) if name in AVERAGED else 1) for name, each in found.items()}
