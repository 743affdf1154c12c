import json
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
from tests.point_suite import PointSuite
from tests.refusals import refused

from apexrl.collectors.demonstrations.record import record_demos
from apexrl.collectors.demonstrations.samples import load_demos
from apexrl.core.errors import ConfigError


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
    with refused(ConfigError, tmp_path, "actions", [2, 3]):
        load_demos(tmp_path, SPACE, chunk=2)


PEAK = """
import sys
import gymnasium as gym, numpy as np
from apexrl.collectors.demonstrations.samples import load_demos

def peak():  # unlike getrusage, it begins anew with this process
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

space = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (128, 128, 3), np.uint8)})
before = peak()
samples = load_demos(sys.argv[1], space, 2)
print((peak() - before) / samples.bytes())
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the peak of memory in /proc")
def test_images_are_in_memory_once_while_they_are_read(tmp_path: Path) -> None:
    images = np.ones((50, 128, 128, 3), np.uint8)
    for _ in range(50):
        write(tmp_path / "a_demo.hdf5", np.zeros((50, 2)), {"camera": images})
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.6  # 2.1 when they are joined at the end


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = PointSuite(num_tasks=1)
    record_demos(suite, tmp_path, 2)
    before = load_demos(tmp_path, suite, chunk=2)

    def replace_first(dataset: Any, key: Any) -> Any:
        if "/obs/" in dataset.name:
            record_demos(suite, tmp_path, 1)
        return read(dataset, key)

    read = h5py.Dataset.__getitem__
    monkeypatch.setattr(h5py.Dataset, "__getitem__", replace_first)
    assert (load_demos(tmp_path, suite, chunk=2) == before).all()
    monkeypatch.undo()
    assert len(load_demos(tmp_path, suite, chunk=2)) < len(before)


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
    image = np.zeros((2, 8, 8, 3), np.uint8)
    image[:, :4] = 200  # the lower half: LIBERO's images stand upside down
    obs = {
        "agentview_rgb": image,
        "eye_in_hand_rgb": image,
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


def _no_link(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("data")["demo_0"] = h5py.SoftLink("/nowhere")


def _no_group(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["data/demo_0"] = np.zeros(3)


def _scalar(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["data/demo_0/actions"] = 1.0


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_text, ["right_demo.hdf5", "readable HDF5 file"]),
        (_cut, ["right_demo.hdf5", "readable HDF5 file"]),
        (_foreign, ["right_demo.hdf5", "group 'data/demo_0'"]),
        (_no_link, ["right_demo.hdf5", "demonstrations", "damaged"]),
        (_no_group, ["right_demo.hdf5", "group 'data/demo_0'"]),
        (_scalar, ["/data/demo_0/actions", "[n, 2]", []]),
        (
            lambda path: write(path, [[0, 1]], {"camera": [[0.0]]}),
            ["'/data/demo_0/obs/state'", ["camera"]],
        ),
        (lambda path: write(path, [[0, 1]], {"state": [[0.0]]}), ["/data/demo_0/obs/state", [1, 2], [1, 1]]),
        (lambda path: write(path, [[0, 1]] * 2, {"state": [[0.0, 0]]}), ["/data/demo_0/obs/state", [2, 2], [1, 2]]),
        (lambda path: write(path, [[0]], {"state": [[0.0, 0]]}), ["/data/demo_0/actions", "[n, 2]", [1, 1]]),
        (lambda path: write(path, [[0, np.nan]], {"state": [[0.0, 0]]}), ["/data/demo_0/actions", "not finite"]),
        (
            lambda path: write(path, [[0, 1]], {"state": [[0.0, np.inf]]}),
            ["/data/demo_0/obs/state", "not finite"],
        ),
        (lambda path: write(path, [[0, 1]], {"state": [[b"a", b"b"]]}), ["/data/demo_0/obs/state", "damaged"]),
        (lambda path: None, ["no demonstrations"]),
    ],
)
def test_a_malformed_file_gives_one_clear_error(
    damage: Callable[[Path], None], named: list[object], tmp_path: Path
) -> None:
    damage(tmp_path / "right_demo.hdf5")
    with refused(ConfigError, tmp_path, *named):
        load_demos(tmp_path, PointSuite(num_tasks=1), chunk=2)


def test_a_task_without_a_file_is_named(tmp_path: Path) -> None:
    record_demos(PointSuite(num_tasks=1), tmp_path, 1)
    with refused(ConfigError, tmp_path, "'left'", "left_demo.hdf5", "task.task_names_to_use"):
        load_demos(tmp_path, PointSuite(num_tasks=2), chunk=2)


def test_a_file_of_another_task_is_refused_whatever_its_name(tmp_path: Path) -> None:
    record_demos(PointSuite(num_tasks=2), tmp_path, 1)
    one = PointSuite(num_tasks=1)
    with refused(ConfigError, "left_demo.hdf5", "of 'left'", "not of 'right'"):
        load_demos(tmp_path / "left_demo.hdf5", one, chunk=2)
    (tmp_path / "left_demo.hdf5").rename(tmp_path / "mine.hdf5")
    with refused(ConfigError, "mine.hdf5", "of 'left'", "not of 'right'"):
        load_demos(tmp_path / "mine.hdf5", one, chunk=2)
    assert len(load_demos((tmp_path / "right_demo.hdf5").rename(tmp_path / "mine.hdf5"), one, chunk=2)) > 1
    write(tmp_path / "theirs.hdf5", [[0, 1]], {"state": [[0.0, 0]]}, env_args='{"env_name": "Lift", "type": 1}')
    assert len(load_demos(tmp_path / "theirs.hdf5", one, chunk=2)) == 1


def test_images_that_are_no_bytes_are_refused(tmp_path: Path) -> None:
    space = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)})
    write(tmp_path / "a_demo.hdf5", [[0, 1]], {"camera": np.full((1, 4, 4, 3), 0.5, np.float32)})
    with refused(ConfigError, "a_demo.hdf5", "/data/demo_0/obs/camera", "uint8", "float32"):
        load_demos(tmp_path, space, chunk=2)


def test_any_damage_gives_samples_or_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "right_demo.hdf5"
    for _ in range(2):  # without attributes: HDF5 itself does not come back from some damage to the text of these
        write(path, np.zeros((20, 2)), {"state": np.zeros((20, 2))})
    whole, random = path.read_bytes(), np.random.default_rng(0)
    errors: list[str] = []
    for _ in range(150):
        damaged = bytearray(whole)
        for place in random.integers(len(whole), size=10):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        try:
            load_demos(tmp_path, SPACE, chunk=2)
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > 20
    assert all("right_demo.hdf5" in error for error in errors)
