"""Document 000: one rollout for training and evaluation, called nearly as the document does."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from apexrl import EpisodeMetrics, OnPolicyRunner, PPOConfig, aggregate_metrics, get_metric_specs_from_env, make_env
from apexrl.evaluation import save_step_csvs


@pytest.fixture
def runner(tmp_path: Path) -> OnPolicyRunner:
    torch.manual_seed(0)
    env = make_env("lift", 4)
    env.reset(0)
    return OnPolicyRunner(env, cfg=PPOConfig(num_steps=8), log_dir=tmp_path, device="cpu")


def test_training_call(runner: OnPolicyRunner) -> None:
    next_obs = runner.env.reset(0)
    next_obs, container, step_data = runner.rollout(
        next_obs,
        8,
        envs=runner.env,
        policy_fn=lambda obs: runner.policy(obs=obs),
        collect_for_training=True,
        record_step_data=False,
    )
    assert isinstance(container, TensorDict)
    assert container.batch_size == torch.Size([8, 4])
    assert step_data is None
    metrics = runner.algorithm.update(container)
    assert metrics["loss"].isfinite()
    _, again, _ = runner.rollout(next_obs, 8)
    assert again is not None
    assert torch.equal(again["observation"][0], next_obs), "the next rollout goes on where this one stopped"


def test_evaluation_call(runner: OnPolicyRunner, tmp_path: Path) -> None:
    eval_envs = runner.env.spawn(2)
    eval_obs = eval_envs.reset(1)

    def eval_policy_fn(obs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        action = runner.policy(obs, deterministic=True).action
        return action, None, None, None

    training_episodes = runner.episode_metrics.state_dict()
    _, storage, step_data_per_env = runner.rollout(
        eval_obs, 120, envs=eval_envs, policy_fn=eval_policy_fn, collect_for_training=False, record_step_data=True
    )
    assert storage is None
    assert step_data_per_env is not None
    assert set(step_data_per_env) == {0, 1}
    assert all(len(rows) == 120 for rows in step_data_per_env.values())
    row = step_data_per_env[0][0]
    assert {"step", "reward", "success", "fail", "reach_reward", "grasp_reward", "lift_reward"} <= set(row)
    assert row["reward"] == pytest.approx(row["reach_reward"] + row["grasp_reward"] + row["lift_reward"], abs=1e-5)
    assert runner.episode_metrics.state_dict() == training_episodes, "training and evaluation episodes never mix"
    assert runner.eval_episode_metrics.means()["return"] > 0
    paths = save_step_csvs(step_data_per_env, tmp_path / "eval" / "eval0")
    assert paths[1] == tmp_path / "eval" / "eval0" / "env1" / "rewards.csv"


def test_metrics_come_from_declared_specs() -> None:
    env = make_env("lift", 3)
    metric_specs = get_metric_specs_from_env(env)
    assert {"success", "fail", "reach_reward", "grasp_reward", "lift_reward"} == set(metric_specs)
    num_steps, num_envs = 5, 3
    metrics_storage = {name: torch.full((num_steps, num_envs, 1), 0.5) for name in metric_specs}
    metrics_storage["reward"] = torch.ones(num_steps, num_envs, 1)
    metrics_storage["done"] = torch.zeros(num_steps, num_envs, 1, dtype=torch.bool)
    metrics_storage["done"][-1] = True
    episode_metrics = EpisodeMetrics()
    aggregate_metrics(metrics_storage, metric_specs, episode_metrics)
    means = episode_metrics.means()
    assert means["return"] == 5.0
    assert means["reward"] == 1.0
    assert means["episode_len"] == 5.0
    assert means["grasp_reward"] == 2.5


def test_log_names_of_training_and_evaluation(runner: OnPolicyRunner) -> None:
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
