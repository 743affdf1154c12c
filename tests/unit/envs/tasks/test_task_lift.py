from __future__ import annotations

import pytest
import torch
from torch import Tensor

from apexrl.core.types import EnvStep
from apexrl.envs.tasks import Lift
from apexrl.envs.tasks.lift import COLUMNS, FINGER_WIDTH, MAX_GAP

SIZE = 0.03
OPEN, CLOSE = -1.0, 1.0


def place(**columns: float) -> Lift:
    """One open gripper at rest above the middle of the table and a block of 6 cm at 0.2, changed as given."""
    task = Lift(1)
    task.reset(0)
    columns = {"y": 0.2, "block_x": 0.2, "size": SIZE, "gap": MAX_GAP, **columns}
    task.state.zero_()
    for name, value in columns.items():
        task.state[0, COLUMNS[name]] = value
    return task


def hold(height: float, **columns: float) -> Lift:
    """A block held at ``height`` at rest."""
    return place(y=height, block_x=0.0, block_y=height, gap=SIZE, held=1.0, held_y=height, **columns)


def get(task: Lift, name: str) -> float:
    return task.state[0, COLUMNS[name]].item()


def act(task: Lift, x: float, y: float, close: float, num_steps: int = 1) -> EnvStep:
    for _ in range(num_steps):
        step = task.step(torch.tensor([[x, y, close]]))
    return step


def scripted(state: Tensor) -> Tensor:
    """Go over the block, go down, close, go up."""
    x, y, block_x, _, size, _, _, _, _, _, held, _ = state.chunk(len(COLUMNS), 1)
    away = block_x - x
    aligned = away.abs() < MAX_GAP - size - 0.005
    low = y < 0.02
    up = torch.where(aligned, -torch.ones_like(y), torch.zeros_like(y))
    up = torch.where(held > 0, torch.ones_like(y), up)
    close = torch.where((aligned & low) | (held > 0), CLOSE, OPEN)
    return torch.cat((10 * away, up, close), 1)


def test_velocity_follows_the_command_with_a_lag() -> None:
    task = place()
    act(task, 1.0, 0.0, OPEN)
    assert get(task, "vx") == pytest.approx(0.25)
    assert get(task, "x") == pytest.approx(0.25 * 0.05)
    act(task, 1.0, 0.0, OPEN)
    assert get(task, "vx") == pytest.approx(0.375)


def test_the_gripper_moves_half_as_fast_up_and_down() -> None:
    task = place()
    act(task, 0.0, 1.0, OPEN)
    assert get(task, "vy") == pytest.approx(0.125)


def test_a_finger_below_the_top_pushes_the_block() -> None:
    task = place(y=0.0, gap=0.0, block_x=0.1)
    act(task, 1.0, 0.0, 0.0, num_steps=10)
    # The outer face of the closed fingers touches the near side of the block.
    assert get(task, "block_x") == pytest.approx(get(task, "x") + FINGER_WIDTH + SIZE)
    assert get(task, "x") > 0.1
    assert get(task, "block_vx") == pytest.approx(get(task, "vx"), abs=1e-4)
    assert get(task, "held") == 0


def test_a_finger_above_the_top_leaves_the_block_alone() -> None:
    task = place(y=0.061, gap=0.0, block_x=0.1)
    act(task, 1.0, 0.0, 0.0, num_steps=10)
    assert get(task, "x") > 0.15
    assert get(task, "block_x") == pytest.approx(0.1)


def test_fingers_stop_on_the_top_of_the_block() -> None:
    task = place(block_x=0.0, gap=0.0)
    act(task, 0.0, -1.0, CLOSE, num_steps=20)
    assert get(task, "y") == pytest.approx(2 * SIZE)
    assert get(task, "vy") == 0
    assert (get(task, "held"), get(task, "block_x"), get(task, "block_y")) == (0, 0, 0)


def test_fingers_stop_on_the_table() -> None:
    task = place()
    act(task, 0.0, -1.0, OPEN, num_steps=20)
    assert get(task, "y") == 0


def test_one_inner_finger_drags_the_block_without_holding_it() -> None:
    task = place(y=0.0, block_x=0.0)
    act(task, 1.0, 0.0, OPEN, num_steps=6)
    assert get(task, "block_x") == pytest.approx(get(task, "x") - MAX_GAP + SIZE)
    assert get(task, "held") == 0


