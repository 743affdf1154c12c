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
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from apexrl.agent.trainer import TrainingConfig
from apexrl.algorithms import ALGORITHMS, AlgorithmConfig, PPOConfig
from apexrl.errors import ConfigError, did_you_mean
from apexrl.models.actor import DistributionName

DEFAULT_PRESET = "lift_ppo"
MAX_NUM_ENVS, MAX_WIDTH = 2**24, 2**20
"""Beyond what any machine holds: a typing mistake, better refused than tried."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is trained on."""

    id: str = "lift"
    """A task that ships with the package (see ``apexrl list``), or a Gymnasium id."""
    num_envs: int = 64
    """Environments stepped together."""
    num_workers: int = 0
    """Processes that step Gymnasium environments; 0 steps them here, faster unless a step takes a millisecond."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the task itself."""

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise ConfigError(f"task.num_envs must be at least 1, got {self.num_envs}.")
        if self.num_envs > MAX_NUM_ENVS:
            raise ConfigError(f"task.num_envs must be at most {MAX_NUM_ENVS}, got {self.num_envs}.")
        if not 0 <= self.num_workers <= self.num_envs:
            raise ConfigError(
                f"task.num_workers must lie between 0 and task.num_envs ({self.num_envs}), got {self.num_workers}."
            )
        for name, value in self.kwargs.items():
            if not _is_plain(value):
                raise ConfigError(
                    f"task.kwargs.{name} must be text, a number, a list or a mapping of these, got {value!r}; "
                    "quote it to make it text."
                )


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The networks."""

    kind: Literal["mlp", "gru", "roa"] = "mlp"
    """mlp: separate actor and critic (pictures get convolutions); gru: with memory; roa: teacher and student."""
    hidden_dims: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers; of those before the memory for gru."""
    critic_hidden_dims: tuple[int, ...] | None = None
    """Widths of the critic's hidden layers; null for the actor's. Not for gru."""
    memory_dim: int = 64
    """Width of the memory; only for gru."""
    activation: Literal["tanh", "relu", "elu", "silu", "gelu"] = "tanh"
    """Between the layers."""
    actor_groups: tuple[str, ...] | None = None
    """Observation groups that the actor sees; null for all but the privileged ones (priv, privileged, critic)."""
    critic_groups: tuple[str, ...] | None = None
    """Observation groups that the critic sees; null for all. Not for gru."""
    distribution: DistributionName = "auto"
    """auto, gaussian, squashed_gaussian (bounded by tanh) or categorical."""
    init_std: float = 1.0
    """Standard deviation at the start."""
    min_std: float = 1e-3
    """Lower bound of the standard deviation."""
    max_std: float = 10.0
    """Upper bound of the standard deviation."""
    state_dependent_std: bool = False
    """Let the standard deviation depend on the observation."""
    normalize_obs: bool = False
    """Normalise observations by running statistics."""
    history: int = 24
    """Frames that the task stacks in its observation group policy; only for roa."""
    history_kind: Literal["mlp", "conv", "gru"] = "mlp"
    """How the adaptation module reads them; only for roa."""
    latent_dim: int = 8
    """Width of the privileged feature; only for roa."""
    encoder_dims: tuple[int, ...] = (64,)
    """Widths of the hidden layers of the privileged encoder; only for roa."""
    adapt_dims: tuple[int, ...] = (128, 64)
    """Widths of the hidden layers of the adaptation module; only for roa."""

    def __post_init__(self) -> None:
        for name in ("hidden_dims", "critic_hidden_dims", "encoder_dims", "adapt_dims"):
            if any(width < 1 for width in getattr(self, name) or ()):
                raise ConfigError(f"policy.{name} must hold positive widths, got {list(getattr(self, name))}.")
            if any(width > MAX_WIDTH for width in getattr(self, name) or ()):
                raise ConfigError(
                    f"policy.{name} must hold widths of at most {MAX_WIDTH}, got {list(getattr(self, name))}."
                )
        for name in ("actor_groups", "critic_groups"):
            if getattr(self, name) == ():
                raise ConfigError(f"policy.{name} must name at least one group or be null, got [].")
        for name in ("memory_dim", "history", "latent_dim"):
            if not 1 <= getattr(self, name) <= MAX_WIDTH:
                raise ConfigError(
                    f"policy.{name} must be at least 1 and at most {MAX_WIDTH}, got {getattr(self, name)}."
                )
        if not 0 < self.min_std <= self.init_std <= self.max_std:
            raise ConfigError(
                f"policy.init_std must lie between policy.min_std ({self.min_std}, above 0) and policy.max_std "
                f"({self.max_std}), got {self.init_std}."
            )
        if self.kind == "gru" and (self.critic_hidden_dims is not None or self.critic_groups is not None):
            raise ConfigError(
                "policy.critic_hidden_dims and policy.critic_groups must be null when policy.kind is gru: "
                "its critic shares the memory."
            )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where numbers go; metrics.jsonl is always written."""

    log_interval: int = 1
    """Iterations between logged ones."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Log to Weights & Biases."""
    wandb_project: str = "apexrl"
    """Weights & Biases project."""
    reward_components: bool = True
    """Log what the task declares besides success and failure."""

    def __post_init__(self) -> None:
        if self.log_interval < 1:
            raise ConfigError(f"logging.log_interval must be at least 1, got {self.log_interval}.")


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig:
    """Extras that can be switched."""

    save_step_csv: bool = False
    """Write one table of steps for each environment at every evaluation."""
    save_video: bool = True
    """Write a video of the trained policy at the end."""
    save_plot: bool = True
    """Draw the learning curve at the end."""
    graphs: bool = True
    """Capture rollout and update as CUDA graphs; without CUDA it does nothing."""
    compile: bool = False
    """Compile policy and loss: faster on long runs, after a first update that takes some ten seconds longer."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Of matrix products: tf32 is for CUDA; bf16 also runs the networks of the update in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    task: TaskConfig = field(default_factory=TaskConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
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
        self.algo.check_rollout(self.task.num_envs, keeps_sequences=self.policy.kind == "gru")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that YAML and checkpoints can hold."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


SECTIONS: dict[str, tuple[type, ...]] = {
    "task": (TaskConfig,),
    "policy": (PolicyConfig,),
    "algo": tuple(config for _, config in ALGORITHMS.values()),
    "training": (TrainingConfig,),
    "logging": (LoggingConfig,),
    "features": (FeaturesConfig,),
}
"""Section -> its classes; ``algo.name`` says which of several."""


def preset_names() -> list[str]:
    """Return the names of the presets that ship."""
    return sorted(Path(entry.name).stem for entry in _preset_dir().iterdir() if entry.name.endswith(".yaml"))


def preset_summary(name: str) -> str:
    """Return the first line of a preset, a comment that says what it is."""
    text: str = (_preset_dir() / f"{name}.yaml").read_text()
    return text.splitlines()[0].lstrip("# ")


def read_source(source: str) -> dict[str, Any]:
    """Read a preset by name, or a YAML file by path."""
    if source in preset_names():
        return parse_yaml((_preset_dir() / f"{source}.yaml").read_text(), source)
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.exists():
        if not path.is_file():
            raise ConfigError(
                f"There is no configuration file at {path}; give an existing one, or a preset: "
                f"{', '.join(preset_names())}."
            )
        return parse_yaml(path.read_text(encoding="utf-8", errors="replace"), str(path))
    raise ConfigError(
        f"Unknown preset '{source}'; presets are {', '.join(preset_names())}, or give a YAML file."
        + did_you_mean(source, preset_names())
    )


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse YAML without tags that could run code."""
    try:
        raw = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not plain YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must hold sections ({', '.join(SECTIONS)}), got {type(raw).__name__}.")
    return raw


