"""Background collection: what is handed out, how old it may be, and how the thread ends. With real threads."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.point_suite import GOALS, PointSimulator, PointSuite
from tests.refusals import refused
from tests.scripted import ScriptedEnv
from torch import Tensor, nn

from apexrl import (
    PPO,
    RLOO,
    ActorCritic,
    Policy,
    PolicyOutput,
    PPOConfig,
    RecurrentActorCritic,
    RLOOConfig,
    Trainer,
    make_env,
)
from apexrl.agent import TrainingConfig
from apexrl.agent.loggers import Logger
from apexrl.collectors import AsyncCollector, RolloutGenerator, SuiteRunner, SyncCollector
from apexrl.core.errors import CheckpointError, ConfigError, EnvError
from apexrl.core.types import Carry, EnvStep
from apexrl.envs import VecEnv
from apexrl.envs.suites.base import Simulator
from apexrl.envs.suites.env import SuiteVecEnv

ENDLESS = 10**6


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    gc.collect()
    for thread in collecting_threads():
        thread.join(1.0)
    assert collecting_threads() == []


def collecting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "apexrl-collector"]


class TestEnv(ScriptedEnv):
    """Counts its steps, takes ``delay`` seconds for each from step ``slow_from`` on, and ten times that to give its
    state; hangs until ``go_on`` is set; fails at step ``fails_at``.
    """

    __test__ = False

    def __init__(self, lengths: tuple[int, ...] = (ENDLESS,)) -> None:
        super().__init__(list(lengths), [True] * len(lengths))
        self.num_steps, self.delay, self.slow_from, self.fails_at = 0, 0.0, 0, -1
        self.hangs = False
        self.go_on = threading.Event()
        self.go_on.set()

    def step(self, action: Tensor) -> EnvStep:
        if self.num_steps == self.fails_at:
            raise ZeroDivisionError("the simulator exploded")
        if self.num_steps >= self.slow_from:
            time.sleep(self.delay)
        self.hangs = not self.go_on.is_set()
        self.go_on.wait()
        self.num_steps += 1
        return super().step(action)

    def state_dict(self) -> dict[str, Any]:
        time.sleep(10 * self.delay)
        return super().state_dict()


class VersionPolicy(Policy):
    """Shows all of its parameters in what it stores; ``teach`` makes every one of them the same number."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(256) for _ in range(30)])
        self.register_buffer("buffer", torch.zeros(1))

    def teach(self, number: float) -> None:
        with torch.no_grad():
            for part in (*self.parts, *self.buffers()):
                part.fill_(number)

    def shown(self) -> Tensor:
        return torch.stack([part.mean() for part in self.parts] + [part.max() for part in self.buffers()])

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        obs = carry["observation"]
        return {"action": torch.zeros(len(obs), 1), "shown": self.shown().expand(len(obs), -1)}

    def forward(self, obs: Tensor, deterministic: bool = False) -> PolicyOutput:
        raise NotImplementedError

    def evaluate_actions(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def get_value(self, obs: Tensor) -> Tensor:
        return self.shown().mean().expand(*obs.shape[:-1], 1)


def make(env: VecEnv | None = None, policy: Policy | None = None, **options: Any) -> AsyncCollector:
    env = env or TestEnv()
    return AsyncCollector(env, policy or ActorCritic.for_env(env), **options)


def wait_for(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def times(batch: Any) -> list[float]:
    """Return when the steps of environment 0 were taken, on the environment's own clock."""
    return list(batch["observation"][:, 0, 0].tolist())


# What is handed out


@pytest.mark.parametrize(("max_staleness", "queue_size"), [(0, 1), (1, 1), (1, 3), (3, 2), (5, 5)])
@pytest.mark.parametrize("learner", ["fast", "slow"])
def test_each_rollout_comes_once_in_order_and_none_is_too_old(
    max_staleness: int, queue_size: int, learner: str
) -> None:
    env, policy = TestEnv(), VersionPolicy()
    ahead = min(max_staleness, queue_size)
    with make(env, policy, max_staleness=max_staleness, queue_size=queue_size) as collector:
        ages = []
        for call in range(40):
            policy.teach(call)
            batch = collector.collect(3)
            if learner == "slow":
                wait_for(lambda: env.num_steps == 3 * (call + 1 + ahead))  # noqa: B023
            assert times(batch) == [3.0 * call, 3.0 * call + 1, 3.0 * call + 2]
            version = batch["policy_version"]
            assert version.shape == (3, 1, 1)
            assert version.dtype == torch.int64
            ages.append(call - int(version[0, 0, 0]))
            # The weights of every step, and of the critic, are those of one call of collect, whole.
            assert (batch["shown"] == version).all()
            assert (batch["value"] == version).all()
        assert min(ages) >= 0
        assert max(ages) <= max_staleness
        assert torch.tensor(ages).diff().max() <= 1  # versions never go back
        if learner == "slow":
            assert max(ages) == ahead
        assert collector.metrics()["collect/dropped"] == 0


def test_the_thread_pauses_when_the_queue_is_full() -> None:
    env = TestEnv()
    with make(env, max_staleness=9, queue_size=2) as collector:
        collector.collect(5)
        wait_for(lambda: env.num_steps == 15)
        time.sleep(0.05)
        assert env.num_steps == 15  # one handed out and two waiting
        assert collector.metrics()["collect/queue"] == 2
        collector.collect(5)
        wait_for(lambda: env.num_steps == 20)


def test_a_strictly_on_policy_collector_waits_for_the_new_weights() -> None:
    env = TestEnv()
    with make(env, max_staleness=0) as collector:
        for call in range(1, 4):
            collector.collect(5)
            time.sleep(0.02)
            assert env.num_steps == 5 * call


def test_what_was_collected_with_the_last_weights_equals_the_synchronous_collector() -> None:
    policy = ActorCritic.for_env(make_env("cartpole", 3))
    torch.manual_seed(3)
    expected = SyncCollector(make_env("cartpole", 3), policy, seed=5).collect(20)
    torch.manual_seed(3)
    with make(make_env("cartpole", 3), policy, seed=5, max_staleness=0) as collector:
        batch = collector.collect(20)
    assert set(batch.keys()) == {*expected.keys(), "policy_version"}
    for key in ("observation", "action", "reward", "value", "next_value", "sample_log_prob"):
        assert torch.equal(batch[key], expected[key]), key


def test_strictly_on_policy_training_equals_the_synchronous_one_but_for_rounding() -> None:
    weights = []
    for make_collector in (SyncCollector, partial(AsyncCollector, max_staleness=0)):
        torch.manual_seed(3)
        env = make_env("cartpole", 3)
        ppo = PPO(env, PPOConfig(num_steps=8), device="cpu")
        with make_collector(env, ppo.policy, keep=ppo.required_keys, seed=5) as collector:
            for _ in range(5):
                ppo.update(collector.collect(8))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in ppo.policy.parameters()]))
    # The copy's parameters lie elsewhere in memory than the optimizer's, and matrix products round accordingly.
    torch.testing.assert_close(*weights, rtol=0.0, atol=1e-4)


