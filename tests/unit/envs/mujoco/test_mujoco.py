from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import ConfigError, EnvError, EnvStateError
from apexrl.core.metrics import MetricSpec
from apexrl.core.types import EnvStep
from apexrl.envs import GymVecEnv, MujocoVecEnv, VecEnv, check_env, make_env
from apexrl.envs.adapters.gymnasium import gym_make_fns
from apexrl.envs.mujoco.simulation import Threads
from apexrl.envs.mujoco.tasks import Ant, Fields, MujocoTask, NumpyArray, Outcome, Parts, reward_metrics

mujoco: Any = pytest.importorskip("mujoco")

TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")
OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": {"frame_skip": 3, "ctrl_cost_weight": 0.3, "exclude_current_positions_from_observation": False},
    "Hopper-v5": {"healthy_reward": 2.0, "healthy_state_range": (-1.0, 1.0), "reset_noise_scale": 0.02},
    "Walker2d-v5": {"terminate_when_unhealthy": False, "healthy_angle_range": (-0.1, 0.1)},
    "Ant-v5": {
        "main_body": 3,
        "contact_force_range": (-0.5, 2.0),
        "contact_cost_weight": 0.1,
        "include_cfrc_ext_in_observation": False,
        "healthy_z_range": (0.4, 0.9),
    },
    "Humanoid-v5": {
        "contact_cost_weight": 1e-3,
        "contact_cost_range": (0.0, 0.5),
        "include_cvel_in_observation": False,
        "include_qfrc_actuator_in_observation": False,
    },
}


def mj_data(env: MujocoVecEnv) -> Any:
    return env._data


def random_actions(env: VecEnv, num_steps: int, seed: int = 0) -> Tensor:
    """Actions ``[T, N, A]``, a fifth of them outside their bounds."""
    space: Any = env.action_space
    high = torch.from_numpy(space.high)
    uniform = torch.rand(num_steps, env.num_envs, len(high), generator=torch.Generator().manual_seed(seed))
    return (uniform * 2 - 1) * 1.25 * high


