"""Collection in Ray actors, with a real Ray on this machine: what is handed out, and what happens when workers die."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from tests.scripted import ScriptedEnv
from torch import Tensor, nn

from apexrl import PPO, SAC, ActorCritic, Policy, PolicyOutput, PPOConfig, RecurrentActorCritic, Trainer, make_env
from apexrl.agent import TrainingConfig
from apexrl.algorithms import SACConfig
from apexrl.cli.main import main
from apexrl.collectors import SyncCollector
from apexrl.collectors.ray import workers as ray_workers
from apexrl.collectors.ray.collector import RayCollector
from apexrl.collectors.ray.session import RaySession, pack, side_by_side_arrays
from apexrl.core.errors import ConfigError, EnvError
from apexrl.core.metrics import MetricSpec
from apexrl.core.system.files import read_json_lines
from apexrl.core.system.seeding import ENV, POLICY, spawn_seed
from apexrl.core.types import Carry, EnvStep
from apexrl.envs import VecEnv

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'apexrl[ray]')")

EPISODE = 5
"""Steps of an episode of the counting environments; it earns 1 + 2 + 3 + 4 + 5 = 15."""


class CountingEnv(ScriptedEnv):
    """Two environments; the observation holds the step of the episode and the process that counts it.

    An action above 10 raises, one below -10 kills the process, and one of exactly -10 hangs.
    """

    def __init__(self) -> None:
        super().__init__([EPISODE] * 2, [True] * 2)

    def step(self, action: Tensor) -> EnvStep:
        time.sleep(0.005)  # so that workers are in the middle of a rollout when they are looked at
        if action.max() > 10:
            raise ZeroDivisionError("the simulator exploded")
        if action.min() < -10:
            os._exit(1)
        if action.min() == -10:
            time.sleep(60)
        return super().step(action)

    def _observe(self) -> Tensor:
        self.buffer[:, 0] = self.time
        self.buffer[:, 1] = os.getpid()
        return self.buffer


class LateMetricEnv(CountingEnv):
    """Declares and reports ``success`` only from the second episode on, in one of its two environments."""

    @property
    def metric_specs(self) -> dict[str, MetricSpec]:
        return {"success": MetricSpec("success")} if len(self.actions) > EPISODE else {}

    def step(self, action: Tensor) -> EnvStep:
        is_end = int(self.time[0]) == EPISODE - 1 and int(self.episode[0]) > 0
        step = super().step(action)
        return step._replace(metric={"success": torch.tensor([[1.0], [torch.nan]])} if is_end else {})


class NumberPolicy(Policy):
    """Acts with its one parameter."""

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor([number]))

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        return {"action": self.number.expand(len(carry["observation"]), 1)}

    def forward(self, obs: Tensor, deterministic: bool = False) -> PolicyOutput:
        raise NotImplementedError

    def evaluate_actions(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def get_value(self, obs: Tensor) -> Tensor:
        return self.number.expand(*obs.shape[:-1], 1)

    def teach(self, number: float) -> None:
        self.number.data.fill_(number)


@pytest.fixture(scope="module", autouse=True)
def _one_ray() -> Iterator[None]:
    # Workers know the classes of this module from what they are sent: they cannot import it.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    session = RaySession(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_workers, "ROOM_SECONDS", 600.0)  # a busy machine is slow to start workers
        yield
    session.leave()
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def shared_collector() -> Iterator[tuple[RayCollector, dict[str, Any]]]:
    """Return a collector with two workers, and its state when it was new."""
    with RayCollector(CountingEnv, NumberPolicy(), num_workers=2, seed=0) as collector:
        yield collector, collector.state_dict()


@pytest.fixture
def counting(shared_collector: tuple[RayCollector, dict[str, Any]]) -> RayCollector:
    """Two workers at the start of their episodes, as if they were new; what was lost and dropped is counted on."""
    collector, new = shared_collector
    collector.follow(NumberPolicy())
    collector.load_state_dict(new)
    collector.restart(0)
    collector.episode_metrics.clear()
    collector.metrics()
    return collector


def process_of(batch: TensorDict, column: int) -> int:
    """Return the process that collected a column."""
    (process,) = batch["observation"][:, column, 1].unique().tolist()
    return int(process)


# How a rollout travels


def test_a_batch_travels_without_loss_and_successors_are_sent_only_where_episodes_end() -> None:
    env = ScriptedEnv([3, 4, 9], [True, False, True])
    collector = SyncCollector(env, ActorCritic.for_env(env), seed=0)
    collector.start()
    batch = collector.take_steps(8)
    arrays = pack(batch)
    # Two ends of environment 0, two of environment 1 (the second is the last step), and the last steps of 0 and 2.
    assert arrays["next_observation",].shape == (6, 2)
    joined = side_by_side_arrays([arrays])
    for key, value in batch.items(include_nested=True, leaves_only=True):
        torch.testing.assert_close(joined[key], value, rtol=0, atol=0, equal_nan=True)
    assert set(joined.keys(include_nested=True)) == set(batch.keys(include_nested=True))


def test_rollouts_lie_side_by_side_and_a_metric_that_one_lacks_is_unknown_there() -> None:
    parts = []
    for lengths in ([3], [2, 8]):
        env = ScriptedEnv(lengths, [True] * len(lengths))
        collector = SyncCollector(env, ActorCritic.for_env(env), keep={"next_observation", "observation"})
        collector.start()
        parts.append(pack(collector.take_steps(4)))
    del parts[0]["metric", "odd"]
    batch = side_by_side_arrays(parts)
    assert batch.shape == (4, 3)
    assert batch["reward"][..., 0].T.tolist() == [[1, 2, 3, 1], [1, 2, 1, 2], [1, 2, 3, 4]]
    assert batch["next_observation"][..., 0].T.tolist() == [[1, 2, 3, 1], [1, 2, 1, 2], [101, 102, 103, 104]]
    assert batch["metric", "odd"][:, 0].isnan().all()
    assert batch["metric", "odd"][:, 2, 0].tolist() == [1, 0, 1, 0]


# What is handed out


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_each_rollout_comes_once_in_order_with_its_version_and_none_is_too_old(
    counting: RayCollector, max_staleness: int
) -> None:
    policy, before = counting.policy, counting.metrics()
    assert isinstance(policy, NumberPolicy)
    counting.max_staleness = max_staleness
    for call in range(6):
        policy.teach(float(call))
        batch = counting.collect(3)
        assert batch.shape == (3, 4)
        steps = [(3 * call + t) % EPISODE for t in range(3)]
        assert batch["observation"][:, :, 0].T.tolist() == [steps] * 4
        version = max(0, call - max_staleness)
        assert batch["policy_version"].dtype == torch.int64
        assert (batch["policy_version"] == version).all()
        assert (batch["action"] == version).all()  # by the weights that it is stamped with
        assert (batch["value"] == call).all()  # by the learner's own
    assert len({os.getpid(), process_of(batch, 0), process_of(batch, 2)}) == 3
    assert counting.metrics() == {
        **before,  # nothing was lost or dropped
        "collect/staleness": pytest.approx(sum(min(call, max_staleness) for call in range(6)) / 6),
        "collect/worker_seconds": pytest.approx(0.0, abs=1.0),
    }
    # 18 steps: three episodes of each of the four environments have ended.
    assert counting.episode_metrics.totals["return"].tolist() == [12 * 15, 12]


def test_another_length_drops_what_was_ordered_ahead_and_reset_cuts_the_episodes(counting: RayCollector) -> None:
    counting.max_staleness = 1
    dropped = counting.metrics()["collect/dropped"]
    counting.collect(3)
    batch = counting.collect(4)  # after three steps that were dropped
    assert batch["observation"][:, 0, 0].tolist() == [1, 2, 3, 4]
    assert counting.metrics()["collect/dropped"] == dropped + 2
    assert counting.episode_metrics.totals["episode_len"].tolist() == [4 * 10, 8]
    # Four steps that were dropped, and then new episodes: the cut ones count nowhere.
    assert counting.collect(4, reset=True)["observation"][:, 0, 0].tolist() == [0, 1, 2, 3]
    assert counting.collect(4)["observation"][:, 0, 0].tolist() == [4, 0, 1, 2]
    assert counting.episode_metrics.totals["episode_len"].tolist() == [4 * 15, 12]


def test_what_was_collected_before_the_normaliser_was_warm_is_dropped() -> None:
    policy = ActorCritic.for_env(make_env("pendulum", 1), normalize_obs=True)
    with RayCollector(partial(make_env, "pendulum", 2), policy, num_workers=1, seed=0) as collector:
        policy.update_normalizer(collector.collect(4)["observation"])
        versions = [collector.collect(4)["policy_version"].unique().tolist() for _ in range(3)]
        # Of the first version one more was ordered, which is dropped; later ones come one call late, as ever.
        assert versions == [[1], [1], [2]]
        assert collector.metrics()["collect/dropped"] == 1.0


def test_workers_have_the_priority_of_the_learner(counting: RayCollector) -> None:
    worker = process_of(counting.collect(2), 0)
    assert os.getpriority(os.PRIO_PROCESS, worker) == os.getpriority(os.PRIO_PROCESS, 0)


def test_it_acts_with_the_policy_that_it_follows(counting: RayCollector) -> None:
    counting.max_staleness = 1
    counting.collect(2)
    counting.follow(NumberPolicy(7.0))
    assert (counting.collect(2)["action"] == 7).all()


def test_a_worker_collects_what_the_synchronous_collector_does_with_its_seed() -> None:
    policy = RecurrentActorCritic.for_env(make_env("cartpole", 2))
    options: dict[str, Any] = {"num_workers": 2, "seed": 5, "max_staleness": 0}
    with RayCollector(partial(make_env, "cartpole", 2), policy, **options) as collector:
        batches = [collector.collect(20), collector.collect(20)]
        collector.restart(5)
        again = collector.collect(20)
        collector.restart(6)
        other = collector.collect(20)
        collector.load_state_dict(collector.state_dict())
        resumed = collector.collect(20)
        collector.load_state_dict(SyncCollector(make_env("cartpole", 2), policy).state_dict())
        assert (collector.collect(4)["policy_version"] == 0).all()
    for worker in (0, 1):
        seed = spawn_seed(5, worker, 0)
        expected = SyncCollector(make_env("cartpole", 2), policy, seed=spawn_seed(seed, ENV))
        torch.manual_seed(spawn_seed(seed, POLICY))
        for batch in batches:
            part = expected.collect(20)
            for key in ("observation", "action", "reward", "value", "next_value", "sample_log_prob", "hidden"):
                torch.testing.assert_close(batch[key][:, 2 * worker : 2 * worker + 2], part[key], rtol=0, atol=1e-5)
    assert torch.equal(again["observation"], batches[0]["observation"])
    assert not torch.equal(other["observation"][0], batches[0]["observation"][0])
    assert not torch.equal(resumed["observation"][0], other["observation"][0])  # not the same episodes over again
    assert (resumed["policy_version"] == 4).all()
    assert not torch.equal(other["observation"][0, :2], other["observation"][0, 2:])


# With the trainer


def test_training_goes_on_when_a_worker_is_killed_and_one_rollout_is_lost(counting: RayCollector) -> None:
    env, messages, lost = CountingEnv(), list[str](), counting.metrics()["collect/lost_rollouts"]
    ppo = PPO(env, PPOConfig(num_steps=12, num_epochs=1, num_minibatches=1), device="cpu")
    counting.max_staleness, counting.on_message = 1, messages.append
    counting.follow(ppo.policy)
    trainer = Trainer(env, ppo.policy, ppo, TrainingConfig(save_interval=0), collector=counting, log_interval=100)
    seen: list[TensorDict] = []
    totals: list[dict[str, Tensor]] = []

    def update(batch: TensorDict) -> dict[str, Tensor]:
        seen.append(batch)
        if len(seen) in (1, 8):  # the iterations that are logged, after which the totals begin again
            totals.append({name: value.clone() for name, value in counting.episode_metrics.totals.items()})
        if len(seen) == 3:
            os.kill(process_of(batch, 2), signal.SIGKILL)  # in its fourth rollout, or in its fifth if this came late
        return PPO.update(ppo, batch)

    ppo.update = update  # type: ignore[method-assign, assignment]
    trainer.learn(8 * 12 * 4)

    assert trainer.iteration == 8
    assert [batch.shape for batch in seen] == [(12, 4)] * 8
    assert counting.metrics()["collect/lost_rollouts"] == lost + 1
    assert len(messages) == 1
    assert messages[0].startswith("Ray worker 1 died")
    # The worker that lives has lost nothing; after three or four batches a new one is in the place of the dead one.
    assert torch.cat([batch["observation"][:, 0, 0] for batch in seen]).tolist() == [t % EPISODE for t in range(96)]
    assert len({process_of(batch, 0) for batch in seen}) == 1
    processes = [process_of(batch, 2) for batch in seen]
    first_new = processes.index(processes[-1])
    assert first_new in (3, 4)
    assert processes == [processes[0]] * first_new + [processes[-1]] * (8 - first_new)
    assert seen[first_new]["observation"][:2, 2, 0].tolist() == [0, 1]
    # 96 steps are 19 episodes; 36 are 7, with one that was cut and counts nowhere, and 60 are 12 (or, a rollout later,
    # 48 are 9 and 48 are 9). Twice each.
    num_episodes = 2 * (96 // EPISODE + 12 * first_new // EPISODE + 12 * (8 - first_new) // EPISODE)
    lengths, successes = (sum(each[name] for each in totals) for name in ("episode_len", "success_once"))
    assert torch.as_tensor(lengths).tolist() == [num_episodes * EPISODE, num_episodes]
    assert torch.as_tensor(successes).tolist() == [num_episodes, num_episodes]


def test_sac_learns_through_ray_and_a_checkpoint_says_what_it_lacks(tmp_path: Path) -> None:
    env, messages = CountingEnv(), list[str]()
    sac = SAC(env, SACConfig(num_steps=8, batch_size=16, learning_starts=32, utd_ratio=0.25), device="cpu")
    policy, keep = sac.rollout_policy, sac.required_keys
    collector = RayCollector(CountingEnv, policy, num_workers=1, keep=keep, on_message=messages.append)
    trainer = Trainer(env, sac.policy, sac, TrainingConfig(save_interval=1), collector=collector, save_dir=tmp_path)
    before = [parameter.detach().clone() for parameter in sac.policy.parameters()]
    trainer.learn(64)
    trainer.close()
    assert trainer.iteration == 4
    assert any(not torch.equal(a, b) for a, b in zip(before, sac.policy.parameters(), strict=True))
    assert messages == ["Ray workers cannot save their state: a resumed run will start new episodes there."]


# What goes wrong


class ThreeMethods(Policy):
    """A policy as the documents write one."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, obs: Tensor, deterministic: bool = False) -> PolicyOutput:
        action = torch.distributions.Normal(self.actor(obs), 1.0).sample()
        return PolicyOutput(action, self.evaluate_actions(obs, action)[0], self.get_value(obs))

    def evaluate_actions(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        normal = torch.distributions.Normal(self.actor(obs), 1.0)
        return normal.log_prob(action), normal.entropy()

    def get_value(self, obs: Tensor) -> Tensor:
        value: Tensor = self.critic(obs)
        return value


def test_a_policy_of_the_documents_three_methods_learns_under_ppo() -> None:
    env, policy = make_env("pendulum", 4), ThreeMethods()
    before = policy.critic.weight.clone()
    collector = RayCollector(partial(make_env, "pendulum", 4), policy, num_workers=1)
    trainer = Trainer(env, policy, PPO(policy=policy, cfg=PPOConfig(num_steps=8)), collector=collector)
    try:
        trainer.learn(64)
    finally:
        trainer.close()
    assert not torch.equal(policy.critic.weight, before)


def test_metrics_that_appear_later_in_a_worker_are_counted() -> None:
    with RayCollector(LateMetricEnv, NumberPolicy(), num_workers=2, seed=0) as collector:
        collector.collect(EPISODE)
        assert "success_once" not in collector.episode_metrics.means()
        collector.collect(EPISODE)
        # Of two rounds of four episodes, two episodes of the second one reported it: 2 of 8.
        assert collector.episode_metrics.means()["success_once"].item() == 0.25


def test_what_an_environment_raises_reaches_the_caller_every_time() -> None:
    with RayCollector(CountingEnv, NumberPolicy(11.0), num_workers=1, max_staleness=0) as collector:
        for _ in range(2):
            with refused(ZeroDivisionError, "the simulator exploded") as caught:
                collector.collect(3)
            assert caught.value.__notes__ == ["Raised in Ray worker 0."]
    with refused(EnvError, "RayCollector", "closed"):
        collector.collect(3)


@pytest.mark.parametrize(
    ("action", "timeout", "named"), [(-11.0, 600.0, ("died",)), (-10.0, 3.0, ("3 s",))], ids=["die", "hang"]
)
def test_workers_that_die_or_hang_again_and_again_end_the_run(
    monkeypatch: pytest.MonkeyPatch, action: float, timeout: float, named: tuple[str, ...]
) -> None:
    monkeypatch.setattr(ray_workers, "MAX_LOST_ACTORS", 2)
    messages: list[str] = []
    options: dict[str, Any] = {"rollout_timeout": timeout, "on_message": messages.append}
    with RayCollector(CountingEnv, NumberPolicy(action), num_workers=1, **options) as collector:
        with refused(EnvError, "2 Ray workers", "place 0", *named):
            collector.collect(3)
        assert collector.metrics()["collect/lost_rollouts"] == 2
    assert len(messages) == 1


def test_a_lost_worker_that_finds_no_room_is_told_from_one_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, resources = list[str](), dict[str, float]()
    options: dict[str, Any] = {"worker_options": {"resources": resources}, "on_message": messages.append}
    with RayCollector(CountingEnv, NumberPolicy(), num_workers=1, **options) as collector:
        pid = process_of(collector.collect(3), 0)
        messages.clear()
        monkeypatch.setattr(ray_workers, "ROOM_SECONDS", 0.5)
        monkeypatch.setattr(ray_workers, "START_SECONDS", (1.0, 2.0))
        # As if its host had died with what only that one had.
        resources["arm"] = 1
        os.kill(pid, signal.SIGKILL)
        with refused(EnvError, "0 of 1", "2 s", "1 arm (0 of 0 free)"):
            collector.collect(3)
        assert collector.metrics()["collect/lost_rollouts"] == 1
    assert messages[0].startswith("Ray worker 0 died")
    assert messages[1].startswith("0 of 1 new Ray workers started within 0.5 s. Each needs 1 CPU (")


def test_a_resumed_run_is_told_that_it_starts_new_episodes() -> None:
    messages: list[str] = []
    with RayCollector(CountingEnv, NumberPolicy(), num_workers=1, on_message=messages.append) as collector:
        unused = collector.state_dict()
        collector.collect(3)
        used = collector.state_dict()
        collector.load_state_dict(unused)
        assert len(messages) == 1  # of the checkpoint
        collector.load_state_dict(used)
    assert messages[1:] == ["Ray workers start new episodes, so this run will differ from an uninterrupted one."]


def test_what_the_factory_raises_reaches_the_caller() -> None:
    with refused(EnvError, "nowhere"):
        RayCollector(partial(make_env, "nowhere", 2), NumberPolicy(), num_workers=1)


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"max_staleness": -1}, {"rollout_timeout": 0.0}], ids=lambda o: next(iter(o))
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with refused(ConfigError, f"RayCollector.{name}", value):
        RayCollector(CountingEnv, NumberPolicy(), **options)


