"""What users bring along: names are found, modules that only files name are not imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.refusals import refused

from apexrl.algorithms import ALGORITHMS
from apexrl.cli import main
from apexrl.core import plugins
from apexrl.core.errors import ConfigError
from apexrl.envs.tasks import TASKS
from apexrl.policies.config import POLICIES

SMALL = ["--task.num_envs", "2", "--training.total_timesteps", "64", "--training.final_eval_episodes", "2"]
SMALL += ["--features.save_video", "false", "--features.save_plot", "false", "--logging.tensorboard", "false"]
EVIL = "from pathlib import Path\nPath('was_imported').touch()\n"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty directory, and a process in which nothing was imported or registered yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_trust", plugins.Trust())
    registries: list[Any] = [TASKS, ALGORITHMS, POLICIES]
    before, modules = [dict(registry) for registry in registries], set(sys.modules)
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


def message(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that is refused."""
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("apexrl: ")
    assert error.count("\n") == 1
    return error


NAMED: list[dict[str, Any]] = [
    {"task": {"id": "evil:Reach"}},
    {"task": {"id": "isaaclab/evil:Reach"}},
    {"algo": {"name": "evil:A2C"}},
    {"policy": {"kind": "evil:Actor"}},
    {"import": ["evil"]},
]


@pytest.mark.parametrize("config", NAMED, ids=str)
def test_a_module_that_a_file_names_is_not_imported(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write("evil.py", EVIL)
    write("foreign.yaml", yaml.safe_dump(config))
    said = message(capsys, "train", "foreign.yaml", *SMALL, "--run-dir", "run")
    assert "evil" in said
    assert "--allow-imports" in said
    assert not Path("was_imported").exists()
    assert not Path("run").exists()


def test_what_is_typed_is_imported_and_what_is_imported_can_be_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    write("my_envs.py", "from apexrl.envs.tasks import CartPole\n" + EVIL)
    assert main(["train", "--task.id", "my_envs:CartPole", *SMALL, "--run-dir", "run"]) == 0
    assert Path("was_imported").exists()
    said = capsys.readouterr().out
    assert "apexrl eval run --allow-imports" in said
    plugins._trust = plugins.Trust()
    assert "--allow-imports" in message(capsys, "eval", "run", "--episodes", "2")
    assert main(["eval", "run", "--episodes", "2", "--allow-imports"]) == 0


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import nothing_like_it", "nothing_like_it"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_cause(
    code: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("my_envs.py", code)
    for words in (["--task.id", "my_envs:Reach"], ["--algo", "my_envs:A2C"], ["--import", "my_envs"]):
        said = message(capsys, "train", *words, *SMALL)
        assert "cannot import my_envs: " in said
        assert cause in said
    assert "There is no environment" not in said


def test_a_module_without_the_name_or_with_another_kind_of_thing_is_said_to_be_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write("my_envs.py", "Reach, Actor = 3, dict")
    assert "Did you mean 'Reach'?" in message(capsys, "train", "--task.id", "my_envs:Reachh")
    assert "got 3" in message(capsys, "train", "--task.id", "my_envs:Reach")
    assert "algo.name my_envs:Actor must be" in message(capsys, "train", "--algo", "my_envs:Actor")
    assert "policy.kind my_envs:Actor must be" in message(capsys, "train", "--policy", "my_envs:Actor")
    assert "cannot import no_such_module" in message(capsys, "train", "--task.id", "no_such_module:Reach")


def test_names_are_registered_once() -> None:
    with refused(ConfigError, "task.id", "'lift'"):
        TASKS.register("lift", dict)
    with refused(ConfigError, "algo.name", "BaseAlgorithm"):
        ALGORITHMS.register("mine", dict)  # type: ignore[arg-type]
    with refused(ConfigError, "a:b"):
        POLICIES.register("a:b", torch.nn.Linear)


def test_the_current_directory_comes_last_and_leaves() -> None:
    write("yaml.py", EVIL)
    write("my_module.py", "import sys, yaml\npath = list(sys.path)")
    before = list(sys.path)
    module = plugins.import_module("my_module")
    assert module.path == [*before, str(Path.cwd())]
    assert sys.path == before
    assert not Path("was_imported").exists()
