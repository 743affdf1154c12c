"""Loaded policies act as the policy does in an evaluation, and remember what belongs to the running episodes."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from tests.point_suite import PointSuite
from tests.refusals import refused
from tests.short_runs import saved_run

from apexrl import PPO, GymVecEnv, MLPActor, OnPolicyRunner, PPOConfig, VLAPolicy, load_policy, make_env
from apexrl.core import plugins
from apexrl.core.errors import ApexRLError, CheckpointError, ConfigError, ObservationError
from apexrl.core.instructions import encode_instruction
from apexrl.core.spaces import space_from_plain, space_to_plain
from apexrl.deploy.export import export_policy, write_policy
from apexrl.envs import VecEnv
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.envs.workers.arrays import decoder, flat_space
from apexrl.policies import Policy
from apexrl.rollout import initial_state, make_actor, rollout
from apexrl.run.trained_policy import load_trained

CHUNK = 3
RUNS = {
    "mlp": "lift",
    "cnn": "image",
    "gru": "gru",
    "roa student": "roa mlp",
    "sac": "sac",
    "asymmetric": "groups",
    "discrete": "cartpole",
    "multi-discrete": "switches",
}
"""Kind -> the run of ``short_runs`` that has such a policy."""


@dataclass(frozen=True)
class Trained:
    """A file, what it was saved from, and an environment."""

    path: Path
    policy: Policy
    env: VecEnv


class OwnActor(MLPActor):
    """Somebody's own actor."""


def runner_checkpoint(path: Path) -> Trained:
    env = make_env("Pendulum-v1", 4)
    runner = OnPolicyRunner(env, actor_cfg={"init_std": 0.5}, cfg=PPOConfig(num_steps=8), device="cpu")
    runner.learn(64)
    return Trained(runner.save_checkpoint(path), runner.policy, make_env("Pendulum-v1", 4))


