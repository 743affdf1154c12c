from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gymnasium.spaces import Dict
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import ConfigError
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import CMD_KEY, OBJECT_KEY, OBS_KEY, OBS_PRIV_KEY, EnvStep, Observation
from apexrl.envs import check_env, make_env
from apexrl.envs.tasks import Payload
from apexrl.envs.tasks.payload import FRAME_SECTIONS, PARAMETERS, SECTION_SIZES

EVEN = {"mass": 3.0, "friction": 0.2, "drag": 2.0, "gain": 0.5, "latency": 0}


def section(task: Payload, name: str) -> Tensor:
    """A view of one part of the state."""
    parts: tuple[Tensor, ...] = task.state.split(SECTION_SIZES, 1)
    return parts[list(FRAME_SECTIONS).index(name)]


def group(obs: Observation | None, name: str) -> Tensor:
    assert isinstance(obs, TensorDict)
    value = obs[name]
    assert isinstance(value, Tensor)
    return value


def frames(obs: Observation | None) -> Tensor:
    """The history ``[N, 24, 4]``."""
    return group(obs, OBS_KEY).view(-1, 24, 4)


def at_rest(velocity: tuple[float, float] = (0.0, 0.0), **parameters: float) -> Payload:
    """One body with even physics but for those given, and the command (0.3, 0)."""
    task = Payload(1, fixed={**EVEN, **parameters})
    task.reset(0)
    section(task, "velocity").copy_(torch.tensor([velocity]))
    section(task, "command").copy_(torch.tensor([[0.3, 0.0]]))
    return task


def random_steps(task: Payload, num: int) -> list[EnvStep]:
    generator = torch.Generator().manual_seed(9)
    return [task.step(2 * torch.rand(task.num_envs, 2, generator=generator) - 1) for _ in range(num)]


def informed_action(task: Payload) -> Tensor:
    """The action that reaches the command when it acts, for one who knows the physics and the pending actions."""
    mass, friction, drag, gain, latency = task.parameters.values()
    push, slowing = 0.05 * 30 * gain / mass, 1 + 0.05 * drag / mass

    def coast(velocity: Tensor, action: Tensor) -> Tensor:
        after: Tensor = (velocity + push * action) / slowing
        after *= (1 - 0.05 * friction / after.norm(dim=1, keepdim=True)).clamp_min(0.0)
        return after

    now, history = section(task, "velocity"), section(task, "frames")
    last, before = history[:, -2:], history[:, -6:-4]
    later = torch.where(latency == 1, coast(now, last), coast(coast(now, before), last))
    velocity = torch.where(latency == 0, now, later)
    command = section(task, "command")
    wanted = command * (1 + 0.05 * friction / command.norm(dim=1, keepdim=True))
    action: Tensor = ((wanted * slowing - velocity) / push).clamp(-1, 1)
    return action


# Physics and reward


@pytest.mark.parametrize("latency", [0, 1, 2])
def test_three_steps_by_hand(latency: int) -> None:
    task = at_rest(latency=latency)
    speed, last = 0.0, 0.0
    actions = [0.8, -0.4, 2.0]  # the last is cut to 1
    for t, raw in enumerate(actions):
        step = task.step(torch.tensor([[raw, 0.0]]))
        action = min(raw, 1.0)
        acting = min(actions[t - latency], 1.0) if t >= latency else 0.0
        # 0.05 s of 30 N at gain 0.5 on 3 kg push by 0.25 m/s; drag divides by 1 + 0.1 / 3; friction takes 0.01 m/s.
        speed = (speed + 0.25 * acting) / (1 + 0.1 / 3)
        speed = math.copysign(max(abs(speed) - 0.01, 0.0), speed)
        assert section(task, "velocity").tolist() == [[pytest.approx(speed, abs=1e-6), 0.0]]
        tracking, smoothness = 1 / (1 + ((speed - 0.3) / 0.15) ** 2), -0.02 * (action - last) ** 2
        assert step.metric["tracking_reward"].item() == pytest.approx(tracking, rel=1e-5)
        assert step.metric["smoothness_reward"].item() == pytest.approx(smoothness, rel=1e-5)
        assert step.reward.item() == pytest.approx(tracking + smoothness, rel=1e-5)
        assert step.metric["tracking_error"].item() == pytest.approx(abs(speed - 0.3), abs=1e-6)
        last = action


