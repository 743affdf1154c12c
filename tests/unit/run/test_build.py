"""What ``make_trainer`` composes: kinds of task, algorithms and policies answer for themselves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor

from apexrl.algorithms import ALGORITHMS, AlgorithmConfig, BaseAlgorithm
from apexrl.collectors import SyncCollector
from apexrl.core.errors import ConfigError
from apexrl.run import directory
from apexrl.run.build import decided, make_trainer
from apexrl.run.config import make_config


@dataclass(frozen=True, kw_only=True)
class StillConfig(AlgorithmConfig):
    num_steps: int = 4


class Still(BaseAlgorithm):
    """Learns nothing."""

    required_keys = frozenset({"observation", "action", "reward", "terminated", "truncated"})
    config_class = StillConfig

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        self.check_batch(rollout)
        return {}


class StillGroups(Still):
    learns_from = "groups"


RAW = {"task": {"id": "cartpole", "num_envs": 3}, "algo": {"name": "still"}, "policy": {"hidden_dims": [8]}}


def test_a_new_algorithm_needs_an_entry_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "still", Still)
    trainer = make_trainer(make_config({**RAW, "training": {"device": "cpu", "total_timesteps": 24}}), tmp_path)
    assert isinstance(trainer.collector, SyncCollector)
    assert trainer.collector.keep == {*Still.required_keys, "pre_tanh"}
    trainer.learn()
    trainer.close()
    assert (trainer.iteration, trainer.total_steps) == (2, 24)


def test_an_algorithm_that_learns_from_groups_is_refused_where_a_task_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "still", StillGroups)
    with refused(ConfigError, "'still'", "task.benchmark_name", "'cartpole'"):
        make_config(RAW)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("raw", "device", "compiles"),
    [
        # 100,000 / (128 · 8) = 97 rollouts of 10 · 8 minibatches: 7,760 gradient steps, 12,500 of the policy.
        ({"algo": {"num_steps": 128, "num_epochs": 10, "num_minibatches": 8}}, CPU, "update"),
        ({"algo": {"num_steps": 128, "num_epochs": 10, "num_minibatches": 8}}, CUDA, False),
        ({"algo": {"num_steps": 128, "num_epochs": 1, "num_minibatches": 8}}, CPU, False),
        # 100 iterations, whatever their steps: 8,000 gradient steps.
        ({"training": {"num_train_steps": 100, "total_timesteps": 8}, "algo": {"num_epochs": 10, "num_minibatches": 8}},
         CPU, "update"),
        ({"algo": {"name": "sac"}}, CPU, "update"),
        ({"algo": {"name": "sac", "learning_starts": 96_000}}, CPU, False),
        # A step of the policy for all of 8 environments: 30,000 of them, and one less.
        ({"algo": {"name": "sac"}, "training": {"total_timesteps": 240_000}}, CPU, True),
        ({"algo": {"name": "sac"}, "training": {"total_timesteps": 239_999}}, CPU, "update"),
        # 1,500 iterations of 20 minibatches, as legged robots are trained.
        ({"task": {"num_envs": 4096}, "algo": {"num_steps": 24}, "training": {"total_timesteps": 1500 * 24 * 4096}},
         CUDA, True),
    ],
)  # fmt: skip
def test_the_numbers_of_a_run_decide_whether_it_is_compiled(raw: Any, device: torch.device, compiles: Any) -> None:
    whole: dict[str, Any] = {"task": {"id": "cartpole", "num_envs": 8}, "training": {"total_timesteps": 100_000}}
    config = make_config({key: {**whole.get(key, {}), **raw.get(key, {})} for key in {**whole, **raw}})
    features = decided(config, device).features
    assert features.compile == compiles
    assert features.precision == ("tf32" if device.type == "cuda" else "fp32")


def test_what_was_asked_for_is_not_decided_again() -> None:
    asked = {"compile": False, "precision": "bf16"}
    features = decided(make_config({"features": asked, "algo": {"name": "sac"}}), CUDA).features
    assert (features.compile, features.precision) == (False, "bf16")


def test_a_resumed_run_keeps_what_was_decided_at_its_start(tmp_path: Path) -> None:
    raw = {
        "task": {"id": "cartpole", "num_envs": 2}, "algo": {"num_steps": 4},
        "training": {"total_timesteps": 8, "device": "cpu"}, "logging": {"tensorboard": False},
    }  # fmt: skip
    directory.start(make_config(raw), tmp_path / "run").close()
    longer = [("training.total_timesteps", "10000000")]
    trainer = directory.resume(tmp_path / "run", longer)
    trainer.close()
    assert trainer.config["features"]["compile"] is False
    assert directory.resumed_config(tmp_path / "run").features.compile is False
