"""Document 002: the ten steps from one task to a suite, each with its own switch, nearly as the document writes them.

They run on two Meta-World tasks; ``test_libero_run.py`` runs the steps about ``libero_10`` on LIBERO itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from tests.suite_session import FAILING, RLOO, TASKS, entries, imitate, options, train
from torch.utils.data import DataLoader, TensorDataset

import apexrl
from apexrl import RLOOConfig, make_suite
from apexrl.cli.main import main
from apexrl.collectors import InitStateDataset, RolloutGenerator, SuiteRunner
from apexrl.collectors.init_states import hash_init_state
from apexrl.core.errors import EnvError
from apexrl.core.functional.rloo import leave_one_out
from apexrl.core.system.files import read_json_lines
from apexrl.envs.suites.base import TaskSuite
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.policies import Policy
from apexrl.policies.vla import PI0_CFG_Adapter, VLAPolicy
from apexrl.run.loading import load_config
from apexrl.run.suite import SuiteConfig
from apexrl.run.trained_policy import load_trained

CHUNK, HORIZON, GROUP_SIZE = 5, 45, 4


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of imitation whose policy succeeds now and then. Not to be changed."""
    return imitate(tmp_path_factory.mktemp("seed_002"))


@pytest.fixture(scope="module")
def suite() -> TaskSuite:
    return make_suite("mt50", TASKS)


@pytest.fixture
def policy(start: Path) -> Policy:
    torch.manual_seed(0)
    return load_trained(start).policy


@pytest.fixture
def env(suite: TaskSuite) -> Iterator[SuiteVecEnv]:
    env = SuiteVecEnv(suite, 4, chunk=CHUNK, num_workers=0, max_steps=HORIZON)
    yield env
    env.close()


