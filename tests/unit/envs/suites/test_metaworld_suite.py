from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.refusals import refused

from apexrl.core.errors import ConfigError, EnvError
from apexrl.envs.suites import make_suite
from apexrl.envs.suites.instructions import INSTRUCTIONS, MT10
from apexrl.envs.suites.metaworld import TASK_NAMES, MetaWorldSimulator, MetaWorldSuite

Trace = tuple[NDArray[np.float32], list[bool], NDArray[np.float64]]

ACTIONS = np.random.default_rng(7).uniform(-1, 1, (20, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def suite() -> MetaWorldSuite:
    return MetaWorldSuite("metaworld", TASK_NAMES, num_init_states=2)


@pytest.fixture(scope="module")
def other_process() -> Iterator[Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def play(simulator: MetaWorldSimulator, init_state: NDArray[np.float64]) -> Trace:
    """Restore a state and act at random; returns observations [21, 39], successes and the last state."""
    simulator.restore(init_state)
    observations, solved = [simulator.observe()["state"]], []
    for action in ACTIONS:
        solved.append(simulator.advance(action))
        observations.append(simulator.observe()["state"])
    return np.stack(observations), solved, simulator.state()


def play_elsewhere(task_name: str) -> tuple[NDArray[np.float64], Trace]:
    """Do all of it with nothing that the calling process has made."""
    suite = MetaWorldSuite("one", [task_name], num_init_states=2)
    init_state = suite.init_states(0)[1]
    return init_state, play(suite.make_simulator(0), init_state)


def assert_same(left: Trace, right: Trace) -> None:
    assert np.array_equal(left[0], right[0])
    assert left[1] == right[1]
    assert np.array_equal(left[2], right[2])


@pytest.mark.parametrize("task_name", TASK_NAMES)
def test_a_state_and_actions_decide_everything(suite: MetaWorldSuite, task_name: str, other_process: Any) -> None:
    task_id = TASK_NAMES.index(task_name)
    other, init_state = suite.init_states(task_id)
    simulator = suite.make_simulator(task_id)
    first = play(simulator, init_state)
    play(simulator, other)
    assert_same(play(simulator, init_state), first)
    # Another simulator of this process, from the middle of the episode.
    middle = suite.make_simulator(task_id)
    middle.restore(init_state)
    for action in ACTIONS[:10]:
        middle.advance(action)
    late = suite.make_simulator(task_id)
    late.restore(middle.state())
    assert np.array_equal(late.state(), middle.state())
    assert np.array_equal(late.observe()["state"], first[0][10])
    for action, seen in zip(ACTIONS[10:], first[0][11:], strict=True):
        late.advance(action)
        assert np.array_equal(late.observe()["state"], seen)
    assert np.array_equal(late.state(), first[2])
    far_state, far = other_process.apply(play_elsewhere, (task_name,))
    assert np.array_equal(far_state, init_state)
    assert_same(far, first)


def drawn_places(simulator: Any) -> NDArray[np.float64]:
    """Where Meta-World has put the objects, and the goal last."""
    drawn: NDArray[np.float64] = simulator._env._last_rand_vec.copy()
    return drawn


@pytest.mark.parametrize("task_name", [*MT10, "stick-push-v3", "coffee-pull-v3", "bin-picking-v3"])
def test_it_steps_as_meta_world_does(task_name: str) -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    suite = MetaWorldSuite("one", [task_name], num_init_states=1)
    simulator = suite.make_simulator(0)
    simulator.restore(suite.init_states(0)[0])
    theirs = ALL_V3_ENVIRONMENTS[task_name]()
    theirs._partially_observable, theirs._set_task_called = False, True
    del theirs.sawyer_observation_space
    theirs._last_rand_vec = drawn_places(simulator)
    theirs.reset()
    noise = np.random.default_rng(0)
    solved = 0
    for step in range(120):
        action = np.clip(simulator.expert_action() + noise.normal(0, 0.05, 4), -1, 1).astype(np.float32)
        expected, _, _, _, info = theirs.step(action)
        success = simulator.advance(action)
        solved += success
        assert success == (info["success"] >= 1)
        seen = simulator.observe()["state"]
        # Their first observation may show the scene before the reset; the step after it holds that frame.
        part = slice(None) if step else slice(0, 18)
        np.testing.assert_allclose(seen[part], expected.astype(np.float32)[part], rtol=0, atol=1e-6)
    assert solved > 0 or task_name == "bin-picking-v3"


@pytest.mark.parametrize("task_name", MT10)
def test_experts_solve_mt10_within_the_horizon(task_name: str) -> None:
    suite = MetaWorldSuite("one", [task_name], num_init_states=5)
    simulator, solved = suite.make_simulator(0), 0
    for init_state in suite.init_states(0):
        simulator.restore(init_state)
        solved += any(simulator.advance(simulator.expert_action()) for _ in range(suite.horizon))
    # Meta-World's own expert drops the peg in about one episode of seven.
    assert solved == 5 or (task_name == "peg-insert-side-v3" and solved == 4)


def test_states_of_the_splits_differ_and_do_not_depend_on_their_number(suite: MetaWorldSuite) -> None:
    task = TASK_NAMES.index("push-v3")
    many = MetaWorldSuite("one", ["push-v3"])
    train, val = many.init_states(0), many.init_states(0, "val")
    assert len(train) == len(val) == 50
    assert len({state.tobytes() for state in [*train, *val]}) == 100
    assert all(np.array_equal(*pair) for pair in zip(suite.init_states(task), train[:2], strict=True))
    assert not any(state.flags.writeable for state in [*train, *val])


def test_the_first_observation_shows_the_scene_twice_and_the_goal(suite: MetaWorldSuite) -> None:
    task = TASK_NAMES.index("reach-v3")
    simulator = suite.make_simulator(task)
    for init_state in suite.init_states(task):
        simulator.restore(init_state)
        seen = simulator.observe()["state"]
        assert suite.observation_space["state"].contains(seen)
        assert np.array_equal(seen[:18], seen[18:36])
        np.testing.assert_array_equal(seen[36:], drawn_places(simulator)[-3:].astype(np.float32))
        assert seen[36:].any()


def test_without_privileges_hand_and_opening_are_left() -> None:
    full = MetaWorldSuite("one", ["drawer-open-v3"], num_init_states=1)
    bare = MetaWorldSuite("one", ["drawer-open-v3"], num_init_states=1, privileged=False)
    seen, everything = (s.make_simulator(0) for s in (bare, full))
    assert np.array_equal(bare.init_states(0)[0], full.init_states(0)[0])
    for simulator in (seen, everything):
        simulator.restore(full.init_states(0)[0])
        simulator.advance(ACTIONS[0])
    assert seen.observe()["state"].shape == bare.observation_space["state"].shape == (4,)
    assert np.array_equal(seen.observe()["state"], everything.observe()["state"][:4])
    # The expert sees everything all the same.
    assert np.array_equal(seen.expert_action(), everything.expert_action())


def test_cameras_draw_what_the_state_says() -> None:
    suite = make_suite("metaworld:window-open-v3", cameras=("corner2", "topview"), image_size=32, num_init_states=2)
    assert suite.renders
    assert not make_suite("mt10").renders
    first, second = suite.init_states(0)
    simulator = suite.make_simulator(0)
    simulator.restore(first)
    try:
        seen = simulator.observe()
    except EnvError as error:
        pytest.skip(f"this machine cannot draw: {error}")
    assert suite.observation_space.contains(seen)
    simulator.restore(second)
    assert not np.array_equal(simulator.observe()["corner2"], seen["corner2"])
    large = simulator.render()
    assert large.shape == (256, 256, 3)
    # The table is brown and the arm comes from above: the upper half holds more of the arm's red.
    red = (large[..., 0] > 100) & (large[..., 1] < 60)
    assert red[:128].sum() > red[128:].sum() > 0
    simulator.restore(first)
    again = simulator.observe()
    assert all(np.array_equal(again[group], seen[group]) for group in seen)
    simulator.close()


def test_a_process_that_simulates_does_without_pytorch() -> None:
    program = (
        "import sys, apexrl.envs.workers.suite_group, apexrl.envs.workers.gym_group, apexrl.envs.suites.metaworld; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_choose_tasks() -> None:
    from metaworld import env_dict

    assert tuple(env_dict.MT10_V3) == MT10
    assert tuple(env_dict.MT50_V3) == TASK_NAMES == tuple(INSTRUCTIONS)
    assert make_suite("mt10").task_names == make_suite("metaworld:MT10").task_names == MT10
    assert make_suite("mt50").task_names == make_suite("metaworld").task_names == TASK_NAMES
    one = make_suite("metaworld:reach-v3", horizon=80)
    assert (one.name, one.task_names, one.horizon, one.num_tasks) == ("metaworld:reach-v3", ("reach-v3",), 80, 1)
    two = make_suite("mt10", ["window-open-v3", "reach-v3"])
    assert two.task_names == ("window-open-v3", "reach-v3")
    assert two.instructions == (INSTRUCTIONS["window-open-v3"], INSTRUCTIONS["reach-v3"])
    assert pickle.loads(pickle.dumps(two)).observation_space == two.observation_space


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_suite("mt11"), r"task.benchmark_name has no 'mt11'. Did you mean 'mt10'"),
        (lambda: make_suite("metaworld:reach"), r"Did you mean 'metaworld:reach-v3'"),
        (lambda: make_suite("libero_11"), r"Did you mean 'libero_10'"),
        (
            lambda: make_suite("mt10", ["reach-v2"]),
            r"task_names_to_use: mt10 .*'reach-v2'. Did you mean 'reach-v3'",
        ),
        (lambda: make_suite("mt10", ["sweep-v3"]), r"mt10 has no task 'sweep-v3'"),
        (lambda: make_suite("mt10", horizn=9), r"mt10 has no option 'horizn'. Did you mean 'horizon'"),
        (lambda: make_suite("mt10", cameras=("corner5",)), r"cameras has no 'corner5'. Did you mean 'corner"),
        (lambda: make_suite("mt10", horizon=0), r"horizon must be at least 1, got 0"),
    ],
)
def test_wrong_names_are_answered_with_the_nearest(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_state_of_another_task_is_refused(suite: MetaWorldSuite) -> None:
    simulator = suite.make_simulator(TASK_NAMES.index("reach-v3"))
    other = suite.init_states(TASK_NAMES.index("drawer-open-v3"))[0]
    with refused(EnvError, 538, len(other)):
        simulator.restore(other)


def test_instructions_are_short_and_all_different() -> None:
    assert len(set(INSTRUCTIONS.values())) == 50
    for text in INSTRUCTIONS.values():
        assert text.isascii()
        assert len(text) <= 96
        assert text[0].isupper()
        assert text.count(".") == 1 == text.endswith(".")
