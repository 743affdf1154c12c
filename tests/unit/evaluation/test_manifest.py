import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.point_suite import PointSuite
from tests.refusals import refused

from apexrl.core.errors import ConfigError
from apexrl.envs import make_env
from apexrl.envs.base import SeedEpisode
from apexrl.envs.suites.base import StateEpisode
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.evaluation.manifest import Manifest, make_manifest


def suite_env(num_tasks: int = 2, num_states: int = 6) -> SuiteVecEnv:
    return SuiteVecEnv(PointSuite(num_tasks, num_states), 1, num_workers=0, split="val")


def test_a_manifest_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    manifest = make_manifest(make_env("lift", 1), "lift", 5, seed=3, options={"max_episode_steps": 9})
    path = manifest.write(tmp_path / "lift.json")
    again = Manifest.read(path)
    assert again == manifest
    assert again.hash == manifest.hash
    assert list(tmp_path.iterdir()) == [path], "no temporary file stays"
    # The layout of the file is no part of the hash; what it says is.
    path.write_text(json.dumps(dict(reversed(manifest.to_dict().items()))), encoding="utf-8")
    assert Manifest.read(path).hash == manifest.hash
    assert Manifest("lift", {}, manifest.episodes).hash != manifest.hash
    assert Manifest("lift", manifest.options, manifest.episodes[::-1]).hash != manifest.hash


def test_the_seeds_of_a_manifest_are_distinct_and_others_for_another_seed() -> None:
    env = make_env("lift", 1)
    first, again, other = (make_manifest(env, "lift", 200, seed=seed).starts(env) for seed in (0, 0, 1))
    assert len(set(first)) == 200
    assert first == again
    assert not set(first) & set(other)


def test_a_suite_gives_as_many_states_of_each_task_and_none_twice() -> None:
    env = suite_env()
    manifest = make_manifest(env, "points", 12, seed=1)
    episodes = [
        (episode.task, episode.init_state) for episode in manifest.episodes if isinstance(episode, StateEpisode)
    ]
    assert sorted(episodes) == [(task, index) for task in ("left", "right") for index in range(6)]
    assert [task for task, _ in episodes[:4]] == ["right", "left", "right", "left"]
    starts: Any = manifest.starts(env)
    for (task, index), start in zip(episodes, starts, strict=True):
        assert env.suite.task_names[start.task_id] == task
        np.testing.assert_array_equal(start.init_state, env.suite.init_states(start.task_id, "val")[index])
    with refused(ConfigError, "--episodes 13", "points", 12):
        make_manifest(env, "points", 13)


def test_a_part_of_a_suite_runs_the_manifest_of_its_tasks_alone() -> None:
    manifest = make_manifest(suite_env(num_tasks=2), "points", 4)
    assert len(manifest.starts(suite_env(num_tasks=3))) == 4
    with refused(ConfigError, "'left'", "1 tasks", "right"):
        manifest.starts(suite_env(num_tasks=1))


def test_a_state_that_is_another_one_is_refused() -> None:
    env = suite_env()
    good = make_manifest(env, "points", 2).episodes[0]
    assert isinstance(good, StateEpisode)
    other_state = StateEpisode(good.task, good.split, good.init_state, hash="0" * 64)
    no_state = StateEpisode(good.task, good.split, init_state=6, hash=good.hash)
    for bad in (other_state, no_state):
        with refused(ConfigError, bad.init_state, good.task, good.split, "version", "apexrl manifest"):
            Manifest("points", {}, [bad]).starts(env)
    with refused(ConfigError, "split", "'debug'"):
        Manifest("points", {}, [StateEpisode(good.task, "debug", good.init_state, good.hash)]).starts(env)


def test_seeds_do_not_start_a_suite_nor_states_a_task() -> None:
    with refused(ConfigError, "points", "init_state", "apexrl manifest"):
        Manifest("points", {}, [SeedEpisode(1)]).starts(suite_env())
    with refused(ConfigError, "points", "seed", "apexrl manifest"):
        make_manifest(suite_env(), "points", 2).starts(make_env("lift", 1))


GOOD: dict[str, Any] = {"version": 1, "task": "lift", "options": {}, "episodes": [{"seed": 1}]}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", ["JSON"]),
        ([], ["not a manifest"]),
        ({**GOOD, "manifest_hash": "x"}, ["not a manifest"]),
        ({"version": 1}, ["not a manifest"]),
        ({**GOOD, "version": 2}, ["version 2", "version 1", "Update apexrl"]),
        ({**GOOD, "task": 3}, ["task", 3]),
        ({**GOOD, "options": []}, ["options", "[]"]),
        ({**GOOD, "episodes": []}, ["episodes"]),
        ({**GOOD, "episodes": [{"seed": 1}, {"seed": -1}]}, ["episodes.1.seed", -1]),
        ({**GOOD, "episodes": [{"seed": "1"}]}, ["episodes.0.seed", "'1'"]),
        ({**GOOD, "episodes": [{"seed": True}]}, ["episodes.0.seed", True]),
        ({**GOOD, "episodes": [{"seed": 1, "x": 2}]}, ["episodes.0.x", 2]),
        ({**GOOD, "episodes": [{"seed": 1}, 5]}, ["episodes.1", 5]),
        ({**GOOD, "episodes": [{"task": "reach"}]}, ["episodes.0.split", "required"]),
    ],
)
def test_what_is_no_manifest_gives_a_message(content: Any, named: list[object], tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with refused(ConfigError, path, *named):
        Manifest.read(path)


def test_no_file() -> None:
    with refused(ConfigError, "manifest", "nowhere.json"):
        Manifest.read(Path("nowhere.json"))
