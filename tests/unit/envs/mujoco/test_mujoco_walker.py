from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.refusals import refused

from apexrl.core.errors import ConfigError
from apexrl.envs import MujocoVecEnv, check_env, make_env
from apexrl.envs.mujoco.walker import STANDING, Walker

mujoco: Any = pytest.importorskip("mujoco")

NUM_ENVS = 3


def fields(**changes: Any) -> dict[str, Any]:
    """A Walker that stands at x = 0 with a command of 1 m/s, its clock at 0."""
    heights = np.zeros((1, 8, 3))
    heights[:, (4, 7), 2] = STANDING
    qpos = np.zeros((1, 9))
    qpos[:, 1] = 1.2
    return {
        "qpos": qpos,
        "qvel": np.zeros((1, 9)),
        "userdata": np.array([[1.0, 50.0, 0.0]]),
        "geom_xpos": heights,
    } | changes


def judged(after: dict[str, Any], action: float = 0.0) -> Any:
    return Walker().outcome(fields(), after, np.full((1, 6), action), np.array([0.02]))


def moved(x: float, pitch: float = 0.0, height: float = 1.2) -> dict[str, Any]:
    after = fields()
    after["qpos"][0, :3] = x, height, pitch
    return after


def test_the_contract_holds() -> None:
    env: Any = make_env("mujoco/Walker", NUM_ENVS, num_threads=1, max_episode_steps=15, command_period=6)
    assert env.observation_space.shape == (20,)
    assert check_env(env, num_steps=40) == []


def test_a_perfect_walk_earns_one_per_step() -> None:
    outcome = judged(moved(0.02))
    np.testing.assert_allclose(outcome.reward, 1.0, rtol=1e-12)
    assert not outcome.terminated.any()
    # Half the commanded speed earns half of what tracking can give.
    np.testing.assert_allclose(judged(moved(0.01)).reward, 0.75)
    # A robot that stands still keeps what gait and posture give.
    np.testing.assert_allclose(judged(moved(0.0)).reward, 0.5)
    np.testing.assert_allclose(judged(moved(0.02), action=0.5).reward, 1.0 - 0.01 * 6 * 0.25)
    np.testing.assert_allclose(judged(moved(0.02, pitch=0.2)).reward, 0.8 + 0.2 * math.exp(-1))


@pytest.mark.parametrize(("phase", "foot"), [(math.pi / 2, 4), (-math.pi / 2, 7)])
def test_the_clock_says_which_foot_is_in_the_air(phase: float, foot: int) -> None:
    after = moved(0.02)
    after["userdata"][0, 2] = phase
    on_the_ground = judged(after).metric["gait_reward"]
    after["geom_xpos"][0, foot, 2] += 0.1
    np.testing.assert_allclose(judged(after).metric["gait_reward"], 0.3)
    np.testing.assert_allclose(on_the_ground, 0.3 * math.exp(-4))  # (0.1 / 0.05)²


@pytest.mark.parametrize(("pitch", "height"), [(1.1, 1.2), (-1.1, 1.2), (0.0, 0.7), (0.0, 2.1), (math.nan, 1.2)])
def test_a_fall_ends_the_episode_and_is_a_failure(pitch: float, height: float) -> None:
    outcome = judged(moved(0.02, pitch, height))
    assert outcome.terminated.all()
    assert outcome.metric["fail"].all()


def test_feet_stand_at_the_height_that_the_clock_starts_from() -> None:
    env: Any = MujocoVecEnv("Walker", 1, num_threads=1, reset_noise_scale=0.0)
    env.reset(seed=0)
    for _ in range(10):
        env.step(torch.zeros(1, 6))
    assert env._data[0].geom_xpos[(4, 7), 2] == pytest.approx(STANDING, abs=0.01)


def test_the_observation_has_the_command_and_a_clock_that_turns_once_in_a_stride() -> None:
    env: Any = MujocoVecEnv("Walker", NUM_ENVS, num_threads=1, stride_steps=8, command_range=(0.6, 0.9))
    first = env.reset(seed=0).clone()
    command, clock = first[:, 17], first[:, 18:]
    assert ((command >= 0.6) & (command <= 0.9)).all()
    torch.testing.assert_close(clock.square().sum(1), torch.ones(NUM_ENVS))
    assert len(clock[:, 0].unique()) == NUM_ENVS
    seen = [env.step(torch.zeros(NUM_ENVS, 6)).obs[:, 18:].clone() for _ in range(8)]
    torch.testing.assert_close(seen[-1], clock)
    torch.testing.assert_close(seen[3], -clock)


@pytest.mark.parametrize(
    ("option", "value"),
    [("stride_steps", 0), ("foot_lift", -0.1), ("command_range", [0.0, 1.0]), ("control_cost_weight", math.nan)],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    with refused(ConfigError, f"Walker.{option}", repr(value)):
        MujocoVecEnv("Walker", 1, **{option: value})
