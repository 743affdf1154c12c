"""The same episodes give the same numbers, to the last bit, for any number of environments, workers and order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tests.point_suite import PointSuite
from tests.refusals import refused
from tests.scripted import ScriptedEnv
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.envs import GymVecEnv, RslVecEnv, VecEnv, check_env, make_env
from apexrl.envs.mujoco.env import MujocoVecEnv
from apexrl.envs.suites import InitState, make_suite
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.evaluation.evaluate import EvaluationResult, evaluate, group_size
from apexrl.policies import ActorCritic, Policy, RecurrentActorCritic, ROAPolicy
from apexrl.policies.vla import VLAPolicy

NUM_ENVS = (1, 3, 32)


def lively(policy: Policy) -> Policy:
    """Give a policy actions of some size, so that a difference of one bit grows."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return policy


def run(
    make: Callable[[int], VecEnv],
    num_envs: int,
    starts: Any,
    make_policy: Callable[[VecEnv], Policy] = ActorCritic.for_env,
) -> EvaluationResult:
    env = make(num_envs)
    torch.manual_seed(1)
    policy = lively(make_policy(env))
    result = evaluate(env, policy, starts)
    env.close()
    return result


def assert_same(results: list[EvaluationResult]) -> None:
    first = results[0].episodes
    for other in results[1:]:
        assert other.episodes.keys() == first.keys()
        for name, values in first.items():
            np.testing.assert_array_equal(other.episodes[name], values, err_msg=name)
        assert {name: values.tolist() for name, values in other.info.items()} == {
            name: values.tolist() for name, values in results[0].info.items()
        }


SEEDS = [11, 5, 99, 3]
TASKS: dict[str, Mapping[str, Any]] = {
    "lift": {"max_episode_steps": 15},
    "cartpole": {"max_episode_steps": 40},
    "pendulum": {"max_episode_steps": 15},
    "payload": {"max_episode_steps": 15, "change_step": 7},
    "CartPole-v1": {"max_episode_steps": 40},
    "HalfCheetah-v5": {"max_episode_steps": 40},
    "mujoco/HalfCheetah-v5": {"max_episode_steps": 40},
    "mujoco/WalkerPayload": {"max_episode_steps": 15, "command_period": 4},
}


@pytest.mark.parametrize("task", TASKS)
def test_any_number_of_environments_gives_the_same_episodes(task: str) -> None:
    def make(num_envs: int) -> VecEnv:
        return make_env(task, num_envs, **TASKS[task])

    results = [run(make, num_envs, SEEDS) for num_envs in NUM_ENVS]
    assert_same(results)
    assert len(set(results[0].episodes["return"])) > 1 or task in ("cartpole", "CartPole-v1"), "episodes differ"


@pytest.mark.parametrize(("task", "policy"), [("recall", RecurrentActorCritic), ("payload", ROAPolicy)])
def test_policies_with_memory_or_groups(task: str, policy: type[Policy]) -> None:
    options: dict[str, Any] = {"max_episode_steps": 10} if task == "payload" else {}
    assert_same([run(lambda n: make_env(task, n, **options), n, SEEDS, policy.for_env) for n in NUM_ENVS])


def test_workers_change_nothing() -> None:
    def make(workers: int) -> Callable[[int], VecEnv]:
        return lambda n: make_env("CartPole-v1", n, num_workers=workers, max_episode_steps=30)

    assert_same([run(make(0), 4, SEEDS), run(make(2), 3, SEEDS)])


def test_the_order_and_the_other_episodes_change_nothing() -> None:
    def make(num_envs: int) -> VecEnv:
        return make_env("payload", num_envs, max_episode_steps=12)

    forward, alone = run(make, 3, SEEDS), run(make, 2, SEEDS[2:3])
    backward = run(make, 2, SEEDS[::-1])
    np.testing.assert_array_equal(forward.episodes["return"], backward.episodes["return"][::-1])
    assert alone.episodes["return"][0] == forward.episodes["return"][2]


