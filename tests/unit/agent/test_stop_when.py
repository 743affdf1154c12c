"""Early stopping by a condition on a logged number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.refusals import refused
from tests.unit.agent.test_trainer import make_trainer, names, scripted

from apexrl.agent import TrainingConfig, checkpoint
from apexrl.agent.stop_when import Condition
from apexrl.core.errors import ConfigError
from apexrl.core.system.files import read_json_lines

EVERY = TrainingConfig(save_interval=1, keep_checkpoints=0)


@pytest.mark.parametrize(
    ("text", "name", "comparison", "number", "satisfied"),
    [
        ("eval/success_rate >= 0.95", "eval/success_rate", ">=", 0.95, [False, True, True]),
        (" eval/success_rate>0.95 ", "eval/success_rate", ">", 0.95, [False, False, True]),
        ("train/approx_kl <= 9.5e-1", "train/approx_kl", "<=", 0.95, [True, True, False]),
        ("rollout/return<.95", "rollout/return", "<", 0.95, [True, False, False]),
    ],
)
def test_a_condition_is_a_name_a_comparison_and_a_number(
    text: str, name: str, comparison: str, number: float, satisfied: list[bool]
) -> None:
    condition = Condition.parse(text)
    assert condition == Condition(name, comparison, number)
    assert [condition.holds(value) for value in (0.9, 0.95, 1.0)] == satisfied


@pytest.mark.parametrize(
    "text",
    [
        "eval/success_rate",
        "eval/success_rate = 1",
        ">= 1",
        "eval/return >= high",
        "eval/return > nan",
        "a >= b > 1",
        "f('x y') > 2",
    ],
)
def test_anything_else_is_refused_at_the_start_with_its_field(text: str) -> None:
    with refused(ConfigError, "training.stop_when", text, "eval/success_rate >= 0.95"):
        TrainingConfig(stop_when=text)


def test_training_ends_when_the_condition_holds_and_says_why(tmp_path: Path) -> None:
    # Environment 0 has episodes of 3 steps, environment 1 of 4: 8 steps an iteration, and every evaluation returns 10.
    cfg = replace(EVERY, eval_interval=2, eval_episodes=2, stop_when="eval/episode_len >= 3")
    trainer, memory = make_trainer(scripted(), cfg, run_dir=tmp_path, save_dir=tmp_path / "checkpoints")
    trainer.learn(800)
    assert trainer.iteration == 2
    assert "eval/episode_len" in memory.lines[-1]
    assert [line for line in memory.messages if "eval/episode_len >= 3" in line and "iteration 2" in line]
    assert names(tmp_path / "checkpoints")[-1] == checkpoint.checkpoint_name(2)
    assert [line["iteration"] for line in read_json_lines(tmp_path / "evaluations.jsonl")] == [2]


def test_a_condition_counts_when_the_number_is_logged() -> None:
    trainer, memory = make_trainer(scripted(), replace(EVERY, stop_when="iteration >= 2"), log_interval=5)
    trainer.learn(800)
    assert trainer.iteration == 5
    assert [line["iteration"] for line in memory.lines] == [1, 5]


@pytest.mark.parametrize(
    ("changed", "iterations"), [("iteration>=2", 2), ("iteration >= 4", 4), ("iteration > 2", 3), (None, 6)]
)
def test_a_run_that_ended_so_continues_only_under_another_condition(
    changed: str | None, iterations: int, tmp_path: Path
) -> None:
    first, _ = make_trainer(scripted(), replace(EVERY, stop_when="iteration >= 2"), save_dir=tmp_path)
    first.learn(48)
    first.learn(48)  # no more than by resuming
    second, memory = make_trainer(scripted(), replace(EVERY, stop_when=changed), save_dir=tmp_path)
    second.load_checkpoint(checkpoint.checkpoint_name(2))
    second.learn(48)
    assert (first.iteration, second.iteration) == (2, iterations)
    if iterations == 2:
        assert [line for line in memory.messages if "training.stop_when" in line]


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (replace(EVERY, stop_when="rollout/retrun >= 1"), "Did you mean 'rollout/return'?"),
        (replace(EVERY, stop_when="eval/retrun >= 1", eval_interval=1, eval_episodes=2), "Did you mean 'eval/return'?"),
        (replace(EVERY, stop_when="eval/return >= 1e9"), "set training.eval_interval."),
    ],
)
def test_a_name_that_is_not_logged_is_one_warning_with_the_nearest(cfg: TrainingConfig, named: str) -> None:
    trainer, memory = make_trainer(scripted(), cfg)
    trainer.learn(32)
    assert trainer.iteration == 4
    (line,) = [line for line in memory.messages if "training.stop_when" in line]
    assert line.endswith(named)
    assert trainer.stop_when is not None
    assert trainer.stop_when.warning == line


def test_a_name_that_is_logged_is_no_reason_to_warn() -> None:
    trainer, memory = make_trainer(scripted(), replace(EVERY, stop_when="rollout/return >= 1e9"))
    trainer.learn(32)
    assert memory.messages == []
    assert trainer.stop_when is not None
    assert trainer.stop_when.warning == ""
