import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.point_suite import GOALS, PointSimulator, PointSuite

from apexrl.demos import Recorded, load_demos, record_demos
from apexrl.envs.suites.base import Simulator
from apexrl.errors import ConfigError, EnvError


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
    ("plans", "error", "message"),
    [
        ([{0: np.zeros((3, 2), np.float32)}, {}], EnvError, "goal of left from none .*20 control steps; --horizon"),
        ([{0: np.zeros((3, 2), np.float32)}], ConfigError, r"plans for 2 tasks with actions \(2,\), got 1"),
        ([{0: np.zeros((3, 5), np.float32)}] * 2, ConfigError, r"actions \(2,\), got 2 with \[\(5,\)\]"),
    ],
)
def test_plans_that_cannot_be_followed_are_refused_before_a_file_is_replaced(
    plans: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        record_demos(PointSuite(), tmp_path / "demos", 1, plans=plans)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (NoExpertSuite, {}, EnvError, "'points' has no scripted experts"),
        (lambda: PointSuite(horizon=1, radius=0.01), {}, EnvError, "from none of 6 training states"),
        (PointSuite, {"per_task": 0}, ConfigError, "per_task must be at least 1"),
        (PointSuite, {"num_workers": -1}, ConfigError, "must not be negative"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    make: Callable[[], PointSuite], options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        record_demos(make(), tmp_path, **{"per_task": 1, **options})
    assert list(tmp_path.iterdir()) == []


def test_a_recording_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = PointSuite(num_tasks=1)
    record_demos(suite, tmp_path, 1)
    before = (tmp_path / "right_demo.hdf5").read_bytes()

    def full_disk(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("apexrl.demos._write_demo", full_disk)
    with pytest.raises(OSError, match="No space"):
        record_demos(suite, tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["right_demo.hdf5"]
    assert (tmp_path / "right_demo.hdf5").read_bytes() == before


def write(path: Path, actions: Any, obs: dict[str, Any], **attributes: Any) -> None:
    """One demonstration by hand."""
    with h5py.File(path, "a") as file:
        data = file.require_group("data")
        data.attrs.update(attributes)
        demo = data.create_group(f"demo_{len(data)}")
        demo["actions"] = np.asarray(actions, np.float64)
        for name, values in obs.items():
            demo[f"obs/{name}"] = np.asarray(values)


SPACE = gym.spaces.Dict({"state": gym.spaces.Box(-1, 1, (2,), np.float32)})


def test_a_sample_is_what_was_seen_and_the_next_actions_of_which_the_last_is_repeated(tmp_path: Path) -> None:
    write(tmp_path / "go_far_demo.hdf5", [[0, 1], [2, 3], [4, 5]], {"state": [[0.0, 0], [1, 1], [2, 2]]})
    samples = load_demos(tmp_path, SPACE, chunk=2)
    assert samples.shape == (3,)
    assert samples["action"].tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 4, 5]]
    assert samples["valid_steps"].tolist() == [[2], [2], [1]]
    assert samples["observation"]["state"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert samples["observation"]["state"].dtype == samples["action"].dtype == torch.float32
    words = samples["observation"]["instruction"]
    assert words.shape == (3, 96)
    assert bytes(words[2].tolist()).rstrip(b"\0") == b"go far"


def test_demonstrations_are_in_the_order_of_their_numbers_and_can_be_limited(tmp_path: Path) -> None:
    for number in range(12):  # demo_10 sorts before demo_2 as text
        write(tmp_path / "a_demo.hdf5", [[number, 0]], {"state": [[0.0, 0]]})
    write(tmp_path / "b_demo.hdf5", [[50, 0]], {"state": [[0.0, 0]]})
    samples = load_demos(tmp_path, SPACE, chunk=1, per_task=4)
    assert samples["action"][:, 0].tolist() == [0, 1, 2, 3, 50]
    assert samples["task_id"].flatten().tolist() == [0, 0, 0, 0, 1]
    assert samples["demo_id"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert len(load_demos(tmp_path / "a_demo.hdf5", SPACE, chunk=1)) == 12


def test_files_with_actions_of_different_sizes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a_demo.hdf5", [[0, 0]], {"state": [[0.0, 0]]})
    write(tmp_path / "b_demo.hdf5", [[0, 0, 0]], {"state": [[0.0, 0]]})
    with pytest.raises(ConfigError, match=re.escape("actions of different sizes, [2, 3]")):
        load_demos(tmp_path, SPACE, chunk=2)


PEAK = """
import resource, sys
import gymnasium as gym, numpy as np
from apexrl.demos import load_demos

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

space = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (128, 128, 3), np.uint8)})
before = peak()
samples = load_demos(sys.argv[1], space, 2)
print((peak() - before) / samples.bytes())
"""


def test_pictures_are_in_memory_once_while_they_are_read(tmp_path: Path) -> None:
    pictures = np.ones((50, 128, 128, 3), np.uint8)
    for _ in range(50):
        write(tmp_path / "a_demo.hdf5", np.zeros((50, 2)), {"camera": pictures})
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.5  # 1.0 here, 1.9 when they are joined at the end


def test_a_suite_gives_the_tasks_and_their_instructions(tmp_path: Path) -> None:
    suite = PointSuite(num_tasks=2)
    record_demos(PointSuite(num_tasks=3), tmp_path, 1)
    samples = load_demos(tmp_path, suite, chunk=3)
    assert set(samples["task_id"].flatten().tolist()) == {0, 1}
    for task_id, words in ((0, b"go right"), (1, b"go left")):
        row = samples["observation"]["instruction"][samples["task_id"].flatten() == task_id][0]
        assert bytes(row.tolist()).rstrip(b"\0") == words
    single = load_demos(tmp_path / "left_demo.hdf5", suite, chunk=3)
    assert set(single["task_id"].flatten().tolist()) == {1}


@pytest.mark.parametrize(
    "attributes",
    [
        {"problem_info": json.dumps({"language_instruction": "open the drawer"})},
        {"problem_info": json.dumps({"language_instruction": list("open the drawer")})},
        {"bddl_file_content": "(define (problem X)\n  (:language open the drawer)\n  (:regions"},
        {},
    ],
    ids=["text", "letters", "bddl", "file name"],
)
def test_the_files_of_libero_are_read(attributes: dict[str, Any], tmp_path: Path) -> None:
    picture = np.zeros((2, 8, 8, 3), np.uint8)
    picture[:, :4] = 200  # the lower half: LIBERO's pictures stand upside down
    obs = {
        "agentview_rgb": picture,
        "eye_in_hand_rgb": picture,
        "ee_pos": [[1.0, 2, 3]] * 2,
        "ee_ori": [[4.0, 5, 6]] * 2,
        "gripper_states": [[7.0, 8]] * 2,
        "joint_states": np.zeros((2, 7)),
    }
    write(tmp_path / "KITCHEN_SCENE4_open_the_drawer_demo.hdf5", np.zeros((2, 7)), obs, **attributes)
    space = gym.spaces.Dict(
        {
            "state": gym.spaces.Box(-np.inf, np.inf, (8,), np.float32),
            "agentview": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "eye_in_hand": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8),
        }
    )
    samples = load_demos(tmp_path, space, chunk=4)
    seen = samples["observation"]
    assert samples["action"].shape == (2, 28)
    assert seen["state"][1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert seen["agentview"][0, :, 0, 0].tolist() == [0, 0, 0, 0, 200, 200, 200, 200]
    assert seen["eye_in_hand"][0, :, 0, 0].tolist() == [0, 0, 200, 200]  # and half as large
    assert bytes(seen["instruction"][0].tolist()).rstrip(b"\0") == b"open the drawer"


def _text(path: Path) -> None:
    path.write_text("no HDF5")


def _cut(path: Path) -> None:
    write(path, [[0, 1]] * 2000, {"state": [[0.0, 0]] * 2000})
    path.write_bytes(path.read_bytes()[:1000])


def _foreign(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["other"] = np.zeros(3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_text, "right_demo.hdf5 is not a readable HDF5 file"),
        (_cut, "right_demo.hdf5 is not a readable HDF5 file"),
        (_foreign, "right_demo.hdf5 has no dataset 'data/demo_0'"),
        (
            lambda path: write(path, [[0, 1]], {"camera": [[0.0]]}),
            "no dataset '/data/demo_0/obs/state'; there are ['ca",
        ),
        (lambda path: write(path, [[0, 1]], {"state": [[0.0]]}), "/data/demo_0/obs/state must be [1, 2], got [1, 1]"),
        (lambda path: write(path, [[0, 1]] * 2, {"state": [[0.0, 0]]}), "obs/state must be [2, 2], got [1, 2]"),
        (lambda path: write(path, [[0]], {"state": [[0.0, 0]]}), "/data/demo_0/actions must be [n, 2], got [1, 1]"),
        (lambda path: write(path, [[0, np.nan]], {"state": [[0.0, 0]]}), "actions holds numbers that are not finite"),
        (lambda path: None, "holds no demonstrations"),
    ],
)
def test_a_malformed_file_gives_one_clear_error(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    damage(tmp_path / "right_demo.hdf5")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_demos(tmp_path, PointSuite(num_tasks=1), chunk=2)


def test_a_task_without_a_file_is_named(tmp_path: Path) -> None:
    record_demos(PointSuite(num_tasks=1), tmp_path, 1)
    with pytest.raises(ConfigError, match="no demonstrations of 'left'"):
        load_demos(tmp_path, PointSuite(num_tasks=2), chunk=2)