def test_friction_stops_the_body_and_does_not_reverse_it() -> None:
    task = at_rest(velocity=(0.006, -0.008), friction=0.4, drag=0.0)
    step = task.step(torch.zeros(1, 2))
    # It moves at 0.01 m/s and friction would take 0.02.
    assert section(task, "velocity").tolist() == [[0.0, 0.0]]
    step = task.step(torch.zeros(1, 2))
    assert section(task, "velocity").tolist() == [[0.0, 0.0]]
    assert step.metric["tracking_error"].item() == pytest.approx(0.3)


def test_friction_keeps_the_direction() -> None:
    task = at_rest(velocity=(0.3, -0.4), friction=0.4, drag=0.0)
    task.step(torch.zeros(1, 2))
    # From 0.5 to 0.48 m/s.
    torch.testing.assert_close(section(task, "velocity"), torch.tensor([[0.288, -0.384]]))


def test_knowing_the_physics_is_worth_much() -> None:
    def mean_reward(action_of: Any) -> float:
        task = Payload(512)
        task.reset(0)
        return torch.cat([task.step(action_of(task)).reward for _ in range(200)]).mean().item()

    # 0.88 and 0.07 over other seeds too.
    assert mean_reward(informed_action) > 0.86
    assert mean_reward(lambda task: torch.zeros(task.num_envs, 2)) < 0.1


# What is drawn, and when


def test_parameters_have_their_ranges() -> None:
    task = Payload(20_000)
    task.reset(0)
    size, density = section(task, "size"), (task.parameters["mass"] - 2.0) / section(task, "size").square()
    expected = {"friction": (0.0, 0.4), "drag": (0.5, 6.0), "gain": (0.3, 2.0), "latency": (0.0, 2.0)}
    found = {**task.parameters, "size": size, "density": density}
    for name, (low, high) in {**expected, "size": (0.5, 1.5), "density": (0.25, 1.8)}.items():
        assert found[name].min().item() == pytest.approx(low, abs=0.01 * (high - low))
        assert found[name].max().item() == pytest.approx(high, abs=0.01 * (high - low))
    # Log-uniform: the median is the geometric mean of the ends. Four standard errors are below 0.03.
    assert found["gain"].median().item() == pytest.approx(math.sqrt(0.3 * 2.0), abs=0.03)
    assert found["density"].median().item() == pytest.approx(math.sqrt(0.25 * 1.8), abs=0.03)
    assert sorted(set(found["latency"].flatten().tolist())) == [0.0, 1.0, 2.0]
    # A third of 20 000 draws with a standard error of 0.0033.
    assert (found["latency"] == 1).float().mean().item() == pytest.approx(1 / 3, abs=0.0134)
    assert section(task, "velocity").std().item() == pytest.approx(0.5, abs=0.01)


def test_parameters_are_redrawn_at_a_reset_only() -> None:
    task = Payload(4, max_episode_steps=30)
    task.reset(0)
    before, size = torch.cat(list(task.parameters.values()), 1), section(task, "size").clone()
    for step in random_steps(task, 29):
        assert not step.truncated.any()
        assert torch.equal(torch.cat(list(task.parameters.values()), 1), before)
    assert torch.equal(section(task, "size"), size)
    assert random_steps(task, 1)[0].truncated.all()
    after = torch.cat(list(task.parameters.values()), 1)
    assert (after != before)[:, :4].all()
    assert (section(task, "size") != size).all()


def test_commands_are_new_every_25_steps_at_a_random_phase() -> None:
    task = Payload(2000)
    obs: Observation = task.reset(0)
    commands = [group(obs, CMD_KEY)]
    commands += [group(step.obs, CMD_KEY) for step in random_steps(task, 99)]
    assert all((command.abs() <= 1).all() for command in commands)
    new = torch.stack([(commands[t] != commands[t - 1]).all(1) for t in range(1, 100)])
    first = new.float().argmax(0)
    # The first new command comes after 1 to 25 steps, and then every 25 steps and never between.
    steps = torch.arange(99)[:, None]
    assert torch.equal(new, (steps >= first) & ((steps - first) % 25 == 0))
    # 80 environments a phase are expected, with a standard deviation of 9.
    assert torch.bincount(first, minlength=25).min() > 40
    assert len(torch.bincount(first)) == 25


def test_the_reward_is_for_the_command_that_was_seen() -> None:
    task = Payload(1)
    obs: Observation = task.reset(0)
    for _ in range(30):
        seen = group(obs, CMD_KEY).clone()
        step = task.step(torch.zeros(1, 2))
        error = (section(task, "velocity") - seen).norm().item()
        assert step.metric["tracking_error"].item() == pytest.approx(error, rel=1e-5)
        obs = step.obs


