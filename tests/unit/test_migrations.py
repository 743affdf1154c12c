"""Files of every older version still load, and a change of what is written needs a new version.

``python -m tests.unit.test_migrations`` writes the layout of this version, once its number has been raised.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.versions.make import COMMON, RUNS

from apexrl import migrations, run
from apexrl.agent import Trainer, checkpoint
from apexrl.algorithms import ALGORITHMS, BCConfig, RLOOConfig
from apexrl.cli import main
from apexrl.config import SECTIONS, load_config, make_config, preset_names, read_source
from apexrl.envs import make_env
from apexrl.errors import CheckpointError, ConfigError
from apexrl.loggers import read_json_lines
from apexrl.migrations import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_MIGRATIONS,
    CONFIG_MIGRATIONS,
    CONFIG_VERSION,
    migrated_checkpoint,
    migrated_config,
)
from apexrl.models import RewardScaler
from apexrl.sections import PolicyConfig

VERSIONS = Path(__file__).parents[1] / "versions"
STORED = sorted(path.name for path in VERSIONS.iterdir() if (path / "config.yaml").is_file())
OTHER_TASK = ("1-a313001-roa",)
"""Of a task that moves otherwise since."""
REWARDS_SCALED_ONCE = ("1-e3db4c4-ppo", "1-fcb44a4-ppo", "4-ppo")
"""By the deviation of returns at the end of a rollout, where each step's own is taken now."""
LAYOUT = VERSIONS / "layout.json"


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(VERSIONS / name, tmp_path / "run"))


# Stored runs


def test_a_run_of_every_checkpoint_format_is_kept() -> None:
    # The layouts of Adam's state that were written as format 1 differ; see the migrations.
    seen = set()
    for name in STORED:
        content = torch.load(VERSIONS / name / "checkpoints" / "iteration_000002.pt", weights_only=True)
        states = [optimizer["state"] for optimizer in migrations._optimizers(content["algorithm"])]
        decay = states[0].get("mean_decay", torch.zeros(()))
        seen.add((content["format"], *sorted(states[0]), decay.dim()))
        assert str(content["format"]) == name.partition("-")[0]
    assert len(seen) >= len(CHECKPOINT_MIGRATIONS) + 1
    assert {entry[0] for entry in seen} >= {1}


@pytest.mark.parametrize("name", STORED)
def test_a_stored_run_is_evaluated(
    name: str, stored: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(stored(name)), "--episodes", "1"]) == 0
    assert "iteration_000002.pt: return" in capsys.readouterr().out


