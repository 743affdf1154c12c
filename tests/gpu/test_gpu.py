"""On a CUDA device: graphs compute what eager code computes, resume exactly, and fall back when they must."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from apexrl import PPO, ActorCritic, PPOConfig, RecurrentActorCritic, SyncCollector, Trainer, make_env
from apexrl.agent import TrainingConfig
from apexrl.graphs import Acceleration, Captured

pytestmark = pytest.mark.gpu


def make_trainer(
    task: str, acceleration: Acceleration, save_dir: Path | None = None, recurrent: bool = False
) -> Trainer:
    torch.manual_seed(0)
    env = make_env(task, 64, device="cuda")
    kind = RecurrentActorCritic if recurrent else ActorCritic
    policy = kind.for_env(env, normalize_obs=True).cuda()
    cfg = PPOConfig(num_steps=16, schedule="adaptive", normalize_reward=True)
    algorithm = PPO(policy=policy, cfg=cfg, acceleration=acceleration)
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=0, acceleration=acceleration)
    return Trainer(env, policy, algorithm, TrainingConfig(save_interval=6), collector=collector, save_dir=save_dir)


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])


@pytest.mark.parametrize(
    ("task", "recurrent"), [("lift", False), ("cartpole", False), ("pendulum", False), ("recall", True)]
)
def test_graphs_equal_eager(task: str, recurrent: bool) -> None:
    runs = []
    for acceleration in (Acceleration(graphs=False), Acceleration()):
        trainer = make_trainer(task, acceleration, recurrent=recurrent)
        stats: list[dict[str, float]] = []
        trainer.add_callback("post_iteration", lambda _, s, stats=stats: stats.append(s))
        trainer.learn(10 * 16 * 64)
        runs.append((weights(trainer), [{k: v for k, v in s.items() if not k.startswith("time/")} for s in stats]))
        if acceleration.graphs:
            assert isinstance(trainer.collector, SyncCollector)
            captured = trainer.collector._captured[16]
            assert captured.enabled
            assert any(entry.graph is not None for entry in captured.entries.values())
            assert isinstance(trainer.algorithm, PPO)
            assert any(entry.graph is not None for entry in trainer.algorithm._captured_epoch.entries.values())
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-4, atol=1e-5)
    assert [s.keys() for s in runs[0][1]] == [s.keys() for s in runs[1][1]]
    for eager, graph in zip(runs[0][1], runs[1][1], strict=True):
        assert graph["rollout/mean_reward"] == pytest.approx(eager["rollout/mean_reward"], rel=1e-3, abs=1e-4)


def test_resume_continues_a_captured_run(tmp_path: Path) -> None:
    whole = make_trainer("lift", Acceleration())
    whole.learn(12 * 16 * 64)
    first = make_trainer("lift", Acceleration(), tmp_path)
    first.learn(6 * 16 * 64)
    second = make_trainer("lift", Acceleration(), tmp_path)
    second.load_checkpoint("iteration_000006.pt")
    second.learn(12 * 16 * 64)
    torch.testing.assert_close(weights(second), weights(whole), rtol=1e-3, atol=1e-4)


def test_a_simulator_on_the_cpu_trains_a_policy_on_the_gpu() -> None:
    torch.manual_seed(0)
    env = make_env("CartPole-v1", 8)
    policy = ActorCritic.for_env(env).cuda()
    trainer = Trainer(env, policy, PPO(policy=policy, cfg=PPOConfig(num_steps=16)))
    before = weights(trainer).clone()
    trainer.learn(6 * 16 * 8)
    assert not torch.equal(weights(trainer), before)
    assert trainer.evaluate(4).num_episodes == 4


def test_what_cannot_be_captured_goes_on_eagerly_and_says_so() -> None:
    def reads_back(x: Tensor) -> Tensor:
        return x * float(x.sum().item())

    captured = Captured("A function that reads back", reads_back, enabled=True)
    x = torch.ones(2, device="cuda")
    for _ in range(3):
        captured(x)
    with pytest.warns(UserWarning, match="A function that reads back cannot be captured"):
        result = captured(x)
    assert result.tolist() == [2.0, 2.0]
    assert captured(x).tolist() == [2.0, 2.0]


def test_a_captured_rollout_draws_new_random_numbers_each_time() -> None:
    trainer = make_trainer("lift", Acceleration())
    batches = [trainer.collector.collect(16)["action"].clone() for _ in range(6)]
    assert not torch.equal(batches[4], batches[5])