def vla_checkpoint(path: Path) -> Trained:
    env = SuiteVecEnv(PointSuite(), 4, chunk=CHUNK, num_workers=0)
    policy = VLAPolicy.for_env(env, chunk=CHUNK, width=16, depth=1, num_heads=2, value_head=True, init_std=0.5)
    runner = OnPolicyRunner(env, agent=PPO(policy=policy, cfg=PPOConfig(num_steps=8, num_minibatches=2)))
    runner.learn(32)
    return Trained(runner.save_checkpoint(path), policy, SuiteVecEnv(PointSuite(), 4, chunk=CHUNK, num_workers=0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Gives a trained policy of a kind; ``onnx gru`` is the exported one of ``gru``. Not to be changed."""
    done: dict[str, Trained] = {}

    def make(kind: str) -> Trained:
        directory = tmp_path_factory.mktemp("load")
        if kind == "runner checkpoint":
            return runner_checkpoint(directory / "model.pt")
        if kind == "vla":
            return vla_checkpoint(directory / "model.pt")
        form, _, other = kind.partition(" of ")
        if other:
            run = get(other)
            export_policy(run.path, directory, [form])
            return Trained(directory, run.policy, run.env)
        loaded = load_trained(saved_run(directory / "run", RUNS[kind]))
        return Trained(directory / "run", loaded.policy, loaded.make_env(7))

    def get(kind: str) -> Trained:
        if kind not in done:
            done[kind] = make(kind)
        return done[kind]

    return get


def as_arrays(obs: Any, row: Any = slice(None)) -> Any:
    """Return an observation as Gymnasium gives it, without what a robot cannot measure."""
    if isinstance(obs, torch.Tensor):
        return obs[row].numpy()
    return {name: as_arrays(value, row) for name, value in obs.items() if name != "priv"}


def evaluated(trained: Trained, num_steps: int = 50) -> tuple[TensorDict, NDArray[Any]]:
    """Return steps ``[T, N]``, and what the environments make of the actions that an evaluation takes in them."""
    env, policy = trained.env, trained.policy.eval()
    torch.manual_seed(0)
    states = initial_state(policy, env)
    batch, _ = rollout(env, make_actor(policy, env.device), {"observation": env.reset(seed=5), **states}, num_steps)
    actor, decode = make_actor(policy, env.device, deterministic=True), decoder(env.action_space)
    with torch.no_grad():
        actions = [actor({name: step[name] for name in ("observation", *states)})["action"] for step in batch.unbind(0)]
    return batch, np.stack([decode(action.numpy()) for action in actions])


EVERY = [*RUNS, "vla", "runner checkpoint", "torchscript of gru", "onnx of gru", "onnx of multi-discrete"]


@pytest.mark.parametrize("kind", EVERY)
def test_predict_gives_what_the_actor_of_an_evaluation_does(kind: str, trained: Callable[[str], Trained]) -> None:
    run = trained(kind)
    batch, wanted = evaluated(run)
    policy = load_policy(str(run.path) if kind == "mlp" else run.path)
    chunk = CHUNK if kind == "vla" else 1
    wanted = wanted.reshape(*wanted.shape[:2], chunk, *policy.action_space.shape)  # type: ignore[misc]
    assert wanted.std() > 0.01

    def episodes(row: Any) -> NDArray[Any]:
        found = []
        for step in batch.unbind(0):
            obs = as_arrays(step["observation"], row)
            actions = [policy.predict(obs if k == 0 else forgotten(obs)) for k in range(chunk)]
            found.append(np.stack(actions, axis=-1 - len(policy.action_space.shape)))  # type: ignore[arg-type]
            policy.reset(step["done"].squeeze(-1)[row].numpy())
        return np.stack(found)

    for _ in range(2):  # from the beginning, after what the first time left behind
        policy.reset()
        together = episodes(slice(None))
        policy.reset()
        alone = episodes(2)
        assert together.dtype == alone.dtype == policy.action_space.dtype
        np.testing.assert_allclose(together, wanted, atol=2e-5, rtol=0)
        np.testing.assert_allclose(alone, wanted[:, 2], atol=2e-5, rtol=0)
        assert all(policy.action_space.contains(action) for action in alone[:, 0])
    if kind.endswith("gru"):
        assert batch["done"].any()


def forgotten(obs: Any) -> Any:
    """Return another observation: within a chunk nothing is looked at."""
    return {
        name: forgotten(value) if isinstance(value, Mapping) else np.zeros_like(value) for name, value in obs.items()
    }


@pytest.mark.parametrize("kind", ["discrete", "multi-discrete"])
def test_an_action_is_what_the_environment_of_gymnasium_takes(kind: str, trained: Callable[[str], Trained]) -> None:
    policy = load_policy(trained(kind).path)
    env = gym.make({"discrete": "CartPole-v1", "multi-discrete": "apexrl-tests/Switches-v0"}[kind])
    obs, _ = env.reset(seed=0)
    for _ in range(5):
        action = policy.predict(obs)
        assert env.action_space.contains(action)
        obs = env.step(action)[0]
    assert policy.predict(np.stack([obs, obs])).shape == (2, *env.action_space.shape)  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["mlp", "vla", "gru", "sac"])
def test_samples_differ_and_stay_inside_the_action_space(kind: str, trained: Callable[[str], Trained]) -> None:
    run = trained(kind)
    policy, obs = load_policy(run.path), as_arrays(run.env.reset(seed=0), 0)
    samples = [policy.predict(obs, deterministic=False) for _ in range(8)]
    assert all(policy.action_space.contains(action) for action in samples)
    assert np.std(samples, axis=0).max() > 1e-3


def test_tensors_lists_and_groups_that_nobody_reads_are_taken(trained: Callable[[str], Trained]) -> None:
    policy = load_policy(trained("asymmetric").path)
    obs = trained("asymmetric").env.reset(seed=0)
    wanted = policy.predict(as_arrays(obs))
    np.testing.assert_array_equal(policy.predict(obs), wanted)
    np.testing.assert_array_equal(policy.predict({**as_arrays(obs), "more": "of this"}), wanted)
    one: Any = as_arrays(obs, 0)
    one["robot"]["joints"] = one["robot"]["joints"].astype(np.float64).tolist()
    np.testing.assert_allclose(policy.predict(one), wanted[0], atol=1e-6)


def test_memory_of_a_mask_is_emptied_and_the_rest_is_kept(trained: Callable[[str], Trained]) -> None:
    policy = load_policy(trained("gru").path)
    first, later = np.random.default_rng(0).normal(size=(2, 3, *policy.inputs[0].shape))
    fresh = policy.predict(later)
    policy.reset()
    policy.predict(first)
    policy.reset([True, False, False])
    mixed = policy.predict(later)
    policy.reset()
    policy.predict(first)
    kept = policy.predict(later)
    np.testing.assert_array_equal(mixed[0], fresh[0])
    np.testing.assert_array_equal(mixed[1:], kept[1:])
    assert (np.abs(kept - fresh) > 1e-4).any(-1).all()
    with refused(ObservationError, "3", "2"):
        policy.predict(later[:2])
    with refused(ObservationError, "mask", "[3]", "[2]"):
        policy.reset([True, False])
    with refused(ObservationError, "mask", "bool", "int64"):
        policy.reset([1, 0, 1])  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["roa student", "onnx of roa student"])
def test_single_frames_are_stacked_as_the_task_stacks_them(kind: str, trained: Callable[[str], Trained]) -> None:
    batch, _ = evaluated(trained("roa student"), 260)  # more than an episode
    policy, whole = load_policy(trained(kind).path), load_policy(trained(kind).path)
    for step in batch.unbind(0):
        obs = as_arrays(step["observation"])
        frames = {**obs, "policy": obs["policy"][:, -4:]}
        np.testing.assert_allclose(policy.predict(frames), whole.predict(obs), atol=1e-5)
        policy.reset(step["done"].squeeze(-1))
    assert batch["done"].any()


def test_a_chunk_is_given_step_by_step_to_each_environment_alone(trained: Callable[[str], Trained]) -> None:
    policy = load_policy(trained("vla").path)
    words = ["go left", "go right"]
    obs = {"state": np.zeros((2, 2), np.float32), "instruction": words}
    other = {**obs, "state": np.full((2, 2), 0.7, np.float32)}
    first = [policy.predict(obs) for _ in range(CHUNK)]
    after = policy.predict(other)
    assert (np.abs(after - first[0]) > 1e-4).any(-1).all()
    policy.reset()
    assert (policy.predict(obs) == first[0]).all()
    policy.reset([False, True])
    mixed = policy.predict(other)
    np.testing.assert_array_equal(mixed[0], first[1][0])  # its chunk continues
    np.testing.assert_allclose(mixed[1], after[1], atol=1e-6)  # this one's is a new one
    encoded = {**obs, "instruction": np.stack([encode_instruction(text) for text in words])}
    policy.reset()
    np.testing.assert_array_equal(policy.predict(encoded), first[0])


CAMERA, JOINTS, GRIPPER = np.zeros((16, 16, 3), np.uint8), np.zeros(2), np.zeros(1)


@pytest.mark.parametrize(
    ("kind", "obs", "named"),
    [
        ("mlp", np.zeros(4), ["observation", "[13]", "[4]"]),
        ("mlp", np.zeros((2, 2, 13)), ["[13]", "[2, 2, 13]"]),
        ("mlp", ["a"] * 13, ["[13]", "<U1"]),
        ("mlp", None, ["[13]", "NoneType"]),
        ("mlp", [[1.0], [1.0, 2.0]], ["[13]"]),
        ("mlp", {"joints": np.zeros(13)}, ["[13]", "joints"]),
        ("asymmetric", np.zeros(10), ["camera", "[16, 16, 3]"]),
        ("asymmetric", {"camera": CAMERA}, ["robot.gripper", "[1]", "camera"]),
        ("asymmetric", {"camera": CAMERA, "robot": {"gripper": GRIPPER}}, ["robot.joints", "[2]"]),
        ("asymmetric", {"camera": CAMERA / 255, "robot": {}}, ["camera", "uint8", "float64"]),
        (
            "asymmetric",
            {"camera": CAMERA, "robot": {"gripper": GRIPPER, "joints": JOINTS[None]}},
            ["robot.joints", "[1, 2]", "one observation"],
        ),
        (
            "asymmetric",
            {"camera": np.stack([CAMERA] * 2), "robot": {"gripper": np.zeros((3, 1)), "joints": JOINTS}},
            ["robot.gripper", "[3, 1]", "2 observations"],
        ),
        ("onnx of multi-discrete", np.zeros(2), ["observation", "[3]", "[2]"]),
        ("mlp", np.where(np.arange(13) > 4, np.nan, 0.0), ["the observation", "nan", "[5]"]),
        ("mlp", torch.full((2, 13), -torch.inf), ["the observation", "-inf", "[0, 0]"]),
        ("mlp", np.full(13, 1e300), ["the observation", "1e+300", "[0]"]),
        ("asymmetric", {"camera": CAMERA, "robot": {"gripper": GRIPPER * np.nan, "joints": JOINTS}}, ["robot.gripper"]),
    ],
)
def test_a_wrong_observation_is_one_line(
    kind: str, obs: Any, named: list[str], trained: Callable[[str], Trained]
) -> None:
    policy = load_policy(trained(kind).path)
    with refused(ObservationError, "predict") as caught:
        policy.predict(obs)
    message = str(caught.value)
    assert "\n" not in message
    assert [name for name in named if name not in message] == [], message


class Observing(gym.Env[Any, Any]):
    """Samples observations of a space."""

    action_space = gym.spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, space: gym.Space[Any]) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, False, {}


NATIVE = {
    "discrete": gym.spaces.Discrete(5, start=-1),
    "multi-discrete": gym.spaces.MultiDiscrete([2, 3]),
    "scalar": gym.spaces.Box(-1.0, 1.0, ()),
    "tuple": gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1.0, 1.0, ()))),
}


def stacked(observations: Any) -> Any:
    """Return a batch of observations as Gymnasium gives it."""
    if isinstance(observations[0], tuple):
        return tuple(stacked(part) for part in zip(*observations, strict=True))
    return np.stack(observations)


@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_observations_are_what_the_environment_of_gymnasium_gives(kind: str, num_workers: int, tmp_path: Path) -> None:
    space = NATIVE[kind]
    make_fns = [partial(Observing, space)] * 6
    with contextlib.closing(GymVecEnv(make_fns, num_workers=num_workers)) as env:
        runner = OnPolicyRunner(env, cfg=PPOConfig(num_steps=8), device="cpu")
        path, seeds = runner.save_checkpoint(tmp_path / "model.pt"), range(6)
        if not num_workers:
            write_policy(runner.policy, env, tmp_path / "exported", ["torchscript"])
        encoded = as_arrays(env.reset_each(seeds))
    native = [Observing(space).reset(seed=seed)[0] for seed in seeds]
    for file in (path, *([] if num_workers else [tmp_path / "exported"])):
        policy = load_policy(file)
        wanted = policy.predict(encoded)
        assert wanted.std() > 1e-4
        np.testing.assert_array_equal(policy.predict(stacked(native)), wanted)
        for obs, action in zip(native, wanted, strict=True):
            np.testing.assert_allclose(policy.predict(obs), action, atol=1e-6)


def test_a_value_outside_a_discrete_space_is_refused_and_one_hot_vectors_are_taken(tmp_path: Path) -> None:
    env = GymVecEnv([partial(Observing, NATIVE["discrete"])])
    policy = load_policy(OnPolicyRunner(env, cfg=PPOConfig(num_steps=8)).save_checkpoint(tmp_path / "model.pt"))
    for obs in (4, -2, np.array([0, 4])):
        with refused(ObservationError, "Discrete(5, start=-1)"):
            policy.predict(obs)
    np.testing.assert_array_equal(policy.predict(np.eye(5)[2]), policy.predict(1))
    assert policy.predict(np.array([0, 0, 1, 0, 0])).shape == (5, 2)


def test_a_tensor_of_half_precision_is_taken(trained: Callable[[str], Trained]) -> None:
    policy = load_policy(trained("mlp").path)
    obs = torch.linspace(-1, 1, 13).bfloat16()
    np.testing.assert_array_equal(policy.predict(obs), policy.predict(obs.float().numpy()))


def test_an_exported_policy_is_loaded_from_each_of_its_files(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    run = trained("asymmetric")
    export_policy(run.path, tmp_path)
    obs = as_arrays(run.env.reset(seed=0))
    wanted = load_policy(run.path).predict(obs)
    for name in ("policy.onnx", "policy.pt", "policy.json", "."):
        np.testing.assert_allclose(load_policy(tmp_path / name).predict(obs), wanted, atol=1e-5)
    with refused(ConfigError, "deterministic"):
        load_policy(tmp_path).predict(obs, deterministic=False)
    content = (tmp_path / "policy.onnx").read_bytes()
    (tmp_path / "policy.onnx").write_bytes(content[:-1])
    with refused(CheckpointError, "policy.onnx"):
        load_policy(tmp_path / "policy.onnx")
    card = json.loads((tmp_path / "policy.json").read_text())
    for broken in ("", "[]", json.dumps({**card, "format": 99}), json.dumps({**card, "outputs": []})):
        (tmp_path / "policy.json").write_text(broken)
        with refused(CheckpointError, "policy.json"):
            load_policy(tmp_path)
    (tmp_path / "policy.json").unlink()
    with refused(CheckpointError, "policy.json"):
        load_policy(tmp_path / "policy.onnx")


def test_what_is_no_policy_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no checkpoint")
    runner = OnPolicyRunner(make_env("pendulum", 2), actor_class=OwnActor)
    own = runner.save_checkpoint(tmp_path / "own.pt")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "text.pt", own):
        with refused(ApexRLError, path):
            load_policy(path)


def test_a_network_of_ones_own_is_imported_when_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_trust", plugins.Trust())
    (tmp_path / "my_nets.py").write_text(
        "from apexrl import MLPActor\nclass Half(MLPActor):\n    def forward(self, obs):\n"
        "        return super().forward(0.5 * obs)\n"
    )
    env, cls = make_env("pendulum", 2), importlib.import_module("my_nets").Half
    runner = OnPolicyRunner(env, actor_class=cls, actor_cfg={"hidden_dims": (8,)})
    path = runner.save_checkpoint(tmp_path / "own.pt")
    del sys.modules["my_nets"]
    with refused(CheckpointError, "my_nets:Half", "--allow-imports", f"load_checkpoint('{path}')"):
        load_policy(path)
    assert "my_nets" not in sys.modules
    obs = env.reset(seed=0)
    with torch.no_grad():
        wanted = runner.policy.act({"observation": obs}, deterministic=True)["action"]
    np.testing.assert_allclose(load_policy(path, allow_imports=True).predict(obs), wanted, atol=1e-6)
    del sys.modules["my_nets"]


@pytest.mark.slow
def test_no_simulator_is_imported(trained: Callable[[str], Trained]) -> None:
    code = (
        "import sys, numpy as np\nsys.modules['mujoco'] = None\nimport apexrl.envs.registry as registry\n"
        "registry.make_env = None\nfrom apexrl import load_policy\n"
        f"print(load_policy({str(trained('discrete').path)!r}).predict(np.zeros(4)))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("0", "1")


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
        gym.spaces.Box(np.array([-1.5, -np.inf], np.float32), np.array([0.1, 2.0], np.float32)),
        gym.spaces.Box(0, 255, (4, 4, 3), np.uint8),
        gym.spaces.Box(0, 9, (), np.int64),
        gym.spaces.Discrete(3, start=-1),
        gym.spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [2, 3]])),
        gym.spaces.MultiBinary((2, 3)),
        flat_space(gym.spaces.Discrete(3, start=-1)),
        gym.spaces.Dict({"b": gym.spaces.Box(0, 1, (1,)), "a": gym.spaces.Dict({"c": gym.spaces.Box(0, 1, (2,))})}),
    ],
    ids=str,
)
def test_a_space_comes_back_from_plain_values(space: gym.Space[Any]) -> None:
    back = space_from_plain(json.loads(json.dumps(space_to_plain(space), allow_nan=False)))
    assert back == space
    assert back.dtype == space.dtype
    assert getattr(back, "source", None) == getattr(space, "source", None)
    if isinstance(back, gym.spaces.Dict) and isinstance(space, gym.spaces.Dict):
        assert list(back.spaces) == list(space.spaces)