@pytest.mark.parametrize("name", STORED)
def test_a_stored_run_goes_on_as_the_program_that_wrote_it_did(
    name: str, stored: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = stored(name)
    if name in REWARDS_SCALED_ONCE:
        now = RewardScaler._variances
        monkeypatch.setattr(RewardScaler, "_variances", lambda *args: now(*args)[-1:].expand(len(args[1])))
    expected = read_json_lines(run_dir / "metrics.jsonl")
    assert main(["train", "--resume", str(run_dir), "--features.save_plot", "false"]) == 0
    found = read_json_lines(run_dir / "metrics.jsonl")
    assert [line["iteration"] for line in found] == [line["iteration"] for line in expected]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["version"] == CONFIG_VERSION
    if name in OTHER_TASK:
        return
    for line, old in zip(found[2:], expected[2:], strict=True):
        compared = [key for key in old if key in line and key.startswith(("train/", "rollout/"))]
        assert len(compared) >= 6
        # Other versions round otherwise.
        assert {key: line[key] for key in compared} == pytest.approx(
            {key: old[key] for key in compared}, rel=1e-3, abs=1e-5
        )


def test_the_moments_of_the_first_layout_are_kept() -> None:
    path = VERSIONS / "1-fcb44a4-ppo" / "checkpoints" / "iteration_000002.pt"
    old = torch.load(path, weights_only=True)["algorithm"]["optimizer"]["state"]
    new = checkpoint.load(path)["algorithm"]["optimizer"]["state"]
    assert set(new) == {"mean", "square", "mean_decay", "square_decay"}
    assert torch.equal(new["mean"], old["exp_avg"])
    assert torch.equal(new["square"], old["exp_avg_sq"])
    # Two iterations of two epochs of two minibatches are 8 steps.
    torch.testing.assert_close(new["mean_decay"], torch.tensor([0.9**8], dtype=torch.float64))
    torch.testing.assert_close(new["square_decay"], torch.tensor([0.999**8], dtype=torch.float64))


# Numbers


def test_a_configuration_of_a_newer_version_gets_one_message(
    stored: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = stored(STORED[0])
    path = run_dir / "config.yaml"
    path.write_text(f"version: 99\n{path.read_text()}\nbrand_new_section: {{}}\n")
    for words in (["train", "--resume", str(run_dir)], ["train", str(path)]):
        assert main(words) == 2
        expected = f"version is 99, but this apexrl reads configurations up to version {CONFIG_VERSION}. Update apexrl."
        assert capsys.readouterr().err == f"apexrl: {path}: {expected}\n"


@pytest.mark.parametrize("number", [0, -1, "two", True, 1.5, None])
def test_a_version_that_is_no_number_is_named(number: Any) -> None:
    with pytest.raises(ConfigError, match=rf"version must be a whole number from 1 to \d+, got {number!r}"):
        make_config({"version": number})


@pytest.mark.parametrize(("number", "fix"), [(CHECKPOINT_FORMAT + 1, "Update apexrl"), (0, "Use another one")])
def test_a_checkpoint_of_an_unknown_format_gets_one_message(number: int, fix: str, tmp_path: Path) -> None:
    torch.save({"format": number}, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointError, match=rf"a\.pt has checkpoint format {number}; this version reads formats 1 to .*{fix}\."
    ):
        checkpoint.load(tmp_path / "a.pt")


def test_migrations_run_in_order_from_the_version_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(letter: str) -> migrations.Migration:
        return lambda old: {**old, "policy": {"seen": old.get("policy", {}).get("seen", "") + letter}}

    for kind in ("CONFIG", "CHECKPOINT"):
        monkeypatch.setattr(migrations, f"{kind}_MIGRATIONS", (step("a"), step("b"), step("c")))
    monkeypatch.setattr(migrations, "CONFIG_VERSION", 4)
    monkeypatch.setattr(migrations, "CHECKPOINT_FORMAT", 4)
    assert migrated_config({})["policy"] == {"seen": "abc"}
    assert migrated_config({"version": 3})["policy"] == {"seen": "c"}
    assert "policy" not in migrated_config({"version": 4})
    assert migrated_checkpoint({"format": 2}, "it") == {"format": 4, "policy": {"seen": "bc"}}


def test_every_migration_says_what_changed() -> None:
    for number, migrate in enumerate(CONFIG_MIGRATIONS, 2):
        assert migrate.__name__ == f"_config_{number}"
    for number, migrate in enumerate(CHECKPOINT_MIGRATIONS, 2):
        assert migrate.__name__ == f"_checkpoint_{number}"
    assert all(migrate.__doc__ for migrate in (*CONFIG_MIGRATIONS, *CHECKPOINT_MIGRATIONS))


def test_an_older_checkpoint_of_rloo_goes_on_with_the_step_size_without_its_warm_up() -> None:
    # Five of ten warm-up steps: half of what the schedule had come to.
    state = {
        "guard": {},
        "num_steps": 5,
        "config": {"warmup_steps": 10},
        "optimizer": {"learning_rate": torch.tensor(1e-4), "state": {}},
    }
    content = migrated_checkpoint({"format": 5, "algorithm": state}, "it")
    assert content["algorithm"]["rate"] == pytest.approx(2e-4)


@pytest.mark.parametrize("name", preset_names())
def test_migrations_leave_alone_what_is_new_already(name: str) -> None:
    plain = load_config(name).to_dict()
    assert {"version": CONFIG_VERSION, **migrated_config({**plain, "version": 1})} == plain
    assert migrated_config(read_source(name)) == read_source(name)


# The layout of what is written


def config_layout() -> dict[str, str]:
    """Every field of every section with its type."""
    every = ((section, cls) for section, classes in SECTIONS.items() for cls in classes)
    return {
        f"{section}.{cls.__name__}.{entry.name}": str(entry.type) for section, cls in every for entry in fields(cls)
    }


def checkpoint_layout(directory: Path) -> dict[str, str]:
    """The keys of checkpoints of several algorithms, and what is there; configurations have their own layout."""
    layout: dict[str, str] = {}
    for name, (preset, *options) in RUNS.items():
        words = [*options, *COMMON]
        overrides = [(key.removeprefix("--"), value) for key, value in zip(words[::2], words[1::2], strict=True)]
        trainer: Trainer = run.start(load_config(preset, overrides), directory / name)
        trainer.learn(1)
        content = trainer._content()
        trainer.close()
        content["config"], content["algorithm"]["config"] = {}, {}
        layout.update({f"{name}{key}": kind for key, kind in sorted(_kinds(content).items())})
    for cfg in (RLOOConfig(kl_coef=0.1, collapse_ratio=0.5), BCConfig()):  # of suites, whose environments have no state
        policy = run.make_policy(PolicyConfig(hidden_dims=(4,)), make_env("lift", 1), torch.device("cpu"), cfg)
        algorithm: Any = ALGORITHMS[cfg.name][0]
        state = {**algorithm(policy=policy, cfg=cfg).state_dict(), "config": {}}
        layout.update({f"{cfg.name}/algorithm{key}": kind for key, kind in sorted(_kinds(state).items())})
    return layout


def _kinds(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        return {k: kind for name, inner in value.items() for k, kind in _kinds(inner, f"{path}/{name}").items()}
    if isinstance(value, torch.Tensor):
        return {path: f"{str(value.dtype).removeprefix('torch.')} with {value.dim()} dimensions"}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _kinds(value[0], f"{path}/0")
    return {path: type(value).__name__}


def test_the_configuration_changes_only_with_its_version() -> None:
    stored = json.loads(LAYOUT.read_text())["config"]
    assert stored == {"version": CONFIG_VERSION, "layout": config_layout()}, (
        "the fields changed: add a migration in migrations.py, then run python -m tests.unit.test_migrations"
    )


def test_the_checkpoint_changes_only_with_its_format(tmp_path: Path) -> None:
    stored = json.loads(LAYOUT.read_text())["checkpoint"]
    assert stored == {"version": CHECKPOINT_FORMAT, "layout": checkpoint_layout(tmp_path)}, (
        "checkpoints changed: keep a run with tests/versions/make.py of the last commit, add a migration in "
        "migrations.py, then run python -m tests.unit.test_migrations"
    )


def write_layout(directory: Path) -> None:
    """Write the layouts of this version; refuses when one changed and its number did not."""
    found = {
        "config": {"version": CONFIG_VERSION, "layout": config_layout()},
        "checkpoint": {"version": CHECKPOINT_FORMAT, "layout": checkpoint_layout(directory)},
    }
    before = json.loads(LAYOUT.read_text()) if LAYOUT.exists() else {}
    for kind, stored in before.items():
        if stored["version"] == found[kind]["version"] and stored != found[kind]:
            raise SystemExit(f"The layout of {kind} changed and its version did not: add a migration first.")
    LAYOUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        write_layout(Path(temporary))
