"""The one schema: YAML files, presets and command-line overrides all become a ``Config``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from apexrl.agent.trainer import TrainingConfig
from apexrl.algorithms import ALGORITHMS, AlgorithmConfig, BaseAlgorithm, PPOConfig
from apexrl.core import plugins
from apexrl.core.errors import ConfigError, UntrustedError, did_you_mean
from apexrl.core.renamed import renamed
from apexrl.core.validation import create, field_rules
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
    imports: tuple[str, ...] = field(default_factory=plugins.imported)
    """Modules that register what the sections name: ``import`` in a file, ``--import`` on the command line."""

    def __post_init__(self) -> None:
        if not isinstance(self.algo, self.algorithm.config_class):
            wanted = self.algorithm.config_class.__name__
            raise ConfigError(f"algo.name '{self.algo.name}' needs a {wanted}, got a {type(self.algo).__name__}.")
        policy = self.algorithm.policy_class(self.policy.kind)
        source = self.algorithm.learns_from
        if source not in self.task.collectors:
            by_suite = source in SuiteConfig.collectors
            needs = "task.benchmark_name, a suite of tasks," if by_suite else "task.id, not task.benchmark_name,"
            raise ConfigError(f"algo.name '{self.algo.name}' needs {needs} got '{self.task.id}'.")
        self.algo.check_policy(policy)
        self.task.check(self)
        self.algo.check_rollout(self.task.num_envs, keeps_sequences=policy.sequential)

    @property
    def algorithm(self) -> type[BaseAlgorithm]:
        """The class of the algorithm."""
        return algorithm_class(self.algo.name)

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
        sections = _as_lists(asdict(self))
        imports = sections.pop("imports")
        return {**({IMPORT: imports} if imports else {}), **sections}


IMPORT = "import"
"""Key of the modules to import, beside the sections."""


CONFIG_SECTIONS: dict[str, tuple[type, ...]] = {
    "task": (TaskConfig, SuiteConfig),
    "policy": tuple(dict.fromkeys(POLICY_KINDS.values())),
    "algo": tuple(algorithm.config_class for algorithm in ALGORITHMS.values()),
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
    **{algorithm.config_class: f"with --algo.name {name}" for name, algorithm in ALGORITHMS.items()},
}
"""What chooses a class of a section that has several."""


def algorithm_class(name: Any) -> type[BaseAlgorithm]:
    """Return the algorithm that ``algo.name`` means."""
    found = ALGORITHMS.find(name) if isinstance(name, str) else None
    if found is None:
        known = sorted(ALGORITHMS.names())
        raise ConfigError(
            f"algo.name must be one of {known}, or module:Class, got {name!r}."
            f"{plugins.module_hint(str(name)) or did_you_mean(str(name), known)}"
        )
    return found


def import_modules(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Import what a configuration asks for; returns the sections."""
    names = raw.get(IMPORT) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"import must be a list of modules, such as [my_envs], got {names!r}.")
    plugins.import_all(names)
    return {name: values for name, values in raw.items() if name != IMPORT}


def section_class(name: str, values: Mapping[str, Any]) -> type:
    """Return the class of a section for the values that are given."""
    if name == "task":
        return SuiteConfig if "benchmark_name" in values else TaskConfig
    if name == "policy":
        return POLICY_KINDS.get(str(values.get("kind")), PolicyConfig)
    if name == "algo":
        return algorithm_class(values.get("name", "ppo")).config_class
    return CONFIG_SECTIONS[name][0]


def make_config(raw: Mapping[str, Any]) -> Config:
    """Check plain values and make a ``Config``; every problem is named with its field.

    Raises:
        ConfigError: with one line for each problem.
    """
    problems: list[str] = []
    sections: dict[str, Any] = {}
    given = import_modules(raw)
    algo, policy = (given.get(name) or {} for name in ("algo", "policy"))
    if isinstance(algo, dict) and isinstance(policy, dict) and "kind" not in policy:
        with contextlib.suppress(ConfigError):  # it is said below
            kinds = algorithm_class(algo.get("name", "ppo")).policies
            if PolicyConfig.kind not in kinds:
                given["policy"] = {"kind": next(iter(kinds)), **policy}
    for name, values in given.items():
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
    """Return every ``section.field``, also of algorithms that users brought along."""
    classes = {**CONFIG_SECTIONS, "algo": [algorithm.config_class for algorithm in ALGORITHMS.values()]}
    every = ((section, entry) for section in classes for cls in classes[section] for entry in fields(cls))
    return list(dict.fromkeys(f"{section}.{entry.name}" for section, entry in every))


def _section(name: str, values: dict[str, Any], problems: list[str]) -> Any:
    try:
        section = section_class(name, values)
    except UntrustedError:
        raise
    except ConfigError as error:
        problems.append(str(error))
        return None
    known = [entry.name for entry in fields(section)]
    unknown = [key for key in values if key not in known]
    for key in unknown:
        which = f" {SECTION_CHOICES[section]}" if section in SECTION_CHOICES else ""
        problems.append(
            renamed(f"{name}.{key}", [f"{name}.{field}" for field in known])
            or f"Unknown field '{name}.{key}'; fields{which} are {', '.join(known)}.{did_you_mean(str(key), known)}"
        )
    try:
        return create(name, section, {key: value for key, value in values.items() if key not in unknown})
    except ConfigError as error:
        problems += str(error).splitlines()
        return None


OPEN_FIELDS = (["task", "kwargs"], ["task", "metrics"], ["policy", "kwargs"])
"""Fields that hold fields of a user's choice."""


def is_text(name: str) -> bool:
    """Whether ``section.field`` takes a string and nothing else."""
    section, _, field_name = name.partition(".")
    return any(field_rules(cls).get(field_name) == "a string" for cls in CONFIG_SECTIONS.get(section, ()))


def require_known(name: str) -> None:
    """Refuse an option that is no ``section.field``, nor below one that takes any key."""
    paths = field_paths()
    if name not in paths and name.split(".")[:2] not in OPEN_FIELDS:
        unknown = f"Unknown option '--{name}'.{nearest_option(name, paths)} 'apexrl train --help-all' lists all."
        raise ConfigError(renamed(name, paths) or unknown)


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_lists(inner) for inner in value]
    return value
