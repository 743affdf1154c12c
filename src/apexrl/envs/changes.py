"""Checks of the options by which a task's physics change within an episode."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from apexrl.core.errors import ConfigError


def is_number(value: Any) -> bool:
    """Say whether a value is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_change_step(task: str, change_step: Any, max_episode_steps: int | None = None) -> None:
    """Refuse a step at which no episode changes; 0 is for never.

    Args:
        task: what the message calls the task.
        change_step: as the user gave it.
        max_episode_steps: of an episode, where it is known.
    """
    if isinstance(change_step, bool) or not isinstance(change_step, int | np.integer) or change_step < 0:
        raise ConfigError(f"{task}.change_step must be a whole number of at least 0, got {change_step!r}.")
    if max_episode_steps is not None and change_step >= max_episode_steps:
        raise ConfigError(
            f"{task}.change_step must lie in [0, {max_episode_steps}), below max_episode_steps, got {change_step}."
        )