def copy_step(step: EnvStep) -> dict[str, Tensor]:
    """What a step says, with the rows of ``final_obs`` that are free set to 0."""
    assert isinstance(step.obs, Tensor)
    done = step.terminated | step.truncated
    final = torch.zeros_like(step.obs) if step.final_obs is None else torch.where(done, step.final_obs, 0.0)
    parts = {"obs": step.obs, "reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
    return {name: value.clone() for name, value in {**parts, "final_obs": final, **step.metric}.items()}


def run(env: VecEnv, actions: Tensor) -> dict[str, Tensor]:
    """Step through the actions; everything that came back, ``[T, N, ...]``."""
    steps = [copy_step(env.step(action)) for action in actions]
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs by {(a[name].double() - b[name].double()).abs().max()}"


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_gymnasiums_to_the_last_bit_over_many_episodes(task: str) -> None:
    theirs: Any = GymVecEnv(gym_make_fns(task, 3, max_episode_steps=40))
    ours = MujocoVecEnv(task, 3, max_episode_steps=40, num_threads=2)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    first, expected = ours.reset(seed=7), theirs.reset(seed=7)
    assert isinstance(first, Tensor)
    assert isinstance(expected, Tensor)
    assert torch.equal(first, expected)
    actions = random_actions(ours, 130)
    trace = run(ours, actions)
    speed, fail = trace.pop("forward_speed"), trace.pop("fail", trace["terminated"])
    assert_same(trace, run(theirs, actions))
    assert theirs.metric_specs.items() <= ours.metric_specs.items()
    weight = 1.25 if task == "Humanoid-v5" else 1.0
    torch.testing.assert_close(weight * speed, trace["reward_forward"])
    assert torch.equal(fail.bool(), trace["terminated"])
    assert trace["truncated"].any() or trace["terminated"].any()
    assert trace["terminated"].any() == (task != "HalfCheetah-v5")
    simulators = theirs._group.simulators
    for data, simulator in zip(mj_data(ours), simulators, strict=True):  # before rounding to float32
        np.testing.assert_array_equal(data.qvel, simulator.unwrapped.data.qvel)


@pytest.mark.parametrize("task", TASKS)
def test_options_mean_what_they_mean_in_gymnasium(task: str) -> None:
    theirs = GymVecEnv(gym_make_fns(task, 2, **OTHER_OPTIONS[task]))
    ours = MujocoVecEnv(task, 2, **OTHER_OPTIONS[task])
    default = MujocoVecEnv(task, 2)
    traces = []
    for env in (ours, theirs, default):
        env.reset(seed=1)
        traces.append(run(env, random_actions(env, 40)))
    for name in traces[0].keys() - traces[1].keys():
        del traces[0][name]
    assert_same(traces[0], traces[1])
    assert not torch.equal(traces[0]["reward"], traces[2]["reward"])


@pytest.mark.parametrize("task", TASKS)
def test_the_contract_holds(task: str) -> None:
    assert check_env(MujocoVecEnv(task, 3, max_episode_steps=15), num_steps=50) == []


def test_the_number_of_threads_changes_nothing() -> None:
    traces = []
    for num_threads in (0, 1, 2, 5, 99):
        env = MujocoVecEnv("Ant-v5", 5, num_threads=num_threads, max_episode_steps=20)
        env.reset(seed=0)
        traces.append(run(env, random_actions(env, 30)))
        env.close()
    for trace in traces[1:]:
        assert_same(trace, traces[0])


@pytest.mark.parametrize(
    ("lock_seconds", "asked", "num_threads"), [(10.0, "", 1), (1e-12, "", 64), (1e-12, "3", 3), (1e-12, "999", 64)]
)
def test_a_short_step_gets_fewer_threads_than_cores_and_no_more_than_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, lock_seconds: float, asked: str, num_threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    module = sys.modules[MujocoVecEnv.__module__]
    monkeypatch.setattr(module, "num_cores", lambda: 64)
    monkeypatch.setattr(module, "LOCK_SECONDS", lock_seconds)
    before = set(threading.enumerate())  # some may be ending
    env = MujocoVecEnv("HalfCheetah-v5", 64)
    assert len(set(threading.enumerate()) - before) == num_threads - 1
    env.close()


def lighten_the_second(models: list[Any]) -> None:
    models[1].body_mass[:] *= 0.5


def weaken_the_second(models: list[Any]) -> None:
    models[1].actuator_gear[:] *= 0.5


def oil_the_second(models: list[Any]) -> None:
    models[1].geom_friction[:] = 1e-4


@pytest.mark.parametrize("change", [lighten_the_second, weaken_the_second, oil_the_second])
def test_changing_a_model_changes_only_its_environment(change: Callable[[list[Any]], None]) -> None:
    plain = MujocoVecEnv("HalfCheetah-v5", 3)
    models = [copy.copy(plain.models[0]) for _ in range(3)]
    changed = MujocoVecEnv("HalfCheetah-v5", 3, models=models)
    traces: list[dict[str, Tensor]] = []
    for env in (plain, changed):
        env.reset(seed=0)
        before = run(env, random_actions(env, 30))
        if env is changed:
            assert_same(before, traces[0])
            change(models)
        traces.append(before)
        traces.append(run(env, random_actions(env, 30, seed=1)))
    _, usual, _, other = traces
    for i in (0, 2):
        assert torch.equal(usual["obs"][:, i], other["obs"][:, i])
    assert not torch.equal(usual["obs"][:, 1], other["obs"][:, 1])


def scale_mass(model: Any, rng: np.random.Generator) -> None:
    model.body_mass[:] *= rng.uniform(0.5, 2.0)
    model.opt.gravity[2] = rng.uniform(-12.0, -8.0)


def test_randomize_draws_a_model_for_each_environment_from_its_seed() -> None:
    def masses(**options: Any) -> list[float]:
        env = MujocoVecEnv("Hopper-v5", 4, randomize=scale_mass, **options)
        return [float(model.body_mass.sum()) for model in env.models]

    usual = float(MujocoVecEnv("Hopper-v5").models[0].body_mass.sum())
    drawn = masses()
    assert len({*drawn, usual}) == 5
    assert drawn == masses()
    assert drawn[0] == pytest.approx(usual * np.random.default_rng([0, 0]).uniform(0.5, 2.0))
    assert not {*drawn} & {*masses(randomize_seed=1)}


def test_velocities_follow_a_changed_time_step() -> None:
    env = MujocoVecEnv(
        "HalfCheetah-v5", 2, randomize=lambda model, rng: None, exclude_current_positions_from_observation=False
    )
    obs: Any = env.reset(seed=0)
    env.models[1].opt.timestep = 0.002
    x_before = obs[:, 0].clone()
    step: Any = env.step(torch.ones(2, 6))
    dt = torch.tensor([0.05, 0.01])
    torch.testing.assert_close(step.metric["reward_forward"][:, 0], (step.obs[:, 0] - x_before) / dt)


def test_humanoid_moves_its_centre_of_mass_by_its_own_masses() -> None:
    def load_the_head(model: Any, rng: np.random.Generator) -> None:
        model.body_mass[2] *= 10

    heavy = MujocoVecEnv("Humanoid-v5", 1, randomize=load_the_head)
    heavy.reset(seed=0)
    before = np.average(mj_data(heavy)[0].xipos[:, 0], weights=heavy.models[0].body_mass)
    step = heavy.step(torch.zeros(1, 17))
    after = np.average(mj_data(heavy)[0].xipos[:, 0], weights=heavy.models[0].body_mass)
    assert float(step.metric["reward_forward"]) == pytest.approx(1.25 * (after - before) / 0.015, rel=1e-4)


def test_models_must_fit() -> None:
    hopper, cheetah = (MujocoVecEnv(f"{name}-v5").models[0] for name in ("Hopper", "HalfCheetah"))
    with refused(EnvError, "model", 3, 2):
        MujocoVecEnv("Hopper-v5", 3, models=[hopper, hopper])
    with refused(EnvError, "models", "environment 1", hopper.nq, cheetah.nq):
        MujocoVecEnv("Hopper-v5", 2, models=[hopper, cheetah])


def saved_and_loaded(env: VecEnv) -> Any:
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("task", TASKS)
def test_a_saved_state_has_the_same_future_in_a_new_environment(task: str) -> None:
    env = MujocoVecEnv(task, 3, max_episode_steps=30)
    env.reset(seed=0)
    run(env, random_actions(env, 25))
    state = saved_and_loaded(env)
    actions = random_actions(env, 50, seed=1)
    future = run(env, actions)
    assert (future["terminated"] | future["truncated"]).any(0).all()  # every generator was used again
    other = MujocoVecEnv(task, 3, max_episode_steps=30)
    other.load_state_dict(state)
    assert_same(run(other, actions), future)
    env.load_state_dict(state)
    assert_same(run(env, actions), future)


def test_a_saved_state_holds_the_start_of_the_solver() -> None:
    env, other = (MujocoVecEnv("HalfCheetah-v5", 3) for _ in range(2))
    env.reset(seed=0)
    run(env, random_actions(env, 40))
    other.load_state_dict(saved_and_loaded(env))
    for ours, theirs in zip(mj_data(env), mj_data(other), strict=True):
        assert np.abs(ours.qacc_warmstart).max() > 0
        np.testing.assert_array_equal(ours.qacc_warmstart, theirs.qacc_warmstart)


def test_models_are_saved_as_far_as_they_differ() -> None:
    env = MujocoVecEnv("Hopper-v5", 2, randomize=scale_mass)
    env.reset(seed=0)
    env.models[1].actuator_gear[0, 0] = 123.0  # as a curriculum may do
    env.models[0].opt.timestep *= 0.5
    state = saved_and_loaded(env)
    assert {"body_mass", "actuator_gear", "opt.gravity", "opt.timestep"} == set(state["model"])
    actions = random_actions(env, 30)
    future = run(env, actions)
    other = MujocoVecEnv("Hopper-v5", 2, randomize=scale_mass, randomize_seed=5)
    other.models[0].dof_damping[:] = 9.0
    other.load_state_dict(state)
    assert other.models[1].actuator_gear[0, 0] == 123.0
    assert_same(run(other, actions), future)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    env = MujocoVecEnv("Hopper-v5", 2)
    assert env.state_dict() is None
    env.reset(seed=0)
    before = saved_and_loaded(env)
    randomized = MujocoVecEnv("Hopper-v5", 2, randomize=scale_mass)
    others = {
        "shape": MujocoVecEnv("Hopper-v5", 3),
        "Walker2d": MujocoVecEnv("Walker2d-v5", 2),
        "body_mass": randomized,
    }
    for name, other in others.items():
        other.reset(seed=1)
        with refused(EnvStateError, name):
            env.load_state_dict(saved_and_loaded(other))
    for key in before:
        with refused(EnvStateError, key):
            env.load_state_dict({name: value for name, value in before.items() if name != key})
    after = saved_and_loaded(env)
    assert torch.equal(before["physics"], after["physics"])
    assert before["generator"] == after["generator"]


def test_spawn_makes_independent_environments_with_the_same_models_and_options() -> None:
    env = MujocoVecEnv("Ant-v5", 2, randomize=scale_mass, max_episode_steps=7, healthy_reward=3.0)
    env.reset(seed=0)
    other = env.spawn(3)
    assert (other.num_envs, other.max_episode_steps, other.task) == (3, 7, Ant(healthy_reward=3.0))
    masses = [float(model.body_mass.sum()) for model in other.models]
    assert masses == [float(env.models[i].body_mass.sum()) for i in (0, 1, 0)]
    before = saved_and_loaded(env)["physics"]
    other.reset(seed=5)
    run(other, random_actions(other, 10))
    other.models[0].body_mass[:] = 1.0
    assert torch.equal(before, saved_and_loaded(env)["physics"])
    assert float(env.models[0].body_mass.sum()) == masses[0]


def test_without_a_seed_episodes_follow_from_the_seed_of_torch() -> None:
    def first(seed: int) -> Tensor:
        torch.manual_seed(seed)
        obs = MujocoVecEnv("Hopper-v5", 2).reset()
        assert isinstance(obs, Tensor)
        return obs.clone()

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
    assert not torch.equal(*first(0))


def test_make_env_knows_the_tasks_by_name() -> None:
    env = make_env("mujoco/Hopper-v5", 2, num_threads=1, healthy_reward=2.0)
    assert isinstance(env, MujocoVecEnv)
    with refused(EnvError, "mujoco/HalfCheeta-v5", "mujoco/HalfCheetah-v5"):
        make_env("mujoco/HalfCheeta-v5")
    with refused(EnvError, "mujoco/Hopper-v5", "num_workers"):
        make_env("mujoco/Hopper-v5", 2, num_workers=2)


def test_gymnasiums_tasks_are_simulated_here_unless_they_are_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_env("Hopper-v5", 2, max_episode_steps=30, healthy_reward=2.0)
    assert isinstance(ours, MujocoVecEnv)
    assert ours.made_from == {
        "id": "Hopper-v5",
        "kwargs": {"max_episode_steps": 30, "healthy_reward": 2.0},
        "metrics": {},
    }
    more: list[dict[str, Any]] = [
        {"num_workers": 1},
        {"metrics": [MetricSpec("x_position", "last")]},
        {"render_mode": "rgb_array"},
        {"max_episode_steps": -1},
    ]
    for options in more:
        with contextlib.closing(make_env("Hopper-v5", 1, **options)) as env:
            assert isinstance(env, GymVecEnv), options
    registered = gym.spec("Hopper-v5")
    for change in ({"max_episode_steps": 30}, {"kwargs": {"frame_skip": 2}}, {"entry_point": "own_envs:Hopper"}):
        monkeypatch.setitem(gym.registry, "Hopper-v5", dataclasses.replace(registered, **change))
        if "entry_point" in change:
            with refused(EnvError, "own_envs"):
                make_env("Hopper-v5")
        else:
            assert isinstance(make_env("Hopper-v5"), GymVecEnv), change


def test_environments_that_nobody_seeded_differ_and_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    envs = [make_env("Hopper-v5", 2) for _ in range(2)]
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))  # policies that are created next begin as they would elsewhere
    first, second = (env.reset() for env in envs)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    starts = [MujocoVecEnv("Hopper-v5", 2, seed=3).reset() for _ in range(2)]
    assert torch.equal(*starts)


