import math

import pytest
import torch
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import ConfigError
from apexrl.core.metrics import (
    EpisodeMetrics,
    MetricSpec,
    Reduce,
    aggregate_metrics,
    evaluation_log_names,
    to_host,
    training_log_names,
)


def steps(*values: float | bool) -> Tensor:
    """``[T, 1, 1]``"""
    return torch.tensor(values).view(-1, 1, 1)


def fold(metrics: EpisodeMetrics, specs: list[MetricSpec], **storage: Tensor) -> dict[str, list[float]]:
    finished = aggregate_metrics(storage, {spec.name: spec for spec in specs}, metrics)
    return {name: value[finished.ended].tolist() for name, value in finished.value.items()}


def test_two_episodes_in_one_rollout() -> None:
    episodes = fold(EpisodeMetrics(), [], reward=steps(1.0, 2.0, 4.0, 8.0), done=steps(False, True, True, False))
    assert episodes["return"] == [3.0, 4.0]
    assert episodes["episode_len"] == [2.0, 1.0]
    assert episodes["reward"] == [1.5, 4.0]


def test_an_episode_that_spans_rollouts_is_counted_whole() -> None:
    metrics = EpisodeMetrics()
    assert fold(metrics, [], reward=steps(1.0, 2.0), done=steps(False, False))["return"] == []
    assert fold(metrics, [], reward=steps(4.0), done=steps(False))["return"] == []
    episodes = fold(metrics, [], reward=steps(8.0, 16.0), done=steps(True, False))
    assert episodes["return"] == [15.0]
    assert episodes["episode_len"] == [4.0]
    assert fold(metrics, [], reward=steps(0.0), done=steps(True))["return"] == [16.0]


def test_environments_do_not_mix() -> None:
    reward = torch.tensor([[1.0, 10.0], [2.0, 20.0]]).unsqueeze(-1)
    done = torch.tensor([[False, True], [True, True]]).unsqueeze(-1)
    finished = aggregate_metrics({"reward": reward, "done": done}, {}, EpisodeMetrics())
    assert finished.ended.tolist() == [[True, True], [False, True], [False, False]]
    assert finished.value["return"][0].tolist() == [3.0, 10.0]
    assert finished.value["return"][1, 1].item() == 20.0


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("sum", [3.0, 5.0]),
        ("mean", [1.5, 2.5]),
        ("max", [4.0, 7.0]),
        ("min", [-1.0, -2.0]),
        ("last", [-1.0, 7.0]),
    ],
)
def test_reductions(reduce: Reduce, expected: list[float]) -> None:
    episodes = fold(
        EpisodeMetrics(),
        [MetricSpec("height", reduce)],
        reward=steps(0.0, 0.0, 0.0, 0.0),
        done=steps(False, True, False, True),
        height=steps(4.0, -1.0, -2.0, 7.0),
    )
    assert episodes["height"] == expected


@pytest.mark.parametrize(("reduce", "expected"), [("max", 9.0), ("min", -3.0), ("sum", 8.0), ("mean", 2.0)])
def test_reductions_across_rollouts(reduce: Reduce, expected: float) -> None:
    metrics, specs = EpisodeMetrics(), [MetricSpec("height", reduce)]
    fold(metrics, specs, reward=steps(0.0, 0.0), done=steps(False, False), height=steps(9.0, -3.0))
    episodes = fold(metrics, specs, reward=steps(0.0, 0.0), done=steps(False, True), height=steps(1.0, 1.0))
    assert episodes["height"] == [expected]


def test_success_once_and_at_the_end_differ() -> None:
    episodes = fold(
        EpisodeMetrics(),
        [MetricSpec("success"), MetricSpec("fail")],
        reward=steps(0.0, 0.0, 0.0, 0.0),
        done=steps(False, True, False, True),
        success=steps(1.0, 0.0, 0.0, 1.0),
        fail=steps(0.0, 1.0, 0.0, 0.0),
    )
    assert episodes["success_once"] == [1.0, 1.0]
    assert episodes["success_at_end"] == [0.0, 1.0]
    assert episodes["fail_once"] == [1.0, 0.0]
    assert "success" not in episodes


