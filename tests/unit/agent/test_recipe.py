"""Policies that are created again from what a runner's checkpoint says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused
from tests.scripted import ScriptedEnv

from apexrl import (
    PPO,
    SAC,
    ActorCritic,
    MLPActor,
    OnPolicyRunner,
    PPOConfig,
    RecurrentActorCritic,
    SACConfig,
    Trainer,
    TrainingConfig,
    VecEnv,
    make_env,
)
from apexrl.agent import checkpoint
from apexrl.agent.recipe import RECIPE
from apexrl.core.errors import CheckpointError, ConfigError, EnvError
from apexrl.core.metrics import MetricSpec
from apexrl.run.trained_policy import load_trained


class OwnActor(MLPActor):
    """Somebody's own actor."""


def ppo(env: VecEnv) -> Trainer:
    return OnPolicyRunner(
        env,
        actor_cfg={"hidden_dims": (8, 4), "init_std": 0.5},
        critic_cfg={"hidden_dims": [8]},
        cfg=PPOConfig(num_steps=4, learning_rate=1e-3),
        device="cpu",
        seed=3,
    )


def gru(env: VecEnv) -> Trainer:
    policy = RecurrentActorCritic.for_env(env, rnn_hidden_dim=8, normalize_obs=True)
    return OnPolicyRunner(env, agent=PPO(policy=policy, cfg=PPOConfig(num_steps=4)), seed=3)


def sac(env: VecEnv) -> Trainer:
    algorithm = SAC(env, SACConfig(num_steps=4, num_critics=3), actor_cfg={"hidden_dims": (8,)}, device="cpu")
    return Trainer(env, algorithm.policy, algorithm, TrainingConfig(seed=3))


@pytest.mark.parametrize("make", [ppo, gru, sac])
def test_a_policy_is_created_from_the_names_in_a_checkpoint(make: Callable[[VecEnv], Trainer], tmp_path: Path) -> None:
    trainer = make(make_env("pendulum", 4, max_episode_steps=20))
    trainer.learn(16)
    trained = load_trained(trainer.save_checkpoint(tmp_path / "model.pt"))
    assert type(trained.policy) is type(trainer.policy)
    assert trained.config.task.id == "pendulum"
    assert trained.config.algo == trainer.algorithm.cfg
    assert trained.config.training == trainer.cfg
    env = trained.make_env(2)
    assert env.max_episode_steps == 20
    ours, theirs = trainer.policy.state_dict(), trained.policy.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_declared_metrics_are_part_of_the_task(tmp_path: Path) -> None:
    env = make_env("CartPole-v1", 2, metrics=[MetricSpec("is_success", "max", event=True)])
    trained = load_trained(ppo(env).save_checkpoint(tmp_path / "model.pt"))
    assert trained.make_env(1).metric_specs == env.metric_specs
    assert "is_success" in env.metric_specs


def test_a_teacher_and_its_student_are_created_again(tmp_path: Path) -> None:
    runner = OnPolicyRunner(
        make_env("payload", 2), algorithm="ppo_roa", actor_cfg={"hidden_dims": (8,)}, critic_cfg={"hidden_dims": (8,)}
    )
    trained = load_trained(runner.save_checkpoint(tmp_path / "model.pt"))
    assert trained.config.policy.kind == "roa"
    obs = trained.make_env(2).reset(seed=0)
    ours, theirs = (policy(obs, deterministic=True).action for policy in (runner.policy, trained.policy))
    assert torch.equal(ours, theirs)


def saved(trainer: Trainer, path: Path, **changes: Any) -> Path:
    """Save, and put other values into the recipe."""
    trainer.save_checkpoint(path)
    content = checkpoint.load(path)
    content[RECIPE].update(changes)
    checkpoint.save(path, content)
    return path


def test_what_is_not_of_the_package_is_refused_with_how_to_load_it_in_python(tmp_path: Path) -> None:
    path, env = tmp_path / "model.pt", make_env("pendulum", 2)
    foreign = {
        ("actor_class", "test_recipe:OwnActor"): OnPolicyRunner(env, actor_class=OwnActor),
        ("ScriptedEnv", "make_env"): OnPolicyRunner(ScriptedEnv([3], [False])),
        ("policy", "for_env"): OnPolicyRunner(
            env, agent=PPO(policy=ActorCritic(env.observation_space, env.action_space))
        ),
    }
    for named, runner in foreign.items():
        with refused(CheckpointError, *named, f"load_checkpoint('{path}')"):
            load_trained(runner.save_checkpoint(path))


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"actor_class": {"class": "evil_module:Actor"}}},
        {"options": {"actor_cfg": {"hidden_dims": [{"class": "evil_module:Actor"}]}}},
        {"policy": {"class": "evil_module:Policy"}},
        {"algorithm": {"class": "os.system"}},
        {"algorithm": {"class": "os:system"}},
    ],
    ids=str,
)
def test_a_checkpoint_imports_nothing_of_its_choice(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('code of a checkpoint was run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = saved(ppo(make_env("pendulum", 2)), tmp_path / "model.pt", **changes)
    with refused(CheckpointError, path, "in Python"):
        load_trained(path)
    assert "evil_module" not in sys.modules


@pytest.mark.parametrize("changes", [{"policy": 5}, {"options": 3}, {"task": {}}, {"task": [1]}, {"algorithm": None}])
def test_a_damaged_recipe_is_one_error(changes: dict[str, Any], tmp_path: Path) -> None:
    path = saved(ppo(make_env("pendulum", 2)), tmp_path / "model.pt", **changes)
    with refused(CheckpointError, path, "'recipe'"):
        load_trained(path)


def test_a_policy_needs_no_environment_until_one_is_asked_for(tmp_path: Path) -> None:
    for name, error in (("NoSuchTask-v0", EnvError), ("evil_module:Marked-v0", ConfigError)):
        task = {"id": name, "kwargs": {}, "num_envs": 1}
        trained = load_trained(saved(ppo(make_env("pendulum", 2)), tmp_path / "model.pt", task=task))
        assert trained.policy.observation_space == make_env("pendulum", 1).observation_space
        with refused(error, "task.id", name):
            trained.make_env(1)
    assert "evil_module" not in sys.modules


def test_a_checkpoint_of_an_older_runner_says_how_to_load_it(tmp_path: Path) -> None:
    path = ppo(make_env("pendulum", 2)).save_checkpoint(tmp_path / "model.pt")
    content = checkpoint.load(path)
    del content[RECIPE]
    checkpoint.save(path, content)
    with refused(CheckpointError, path, "policy", "in Python"):
        load_trained(path)
