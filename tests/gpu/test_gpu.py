"""On a CUDA device: graphs compute what eager code computes, resume exactly, and fall back when they must."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apexrl import (
    PPO,
    PPOROA,
    SAC,
    ActorCritic,
    PPOConfig,
    PPOROAConfig,
    RecurrentActorCritic,
    ROAPolicy,
    SACConfig,
    SACPolicy,
    SyncCollector,
    Trainer,
    make_env,
)
from apexrl.agent import TrainingConfig
from apexrl.core.system.acceleration import WARM_UP_CALLS, Acceleration, Captured

pytestmark = pytest.mark.gpu


def make_trainer(
    task: str, acceleration: Acceleration, save_dir: Path | None = None, recurrent: bool = False, gsde: bool = False
) -> Trainer:
    torch.manual_seed(0)
    env = make_env(task, 64, device="cuda")
    kind = RecurrentActorCritic if recurrent else ActorCritic
    head = {"gsde": True, "gsde_interval": 5, "init_std": 0.2} if gsde else {}
    options: dict[str, Any] = head if recurrent else {"actor_cfg": head}
    policy = kind.for_env(env, normalize_obs=True, **options).cuda()
    cfg = PPOConfig(
        num_steps=16,
        schedule="adaptive",
        normalize_reward=True,
        std_schedule="capped" if gsde else "learned",
        final_std=0.05,
    )
    algorithm = PPO(policy=policy, cfg=cfg, acceleration=acceleration)
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=0, acceleration=acceleration)
    return Trainer(env, policy, algorithm, TrainingConfig(save_interval=6), collector=collector, save_dir=save_dir)


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])


def parts(owner: Any, *names: str) -> list[Captured]:
    """What an algorithm or a collector captures, all of it or that with these names."""
    found: list[Any] = []
    for value in vars(owner).values():
        found += value.values() if isinstance(value, dict) else [value]
    captured = [value for value in found if isinstance(value, Captured) and (not names or value.name in names)]
    assert not names or {value.name for value in captured} in ({*names}, set())  # none where graphs are off
    return captured


def has_graphs(owner: Any, *names: str) -> bool:
    """Whether each of its parts has been captured."""
    captured = parts(owner, *names)
    return bool(captured) and all(any(entry.graph is not None for entry in part.entries.values()) for part in captured)


@pytest.mark.parametrize(
    ("task", "recurrent", "gsde"),
    [
        ("lift", False, False),
        ("lift", False, True),
        ("lift", True, True),
        ("cartpole", False, False),
        ("pendulum", False, False),
        ("payload", False, False),
        ("recall", True, False),
    ],
)
def test_graphs_equal_eager(task: str, recurrent: bool, gsde: bool) -> None:
    runs = []
    for acceleration in (Acceleration(graphs=False), Acceleration()):
        trainer = make_trainer(task, acceleration, recurrent=recurrent, gsde=gsde)
        stats: list[dict[str, float]] = []
        trainer.add_callback("post_iteration", lambda _, s, stats=stats: stats.append(s))
        trainer.learn(10 * 16 * 64)
        runs.append((weights(trainer), [{k: v for k, v in s.items() if not k.startswith("time/")} for s in stats]))
        if acceleration.graphs:
            assert isinstance(trainer.collector, SyncCollector)
            assert has_graphs(trainer.collector)
            assert all(captured.enabled for captured in parts(trainer.collector))
            assert isinstance(trainer.algorithm, PPO)
            assert has_graphs(trainer.algorithm, "The update")
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-4, atol=1e-5)
    assert [s.keys() for s in runs[0][1]] == [s.keys() for s in runs[1][1]]
    for eager, graph in zip(runs[0][1], runs[1][1], strict=True):
        assert graph["rollout/mean_reward"] == pytest.approx(eager["rollout/mean_reward"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_equal_eager_on_stale_rollouts(precision: Any, recurrent: bool) -> None:
    found = []
    for graphs in (False, True):
        trainer = make_trainer("lift", Acceleration(graphs=graphs, precision=precision), recurrent=recurrent)
        algorithm = trainer.algorithm
        assert isinstance(algorithm, PPO)
        for _ in range(WARM_UP_CALLS + 3):
            batch = trainer.collector.collect(16)
            batch["policy_version"] = torch.zeros(*batch.shape, 1, dtype=torch.long, device="cuda")
            batch["sample_log_prob"] = batch["sample_log_prob"] - 0.3
            algorithm.update(batch)
        if graphs:
            assert has_graphs(algorithm, "The start of the update")
        found.append(weights(trainer))
    torch.testing.assert_close(found[0], found[1], rtol=1e-2 if precision == "bf16" else 1e-4, atol=1e-4)


@pytest.mark.parametrize("gsde", [False, True])
def test_resume_continues_a_captured_run(gsde: bool, tmp_path: Path) -> None:
    whole = make_trainer("lift", Acceleration(), gsde=gsde)
    whole.learn(13 * 16 * 64)  # the first rollout teaches the normaliser
    first = make_trainer("lift", Acceleration(), tmp_path, gsde=gsde)
    first.add_callback("post_iteration", lambda trainer, _: trainer.stop() if trainer.iteration == 7 else None)
    first.learn(13 * 16 * 64)  # the schedule of σ depends on the end
    second = make_trainer("lift", Acceleration(), tmp_path, gsde=gsde)
    second.load_checkpoint("iteration_000006.pt")
    second.learn(13 * 16 * 64)
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

    captured = Captured("A function that reads back", reads_back)
    x = torch.ones(2, device="cuda")
    for _ in range(3):
        captured(x)
    with pytest.warns(UserWarning, match="A function that reads back"):
        result = captured(x)
    assert result.tolist() == [2.0, 2.0]
    assert captured(x).tolist() == [2.0, 2.0]


def test_a_captured_rollout_draws_new_random_numbers_each_time() -> None:
    trainer = make_trainer("lift", Acceleration())
    batches = [trainer.collector.collect(16)["action"].clone() for _ in range(6)]
    assert not torch.equal(batches[4], batches[5])


# PPO-ROA, whose optimizers and graphs are new in each phase

ROA_STEPS = 16 * 64
"""Of one iteration."""


def make_roa_trainer(acceleration: Acceleration, save_dir: Path | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    env = make_env("payload", 64, device="cuda")
    policy = ROAPolicy.for_env(env, history=24, normalize_obs=True).cuda()
    cfg = PPOROAConfig(num_steps=16, encoder_penalty=0.1, train_share=0.5, **options)
    algorithm = PPOROA(policy, cfg, acceleration=acceleration)
    collector = SyncCollector(
        env, algorithm.rollout_policy, keep=PPOROA.required_keys, seed=0, acceleration=acceleration
    )
    training = TrainingConfig(save_interval=3, keep_checkpoints=0)
    return Trainer(env, policy, algorithm, training, collector=collector, save_dir=save_dir)


def roa_has_graphs(trainer: Trainer) -> bool:
    assert isinstance(trainer.algorithm, PPOROA)
    assert isinstance(trainer.collector, SyncCollector)
    names = "The update", "The advantage", "The adaptation"
    return has_graphs(trainer.algorithm, *names) and has_graphs(trainer.collector)


def test_roa_graphs_equal_eager_in_both_phases() -> None:
    runs = []
    for acceleration in (Acceleration(graphs=False), Acceleration()):
        trainer = make_roa_trainer(acceleration)
        stats: list[dict[str, float]] = []
        captured: list[bool] = []
        trainer.add_callback("post_iteration", lambda _, s, stats=stats: stats.append(s))
        trainer.add_callback("pre_iteration", lambda t, captured=captured: captured.append(roa_has_graphs(t)))
        trainer.learn(13 * ROA_STEPS)
        assert captured[5] == acceleration.graphs  # before the last iteration of train
        assert not captured[6]  # new in finetune
        assert roa_has_graphs(trainer) == acceleration.graphs
        assert ["train/imitation_loss" in s for s in stats] == [True] * 6 + [False] * 6
        runs.append((weights(trainer), [{k: v for k, v in s.items() if not k.startswith("time/")} for s in stats]))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-3, atol=1e-4)
    for eager, graph in zip(runs[0][1], runs[1][1], strict=True):
        assert eager.keys() == graph.keys()
        for name in ("rollout/mean_reward", "train/adapt_loss"):
            assert graph[name] == pytest.approx(eager[name], rel=1e-3, abs=1e-4)


def test_an_old_graph_that_is_garbage_is_not_freed_in_a_capture() -> None:
    def double(x: Tensor) -> Tensor:
        if gc.isenabled():
            gc.collect()  # as Python may at any time
        return x * 2

    def warmed_up() -> Captured:
        captured = Captured("double", double)
        for _ in range(WARM_UP_CALLS):
            captured(ones)
        return captured

    ones = torch.ones(3, device="cuda")
    old, new = warmed_up(), warmed_up()
    old(ones)
    cycle: list[Any] = [old]
    cycle.append(cycle)
    del old, cycle
    assert new(ones).tolist() == [2, 2, 2]
    assert new.enabled


@pytest.mark.parametrize("phase", ["train", "finetune"])
def test_roa_never_waits_for_the_device(phase: Any) -> None:
    trainer = make_roa_trainer(Acceleration(), phase=phase)
    trainer.learn(6 * ROA_STEPS)
    assert roa_has_graphs(trainer)
    before = weights(trainer).clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            metrics = trainer.algorithm.update(trainer.collector.collect(16))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert metrics["nonfinite"].item() == 0
    assert not torch.equal(weights(trainer), before)


def test_roa_trains_on_rollouts_that_change_their_shape() -> None:
    # Back to the first shape: what was captured for its old memory must not be found again.
    results = []
    for acceleration in (Acceleration(graphs=False), Acceleration()):
        trainer = make_roa_trainer(acceleration, phase="train")
        torch.manual_seed(1)
        for num_steps in (16, 16, 16, 8, 8, 8, 16, 16):
            trainer.algorithm.update(trainer.collector.collect(num_steps).clone())
        results.append(weights(trainer))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)


def test_roa_resumes_across_the_boundary(tmp_path: Path) -> None:
    whole = make_roa_trainer(Acceleration(), tmp_path)
    whole.learn(12 * ROA_STEPS)
    for iteration in (3, 6, 9):
        resumed = make_roa_trainer(Acceleration())
        resumed.load_checkpoint(tmp_path / f"iteration_{iteration:06d}.pt")
        resumed.learn(12 * ROA_STEPS)
        torch.testing.assert_close(weights(resumed), weights(whole), rtol=1e-3, atol=1e-4)


# SAC, with its replay buffer on the device

SAC_STEPS = 4 * 1024
"""Of one iteration; they earn 8 gradient steps, 4 of them with the actor."""
SAC_OPTIONS: list[dict[str, Any]] = [{}, {"n_step": 3, "priority_exponent": 0.6, "num_critics": 5}]


def make_sac_trainer(acceleration: Acceleration, save_dir: Path | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    env = make_env("pendulum", 1024, device="cuda")
    cfg = SACConfig(
        utd_ratio=8 / SAC_STEPS,
        learning_starts=2 * SAC_STEPS,
        buffer_size=8 * SAC_STEPS,  # the ring goes around within a test
        policy_delay=2,
        save_replay=True,
        **options,
    )
    policy = SACPolicy.for_env(
        env,
        actor_cfg={"hidden_dims": (64, 64)},
        critic_cfg={"hidden_dims": (64, 64), **SAC.critic_options(cfg)},
        normalize_obs=True,
    ).cuda()
    algorithm = SAC(policy=policy, cfg=cfg, acceleration=acceleration)
    collector = SyncCollector(env, policy, keep=SAC.required_keys, seed=0, acceleration=acceleration)
    return Trainer(env, policy, algorithm, TrainingConfig(save_interval=6), collector=collector, save_dir=save_dir)


@pytest.mark.parametrize("options", SAC_OPTIONS, ids=str)
def test_sac_never_waits_for_the_device(options: dict[str, Any]) -> None:
    trainer = make_sac_trainer(Acceleration(), **options)
    trainer.learn(10 * SAC_STEPS)
    assert isinstance(trainer.algorithm, SAC)
    assert trainer.algorithm.replay.device.type == "cuda"
    assert has_graphs(trainer.algorithm)
    before, num_updates = weights(trainer).clone(), trainer.algorithm.state_dict()["num_updates"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            metrics = trainer.algorithm.update(trainer.collector.collect(4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.algorithm.state_dict()["num_updates"] == num_updates + 5 * 8
    assert metrics["nonfinite"].item() == 0
    assert not torch.equal(weights(trainer), before)


@pytest.mark.parametrize("options", SAC_OPTIONS, ids=str)
def test_sac_graphs_equal_eager(options: dict[str, Any]) -> None:
    runs = []
    for acceleration in (Acceleration(graphs=False), Acceleration()):
        trainer = make_sac_trainer(acceleration, **options)
        losses: list[float] = []
        trainer.add_callback("post_update", lambda _, s, losses=losses: losses.append(s.get("train/critic_loss", 0.0)))
        trainer.learn(10 * SAC_STEPS)
        assert isinstance(trainer.algorithm, SAC)
        assert has_graphs(trainer.algorithm) == acceleration.graphs
        runs.append((weights(trainer), losses))
    assert runs[0][1][0] == 0.0 < runs[0][1][-1]
    assert runs[1][1] == pytest.approx(runs[0][1], rel=1e-3)
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-3, atol=1e-4)


def test_sac_resumes_with_its_replay_buffer(tmp_path: Path) -> None:
    whole = make_sac_trainer(Acceleration())
    whole.learn(12 * SAC_STEPS)
    make_sac_trainer(Acceleration(), tmp_path).learn(6 * SAC_STEPS)
    second = make_sac_trainer(Acceleration(), tmp_path)
    second.load_checkpoint("iteration_000006.pt")
    assert isinstance(second.algorithm, SAC)
    assert len(second.algorithm.replay) == 6 * SAC_STEPS
    second.learn(12 * SAC_STEPS)
    torch.testing.assert_close(weights(second), weights(whole), rtol=1e-3, atol=1e-4)


def test_sac_learns_on_the_gpu_from_a_replay_buffer_on_the_cpu() -> None:
    trainer = make_sac_trainer(Acceleration(), replay_device="cpu")
    before = weights(trainer).clone()
    trainer.learn(4 * SAC_STEPS)
    assert isinstance(trainer.algorithm, SAC)
    assert trainer.algorithm.replay.device.type == "cpu"
    assert weights(trainer).isfinite().all()
    assert not torch.equal(weights(trainer), before)
