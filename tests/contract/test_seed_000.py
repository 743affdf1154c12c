"""Document 000: one rollout for training and evaluation, as the document calls it."""

from __future__ import annotations

import csv
import inspect
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl import EpisodeMetrics, OnPolicyRunner, PPOConfig, aggregate_metrics, get_metric_specs_from_env, make_env

PolicyFn = Callable[[Any], tuple[Tensor | None, ...]]
LIFT_METRICS = {"reach_reward", "grasp_reward", "lift_reward"}


class Runner(OnPolicyRunner):
    """The document's runner: its private methods are public ones here, and its two loops are written out."""

    save_csv = True

    def _rollout(
        self,
        obs: Any,
        num_steps: int,
        envs: Any = None,
        policy_fn: PolicyFn | None = None,
        collect_for_training: bool = True,
        record_step_data: bool = False,
    ) -> Any:
        next_obs, storage, step_data_per_env = self.rollout(
            obs, num_steps, envs, policy_fn, collect_for_training, record_step_data
        )
        return next_obs, storage, step_data_per_env

    def train(self, num_iterations: int) -> list[dict[str, float]]:
        """ "Training 调用"."""
        next_obs, logs = self.envs.reset(0), []
        for _ in range(num_iterations):
            next_obs, container, _ = self._rollout(
                next_obs,
                self.num_steps,
                envs=self.envs,
                policy_fn=lambda obs: self.policy(obs=obs),
                collect_for_training=True,
                record_step_data=False,
            )
            self.agent.update(container)
            logs.append({f"rollout/{name}": mean(values) for name, values in self.episode_metrics.items()})
            self.episode_metrics.clear()
        return logs

    def _evaluate(self, max_steps: int) -> dict[str, float]:
        """ "Evaluation 调用"."""
        agent = self.agent

        def eval_policy_fn(obs: Any) -> tuple[Tensor | None, ...]:
            action = agent.get_action(obs, deterministic=True)
            return action, None, None, None

        self.eval_episode_metrics.clear()
        eval_obs = self.eval_envs.reset(1)
        _, _, step_data_per_env = self._rollout(
            eval_obs,
            max_steps,
            envs=self.eval_envs,
            policy_fn=eval_policy_fn,
            collect_for_training=False,
            record_step_data=self.save_csv,
        )
        if self.save_csv:
            self.save_step_csvs(step_data_per_env)
        return self.build_eval_logs()


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    torch.manual_seed(0)
    return Runner(make_env("lift", 4), cfg=PPOConfig(num_steps=8), log_dir=tmp_path, device="cpu")


def test_the_signature_of_a_rollout() -> None:
    signature = inspect.signature(OnPolicyRunner.rollout)
    assert {name: parameter.default for name, parameter in signature.parameters.items() if name != "self"} == {
        "obs": inspect.Parameter.empty,
        "num_steps": inspect.Parameter.empty,
        "envs": None,
        "policy_fn": None,
        "collect_for_training": True,
        "record_step_data": False,
    }


def test_training_call(runner: Runner) -> None:
    next_obs = runner.envs.reset(0)
    next_obs, container, step_data = runner.rollout(
        next_obs,
        runner.num_steps,
        envs=runner.envs,
        policy_fn=lambda obs: runner.policy(obs=obs),
        collect_for_training=True,
        record_step_data=False,
    )
    assert isinstance(container, TensorDict)
    assert container.batch_size == torch.Size([8, 4])
    assert {"action", "sample_log_prob", "value", "reward", "done"} <= set(container.keys())
    assert step_data is None
    metrics = runner.algorithm.update(container)
    assert metrics["loss"].isfinite()
    _, again, _ = runner.rollout(next_obs, 8)
    assert again is not None
    assert torch.equal(again["observation"][0], next_obs), "the next rollout continues where this one stopped"


def test_the_training_loop(runner: Runner) -> None:
    logs = runner.train(26)
    # Episodes last 100 steps: they end in the 13th and in the 25th rollout of 8 steps.
    with_episodes = [index for index, log in enumerate(logs) if log["rollout/episode_len"] == 100.0]
    assert with_episodes == [12, 24]
    assert {f"rollout/{name}" for name in ("return", "reward", "success_once")} <= set(logs[12])


def test_evaluation_call(runner: Runner) -> None:
    def eval_policy_fn(obs: Any) -> tuple[Tensor | None, ...]:
        action = runner.agent.get_action(obs, deterministic=True)
        return action, None, None, None

    eval_obs = runner.eval_envs.reset(1)
    training_episodes = runner.episode_metrics.state_dict()
    _, storage, step_data_per_env = runner.rollout(
        eval_obs, 120, envs=runner.eval_envs, policy_fn=eval_policy_fn, collect_for_training=False,
        record_step_data=True,
    )  # fmt: skip
    assert storage is None
    assert step_data_per_env is not None
    assert set(step_data_per_env) == set(range(runner.eval_envs.num_envs))
    assert all(len(rows) == 120 for rows in step_data_per_env.values())
    row = step_data_per_env[0][0]
    assert {"step", "reward", "success", "fail", *LIFT_METRICS} <= set(row)
    assert row["reward"] == pytest.approx(sum(row[name] for name in LIFT_METRICS), abs=1e-5)
    assert runner.episode_metrics.state_dict() == training_episodes, "training and evaluation episodes never mix"
    episode_metrics = runner.eval_episode_metrics
    assert len(episode_metrics["return"]) == runner.eval_envs.num_envs
    np.testing.assert_array_equal(episode_metrics["success"], episode_metrics["success_once"])
    # "_build_eval_logs", with Python's mean and with NumPy's.
    for average in (mean, np.mean):
        logs = {
            "eval/return": average(episode_metrics["return"]),
            "eval/success_rate": average(episode_metrics["success"]),
            "eval/fail_rate": average(episode_metrics["fail"]),
            **{f"eval_reward/{metric_name}": average(episode_metrics[metric_name]) for metric_name in LIFT_METRICS},
        }
        ours = runner.build_eval_logs()
        assert {name: ours[name] for name in logs} == pytest.approx({name: float(x) for name, x in logs.items()})