def test_closing_centres_the_block_and_holds_it_when_both_fingers_touch() -> None:
    # The gap goes 0.06, 0.05, 0.04, 0.03 and the block half is 0.03: the third step closes on it.
    task = place(y=0.0, block_x=0.02, gap=0.06)
    act(task, 0.0, 0.0, CLOSE)
    assert get(task, "block_x") == pytest.approx(0.02)
    act(task, 0.0, 0.0, CLOSE)
    # One finger touches and pushes.
    assert get(task, "block_x") == pytest.approx(0.01)
    assert get(task, "held") == 0
    act(task, 0.0, 0.0, CLOSE, num_steps=2)
    assert get(task, "block_x") == pytest.approx(0.0, abs=1e-6)
    assert get(task, "held") == 1
    assert get(task, "gap") == pytest.approx(SIZE)


def test_closing_beside_or_above_the_block_holds_nothing() -> None:
    for task in (place(y=0.0, block_x=0.2), place(y=0.1, block_x=0.0)):
        act(task, 0.0, 0.0, CLOSE, num_steps=10)
        assert (get(task, "held"), get(task, "gap")) == (0, 0)


def test_a_held_block_follows_the_gripper() -> None:
    task = hold(0.1)
    act(task, 1.0, 1.0, CLOSE, num_steps=4)
    assert get(task, "held") == 1
    assert get(task, "x") > 0.05
    assert get(task, "block_x") == pytest.approx(get(task, "x"))
    assert get(task, "block_y") == pytest.approx(get(task, "y"))


def test_a_block_held_by_its_upper_end_is_not_lost_on_the_way_up() -> None:
    task = place(y=0.055, block_x=0.0, gap=SIZE, held=1.0)
    act(task, 0.0, 1.0, CLOSE, num_steps=12)
    assert get(task, "held") == 1
    assert get(task, "block_y") == pytest.approx(get(task, "y") - 0.055)
    assert get(task, "block_y") > 0.1


def test_a_held_block_stops_on_the_table() -> None:
    task = place(y=0.07, block_x=0.0, block_y=0.04, gap=SIZE, held=1.0, held_y=0.04)
    step = act(task, 0.0, -1.0, CLOSE, num_steps=10)
    assert get(task, "block_y") == pytest.approx(0.0, abs=1e-6)
    assert get(task, "y") == pytest.approx(0.03)
    assert not step.terminated.item()


def test_a_dropped_block_falls_and_fails_the_episode_when_it_lands() -> None:
    # After n steps it has fallen 0.05² · 9.81 · n (n + 1) / 2: 0.147 m after three, 0.245 m after four.
    task = hold(0.2)
    step = act(task, 0.0, 0.0, OPEN, num_steps=3)
    assert get(task, "block_y") == pytest.approx(0.2 - 0.05**2 * 9.81 * 6)
    assert not step.terminated.item()
    step = act(task, 0.0, 0.0, OPEN)
    assert step.terminated.item()
    assert step.metric["fail"].item() == 1


def test_a_block_set_down_from_low_is_not_a_failure() -> None:
    task = hold(0.09)
    for _ in range(6):
        assert not act(task, 0.0, 0.0, OPEN).terminated.item()
    assert (get(task, "block_y"), get(task, "held"), get(task, "held_y")) == (0, 0, 0)


def test_a_block_pushed_off_the_table_fails_the_episode() -> None:
    task = place(y=0.0, x=0.35, block_x=0.48)
    for _ in range(20):
        before = get(task, "block_x")
        step = act(task, 1.0, 0.0, OPEN)
        if step.terminated.item():
            break
        assert get(task, "block_x") <= 0.5
    assert step.terminated.item()
    assert step.metric["fail"].item() == 1
    assert 0.475 < before <= 0.5


def test_a_block_held_past_the_edge_has_not_fallen() -> None:
    task = place(x=0.5, y=0.1, block_x=0.52, block_y=0.1, gap=SIZE, held=1.0)
    assert not act(task, 1.0, 0.0, CLOSE).terminated.item()


