"""Short CPU traces that a refactor must reproduce.

On the kind of processor that recorded them, numbers are compared to a millionth. Other processors round differently in
their last bits, and training amplifies that from iteration to iteration: there each iteration has its own tolerance.
On one machine a run repeats bit for bit (``tests/contract/test_resume.py``). After a change that is meant to move them:

    python -m tests.golden.test_golden
"""

import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.point_suite import PointSuite

from apexrl import BC, RLOO, ActorCritic, BCConfig, RLOOConfig, RolloutGenerator, SuiteRunner, Trainer, TrainingConfig
from apexrl.collectors.demonstrations.record import record_demos
from apexrl.collectors.demonstrations.samples import load_demos
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.policies.vla import VLAPolicy
from apexrl.run.build import make_trainer
from apexrl.run.loading import load_config

PATH = Path(__file__).parent / "traces.json"
PRESETS: dict[str, tuple[str, dict[str, str]]] = {
    "lift_ppo": ("lift_ppo", {"task.num_envs": "16"}),
    "cartpole_ppo": ("cartpole_ppo", {}),
    "pendulum_ppo": ("pendulum_ppo", {"task.num_envs": "16"}),
    # Few steps: the simulation is chaotic. 1e-7 in the weights becomes 1e-3 in the mean reward of 16 steps, 1e-1 of 64.
    "halfcheetah_ppo": (
        "halfcheetah_ppo",
        {"algo.num_steps": "8", "algo.num_minibatches": "4", "algo.std_schedule": "learned"},
    ),
    "pendulum_sac": (
        "pendulum_sac",
        {"algo.num_steps": "8", "algo.learning_starts": "8", "training.total_timesteps": "24"},
    ),
    # The third iteration is of phase finetune.
    "payload_roa": (
        "payload_roa",
        {"task.num_envs": "16", "policy.normalize_obs": "true", "algo.encoder_penalty": "0.1"},
    ),
    "gru": (
        "cartpole_ppo",
        {"task.id": "recall", "policy.kind": "gru", "algo.num_steps": "16", "algo.num_minibatches": "2"},
    ),
    "prioritised_sac": (
        "pendulum_sac",
        {
            "algo.num_steps": "8",
            "algo.learning_starts": "8",
            "algo.priority_exponent": "0.6",
            "algo.n_step": "3",
            "training.total_timesteps": "24",
        },
    ),
}
KEYS = (
    *("rollout/mean_reward", "rollout/mean_value", "train/loss", "train/approx_kl", "train/grad_norm"),
    *("train/adapt_loss", "train/imitation_loss", "train/critic_loss", "train/actor_loss", "train/temperature"),
)
"""What is compared, where it is logged."""
TOLERANCE = (1e-6, 1e-6, 1e-6)
OTHER_PROCESSOR = (1e-4, 1e-3, 1e-2)
"""Tolerance per iteration. Between an AMD and an Intel processor differences of 7e-6, 5e-6 and 2e-4 were seen."""
Trace = list[dict[str, float]]


def processor() -> str:
    """Name what decides how sums are rounded: vendor, family and model, and the vector instructions that torch uses."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    facts = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    names = [facts[name] for name in ("vendor_id", "cpu family", "model") if name in facts]
    return " ".join([*(names or [platform.processor()]), torch.backends.cpu.get_cpu_capability()])


def trace_preset(preset: str, settings: dict[str, str], directory: Path) -> Trace:
    overrides = {
        **settings,
        "logging.tensorboard": "false",
        "training.device": "cpu",
        "training.save_interval": "0",
        "features.compile": "false",
    }
    config = load_config(preset, overrides.items())
    threads = torch.get_num_threads()
    trainer = make_trainer(config, directory)
    records = recorded(trainer)
    rollouts = 3 + trainer.policy.has_new_normalizer  # a new normaliser sees one before anything is learned
    trainer.learn(rollouts * trainer.algorithm.num_steps * config.task.num_envs)
    trainer.close()
    torch.set_num_threads(threads)
    return records


def recorded(trainer: Trainer) -> Trace:
    """Return a list that grows with every iteration of the trainer."""
    records: Trace = []
    trainer.add_callback(
        "post_iteration", lambda _, stats: records.append({key: stats[key] for key in KEYS if key in stats})
    )
    return records


def trace_rloo(head: str) -> Trace:
    torch.manual_seed(0)
    env = SuiteVecEnv(PointSuite(radius=0.4), 4, chunk=5, num_workers=0)
    groups = {"groups": ["state"]}
    policy = (
        ActorCritic.for_env(env, actor_cfg=groups, critic_cfg=groups)
        if head == "mlp"
        else VLAPolicy.for_env(env, chunk=5, width=32, depth=1, num_heads=2, head="flow", denoising_steps=2)
    )
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(rloo_batch_size=4, num_groups=6, num_epochs=2, learning_rate=1e-3))
    generator = RolloutGenerator(SuiteRunner(env, policy), 4, 6, on_message=lambda _: None)
    trainer = Trainer(env, policy, algorithm, TrainingConfig(num_train_steps=3), collector=generator)
    records = recorded(trainer)
    trainer.learn()
    trainer.close()
    return records


def trace_bc(directory: Path) -> Trace:
    suite = PointSuite()
    record_demos(suite, directory, 2, num_workers=0)
    demos = load_demos(directory, suite, chunk=5)
    torch.manual_seed(0)
    env = SuiteVecEnv(suite, 4, chunk=5, num_workers=0)
    learner = BC(policy=VLAPolicy.for_env(env, chunk=5, width=32, depth=1, num_heads=2), cfg=BCConfig(batch_size=32))
    records = [learner.fit(demos, 1) for _ in range(3)]
    env.close()
    return [{f"train/{name}": float(found[name]) for name in ("loss", "grad_norm")} for found in records]


def trace(name: str, directory: Path) -> Trace:
    if name in PRESETS:
        return trace_preset(*PRESETS[name], directory)
    return OTHERS[name](directory)


OTHERS: dict[str, Callable[[Path], Trace]] = {
    "rloo": lambda _: trace_rloo("mlp"),
    "rloo_flow": lambda _: trace_rloo("flow"),
    "bc": trace_bc,
}


@pytest.mark.parametrize("name", [*PRESETS, *OTHERS])
def test_the_first_iterations_are_the_same_as_ever(name: str, tmp_path: Path) -> None:
    stored = json.loads(PATH.read_text())
    tolerances = TOLERANCE if stored["processor"] == processor() else OTHER_PROCESSOR
    found = trace(name, tmp_path)
    assert len(found) == 3
    for ours, golden, tolerance in zip(found, stored[name], tolerances, strict=True):
        assert ours == pytest.approx(golden, rel=tolerance, abs=tolerance)


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    traces: dict[str, Trace | str] = {"processor": processor()}
    for case in [*PRESETS, *OTHERS]:
        with tempfile.TemporaryDirectory() as directory:
            traces[case] = trace(case, Path(directory))
    PATH.write_text(json.dumps(traces, indent=1) + "\n")
