"""The schedule: when things are logged, evaluated and saved, and what happens when something goes wrong."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from tests.refusals import refused
from tests.scripted import ScriptedEnv
from torch import Tensor

from apexrl.agent import Trainer, TrainingConfig, checkpoint
from apexrl.agent.loggers import Logger
from apexrl.agent.trainer import EVENTS, NO_EVALUATION
from apexrl.algorithms import PPO, SAC, PPOConfig, SACConfig
from apexrl.collectors import AsyncCollector
from apexrl.core.errors import ConfigError, DivergenceError, EnvError, RunDirError
from apexrl.core.system.files import read_json_lines
from apexrl.core.types import EnvStep
from apexrl.envs import GymVecEnv, VecEnv, make_env
from apexrl.policies import ActorCritic, SACPolicy


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


class RareSuccess(gym.Env[Any, Any]):
    """Episodes of three steps, of which about three in ten end with ``is_success`` in info; the others say nothing."""

    observation_space = action_space = gym.spaces.Box(-1.0, 1.0, (1,))
    wins: ClassVar[list[bool]] = []
    """Of every episode that ended in this process, whether it succeeded."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.succeeds = 0, bool(self.np_random.random() < 0.3)
        return self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        ends = self.time == 3
        if ends:
            RareSuccess.wins.append(self.succeeds)
        info = {"is_success": True} if ends and self.succeeds else {}
        return np.full(1, self.time / 3, np.float32), 1.0, ends, False, info


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
    env: VecEnv,
    cfg: TrainingConfig | None = None,
    learning_rate: float = 3e-4,
    more_loggers: Sequence[Logger] = (),
    **options: Any,
) -> tuple[Trainer, Memory]:
    """Return a trainer whose iterations take four steps, and what it logs."""
    torch.manual_seed(0)
    policy = ActorCritic.for_env(env, actor_cfg={"hidden_dims": (4,)}, critic_cfg={"hidden_dims": (4,)})
    algo = PPOConfig(num_steps=4, num_epochs=2, num_minibatches=2, learning_rate=learning_rate)
    memory = Memory()
    loggers = [memory, *more_loggers]
    return Trainer(env, policy, PPO(policy=policy, cfg=algo), cfg, loggers=loggers, **options), memory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


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


def test_optimizer_steps_are_counted_over_a_resume(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(), save_dir=tmp_path)
    trainer.learn(16)
    # Two iterations of two epochs with two minibatches each.
    assert trainer.optimizer_steps == 8
    resumed, _ = make_trainer(scripted(), save_dir=tmp_path)
    resumed.load_checkpoint(checkpoint.checkpoint_name(2))
    resumed.learn(24)
    assert resumed.optimizer_steps == 12
    assert memory.messages == []


def test_a_run_without_an_optimizer_step_says_so_at_its_end() -> None:
    env, memory = make_env("pendulum", 2), Memory()
    policy = SACPolicy.for_env(env)
    algorithm = SAC(policy=policy, cfg=SACConfig(num_steps=4, learning_starts=1000))
    trainer = Trainer(env, policy, algorithm, loggers=[memory])
    trainer.learn(16)
    warning = memory.messages[-1]
    assert warning == trainer.no_step_warning()
    assert warning.startswith("WARNING: nothing was learned. The optimizer took no step in 2 iterations")
    assert "algo.learning_starts" in warning


def test_an_algorithm_that_does_not_report_its_steps_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPO, "update", lambda *_: {})
    trainer, memory = make_trainer(scripted())
    trainer.learn(16)
    assert trainer.optimizer_steps is None
    assert memory.messages == []


def test_log_interval_skips_lines_but_no_episodes() -> None:
    # Environment 0 earns 6 every three steps, environment 1 earns 10 every four: in steps 5 to 12 that is 6, 6, 6, 10
    # and 10.
    trainer, memory = make_trainer(scripted(), log_interval=3)
    trainer.learn(40)
    assert [line["iteration"] for line in memory.lines] == [1, 3, 5]  # the first and the last too
    assert memory.lines[1]["rollout/return"] == pytest.approx(7.6)
    assert memory.lines[1]["rollout/episode_len"] == pytest.approx(17 / 5)
    assert len(memory.steps) == 5  # progress is shown every iteration


def test_the_first_and_the_last_iteration_are_logged_whatever_the_interval() -> None:
    trainer, memory = make_trainer(scripted(), log_interval=100)
    trainer.learn(24)
    trainer.learn(48)
    assert [line["iteration"] for line in memory.lines] == [1, 3, 6]


def test_learning_for_no_steps_does_nothing_and_for_a_negative_number_is_an_error(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(), save_dir=tmp_path)
    trainer.learn(0)
    assert (trainer.iteration, memory.lines, names(tmp_path)) == (0, [], [])
    with refused(ConfigError, "total_timesteps", -5):
        trainer.learn(-5)
    not_a_number: Any = float("nan")
    with refused(ConfigError, "total_timesteps", "nan"):
        trainer.learn(not_a_number)


