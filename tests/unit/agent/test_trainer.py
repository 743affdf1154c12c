"""The schedule: when things are logged, evaluated and saved, and what happens when something goes wrong."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scripted import ScriptedEnv
from torch import Tensor

from apexrl.agent import Trainer, TrainingConfig, checkpoint
from apexrl.algorithms import PPO, PPOConfig
from apexrl.envs import VecEnv, make_env
from apexrl.errors import CheckpointError, ConfigError, DivergenceError, EnvError
from apexrl.loggers import Logger, read_json_lines
from apexrl.policies import ActorCritic
from apexrl.types import EnvStep


class Memory(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.steps: list[tuple[float, float]] = []
        self.messages: list[str] = []

    def log(self, values: Mapping[str, float]) -> None:
        self.lines.append(dict(values))

    def progress(self, values: Mapping[str, float], done: float) -> None:
        self.steps.append((values["total_steps"], done))

    def message(self, text: str) -> None:
        self.messages.append(text)


class NanRewardEnv(ScriptedEnv):
    """Environment 1 gives a reward that is not a number at its 11th step."""

    def step(self, action: Tensor) -> EnvStep:
        step = super().step(action)
        if len(self.actions) == 11:
            step.reward[1] = math.nan
        return step


class BrokenEnv(ScriptedEnv):
    """Fails at its 7th step."""

    def step(self, action: Tensor) -> EnvStep:
        if len(self.actions) == 6:
            raise EnvError("the simulator has died")
        return super().step(action)


class UnreadableEnv(ScriptedEnv):
    """Fails when it is asked for its state."""

    def state_dict(self) -> dict[str, Any]:
        raise EnvError("the environments are closed")


class ForgetfulEnv(ScriptedEnv):
    """Cannot save its state."""

    def state_dict(self) -> dict[str, Any]:
        return None  # type: ignore[return-value]


class SilentMetricEnv(ScriptedEnv):
    """Never knows the metric that it declares."""

    def step(self, action: Tensor) -> EnvStep:
        step = super().step(action)
        step.metric["odd"].fill_(math.nan)
        return step

    def spawn(self, num_envs: int) -> SilentMetricEnv:
        return SilentMetricEnv([3] * num_envs, [False] * num_envs)


def scripted(kind: type[ScriptedEnv] = ScriptedEnv) -> ScriptedEnv:
    return kind([3, 4], [False, True])


def make_trainer(
    env: VecEnv, cfg: TrainingConfig | None = None, learning_rate: float = 3e-4, **options: Any
) -> tuple[Trainer, Memory]:
    """Return a trainer whose iterations take four steps, and what it logs."""
    torch.manual_seed(0)
    policy = ActorCritic.for_env(env, actor_cfg={"hidden_dims": (4,)}, critic_cfg={"hidden_dims": (4,)})
    algo = PPOConfig(num_steps=4, num_epochs=2, num_minibatches=2, learning_rate=learning_rate)
    memory = Memory()
    trainer = Trainer(env, policy, PPO(policy=policy, cfg=algo), cfg, loggers=[memory], **options)
    return trainer, memory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def training_numbers(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if not name.startswith(("time/", "eval"))} for line in lines]


# Counting and logging


def test_training_ends_with_the_iteration_that_reaches_the_target() -> None:
    trainer, memory = make_trainer(scripted(), TrainingConfig(total_timesteps=20))
    trainer.learn()
    assert (trainer.iteration, trainer.total_steps) == (3, 24)
    assert memory.steps == [(8, 0.4), (16, 0.8), (24, 1.0)]
    trainer.learn()
    assert trainer.iteration == 3
    trainer.learn(32)
    assert trainer.total_steps == 32


def test_a_new_normalizer_sees_a_rollout_before_anything_is_learned_from_one() -> None:
    env = scripted()
    policy = ActorCritic.for_env(env, normalize_obs=True)
    assert policy.normalizer is not None
    before = {name: value.clone() for name, value in policy.named_parameters()}
    seen: list[bool] = []
    trainer = Trainer(env, policy, PPO(policy=policy, cfg=PPOConfig(num_steps=4, num_minibatches=2)), TrainingConfig())

    def note(_: Trainer) -> None:
        unchanged = all(torch.equal(value, before[name]) for name, value in policy.named_parameters())
        seen.append(unchanged and not policy.has_new_normalizer)

    trainer.add_callback("pre_iteration", note)
    trainer.learn(16)
    assert (trainer.iteration, trainer.total_steps, seen) == (1, 16, [True])
    trainer.learn(24)  # it is not new any more
    assert (trainer.iteration, trainer.total_steps) == (2, 24)


def test_learning_can_count_iterations_instead_of_steps() -> None:
    trainer, memory = make_trainer(scripted(), TrainingConfig(total_timesteps=8, num_train_steps=4))
    trainer.learn()
    assert (trainer.iteration, trainer.total_steps) == (4, 32)
    assert [done for _, done in memory.steps] == [0.25, 0.5, 0.75, 1.0]


def test_log_interval_skips_lines_but_no_episodes() -> None:
    # Environment 0 earns 6 every three steps, environment 1 earns 10 every four: by step 8 that is 6, 6, 10 and 10.
    trainer, memory = make_trainer(scripted(), log_interval=2)
    trainer.learn(40)
    assert [line["iteration"] for line in memory.lines] == [2, 4]
    assert memory.lines[0]["rollout/return"] == 8.0
    assert memory.lines[0]["rollout/episode_len"] == 3.5
    assert len(memory.steps) == 5  # progress is shown every iteration


def test_what_is_not_known_is_left_out_of_the_log() -> None:
    env = SilentMetricEnv([9, 9], [False, False])
    trainer, memory = make_trainer(env, TrainingConfig(eval_interval=2, eval_episodes=2))
    trainer.learn(16)
    assert "rollout/return" not in memory.lines[0]  # no episode has ended
    assert "eval/return" in memory.lines[1]
    assert not [name for line in memory.lines for name, value in line.items() if math.isnan(value) or "odd" in name]


def test_reward_components_can_be_left_out() -> None:
    for wanted in (True, False):
        trainer, memory = make_trainer(scripted(), log_reward_components=wanted)
        trainer.learn(8)
        assert ("reward/odd" in memory.lines[0]) is wanted
        assert "rollout/success_rate" in memory.lines[0]


def test_the_numbers_an_environment_logs_go_below_env() -> None:
    trainer, memory = make_trainer(scripted())
    trainer.learn(8)
    assert memory.lines[0]["env/height"] == 17 / 8


def test_a_policy_that_the_algorithm_does_not_update_is_refused() -> None:
    env = scripted()
    trainer, _ = make_trainer(env)
    with pytest.raises(ConfigError, match="another object"):
        Trainer(env, ActorCritic.for_env(env), trainer.algorithm)


# Evaluation


def test_evaluation_leaves_the_training_as_it_would_have_been() -> None:
    runs = []
    for interval in (0, 2):
        torch.manual_seed(3)
        trainer, memory = make_trainer(make_env("cartpole", 4), TrainingConfig(eval_interval=interval, eval_episodes=3))
        trainer.learn(160)
        runs.append((training_numbers(memory.lines), len([line for line in memory.lines if "eval/return" in line])))
    assert runs[0][0] == runs[1][0]
    assert (runs[0][1], runs[1][1]) == (0, 5)


def test_evaluation_by_hand_leaves_the_training_as_it_would_have_been() -> None:
    runs = []
    for by_hand in (False, True):
        torch.manual_seed(3)
        trainer, memory = make_trainer(make_env("cartpole", 4))
        trainer.learn(48)
        if by_hand:
            trainer.evaluate(2, deterministic=False)
        trainer.learn(96)
        runs.append(training_numbers(memory.lines))
    assert runs[0] == runs[1]


def test_an_evaluation_is_recorded_with_its_place(tmp_path: Path) -> None:
    trainer, _ = make_trainer(scripted(), TrainingConfig(eval_interval=2, eval_episodes=4), run_dir=tmp_path)
    trainer.learn(32)
    records = read_json_lines(tmp_path / "evaluations.jsonl")
    assert [(record["iteration"], record["step"], record["episodes"]) for record in records] == [(2, 16, 4), (4, 32, 4)]
    assert records[0]["return"] == 8.0  # two episodes of 6 and two of 10
    assert trainer.num_evaluations == 2


def test_step_tables_are_numbered_by_evaluation(tmp_path: Path) -> None:
    cfg = TrainingConfig(eval_interval=1, eval_episodes=2, eval_num_envs=2)
    trainer, _ = make_trainer(scripted(), cfg, run_dir=tmp_path, save_step_csv=True)
    trainer.learn(16)
    assert len(list(tmp_path.glob("eval/eval[01]/env[01]/rewards.csv"))) == 4


def test_environments_for_evaluation_are_those_given_or_as_many_as_wanted() -> None:
    given = scripted()
    trainer, _ = make_trainer(scripted(), TrainingConfig(eval_num_envs=3), eval_env=given)
    trainer.evaluate(6)
    assert trainer.eval_env is given
    trainer, _ = make_trainer(scripted(), TrainingConfig(eval_num_envs=3))
    trainer.evaluate(2)
    first = trainer.eval_env
    assert first is not None
    assert first.num_envs == 2
    closed = []
    first.close = lambda: closed.append(True)  # type: ignore[method-assign]
    trainer.evaluate(7)
    assert trainer.eval_env is not None
    assert trainer.eval_env.num_envs == 3
    assert closed == [True]


# Saving and loading


@pytest.mark.parametrize(
    ("interval", "keep", "expected"), [(0, 3, [5]), (2, 0, [2, 4, 5]), (1, 2, [4, 5]), (2, 3, [2, 4, 5]), (9, 1, [5])]
)
def test_checkpoints_are_saved_at_their_interval_and_at_the_end(
    interval: int, keep: int, expected: list[int], tmp_path: Path
) -> None:
    cfg = TrainingConfig(save_interval=interval, keep_checkpoints=keep)
    trainer, _ = make_trainer(scripted(), cfg, save_dir=tmp_path)
    trainer.learn(40)
    assert names(tmp_path) == [f"iteration_{number:06d}.pt" for number in expected]


def test_checkpoints_of_an_earlier_run_are_neither_taken_for_ours_nor_our_ruin(tmp_path: Path) -> None:
    for number in (1, 50):
        (tmp_path / checkpoint.checkpoint_name(number)).write_text("from another run")
    trainer, _ = make_trainer(scripted(), TrainingConfig(save_interval=1, keep_checkpoints=2), save_dir=tmp_path)
    trainer.learn(8)
    assert checkpoint.load(tmp_path / checkpoint.checkpoint_name(1))["iteration"] == 1
    trainer.learn(24)
    assert names(tmp_path) == [checkpoint.checkpoint_name(number) for number in (2, 3, 50)]


def test_without_save_dir_a_run_saves_nothing_and_a_relative_name_is_an_error(tmp_path: Path) -> None:
    trainer, _ = make_trainer(scripted())
    trainer.learn(8)
    for call in (trainer.save_checkpoint, trainer.load_checkpoint):
        with pytest.raises(CheckpointError, match=r"'best\.pt' has no place.*save_dir"):
            call("best.pt")
    assert trainer.save_checkpoint(tmp_path / "best.pt") == tmp_path / "best.pt"
    assert (tmp_path / "best.pt").exists()


def test_a_checkpoint_by_name_lies_in_save_dir_and_stays(tmp_path: Path) -> None:
    trainer, _ = make_trainer(scripted(), TrainingConfig(save_interval=1, keep_checkpoints=1), save_dir=tmp_path)
    trainer.learn(8)
    trainer.save_checkpoint("best.pt")
    trainer.learn(32)
    assert names(tmp_path) == ["best.pt", checkpoint.checkpoint_name(4)]


def test_a_loaded_checkpoint_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    whole, expected = make_trainer(make_env("cartpole", 4))
    whole.learn(128)
    trainer, _ = make_trainer(make_env("cartpole", 4), save_dir=tmp_path)
    trainer.learn(64)
    resumed, memory = make_trainer(make_env("cartpole", 4), save_dir=tmp_path)
    torch.randn(7)
    resumed.load_checkpoint(checkpoint.checkpoint_name(4))
    assert (resumed.iteration, resumed.total_steps) == (4, 64)
    resumed.learn(128)
    assert training_numbers(memory.lines) == training_numbers(expected.lines[4:])


def test_a_checkpoint_of_another_policy_changes_nothing(tmp_path: Path) -> None:
    trainer, _ = make_trainer(make_env("cartpole", 2), save_dir=tmp_path)
    trainer.learn(8)
    other, _ = make_trainer(scripted(), save_dir=tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this policy"):
        other.load_checkpoint(checkpoint.checkpoint_name(1))
    assert other.iteration == 0


def test_an_environment_that_cannot_come_back_says_so_and_training_goes_on(tmp_path: Path) -> None:
    cfg = TrainingConfig(save_interval=1)
    trainer, memory = make_trainer(scripted(ForgetfulEnv), cfg, save_dir=tmp_path)
    trainer.learn(24)
    assert memory.messages == ["ForgetfulEnv cannot save its state: a resumed run will start new episodes there."]
    resumed, memory = make_trainer(scripted(ForgetfulEnv), cfg, save_dir=tmp_path)
    resumed.load_checkpoint(checkpoint.checkpoint_name(3))
    assert "New episodes start, so this run will differ from an uninterrupted one" in memory.messages[0]
    resumed.learn(32)
    assert resumed.iteration == 4


def test_messages_reach_those_who_have_no_console(caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = make_trainer(scripted())
    with caplog.at_level(logging.WARNING, "apexrl"):
        trainer.tell("something to know", once=True)
        trainer.tell("something to know", once=True)
    assert [record.message for record in caplog.records] == ["something to know"]


# Divergence and failure


def assert_finite(trainer: Trainer) -> None:
    for name, parameter in trainer.policy.named_parameters():
        assert parameter.isfinite().all(), name


def test_a_reward_that_is_not_a_number_stops_the_run_with_a_report(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(NanRewardEnv), TrainingConfig(save_interval=1), save_dir=tmp_path)
    with pytest.raises(DivergenceError) as caught:
        trainer.learn(80)
    # The 11th step is the third of the third rollout.
    for part in ("'reward'", "1 of 8", "step 2, environment 1", str(tmp_path / checkpoint.checkpoint_name(2))):
        assert part in str(caught.value)
    assert_finite(trainer)
    assert len(memory.lines) == trainer.iteration == 2
    assert names(tmp_path) == [checkpoint.checkpoint_name(number) for number in (1, 2)]


def test_a_learning_rate_that_is_too_high_stops_the_run_with_a_report(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(), TrainingConfig(save_interval=1), learning_rate=1e25, save_dir=tmp_path)
    trainer.save_checkpoint()
    with pytest.raises(DivergenceError, match=rf"Training diverged.*The last good checkpoint is {tmp_path}"):
        trainer.learn(800)
    assert_finite(trainer)
    assert all(math.isfinite(value) for line in memory.lines for value in line.values())


def test_a_divergence_before_the_first_checkpoint_says_that_there_is_none() -> None:
    trainer, _ = make_trainer(scripted(NanRewardEnv))
    with pytest.raises(DivergenceError, match=r"No checkpoint had been saved\."):
        trainer.learn(80)


def test_an_environment_that_fails_in_a_step_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(BrokenEnv), TrainingConfig(save_interval=1), save_dir=tmp_path)
    with pytest.raises(EnvError, match="the simulator has died"):
        trainer.learn(80)
    assert memory.messages == []
    assert names(tmp_path) == [checkpoint.checkpoint_name(1)]


def test_what_went_wrong_is_not_hidden_by_a_checkpoint_that_cannot_be_saved(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(UnreadableEnv), TrainingConfig(save_interval=50), save_dir=tmp_path)
    trainer.add_callback("pre_update", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.learn(80)
    assert "No checkpoint could be saved at iteration 0: the environments are closed" in memory.messages[0]
    assert list(tmp_path.iterdir()) == []


# Signals


@pytest.mark.parametrize(("number", "left_by"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_iteration_saves_and_leaves_as_usual(
    number: signal.Signals, left_by: type[BaseException], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    trainer, memory = make_trainer(scripted(), save_dir=tmp_path)

    def interrupt(_: Trainer) -> None:
        if trainer.iteration == 1:
            os.kill(os.getpid(), number)

    trainer.add_callback("pre_update", interrupt)
    with pytest.raises(left_by) as left:
        trainer.learn(80)
    if isinstance(left.value, SystemExit):
        assert left.value.code == 128 + number
    assert trainer.iteration == len(memory.lines) == 2
    assert names(tmp_path) == [checkpoint.checkpoint_name(2)]
    assert "Stopping after this iteration" in capfd.readouterr().err
    assert signal.getsignal(number) is before
    trainer.learn(24)  # the next call starts afresh
    assert trainer.iteration == 3


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(), save_dir=tmp_path)

    def interrupt(_: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer.add_callback("pre_update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.learn(80)
    assert memory.lines == []


def test_training_outside_the_main_thread_works() -> None:
    trainer, memory = make_trainer(scripted())
    thread = threading.Thread(target=trainer.learn, args=(16,))
    thread.start()
    thread.join(30)
    assert len(memory.lines) == 2