def test_the_evaluation_loop(runner: Runner, tmp_path: Path) -> None:
    first = runner._evaluate(max_steps=120)
    episode_metrics = runner.eval_episode_metrics
    assert first["eval/return"] == pytest.approx(mean(episode_metrics["return"]))
    assert first["eval/success_rate"] == pytest.approx(mean(episode_metrics["success"]))
    assert first["eval/fail_rate"] == pytest.approx(mean(episode_metrics["fail"]))
    for metric_name in LIFT_METRICS:
        values = episode_metrics[metric_name]
        assert first[f"eval_reward/{metric_name}"] == pytest.approx(mean(values))
    assert runner._evaluate(max_steps=120) == first, "the same seed and weights, counted from new episodes"
    for number in (0, 1):
        found = sorted((tmp_path / "eval" / f"eval{number}").glob("env*/rewards.csv"))
        assert len(found) == runner.eval_envs.num_envs
    with (tmp_path / "eval" / "eval1" / "env0" / "rewards.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"step", "reward", "success", "fail", *LIFT_METRICS} <= set(rows[0])
    assert [index for index, row in enumerate(rows) if float(row["done"])] == [99]


def test_training_and_evaluation_take_turns(runner: Runner) -> None:
    runner.learn(4 * 8 * 2)
    logs = runner._evaluate(max_steps=120)
    assert logs["eval/episode_len"] == 100.0
    runner.train(2)
    seen: dict[str, float] = {}
    runner.add_callback("post_iteration", lambda _, stats: seen.update(stats))
    runner.learn(4 * 8 * 20)
    assert seen["episode/mean_length"] == 100.0
    assert runner._evaluate(max_steps=120)["eval/episode_len"] == 100.0


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_metrics_are_collected_into_storage_and_folded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    envs = make_env("lift", 3)
    num_steps, num_envs = 5, envs.num_envs
    # 1. the metrics of the task
    metric_specs = get_metric_specs_from_env(envs)
    assert {"success", "fail", *LIFT_METRICS} == set(metric_specs)
    # 2. storage on the device
    metrics_storage = {"done_mask": torch.empty(shape, dtype=dtype)}
    metrics_storage |= {name: torch.empty(shape) for name in metric_specs}
    # 3. every step
    envs.reset(0)
    for step in range(num_steps):
        infos: dict[str, Any] = dict(envs.step(torch.zeros(num_envs, 3)).metric)
        info_to_log = infos.get("final_info", infos)
        for metric_name in metric_specs:
            value = info_to_log.get(metric_name, 0.0)
            metrics_storage[metric_name][step] = value.view(shape[1:])
        metrics_storage["done_mask"][step] = step == num_steps - 1
    # 4. once a rollout
    episode_metrics = EpisodeMetrics(keep_episodes=True)
    aggregate_metrics(metrics_storage, metric_specs, episode_metrics)
    assert episode_metrics["episode_len"].tolist() == [5.0] * 3
    reach = metrics_storage["reach_reward"].view(5, 3).double().sum(0)
    np.testing.assert_allclose(episode_metrics["reach_reward"], reach)
    assert "return" not in episode_metrics, "there was no reward in the storage"


def test_fields_of_an_episode() -> None:
    storage = {
        "reward": torch.ones(5, 3),
        "done_mask": torch.tensor([False] * 4 + [True])[:, None].expand(5, 3),
        "success": torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])[:, None].expand(5, 3),
    }
    specs = get_metric_specs_from_env(make_env("lift", 3))
    episode_metrics = EpisodeMetrics()
    aggregate_metrics(storage, specs, episode_metrics)
    fields = {name: mean(episode_metrics[name]) for name in ("return", "reward", "episode_len")}
    assert fields == {"return": 5.0, "reward": 1.0, "episode_len": 5.0}
    assert mean(episode_metrics["success_once"]) == 1.0, "ever, although the episode did not end there"
    assert mean(episode_metrics["success_at_end"]) == 0.0


def test_log_names_of_training_and_evaluation(runner: Runner) -> None:
    seen: dict[str, float] = {}
    runner.add_callback("post_iteration", lambda _, stats: seen.update(stats))
    runner.learn(4 * 8 * 30)
    assert {"rollout/success_rate", "rollout/return", "reward/grasp_reward", "rollout/mean_reward"} <= set(seen)
    logs = runner.eval(4)
    assert {"eval/return", "eval/success_rate", "eval/success_once", "eval/success_at_end", "eval/fail_rate"} <= set(
        logs
    )
    assert "eval_reward/grasp_reward" in logs


def test_step_tables_of_an_evaluation_need_no_video(tmp_path: Path) -> None:
    env = make_env("lift", 4)
    runner = OnPolicyRunner(env, log_dir=tmp_path, device="cpu")
    runner.save_step_csv = True
    runner.evaluate(2)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.csv")) == [
        "eval/eval0/env0/rewards.csv",
        "eval/eval0/env1/rewards.csv",
    ]
