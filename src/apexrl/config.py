"""The one schema: YAML files, presets and command-line overrides all become a ``Config``."""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from apexrl.agent.trainer import TrainingConfig
from apexrl.algorithms import ALGORITHMS, AlgorithmConfig, BCConfig, PPOConfig, RLOOConfig
from apexrl.errors import ConfigError, did_you_mean
from apexrl.migrations import CONFIG_VERSION, VERSION, migrated_config
from apexrl.sections import FeaturesConfig, LoggingConfig, PolicyConfig, SuiteConfig, TaskConfig, VLAConfig

DEFAULT_PRESET = "lift_ppo"
SUITE_ALGORITHMS = ("rloo", "bc")
MAX_VALUES = 10_000
"""In a configuration, with its anchors filled in: a few lines of YAML can stand for more than any memory holds."""

MAX_BITS = 1024
"""Of a whole number; no field takes a larger one, and Python does not write one of any size."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    task: TaskConfig | SuiteConfig = field(default_factory=TaskConfig)
    policy: PolicyConfig | VLAConfig = field(default_factory=PolicyConfig)
    algo: AlgorithmConfig = field(default_factory=PPOConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)

    def __post_init__(self) -> None:
        kinds = list(ALGORITHMS[self.algo.name][0].policies)
        if self.policy.kind not in kinds:
            raise ConfigError(
                f"policy.kind must be one of {kinds} for algo.name '{self.algo.name}', got '{self.policy.kind}'."
            )
        is_suite, takes_suites = isinstance(self.task, SuiteConfig), self.algo.name in SUITE_ALGORITHMS
        if is_suite != takes_suites:
            needs = "task.benchmark_name, a suite of tasks," if takes_suites else "task.id, not task.benchmark_name,"
            raise ConfigError(f"algo.name '{self.algo.name}' needs {needs} got '{self.task.id}'.")
        if self.policy.kind == "vla" and isinstance(self.algo, BCConfig):
            self.algo.require_default_loss()
        if isinstance(self.task, SuiteConfig) and isinstance(self.algo, RLOOConfig):
            has_demos = self.task.num_demos or self.task.demos or self.training.init_from
            if self.algo.imitation_updates and not has_demos:
                raise ConfigError(
                    "algo.imitation_updates needs demonstrations: set task.num_demos to record some with the suite's "
                    f"scripted experts, or task.demos to a directory of them; got {self.task.num_demos} and ''."
                )
        if self.training.collector == "ray" and self.task.num_envs % self.training.num_collectors:
            raise ConfigError(
                f"task.num_envs must be a multiple of training.num_collectors ({self.training.num_collectors}) with "
                f"training.collector ray, got {self.task.num_envs}."
            )
        known = ("sync", "async") if self.algo.name == "rloo" else ("sync",)
        if is_suite and self.training.collector not in known:
            raise ConfigError(
                f"training.collector must be {' or '.join(known)} with task.benchmark_name and algo.name "
                f"{self.algo.name}, got '{self.training.collector}'."
            )
        self.algo.check_rollout(self.task.num_envs, keeps_sequences=self.policy.kind == "gru")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that YAML and checkpoints can hold."""
        return {VERSION: CONFIG_VERSION, **_plain(asdict(self))}


SECTIONS: dict[str, tuple[type, ...]] = {
    "task": (TaskConfig, SuiteConfig),
    "policy": (PolicyConfig, VLAConfig),
    "algo": tuple(config for _, config in ALGORITHMS.values()),
    "training": (TrainingConfig,),
    "logging": (LoggingConfig,),
    "features": (FeaturesConfig,),
}
"""Section -> its classes; ``section_class`` says which of several."""
CHOICES = {
    TaskConfig: "with --task.id",
    SuiteConfig: "with --task.benchmark_name",
    PolicyConfig: "with --policy.kind mlp, gru or roa",
    VLAConfig: "with --policy.kind vla",
    **{config: f"with --algo.name {name}" for name, (_, config) in ALGORITHMS.items()},
}
"""What chooses a class of a section that has several."""


def section_class(name: str, values: Mapping[str, Any]) -> type:
    """Return the class of a section for the values that are given."""
    if name == "task":
        return SuiteConfig if "benchmark_name" in values else TaskConfig
    if name == "policy":
        return VLAConfig if values.get("kind") == "vla" else PolicyConfig
    if name == "algo":
        wanted = values.get("name", "ppo")
        if not isinstance(wanted, str) or wanted not in ALGORITHMS:
            raise ConfigError(
                f"algo.name must be one of {sorted(ALGORITHMS)}, got {wanted!r}.{did_you_mean(str(wanted), ALGORITHMS)}"
            )
        return ALGORITHMS[wanted][1]
    return SECTIONS[name][0]


def preset_names() -> list[str]:
    """Return the names of the presets that ship."""
    return sorted(Path(entry.name).stem for entry in preset_dir().iterdir() if entry.name.endswith(".yaml"))


def preset_summary(name: str) -> str:
    """Return the first line of a preset, a comment that says what it is."""
    text: str = (preset_dir() / f"{name}.yaml").read_text()
    return text.splitlines()[0].lstrip("# ")