def test_episode_statistics_are_those_of_what_was_handed_out() -> None:
    # Episodes of 3 steps earn 6, of 5 steps 15; by step 16 they ended 5 and 3 times.
    env = TestEnv((3, 5))
    with make(env, queue_size=3, max_staleness=3) as collector:
        for _ in range(4):
            collector.collect(4)
            time.sleep(0.02)
        assert env.num_steps > 16
        assert collector.episode_metrics.totals["return"].tolist() == [5 * 6 + 3 * 15, 8]


def test_a_rollout_that_became_too_old_is_dropped_and_its_episodes_count() -> None:
    env = TestEnv((3,))
    env.go_on.clear()
    with make(env, max_staleness=0, step_timeout=0.05) as collector:
        with refused(EnvError, "TestEnv", "step_timeout"):
            collector.collect(3)
        env.go_on.set()
        wait_for(lambda: env.num_steps == 3)
        batch = collector.collect(3)  # its weights are version 1; the rollout under way has version 0
        assert batch["policy_version"].unique().tolist() == [1]
        assert batch["observation"][:, 0, 1].tolist() == [1, 1, 1]  # the second episode
        assert collector.metrics()["collect/dropped"] == 1
        assert collector.episode_metrics.totals["return"].tolist() == [12, 2]


def num_ready(collector: AsyncCollector) -> int:
    """Rollouts that are done and wait to be handed out."""
    thread: Any = collector._thread
    return len(thread.ready)


