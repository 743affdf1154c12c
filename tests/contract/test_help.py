"""Defaults and help: what a run starts from, which options there are, and what a wrong one is answered with."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.doc_files import write_files

import apexrl
from apexrl.cli.help import COMMON
from apexrl.cli.main import main
from apexrl.core.validation import field_help
from apexrl.run import directory as run
from apexrl.run.config import Config
from apexrl.run.sources import DEFAULT_PRESET, default_source, preset_names


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, str]]:
    """What ``apexrl train`` would start: configuration and name of the directory."""
    found: list[tuple[Config, str]] = []

    def start(config: Config, *_: object, name: str) -> None:
        found.append((config, name))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "start", start)
    return found


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, f"apexrl {apexrl.__version__}\n")


# What a run starts from


@pytest.mark.parametrize(
    ("overrides", "preset"),
    [
        ({}, DEFAULT_PRESET),
        ({"algo.gamma": "0.9"}, DEFAULT_PRESET),
        ({"task.id": "Hopper-v5"}, "hopper_ppo"),
        ({"task.id": "HalfCheetah-v5"}, "halfcheetah_ppo"),
        ({"task.id": "HalfCheetah-v5", "algo.name": "sac"}, "halfcheetah_sac"),
        ({"task.id": "Pendulum-v1", "algo.name": "ppo"}, None),
        ({"task.id": "Acrobot-v1"}, None),
        ({"task.benchmark_name": "mt10", "algo.name": "rloo"}, "mt10_rloo"),
    ],
)
def test_a_run_starts_from_the_preset_of_its_task_or_from_the_defaults(
    overrides: dict[str, str], preset: str | None
) -> None:
    source, note = default_source(overrides.items())
    assert source == preset
    assert (preset or "defaults") in note
    assert "\n" not in note


def test_the_first_line_says_what_a_run_starts_from(
    started: list[tuple[Config, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--task.id", "Hopper-v5", "--algo.gamma", "0.9"]) == 130
    assert main(["train", "--task.id", "ALE/Pong", "--algo.name", "sac"]) == 130
    (hopper, hopper_name), (pong, pong_name) = started
    assert (hopper.task.num_envs, hopper.algo.num_steps, hopper.algo.gamma) == (1, 2048, 0.9)  # type: ignore[attr-defined]
    assert pong == apexrl.load_config(None, [("task.id", "ALE/Pong"), ("algo.name", "sac")])
    assert (hopper_name, pong_name) == ("hopper_ppo", "ALE-Pong")
    first, second = (line for line in capsys.readouterr().out.splitlines() if line)
    assert "hopper_ppo" in first
    assert "ALE/Pong" in second
    assert "defaults of sac" in second


# Help


@pytest.mark.parametrize("preset", preset_names())
def test_the_help_of_a_preset_is_short_and_has_what_the_preset_sets(
    preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", preset, "--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 60
    config = apexrl.load_config(preset).to_dict()
    for section, fields in apexrl.run.sources.read_source(preset).items():
        for name in fields:
            value = config[section][name]
            if isinstance(value, int | str) and not isinstance(value, bool):
                assert re.search(rf"--{section}\.{name} {value} ", shown), name
    for name in ("task.num_workers", "policy.min_std", "training.keep_checkpoints"):
        assert f"--{name} " not in shown


def test_the_help_has_types_choices_and_the_values_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "lift_ppo", "--algo.max_grad_norm", "0.7", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()

    def line(option: str) -> str:
        return next(each for each in lines if each.startswith(f"  --{option} "))

    assert "integer" in line("task.num_envs 256")
    assert "one of fixed, linear, adaptive" in line("algo.schedule linear")
    assert "ppo, ppo_roa, sac" in line("algo.name ppo")
    assert "integer" in line("training.seed 0")
    assert line("algo.max_grad_norm 0.7")
    assert "a list of integers" in line('policy.hidden_dims "[64, 64]"')


@pytest.mark.parametrize("preset", ["lift_ppo", "halfcheetah_sac"])
def test_the_common_options_say_their_usual_range(preset: str) -> None:
    config = apexrl.load_config(preset)
    for section, name in (path.split(".") for path in COMMON.split()):
        own = getattr(config, section)
        texts = field_help(type(own))
        if name in texts and name != "seed" and isinstance(getattr(own, name), int | float | tuple):
            assert "usually" in texts[name], name


# What a wrong option is answered with


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--lr", "0.1"], "--algo.learning_rate"),
        (["--lr=0.1"], "--algo.learning_rate"),
        (["lift_ppo", "--algo.lr", "0.1"], "--algo.learning_rate"),
        (["--seed", "3"], "--training.seed"),
        (["--total_timesteps", "3"], "--training.total_timesteps"),
        (["--timesteps", "3"], "--training.total_timesteps"),
        (["--n-envs", "3"], "--task.num_envs"),
        (["--num-envs", "3"], "--task.num_envs"),
        (["--gamma", "0.9"], "--algo.gamma"),
        (["--env", "lift"], "--task.id"),
        (["--device", "cpu"], "--training.device"),
        (["--net_arch", "[64]"], "--policy.hidden_dims"),
        (["--ent_coef", "0"], "--algo.entropy_coef"),
        (["--run-dri", "x"], "--run-dir"),
    ],
)
def test_an_option_of_another_library_gets_our_name(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(["train", *words], capsys)
    assert "Unknown option" in said
    assert f"Did you mean '{option}'?" in said


@pytest.mark.parametrize("words", [["[64,", "64]"], ["[64", ",", "64]"]])
def test_a_list_that_the_shell_has_split_is_to_be_quoted(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(["train", "lift_ppo", "--policy.hidden_dims", *words, "--algo.gamma", "0.9"], capsys)
    assert "quote it" in said
    assert f'--policy.hidden_dims "{" ".join(words)}"' in said


def test_a_wrong_preset_is_answered_without_pytorch(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import sys; from apexrl.cli import main; code = main(['train', 'nosuch']); assert 'torch' not in sys.modules; "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert "'nosuch'" in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 0.5


# Resuming


def test_a_finished_run_says_so_and_how_to_extend_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(tmp_path / "run")
    options = {
        "task.num_envs": "2", "algo.num_steps": "4", "algo.num_minibatches": "1", "algo.num_epochs": "1",
        "training.total_timesteps": "16", "training.final_eval_episodes": "0", "training.eval_interval": "0",
        "features.save_video": "false", "features.save_plot": "false", "features.compile": "false",
        "training.device": "cpu", "logging.tensorboard": "false",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items()]
    assert main(["train", "cartpole_ppo", *words, "--run-dir", run_dir]) == 0
    assert "is finished" not in capsys.readouterr().out
    assert main(["train", "--resume", run_dir]) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if "is finished" in line)
    command = said.partition("apexrl ")[2].split()
    assert command == ["train", "--resume", run_dir, "--training.total_timesteps", "32"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "is finished" not in shown
    assert "steps 32" in shown
    said = error_of(["train", "--resume", run_dir, "--algo.learning_rate", "0.1"], capsys)
    assert "--training.init_from" in said
    assert "--algo.learning_rate 0.1" in said


@pytest.mark.parametrize(
    ("words", "said", "not_said"),
    [
        (["--policy.hidden_dims", "[64,64"], '"[64,64]"', "shell"),
        (["--policy.hidden_dims", "[64,", "64]"], '"[64, 64]"', "closing"),
        (["--policy.hidden_dims", "64,64"], '"[64, 64]"', "shell"),
        (["--nosuch", "3"], "--help-all", "--jobs"),
    ],
    ids=str,
)
def test_a_wrong_value_or_option_is_answered_with_what_to_write(
    words: list[str], said: str, not_said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(["train", *words], capsys)
    assert said in error
    assert not_said not in error


def test_the_help_of_an_algorithm_of_a_user_has_all_its_fields_with_their_sentences(
    tmp_path: Path,
) -> None:
    write_files(tmp_path)
    call = [
        sys.executable,
        "-m",
        "apexrl.cli",
        "train",
        "--task.id",
        "my_envs:Reach",
        "--algo",
        "my_algos:A2C",
        "--help",
    ]
    shown = subprocess.run(
        call,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(apexrl.__file__).parents[1])},
    )
    assert re.search(r"--algo.max_grad_norm 0.5 +Gradients are scaled down to this norm\. ", shown.stdout)
    assert shown.stdout.rstrip().endswith(
        "'apexrl train --task.id my_envs:Reach --algo my_algos:A2C --help-all' lists all."
    )