def test_a_missing_metric_is_left_out_of_means_not_counted_as_zero() -> None:
    metrics = EpisodeMetrics()
    nan = math.nan
    episodes = fold(
        metrics,
        [MetricSpec("grasp_reward", "mean")],
        reward=steps(1.0, 1.0, 1.0, 1.0),
        done=steps(False, True, False, True),
        grasp_reward=steps(nan, 4.0, nan, nan),
    )
    assert episodes["grasp_reward"][0] == 4.0
    assert math.isnan(episodes["grasp_reward"][1])
    assert metrics.means()["grasp_reward"].item() == 4.0


def test_a_metric_that_one_rollout_does_not_report_stays_with_its_episode() -> None:
    metrics, specs = EpisodeMetrics(), [MetricSpec("height", "sum")]
    fold(metrics, specs, reward=steps(0.0, 0.0), done=steps(False, False), height=steps(5.0, 5.0))
    assert fold(metrics, specs, reward=steps(0.0), done=steps(True))["height"] == [10.0]
    episodes = fold(metrics, specs, reward=steps(0.0, 0.0), done=steps(False, True), height=steps(1.0, 1.0))
    assert episodes["height"] == [2.0]


def test_success_counts_as_reached_or_not_also_when_it_is_a_fraction() -> None:
    episodes = fold(EpisodeMetrics(), [MetricSpec("success")], reward=steps(0.0), done=steps(True), success=steps(0.5))
    assert (episodes["success_once"], episodes["success_at_end"]) == ([1.0], [1.0])


NAN = math.nan


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (MetricSpec("success"), ["success_once", "success_at_end"]),
        (MetricSpec("fail"), ["fail_once"]),
        (MetricSpec("collision", "max", event=True), ["collision"]),
        (MetricSpec("collision", "last", event=True), ["collision"]),
    ],
)
def test_an_event_counts_zero_where_an_episode_does_not_report_it(spec: MetricSpec, fields: list[str]) -> None:
    # Four episodes of two steps; the event is reported at the end of the third, when it happens.
    metrics = EpisodeMetrics()
    episodes = fold(
        metrics,
        [spec],
        reward=steps(*[0.0] * 8),
        done=steps(*[False, True] * 4),
        **{spec.name: steps(NAN, NAN, NAN, NAN, NAN, 1.0, NAN, NAN)},
    )
    for field in fields:
        assert episodes[field] == [0.0, 0.0, 1.0, 0.0]
        assert metrics.means()[field].item() == 0.25
    assert metrics.events() == set(fields)


def test_an_event_that_was_never_reported_is_unknown() -> None:
    metrics, specs = EpisodeMetrics(), [MetricSpec("success")]
    episodes = fold(metrics, specs, reward=steps(0.0, 0.0), done=steps(False, True), success=steps(NAN, NAN))
    assert math.isnan(episodes["success_once"][0])
    assert math.isnan(metrics.means()["success_once"].item())
    assert metrics.events() == set()


def test_episodes_before_the_first_report_of_an_event_count_in_the_same_mean() -> None:
    # Three rollouts between two logs: the environment does not know the metric before the third.
    metrics, spec = EpisodeMetrics(), MetricSpec("success")
    fold(metrics, [], reward=steps(0.0, 0.0), done=steps(True, True))
    fold(metrics, [], reward=steps(0.0), done=steps(True))
    fold(metrics, [spec], reward=steps(0.0), done=steps(True), success=steps(1.0))
    assert metrics.means()["success_once"].item() == 0.25
    assert metrics.count("success_once").item() == 4
    # After the next log only what follows counts, and what was reported once stays known.
    metrics.clear()
    fold(metrics, [], reward=steps(0.0, 0.0), done=steps(True, True))
    assert metrics.means()["success_once"].item() == 0.0


def test_an_event_at_an_earlier_step_is_not_one_at_the_end() -> None:
    episodes = fold(
        EpisodeMetrics(),
        [MetricSpec("success")],
        reward=steps(0.0, 0.0),
        done=steps(False, True),
        success=steps(1.0, NAN),
    )
    assert (episodes["success_once"], episodes["success_at_end"]) == ([1.0], [0.0])


def test_what_is_known_of_metrics_survives_a_round_trip() -> None:
    before, after = EpisodeMetrics(), EpisodeMetrics()
    fold(before, [MetricSpec("success")], reward=steps(0.0, 0.0), done=steps(True, False), success=steps(NAN, 1.0))
    after.load_state_dict(before.state_dict(), torch.device("cpu"))
    # The environment that goes on has not seen the metric yet.
    episodes = fold(after, [], reward=steps(0.0, 0.0), done=steps(True, True))
    assert episodes["success_once"] == [1.0, 0.0]
    assert after.means()["success_once"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["reward", "return", "episode_len", "done", "success_once"])
