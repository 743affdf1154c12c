import json
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.point_suite import GOALS, PointSimulator, PointSuite
from tests.refusals import refused

from apexrl.collectors.demonstrations.record import Recorded, record_demos
from apexrl.collectors.demonstrations.samples import load_demos
from apexrl.core.errors import ConfigError, EnvError, RunDirError
from apexrl.envs.suites.base import Simulator


class _Clumsy(PointSimulator):
    """Its expert goes wrong when it starts on the left."""

    def restore(self, init_state: NDArray[np.float64]) -> None:
        super().restore(init_state)
        self.wrong = init_state[0] < 0

    def expert_action(self) -> NDArray[np.float32]:
        return np.zeros(2, np.float32) if self.wrong else super().expert_action()


class ClumsySuite(PointSuite):
    def make_simulator(self, task_id: int) -> Simulator:
        return _Clumsy(GOALS[task_id], self.radius)


class NoExpertSuite(PointSuite):
    def make_simulator(self, task_id: int) -> Simulator:
        simulator = super().make_simulator(task_id)
        simulator.expert_action = lambda: Simulator.expert_action(simulator)  # type: ignore[method-assign]
        return simulator


def test_a_recorded_file_has_the_layout_of_robomimic_and_libero(tmp_path: Path) -> None:
    suite = PointSuite()
    recorded = record_demos(suite, tmp_path / "demos", 2)
    assert list(recorded) == ["right", "left"]
    assert [r.num_demos for r in recorded.values()] == [2, 2]
    with h5py.File(tmp_path / "demos" / "left_demo.hdf5") as file:
        data = file["data"]
        assert sorted(data) == ["demo_0", "demo_1"]
        assert data.attrs["num_demos"] == 2
        assert data.attrs["demonstrator"] == "expert"
        assert json.loads(data.attrs["problem_info"])["language_instruction"] == "go left"
        assert json.loads(data.attrs["env_args"])["env_name"] == "left"
        demo = data["demo_1"]
        count = demo.attrs["num_samples"]
        assert sum(data[name].attrs["num_samples"] for name in data) == data.attrs["total"]
        assert sorted(demo) == ["actions", "dones", "obs", "rewards", "states"]
        assert demo["actions"].shape == (count, 2)
        assert demo["obs/state"].shape == (count, 2)
        assert demo["rewards"][:].tolist() == demo["dones"][:].tolist() == [0] * (count - 1) + [1]
        np.testing.assert_array_equal(demo.attrs["init_state"], suite.init_states(1)[1])
        np.testing.assert_array_equal(demo["states"][0], suite.init_states(1)[1])


def test_replaying_the_actions_reaches_the_goal_at_the_last_one(tmp_path: Path) -> None:
    suite = PointSuite()
    record_demos(suite, tmp_path, 1)
    with h5py.File(tmp_path / "right_demo.hdf5") as file:
        demo = file["data/demo_0"]
        simulator = suite.make_simulator(0)
        simulator.restore(demo["states"][0])
        solved = []
        for seen, action in zip(demo["obs/state"], demo["actions"], strict=True):
            np.testing.assert_array_equal(simulator.observe()["state"], seen)
            solved.append(simulator.advance(action))
    assert solved == [False] * (len(solved) - 1) + [True]


def test_states_from_which_the_expert_fails_are_skipped_and_counted(tmp_path: Path) -> None:
    suite = ClumsySuite(num_tasks=1, num_states=20)
    starts = [state[0] >= 0 for state in suite.init_states(0)]
    second = [number for number, good in enumerate(starts) if good][1]
    told: list[tuple[str, Recorded]] = []
    recorded = record_demos(suite, tmp_path, 2, on_progress=lambda name, result: told.append((name, result)))["right"]
    assert recorded.num_demos == 2
    assert recorded.num_failures == second - 1 > 0
    assert told == [("right", recorded)]
    with h5py.File(recorded.path) as file:
        assert all(file[f"data/demo_{i}"].attrs["init_state"][0] >= 0 for i in range(2))


def test_recording_can_begin_with_another_state_and_ends_with_the_states(tmp_path: Path) -> None:
    suite = PointSuite(num_tasks=1, num_states=6)
    recorded = record_demos(suite, tmp_path, 5, start=4)["right"]
    assert recorded.num_demos == 2
    with h5py.File(recorded.path) as file:
        np.testing.assert_array_equal(file["data/demo_0"].attrs["init_state"], suite.init_states(0)[4])


