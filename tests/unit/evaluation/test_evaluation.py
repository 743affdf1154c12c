import copy
import csv
import json
import math
import pickle
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.refusals import refused
from tests.scripted import ScriptedEnv
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.core.metrics import MetricSpec
from apexrl.core.types import EnvStep
from apexrl.envs import make_env
from apexrl.evaluation.evaluate import EvaluationResult, evaluate
from apexrl.evaluation.step_csv import save_step_csvs
from apexrl.evaluation.video import record_video
from apexrl.policies import ActorCritic, RecurrentActorCritic


def policy_for(env: ScriptedEnv) -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic.for_env(env)


def test_every_environment_has_its_own_quota() -> None:
    # Lengths 1 and 10: counting the first 4 episodes to end would take 4 short ones.
    env = ScriptedEnv([1, 10], [False, False])
    result = evaluate(env, policy_for(env), 4)
    assert sorted(result.episodes["episode_len"]) == [1, 1, 10, 10]
    assert sorted(result.episodes["return"]) == [1, 1, 55, 55]


@pytest.mark.parametrize("num_episodes", [1, 2, 3, 7])
def test_exactly_as_many_episodes_as_asked(num_episodes: int) -> None:
    env = ScriptedEnv([2, 3, 4], [True, False, True])
    assert evaluate(env, policy_for(env), num_episodes).num_episodes == num_episodes


def test_success_once_and_at_the_end() -> None:
    # Success is at step 2: environment 0 ends there, environment 1 goes on to step 3.
    env = ScriptedEnv([2, 3], [False, False])
    result = evaluate(env, policy_for(env), 2)
    assert result.mean("success_once") == 1.0
    assert result.mean("success_at_end") == 0.5
    logs = result.logs()
    assert logs["eval/success_rate"] == logs["eval/success_once"] == 1.0
    assert logs["eval/success_at_end"] == 0.5
    assert logs["eval_reward/odd"] == 1.0  # steps 1 (and 3, which is done and so NaN): 1 and 1
    assert (logs["eval/min_reward"], logs["eval/max_reward"]) == (3.0, 6.0)
    assert (logs["eval/mean_reward"], logs["eval/std_reward"]) == (4.5, 1.5)


class RareSuccess(ScriptedEnv):
    """Reports ``success`` at the end of one episode only, and nothing elsewhere."""

    def __init__(self, which: int | None) -> None:
        super().__init__([2], [True])
        self.which = which

    def step(self, action: Tensor) -> EnvStep:
        is_end = int(self.episode) == self.which and int(self.time) == 1
        step = super().step(action)
        metric = {"success": torch.ones(1, 1)} if is_end else {}
        return EnvStep(step.obs, step.reward, step.terminated, step.truncated, step.final_obs, metric, step.log)


def test_a_success_that_is_reported_only_when_it_happens_is_a_rate_of_all_episodes() -> None:
    env = RareSuccess(which=2)
    result = evaluate(env, policy_for(env), 4)
    assert result.episodes["success_once"].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert result.logs()["eval/success_rate"] == result.logs()["eval/success_at_end"] == 0.25


def test_a_success_that_nobody_reports_is_zero_only_where_it_is_known() -> None:
    env = RareSuccess(which=None)
    assert "success_once" not in evaluate(env, policy_for(env), 4).episodes
    result = evaluate(env, policy_for(env), 4, events={"success_once"})
    assert result.logs()["eval/success_rate"] == 0.0


def test_wilson_interval_of_eight_in_ten() -> None:
    # Wilson's interval of 8/10 at 95 %: centre (0.8 + 1.92/10) / 1.384 = 0.7168, half-width 0.2266.
    result = EvaluationResult({"return": np.zeros(10), "success_once": np.array([1.0] * 8 + [0.0] * 2)})
    low, high = result.interval("success_once")
    assert math.isclose(low, 0.4902, abs_tol=1e-3)
    assert math.isclose(high, 0.9433, abs_tol=1e-3)


def test_the_interval_of_the_return_is_students() -> None:
    # Mean 3 and s² = 2.5 of five returns; t with four degrees of freedom is 2.7764.
    low, high = EvaluationResult({"return": np.arange(1.0, 6.0)}).interval("return")
    assert (3 - low, high - 3) == pytest.approx((2.7764 * math.sqrt(2.5 / 5),) * 2, abs=1e-4)


def test_the_result_is_a_number_and_a_sentence() -> None:
    result = EvaluationResult({"return": np.array([1.0, 3.0])})
    assert float(result) == 2.0
    assert f"{result:.1f}" == "2.0"
    assert "2 episodes" in f"{result}"
    assert "2 episodes" in str(result)


def test_the_summary_has_episodes_without_a_failure_and_the_metrics_of_the_task() -> None:
    episodes = {
        "return": np.ones(10),
        "fail_once": np.array([1.0] * 2 + [0.0] * 8),
        "speed": np.array([0.25, 0.75] * 5),
    }
    specs = [MetricSpec("speed", group="task"), MetricSpec("never_reported", group="task")]
    result = EvaluationResult({**episodes, "reward_x": np.ones(10)}, task_metrics=specs)
    # Wilson's interval of 8/10, as above.
    assert "without a failure 80.0 % (49.0 to 94.3 %), speed 0.50, over 10 episodes" in str(result)
    assert "reward_x" not in str(result)
    result = replace(result, task_metrics=[replace(specs[0], at_most=0.25)])
    assert "speed 0.50 (at most 0.25 in 50.0 % of the episodes), over" in str(result)


