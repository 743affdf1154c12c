"""Episodes of a suite over Ray actors: the same ones as in one process, also when a worker dies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tests import point_suite
from tests.point_suite import PointSuite

from apexrl import ActorCritic
from apexrl.collectors import RolloutGenerator, SuiteRunner
from apexrl.collectors.ray_suite import RaySuiteRunner
from apexrl.envs.suite_env import SuiteVecEnv
from apexrl.envs.suites.base import InitState
from apexrl.errors import ConfigError

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'apexrl[ray]')")

MAKE = partial(SuiteVecEnv, PointSuite(), 3, num_workers=0)


@pytest.fixture(scope="module")
def runner() -> Iterator[RaySuiteRunner]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[point_suite.__name__])
    torch.manual_seed(0)
    runner = RaySuiteRunner(MAKE, ActorCritic.for_env(MAKE(), actor_cfg={"groups": ("state",)}), num_workers=2)
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
            ray.kill(runner._actors[1])
        batch = runner.run_episodes(episodes, deterministic=True)
        assert batch.shape == expected.shape
        for key, value in expected.items(include_nested=True, leaves_only=True):
            torch.testing.assert_close(batch[key], value, rtol=0, atol=1e-5)
        assert runner.lost_rollouts == len(messages) == died
    assert "its 3 episodes are run again" in messages[0]


def test_groups_are_generated_over_ray_and_repeat_from_the_seed_here(runner: RaySuiteRunner) -> None:
    batches = []
    for _ in range(2):
        torch.manual_seed(4)
        generator = RolloutGenerator(runner, rollouts_per_env=3, num_envs=2, seed=1)
        batches.append(generator.collect())
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


def test_an_address_where_there_is_no_ray_is_named_at_once(
    runner: RaySuiteRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"no Ray at RAY_ADDRESS=127\.0\.0\.1:1.*refused"):
        runner._ray._connect(1)
