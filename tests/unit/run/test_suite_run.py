"""What a run on a suite adds to any other."""

import json
import math
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from tests.point_suite import GOALS, PointSimulator, PointSuite

from apexrl import ActorCritic, TrainingConfig
from apexrl.algorithms import BC, RLOO, AlgorithmConfig, BCConfig, RLOOConfig
from apexrl.algorithms.rloo import explore_with
from apexrl.core.system.files import append_json_line
from apexrl.envs.suites.base import Simulator, Split
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.evaluation.evaluate import evaluate
from apexrl.policies import VLAPolicy
from apexrl.policies.config import VLAConfig
from apexrl.run.build import schedule
from apexrl.run.config import Config
from apexrl.run.loading import load_config
from apexrl.run.sections import LoggingConfig
from apexrl.run.suite import SuiteConfig, imitation_config, write_final_results


def test_every_task_is_evaluated_as_often_as_the_others() -> None:
    training = TrainingConfig(eval_episodes=4, final_eval_episodes=20, eval_interval=3)

    def scheduled(algo: AlgorithmConfig, log_freq: int) -> TrainingConfig:
        logging = LoggingConfig(log_freq=log_freq)
        config = Config(task=SuiteConfig(), policy=VLAConfig(), algo=algo, training=training, logging=logging)
        return schedule(config, num_tasks=3)

    found = scheduled(RLOOConfig(), 7)
    assert (found.eval_episodes, found.final_eval_episodes, found.eval_interval) == (6, 21, 7)
    assert scheduled(BCConfig(num_updates=5), 0).num_train_steps == 5
    assert scheduled(BCConfig(), 0).eval_interval == 3


def test_a_deterministic_evaluation_runs_no_episode_twice() -> None:
    env = SuiteVecEnv(PointSuite(num_tasks=2, num_states=3), 4, num_workers=0, split="val")
    policy = ActorCritic.for_env(env, actor_cfg={"groups": ["state"]})
    assert evaluate(env, policy, 50).num_episodes == 6
    assert evaluate(env, policy, 5).num_episodes == 5
    assert evaluate(env, policy, 50, deterministic=False).num_episodes == 50
    env.close()


def test_damaged_lines_have_no_part_in_the_results(tmp_path: Path) -> None:
    for record in ({"iteration": 1, "step": 8, "return": 0.5}, {"iteration": "2", "step": 9}, {"return": 1.0}):
        append_json_line(tmp_path / "evaluations.jsonl", record)
    append_json_line(tmp_path / "metrics.jsonl", {"train/loss": [5]})
    content = json.loads(write_final_results(tmp_path, 2, 16, 7).read_text())
    assert [entry["step"] for entry in content["evaluations"]] == [1]
    assert len(content["training_metrics"]) == 1


def test_the_steps_of_the_results_mean_one_thing(tmp_path: Path) -> None:
    for iteration in (1, 2):
        append_json_line(tmp_path / "metrics.jsonl", {"iteration": iteration, "total_steps": 60 * iteration})
    # Periodic evaluations after each iteration, and one at the end.
    for iteration, rate in ((1, 0.25), (2, 0.5), (2, 0.75)):
        record = {"iteration": iteration, "step": 60 * iteration, "success_rate": rate}
        append_json_line(tmp_path / "evaluations.jsonl", record)
    content = json.loads(write_final_results(tmp_path, 2, 120, 7).read_text())
    assert (content["total_steps"], content["environment_steps"], content["optimizer_steps"]) == (2, 120, 7)
    assert [line["total_steps"] for line in content["training_metrics"]] == [1, 2]
    assert [line["environment_steps"] for line in content["training_metrics"]] == [60, 120]
    assert json.loads((tmp_path / "metrics.json").read_text()) == content["evaluations"]
    assert [(entry["step"], entry["overall_success_rate"]) for entry in content["evaluations"]] == [
        (1, 0.25),
        (2, 0.75),
    ]