class _Loader(yaml.SafeLoader):
    """Plain YAML, in which a key stands once and 10:30 is text instead of 630."""

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


_TIME = ("tag:yaml.org,2002:str", re.compile(r"[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?$"))
_Loader.yaml_implicit_resolvers = {
    first: [_TIME, *resolvers] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def with_overrides(raw: Mapping[str, Any], overrides: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Set ``section.key`` to values given as text."""
    merged: dict[str, Any] = _copied(raw)
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
    for name, values in raw.items():
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
    return make_config(with_overrides(read_source(source), overrides))


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
    section = SECTIONS[name][0]
    if name == "algo":
        wanted = values.get("name", "ppo")
        if not isinstance(wanted, str) or wanted not in ALGORITHMS:
            problems.append(
                f"algo.name must be one of {sorted(ALGORITHMS)}, got {wanted!r}.{did_you_mean(str(wanted), ALGORITHMS)}"
            )
            return None
        section = ALGORITHMS[wanted][1]
    known = {entry.name: str(entry.type) for entry in fields(section)}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            problems.append(
                f"Unknown field '{name}.{key}'; fields are {', '.join(known)}.{did_you_mean(str(key), known)}"
            )
        elif known[key].startswith(("int", "float")):
            checked[key] = number = _number(value)
            if isinstance(number, bool) or (isinstance(number, float) and not math.isfinite(number)):
                problems.append(f"{name}.{key} must be a finite number, got {value!r}.")
        else:
            checked[key] = value
    try:
        return TypeAdapter(section).validate_python(checked)
    except ValidationError as error:
        problems += [_problem(name, entry) for entry in error.errors()]
        return None


def _number(value: Any) -> Any:
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
    if not parents or (name not in paths and parents[:2] != ["task", "kwargs"]):
        raise ConfigError(f"Unknown option '--{name}'.{did_you_mean(name, paths)} 'apexrl train --help' lists all.")


def _is_plain(value: Any) -> bool:
    """Say whether YAML and checkpoints give a value back as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _copied(raw: Any) -> Any:
    return {key: _copied(value) for key, value in raw.items()} if isinstance(raw, dict) else raw


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _preset_dir() -> Any:
    return resources.files("apexrl") / "presets"
