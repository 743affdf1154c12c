"""When checkpoints are saved, which of them stay, and that a run continues from one as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused
from tests.scripted import ScriptedEnv
from tests.unit.agent.test_trainer import make_trainer, names, scripted, training_numbers

from apexrl.agent import Trainer, TrainingConfig, checkpoint
from apexrl.core.errors import CheckpointError, ConfigError
from apexrl.envs import make_env


class ForgetfulEnv(ScriptedEnv):
    """Cannot save its state."""

    def state_dict(self) -> dict[str, Any]:
        return None  # type: ignore[return-value]


class Clock:
    """Says what it is told."""

    def __init__(self, trainer: Trainer) -> None:
        self.seconds = 0.0
        trainer.checkpointer.clock = lambda: self.seconds
        trainer.checkpointer.last_time = 0.0


# When


@pytest.mark.parametrize(
    ("interval", "keep", "expected"), [(0, 3, [5]), (2, 0, [2, 4, 5]), (1, 2, [4, 5]), (2, 3, [2, 4, 5]), (9, 1, [5])]
)
def test_checkpoints_are_saved_at_their_interval_and_at_the_end(
    interval: int, keep: int, expected: list[int], tmp_path: Path
) -> None:
    cfg = TrainingConfig(save_interval=interval, keep_checkpoints=keep)
    trainer, _ = make_trainer(scripted(), cfg, save_dir=tmp_path)
    trainer.learn(40)
    assert names(tmp_path) == [f"iteration_{number:06d}.pt" for number in expected]


def minutes(trainer: Trainer, *ends: float) -> None:
    """Let the iterations of a trainer end at these minutes."""
    clock, left = Clock(trainer), list(ends)

    def advance(*_: Any) -> None:
        clock.seconds = 60.0 * left.pop(0)

    trainer.add_callback("post_update", advance)
    trainer.learn(8 * len(ends))


@pytest.mark.parametrize(
    ("interval", "save_minutes", "expected"),
    [
        (50, 10.0, [3, 5, 6]),  # 12 minutes after the start, 10 after that, and the end
        (50, 0.5, [1, 2, 3, 4, 5, 6]),
        (50, 30.0, [6]),
        (50, 0.0, [6]),
        (0, 0.5, [6]),  # only at the end
        (2, 10.0, [2, 4, 6]),  # a checkpoint of the other kind is as good
    ],
)
def test_a_checkpoint_is_saved_when_the_last_one_is_old(
    interval: int, save_minutes: float, expected: list[int], tmp_path: Path
) -> None:
    cfg = TrainingConfig(save_interval=interval, save_minutes=save_minutes, keep_checkpoints=0)
    trainer, _ = make_trainer(scripted(), cfg, save_dir=tmp_path)
    minutes(trainer, 4, 8, 12, 16, 22, 26)
    assert names(tmp_path) == [f"iteration_{number:06d}.pt" for number in expected]


def test_a_checkpoint_by_name_does_not_put_off_the_next_one_on_schedule(tmp_path: Path) -> None:
    # Nobody resumes from it by itself.
    trainer, _ = make_trainer(scripted(), TrainingConfig(save_minutes=10), save_dir=tmp_path)
    trainer.add_callback("pre_iteration", lambda _: trainer.save_checkpoint("best.pt"))
    minutes(trainer, 6, 11, 12)
    assert names(tmp_path) == ["best.pt", *(checkpoint.checkpoint_name(number) for number in (2, 3))]


def test_a_checkpoint_by_name_does_not_take_the_name_of_another_iteration(tmp_path: Path) -> None:
    trainer, _ = make_trainer(scripted(), TrainingConfig(save_interval=5), save_dir=tmp_path)
    trainer.learn(16)
    for name in (checkpoint.checkpoint_name(5), str(tmp_path / "elsewhere" / checkpoint.checkpoint_name(900))):
        with refused(ConfigError, Path(name).name, "iteration than 2"):
            trainer.save_checkpoint(name)
    assert trainer.save_checkpoint(checkpoint.checkpoint_name(2)) == trainer.save_checkpoint()
    assert names(tmp_path) == [checkpoint.checkpoint_name(2)]


def test_a_save_measures_how_long_it_takes_and_says_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = make_trainer(scripted(), save_dir=tmp_path)
    clock, saver, save, seen = Clock(trainer), trainer.checkpointer, checkpoint.save, []

    def slow(*arguments: Any) -> None:
        seen.append(saver.is_saving)
        clock.seconds += 3.0
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save", slow)
    assert (saver.seconds, saver.is_saving) == (0.0, False)
    trainer.learn(8)
    assert (saver.seconds, saver.is_saving, seen) == (3.0, False, [True])


# Which


def test_without_save_dir_a_run_saves_nothing_and_a_relative_name_is_an_error(tmp_path: Path) -> None:
    trainer, _ = make_trainer(scripted())
    trainer.learn(8)
    for call in (trainer.save_checkpoint, trainer.load_checkpoint):
        with refused(CheckpointError, "'best.pt'", "save_dir"):
            call("best.pt")
    assert trainer.save_checkpoint(tmp_path / "best.pt") == tmp_path / "best.pt"
    assert (tmp_path / "best.pt").exists()


def test_a_checkpoint_is_loaded_by_the_path_that_saving_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer, _ = make_trainer(scripted(), save_dir=Path("checkpoints"))
    trainer.learn(8)
    path = trainer.save_checkpoint("best.pt")
    assert path == Path("checkpoints/best.pt")
    for save_dir in (Path("checkpoints"), Path("elsewhere"), None):
        other, _ = make_trainer(scripted(), save_dir=save_dir)
        other.load_checkpoint(path)
        assert other.iteration == trainer.iteration == 1


def test_a_checkpoint_by_name_lies_in_save_dir_and_stays(tmp_path: Path) -> None:
    trainer, _ = make_trainer(scripted(), TrainingConfig(save_interval=1, keep_checkpoints=1), save_dir=tmp_path)
    trainer.learn(8)
    trainer.save_checkpoint("best.pt")
    trainer.learn(32)
    assert names(tmp_path) == ["best.pt", checkpoint.checkpoint_name(4)]


def test_only_checkpoints_that_were_saved_on_schedule_are_deleted(tmp_path: Path) -> None:
    trainer, _ = make_trainer(scripted(), TrainingConfig(save_interval=1, keep_checkpoints=1), save_dir=tmp_path)
    trainer.learn(8)
    for iteration in (1, 2, 3):
        (tmp_path / f"iteration_{iteration}.pt").write_text("somebody's own")
    trainer.learn(16)
    trainer.save_checkpoint("iteration_2.pt")
    trainer.save_checkpoint()  # now asked for by name: it stays
    trainer.learn(40)
    ours = [checkpoint.checkpoint_name(2), checkpoint.checkpoint_name(5)]
    assert names(tmp_path) == sorted([*ours, *(f"iteration_{iteration}.pt" for iteration in (1, 2, 3))])
    assert (tmp_path / "iteration_1.pt").read_text() == "somebody's own"


# Restoring


def test_a_loaded_checkpoint_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    whole, expected = make_trainer(make_env("cartpole", 4))
    whole.learn(128)
    trainer, _ = make_trainer(make_env("cartpole", 4), save_dir=tmp_path)
    trainer.learn(64)
    resumed, memory = make_trainer(make_env("cartpole", 4), save_dir=tmp_path)
    torch.randn(7)
    resumed.load_checkpoint(checkpoint.checkpoint_name(4))
    assert (resumed.iteration, resumed.total_steps) == (4, 64)
    resumed.learn(128)
    assert training_numbers(memory.lines) == training_numbers(expected.lines[4:])


def test_a_checkpoint_of_another_policy_changes_nothing(tmp_path: Path) -> None:
    trainer, _ = make_trainer(make_env("cartpole", 2), save_dir=tmp_path)
    trainer.learn(8)
    other, _ = make_trainer(scripted(), save_dir=tmp_path)
    with refused(CheckpointError, tmp_path / checkpoint.checkpoint_name(1), "policy"):
        other.load_checkpoint(checkpoint.checkpoint_name(1))
    assert other.iteration == 0


def test_an_environment_that_cannot_come_back_says_so_and_training_goes_on(tmp_path: Path) -> None:
    cfg = TrainingConfig(save_interval=1)
    trainer, memory = make_trainer(scripted(ForgetfulEnv), cfg, save_dir=tmp_path)
    trainer.learn(24)
    assert memory.messages == ["ForgetfulEnv cannot save its state: a resumed run will start new episodes there."]
    resumed, memory = make_trainer(scripted(ForgetfulEnv), cfg, save_dir=tmp_path)
    resumed.load_checkpoint(checkpoint.checkpoint_name(3))
    assert "New episodes start, so this run will differ from an uninterrupted one" in memory.messages[0]
    resumed.learn(32)
    assert resumed.iteration == 4


def test_a_checkpoint_that_was_loaded_is_not_written_again(tmp_path: Path) -> None:
    trainer, _ = make_trainer(scripted(), TrainingConfig(save_interval=1), save_dir=tmp_path)
    trainer.learn(24)
    path = tmp_path / checkpoint.checkpoint_name(3)
    before = path.stat().st_mtime_ns
    resumed, _ = make_trainer(scripted(), TrainingConfig(save_interval=1), save_dir=tmp_path)
    resumed.load_checkpoint(path.name)
    resumed.learn(24)
    assert path.stat().st_mtime_ns == before
    # After an earlier one, what comes again is written again.
    resumed.load_checkpoint(checkpoint.checkpoint_name(2))
    resumed.learn(24)
    assert path.stat().st_mtime_ns > before


def test_the_newest_checkpoint_that_can_be_read_is_continued_and_the_older_ones_give_way(tmp_path: Path) -> None:
    cfg = TrainingConfig(save_interval=1, keep_checkpoints=2)
    trainer, _ = make_trainer(scripted(), cfg, save_dir=tmp_path)
    trainer.learn(24)
    (tmp_path / checkpoint.checkpoint_name(3)).write_text("cut off")
    resumed, memory = make_trainer(scripted(), cfg, save_dir=tmp_path)
    resumed.checkpointer.load_newest()
    assert resumed.iteration == 2
    assert "Resuming from iteration_000002.pt, the newest that can be read." in memory.messages[0]
    resumed.learn(24)
    ours = [checkpoint.checkpoint_name(number) for number in (2, 3)]
    assert names(tmp_path) == [*ours, f"{ours[1]}.damaged"]
