from __future__ import annotations

import pytest
import torch
from torch import Tensor

from apexrl.envs.tasks import Recall


def observation(value: Tensor | object) -> list[list[float]]:
    assert isinstance(value, Tensor)
    return value.tolist()


def test_the_cue_shows_once_then_blanks_then_go() -> None:
    task = Recall(1, num_cues=3, delay=2)
    cues = set()
    for seed in range(20):
        shown = observation(task.reset(seed))[0]
        cue = int(task.state[0, 0])
        assert shown == [float(i == cue) for i in range(4)]
        cues.add(cue)
    assert cues == {0, 1, 2}
    action = torch.zeros(1, 1, dtype=torch.int64)
    assert observation(task.step(action).obs) == [[0, 0, 0, 0]]
    assert observation(task.step(action).obs) == [[0, 0, 0, 0]]
    assert observation(task.step(action).obs) == [[0, 0, 0, 1]]
    last = task.step(action)
    assert last.terminated.item()
    # The next episode begins with its cue.
    assert sum(observation(last.obs)[0][:3]) == 1


@pytest.mark.parametrize("answer", [0, 1])
def test_only_the_matching_answer_at_go_earns_one(answer: int) -> None:
    task = Recall(2, num_cues=2, delay=1)
    task.reset(0)
    task.state[:, 0] = torch.tensor([0.0, 1.0])
    action = torch.full((2, 1), answer)
    for _ in range(2):
        step = task.step(action)
        assert not step.terminated.any()
        assert step.reward.sum() == step.metric["success"].sum() == 0
    step = task.step(action)
    expected = [[1.0], [0.0]] if answer == 0 else [[0.0], [1.0]]
    assert step.reward.tolist() == step.metric["success"].tolist() == expected
    assert step.terminated.all()
    assert not step.truncated.any()


def test_a_constant_answer_earns_one_over_the_number_of_cues() -> None:
    task = Recall(20_000, num_cues=4, delay=0)
    task.reset(0)
    action = torch.full((20_000, 1), 2)
    task.step(action)
    # Four standard errors of a mean of 20 000 draws with p = 1/4 are 0.012.
    assert task.step(action).reward.mean().item() == pytest.approx(0.25, abs=0.012)
