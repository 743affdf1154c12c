"""Rollouts of the runner: whose episodes they continue, and who acts."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tests.refusals import refused
from tests.scripted import ScriptedEnv
from torch import Tensor

from apexrl import PPO, ActorCritic, OnPolicyRunner, PPOConfig, RecurrentActorCritic, SyncCollector, Trainer
from apexrl.agent import TrainingConfig
from apexrl.algorithms import PPOROA, PPOROAConfig
from apexrl.core.errors import ConfigError
from apexrl.envs import VecEnv, make_env
from apexrl.policies import ROAPolicy


class TwentySteps:
    """A simulator of the dialect of rsl_rl without ``reset``: environment n has taken ``5 n`` steps of twenty."""

    num_envs, num_actions, device = 3, 1, "cpu"

    def __init__(self) -> None:
        self.time = torch.arange(3) * 5

    def get_observations(self) -> Tensor:
        return self.time.float().unsqueeze(-1)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        self.time = self.time + 1
        done = self.time == 20
        reward = self.time.float()
        self.time = torch.where(done, 0, self.time)
        return self.get_observations(), reward, done, {"time_outs": done}


class ResettableTwentySteps(TwentySteps):
    def reset(self) -> Tensor:
        self.time = torch.zeros_like(self.time)
        return self.get_observations()


pytestmark = pytest.mark.filterwarnings("ignore:.*hides the last state.*")


def make_runner(env: Any = None, num_steps: int = 8) -> OnPolicyRunner:
    torch.manual_seed(0)
    env = ScriptedEnv([20, 20], [True, True]) if env is None else env
    return OnPolicyRunner(env, cfg=PPOConfig(num_steps=num_steps), device="cpu", log_interval=1)


def still(obs: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.zeros(len(obs), 1), None, None, None


def evaluated_length(runner: OnPolicyRunner, envs: Any, obs: Any, num_steps: int = 30) -> float:
    runner.eval_episode_metrics.clear()
    runner.rollout(obs, num_steps, envs=envs, policy_fn=still, collect_for_training=False)
    return runner.eval_episode_metrics.means()["episode_len"].item()


def logged_lengths(trainer: Trainer) -> list[float]:
    lengths: list[float] = []
    trainer.add_callback("post_iteration", lambda _, s: lengths.append(s.get("episode/mean_length", 20.0)))
    return lengths


def test_evaluation_after_a_reset_counts_new_episodes() -> None:
    runner = make_runner()
    envs = runner.env.spawn(3)
    assert [evaluated_length(runner, envs, envs.reset(7)) for _ in range(3)] == [20.0] * 3


def test_evaluation_of_a_raw_simulator_that_its_user_resets_counts_new_episodes() -> None:
    runner, simulator = make_runner(), ResettableTwentySteps()
    assert [evaluated_length(runner, simulator, simulator.reset()) for _ in range(3)] == [20.0] * 3


def test_evaluation_without_a_reset_counts_episodes_that_span_calls_whole() -> None:
    runner = make_runner()
    envs = runner.env.spawn(3)
    obs, _, _ = runner.rollout(envs.reset(7), 15, envs=envs, policy_fn=still, collect_for_training=False)
    assert evaluated_length(runner, envs, obs, 10) == 20.0


def test_environments_of_different_sizes_can_be_evaluated_in_turn() -> None:
    runner = make_runner()
    first, second = runner.env.spawn(3), runner.env.spawn(5)
    one, two = first.reset(), second.reset()
    for _ in range(3):
        one, _, _ = runner.rollout(one, 15, envs=first, policy_fn=still, collect_for_training=False)
        two, _, _ = runner.rollout(two, 15, envs=second, policy_fn=still, collect_for_training=False)
    means = runner.eval_episode_metrics
    assert means.count("episode_len") == 2 * (3 + 5)
    assert means.means()["episode_len"] == 20.0


def test_an_observation_that_was_returned_does_not_change_later() -> None:
    runner = make_runner()
    obs, _, _ = runner.rollout(None, 5)
    before = obs.clone()
    runner.rollout(obs, 5)
    assert torch.equal(obs, before)


@pytest.mark.parametrize("num_steps", [3, 15])
def test_learning_continues_where_a_rollout_stopped(num_steps: int) -> None:
    runner = make_runner()
    lengths = logged_lengths(runner)
    runner.learn(2 * 8 * 3)
    obs, _, _ = runner.rollout(None, num_steps)
    seen: list[Tensor] = []
    collector: Any = runner.collector
    act = collector.actor
    collector.actor = lambda carry: (seen.append(carry["observation"].clone()), act(carry))[1]  # type: ignore[func-returns-value]
    runner.learn(2 * 8 * 10)
    assert torch.equal(seen[0], obs)
    assert lengths == [20.0] * 10


def test_an_observation_that_is_out_of_date_neither_acts_nor_starts_an_episode() -> None:
    runner = make_runner()
    obs, _, _ = runner.rollout(None, 5)
    runner.learn(2 * 8)
    _, batch, _ = runner.rollout(obs, 15)
    assert batch is not None
    # Learning continued for 8 steps, although it was its first call.
    assert batch["observation"][:8, 0, 0].tolist() == [13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0, 0.0]
    assert runner.episode_metrics.means()["episode_len"] == 20.0


def test_environments_that_were_evaluated_once_are_not_kept() -> None:
    runner = make_runner()
    envs = runner.env.spawn(3)
    runner.rollout(envs.reset(), 5, envs=envs)
    alive = weakref.ref(envs)
    del envs
    gc.collect()
    assert alive() is None


def test_learning_starts_new_episodes_after_a_reset_of_the_user() -> None:
    runner = make_runner()
    lengths = logged_lengths(runner)
    runner.learn(2 * 8 * 3)
    runner.env.reset()
    runner.learn(2 * 8 * 10)
    assert lengths == [20.0] * 10


def test_a_trainer_continues_what_another_collector_stepped() -> None:
    torch.manual_seed(0)
    env = ScriptedEnv([20, 20], [True, True])
    agent = PPO(env, PPOConfig(num_steps=8), device="cpu")
    trainer = Trainer(env, agent.policy, agent, TrainingConfig(eval_num_envs=2))
    lengths = logged_lengths(trainer)
    collector = SyncCollector(env=env, policy=agent.policy, device="cpu")
    trainer.learn(2 * 8)
    times = []
    for epoch in range(2, 6):
        rollout = collector.collect(n_steps=13, reset=epoch == 2)
        times.append(rollout["observation"][0, 0, 0].item())
        trainer.learn(2 * 8 * epoch)
    # Each epoch takes 13 + 8 steps of episodes of 20.
    assert times == [0.0, 1.0, 2.0, 3.0]
    assert lengths == [20.0] * 5


def test_collectors_of_policies_with_and_without_memory_take_turns() -> None:
    env = ScriptedEnv([20, 20], [True, True])
    plain = SyncCollector(env, PPO(env, device="cpu").policy)
    recurrent = SyncCollector(env, RecurrentActorCritic.for_env(env))
    for collector in (plain, recurrent):
        collector.collect(1)
    times = [collector.collect(3)["observation"][0, 0, 0].item() for collector in (plain, recurrent, plain, recurrent)]
    assert times == [1.0, 4.0, 7.0, 10.0]


def test_a_failed_step_leaves_no_stale_observation() -> None:
    env = ScriptedEnv([20, 20], [True, True])
    collector = SyncCollector(env, PPO(env, device="cpu").policy)
    collector.collect(3)
    act, collector.actor = collector.actor, lambda carry: {}
    with pytest.raises(KeyError):
        collector.collect(3)
    collector.actor = act
    assert collector.collect(1)["observation"][0, 0, 0] == 0.0


def test_the_policy_that_learns_is_the_one_that_acts() -> None:
    torch.manual_seed(0)
    env = make_env("payload", 4)
    layers: dict[str, Any] = {"hidden_dims": (16,), "encoder_dims": (8,), "adapt_dims": (16,)}
    agent = PPOROA(ROAPolicy.for_env(env, history=24, **layers), PPOROAConfig(num_steps=8))
    runner = OnPolicyRunner(env, agent=agent)
    _, batch, _ = runner.rollout(None, 8)
    assert batch is not None
    teacher = agent.rollout_policy
    assert teacher is not agent.policy
    evaluation = teacher.evaluate(batch)
    torch.testing.assert_close(evaluation.log_prob, batch["sample_log_prob"])
    torch.testing.assert_close(evaluation.value, batch["value"])


def test_evaluation_of_a_simulator_without_reset_begins_with_new_episodes() -> None:
    runner = make_runner(TwentySteps())
    runner.learn(3 * 8 * 2)
    for _ in range(2):
        result = runner.evaluate(7)
        assert result.episodes["episode_len"].tolist() == [20.0] * 7
        assert result.episodes["return"].tolist() == [210.0] * 7


def test_step_tables_of_a_simulator_without_reset_begin_with_new_episodes(tmp_path: Path) -> None:
    runner = OnPolicyRunner(TwentySteps(), device="cpu", log_dir=tmp_path)
    runner.save_step_csv = True
    rows = runner.evaluate(4).step_rows
    assert rows is not None
    assert [len(rows[index]) for index in range(3)] == [40, 20, 20]
    assert [row["reward"] for row in rows[1]] == list(range(1, 21))
    assert [row["step"] for row in rows[2]] == list(range(20))


def test_rollouts_of_a_simulator_without_reset_count_from_new_episodes() -> None:
    runner, simulator = make_runner(), TwentySteps()
    assert evaluated_length(runner, simulator, None, 45) == 20.0
    assert evaluated_length(runner, simulator, None, 15) == 20.0, "nothing was reset, so its episodes continue"
    training = make_runner(TwentySteps())
    lengths = logged_lengths(training)
    training.learn(3 * 8 * 8)
    assert lengths == [20.0] * 8


def test_an_evaluation_on_the_training_simulator_is_known_to_training() -> None:
    simulator = TwentySteps()
    torch.manual_seed(0)
    runner = OnPolicyRunner(simulator, device="cpu", cfg=PPOConfig(num_steps=8), eval_env=simulator)
    lengths = logged_lengths(runner)
    runner.learn(3 * 8 * 2)
    runner.eval(3)
    runner.learn(3 * 8 * 8)
    assert lengths == [20.0] * 8
    envs: VecEnv = runner.env
    assert envs is runner.eval_env, "one simulator has one wrapper"


def test_a_simulator_without_reset_resumes_from_its_own_observation(tmp_path: Path) -> None:
    runner = OnPolicyRunner(TwentySteps(), device="cpu", cfg=PPOConfig(num_steps=8), save_dir=tmp_path)
    runner.learn(3 * 8)
    other = OnPolicyRunner(TwentySteps(), device="cpu", cfg=PPOConfig(num_steps=8), save_dir=tmp_path)
    other.load_checkpoint(runner.save_checkpoint("model.pt"))
    assert other.collector.collect(1)["observation"][0].tolist() == [[0.0], [5.0], [10.0]]


def test_evaluation_environments_that_were_handed_out_stay() -> None:
    runner = make_runner()
    envs = runner.eval_envs
    assert envs is not runner.envs
    runner.evaluate(2)
    assert runner.eval_envs is envs
    given = ScriptedEnv([20], [True])
    assert OnPolicyRunner(runner.env, eval_env=given, device="cpu").eval_envs is given


def test_evaluation_logs_without_an_episode_are_empty() -> None:
    runner = make_runner()
    assert runner.build_eval_logs() == {}
    runner.rollout(None, 19, envs=runner.eval_envs)
    assert runner.build_eval_logs() == {}


def test_step_tables_need_a_directory() -> None:
    runner = make_runner()
    _, _, rows = runner.rollout(None, 3, record_step_data=True)
    assert rows is not None
    with refused(ConfigError, "log_dir"):
        runner.save_step_csvs(rows)
    with refused(ConfigError, "record_step_data=True"):
        runner.save_step_csvs(None)
    runner.save_step_csv = True
    with refused(ConfigError, "save_step_csv", "directory"):
        runner.eval(2)
    with refused(ConfigError, "save_step_csv", "directory"):
        Trainer(runner.env, runner.policy, runner.agent, save_step_csv=True)


def box(size: int) -> gym.spaces.Box:
    return gym.spaces.Box(-1.0, 1.0, (size,))


@pytest.mark.parametrize(
    ("observation_space", "action_space", "named"),
    [
        (box(2), gym.spaces.Discrete(3), "Discrete(3)"),
        (box(2), gym.spaces.MultiDiscrete([2]), "MultiDiscrete([2])"),
        (box(2), box(2), "Box(-1.0, 1.0, (2,), float32)"),
        (box(3), box(1), "{'observation': (3,)}"),
        (gym.spaces.Dict({"policy": box(2)}), box(1), "{'policy': (2,)}"),
    ],
    ids=str,
)
def test_an_agent_made_for_another_environment_is_refused(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], named: str
) -> None:
    agent = PPO(policy=ActorCritic(observation_space, action_space))
    with refused(ConfigError, named, "ScriptedEnv", "for_env"):
        OnPolicyRunner(ScriptedEnv([20], [True]), agent=agent)


def test_an_agent_with_other_bounds_of_actions_is_taken() -> None:
    policy = ActorCritic(box(2), gym.spaces.Box(-2.0, 2.0, (1,)))
    assert OnPolicyRunner(ScriptedEnv([20], [True]), agent=PPO(policy=policy)).policy is policy


class Blind(ResettableTwentySteps):
    """Its observation is always the same."""

    def get_observations(self) -> Tensor:
        return torch.full((3, 1), torch.nan)


def test_episodes_are_told_apart_where_observations_are_always_the_same() -> None:
    runner, simulator = make_runner(), Blind()
    assert [evaluated_length(runner, simulator, simulator.reset()) for _ in range(3)] == [20.0, 20.0, 20.0]
    runner.eval_episode_metrics.clear()
    obs: Any = simulator.reset()
    for _ in range(4):
        obs, _, _ = runner.rollout(obs, 13, envs=simulator, policy_fn=still, collect_for_training=False)
    assert runner.eval_episode_metrics["episode_len"].tolist() == [20.0] * 6


def test_steps_of_the_user_leave_no_stale_observation() -> None:
    runner = make_runner()
    runner.learn(2 * 8 * 2)
    for _ in range(7):
        runner.env.step(torch.zeros(2, 1))
    assert runner.env.running is None
    lengths = logged_lengths(runner)
    runner.learn(2 * 8 * 12)
    assert set(lengths) == {20.0}


def test_a_policy_function_may_return_the_action_alone() -> None:
    runner, env = make_runner(), ScriptedEnv([20, 20], [True, True])
    seen: list[Tensor] = []
    step = env.step
    env.step = lambda action: (seen.append(action), step(action))[1]  # type: ignore[method-assign, func-returns-value]
    runner.rollout(env.reset(), 2, envs=env, policy_fn=lambda obs: torch.ones(2, 1), collect_for_training=False)
    assert [action.tolist() for action in seen] == [[[1.0], [1.0]]] * 2
    for wrong in (None, torch.ones(3, 1), torch.tensor(1.0)):
        with refused(ConfigError, "policy_fn"):
            runner.rollout(env.reset(), 2, envs=env, policy_fn=lambda obs, wrong=wrong: (wrong, None))  # type: ignore[misc]


def test_observations_come_as_simulators_give_them_and_for_every_environment() -> None:
    runner = make_runner()
    forms: list[Any] = [lambda obs: obs.numpy(), lambda obs: (obs, {})]
    for form in forms:
        obs = runner.env.reset().clone()
        _, batch, _ = runner.rollout(form(obs), 3)
        assert batch is not None
        assert torch.equal(batch["observation"][0], obs)
    with refused(ConfigError, "observations", "[3]", 2):
        runner.rollout(torch.zeros(3, 2), 3)


def test_other_environments_must_fit_the_policy_too() -> None:
    continuous, discrete = make_env("pendulum", 2), make_env("cartpole", 2)
    with pytest.raises(ConfigError):
        OnPolicyRunner(continuous, eval_env=discrete, device="cpu")
    with pytest.raises(ConfigError):
        OnPolicyRunner(continuous, device="cpu").rollout(None, 5, envs=discrete)


class CountingSteps(ResettableTwentySteps):
    """With the counters that rsl_rl's simulators have; a reset may start anywhere in an episode."""

    def __init__(self, starts: tuple[int, int, int] = (0, 0, 0)) -> None:
        super().__init__()
        self.starts = torch.tensor(starts)
        self.reset()

    @property
    def episode_length_buf(self) -> Tensor:
        return self.time

    def reset(self) -> Tensor:
        self.time = self.starts.clone()
        return self.get_observations()


