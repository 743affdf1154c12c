"""Configurations from presets, YAML files and the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.core.system.migrations import migrated_config
from apexrl.run.config import CONFIG_SECTIONS, Config, _require_known, make_config, section_class

DEFAULT_PRESET = "lift_ppo"
MAX_VALUES = 10_000
"""In a configuration, with its anchors filled in: a few lines of YAML can stand for more than any memory holds."""
MAX_BITS = 1024
"""Of an integer; no field takes a larger one, and Python does not write one of any size."""


def preset_names() -> list[str]:
    """Return the names of the presets that ship."""
    return sorted(Path(entry.name).stem for entry in preset_dir().iterdir() if entry.name.endswith(".yaml"))


def preset_summary(name: str) -> str:
    """Return the first line of a preset, a comment that says what it is."""
    return (preset_dir() / f"{name}.yaml").read_text().splitlines()[0].lstrip("# ")


def read_source(source: str) -> dict[str, Any]:
    """Read a preset by name, or a YAML file by path."""
    if source in preset_names():
        return migrated_config(parse_yaml((preset_dir() / f"{source}.yaml").read_text(), source), source)
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.exists():
        if not path.is_file():
            raise ConfigError(f"There is no configuration file at {path}; presets are {', '.join(preset_names())}.")
        return read_config(path)
    raise ConfigError(
        f"Unknown preset '{source}'; presets are {', '.join(preset_names())}, or give a YAML file."
        + did_you_mean(source, preset_names())
    )


def read_config(path: Path) -> dict[str, Any]:
    """Read the sections of a YAML file of any version as this version has them."""
    return migrated_config(parse_yaml(path.read_text(encoding="utf-8", errors="replace"), str(path)), str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse YAML without tags that could run code."""
    try:
        raw = yaml.load(text, _Loader)
    except _TagError as error:
        raise ConfigError(f"{where}, {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not plain YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must hold sections ({', '.join(CONFIG_SECTIONS)}), got {type(raw).__name__}.")
    return raw


class _TagError(yaml.YAMLError):
    """A value with a tag, such as ``!!python/name:os.system``."""


class _Loader(yaml.SafeLoader):
    """Plain YAML, in which a key stands once and 10:30 is text instead of 630."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._keys: list[str] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read a value, unless it has a tag."""
        keys = [index.value] if isinstance(index, yaml.ScalarNode) else []
        self._keys += keys
        event = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            name, field = tag.replace("tag:yaml.org,2002:", "!!"), ".".join(self._keys)
            where = f", {field}" if "." in field else f", section '{field}'" if field else ""
            raise _TagError(
                f"line {event.start_mark.line + 1}{where}: the tag '{name}' is refused. Use plain values only: "
                "strings, numbers, true and false, lists, mappings."
            )
        node = super().compose_node(parent, index)
        del self._keys[len(self._keys) - len(keys) :]
        return node

    def construct_number(self, node: Any) -> int:
        """Return an integer that can be written again."""
        number: int = self.construct_yaml_int(node)
        if number.bit_length() > MAX_BITS:
            raise ConfigError(f"the number in line {node.start_mark.line + 1} has too many digits.")
        return number

    def get_single_node(self) -> Any:
        """Return the document, unless it is too large to be a configuration."""
        node = super().get_single_node()
        if _num_values(node, {}) > MAX_VALUES:
            name = _largest_part(node)
            raise ConfigError(f"{name} stands for more than {MAX_VALUES} values; use fewer anchors (&).")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Make a mapping, or name the key that is given twice."""
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise ConfigError(f"'{key.value}' is given twice, again in line {key.start_mark.line + 1}; keep one.")
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _num_values(node: Any, known: dict[int, float]) -> float:
    """Count the values of a YAML node, with its aliases filled in; infinite when it holds itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_num_values(part, known) for part in parts)
    return known[id(node)]


def _largest_part(node: Any) -> str:
    """Name the field with the most values, or the section."""
    names: list[str] = []
    while isinstance(node, yaml.MappingNode) and len(names) < 2:
        key, node = max(node.value, key=lambda entry: _num_values(entry[1], {}))
        names.append(str(key.value))
    return ".".join(names) if len(names) == 2 else f"Section '{names[0]}'" if names else "it"


_TIME = ("tag:yaml.org,2002:str", re.compile(r"[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?$"))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)
_Loader.yaml_implicit_resolvers = {
    first: [_TIME, *resolvers] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def with_overrides(raw: Mapping[str, Any], overrides: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Set ``section.key`` to values given as text."""
    merged: dict[str, Any] = _copied(migrated_config(raw))
    for name, text in overrides:
        *parents, last = name.split(".")
        _require_known(name, parents, last)
        place = merged
        for parent in parents:
            if place.get(parent) is None:
                place[parent] = {}
            place = place[parent]
            if not isinstance(place, dict):
                raise ConfigError(f"'{name}' cannot be set: '{parent}' is {place!r}, not a section.")
        try:
            place[last] = yaml.load(text, _Loader)
        except ConfigError as error:
            raise ConfigError(f"--{name}: {error}") from error
        except (yaml.YAMLError, ValueError, RecursionError):
            place[last] = text
    return merged


def load_config(source: str, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Read a preset or a YAML file, apply overrides, and check the result."""
    return overridden(read_source(source), overrides)


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


def preset_dir() -> Path:
    """Return where the files are that ship."""
    return Path(str(resources.files("apexrl.run"))) / "presets"