def test_what_was_collected_before_the_normaliser_was_warm_is_dropped() -> None:
    env = TestEnv()
    policy = ActorCritic.for_env(env, normalize_obs=True)
    with make(env, policy) as collector:
        first = collector.collect(4)
        wait_for(lambda: num_ready(collector) == 1)  # also with the policy that normalises nothing
        policy.update_normalizer(first["observation"])
        batch = collector.collect(4)
        assert batch["policy_version"].unique().tolist() == [1]
        assert collector.metrics()["collect/dropped"] == 1.0
        log_prob = policy.evaluate_actions(batch["observation"], batch["action"])[0]
        torch.testing.assert_close(log_prob, batch["sample_log_prob"])
        wait_for(lambda: num_ready(collector) == 1)
        assert collector.collect(4)["policy_version"].unique().tolist() == [1], "later rollouts are kept"


def test_another_number_of_steps_drops_what_was_collected_ahead() -> None:
    env = TestEnv((2,))
    with make(env) as collector:
        collector.collect(4)
        wait_for(lambda: env.num_steps == 8)
        assert collector.collect(6).shape == (6, 1)
        wait_for(lambda: env.num_steps == 20)
        assert collector.collect(6).shape == (6, 1)
        assert collector.metrics()["collect/dropped"] == 1
        assert collector.episode_metrics.totals["episode_len"].tolist() == [20, 10]  # the dropped four steps too


def test_reset_cuts_the_running_episodes() -> None:
    env = TestEnv((7,))
    with make(env) as collector:
        assert times(collector.collect(3)) == [0, 1, 2]
        assert times(collector.collect(3, reset=True)) == [0, 1, 2]
        assert times(collector.collect(3)) == [3, 4, 5]
        assert times(collector.collect(3)) == [6, 0, 1]
        assert collector.episode_metrics.totals["episode_len"].tolist() == [7, 1]


def test_restart_starts_from_the_seed() -> None:
    first = make_env("cartpole", 2).reset(seed=11)
    with make(make_env("cartpole", 2)) as collector:
        collector.collect(4)
        collector.restart(11)
        assert torch.equal(collector.collect(4)["observation"][0], first)
        assert not torch.equal(collector.collect(4)["observation"][0], first)


def test_keep_and_the_true_successors() -> None:
    with make(TestEnv((3,)), keep={"observation", "action", "next_observation"}) as collector:
        for _ in range(2):
            batch = collector.collect(3)
            assert "value" not in batch
            assert batch["next_observation"][:, 0, 0].tolist() == [1, 2, 3]


def test_a_recurrent_policy_carries_its_memory_through_the_thread() -> None:
    env = TestEnv((5,))
    policy = RecurrentActorCritic.for_env(env)
    ppo = PPO(policy=policy, cfg=PPOConfig(num_steps=4, num_epochs=1, num_minibatches=1))
    with make(env, policy, keep=ppo.required_keys) as collector:
        first, second = collector.collect(4), collector.collect(4)
        hidden = torch.cat((first["hidden"], second["hidden"]))[:, 0]
        assert [bool(row.any()) for row in hidden] == [False, True, True, True, True, False, True, True]
        assert "loss" in ppo.update(second)


# What goes wrong


def test_an_exception_of_the_thread_reaches_the_caller_every_time() -> None:
    env = TestEnv()
    env.fails_at = 7
    with make(env, queue_size=3, max_staleness=3) as collector:
        assert times(collector.collect(3)) == [0, 1, 2]
        wait_for(lambda: collecting_threads() == [])
        assert times(collector.collect(3)) == [3, 4, 5]  # whole, and before the failure
        for _ in range(2):
            with refused(ZeroDivisionError, "the simulator exploded") as caught:
                collector.collect(3)
            shown = "".join(traceback.format_exception(caught.value))
            assert 'raise ZeroDivisionError("the simulator exploded")' in shown  # the line in the environment
            assert "Raised in the thread of AsyncCollector, in rollout 3 with TestEnv." in shown
            assert shown.count("Raised in the thread") == 1
        with pytest.raises(ZeroDivisionError):
            collector.state_dict()


