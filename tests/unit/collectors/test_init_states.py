import hashlib
import itertools
import json
import os
import random
import signal
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.point_suite import PointSuite
from tests.refusals import refused
from torch.utils.data import DataLoader

from apexrl.collectors.init_states import InitStateDataset, InitStateSampler, RolloutStats, endless, hash_init_state
from apexrl.core.errors import ConfigError, RunDirError
from apexrl.envs.suites.base import Split


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


class UnequalSuite(PointSuite):
    """The states of task 1 are longer than those of task 0."""

    def init_states(self, task_id: int, split: Split = "train") -> list[NDArray[np.float64]]:
        assert split != "test"  # a suite need not know that name
        states = [np.append(state, [0.5] * task_id) for state in super().init_states(task_id, split)]
        for state in states:
            state.flags.writeable = False
        return states


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_tasks", [1, 2])
def test_pytorchs_loader_shuffles_states_of_any_length(num_tasks: int) -> None:
    dataset: Any = InitStateDataset(UnequalSuite(num_tasks=num_tasks, num_states=8))
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    found = [
        hash_init_state(sample["init_state"]) for sample in itertools.islice(endless(loader, num_tasks), len(dataset))
    ]
    expected = [hash_init_state(sample["init_state"]) for sample in dataset]
    assert sorted(found) == sorted(expected)
    assert found != expected
    batch = next(iter(loader))
    assert batch["task_id"].shape == (4,)
    assert [len(state) for state in batch["init_state"]] == (3 + batch["task_id"]).tolist()
    assert isinstance(batch["init_state"], torch.Tensor) == (num_tasks == 1)


def test_test_is_another_name_of_the_split_that_is_never_trained_on() -> None:
    suite = UnequalSuite()
    val = suite.init_states(1, "val")
    np.testing.assert_array_equal(suite.get_task_init_states(1, split="test"), np.stack(val))
    np.testing.assert_array_equal(suite.get_task_init_states(1), np.stack(suite.init_states(1, "train")))
    np.testing.assert_array_equal(InitStateDataset(suite, "test")[-1]["init_state"], val[-1])
    with refused(ConfigError, "split", "train", "val", "test", "tset"):
        suite.get_task_init_states(0, "tset")  # type: ignore[arg-type]


def test_a_task_without_init_states_is_named() -> None:
    with refused(ConfigError, "right", "train"):
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


def test_of_two_runs_that_write_at_the_same_time_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    first, second = RolloutStats(path), RolloutStats(path)
    first.record("a", [True])
    second.record("b", [False])
    first.write()
    second.write()
    assert RolloutStats(path).state_dict() == {"b": {"task": "", "outcomes": [0], "skips": 0}}


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
    with refused(ConfigError, "rollout_stats_path", path):
        RolloutStats(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stats = RolloutStats(None)
    stats.path = tmp_path / "file" / "stats.json"
    with refused(RunDirError, "rollout_stats_path", stats.path):
        stats.write()


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [({"window": 0}, "window", 0), ({"skip_threshold": -1}, "rollout_skip_threshold", -1)],
)
def test_impossible_numbers_are_refused(options: dict[str, int], field: str, value: int) -> None:
    with refused(ConfigError, field, value):
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
