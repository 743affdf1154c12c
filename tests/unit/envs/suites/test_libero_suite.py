"""LIBERO's suites, on the scene files that ``APEXRL_LIBERO_ASSETS`` names (those of libero_10 are enough)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.refusals import refused

from apexrl.core.errors import ConfigError, EnvError, EnvStateError
from apexrl.envs.suites.libero import ASSETS_VARIABLE, HORIZONS, NULL_ACTION, LiberoSimulator, LiberoSuite

WHY_NOT = (
    f"{ASSETS_VARIABLE} does not name LIBERO's scene files"
    if not os.environ.get(ASSETS_VARIABLE)
    else "LIBERO is not installed (make install-libero)"
    if importlib.util.find_spec("libero") is None
    else ""
)
needs_libero = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

STOVE = "KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it"
SOUP = "LIVING_ROOM_SCENE2_put_both_the_alphabet_soup_and_the_tomato_sauce_in_the_basket"
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (8, 7)).astype(np.float32)


@pytest.fixture(scope="module")
def suite() -> LiberoSuite:
    return LiberoSuite("libero_10", (STOVE, SOUP), image_size=48)


@pytest.fixture(scope="module")
def stove(suite: LiberoSuite) -> Iterator[LiberoSimulator]:
    simulator = suite.make_simulator(0)
    yield simulator
    simulator.close()


def mj_data(simulator: LiberoSimulator) -> Any:
    return simulator._data


def after(simulator: LiberoSimulator, actions: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    for action in actions:
        simulator.advance(action)
    return simulator.observe()


def same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[group], other[group]) for group in one)


@needs_libero
@pytest.mark.parametrize(
    ("name", "num_tasks", "horizon"),
    [
        ("libero_spatial", 10, 220),
        ("libero_object", 10, 280),
        ("libero_goal", 10, 300),
        ("libero_10", 10, 520),
        ("libero_90", 90, 400),
    ],
)
def test_every_suite_has_its_tasks_instructions_and_states(name: str, num_tasks: int, horizon: int) -> None:
    suite = LiberoSuite(name, cameras=())
    assert (suite.num_tasks, suite.horizon) == (num_tasks, horizon)
    assert len(suite.instructions) == len(set(suite.task_names)) == num_tasks
    for task_id in (0, num_tasks - 1):
        words = suite.instructions[task_id]
        assert suite.task_names[task_id].endswith(words.replace(" ", "_"))
        train, val = suite.init_states(task_id), suite.init_states(task_id, "val")
        assert (len(train), len(val)) == (40, 10)
        assert len({state.tobytes() for state in train + val}) == 50
        assert {(state.dtype, state.shape) for state in train + val} == {(np.dtype(np.float64), train[0].shape)}


@needs_libero
def test_tasks_come_in_the_order_asked_for_and_a_suite_survives_the_way_to_a_worker(suite: LiberoSuite) -> None:
    copy = pickle.loads(pickle.dumps(suite))
    assert copy.task_names == [STOVE, SOUP]
    assert copy.instructions[0] == "turn on the stove and put the moka pot on it"
    assert [len(copy.init_states(task_id)[0]) for task_id in (0, 1)] == [47, 123]
    assert copy.observation_space == suite.observation_space


@needs_libero
def test_two_restores_lead_to_the_same_observations(suite: LiberoSuite, stove: LiberoSimulator) -> None:
    first, second = suite.init_states(0)[:2]
    stove.restore(first)
    start = stove.observe()
    end = after(stove, ACTIONS)
    stove.restore(second)
    assert not same(stove.observe(), start)
    after(stove, -ACTIONS)

    stove.restore(first)
    assert same(stove.observe(), start)
    stove.render()  # neither a look nor an image may change what follows
    after(stove, ACTIONS[:4])
    assert same(after(stove, ACTIONS[4:]), end)


@needs_libero
def test_a_state_in_the_middle_is_restored_exactly_and_without_settling(
    suite: LiberoSuite, stove: LiberoSimulator
) -> None:
    stove.restore(suite.init_states(0)[0])
    middle, state = after(stove, ACTIONS[:4]), stove.state()
    # No rotation is asked for here: the controller holds the orientation that it remembers.
    hold = ACTIONS[4:] * np.array([1, 1, 1, 0, 0, 0, 1], np.float32)
    end, end_state = after(stove, hold), stove.state()

    stove.restore(suite.init_states(0)[1])
    after(stove, -ACTIONS)
    stove.restore(state)
    assert np.array_equal(stove.state(), state)
    assert same(stove.observe(), middle)
    assert same(after(stove, hold), end)
    assert np.array_equal(stove.state(), end_state)


@needs_libero
def test_a_state_of_another_task_is_refused(suite: LiberoSuite, stove: LiberoSimulator) -> None:
    with refused(EnvStateError, 47, 123):
        stove.restore(suite.init_states(1)[0])


@needs_libero
def test_observations_are_in_their_space_and_mean_what_they_say(suite: LiberoSuite, stove: LiberoSimulator) -> None:
    stove.restore(suite.init_states(0)[0])
    before = stove.observe()
    assert suite.observation_space.contains(before)
    assert list(before) == ["state", "agentview", "eye_in_hand"]
    assert min(before["agentview"].std(), before["eye_in_hand"].std()) > 10
    # The camera looks down at the table, with the dark wall behind it: an upright image is darker on top.
    assert before["agentview"][:12].mean() + 20 < before["agentview"][-12:].mean()
    after(stove, np.tile(np.array([0, 0, 1, 0, 0, 0, -1], np.float32), (6, 1)))
    up = stove.observe()["state"]
    assert up[2] > before["state"][2] + 0.05
    np.testing.assert_allclose(up[:2], before["state"][:2], atol=0.02)
    assert np.pi - 0.2 < np.linalg.norm(up[3:6]) < np.pi + 0.2  # the hand points down: half a turn
    after(stove, np.tile(np.array([0, 0, 0, 0, 0, 0, 1], np.float32), (10, 1)))
    closed = stove.observe()["state"]
    assert closed[6] - closed[7] < 0.5 * (up[6] - up[7])


@needs_libero
def test_the_task_is_solved_when_the_stove_is_on_and_the_pot_on_it(suite: LiberoSuite, stove: LiberoSimulator) -> None:
    state = suite.init_states(0)[0].copy()
    stove.restore(state)
    assert stove.advance(ACTIONS[0]) is False
    positions = state[1:]
    positions[16:19] = mj_data(stove).site("flat_stove_1_cook_region").xpos + np.array([0, 0, 0.09])
    stove.restore(state)
    assert stove.advance(ACTIONS[0]) is False
    positions[23] = 1.0  # the knob
    stove.restore(state)
    assert stove.advance(ACTIONS[0]) is True


@needs_libero
def test_simulators_of_a_task_are_alike_and_drawing_does_not_change_the_physics(
    suite: LiberoSuite, stove: LiberoSimulator
) -> None:
    # LIBERO draws the places of its fixtures from NumPy's global generator.
    np.random.seed(7)
    expected = pickle.dumps(np.random.get_state())
    blind = LiberoSuite("libero_10", (STOVE,), cameras=())
    assert not blind.renders
    simulator = blind.make_simulator(0)
    assert pickle.dumps(np.random.get_state()) == expected
    try:
        for one in (stove, simulator):
            one.restore(suite.init_states(0)[3])
        assert list(simulator.observe()) == ["state"]
        assert np.array_equal(after(simulator, ACTIONS)["state"], after(stove, ACTIONS)["state"])
        assert np.array_equal(simulator.state(), stove.state())
        assert np.array_equal(simulator.render(), stove.render())
    finally:
        simulator.close()


@needs_libero
def test_an_episode_goes_as_in_libero_itself(suite: LiberoSuite, stove: LiberoSimulator) -> None:
    first = suite.init_states(0)[0]
    stove.restore(first)
    after(stove, ACTIONS)
    wrapper = importlib.import_module("libero.libero.envs.env_wrapper")
    bddl = Path(wrapper.__file__ or "").parents[1] / "bddl_files" / "libero_10" / f"{STOVE}.bddl"
    np.random.seed(0)
    theirs = wrapper.ControlEnv(str(bddl), use_camera_obs=False, has_offscreen_renderer=False)
    theirs.set_init_state(first)
    for action in (*[NULL_ACTION] * 10, *ACTIONS):
        seen, *_ = theirs.step(action.astype(np.float64))
    np.testing.assert_array_equal(theirs.sim.data.qpos, mj_data(stove).qpos)
    # LIBERO's observation was taken one substep (1/500 s) before.
    np.testing.assert_allclose(stove.observe()["state"][:3], seen["robot0_eef_pos"], atol=2e-3)
    theirs.close()


@needs_libero
def test_two_live_simulators_draw_their_own_images(suite: LiberoSuite, stove: LiberoSimulator) -> None:
    stove.restore(suite.init_states(0)[0])
    alone = stove.observe()
    soup = suite.make_simulator(1)
    soup.restore(suite.init_states(1)[0])
    other = soup.observe()
    assert same(stove.observe(), alone)
    assert same(soup.observe(), other)
    assert not np.array_equal(other["agentview"], alone["agentview"])
    soup.close()
    soup.close()
    assert same(stove.observe(), alone)


@needs_libero
def test_importing_asks_nothing_and_writes_nothing_into_the_home_directory(tmp_path: Path) -> None:
    code = (
        "from apexrl.envs.suites.libero import LiberoSuite, _import_libero\n"
        "LiberoSuite('libero_10'); _import_libero('envs'); _import_libero('utils')\n"
        "import os; print(os.environ.get('MUJOCO_GL'), os.environ.get('LIBERO_CONFIG_PATH'))"
    )
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    environ = {**os.environ, "HOME": str(home), "TMPDIR": str(scratch), "MUJOCO_GL": "disable"}
    environ.pop("LIBERO_CONFIG_PATH", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "disable None\n"
    assert done.stderr == ""
    assert not list(home.rglob("*libero*"))
    assert not list(scratch.iterdir())


@needs_libero
def test_unknown_names_are_answered_with_the_nearest(suite: LiberoSuite) -> None:
    with refused(ConfigError, "task.task_names_to_use", f"'{STOVE}'"):
        LiberoSuite("libero_10", [STOVE.lower().replace("kitchen_scene3", "KITCHEN_SCENE3") + "x"])


@needs_libero
def test_a_missing_scene_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "scenes").mkdir()
    with refused(EnvError, tmp_path, STOVE, "xml"):
        LiberoSuite("libero_10", (STOVE,), assets=tmp_path).make_simulator(0)


@needs_libero
def test_a_folder_without_scenes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASSETS_VARIABLE, str(tmp_path))
    with refused(ConfigError, tmp_path, ASSETS_VARIABLE):
        LiberoSuite("libero_10")


def test_without_libero_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("libero", "cv2") else find("os"))
    with refused(ConfigError, "task.benchmark_name", "libero_10", "libero, cv2", "make install-libero"):
        LiberoSuite("libero_10")


def test_options_are_checked() -> None:
    with refused(ConfigError, "task.benchmark_name", "libero_11", "libero_10"):
        LiberoSuite("libero_11")
    with refused(ConfigError, "cameras", "frontview", "agentview, eye_in_hand"):
        LiberoSuite("libero_10", cameras=("frontview",))
    with refused(ConfigError, "image_size", 1, 0):
        LiberoSuite("libero_10", image_size=0)
    assert set(HORIZONS) == {f"libero_{name}" for name in ("spatial", "object", "goal", "10", "90")}