def test_wrong_arguments_are_explained() -> None:
    with pytest.raises(EnvError, match="Did you mean 'Walker2d-v5'"):
        MujocoVecEnv("Walker-v5")
    with refused(EnvError, "healty_reward", "healthy_reward"):
        MujocoVecEnv("Ant-v5", healty_reward=2.0)
    with refused(EnvError, "healthy_reward", "Ant"):
        MujocoVecEnv(Ant(), healthy_reward=2.0)
    with refused(ConfigError, "MujocoVecEnv.num_envs", 0):
        MujocoVecEnv("Ant-v5", 0)


def test_a_missing_mujoco_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with refused(EnvError, "pip install 'apexrl[mujoco]'"):
        make_env("mujoco/Ant-v5", 1)


def test_steps_out_of_order_are_refused() -> None:
    env = MujocoVecEnv("Hopper-v5", 2, num_threads=2)
    with refused(EnvError, "reset"):
        env.step(torch.zeros(2, 3))
    env.reset(seed=0)
    with refused(EnvError, [2, 3], [2, 4]):
        env.step(torch.zeros(2, 4))
    env.close()
    env.close()
    with refused(EnvError, "closed"):
        env.step(torch.zeros(2, 3))


def test_threads_end_with_their_environment() -> None:
    def wait_for(count: int) -> bool:
        for thread in set(threading.enumerate()) - before:
            thread.join(5.0 if count == 0 else 0.0)
        return len(set(threading.enumerate()) - before) == count

    before = set(threading.enumerate())
    env = MujocoVecEnv("Hopper-v5", 3, num_threads=3)
    env.reset(seed=0)
    env.step(torch.zeros(3, 3))
    assert wait_for(2)
    del env
    gc.collect()
    assert wait_for(0)


