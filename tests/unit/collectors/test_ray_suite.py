"""Episodes of a suite over Ray actors: the same ones as in one process, also when a worker dies."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tests import point_suite
from tests.point_suite import PointSuite

from apexrl import ActorCritic
from apexrl.collectors import RolloutGenerator, SuiteRunner, ray_workers
from apexrl.collectors.ray_suite import RaySuiteRunner
from apexrl.envs.suite_env import SuiteVecEnv
from apexrl.envs.suites.base import InitState
from apexrl.errors import ConfigError, EnvError

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'apexrl[ray]')")

MAKE = partial(SuiteVecEnv, PointSuite(), 3, num_workers=0)


@pytest.fixture(scope="module")
def runner() -> Iterator[RaySuiteRunner]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[point_suite.__name__])
    torch.manual_seed(0)
    runner = RaySuiteRunner(MAKE, ActorCritic.for_env(MAKE(), actor_cfg={"groups": ("state",)}), num_workers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_workers, "ROOM_SECONDS", 600.0)  # a busy machine is slow to start workers
        yield runner
    runner.close()
    assert not ray.is_initialized()


def test_the_episodes_are_those_of_one_process_also_when_a_worker_dies(runner: RaySuiteRunner) -> None:
    suite, messages = runner.suite, list[str]()
    runner.on_message = messages.append
    episodes = [InitState(task, state) for task in range(2) for state in suite.init_states(task)][:7]
    expected = SuiteRunner(MAKE(), runner.policy).run_episodes(episodes, deterministic=True)
    for died in (0, 1):
        if died:
            ray.kill(runner._workers.actors[1])
        batch = runner.run_episodes(episodes, deterministic=True)
        assert batch.shape == expected.shape
        for key, value in expected.items(include_nested=True, leaves_only=True):
            torch.testing.assert_close(batch[key], value, rtol=0, atol=1e-5)
        assert runner.metrics() == {"collect/lost_rollouts": died}
        assert len(messages) == died
    assert "its episodes are run again" in messages[0]


def test_one_task_runs_over_ray_too(runner: RaySuiteRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.env, "assign", None)  # whoever steps the environments here fails
    states = runner.suite.init_states(1)[:3]
    name = runner.suite.task_names[1]
    created = runner.create_parallel_envs(name)
    assert created[2] == runner.num_envs == 6
    for created_env in (None, created):
        batch = runner.run_policy_in_env(name, states, created_env)
        assert batch["metric", "episode_id"][0, :, 0].tolist() == [0, 1, 2]


def test_groups_are_generated_over_ray_and_repeat_from_the_seed_here(runner: RaySuiteRunner) -> None:
    batches = []
    for _ in range(2):
        torch.manual_seed(4)
        generator = RolloutGenerator(runner, rollouts_per_env=3, num_envs=2, seed=1)
        batches.append(generator.collect())
    assert runner.created > 0  # by the workers
    assert runner.env.created == 0
    numbers = generator.metrics()
    assert numbers["collect/envs_created"] + numbers["collect/envs_reused"] == numbers["collect/episodes"] == 6
    assert "collect/lost_rollouts" in numbers
    told: list[str] = []
    generator.on_message = told.append
    runner.on_message("a worker died")
    assert told == ["a worker died"]
    assert batches[0].shape[1] == 6
    assert batches[0]["group"][0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(batches[0]["action"], batches[1]["action"])
    assert not torch.equal(batches[0]["action"][0, 0], batches[0]["action"][0, 1])
    # The rollouts of a group begin in the same state.
    start = batches[0]["observation", "state"][0]
    assert torch.equal(start[:3], start[:1].expand(3, -1))


def test_it_needs_a_worker() -> None:
    with pytest.raises(ConfigError, match="num_workers must be at least 1"):
        RaySuiteRunner(MAKE, ActorCritic.for_env(MAKE()), num_workers=0)


def test_workers_for_which_there_is_no_room_are_named(runner: RaySuiteRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "ROOM_SECONDS", 0.5)
    monkeypatch.setattr(ray_workers, "START_SECONDS", (1.0, 1.0))
    with pytest.raises(
        EnvError, match=r"0 of 2 new Ray workers started within 1 s\. Each needs 99 CPU \(\d of \d free"
    ):
        RaySuiteRunner(MAKE, runner.policy, num_workers=2, worker_options={"num_cpus": 99})
    assert ray.is_initialized()  # for the other


def test_a_worker_that_hangs_is_noticed(runner: RaySuiteRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "MAX_DEATHS", 1)
    monkeypatch.setattr(runner._workers, "timeout", 0.5)
    # What is asked of this actor comes after a sleep that is longer than the limit.
    busy = runner._workers.actors[0].__ray_call__.remote(lambda worker: time.sleep(1.5))
    with pytest.raises(EnvError, match=r"in a row were lost in place 0; the last one gave no rollout for 0\.5 s"):
        runner.run_episodes([InitState(0, runner.suite.init_states(0)[0])])
    ray.get(busy)


def test_a_generator_ends_the_workers(runner: RaySuiteRunner) -> None:
    other = RaySuiteRunner(MAKE, runner.policy, num_workers=1, worker_options={"num_cpus": 0})
    RolloutGenerator(other, rollouts_per_env=2, num_envs=1).cleanup()
    with pytest.raises(EnvError, match="RaySuiteRunner is closed"):
        other.run_episodes([InitState(0, runner.suite.init_states(0)[0])])


def test_an_address_where_there_is_no_ray_is_named_at_once(
    runner: RaySuiteRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"no Ray at RAY_ADDRESS=127\.0\.0\.1:1.*refused"):
        runner._workers.ray._connect(1)
