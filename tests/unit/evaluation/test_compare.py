from typing import Any

import numpy as np
import pytest
from tests.refusals import refused

from apexrl.core.errors import ConfigError
from apexrl.core.result import EvaluationResult
from apexrl.evaluation.compare import compare


def result(returns: list[float], *, ids: list[int] | None = None, **more: Any) -> EvaluationResult:
    columns: dict[str, Any] = {"return": returns, "episode_len": [10.0] * len(returns)}
    columns |= {"success_once": more.pop("success_once")} if "success_once" in more else {}
    info = {"episode_id": ids or range(len(returns))}
    info |= {"task_id": more.pop("task_id")} if "task_id" in more else {}
    tables = ({name: np.array(values, np.float64) for name, values in table.items()} for table in (columns, info))
    episodes, numbers = tables
    return EvaluationResult(episodes, info=numbers, **more)


def test_a_policy_does_not_differ_from_itself() -> None:
    a = result([1.0, 5.0, 2.0], success_once=[0, 1, 0])
    comparison = compare(a, a)
    assert comparison.significant == []
    assert comparison.verdict() == "No significant difference: A and B did the same in each of 3 paired episodes."
    assert comparison.fields["return"].interval == (0.0, 0.0)
    low, high = comparison.fields["success_once"].interval
    assert low < 0 < high, "three pairs do not show that the rates are the same"


def test_one_pair_has_no_interval_of_the_return() -> None:
    a = result([1.0], success_once=[1])
    comparison = compare(a, a)
    assert comparison.verdict() == "No significant difference: A and B did the same in each of 1 paired episode."
    assert comparison.to_dict()["return"]["interval"] is None
    assert len(comparison.to_dict()["success_once"]["interval"]) == 2


def test_pairing_finds_what_the_spread_of_episodes_would_hide() -> None:
    # Returns from 0 to 900, and B is 1 better in each: all ten signs agree, p = 2 / 2^10.
    a = result([100.0 * i for i in range(10)])
    b = result([100.0 * i + 1 for i in range(10)])
    found = compare(a, b).fields["return"]
    assert (found.a, found.b, found.difference, found.interval) == (450.0, 451.0, 1.0, (1.0, 1.0))
    assert found.p_value == pytest.approx(2 / 1024)
    assert compare(a, b).verdict() == (
        "The difference is statistically significant: B has a higher return (p = 0.002), over 10 paired episodes."
    )
    assert "B has a lower return" in compare(b, a).verdict()


def test_a_few_episodes_cannot_tell() -> None:
    # Five times better: p = 2 / 32 at the least.
    comparison = compare(result([0.0] * 5), result([9.0, 8.0, 7.0, 6.0, 5.0]))
    assert comparison.fields["return"].p_value == pytest.approx(1 / 16)
    assert comparison.verdict() == "No significant difference: 5 paired episodes cannot tell A and B apart."


def test_success_is_tested_by_the_pairs_that_differ() -> None:
    a = result([0.0] * 12, success_once=[1, *[0] * 9, 1, 0])
    b = result([0.0] * 12, success_once=[0, *[1] * 9, 1, 0])
    found = compare(a, b).fields["success_once"]
    assert (found.only_a, found.only_b) == (1, 9)
    assert found.p_value == pytest.approx(22 / 1024)
    assert found.difference == pytest.approx(8 / 12)
    low, high = found.interval
    assert 0 < low < 8 / 12 < high <= 1
    # Two tests share the 5 %, so each has 2.5 %.
    assert compare(a, b).to_dict()["level"] == 0.025
    assert compare(a, b).significant == ["success_once"]


def test_two_tests_share_the_level() -> None:
    # Six of six: p = 2 / 64 = 0.031, below 0.05 and above 0.025.
    a, b = result([0.0] * 6, success_once=[0] * 6), result([0.0] * 6, success_once=[1] * 6)
    assert compare(a, b).fields["success_once"].p_value == pytest.approx(1 / 32)
    assert compare(a, b).significant == []
    assert compare(result([0.0] * 6), result([1.0] * 6)).significant == ["return"]


def test_episodes_are_paired_by_their_number_and_lost_ones_left_out() -> None:
    # Of four episodes A lost number 3 and B number 1: 0 and 2 remain, whatever the order.
    a = result([1.0, 2.0, 3.0], ids=[0, 1, 2], num_lost=1)
    b = result([30.0, 10.0, 99.0], ids=[2, 0, 3], num_lost=1)
    comparison = compare(a, b)
    assert (comparison.num_pairs, comparison.num_left_out) == (2, 2)
    assert comparison.fields["return"].difference == pytest.approx((9 + 27) / 2)


def test_episodes_that_neither_has_are_left_out_too() -> None:
    a = result([1.0, 2.0], ids=[0, 1], num_lost=2)
    b = result([1.0, 2.0], ids=[1, 2], num_lost=2)
    assert (compare(a, b).num_pairs, compare(a, b).num_left_out) == (1, 3)


def test_success_that_was_not_reported_is_not_a_failure() -> None:
    a = result([0.0] * 3, success_once=[1, np.nan, 0])
    b = result([0.0] * 3, success_once=[1, 1, 1])
    found = compare(a, b).fields["success_once"]
    assert (found.only_a, found.only_b, found.a) == (0, 1, 0.5)


def test_each_task_of_a_suite() -> None:
    a = result([0.0] * 4, success_once=[1, 1, 0, 0], task_id=[0, 0, 1, 1], task_names=["reach", "push"])
    b = result([0.0] * 4, success_once=[1, 1, 1, 1], task_id=[0, 0, 1, 1], task_names=["reach", "push"])
    tasks = compare(a, b).to_dict()["per_task"]
    assert {name: (task["a"], task["b"], task["only_b"]) for name, task in tasks.items()} == {
        "reach": (1.0, 1.0, 0),
        "push": (0.0, 1.0, 2),
    }


def test_nothing_in_common() -> None:
    with refused(ConfigError, "A and B", "no episode in common", "return"):
        compare(result([1.0], ids=[0]), result([1.0], ids=[1]))
    with refused(ConfigError, "B", "given starts"):
        compare(result([1.0]), EvaluationResult({"return": np.ones(1)}))


def test_an_episode_without_a_number_is_left_out_and_decides_nothing() -> None:
    a = result([1.0] * 12, success_once=[1] * 12, task_id=[0] * 12, task_names=["push"])
    b = result([float("nan"), *[1.0] * 11], success_once=[np.nan, *[1] * 11], task_id=[0] * 12, task_names=["push"])
    comparison = compare(a, b)
    assert (comparison.num_pairs, comparison.num_left_out, comparison.significant) == (11, 1, [])
    assert comparison.fields["return"].b == 1.0
    assert comparison.per_task["push"].b == 1.0
    with refused(ConfigError, "A and B", "no episode in common", "return"):
        compare(result([1.0]), result([float("nan")]))