def test_names_of_episode_fields_are_refused(name: str) -> None:
    with refused(ConfigError, f"'{name}'", "Rename"):
        MetricSpec(name)


def test_an_unknown_reduction_is_refused() -> None:
    with refused(ConfigError, "MetricSpec.reduce", "'height'", ("sum", "mean", "max", "min", "last"), "'median'"):
        MetricSpec("height", "median")  # type: ignore[arg-type]


def test_means_cover_everything_since_clear() -> None:
    metrics = EpisodeMetrics()
    fold(metrics, [], reward=steps(1.0, 3.0), done=steps(True, True))
    fold(metrics, [], reward=steps(8.0), done=steps(True))
    assert metrics.means()["return"].item() == 4.0
    metrics.clear()
    fold(metrics, [], reward=steps(5.0), done=steps(True))
    assert metrics.means()["return"].item() == 5.0


def test_means_are_nan_while_no_episode_ended() -> None:
    metrics = EpisodeMetrics()
    fold(metrics, [], reward=steps(1.0), done=steps(False))
    assert math.isnan(metrics.means()["return"].item())


def test_state_goes_on_after_a_round_trip() -> None:
    before, after = EpisodeMetrics(), EpisodeMetrics()
    fold(before, [], reward=steps(1.0, 2.0), done=steps(True, False))
    after.load_state_dict(before.state_dict(), torch.device("cpu"))
    assert fold(after, [], reward=steps(4.0), done=steps(True))["return"] == [6.0]
    assert after.means()["return"].item() == 3.5


def test_log_names() -> None:
    specs = {"grasp_reward": MetricSpec("grasp_reward"), "velocity": MetricSpec("velocity", group="reward_components")}
    assert training_log_names("return", specs) == ["rollout/return", "episode/mean_reward"]
    assert training_log_names("success_once", specs) == ["rollout/success_once", "rollout/success_rate"]
    assert training_log_names("grasp_reward", specs) == ["reward/grasp_reward"]
    assert training_log_names("velocity", specs) == ["reward_components/velocity"]
    assert evaluation_log_names("fail_once") == ["eval/fail_once", "eval/fail_rate"]
    assert evaluation_log_names("grasp_reward") == ["eval_reward/grasp_reward"]


def test_to_host_mixes_tensors_and_floats() -> None:
    host = to_host({"a": torch.tensor(1.5), "b": 2, "c": torch.tensor(3)})
    assert host == {"a": 1.5, "b": 2.0, "c": 3.0}
    assert all(type(value) is float for value in host.values())


def test_kept_episodes_are_read_by_field() -> None:
    metrics = EpisodeMetrics(keep_episodes=True)
    done = steps(False, True, True)
    fold(metrics, [], reward=steps(1.0, 2.0, 4.0), done=done)
    fold(metrics, [MetricSpec("success"), MetricSpec("odd")], reward=steps(8.0, 16.0, 32.0), done=done,
         success=steps(0.0, 0.0, 1.0), odd=steps(math.nan, math.nan, 3.0))  # fmt: skip
    assert metrics["return"].tolist() == [3.0, 4.0, 24.0, 32.0]
    assert metrics["odd"].tolist() == [3.0], "what is not known is left out"
    assert metrics["success"].tolist() == [0.0, 0.0, 0.0, 1.0], "an event counts 0 where it was not reported"
    assert set(metrics) == {"return", "episode_len", "reward", "success_once", "success_at_end", "odd"}
    metrics.clear()
    assert metrics["return"].tolist() == []
    with refused(KeyError, "'lift'", "'odd'"):
        metrics["lift"]


def test_episodes_that_are_not_kept_are_read_as_their_mean() -> None:
    metrics = EpisodeMetrics()
    fold(metrics, [], reward=steps(1.0, 2.0, 4.0), done=steps(False, True, True))
    assert metrics["return"].tolist() == [3.5]
    assert {name: value.tolist() for name, value in metrics.items()} == {
        "return": [3.5], "episode_len": [1.5], "reward": [2.75]
    }  # fmt: skip


def test_a_storage_without_ends_of_episodes_is_refused() -> None:
    with refused(KeyError, "'done' or 'done_mask'", ["reward"]):
        aggregate_metrics({"reward": steps(1.0)}, {}, EpisodeMetrics())
