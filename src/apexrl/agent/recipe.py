"""How the policy of a checkpoint is created again: classes of this package by name, and options as plain values.

A checkpoint names classes but never brings code along: nothing is imported for a name, and only the classes listed
here are created from one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apexrl.agent.schedule import TrainingConfig
from apexrl.algorithms import ALGORITHMS, BaseAlgorithm
from apexrl.core.errors import CheckpointError
from apexrl.core.system.acceleration import Acceleration
from apexrl.envs import VecEnv
from apexrl.policies import Policy
from apexrl.policies.networks import MLPActor, MLPCritic, QEnsemble

RECIPE = "recipe"
"""Key of a checkpoint that was saved without a whole configuration."""
CLASS = "class"
"""The only key of a mapping that stands for a class, or for a value that is not plain."""
OWN_CLASSES: dict[str, type] = {
    **{cls.__name__: cls for cls in ALGORITHMS.values()},
    **{policy.__name__: policy for cls in ALGORITHMS.values() for policy in cls.policies.values()},
    **{cls.__name__: cls for cls in (MLPActor, MLPCritic, QEnsemble)},
}
"""What may be created from a name in a file."""


@dataclass(frozen=True)
class Recipe:
    """What a policy and its task are created from."""

    config: dict[str, Any]
    """Sections of a configuration; of its policy it only has the kind."""
    policy_class: type[Policy]
    options: dict[str, Any]
    """Of the policy."""

    def make_policy(self, env: VecEnv) -> Policy:
        """Create the policy for an environment's spaces; its weights are not those of the checkpoint yet."""
        return self.policy_class.for_env(env, **self.options)


def write_recipe(
    env: VecEnv,
    algorithm: BaseAlgorithm,
    training: TrainingConfig,
    logging: Mapping[str, Any],
    save_step_csv: bool,
) -> dict[str, Any]:
    """Return what ``read_recipe`` needs, as plain values; classes of others are there by name."""
    task, cfg = env.made_from, getattr(algorithm, "cfg", None)
    acceleration = getattr(algorithm, "acceleration", None) or Acceleration()
    is_own = OWN_CLASSES.get(type(algorithm).__name__) is type(algorithm)
    return {
        "env": type(getattr(env, "simulator", env)).__name__,
        "task": None if task is None else {**_by_name(task), "num_envs": env.num_envs},
        "algorithm": _by_name(type(algorithm)),
        "algo": _by_name(asdict(cfg)) if is_own and cfg is not None else {},
        "training": _by_name(asdict(training)),
        "logging": _by_name(logging),
        "features": {
            "save_step_csv": save_step_csv,
            "cuda_graphs": acceleration.graphs,
            "compile": acceleration.compile,
            "precision": acceleration.precision,
        },
        "policy": _by_name(type(algorithm.policy)),
        "options": _by_name(algorithm.policy.options),
    }


def read_recipe(content: Mapping[str, Any], path: Path) -> Recipe:
    """Return the recipe in a checkpoint.

    Raises:
        CheckpointError: when there is none, or it names what this package does not have, with how to load it in Python.
    """
    stored = content.get(RECIPE)
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"{path} does not say how its policy was created: {in_python(path)}")
    try:
        if stored["task"] is None:
            raise CheckpointError(
                f"{path} was trained on an environment ({stored['env']}) that make_env did not create, so it cannot be "
                f"created by its name: {in_python(path)}"
            )
        if ":" in stored["task"]["id"]:  # Gymnasium would import what stands before it
            raise CheckpointError(
                f"{path} was trained on '{stored['task']['id']}', whose module is not imported for a name in a file: "
                f"{in_python(path)}"
            )
        if stored["options"] is None:
            raise CheckpointError(f"{path} has a policy that for_env did not create: {in_python(path)}")
        algorithm = _by_class(stored["algorithm"], "algorithm", path)
        policy_class = _by_class(stored["policy"], "policy", path)
        kinds = [kind for kind, policy in algorithm.policies.items() if policy is policy_class]
        sections = {name: stored[name] for name in ("task", "algo", "training")}
        sections |= {name: stored[name] for name in ("logging", "features") if name in stored}
        options = {str(name): _by_class(value, str(name), path) for name, value in stored["options"].items()}
        return Recipe({**sections, "policy": {"kind": kinds[0]}}, policy_class, options)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} cannot be used: its '{RECIPE}' does not fit ({error!r}).") from error


def in_python(path: Path) -> str:
    """Say how to load a checkpoint that the command line cannot."""
    return (
        "load it in Python. Create the OnPolicyRunner or Trainer as for training, then call "
        f"load_checkpoint({str(path.absolute())!r})."
    )


def _by_name(value: Any) -> Any:
    """Replace tuples by lists, and whatever is not plain by the name of its class."""
    if isinstance(value, Mapping):
        return {str(key): _by_name(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_by_name(inner) for inner in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    cls = value if isinstance(value, type) else type(value)
    is_own = isinstance(value, type) and OWN_CLASSES.get(cls.__name__) is cls
    return {CLASS: cls.__name__ if is_own else f"{cls.__module__}.{cls.__qualname__}"}


def _by_class(value: Any, name: str, path: Path) -> Any:
    """Replace names by classes of this package."""
    if isinstance(value, list):
        return [_by_class(inner, name, path) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) != {CLASS}:
        return {str(key): _by_class(inner, f"{name}.{key}", path) for key, inner in value.items()}
    if value[CLASS] not in OWN_CLASSES:
        raise CheckpointError(
            f"{path} was saved with {name} '{value[CLASS]}', which is not of this package and is not imported for a "
            f"name in a file: {in_python(path)}"
        )
    return OWN_CLASSES[value[CLASS]]