@pytest.mark.parametrize("change", ["mass", "gain", "all"])
def test_the_physics_change_after_change_step_steps(change: str) -> None:
    task, unchanged = (Payload(8, change_step=n, change=change, max_episode_steps=20) for n in (7, 0))
    task.reset(0)
    unchanged.reset(0)
    before, size = task.parameters, section(task, "size").clone()
    random_steps(task, 6)
    random_steps(unchanged, 6)
    assert all(torch.equal(task.parameters[name], before[name]) for name in PARAMETERS)
    assert torch.equal(task.state, unchanged.state)
    step = random_steps(task, 1)[0]
    after = task.parameters
    for name in PARAMETERS:
        changed = not torch.equal(after[name], before[name])
        assert changed == (change in ("all", name))
    # The teacher is told at once, and the object looks the same.
    assert (group(step.obs, OBS_PRIV_KEY) != group(unchanged.step(torch.zeros(8, 2)).obs, OBS_PRIV_KEY)).any(1).all()
    assert torch.equal(section(task, "size"), size)
    random_steps(task, 12)
    assert all(torch.equal(task.parameters[name], after[name]) for name in PARAMETERS)
    assert random_steps(task, 1)[0].truncated.all()


def test_every_episode_changes_again() -> None:
    task = Payload(1, change_step=3, max_episode_steps=5, change="gain", fixed={"gain": 0.5}, change_to={"gain": 1.5})
    task.reset(0)
    gains = []
    for _ in range(10):
        gains.append(task.parameters["gain"].item())
        task.step(torch.zeros(1, 2))
    assert gains == [0.5, 0.5, 0.5, 1.5, 1.5] * 2


def test_fixed_parameters_have_their_values_and_the_others_are_drawn() -> None:
    task = Payload(64, fixed={"gain": 3.0, "latency": 1}, change_step=5)
    task.reset(0)
    random_steps(task, 5)
    assert task.parameters["gain"].tolist() == [[3.0]] * 64
    assert task.parameters["latency"].tolist() == [[1.0]] * 64
    assert task.parameters["mass"].unique().numel() == 64


# What is seen


def test_the_groups_and_their_sizes() -> None:
    task = Payload(3)
    space = task.observation_space
    assert isinstance(space, Dict)
    shapes = {name: part.shape for name, part in space.spaces.items()}
    assert shapes == {OBS_KEY: (96,), CMD_KEY: (2,), OBJECT_KEY: (1,), OBS_PRIV_KEY: (5,)}
    obs = task.reset(0)
    assert isinstance(obs, TensorDict)
    assert {name: x.shape[1:] for name, x in obs.to_dict().items()} == shapes
    torch.testing.assert_close(group(obs, OBJECT_KEY), section(task, "size") - 1)


def test_priv_is_minus_one_to_one_over_the_ranges() -> None:
    low = {"mass": 2 + 0.25 * 0.25, "friction": 0.0, "drag": 0.5, "gain": 0.3, "latency": 0}
    high = {"mass": 2 + 1.8 * 2.25, "friction": 0.4, "drag": 6.0, "gain": 2.0, "latency": 2}
    middle = {
        "mass": math.sqrt(low["mass"] * high["mass"]),
        "friction": 0.2,
        "drag": 3.25,
        "gain": math.sqrt(0.6),
        "latency": 1,
    }
    for fixed, expected in ((low, -1.0), (middle, 0.0), (high, 1.0)):
        priv = group(Payload(1, fixed=fixed).reset(0), OBS_PRIV_KEY)
        torch.testing.assert_close(priv, torch.full((1, 5), expected), atol=1e-5, rtol=0.0)


def test_history_slides_and_is_empty_before_the_episode() -> None:
    task = Payload(4, max_episode_steps=30)
    first = frames(task.reset(0))
    assert (first[:, :-1] == 0).all()
    assert (first[:, -1, 2:] == 0).all()
    assert (first[:, -1, :2] != 0).all()
    last = first
    generator = torch.Generator().manual_seed(1)
    for t in range(30):
        action = 3 * torch.rand(4, 2, generator=generator) - 1.5
        step = task.step(action)
        now = frames(step.final_obs)
        assert torch.equal(now[:, :-1], last[:, 1:])
        assert torch.equal(now[:, -1, 2:], action.clamp(-1, 1))
        assert (now[:, : max(0, 22 - t)] == 0).all()
        last = now
    # The time limit: final_obs has the whole history, the new episode none of it.
    assert step.truncated.all()
    assert (frames(step.final_obs) != 0).all()
    assert (frames(step.obs)[:, :-1] == 0).all()
    assert (frames(step.obs)[:, -1, 2:] == 0).all()


