"""A new run that starts from the weights of another: each phase of PPO-ROA alone, and what goes wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from apexrl.agent import checkpoint
from apexrl.cli.main import main
from apexrl.core.system.files import read_json_lines
from apexrl.run.directory import start
from apexrl.run.loading import load_config

TINY = {
    "task.num_envs": "4",
    "policy.hidden_dims": "[8]",
    "policy.encoder_dims": "[8]",
    "policy.adapt_dims": "[8]",
    "algo.num_steps": "8",
    "algo.num_epochs": "1",
    "training.total_timesteps": "64",
    "training.save_interval": "0",
    "training.eval_interval": "0",
    "training.final_eval_episodes": "0",
    "training.device": "cpu",
    "features.save_video": "false",
    "features.save_plot": "false",
}


def train(run_dir: Path, **options: str) -> int:
    named = {**TINY, **{name.replace("__", "."): value for name, value in options.items()}}
    words = [word for name, value in named.items() for word in (f"--{name}", value)]
    return main(["train", "payload_roa", "--run-dir", str(run_dir), *words])


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    policy: dict[str, torch.Tensor] = checkpoint.load(checkpoint.latest(run_dir / "checkpoints"))["policy"]
    return policy


def modules_that_differ(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name.split(".")[0] for name, value in one.items() if not torch.equal(value, other[name])}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of phase train alone. Not to be changed."""
    run_dir = tmp_path_factory.mktemp("init_from") / "teacher"
    assert train(run_dir, algo__phase="train") == 0
    return run_dir


def test_the_train_phase_alone_never_lets_the_student_act(teacher: Path) -> None:
    content = checkpoint.load(checkpoint.latest(teacher / "checkpoints"))
    assert content["algorithm"]["phase"] == "train"
    assert all("train/imitation_loss" in line for line in read_json_lines(teacher / "metrics.jsonl"))


def test_finetune_alone_starts_from_a_teacher(teacher: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "student"
    assert train(run_dir, algo__phase="finetune", training__init_from=str(teacher)) == 0
    content = checkpoint.load(checkpoint.latest(run_dir / "checkpoints"))
    assert (content["algorithm"]["phase"], content["iteration"]) == ("finetune", 2)
    assert modules_that_differ(weights(teacher), weights(run_dir)) == {
        "actor_adapt", "adapt_module", "adapt_ema", "critic",
    }  # fmt: skip
    assert all("train/imitation_loss" not in line for line in read_json_lines(run_dir / "metrics.jsonl"))


def test_the_first_weights_are_those_of_the_checkpoint(teacher: Path, tmp_path: Path) -> None:
    file = checkpoint.latest(teacher / "checkpoints")
    for phase, source in (("train", teacher), ("train", file), ("finetune", teacher / "checkpoints")):
        overrides = [*TINY.items(), ("algo.phase", phase), ("training.init_from", str(source))]
        trainer = start(load_config("payload_roa", overrides), tmp_path / f"{phase}-{source.name}")
        first = trainer.policy.state_dict()
        trainer.close()
        expected = dict(weights(teacher))
        if phase == "finetune":
            expected["actor_adapt.action_head.log_std"] = expected["actor.action_head.log_std"]
        assert modules_that_differ(expected, first) == set()
        assert (trainer.iteration, trainer.total_steps) == (0, 0)


def test_finetune_without_a_teacher_says_so_once(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "algo.phase finetune without training.init_from: encoder and teacher are untrained"
    assert train(tmp_path / "teacher", algo__phase="train") == 0
    assert train(tmp_path / "student", algo__phase="finetune", training__init_from=str(teacher)) == 0
    assert said not in capsys.readouterr().out
    assert train(tmp_path / "alone", algo__phase="finetune") == 0
    assert capsys.readouterr().out.count(said) == 1
    assert main(["train", "--resume", str(tmp_path / "alone"), "--training.total_timesteps", "96"]) == 0
    assert said not in capsys.readouterr().out


def test_a_teacher_goes_on_from_a_finetuned_run(teacher: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "student", algo__phase="finetune", training__init_from=str(teacher)) == 0
    assert train(tmp_path / "again", algo__phase="train", training__init_from=str(tmp_path / "student")) == 0
    assert checkpoint.load(checkpoint.latest(tmp_path / "again" / "checkpoints"))["algorithm"]["phase"] == "train"


def test_a_resumed_run_goes_on_with_its_own_weights(teacher: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(teacher, tmp_path / "source"))
    options = {"algo__phase": "finetune", "training__init_from": str(source), "training__total_timesteps": "128"}
    assert train(tmp_path / "whole", **options) == 0
    assert train(tmp_path / "short", **{**options, "training__total_timesteps": "64"}) == 0
    shutil.rmtree(source)
    assert main(["train", "--resume", str(tmp_path / "short"), "--training.total_timesteps", "128"]) == 0
    assert modules_that_differ(weights(tmp_path / "whole"), weights(tmp_path / "short")) == set()


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_the_weights_again(
    teacher: Path, tmp_path: Path
) -> None:
    options = {"algo__phase": "finetune", "training__init_from": str(teacher)}
    for name in ("whole", "killed"):
        assert train(tmp_path / name, **options) == 0
    shutil.rmtree(tmp_path / "killed" / "checkpoints")
    assert main(["train", "--resume", str(tmp_path / "killed")]) == 0
    assert modules_that_differ(weights(tmp_path / "whole"), weights(tmp_path / "killed")) == set()


# Mistakes


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere", {}, "There is no checkpoint at nowhere."),
        ("empty", {}, "empty is not a run directory"),
        ("x" * 300, {}, "xxx cannot be read: File name too long."),
        ("notes.pt", {}, "notes.pt is not a readable checkpoint"),
        ("teacher", {"policy__hidden_dims": "[9]"}, "is [8, 106] in the checkpoint and [9, 106] here"),
        ("teacher", {"policy__normalize_obs": "true"}, "'normalizer.normalizers.command.mean' is missing"),
    ],
)
def test_weights_that_cannot_be_used_are_refused_with_one_message(
    source: str,
    options: dict[str, str],
    message: str,
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.pt").write_text("not a checkpoint")
    place = str(teacher) if source == "teacher" else source
    capsys.readouterr()
    assert train(tmp_path / "run", training__init_from=place, **options) == 2
    said = capsys.readouterr().err
    assert said.startswith("apexrl: training.init_from: ")
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_the_source_cannot_change_at_a_resume(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(teacher, tmp_path / "run"))
    assert main(["train", "--resume", str(run_dir), "--training.init_from", "elsewhere"]) == 2
    assert "'--training.init_from elsewhere' cannot change" in capsys.readouterr().err