def test_an_exception_while_the_caller_waits_wakes_it() -> None:
    env = TestEnv()
    env.delay, env.fails_at = 0.02, 2
    with make(env, max_staleness=0) as collector, pytest.raises(ZeroDivisionError):
        collector.collect(5)


@pytest.mark.parametrize(
    "wait", [lambda c: c.collect(3), lambda c: c.quiet().__enter__()], ids=["in collect", "in quiet"]
)
def test_an_environment_that_hangs_is_named_and_close_still_returns(wait: Callable[[AsyncCollector], Any]) -> None:
    env = TestEnv()
    collector = make(env, step_timeout=0.1)
    collector.collect(3)
    wait_for(lambda: env.num_steps == 6)
    env.go_on.clear()
    collector.collect(3)
    wait_for(lambda: env.hangs)
    begin = time.monotonic()
    with refused(EnvError, "TestEnv", "hangs", "step_timeout", "0.1 s"):
        wait(collector)
    with refused(EnvError, "TestEnv", "step_timeout"):
        collector.collect(3)
    assert time.monotonic() - begin < 0.5
    begin = time.monotonic()
    collector.close()
    assert time.monotonic() - begin < 1.0
    env.go_on.set()


def test_many_short_steps_are_not_a_hang() -> None:
    env = TestEnv()
    env.delay = 0.01
    with make(env, step_timeout=0.3) as collector:
        assert collector.collect(50).shape == (50, 1)


