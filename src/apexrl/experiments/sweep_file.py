"""The YAML file of a sweep: what is searched, by what, and for how long. Every mistake is named with its field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.run.config import CONFIG_SECTIONS, Config, as_number, field_paths
from apexrl.run.loading import overridden, parse_yaml, preset_dir, read_source

SWEEP_VERSION = 1
SWEEP_CHOICES = {
    "direction": ("maximize", "minimize"),
    "pruning": ("none", "median", "halving"),
    "sampler": ("tpe", "random"),
}
"""Fields with a few possible values."""
MAX_COUNTS = {"trials": 100_000, "seeds": 100}
"""Fields that count, and their largest value."""
DEFAULTS: dict[str, Any] = {
    "trials": 20,
    "objective": "return",
    "direction": "maximize",
    "seeds": 1,
    "pruning": "none",
    "sampler": "tpe",
    "seed": 0,
}


@dataclass(frozen=True)
class Dimension:
    """A field to search: numbers between two ends, or one of several values."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    is_integer: bool = False

    def ends(self) -> Sequence[Any]:
        """Return values that must be possible: the choices, or the two ends."""
        return self.choices or (self.low, self.high)


@dataclass(frozen=True)
class SweepFile:
    """What a sweep does."""

    base: dict[str, Any]
    """The configuration that every trial starts from, as plain values."""
    space: tuple[Dimension, ...]
    given: dict[str, Any]
    """The fields as they stand in the file, with defaults."""

    trials: int
    objective: str
    direction: Literal["maximize", "minimize"]
    seeds: int
    pruning: str
    sampler: str
    seed: int

    def config(self, values: Mapping[str, Any]) -> Config:
        """Return the configuration of a trial."""
        return overridden(self.base, [(name, as_text(value)) for name, value in values.items()])

    def with_trials(self, trials: int) -> SweepFile:
        """Return the same search with another number of trials."""
        return sweep_from({**self.to_dict(), "trials": trials}, "--trials")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, which ``sweep_from`` reads."""
        return {"version": SWEEP_VERSION, **self.given, "base": self.base}


def read_sweep(path: Path) -> SweepFile:
    """Read the file of a sweep, or one that ships, by its name.

    Raises:
        ConfigError: with one line for each problem.
    """
    shipped = {entry.stem: entry for entry in sorted((preset_dir() / "sweeps").glob("*.yaml"))}
    if not path.is_file():
        if str(path) not in shipped:
            raise ConfigError(
                f"There is no sweep file at {path}; give a YAML file, or one that ships: {', '.join(shipped)}."
            )
        path = shipped[str(path)]
    raw = parse_yaml(path.read_text(encoding="utf-8", errors="replace"), str(path))
    if "base" in raw:
        raise ConfigError(f"{path}: Unknown field 'base'; give preset, such as cartpole_ppo, or config, a YAML file.")
    return sweep_from(raw, str(path))


def sweep_from(raw: Mapping[str, Any], where: str) -> SweepFile:
    """Make a sweep from plain values: those of a file, or those that a sweep's directory keeps."""
    if "base" in raw:  # as a sweep's directory keeps it
        version = raw.get("version", SWEEP_VERSION)
        if not isinstance(version, int) or version > SWEEP_VERSION:
            raise ConfigError(
                f"{where}: version is {version!r}; this apexrl reads sweeps up to {SWEEP_VERSION}. Update apexrl."
            )
        kept = {name: value for name, value in raw.items() if name not in ("base", "version")}
        base, given = raw["base"], {**DEFAULTS, **kept}
    else:
        given = {**DEFAULTS, **raw}
        base = _base(given, where).to_dict()
    problems = _scalar_problems(given)
    space = [_dimension(name, entry, problems) for name, entry in _mapping(given, "space", problems).items()]
    if not given.get("space"):
        problems.append("space must hold at least one field, such as algo.learning_rate: {low: 1e-4, high: 1e-2}.")
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))
    known = [dimension for dimension in space if dimension is not None]
    sweep = SweepFile(base, tuple(known), given, **{name: given[name] for name in DEFAULTS})
    _check_values(sweep, where)
    return sweep