def read_source(source: str) -> dict[str, Any]:
    """Read a preset by name, or a YAML file by path."""
    if source in preset_names():
        return migrated_config(parse_yaml((preset_dir() / f"{source}.yaml").read_text(), source), source)
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.exists():
        if not path.is_file():
            raise ConfigError(
                f"There is no configuration file at {path}; give an existing one, or a preset: "
                f"{', '.join(preset_names())}."
            )
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
        raise ConfigError(f"{where} must hold sections ({', '.join(SECTIONS)}), got {type(raw).__name__}.")
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
                f"line {event.start_mark.line + 1}{where}: the tag '{name}' is refused. Use plain values only: text, "
                "numbers, true and false, lists, mappings."
            )
        node = super().compose_node(parent, index)
        del self._keys[len(self._keys) - len(keys) :]
        return node

    def construct_number(self, node: Any) -> int:
        """Make a whole number that can be written again."""
        number: int = self.construct_yaml_int(node)
        if number.bit_length() > MAX_BITS:
            raise ConfigError(f"the number in line {node.start_mark.line + 1} has too many digits.")
        return number

    def get_single_node(self) -> Any:
        """Return the document, unless it is too large to be a configuration."""
        node = super().get_single_node()
        if _num_values(node, {}) > MAX_VALUES:
            name = _largest_part(node)
            raise ConfigError(
                f"{name} stands for more than {MAX_VALUES} values; use fewer anchors (&) and aliases (*)."
            )
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
            inner = place.get(parent)
            if inner is None:
                inner = place[parent] = {}
            if not isinstance(inner, dict):
                raise ConfigError(f"'{name}' cannot be set: '{parent}' is {inner!r}, not a section.")
            place = inner
        try:
            place[last] = yaml.load(text, _Loader)
        except ConfigError as error:
            raise ConfigError(f"--{name}: {error}") from error
        except (yaml.YAMLError, ValueError, RecursionError):
            place[last] = text
    return merged


def make_config(raw: Mapping[str, Any]) -> Config:
    """Check plain values and make a ``Config``; every problem is named with its field.

    Raises:
        ConfigError: with one line for each problem.
    """
    problems: list[str] = []
    sections: dict[str, Any] = {}
    for name, values in migrated_config(raw).items():
        if name not in SECTIONS:
            problems.append(
                f"Unknown section '{name}'; sections are {', '.join(SECTIONS)}.{did_you_mean(str(name), SECTIONS)}"
            )
        elif not isinstance(values, dict | None):
            problems.append(f"Section '{name}' must hold fields, got {values!r}.")
        else:
            sections[name] = _section(name, values or {}, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return Config(**sections)


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
    for name, classes in SECTIONS.items():
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


def field_paths() -> list[str]:
    """Return every ``section.field``."""
    every = [
        f"{section}.{entry.name}" for section, classes in SECTIONS.items() for cls in classes for entry in fields(cls)
    ]
    return list(dict.fromkeys(every))


def field_help(section: type) -> dict[str, str]:
    """Return the sentence below each field of a configuration class, inherited ones first."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if is_text:
                    text = " ".join(str(following.value.value).split())  # type: ignore[attr-defined]
                    found[statement.target.id] = text
    return found


def _section(name: str, values: dict[str, Any], problems: list[str]) -> Any:
    try:
        section = section_class(name, values)
    except ConfigError as error:
        problems.append(str(error))
        return None
    known = {entry.name: str(entry.type) for entry in fields(section)}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            which = f" {CHOICES[section]}" if section in CHOICES else ""
            problems.append(
                f"Unknown field '{name}.{key}'; fields{which} are {', '.join(known)}.{did_you_mean(str(key), known)}"
            )
        elif known[key].startswith(("int", "float")):
            checked[key] = number = as_number(value)
            if isinstance(number, bool) or (isinstance(number, float) and not math.isfinite(number)):
                problems.append(f"{name}.{key} must be a finite number, got {value!r}.")
        else:
            checked[key] = value
    try:
        return TypeAdapter(section).validate_python(checked)
    except ValidationError as error:
        problems += [_problem(name, entry) for entry in error.errors()]
        return None


def as_number(value: Any) -> Any:
    """Read text such as 1e6, which YAML does not take for a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _problem(section: str, entry: Any) -> str:
    cause = entry.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    path = ".".join(str(part) for part in (section, *entry["loc"]))
    text = (entry["msg"][0].lower() + entry["msg"][1:]).replace("valid tuple", "list, such as [64, 64]")
    return f"{path}: {text}, got {entry['input']!r}."


def _require_known(name: str, parents: list[str], last: str) -> None:
    paths = field_paths()
    if not parents or (name not in paths and parents[:2] not in (["task", "kwargs"], ["task", "metrics"])):
        raise ConfigError(f"Unknown option '--{name}'.{did_you_mean(name, paths)} 'apexrl train --help' lists all.")


def _copied(raw: Any) -> Any:
    return {key: _copied(value) for key, value in raw.items()} if isinstance(raw, dict) else raw


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def preset_dir() -> Path:
    """Return where the files are that ship."""
    return Path(str(resources.files("apexrl"))) / "presets"