class NoisySteps(ResettableTwentySteps):
    """Shows another observation at every look."""

    def get_observations(self) -> Tensor:
        return self.time.unsqueeze(-1) + torch.rand(3, 1)


def first_seen(runner: OnPolicyRunner, total_timesteps: int) -> list[float]:
    """Learn, and return the observation that the first action of it was taken on."""
    seen: list[list[float]] = []
    collector: Any = runner.collector
    act = collector.actor

    def spy(carry: Any) -> Any:
        seen.append(carry["observation"].flatten().tolist())
        return act(carry)

    collector.actor = spy
    runner.learn(total_timesteps)
    collector.actor = act
    return seen[0]


@pytest.mark.parametrize("kind", [CountingSteps, ResettableTwentySteps])
def test_learning_notices_what_others_do_with_the_simulator_itself(kind: type[ResettableTwentySteps]) -> None:
    simulator = kind()
    runner = make_runner(simulator)
    lengths: list[float] = []
    runner.add_callback("post_iteration", lambda _, stats: lengths.append(stats.get("episode/mean_length", 20.0)))
    runner.learn(2 * 24)
    simulator.reset()
    assert first_seen(runner, 4 * 24) == [0.0, 0.0, 0.0]
    for _ in range(3):
        simulator.step(torch.zeros(3, 1))
    now = simulator.get_observations().flatten().tolist()
    assert first_seen(runner, 12 * 24) == now
    assert set(lengths) == {20.0}


