"""Configurations from presets, YAML files and the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import yaml

from apexrl.algorithms import ALGORITHMS
from apexrl.core.errors import ConfigError
from apexrl.run.config import (
    CONFIG_SECTIONS,
    Config,
    import_modules,
    is_text,
    make_config,
    require_known,
    section_class,
)
from apexrl.run.sources import PlainLoader, read_source


def with_overrides(raw: Mapping[str, Any], overrides: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Set ``section.key`` to values given as text."""
    merged: dict[str, Any] = _copied(raw)
    import_modules(merged)
    # First what decides which fields there are.
    for name, text in sorted(overrides, key=lambda pair: pair[0] != "algo.name"):
        _load_algorithm(merged)
        require_known(name)
        *parents, last = name.split(".")
        place = merged
        for parent in parents:
            if place.get(parent) is None:
                place[parent] = {}
            place = place[parent]
            if not isinstance(place, dict):
                raise ConfigError(f"'{name}' cannot be set: '{parent}' is {place!r}, not a section.")
        try:
            value = yaml.load(text, PlainLoader)
            place[last] = text if is_text(name) and not isinstance(value, str) else value
        except ConfigError as error:
            raise ConfigError(f"--{name}: {error}") from error
        except (yaml.YAMLError, ValueError, RecursionError):
            place[last] = text
    return merged


def _load_algorithm(merged: Mapping[str, Any]) -> None:
    """Load an algorithm that a user brings along, whose options are fields from then on."""
    section = merged.get("algo")
    name = section.get("name") if isinstance(section, dict) else None
    if isinstance(name, str):
        ALGORITHMS.find(name)


def load_config(source: str | None, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Read a preset or a YAML file, or take the defaults (None), apply overrides, and check the result."""
    return overridden({} if source is None else read_source(source), overrides)


def overridden(stored: Mapping[str, Any], overrides: Iterable[tuple[str, str]]) -> Config:
    """Apply overrides to the sections of a configuration, which may choose another kind of section."""
    overrides = list(overrides)
    return make_config(_without_other_kinds(stored, with_overrides(stored, overrides), dict(overrides)))


def _without_other_kinds(stored: Mapping[str, Any], merged: dict[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Drop what a source says about another kind of task, policy or algorithm than the one that was asked for."""
    if "task.id" in given and "task.benchmark_name" not in given and isinstance(merged.get("task"), dict):
        merged["task"].pop("benchmark_name", None)
    for name, classes in CONFIG_SECTIONS.items():
        before, after = stored.get(name), merged.get(name)
        if len(classes) < 2 or not isinstance(before, dict) or not isinstance(after, dict):
            continue
        try:
            kind = section_class(name, after)
            if kind is section_class(name, before):
                continue
        except ConfigError:  # it will be said when the section is made
            continue
        known = {entry.name for entry in fields(kind)}
        merged[name] = {key: value for key, value in after.items() if key in known or f"{name}.{key}" in given}
    return merged


def _copied(raw: Any) -> Any:
    return {key: _copied(value) for key, value in raw.items()} if isinstance(raw, dict) else raw
