"""Presets and YAML files as plain values. Imports no PyTorch, so that a wrong name is answered at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from apexrl.core.errors import ConfigError, did_you_mean

SECTIONS = ("task", "policy", "algo", "training", "logging", "features")
DEFAULT_PRESET = "walker_ppo"
MAX_VALUES = 10_000
"""In a configuration, with its anchors filled in: a few lines of YAML can stand for more than any memory holds."""
MAX_BITS = 1024
"""Of an integer; no field takes a larger one, and Python does not write one of any size."""


OTHER_NAMES = {
    "algo.name": "algorithm",
    "algo.learning_rate": "lr learningrate actor_lr policy_lr",
    "algo.num_steps": "n_steps nsteps rollout_steps horizon num_transitions_per_env num_steps_per_env",
    "algo.num_epochs": "n_epochs epochs update_epochs num_learning_epochs",
    "algo.num_minibatches": "num_mini_batches minibatches",
    "algo.gamma": "discount discount_factor",
    "algo.entropy_coef": "ent_coef entropy_loss_coef",
    "algo.value_coef": "vf_coef value_loss_coef",
    "policy.hidden_dims": "net_arch hidden_sizes hidden_layers actor_hidden_dims",
    "task.id": "env env_id env_name task",
    "task.num_envs": "n_envs nenvs",
    "training.total_timesteps": "timesteps steps total_steps max_steps num_timesteps n_timesteps",
    "training.num_train_steps": "iterations max_iterations",
    "training.init_from": "load checkpoint pretrained",
    "training.seed": "random_seed",
    "training.device": "gpu cuda",
    "run-dir": "output log_dir logdir output_dir out",
}
"""Option -> what other libraries call it."""


def nearest_option(name: str, known: Sequence[str]) -> str:
    """Return ``" Did you mean '--x'?"`` for an option that is not known, or an empty string.

    Args:
        name: what was given, without dashes in front.
        known: options, without dashes in front.
    """
    last = name.rpartition(".")[2].replace("-", "_").lower()
    found = [option for option, others in OTHER_NAMES.items() if last in others.split()]
    found += [option for option in known if option.rpartition(".")[2] == last]
    return did_you_mean(f"--{found[0]}" if found else f"--{name}", [f"--{option}" for option in [*found[:1], *known]])


def preset_names() -> list[str]:
    """Return the names of the presets that ship."""
    return sorted(Path(entry.name).stem for entry in preset_dir().iterdir() if entry.name.endswith(".yaml"))


def preset_summary(name: str) -> str:
    """Return the first line of a preset, a comment that says what it is."""
    return (preset_dir() / f"{name}.yaml").read_text().splitlines()[0].lstrip("# ")


def require_source(source: str) -> None:
    """Refuse a name that is neither a preset nor a file."""
    if source in preset_names():
        return
    path = Path(source)
    if not (path.suffix in (".yaml", ".yml") or path.exists()):
        raise ConfigError(
            f"Unknown preset '{source}'; presets are {', '.join(preset_names())}, or give a YAML file."
            + did_you_mean(source, preset_names())
        )
    if not path.is_file():
        raise ConfigError(f"There is no configuration file at {path}; presets are {', '.join(preset_names())}.")


def read_source(source: str) -> dict[str, Any]:
    """Read a preset by name, or a YAML file by path."""
    require_source(source)
    path = preset_dir() / f"{source}.yaml" if source in preset_names() else Path(source)
    raw = read_config(path, source)
    if is_recipe(raw):
        raise ConfigError(
            f"{path} describes a run that was started in Python; run its script again, or resume it with: "
            f"apexrl train --resume {path.parent}"
        )
    return raw


def is_recipe(raw: Mapping[str, Any]) -> bool:
    """Whether sections are of the ``config.yaml`` of a run that was started in Python (``agent.recipe``)."""
    return "algorithm" in raw


def read_config(path: Path, where: str = "") -> dict[str, Any]:
    """Read the sections of a YAML file; ``where`` is what messages call it."""
    return parse_yaml(path.read_text(encoding="utf-8", errors="replace"), where or str(path))


def default_source(overrides: Iterable[tuple[str, str]]) -> tuple[str | None, str]:
    """Return the preset that a run starts from when none is named, or None for the defaults, and a line that says so.

    It is the first preset written for the task that is asked for (with the algorithm that is asked for).
    """
    given = dict(overrides)
    task = next((name for name in ("task.id", "task.benchmark_name") if name in given), None)
    if task is None:
        return DEFAULT_PRESET, f"Starting from the preset {DEFAULT_PRESET}, the default."
    for preset in preset_names():
        raw = read_source(preset)
        of_algorithm = given.get("algo.name", raw["algo"]["name"]) == raw["algo"]["name"]
        if of_algorithm and raw["task"].get(task.removeprefix("task.")) == given[task]:
            return preset, f"Starting from the preset {preset}, which is for {task} {given[task]}."
    algo = given.get("algo.name", "ppo")
    return None, f"No preset is for {task} {given[task]} with {algo}: starting from the defaults of {algo}."


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse YAML without tags that could run code."""
    try:
        raw = yaml.load(text, PlainLoader)
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


class PlainLoader(yaml.SafeLoader):
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
PlainLoader.add_constructor("tag:yaml.org,2002:int", PlainLoader.construct_number)
PlainLoader.yaml_implicit_resolvers = {
    first: [_TIME, *resolvers] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def preset_dir() -> Path:
    """Return where the files are that ship."""
    return Path(str(resources.files("apexrl.run"))) / "presets"
