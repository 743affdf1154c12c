"""GymVecEnv against the real environments stepped beside it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.core.metrics import MetricSpec
from apexrl.envs import GymVecEnv, RslVecEnv, as_vec_env, display, gym_make_fns, make_env
from apexrl.envs.adapters import gymnasium as adapter
from apexrl.envs.tasks import TASKS
from apexrl.envs.workers.arrays import flat_space
from apexrl.envs.workers.gym_group import MAX_METRICS, users_frames
from apexrl.envs.workers.process import WorkerProcess

Step = tuple[Any, float, bool, bool, dict[str, Any]]
ONE = spaces.Box(-1.0, 1.0, (1,))


class Scripted(gym.Env[Any, Any]):
    """Returns prepared steps in turn, the observation of step 0 at every reset, and keeps its actions."""

    def __init__(
        self, obs: Any, steps: list[Step], obs_space: spaces.Space[Any], action_space: spaces.Space[Any] = ONE
    ) -> None:
        self.first, self.steps = obs, steps
        self.observation_space, self.action_space = obs_space, action_space
        self.actions: list[Any] = []
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.t, self.actions = 0, []
        return self.first, {}

    def step(self, action: Any) -> Step:
        self.actions.append(action)
        self.t += 1
        return self.steps[(self.t - 1) % len(self.steps)]


def step_of(obs: Any, info: dict[str, Any] | None = None, *, ends: tuple[bool, bool] = (False, False)) -> Step:
    return obs, 0.0, *ends, info or {}


def observe(space: spaces.Space[Any], obs: Any) -> Any:
    """Reset an environment with this observation and return what comes out of the adapter."""
    env = GymVecEnv([lambda: Scripted(obs, [step_of(obs)], space)] * 2)
    return env, env.reset(0)


def act(space: spaces.Space[Any], action: Tensor) -> Any:
    """Send one action ``[1, A]`` and return what the environment got."""
    simulator = Scripted(np.zeros(1), [step_of(np.zeros(1))], ONE, space)
    env = GymVecEnv([lambda: simulator])
    env.reset(0)
    env.step(action)
    return simulator.actions[0]


def random_actions(space: spaces.Space[Any], num_steps: int, num_envs: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(space, spaces.Discrete):
        return torch.randint(int(space.n), (num_steps, num_envs, 1), generator=generator)
    assert isinstance(space, spaces.Box)
    scale = float(space.high.max())
    return scale * (2 * torch.rand(num_steps, num_envs, *space.shape, generator=generator) - 1)


def encode(space: spaces.Space[Any], obs: Any) -> Any:
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[obs - space.start]
    if isinstance(space, spaces.Tuple):
        return {str(i): encode(part, obs[i]) for i, part in enumerate(space.spaces)}
    return np.asarray(obs, np.float32)


def assert_row(obs: Any, i: int, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, part in expected.items():
            assert_row(obs[key], i, part)
    else:
        np.testing.assert_array_equal(obs[i].numpy(), expected)


@pytest.mark.parametrize(
    "env_id",
    ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "HalfCheetah-v5"],
)
def test_steps_are_those_of_the_environments_alone(env_id: str) -> None:
    # A limit of 25 steps makes every task end at least twice.
    make = functools.partial(gym.make, env_id, max_episode_steps=25)
    env, alone = GymVecEnv([make] * 3), [make() for _ in range(3)]
    obs = env.reset_each([5, 6, 7])
    for i, simulator in enumerate(alone):
        assert_row(obs, i, encode(simulator.observation_space, simulator.reset(seed=5 + i)[0]))
    num_ended = 0
    for actions in random_actions(env.action_space, 60, 3):
        step = env.step(actions)
        any_ended = False
        for i, simulator in enumerate(alone):
            action = actions[i].numpy() if actions.is_floating_point() else int(actions[i])
            raw, reward, terminated, truncated, _ = simulator.step(action)
            ended = terminated or truncated
            if ended:
                assert step.final_obs is not None
                assert_row(step.final_obs, i, encode(simulator.observation_space, raw))
                raw, _ = simulator.reset()
            assert_row(step.obs, i, encode(simulator.observation_space, raw))
            assert step.reward[i].tolist() == [float(np.float32(reward))]
            assert step.terminated[i].tolist() == [terminated]
            assert step.truncated[i].tolist() == [truncated and not terminated]
            any_ended |= ended
            num_ended += ended
        assert (step.final_obs is not None) == any_ended
    assert num_ended >= 6


def test_types_and_shapes_of_a_step() -> None:
    env = GymVecEnv(gym_make_fns("CartPole-v1", 4))
    env.reset(0)
    step = env.step(torch.zeros(4, 1, dtype=torch.int64))
    assert isinstance(step.obs, Tensor)
    assert (step.obs.shape, step.obs.dtype) == ((4, 4), torch.float32)
    assert (step.reward.shape, step.reward.dtype) == ((4, 1), torch.float32)
    for flag in (step.terminated, step.truncated):
        assert (flag.shape, flag.dtype) == ((4, 1), torch.bool)
    assert env.max_episode_steps == 500


def test_tensors_share_the_buffers_of_the_simulators() -> None:
    env = GymVecEnv(gym_make_fns("CartPole-v1", 2))
    obs = env.reset(0)
    assert isinstance(obs, Tensor)
    before = obs.clone()
    step = env.step(torch.ones(2, 1, dtype=torch.int64))
    assert step.obs is obs
    assert not torch.equal(obs, before)


def test_another_device_gets_copies() -> None:
    env = GymVecEnv(gym_make_fns("Blackjack-v1", 2), device="meta")
    obs = env.reset(0)
    step = env.step(torch.zeros(2, 1, dtype=torch.int64))  # to stick ends the game
    assert isinstance(obs, TensorDict)
    assert isinstance(step.final_obs, TensorDict)
    tensors = [obs["0"], step.final_obs["0"], step.reward, step.terminated, step.truncated]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert env.spawn(1).device.type == "meta"


def test_terminated_wins_over_truncated() -> None:
    last = step_of(np.ones(1), ends=(True, True))
    env = GymVecEnv([lambda: Scripted(np.zeros(1), [last], ONE)])
    env.reset(0)
    step = env.step(torch.zeros(1, 1))
    assert (step.terminated.item(), step.truncated.item()) == (True, False)
    assert isinstance(step.obs, Tensor)
    assert isinstance(step.final_obs, Tensor)
    assert (step.obs.item(), step.final_obs.item()) == (0.0, 1.0)


# --- Observations


def test_discrete_becomes_one_hot_counted_from_its_start() -> None:
    env, obs = observe(spaces.Discrete(4, start=10), 12)
    assert obs.tolist() == [[0, 0, 1, 0]] * 2
    assert env.observation_space.shape == (4,)


def test_multi_discrete_becomes_concatenated_one_hots() -> None:
    _, obs = observe(spaces.MultiDiscrete([2, 3], start=[0, 5]), np.array([1, 5]))
    assert obs.tolist() == [[0, 1, 1, 0, 0]] * 2


def test_multi_binary_becomes_float() -> None:
    _, obs = observe(spaces.MultiBinary(3), np.array([1, 0, 1], np.int8))
    assert obs.dtype == torch.float32
    assert obs.tolist() == [[1, 0, 1]] * 2


def test_images_stay_bytes_but_vectors_of_bytes_do_not() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    _, obs = observe(spaces.Box(0, 255, (2, 2, 3), np.uint8), image)
    assert obs.dtype == torch.uint8
    np.testing.assert_array_equal(obs[1].numpy(), image)
    _, obs = observe(spaces.Box(0, 255, (3,), np.uint8), np.array([1, 2, 255], np.uint8))
    assert obs.dtype == torch.float32
    assert obs[0].tolist() == [1, 2, 255]


def test_a_number_without_dimensions_gets_one() -> None:
    env, obs = observe(spaces.Box(-1.0, 1.0, ()), np.float32(0.5))
    assert obs.tolist() == [[0.5], [0.5]]
    assert env.observation_space.shape == (1,)


def test_dict_and_tuple_become_named_groups() -> None:
    space = spaces.Dict({"b": spaces.Tuple([spaces.Discrete(2), ONE]), "a": spaces.Dict({"c": ONE})})
    env, obs = observe(space, {"a": {"c": [0.25]}, "b": (1, [0.5])})
    assert isinstance(obs, TensorDict)
    assert obs.batch_size == torch.Size([2])
    assert obs["a", "c"].tolist() == [[0.25], [0.25]]
    assert obs["b", "0"].tolist() == [[0, 1]] * 2
    assert obs["b", "1"].tolist() == [[0.5]] * 2
    assert sorted(env.observation_space["b"].spaces) == ["0", "1"]
    with refused(RuntimeError, "locked"):
        obs["new"] = torch.zeros(2)  # every step returns this object


def test_unsupported_observation_space_is_named() -> None:
    with refused(EnvError, "Observation space", spaces.Text(3)):
        observe(spaces.Text(3), "abc")


def test_wide_bounds_become_infinite() -> None:
    box = flat_space(spaces.Box(-1e300, 1e300, (1,), np.float64))
    assert isinstance(box, spaces.Box)
    assert (box.low.item(), box.high.item()) == (-np.inf, np.inf)


# --- Actions


def test_box_actions_are_clipped_shaped_and_cast() -> None:
    space = spaces.Box(np.full((2, 1), -1.0), np.full((2, 1), 0.5), dtype=np.float64)
    action = act(space, torch.tensor([[-3.0, 3.0]]))
    assert (action.dtype, action.tolist()) == (np.float64, [[-1.0], [0.5]])


def test_integer_box_actions_are_rounded() -> None:
    action = act(spaces.Box(0, 5, (3,), np.int32), torch.tensor([[1.6, 9.0, -2.0]]))
    assert (action.dtype, action.tolist()) == (np.int32, [2, 5, 0])


def test_discrete_actions_count_from_their_start() -> None:
    assert act(spaces.Discrete(3, start=-1), torch.tensor([[2]])) == 1
    action = act(spaces.MultiDiscrete([3, 3], start=[5, 0]), torch.tensor([[1, 2]]))
    assert action.tolist() == [6, 2]
    assert spaces.MultiDiscrete([3, 3], start=[5, 0]).contains(action)


def test_multi_binary_actions() -> None:
    action = act(spaces.MultiBinary(3), torch.tensor([[1, 0, 1]]))
    assert spaces.MultiBinary(3).contains(action)
    assert action.tolist() == [1, 0, 1]


def test_unsupported_action_space_is_named() -> None:
    with refused(EnvError, "Action space", spaces.Dict({"a": ONE})):
        act(spaces.Dict({"a": ONE}), torch.zeros(1, 1))


def test_actions_of_another_shape_are_refused() -> None:
    env = GymVecEnv(gym_make_fns("CartPole-v1", 2))
    env.reset(0)
    with refused(EnvError, [2, 1], [2]):
        env.step(torch.zeros(2, dtype=torch.int64))


def test_environments_need_the_same_spaces() -> None:
    with refused(EnvError, "observation_space", "environment 0", "environment 1"):
        GymVecEnv([*gym_make_fns("CartPole-v1", 1), *gym_make_fns("Acrobot-v1", 1)])


# --- Metrics


def test_metrics_are_found_in_info() -> None:
    info = {"is_success": True, "reward": 3.0, "reward_a": 1, "b_reward": np.float64(2.0), "reward_text": "x", "c": 4}
    env = GymVecEnv([lambda: Scripted(np.zeros(1), [step_of(np.zeros(1), info)], ONE)])
    env.reset(0)
    metric = env.step(torch.zeros(1, 1)).metric
    assert set(env.metric_specs) == {"success", "reward_a", "b_reward"}
    assert env.metric_specs["reward_a"].reduce == "sum"
    assert {name: value.tolist() for name, value in metric.items()} == {
        "success": [[1.0]],
        "reward_a": [[1.0]],
        "b_reward": [[2.0]],
    }


def test_a_metric_that_a_step_lacks_is_nan() -> None:
    nothing = np.zeros(1)
    steps = [step_of(nothing, {"reward_a": 1.0}), step_of(nothing, ends=(False, True)), step_of(nothing, {"x": 7})]
    env = GymVecEnv([lambda: Scripted(nothing, steps, ONE)], metrics=[MetricSpec("x", "max")])
    assert env.metric_specs["x"].reduce == "max"
    env.reset(0)
    for expected in ({"reward_a": 1.0, "x": np.nan}, {"reward_a": np.nan, "x": np.nan}, {"reward_a": np.nan, "x": 7.0}):
        metric = env.step(torch.zeros(1, 1)).metric
        np.testing.assert_equal({name: value.item() for name, value in metric.items()}, expected)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_metrics_are_found_whenever_they_appear(num_workers: int) -> None:
    class Late(gym.Env[Any, Any]):
        """Episodes of three steps; some end with a number in info that no step before had."""

        observation_space = action_space = spaces.Box(-1.0, 1.0, (1,))

        def __init__(self, key: str, first: int) -> None:
            self.key, self.first, self.t = key, first, 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            ends = self.t % 3 == 0
            info = {self.key: 10 * self.t, "other": 1.0} if ends and self.t >= self.first else {"other": 2.0}
            return np.zeros(1, np.float32), 0.0, ends, False, info

    keys = (("is_success", 6), ("is_success", 3), ("late_reward", 6), ("late_reward", 6))
    env = GymVecEnv([functools.partial(Late, *key) for key in keys], num_workers=num_workers)
    env.reset(0)
    nan, found = np.nan, []
    for _ in range(9):
        metric = env.step(torch.zeros(4, 1)).metric
        found.append({name: value.flatten().tolist() for name, value in metric.items()})
        assert set(metric) == set(env.metric_specs), "what a step reports is declared"
    nothing = [nan] * 4
    np.testing.assert_equal(found[:2], [{}] * 2)
    np.testing.assert_equal(found[2], {"success": [nan, 30.0, nan, nan]})
    np.testing.assert_equal(found[3:5], [{"success": nothing}] * 2)
    np.testing.assert_equal(found[5], {"success": [60.0, 60.0, nan, nan], "late_reward": [nan, nan, 60.0, 60.0]})
    np.testing.assert_equal(found[6:8], [{"success": nothing, "late_reward": nothing}] * 2)
    np.testing.assert_equal(found[8], {"success": [90.0, 90.0, nan, nan], "late_reward": [nan, nan, 90.0, 90.0]})
    other = env.spawn(1)
    assert set(other.metric_specs) == {"success", "late_reward"}
    other.close()
    env.close()


def test_a_declared_key_is_found_as_success_too() -> None:
    step = step_of(np.zeros(1), {"is_success": 1.0})
    env = GymVecEnv([lambda: Scripted(np.zeros(1), [step], ONE)], metrics=[MetricSpec("is_success", "last")])
    env.reset(0)
    metric = env.step(torch.zeros(1, 1)).metric
    assert {name: value.item() for name, value in metric.items()} == {"is_success": 1.0, "success": 1.0}


def test_metrics_beyond_the_limit_are_left_out() -> None:
    steps = [step_of(np.zeros(1), {f"reward_{i}": float(i) for i in range(MAX_METRICS + 1)})] * 3
    env = GymVecEnv([lambda: Scripted(np.zeros(1), steps, ONE)])
    env.reset(0)
    with pytest.warns(UserWarning, match=f"{MAX_METRICS} metrics"):
        env.step(torch.zeros(1, 1))
    metric = env.step(torch.zeros(1, 1)).metric
    assert len(metric) == MAX_METRICS
    assert metric["reward_255"].item() == 255.0


def test_a_task_that_declares_its_metrics_takes_no_others() -> None:
    with refused(EnvError, "cartpole", "metrics", ["x"]):
        make_env("cartpole", 1, metrics=[MetricSpec("x")])


def test_half_cheetah_reward_parts_add_up_to_the_reward() -> None:
    env = GymVecEnv(gym_make_fns("HalfCheetah-v5", 2))
    env.reset(0)
    for actions in random_actions(env.action_space, 5, 2):
        step = env.step(actions)
        torch.testing.assert_close(step.metric["reward_forward"] + step.metric["reward_ctrl"], step.reward)


# --- Making, copying, drawing


def test_spawn_repeats_the_make_functions_in_turn() -> None:
    def make(value: float) -> Callable[[], Scripted]:
        return lambda: Scripted(np.array([value]), [step_of(np.zeros(1))], ONE)

    spec = MetricSpec("x")
    env = GymVecEnv([make(0.1), make(0.2)], metrics=[spec]).spawn(3)
    obs = env.reset(0)
    assert isinstance(obs, Tensor)
    torch.testing.assert_close(obs, torch.tensor([[0.1], [0.2], [0.1]]))
    assert env.metric_specs == {"x": spec}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_render_draws_the_environment_asked_for(num_workers: int) -> None:
    env = make_env("CartPole-v1", 2, num_workers=num_workers)
    assert isinstance(env, GymVecEnv)
    alone = gym.make("CartPole-v1", render_mode="rgb_array")
    env.reset_each([0, 1])
    alone.reset(seed=1)
    for _ in range(5):
        env.step(torch.tensor([[0], [1]]))
        alone.step(1)
    image: Any = alone.render()
    np.testing.assert_array_equal(env.render(1), image)
    assert not np.array_equal(env.render(0), image)
    env.close()


def test_render_without_a_mode_says_what_to_do() -> None:
    env = GymVecEnv([lambda: gym.make("CartPole-v1", render_mode=None)])
    env.reset(0)
    by_gymnasium = pytest.warns(UserWarning, match="render")
    with by_gymnasium, refused(EnvError, "Environment 0", "render_mode='rgb_array'"):
        env.render()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, "egl"), ({"DISPLAY": ":0"}, None), ({"WAYLAND_DISPLAY": "w"}, None), ({"MUJOCO_GL": "osmesa"}, "osmesa")],
)
def test_mujoco_draws_by_egl_only_without_a_display(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(display, "_has_egl", lambda: True)
    gym_make_fns("CartPole-v1", 1)
    assert environ.get("MUJOCO_GL") == expected


def test_mujoco_is_not_told_to_use_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(display, "_has_egl", lambda: False)
    display.render_without_display()
    assert environ == {"SDL_VIDEODRIVER": "dummy"}  # pygame shall not look for a screen


def test_an_exception_in_a_step_names_the_environment() -> None:
    class Broken(Scripted):
        def step(self, action: Any) -> Step:
            if action[0] > 0.5:
                raise ZeroDivisionError("boom")
            return super().step(action)

    good, bad = Scripted(np.zeros(1), [step_of(np.zeros(1))], ONE), Broken(np.zeros(1), [step_of(np.zeros(1))], ONE)
    env = GymVecEnv([lambda: good, lambda: bad])
    env.reset(0)
    with refused(EnvError, "ZeroDivisionError: boom", "environment 1") as caught:
        env.step(torch.ones(2, 1))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    line = Broken.step.__code__.co_firstlineno + 2
    said = str(caught.value)
    assert said.endswith(f"(in environment 1) at {__file__}:{line} in step"), "the user's frames and no other"


def test_a_package_whose_name_begins_like_gymnasiums_is_the_users() -> None:
    file = f"{Path(gym.__file__).parent}_robotics/reach.py"
    with refused(ValueError, "far") as caught:
        exec(compile("raise ValueError('far')", file, "exec"))
    assert users_frames(caught.value)[-1] == f"{file}:1 in <module>"


def test_unknown_id_suggests_the_nearest() -> None:
    with refused(EnvError, "'CartPol-v1'", "'CartPole-v1'"):
        gym_make_fns("CartPol-v1", 1)
    nearest = next(iter(TASKS))
    with pytest.raises(EnvError, match=f"Did you mean '{nearest}'"):
        make_env(nearest + "x")


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise gym.error.DependencyNotInstalled("MuJoCo is not installed")

    monkeypatch.setattr(adapter, "load_env_creator", fail)
    with refused(EnvError, "HalfCheetah-v5", "pip install 'apexrl[mujoco]'"):
        gym_make_fns("HalfCheetah-v5", 1)


def test_robotics_ids_are_registered_on_demand() -> None:
    pytest.importorskip("gymnasium_robotics")
    assert adapter.find_gym_id("FetchReach-v4") in ("FetchReach-v4", "gymnasium_robotics:FetchReach-v4")


def test_make_env_makes_shipped_tasks_and_gymnasium_ids() -> None:
    name, task = next(iter(TASKS.items()))
    assert type(make_env(name, 3)) is task
    env = make_env("Pendulum-v1", 2, g=0.0)
    assert (env.num_envs, env.max_episode_steps) == (2, 200)
    with refused(EnvError, name, "num_workers"):
        make_env(name, 3, num_workers=2)


def test_as_vec_env() -> None:
    class Simulator:
        num_envs, num_actions = 2, 1

        def get_observations(self) -> Tensor:
            return torch.zeros(2, 3)

        def step(self, actions: Tensor) -> Any:
            raise NotImplementedError

    env = GymVecEnv(gym_make_fns("CartPole-v1", 1))
    assert as_vec_env(env) is env
    assert isinstance(as_vec_env(Simulator()), RslVecEnv)
    for other in (gym.make("CartPole-v1"), gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")):
        with refused(EnvError, "GymVecEnv", "make_env"):
            as_vec_env(other)
    with refused(EnvError, "int", "VecEnv"):
        as_vec_env(3)


# --- Workers


def test_workers_give_the_same_trajectory_bit_for_bit() -> None:
    fns = gym_make_fns("CartPole-v1", 5, max_episode_steps=20)
    here, there = GymVecEnv(fns), GymVecEnv(fns, num_workers=2)
    np.testing.assert_array_equal(here.reset(3), there.reset(3))
    num_ended = 0
    for actions in random_actions(here.action_space, 60, 5):
        a, b = here.step(actions), there.step(actions)
        for x, y in zip(a[:4], b[:4], strict=True):
            np.testing.assert_array_equal(x, y)
        assert (a.final_obs is None) == (b.final_obs is None)
        if a.final_obs is not None and b.final_obs is not None:
            ended = (a.terminated | a.truncated).squeeze(1)
            num_ended += int(ended.sum())
            np.testing.assert_array_equal(a.final_obs[ended], b.final_obs[ended])
    assert num_ended > 10
    assert there.max_episode_steps == 20
    there.close()


def test_workers_report_groups_and_metrics() -> None:
    def make() -> gym.Env[Any, Any]:
        import gymnasium

        class Task(gymnasium.Env[Any, Any]):
            observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(3)})
            action_space = gymnasium.spaces.Discrete(2)

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                super().reset(seed=seed)
                self.value = 0 if seed is None else seed
                return {"a": 0}, {}

            def step(self, action: Any) -> Any:
                return {"a": 1}, 0.0, False, False, {"reward_a": float(self.value)}

        return Task()

    env = GymVecEnv([make] * 3, num_workers=3)
    env.reset_each([10, 11, 12])
    step = env.step(torch.zeros(3, 1))
    assert isinstance(step.obs, TensorDict)
    assert step.obs["a"].tolist() == [[0, 1, 0]] * 3
    assert step.metric["reward_a"].tolist() == [[10], [11], [12]]
    env.close()


def processes(env: GymVecEnv) -> list[subprocess.Popen[bytes]]:
    group: Any = env._group
    return [worker.process for worker in group.workers]


def faulty(fault: str) -> Callable[[], gym.Env[Any, Any]]:
    """An environment whose second action does what ``fault`` says; by value, so that workers need not import this."""

    def make() -> gym.Env[Any, Any]:
        import gymnasium

        class Faulty(gymnasium.Env[Any, Any]):
            observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
            action_space = gymnasium.spaces.Discrete(1)

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                super().reset(seed=seed)
                self.t = 0
                return [0.0], {}

            def step(self, action: Any) -> Any:
                self.t += 1
                if self.t == 2:
                    exec(fault)
                return [0.0], 0.0, False, False, {}

        return Faulty()

    return make


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("raise KeyError('lost')", ["Worker 1", "KeyError: 'lost'", "test_gymnasium.py", "in step"]),
        ("import os; os._exit(7)", ["Worker 1", "exit code 7"]),
        ("import os; os.kill(os.getpid(), 9)", ["Worker 1", "SIGKILL"]),
        ("import time; time.sleep(60)", ["Worker 1", "step_timeout", "1 s"]),
    ],
)
def test_a_worker_that_fails_is_an_error_of_its_environments(fault: str, named: list[str]) -> None:
    fine, bad = faulty("pass"), faulty(fault)
    env = GymVecEnv([fine, fine, bad, bad], num_workers=2, step_timeout=1.0)
    env.reset(0)
    action = torch.zeros(4, 1, dtype=torch.int64)
    env.step(action)
    begin, workers = time.monotonic(), processes(env)
    assert len(workers) == 2
    with refused(EnvError, "environments 2 to 3", *named):
        env.step(action)
    assert time.monotonic() - begin < 10.0
    env.close()
    assert all(process.poll() is not None for process in workers)


def test_workers_answer_after_one_has_raised() -> None:
    fine, bad = faulty("pass"), faulty("raise ValueError")
    env = GymVecEnv([bad, fine], num_workers=2)
    env.reset(0)
    action = torch.zeros(2, 1, dtype=torch.int64)
    env.step(action)
    with pytest.raises(EnvError):
        env.step(action)
    env.reset(0)
    assert env.step(action).reward.tolist() == [[0.0], [0.0]]
    env.close()
    with refused(EnvError, "closed"):
        env.step(action)


def test_an_interrupted_step_does_not_shift_the_answers_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    env, peer = (GymVecEnv([lambda: gym.make("CartPole-v1")] * 2, num_workers=w) for w in (2, 0))
    env.reset(0)
    action = torch.zeros(2, 1, dtype=torch.int64)

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            env.step(action)
    for one in (env, peer):
        one.reset(1)
        one.step(action)
    state = env.state_dict()
    assert state is not None
    assert [len(each["actions"]) for each in state["envs"]] == [1, 1]
    assert torch.equal(env.step(action).obs, peer.step(action).obs)
    env.close()


def test_a_worker_that_cannot_make_its_environment_says_why() -> None:
    def make() -> gym.Env[Any, Any]:
        raise OSError("no such robot")

    with refused(EnvError, "Worker 0", "OSError: no such robot"):
        GymVecEnv([make, make], num_workers=2)


def test_workers_do_not_import_torch_and_ignore_ctrl_c() -> None:
    def make() -> gym.Env[Any, Any]:
        import sys

        import gymnasium

        if "torch" in sys.modules:
            raise RuntimeError("torch was imported")
        return gymnasium.make("CartPole-v1")

    env = GymVecEnv([make], num_workers=1)
    env.reset(0)
    os.kill(processes(env)[0].pid, signal.SIGINT)
    assert env.step(torch.zeros(1, 1)).reward.item() == 1.0
    env.close()


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "sys.exit(0)", "del env; gc.collect(); time.sleep(5)"])
def test_no_worker_outlives_its_parent(how: str) -> None:
    script = f"""
        import gc, os, sys, time
        from apexrl.envs import make_env
        env = make_env("CartPole-v1", 2, num_workers=2)
        env.reset(0)
        print(*[worker.process.pid for worker in env._group.workers], flush=True)
        {how}
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 4.0
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_is_running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
