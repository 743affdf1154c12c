"""Exported policies act as the policy does, take nothing that a robot lacks, and say what they are."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tests.short_runs import KINDS, saved_run
from torch import Tensor

from apexrl.cli.main import main
from apexrl.core.observations import leaves
from apexrl.core.types import Carry
from apexrl.deploy import card as export_card
from apexrl.deploy import export
from apexrl.deploy.model import FILES, DeployedPolicy
from apexrl.envs import make_env
from apexrl.policies import ActorCritic
from apexrl.rollout import initial_state, make_actor, rollout
from apexrl.run import trained_policy

INPUTS = {
    "lift": ["observation"],
    "cartpole": ["observation"],
    "switches": ["observation"],
    "gsde": ["observation"],  # noise is for exploration
    "groups": ["camera", "robot.gripper", "robot.joints"],
    "image": ["observation"],
    "gru": ["observation", "hidden"],
    "gru on groups": ["camera", "robot.gripper", "robot.joints", "hidden"],
    "sac": ["observation"],
    "roa mlp": ["policy", "command", "object"],
    "roa conv": ["policy", "command", "object"],
    "roa gru": ["policy", "command", "object"],
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the run directory of a kind, exported once by the command line. Not to be changed."""
    done: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in done:
            done[kind] = saved_run(tmp_path_factory.mktemp("export") / "run", kind)
            assert main(["export", str(done[kind])]) == 0
        return done[kind]

    return get


def card_of(run_dir: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((run_dir / "export" / "policy.json").read_text())
    return card


def onnx_model(run_dir: Path) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    session = onnxruntime.InferenceSession(run_dir / "export" / "policy.onnx")
    names = [entry["name"] for entry in card_of(run_dir)["inputs"]]

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        outputs = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
        return [torch.from_numpy(x) for x in outputs]

    return call


def torchscript_model(run_dir: Path) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    script = torch.jit.load(run_dir / "export" / "policy.pt")

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        output = script(*inputs)
        return [output] if isinstance(output, Tensor) else list(output)

    return call


MODELS = {"onnx": onnx_model, "torchscript": torchscript_model}


def clipped(action: Tensor, space: gym.Space[Any]) -> Tensor:
    return torch.from_numpy(action.numpy().clip(space.low, space.high)) if isinstance(space, spaces.Box) else action


# Parity


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("gru")])
@pytest.mark.parametrize("name", MODELS)
def test_a_file_acts_as_the_policy_on_observations_of_the_task(
    kind: str, name: str, exported: Callable[[str], Path]
) -> None:
    run_dir = exported(kind)
    trained, model = trained_policy.load_trained(run_dir), MODELS[name](run_dir)
    env = trained.make_env(7)
    carry: Carry = {"observation": env.reset(seed=5)}
    batch, _ = rollout(env, make_actor(trained.policy, env.device), carry, 40, keep={"observation"})
    wanted, found = [], []
    for step in batch.unbind(0):
        with torch.no_grad():
            action = trained.policy.act({"observation": step["observation"]}, deterministic=True)["action"]
        wanted.append(clipped(action, env.action_space))
        inputs = [leaves(step["observation"])[path] for path in INPUTS[kind]]
        together = model(inputs)[0]
        alone = torch.cat([model([x[i : i + 1] for x in inputs])[0] for i in range(7)])
        found.append(torch.stack((together, alone)))
    difference = float((torch.stack(found, 1).double() - torch.stack(wanted).double()).abs().max())
    print(f"{kind} {name}: largest difference {difference:.1e}")
    assert difference < 1e-5
    # The comparison means something: actions are not all alike.
    assert torch.stack(wanted).double().std() > 0.05
    assert found[0].dtype == wanted[0].dtype


