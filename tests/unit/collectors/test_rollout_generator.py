import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from tests.point_suite import GOALS, PointSimulator, PointSuite
from tests.refusals import refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from apexrl.algorithms import RLOO
from apexrl.collectors.episodes import SuiteRunner, find_plans
from apexrl.collectors.groups import RolloutGenerator
from apexrl.collectors.init_states import InitStateDataset, InitStateSampler, RolloutStats, hash_init_state
from apexrl.core.errors import ConfigError, EnvError
from apexrl.core.metrics import training_log_names
from apexrl.core.types import EnvStep, Observation, PolicyOutput
from apexrl.envs.suites.base import InitState, Simulator, TaskSuite
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.evaluation.evaluate import evaluate
from apexrl.policies.base import Policy

CHUNK = 5
LETTERS = {"r": 0, "l": 1, "u": 2}
SOMETIMES, ALWAYS, NEVER = 0.5, 1.0, 0.0


class PointPolicy(Policy):
    """Each chunk goes to the goal that the instruction names with probability ``skill``, else away from it."""

    def __init__(self, *skills: float) -> None:
        super().__init__()
        self.skills = nn.Parameter(torch.tensor([*skills, *[skills[-1]] * (3 - len(skills))]), requires_grad=False)
        self.modes: list[bool] = []

    def forward(self, obs: Observation, deterministic: bool = False) -> PolicyOutput:
        assert isinstance(obs, TensorDict)
        self.modes.append(self.training)
        task = torch.tensor([LETTERS[chr(letter)] for letter in obs["instruction"][:, 3].tolist()])
        goal, position = torch.tensor(GOALS)[task], obs["state"].clone()
        luck = torch.full((len(task), 1), 0.5) if deterministic else torch.rand(len(task), 1)
        sign = torch.where(luck < self.skills[task].unsqueeze(-1), 1.0, -1.0)
        plan = []
        for _ in range(CHUNK):
            plan.append(sign * (10 * (goal - position)).clamp(-1, 1))
            position = (position + 0.1 * plan[-1]).clamp(-1, 1)
        return PolicyOutput(torch.cat(plan, -1), luck.log(), torch.zeros(len(task), 1))

    def act(self, carry: dict[str, Any], deterministic: bool = False) -> dict[str, Tensor]:
        output = super().act(carry, deterministic)
        return {**output, "denoising": output["action"].unsqueeze(1).expand(-1, 3, -1)}

    def evaluate_actions(self, obs: Observation, action: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def get_value(self, obs: Observation) -> Tensor:
        raise NotImplementedError


def runner(
    *skills: float, num_tasks: int = 2, num_states: int = 6, num_envs: int = 3, radius: float = 0.1
) -> SuiteRunner:
    suite = PointSuite(num_tasks=num_tasks, num_states=num_states, radius=radius)
    return SuiteRunner(SuiteVecEnv(suite, num_envs, chunk=CHUNK, num_workers=0), PointPolicy(*skills))


def generator(
    *skills: float, num_tasks: int = 2, num_states: int = 6, **options: Any
) -> tuple[RolloutGenerator, list[str]]:
    torch.manual_seed(0)
    messages: list[str] = []
    defaults: dict[str, Any] = {"rollouts_per_env": 4, "num_envs": 3, "on_message": messages.append}
    made = runner(*skills, num_tasks=num_tasks, num_states=num_states)
    return RolloutGenerator(made, **{**defaults, **options}), messages


def successes(batch: TensorDict) -> Tensor:
    returns: Tensor = batch["reward"].sum(0).squeeze(-1)
    return returns


def by_group(batch: TensorDict) -> list[list[float]]:
    group = batch["group"][0, :, 0]
    return [successes(batch)[group == number].tolist() for number in range(int(group.max()) + 1)]


def master(path: Path, states: list[NDArray[np.float64]], count: int = 4) -> None:
    stats = RolloutStats(path)
    for state in states:
        stats.record(hash_init_state(state), [True] * count, "right")
    stats.write()


def test_the_batch_is_whole_episodes_in_groups_padded_with_zeros() -> None:
    made, _ = generator(SOMETIMES)
    batch = made.collect(1)
    lengths = batch["valid"].sum(0).squeeze(-1)
    T = int(lengths.max())
    assert list(batch.shape) == [T, 12]
    assert batch["action"].shape == (T, 12, CHUNK * 2)
    assert batch["denoising"].shape == (T, 12, 3, CHUNK * 2)
    assert batch["observation", "instruction"].dtype == torch.uint8
    assert batch["group"].dtype == torch.int64
    assert batch["group"][..., 0].tolist() == [[0] * 4 + [1] * 4 + [2] * 4] * T
    assert set(lengths.tolist()) > {4}  # short ones are padded
    steps = torch.arange(T)[:, None, None]
    assert torch.equal(batch["valid"], steps < lengths[:, None])
    assert torch.equal(batch["done"], steps == lengths[:, None] - 1)  # an episode ends once, at its last step
    assert torch.equal(batch["terminated"], batch["reward"] > 0)
    for key in ("action", "sample_log_prob", "denoising", "reward", ("observation", "state"), ("metric", "success")):
        assert not batch[key][~batch["valid"].squeeze(-1)].any(), key
    assert set(batch["metric"].keys()) == {"success", "control_steps"}
    assert set(batch["info"].keys()) == {"task_id", "control_steps"}
    assert "next_observation" not in batch


def test_every_column_is_what_its_simulator_did_from_the_init_state_of_its_group() -> None:
    # 12 episodes in 3 environments: each column is put together from the pieces of one environment's stream.
    made, _ = generator(SOMETIMES)
    expected = InitStateSampler(InitStateDataset(made.env.suite))
    episodes = made.generate_rollouts()
    assert len(episodes) == 12
    for number in range(3):
        sample = next(expected)
        members = [episode for episode in episodes if episode["group"] == number]
        assert len(members) == 4
        for episode in members:
            task_id = sample["task_id"]
            assert episode["task_id"] == task_id == number % 2
            assert episode["task_name"] == ("right", "left")[task_id]
            assert episode["instruction"] == ("go right", "go left")[task_id]
            assert episode["init_state_hash"] == hash_init_state(sample["init_state"])
            np.testing.assert_array_equal(episode["init_state"], sample["init_state"])
            simulator = PointSimulator(GOALS[task_id], 0.1)
            simulator.restore(sample["init_state"])
            solved, taken = False, 0
            for state, chunk in zip(episode["observation"]["state"], episode["action"], strict=True):
                assert not solved
                np.testing.assert_array_equal(state, simulator.observe()["state"])
                for action in chunk.view(CHUNK, 2).numpy():
                    if not solved:
                        solved, taken = simulator.advance(action), taken + 1
            assert episode["success"] == solved == (episode["return"] == 1.0)
            assert episode["control_steps"] == taken
            assert episode["length"] == len(episode["action"]) == -(-taken // CHUNK)
    assert {episode["success"] for episode in episodes} == {True, False}


def test_without_dynamic_sampling_every_group_is_kept_and_no_state_skipped(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    made, messages = generator(ALWAYS, enable_rollout_stats_tracking=True, rollout_stats_path=path)
    for count in range(1, 4):
        batch = made.collect(0)
        assert by_group(batch) == [[1.0] * 4] * 3
        assert made.metrics()["collect/attempts"] == 1
        assert sum(len(entry["outcomes"]) for entry in json.loads(path.read_text()).values()) == 12 * count
    assert not [message for message in messages if "Skipped" in message or "Dropped" in message]


def test_dynamic_sampling_drops_uniform_groups_and_draws_others() -> None:
    # The policy masters one task and cannot learn from it; the other gives mixed groups.
    made, messages = generator(ALWAYS, SOMETIMES, enable_dynamic_sampling=True, num_envs=4)
    batch = made.collect(0)
    assert len(by_group(batch)) == 4
    assert all(0 < sum(group) < 4 for group in by_group(batch))
    assert set(batch["info", "task_id"][batch["valid"]].tolist()) == {1}
    metrics = made.metrics()
    assert metrics["collect/groups_wanted"] == 4
    assert metrics["collect/groups_dropped"] >= 3
    assert metrics["collect/attempts"] >= 2
    assert any(message.startswith("Dropped 3 groups whose rollouts all succeeded: right ") for message in messages)


def test_messages_name_states_by_the_beginning_of_their_hash() -> None:
    made, messages = generator(NEVER, enable_dynamic_sampling=True, num_envs=1, oversample=1.0, max_attempts=1)
    made.collect(0)
    state = next(InitStateSampler(InitStateDataset(made.env.suite)))["init_state"]
    assert f"Dropped 1 group whose rollouts all failed: right {hash_init_state(state)[:8]}." in messages


@pytest.mark.parametrize(("skill", "word"), [(ALWAYS, "succeeded"), (NEVER, "failed")])
def test_a_suite_without_mixed_groups_ends_with_a_message(skill: float, word: str) -> None:
    made, messages = generator(skill, enable_dynamic_sampling=True, enable_rollout_stats_tracking=True)
    for _ in range(3):
        messages.clear()
        batch = made.collect(0)
        assert batch["valid"].any()
        assert made.steps_in(batch) > 0
        assert all(len(set(group)) == 1 for group in by_group(batch))
        assert any(f"whose rollouts all {word}" in message for message in messages)
        assert any(message.startswith("No group had both successes and failures after") for message in messages)
    assert made.metrics()["collect/attempts"] <= 4


def test_attempts_are_capped_and_the_batch_is_what_was_found() -> None:
    made, messages = generator(
        ALWAYS, SOMETIMES, enable_dynamic_sampling=True, num_envs=6, oversample=1.0, max_attempts=1
    )
    batch = made.collect(0)
    found = len(by_group(batch))
    assert 0 < found <= 3  # half of the six groups are of the mastered task
    assert f"Only {found} of 6 wanted groups were found after 1 attempt; training continues with them." in messages


def test_surplus_groups_are_kept_up_to_max_groups() -> None:
    options: dict[str, Any] = {"enable_dynamic_sampling": True, "num_envs": 2, "oversample": 4.0}
    assert len(by_group(generator(SOMETIMES, **options)[0].collect(0))) == 2
    assert len(by_group(generator(SOMETIMES, max_groups=3, **options)[0].collect(0))) == 3


def test_mastered_states_are_skipped_and_tested_again_after_the_threshold(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    suite = PointSuite(num_tasks=1, num_states=3)
    mastered, *others = suite.init_states(0)
    master(path, [mastered])
    made, messages = generator(
        SOMETIMES,
        num_tasks=1,
        num_states=3,
        num_envs=2,
        oversample=1.0,
        max_attempts=1,
        enable_dynamic_sampling=True,
        enable_rollout_stats_tracking=True,
        rollout_stats_path=path,
        rollout_skip_threshold=2,
    )
    name = hash_init_state(mastered)
    line = f"Skipped 1 init state whose last 4 rollouts all succeeded: right {name[:8]}."
    num_skips = 0
    while RolloutStats(path).is_mastered(name, 4):
        assert num_skips < 3
        messages.clear()
        made.collect(0)
        if line in messages:
            num_skips += 1
            assert made.metrics()["collect/states_skipped"] == 1
    assert num_skips == 3  # more often than twice
    for _ in range(3):
        made.collect(0)
    assert len(RolloutStats(path).outcomes(name)) >= 4
    assert all(RolloutStats(path).outcomes(hash_init_state(state)) for state in others)


def test_when_every_state_is_mastered_some_are_tested_again(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    suite = PointSuite(num_tasks=1, num_states=4)
    master(path, suite.init_states(0))
    made, messages = generator(
        ALWAYS,
        num_tasks=1,
        num_states=4,
        num_envs=2,
        enable_dynamic_sampling=True,
        enable_rollout_stats_tracking=True,
        rollout_stats_path=path,
    )
    batch = made.collect(0)
    assert successes(batch).tolist() == [1.0] * 8
    assert made.metrics()["collect/states_skipped"] == 4
    assert "Every init state is mastered; 3 of them are tested again." in messages


def test_episode_statistics_are_of_all_episodes_that_ran_also_the_dropped_ones() -> None:
    made, _ = generator(ALWAYS, SOMETIMES, enable_dynamic_sampling=True, enable_rollout_stats_tracking=True)
    batch = made.collect(0)
    assert made.stats is not None
    outcomes = [outcome for entry in made.stats.state_dict().values() for outcome in entry["outcomes"]]
    assert len(outcomes) == made.metrics()["collect/episodes"] > batch.shape[1]
    means = made.episode_metrics.means()
    assert means["success_once"].item() == means["success_at_end"].item() == pytest.approx(np.mean(outcomes))
    assert means["return"].item() == pytest.approx(np.mean(outcomes))
    assert made.steps_in(batch) == round(means["control_steps"].item() * len(outcomes))
    assert 1 <= means["episode_len"].item() <= 4
    assert not {"task_id", "episode_id", "lost"} & means.keys()
    assert made.metrics()["collect/control_steps"] == made.steps_in(batch)
    assert made.metrics()["collect/control_steps_per_second"] > 0


def test_the_success_of_each_task_is_a_field_of_its_own() -> None:
    made, _ = generator(ALWAYS, SOMETIMES, num_tasks=3, enable_dynamic_sampling=True, num_envs=2, oversample=1.0)
    outcomes: dict[str, list[bool]] = {}
    run = made._run
    made._run = lambda draws: [  # type: ignore[method-assign]
        outcomes.setdefault(made.env.suite.task_names[group.draw.task_id], []).extend(group.successes) or group  # type: ignore[func-returns-value]
        for group in run(draws)
    ]
    made.collect(0)
    made.collect(0)
    assert set(outcomes) == {"right", "left", "up"}
    means = made.episode_metrics.means()
    found = {name: means[f"success_once of {name}"].item() for name in outcomes}
    assert found == pytest.approx({name: np.mean(successes) for name, successes in outcomes.items()})
    assert found["right"] == 1.0 > found["left"] > 0.0
    names = training_log_names("success_once of left", made.env.metric_specs)
    assert names == ["rollout/success_rate/left"]
    made.episode_metrics.clear()
    assert all(mean.isnan() for mean in made.episode_metrics.means().values())


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "enable_dynamic_sampling": True,
        "enable_rollout_stats_tracking": True,
        "rollout_stats_path": tmp_path / "stats.json",
        "seed": 5,
    }
    made, _ = generator(ALWAYS, SOMETIMES, **options)
    made.collect(0)
    torch.save({"collector": made.state_dict(), "rng": torch.get_rng_state()}, tmp_path / "checkpoint.pt")
    expected = [made.collect(0) for _ in range(2)]
    assert made.stats is not None

    resumed, _ = generator(ALWAYS, SOMETIMES, **{**options, "seed": 6})  # reads the file of the whole run
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(saved["collector"])
    torch.set_rng_state(saved["rng"])
    for batch in expected:
        again = resumed.collect(0)
        assert again.shape == batch.shape
        assert (again == batch).all()
    assert resumed.stats is not None
    assert resumed.stats.state_dict() == made.stats.state_dict()
    for name, mean in made.episode_metrics.means().items():
        assert torch.equal(resumed.episode_metrics.means()[name], mean)


def test_random_states_are_new_for_every_group_and_follow_from_the_seed(tmp_path: Path) -> None:
    def make(seed: int) -> RolloutGenerator:
        torch.manual_seed(0)
        env = SuiteVecEnv(PointSuite(), 3, chunk=CHUNK, num_workers=0)
        made = SuiteRunner(env, PointPolicy(SOMETIMES), random_init=True)
        path = tmp_path / "stats.json"
        return RolloutGenerator(
            made, 4, 3, seed=seed, enable_rollout_stats_tracking=True, rollout_stats_path=path, on_message=print
        )

    def hashes(made: RolloutGenerator) -> list[str]:
        return [episode["init_state_hash"] for episode in made.generate_rollouts()]

    made = make(1)
    first = hashes(made)
    assert first[::4] == first[1::4] == first[3::4]  # a group starts from one state
    state = made.state_dict()
    expected = [hashes(made) for _ in range(2)]
    assert len({*first, *expected[0], *expected[1]}) == 9
    suite = made.env.suite
    fixed = [state for task in range(2) for split in ("train", "val") for state in suite.init_states(task, split)]
    assert not {hash_init_state(state) for state in fixed} & {*first, *expected[0]}
    assert [episode["task_id"] for episode in made.generate_rollouts()[::4]] == [1, 0, 1]  # the tasks in turn
    resumed = make(2)
    assert hashes(resumed) != first
    resumed.load_state_dict(state)
    assert [hashes(resumed) for _ in range(2)] == expected
    resumed.restart(1)
    assert hashes(resumed) == first
    assert list(tmp_path.iterdir()) == []  # a state that never comes again has no history


def test_the_runner_starts_from_random_states_where_it_is_told_to() -> None:
    env = SuiteVecEnv(PointSuite(), 3, chunk=CHUNK, num_workers=0)
    fixed, random = (SuiteRunner(env, PointPolicy(ALWAYS), random_init=random_init) for random_init in (False, True))
    starts = [
        made.run_policy_in_env("left", keep={"observation"})["observation", "state"][0] for made in (fixed, random)
    ]
    np.testing.assert_array_equal(starts[0], np.stack(env.suite.init_states(1)[:3])[:, :2].astype(np.float32))
    assert not torch.equal(*starts)
    results = [random.run(4, seed=seed).episodes["control_steps"].tolist() for seed in (1, 1, 2)]
    assert len(results[0]) == 8
    assert results[0] == results[1] != results[2]
    assert fixed.run(4).episodes["control_steps"].tolist() != results[0]


def test_random_states_need_a_suite_that_draws_them_and_no_split() -> None:
    class Fixed(PointSuite):
        random_init_state = TaskSuite.random_init_state

    with refused(ConfigError, "task.random_init", "'points'"):
        SuiteRunner(SuiteVecEnv(Fixed(), 1, num_workers=0), PointPolicy(ALWAYS), random_init=True)
    random = SuiteRunner(SuiteVecEnv(PointSuite(), 1, num_workers=0), PointPolicy(ALWAYS), random_init=True)
    with refused(ConfigError, "algo.use_val_init", "task.random_init"):
        RolloutGenerator(random, use_val_init=True)


def test_restart_draws_in_another_order() -> None:
    made, _ = generator(SOMETIMES)
    first = made.collect(0)["observation", "state"][0]
    made.restart(0)
    assert torch.equal(made.collect(0)["observation", "state"][0], first)
    made.restart(1)
    assert not torch.equal(made.collect(0)["observation", "state"][0], first)


def test_keep_limits_the_batch() -> None:
    made, _ = generator(SOMETIMES, keep={"observation", "action"})
    assert set(made.collect(0).keys()) == {
        "observation", "action", "reward", "terminated", "truncated", "done", "metric", "info", "valid", "group",
        "sampled_success",
    }  # fmt: skip


class Untouchable:
    """A final observation that nobody may look at."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the final observation was read ({name}), though RLOO drops the successors")


@pytest.mark.parametrize("keep", [None, RLOO.required_keys])
def test_the_rollout_of_rloo_neither_builds_successors_nor_copies_final_observations(
    keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = generator(SOMETIMES, keep=keep)
    step = made.env.step

    def step_without_end(action: Tensor) -> EnvStep:
        found = step(action)
        return found if found.final_obs is None else found._replace(final_obs=Untouchable())  # type: ignore[arg-type]

    monkeypatch.setattr(made.env, "step", step_without_end)
    monkeypatch.setattr("apexrl.rollout.choose", Untouchable())
    batch = made.collect()
    assert batch["done"].any()
    assert not {"next_observation", "log"} & set(batch.keys())


def test_mastered_states_that_are_skipped_still_count_as_successes(tmp_path: Path) -> None:
    """Else a policy that masters the easy states would seem to get worse, and a guard would undo what it learned."""
    made, _ = generator(ALWAYS, SOMETIMES, enable_dynamic_sampling=True, enable_rollout_stats_tracking=True)
    skipped = 0.0
    for _ in range(6):
        made.episode_metrics.clear()
        rate = made.collect(0)["sampled_success"].flatten()[0].item()
        counts, ran = made.metrics(), made.episode_metrics.means()["success_once"].item()
        skipped, episodes = counts["collect/states_skipped"], counts["collect/episodes"]
        assert rate == pytest.approx((ran * episodes + 4 * skipped) / (episodes + 4 * skipped))
    assert skipped > 0
    assert rate > ran


def test_use_val_init_draws_from_the_validation_split() -> None:
    suite = PointSuite()
    val = {hash_init_state(state) for task in range(2) for state in suite.init_states(task, "val")}
    sampler = InitStateSampler(InitStateDataset(suite))
    made, _ = generator(SOMETIMES, use_val_init=True, init_state_dataloader=sampler)
    assert {episode["init_state_hash"] for episode in made.generate_rollouts()} <= val


def test_any_loader_of_samples_or_of_lists_of_samples_goes() -> None:
    dataset = InitStateDataset(PointSuite())
    wanted = [hash_init_state(dataset[index]["init_state"]) for index in (3, 8, 3)]
    for loader in ([dataset[3], dataset[8]], [[dataset[3], dataset[8]]]):
        made, _ = generator(SOMETIMES, init_state_dataloader=loader, init_state_dataset=dataset)
        assert [episode["init_state_hash"] for episode in made.generate_rollouts()[::4]] == wanted
    made, _ = generator(SOMETIMES, init_state_dataloader=[[]])
    with refused(ConfigError, "init_state_dataloader", "samples"):
        made.collect(0)


def test_states_alone_are_those_of_the_only_task() -> None:
    states = torch.from_numpy(PointSuite(1).get_task_init_states(0))
    wanted = [hash_init_state(states[index].numpy()) for index in (0, 1, 2, 0, 1, 2)]
    loaders: list[Any] = [list(states[:3].numpy()), DataLoader(TensorDataset(states[:3]), batch_size=2), [states[:3]]]
    for loader in loaders:
        made, _ = generator(SOMETIMES, num_tasks=1, rollouts_per_env=2, num_envs=6, init_state_dataloader=loader)
        assert [episode["init_state_hash"] for episode in made.generate_rollouts()[::2]] == wanted
    made, _ = generator(SOMETIMES, init_state_dataloader=[states])
    with refused(ConfigError, "init_state_dataloader", "2 tasks", "'task_id'"):
        made.collect(0)


def test_simulators_are_made_once_and_reused() -> None:
    made, messages = generator(SOMETIMES)
    made.collect(0)
    first = made.metrics()
    assert first["collect/envs_created"] > 0
    assert any(message.startswith("Created ") for message in messages)
    assert made.created_envs == {0: (made.env, 0, 3), 1: (made.env, 1, 3)}
    for _ in range(4):  # until each of the three environments has met both tasks
        made.collect(0)
    messages.clear()
    made.collect(0)
    assert made.metrics()["collect/envs_created"] == 0
    assert made.metrics()["collect/envs_reused"] == 12
    assert messages == []
    made.cleanup()
    assert made.created_envs == {}


@pytest.mark.parametrize(("max_steps", "expected"), [(None, 20), (7, 7), (33, 33)])
def test_max_steps_is_the_length_of_an_episode_that_fails(max_steps: int | None, expected: int) -> None:
    # The environments end an episode after 20 control steps, if nobody says otherwise.
    made, _ = generator(NEVER, max_steps=max_steps)
    batch = made.collect(0)
    assert batch["info", "control_steps"].sum(0).unique().tolist() == [expected]
    assert batch.shape[0] == -(-expected // CHUNK)
    assert batch["truncated"].sum(0).unique().tolist() == [1]
    # What others run in the same environments is as long as before.
    assert made.env_runner.run().mean("control_steps") == 20


def test_without_reuse_every_batch_creates_the_simulators_of_its_only_task() -> None:
    created = []
    for reuse_envs in (True, False):
        made, messages = generator(SOMETIMES, num_tasks=1, reuse_envs=reuse_envs)
        states = []
        for number in range(3):
            states.append(made.collect(0)["observation", "state"])
            assert set(made.created_envs) == ({0} if reuse_envs else set())
            created.append(made.metrics()["collect/envs_created"])
            assert any(message.startswith("Created ") for message in messages) == (created[-1] > 0), number
            messages.clear()
        if reuse_envs:
            expected = states
    assert created == [1, 0, 0, 1, 1, 1]
    assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))


def test_the_first_gpu_means_the_policys_device_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    made, _ = generator(SOMETIMES, agent_gpus=[0])
    assert made.device == torch.device("cpu")


def test_the_policy_that_it_follows_acts_in_evaluation_mode() -> None:
    made, _ = generator(NEVER)
    other = PointPolicy(ALWAYS).train()
    made.follow(other)
    assert successes(made.collect(0)).tolist() == [1.0] * 12
    assert set(other.modes) == {False}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rollouts_per_env": 1}, ("algo.rloo_batch_size", 2, 1)),
        ({"num_envs": 0}, ("algo.num_groups", 1, 0)),
        ({"oversample": 0.5}, ("algo.oversample", 1, 0.5)),
        ({"max_attempts": 0}, ("algo.max_attempts", 1, 0)),
        ({"max_groups": 2}, ("max_groups", 3, 2)),
        ({"max_steps": 0}, ("max_steps", 1, 0)),
        ({"agent_gpus": [0, 1]}, ("agent_gpus", "[0, 1]")),
        ({"rollout_skip_threshold": -1, "enable_rollout_stats_tracking": True}, ("algo.rollout_skip_threshold", -1)),
    ],
)
def test_impossible_settings_are_named(options: dict[str, Any], named: tuple[object, ...]) -> None:
    with refused(ConfigError, *named):
        generator(SOMETIMES, **options)


def test_plans_are_what_led_to_the_goal_from_the_first_states_that_did() -> None:
    class Blind(PointPolicy):
        """Goes wrong where it begins above; by chance, unless it is asked for its mode."""

        def forward(self, obs: Observation, deterministic: bool = False) -> PolicyOutput:
            assert not self.training
            output = super().forward(obs, deterministic)
            assert isinstance(obs, TensorDict)
            action = torch.where(obs["state"][:, 1:] > 0.05, 0.0, output.action)
            return PolicyOutput(action, output.log_prob, output.value)

    suite = PointSuite(num_states=12)
    env = SuiteVecEnv(suite, 3, chunk=CHUNK, num_workers=0)
    policy = Blind(0.6, 0.0).train()  # right by its mode, left never
    states = [suite.init_states(task) for task in range(2)]
    good = [number for number, state in enumerate(states[0]) if state[1] <= 0.05]
    assert 3 < len(good) < 10
    numbers = torch.get_rng_state()
    plans = find_plans(env, policy, states, 3)
    assert [sorted(found) for found in plans] == [good[:3], []]
    assert policy.training
    assert torch.equal(torch.get_rng_state(), numbers)
    simulator = suite.make_simulator(0)
    for number, actions in plans[0].items():
        simulator.restore(states[0][number])
        assert [simulator.advance(action) for action in actions] == [False] * (len(actions) - 1) + [True]
    assert [sorted(found) for found in find_plans(env, policy, states, 99)] == [good, []]


class DyingSimulator(PointSimulator):
    """Takes its process with it at the third step of an episode, once for each time that ``order`` was made."""

    order: Path

    def advance(self, action: NDArray[np.float32]) -> bool:
        if self.steps == 2 and self.order.exists():
            self.order.unlink()
            os._exit(3)
        return super().advance(action)


class DyingSuite(PointSuite):
    def __init__(self, order: Path) -> None:
        super().__init__(num_tasks=1, radius=0.1)
        self.order = order

    def make_simulator(self, task_id: int) -> Simulator:
        simulator = DyingSimulator(GOALS[task_id], self.radius)
        simulator.order = self.order
        return simulator


@pytest.fixture(scope="module")
def dying_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuiteVecEnv]:
    """Two environments that share a worker, so that both episodes are lost when it dies."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that the worker need not import PyTorch
    env = SuiteVecEnv(DyingSuite(tmp_path_factory.mktemp("orders") / "die"), 2, chunk=CHUNK, num_workers=1)
    yield env
    env.close()


def dying_generator(env: SuiteVecEnv, **options: Any) -> RolloutGenerator:
    assert isinstance(env.suite, DyingSuite)
    env.suite.order.touch()
    torch.manual_seed(0)
    return RolloutGenerator(SuiteRunner(env, PointPolicy(SOMETIMES)), **options)


def test_a_group_goes_on_without_its_lost_episodes(dying_env: SuiteVecEnv) -> None:
    made = dying_generator(dying_env, rollouts_per_env=4, num_envs=2)
    batch = made.collect(0)
    assert batch["group"][0, :, 0].tolist() == [0, 0, 1, 1, 1, 1]
    assert batch["valid"].any(0).all()
    assert made.metrics()["collect/episodes"] == 8
    assert made.collect(0).shape[1] == 8


def test_a_group_with_one_episode_left_is_replaced(dying_env: SuiteVecEnv) -> None:
    messages: list[str] = []
    made = dying_generator(
        dying_env, rollouts_per_env=3, num_envs=2, enable_rollout_stats_tracking=True, on_message=messages.append
    )
    batch = made.collect(0)
    assert made.metrics()["collect/lost_episodes"] == 2
    assert made.metrics()["collect/attempts"] == 2
    assert "Discarded 2 episodes: the workers that ran them died." in messages
    assert [len(group) for group in by_group(batch)] == [3, 3]
    assert torch.equal(batch["done"].sum(0), torch.ones(6, 1, dtype=torch.int64))
    assert made.stats is not None
    outcomes = [entry["outcomes"] for entry in made.stats.state_dict().values()]
    assert sorted(map(len, outcomes)) == [1, 3, 3]
    assert made.episode_metrics.means()["success_once"].item() == pytest.approx(np.mean(np.concatenate(outcomes)))


def test_an_environment_that_loses_everything_is_an_error(dying_env: SuiteVecEnv) -> None:
    made = dying_generator(dying_env, rollouts_per_env=2, num_envs=1, max_attempts=1)
    with refused(EnvError, "2 of 2 episodes"):
        made.collect(0)


def test_evaluation_covers_every_task_and_touches_nothing() -> None:
    results = []
    for num_envs in (1, 4):
        evaluated = runner(ALWAYS, NEVER, num_envs=num_envs)
        evaluated.policy.train()
        state = torch.get_rng_state()
        results.append(evaluated.run())
        assert torch.equal(torch.get_rng_state(), state)
        assert evaluated.policy.training
        assert isinstance(evaluated.policy, PointPolicy)
        assert set(evaluated.policy.modes) == {False}
    whole = results[0].record()
    assert whole == results[1].record()
    assert (whole["success_rate"], whole["return"], whole["episodes"], results[0].num_lost) == (0.5, 0.5, 12, 0)
    tasks = {name: (task["success_rate"], task["episodes"]) for name, task in whole["per_task"].items()}
    assert tasks == {"right": (1.0, 6), "left": (0.0, 6)}


def test_the_runner_finds_what_evaluating_the_same_starts_finds() -> None:
    evaluated = runner(ALWAYS, SOMETIMES, num_states=8)
    starts = [InitState(task, state) for task in range(2) for state in evaluated.env.suite.init_states(task, "val")]
    expected = evaluate(evaluated.env, evaluated.policy, starts).episodes
    result = evaluated.run()
    found = result.episodes
    np.testing.assert_array_equal(result.info["task_id"], np.repeat([0, 1], 8))
    assert len(set(found["episode_len"])) > 1
    for name in ("return", "episode_len", "reward", "success_once", "success_at_end", "control_steps"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_an_evaluation_counts_what_it_lost(dying_env: SuiteVecEnv) -> None:
    found = dying_generator(dying_env, rollouts_per_env=2, num_envs=1).env_runner.run(4)
    assert (found.num_episodes, found.num_lost) == (2, 2)


def test_evaluation_takes_the_first_init_states_of_the_validation_split() -> None:
    evaluated = runner(ALWAYS)
    assigned: list[Any] = []
    assign = evaluated.env.assign
    evaluated.env.assign = lambda episodes, max_steps=None: (assigned.extend(episodes), assign(episodes))[1]  # type: ignore[func-returns-value,method-assign]
    assert evaluated.run(2).num_episodes == 4
    for task in range(2):
        for index in range(2):
            episode = assigned[2 * task + index]
            assert episode.task_id == task
            np.testing.assert_array_equal(episode.init_state, evaluated.env.suite.init_states(task, "val")[index])
    with refused(ValueError, "episodes_per_task"):
        evaluated.run(0)


def test_sampled_evaluation_follows_its_seed() -> None:
    evaluated = runner(SOMETIMES, num_states=20)
    results = [evaluated.run(deterministic=False, seed=seed) for seed in (1, 1, 2)]
    returns = [result.episodes["return"].tolist() for result in results]
    assert returns[0] == returns[1] != returns[2]


def test_the_runner_runs_one_task_from_given_states() -> None:
    one = runner(ALWAYS)
    states = one.env.suite.init_states(1)[:2]
    created = one.create_parallel_envs("left")
    assert created == (one.env, 1, 3)
    batch = one.run_policy_in_env("left", states, created_env=created, keep={"observation"})
    assert batch["info", "task_id"][0].tolist() == [[1], [1]]
    np.testing.assert_array_equal(batch["observation", "state"][0], np.stack(states)[:, :2].astype(np.float32))
    with refused(ConfigError, "'lefd'"):
        one.create_parallel_envs("lefd")