def test_an_error_in_another_thread_is_raised_here() -> None:
    threads = Threads(2)
    here, both = threading.current_thread(), threading.Barrier(2, timeout=10.0)

    def fail_elsewhere() -> None:
        both.wait()
        if threading.current_thread() is not here:
            raise ZeroDivisionError

    for _ in range(2):  # the thread outlives its error
        with pytest.raises(ZeroDivisionError):
            threads.run(fail_elsewhere)
    threads.close()


def test_work_that_is_done_does_not_wait_for_a_thread_that_is_busy() -> None:
    threads = Threads(2)
    busy, free = threading.Event(), threading.Event()
    here = threading.current_thread()
    callers = []

    def keep_the_other_busy() -> None:
        if threading.current_thread() is user:
            busy.wait(10.0)
        else:
            busy.set()
            free.wait(10.0)

    user = threading.Thread(target=threads.run, args=(keep_the_other_busy,), daemon=True)
    user.start()
    assert busy.wait(10.0)
    threads.run(lambda: callers.append(threading.current_thread()))
    assert callers == [here]
    assert user.is_alive()  # and so the other thread was busy all the while
    free.set()
    user.join(10.0)
    assert not user.is_alive()
    threads.close()


def test_render_draws_the_environment_asked_for_and_does_not_disturb_it() -> None:
    env = MujocoVecEnv("Ant-v5", 2)
    env.reset(seed=0)
    run(env, random_actions(env, 10))
    state = saved_and_loaded(env)
    actions = random_actions(env, 5, seed=1)
    future = run(env, actions)
    env.load_state_dict(state)
    try:
        images = [env.render(i) for i in (0, 1, 0)]
    except EnvError as error:
        pytest.skip(str(error))
    assert images[0].shape == (480, 480, 3)
    assert images[0].dtype == np.uint8
    assert images[0].std() > 10  # not a blank page
    assert np.array_equal(images[0], images[2])
    assert not np.array_equal(images[0], images[1])
    assert_same(run(env, actions), future)
    with refused(EnvError, "0 to 1", 2):
        env.render(2)
    env.close()


