"""What a run tells its user: numbers by name, and lines of text."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.agent.loggers import ConsoleLogger, Logger
from apexrl.collectors.base import BaseCollector
from apexrl.core.errors import ConfigError
from apexrl.core.metrics import Weighted, merged_collection, merged_to_host, training_log_names
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
    """

    def __init__(self, loggers: Sequence[Logger], collector: BaseCollector, interval: int, components: bool) -> None:
        if interval < 1:
            raise ConfigError(f"log_interval must be at least 1, got {interval}.")
        self.loggers = list(loggers) if distributed.is_main_process() else []
        self.collector, self.interval, self.components = collector, interval, components
        self._unwritten: dict[str, float] | None = None
        """The numbers of the last iteration, where no logger has them."""
        self._told: set[str] = set()

    def tell(self, text: str, once: bool = False) -> None:
        """Show a line to the user; with ``once`` only the first time."""
        if not (once and text in self._told):
            self._told.add(text)
            tell(self.loggers, text)

    def read(self, batch: TensorDict, learned: Mapping[str, Tensor]) -> dict[str, float]:
        """Bring the numbers of a batch and of the update with it to the host, in one transfer, by their log names."""
        return known(merged_to_host({**self._of_rollout(batch), **{f"train/{k}": v for k, v in learned.items()}}))

    def _of_rollout(self, batch: TensorDict) -> dict[str, Tensor | Weighted]:
        metrics: dict[str, Tensor | Weighted] = {}
        if REWARD in batch:
            valid = batch[VALID] if VALID in batch else torch.ones_like(batch[REWARD])
            count = valid.sum()
            metrics["rollout/mean_reward"] = Weighted((batch[REWARD] * valid).sum() / count, lambda: count)
        if VALUE in batch:
            metrics["rollout/mean_value"] = batch[VALUE].mean()
        episodes = self.collector.episode_metrics
        specs, events = episodes.specs, {field for name in episodes.reported for field in episodes.specs[name].fields}
        for name, mean in episodes.means().items():
            if name in specs and not self.components:
                continue
            number = Weighted(mean, partial(episodes.count, name), name in events)
            metrics.update(dict.fromkeys(training_log_names(name, specs), number))
        if LOG in batch:
            for name, value in batch[LOG].items():
                metrics[f"env/{name.lstrip('/')}"] = Weighted(value.nanmean(), partial(_count_known, value))
        return metrics

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
        stats.update(merged_collection(self.collector.metrics()))
        for logger in self.loggers:
            logger.log(stats)
        self.collector.episode_metrics.clear()

    def close(self) -> None:
        """Close the loggers."""
        for logger in self.loggers:
            logger.close()


def known(values: Mapping[str, float]) -> dict[str, float]:
    """Leave out what is not known in this iteration, such as the return when no episode ended."""
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _count_known(values: Tensor) -> Tensor:
    return (~values.isnan()).sum()
