"""The plot of ``benchmarks/adaptation.py``: what teacher and student do when the physics change."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adaptation import compare, draw, mean_rewards, with_fixed_latent
from adaptation import main as plot_adaptation
from PIL import Image
from tests.refusals import refused

from apexrl import ActorCritic, ROAPolicy, make_env
from apexrl.cli.main import main
from apexrl.envs.tasks import TASKS, Payload
from apexrl.run import trained_policy
from apexrl.run.tasks import TaskConfig

SMALL = {
    "task.num_envs": "8", "policy.hidden_dims": "[8]", "policy.adapt_dims": "[8]", "algo.num_steps": "8",
    "training.total_timesteps": "256", "task.kwargs.max_episode_steps": "20", "training.eval_interval": "0",
    "training.final_eval_episodes": "0",
    "features.save_video": "false",
}  # fmt: skip


@pytest.fixture(scope="module")
def roa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("roa") / "run"
    words = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    assert main(["train", "payload_roa", "--run-dir", str(run_dir), *words]) == 0
    return run_dir


def test_the_script_draws_how_the_student_of_each_run_adapts(
    roa: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["adaptation.py", str(roa)])
    plot_adaptation()
    path = roa / "run-adaptation.png"
    assert capsys.readouterr().out.split() == [str(path)]
    with Image.open(path) as image:
        assert len(set(image.convert("L").get_flattened_data())) > 50


def test_a_run_that_does_not_exist_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["adaptation.py", str(tmp_path / "nowhere")])
    with refused(SystemExit, 2):
        plot_adaptation()
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_a_run_whose_own_physics_change_is_drawn_too(roa: Path) -> None:
    trained = trained_policy.load_trained(roa)
    assert isinstance(trained.config.task, TaskConfig)
    own = {"change_step": 3, "change": "mass", "change_to": {"mass": 3.0}, "fixed": {"gain": 0.5, "drag": 1.0}}
    kwargs = {**trained.config.task.kwargs, **own}
    config = replace(trained.config, task=replace(trained.config.task, kwargs=kwargs))
    adaptation = compare(replace(trained, config=config), episodes=2)
    plain = compare(trained, episodes=2)
    assert adaptation.change_step == plain.change_step == 10
    assert np.array_equal(adaptation.true, plain.true)  # the physics of the one episode are those of the plot
    assert np.array_equal(adaptation.rewards["teacher"], plain.rewards["teacher"])


def test_the_feature_ends_with_the_episode(monkeypatch: pytest.MonkeyPatch, roa: Path, tmp_path: Path) -> None:
    opened: list[Any] = []
    closed: list[Any] = []

    class Short(Payload):
        """Ends its episodes after 7 steps, but says nothing of it, as a robot that falls."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            opened.append(self)

        def _advance(self, state: Any, action: Any, uniform: Any, normal: Any) -> Any:
            return super()._advance(state, action, uniform, normal)._replace(terminated=self.elapsed + 1 == 7)

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setitem(TASKS, "payload", Short)
    trained = trained_policy.load_trained(roa)
    opened.clear()
    closed.clear()
    adaptation = compare(trained, episodes=3)
    assert len(adaptation.true) == len(adaptation.guess) == 7
    assert adaptation.rewards["student"][6] != 0
    assert not adaptation.rewards["student"][7:].any()
    assert {id(env) for env in opened} == {id(env) for env in closed}
    draw(adaptation, tmp_path / "short.png")


def test_the_motors_change_in_the_middle_and_the_true_feature_with_them(roa: Path) -> None:
    adaptation = compare(trained_policy.load_trained(roa), episodes=4)
    assert set(adaptation.rewards) == {"teacher", "student", "student, latent fixed"}
    step = adaptation.change_step
    assert 0 < step < len(adaptation.true)
    assert np.ptp(adaptation.true[:step], axis=0).max() < 1e-5
    assert np.abs(adaptation.true[step + 1] - adaptation.true[step - 1]).max() > 1e-3
    assert np.ptp(adaptation.guess[:step], axis=0).max() > 1e-4


def test_a_fixed_latent_does_not_follow_what_is_seen() -> None:
    env = make_env("payload", 3)
    policy = ROAPolicy.for_env(env, history=24, hidden_dims=(8,), adapt_dims=(8,))
    blind = with_fixed_latent(policy, env, 5)
    latents = blind.act({"observation": env.reset(seed=1)})["priv_pred"]
    assert torch.equal(latents, latents[:1].expand_as(latents))
    seeing = policy.act({"observation": env.reset(seed=1)})["priv_pred"]
    assert not torch.equal(seeing, seeing[:1].expand_as(seeing))


def test_an_episode_that_has_ended_earns_nothing() -> None:
    env = make_env("cartpole", 2, max_episode_steps=3)
    # A cart-pole earns 1 a step; the fourth step would be of the next episode.
    assert mean_rewards(env, ActorCritic.for_env(env), 5).tolist() == [1, 1, 1, 0, 0]