def test_holding_at_the_target_succeeds_earns_one_and_goes_on() -> None:
    task = hold(0.26)
    step = act(task, 0.0, 0.0, CLOSE)
    assert step.metric["success"].item() == 1
    assert step.reward.item() == pytest.approx(0.1 + 0.2 + 0.7)
    assert not step.terminated.item()
    # Let go at the same height, it is no success any more.
    assert act(task, 0.0, 0.0, OPEN).metric["success"].item() == 0


def test_half_way_up_earns_half_the_lift_reward() -> None:
    step = act(hold(0.125), 0.0, 0.0, CLOSE)
    assert step.metric["lift_reward"].item() == pytest.approx(0.35)
    assert step.metric["success"].item() == 0


def test_reach_reward_grows_towards_the_block() -> None:
    far, near = place(block_x=0.3), place(block_x=0.1)
    still = (0.0, 0.0, OPEN)
    far_reward, near_reward = act(far, *still).reward.item(), act(near, *still).reward.item()
    assert 0 < far_reward < near_reward < 0.1


def test_closing_around_the_block_earns_up_to_half_the_grasp_reward() -> None:
    # Half of the way from fully open to the block: half of 0.5 of the weight 0.2.
    around = place(y=0.0, block_x=0.0, gap=(MAX_GAP + SIZE) / 2)
    beside = place(y=0.0, block_x=0.2, gap=(MAX_GAP + SIZE) / 2)
    assert act(around, 0.0, 0.0, 0.0).metric["grasp_reward"].item() == pytest.approx(0.05)
    assert act(beside, 0.0, 0.0, 0.0).metric["grasp_reward"].item() == 0


def test_grasping_on_the_way_down_does_not_press_the_block_into_the_table() -> None:
    task = place(y=0.03, block_x=0.0, gap=SIZE + 0.005, vy=-0.25)
    act(task, 0.0, -1.0, CLOSE)
    assert (get(task, "held"), get(task, "block_y")) == (1, 0)


def test_fingers_and_block_never_overlap() -> None:
    # Wild motions near the block, held for a few steps each, pressing down more than up.
    N = 512
    task = Lift(N)
    task.reset(0)
    generator = torch.Generator().manual_seed(0)
    num_contacts = 0
    for t in range(200):
        if t % 3 == 0:
            action = 2 * torch.rand(N, 3, generator=generator) - 1
            toward = (task.state[:, 2:3] - task.state[:, 0:1]).sign()
            action = torch.cat((action[:, :1] + 0.3 * toward, action[:, 1:2] - 0.2, action[:, 2:]), 1)
        task.step(action)
        x, y, block_x, block_y, size, _, _, block_vx, _, gap, _, _ = task.state.chunk(len(COLUMNS), 1)
        assert torch.minimum(y, block_y).min() >= 0
        overlap_y = torch.minimum(y + 0.1, block_y + 2 * size) - torch.maximum(y, block_y)
        for finger in (x - gap - FINGER_WIDTH / 2, x + gap + FINGER_WIDTH / 2):
            overlap_x = size + FINGER_WIDTH / 2 - (finger - block_x).abs()
            assert torch.minimum(overlap_x, overlap_y).max() < 1e-4
        num_contacts += int((block_vx != 0).sum())
    assert num_contacts > 1000


def test_reward_is_the_sum_of_its_components_and_bounded() -> None:
    task = Lift(64)
    task.reset(0)
    for _ in range(60):
        step = task.step(scripted(task.state))
        parts = [step.metric[name] for name in ("reach_reward", "grasp_reward", "lift_reward")]
        torch.testing.assert_close(step.reward, torch.stack(parts).sum(0))
        assert all((part >= 0).all() for part in parts)
        assert step.reward.max() <= 1.0 + 1e-6


def test_a_scripted_policy_always_succeeds_to_the_end() -> None:
    task = Lift(1024)
    task.reset(0)
    for t in range(100):
        step = task.step(scripted(task.state))
        assert not step.terminated.any()
        assert step.truncated.all() == (t == 99)
    assert step.metric["success"].all()


def test_random_actions_never_succeed() -> None:
    task = Lift(1024)
    task.reset(0)
    generator = torch.Generator().manual_seed(0)
    num_successes = 0.0
    for _ in range(200):
        step = task.step(2 * torch.rand(1024, 3, generator=generator) - 1)
        num_successes += step.metric["success"].sum().item()
    assert num_successes == 0
