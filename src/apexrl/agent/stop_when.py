"""Early stopping: a run ends when a number that it logs crosses a threshold."""

from __future__ import annotations

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
_CONDITION = re.compile(
    r"\s*([\w./-]+)\s*(>=|<=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*", re.ASCII | re.IGNORECASE
)


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
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(
                "training.stop_when must be a log name, one of >=, <=, > and <, and a number, such as "
                f"'eval/success_rate >= 0.95', got '{text}'."
            )
        return cls(match[1], match[2], float(match[3]))

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
        self.warning = ""
        """Why the condition has no effect, where that is known."""
        self._known: set[str] = set()
        of_evaluations = condition.name.startswith("eval")
        self._sign = "eval/episode_len" if of_evaluations else "rollout/episode_len"
        """Is logged together with names such as this one."""
        if of_evaluations and not (trainer.cfg.eval_interval and trainer.can_evaluate):
            self._warn("no evaluation takes place during training; set training.eval_interval.")

    def log(self, values: Mapping[str, float]) -> None:
        """Stop the trainer if the condition holds."""
        self._known.update(values)
        name, trainer = self.condition.name, self.trainer
        if name in values:
            self.warning = ""
            if self.condition.holds(values[name]):
                trainer.counters.stopped_by = str(self.condition)
                where = f"iteration {trainer.iteration:,}, step {trainer.total_steps:,}"
                trainer.tell(f"Stopped at {where}: {name} is {values[name]:.4g} (stop_when {self.condition}).")
                trainer.stop()
        elif self._sign in values:
            self._warn()

    def progress(self, values: Mapping[str, float], done: float) -> None:
        """At the end of training, say if the name was never logged."""
        if done >= 1.0:
            self._warn()

    def _warn(self, why: str = "") -> None:
        if not self.warning and self.condition.name not in self._known:
            why = why or f"no number of that name is logged.{did_you_mean(self.condition.name, self._known)}"
            self.warning = f"WARNING: training.stop_when '{self.condition}' has no effect: {why}"
            self.trainer.tell(self.warning)
