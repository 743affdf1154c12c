"""Early stopping: a run ends when a number that it logs crosses a threshold."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apexrl.agent.loggers import Logger
from apexrl.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from apexrl.agent.trainer import Trainer

_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_CONDITION = re.compile(r"\s*([^<>=]*[^<>=\s])\s*(>=|<=|>|<)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """A log name, a comparison and a number, such as ``eval/success_rate >= 0.95``."""

    name: str
    comparison: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            ConfigError: when it has another form.
        """
        try:
            name, comparison, number = _CONDITION.fullmatch(text).groups()  # type: ignore[union-attr]
            condition = cls(name, comparison, float(number))
        except (AttributeError, ValueError):
            condition = cls("", "", math.nan)
        if not math.isfinite(condition.number):
            raise ConfigError(
                "training.stop_when must be a log name, one of >=, <=, > and <, and a number, such as "
                f"'eval/success_rate >= 0.95', got '{text}'."
            )
        return condition

    def __str__(self) -> str:
        return f"{self.name} {self.comparison} {self.number:g}"

    def holds(self, value: float) -> bool:
        """Whether a value of the number satisfies it."""
        return bool(_COMPARISONS[self.comparison](value, self.number))


class StopWhen(Logger):
    """Stops a trainer when the condition holds for what is logged; of several processes, the first one decides.

    A name that is not logged gets one warning, as soon as that is known.

    Args:
        condition: that ends the run.
        trainer: to stop.
    """

    def __init__(self, condition: Condition, trainer: Trainer) -> None:
        self.condition, self.trainer = condition, trainer
        self._known: set[str] = set()
        self._is_settled = False
        """The name was logged, or the warning was given."""
        if self._is_of_evaluations and not (trainer.cfg.eval_interval and trainer.can_evaluate):
            self._warn("no evaluation takes place during training; set training.eval_interval")

    @property
    def _is_of_evaluations(self) -> bool:
        return self.condition.name.startswith("eval")

    def log(self, values: Mapping[str, float]) -> None:
        """Stop the trainer if the condition holds."""
        self._known.update(values)
        name, trainer = self.condition.name, self.trainer
        if name in values:
            self._is_settled = True
            if self.condition.holds(values[name]):
                trainer.counters.stopped_by = str(self.condition)
                where = f"iteration {trainer.iteration:,}, step {trainer.total_steps:,}"
                trainer.tell(f"Stopped at {where}: {name} is {values[name]:.4g} (stop_when {self.condition}).")
                trainer.stop()
        elif any(
            known.startswith("eval/") if self._is_of_evaluations else known == "rollout/return" for known in values
        ):
            self._warn_unlogged()

    def progress(self, values: Mapping[str, float], done: float) -> None:
        """At the end of training, say if the name was never logged."""
        if done >= 1.0:
            self._warn_unlogged()

    def _warn_unlogged(self) -> None:
        self._warn(f"no number of that name is logged.{did_you_mean(self.condition.name, self._known)}")

    def _warn(self, text: str) -> None:
        if not self._is_settled:
            self._is_settled = True
            self.trainer.tell(f"WARNING: training.stop_when '{self.condition}' has no effect: {text}".rstrip(".") + ".")
