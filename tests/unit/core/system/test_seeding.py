"""Random streams: no two environments share one, whatever the seed, the process or the worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from apexrl import ActorCritic, evaluate, make_env
from apexrl.agent import checkpoint
from apexrl.agent.trainer import env_seed
from apexrl.collectors.ray.collector import _Actor
from apexrl.collectors.ray.session import weights_of
from apexrl.core.system import distributed
from apexrl.core.system.seeding import ENV, POLICY, spawn_seed, spawn_seeds
from apexrl.core.types import Observation
from apexrl.envs import VecEnv


def rows(obs: Observation) -> list[tuple[float, ...]]:
    """Return what each environment sees, as plain numbers."""
    groups = [obs] if isinstance(obs, Tensor) else [*obs.values()]
    return [tuple(row.tolist()) for row in torch.cat([group.flatten(1) for group in groups], 1)]


def test_seeds_of_streams_differ_and_do_not_depend_on_how_many_there_are() -> None:
    found = [value for seed in range(50) for value in spawn_seeds(seed, 40)]
    assert len(set(found)) == len(found)
    assert all(0 <= value < 2**31 for value in found)
    assert spawn_seeds(3, 10)[:4] == spawn_seeds(3, 4)
    keys = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    assert len({spawn_seed(0, *key) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"num_workers": 2}),
        ("mujoco/Hopper-v5", {}),
        ("lift", {}),
        ("payload", {}),
    ],
)
def test_no_two_environments_of_two_seeds_begin_alike(name: str, options: dict[str, Any]) -> None:
    env = make_env(name, 4, **options)
    starts = [rows(env.reset(seed=seed)) for seed in range(4)]
    assert len({row for start in starts for row in start}) == 16
    assert rows(env.reset(seed=1)) == starts[1]
    env.close()


def test_processes_and_restarts_have_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for rank in range(4):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        found |= {env_seed(seed, steps) for seed in range(20) for steps in (0, 1, 8)}
    assert len(found) == 4 * 20 * 3


class Recording(ActorCritic):
    """Remembers the seed of the generator that it draws from."""

    seeds: set[int]

    def act(self, carry: Any, deterministic: bool = False) -> Any:
        self.seeds = {*getattr(self, "seeds", ()), torch.initial_seed()}
        return super().act(carry, deterministic)


def env_generator_seed(env: VecEnv) -> int:
    return env.generators[0].initial_seed()


def test_an_evaluation_draws_actions_and_episodes_from_separate_streams() -> None:
    env = make_env("lift", 2, max_episode_steps=3)
    policy = Recording.for_env(env)
    evaluate(env, policy, 2, deterministic=False, seed=5)
    assert policy.seeds == {spawn_seed(5, POLICY)}
    assert env_generator_seed(env) == spawn_seed(5, ENV)
    policy.seeds = set()
    evaluate(env, policy, [0, 5])
    assert not policy.seeds & {0, 5}


def test_a_ray_worker_draws_actions_and_episodes_from_separate_streams() -> None:
    policy = Recording.for_env(make_env("lift", 2))
    with checkpoint.kept_rng_state():
        worker = _Actor(lambda: make_env("lift", 2), policy, None)
        worker.collect(1, 0, weights_of(policy), seed=5)
    assert isinstance(worker.policy, Recording)
    assert worker.policy.seeds == {spawn_seed(5, POLICY)}
    assert env_generator_seed(worker.collector.env) == spawn_seed(5, ENV)
