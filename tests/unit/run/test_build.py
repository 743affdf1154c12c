"""What ``make_trainer`` composes: kinds of task, algorithms and policies answer for themselves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor

from apexrl import ActorCritic
from apexrl.algorithms import ALGORITHMS, AlgorithmConfig, BaseAlgorithm
from apexrl.collectors import SyncCollector
from apexrl.core.errors import ConfigError
from apexrl.run.build import make_trainer
from apexrl.run.config import make_config


@dataclass(frozen=True, kw_only=True)
class StillConfig(AlgorithmConfig):
    name: Literal["still"] = "still"
    num_steps: int = 4


class Still(BaseAlgorithm):
    """Learns nothing."""

    required_keys = frozenset({"observation", "action", "reward", "terminated", "truncated"})
    policies: ClassVar = {"mlp": ActorCritic}

    def __init__(self, policy: ActorCritic, cfg: StillConfig, acceleration: Any) -> None:
        super().__init__(policy, cfg.num_steps)

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        self.check_batch(rollout)
        return {}


class StillGroups(Still):
    learns_from = "groups"


RAW = {"task": {"id": "cartpole", "num_envs": 3}, "algo": {"name": "still"}, "policy": {"hidden_dims": [8]}}


def test_a_new_algorithm_needs_an_entry_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "still", (Still, StillConfig))
    trainer = make_trainer(make_config({**RAW, "training": {"device": "cpu", "total_timesteps": 24}}), tmp_path)
    assert isinstance(trainer.collector, SyncCollector)
    assert trainer.collector.keep == {*Still.required_keys, "pre_tanh"}
    trainer.learn()
    trainer.close()
    assert (trainer.iteration, trainer.total_steps) == (2, 24)


def test_an_algorithm_that_learns_from_groups_is_refused_where_a_task_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "still", (StillGroups, StillConfig))
    with refused(ConfigError, "'still'", "task.benchmark_name", "'cartpole'"):
        make_config(RAW)
