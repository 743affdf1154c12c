from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import ConfigError, EnvError, EnvStateError
from apexrl.envs import MujocoVecEnv, check_env, make_env
from apexrl.envs.mujoco.payload import FRAME, WalkerPayload, WalkerPhysics

mujoco: Any = pytest.importorskip("mujoco")

HISTORY = 3
GROUPS = {"policy": HISTORY * FRAME, "command": 1, "object": 2, "priv": 7}


def make(num_envs: int = 2, **options: Any) -> MujocoVecEnv:
    return MujocoVecEnv("WalkerPayload", num_envs, num_threads=1, **{"history": HISTORY, **options})


def mj_data(env: MujocoVecEnv) -> Any:
    return env._data


def actions(num_steps: int, num_envs: int = 2, seed: int = 0) -> Tensor:
    return torch.rand(num_steps, num_envs, 6, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def trace(env: MujocoVecEnv, moves: Tensor) -> list[dict[str, Tensor]]:
    """All that each step says."""
    steps = []
    for action in moves:
        step: Any = env.step(action)
        done = step.terminated | step.truncated
        seen = {name: step.obs[name].clone() for name in GROUPS}
        if step.final_obs is not None:
            seen |= {f"final_{name}": torch.where(done, step.final_obs[name], 0.0) for name in GROUPS}
        steps.append({**seen, "reward": step.reward.clone(), "done": done.clone()})
    return steps


def assert_same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> None:
    for ours, theirs in zip(a, b, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name


def true_frame(env: MujocoVecEnv, i: int, action: Tensor) -> Tensor:
    """The newest frame of environment ``i`` by the names of the joints."""
    data, legs = mj_data(env)[i], [f"{part}{side}_joint" for side in ("", "_left") for part in ("thigh", "leg", "foot")]
    angles = [float(data.joint(name).qpos[0]) for name in ("rooty", *legs)]
    return torch.tensor([*angles, *action.tolist()])


def test_the_four_groups() -> None:
    env: Any = make_env("mujoco/WalkerPayload", 3, num_threads=1)
    assert {name: space.shape for name, space in env.observation_space.spaces.items()} == {
        "policy": (10 * FRAME,), "command": (1,), "object": (2,), "priv": (7,),
    }  # fmt: skip
    assert env.action_space.shape == (6,)
    assert env.max_episode_steps == 500
    assert env.metric_specs["tracking_error"].reduce == "mean"
    obs = env.reset(seed=0)
    assert ((obs["command"] >= 0.5) & (obs["command"] <= 1.5)).all()
    assert (obs["object"].abs() <= 1).all()
    assert (obs["priv"][:, :4].abs() <= 1).all()


def test_the_contract_holds() -> None:
    assert check_env(make(3, max_episode_steps=15, command_period=6), num_steps=40) == []


def test_frames_stack_up_from_zeros_with_the_newest_last() -> None:
    env = make(max_episode_steps=4)
    obs: Any = env.reset(seed=0)
    frames = [obs["policy"].clone().view(2, HISTORY, FRAME)]
    assert (frames[0][:, :-1] == 0).all()
    moves = actions(4)
    for t in range(3):
        step: Any = env.step(moves[t])
        frames.append(step.obs["policy"].clone().view(2, HISTORY, FRAME))
        torch.testing.assert_close(frames[-1][1, -1], true_frame(env, 1, moves[t][1]))
        assert torch.equal(frames[-1][:, :-1], frames[-2][:, 1:])
    last: Any = env.step(moves[3])
    assert last.truncated.all()
    final, fresh = (obs["policy"].view(2, HISTORY, FRAME) for obs in (last.final_obs, last.obs))
    assert torch.equal(final[:, :-1], frames[-1][:, 1:])
    assert torch.equal(final[:, -1, -6:], moves[3])
    assert (fresh[:, :-1] == 0).all()
    torch.testing.assert_close(fresh[0, -1], true_frame(env, 0, torch.zeros(6)))


def test_a_command_lasts_its_period_from_a_random_phase() -> None:
    env = make(8, command_period=5, command_range=(0.2, 0.5))
    obs: Any = env.reset(seed=0)
    commands = [obs["command"].clone()] + [step["command"] for step in trace(env, torch.zeros(14, 8, 6))]
    assert all(((command >= 0.2) & (command <= 0.5)).all() for command in commands)
    changes = torch.stack([(a != b).any(1) for a, b in zip(commands[1:], commands[:-1], strict=True)])
    first = changes.float().argmax(0)
    assert len(first.unique()) > 1
    for i, start in enumerate(first.tolist()):
        assert changes[:, i].nonzero().flatten().tolist() == list(range(start, 14, 5))


def test_physics_are_drawn_for_each_episode_from_the_seed() -> None:
    def physics(env: MujocoVecEnv) -> list[tuple[float, ...]]:
        return [WalkerPayload().physics(model) for model in env.models]

    def differ_in_all(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return all(ours != theirs for ours, theirs in zip(a, b, strict=True))

    env = make(3, max_episode_steps=1)
    env.reset(seed=4)
    first = physics(env)
    env.step(torch.zeros(3, 6))
    second = physics(env)
    for i in range(3):
        assert differ_in_all(first[i], second[i])
        assert differ_in_all(first[i], first[(i + 1) % 3])
    env.reset(seed=4)
    assert physics(env) == first
    usual, again = WalkerPayload().load(), make(1)
    for seed in (3, 4):  # what is drawn does not add up
        again.reset(seed=seed)
    assert physics(again)[0] == first[0]
    state = again.state_dict()
    assert state is not None
    assert "body_mass" in state["model"]  # by which the model differs from the usual one
    other = make(1)
    other.load_state_dict(state)
    assert physics(other) == physics(again)
    assert not np.array_equal(again.models[0].body_mass, usual.body_mass)


def test_priv_and_object_tell_the_physics_of_the_model() -> None:
    env = make(1)
    env.reset(seed=0)
    model, usual = env.models[0], WalkerPayload().load()
    obs: Any = env.step(actions(1, 1)[0]).obs
    # Ranges as in the docstring.
    mass = model.body_mass[1:8].sum() / usual.body_mass[1:8].sum()
    expected = [
        (mass - 1.05) / 0.25,
        (model.geom_friction[0, 0] - 1.0) / 0.5,
        (model.actuator_forcerange[5, 1] / 100 - 1.0) / 0.4,
    ]
    torch.testing.assert_close(obs["priv"][0, :3], torch.tensor(expected, dtype=torch.float32))
    payload, half = model.body("payload").mass.item(), model.geom("payload").size[0]
    low, high = math.log(100 * 0.16**3), math.log(600 * 0.28**3)
    assert float(obs["priv"][0, 3]) == pytest.approx(-1 + 2 * (math.log(payload) - low) / (high - low))
    assert 100 <= payload / (2 * half) ** 3 <= 600
    place = [(half - 0.11) / 0.03, model.body("payload").pos[0] / 0.1]
    torch.testing.assert_close(obs["object"][0], torch.tensor(place, dtype=torch.float32))
    data = mj_data(env)[0]
    state = [data.joint("rootx").qvel[0], data.joint("rootz").qvel[0], data.body("torso").xpos[2]]
    mujoco.mj_kinematics(model, data)  # the place of the torso is one substep behind until then
    state[2] = data.body("torso").xpos[2]
    torch.testing.assert_close(obs["priv"][0, 4:], torch.tensor(state, dtype=torch.float32))


def test_physics_changed_within_an_episode_are_observed() -> None:
    task = WalkerPayload(history=HISTORY)
    env = MujocoVecEnv(task, 2, num_threads=1)
    env.reset(seed=0)
    physics = WalkerPhysics(mass=0.8, friction=1.5, strength=1.0, size=0.14, payload=600 * 0.28**3, offset=0.1)
    task.set_physics(env.models[1], physics, mujoco.MjData(env.models[1]))
    assert task.physics(env.models[1]) == pytest.approx(physics)
    obs: Any = env.step(torch.zeros(2, 6)).obs
    torch.testing.assert_close(obs["priv"][1, :4], torch.tensor([-1.0, 1.0, 0.0, 1.0]))
    torch.testing.assert_close(obs["object"][1], torch.tensor([1.0, 1.0]))
    weight = env.models[1].body_subtreemass[1]  # what MuJoCo derives from the masses
    assert weight == pytest.approx(0.8 * task.load().body_mass[1:8].sum() + 600 * 0.28**3)
    assert not torch.allclose(obs["priv"][0, :4], obs["priv"][1, :4])


@pytest.mark.parametrize(("change", "place"), [("mass", 0), ("friction", 1), ("strength", 2), ("payload", 3)])
def test_one_of_the_physics_changes_in_the_middle_of_an_episode(change: str, place: int) -> None:
    usual, env = (
        make(2, max_episode_steps=6, command_period=2, **more) for more in ({}, {"change_step": 3, "change": change})
    )
    for each in (usual, env):
        each.reset(seed=0)
    expected, found = (trace(each, torch.zeros(5, 2, 6)) for each in (usual, env))
    assert_same(found[:2], expected[:2])
    for t in (2, 3, 4):
        differs = found[t]["priv"][:, :4] != expected[t]["priv"][:, :4]
        assert (differs == (torch.arange(4) == place)).all()
        assert torch.equal(found[t]["command"], expected[t]["command"])  # in all else the episode is the same
        assert torch.equal(found[t]["object"], expected[t]["object"])
    assert torch.equal(found[2]["policy"], expected[2]["policy"])
    assert not torch.equal(found[3]["policy"], expected[3]["policy"]) or change == "friction"
    assert (found[4]["priv"][:, :4].abs() <= 1).all()
    expected, found = (trace(each, torch.zeros(1, 2, 6)) for each in (usual, env))
    assert found[0]["done"].all()
    assert torch.equal(found[0]["priv"], expected[0]["priv"])  # of the next episode


def test_a_change_may_have_a_given_value() -> None:
    env = make(1, change_step=1, change="strength", change_to=0.6)
    env.reset(seed=0)
    obs: Any = env.step(torch.zeros(1, 6)).obs
    assert float(obs["priv"][0, 2]) == pytest.approx(-1.0)


def test_servos_and_contacts_have_the_drawn_strength_and_friction() -> None:
    def hip_speed(**ranges: Any) -> float:
        env = make(1, reset_noise_scale=0.0, size_range=(0.1, 0.1), density_range=(50.0, 50.0), **ranges)
        env.reset(seed=0)
        env.step(torch.full((1, 6), 0.1))
        return abs(float(mj_data(env)[0].joint("thigh_joint").qvel[0]))

    assert hip_speed(strength_range=(0.5, 0.5)) < 0.7 * hip_speed(strength_range=(1.3, 1.3))
    env = make(1, friction_range=(0.5, 0.5))
    env.reset(seed=0)
    for _ in range(15):
        env.step(torch.zeros(1, 6))
    contacts = mj_data(env)[0].contact
    assert len(contacts) > 0
    assert contacts[0].friction[0] == 0.5


def test_servos_pull_towards_their_aim() -> None:
    env = make(1, strength_range=(0.5, 0.5))
    env.reset(seed=0)
    model, data = env.models[0], mj_data(env)[0]
    data.ctrl[:] = [0.5, -0.5, 0.1, 0.0, 1.0, 0.0]
    data.qpos[3:] = [0.3, -0.6, 0.3, 0.0, -1.6, 0.3]
    data.qvel[3:] = [0.0, 0.0, 0.0, 0.0, 0.0, 4.0]
    mujoco.mj_forward(model, data)
    # 120 N·m/rad · (pose + action - angle) - 1.5 N·m·s/rad · velocity, at most 100 N·m, and half of it all.
    expected = [0.5 * 120 * 0.5, -0.5 * 120 * 0.5, 0.5 * 120 * 0.1, 0.5 * 120 * 0.3, 50.0, -0.5 * 1.5 * 4.0]
    np.testing.assert_allclose(data.actuator_force, expected, atol=1e-9)


def test_reward_of_one_step() -> None:
    env = make(3, control_cost_weight=0.05)
    obs: Any = env.reset(seed=0)
    for data, speed in zip(mj_data(env), (1.0, -2.0, 0.4), strict=True):
        data.qvel[0] = speed
    command = obs["command"][:, 0].tolist()
    before = [data.joint("rootx").qpos[0] for data in mj_data(env)]
    action = actions(1, 3)[0]
    step = env.step(action)
    for i, data in enumerate(mj_data(env)):
        speed = (data.joint("rootx").qpos[0] - before[i]) / 0.02
        error = abs(speed - command[i])
        expected = max(0.0, 1 - error / command[i]) - 0.05 * float(action[i].square().sum())
        assert float(step.reward[i]) == pytest.approx(expected, rel=1e-5)
        assert float(step.metric["tracking_error"][i]) == pytest.approx(error, rel=1e-5)
    assert float(step.metric["tracking_reward"][1]) == 0  # backwards is no worse than to stand


def test_it_ends_when_the_walker_falls() -> None:
    env = make(5)
    env.reset(seed=0)
    state: Any = env.state_dict()
    before = {name: values.numpy() for name, values in state["fields"].items()}
    after = {name: array.copy() for name, array in before.items()}
    after["qpos"][:, 1] = [0.79, 2.01, 1.2, 1.2, 0.81]  # Gymnasium's bounds
    after["qpos"][:, 2] = [0.0, 0.0, -1.01, 0.0, 0.99]
    after["qvel"][3, 0] = np.nan
    outcome = env.task.outcome(before, after, np.zeros((5, 6), np.float32), np.full(5, 0.02))
    assert outcome.terminated.tolist() == [True, True, True, True, False]
    mj_data(env)[1].qpos[1] = 2.5
    assert env.step(torch.zeros(5, 6)).terminated.flatten().tolist() == [False, True, False, False, False]


def test_a_saved_state_has_the_same_future_in_a_new_environment() -> None:
    options: dict[str, Any] = {"max_episode_steps": 12, "command_period": 5, "change_step": 10}
    env = make(**options)
    obs: Any = env.reset(seed=0)  # the memory of every later observation
    trace(env, actions(8))
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    moves = actions(20, seed=1)
    future = trace(env, moves)
    assert any(step["done"].any() for step in future)
    other = make(**options)
    other.load_state_dict(state)
    usual = WalkerPayload().load()
    assert other.models[0].stat.meaninertia != usual.stat.meaninertia  # which the solver reads
    assert_same(trace(other, moves), future)
    env.load_state_dict(state)
    assert torch.equal(obs["policy"].view(2, HISTORY, FRAME)[:, -1, -6:], actions(8)[-1])
    assert_same(trace(env, moves), future)
    with refused(EnvStateError, "WalkerPayload", "physics"):
        make(history=4).load_state_dict(state)


def test_spawn_draws_its_own_physics_around_the_same_robot() -> None:
    env = make(1, max_episode_steps=7, strength_range=(0.5, 0.6))
    env.reset(seed=0)
    other = env.spawn(2)
    assert (other.num_envs, other.max_episode_steps, other.task) == (2, 7, env.task)
    before = env.models[0].body_mass.copy()
    for _ in range(3):  # what is drawn does not add up
        other.reset()
    assert all(50 <= model.actuator_forcerange[0, 1] <= 60 for model in other.models)
    np.testing.assert_array_equal(env.models[0].body_mass, before)


def test_what_randomize_changes_stays() -> None:
    def add_damping(model: Any, rng: np.random.Generator) -> None:
        model.dof_damping[3:] = rng.uniform(2.0, 3.0)

    env = make(2, randomize=add_damping)
    damping = [model.dof_damping[3] for model in env.models]
    env.reset(seed=0)
    assert [model.dof_damping[3] for model in env.models] == damping
    assert [model.dof_damping[3] for model in env.spawn(2).models] == damping
    assert damping[0] != damping[1]


def test_the_image_shows_the_object_of_the_episode() -> None:
    env = make(1, max_episode_steps=1, reset_noise_scale=0.0)
    env.reset(seed=0)
    try:
        first = env.render()
    except EnvError as error:
        pytest.skip(str(error))
    env.step(torch.zeros(1, 6))
    assert not np.array_equal(env.render(), first)  # the same pose with another object
    env.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("history", 0), ("history", 2.5), ("command_period", 0), ("command_range", (0.0, 1.0)), ("frame_skip", 0),
        ("control_cost_weight", math.nan), ("mass_range", (2.0, 1.0)), ("friction_range", 1.0),
        ("density_range", (0.0, 1.0)), ("offset_range", (0.0, math.inf)), ("change_step", -1), ("change", "size"),
        ("change_to", 1.0), ("change_step", True), ("change_step", 1.5), ("change_step", 500),
    ],
)  # fmt: skip
def test_wrong_options_are_named(option: str, value: Any) -> None:
    with refused(ConfigError, f"WalkerPayload.{option}", value):
        make_env("mujoco/WalkerPayload", 1, **{option: value})


def test_lists_from_a_file_are_ranges_too() -> None:
    env = make(1, mass_range=[1.0, 1.0], offset_range=[0.0, 0.0])
    env.reset(seed=0)
    assert env.models[0].body_mass[1] == WalkerPayload().load().body_mass[1]


def test_the_list_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    from apexrl.cli.main import main

    assert main(["list"]) == 0
    output = capsys.readouterr().out
    assert "mujoco/WalkerPayload  Walk at a commanded speed" in output
    assert "walker_roa " in output


def test_the_preset_trains_and_is_drawn_with_a_change(tmp_path: Path) -> None:
    from adaptation import compare

    from apexrl.cli.main import main
    from apexrl.run import trained_policy

    small = {
        "task.num_envs": 2, "policy.hidden_dims": "[8]", "policy.adapt_dims": "[8]", "algo.num_steps": 4,
        "algo.num_epochs": 1, "algo.num_minibatches": 1, "algo.train_share": 0.5, "training.total_timesteps": 24,
        "training.eval_interval": 0, "training.final_eval_episodes": 0, "training.device": "cpu",
        "features.save_video": "false", "features.save_plot": "false", "task.kwargs.max_episode_steps": 8,
    }  # fmt: skip
    words = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    assert main(["train", "walker_roa", "--run-dir", str(tmp_path / "run"), *words]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["total_steps"] for line in lines] == [16, 24]  # the first rollout teaches the normaliser
    assert ["train/imitation_loss" in line for line in lines] == [True, False]  # the student imitates, then it acts
    adaptation = compare(trained_policy.load_trained(tmp_path / "run"), episodes=2)
    assert adaptation.change_step == 4
    strength = np.abs(np.diff(adaptation.true, axis=0)).max(
        1
    )  # the rest of the privileged group changes little by little
    assert strength.argmax() == 3
