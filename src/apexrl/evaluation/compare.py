"""Two policies on the same episodes: how much they differ, and whether the difference is statistically significant."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import ConfigError, plural
from apexrl.core.functional.intervals import mcnemar_test, mean_interval, paired_rate_interval, sign_flip_test
from apexrl.core.result import EvaluationResult
from apexrl.core.types import EPISODE_ID, TASK_ID

LEVEL = 0.05
"""How often chance alone may give a significant difference, for all tests together."""


@dataclass(frozen=True)
class Difference:
    """One field of paired episodes, B against A: the means of A, of B, and of B − A over the pairs."""

    a: float
    b: float
    difference: float
    interval: tuple[float, float]
    """95 %, of the difference: Student's t over pairs (NaN for one), of a rate Tango's score interval."""
    p_value: float
    """Of the exact test that there is no difference."""
    test: str
    only_a: int | None = None
    """Of a rate: pairs in which A alone succeeded; ``only_b``: B alone."""
    only_b: int | None = None

    @property
    def is_none(self) -> bool:
        """Whether A and B did the same in every pair."""
        if self.only_a is not None:
            return self.only_a == self.only_b == 0
        return self.difference == 0 and not self.interval[0] < self.interval[1]


@dataclass(frozen=True)
class Comparison:
    """What pairing the episodes of A and B gave."""

    num_pairs: int
    num_left_out: int
    """Episodes that A or B lost, or whose return is no number for one of them."""
    fields: dict[str, Difference]
    """``return`` and ``episode_len``; ``success_once`` and ``success_at_end`` of tasks that report success."""
    per_task: dict[str, Difference] = field(default_factory=dict)
    """``success_once`` of each task of a suite."""

    @property
    def judged(self) -> list[str]:
        """The fields that decide: return, and success where there is one."""
        return [name for name in ("return", "success_once") if name in self.fields]

    @property
    def significant(self) -> list[str]:
        """The judged fields with p-values below 0.05, divided by how many are judged (Bonferroni)."""
        return [name for name in self.judged if self.fields[name].p_value < LEVEL / len(self.judged)]

    def verdict(self) -> str:
        """Say in a sentence whether the difference is statistically significant."""
        pairs = plural(self.num_pairs, "paired episode")
        if not self.significant:
            if all(entry.is_none for entry in self.fields.values()):
                return f"No significant difference: A and B did the same in each of {pairs}."
            return f"No significant difference: {pairs} cannot tell A and B apart."
        found = [
            f"{'higher' if self.fields[name].difference > 0 else 'lower'} "
            f"{'success' if name == 'success_once' else name} (p = {self.fields[name].p_value:.2g})"
            for name in self.significant
        ]
        return f"The difference is statistically significant: B has a {' and a '.join(found)}, over {pairs}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        plain = {
            "pairs": self.num_pairs,
            "left_out": self.num_left_out,
            "level": LEVEL / len(self.judged),
            "difference_is_real": bool(self.significant),
            "verdict": self.verdict(),
            **{name: _difference_record(entry) for name, entry in self.fields.items()},
        }
        if self.per_task:
            plain["per_task"] = {name: _difference_record(entry) for name, entry in self.per_task.items()}
        return plain


def compare(a: EvaluationResult, b: EvaluationResult) -> Comparison:
    """Pair the episodes that both have, by ``episode_id``, as ``evaluate`` gives it from given starts.

    Raises:
        ConfigError: when there is no pair.
    """
    for name, result in (("A", a), ("B", b)):
        if EPISODE_ID not in result.info:
            raise ConfigError(f"{name} does not say which episodes it ran; evaluate it from given starts.")
    _, rows_a, rows_b = np.intersect1d(a.info[EPISODE_ID], b.info[EPISODE_ID], return_indices=True)
    numbers = np.isfinite(np.stack((a.episodes["return"][rows_a], b.episodes["return"][rows_b]))).all(0)
    rows_a, rows_b = rows_a[numbers], rows_b[numbers]
    if not len(rows_a):
        raise ConfigError("A and B have no episode in common with a return that is a number: nothing can be compared.")
    columns = {
        name: (values[rows_a], b.episodes[name][rows_b]) for name, values in a.episodes.items() if name in b.episodes
    }
    fields = {name: _mean_difference(*columns[name]) for name in ("return", "episode_len")}
    for name in ("success_once", "success_at_end"):
        known = ~np.isnan(np.stack(columns[name])).any(0) if name in columns else np.zeros(len(rows_a), bool)
        if known.any():
            fields[name] = _rate_difference(*(values[known] for values in columns[name]))
    per_task = {}
    for index, task in enumerate(a.task_names if "success_once" in fields else ()):
        rows = (a.info[TASK_ID][rows_a] == index) & ~np.isnan(np.stack(columns["success_once"])).any(0)
        if rows.any():
            per_task[task] = _rate_difference(*(values[rows] for values in columns["success_once"]))
    num_asked = a.num_episodes + a.num_lost
    return Comparison(len(rows_a), num_asked - len(rows_a), fields, per_task)


def _mean_difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> Difference:
    low, high = mean_interval(b - a)
    return _difference(a, b, (float(low), float(high)), sign_flip_test(b - a), "paired sign flips")


def _rate_difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> Difference:
    only = int(((a > 0) & ~(b > 0)).sum()), int(((b > 0) & ~(a > 0)).sum())
    return _difference(a, b, paired_rate_interval(*only, len(a)), mcnemar_test(*only), "McNemar, exact", *only)


def _difference(a: NDArray[np.float64], b: NDArray[np.float64], *how_sure: Any) -> Difference:
    return Difference(float(a.mean()), float(b.mean()), float((b - a).mean()), *how_sure)


def _difference_record(entry: Difference) -> dict[str, Any]:
    values = {name: value for name, value in asdict(entry).items() if value is not None}
    return {**values, "interval": None if math.isnan(entry.interval[0]) else list(entry.interval)}