def results(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = entries(run_dir / "final_training_results.json")
    return found


def states_of(suite: TaskSuite) -> dict[str, str]:
    """Hash of every training state -> the name of its task."""
    return {
        hash_init_state(state): name
        for task_id, name in enumerate(suite.task_names)
        for state in suite.init_states(task_id, "train")
    }


def mastered(suite: TaskSuite, task: str, path: Path) -> list[str]:
    """Write statistics in which every training state of a task is mastered; returns their hashes."""
    own = [state for state, name in states_of(suite).items() if name == task]
    content = {state: {"task": task, "outcomes": [0, *[1] * GROUP_SIZE], "skips": 0} for state in own}
    path.write_text(json.dumps(content), encoding="utf-8")
    return own


def test_step_1_without_dynamic_sampling_every_batch_gives_a_training_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Every rollout fails: filtered by batches, nothing would be left.
    preset = resources.files("apexrl.run") / "presets" / "stage11_ript_vla.yaml"
    values = {
        **RLOO,
        **FAILING,
        "policy.normalize_obs": "false",
        "algo.enable_dynamic_sampling": "false",
        "features.save_video": "false",
    }
    assert main(["train", "--config_path", str(preset), "--run-dir", str(tmp_path / "run"), *options(values)]) == 0
    said = capsys.readouterr().out
    assert "Dropped" not in said
    # Nobody should have to look into a file to learn that nothing was learned.
    assert "WARNING: nothing was learned" in said.splitlines()[-1]
    assert "task.num_demos" in said
    final = results(tmp_path / "run")
    assert final["total_steps"] == final["training_metrics"][-1]["total_steps"] == 2
    assert final["optimizer_steps"] == 0
    # Two groups of four rollouts of ten control steps, twice.
    assert final["environment_steps"] == 2 * 2 * 4 * 10
    assert [line["iteration"] for line in final["training_metrics"]] == [1, 2]
    assert all(line["collect/groups_dropped"] == 0 for line in final["training_metrics"])
    assert all(line["train/success"] == 0 for line in final["training_metrics"])


def test_step_1_the_documents_command_learns_from_demonstrations_that_it_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = resources.files("apexrl.run") / "presets" / "stage11_ript_vla.yaml"
    config = load_config(str(preset))
    assert (config.policy.kind, config.task.num_envs) == ("vla", 32)
    assert isinstance(config.task, SuiteConfig)
    assert config.task.num_demos > 0
    # The preset on an easier task, with a smaller vla, for seconds instead of minutes.
    values = {name: value for name, value in RLOO.items() if not name.startswith("policy.")} | {
        "task.task_names_to_use": f"[{TASKS[0]}]",
        "policy.width": "32",
        "policy.depth": "1",
        "policy.num_heads": "2",
        "algo.imitation_updates": "60",
        "algo.imitation_batch_size": "32",
        "training.eval_episodes": "8",
        "training.final_eval_episodes": "8",
        "features.save_video": "false",
    }
    assert main(["train", "--config_path", str(preset), "--run-dir", str(tmp_path / "run"), *options(values)]) == 0
    said = capsys.readouterr().out
    assert f"Recording 1 demonstration of {TASKS[0]}" in said
    assert "After imitation: return" in said
    assert "nothing was learned" not in said
    final, imitation = results(tmp_path / "run"), results(tmp_path / "run" / "imitation")
    assert (final["total_steps"], imitation["total_steps"]) == (2, 60)
    assert final["optimizer_steps"] > 0
    assert imitation["evaluations"][-1]["overall_success_rate"] > 0
    assert final["evaluations"][-1]["overall_success_rate"] > 0
    # No rollout is run but those that are learned from: a vla is normalised by its demonstrations.
    collected = sum(line["collect/control_steps"] for line in final["training_metrics"])
    assert final["environment_steps"] == collected


def test_step_1_a_new_normaliser_sees_one_episode_of_each_environment_not_a_whole_batch(tmp_path: Path) -> None:
    values = {**RLOO, **FAILING, "algo.enable_dynamic_sampling": "false", "training.num_train_steps": "1"}
    assert train("stage11_ript_vla", tmp_path / "run", values, algo__num_groups="5") == 0
    # Five groups of four rollouts of ten control steps; and one episode in each of the four environments.
    assert results(tmp_path / "run")["environment_steps"] == 5 * 4 * 10 + 4 * 10
    stats = entries(tmp_path / "run" / "rollout_stats.json")
    assert sum(len(entry["outcomes"]) for entry in stats.values()) == 5 * 4


def test_step_2_the_rollout_generator_takes_its_twelve_arguments(
    suite: TaskSuite, env: SuiteVecEnv, policy: Policy, tmp_path: Path
) -> None:
    dataset = InitStateDataset(suite)
    rollout_generator = RolloutGenerator(
        env_runner=SuiteRunner(env, policy),
        rollouts_per_env=GROUP_SIZE,
        num_envs=2,
        max_steps=HORIZON,
        agent_gpus=[0],
        init_state_dataloader=DataLoader(dataset, batch_size=2),
        init_state_dataset=dataset,
        enable_dynamic_sampling=False,
        rollout_skip_threshold=3,
        enable_rollout_stats_tracking=True,
        rollout_stats_path=tmp_path / "rollout_stats.json",
        use_val_init=False,
    )
    for step in range(2):
        episodes = rollout_generator.generate_rollouts()
        assert [episode["group"] for episode in episodes] == [0] * GROUP_SIZE + [1] * GROUP_SIZE
        for number, episode in enumerate(episodes):
            # The loader gives the states of the first task in their order.
            np.testing.assert_array_equal(episode["init_state"], dataset[2 * step + number // GROUP_SIZE]["init_state"])
            assert episode["success"] == (episode["return"] == 1)
            assert episode["length"] == -(-episode["control_steps"] // CHUNK) == len(episode["action"])
            assert episode["success"] or episode["control_steps"] == HORIZON
    assert len(entries(tmp_path / "rollout_stats.json")) == 4
    rollout_generator.cleanup()
    with refused(EnvError, "closed"):
        rollout_generator.generate_rollouts()


def test_step_2_pytorchs_loader_may_collate_the_samples(suite: TaskSuite, env: SuiteVecEnv, policy: Policy) -> None:
    dataset = InitStateDataset(suite)
    chosen: Any = [{**dataset[index], "init_state": dataset[index]["init_state"].copy()} for index in (3, 1)]
    loader = DataLoader(chosen, batch_size=2)
    episodes = RolloutGenerator(SuiteRunner(env, policy), 2, 2, init_state_dataloader=loader).generate_rollouts()
    assert [episode["init_state_hash"] for episode in episodes] == [
        hash_init_state(dataset[index]["init_state"]) for index in (3, 3, 1, 1)
    ]


def test_step_2_a_loader_of_one_task_gives_states_alone(policy: Policy) -> None:
    # "shape ~ [N, 8], batch_size=task.num_parallel_envs": samples carry their task from step 6 on.
    one = make_suite("mt50", TASKS[:1])
    states = torch.from_numpy(one.get_task_init_states(0))
    env = SuiteVecEnv(one, 4, chunk=CHUNK, num_workers=0, max_steps=HORIZON)
    rollout_generator = RolloutGenerator(
        env_runner=SuiteRunner(env, policy),
        rollouts_per_env=2,
        num_envs=4,
        max_steps=5,
        init_state_dataloader=DataLoader(TensorDataset(states), batch_size=4),
    )
    episodes = rollout_generator.generate_rollouts()
    for number, episode in enumerate(episodes):
        np.testing.assert_array_equal(episode["init_state"], states[number // 2])
    rollout_generator.cleanup()


def test_step_2_use_val_init_draws_from_the_other_split(suite: TaskSuite, env: SuiteVecEnv, policy: Policy) -> None:
    generator = RolloutGenerator(SuiteRunner(env, policy), 2, 2, use_val_init=True)
    found = {episode["init_state_hash"] for episode in generator.generate_rollouts()}
    assert not found & states_of(suite).keys()
    assert found <= {hash_init_state(state) for task_id in (0, 1) for state in suite.init_states(task_id, "val")}


def test_step_2_use_val_init_is_passed_through_from_the_file(start: Path, suite: TaskSuite, tmp_path: Path) -> None:
    values = {**RLOO, **FAILING, "algo.use_val_init": "true", "training.num_train_steps": "1"}
    assert train("stage11_ript_vla", tmp_path / "run", values, training__init_from=str(start)) == 0
    found = entries(tmp_path / "run" / "rollout_stats.json").keys()
    held_out = {hash_init_state(state) for task_id in (0, 1) for state in suite.init_states(task_id, "val")}
    assert found
    assert found <= held_out


def test_step_2_max_steps_ends_episodes_before_the_environments_do(
    suite: TaskSuite, env: SuiteVecEnv, policy: Policy
) -> None:
    generator = RolloutGenerator(SuiteRunner(env, policy), 2, 2, max_steps=12)
    assert [episode["control_steps"] for episode in generator.generate_rollouts()] == [12] * 4  # too few to succeed


def test_step_2_a_shuffling_loader_goes_over_states_of_every_length(
    suite: TaskSuite, env: SuiteVecEnv, policy: Policy
) -> None:
    dataset = InitStateDataset(suite)
    assert len({len(dataset[index]["init_state"]) for index in range(len(dataset))}) == 2
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    episodes = RolloutGenerator(
        SuiteRunner(env, policy), 2, 4, max_steps=5, init_state_dataloader=loader, init_state_dataset=dataset
    ).generate_rollouts()
    known = states_of(suite)
    assert len({episode["init_state_hash"] for episode in episodes}) == 4
    assert all(known[episode["init_state_hash"]] == episode["task_name"] for episode in episodes)
    assert {episode["task_name"] for episode in episodes} == set(TASKS)


def test_step_3_statistics_grow_over_runs(start: Path, suite: TaskSuite, tmp_path: Path) -> None:
    path = tmp_path / "output" / "stage11_ript_vla" / "rollout_stats.json"
    values = {
        **RLOO,
        "algo.enable_dynamic_sampling": "false",
        "algo.enable_rollout_stats_tracking": "true",
        "algo.rollout_stats_path": str(path),
        "training.num_train_steps": "1",
        "training.init_from": str(start),
    }
    known = states_of(suite)
    before: dict[str, Any] = {}
    for number in range(1, 4):
        # Another seed, so that every run meets states of its own.
        assert train("stage11_ript_vla", tmp_path / f"run{number}", values, training__seed=str(number)) == 0
        stats = entries(path)
        assert sum(len(entry["outcomes"]) for entry in stats.values()) == number * 2 * GROUP_SIZE
        for state, entry in stats.items():
            assert entry["task"] == known[state]
            assert set(entry["outcomes"]) <= {0, 1}
        for state, entry in before.items():
            assert stats[state]["outcomes"][: len(entry["outcomes"])] == entry["outcomes"]
        before = stats
    assert not (tmp_path / "run1" / "rollout_stats.json").exists()


def test_step_3_without_tracking_nothing_is_written(start: Path, tmp_path: Path) -> None:
    values = {**RLOO, **FAILING, "training.num_train_steps": "1", "algo.enable_rollout_stats_tracking": "false"}
    assert train("stage11_ript_vla", tmp_path / "run", values, training__init_from=str(start)) == 0
    assert not list((tmp_path / "run").rglob("*rollout_stats*"))


def test_step_4_mastered_states_are_skipped_and_the_others_train(
    start: Path, suite: TaskSuite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rollout_stats.json"
    own = mastered(suite, TASKS[0], path)
    values = {
        **RLOO,
        "algo.enable_dynamic_sampling": "true",
        "algo.rollout_skip_threshold": "3",
        "algo.rollout_stats_path": str(path),
        "algo.max_attempts": "4",
        "training.init_from": str(start),
    }
    assert train("stage11_ript_vla", tmp_path / "run", values) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"whose last 4 rollouts all succeeded: {TASKS[0]}" in said
    stats, final = entries(path), results(tmp_path / "run")
    assert final["total_steps"] == 2
    skipped = [state for state in own if stats[state]["skips"]]
    assert len(skipped) >= sum(line["collect/states_skipped"] > 0 for line in final["training_metrics"]) == 2
    assert all(len(stats[state]["outcomes"]) == 5 for state in own), "a mastered state was run"
    assert {entry["task"] for state, entry in stats.items() if state not in own} == {TASKS[1]}
    assert sum(line["collect/groups_valid"] for line in final["training_metrics"]) >= 1


def test_step_4_a_state_that_was_skipped_too_often_is_forgotten(start: Path, suite: TaskSuite, tmp_path: Path) -> None:
    path = tmp_path / "rollout_stats.json"
    own = mastered(suite, TASKS[0], path)
    values = {**RLOO, **FAILING, "algo.rollout_skip_threshold": "0", "algo.rollout_stats_path": str(path)}
    values |= {"training.num_train_steps": "1", "training.init_from": str(start)}
    assert train("stage11_ript_vla", tmp_path / "run", values) == 0
    stats = entries(path)
    (line,) = results(tmp_path / "run")["training_metrics"]
    gone = [state for state in own if state not in stats or len(stats[state]["outcomes"]) == 4]
    assert len(gone) == line["collect/states_skipped"] > 0


def test_step_4_groups_without_a_gradient_are_dropped_one_by_one(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {**RLOO, **FAILING, "algo.enable_dynamic_sampling": "true", "training.init_from": str(start)}
    assert train("stage11_ript_vla", tmp_path / "run", values, algo__oversample="2") == 0
    said = " ".join(capsys.readouterr().out.split())
    # Two groups are run for each of the two that are wanted.
    assert f"Dropped 4 groups whose rollouts all failed: {TASKS[0]}" in said
    assert "No group had both successes and failures after 2 attempts; nothing is learned from this batch" in said
    final = results(tmp_path / "run")
    assert final["total_steps"] == 2
    assert [line["collect/groups_dropped"] for line in final["training_metrics"]] == [8, 8]


def test_step_5_an_empty_list_of_tasks_takes_all_of_the_benchmark(tmp_path: Path) -> None:
    values = {
        **RLOO,
        "task.benchmark_name": "mt10",
        "task.task_names_to_use": "[]",
        "task.num_parallel_envs": "2",
        "task.max_episode_length": "5",
        "policy.normalize_obs": "false",
        "algo.rloo_batch_size": "4",
        "algo.num_groups": "10",
        "algo.enable_dynamic_sampling": "false",
        "training.num_train_steps": "1",
        "features.save_video": "false",
    }
    assert train("stage11_ript_vla", tmp_path / "run", values) == 0
    names = set(make_suite("mt10").task_names)
    assert len(names) == 10
    assert results(tmp_path / "run")["total_steps"] == 1
    assert {entry["task"] for entry in entries(tmp_path / "run" / "rollout_stats.json").values()} == names


@pytest.mark.parametrize("line", ["task_names_to_use:", "task_names_to_use: []", ""])
def test_step_5_task_names_to_use_may_be_deleted_or_left_empty(tmp_path: Path, line: str) -> None:
    file = tmp_path / "stage12.yaml"
    file.write_text(
        f"task:\n  benchmark_name: libero_10\n  {line}\n  num_parallel_envs: 2\n"
        "algo:\n  name: rloo\n  rloo_batch_size: 4\nfeatures:\n  save_video: false\n",
        encoding="utf-8",
    )
    task = load_config(str(file)).task
    assert isinstance(task, SuiteConfig)
    assert task.task_names_to_use == ()
    assert make_suite("mt10", None).num_tasks == 10


def test_step_6_samples_carry_their_task(suite: TaskSuite, env: SuiteVecEnv, policy: Policy) -> None:
    dataset = InitStateDataset(suite)
    assert set(dataset[0]) == {"task_id", "init_state"}
    generator = RolloutGenerator(SuiteRunner(env, policy), 2, 4, init_state_dataset=dataset)
    known = states_of(suite)
    for _ in range(2):
        episodes = generator.generate_rollouts()
        assert [episode["task_id"] for episode in episodes] == [0, 0, 1, 1, 0, 0, 1, 1]
        for episode in episodes:
            assert episode["task_name"] == TASKS[episode["task_id"]] == known[episode["init_state_hash"]]
            assert episode["instruction"] == suite.instructions[episode["task_id"]]
            seen = bytes(episode["observation"]["instruction"][0].tolist()).rstrip(b"\0").decode()
            assert seen == episode["instruction"]
        # A group starts from one state, another group from another.
        hashes = [episode["init_state_hash"] for episode in episodes]
        assert hashes[::2] == hashes[1::2]
        assert len(set(hashes)) == 4


def test_step_7_simulators_are_made_once_for_each_task(suite: TaskSuite, env: SuiteVecEnv, policy: Policy) -> None:
    runner = SuiteRunner(env, policy)
    generator = RolloutGenerator(runner, 4, 2)
    assert generator.created_envs == {}
    generator.generate_rollouts()
    first = generator.metrics()
    assert set(generator.created_envs) == {0, 1}
    for task_id, (created, env_id, env_num) in generator.created_envs.items():
        assert (created, env_id, env_num) == (env, task_id, 4)
    assert first["collect/envs_created"] >= 2
    assert first["collect/seconds_creating_envs"] > 0
    generator.generate_rollouts()
    generator.generate_rollouts()
    again = generator.metrics()
    assert again["collect/envs_reused"] == again["collect/episodes"] == 8
    assert again["collect/envs_created"] == again["collect/seconds_creating_envs"] == 0
    batch = runner.run_policy_in_env(TASKS[1], suite.init_states(1)[:2], created_env=generator.created_envs[1])
    assert batch["info", "task_id"][0].flatten().tolist() == [1, 1]
    generator.cleanup()
    assert generator.created_envs == {}


@pytest.mark.parametrize("tasks", [TASKS, TASKS[:1]])
def test_step_7_reuse_can_be_switched_off(policy: Policy, tasks: tuple[str, ...]) -> None:
    env = SuiteVecEnv(make_suite("mt50", tasks), 1, chunk=CHUNK, num_workers=0, max_steps=5)
    generator = RolloutGenerator(SuiteRunner(env, policy), 2, 2, reuse_envs=False)
    for _ in range(2):
        generator.generate_rollouts()
        assert generator.metrics()["collect/envs_created"] == len(tasks)
        assert generator.created_envs == {}
    generator.cleanup()


def test_step_7_the_switch_is_in_the_file_too(start: Path, tmp_path: Path) -> None:
    values = {**RLOO, **FAILING, "task.reuse_envs": "false", "task.task_names_to_use": f"[{TASKS[0]}]"}
    values |= {"algo.enable_dynamic_sampling": "false", "training.init_from": str(start)}
    assert train("stage11_ript_vla", tmp_path / "run", values) == 0
    assert [line["collect/envs_created"] for line in results(tmp_path / "run")["training_metrics"]] == [1, 1]


def test_step_8_an_episode_is_compared_with_the_others_of_its_group() -> None:
    returns, group = torch.tensor([1.0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1])
    torch.testing.assert_close(leave_one_out(returns, group), torch.tensor([1.0, -0.5, -0.5, 0, 0, 0]))
    # Against the whole batch, 4 of 6, the second group would count as better than it is.
    whole = leave_one_out(returns, torch.zeros_like(group))
    torch.testing.assert_close(whole, torch.tensor([0.4, -0.8, -0.8, 0.4, 0.4, 0.4]))


def test_step_8_advantages_weigh_the_flow_matching_loss(suite: TaskSuite) -> None:
    torch.manual_seed(0)
    env = SuiteVecEnv(suite, 4, chunk=CHUNK, num_workers=0, max_steps=10)
    flow = VLAPolicy.for_env(env, chunk=CHUNK, head="flow", width=32, depth=1, num_heads=2)
    batch: TensorDict = RolloutGenerator(SuiteRunner(env, flow), 2, 2).collect()
    env.close()
    returns = torch.tensor([1.0, 0.0, 1.0, 1.0])  # of the four columns: a mixed group and one that always succeeds
    advantages = leave_one_out(returns, batch["group"][0].squeeze(-1)).expand(batch.shape).unsqueeze(-1)
    adapter = PI0_CFG_Adapter(flow)

    def loss(weights: torch.Tensor) -> float:
        torch.manual_seed(1)  # the same noise
        value = adapter.compute_weighted_loss(batch, weights)
        value.backward()
        return float(value.detach())

    conditional_only_for_the_better = loss(advantages)
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in flow.parameters())
    # A negative or zero advantage takes the conditional term away: more of them can only lower the loss.
    assert loss(-torch.ones_like(advantages)) < conditional_only_for_the_better < loss(torch.ones_like(advantages))
    # Only signs count, so a very bad episode cannot make the loss grow without bound.
    assert loss(-1e6 * torch.ones_like(advantages)) == loss(-torch.ones_like(advantages))


def test_step_8_advantages_of_the_groups_are_joined_and_given_to_the_adapter(suite: TaskSuite) -> None:
    torch.manual_seed(0)
    env = SuiteVecEnv(suite, 4, chunk=CHUNK, num_workers=0, max_steps=10)
    flow = VLAPolicy.for_env(env, chunk=CHUNK, head="flow", width=32, depth=1, num_heads=2)
    rollout_generator = RolloutGenerator(SuiteRunner(env, flow), 2, 2)
    episodes = rollout_generator.generate_rollouts()
    rollout_generator.cleanup()
    rewards = [1.0, 0.0, 0.0, 1.0]  # as if one of each group had succeeded
    advantages = []
    for group in sorted({episode["group"] for episode in episodes}):
        r = [reward for reward, episode in zip(rewards, episodes, strict=True) if episode["group"] == group]
        advantages += [r_i - (sum(r) - r_i) / (len(r) - 1) for r_i in r]
    assert advantages == [1.0, -1.0, -1.0, 1.0]
    adapter = PI0_CFG_Adapter(flow)
    adapter.set_episodes(episodes)
    loss = adapter.compute_weighted_loss(torch.tensor(advantages))
    loss.backward()
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in flow.parameters())


def test_step_8_rloo_learns_from_the_list_of_episodes(suite: TaskSuite, env: SuiteVecEnv, start: Path) -> None:
    learned = []
    for as_list in (True, False):
        torch.manual_seed(0)
        policy = load_trained(start).policy
        algorithm = apexrl.RLOO(policy=policy, cfg=RLOOConfig(rloo_batch_size=GROUP_SIZE, num_epochs=1))
        rollout_generator = RolloutGenerator(SuiteRunner(env, policy), GROUP_SIZE, 2)
        episodes = rollout_generator.generate_rollouts() if as_list else rollout_generator.collect()
        metrics = algorithm.update(episodes)
        assert metrics["updates"] > 0
        learned.append(torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]))
    assert torch.equal(*learned)


def test_step_8_the_baseline_of_the_whole_batch_can_be_selected_to_compare(start: Path, tmp_path: Path) -> None:
    values = {**RLOO, "algo.num_groups": "4", "training.num_train_steps": "1", "training.init_from": str(start)}
    values["algo.enable_dynamic_sampling"] = "false"
    lines = {}
    for baseline in ("group", "batch"):
        assert train("stage11_ript_vla", tmp_path / baseline, values, algo__baseline=baseline) == 0
        (lines[baseline],) = read_json_lines(tmp_path / baseline / "metrics.jsonl")
    group, batch = lines["group"], lines["batch"]
    assert group["train/success"] == batch["train/success"], "the two runs did not see the same episodes"
    assert 0 < group["train/success"] < 1
    assert group["train/grad_norm"] != batch["train/grad_norm"]
    assert batch["train/mixed"] == 1  # against all others, every episode counts


def test_step_9_every_log_freq_steps_all_tasks_are_evaluated(start: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    values = {**RLOO, **FAILING, "algo.enable_dynamic_sampling": "false", "training.init_from": str(start)}
    values |= {"logging.log_freq": "2", "training.num_train_steps": "4", "training.final_eval_episodes": "2"}
    assert train("stage11_ript_vla", run_dir, values) == 0
    found = entries(run_dir / "metrics.json")
    assert [entry["step"] for entry in found] == [2, 4]  # the evaluation at the end takes the place of the periodic one
    for entry in found:
        assert entry["overall_success_rate"] == entry["reward"] == 0
        assert set(entry["per_task"]) == set(TASKS)
        assert sum(task["episodes"] for task in entry["per_task"].values()) == (2 if entry is found[-1] else 4)
        for task in entry["per_task"].values():
            low, high = task["interval"]
            assert low == task["success_rate"] == 0 < high
    # Training, too, says how each task fares.
    for line in read_json_lines(run_dir / "metrics.jsonl"):
        assert [line[f"rollout/success_rate/{task}"] for task in TASKS] == [0.0, 0.0]
    # A run that goes on appends to it.
    assert main(["train", "--resume", str(run_dir), "--training.num_train_steps", "6"]) == 0
    longer = entries(run_dir / "metrics.json")
    assert longer[0] == found[0]
    assert [entry["step"] for entry in longer] == [2, 4, 6]
    assert results(run_dir)["evaluations"] == longer


def test_step_9_the_runner_evaluates_by_itself_too(suite: TaskSuite, env: SuiteVecEnv, policy: Policy) -> None:
    found = SuiteRunner(env, policy).run(episodes_per_task=2).record()
    assert found["episodes"] == 4
    assert set(found["per_task"]) == set(TASKS)
    assert found["success_rate"] == found["return"] == np.mean([t["success_rate"] for t in found["per_task"].values()])


@pytest.mark.parametrize("split", ["train", "test"])
def test_appendix_the_benchmark_has_a_fixed_set_of_init_states(suite: TaskSuite, split: Any) -> None:
    benchmark, task_id = suite, 1
    states = benchmark.get_task_init_states(task_id, split=split)
    assert states.ndim == 2
    train = {hash_init_state(state) for state in benchmark.get_task_init_states(task_id, split="train")}
    assert len(states) == len(train) == 50
    assert {hash_init_state(state) for state in states} & train == (train if split == "train" else set())
    np.testing.assert_array_equal(states, benchmark.init_states(task_id, split))


def test_appendix_the_runner_may_draw_random_init_states(suite: TaskSuite, env: SuiteVecEnv, policy: Policy) -> None:
    runner = SuiteRunner(env, policy, random_init=True)
    episodes = RolloutGenerator(runner, 2, 4, max_steps=5).generate_rollouts()
    hashes = [episode["init_state_hash"] for episode in episodes]
    fixed = {
        hash_init_state(state)
        for task_id in (0, 1)
        for split in ("train", "test")
        for state in suite.get_task_init_states(task_id, split=split)
    }
    assert hashes[::2] == hashes[1::2]
    assert len(set(hashes) - fixed) == 4
    again = RolloutGenerator(runner, 2, 4, max_steps=5).generate_rollouts()
    assert [episode["init_state_hash"] for episode in again] == hashes


def test_appendix_random_init_states_can_be_asked_for_in_the_file(start: Path, tmp_path: Path) -> None:
    values = {**RLOO, **FAILING, "task.random_init": "true", "training.init_from": str(start)}
    values |= {"algo.enable_dynamic_sampling": "false", "training.num_train_steps": "1", "logging.log_freq": "1"}
    assert train("stage11_ript_vla", tmp_path / "run", values) == 0
    assert results(tmp_path / "run")["total_steps"] == 1
    assert not list((tmp_path / "run").rglob("*rollout_stats*"))


def test_step_10_the_presets_hold_what_the_document_recommends() -> None:
    one, ten = load_config("stage11_ript_vla"), load_config("stage12_libero10")
    for config in (one, ten):
        assert isinstance(config.task, SuiteConfig)
        assert config.task.task_names_to_use == ()
        assert config.algo.name == "rloo"
        assert not config.features.save_video
        assert config.logging.log_freq > 0
    assert isinstance(ten.task, SuiteConfig)
    assert ten.task.benchmark_name == "libero_10"
    assert ten.task.num_parallel_envs == 2
    recommended = {
        "rloo_batch_size": 4,
        "enable_dynamic_sampling": True,
        "enable_rollout_stats_tracking": True,
        "rollout_skip_threshold": 3,
    }
    assert {name: getattr(ten.algo, name) for name in recommended} == recommended
    assert ten.training.num_train_steps == 1000


def test_step_10_the_long_preset_runs_with_its_vla_on_other_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {name: value for name, value in RLOO.items() if not name.startswith("policy.")}
    values |= FAILING
    values |= {
        "task.cameras": "[]",
        "task.chunk_size": "5",
        "policy.size": "tiny",
        "policy.width": "32",
        "policy.depth": "1",
        "policy.num_heads": "2",
        "algo.rollout_stats_path": "./output/stage12/rollout_stats.json",
        "logging.log_freq": "1",
        "training.num_train_steps": "1",
    }
    sizes = []
    for number in range(2):
        assert train("stage12_libero10", Path(f"run{number}"), values, training__seed=str(number)) == 0
        sizes.append((tmp_path / "output" / "stage12" / "rollout_stats.json").stat().st_size)
        assert [entry["step"] for entry in entries(Path(f"run{number}") / "metrics.json")] == [1]
        assert results(Path(f"run{number}"))["total_steps"] == 1
    assert sizes[1] > sizes[0] > 2
