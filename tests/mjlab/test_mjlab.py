"""mjlab's tasks through our adapter, in the environment that has mjlab.

Its environments are of the same make as those of Isaac Lab, which needs Isaac Sim and a GPU: with ``auto_reset`` they
stand here for both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from tests.simulator_session import assert_the_bootstrap_sees_the_true_successor, logged, train

from apexrl.cli.main import main
from apexrl.core.errors import EnvError
from apexrl.envs import LabSimulator, RslVecEnv, VecEnv, check_env, make_env
from apexrl.rollout import rollout

pytest.importorskip("mjlab", reason="mjlab has an environment of its own: make test-mjlab")
CARTPOLE, GO1 = "mjlab/Mjlab-Cartpole-Balance", "mjlab/Mjlab-Velocity-Flat-Unitree-Go1"
SHORT: dict[str, Any] = {"episode_length_s": 0.4}
"""Eight steps of the cart-pole."""


@pytest.fixture(scope="module")
def short() -> Iterator[VecEnv]:
    env = make_env(CARTPOLE, 3, **SHORT)
    yield env
    env.close()


def test_it_keeps_the_contract(short: VecEnv) -> None:
    assert check_env(short, num_steps=25) == []
    assert short.gives_final_obs
    assert short.max_episode_steps == 8
    assert isinstance(short.reset(seed=0), TensorDict)


def test_go1_keeps_the_contract() -> None:
    env = make_env(GO1, 4, episode_length_s=0.2)
    assert check_env(env, num_steps=15) == []
    assert {name: space.shape for name, space in env.observation_space.items()} == {"actor": (48,), "critic": (72,)}  # type: ignore[attr-defined]
    env.close()


def test_the_command_line_checks_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", CARTPOLE, "--num-envs", "1"]) == 0
    # The tables that mjlab prints are not shown.
    assert capsys.readouterr().out.splitlines()[-1] == f"{CARTPOLE}: keeps the environment contract"


def test_the_bootstrap_sees_the_true_successor(short: VecEnv) -> None:
    assert_the_bootstrap_sees_the_true_successor(short, make_env(CARTPOLE, 3), limit=8)


def test_running_episodes_do_not_notice_that_others_are_reset() -> None:
    ending, alone = (make_env(CARTPOLE, 2, **SHORT) for _ in range(2))
    assert isinstance(ending, RslVecEnv)
    ending.reset(seed=0)
    alone.reset(seed=0)
    ending.simulator.wrapped.episode_length_buf[0] = 4  # the first episode meets its limit four steps earlier
    for t in range(6):
        steps = [env.step(torch.full((2, 1), 0.5)) for env in (ending, alone)]
        assert steps[0].truncated.tolist() == [[t == 3], [False]]
        groups = [step.obs for step in steps]
        assert all(isinstance(group, TensorDict) for group in groups)
        torch.testing.assert_close(groups[0]["actor"][1], groups[1]["actor"][1])  # type: ignore[index]


def test_history_and_command_errors_of_running_episodes_do_not_notice_it_either() -> None:
    registry = import_module("mjlab.tasks.registry")

    def make() -> LabSimulator:
        cfg = registry.load_env_cfg(GO1.removeprefix("mjlab/"))
        cfg.auto_reset, cfg.scene.num_envs, cfg.seed = False, 2, 0
        cfg.observations["actor"].history_length, cfg.observations["actor"].enable_corruption = 3, False
        del cfg.events["push_robot"]
        return LabSimulator(import_module("mjlab.envs").ManagerBasedRlEnv(cfg=cfg, device="cpu"))

    ending, alone = make(), make()
    for simulator in (ending, alone):
        simulator.reset(seed=0)
    ending.wrapped.episode_length_buf[0] = ending.max_episode_length - 3
    errors = [simulator.wrapped.command_manager.get_term("twist").metrics for simulator in (ending, alone)]
    for t in range(5):
        steps = [simulator.step(torch.full((2, 12), 0.1)) for simulator in (ending, alone)]
        assert steps[0][2].tolist() == [t == 2, False]
        torch.testing.assert_close(steps[0][0]["actor"][1], steps[1][0]["actor"][1])
        for name, value in errors[1].items():
            assert value[1] > 0.0
            torch.testing.assert_close(errors[0][name][1], value[1])


def test_with_auto_reset_the_successor_is_hidden_and_never_the_state_after_the_reset() -> None:
    env = make_env(CARTPOLE, 2, auto_reset=True, **SHORT)
    assert not env.gives_final_obs
    assert check_env(env, num_steps=20) == []
    batch, carry = rollout(env, lambda _: {"action": torch.ones(2, 1)}, {"observation": env.reset(seed=0)}, 8)
    assert batch["truncated"][-1].all()
    last, seen = batch["next_observation"]["actor"][-1], batch["observation"]["actor"][-1]
    assert torch.equal(last, seen)
    assert not torch.equal(last, carry["observation"]["actor"])


def test_evaluation_gets_environments_of_its_own(short: VecEnv) -> None:
    other = short.spawn(2)
    assert (other.num_envs, other.max_episode_steps, other.gives_final_obs) == (2, 8, True)
    assert isinstance(other, RslVecEnv)
    assert isinstance(other.simulator, LabSimulator)


def test_go1_trains_with_its_metrics_in_the_log(tmp_path: Path) -> None:
    options = {
        "task.num_envs": "8",
        "task.kwargs.episode_length_s": "0.3",
        "algo.num_steps": "16",
        "training.total_timesteps": "384",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it gives the last observation: there is nothing to warn of
        warnings.filterwarnings("ignore", category=FutureWarning)
        numbers = logged(train(GO1, tmp_path / "run", options))
    assert numbers["rollout/episode_len"] == 15.0
    assert numbers["eval/episode_len"] == 15.0
    assert numbers["env/Episode_Reward/track_linear_velocity"] > 0.0
    assert "env/Metrics/twist/error_vel_xy" in numbers


def test_what_cannot_be_had_is_said() -> None:
    with refused(EnvError, "mjlab", "'Mjlab-Cartpole'", "Did you mean"):
        make_env("mjlab/Mjlab-Cartpole")
    with refused(EnvError, "'episode_length'", "'episode_length_s'"):
        make_env(CARTPOLE, episode_length=3)
