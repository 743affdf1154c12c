"""The scaling model of ``benchmarks/scaling.py``: hand-worked numbers, and its errors on the stored record."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report
import scaling
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def costs() -> scaling.Costs:
    """A worker needs 10 (4 * 0.02 + 0.02) = 1 s for 40 steps, of which 10 (4 * 0.005 + 0.02) = 0.4 s compute."""
    return scaling.Costs(
        env_step=0.02,
        env_cpu=0.005,
        policy_step=0.02,
        latency=0.1,
        bandwidth=1000.0,
        rollout_bytes=200.0,
        weight_bytes=100.0,
        learner_rollout=0.1,
        learner_call=0.05,
        num_envs=4,
        num_steps=10,
    )


def test_parts_that_follow_each_other_add_up(costs: scaling.Costs) -> None:
    # Weights over two hops take 0.2 s, three rollouts over the network 0.6 s, the learner 0.05 + 0.3 s.
    found = scaling.predict(costs, 3, overlap=False)
    assert found.seconds == pytest.approx(
        {"workers": 0.1 + 0.2 + 1.0, "network": 0.6, "learner: rollouts": 0.35, "learner: update": 0.0}
    )
    assert found.steps_per_s == pytest.approx(120 / 2.25)
    assert found.bottleneck == "workers"
    # On one core the three need 1.2 s for what each alone needs 0.4 s of computing for.
    crowded = scaling.predict(costs, 3, overlap=False, cores=1)
    assert crowded.steps_per_s == pytest.approx(120 / 2.45)


@pytest.mark.parametrize(
    ("workers", "update_step", "cores", "seconds", "bottleneck"),
    [
        (3, 0.0, None, 0.1 + 0.2 + 1.0 + 0.2, "workers"),
        (15, 0.0, None, 15 * 0.2, "network"),
        (3, 0.05, None, 0.35 + 120 * 0.05, "learner: update"),
        (3, 0.0, 1, 3 * 0.4 + 0.35, "cores"),
    ],
)
def test_of_parts_that_overlap_the_longest_counts(
    costs: scaling.Costs, workers: int, update_step: float, cores: int | None, seconds: float, bottleneck: str
) -> None:
    case = replace(costs, update_step=update_step)
    found = scaling.predict(case, workers, overlap=True, cores=cores)
    assert found.bottleneck == bottleneck
    assert found.steps_per_s == pytest.approx(workers * 40 / seconds)


def test_the_record_is_predicted_within_a_fifth_and_has_the_rounds_of_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = json.loads((BENCHMARKS / "scaling.json").read_text())
    assert len(content["tasks"]) == 2
    for found in content["tasks"]:
        rows = scaling.checked(found)
        assert {(row["workers"], row["overlap"]) for row, _, _ in rows} == {(n, way) for n in (1, 2) for way in (0, 1)}
        for row, _, error in rows:
            assert abs(error) < 0.2
            assert row["steps_per_s"] == max(row["all"])
    # The command of the page measures what the record holds.
    asked: list[tuple[str, int]] = []

    def run(task: str, rounds: int, seconds: float) -> dict[str, Any]:
        asked.append((task, rounds))
        return {}

    monkeypatch.setattr(scaling, "run", run)
    monkeypatch.setattr(scaling, "show", lambda content: None)
    monkeypatch.setattr(report, "write", lambda name, content: None)
    monkeypatch.setattr(sys, "argv", ["scaling.py"])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    scaling.main()
    assert asked == [(found["task"], len(found["measured"][0]["all"])) for found in content["tasks"]]