def test_only_the_observed_velocity_is_noisy() -> None:
    task = Payload(5000, fixed=EVEN)
    noise = frames(task.reset(0))[:, -1, :2] - section(task, "velocity")
    assert noise.std().item() == pytest.approx(0.02, rel=0.05)
    section(task, "velocity").fill_(0.1)
    step = task.step(torch.full((5000, 2), 0.5))
    # The same push everywhere: the true velocities agree, what is seen does not.
    assert section(task, "velocity").std(0).max() < 1e-6
    noise = frames(step.obs)[:, -1, :2] - section(task, "velocity")
    assert noise.std().item() == pytest.approx(0.02, rel=0.05)
    assert noise.mean().item() == pytest.approx(0.0, abs=1e-3)


# As an environment


def test_episodes_end_by_the_time_limit_only() -> None:
    task = Payload(16)
    task.reset(0)
    steps = random_steps(task, 400)
    assert not any(step.terminated.any() for step in steps)
    assert [t for t, step in enumerate(steps) if step.truncated.any()] == [199, 399]
    assert steps[199].truncated.all()


def test_options_keep_the_rules_too() -> None:
    options: dict[str, Any] = {
        "change_step": 5,
        "max_episode_steps": 20,
        "fixed": {"drag": 1.0},
        "change_to": {"gain": 0.5},
    }
    env = make_env("payload", 3, **options)
    assert isinstance(env, Payload)
    assert check_env(env, num_steps=60) == []
    other = env.spawn(2)
    other.reset(0)
    random_steps(other, 5)
    assert other.parameters["gain"].tolist() == [[0.5], [0.5]]
    assert other.parameters["drag"].tolist() == [[1.0], [1.0]]


def test_compiled_steps_equal_eager_ones() -> None:
    eager, compiled = Payload(8, max_episode_steps=12, change_step=5), Payload(8, max_episode_steps=12, change_step=5)
    compiled.accelerate(Acceleration(compile=True))
    eager.reset(3)
    compiled.reset(3)
    for ours, theirs in zip(random_steps(eager, 30), random_steps(compiled, 30), strict=True):
        for name in (OBS_KEY, CMD_KEY, OBJECT_KEY, OBS_PRIV_KEY):
            torch.testing.assert_close(group(ours.obs, name), group(theirs.obs, name))
            torch.testing.assert_close(group(ours.final_obs, name), group(theirs.final_obs, name))
        torch.testing.assert_close(ours.reward, theirs.reward)
        assert torch.equal(ours.truncated, theirs.truncated)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"change_step": -1}, ["Payload.change_step", 0, -1]),
        ({"change_step": 200}, ["Payload.change_step", "[0, 200)", 200]),
        ({"change_step": 1.5}, ["Payload.change_step", 1.5]),
        ({"change_step": True}, ["Payload.change_step", True]),
        ({"fixed": {"gain": True}}, ["Payload.fixed.gain", "finite", True]),
        ({"change_step": 5, "change_to": {"latency": True}}, ["Payload.change_to.latency", "finite", True]),
        ({"change": "colour"}, ["Payload.change", "mass", "all", "colour"]),
        ({"max_episode_steps": 0}, ["Payload.max_episode_steps", 1, 0]),
        ({"fixed": {"gian": 1.0}}, ["Payload.fixed", "'gian'", "'gain'"]),
        ({"fixed": {"gain": 0.0}}, ["Payload.fixed.gain", "above 0", 0.0]),
        ({"fixed": {"drag": -1.0}}, ["Payload.fixed.drag", "at least 0", -1.0]),
        ({"fixed": {"mass": math.nan}}, ["Payload.fixed.mass", "finite", math.nan]),
        ({"fixed": {"mass": "heavy"}}, ["Payload.fixed.mass", "finite", "'heavy'"]),
        ({"fixed": {"latency": 3}}, ["Payload.fixed.latency", "0, 1 or 2", 3]),
        ({"fixed": ["gain"]}, ["Payload.fixed", "map"]),
        ({"change_to": {"gain": 1.0}}, ["Payload.change_to", "Payload.change_step"]),
        ({"change_step": 5, "change_to": 7}, ["Payload.change_to", "map"]),
        (
            {"change_step": 5, "change": "mass", "change_to": {"gain": 1.0}},
            ["Payload.change_to", ["gain"], "Payload.change", "mass"],
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], named: list[object]) -> None:
    with refused(ConfigError, *named):
        Payload(1, **options)