def test_a_factory_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def make() -> VecEnv:
        with lock:
            return CountingEnv()

    with refused(ConfigError, "make_env", "functools.partial"):
        RayCollector(make, NumberPolicy())


def test_workers_for_which_there_is_no_room_at_the_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "ROOM_SECONDS", 0.5)
    monkeypatch.setattr(ray_workers, "START_SECONDS", (1.0, 1.0))
    with refused(EnvError, "0 of 2", "1 s", "99 CPU"):
        RayCollector(CountingEnv, NumberPolicy(), num_workers=2, worker_options={"num_cpus": 99})
    assert ray.is_initialized()  # for the other collectors


def test_an_address_where_there_is_no_ray_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with refused(ConfigError, "RAY_ADDRESS=127.0.0.1:1", "refused"):
        RaySession(1)


def test_a_run_collects_with_ray_by_its_configuration(tmp_path: Path) -> None:
    options = {
        "training.collector": "ray",
        "training.total_timesteps": "64",
        "training.final_eval_episodes": "0",
        "algo.num_steps": "8",
        "algo.num_minibatches": "2",
        "features.save_video": "false",
        "features.save_plot": "false",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    run_dir = tmp_path / "run"
    assert main(["train", "cartpole_ppo", "--task.num_envs", "4", "--run-dir", str(run_dir), *arguments]) == 0
    assert [line["total_steps"] for line in read_json_lines(run_dir / "metrics.jsonl")] == [32, 64]
    assert main(["train", "--resume", str(run_dir), "--training.collector", "sync"]) == 2
    assert main(["train", "cartpole_ppo", "--task.num_envs", "3", "--run-dir", str(tmp_path / "no"), *arguments]) == 2
    assert not (tmp_path / "no").exists()
