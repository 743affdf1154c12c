"""Curves over seeds: thinning, means and intervals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tests.unit.experiments.report.test_runs import evaluate_run, groups_of, make_run

from apexrl.core.functional.intervals import wilson_interval
from apexrl.experiments.report.curves import (
    common_axis,
    evaluation_curve,
    final_estimate,
    summarize,
    task_estimates,
    thin,
    time_spent,
    training_curve,
)


def test_thinning_keeps_means_and_the_number_asked_for() -> None:
    places, values = thin((np.arange(10.0), np.arange(10.0) ** 2), 5)
    assert places.tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert values.tolist() == [0.5, 6.5, 20.5, 42.5, 72.5]  # (0 + 1) / 2, (4 + 9) / 2, ...


def test_thinning_leaves_short_curves_alone() -> None:
    places, values = thin((np.arange(3.0), np.ones(3)), 3)
    assert (places.tolist(), values.tolist()) == ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0])


def test_the_mean_over_seeds_goes_as_far_as_all_of_them(tmp_path: Path) -> None:
    # Seed 0 logs 1, 2, 3, 4 and seed 1 logs 2, 3: together 1.5 and 2.5.
    (group,) = groups_of(make_run(tmp_path / "a-0"), make_run(tmp_path / "a-1", seed=1, lines=2))
    curve = training_curve(group, "rollout/return", "total_steps", 100)
    assert curve.mean[0].tolist() == [100.0, 200.0]
    assert curve.mean[1].tolist() == [1.5, 2.5]
    assert curve.interval is not None
    # Student's t of two values one apart: t with one degree of freedom is 12.706.
    assert [bound.tolist() for bound in curve.interval] == [
        pytest.approx([1.5 - 6.353, 2.5 - 6.353], abs=1e-3),
        pytest.approx([1.5 + 6.353, 2.5 + 6.353], abs=1e-3),
    ]
    assert [len(places) for places, _ in curve.runs] == [4, 2]


def test_runs_that_log_at_other_steps_are_interpolated() -> None:
    curve = summarize([(np.array([0.0, 10.0]), np.array([0.0, 10.0])), (np.array([5.0, 8.0]), np.array([1.0, 1.0]))])
    assert curve.mean[0].tolist() == [5.0, 8.0]
    assert curve.mean[1].tolist() == [3.0, 4.5]  # (5 + 1) / 2, (8 + 1) / 2


def test_runs_without_a_common_stretch_have_no_mean() -> None:
    curve = summarize([(np.array([0.0, 1.0]), np.ones(2)), (np.array([5.0, 8.0]), np.ones(2))])
    assert len(curve.mean[0]) == 0
    assert len(curve.runs) == 2


def test_the_interval_of_a_rate_stays_within_0_and_1() -> None:
    runs = [(np.array([0.0, 1.0]), np.array([0.0, 1.0])), (np.array([0.0, 1.0]), np.array([0.2, 0.7]))]
    interval = summarize(runs, is_rate=True).interval
    assert interval is not None
    assert [bound.tolist() for bound in interval] == [[0.0, 0.0], [1.0, 1.0]]


def test_evaluations_of_one_run_have_their_recorded_intervals(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    evaluate_run(path, 200, **{"return": [0.0] * 10}, success_once=[1.0] * 2 + [0.0] * 8)
    (group,) = groups_of(path)
    curve = evaluation_curve(group, "success_rate", "total_steps")
    assert curve.mean[0].tolist() == [200.0]
    assert curve.interval is not None
    assert [float(bound[0]) for bound in curve.interval] == list(wilson_interval(2, 10))


def test_the_final_evaluation_is_the_last_one_and_seeds_give_its_interval(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"run-{seed}", seed) for seed in range(3)]
    for seed, path in enumerate(paths):
        evaluate_run(path, 200, **{"return": [100.0, 100.0]})
        evaluate_run(path, 400, **{"return": [seed + 1.0, seed + 3.0]})
    (group,) = groups_of(*paths)
    estimate = final_estimate(group, "return")
    assert estimate is not None
    # Of 2, 3 and 4: s = 1, t with two degrees of freedom is 4.3027.
    assert (estimate.mean, estimate.low) == pytest.approx((3.0, 3 - 4.3027 / math.sqrt(3)), abs=1e-4)
    assert estimate.high - 3 == pytest.approx(3 - estimate.low)
    assert final_estimate(group, "episode_len") is None


def test_runs_that_all_succeed_have_the_interval_of_their_episodes(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"run-{seed}", seed) for seed in range(3)]
    for path in paths:
        evaluate_run(path, 200, **{"return": [1.0] * 10}, success_once=[1.0] * 10)
    (group,) = groups_of(*paths)
    estimate = final_estimate(group, "success_rate")
    assert estimate is not None
    assert (estimate.mean, estimate.low, estimate.high) == (1.0, *wilson_interval(30, 30))


def test_the_tasks_of_a_suite_count_the_episodes_of_all_seeds(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"run-{seed}", seed) for seed in range(2)]
    for path in paths:
        evaluate_run(
            path, 400, **{"return": [0.0] * 4}, success_once=[1.0, 0.0, 1.0, 1.0], task_id=[0.0, 0.0, 1.0, 1.0]
        )
    (group,) = groups_of(*paths)
    estimates = task_estimates(group)
    assert {task: (rate.mean, episodes) for task, (rate, episodes) in estimates.items()} == {
        "reach": (0.5, 4),
        "push": (1.0, 4),
    }
    assert (estimates["push"][0].low, estimates["push"][0].high) == wilson_interval(4, 4)


def test_imitation_alone_is_drawn_over_iterations(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    text = (path / "metrics.jsonl").read_text()
    for step in (100, 200, 300, 400):
        text = text.replace(f'"total_steps": {step}', '"total_steps": 0')
    (path / "metrics.jsonl").write_text(text)
    (group,) = groups_of(path)
    assert common_axis(group.runs) == "iteration"
    assert training_curve(group, "rollout/return", "iteration", 9).mean[0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert training_curve(group, "rollout/return", "total_steps", 9).runs == []


def test_the_time_is_added_up_from_the_logged_iterations(tmp_path: Path) -> None:
    (group,) = groups_of(make_run(tmp_path / "run"))
    spent = time_spent(group.runs[0])
    assert spent is not None
    assert (spent.seconds, spent.steps_per_second, spent.rollout_share) == (8.0, 50.0, 0.25)  # 400 steps at 50
