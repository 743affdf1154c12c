"""Checks of the options of environments and tasks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from apexrl.core.errors import ConfigError, EnvError, did_you_mean


def is_number(value: Any) -> bool:
    """Say whether a value is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_known(
    subject: str, names: Iterable[str], known: Collection[str], rest: str = "", error: type[Exception] = EnvError
) -> None:
    """Refuse a name that is not known, with the nearest one that is; ``subject`` ends in "has no task" or the like."""
    for name in names:
        if name not in known:
            raise error(f"{subject} {name!r}.{did_you_mean(name, known)}{rest}")


def check_at_least(owner: str, least: float, **values: Any) -> None:
    """Refuse options below a bound; None is one that is not given."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{owner}{name} must be at least {least}, got {value}.")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")


def check_change_step(task: str, change_step: Any, max_episode_steps: int | None = None) -> None:
    """Refuse a step at which the physics of no episode change; 0 is for never."""
    check_count(f"{task}.change_step", change_step, least=0)
    if max_episode_steps is not None and change_step >= max_episode_steps:
        raise ConfigError(
            f"{task}.change_step must lie in [0, {max_episode_steps}), below max_episode_steps, got {change_step}."
        )
