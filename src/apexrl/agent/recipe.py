"""How the policy of a checkpoint is created again: classes by name, and options as plain values.

A checkpoint names classes but never brings code along. Those of this package and those that this process knows are
created from a name; the module of any other is imported only when the user allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
from torch import nn

from apexrl.agent import checkpoint
from apexrl.agent.schedule import TrainingConfig
from apexrl.algorithms import ALGORITHMS, BaseAlgorithm
from apexrl.core.errors import CheckpointError, ConfigError
from apexrl.core.plugins import load_reference, require_trust
from apexrl.core.spaces import space_from_plain, space_to_plain
from apexrl.core.system.acceleration import Acceleration
from apexrl.envs import VecEnv
from apexrl.policies import Policy
from apexrl.policies.base import HasSpaces
from apexrl.policies.config import POLICIES
from apexrl.policies.networks import MLPActor, MLPCritic, QEnsemble

RECIPE = "recipe"
"""Key of a checkpoint: how its policy was created."""
SPACES = "spaces"
"""Key of a checkpoint: what its policy was created for."""
CLASS = "class"
"""The only key of a mapping that stands for a class, or for a value that is not plain."""
OWN_CLASSES: dict[str, type] = {
    **{cls.__name__: cls for cls in ALGORITHMS.values()},
    **{policy.__name__: policy for cls in ALGORITHMS.values() for policy in cls.policies.values()},
    **{cls.__name__: cls for cls in (MLPActor, MLPCritic, QEnsemble)},
}
"""What may be created from a name in a file: a class of this package by its name, others as ``module:Class``."""


@dataclass
class Spaces:
    """What a policy is created for, in the place of an environment."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    chunk: int
    """Control steps that one action holds."""


def write_recipe(
    env: VecEnv,
    algorithm: BaseAlgorithm,
    training: TrainingConfig,
    logging: Mapping[str, Any],
    save_step_csv: bool,
) -> dict[str, Any]:
    """Return what a ``Recipe`` needs, as plain values; classes of others are there by name."""
    task, cfg = env.made_from, getattr(algorithm, "cfg", None)
    acceleration = getattr(algorithm, "acceleration", None) or Acceleration()
    is_own = OWN_CLASSES.get(type(algorithm).__name__) is type(algorithm)
    return {
        "env": type(getattr(env, "simulator", env)).__name__,
        "task": None if task is None else {**_by_name(task), "num_envs": env.num_envs},
        "algorithm": _by_name(type(algorithm)),
        "algo": _by_name({**asdict(cfg), **({} if is_own else {"name": _reference(type(algorithm))})}) if cfg else {},
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


def write_spaces(env: VecEnv) -> dict[str, Any]:
    """Return the spaces of an environment as plain values."""
    spaces = {"observation": space_to_plain(env.observation_space), "action": space_to_plain(env.action_space)}
    return {**spaces, "chunk": env.chunk}


@dataclass(frozen=True)
class Recipe:
    """What ``write_recipe`` returned, read from a file; its methods raise a CheckpointError where it does not fit."""

    stored: Mapping[str, Any]
    path: Path

    def make_policy(self, env: HasSpaces) -> Policy:
        """Create the policy for an environment's spaces; its weights are not those of the checkpoint yet."""
        with _naming(RECIPE, self.path):
            if self.stored["options"] is None:
                raise CheckpointError(f"{self.path} has a policy that for_env did not create: {in_python(self.path)}")
            options = {str(name): self._by_class(value, str(name)) for name, value in self.stored["options"].items()}
            policy: Policy = self._by_class(self.stored["policy"], "policy").for_env(env, **options)
            return policy

    def sections(self) -> dict[str, Any]:
        """Return the sections of a configuration; of its policy only the kind."""
        stored, path = self.stored, self.path
        with _naming(RECIPE, path):
            if stored["task"] is None:
                raise CheckpointError(
                    f"{path} was trained on an environment ({stored['env']}) that make_env did not create, so it "
                    f"cannot be created by its name: {in_python(path)}"
                )
            algorithm, policy_class = (self._by_class(stored[name], name) for name in ("algorithm", "policy"))
            kinds = [kind for kind, policy in algorithm.policies.items() if policy is policy_class]
            sections = {name: dict(stored[name]) for name in ("task", "algo", "training")}
            sections |= {name: dict(stored[name]) for name in ("logging", "features") if name in stored}
            assert isinstance(sections["task"]["id"], str)
            return {**sections, "policy": {"kind": kinds[0] if kinds else stored["policy"][CLASS]}}

    def _by_class(self, value: Any, name: str) -> Any:
        """Replace names by classes."""
        if isinstance(value, list):
            return [self._by_class(inner, name) for inner in value]
        if not isinstance(value, Mapping):
            return value
        if set(value) != {CLASS}:
            return {str(key): self._by_class(inner, f"{name}.{key}") for key, inner in value.items()}
        wanted = value[CLASS]
        registered: Iterable[type] = (*ALGORITHMS.values(), *POLICIES.values())
        known = {**{_reference(cls): cls for cls in registered}, **OWN_CLASSES}
        if wanted in known:
            return known[wanted]
        try:
            require_trust(wanted, name)
            cls = load_reference(wanted)
        except ConfigError as error:
            raise CheckpointError(f"{self.path} cannot be loaded: {error} Or {in_python(self.path)}") from error
        if not (isinstance(cls, type) and issubclass(cls, nn.Module | BaseAlgorithm)):
            raise CheckpointError(f"{self.path} was saved with {name} '{wanted}', which is no network or algorithm.")
        return cls


def read_recipe(content: Mapping[str, Any], path: Path) -> Recipe:
    """Return the recipe in a checkpoint."""
    if not isinstance(content.get(RECIPE), Mapping):
        raise CheckpointError(f"{path} does not say how its policy was created: {in_python(path)}")
    return Recipe(content[RECIPE], path)


def read_policy(content: Mapping[str, Any], path: Path) -> tuple[Policy, Spaces]:
    """Create the policy of a checkpoint, with its weights, from the spaces that were stored; no environment is needed.

    Raises:
        CheckpointError: when it names what this package does not have, with how to load it in Python.
    """
    recipe = read_recipe(content, path)
    with _naming(SPACES, path):
        stored = content[SPACES]
        observations, actions = (space_from_plain(stored[name]) for name in ("observation", "action"))
        spaces = Spaces(observations, actions, int(stored["chunk"]))
    policy = recipe.make_policy(spaces)
    checkpoint.load_module(policy, content["policy"], path)
    return policy.eval(), spaces


@contextmanager
def _naming(part: str, path: Path) -> Iterator[None]:
    """Name the file where a part of it is not what was written."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{path} cannot be used: its '{part}' does not fit ({error!r}).") from error


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
    return {CLASS: cls.__name__ if is_own else _reference(cls)}


def _reference(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
