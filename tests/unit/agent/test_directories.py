"""A trainer destroys no run of another in its directories; tests/contract has the same for the runner."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.unit.agent.test_trainer import make_trainer, names, scripted

from apexrl.agent import TrainingConfig, checkpoint
from apexrl.agent.directories import RunDirectories
from apexrl.core.system.files import DirectoryLock, read_json_lines

EVERY = TrainingConfig(save_interval=1, keep_checkpoints=2, eval_interval=1, eval_episodes=2)


def test_a_second_trainer_in_the_same_directories_writes_beside_the_run_there(tmp_path: Path) -> None:
    first, _ = make_trainer(scripted(), EVERY, run_dir=tmp_path, save_dir=tmp_path / "checkpoints")
    first.learn(24)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    second, memory = make_trainer(scripted(), EVERY, run_dir=tmp_path, save_dir=tmp_path / "checkpoints")
    assert (second.run_dir, second.save_dir) == (tmp_path, tmp_path / "checkpoints")  # as long as it writes nothing
    second.learn(8)
    assert (second.run_dir, second.save_dir) == (tmp_path / "run_2", tmp_path / "checkpoints" / "run_2")
    assert memory.messages == [
        f"The directory holds another run; this one writes to {second.run_dir}, {second.save_dir}."
    ]
    assert {path: path.read_bytes() for path in before} == before
    assert names(tmp_path / "checkpoints" / "run_2") == [checkpoint.checkpoint_name(1)]
    assert [line["iteration"] for line in read_json_lines(tmp_path / "run_2" / "evaluations.jsonl")] == [1]
    second.load_checkpoint(checkpoint.checkpoint_name(3))  # of the run above it
    assert second.iteration == 3


def test_a_checkpoint_from_the_directory_continues_the_run_in_it(tmp_path: Path) -> None:
    first, _ = make_trainer(scripted(), EVERY, save_dir=tmp_path)
    first.learn(40)
    second, memory = make_trainer(scripted(), EVERY, save_dir=tmp_path)
    second.load_checkpoint(checkpoint.checkpoint_name(4))
    second.learn(48)
    assert memory.messages == []
    # Number 5 comes again, and until then it must not be taken for the newest.
    expected = [4, "5.superseded", 5, 6]
    assert second.save_dir == tmp_path
    assert names(tmp_path) == sorted(
        checkpoint.checkpoint_name(number) if isinstance(number, int) else "iteration_000005.pt.superseded"
        for number in expected
    )


def test_files_without_the_name_of_a_run_count_as_one(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "mine.pt")
    trainer, _ = make_trainer(scripted(), save_dir=tmp_path)
    trainer.learn(8)
    assert trainer.save_dir == tmp_path / "run_2"


def test_a_directory_whose_lock_is_held_is_the_runs_own(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    device = torch.device("cpu")
    directories = RunDirectories(tmp_path, tmp_path / "checkpoints", print, lock, config={}, device=device)
    directories.prepare(0)
    assert directories.run_dir == tmp_path
    trainer, _ = make_trainer(scripted(), run_dir=tmp_path, lock=lock)
    trainer.learn(8)
    trainer.close()
    assert trainer.run_dir == tmp_path
    assert "run_2" not in names(tmp_path)
    assert not lock.path.exists()