def test_workers_record_the_same(tmp_path: Path) -> None:
    suite = PointSuite(num_tasks=3)
    record_demos(suite, tmp_path / "here", 2)
    record_demos(suite, tmp_path / "there", 2, num_workers=2)
    here, there = (load_demos(tmp_path / name, suite, 4) for name in ("here", "there"))
    assert len(here) > 20
    assert (here == there).all()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_plans_are_followed_instead_of_the_expert(num_workers: int, tmp_path: Path) -> None:
    suite = NoExpertSuite(num_tasks=2, num_states=4)

    def straight(task: int, number: int) -> NDArray[np.float32]:
        steps = 10.0 * (np.array(GOALS[task]) - suite.init_states(task)[number][:2])
        return np.tile(steps / 16.0, (20, 1)).astype(np.float32)  # there after 16 of 20 steps, and near it before

    plans = [{1: straight(0, 1), 3: 100.0 * straight(0, 3)}, {0: straight(1, 0)[:5], 2: straight(1, 2)}]
    plans[0][2] = straight(0, 2)
    recorded = record_demos(suite, tmp_path, 4, plans=plans, num_workers=num_workers)
    assert [r.num_demos for r in recorded.values()] == [3, 1]
    assert [r.num_failures for r in recorded.values()] == [1, 3]  # no plan, or one that ends before the goal
    with h5py.File(tmp_path / "right_demo.hdf5") as file:
        assert file["data"].attrs["demonstrator"] == "policy"
        for number, demo in enumerate(file["data"].values(), 1):
            np.testing.assert_array_equal(demo.attrs["init_state"], suite.init_states(0)[number])
            np.testing.assert_array_equal(demo["actions"], plans[0][number][: demo.attrs["num_samples"]].clip(-1, 1))
            assert demo.attrs["num_samples"] <= 16


@pytest.mark.parametrize(
    ("plans", "error", "named"),
    [
        ([{0: np.zeros((3, 2), np.float32)}, {}], EnvError, ["left", "horizon (20", "--horizon"]),
        ([{0: np.zeros((3, 2), np.float32)}], ConfigError, ["plans", "2 tasks", (2,), 1]),
        ([{0: np.zeros((3, 5), np.float32)}] * 2, ConfigError, ["plans", "actions", (2,), 2, [(5,)]]),
    ],
)
def test_plans_that_cannot_be_followed_are_refused_before_a_file_is_replaced(
    plans: Any, error: type[Exception], named: list[object], tmp_path: Path
) -> None:
    with refused(error, *named):
        record_demos(PointSuite(), tmp_path / "demos", 1, plans=plans)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "options", "error", "named"),
    [
        (NoExpertSuite, {}, EnvError, ["'points'", "no scripted experts"]),
        (lambda: PointSuite(horizon=1, radius=0.01), {}, EnvError, ["right", "none of 6"]),
        (PointSuite, {"per_task": 0}, ConfigError, ["per_task", 1, 0]),
        (PointSuite, {"num_workers": -1}, ConfigError, ["num_workers", -1]),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    make: Callable[[], PointSuite], options: dict[str, Any], error: type[Exception], named: list[object], tmp_path: Path
) -> None:
    with refused(error, *named):
        record_demos(make(), tmp_path, **{"per_task": 1, **options})
    assert list(tmp_path.iterdir()) == []


def test_a_recording_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = PointSuite(num_tasks=1)
    record_demos(suite, tmp_path, 1)
    before = (tmp_path / "right_demo.hdf5").read_bytes()

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(h5py.Group, "create_dataset", full_disk)
    with refused(RunDirError, tmp_path / "right_demo.hdf5", "No space left on device"):
        record_demos(suite, tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["right_demo.hdf5"]
    assert (tmp_path / "right_demo.hdf5").read_bytes() == before


def test_an_interrupt_while_processes_are_asked_for_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(pool: ProcessPoolExecutor, *arguments: Any) -> Future[Any]:
        signal.raise_signal(signal.SIGINT)
        return submit(pool, *arguments)

    submit = ProcessPoolExecutor.submit
    monkeypatch.setattr(ProcessPoolExecutor, "submit", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            record_demos(PointSuite(num_tasks=2), tmp_path, 1, num_workers=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())
