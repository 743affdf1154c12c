"""What users bring along: names are found, modules that only files name are not imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.doc_files import write_files
from tests.refusals import refused

from apexrl import ActorCritic, Trainer, make_env
from apexrl.algorithms import ALGORITHMS
from apexrl.cli import main
from apexrl.core import plugins
from apexrl.core.errors import CheckpointError, ConfigError
from apexrl.envs.tasks import TASKS
from apexrl.policies.config import POLICIES
from apexrl.run.trained_policy import load_trained

SMALL = ["--task.num_envs", "2", "--training.total_timesteps", "64", "--training.final_eval_episodes", "2"]
SMALL += ["--features.save_video", "false", "--features.save_plot", "false", "--logging.tensorboard", "false"]
SOURCES = Path(__file__).parents[2] / "src"
EVIL = "from pathlib import Path\nPath('was_imported').touch()\n"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty directory, and a process in which nothing was imported or registered yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_trust", plugins.Trust())
    yield
    forget()


def forget() -> None:
    """Make this process one in which nothing was imported or registered yet."""
    plugins._trust = plugins.Trust()
    registries: list[Any] = [TASKS, ALGORITHMS, POLICIES]
    for registry in registries:
        for name in [name for name, value in registry.items() if not value.__module__.startswith("apexrl.")]:
            del registry[name]
        for name in [name for name in registry if ":" in name]:
            del registry[name]
    for name in [name for name in sys.modules if name.startswith("my_")]:
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
    forget()
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


def in_own_process(*words: str) -> str:
    """Run a command as a user does; returns its exit code and what it prints."""
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "apexrl.cli", *words]
    found = subprocess.run(call, capture_output=True, text=True, env=env, timeout=300)
    return f"{found.returncode}: {found.stdout}{found.stderr}"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that succeeds in a process that has imported nothing for anybody; returns what it prints."""

    def run(*words: str) -> str:
        forget()
        capsys.readouterr()
        assert main(words) == 0
        return capsys.readouterr().out

    return run


OWN = ["--task.id", "my_envs:Reach", "--algo", "my_algos:A2C", "--policy", "my_nets:MyActor"]


def test_the_algorithm_of_the_docs_is_short_and_uses_no_private_name(tmp_path: Path) -> None:
    code = write_files(tmp_path)["my_algos.py"]
    assert len(code.splitlines()) < 60
    assert not re.search(r"[\s.]_[a-z]", code)


@pytest.mark.slow
def test_what_the_docs_write_is_trained_resumed_evaluated_played_and_exported(
    command: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    options = ["--policy.kwargs.width", "16", "--task.metrics.distance", "last", "--algo.learning_rate", "0.003"]
    trained = command("train", *OWN, *options, "--run-dir", "run", "--task.num_envs", "8", *SMALL[2:])
    assert "apexrl eval run --allow-imports" in trained
    line = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert {"train/policy_loss", "train/value_loss", "reward/distance"} <= line.keys() | {"reward/distance"}
    for refused_words in (["eval", "run"], ["play", "run"], ["export", "run"], ["train", "--resume", "run"]):
        forget()
        assert "--allow-imports" in message(capsys, *refused_words)
    resumed = command("train", "--resume", "run", "--training.total_timesteps", "1000", "--allow-imports")
    assert "Resumed run at iteration 1" in resumed
    assert "eval_reward/distance" in command("eval", "run", "--episodes", "4", "--allow-imports")
    assert "run/video.mp4" in command("play", "run", "--episodes", "1", "--allow-imports")
    assert "policy.onnx" in command("export", "run", "--allow-imports")
    forget()
    assert "Did you mean '--algo.learning_rate'?" in message(capsys, "train", *OWN, "--algo.learning_rat", "1")
    assert "algo.learning_rate" in message(capsys, "train", *OWN, "--algo.learning_rate", "fast")
    assert "algo.learning_rate" in command("train", *OWN, "--help")


@pytest.mark.slow
def test_modules_reach_workers_seeds_and_a_registered_task(command: Callable[..., str], tmp_path: Path) -> None:
    write_files(tmp_path)
    metric = ["--import", "my_metrics", "--task.id", "upright_cartpole", "--task.metrics.upright", "mean"]
    command("train", *metric, *SMALL, "--task.num_workers", "2", "--algo", "my_algos:A2C", "--run-dir", "one")
    assert yaml.safe_load(Path("one/config.yaml").read_text())["import"] == ["my_metrics"]
    assert "eval_reward/upright" in command("eval", "one", "--episodes", "2", "--allow-imports")
    said = command("train", *metric, *OWN[2:4], *SMALL, "--seeds", "2", "--run-dir", "many")
    assert "over 2 seeds" in said


@pytest.mark.slow
def test_a_run_from_elsewhere_runs_none_of_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path)
    assert main(["train", *OWN, *SMALL, "--run-dir", "run"]) == 0
    forget()
    (checkpoint,) = Path("run/checkpoints").glob("*.pt")
    for name in ("my_envs", "my_algos", "my_nets", "yaml", "torch", "pydantic", "rich", "numpy"):
        write(f"{name}.py", EVIL)
    write("sweep.yaml", "config: run/config.yaml\nspace: {algo.learning_rate: {low: 1.0e-4, high: 1.0e-3}}\n")
    for words in (
        ["train", "run/config.yaml", "--run-dir", "new"],
        ["train", "run/config.yaml", "--seeds", "2", "--run-dir", "new"],
        ["train", "--resume", "run"],
        ["eval", "run"],
        ["eval", str(checkpoint)],
        ["play", "run"],
        ["export", "run"],
        ["compare", "run", "run"],
        ["manifest", "run", "--output", "m.json"],
        ["sweep", "sweep.yaml"],
        ["demos", "mt10", "--policy", "run"],
    ):
        assert "--allow-imports" in message(capsys, *words)
    # With weights of another shape; nothing is imported to find that out.
    assert "training.init_from" in message(capsys, "train", *SMALL, "--training.init_from", "run", "--run-dir", "new")
    # Where Python itself would look into the current directory first.
    assert "--allow-imports" in in_own_process("eval", "run")
    assert in_own_process("report", "run").startswith("0: ")
    assert main(["plot", "run"]) == 0
    assert not Path("was_imported").exists()


