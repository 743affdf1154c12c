"""Files of older versions become files of this one: for each kind of file an ordered list of small functions.

The first function turns version 1 into 2, the second 2 into 3, and so on; its docstring says what changed. A function
leaves alone what is new already: the number of a configuration may be left out, and checkpoints stood at 1 until 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from apexrl.errors import CheckpointError, ConfigError

Migration = Callable[[dict[str, Any]], dict[str, Any]]
VERSION = "version"
"""Key of a configuration's version; a file without it is of version 1, or has nothing that changed since."""


def _config_2(config: dict[str, Any]) -> dict[str, Any]:
    """Configurations carry a number. Until then fields were only added: one that is missing takes its default."""
    return config


def _config_3(config: dict[str, Any]) -> dict[str, Any]:
    """RLOO has imitation_coef and imitation_batch_size; without them it reads no demonstrations."""
    return config


def _config_4(config: dict[str, Any]) -> dict[str, Any]:
    """Flow heads have noise; without it every step of their sampler is noisy."""
    return config


def _config_5(config: dict[str, Any]) -> dict[str, Any]:
    """BC has picture_shift, and SAC uniform_start, by default true: a new run of an older file acts at random first."""
    return config


def _config_6(config: dict[str, Any]) -> dict[str, Any]:
    """Fields were added; where a file does not have one, its default applies."""
    return config


def _checkpoint_2(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Adam's moments are called mean and square, its step count steps; they had PyTorch's names."""
    names = {"exp_avg": "mean", "exp_avg_sq": "square", "step": "steps"}
    for optimizer in _optimizers(checkpoint.get("algorithm")):
        optimizer["state"] = {names.get(name, name): value for name, value in optimizer["state"].items()}
    return checkpoint


def _checkpoint_3(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Adam keeps β₁ᵗ and β₂ᵗ, mean_decay and square_decay, instead of the steps t."""
    for optimizer in _optimizers(checkpoint.get("algorithm")):
        state = optimizer["state"]
        if "steps" in state:
            steps = state.pop("steps").double()
            state["mean_decay"], state["square_decay"] = 0.9**steps, 0.999**steps
    return checkpoint


def _checkpoint_4(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Adam's decays have one dimension, of length 1, instead of none; RLOO counts its optimizer steps."""
    for optimizer in _optimizers(checkpoint.get("algorithm")):
        state = optimizer["state"]
        state.update({name: state[name].reshape(1) for name in ("mean_decay", "square_decay") if name in state})
    algorithm = checkpoint.get("algorithm")
    if isinstance(algorithm, dict) and "guard" in algorithm:
        algorithm.setdefault("num_steps", 0)
    return checkpoint


def _checkpoint_5(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """SAC's policy knows whether it acts uniformly, which older ones never did."""
    policy = checkpoint.get("policy")
    if isinstance(policy, dict) and any(str(name).startswith("target_critics.") for name in policy):
        policy.setdefault("acts_uniformly", torch.tensor(False))
    return checkpoint


def _checkpoint_6(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """RLOO stores where its schedule stands; until then that was in the step size alone, times the warm-up.

    Optimizer steps are counted; how many an older run took is not known. SAC's importance exponent rises over training;
    an older run keeps its own.
    """
    algorithm = checkpoint.get("algorithm")
    if isinstance(algorithm, dict) and "log_temperature" in algorithm and "final_importance" not in algorithm:
        exponent = algorithm["config"].get("importance_exponent", 0.4)
        algorithm["importance_exponent"] = torch.tensor(exponent, dtype=torch.float64)
        algorithm["final_importance"] = exponent
    if isinstance(algorithm, dict) and "guard" in algorithm and "rate" not in algorithm:
        steps, warmup = algorithm["num_steps"], algorithm["config"].get("warmup_steps", 0)
        warm = min(1.0, steps / warmup) if steps and warmup else 1.0
        algorithm["rate"] = float(algorithm["optimizer"]["learning_rate"]) / warm
    checkpoint.setdefault("optimizer_steps", None)
    return checkpoint


CONFIG_MIGRATIONS: tuple[Migration, ...] = (_config_2, _config_3, _config_4, _config_5, _config_6)
CHECKPOINT_MIGRATIONS: tuple[Migration, ...] = (
    _checkpoint_2,
    _checkpoint_3,
    _checkpoint_4,
    _checkpoint_5,
    _checkpoint_6,
)
CONFIG_VERSION = 1 + len(CONFIG_MIGRATIONS)
CHECKPOINT_FORMAT = 1 + len(CHECKPOINT_MIGRATIONS)


def migrated_config(raw: Mapping[str, Any], where: str = "This configuration") -> dict[str, Any]:
    """Return the sections of a configuration of any version as this version has them, without the number.

    Args:
        raw: plain values, which stay as they are.
        where: what a message calls it.

    Raises:
        ConfigError: when the number is of a newer version, or none.
    """
    number = raw.get(VERSION, 1)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(
            f"{where}: {VERSION} must be a whole number from 1 to {CONFIG_VERSION}, got {number!r}; leave the line out "
            "of a file that you write yourself."
        )
    if number > CONFIG_VERSION:
        raise ConfigError(
            f"{where}: {VERSION} is {number}, but this apexrl reads configurations up to version {CONFIG_VERSION}. "
            "Update apexrl."
        )
    config = {name: dict(values) if isinstance(values, dict) else values for name, values in raw.items()}
    config.pop(VERSION, None)
    for migrate in CONFIG_MIGRATIONS[number - 1 :]:
        config = migrate(config)
    return config


def migrated_checkpoint(content: dict[str, Any], where: object) -> dict[str, Any]:
    """Return the content of a checkpoint of any version as this version has it.

    Args:
        content: as it was read; it may be changed.
        where: what a message calls it.

    Raises:
        CheckpointError: when it has no number, or a newer one.
    """
    number = content.get("format")
    if isinstance(number, bool) or not isinstance(number, int):
        raise CheckpointError(f"{where} was not written by apexrl: it has no format number.")
    if not 1 <= number <= CHECKPOINT_FORMAT:
        fix = "Update apexrl." if number > CHECKPOINT_FORMAT else "Use another one."
        raise CheckpointError(
            f"{where} has checkpoint format {number}; this version reads formats 1 to {CHECKPOINT_FORMAT}. {fix}"
        )
    for migrate in CHECKPOINT_MIGRATIONS[number - 1 :]:
        content = migrate(content)
    return {**content, "format": CHECKPOINT_FORMAT}


def _optimizers(state: Any) -> Iterator[dict[str, Any]]:
    """Find the states of optimizers, wherever an algorithm keeps them."""
    if not isinstance(state, dict):
        return
    inner = state.get("state")
    if "learning_rate" in state and isinstance(inner, dict):
        if all(isinstance(value, torch.Tensor) for value in inner.values()):
            yield state
        return
    for value in state.values():
        yield from _optimizers(value)
