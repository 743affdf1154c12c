"""ManiSkill's PickCube through our adapter, in the environment that has ManiSkill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from tests.simulator_session import assert_the_bootstrap_sees_the_true_successor, logged, train

from apexrl.cli.main import main
from apexrl.core.errors import EnvError
from apexrl.core.metrics import EpisodeMetrics, fold_episodes
from apexrl.envs import ManiSkillVecEnv, check_env, make_env
from apexrl.rollout import rollout

pytest.importorskip("mani_skill", reason="ManiSkill has an environment of its own: make test-maniskill")
TASK = "maniskill/PickCube-v1"


class _Found:
    """Stands before ManiSkill's vector environment and keeps what it returned."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.infos: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, action: Any) -> Any:
        result = self.inner.step(action)
        self.infos.append(result[4])
        return result


@pytest.fixture
def short() -> Iterator[ManiSkillVecEnv]:
    env = make_env(TASK, 2, max_episode_steps=8)
    assert isinstance(env, ManiSkillVecEnv)
    yield env
    env.close()


def test_it_keeps_the_contract(short: ManiSkillVecEnv) -> None:
    assert check_env(short, num_steps=25) == []
    assert short.gives_final_obs
    assert (short.max_episode_steps, short.observation_space.shape, short.video_fps) == (8, (42,), 20.0)


def test_named_groups_and_ends_at_success_keep_the_contract() -> None:
    env = make_env(TASK, 2, max_episode_steps=8, obs_mode="state_dict", ignore_terminations=False)
    assert check_env(env, num_steps=20) == []
    obs = env.reset(seed=0)
    assert isinstance(obs, TensorDict)
    assert obs["extra", "is_grasped"].shape == (2, 1)
    env.close()


def test_the_command_line_checks_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", TASK, "--num-envs", "1"]) == 0
    assert "keeps the environment contract" in capsys.readouterr().out


def test_the_bootstrap_sees_the_true_successor(short: ManiSkillVecEnv) -> None:
    long = make_env(TASK, 2, max_episode_steps=50)
    assert_the_bootstrap_sees_the_true_successor(short, long, limit=8)
    long.close()


def _solved(env: ManiSkillVecEnv, steps: set[int]) -> list[_Found]:
    """Let environment 0 be solved after these steps of its episode, whatever it does."""
    found = [_Found(part) for part in env._parts]
    env._parts = found
    base = found[0].base_env
    evaluate = base.evaluate

    def solved() -> dict[str, Any]:
        return {**evaluate(), "success": torch.tensor([int(base.elapsed_steps[0]) in steps])}

    base.evaluate = solved
    return found


def test_success_is_counted_as_maniskill_counts_it() -> None:
    vector = pytest.importorskip("mani_skill.vector.wrappers.gymnasium")

    def make(size: int) -> Any:
        options = {"obs_mode": "state", "render_backend": "none", "max_episode_steps": 6, "record_metrics": True}
        return vector.ManiSkillVectorEnv("PickCube-v1", num_envs=size, ignore_terminations=True, **options)

    env = ManiSkillVecEnv(make, 2)
    found = _solved(env, {2, 3})
    batch, _ = rollout(env, lambda _: {"action": torch.zeros(2, 8)}, {"observation": env.reset(seed=0)}, 6)
    episodes = fold_episodes(batch, env.metric_specs, EpisodeMetrics())
    assert not batch["terminated"].any()
    for i, part in enumerate(found):
        theirs = part.infos[-1]["final_info"]["episode"]
        ours = {name: episodes.value[name][0, i].item() for name in (*theirs, "episode_len")}
        assert ours == pytest.approx({name: float(value[0]) for name, value in theirs.items()}, rel=1e-5)
    assert episodes.value["success_once"][0].tolist() == [1.0, 0.0]
    assert episodes.value["success_at_end"][0].tolist() == [0.0, 0.0]
    env.close()


def test_success_in_the_last_step_is_not_lost_in_the_reset(short: ManiSkillVecEnv) -> None:
    # After the reset info says that the new episode is not solved.
    _solved(short, {8})
    batch, _ = rollout(short, lambda _: {"action": torch.zeros(2, 8)}, {"observation": short.reset(seed=0)}, 8)
    assert batch["metric", "success"][:, 0, 0].tolist() == [0.0] * 7 + [1.0]
    assert batch["truncated"][-1].tolist() == [[True], [True]]


def test_success_at_the_time_limit_terminates() -> None:
    env = make_env(TASK, 2, max_episode_steps=4, ignore_terminations=False)
    assert isinstance(env, ManiSkillVecEnv)
    _solved(env, {4})
    env.reset(seed=0)
    for _ in range(4):
        step = env.step(torch.zeros(2, 8))
    assert step.terminated.tolist() == [[True], [False]]
    assert step.truncated.tolist() == [[False], [True]]
    env.close()


def test_without_ignoring_an_end_success_terminates_one_environment_alone() -> None:
    env = make_env(TASK, 2, max_episode_steps=8, ignore_terminations=False)
    assert isinstance(env, ManiSkillVecEnv)
    _solved(env, {3})
    obs = env.reset(seed=0)
    for _ in range(3):
        step = env.step(torch.zeros(2, 8))
    assert step.terminated.tolist() == [[True], [False]]
    assert not step.truncated.any()
    assert step.final_obs is not None
    assert not torch.equal(step.final_obs[0], step.obs[0])
    assert torch.equal(step.final_obs[1], step.obs[1])
    assert not torch.equal(step.obs[0], obs[0])
    env.close()


def test_it_trains_with_its_metrics_in_the_log(tmp_path: Path) -> None:
    options = {
        "task.num_envs": "2",
        "task.kwargs.max_episode_steps": "16",
        "algo.num_steps": "32",
        "training.total_timesteps": "192",
    }
    lines = train(TASK, tmp_path / "run", options)
    numbers = logged(lines)
    assert numbers["rollout/episode_len"] == 16.0
    assert {"rollout/success_once", "rollout/success_at_end", "eval/success_once", "task/is_grasped"} <= numbers.keys()
    assert 0.0 < numbers["rollout/reward"] < 1.0


def test_what_cannot_be_had_is_said() -> None:
    with refused(EnvError, "ManiSkill", "'PickCub-v1'", "'PickCube-v1'"):
        make_env("maniskill/PickCub-v1")
    env = make_env(TASK, 1)
    with refused(EnvError, "ManiSkill", "render"):
        env.render()
    env.close()


def test_without_a_vulkan_device_the_message_says_what_to_do() -> None:
    command = [sys.executable, "-m", "apexrl.cli", "check-env", TASK]
    without = os.environ | {"VK_ICD_FILENAMES": "/nowhere.json"}
    answer = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "ManiSkill needs a Vulkan device" in answer.stderr
    assert "Traceback" not in answer.stderr
