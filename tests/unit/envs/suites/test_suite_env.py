"""SuiteVecEnv: real simulators in real processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import MagicMock

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.point_suite import GOALS, PointSimulator, PointSuite
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import ConfigError, EnvError, EnvStateError
from apexrl.core.instructions import INSTRUCTION_BYTES, encode_instruction
from apexrl.core.types import EnvStep
from apexrl.envs import check_env
from apexrl.envs.suites.base import InitState, Simulator, TaskSuite
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.envs.suites.metaworld import MetaWorldSuite
from apexrl.envs.workers.process import WorkerProcess
from apexrl.envs.workers.suite_group import SimulatorCache

# The workers get the suites below without importing this file, which would take seconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Make: TypeAlias = Callable[..., Any]
STILL = (0.0, 0.0)
RIGHT = (1.0, 0.0)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[SuiteVecEnv] = []

    def make_env(suite: TaskSuite, num_envs: int, **options: Any) -> SuiteVecEnv:
        made.append(SuiteVecEnv(suite, num_envs, **options))
        return made[-1]

    yield make_env
    for env in made:
        env.close()


def starts(suite: TaskSuite, split: Any = "train") -> list[InitState]:
    """Every initial state of a suite, tasks in turn."""
    states = [suite.init_states(task, split) for task in range(suite.num_tasks)]
    return [InitState(task, states[task][k]) for k in range(len(states[0])) for task in range(suite.num_tasks)]


def at(*xs: float) -> list[InitState]:
    """Episodes of task 0 that start on the line to the goal, which lies at 0.5."""
    return [InitState(0, np.array([x, 0.0, 0.0])) for x in xs]


def same(env: SuiteVecEnv, action: tuple[float, ...]) -> Tensor:
    """The same control step, again and again, in every environment."""
    return torch.tensor(action).repeat(env.chunk).expand(env.num_envs, -1)


def text(instruction: Tensor) -> str:
    return bytes(instruction.numpy()).rstrip(b"\0").decode()


def steer(env: SuiteVecEnv, obs: Any) -> Tensor:
    """Go towards the goal that the instruction names, a little to the side of it."""
    words = [text(row) for row in obs["instruction"]]
    goals = torch.tensor([GOALS[env.suite.instructions.index(word)] for word in words]).float()
    return (0.7 * torch.sign(goals + 0.03 - obs["state"])).repeat(1, env.chunk)


class Outcome(NamedTuple):
    success: bool
    lost: bool
    control_steps: int
    task: int
    chunks: int
    end: tuple[float, ...]


def play(env: Any, episodes: list[InitState], at_step: Callable[[int], None] = lambda t: None) -> dict[int, Outcome]:
    """Run assigned episodes and return what each gave, by its number."""
    env.assign(episodes)
    obs = env.reset()
    outcomes: dict[int, Outcome] = {}
    running: dict[int, tuple[int, int]] = {}
    for t in range(1000):
        if not env.busy:
            return outcomes
        at_step(t)
        step = env.step(steer(env, obs))
        obs = step.obs
        for i in range(env.num_envs):
            number = int(step.info["episode_id"][i])
            steps, chunks = running.get(number, (0, 0))
            running[number] = steps, chunks = steps + int(step.info["control_steps"][i]), chunks + 1
            if number >= 0 and (step.terminated[i] or step.truncated[i]):
                assert number not in outcomes
                assert step.final_obs is not None
                assert bool(step.terminated[i]) == bool(step.metric["success"][i]) == bool(step.reward[i] == 1)
                outcomes[number] = Outcome(
                    bool(step.terminated[i]),
                    bool(step.info["lost"][i]),
                    steps,
                    int(step.info["task_id"][i]),
                    chunks,
                    tuple(step.final_obs["state"][i].tolist()),
                )
    raise AssertionError("the episodes never ended")


def expected(suite: PointSuite, episode: InitState, chunk: int) -> Outcome:
    """The same episode in one simulator, without any environment."""
    simulator = suite.make_simulator(episode.task_id)
    simulator.restore(episode.init_state)
    steps, solved, chunks = 0, False, 0
    while steps < suite.horizon and not solved:
        state = torch.from_numpy(simulator.observe()["state"])
        action = 0.7 * torch.sign(torch.tensor(GOALS[episode.task_id]).float() + 0.03 - state)
        chunks += 1
        for _ in range(min(chunk, suite.horizon - steps)):
            steps += 1
            solved = simulator.advance(action.numpy())
            if solved:
                break
    return Outcome(solved, False, steps, episode.task_id, chunks, tuple(simulator.observe()["state"].tolist()))


def workers_of(env: SuiteVecEnv) -> Any:
    return env._workers


def pids(env: SuiteVecEnv) -> list[int]:
    return [worker.process.pid for worker in workers_of(env).workers if isinstance(worker, WorkerProcess)]


@pytest.mark.parametrize(("num_envs", "num_workers"), [(1, 0), (5, 0), (3, 1), (5, 2)])
def test_an_episode_is_the_same_whatever_runs_beside_it(make: Make, num_envs: int, num_workers: int) -> None:
    suite = PointSuite(num_tasks=3, horizon=13)
    episodes = starts(suite)
    env = make(suite, num_envs, chunk=3, num_workers=num_workers)
    outcomes = play(env, episodes)
    assert len(pids(env)) == num_workers
    assert outcomes == {k: expected(suite, episode, 3) for k, episode in enumerate(episodes)}
    assert {outcome.success for outcome in outcomes.values()} == {True, False}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_keeps_the_rules_of_a_vec_env(make: Make, num_workers: int) -> None:
    env = make(PointSuite(num_tasks=3, horizon=12), 4, num_workers=num_workers)
    assert check_env(env, num_steps=60) == []
    assert env.max_episode_steps == 3  # chunks of 5, 5 and 2


def test_success_stops_a_chunk_and_the_next_episode_begins_in_the_same_step(make: Make) -> None:
    env = make(PointSuite(num_tasks=1), 1, num_workers=1)
    env.assign(at(0.12, -0.5))  # 0.38 from the goal: 0.28, 0.18, 0.08 < 0.15
    obs = env.reset()
    assert torch.equal(obs["state"], torch.tensor([[0.12, 0.0]]))
    step = env.step(same(env, RIGHT))
    assert step.terminated.item()
    assert not step.truncated.item()
    assert step.reward.item() == 1
    assert {name: value.item() for name, value in step.metric.items()} == {"success": 1, "control_steps": 3}
    assert {name: value.item() for name, value in step.info.items()} == {
        "control_steps": 3, "task_id": 0, "episode_id": 0, "lost": False,
    }  # fmt: skip
    assert step.final_obs is not None
    assert torch.allclose(step.final_obs["state"], torch.tensor([[0.42, 0.0]]))
    assert torch.equal(step.obs["state"], torch.tensor([[-0.5, 0.0]]))


def test_the_horizon_need_not_be_a_multiple_of_the_chunk(make: Make) -> None:
    env = make(PointSuite(num_tasks=1), 1, num_workers=0, max_steps=7)
    env.assign(at(-0.9, -0.8))
    env.reset()
    first, taken = env.step(same(env, RIGHT)), []
    assert not first.truncated.item()
    assert first.final_obs is None
    taken.append(first.info["control_steps"].item())
    last = env.step(same(env, RIGHT))
    taken.append(last.info["control_steps"].item())
    assert taken == [5, 2]
    assert last.truncated.item()
    assert not last.terminated.item()
    assert last.reward.item() == 0
    assert last.final_obs is not None
    assert torch.allclose(last.final_obs["state"][0, 0], torch.tensor(-0.2))
    assert env.step(same(env, STILL)).info["control_steps"].item() == 5  # the next one has all of its time


def test_slots_take_the_next_of_the_queue_and_idle_when_it_is_empty(make: Make) -> None:
    env = make(PointSuite(num_tasks=2, horizon=10), 3, num_workers=2)
    assert not env.busy
    env.assign([*at(0.3, -0.9, 0.25), InitState(1, np.array([0.9, 0.0, 0.0]))])
    assert env.busy
    env.reset()

    def row(step: EnvStep, name: str) -> list[float]:
        return [float(x) for x in step.info[name].flatten()]

    first = env.step(same(env, RIGHT))  # 0 and 2 are solved; 3 is the only one left
    assert row(first, "episode_id") == [0, 1, 2]
    assert first.terminated.flatten().tolist() == [True, False, True]
    last_seen = first.final_obs["state"][2].clone()
    assert [text(words) for words in first.obs["instruction"]] == ["go left", "go right", "go right"]
    second = env.step(same(env, RIGHT))
    assert row(second, "episode_id") == [3, 1, -1]
    assert row(second, "task_id") == [1, 0, -1]
    assert row(second, "control_steps") == [5, 5, 0]
    assert second.truncated.flatten().tolist() == [False, True, True]
    assert torch.equal(second.obs["state"][2], last_seen)
    assert env.busy
    third = env.step(same(env, RIGHT))
    assert row(third, "episode_id") == [3, -1, -1]
    assert third.truncated.all()
    assert not third.reward.any()
    assert not env.busy
    fourth = env.step(same(env, RIGHT))
    assert row(fourth, "episode_id") == [-1, -1, -1]
    assert fourth.final_obs is not None
    assert torch.equal(fourth.final_obs["state"], third.obs["state"])


def test_an_environment_without_an_episode_looks_like_the_first(make: Make) -> None:
    env = make(PointSuite(), 3, num_workers=0)
    env.assign(at(0.125))
    obs = env.reset()
    assert obs["state"].tolist() == [[0.125, 0.0]] * 3
    assert [text(words) for words in obs["instruction"]] == ["go right"] * 3


@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_episodes_that_are_not_assigned_come_in_a_fixed_order(make: Make, num_envs: int) -> None:
    suite = PointSuite(num_tasks=3, num_states=2, horizon=10, radius=0.0)  # all take two chunks
    env = make(suite, num_envs, num_workers=0)
    seen: dict[int, tuple[int, list[float]]] = {}
    for seed in (0, 1):
        obs = env.reset(seed)
        assert not env.busy
        for _ in range(20):
            begun = obs["state"].clone()
            env.step(same(env, STILL))
            step = env.step(same(env, STILL))
            assert step.truncated.all()
            obs = step.obs
            for i in range(num_envs):
                number = int(step.info["episode_id"][i])
                found = (int(step.info["task_id"][i]), begun[i].tolist())
                assert seen.setdefault(number, found) == found
    assert sorted(seen) == list(range(20 * num_envs))
    for number, (task, state) in seen.items():
        assert task == number % 3
        wanted = suite.init_states(task)[number // 3 % 2][:2].astype(np.float32)
        assert state == wanted.tolist()


def test_spawn_takes_the_states_of_val(make: Make) -> None:
    suite = PointSuite()
    env = make(suite, 2, num_workers=1, chunk=4, max_steps=9)
    other = env.spawn(3)
    with closing(other):
        assert (other.num_envs, other.chunk, other.horizon) == (3, 4, 9)
        assert set(pids(other)).isdisjoint(pids(env))
        wanted = [episode.init_state[:2] for episode in starts(suite, "val")[:3]]
        assert torch.equal(other.reset()["state"], torch.tensor(np.array(wanted)).float())
    train = [episode.init_state[:2] for episode in starts(suite)[:2]]
    assert torch.equal(env.reset()["state"], torch.tensor(np.array(train)).float())


def test_simulators_are_used_again_in_the_next_batch(make: Make) -> None:
    suite = PointSuite(num_tasks=3)
    env = make(suite, 4, num_workers=2)
    first = play(env, starts(suite))
    made, seconds = env.counts.created, env.counts.seconds_creating
    assert 4 <= made <= 12  # each of two workers: two slots, three tasks
    assert seconds > 0
    assert play(env, starts(suite)) == first
    assert (env.counts.created, env.counts.seconds_creating) == (made, seconds)


class Living(PointSimulator):
    """Keeps the open ones in a list."""

    def __init__(self, suite: CountingSuite, task: int) -> None:
        super().__init__(GOALS[task], suite.radius)
        self.suite, self.task = suite, task
        suite.open.append(task)
        suite.most = max(suite.most, len(suite.open))

    def close(self) -> None:
        self.suite.open.remove(self.task)


class CountingSuite(PointSuite):
    def __init__(self) -> None:
        super().__init__(num_tasks=3)
        self.open: list[int] = []
        self.most = 0

    def make_simulator(self, task_id: int) -> Simulator:
        return Living(self, task_id)


def test_the_simulator_that_was_not_used_for_longest_is_closed_first() -> None:
    suite = CountingSuite()
    cache = SimulatorCache(suite, 2)
    state = np.zeros(3)
    made = [cache.begin([0], [task], [state])[3] for task in (0, 1, 0, 2, 0, 1)]
    assert made == [1, 1, 0, 1, 0, 1]  # 2 closes 1, so 0 is still there and 1 must be made again
    assert sorted(suite.open) == [0, 1]
    assert suite.most == 2
    cache.close()
    assert suite.open == []


@pytest.mark.parametrize("allowed", [1, 2, 3, 64])
def test_slots_share_a_simulator_a_task_and_no_more_live_than_allowed(allowed: int, make: Make) -> None:
    suite = CountingSuite()
    env = make(suite, 3, num_workers=0, max_cached_envs=allowed)
    results = play(env, starts(suite))
    assert suite.most == min(allowed, suite.num_tasks)
    if allowed >= suite.num_tasks:
        assert env.counts.created == suite.num_tasks
    env.close()
    assert suite.open == []
    other = CountingSuite()
    assert results == play(make(other, 1, num_workers=0), starts(other))


class SeenFromInside(PointSimulator):
    """Its image shows which process it is in and how many simulators live there."""

    alive = 0

    def __init__(self, task: int, radius: float) -> None:
        super().__init__(GOALS[task], radius)
        type(self).alive += 1

    def observe(self) -> dict[str, NDArray[Any]]:
        pixels = np.array([*os.getpid().to_bytes(4, "little"), type(self).alive], np.uint8)
        return {**super().observe(), "camera": np.resize(pixels, (1, 2, 3))}

    def close(self) -> None:
        type(self).alive -= 1


class RenderingSuite(PointSuite):
    renders = True
    observation_space = gym.spaces.Dict(
        {"state": gym.spaces.Box(-1, 1, (2,)), "camera": gym.spaces.Box(0, 255, (1, 2, 3), np.uint8)}
    )

    def make_simulator(self, task_id: int) -> Simulator:
        return SeenFromInside(task_id, self.radius)


def test_simulators_that_render_have_a_process_each(make: Make) -> None:
    suite = RenderingSuite(num_tasks=3, horizon=5, radius=0.0)
    env = make(suite, 2, num_workers=0, max_cached_envs=3)
    assert len(pids(env)) == 2
    homes: dict[str, set[int]] = {}
    for batch in range(2):
        env.assign([InitState(task, np.zeros(3)) for task in (0, 1, 2, 0)])
        obs = env.reset()
        while env.busy:
            pixels = obs["camera"].flatten(1).numpy()
            here = [int.from_bytes(row[:4].tobytes(), "little") for row in pixels]
            assert here[0] != here[1]
            assert pixels[:, 4].tolist() == [1, 1]
            for words, pid in zip(obs["instruction"], here, strict=True):
                homes.setdefault(text(words), set()).add(pid)
            obs = env.step(same(env, STILL)).obs
        assert env.counts.created == 3, f"batch {batch}"
    # Three processes are allowed: each keeps its task, and a slot moves to the one it needs.
    assert [len(of_task) for of_task in homes.values()] == [1, 1, 1]
    assert sorted(pids(env)) == sorted(pid for of_task in homes.values() for pid in of_task)


def test_a_rendering_process_changes_its_task_when_there_may_be_no_other(make: Make) -> None:
    suite = RenderingSuite(num_tasks=3, horizon=5, radius=0.0)
    env = make(suite, 1, max_cached_envs=1)
    env.assign([InitState(task, np.zeros(3)) for task in (0, 1, 1, 2)])
    alive = [int(env.reset()["camera"].flatten()[4])]
    while env.busy:
        alive.append(int(env.step(same(env, STILL)).obs["camera"].flatten()[4]))
    assert set(alive) == {1}
    assert env.counts.created == 3
    assert len(pids(env)) == 1


@pytest.mark.parametrize(("allowed", "created"), [(2, [4, 8]), (4, [4, 4])])
def test_where_a_process_has_one_simulator_a_slot_stays_with_its_task(
    make: Make, allowed: int, created: list[int]
) -> None:
    suite = RenderingSuite(num_tasks=3, horizon=5, radius=0.0)
    env = make(suite, 2, max_cached_envs=allowed)
    groups = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)
    for so_far in created:
        outcomes = play(env, [InitState(task, np.zeros(3)) for task in groups * 2])
        assert [outcomes[number].task for number in range(24)] == [*groups, *groups]
        # One simulator of task 0, one of task 1, and in the end both slots have task 2; in the order given it were 12.
        # Twice as many processes as slots keep all four for the next time.
        assert env.counts.created == so_far


def begun(env: SuiteVecEnv, tasks: tuple[int, ...]) -> list[list[int]]:
    """Numbers of the episodes that run in each slot, step by step; every episode takes one step."""
    env.assign([InitState(task, np.zeros(3)) for task in tasks])
    env.reset()
    found = []
    while env.busy:
        found.append(env.step(same(env, STILL)).info["episode_id"].flatten().int().tolist())
    return found


def test_a_slot_without_a_task_takes_the_one_with_most_left_for_each_that_runs_it(make: Make) -> None:
    env = make(RenderingSuite(num_tasks=3, horizon=5, radius=0.0), 3, max_cached_envs=6)
    # Four of task 0, one of task 1, two of task 2. The first slot takes task 0, the second task 2 (2 left and no slot,
    # against 3 and one), the third task 0 (3 and one, against 1 and none or 1 and one). Task 1 comes last.
    assert begun(env, (0, 0, 0, 0, 1, 2, 2)) == [[0, 5, 1], [2, 6, 3], [4, -1, -1]]


def test_simulators_that_share_a_process_run_episodes_in_the_order_given(make: Make) -> None:
    env = make(PointSuite(num_tasks=3, horizon=5, radius=0.0), 3)
    assert begun(env, (0, 0, 0, 0, 1, 2, 2)) == [[0, 1, 2], [3, 4, 5], [6, -1, -1]]


class DiesAtTheLeft(PointSimulator):
    def restore(self, state: NDArray[np.float64]) -> None:
        if state[0] < 0:
            os._exit(3)
        super().restore(state)


class FatalSuite(PointSuite):
    renders = True

    def make_simulator(self, task_id: int) -> Simulator:
        return DiesAtTheLeft(GOALS[task_id], self.radius)


def test_a_state_that_kills_its_simulator_costs_its_episodes_alone(make: Make) -> None:
    env = make(FatalSuite(num_tasks=3, horizon=5, radius=0.0), 2, max_cached_envs=6)
    fatal, good = InitState(0, np.array([-0.5, 0.0, 0.0])), [InitState(task, np.zeros(3)) for task in (0, 1, 2)]
    outcomes = play(env, [*[fatal] * 8, *good * 2])
    assert [number for number, outcome in outcomes.items() if outcome.lost] == [0, 1]  # one in each slot
    assert sorted(outcomes) == [0, 1, *range(8, 14)]  # the other six were not begun
    assert env.counts.replaced == 2


def test_a_killed_worker_is_replaced_and_its_episodes_are_lost(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    suite = PointSuite(num_tasks=3)
    episodes = starts(suite)
    env = make(suite, 4, num_workers=2)
    killed = pids(env)[1]

    def kill(t: int) -> None:
        if t == 1:
            os.kill(killed, signal.SIGKILL)

    with caplog.at_level(logging.WARNING, "apexrl"):
        outcomes = play(env, episodes, at_step=kill)
    assert sorted(outcomes) == list(range(len(episodes)))
    lost = [k for k, outcome in outcomes.items() if outcome.lost]
    assert len(lost) == 2  # environments 1 and 3 lie in worker 1
    assert env.counts.replaced == 1
    assert "SIGKILL" in caplog.text
    for number in lost:
        assert not outcomes[number].success
    for number in set(outcomes) - set(lost):
        assert outcomes[number] == expected(suite, episodes[number], 5)
    assert killed not in pids(env)
    assert not Path(f"/proc/{killed}").exists()  # no zombie
    again = play(env, episodes)
    assert not any(outcome.lost for outcome in again.values())


def test_a_killed_process_that_renders_loses_one_episode(make: Make) -> None:
    suite = RenderingSuite(num_tasks=3)
    env = make(suite, 2, max_cached_envs=3)

    def kill(t: int) -> None:
        if t == 1:
            os.kill(pids(env)[workers_of(env).worker_of[1]], signal.SIGKILL)

    episodes = starts(suite)
    outcomes = play(env, episodes, at_step=kill)
    assert sorted(outcomes) == list(range(len(episodes)))
    assert sum(outcome.lost for outcome in outcomes.values()) == 1
    assert len(pids(env)) == 3


class Moody(PointSimulator):
    """Does something else than to step where x is above 0.8, and dies when it is put above 0.9."""

    def __init__(self, radius: float, act: str) -> None:
        super().__init__(GOALS[0], radius)
        self.act = act

    def restore(self, init_state: NDArray[np.float64]) -> None:
        if init_state[0] > 0.9:
            os._exit(3)
        super().restore(init_state)

    def advance(self, action: NDArray[np.float32]) -> bool:
        if self.position[0] > 0.8 and self.act == "raise":
            raise ZeroDivisionError("the gripper is upset")
        if self.position[0] > 0.8 and self.act == "hang":
            time.sleep(1000)
        return super().advance(action)


class MoodySuite(PointSuite):
    def __init__(self, act: str) -> None:
        super().__init__(num_tasks=1, radius=0.5)
        self.act = act

    def make_simulator(self, task_id: int) -> Simulator:
        return Moody(self.radius, self.act)


def test_a_worker_that_hangs_is_replaced(make: Make) -> None:
    env = make(MoodySuite("hang"), 2, num_workers=2, step_timeout=1.5)
    begin = time.monotonic()
    outcomes = play(env, at(0.3, 0.85, 0.2, 0.1))
    assert 1.5 < time.monotonic() - begin < 20
    assert {k: outcome.lost for k, outcome in outcomes.items()} == {0: False, 1: True, 2: False, 3: False}
    assert [outcomes[k].success for k in (0, 2, 3)] == [True] * 3
    assert outcomes[1].control_steps == 0
    assert env.counts.replaced == 1


def test_a_worker_that_dies_as_an_episode_begins_loses_that_one(make: Make) -> None:
    env = make(MoodySuite("none"), 1, num_workers=1)
    outcomes = play(env, at(0.3, 0.95, 0.2))
    assert [outcomes[k].lost for k in range(3)] == [False, True, False]
    assert [outcomes[k].success for k in range(3)] == [True, False, True]


def test_a_worker_that_dies_again_and_again_stops_the_run(make: Make) -> None:
    env = make(MoodySuite("none"), 1, num_workers=1)
    with refused(EnvError, "Worker 0", "points", "code 3", "3 times"):
        play(env, at(*[0.95] * 10))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_simulator_raises_reaches_the_caller(make: Make, num_workers: int) -> None:
    env = make(MoodySuite("raise"), 4, num_workers=num_workers)
    env.assign(at(0.3, 0.85, 0.1, 0.2))
    env.reset()
    with refused(EnvError, "in advance", "ZeroDivisionError: the gripper is upset"):
        env.step(same(env, RIGHT))
    with refused(EnvError, "reset"):
        env.step(same(env, RIGHT))
    outcomes = play(env, at(0.3, 0.1, 0.0, 0.2, -0.1))  # the workers live on
    assert all(outcome.success for outcome in outcomes.values())
    assert env.counts.replaced == 0


class BrokenSuite(PointSuite):
    def __setstate__(self, state: Any) -> None:
        raise ImportError("no simulator on this machine")


def test_a_suite_that_does_not_arrive_in_the_worker_says_why() -> None:
    env = SuiteVecEnv(BrokenSuite(), 1, num_workers=1)
    with refused(EnvError, "Worker 0", "ImportError: no simulator on this machine"):
        env.reset()
    env.close()


def test_processes_start_when_they_are_needed_and_never_after_closing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = MagicMock(wraps=subprocess.Popen)
    monkeypatch.setattr(subprocess, "Popen", start)
    env = make(PointSuite(), 2, num_workers=1)
    assert start.call_count == 0
    assert (env.counts.created, env.counts.seconds_creating, env.counts.replaced) == (0, 0.0, 0)
    env.reset()
    assert start.call_count == 1
    unused = make(PointSuite(), 2, num_workers=1)
    unused.close()
    with refused(EnvError, "closed"):
        unused.reset()
    assert start.call_count == 1


@pytest.mark.parametrize("hanging", [False, True])
def test_close_takes_a_second_and_leaves_nothing(hanging: bool) -> None:
    env = SuiteVecEnv(MoodySuite("hang"), 4, num_workers=2, step_timeout=100.0)
    env.assign(at(0.85, 0.3))
    env.reset()
    processes = pids(env)
    assert len(processes) == 2
    if hanging:
        workers_of(env).workers[0].send("advance", [0], np.zeros((1, 5, 2), np.float32), [5])
    begin = time.monotonic()
    env.close()
    assert time.monotonic() - begin < 1.0
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    with refused(EnvError, "closed"):
        env.step(same(env, STILL))
    env.close()


def test_the_workers_do_not_wait_for_torch(make: Make) -> None:
    class Imports(PointSimulator):
        def observe(self) -> dict[str, NDArray[Any]]:
            before = "torch" in sys.modules
            import apexrl.envs

            assert apexrl.envs.VecEnv.__name__ == "VecEnv"  # a name of the package is found all the same
            return {"state": np.array([before, "torch" in sys.modules], np.float32)}

    class ImportsSuite(PointSuite):
        def make_simulator(self, task_id: int) -> Simulator:
            return Imports(GOALS[task_id], self.radius)

    assert make(ImportsSuite(), 1, num_workers=1).reset()["state"].tolist() == [[0.0, 1.0]]


def test_an_interrupted_step_does_not_shift_the_answers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = PointSuite(num_tasks=3)
    env = make(suite, 4, num_workers=2)
    env.assign(starts(suite))
    obs = env.reset()

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            env.step(steer(env, obs))
    outcomes = play(env, starts(suite))
    assert outcomes == {k: expected(suite, episode, 5) for k, episode in enumerate(starts(suite))}


def test_render_draws_the_slot(make: Make) -> None:
    env = make(PointSuite(), 2, num_workers=2)
    env.assign(at(-0.5, 0.5))
    env.reset()
    for index, x in enumerate((-0.5, 0.5)):
        simulator = PointSimulator(GOALS[0], 0.1)
        simulator.restore(np.array([x, 0.0, 0.0]))
        np.testing.assert_array_equal(env.render(index), simulator.render())
    env.assign(at(0.0))
    env.reset()
    with refused(EnvError, "environment 1", "no episode"):
        env.render(1)


def test_there_is_a_state_only_between_episodes(make: Make) -> None:
    env = make(PointSuite(), 2, num_workers=0)
    assert env.state_dict() == {}
    env.assign(at(0.3))
    env.reset()
    assert env.state_dict() is None
    env.step(same(env, RIGHT))
    assert env.state_dict() == {}
    env.load_state_dict({})
    with pytest.raises(EnvStateError):
        env.load_state_dict({"x": 1})


def test_actions_are_clipped(make: Make) -> None:
    env = make(PointSuite(num_tasks=1), 1, chunk=2, num_workers=0)
    env.assign(at(0.0))
    env.reset()
    step = env.step(torch.tensor([[100.0, 0.0, -0.5, -100.0]]))
    assert torch.allclose(step.obs["state"], torch.tensor([[0.05, -0.1]]))


def test_instructions_are_padded_bytes_and_never_cut() -> None:
    assert bytes(encode_instruction("öffne")).rstrip(b"\0").decode() == "öffne"
    assert encode_instruction("x").shape == (INSTRUCTION_BYTES,)
    with refused(ConfigError, "instruction", "96 bytes", "97 bytes"):
        encode_instruction("x" * 97)


@pytest.mark.parametrize(
    "options", [{"chunk": 0}, {"num_workers": -1}, {"max_cached_envs": 0}, {"max_steps": 0}, {"step_timeout": 0.0}]
)
def test_impossible_numbers_are_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with refused(ConfigError, f"SuiteVecEnv.{name}", value):
        SuiteVecEnv(PointSuite(), 2, **options)


def test_impossible_calls_are_refused(make: Make) -> None:
    env = make(PointSuite(), 2, num_workers=0)
    with refused(EnvError, "reset"):
        env.step(same(env, STILL))
    with refused(EnvError, "SuiteVecEnv.assign", "episode"):
        env.assign([])
    with refused(EnvError, "task 2", "points"):
        env.assign([InitState(2, np.zeros(3))])
    env.reset()
    with refused(EnvError, [2, 10], [2, 2]):
        env.step(torch.zeros(2, 2))


def test_meta_world_in_workers_equals_one_simulator(make: Make) -> None:
    suite = MetaWorldSuite("two", ("reach-v3", "drawer-open-v3"), horizon=12, num_init_states=2)
    episodes = starts(suite)
    env = make(suite, 3, num_workers=1, chunk=5)
    env.assign(episodes)
    obs = env.reset()
    action = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) * 2 - 1
    begun = obs["state"].clone()
    for _ in range(3):
        step = env.step(action)
    assert step.truncated.all()
    assert step.info["control_steps"].flatten().tolist() == [2, 2, 2]
    assert step.final_obs is not None
    for i, (task, state) in enumerate(episodes[:3]):
        simulator = suite.make_simulator(task)
        simulator.restore(state)
        np.testing.assert_array_equal(begun[i], simulator.observe()["state"])
        for t in range(12):
            simulator.advance(action[i].view(5, 4)[t % 5].numpy())
        np.testing.assert_array_equal(step.final_obs["state"][i], simulator.observe()["state"])
    assert text(step.obs["instruction"][0]) == suite.instructions[1]
    assert env.counts.created == 2  # one a task
