"""In a single process nothing of it does anything, and costs nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.point_suite import PointSuite
from tests.refusals import refused

from apexrl import RLOO, ActorCritic, RLOOConfig, Trainer, cli
from apexrl.agent import checkpoint
from apexrl.agent.training_log import merged_collection
from apexrl.collectors import RolloutStats
from apexrl.core.errors import CheckpointError, ConfigError
from apexrl.core.system import distributed
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.policies.config import VLAConfig
from apexrl.run import directory as run
from apexrl.run.config import Config
from apexrl.run.loading import load_config
from apexrl.run.suite import ROLLOUT_STATS, SuiteConfig, begin_statistics, process_dir

pytestmark = pytest.mark.slow

Pretend = Callable[[int, int], None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Let this be one of several processes, as far as numbers tell."""

    def become(rank: int, count: int) -> None:
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: count)

    return become


def test_tensors_come_back_as_they_are() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor(3.0)
    assert distributed.all_reduce_mean(x, y, weight=2.0) == (x, y)
    assert all(function(x) is x for function in (distributed.all_gather, distributed.all_ranks, distributed.any_rank))
    assert distributed.all_gather_rows(x)[0] is x
    assert distributed.merged_moments(5, x, y) == (5, x, y)


def test_the_only_process_writes_and_has_everything() -> None:
    assert (distributed.world_size(), distributed.rank(), distributed.is_main_process()) == (1, 0, True)
    assert (distributed.share(7, "task.num_envs"), distributed.all_reduce_max(7)) == (7, 7)
    assert distributed.all_gather_object("a") == distributed.gather_object("a") == ["a"]
    assert distributed.on_main_process(lambda: 3) == 3


def test_random_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    distributed.seed_per_rank(4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "1e9"])
def test_an_impossible_timeout_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(distributed.TIMEOUT_VARIABLE, text)
    with refused(ConfigError, distributed.TIMEOUT_VARIABLE, text):
        distributed.join_ranks(torch.device("cpu"))


def test_a_lost_process_of_a_checkpoint_gets_no_random_state() -> None:
    content = {"rng": {"a": 1}, "algorithm": {}, "peers": [None]}
    first, second = (checkpoint.of_rank(content, rank, 2, Path("x.pt")) for rank in (0, 1))
    assert (first["rng"], second["rng"]) == ({"a": 1}, None)
    assert first[checkpoint.CHANGED] == "the checkpoint was saved by process 0 alone"


@pytest.mark.parametrize("peers", [3, [{"rng": {}}]])
def test_a_damaged_list_of_processes_is_named(peers: object) -> None:
    with refused(CheckpointError, "x.pt", "peers"):
        checkpoint.of_rank({"algorithm": {}, "peers": peers}, 1, 2, Path("x.pt"))


def test_numbers_of_the_collecting_stay_as_they_are() -> None:
    assert merged_collection({"collect/queue": 3.0, "collect/staleness": 0.1}) == {
        "collect/queue": 3.0,
        "collect/staleness": 0.1,
    }


# Refusals


@pytest.mark.parametrize(("rank", "prefix"), [(None, ""), ("0", ""), ("3", "Rank 3: ")])
def test_every_rank_but_the_first_says_its_number(
    rank: str | None, prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise distributed.LostRankError("The others are lost.")

    monkeypatch.setattr(run, "start", lose)
    if rank is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("RANK", rank)
    assert cli.main(["train", "lift_ppo"]) == 2
    assert capsys.readouterr().err == f"apexrl: {prefix}The others are lost.\n"


# What is known of init states


def learned(path: Path, *states: str) -> None:
    stats = RolloutStats(path)
    for state in states:
        stats.record(state, [True, True])
    stats.write()


def begun(run_dir: Path, rank: int) -> set[str]:
    """Return the states that a process of a resumed run begins with."""
    first = run_dir / ROLLOUT_STATS
    stats = RolloutStats(process_dir(run_dir, rank) / ROLLOUT_STATS)
    begin_statistics(stats, run_dir, first)
    return set(stats.state_dict())


@pytest.fixture
def left(tmp_path: Path, pretend: Pretend) -> Path:
    """What a run of three processes left, with a checkpoint."""
    for rank in range(3):
        pretend(rank, 3)
        assert begun(tmp_path, rank) == set()
    for rank in range(3):
        learned(process_dir(tmp_path, rank) / ROLLOUT_STATS, f"state {rank}", "all")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / checkpoint.checkpoint_name(1)).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("count", "known"),
    [(1, ["012"]), (2, ["02", "1"]), (3, ["0", "1", "2"]), (4, ["0", "1", "2", "0"])],
    ids=["one", "fewer", "as many", "more"],
)
def test_what_processes_know_of_init_states_is_not_lost(
    count: int, known: list[str], left: Path, pretend: Pretend
) -> None:
    for rank, numbers in enumerate(known):
        pretend(rank, count)
        assert begun(left, rank) == {"all", *(f"state {number}" for number in numbers)}


# The run directory


def test_the_others_write_only_after_the_first_process_could(
    tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Callable[[], None]) -> None:
        raise SystemExit(2)  # as in every other process, when it failed in the first one

    env = SuiteVecEnv(PointSuite(), 1, num_workers=0)
    policy = ActorCritic.for_env(env, actor_cfg={"groups": ["state"]})
    cfg = RLOOConfig(enable_rollout_stats_tracking=True)
    algorithm, config = RLOO(policy=policy, cfg=cfg), Config(task=SuiteConfig(), policy=VLAConfig(), algo=cfg)
    pretend(1, 2)
    monkeypatch.setattr(distributed, "on_main_process", fails)
    with pytest.raises(SystemExit):
        config.task.make_collector(config, env, algorithm, algorithm.acceleration, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_another_process_still_writes_does_not_hide_why_a_run_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> Trainer:
        (tmp_path / "run" / "process_1").mkdir()
        raise ConfigError("the cause")

    monkeypatch.setattr(run, "make_trainer", fails)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with refused(ConfigError, "the cause"):
        run.start(load_config("lift_ppo"), tmp_path / "run")
