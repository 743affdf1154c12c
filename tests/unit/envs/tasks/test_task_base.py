from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import ConfigError, EnvError, EnvStateError
from apexrl.core.types import Observation
from apexrl.envs.tasks import TASKS, CartPole, Lift, Pendulum, Recall, TensorTask

every_task = pytest.mark.parametrize("task_class", TASKS.values(), ids=TASKS.keys())


def random_action(task: TensorTask, generator: torch.Generator) -> Tensor:
    space = task.action_space
    if isinstance(space, Discrete):
        return torch.randint(int(space.n), (task.num_envs, 1), generator=generator)
    assert isinstance(space, Box)
    uniform = torch.rand(task.num_envs, *space.shape, generator=generator)
    return torch.from_numpy(space.low) + uniform * torch.from_numpy(space.high - space.low)


def groups(obs: Observation | None) -> dict[str, Tensor]:
    """The tensors of an observation by group; one without groups is called ``all``."""
    assert obs is not None
    return {"all": obs} if isinstance(obs, Tensor) else obs.to_dict()


def spaces(task: TensorTask) -> dict[str, Any]:
    space = task.observation_space
    return dict(space.spaces) if isinstance(space, Dict) else {"all": space}


def trajectory(task: TensorTask, num_steps: int, action_seed: int) -> list[Tensor]:
    """Everything that ``num_steps`` random steps return."""
    generator = torch.Generator().manual_seed(action_seed)
    seen: list[Tensor] = []
    for _ in range(num_steps):
        step = task.step(random_action(task, generator))
        seen += [
            *groups(step.obs).values(),
            step.reward,
            step.terminated,
            step.truncated,
            *groups(step.final_obs).values(),
            *step.metric.values(),
        ]
    return seen


def all_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@every_task
def test_shapes_types_and_declared_metrics(task_class: type[TensorTask]) -> None:
    task = task_class(3)
    shapes = {name: (3, *space.shape) for name, space in spaces(task).items()}
    assert {name: x.shape for name, x in groups(task.reset(0)).items()} == shapes
    step = task.step(random_action(task, torch.Generator()))
    assert {name: x.shape for name, x in groups(step.obs).items()} == shapes
    assert {x.dtype for x in groups(step.obs).values()} == {step.reward.dtype} == {torch.float32}
    assert step.terminated.dtype == step.truncated.dtype == torch.bool
    assert step.reward.shape == step.terminated.shape == step.truncated.shape == (3, 1)
    assert step.metric.keys() == task.metric_specs.keys()
    assert all(m.shape == (3, 1) and m.dtype == torch.float32 for m in step.metric.values())


@every_task
def test_observations_lie_in_their_space(task_class: type[TensorTask]) -> None:
    task = task_class(1)
    generator = torch.Generator().manual_seed(0)
    observations = [task.reset(0), *(task.step(random_action(task, generator)).obs for _ in range(250))]
    for obs in observations:
        assert all(spaces(task)[name].contains(x[0].numpy()) for name, x in groups(obs).items())


@every_task
def test_same_seed_same_trajectory_and_another_seed_another(task_class: type[TensorTask]) -> None:
    first, second, other = task_class(8), task_class(8), task_class(8)
    first.reset(seed=5)
    second.reset(seed=5)
    other.reset(seed=6)
    expected = trajectory(first, 150, 1)
    assert all_equal(trajectory(second, 150, 1), expected)
    assert not all_equal(trajectory(other, 150, 1), expected)


@every_task
def test_two_unseeded_tasks_differ(task_class: type[TensorTask]) -> None:
    first = task_class(64)
    assert not all_equal(list(groups(first.reset()).values()), list(groups(first.spawn(64).reset()).values()))


@every_task
def test_state_survives_a_file_bit_for_bit(task_class: type[TensorTask]) -> None:
    task = task_class(8)
    task.reset(3)
    trajectory(task, 30, 2)
    file = io.BytesIO()
    torch.save(task.state_dict(), file)
    expected = trajectory(task, 150, 4)

    file.seek(0)
    resumed = task_class(8)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert all_equal(trajectory(resumed, 150, 4), expected)


def test_a_saved_state_does_not_change_with_the_task() -> None:
    task = CartPole(2)
    task.reset(0)
    saved = task.state_dict()
    before = saved["state"].clone()
    task.step(torch.ones(2, 1, dtype=torch.int64))
    assert torch.equal(saved["state"], before)
    assert saved["elapsed"].tolist() == [[0], [0]]


