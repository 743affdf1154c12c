"""The one schema: YAML files, presets and command-line overrides all become a ``Config``."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from apexrl.agent.trainer import TrainingConfig
from apexrl.algorithms import ALGORITHMS, AlgorithmConfig, BaseAlgorithm, PPOConfig
from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.core.system.migrations import CONFIG_VERSION, VERSION_KEY, migrated_config
from apexrl.policies.config import POLICY_KINDS, PolicyConfig, VLAConfig
from apexrl.run.sections import FeaturesConfig, LoggingConfig
from apexrl.run.sources import nearest_option
from apexrl.run.suite import SuiteConfig
from apexrl.run.tasks import TaskConfig


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
        kinds = self.algorithm.policies
        if self.policy.kind not in kinds:
            raise ConfigError(
                f"policy.kind must be one of {list(kinds)} for algo.name '{self.algo.name}', got '{self.policy.kind}'."
            )
        source = self.algorithm.learns_from
        if source not in self.task.collectors:
            by_suite = source in SuiteConfig.collectors
            needs = "task.benchmark_name, a suite of tasks," if by_suite else "task.id, not task.benchmark_name,"
            raise ConfigError(f"algo.name '{self.algo.name}' needs {needs} got '{self.task.id}'.")
        policy = kinds[self.policy.kind]
        self.algo.check_policy(policy)
        self.task.check(self)
        self.algo.check_rollout(self.task.num_envs, keeps_sequences=policy.sequential)

    @property
    def algorithm(self) -> type[BaseAlgorithm]:
        """The class of the algorithm."""
        return ALGORITHMS[self.algo.name][0]

    @property
    def imitation(self) -> AlgorithmConfig | None:
        """The imitation that the run begins with, or None."""
        return self.algo.imitation(self.training.init_from)

    @property
    def records_demos(self) -> bool:
        """Whether the run reads demonstrations that it records itself."""
        return self.task.records_demos and (bool(self.algo.demo_reader) or self.imitation is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that YAML and checkpoints can hold."""
        return {VERSION_KEY: CONFIG_VERSION, **_as_lists(asdict(self))}


CONFIG_SECTIONS: dict[str, tuple[type, ...]] = {
    "task": (TaskConfig, SuiteConfig),
    "policy": tuple(dict.fromkeys(POLICY_KINDS.values())),
    "algo": tuple(config for _, config in ALGORITHMS.values()),
    "training": (TrainingConfig,),
    "logging": (LoggingConfig,),
    "features": (FeaturesConfig,),
}
"""Section -> its classes; ``section_class`` says which of several."""
SECTION_CHOICES = {
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
        return POLICY_KINDS.get(str(values.get("kind")), PolicyConfig)
    if name == "algo":
        wanted = values.get("name", "ppo")
        if not isinstance(wanted, str) or wanted not in ALGORITHMS:
            raise ConfigError(
                f"algo.name must be one of {sorted(ALGORITHMS)}, got {wanted!r}.{did_you_mean(str(wanted), ALGORITHMS)}"
            )
        return ALGORITHMS[wanted][1]
    return CONFIG_SECTIONS[name][0]


def make_config(raw: Mapping[str, Any]) -> Config:
    """Check plain values and make a ``Config``; every problem is named with its field.

    Raises:
        ConfigError: with one line for each problem.
    """
    problems: list[str] = []
    sections: dict[str, Any] = {}
    for name, values in migrated_config(raw).items():
        if name not in CONFIG_SECTIONS:
            problems.append(
                f"Unknown section '{name}'; sections are {', '.join(CONFIG_SECTIONS)}."
                f"{did_you_mean(str(name), CONFIG_SECTIONS)}"
            )
        elif not isinstance(values, dict | None):
            problems.append(f"Section '{name}' must hold fields, got {values!r}.")
        else:
            sections[name] = _section(name, values or {}, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return Config(**sections)


def field_paths() -> list[str]:
    """Return every ``section.field``."""
    every = (
        (section, entry) for section in CONFIG_SECTIONS for cls in CONFIG_SECTIONS[section] for entry in fields(cls)
    )
    return list(dict.fromkeys(f"{section}.{entry.name}" for section, entry in every))


def field_help(section: type) -> dict[str, str]:
    """Return the sentence below each field of a configuration class, inherited ones first."""
    found: dict[str, str] = {}
    for cls in filter(is_dataclass, reversed(section.__mro__)):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
                found[statement.target.id] = " ".join(str(following.value.value).split())  # type: ignore[attr-defined]
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
            which = f" {SECTION_CHOICES[section]}" if section in SECTION_CHOICES else ""
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


def require_known(name: str) -> None:
    """Refuse an option that is no ``section.field``, nor below one that takes any key."""
    paths = field_paths()
    if name not in paths and (name.split(".")[:2] not in (["task", "kwargs"], ["task", "metrics"])):
        raise ConfigError(
            f"Unknown option '--{name}'.{nearest_option(name, paths)} 'apexrl train --help-all' lists all."
        )


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_lists(inner) for inner in value]
    return value