@pytest.mark.parametrize(
    "options", [{"max_staleness": -1}, {"queue_size": 0}, {"step_timeout": 0.0}], ids=lambda o: next(iter(o))
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with refused(ConfigError, *next(iter(options.items()))):
        make(**options)


# Stopping


def test_close_in_the_middle_of_a_long_rollout_returns_at_once() -> None:
    env = TestEnv()
    env.delay, env.slow_from = 0.01, 1000
    collector = make(env)
    collector.collect(1000)
    wait_for(lambda: env.num_steps > 1000)  # this rollout would take 10 s
    begin = time.monotonic()
    collector.close()
    collector.close()
    assert time.monotonic() - begin < 1.0
    assert collecting_threads() == []
    with refused(EnvError, "AsyncCollector", "closed"):
        collector.collect(1000)
    with refused(EnvError, "AsyncCollector", "closed"):
        collector.state_dict()


def test_a_collector_that_nobody_holds_ends_its_thread() -> None:
    env = TestEnv()
    collector = make(env)
    collector.collect(3)
    assert len(collecting_threads()) == 1
    del collector
    wait_for(lambda: collecting_threads() == [])


def test_no_thread_before_the_first_collect() -> None:
    with make() as collector:
        assert collecting_threads() == []
        with collector.quiet():
            assert collector.state_dict()["carry"] == {}


# Standing still


def test_the_environments_stand_still_inside_quiet() -> None:
    env = TestEnv()
    env.delay = 0.002
    with make(env, queue_size=3, max_staleness=3) as collector:
        collector.collect(10)
        wait_for(lambda: env.num_steps > 10)
        with collector.quiet():
            with collector.quiet():
                pass
            assert env.num_steps == 20  # the running rollout has ended
            time.sleep(0.05)
            assert env.num_steps == 20
            with refused(RuntimeError, "quiet"):
                collector.collect(10)
        assert times(collector.collect(10)) == list(range(10, 20))
        assert times(collector.collect(10)) == list(range(20, 30))


def test_a_saved_state_goes_on_after_what_was_collected_and_counts_whole_episodes() -> None:
    env = TestEnv((7,))
    with make(env) as collector:
        collector.collect(5)
        wait_for(lambda: env.num_steps == 10)  # one rollout was handed out, one will be lost
        state = collector.state_dict()
        env_state = env.state_dict()
    other_env = TestEnv((7,))
    with make(other_env) as other:
        other.collect(5)
        with other.quiet():
            other_env.load_state_dict(env_state)
            other.load_state_dict(state)
        batch = other.collect(5)
        assert times(batch) == [3, 4, 5, 6, 0]
        assert batch["policy_version"].unique().tolist() == [1]
        # 1 + ... + 7, twice: the episode that ended in the lost rollout, and the one that was under way.
        assert other.episode_metrics.totals["return"].tolist() == [56, 2]


def test_states_go_from_and_to_the_synchronous_collector() -> None:
    env = TestEnv((7,))
    sync = SyncCollector(env, ActorCritic.for_env(env))
    sync.collect(4)
    with make(env) as collector:
        collector.load_state_dict(sync.state_dict())
        assert times(collector.collect(4)) == [4, 5, 6, 0]
        wait_for(lambda: env.num_steps == 12)
        state = collector.state_dict()
    sync.load_state_dict(state)
    assert times(sync.collect(2)) == [5, 6]


# With the trainer


class Memory(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, values: Any) -> None:
        self.lines.append(dict(values))


def make_trainer(env: VecEnv, ahead: int = 1, **options: Any) -> tuple[Trainer, Memory]:
    torch.manual_seed(0)
    policy = ActorCritic.for_env(env, actor_cfg={"hidden_dims": (8,)}, critic_cfg={"hidden_dims": (8,)})
    ppo = PPO(policy=policy, cfg=PPOConfig(num_steps=8, num_epochs=2, num_minibatches=2))
    collector = AsyncCollector(env, policy, keep=ppo.required_keys, seed=0, queue_size=ahead, max_staleness=ahead)
    memory = Memory()
    return Trainer(
        env, policy, ppo, TrainingConfig(eval_num_envs=2), collector=collector, loggers=[memory], **options
    ), memory


def test_the_trainer_logs_how_the_two_sides_keep_pace() -> None:
    env = TestEnv()
    env.delay = 0.001
    trainer, memory = make_trainer(env, log_interval=2)
    trainer.add_callback("pre_update", lambda _: time.sleep(0.015))
    trainer.learn(8 * 6)
    trainer.close()
    assert [line["iteration"] for line in memory.lines] == [1, 2, 4, 6]
    for line in memory.lines[1:]:
        assert line["collect/staleness"] == 1
        assert line["collect/dropped"] == 0
        assert line["collect/queue"] in (0, 1)
        assert 0.3 < line["collect/overlap"] <= 1
    sync = Trainer(env, trainer.policy, trainer.algorithm, loggers=[memory])
    sync.learn(8)
    assert not [name for name in memory.lines[-1] if name.startswith("collect/")]


def test_without_overlap_the_log_says_so() -> None:
    env = TestEnv()
    env.delay = 0.001
    with make(env, max_staleness=0) as collector:
        collector.collect(8)
        numbers = collector.metrics()
        assert numbers["collect/staleness"] == 0
        assert numbers["collect/overlap"] == 0
        assert set(collector.metrics()) == {"collect/queue", "collect/dropped"}  # nothing since


def test_evaluation_holds_the_training_environments() -> None:
    env = TestEnv((4, 4))
    env.delay = 0.002
    trainer, _ = make_trainer(env, ahead=4)
    seen: list[int] = []

    def watch(_: int) -> None:
        for _ in range(3):
            time.sleep(0.01)
            seen.append(env.num_steps)

    trainer.add_callback("pre_update", lambda _: trainer.evaluate(2, on_progress=watch))
    trainer.learn(16)
    trainer.close()
    assert len(seen) > 1
    assert len(set(seen)) == 1
    assert seen[0] % 8 == 0


def test_a_checkpoint_holds_environment_and_collector_of_the_same_moment(tmp_path: Path) -> None:
    env = TestEnv()
    env.delay = 0.002
    trainer, _ = make_trainer(env, ahead=4, save_dir=tmp_path)
    trainer.add_callback("pre_update", lambda _: trainer.save_checkpoint("now.pt"))
    trainer.learn(8)
    trainer.close()
    saved = torch.load(tmp_path / "now.pt", weights_only=True)
    assert saved["env"]["time"].tolist() == saved["collector"]["carry"]["observation"][:, 0].tolist()


def test_a_checkpoint_that_does_not_fit_leaves_environment_and_collector_together(tmp_path: Path) -> None:
    other, _ = make_trainer(make_env("cartpole", 1))
    other.save_checkpoint(tmp_path / "other.pt")
    env = TestEnv()
    env.delay = 0.002
    trainer, _ = make_trainer(env, ahead=4)
    trainer.learn(8)
    with refused(CheckpointError, tmp_path / "other.pt", "policy"):
        trainer.load_checkpoint(tmp_path / "other.pt")
    place = env.num_steps
    assert times(trainer.collector.collect(8))[0] == place
    trainer.close()


@pytest.mark.parametrize("task", ["cartpole", "CartPole-v1"])
def test_training_resumes_from_a_checkpoint(task: str, tmp_path: Path) -> None:
    trainer, _ = make_trainer(make_env(task, 2), save_dir=tmp_path)
    trainer.learn(8 * 2 * 5)
    trainer.close()
    saved = torch.load(tmp_path / "iteration_000005.pt", weights_only=True)
    assert saved["collector"]["version"] == 4
    resumed, memory = make_trainer(make_env(task, 2), save_dir=tmp_path)
    resumed.learn(8 * 2 * 2)
    resumed.load_checkpoint("iteration_000005.pt")
    batches: list[Any] = []
    collect = resumed.collector.collect
    resumed.collector.collect = lambda *a: (batches.append(collect(*a)), batches[-1])[1]  # type: ignore[func-returns-value,method-assign]
    resumed.learn(8 * 2 * 8)
    resumed.close()
    assert torch.equal(batches[0]["observation"][0], saved["collector"]["carry"]["observation"])
    first, second, third = (int(batch["policy_version"][0, 0, 0]) for batch in batches)
    assert first == 5
    assert 5 <= second <= 6 <= third <= 7
    assert memory.lines[-1]["iteration"] == 8


def test_a_trainer_stopped_by_an_exception_leaves_no_thread() -> None:
    env = TestEnv()
    trainer, _ = make_trainer(env)
    trainer.add_callback("post_update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.learn(80)
    trainer.close()
    assert collecting_threads() == []


def test_the_trainer_shows_where_the_environment_failed(tmp_path: Path) -> None:
    env = TestEnv()
    env.fails_at = 20
    trainer, _ = make_trainer(env, save_dir=tmp_path)
    with refused(ZeroDivisionError, "exploded"):
        trainer.learn(800)
    assert trainer.iteration == 2
    trainer.close()


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_learns_cartpole_from_rollouts_of_the_last_weights(seed: int) -> None:
    torch.manual_seed(seed)
    env = make_env("CartPole-v1", 8)
    policy = ActorCritic.for_env(env)
    cfg = PPOConfig(
        num_steps=128, num_epochs=10, num_minibatches=8, learning_rate=5e-4, schedule="linear", entropy_coef=0.0
    )
    ppo = PPO(policy=policy, cfg=cfg)
    collector = AsyncCollector(env, policy, keep=ppo.required_keys, seed=seed)
    trainer = Trainer(env, policy, ppo, TrainingConfig(seed=seed, eval_num_envs=8), collector=collector)
    trainer.learn(100_000)
    result = trainer.evaluate(40)
    trainer.close()
    assert result.mean("return") >= 475


# Groups of episodes of a task suite


def suite_env(suite: PointSuite | None = None) -> SuiteVecEnv:
    return SuiteVecEnv(suite or PointSuite(), 4, chunk=5, num_workers=0)


def suite_policy(env: SuiteVecEnv) -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic.for_env(env, actor_cfg={"groups": ["state"]}, critic_cfg={"groups": ["state"]})


def test_of_a_suite_it_collects_the_groups_that_a_generator_does() -> None:
    env = suite_env()
    policy = suite_policy(env)
    collector = AsyncCollector(env, policy, torch.device("cpu"), seed=3, max_staleness=0)
    torch.manual_seed(1)
    found = [collector.collect(8) for _ in range(2)]
    steps = collector.steps_in(found[-1])
    metrics = collector.metrics()
    collector.close()
    other = suite_env()
    generator = RolloutGenerator(SuiteRunner(other, policy), seed=3)
    torch.manual_seed(1)
    for version, batch in enumerate(found):
        expected = generator.collect()
        assert set(batch.keys()) == {*expected.keys(), "policy_version"}
        assert (batch.select(*expected.keys()) == expected).all()
        assert batch["policy_version"].unique().tolist() == [version]
    assert steps == generator.steps_in(expected)
    assert {name: metrics[name] for name in ("collect/episodes", "collect/groups_valid", "collect/control_steps")} == {
        "collect/episodes": 64,
        "collect/groups_valid": 8,
        "collect/control_steps": steps,
    }
    for name, mean in generator.episode_metrics.means().items():
        assert torch.equal(collector.episode_metrics.means()[name], mean), name
    # Where values are wanted, it takes steps there too.
    steps_of = AsyncCollector(other, policy, keep=PPO.required_keys)
    assert steps_of.collect(3).shape == (3, 4)
    steps_of.close()


def test_rloo_learns_from_groups_of_the_policy_before() -> None:
    env = suite_env()
    policy = suite_policy(env)
    messages: list[str] = []
    generator = RolloutGenerator(SuiteRunner(env, policy), 4, 3, on_message=messages.append)
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(rloo_batch_size=4, num_groups=3, num_epochs=1, learning_rate=1e-3))
    collector = AsyncCollector(env, policy, generator=generator, max_staleness=1)
    assert generator.policy is not policy
    trainer = Trainer(env, policy, algorithm, TrainingConfig(num_train_steps=5), collector=collector)
    versions: list[int] = []
    steps: list[float] = []
    update = algorithm.update

    def spy(rollout: Any) -> dict[str, Tensor]:
        versions.append(int(rollout["policy_version"].unique()))
        steps.append(rollout["info", "control_steps"].sum().item())
        return update(rollout)

    algorithm.update = spy  # type: ignore[method-assign]
    trainer.learn()
    saved = trainer.collector.state_dict()
    trainer.close()
    assert [newest - 1 <= version <= newest for newest, version in enumerate(versions)] == [True] * 5
    assert versions == sorted(versions)
    assert trainer.total_steps == sum(steps)
    assert any(message.startswith("Created ") for message in messages)
    # A generator alone goes on from there: after five batches, and at most one that was never handed out.
    assert saved["sampler"]["num_drawn"] in (15, 18)
    generator.load_state_dict(saved)


class SlowSimulator(PointSimulator):
    """Takes 5 ms for a step, and is never there."""

    def advance(self, action: NDArray[np.float32]) -> bool:
        time.sleep(0.005)
        super().advance(action)
        return False


class SlowSuite(PointSuite):
    def make_simulator(self, task_id: int) -> Simulator:
        return SlowSimulator(GOALS[task_id], self.radius)


def test_groups_are_left_in_the_middle_when_the_collector_is_closed() -> None:
    env = SuiteVecEnv(SlowSuite(), 2, chunk=5, num_workers=0, max_steps=4000)  # an episode takes 20 s
    generator = RolloutGenerator(SuiteRunner(env, policy := suite_policy(env)))
    collector = AsyncCollector(env, policy, generator=generator)
    raised: list[BaseException] = []

    def collect() -> None:
        try:
            collector.collect(1)
        except EnvError as error:
            raised.append(error)

    caller = threading.Thread(target=collect)
    caller.start()
    while not env.counts.created:  # the first episodes run
        time.sleep(0.01)
    collector.close()
    caller.join(10.0)
    assert [str(error) for error in raised] == ["The AsyncCollector is closed."]


def test_a_generator_of_other_environments_is_refused() -> None:
    env, other = suite_env(), suite_env()
    policy = suite_policy(env)
    with refused(ConfigError, "AsyncCollector", "generator.env"):
        AsyncCollector(env, policy, generator=RolloutGenerator(SuiteRunner(other, policy)))
