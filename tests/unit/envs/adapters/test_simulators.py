"""Simulators by name, where they are not installed; what Isaac Lab and mjlab have in common; Gymnasium-Robotics."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from tests.simulator_session import assert_the_bootstrap_sees_the_true_successor, logged, train
from torch import Tensor

from apexrl.cli.main import main
from apexrl.core.errors import EnvError
from apexrl.envs import LabSimulator, RslVecEnv, VecEnv, check_env, make_env
from apexrl.envs.adapters import lab
from apexrl.envs.tasks import TASKS

PACKAGES = {
    "maniskill/PickCube-v1": ("mani_skill", "pip install mani-skill"),
    "mjlab/Mjlab-Velocity-Flat-Unitree-Go1": ("mjlab", "pip install mjlab"),
    "isaaclab/Isaac-Ant-v0": ("isaaclab", "follow Isaac Lab's installation guide"),
    "envpool/HalfCheetah-v5": ("envpool", "pip install 'apexrl[envpool]'"),
}


@pytest.mark.parametrize(("task", "package", "advice"), [(task, *known) for task, known in PACKAGES.items()])
def test_a_simulator_that_is_not_installed_says_how_to_get_it(
    task: str, package: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    assert main(["check-env", task]) == 2
    said = capsys.readouterr().err
    assert f"{package} is not installed" in said
    assert advice in said
    assert "docs/environments.md" in said


def test_a_simulator_that_is_broken_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "envpool.py").write_text("import a_part_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "envpool", raising=False)
    with refused(EnvError, "envpool", "'a_part_that_is_missing'"):
        make_env("envpool/HalfCheetah-v5")


def test_simulators_take_no_workers() -> None:
    with refused(EnvError, "maniskill/PickCube-v1", "num_workers"):
        make_env("maniskill/PickCube-v1", 2, num_workers=1)


# Isaac Lab and mjlab


@dataclass
class LabConfig:
    """Those fields of a configuration that the adapter reads."""

    auto_reset: bool = True
    is_finite_horizon: bool = False
    limits: list[int] = field(default_factory=lambda: [3, 3])
    failures: list[int] = field(default_factory=lambda: [0, 0])
    """Steps of an episode after which it fails; 0 for never."""


class Lab:
    """Two environments that count their steps, built as those of Isaac Lab are; every observation has new noise."""

    num_envs, device, max_episode_length, render_mode = 2, "cpu", 3, None
    single_action_space = gym.spaces.Box(-np.inf, np.inf, (1,))

    def __init__(self, cfg: LabConfig) -> None:
        self.cfg = cfg
        self.clock, self.drawn = torch.zeros(2), 0
        self.metrics = {"error": torch.zeros(2)}

    @property
    def command_manager(self) -> Any:
        return SimpleNamespace(active_terms=["twist"], get_term=lambda name: self)

    @property
    def unwrapped(self) -> Lab:
        return self

    def observe(self) -> dict[str, Tensor]:
        self.drawn += 1
        return {"policy": torch.stack((self.clock, torch.full((2,), float(self.drawn))), dim=1)}

    def reset(self, seed: int | None = None, env_ids: Tensor | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.drawn = self.drawn if seed is None else seed
        self.clock[slice(None) if env_ids is None else env_ids] = 0.0
        self.metrics["error"] += 1.0  # everywhere, as mjlab does
        return self.observe(), {"log": {"Episode/ended": 2.0 if env_ids is None else len(env_ids)}}

    def step(self, actions: Tensor) -> Any:
        self.clock += 1
        truncated = self.clock >= torch.tensor(self.cfg.limits)
        terminated = self.clock == torch.tensor(self.cfg.failures)
        if self.cfg.auto_reset:
            self.clock[terminated | truncated] = 0.0
        return self.observe(), torch.ones(2), terminated, truncated, {"log": {}}

    def close(self) -> None: ...


def wrapped(**options: Any) -> RslVecEnv:
    return RslVecEnv(LabSimulator(Lab(LabConfig(**options))))


def run(env: RslVecEnv, num_steps: int) -> Any:
    env.reset(seed=0)
    for _ in range(num_steps):
        step = env.step(torch.zeros(2, 1))
    return step


def test_a_lab_that_leaves_the_reset_to_us_gives_the_last_observation() -> None:
    env = wrapped(auto_reset=False, limits=[2, 3])
    assert env.gives_final_obs
    step = run(env, 2)
    assert step.truncated.tolist() == [[True], [False]]
    assert step.final_obs["policy"][0, 0] == 2.0
    # The running one keeps the noise that it had (the third observation); the new episode has its own (the fourth).
    assert step.obs["policy"].tolist() == [[0.0, 4.0], [2.0, 3.0]]
    assert step.log == {"Episode/ended": 1.0}
    # Both began with the reset of both, and one was reset again.
    assert env.simulator.wrapped.metrics["error"].tolist() == [3.0, 2.0]
    assert env.simulator.get_observations() is step.obs


def test_a_lab_that_resets_by_itself_hides_it() -> None:
    env = wrapped(limits=[2, 3])
    step = run(env, 2)
    assert not env.gives_final_obs
    assert step.final_obs is None
    assert step.truncated.tolist() == [[True], [False]]


def test_failing_at_the_time_limit_is_a_failure() -> None:
    step = run(wrapped(limits=[2, 3], failures=[2, 0]), 2)
    assert step.terminated.tolist() == [[True], [False]]
    assert not step.truncated.any()


def test_with_a_finite_horizon_the_time_limit_is_an_end() -> None:
    step = run(wrapped(limits=[2, 2], is_finite_horizon=True), 2)
    assert step.terminated.all()


@pytest.mark.parametrize("auto_reset", [True, False])
def test_labs_keep_the_contract(auto_reset: bool) -> None:
    assert check_env(wrapped(auto_reset=auto_reset), num_steps=20) == []


def test_an_environment_for_evaluation_is_made_with_as_many_as_are_wanted() -> None:
    asked = []

    def make(size: int) -> LabSimulator:
        asked.append(size)
        return LabSimulator(Lab(LabConfig()))

    RslVecEnv(make(2), make=make).spawn(7).spawn(9)
    assert asked == [2, 7, 9]


ISAAC = {
    "isaaclab/app.py": """
