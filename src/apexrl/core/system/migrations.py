"""Versions of configurations and checkpoints, and for each of the two the functions that update older files.

A version changes only when a field is removed, renamed or changes meaning; a field that is added has a default.
The first function turns a file of the first supported version into one of the next, the second function that into one
of the version after it, and so on; its docstring says what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from apexrl.core.errors import ApexRLError, CheckpointError, ConfigError

Migration = Callable[[dict[str, Any]], dict[str, Any]]
VERSION_KEY = "version"
"""Key of a configuration's version; a file without it is of the current version."""
FORMAT_KEY = "format"
"""Key of a checkpoint's version."""
FIRST_CONFIG_VERSION = 6
FIRST_CHECKPOINT_FORMAT = 6
"""Files with smaller numbers were written before the first release."""


def _terms(content: dict[str, Any]) -> dict[str, Any]:
    """The weight of PPO-ROA's encoder penalty belongs to a term; SAC no longer stores its final importance exponent."""
    algorithm = {k: v for k, v in content["algorithm"].items() if k not in ("penalty_weight", "final_importance")}
    weight = content["algorithm"].get("penalty_weight")
    terms = {} if weight is None else {"encoder_distance": {"weight": weight}}
    return {**content, "algorithm": {"terms": terms, **algorithm}}


CONFIG_MIGRATIONS: tuple[Migration, ...] = ()
CHECKPOINT_MIGRATIONS: tuple[Migration, ...] = (_terms,)
CONFIG_VERSION = FIRST_CONFIG_VERSION + len(CONFIG_MIGRATIONS)
CHECKPOINT_FORMAT = FIRST_CHECKPOINT_FORMAT + len(CHECKPOINT_MIGRATIONS)


def migrated_config(raw: Mapping[str, Any], where: str = "This configuration") -> dict[str, Any]:
    """Return the sections of a configuration as the current version has them, without the number.

    Args:
        raw: plain values, which are not modified.
        where: what a message calls it.
    """
    config = {name: dict(values) if isinstance(values, dict) else values for name, values in raw.items()}
    number = config.pop(VERSION_KEY, CONFIG_VERSION)
    if type(number) is not int:
        raise ConfigError(f"{where}: {VERSION_KEY} must be an integer, got {number!r}; or leave the line out.")
    advice = "Start from a preset again; 'apexrl list' shows them."
    _check(ConfigError, f"{where}: {VERSION_KEY} is", number, FIRST_CONFIG_VERSION, CONFIG_VERSION, advice)
    for migrate in CONFIG_MIGRATIONS[number - FIRST_CONFIG_VERSION :]:
        config = migrate(config)
    return config


def migrated_checkpoint(content: dict[str, Any], where: object) -> dict[str, Any]:
    """Return the content of a checkpoint as the current version has it.

    Args:
        content: as it was read; it may be changed.
        where: what a message calls it.
    """
    number = content.get(FORMAT_KEY)
    if type(number) is not int:
        raise CheckpointError(f"{where} was not written by apexrl: it has no format number.")
    what = f"{where} has checkpoint format"
    _check(CheckpointError, what, number, FIRST_CHECKPOINT_FORMAT, CHECKPOINT_FORMAT, "Start a new run.")
    for migrate in CHECKPOINT_MIGRATIONS[number - FIRST_CHECKPOINT_FORMAT :]:
        content = migrate(content)
    return {**content, FORMAT_KEY: CHECKPOINT_FORMAT}


def _check(error: type[ApexRLError], what: str, number: int, first: int, last: int, advice: str) -> None:
    """Raise unless the version of a file is supported; ``advice`` is for older files."""
    if not first <= number <= last:
        supported = f"only {last}" if first == last else f"{first} to {last}"
        fix = "Update apexrl." if number > last else advice
        raise error(f"{what} {number}, but this apexrl reads {supported}. {fix}")
