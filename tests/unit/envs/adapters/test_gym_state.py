"""Saving Gymnasium environments and going on from the saved state, bit for bit."""

from __future__ import annotations

import functools
import io
import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import EnvStateError
from apexrl.core.types import EnvStep
from apexrl.envs import GymVecEnv
from apexrl.envs.workers import gym_group

MUJOCO = [
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
    "Ant-v5",
    "Humanoid-v5",
    "Swimmer-v5",
    "Reacher-v5",
    "Pusher-v5",
    "InvertedPendulum-v5",
    "InvertedDoublePendulum-v5",
]
OTHERS = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "Blackjack-v1", "FrozenLake-v1", "Taxi-v4"]


def through_a_file(state: dict[str, Any] | None) -> dict[str, Any]:
    assert state is not None
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def random_actions(env: GymVecEnv, num_steps: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(env.action_space, spaces.Discrete):
        return torch.randint(int(env.action_space.n), (num_steps, env.num_envs, 1), generator=generator)
    assert env.action_space.shape is not None
    return 2 * torch.rand(num_steps, env.num_envs, *env.action_space.shape, generator=generator) - 1


def leaves(obs: Any) -> list[Tensor]:
    return [obs] if isinstance(obs, Tensor) else [x for key in sorted(obs.keys()) for x in leaves(obs[key])]


def numbers(step: EnvStep) -> list[bytes]:
    """Every bit of a step that has a meaning."""
    ended = (step.terminated | step.truncated).squeeze(1)
    final = [] if step.final_obs is None else [x[ended] for x in leaves(step.final_obs)]
    tensors = [*leaves(step.obs), *final, step.reward, step.terminated, step.truncated, *step.metric.values()]
    return [x.numpy().tobytes() for x in tensors]


def assert_goes_on_alike(env: GymVecEnv, other: GymVecEnv, num_steps: int) -> int:
    """Step both with the same actions, compare all bits, and return how many episodes ended."""
    num_ended = 0
    for t, actions in enumerate(random_actions(env, num_steps, seed=99)):
        a, b = env.step(actions), other.step(actions)
        assert numbers(a) == numbers(b), f"step {t} differs"
        num_ended += int((a.terminated | a.truncated).sum())
    return num_ended


def run(env: GymVecEnv, num_steps: int, seed: int | None = 3) -> None:
    env.reset(seed)
    for actions in random_actions(env, num_steps, seed=7):
        env.step(actions)


@pytest.mark.parametrize("env_id", MUJOCO + OTHERS)
# Step 17 lies in the first episode, step 38 in a later one (the limit is 25).
@pytest.mark.parametrize("num_steps", [17, 38])
def test_a_fresh_environment_goes_on_from_the_saved_state(env_id: str, num_steps: int) -> None:
    make = functools.partial(gym.make, env_id, max_episode_steps=25)
    env, other = GymVecEnv([make] * 2), GymVecEnv([make] * 2)
    run(env, num_steps)
    other.load_state_dict(through_a_file(env.state_dict()))
    assert assert_goes_on_alike(env, other, 60) >= 4


@pytest.mark.parametrize("env_id", ["Ant-v5", "CartPole-v1"])
def test_the_same_object_goes_back(env_id: str) -> None:
    env = GymVecEnv([functools.partial(gym.make, env_id, max_episode_steps=25)] * 2)
    run(env, 30)
    state = through_a_file(env.state_dict())
    actions = random_actions(env, 40, seed=1)
    before = [numbers(env.step(action)) for action in actions]
    env.load_state_dict(state)
    assert [numbers(env.step(action)) for action in actions] == before


@pytest.mark.parametrize("seed", [None, 3])
def test_right_after_reset(seed: int | None) -> None:
    make = functools.partial(gym.make, "CartPole-v1")
    env, other = GymVecEnv([make] * 2), GymVecEnv([make] * 2)
    env.reset(seed)
    other.load_state_dict(through_a_file(env.state_dict()))
    assert_goes_on_alike(env, other, 30)


def test_a_restored_environment_can_be_saved_again() -> None:
    # The episodes differ in length when they are saved, so the second state mixes replayed and new actions.
    make = functools.partial(gym.make, "CartPole-v1")
    first, second, third = (GymVecEnv([make] * 4) for _ in range(3))
    run(first, 33)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert_goes_on_alike(first, second, 3)
    third.load_state_dict(through_a_file(second.state_dict()))
    assert_goes_on_alike(first, third, 40)


def test_a_wrapped_mujoco_task_is_replayed() -> None:
    def make() -> gym.Env[Any, Any]:
        return FrameStackObservation(gym.make("HalfCheetah-v5", max_episode_steps=25), 3)

    env, other = GymVecEnv([make]), GymVecEnv([make])
    run(env, 38)
    other.load_state_dict(through_a_file(env.state_dict()))
    assert_goes_on_alike(env, other, 30)


def test_a_mujoco_task_of_another_package_is_replayed() -> None:
    from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

    class Tired(HalfCheetahEnv):
        """Its reward falls with a count that the simulator does not hold."""

        def reset_model(self) -> Any:
            self.count = 0
            return super().reset_model()  # type: ignore[no-untyped-call]

        def step(self, action: Any) -> Any:
            self.count += 1
            obs, _, *rest = super().step(action)  # type: ignore[no-untyped-call]
            return obs, -self.count, *rest

    env, other = GymVecEnv([Tired]), GymVecEnv([Tired])
    run(env, 5)
    other.load_state_dict(through_a_file(env.state_dict()))
    action = torch.zeros(1, 6)
    assert [env.step(action).reward.item(), other.step(action).reward.item()] == [-6.0, -6.0]


def test_workers_and_this_process_share_the_format() -> None:
    make = functools.partial(gym.make, "Hopper-v5", max_episode_steps=25)
    there, here = GymVecEnv([make] * 3, num_workers=2), GymVecEnv([make] * 3)
    run(there, 20)
    here.load_state_dict(through_a_file(there.state_dict()))
    assert_goes_on_alike(there, here, 30)
    there.load_state_dict(through_a_file(here.state_dict()))
    assert_goes_on_alike(there, here, 30)
    there.close()


class Walk(gym.Env[Any, Any]):
    """A walk whose steps come from ``draw``."""

    observation_space = spaces.Dict({"at": spaces.Box(-np.inf, np.inf, (1,)), "on": spaces.Discrete(2)})
    action_space = spaces.Discrete(2)

    def draw(self) -> float:
        return float(self.np_random.normal())

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = self.draw()
        return {"at": [self.at], "on": 0}, {}

    def step(self, action: Any) -> Any:
        self.at += self.draw()
        return {"at": [self.at], "on": 1}, 0.0, False, False, {}


class GlobalWalk(Walk):
    def draw(self) -> float:
        return random.random()


class SeededOnceWalk(Walk):
    """Draws from a second generator, which only a reset with a seed makes."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None or not hasattr(self, "second"):
            self.second = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def draw(self) -> float:
        return float(self.second.normal())


def test_grouped_observations_are_restored() -> None:
    env, other = GymVecEnv([Walk] * 2), GymVecEnv([Walk] * 2)
    run(env, 10)
    other.load_state_dict(through_a_file(env.state_dict()))
    assert_goes_on_alike(env, other, 10)


def test_a_seeded_second_generator_is_made_again() -> None:
    env, other = GymVecEnv([SeededOnceWalk] * 2), GymVecEnv([SeededOnceWalk] * 2)
    run(env, 10)
    other.load_state_dict(through_a_file(env.state_dict()))
    assert_goes_on_alike(env, other, 10)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_random_numbers_are_an_error_that_names_the_environment(num_workers: int) -> None:
    walk = functools.partial(Walk)
    env = GymVecEnv([walk, GlobalWalk], num_workers=num_workers)
    run(env, 10)
    state = through_a_file(env.state_dict())
    with refused(EnvStateError, "Environment 1", "GlobalWalk", "observation", "np_random"):
        env.load_state_dict(state)
    env.close()


def test_states_of_other_environments_are_refused() -> None:
    env = GymVecEnv([functools.partial(gym.make, "CartPole-v1")] * 2)
    run(env, 3)
    state = through_a_file(env.state_dict())
    with refused(EnvStateError, "2 environments", 1):
        GymVecEnv([functools.partial(gym.make, "CartPole-v1")]).load_state_dict(state)
    with refused(EnvStateError, "Environment 0", "AcrobotEnv", "CartPoleEnv"):
        GymVecEnv([functools.partial(gym.make, "Acrobot-v1")] * 2).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_there_is_no_state_before_the_first_reset(num_workers: int) -> None:
    env = GymVecEnv([functools.partial(gym.make, "CartPole-v1")], num_workers=num_workers)
    assert env.state_dict() is None
    env.close()


def test_an_endless_episode_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_group, "MAX_REPLAY", 10)
    env = GymVecEnv([Walk] * 2)
    run(env, 20)
    assert env.state_dict() is not None
    run(env, 21)
    assert env.state_dict() is None
    env.reset(0)
    assert env.state_dict() is not None


def test_short_episodes_outlive_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_group, "MAX_REPLAY", 30)
    make = functools.partial(gym.make, "CartPole-v1", max_episode_steps=25)
    env, other = GymVecEnv([make] * 2), GymVecEnv([make] * 2)
    run(env, 100)
    other.load_state_dict(through_a_file(env.state_dict()))
    assert_goes_on_alike(env, other, 40)