@pytest.mark.parametrize("name", ["state", "elapsed", "generator"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    task = CartPole(2)
    task.reset(0)
    before = task.state_dict()
    broken = dict(CartPole(2).state_dict())
    broken[name] = broken[name][:1]
    with refused(EnvStateError, "CartPole", f"'{name}'", list(before[name].shape), list(broken[name].shape)):
        task.load_state_dict(broken)
    del broken[name]
    with refused(EnvStateError, "CartPole", f"'{name}'", None):
        task.load_state_dict(broken)
    assert all(torch.equal(task.state_dict()[key], value) for key, value in before.items())


def test_a_state_of_another_size_names_both_sizes() -> None:
    with refused(EnvStateError, "torch.float32 [3, 4]", "torch.float32 [2, 4]"):
        CartPole(3).load_state_dict(CartPole(2).state_dict())


def test_the_time_limit_truncates_with_the_true_successor() -> None:
    short, long = CartPole(4, max_episode_steps=3), CartPole(4)
    short.reset(7)
    long.reset(7)
    action = torch.tensor([[0], [1], [1], [0]])
    for _ in range(2):
        assert not short.step(action).truncated.any()
        long.step(action)
    cut, uncut = short.step(action), long.step(action)
    assert cut.truncated.all()
    assert not cut.terminated.any()
    assert isinstance(cut.final_obs, Tensor)
    assert isinstance(uncut.obs, Tensor)
    assert torch.equal(cut.final_obs, uncut.obs)
    # Three pushes of 10 N give a speed near 0.6, which no first state has.
    assert (cut.final_obs[:, 1].abs() > 0.4).all()
    assert isinstance(cut.obs, Tensor)
    assert (cut.obs.abs() <= 0.05).all()
    assert torch.equal(cut.obs, short.state)
    assert short.elapsed.tolist() == [[0]] * 4


def test_only_the_ended_row_is_reset() -> None:
    task = CartPole(2)
    task.reset(0)
    task.state[0] = torch.tensor([2.39, 10.0, 0.0, 0.0])
    step = task.step(torch.ones(2, 1, dtype=torch.int64))
    assert step.terminated.tolist() == [[True], [False]]
    assert isinstance(step.obs, Tensor)
    assert isinstance(step.final_obs, Tensor)
    assert step.final_obs[0, 0].item() == pytest.approx(2.39 + 0.02 * 10)
    assert (step.obs[0].abs() <= 0.05).all()
    assert torch.equal(step.obs[1], step.final_obs[1])
    assert task.elapsed.tolist() == [[0], [1]]


def test_termination_wins_over_the_time_limit() -> None:
    task = CartPole(2, max_episode_steps=1)
    task.reset(0)
    task.state[0, 0] = 3.0
    step = task.step(torch.ones(2, 1, dtype=torch.int64))
    assert step.terminated.tolist() == [[True], [False]]
    assert step.truncated.tolist() == [[False], [True]]


@every_task
def test_state_keeps_its_storage_and_outputs_do_not_share_it(task_class: type[TensorTask]) -> None:
    task = task_class(4)
    first = groups(task.reset(0)).values()
    storage = task.state.data_ptr(), task.elapsed.data_ptr()
    seen = [*first, *trajectory(task, 2, 0)]
    before = [tensor.clone() for tensor in seen]
    trajectory(task, 10, 1)
    task.reset()
    assert (task.state.data_ptr(), task.elapsed.data_ptr()) == storage
    assert all_equal(seen, before)


def test_spawn_keeps_the_options() -> None:
    lift = Lift(4, target_height=0.2, max_episode_steps=7).spawn(2)
    assert (lift.num_envs, lift.target_height, lift.max_episode_steps) == (2, 0.2, 7)
    recall = Recall(4, num_cues=3, delay=1).spawn(9)
    assert (recall.num_envs, recall.num_cues, recall.delay) == (9, 3, 1)
    assert CartPole(2, max_episode_steps=9).spawn(1).max_episode_steps == 9
    assert Pendulum(2, max_episode_steps=9).spawn(1).max_episode_steps == 9


@every_task
def test_images_show_the_state(task_class: type[TensorTask]) -> None:
    task = task_class(2)
    task.reset(0)
    image = task.render(1)
    assert image.shape == (300, 400, 3)
    assert image.dtype == np.uint8
    trajectory(task, 3, 0)
    assert not np.array_equal(task.render(1), image)
    with refused(EnvError, type(task).__name__, "0 to 1", 2):
        task.render(2)


def test_impossible_options_are_refused() -> None:
    with refused(ConfigError, "CartPole.num_envs", 1, 0):
        CartPole(0)
    with refused(ConfigError, "Pendulum.max_episode_steps", 0):
        Pendulum(1, max_episode_steps=0)
    half: Any = 1.5
    with refused(ConfigError, "Lift.max_episode_steps", 1.5):
        Lift(1, max_episode_steps=half)
    with refused(ConfigError, "Lift.target_height", 0.5):
        Lift(1, target_height=0.5)
    with refused(ConfigError, "Recall.num_cues", 5):
        Recall(1, num_cues=5)
    with refused(ConfigError, "Recall.delay", -1):
        Recall(1, delay=-1)


def test_actions_of_another_shape_are_refused() -> None:
    task = Lift(4)
    task.reset(0)
    with refused(EnvError, "Lift", [4, 3], [4, 1]):
        task.step(torch.zeros(4, 1))
