import hashlib
import json
import os
import random
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from tests.point_suite import PointSuite

from apexrl.collectors.init_states import InitStateDataset, InitStateSampler, RolloutStats, hash_init_state
from apexrl.errors import ConfigError, RunDirError


def drawn(sampler: InitStateSampler, count: int) -> list[tuple[int, str]]:
    samples = [next(sampler) for _ in range(count)]
    return [(sample["task_id"], hash_init_state(sample["init_state"])) for sample in samples]


def test_the_dataset_holds_every_state_of_its_split_task_after_task() -> None:
    suite = PointSuite(num_tasks=3, num_states=4)
    for split in ("train", "val"):
        dataset = InitStateDataset(suite, split)
        assert len(dataset) == 12
        assert [dataset[i]["task_id"] for i in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
        np.testing.assert_array_equal(dataset[6]["init_state"], suite.init_states(1, split)[2])
        np.testing.assert_array_equal(dataset[-1]["init_state"], dataset[11]["init_state"])
        for index in (12, -13):
            with pytest.raises(IndexError):
                dataset[index]


def test_a_task_without_init_states_is_named() -> None:
    with pytest.raises(ConfigError, match="task 'right' has no init states in its train split"):
        len(InitStateDataset(PointSuite(num_states=0)))


def test_the_sampler_polls_the_tasks_and_shuffles_each_anew_in_every_round() -> None:
    dataset = InitStateDataset(PointSuite(num_tasks=3, num_states=5))
    draws = drawn(InitStateSampler(dataset, seed=1), 30)
    assert [task for task, _ in draws] == [0, 1, 2] * 10
    for task in range(3):
        own = [state for number, state in draws if number == task]
        every = {hash_init_state(state) for state in dataset.states(task)}
        assert set(own[:5]) == set(own[5:]) == every
        assert own[:5] != own[5:]
    assert drawn(InitStateSampler(dataset, seed=1), 30) == draws
    assert drawn(InitStateSampler(dataset, seed=2), 30) != draws


def test_the_sampler_goes_on_exactly() -> None:
    dataset = InitStateDataset(PointSuite(num_tasks=2, num_states=5))
    sampler = InitStateSampler(dataset, seed=3)
    drawn(sampler, 7)
    state = sampler.state_dict()
    expected = drawn(sampler, 20)
    other = InitStateSampler(dataset, seed=9)
    drawn(other, 3)
    other.load_state_dict(state)
    assert drawn(other, 20) == expected


def test_the_hash_is_of_the_float64_bytes_without_padding() -> None:
    state = np.array([0.5, -2.0])
    assert hash_init_state(state) == hashlib.sha256(struct.pack("<2d", 0.5, -2.0)).hexdigest()
    assert hash_init_state(np.array([0.5, 9.0, -2.0, 9.0])[::2]) == hash_init_state(state)
    assert hash_init_state(np.array([0.5, -2.0, 0.0])) != hash_init_state(state)


def test_a_state_is_mastered_when_its_last_outcomes_all_succeeded() -> None:
    stats = RolloutStats(None)
    stats.record("a", [False, True, True])
    assert stats.is_mastered("a", 2)
    assert not stats.is_mastered("a", 3)
    stats.record("a", [True])
    assert stats.is_mastered("a", 3)
    assert not stats.is_mastered("a", 5)  # of fewer rollouts than that nothing is known
    assert not stats.is_mastered("b", 1)


def test_the_history_is_continued_over_runs_and_capped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rollout_stats.json"
    first = RolloutStats(path)
    first.record("a", [True, False], "reach")
    first.write()
    second = RolloutStats(path)
    second.record("a", [True] * 99, "reach")
    second.record("b", [False], "push")
    second.write()
    written = json.loads(path.read_text())
    assert written["a"] == {"task": "reach", "outcomes": [0] + [1] * 99, "skips": 0}
    assert RolloutStats(path).outcomes("b") == [0]
    assert list(path.parent.iterdir()) == [path]


def test_a_state_skipped_more_often_than_the_threshold_is_forgotten() -> None:
    stats = RolloutStats(None, skip_threshold=2)
    stats.record("a", [True, True])
    for count in (1, 2):
        stats.skip("a")
        assert stats.is_mastered("a", 2)
        assert stats.skips("a") == count
    stats.skip("a")
    assert not stats.is_mastered("a", 2)
    assert stats.outcomes("a") == []


def test_new_outcomes_start_the_count_of_skips_again() -> None:
    stats = RolloutStats(None, skip_threshold=1)
    stats.record("a", [True])
    stats.skip("a")
    stats.record("a", [True])
    stats.skip("a")
    assert stats.is_mastered("a", 1)


def test_statistics_go_back_to_a_state_whatever_the_file_says(tmp_path: Path) -> None:
    stats = RolloutStats(tmp_path / "stats.json")
    stats.record("a", [True])
    state = stats.state_dict()
    stats.record("a", [False])
    stats.record("b", [False])
    stats.write()
    resumed = RolloutStats(tmp_path / "stats.json")
    resumed.load_state_dict(state)
    resumed.write()
    assert json.loads((tmp_path / "stats.json").read_text()) == {"a": {"task": "", "outcomes": [1], "skips": 0}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"a": 3}',
        '{"a": {"task": "", "outcomes": [2], "skips": 0}}',
        '{"a": {"task": "", "outcomes": [], "skips": 1e999}}',
        '{"a": ' + "[" * 100_000,
    ],
    ids=range(7),
)
def test_a_foreign_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stats.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rollout_stats_path .*stats.json holds no rollout statistics"):
        RolloutStats(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stats = RolloutStats(None)
    stats.path = tmp_path / "file" / "stats.json"
    with pytest.raises(RunDirError, match=r"rollout_stats_path .* cannot be written"):
        stats.write()


@pytest.mark.parametrize("options", [{"window": 0}, {"skip_threshold": -1}])
def test_impossible_numbers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        RolloutStats(None, **options)


def test_a_kill_while_writing_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    draw = random.Random(0)
    most = 0
    for _ in range(12):
        before = RolloutStats(path).outcomes("0")
        child = os.fork()
        if child == 0:
            stats = RolloutStats(path)
            while True:
                for number in range(300):
                    stats.record(str(number), [True] * 4)
                stats.write()
        time.sleep(draw.uniform(0.05, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        stats = RolloutStats(path)
        # Each file is a whole one: every state has the same history, and none that was there is lost.
        assert len({len(stats.outcomes(str(number))) for number in range(300)}) == 1
        assert len(stats.outcomes("0")) >= len(before)
        most = max(most, len(stats.outcomes("0")))
    assert most >= 8  # files were replaced, not only made