def test_one_episode_has_no_interval() -> None:
    one = EvaluationResult({name: np.ones(1) for name in ("return", "success_once", "success_at_end")})
    assert str(one) == "return 1.00, success 100.0 %, at the end 100.0 %, over 1 episode"
    assert all(map(math.isnan, one.interval("return")))
    assert one.record()["return_interval"] is None
    assert one.record()["success_rate_interval"] == pytest.approx([0.2065, 1.0], abs=1e-3)  # Wilson's


def test_evaluation_repeats_and_leaves_the_random_state_alone() -> None:
    env = make_env("lift", 4)
    policy = ActorCritic.for_env(env)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = evaluate(env, policy, 6, deterministic=False, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    second = evaluate(env, policy, 6, deterministic=False, seed=3)
    other = evaluate(env, policy, 6, deterministic=False, seed=4)
    assert np.array_equal(first.episodes["return"], second.episodes["return"])
    assert not np.array_equal(first.episodes["return"], other.episodes["return"])


def test_evaluation_does_not_move_the_normaliser_and_restores_the_mode() -> None:
    env = make_env("lift", 2)
    policy = ActorCritic.for_env(env, normalize_obs=True)
    policy.train()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    evaluate(env, policy, 2)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert policy.training


def test_a_recurrent_policy_is_evaluated_with_its_memory() -> None:
    env = make_env("recall", 4)
    policy = RecurrentActorCritic.for_env(env)
    assert evaluate(env, policy, 8).num_episodes == 8


def test_an_environment_that_never_ends_is_given_up_with_a_reason() -> None:
    env = ScriptedEnv([10_000], [False])
    with refused(EnvError, "0 of 1 episodes", "50 steps", "max_episode_steps"):
        evaluate(env, policy_for(env), 1, max_steps=50)


def test_step_tables(tmp_path: Path) -> None:
    env = ScriptedEnv([3, 3], [True, True])
    result = evaluate(env, policy_for(env), 2, record_steps=True)
    assert result.step_rows is not None
    paths = save_step_csvs(result.step_rows, tmp_path / "eval0")
    assert paths == [tmp_path / "eval0" / f"env{index}" / "rewards.csv" for index in range(2)]
    with paths[1].open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "reward", "done", "success", "fail", "odd"]
    assert [float(row["done"]) for row in rows] == [0.0, 0.0, 1.0]
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert [float(row["reward"]) for row in rows] == [1.0, 2.0, 3.0]
    assert [float(row["success"]) for row in rows] == [0.0, 1.0, 0.0]
    assert [row["odd"] for row in rows] == ["1.0", "0.0", ""], "missing at the last step"
    assert [row["fail"] for row in rows] == ["", "", ""], "not declared by the task"


def test_step_tables_hold_the_counted_episodes_alone() -> None:
    # The short environment goes on while the long one finishes; only its one counted episode is in its table.
    env = ScriptedEnv([2, 7], [True, True])
    result = evaluate(env, policy_for(env), 2, record_steps=True)
    assert result.step_rows is not None
    assert [len(rows) for rows in result.step_rows.values()] == [2, 7]


@pytest.mark.parametrize(("dt", "every", "fps"), [(None, 1, 30.0), (0.05, 1, 20.0), (0.008, 4, 31.25)])
def test_a_video_is_in_real_time_with_about_30_frames_per_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dt: float | None, every: int, fps: float
) -> None:
    import imageio.v2 as imageio

    env = make_env("recall", 1)
    monkeypatch.setattr(env, "step_time", lambda: (dt, None))
    path = record_video(env, ActorCritic.for_env(env), tmp_path / "deep" / "video.mp4", num_episodes=2)
    reader = imageio.get_reader(path)
    frames = [frame for frame in reader]  # noqa: C416 (list() asks for an endless length)
    result = evaluate(env, ActorCritic.for_env(env), 2)
    assert len(frames) == math.ceil(int(result.episodes["episode_len"].sum()) / every)
    assert reader.get_meta_data()["fps"] == pytest.approx(fps, rel=0.01)
    assert list(path.parent.iterdir()) == [path], "no temporary file stays"


def test_a_result_is_its_mean_return_as_a_number() -> None:
    result = EvaluationResult({"return": np.array([1.0, 3.0]), "episode_len": np.array([5.0, 7.0])}, num_lost=1)
    assert result > 1
    assert 1 < result <= 2.0
    assert result == 2.0
    assert max(-1.0, result) is result
    assert sorted([result, 1.0]) == [1.0, 2.0]
    assert (result + 1, 1 - result, result / 2, -result, abs(result)) == (3.0, -1.0, 1.0, -2.0, 2.0)
    assert sum([result, result]) == 4.0
    assert round(result, 1) == 2.0
    assert np.mean([result, 4.0]) == statistics.mean([result, 4.0]) == 3.0
    assert statistics.mean([result, result]) == 2.0
    assert np.mean(result) == result.mean() == 2.0
    assert math.isclose(result, 2.0)
    assert f"{result:.1f}" == "2.0"
    assert json.dumps({"return": result}) == '{"return": 2.0}'
    for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result)), replace(result, num_lost=1)):
        assert other == 2.0
        assert (other.num_lost, other.mean("episode_len"), str(other)) == (1, 6.0, str(result))
