"""Files carry a version, older ones are migrated, and what they hold is removed or renamed only with a new version.

``python -m tests.unit.core.system.test_migrations`` writes the fields of the current version to ``tests/fields.json``.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused

from apexrl.agent import checkpoint
from apexrl.algorithms import ALGORITHMS, BCConfig, RLOOConfig
from apexrl.core.errors import CheckpointError, ConfigError
from apexrl.core.system import migrations
from apexrl.core.system.migrations import (
    CHECKPOINT_FORMAT,
    CONFIG_VERSION,
    FIRST_CHECKPOINT_FORMAT,
    FIRST_CONFIG_VERSION,
    Migration,
    migrated_checkpoint,
    migrated_config,
)
from apexrl.envs import make_env
from apexrl.policies.config import PolicyConfig
from apexrl.run import build
from apexrl.run import directory as run
from apexrl.run.config import CONFIG_SECTIONS, make_config
from apexrl.run.loading import load_config
from apexrl.run.sources import preset_names, read_config

FIELDS = Path(__file__).parents[3] / "fields.json"
SMALL = {"policy.hidden_dims": "[4]", "training.device": "cpu", "features.save_video": "false"}
ON_POLICY = {
    **SMALL, "task.num_envs": "2", "algo.num_steps": "8", "algo.num_minibatches": "2", "training.total_timesteps": "64",
}  # fmt: skip
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "ppo": ("cartpole_ppo", {**ON_POLICY, "policy.normalize_obs": "true", "algo.normalize_reward": "true"}),
    "gru": ("cartpole_ppo", {**ON_POLICY, "policy.kind": "gru", "policy.memory_dim": "4"}),
    "roa": (
        "payload_roa",
        {**ON_POLICY, "policy.adapt_dims": "[4]", "policy.encoder_dims": "[4]", "policy.critic_hidden_dims": "[4]",
         "policy.latent_dim": "2"},
    ),
    "sac": (
        "pendulum_sac",
        {**SMALL, "task.num_envs": "2", "algo.num_steps": "4", "algo.batch_size": "4", "algo.learning_starts": "4",
         "algo.replay_capacity": "32", "algo.save_replay": "true", "training.total_timesteps": "32"},
    ),
}  # fmt: skip
"""Tiny runs whose checkpoints hold everything that checkpoints may hold."""


# Numbers


@pytest.mark.parametrize(
    ("number", "advice"),
    [(CONFIG_VERSION + 1, "Update apexrl"), (FIRST_CONFIG_VERSION - 1, "preset"), (1, "preset"), (0, "preset")],
)
def test_a_configuration_of_an_unsupported_version_is_refused(number: int, advice: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"version: {number}\nunknown_section: {{}}\n")
    with refused(ConfigError, path, "version", number, CONFIG_VERSION, advice):
        read_config(path)


@pytest.mark.parametrize("number", ["two", True, 1.5, None])
def test_a_version_that_is_not_an_integer_is_named(number: Any) -> None:
    with refused(ConfigError, "version", repr(number)):
        make_config({"version": number})


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (CHECKPOINT_FORMAT + 1, "Update apexrl"),
        (FIRST_CHECKPOINT_FORMAT - 1, "new run"),
        (1, "new run"),
        (0, "new run"),
    ],
)
def test_a_checkpoint_of_an_unsupported_format_is_refused(number: int, advice: str, tmp_path: Path) -> None:
    torch.save({"format": number}, tmp_path / "a.pt")
    with refused(CheckpointError, tmp_path / "a.pt", number, CHECKPOINT_FORMAT, advice):
        checkpoint.load(tmp_path / "a.pt")


@pytest.mark.parametrize("name", preset_names())
def test_a_configuration_without_a_version_is_a_current_one(name: str) -> None:
    numbered = load_config(name).to_dict()
    assert numbered["version"] == CONFIG_VERSION
    sections = {section: values for section, values in numbered.items() if section != "version"}
    assert migrated_config(sections) == migrated_config(numbered) == sections


def test_migrations_run_in_order_from_the_version_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(letter: str) -> Migration:
        return lambda old: {**old, "policy": {"seen": old["policy"]["seen"] + letter}}

    migrate_all = tuple(map(append, "abc"))
    for kind, first, current in (
        ("CONFIG", FIRST_CONFIG_VERSION, "CONFIG_VERSION"),
        ("CHECKPOINT", FIRST_CHECKPOINT_FORMAT, "CHECKPOINT_FORMAT"),
    ):
        monkeypatch.setattr(migrations, f"{kind}_MIGRATIONS", migrate_all)
        monkeypatch.setattr(migrations, current, first + 3)
    file = {"policy": {"seen": ""}}
    for steps_behind, seen in ((0, ""), (1, "c"), (2, "bc"), (3, "abc")):
        config = {"version": FIRST_CONFIG_VERSION + 3 - steps_behind, **file}
        assert migrated_config(config) == {"policy": {"seen": seen}}
        content = {"format": FIRST_CHECKPOINT_FORMAT + 3 - steps_behind, **file}
        assert migrated_checkpoint(content, "it") == {
            "format": FIRST_CHECKPOINT_FORMAT + 3,
            "policy": {"seen": seen},
        }
    assert migrated_config(file) == file  # without a number it is current
    for number in (FIRST_CONFIG_VERSION - 1, FIRST_CONFIG_VERSION + 4):
        with refused(ConfigError, number, FIRST_CONFIG_VERSION, FIRST_CONFIG_VERSION + 3):
            migrated_config({"version": number})


def test_a_migrated_configuration_leaves_the_given_one_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(config: dict[str, Any]) -> dict[str, Any]:
        config["algo"]["new"] = config["algo"].pop("old")
        return config

    monkeypatch.setattr(migrations, "CONFIG_MIGRATIONS", (rename,))
    monkeypatch.setattr(migrations, "CONFIG_VERSION", FIRST_CONFIG_VERSION + 1)
    given = {"version": FIRST_CONFIG_VERSION, "algo": {"old": 1}}
    assert migrated_config(given) == {"algo": {"new": 1}}
    assert given == {"version": FIRST_CONFIG_VERSION, "algo": {"old": 1}}


def test_weights_of_the_encoder_penalty_move_to_its_term() -> None:
    old = {"format": 6, "algorithm": {"penalty_weight": 0.5, "phase": "train"}}
    terms = {"encoder_distance": {"weight": 0.5}}
    assert migrated_checkpoint(old, "it")["algorithm"] == {"terms": terms, "phase": "train"}
    old = {"format": 6, "algorithm": {"final_importance": 1.0, "due": 0.0}}
    assert migrated_checkpoint(old, "it")["algorithm"] == {"terms": {}, "due": 0.0}


# Fields


def config_fields() -> set[str]:
    """Every field of every section."""
    every = ((section, cls) for section, classes in CONFIG_SECTIONS.items() for cls in classes)
    return {f"{section}.{cls.__name__}.{entry.name}" for section, cls in every for entry in fields(cls)}


def checkpoint_fields(directory: Path) -> set[str]:
    """Every key of the checkpoints of several algorithms; their configurations are listed by ``config_fields``."""
    found: set[str] = set()
    for name, (preset, options) in RUNS.items():
        trainer = run.start(load_config(preset, options.items()), directory / name)
        trainer.learn(1)
        content = checkpoint.load(trainer.save_checkpoint("fields.pt"))
        trainer.close()
        content["config"], content["algorithm"]["config"] = {}, {}
        found |= {f"{name}{key}" for key in _keys(content)}
    for cfg in (RLOOConfig(kl_coef=0.1, collapse_ratio=0.5), BCConfig()):  # of suites, whose environments have no state
        policy = build.make_policy(PolicyConfig(hidden_dims=(4,)), make_env("lift", 1), torch.device("cpu"), cfg)
        algorithm: Any = ALGORITHMS[cfg.name]
        state = {**algorithm(policy=policy, cfg=cfg).state_dict(), "config": {}}
        found |= {f"{cfg.name}/algorithm{key}" for key in _keys(state)}
    return found


def _keys(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict) and value:
        return {key for name, inner in value.items() for key in _keys(inner, f"{path}/{name}")}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _keys(value[0], f"{path}/0")
    return {path}


def removed(stored: dict[str, Any], version: int, found: set[str]) -> set[str]:
    """Return the fields of ``tests/fields.json`` that files lack although their version is the same."""
    return set(stored["fields"]) - found if stored["version"] == version else set()


def test_removed_fields_are_found_and_added_ones_are_none_of_them() -> None:
    stored = {"version": 6, "fields": ["a", "b"]}
    assert removed(stored, 6, {"a", "b", "c"}) == set()
    assert removed(stored, 6, {"a", "renamed"}) == {"b"}
    assert removed(stored, 7, {"a", "renamed"}) == set()


def test_a_field_of_the_configuration_is_removed_or_renamed_only_with_a_new_version() -> None:
    stored = json.loads(FIELDS.read_text())["config"]
    assert removed(stored, CONFIG_VERSION, config_fields()) == set(), "add a migration to migrations.py"
    assert stored["version"] == CONFIG_VERSION, "run python -m tests.unit.core.system.test_migrations"


def test_a_key_of_checkpoints_is_removed_or_renamed_only_with_a_new_format(tmp_path: Path) -> None:
    stored = json.loads(FIELDS.read_text())["checkpoint"]
    assert removed(stored, CHECKPOINT_FORMAT, checkpoint_fields(tmp_path)) == set(), "add a migration to migrations.py"
    assert stored["version"] == CHECKPOINT_FORMAT, "run python -m tests.unit.core.system.test_migrations"


def write_fields(directory: Path) -> None:
    """Write the fields of the current versions."""
    found = {
        "config": {"version": CONFIG_VERSION, "fields": sorted(config_fields())},
        "checkpoint": {"version": CHECKPOINT_FORMAT, "fields": sorted(checkpoint_fields(directory))},
    }
    FIELDS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        write_fields(Path(temporary))