@dataclass(frozen=True, kw_only=True)
class Follow(MujocoTask):
    """Turn a wheel at a commanded speed; the command is drawn for each episode."""

    metrics = reward_metrics("reward_speed")
    data_fields = ("qvel", "userdata")
    frame_skip: int = 2

    def load(self) -> Any:
        return mujoco.MjModel.from_xml_string(
            """<mujoco><size nuserdata="1"/>
            <worldbody><body><joint name="wheel" axis="0 0 1"/><geom size="0.1"/></body></worldbody>
            <actuator><motor joint="wheel" ctrlrange="-1 1"/></actuator></mujoco>"""
        )

    def begin(self, model: Any, data: Any, rng: np.random.Generator) -> None:
        data.userdata[0] = rng.uniform(-1.0, 1.0)

    def observe(self, fields: Fields) -> Parts:
        return {"policy": [fields["qvel"]], "command": [fields["userdata"]]}

    def outcome(self, before: Fields, after: Fields, action: NumpyArray, dt: NumpyArray) -> Outcome:
        speed = -np.abs(after["qvel"] - after["userdata"])[:, 0]
        return Outcome(speed, np.zeros(len(speed), np.bool_), {"reward_speed": speed})


def test_a_task_of_ones_own_with_groups_and_a_command() -> None:
    env = MujocoVecEnv(Follow(), 3, max_episode_steps=10)
    assert check_env(env, num_steps=40) == []
    obs: Any = env.reset(seed=0)
    command = obs["command"].clone()
    assert len(command.unique()) == 3
    steps = [env.step(torch.zeros(3, 1)) for _ in range(9)]
    torch.testing.assert_close(steps[-1].reward, -command.abs())  # it stands still
    last: Any = env.step(torch.zeros(3, 1))
    assert last.truncated.all()
    assert torch.equal(last.final_obs["command"], command)
    assert not torch.equal(last.obs["command"], command)