@pytest.mark.parametrize("kind", ["gru", "gru on groups"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_envs", [1, 7])
def test_memory_that_the_caller_carries_gives_the_same_episodes(
    kind: str, name: str, num_envs: int, exported: Callable[[str], Path]
) -> None:
    run_dir = exported(kind)
    trained, model = trained_policy.load_trained(run_dir), MODELS[name](run_dir)

    def deployed(carry: Carry) -> dict[str, Tensor]:
        found = {**leaves(carry["observation"]), "hidden": carry["hidden"]}
        action, hidden = model([found[path] for path in INPUTS[kind]])
        return {"action": action, "hidden": hidden}

    def episodes(actor: Callable[[Carry], dict[str, Tensor]]) -> TensorDict:
        env = trained.make_env(num_envs)
        carry = {"observation": env.reset(seed=5), **initial_state(trained.policy, env)}
        return rollout(env, actor, carry, 50)[0]  # more than an episode, so the memory is emptied on the way

    theirs = episodes(deployed)
    ours = episodes(make_actor(trained.policy, torch.device("cpu"), deterministic=True))
    assert ours["done"].any()
    assert (theirs["done"] == ours["done"]).all()
    wanted = clipped(ours["action"], trained.make_env(1).action_space)
    difference = float((theirs["action"] - wanted).abs().max())
    print(f"{kind} {name} {num_envs}: largest difference {difference:.1e}")
    assert difference < 1e-5
    assert (theirs["hidden"] - ours["hidden"]).abs().max() < 1e-5
    assert wanted.std() > 0.05


@pytest.mark.parametrize("name", MODELS)
def test_the_model_clips_as_the_environment_does(name: str, exported: Callable[[str], Path]) -> None:
    run_dir = exported("groups")
    inputs = [torch.zeros(500, 16, 16, 3, dtype=torch.uint8), torch.rand(500, 1), torch.rand(500, 2) * 20 - 10]
    action = MODELS[name](run_dir)(inputs)[0]
    torch.testing.assert_close(action.amin(0), torch.tensor([-0.3, -0.4]), rtol=0, atol=0)
    torch.testing.assert_close(action.amax(0), torch.tensor([0.3, 0.1]), rtol=0, atol=0)


def test_the_student_of_roa_is_the_slow_copy(exported: Callable[[str], Path]) -> None:
    run_dir = exported("roa mlp")
    policy = trained_policy.load_trained(run_dir).policy
    inputs = [torch.randn(5, 96), torch.randn(5, 2), torch.randn(5, 1)]
    obs = TensorDict(dict(zip(INPUTS["roa mlp"], inputs, strict=True)), batch_size=[5])
    found = onnx_model(run_dir)(inputs)[0]
    with torch.no_grad():
        seen: Any = policy.normalized(obs)
        actions = {
            name: policy.actor_adapt(seen, getattr(policy, name)(seen)).mode.clamp(-1, 1)  # type: ignore[operator]
            for name in ("adapt_ema", "adapt_module")
        }
    torch.testing.assert_close(found, actions["adapt_ema"], rtol=0, atol=1e-5)
    assert (found - actions["adapt_module"]).abs().max() > 1e-2


# What is inside


@pytest.mark.parametrize("kind", KINDS)
def test_a_privileged_group_is_no_input(kind: str, exported: Callable[[str], Path]) -> None:
    directory = exported(kind) / "export"
    card = card_of(exported(kind))
    graph = onnx.load(directory / "policy.onnx").graph
    assert [entry["name"] for entry in card["inputs"]] == INPUTS[kind]
    assert [entry.name for entry in graph.input] == INPUTS[kind]
    assert [entry.name for entry in graph.output] == [entry["name"] for entry in card["outputs"]]
    # Every input is used, and the first of a TorchScript graph is the module itself.
    assert set(INPUTS[kind]) <= {name for node in graph.node for name in node.input}
    _, *inputs = torch.jit.load(directory / "policy.pt").inlined_graph.inputs()
    assert len(inputs) == len(INPUTS[kind])


def test_a_file_holds_the_actor_alone(exported: Callable[[str], Path]) -> None:
    run_dir = exported("cartpole")
    actor: Any = trained_policy.load_trained(run_dir).policy.actor
    graph = onnx.load(run_dir / "export" / "policy.onnx").graph
    numbers = sum(int(np.prod(tensor.dims)) for tensor in graph.initializer)
    assert numbers == sum(parameter.numel() for parameter in actor.parameters())
    script = torch.jit.load(run_dir / "export" / "policy.pt")
    assert dict(script.named_parameters()) == {}
    assert (run_dir / "export" / "policy.pt").stat().st_size < 25_000


def test_the_card_says_what_the_files_are(exported: Callable[[str], Path]) -> None:
    run_dir = exported("roa gru")
    card, trained = card_of(run_dir), trained_policy.load_trained(run_dir)
    assert card["format"] == 1
    assert card["apexrl"] == "0.1.0"
    assert card["algorithm"] == "ppo_roa"
    assert card["task"] == {"id": "payload", "kwargs": {}}
    assert card["checkpoint"] == {"name": "iteration_000001.pt", "iteration": 1, "total_steps": 256}
    assert card["control"] == {"hz": 20.0, "source": "time step of the task"}
    window, command, _ = card["inputs"]
    assert window["shape"] == ["batch", 96]
    assert "24 frames of 4 numbers, the oldest first; frames from before the episode are zeros" in window["meaning"]
    assert window["meaning"].endswith("In each frame, in order: velocity, m/s (2); last action (2)")
    assert (window["dtype"], window["group"]) == ("float32", "policy")
    normalizer: Any = trained.policy.normalizer
    assert command["normalizer"]["mean"] == normalizer.normalizers["command"].mean.tolist()
    wanted = (normalizer.normalizers["command"].var + 1e-8).rsqrt()
    assert command["normalizer"]["scale"] == pytest.approx(wanted.tolist())
    (action,) = card["outputs"]
    assert (action["name"], action["shape"], action["dtype"]) == ("action", ["batch", 2], "float32")
    assert (action["low"], action["high"], action["caller"]) == ([-1.0, -1.0], [1.0, 1.0], "nothing")
    assert card["use"]["torchscript"] == 'torch.jit.load("policy.pt")(policy, command, object)'
    assert card["verification"]["observations"] == 4 * (200 + 100)  # an episode has 200 steps
    assert all(difference < 1e-5 for difference in card["verification"]["largest_difference"].values())
    for name, entry in card["files"].items():
        assert entry["sha256"] == hashlib.sha256((run_dir / "export" / name).read_bytes()).hexdigest()
    assert {path.name for path in (run_dir / "export").iterdir()} == {"policy.onnx", "policy.pt", "policy.json"}


@pytest.mark.parametrize("kind", ["roa mlp", "gru"])
def test_the_files_are_tried_across_a_reset(kind: str, exported: Callable[[str], Path]) -> None:
    trained = trained_policy.load_trained(exported(kind))
    batch = export.record(trained.make_env(2), trained.policy)
    ends = batch["done"].squeeze(-1).any(-1).nonzero().flatten()
    assert len(ends) >= 1
    assert ends[0] + 20 < len(batch)


def test_the_command_on_the_card_runs(exported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported("gru on groups") / "export")
    values: dict[str, Any] = {
        "robot_joints": np.zeros((3, 2), np.float32),
        "robot_gripper": np.zeros((3, 1), np.float32),
        "camera": np.zeros((3, 16, 16, 3), np.uint8),
        "hidden": np.zeros((3, 64), np.float32),
    }
    commands = card_of(exported("gru on groups"))["use"]
    action, hidden = eval(commands["onnx"], {"onnxruntime": onnxruntime, **values})
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    same_action, same_hidden = eval(commands["torchscript"], {"torch": torch, **tensors})
    np.testing.assert_allclose(action, same_action, atol=1e-5)
    np.testing.assert_allclose(hidden, same_hidden, atol=1e-5)


def test_memory_and_choices_are_on_the_card(exported: Callable[[str], Path]) -> None:
    card = card_of(exported("gru"))
    assert [entry["name"] for entry in card["outputs"]] == ["action", "next_hidden"]
    assert card["inputs"][1]["shape"] == card["outputs"][1]["shape"] == ["batch", 12]
    assert "zeros when an episode starts" in card["inputs"][1]["meaning"]
    (action,) = card_of(exported("cartpole"))["outputs"]
    assert (action["dtype"], action["choices"], action["caller"]) == ("int64", [2], "nothing")
    assert card_of(exported("groups"))["inputs"][0]["dtype"] == "uint8"


@pytest.mark.parametrize(
    ("space", "wanted"),
    [
        (spaces.Discrete(3, start=5), {"choices": [3], "caller": "add [5]: the task counts from there"}),
        (spaces.MultiDiscrete([2, 4]), {"choices": [2, 4], "caller": "nothing"}),
        (spaces.MultiBinary(3), {"choices": [2, 2, 2], "caller": "nothing"}),
        (spaces.Box(-np.inf, np.inf, (1, 2)), {"low": [None, None], "high": [None, None], "space_shape": [1, 2]}),
        (spaces.Box(0, 9, (1,), np.int64), {"low": [0.0], "high": [9.0], "caller": "round to integers"}),
    ],
)
def test_the_card_says_what_the_caller_does_with_an_action(space: gym.Space[Any], wanted: dict[str, Any]) -> None:
    assert wanted.items() <= export_card.action_entry(space).items()


@pytest.mark.parametrize(
    ("task", "hz"),
    [("cartpole", 50), ("recall", None), ("CartPole-v1", 50), ("Pendulum-v1", 20), ("mujoco/HalfCheetah-v5", 20),
     ("HalfCheetah-v5", 20), ("MountainCar-v0", 30), ("apexrl-tests/Cameras-v0", None)],
)  # fmt: skip
def test_the_control_rate_is_the_tasks(task: str, hz: float | None) -> None:
    env = make_env(task, 1)
    assert export_card.control(env)["hz"] == hz
    env.close()


def test_any_policy_with_its_environment_can_be_written(tmp_path: Path) -> None:
    env = make_env("lift", 3)
    policy = ActorCritic.for_env(env)
    policy.train()
    exported = export.write_policy(policy, env, tmp_path / "here", ["torchscript"], about={"task": {"id": "mine"}})
    assert json.loads((tmp_path / "here" / "policy.json").read_text()) == exported.card
    assert env.max_episode_steps is not None
    observations = 3 * (env.max_episode_steps + 100)
    assert (exported.card["task"], exported.card["verification"]["observations"]) == ({"id": "mine"}, observations)
    # The policy itself goes on training.
    assert policy.training
    assert all(parameter.requires_grad for parameter in policy.parameters())


def test_the_torchscript_file_needs_no_package_of_ours(exported: Callable[[str], Path]) -> None:
    path = exported("roa gru") / "export" / "policy.pt"
    code = (
        "import sys, torch\nsys.modules['apexrl'] = sys.modules['tensordict'] = None\n"
        f"print(torch.jit.load({str(path)!r})(torch.zeros(2, 96), torch.zeros(2, 2), torch.zeros(2, 1)).shape)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([2, 2])\n"


# What is refused


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("apexrl: ")
    return captured.err


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    return saved_run(tmp_path / "run", "cartpole")


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported function differs from the policy by 2e-5 in every action."""
    act: Any = DeployedPolicy.forward
    monkeypatch.setattr(DeployedPolicy, "forward", lambda self, *inputs: act(self, *inputs) + 2e-5)


@pytest.mark.usefixtures("spoilt")
@pytest.mark.parametrize("name", MODELS)
def test_a_file_that_acts_differently_is_not_kept(
    name: str, small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(small_run)
    message = refused(capsys, "export", str(small_run), "--format", name)
    assert re.search(rf"{FILES[name]} was not kept: .* by 2\.0e-05, which is not below 1e-05", message)
    assert tree(small_run) == before
    assert not (small_run / "export").exists()


def test_a_refusal_leaves_an_earlier_export_as_it_was(
    small_run: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    assert main(["export", str(small_run)]) == 0
    before = tree(small_run)
    request.getfixturevalue("spoilt")
    refused(capsys, "export", str(small_run))
    assert tree(small_run) == before


def test_a_new_export_replaces_the_old_one_and_can_go_elsewhere(small_run: Path, tmp_path: Path) -> None:
    (path,) = (small_run / "checkpoints").glob("*.pt")
    assert main(["export", str(path)]) == 0
    assert set(card_of(small_run)["files"]) == {"policy.onnx", "policy.pt"}
    assert main(["export", str(small_run / "checkpoints"), "--format", "torchscript"]) == 0
    assert {entry.name for entry in (small_run / "export").iterdir()} == {"policy.pt", "policy.json"}
    assert set(card_of(small_run)["files"]) == {"policy.pt"}
    elsewhere = tmp_path / "robot" / "policies"
    assert main(["export", str(small_run), "--output", str(elsewhere), "--format", "onnx"]) == 0
    assert {entry.name for entry in elsewhere.iterdir()} == {"policy.onnx", "policy.json"}


def test_the_command_prints_the_largest_difference(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["export", str(small_run)]) == 0
    captured = capsys.readouterr()
    assert "Exported iteration_000002.pt (CartPole-v1, ppo)" in captured.out
    assert "policy.onnx: largest difference 0.0e+00 on 2400 recorded observations" in captured.out
    assert "inputs: observation [batch, 4]" in captured.out
    assert captured.err == ""


def test_without_the_packages_one_message_says_what_to_install(
    small_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else find(name))
    message = refused(capsys, "export", str(small_run))
    assert "ONNX needs onnx and onnxruntime: pip install 'apexrl[export]'" in message
    assert not (small_run / "export").exists()
    assert main(["export", str(small_run), "--format", "torchscript"]) == 0


def test_an_actor_that_sees_a_privileged_group_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = saved_run(tmp_path / "run", "groups", **{"policy.actor_groups": "[robot, priv]"})
    message = refused(capsys, "export", str(run_dir))
    assert "sees ['priv']" in message
    assert "policy.actor_groups" in message
    assert not (run_dir / "export").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["nowhere"], ["nowhere", "no checkpoint"]),
        ([], ["RUN_DIR|CHECKPOINT", "apexrl export --help"]),
        (["{run}", "--format", "onx"], ["--format", "'onx'", "onnx,torchscript", "Did you mean 'onnx'?"]),
        (["{run}", "--format", ""], ["--format", "''"]),
        (["{run}", "--format", "onnx,"], ["--format", "'onnx,'"]),
        (["{run}", "--output", "{run}/config.yaml"], ["--output", "config.yaml is a file"]),
        (["{run}", "--output", "{run}/config.yaml/deep"], ["config.yaml"]),
        (["{run}", "--fast"], ["--fast"]),
        (["{run}", "--algo.gamma", "1"], ["--algo.gamma", "apexrl export --help"]),
        (["{run}/config.yaml"], ["config.yaml", "not a readable checkpoint"]),
    ],
)
def test_a_mistake_gives_one_message_and_writes_nothing(
    arguments: list[str], parts: list[str], exported: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = exported("cartpole")
    before = tree(run_dir)
    message = refused(capsys, "export", *(word.format(run=run_dir) for word in arguments))
    assert [part for part in parts if part not in message] == [], message
    assert tree(run_dir) == before
