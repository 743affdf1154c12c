"""In a single process nothing of it does anything, and costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apexrl import distributed
from apexrl.agent import checkpoint
from apexrl.errors import CheckpointError, ConfigError
from apexrl.metrics import Weighted, merged_to_host


def test_tensors_come_back_as_they_are() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor(3.0)
    assert distributed.mean(x, y, weight=2.0) == (x, y)
    assert all(
        function(x) is x
        for function in (distributed.whole, distributed.own_part, distributed.everywhere, distributed.anywhere)
    )
    assert distributed.concatenated(x)[0] is x
    assert distributed.merged_moments(5, x, y) == (5, x, y)


def test_the_only_process_writes_and_has_everything() -> None:
    assert (distributed.world_size(), distributed.rank(), distributed.is_first()) == (1, 0, True)
    assert (distributed.share(7, "task.num_envs"), distributed.total(7), distributed.most(7)) == (7, 7, 7)
    assert distributed.gather("a") == distributed.gather_on_first("a") == ["a"]
    assert distributed.on_first(lambda: 3) == 3


def test_random_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    distributed.seed_apart(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_are_not_asked_for() -> None:
    def fail() -> float:
        raise AssertionError("a single process needs no weight")

    assert merged_to_host({"a": Weighted(torch.tensor(2.0), fail), "b": torch.tensor(3.0)}) == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "1e9"])
def test_an_impossible_timeout_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(distributed.TIMEOUT_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"APEXRL_RANK_TIMEOUT must be a positive number of seconds, got '{text}'"):
        distributed.join(torch.device("cpu"))


def test_a_lost_process_of_a_checkpoint_gets_no_random_state() -> None:
    content = {"rng": {"a": 1}, "algorithm": {}, "peers": [None]}
    first, second = (checkpoint.of_rank(content, rank, 2, Path("x.pt")) for rank in (0, 1))
    assert (first["rng"], second["rng"]) == ({"a": 1}, None)
    assert first[checkpoint.CHANGED] == "the checkpoint was saved when a process had been lost"


@pytest.mark.parametrize("peers", [3, [{"rng": {}}]])
def test_a_damaged_list_of_processes_is_named(peers: object) -> None:
    with pytest.raises(CheckpointError, match=r"x\.pt is damaged: its 'peers'"):
        checkpoint.of_rank({"algorithm": {}, "peers": peers}, 1, 2, Path("x.pt"))