def test_a_checkpoint_from_python_with_own_classes_needs_the_same_trust(tmp_path: Path) -> None:
    write_files(tmp_path)
    nets, algos = plugins.import_module("my_nets"), plugins.import_module("my_algos")
    env = make_env("my_envs:Reach", 2)
    policy = ActorCritic.for_env(env, actor_class=nets.MyActor, actor_cfg={"width": 8})
    path = Trainer(env, policy, algos.A2C(policy)).save_checkpoint(tmp_path / "model.pt")
    forget()
    with refused(CheckpointError, "my_algos:A2C", "--allow-imports", "load_checkpoint"):
        load_trained(path)
    with plugins.imports_allowed():
        trained = load_trained(path)
    assert trained.config.algo.name == "my_algos:A2C"
    assert type(trained.policy.actor).__module__ == "my_nets"


BROKEN = """
from my_algos import A2C
from my_envs import Reach
from apexrl import ActorCritic

class BadReset(Reach):
    def reset(self, *, seed=None, options=None):
        return 3

class BadStep(Reach):
    def step(self, action):
        return super().step(action)[:4]

class Strict(ActorCritic):
    @classmethod
    def for_env(cls, env, **options):
        raise KeyError("no such layer")

class NoOptions(A2C):
    def __init__(self, policy):
        super().__init__(policy)
"""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["--policy", "my_nets:MyActor", "--policy.kwargs.widht", "3"],
            ["policy.kwargs {'widht': 3}", "my_nets:MyActor"],
        ),
        (["--policy", "my_broken:Strict"], ["policy.kind my_broken:Strict", "no such layer", "my_broken.py, line 17"]),
        (["--algo", "my_broken:NoOptions"], ["algo.name my_broken:NoOptions", "'cfg'"]),
        (["--task.id", "my_broken:BadReset"], ["my_broken.BadReset.reset must return (obs, info), got int. "]),
        (["--task.id", "my_broken:BadStep"], ["my_broken.BadStep.step must return (obs, reward,", "got 4"]),
        (["--task.id", "my_broken:BadStep", "--task.kwargs.max_episode_steps", "9"], ["my_broken.BadStep.step must"]),
    ],
    ids=str,
)
def test_a_mistake_in_code_of_a_user_is_named_in_one_line(
    words: list[str], named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    write("my_broken.py", BROKEN)
    task = [] if "--task.id" in words else ["--task.id", "my_envs:Reach"]
    said = message(capsys, "train", *task, *words, *SMALL, "--run-dir", "run")
    assert all(each in said for each in named), said


@pytest.mark.parametrize("words", [["--algo", "my_algos:A2C"], ["--policy", "my_nets:MyActor"]], ids=str)
def test_a_module_that_a_run_names_is_not_trusted_rather_than_unfit(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    assert main(["train", "--task.id", "cartpole", *words, *SMALL, "--run-dir", "run"]) == 0
    for command in ("eval", "play", "export"):
        forget()
        said = message(capsys, command, "run")
        assert said.startswith(
            ("apexrl: algo.name 'my_algos:A2C' names", "apexrl: policy.kind 'my_nets:MyActor' names")
        )
        assert "--allow-imports" in said


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--task.id", "my_envs.Reach"], "my_envs:Reach"),
        (["--task.id", "my_envs"], "module:Class, such as my_envs:"),
        (["--task.id", "my_envs:"], "module:Class"),
        (["--algo", "my_algos.A2C"], "my_algos:A2C"),
        (["--policy", "my_nets.MyActor"], "my_nets:MyActor"),
    ],
    ids=str,
)
def test_a_module_without_a_colon_is_answered_with_how_to_write_it(
    words: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    said = message(capsys, "train", *words, *SMALL)
    assert hint in said
    assert "Tasks:" not in said
    assert words[1] in said