def as_text(value: Any) -> str:
    """Write a value as an override is given."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _base(given: dict[str, Any], where: str) -> Config:
    """Return the configuration that a file starts from."""
    allowed = ("preset", "config", "overrides", "space", *DEFAULTS)
    unknown = [name for name in given if name not in allowed]
    if unknown:
        raise ConfigError(
            f"{where}: Unknown field '{unknown[0]}'; fields are {', '.join(allowed)}."
            f"{did_you_mean(str(unknown[0]), allowed)}"
        )
    if ("preset" in given) == ("config" in given):
        raise ConfigError(f"{where}: give one of preset, such as cartpole_ppo, and config, a YAML file.")
    source = given.get("preset", given.get("config"))
    if not isinstance(source, str):
        raise ConfigError(f"{where}: {'preset' if 'preset' in given else 'config'} must be text, got {source!r}.")
    problems: list[str] = []
    overrides = _mapping(given, "overrides", problems)
    if problems:
        raise ConfigError(f"{where}: {problems[0]}")
    try:
        return overridden(read_source(source), [(str(name), as_text(value)) for name, value in overrides.items()])
    except ConfigError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from error


def _mapping(given: Mapping[str, Any], name: str, problems: list[str]) -> dict[str, Any]:
    value = given.get(name) or {}
    if not isinstance(value, dict):
        problems.append(f"{name} must hold fields and values, got {value!r}.")
        return {}
    return value


def _scalar_problems(given: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, allowed in SWEEP_CHOICES.items():
        if given[name] not in allowed:
            problems.append(
                f"{name} must be one of {', '.join(allowed)}, got {given[name]!r}."
                f"{did_you_mean(str(given[name]), allowed)}"
            )
    for name, most in (*MAX_COUNTS.items(), ("seed", 2**31)):
        value, least = given[name], 0 if name == "seed" else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            problems.append(f"{name} must be an integer from {least} to {most}, got {value!r}.")
    if not isinstance(given["objective"], str) or not given["objective"]:
        problems.append(
            f"objective must be return, success_rate or another number of an evaluation, or a metric such as "
            f"train/value_loss, got {given['objective']!r}."
        )
    return problems


def _dimension(name: str, entry: Any, problems: list[str]) -> Dimension | None:
    """Check one field of the space; problems are added to the list."""
    kind = _kind(name)
    if kind is None:
        problems.append(f"space.{name}: there is no such field.{did_you_mean(str(name), field_paths())}")
        return None
    if name == "training.seed":
        problems.append("space.training.seed must not be searched: give seeds, how many a trial is trained with.")
        return None
    shape = "must be {low: …, high: …}, with log: true for orders of magnitude, or {choices: [...]}"
    allowed = {"choices"} if isinstance(entry, dict) and "choices" in entry else {"low", "high", "log"}
    if not isinstance(entry, dict) or (not {"choices"} <= set(entry) and not {"low", "high"} <= set(entry)):
        problems.append(f"space.{name} {shape}, got {entry!r}.")
        return None
    if extra := sorted(set(map(str, entry)) - allowed):
        problems.append(f"space.{name} {shape}; unknown '{extra[0]}'.{did_you_mean(extra[0], allowed)}")
        return None
    if "choices" in entry:
        choices = entry["choices"]
        if not isinstance(choices, list) or len({json.dumps(choice, default=str) for choice in choices}) < 2:
            problems.append(f"space.{name}.choices must be a list of two or more values, got {choices!r}.")
            return None
        return Dimension(name, tuple(choices))
    return _range(name, entry, kind, problems)


def _range(name: str, entry: Mapping[str, Any], kind: str, problems: list[str]) -> Dimension | None:
    low, high, log = as_number(entry["low"]), as_number(entry["high"]), entry.get("log", False)
    for end, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            problems.append(f"space.{name}.{end} must be a finite number, got {entry[end]!r}.")
            return None
    are_whole = isinstance(low, int) and isinstance(high, int)
    is_integer = kind.startswith("int") or (are_whole and not kind.startswith("float"))
    if is_integer and (low != int(low) or high != int(high)):
        problems.append(f"space.{name} counts: low and high must be whole numbers, got {low} and {high}.")
    elif not low < high:
        problems.append(f"space.{name}.low must be below high ({high}), got {low}.")
    elif not isinstance(log, bool):
        problems.append(f"space.{name}.log must be true or false, got {log!r}.")
    elif log and low <= 0:
        problems.append(f"space.{name}.low must be above 0 with log: true, got {low}.")
    else:
        number = int if is_integer else float
        return Dimension(name, (), number(low), number(high), log, is_integer)
    return None


def _kind(name: Any) -> str | None:
    """Return the type of a field, as it is written; an empty text for an option of the task, None for no field."""
    section, _, key = str(name).partition(".")
    if section == "task" and key.startswith("kwargs."):
        return ""
    for cls in CONFIG_SECTIONS.get(section, ()):
        for entry in fields(cls):
            if entry.name == key:
                return str(entry.type)
    return None


def _check_values(sweep: SweepFile, where: str) -> None:
    """Try every choice and every end alone, so that an impossible one is found before the first trial."""
    problems = []
    for dimension in sweep.space:
        for value in dimension.ends():
            try:
                config = sweep.config({dimension.name: value})
            except ConfigError as error:
                problems.append(f"space.{dimension.name}: {str(error).splitlines()[0]}")
                continue
            if not config.training.final_eval_episodes:
                problems.append("training.final_eval_episodes must be at least 1, got 0: trials are judged by it.")
            if sweep.pruning != "none" and not config.training.eval_interval:
                problems.append(
                    f"pruning {sweep.pruning} needs periodic evaluations: training.eval_interval must be at least 1, "
                    "got 0; set it in overrides, or take pruning: none."
                )
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in dict.fromkeys(problems)))