def test_episodes_of_meta_world() -> None:
    suite = make_suite("mt50", ("handle-press-v3", "reach-v3"))
    starts = [InitState(task, suite.init_states(task, "val")[index]) for index in (4, 0) for task in (0, 1)]

    def make(num_workers: int) -> Callable[[int], VecEnv]:
        return lambda n: SuiteVecEnv(suite, n, num_workers=num_workers, max_steps=20, split="val")

    def policy(env: VecEnv) -> Policy:
        groups = {"groups": ["state"]}
        return ActorCritic.for_env(env, actor_cfg=groups, critic_cfg=groups)

    results = [run(make(0), num_envs, starts, policy) for num_envs in NUM_ENVS] + [run(make(2), 3, starts, policy)]
    assert_same(results)
    assert results[0].info["task_id"].tolist() == [0, 1, 0, 1]
    assert results[0].episodes["control_steps"].tolist() == [20.0] * 4
    assert list(results[0].per_task()) == ["handle-press-v3", "reach-v3"]


def go_to_the_goal(env: VecEnv) -> Policy:
    groups = {"groups": ["state"]}
    return ActorCritic.for_env(env, actor_cfg=groups, critic_cfg=groups)


def test_episodes_that_end_early_leave_the_others_alone() -> None:
    # Some episodes start at the goal and end with their first chunk, others run to the horizon.
    suite = PointSuite(radius=0.6)
    starts = [
        InitState(task, state)
        for state_of in range(3)
        for task in (0, 1)
        for state in [suite.init_states(task)[state_of]]
    ]
    results = [run(lambda n: SuiteVecEnv(suite, n, num_workers=0), n, starts, go_to_the_goal) for n in (1, 4, 32)]
    assert_same(results)
    lengths = results[0].episodes["control_steps"]
    assert lengths.min() < lengths.max() == suite.horizon
    np.testing.assert_array_equal(results[0].episodes["truncated"], 1 - results[0].episodes["success_at_end"])


