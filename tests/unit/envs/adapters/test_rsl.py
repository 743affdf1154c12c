"""RslVecEnv around small simulators of that dialect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import EnvError, EnvStateError
from apexrl.core.metrics import MetricSpec
from apexrl.envs import RslVecEnv, as_vec_env, get_metric_specs_from_env
from apexrl.rollout import rollout

ACTION = torch.zeros(3, 2)


class Simulator:
    """Three environments that count their steps; what a step returns beside that is set by the test."""

    num_envs = 3
    num_actions = 2
    max_episode_length = 10
    device = "cpu"

    def __init__(self, **returns: Any) -> None:
        self.count = torch.zeros(3)
        self.returns: dict[str, Any] = {"reward": torch.zeros(3), "done": torch.zeros(3), "extras": {}} | returns

    def get_observations(self) -> Any:
        return self.count[:, None].expand(3, 4)

    def step(self, actions: Tensor) -> Any:
        self.count = self.count + 1
        return self.get_observations(), self.returns["reward"], self.returns["done"], self.returns["extras"]


def test_spaces_and_limits_come_from_the_simulator() -> None:
    env = RslVecEnv(Simulator())
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (4,))
    assert env.action_space == spaces.Box(-np.inf, np.inf, (2,))
    assert (env.num_envs, env.max_episode_steps, env.device) == (3, 10, torch.device("cpu"))
    assert not env.gives_final_obs


def test_a_done_with_time_out_is_truncated_and_without_is_terminated() -> None:
    # The third environment reports a time-out although its episode goes on: that ends nothing.
    extras = {"time_outs": torch.tensor([True, False, True])}
    step = RslVecEnv(Simulator(done=torch.tensor([1, 1, 0]), extras=extras)).step(ACTION)
    assert step.terminated.tolist() == [[False], [True], [False]]
    assert step.truncated.tolist() == [[True], [False], [False]]
    assert step.final_obs is None


def test_without_time_outs_every_end_is_a_termination() -> None:
    step = RslVecEnv(Simulator(done=torch.tensor([1, 0, 0]))).step(ACTION)
    assert step.terminated.tolist() == [[True], [False], [False]]
    assert not step.truncated.any()


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_rewards_and_dones_of_any_shape_and_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.tensor([1, 0, 2]).to(dtype).reshape(shape)
    step = RslVecEnv(Simulator(reward=values, done=values, extras={"time_outs": values})).step(ACTION)
    assert (step.reward.dtype, step.reward.tolist()) == (torch.float32, [[1], [0], [2]])
    assert (step.truncated.dtype, step.truncated.tolist()) == (torch.bool, [[True], [False], [True]])


def test_reward_components_become_metrics_as_they_appear() -> None:
    simulator = Simulator()
    env = RslVecEnv(simulator)
    assert env.metric_specs == {}
    simulator.returns["extras"] = {"reward_components": {"track": torch.tensor([1.0, 2.0, 3.0])}}
    step = env.step(ACTION)
    assert step.metric["track"].tolist() == [[1], [2], [3]]
    simulator.returns["extras"] = {
        "reward_components": {"energy": torch.ones(3)},
        "success": torch.tensor([True, False, True]),
        "fail": torch.tensor([0, 1, 0]),
    }
    step = env.step(ACTION)
    assert step.metric["success"].tolist() == [[1], [0], [1]]
    assert step.metric["fail"].tolist() == [[0], [1], [0]]
    assert "track" not in step.metric
    assert env.metric_specs == {
        "track": MetricSpec("track", "sum", "reward_components"),
        "energy": MetricSpec("energy", "sum", "reward_components"),
        "success": MetricSpec("success"),
        "fail": MetricSpec("fail"),
    }


def test_a_reward_component_with_a_reserved_name_is_renamed_and_summed() -> None:
    parts = {"success": torch.full((3,), 5.0), "return": torch.ones(3), "return_reward": torch.full((3,), 2.0)}
    env = RslVecEnv(Simulator(extras={"reward_components": parts, "success": torch.tensor([1, 0, 1])}))
    metric = env.step(ACTION).metric
    assert {name: value[:, 0].tolist() for name, value in metric.items()} == {
        "success_reward": [5, 5, 5],
        "return_reward_reward": [1, 1, 1],
        "return_reward": [2, 2, 2],
        "success": [1, 0, 1],
    }
    assert env.metric_specs["success_reward"] == MetricSpec("success_reward", "sum", "reward_components")


def test_log_loses_its_slash_and_tensors_become_their_mean() -> None:
    log = {"/curriculum/level": torch.tensor([1, 2]), "speed": 0.5}
    step = RslVecEnv(Simulator(extras={"log": log})).step(ACTION)
    assert {key: float(value) for key, value in step.log.items()} == {"curriculum/level": 1.5, "speed": 0.5}


@pytest.mark.parametrize("key", ["final_observation", "final_obs"])
def test_a_final_observation_is_passed_on(key: str) -> None:
    env = RslVecEnv(Simulator(done=torch.ones(3), extras={key: torch.full((3, 4), 7.0)}))
    step = env.step(ACTION)
    assert env.gives_final_obs
    assert isinstance(step.final_obs, Tensor)
    assert step.final_obs.tolist() == [[7.0] * 4] * 3


@pytest.mark.parametrize("kind", [dict, lambda groups: TensorDict(groups, batch_size=[3])])
def test_groups_become_a_tensordict(kind: Any) -> None:
    class Grouped(Simulator):
        def get_observations(self) -> Any:
            return kind({"policy": self.count[:, None], "critic": torch.zeros(3, 2)})

    env = RslVecEnv(Grouped())
    expected: dict[str, Any] = {
        "policy": spaces.Box(-np.inf, np.inf, (1,)),
        "critic": spaces.Box(-np.inf, np.inf, (2,)),
    }
    assert env.observation_space == spaces.Dict(expected)
    step = env.step(ACTION)
    assert isinstance(step.obs, TensorDict)
    assert step.obs.batch_size == torch.Size([3])
    assert step.obs["policy"].tolist() == [[1], [1], [1]]


class GroupedSimulator(Simulator):
    """The critic sees one number more than the policy, 100 above; an episode ends at every second step."""

    final: Any = None

    def get_observations(self) -> Any:
        return {"policy": self.count[:, None], "critic": 100 + self.count[:, None].expand(3, 2)}

    def step(self, actions: Tensor) -> Any:
        self.count = self.count + 1
        done = self.count == 2
        self.count = torch.where(done, 0.0, self.count)
        return self.get_observations(), torch.zeros(3), done, {"final_obs": self.final} if done.any() else {}


def successors(final: Any) -> Any:
    simulator = GroupedSimulator()
    simulator.final = final
    env = RslVecEnv(simulator)
    batch, _ = rollout(env, lambda _: {"action": ACTION}, {"observation": env.reset()}, 4)
    return batch["next_observation"]


def test_a_plain_final_observation_is_that_of_the_policy_alone() -> None:
    after = successors(torch.full((3, 1), 7.0))
    assert after["policy"][:, 0, 0].tolist() == [1, 7, 1, 7]
    # The last visible critic observation stands in: neither 7 nor 100, which is the one after the reset.
    assert after["critic"][:, 0].tolist() == [[101, 101]] * 4


@pytest.mark.parametrize("kind", [dict, lambda groups: TensorDict(groups, batch_size=[3])])
def test_a_final_observation_may_have_all_groups(kind: Any) -> None:
    after = successors(kind({"policy": torch.full((3, 1), 7.0), "critic": torch.full((3, 2), 8.0)}))
    assert after["policy"][:, 0, 0].tolist() == [1, 7, 1, 7]
    assert after["critic"][:, 0].tolist() == [[101, 101], [8, 8]] * 2


def test_a_final_observation_that_does_not_fit_is_refused() -> None:
    with refused(EnvError, "group 'policy'", [3, 2]):
        successors(torch.zeros(3, 2))
    with refused(EnvError, "final_obs", ["policy"], ["critic", "policy"]):
        successors({"policy": torch.zeros(3, 1)})


def test_the_last_visible_observation_follows_a_restored_state() -> None:
    class Saves(GroupedSimulator):
        final = torch.full((3, 1), 7.0)

        def state_dict(self) -> dict[str, Tensor]:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    env = RslVecEnv(Saves())
    env.load_state_dict({"count": torch.ones(3)})
    final = env.step(ACTION).final_obs
    assert isinstance(final, TensorDict)
    assert final["critic"].tolist() == [[101, 101]] * 3


def test_a_tuple_brings_its_further_groups() -> None:
    class Tupled(Simulator):
        def get_observations(self) -> Any:
            return self.count[:, None], {"observations": {"critic": torch.zeros(3, 2)}}

        def step(self, actions: Tensor) -> Any:
            (obs, extras), _ = self.get_observations(), None
            return obs + 5, torch.zeros(3), torch.zeros(3), extras

    env = RslVecEnv(Tupled())
    obs = env.reset()
    assert isinstance(obs, TensorDict)
    assert {key: value.shape for key, value in obs.items()} == {"policy": (3, 1), "critic": (3, 2)}
    stepped = env.step(ACTION).obs
    assert isinstance(stepped, TensorDict)
    assert stepped["policy"].tolist() == [[5], [5], [5]]


def test_a_tuple_with_plain_extras_is_one_tensor() -> None:
    class Tupled(Simulator):
        def get_observations(self) -> Any:
            return self.count[:, None], {}

        def step(self, actions: Tensor) -> Any:
            return torch.zeros(3, 1), torch.zeros(3), torch.zeros(3), {"observations": {"policy": torch.zeros(3, 1)}}

    env = RslVecEnv(Tupled())
    assert isinstance(env.reset(), Tensor)
    assert isinstance(env.step(ACTION).obs, Tensor)


def test_reset_uses_the_simulators_own_and_passes_the_seed() -> None:
    class Resets(Simulator):
        def reset(self, seed: int | None = None) -> Any:
            self.count = torch.full((3,), float(seed or 0))
            return self.get_observations(), {}

    class Seeds(Simulator):
        def seed(self, seed: int) -> None:
            self.count = torch.full((3,), float(seed))

        def reset(self) -> Any:
            return self.get_observations()

    for simulator in (Resets(), Seeds()):
        obs = RslVecEnv(simulator).reset(seed=4)
        assert isinstance(obs, Tensor)
        assert obs[:, 0].tolist() == [4, 4, 4]
    obs = RslVecEnv(Simulator()).reset(seed=4)
    assert isinstance(obs, Tensor)
    assert obs[:, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["single_action_space", "action_space"])
def test_action_space_of_the_simulator_is_used(name: str) -> None:
    one = spaces.Box(-2.0, 2.0, (2,))
    simulator = Simulator()
    setattr(simulator, name, one)
    assert RslVecEnv(simulator).action_space == one


def test_a_batched_action_space_loses_its_batch() -> None:
    simulator: Any = Simulator()
    simulator.action_space = spaces.Box(-2.0, 2.0, (3, 2))
    assert RslVecEnv(simulator).action_space == spaces.Box(-2.0, 2.0, (2,))


def test_spawn_is_independent_and_keeps_the_simulators_size() -> None:
    env = RslVecEnv(Simulator())
    copy = env.spawn(3)
    copy.step(ACTION)
    assert (copy.simulator.count[0].item(), env.simulator.count[0].item()) == (1, 0)
    assert env.spawn(5).num_envs == 3
    env.simulator.handle = (name for name in "abc")  # generators cannot be copied
    with refused(EnvError, "Simulator", "generator", "eval_env"):
        env.spawn(3)


def test_state_is_the_simulators_own_or_none() -> None:
    class Saves(Simulator):
        def state_dict(self) -> dict[str, Tensor]:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    env = RslVecEnv(Saves())
    state = env.state_dict()
    assert state is not None
    env.step(ACTION)
    env.load_state_dict(state)
    assert env.simulator.count.tolist() == [0, 0, 0]
    with refused(EnvStateError, "Saves", "count"):
        env.load_state_dict({})
    plain = RslVecEnv(Simulator())
    assert plain.state_dict() is None
    with pytest.raises(EnvStateError):
        plain.load_state_dict({})


def test_render_picks_the_image() -> None:
    class Draws(Simulator):
        def render(self) -> Any:
            return np.arange(2, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 5, 3), np.uint8)

    assert RslVecEnv(Draws()).render(1).tolist() == np.ones((4, 5, 3)).tolist()
    with refused(EnvError, "Draws", "2 images"):
        RslVecEnv(Draws()).render(2)
    with refused(EnvError, "Simulator", "render"):
        RslVecEnv(Simulator()).render()


def test_missing_parts_are_named() -> None:
    with refused(EnvError, "object", ["num_envs", "num_actions", "get_observations", "step"]):
        RslVecEnv(object())


def test_the_metrics_of_a_raw_simulator_are_those_it_reported() -> None:
    simulator = Simulator(extras={"reward_components": {"energy": torch.zeros(3)}, "success": torch.zeros(3)})
    env = as_vec_env(simulator)
    assert get_metric_specs_from_env(simulator) == {}
    env.step(ACTION)
    assert get_metric_specs_from_env(simulator) == {
        "energy": MetricSpec("energy", "sum", "reward_components"),
        "success": MetricSpec("success"),
    }


def test_a_simulator_has_one_wrapper() -> None:
    simulator = Simulator()
    env = RslVecEnv(simulator)
    assert as_vec_env(simulator) is env
    assert as_vec_env(Simulator()) is not env