@pytest.mark.parametrize("event", EVENTS)
def test_a_callback_stops_training_after_its_iteration_which_is_logged_and_saved(event: str, tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(), log_interval=100, save_dir=tmp_path)
    calls = 0

    def handler(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            trainer.stop()

    trainer.add_callback(event, handler)
    trainer.stop()  # nothing runs, so nothing is stopped
    trainer.learn(800)
    assert (trainer.iteration, calls) == (3, 3)
    assert [line["iteration"] for line in memory.lines] == [1, 3]
    assert names(tmp_path) == [checkpoint.checkpoint_name(3)]
    trainer.learn(32)  # and it can go on
    assert trainer.iteration == 4


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
    with refused(ConfigError, "Trainer", "algorithm.policy"):
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


def test_an_evaluation_reports_sampled_actions_beside_deterministic_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    cfg = TrainingConfig(eval_interval=2, eval_episodes=3, eval_sampled=True)
    trainer, memory = make_trainer(make_env("pendulum", 4), cfg, run_dir=tmp_path)
    trainer.learn(32)
    (record,) = read_json_lines(tmp_path / "evaluations.jsonl")
    (line,) = (line for line in memory.lines if "eval/return" in line)
    result = trainer.evaluate(3)
    assert result.sampled is not None
    assert float(result.sampled) == float(trainer.evaluate(3, deterministic=False)) != float(result)
    for number, both in ((float(result), "return"), (float(result.sampled), "sampled_return")):
        assert record[both] == line[f"eval/{both}"] == number
    assert record["sampled_return_interval"] == list(result.sampled.interval("return"))
    assert f"{float(result.sampled):.2f} with sampled actions" in str(result)


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


def test_the_number_of_episodes_to_evaluate_is_named() -> None:
    trainer, _ = make_trainer(scripted())
    with refused(ConfigError, "episodes", 1, 0):
        trainer.evaluate(0)


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
    with refused(EnvError, "the simulator has died"):
        trainer.learn(80)
    assert memory.messages == []
    assert names(tmp_path) == [checkpoint.checkpoint_name(1)]


def test_what_went_wrong_is_not_hidden_by_a_checkpoint_that_cannot_be_saved(tmp_path: Path) -> None:
    trainer, memory = make_trainer(scripted(UnreadableEnv), TrainingConfig(save_interval=50), save_dir=tmp_path)
    trainer.add_callback("post_iteration", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.learn(80)
    assert "No checkpoint could be saved at iteration 1: the environments are closed" in memory.messages[0]
    assert caught.value.__notes__ == ["No checkpoint had been saved."]
    assert names(tmp_path) == []


class FailingLogger(Logger):
    """Cannot log its second line."""

    def __init__(self, error: Exception) -> None:
        self.error, self.count = error, 0

    def log(self, values: Mapping[str, float]) -> None:
        self.count += 1
        if self.count == 2:
            raise self.error


def test_what_a_logger_raises_comes_after_a_checkpoint(tmp_path: Path) -> None:
    error = ConnectionError("the server of the numbers is gone")
    trainer, _ = make_trainer(scripted(), save_dir=tmp_path, more_loggers=[FailingLogger(error)])
    with pytest.raises(ConnectionError) as caught:
        trainer.learn(80)
    saved = tmp_path / checkpoint.checkpoint_name(2)
    assert caught.value is error
    assert error.__notes__ == [f"The last good checkpoint is {saved}."]
    assert checkpoint.load(saved)["iteration"] == 2


def test_a_full_disk_is_not_asked_for_a_checkpoint(tmp_path: Path) -> None:
    error = RunDirError("the disk is full.")
    cfg = TrainingConfig(save_interval=1)
    options: dict[str, Any] = {"run_dir": tmp_path, "save_dir": tmp_path / "checkpoints", "config": {"version": 1}}
    trainer, memory = make_trainer(scripted(), cfg, more_loggers=[FailingLogger(error)], **options)
    with pytest.raises(RunDirError) as caught:
        trainer.learn(80)
    first = tmp_path / "checkpoints" / checkpoint.checkpoint_name(1)
    resume = f"Fix the problem, then resume with: apexrl train --resume {tmp_path}"
    assert str(caught.value) == f"the disk is full. The last good checkpoint is {first}. {resume}"
    assert names(tmp_path / "checkpoints") == [first.name]
    assert memory.messages == []


def test_an_iteration_whose_evaluation_fails_begins_again_after_a_resume(tmp_path: Path) -> None:
    cfg = TrainingConfig(eval_interval=2, eval_episodes=4, save_interval=1)
    trainer, memory = make_trainer(scripted(), cfg, save_dir=tmp_path, eval_env=scripted(BrokenEnv))
    with refused(EnvError, "the simulator has died", tmp_path / checkpoint.checkpoint_name(1)):
        trainer.learn(80)
    assert names(tmp_path) == [checkpoint.checkpoint_name(1)]
    assert len(memory.lines) == 1


def test_what_fails_in_an_iteration_leaves_nothing_but_the_last_checkpoint(tmp_path: Path) -> None:
    class StumbleError(Exception):
        pass

    for part in ("collect", "update"):
        save_dir = tmp_path / part
        trainer, _ = make_trainer(scripted(), TrainingConfig(save_interval=1), save_dir=save_dir)
        owner: Any = trainer.collector if part == "collect" else trainer.algorithm
        original = getattr(owner, part)
        trainer.learn(16)

        def fail(*_: Any) -> None:
            raise StumbleError

        setattr(owner, part, fail)
        with pytest.raises(StumbleError) as caught:
            trainer.learn(80)
        newest = save_dir / checkpoint.checkpoint_name(2)
        assert caught.value.__notes__ == [f"The last good checkpoint is {newest}."]
        assert checkpoint.latest(save_dir) == newest
        trainer.checkpointer.load(newest.name)  # and this trainer can continue from it
        setattr(owner, part, original)
        trainer.learn(24)
        assert trainer.iteration == 3


def test_a_simulator_that_holds_one_environment_a_process_is_not_evaluated() -> None:
    env = scripted()
    env.can_spawn = False
    trainer, memory = make_trainer(env, TrainingConfig(eval_interval=1))
    assert memory.messages == [NO_EVALUATION]
    trainer.learn(16)
    assert not any("eval/return" in line for line in memory.lines)
    trainer, memory = make_trainer(env, TrainingConfig(eval_interval=1), eval_env=scripted())
    trainer.learn(8)
    assert memory.messages == []
    assert "eval/return" in memory.lines[0]


# Metrics of Gymnasium that appear later, and events


def rare_trainer(memory: Memory, num_steps: int = 5, **options: Any) -> Trainer:
    torch.manual_seed(0)
    env = GymVecEnv([RareSuccess] * 3)
    agent = PPO(env, PPOConfig(num_steps=num_steps, num_minibatches=1, num_epochs=1), device="cpu")
    return Trainer(env, agent.policy, agent, loggers=[memory], **options)


def test_a_success_in_info_that_only_some_episodes_report_is_logged_as_the_true_rate() -> None:
    memory = Memory()
    trainer = rare_trainer(memory, num_steps=20)
    assert trainer.env.metric_specs == {}
    for _ in range(3):
        RareSuccess.wins.clear()
        trainer.learn(trainer.total_steps + 60)
        assert 0 < sum(RareSuccess.wins) < len(RareSuccess.wins)
        assert memory.lines[-1]["rollout/success_rate"] == pytest.approx(np.mean(RareSuccess.wins))
    result = trainer.evaluate(20)
    assert len(result.episodes["success_once"]) == 20
    assert 0.0 < result.logs()["eval/success_rate"] < 1.0
    trainer.close()


def test_an_evaluation_without_a_success_counts_zero_once_training_had_one() -> None:
    trainer = rare_trainer(Memory())
    trainer.eval_env = ScriptedEnvWithoutMetrics([3], [True])
    assert "eval/success_rate" not in trainer.evaluate(2).logs()
    trainer.learn(15 * 4)
    assert trainer.evaluate(2).logs()["eval/success_rate"] == 0.0


class ScriptedEnvWithoutMetrics(ScriptedEnv):
    """Its observation is one number, as that of ``RareSuccess``."""

    def __init__(self, lengths: list[int], truncates: list[bool]) -> None:
        super().__init__(lengths, truncates)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (1,))

    def step(self, action: Tensor) -> EnvStep:
        step = super().step(action)
        return EnvStep(step.obs, step.reward, step.terminated, step.truncated, step.final_obs, log=step.log)

    def _observe(self) -> Tensor:
        return super()._observe()[:, :1]


def test_a_resumed_run_knows_the_metrics_that_were_found_before(tmp_path: Path) -> None:
    whole, resumed = Memory(), Memory()
    options: dict[str, Any] = {"cfg": TrainingConfig(save_interval=1, keep_checkpoints=0), "save_dir": tmp_path}
    trainer = rare_trainer(whole, **options)
    trainer.learn(15 * 20)
    # From where no success is reported for a while: its environments do not know the metric yet.
    silent = next(i for i, line in enumerate(whole.lines) if line.get("rollout/success_rate") == 0.0)
    trainer = rare_trainer(resumed, **options)
    trainer.load_checkpoint(checkpoint.checkpoint_name(silent))
    assert trainer.env.metric_specs == {}
    trainer.learn(15 * 20)
    names = [name for name in whole.lines[-1] if not name.startswith("time/")]
    assert "rollout/success_rate" in names
    before, after = ([[line[name] for name in names] for line in m.lines] for m in (whole, resumed))
    assert after == before[silent:]


def test_metrics_that_appear_later_are_logged_by_an_async_collector() -> None:
    memory = Memory()
    env = GymVecEnv([RareSuccess] * 3)
    agent = PPO(env, PPOConfig(num_steps=5, num_minibatches=1, num_epochs=1), device="cpu")
    collector = AsyncCollector(env, agent.policy, keep=agent.required_keys, seed=0)
    trainer = Trainer(env, agent.policy, agent, collector=collector, loggers=[memory], log_interval=20)
    trainer.learn(15 * 20)
    trainer.close()
    assert 0.0 < memory.lines[-1]["rollout/success_rate"] < 0.6
