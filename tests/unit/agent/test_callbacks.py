"""Handlers at the trainer's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused
from tests.scripted import ScriptedEnv

from apexrl.agent import Trainer, TrainingConfig, checkpoint
from apexrl.agent.trainer import EVENTS
from apexrl.algorithms import PPO, PPOConfig
from apexrl.core.errors import ConfigError
from apexrl.policies import ActorCritic


def make_trainer(save_dir: Path | None = None) -> Trainer:
    env = ScriptedEnv([3, 4], [False, True])
    policy = ActorCritic.for_env(env, actor_cfg={"hidden_dims": (4,)}, critic_cfg={"hidden_dims": (4,)})
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=4, num_epochs=1, num_minibatches=1))
    return Trainer(env, policy, algorithm, TrainingConfig(save_interval=50), save_dir=save_dir)


def test_handlers_are_called_in_the_order_in_which_they_were_added() -> None:
    trainer = make_trainer()
    seen: list[tuple[str, Any]] = []
    trainer.add_callback("pre_rollout", lambda runner: seen.append(("first", runner)))
    trainer.add_callback("pre_rollout", lambda runner: seen.append(("second", runner)))
    trainer.learn(8)
    assert seen == [("first", trainer), ("second", trainer)]


def test_an_unknown_event_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer().add_callback("pre_rolout", print)
    for part in ("'pre_rolout'", "Did you mean 'pre_rollout'?", *EVENTS):
        assert part in str(caught.value)


def test_the_six_events_fire_in_order_with_their_arguments() -> None:
    trainer = make_trainer()
    seen: list[tuple[str, int, tuple[Any, ...]]] = []
    for event in EVENTS:
        trainer.add_callback(event, lambda *given, event=event: seen.append((event, trainer.iteration, given)))
    trainer.learn(16)
    order = ["pre_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update", "post_iteration"]
    assert [event for event, _, _ in seen] == order * 2
    assert [iteration for _, iteration, _ in seen] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]
    for event, _, given in seen:
        assert given[0] is trainer
        assert len(given) == (1 if event.startswith("pre_") else 2)
    stats = {event: given[1] for event, _, given in seen[:6] if event.startswith("post_")}
    # Environment 0 earned 1 + 2 + 3 and then 1, environment 1 earned 1 + 2 + 3 + 4: 17 in 8 steps.
    assert stats["post_rollout"]["rollout/mean_reward"] == 17 / 8
    assert stats["post_rollout"]["rollout/return"] == 8.0  # the mean of 6 and 10
    assert {"train/policy_loss", "train/learning_rate"} <= stats["post_update"].keys()
    assert all(name.startswith("train/") for name in stats["post_update"])
    assert stats["post_iteration"]["iteration"] == 1
    assert stats["post_iteration"]["total_steps"] == 8
    assert stats["post_iteration"]["rollout/return"] == 8.0
    assert stats["post_iteration"]["train/policy_loss"] == stats["post_update"]["train/policy_loss"]


class HandlerError(Exception):
    pass


@pytest.mark.parametrize("event", EVENTS)
def test_the_exception_of_a_handler_stops_the_run_which_is_saved_between_iterations(event: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    calls = 0

    def handler(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise HandlerError("on purpose")

    trainer.add_callback(event, handler)
    trainer.learn(8)
    calls = 1
    with refused(HandlerError, "on purpose") as caught:
        trainer.learn(800)
    assert calls == 3
    # Between rollout and update are steps that nobody has learned from: nothing is saved there.
    finished = {"post_rollout": 1, "pre_update": 1, "post_update": 3, "post_iteration": 3}.get(event, 2)
    assert caught.value.__notes__ == [f"The last good checkpoint is {checkpoint.latest(tmp_path)}."]
    saved = checkpoint.load(checkpoint.latest(tmp_path))
    assert (saved["iteration"], saved["total_steps"]) == (finished, 8 * finished)

    again = make_trainer(tmp_path)
    again.load_checkpoint(checkpoint.latest(tmp_path).name)
    again.learn(8 * (finished + 1))
    assert again.iteration == finished + 1


@pytest.mark.parametrize("event", EVENTS)
def test_a_handler_that_returns_false_ends_training_after_the_running_iteration(event: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    answers = iter([True, False, True])
    trainer.add_callback(event, lambda *_: next(answers))
    trainer.learn(80)
    assert (trainer.iteration, trainer.total_steps) == (2, 16)
    assert (tmp_path / checkpoint.checkpoint_name(2)).is_file()


def test_only_false_itself_stops() -> None:
    trainer = make_trainer()
    for value in (None, 0, "", True):
        trainer.add_callback("post_iteration", lambda *_, value=value: value)
    trainer.learn(16)
    assert trainer.iteration == 2
