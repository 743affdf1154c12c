"""envpool's tasks through our adapter, in the environment that has envpool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.refusals import refused
from tests.simulator_session import assert_the_bootstrap_sees_the_true_successor, logged, train

from apexrl.cli.main import main
from apexrl.core.errors import EnvError
from apexrl.envs import check_env, make_env

pytest.importorskip("envpool", reason="envpool has an environment of its own: make test-envpool")
HALFCHEETAH = "envpool/HalfCheetah-v5"


@pytest.mark.parametrize("task", ["CartPole-v1", "HalfCheetah-v5", "Hopper-v5", "FrozenLake-v1", "CheetahRun-v1"])
def test_tasks_keep_the_contract(task: str) -> None:
    env = make_env(f"envpool/{task}", 3, max_episode_steps=30)
    assert check_env(env, num_steps=100) == []
    assert env.gives_final_obs
    assert env.max_episode_steps == 30
    env.close()


def test_images_stay_bytes() -> None:
    env = make_env("envpool/Pong-v5", 2)
    assert env.observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert env.reset(seed=0).dtype == torch.uint8
    env.close()


def test_the_command_line_checks_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "envpool/CartPole-v1"]) == 0
    assert "keeps the environment contract" in capsys.readouterr().out


def test_no_step_of_a_reset_is_seen() -> None:
    # Always pushed to one side, a pole falls after 8 to 11 steps. Each of them earns 1; a reset would earn 0.
    env = make_env("envpool/CartPole-v1", 4)
    env.reset(seed=0)
    length, ends = torch.zeros(4, 1), 0
    for _ in range(60):
        step = env.step(torch.zeros(4, 1, dtype=torch.int64))
        length += 1
        assert step.reward.tolist() == [[1.0]] * 4
        for i in step.terminated.nonzero()[:, 0].tolist():
            assert step.final_obs is not None
            assert step.final_obs[i, 2].abs() > 0.2094  # twelve degrees
            assert step.obs[i, 2].abs() <= 0.05  # where an episode begins
            assert 8 <= length[i] <= 11
            length[i], ends = 0.0, ends + 1
    assert ends > 16
    env.close()


def test_an_ended_episode_leaves_the_others_alone() -> None:
    # Environment 0 falls over and is reset; environment 1 is balanced, as it is beside one that does not fall.
    falling, steady = (make_env("envpool/CartPole-v1", 2) for _ in range(2))
    obs = falling.reset(seed=0)
    steady.reset(seed=0)
    ended = False
    for _ in range(20):
        balance = (obs[1, 2] + 0.3 * obs[1, 3] > 0).long()
        steps = [
            env.step(torch.stack((first, balance))[:, None])
            for env, first in ((falling, 0 * balance), (steady, balance))
        ]
        obs = steps[0].obs
        ended = ended or bool(steps[0].terminated[0])
        assert torch.equal(steps[0].obs[1], steps[1].obs[1])
    assert ended
    falling.close()
    steady.close()


def test_a_time_limit_truncates_and_the_bootstrap_sees_the_true_successor() -> None:
    short, long = (make_env(HALFCHEETAH, 2, max_episode_steps=limit) for limit in (10, 100))
    assert_the_bootstrap_sees_the_true_successor(short, long, limit=10)


def test_two_seeds_differ_and_actions_are_clipped() -> None:
    env = make_env(HALFCHEETAH, 2)
    first = env.reset(seed=0)
    bound = env.step(torch.ones(2, 6)).obs
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, env.reset(seed=1))
    env.reset(seed=0)
    assert torch.equal(env.step(torch.full((2, 6), 5.0)).obs, bound)


def test_it_trains_with_its_metrics_in_the_log(tmp_path: Path) -> None:
    options = {
        "task.num_envs": "4",
        "task.kwargs.max_episode_steps": "16",
        "algo.num_steps": "32",
        "training.total_timesteps": "384",
    }
    numbers = logged(train(HALFCHEETAH, tmp_path / "run", options))
    assert numbers["rollout/episode_len"] == 16.0
    assert numbers["eval/episode_len"] == 16.0
    parts = numbers["reward/reward_run"] + numbers["reward/reward_ctrl"]
    assert parts == pytest.approx(numbers["rollout/return"], rel=1e-4)


def test_what_cannot_be_had_is_said() -> None:
    with refused(EnvError, "envpool", "'HalfCheeta-v5'", "'HalfCheetah-v5'"):
        make_env("envpool/HalfCheeta-v5")
    with refused(EnvError, HALFCHEETAH, "num_workers"):
        make_env(HALFCHEETAH, 2, num_workers=1)
    with refused(EnvError, "envpool", "render"):
        make_env(HALFCHEETAH).render()
