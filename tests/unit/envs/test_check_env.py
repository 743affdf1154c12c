"""One broken environment for each rule that check_env knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.metrics import MetricSpec
from apexrl.core.types import EnvStep, Observation
from apexrl.envs import GymVecEnv, VecEnv, check_env, gym_make_fns, make_env
from apexrl.envs.tasks import TASKS

N = 3


class Walk(VecEnv):
    """A random walk that keeps every rule; the observation is ``(position, target)``, drawn at each reset."""

    num_envs = N
    device = torch.device("cpu")
    observation_space: Any = spaces.Box(-100.0, 100.0, (2,))
    action_space: Any = spaces.Box(-1.0, 1.0, (1,))
    max_episode_steps: int | None = 7
    capturable = False
    specs: Mapping[str, MetricSpec] = {"success": MetricSpec("success")}

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.t = torch.zeros(N, 1)
        self.state = self.draw()

    def draw(self) -> Tensor:
        return torch.randn(N, 2, generator=self.generator)

    @property
    def metric_specs(self) -> Mapping[str, MetricSpec]:
        return self.specs

    def reset(self, seed: int | None = None) -> Observation:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.t = torch.zeros(N, 1)
        self.state = self.draw()
        return self.state.clone()

    def step(self, action: Tensor) -> EnvStep:
        self.t = self.t + 1
        final = self.state + torch.cat((action, torch.zeros(N, 1)), dim=1)
        terminated = final[:, :1].abs() > 2.0
        truncated = (self.t >= 7) & ~terminated
        done = terminated | truncated
        self.t = torch.where(done, 0.0, self.t)
        self.state = torch.where(done, self.draw(), final)
        metric = {"success": terminated.float()}
        return EnvStep(self.state.clone(), -final[:, :1].abs(), terminated, truncated, final, metric)

    def state_dict(self) -> dict[str, Any] | None:
        return {"state": self.state, "t": self.t, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state, self.t = state["state"], state["t"]
        self.generator.set_state(state["generator"])


def done_of(step: EnvStep) -> Tensor:
    return step.terminated | step.truncated


def changed(step: EnvStep, **fields: Any) -> EnvStep:
    return step._replace(**fields)


def edited(**fields: Any) -> type[Walk]:
    """A walk whose steps have the given fields changed by functions of the step."""

    class Edited(Walk):
        def step(self, action: Tensor) -> EnvStep:
            step = super().step(action)
            return changed(step, **{name: change(step) for name, change in fields.items()})

    return Edited


def with_class(**attributes: Any) -> type[Walk]:
    return type("Changed", (Walk,), attributes)


class ChangesAction(Walk):
    def step(self, action: Tensor) -> EnvStep:
        return super().step(action.clamp_(-0.5, 0.5))


class GlobalRandom(Walk):
    def draw(self) -> Tensor:
        return torch.randn(N, 2)


class ForgetsTime(Walk):
    """Its state lacks the step count, so the time limit comes at another step after a restore."""

    def state_dict(self) -> dict[str, Any] | None:
        return {"state": self.state, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "t": self.t + 1})


class LiveState(Walk):
    """Its state is the tensor that the next steps write into."""

    def step(self, action: Tensor) -> EnvStep:
        live = self.state
        step = super().step(action)
        live.copy_(self.state)
        self.state = live
        return step


class RefusesState(Walk):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise ValueError("no thanks")


class NeverResets(Walk):
    """Reports the end of an episode and goes on from the same state, so that it ends again at once."""

    max_episode_steps = None

    def step(self, action: Tensor) -> EnvStep:
        self.t = self.t + 1
        final = torch.cat((self.t, torch.ones(N, 1)), dim=1)
        terminated = self.t >= 4
        return EnvStep(final.clone(), final[:, :1], terminated, torch.zeros_like(terminated), final, {})


class Raises(Walk):
    def step(self, action: Tensor) -> EnvStep:
        raise ZeroDivisionError("boom")


class ResetShape(Walk):
    def reset(self, seed: int | None = None) -> Observation:
        return super().reset(seed)[:, :1]


def nan_like(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


BROKEN = [
    (with_class(observation_space=spaces.Discrete(3)), "observation_space must be a Box or a Dict of Boxes"),
    (with_class(action_space=spaces.Dict({})), "action_space must be Box, Discrete, MultiDiscrete or MultiBinary"),
    (ResetShape, "observation of reset must have the shape [3, 2], it has [3, 1]"),
    (edited(obs=lambda s: s.obs[:, :1]), "observation of step must have the shape [3, 2], it has [3, 1]"),
    (edited(obs=lambda s: s.obs.double()), "observation of step must be torch.float32, it is torch.float64"),
    (edited(obs=lambda s: s.obs.to("meta")), "observation of step must be on cpu, it is on meta"),
    (edited(obs=lambda s: nan_like(s.obs)), "observation of step has values that are not finite"),
    (edited(obs=lambda s: TensorDict({"a": s.obs}, [N])), "step must return ['observation'] as observation_space says"),
    (edited(reward=lambda s: s.reward[:, 0]), "reward must have the shape [3, 1], it has [3]"),
    (edited(reward=lambda s: s.reward.double()), "reward must be torch.float32"),
    (edited(reward=lambda s: nan_like(s.reward)), "reward has values that are not finite"),
    (edited(terminated=lambda s: s.terminated[:, 0]), "terminated must have the shape [3, 1]"),
    (edited(terminated=lambda s: s.terminated.float()), "terminated must be torch.bool"),
    (edited(truncated=lambda s: s.truncated.long()), "truncated must be torch.bool"),
    (edited(truncated=lambda s: False), "truncated must be a tensor, it is a bool"),
    (edited(truncated=done_of), "terminated and truncated are both true"),
    (edited(info=lambda s: {"task_id": s.reward[:, 0]}), "info 'task_id' must have the shape [3, 1], it has [3]"),
    (edited(final_obs=lambda s: None), "An episode ended without final_obs"),
    (edited(final_obs=lambda s: s.final_obs[:1]), "final_obs must have the keys and shapes of obs"),
    (edited(final_obs=lambda s: nan_like(s.final_obs)), "final_obs has values that are not finite"),
    (edited(final_obs=lambda s: s.obs.clone()), "final_obs is the same as obs wherever an episode ended"),
    (edited(final_obs=lambda s: s.obs), "final_obs shares memory with obs"),
    (edited(final_obs=lambda s: s.obs.view(-1)[1:].as_strided((N, 2), (1, 1))), "final_obs shares memory with obs"),
    (with_class(max_episode_steps=5), "An episode went on after max_episode_steps (5)"),
    (with_class(max_episode_steps=9), "Episodes are truncated after 7 steps, before max_episode_steps (9)"),
    (with_class(observation_space=spaces.Box(-1.0, 1.0, (2,))), "observation leaves its Box: "),
    (edited(obs=lambda s: s.obs + torch.tensor([0.0, 200.0])), " at place 1 is not in [-100, 100]"),
    (with_class(spawn=lambda self, num_envs: self), "spawn returned the environment itself"),
    (NeverResets, "After its first end every episode ends at its first step"),
    (ChangesAction, "step changed the action tensor"),
    (GlobalRandom, "The same seed and actions gave another result, first at reset"),
    (ForgetsTime, "After load_state_dict the same actions gave another result"),
    (LiveState, "After load_state_dict the same actions gave another result"),
    (RefusesState, "load_state_dict refused what state_dict gave: no thanks"),
    (with_class(state_dict=lambda self: {"self": self.t.numpy}), "state_dict holds what torch.load(weights_only=True)"),
    (edited(metric=lambda s: {**s.metric, "x": s.reward}), "The metric 'x' is not declared in metric_specs"),
    (with_class(specs={"success": MetricSpec("success"), "x": MetricSpec("x")}), "'x' is declared in metric_specs but"),
    (edited(metric=lambda s: {**s.metric, "return": s.reward}), "The metric 'return' has the name of a field"),
    (with_class(specs={"success": MetricSpec("success"), "done": MetricSpec("x")}), "The metric 'done' has the name"),
    (with_class(specs={"success": MetricSpec("x")}), "metric_specs['success'] declares the metric 'x'"),
    (edited(metric=lambda s: {"success": nan_like(s.reward)}), "'success' is declared in metric_specs but never"),
    (edited(metric=lambda s: {"success": s.reward[:, 0]}), "metric 'success' must have the shape [3, 1]"),
    (edited(metric=lambda s: {"success": s.reward.double()}), "metric 'success' must be torch.float32"),
    (edited(metric=lambda s: {"success": s.reward / 0}), "metric 'success' has infinite values"),
    (Raises, "ZeroDivisionError was raised: boom"),
]


@pytest.mark.parametrize(("broken", "sentence"), BROKEN, ids=[sentence for _, sentence in BROKEN])
def test_each_violation_is_found(broken: type[Walk], sentence: str) -> None:
    problems = check_env(broken(), num_steps=40)
    assert any(sentence in problem for problem in problems), problems


def test_a_correct_environment_has_no_problems() -> None:
    assert check_env(Walk()) == []


def test_rounding_does_not_leave_a_box() -> None:
    class Rounds(Walk):
        observation_space = spaces.Box(np.array([-100.0, 0.0], np.float32), np.array([100.0, np.inf], np.float32))

        def draw(self) -> Tensor:
            return super().draw() * torch.tensor([1.0, 0.0]) + torch.tensor([0.0, -1e-6])

    assert check_env(Rounds()) == []


def test_what_an_environment_declares_impossible_is_no_problem() -> None:
    hides = type("Hides", (edited(final_obs=lambda s: None),), {"gives_final_obs": False})
    assert check_env(hides()) == []
    assert check_env(with_class(state_dict=lambda self: None)()) == []


def test_a_metric_of_the_episode_end_is_not_missed_before_it() -> None:
    quiet = edited(metric=lambda s: {"success": torch.where(done_of(s), 1.0, torch.nan)})
    assert check_env(quiet(), num_steps=1) == []
    assert check_env(quiet(), num_steps=40) == []


def test_neighbouring_slices_of_one_buffer_do_not_share_memory() -> None:
    class OneBuffer(Walk):
        def step(self, action: Tensor) -> EnvStep:
            step = super().step(action)
            assert isinstance(step.obs, Tensor)
            assert isinstance(step.final_obs, Tensor)
            both = torch.stack((step.obs, step.final_obs), dim=1)
            return changed(step, obs=both[:, 0], final_obs=both[:, 1])

    assert check_env(OneBuffer()) == []


def test_groups_are_checked_by_their_path() -> None:
    class Grouped(Walk):
        observation_space = spaces.Dict({"policy": Walk.observation_space, "priv": spaces.Box(-1.0, 1.0, (5,))})

        def reset(self, seed: int | None = None) -> Observation:
            return TensorDict({"policy": super().reset(seed), "priv": torch.zeros(N, 4)}, [N])

    problems = check_env(Grouped(), num_steps=0)
    assert problems[0] == "observation['priv'] of reset must have the shape [3, 5], it has [3, 4]."


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Pendulum-v1", "Blackjack-v1", "FrozenLake-v1", "Taxi-v4", "Hopper-v5", *TASKS]
)
def test_shipped_adapters_and_tasks_keep_the_rules(env_id: str) -> None:
    assert check_env(make_env(env_id, 3)) == []


def test_workers_keep_the_rules() -> None:
    env = GymVecEnv(gym_make_fns("CartPole-v1", 3), num_workers=2)
    assert check_env(env, num_steps=60) == []
    env.close()