def test_episodes_of_a_suite_that_renders_come_in_the_order_of_their_starts() -> None:
    suite = PointSuite(radius=0.6)
    suite.renders = True  # then an environment chooses among the episodes by their tasks
    starts = [InitState(task, state) for task in (0, 1) for state in suite.init_states(task)[:3]]
    results = [run(lambda n: SuiteVecEnv(suite, n), n, starts, go_to_the_goal) for n in (1, 4, 6)]
    assert_same(results)
    assert results[0].info["task_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert results[0].info["episode_id"].tolist() == list(range(6))
    lengths = results[0].episodes["control_steps"]
    assert lengths.min() < lengths.max()


class TwoModes(gym.Env[Any, Any]):
    """Four steps that look alike; an action near 1 or -1 is right, which of them shows in the reward."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        reward = (abs(action[0]) > 0.8) + 0.01 * 2**self.time * (action[0] > 0.0)
        return np.zeros(1, np.float32), float(reward), False, self.time == 4, {}


def balanced(env: VecEnv, noise: str = "every_step") -> Policy:
    """A flow policy whose field is exactly that of chunks that are 1 or -1, equally often."""
    policy = VLAPolicy.for_env(env, head="flow", noise=noise)
    assert policy.flow is not None

    def field(expert: Any, prefix: Any, x: Tensor, time: Tensor) -> Tensor:
        rest = (1.0 - time).unsqueeze(-1)
        return ((x * time.unsqueeze(-1) / rest.square()).tanh() - x) / rest

    policy.flow.field = field  # type: ignore[method-assign]
    return policy


@pytest.mark.parametrize("noise", ["every_step", "last_step"])
def test_a_flow_draws_where_it_starts_and_so_finds_both_modes(noise: str) -> None:
    env = GymVecEnv([TwoModes] * 8)
    policy = balanced(env, noise)
    result = evaluate(env, policy, 200)
    right = np.floor(result.episodes["return"]).sum() / 800  # from the middle of the noise, between the modes: 0
    assert right > 0.9
    upper = (result.episodes["return"] % 1 / 0.02).round().astype(int)
    assert set(upper) == set(range(16)), "each step takes either mode"
    again, other = evaluate(env, policy, 200), evaluate(env, policy, 200, seed=1)
    np.testing.assert_array_equal(again.episodes["return"], result.episodes["return"])
    assert (other.episodes["return"] != result.episodes["return"]).mean() > 0.5
    torch.manual_seed(7)
    before = torch.get_rng_state()
    evaluate(env, policy, SEEDS)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_flow_draws_follows_from_the_start_of_the_episode() -> None:
    seeds = list(range(20))
    results = [run(lambda n: GymVecEnv([TwoModes] * n), n, seeds, balanced) for n in NUM_ENVS]
    assert_same(results)
    assert len(set(results[0].episodes["return"])) > 8
    backward = run(lambda n: GymVecEnv([TwoModes] * n), 3, seeds[::-1], balanced)
    np.testing.assert_array_equal(backward.episodes["return"][::-1], results[0].episodes["return"])


@pytest.mark.parametrize("renders", [False, True])
def test_what_a_flow_draws_follows_from_the_init_state_of_a_suite(renders: bool) -> None:
    suite = PointSuite(radius=0.6)
    suite.renders = renders
    starts = [InitState(task, suite.init_states(task)[index]) for index in range(3) for task in (0, 1)]

    def flow(env: VecEnv) -> Policy:
        return VLAPolicy.for_env(env, chunk=5, head="flow")

    results = [run(lambda n: SuiteVecEnv(suite, n, num_workers=0), n, starts, flow) for n in (1, 4, 6)]
    assert_same(results)
    alone = run(lambda n: SuiteVecEnv(suite, n, num_workers=0), 1, starts[3:4], flow)
    assert alone.episodes["control_steps"][0] == results[0].episodes["control_steps"][3]


def test_episodes_come_in_the_order_of_their_starts_with_their_ends() -> None:
    # Each environment made alone is number 0: two steps, reward 1 + 2, ended by the time limit.
    env = ScriptedEnv([2, 9], [True, True])
    told: list[int] = []
    result = evaluate(env, ActorCritic.for_env(env), [7, 8, 9], on_progress=told.append)
    assert result.info["episode_id"].tolist() == [0, 1, 2]
    assert result.episodes["return"].tolist() == [3, 3, 3]
    assert result.episodes["truncated"].tolist() == [1, 1, 1]
    assert told[-1] == 3
    env = ScriptedEnv([2], [False])
    assert evaluate(env, ActorCritic.for_env(env), [7]).episodes["truncated"].tolist() == [0]


def test_groups_are_few_and_of_about_one_size() -> None:
    assert [group_size(33, 32), group_size(7, 3), group_size(4, 32), group_size(6, 1)] == [17, 3, 4, 1]


def test_an_episode_that_never_ends_is_given_up() -> None:
    env = ScriptedEnv([10_000], [False])
    with refused(EnvError, "0 of 1 episodes", "50 steps", "max_episode_steps"):
        evaluate(env, ActorCritic.for_env(env), [0], max_steps=50)


class DyingSuite(PointSuite):
    """Its second task kills the worker."""

    def make_simulator(self, task_id: int) -> Any:
        simulator: Any = super().make_simulator(task_id)
        if task_id == 1:
            simulator.advance = _die
        return simulator


def _die(action: Any) -> bool:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
    return False


def test_episodes_whose_worker_dies_are_reported_and_not_counted() -> None:
    suite = DyingSuite()
    starts = [InitState(task, suite.init_states(task)[0]) for task in (1, 0)]
    # One episode at a time, so that no other is in the worker that dies.
    result = run(lambda n: SuiteVecEnv(suite, n, num_workers=1), 1, starts, go_to_the_goal)
    assert (result.num_episodes, result.num_lost) == (1, 1)
    assert result.info["episode_id"].tolist() == [1]
    assert result.summary().endswith("over 1 episode (1 more lost: their workers died)")
    assert result.record()["lost_episodes"] == 1


class Fixed:
    """A simulator of rsl_rl's dialect, which has four environments and no other number."""

    num_envs, num_actions, device = 4, 1, "cpu"

    def get_observations(self) -> Tensor:
        return torch.zeros(4, 2)

    def step(self, actions: Tensor) -> Any:
        return torch.zeros(4, 2), torch.zeros(4), torch.ones(4), {}


def test_a_simulator_with_a_fixed_number_of_environments_is_refused() -> None:
    env = RslVecEnv(Fixed())
    with refused(EnvError, "RslVecEnv", "4 environments"):
        evaluate(env, ActorCritic.for_env(env), [0])


def test_environments_with_different_models_are_refused() -> None:
    def heavier(model: Any, rng: np.random.Generator) -> None:
        model.body_mass[1] *= rng.uniform(1.0, 2.0)

    env = MujocoVecEnv("Hopper-v5", 2, randomize=heavier)
    with refused(EnvError, "models", "body_mass"):
        evaluate(env, ActorCritic.for_env(env), [0])
    env.close()


class Shared(GymVecEnv):
    """Breaks the rule: every environment gets the first seed."""

    def reset_each(self, seeds: Any) -> Any:
        return super().reset_each([seeds[0]] * len(seeds))


def test_check_env_finds_seeds_that_do_not_reach_their_environments() -> None:
    make = [lambda: gym.make("CartPole-v1")] * 3
    assert check_env(GymVecEnv(make), 30) == []
    assert check_env(Shared(make), 30) == [
        "The same seed of reset_each and actions gave another result in another environment."
    ]


def test_sampled_actions_follow_from_the_start_of_the_episode() -> None:
    env = make_env("CartPole-v1", 3, max_episode_steps=40)
    policy = ActorCritic.for_env(env)
    sampled = [evaluate(env, policy, seeds, deterministic=False) for seeds in (SEEDS, SEEDS[::-1])]
    np.testing.assert_array_equal(sampled[0].episodes["return"], sampled[1].episodes["return"][::-1])
    assert sampled[0].episodes["return"].tolist() != evaluate(env, policy, SEEDS).episodes["return"].tolist()


def test_step_tables_of_given_starts_hold_their_episodes_one_after_another() -> None:
    env = make_env("CartPole-v1", 3, max_episode_steps=40)
    result = evaluate(env, ActorCritic.for_env(env), SEEDS, record_steps=True)
    lengths = result.episodes["episode_len"]
    assert result.step_rows is not None
    # Environment 0 runs the first episode and the last one, the others one each.
    assert [len(rows) for rows in result.step_rows.values()] == [lengths[0] + lengths[3], lengths[1], lengths[2]]
    assert [row["step"] for row in result.step_rows[0]] == list(range(int(lengths[0] + lengths[3])))
    assert [index + 1 for index, row in enumerate(result.step_rows[0]) if row["done"]] == [
        lengths[0],
        lengths[0] + lengths[3],
    ]


def test_step_tables_of_a_suite_say_which_episode_a_step_belongs_to() -> None:
    env = SuiteVecEnv(PointSuite(), 2, num_workers=0, split="val")
    result = evaluate(env, go_to_the_goal(env), 4, record_steps=True)
    assert result.step_rows is not None
    for index, rows in result.step_rows.items():
        assert {row["episode_id"] for row in rows} == {index, index + 2}
        assert all(row["task_id"] == row["episode_id"] % 2 for row in rows)
    assert result.info["episode_id"].tolist() == [0, 1, 2, 3]
    assert not {"episode_id", "task_id", "lost"} & result.episodes.keys()
