"""Short CPU traces that a refactor must reproduce.

Processors round differently in their last bits, so numbers are compared to six digits; on one machine a run repeats bit
for bit (``tests/contract/test_resume.py``). After a change that is meant to move them:

    python tests/golden/test_golden.py
"""

import json
from pathlib import Path

import pytest
import torch

from apexrl.config import load_config
from apexrl.run import make_trainer

PATH = Path(__file__).parent / "traces.json"
SETTINGS = {
    "lift_ppo": {"task.num_envs": "16"},
    "cartpole_ppo": {},
    "pendulum_ppo": {"task.num_envs": "16"},
    "halfcheetah_ppo": {"algo.num_steps": "64", "algo.num_minibatches": "4", "algo.std_schedule": "learned"},
    "pendulum_sac": {"algo.num_steps": "8", "algo.learning_starts": "8", "training.total_timesteps": "24"},
    # The third iteration is of phase finetune.
    "payload_roa": {"task.num_envs": "16", "policy.normalize_obs": "true", "algo.encoder_penalty": "0.1"},
}
KEYS = (
    *("rollout/mean_reward", "rollout/mean_value", "train/loss", "train/approx_kl", "train/grad_norm"),
    *("train/adapt_loss", "train/imitation_loss", "train/critic_loss", "train/actor_loss", "train/temperature"),
)
"""What is compared, where it is logged."""


def trace(preset: str, run_dir: Path) -> list[dict[str, float]]:
    overrides = {
        **SETTINGS[preset],
        "logging.tensorboard": "false",
        "training.device": "cpu",
        "training.save_interval": "0",
    }
    config = load_config(preset, overrides.items())
    threads = torch.get_num_threads()
    trainer = make_trainer(config, run_dir)
    records: list[dict[str, float]] = []
    trainer.add_callback(
        "post_iteration", lambda _, stats: records.append({key: stats[key] for key in KEYS if key in stats})
    )
    rollouts = 3 + trainer.policy.has_new_normalizer  # a new normaliser sees one before anything is learned
    trainer.learn(rollouts * trainer.algorithm.num_steps * config.task.num_envs)
    trainer.close()
    torch.set_num_threads(threads)
    return records


@pytest.mark.parametrize("preset", list(SETTINGS))
def test_the_first_iterations_are_the_same_as_ever(preset: str, tmp_path: Path) -> None:
    expected = json.loads(PATH.read_text())[preset]
    found = trace(preset, tmp_path)
    assert len(found) == len(expected) == 3
    for ours, golden in zip(found, expected, strict=True):
        assert ours == pytest.approx(golden, rel=1e-4, abs=1e-6)


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    traces = {}
    for name in SETTINGS:
        with tempfile.TemporaryDirectory() as directory:
            traces[name] = trace(name, Path(directory))
    PATH.write_text(json.dumps(traces, indent=1) + "\n")