def test_exploration_is_set_where_imitation_left_it_and_kept_where_it_was_learned() -> None:
    env = SuiteVecEnv(PointSuite(), 1, num_workers=0)
    policy = ActorCritic.for_env(env, actor_cfg={"groups": ["state"], "init_std": 0.4})
    log_std = policy.get_parameter("actor.action_head.log_std")
    explore_with(policy, 0.9)
    torch.testing.assert_close(log_std.exp(), torch.full_like(log_std, 0.9))
    with torch.no_grad():
        log_std[0] = math.log(0.2)
    learned = log_std.detach().clone()
    explore_with(policy, 0.5)
    assert torch.equal(log_std, learned)


def test_the_policy_that_a_penalty_compares_with_explores_as_the_trained_one_does() -> None:
    env = SuiteVecEnv(PointSuite(), 1, num_workers=0)
    policy = ActorCritic.for_env(env, actor_cfg={"groups": ["state"], "init_std": 0.4})
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(kl_coef=0.1))
    algorithm.begin_trained(0.9)
    assert algorithm.reference is not None
    for explores in (policy, algorithm.reference):
        log_std = explores.get_parameter("actor.action_head.log_std")
        torch.testing.assert_close(log_std.exp(), torch.full_like(log_std, 0.9))


def test_padding_has_no_part_in_the_statistics_of_actions() -> None:
    env = SuiteVecEnv(PointSuite(), 1, num_workers=0, chunk=2)
    policy = VLAPolicy.for_env(env, chunk=2)
    observation = TensorDict(
        {"state": torch.randn(2, 2), "instruction": torch.zeros(2, 96, dtype=torch.uint8)}, batch_size=[2]
    )
    # Real actions are (1, 0), (3, 0) and (5, 0); the last one is repeated as padding, here far away.
    action = torch.tensor([[1.0, 0.0, 3.0, 0.0], [5.0, 0.0, 99.0, 99.0]])
    samples = TensorDict(
        {"observation": observation, "action": action, "valid_steps": torch.tensor([[2], [1]])}, batch_size=[2]
    )
    BC(policy=policy, cfg=BCConfig()).set_statistics(samples)
    torch.testing.assert_close(policy.scaling.action(torch.tensor([[3.0, 0.0, 3.0, 0.0]])), torch.zeros(1, 4))


class Dying(PointSimulator):
    """Its process dies where x is above 0.8."""

    def advance(self, action: NDArray[np.float32]) -> bool:
        if self.position[0] > 0.8:
            os._exit(3)
        return super().advance(action)


class DyingSuite(PointSuite):
    def init_states(self, task_id: int, split: Split = "train") -> list[NDArray[np.float64]]:
        return [np.array([x, 0.0, 0.0]) for x in (0.4, 0.9, 0.5, 0.6)]

    def make_simulator(self, task_id: int) -> Simulator:
        return Dying(GOALS[task_id], self.radius)


def test_an_episode_whose_worker_died_is_no_failure_of_the_policy() -> None:
    env = SuiteVecEnv(DyingSuite(num_tasks=1, num_states=4, radius=0.3), 2, num_workers=2, split="val")
    policy = ActorCritic.for_env(env, actor_cfg={"groups": ["state"]})
    result = evaluate(env, policy, 4)  # untrained, it hardly moves; the other states lie at the goal
    env.close()
    assert env.counts.replaced == 1
    assert result.num_episodes == 3
    assert result.mean("success_once") == 1.0


def test_imitation_before_a_run_that_collects_in_the_background_does_not() -> None:
    config = load_config("stage11_ript_vla", [("training.collector", "async"), ("algo.imitation_updates", "25")])
    assert config.imitation is not None
    first = imitation_config(config, config.imitation, Path("runs/x"))
    assert (first.training.collector, first.algo.name, first.policy) == ("sync", "bc", config.policy)
    assert isinstance(first.task, SuiteConfig)
    assert (first.task.demos, first.task.num_demos) == (str(Path("runs/x/demos")), 0)