launched = []

class AppLauncher:
    def __init__(self, **options):
        launched.append(options)
        self.app = "Isaac Sim"
""",
    "isaaclab_tasks/__init__.py": """
import gymnasium
from isaaclab.app import launched

assert launched, "Isaac Sim must run before this can be imported"
gymnasium.register("Isaac-Count-v0", "isaaclab_tasks:Count")
""",
    "isaaclab_tasks/utils.py": """
from tests.unit.envs.adapters.test_simulators import LabConfig

def parse_env_cfg(task_name, device="cuda:0", num_envs=None, use_fabric=None):
    assert (task_name, device, num_envs) == ("Isaac-Count-v0", "cuda:0", 2)
    return LabConfig()
""",
}
"""Isaac Lab needs Isaac Sim and a GPU; modules with its names stand in for it, and load in the order that it needs."""


def forget_isaac_sim() -> None:
    lab._start_isaac_sim.cache_clear()


def test_isaac_lab_is_started_before_its_tasks_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, code in ISAAC.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gym, "make", lambda id, cfg: Lab(cfg))
    forget_isaac_sim()
    env = make_env("isaaclab/Isaac-Count-v0", 2, device="cuda:0", limits=[2, 2])
    assert sys.modules["isaaclab.app"].launched == [{"headless": True, "device": "cuda:0"}]
    assert not env.gives_final_obs
    assert not env.can_spawn
    env.reset()
    assert not env.step(torch.zeros(2, 1)).truncated.any()
    assert env.step(torch.zeros(2, 1)).truncated.all()
    with refused(EnvError, "Isaac Sim", "one simulation"):
        env.spawn(2)
    with refused(EnvError, "Isaac-Count-v0", "'limit'", "'limits'"):
        make_env("isaaclab/Isaac-Count-v0", 2, device="cuda:0", limit=[2, 2])
    with refused(EnvError, "'Isaac-Coun-v0'", "'Isaac-Count-v0'"):
        make_env("isaaclab/Isaac-Coun-v0", 2, device="cuda:0")
    assert len(sys.modules["isaaclab.app"].launched) == 1
    forget_isaac_sim()
    del gym.registry["Isaac-Count-v0"]
    for name in ("isaaclab", "isaaclab.app", "isaaclab_tasks", "isaaclab_tasks.utils"):
        sys.modules.pop(name, None)


def test_where_there_can_be_no_second_environment_evaluation_is_off_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def only_one(self: VecEnv, num_envs: int) -> VecEnv:
        raise EnvError("There is one simulation a process")

    monkeypatch.setattr(TASKS["cartpole"], "can_spawn", False)
    monkeypatch.setattr(TASKS["cartpole"], "spawn", only_one)
    options = {
        "task.id": "cartpole",
        "task.num_envs": "4",
        "algo.num_steps": "8",
        "algo.num_minibatches": "2",
        "features.save_plot": "false",
        "training.total_timesteps": "64",
        "training.eval_interval": "1",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert main(["train", "cartpole_ppo", "--run-dir", str(tmp_path / "run"), *words]) == 0
    said = capsys.readouterr().out
    assert said.count("there is no evaluation in this run") == 1
    assert "No video: There is one simulation a process" in said
    assert not (tmp_path / "run" / "evaluations.jsonl").exists()


def test_the_simulator_that_was_meant_is_named() -> None:
    known = "mujoco/NAME, maniskill/NAME, mjlab/NAME, isaaclab/NAME"
    with refused(EnvError, "'maniskil/PickCube-v1'", "'maniskill/PickCube-v1'", known):
        make_env("maniskil/PickCube-v1")


# Gymnasium-Robotics


def test_fetch_keeps_the_contract_and_the_bootstrap_sees_the_true_successor() -> None:
    pytest.importorskip("gymnasium_robotics")
    short, long = (make_env("FetchReach-v4", 2, max_episode_steps=limit) for limit in (8, 50))
    assert check_env(short, num_steps=20) == []
    obs = short.reset(seed=0)
    assert isinstance(obs, TensorDict)
    assert {name: group.shape[1] for name, group in obs.items()} == {
        "observation": 10,
        "achieved_goal": 3,
        "desired_goal": 3,
    }
    assert_the_bootstrap_sees_the_true_successor(short, long, limit=8)


def test_fetch_trains_with_its_success_in_the_log(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium_robotics")
    options = {
        "task.num_envs": "2",
        "task.kwargs.max_episode_steps": "8",
        "algo.num_steps": "16",
        "training.total_timesteps": "96",
    }
    numbers = logged(train("FetchReach-v4", tmp_path / "run", options))
    assert numbers["rollout/episode_len"] == 8.0
    assert {"rollout/success_once", "rollout/success_at_end", "eval/success_once"} <= numbers.keys()
