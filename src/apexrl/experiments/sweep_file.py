"""The YAML file of a sweep: what is searched, by what, and for how long. Every mistake is named with its field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.core.renamed import renamed
from apexrl.core.validation import Integer, as_number, field_rules, options
from apexrl.run.config import CONFIG_SECTIONS, Config, field_paths
from apexrl.run.loading import overridden
from apexrl.run.sources import parse_yaml, preset_dir, read_source

SWEEP_VERSION = 1


@dataclass(frozen=True)
class Dimension:
    """A field to search: numbers between two ends, or one of several values."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    is_integer: bool = False


@options("")
class SweepOptions:
    """How a sweep searches."""

    trials: Annotated[Integer, Field(ge=1, le=100_000)] = 20
    """Configurations that are tried."""
    objective: Annotated[str, Field(min_length=1)] = "return"
    """return, success_rate or another number of an evaluation, or a metric such as train/value_loss."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """What is done with the objective."""
    seeds: Annotated[Integer, Field(ge=1, le=100)] = 1
    """Seeds that each trial is trained with."""
    pruning: Literal["none", "median", "halving"] = "none"
    """What stops hopeless trials early."""
    sampler: Literal["tpe", "random"] = "tpe"
    """What draws the next trial."""
    seed: Annotated[Integer, Field(ge=0, le=2**31)] = 0
    """Of the sampler."""


@options("")
class SweepFile(SweepOptions):
    """What a sweep does."""

    base: dict[str, Any]
    """The configuration that every trial starts from, as plain values."""
    space: tuple[Dimension, ...]
    """What is searched."""
    given: dict[str, Any]
    """The fields as they stand in the file, with defaults."""

    def config(self, values: Mapping[str, Any]) -> Config:
        """Return the configuration of a trial."""
        return overridden(self.base, [(name, as_text(value)) for name, value in values.items()])

    def with_trials(self, trials: int) -> SweepFile:
        """Return the same search with another number of trials."""
        return sweep_from({**self.to_dict(), "trials": trials}, "--trials")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, which ``sweep_from`` reads."""
        return {"version": SWEEP_VERSION, **self.given, "base": self.base}


DEFAULTS = asdict(SweepOptions())


def read_sweep(path: Path) -> SweepFile:
    """Read the file of a sweep, or one that ships, by its name."""
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
    """Create a sweep from plain values: those of a file, or those that a sweep's directory keeps.

    Raises:
        ConfigError: with one line for each problem.
    """
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
    problems: list[str] = []
    space = []
    try:
        options_of_search = SweepOptions(**{name: given[name] for name in DEFAULTS})
    except ConfigError as error:
        problems += str(error).splitlines()
    for name, entry in _mapping(given, "space", problems).items():
        try:
            space.append(_dimension(name, entry))
        except ConfigError as error:
            problems.append(str(error))
    if not given.get("space"):
        problems.append("space must hold at least one field, such as algo.learning_rate: {low: 1e-4, high: 1e-2}.")
    _refuse(problems, where)
    sweep = SweepFile(base=base, space=tuple(space), given=given, **asdict(options_of_search))
    _refuse(_impossible_values(sweep), where)
    return sweep


def _refuse(problems: Iterable[str], where: str) -> None:
    if lines := [f"{where}: {problem}" for problem in problems]:
        raise ConfigError("\n".join(lines))


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
        raise ConfigError(f"{where}: {'preset' if 'preset' in given else 'config'} must be a string, got {source!r}.")
    problems: list[str] = []
    overrides = _mapping(given, "overrides", problems)
    _refuse(problems, where)
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


def _dimension(name: str, entry: Any) -> Dimension:
    """Check one field of the space."""
    kind = _kind(name)
    if kind is None:
        unknown = f"there is no such field.{did_you_mean(str(name), field_paths())}"
        raise ConfigError(f"space.{name}: {renamed(str(name), field_paths()) or unknown}")
    if name == "training.seed":
        raise ConfigError("space.training.seed must not be searched: give seeds, how many a trial is trained with.")
    shape = "must be {low: …, high: …}, with log: true for orders of magnitude, or {choices: [...]}"
    if not isinstance(entry, dict) or ("choices" not in entry and not {"low", "high"} <= set(entry)):
        raise ConfigError(f"space.{name} {shape}, got {entry!r}.")
    allowed = {"choices"} if "choices" in entry else {"low", "high", "log"}
    if extra := sorted(set(map(str, entry)) - allowed):
        raise ConfigError(f"space.{name} {shape}; unknown '{extra[0]}'.{did_you_mean(extra[0], allowed)}")
    if "choices" not in entry:
        return _range(name, entry, kind)
    choices = entry["choices"]
    if not isinstance(choices, list) or len({json.dumps(choice, default=str) for choice in choices}) < 2:
        raise ConfigError(f"space.{name}.choices must be a list of two or more values, got {choices!r}.")
    return Dimension(name, tuple(choices))


def _range(name: str, entry: Mapping[str, Any], kind: str) -> Dimension:
    low, high, log = as_number(entry["low"]), as_number(entry["high"]), entry.get("log", False)
    for end, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"space.{name}.{end} must be a finite number, got {entry[end]!r}.")
    has_integers = isinstance(low, int) and isinstance(high, int)
    is_integer = kind.startswith("an integer") or (has_integers and not kind.startswith("a number"))
    if is_integer and (low != int(low) or high != int(high)):
        raise ConfigError(f"space.{name} counts: low and high must be integers, got {low} and {high}.")
    if not low < high:
        raise ConfigError(f"space.{name}.low must be below high ({high}), got {low}.")
    if not isinstance(log, bool):
        raise ConfigError(f"space.{name}.log must be true or false, got {log!r}.")
    if log and low <= 0:
        raise ConfigError(f"space.{name}.low must be above 0 with log: true, got {low}.")
    number = int if is_integer else float
    return Dimension(name, (), number(low), number(high), log, is_integer)


def _kind(name: Any) -> str | None:
    """Return what a field must be, in words; an empty text for an option of the task, None for no field."""
    section, _, key = str(name).partition(".")
    if section == "task" and key.startswith("kwargs."):
        return ""
    return next((rules[key] for rules in map(field_rules, CONFIG_SECTIONS.get(section, ())) if key in rules), None)


def _impossible_values(sweep: SweepFile) -> Iterable[str]:
    """Try every choice and every end alone, so that an impossible one is found before the first trial."""
    problems = []
    for dimension in sweep.space:
        for value in dimension.choices or (dimension.low, dimension.high):
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
    return dict.fromkeys(problems)