def test_a_simulator_that_is_noisy_keeps_its_running_episodes() -> None:
    runner = make_runner(NoisySteps())
    lengths: list[float] = []
    runner.add_callback("post_iteration", lambda _, stats: lengths.append(stats.get("episode/mean_length", 0.0)))
    runner.learn(3 * 24)
    assert lengths == [0.0, 0.0, 20.0]


def test_a_reset_into_the_middle_of_episodes_begins_new_ones() -> None:
    runner = make_runner(CountingSteps())
    simulator = CountingSteps((0, 3, 5))
    for _ in range(3):
        runner.eval_episode_metrics.clear()
        start = simulator.reset()
        runner.rollout(start, 24, envs=simulator, policy_fn=still, collect_for_training=False)
        assert runner.eval_episode_metrics["episode_len"].tolist() == [20.0, 17.0, 15.0]


def test_a_rollout_begins_where_the_simulator_was_brought_by_hand() -> None:
    runner = make_runner(CountingSteps())
    simulator = CountingSteps()
    runner.rollout(simulator.reset(), 3, envs=simulator, policy_fn=still, collect_for_training=False)
    obs: Any = None
    for _ in range(4):
        obs, *_ = simulator.step(torch.zeros(3, 1))
    seen: list[Tensor] = []

    def watching(now: Tensor) -> Tensor:
        seen.append(now.clone())
        return torch.zeros(len(now), 1)

    runner.rollout(obs, 2, envs=simulator, policy_fn=watching, collect_for_training=False)
    assert torch.equal(seen[0], torch.full((3, 1), 7.0))


def test_a_schedule_must_be_one() -> None:
    schedule: Any = {"save_interval": 5}
    with refused(ConfigError, "training", "TrainingConfig", "dict"):
        OnPolicyRunner(ScriptedEnv([20], [True]), training=schedule, device="cpu")
