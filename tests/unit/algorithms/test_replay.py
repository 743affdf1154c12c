"""The replay buffer against hand-worked targets and against plain Python lists."""

import io
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor

from apexrl.algorithms.replay import FINAL_SPACING, ReplayBuffer
from apexrl.core.errors import ConfigError
from apexrl.core.system.acceleration import Captured

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_batch(observation: Any, next_observation: Any, **columns: Any) -> TensorDict:
    """Make a batch [T, N]; what is not given is zero."""
    T, N = next(iter([observation] if isinstance(observation, Tensor) else observation.values())).shape[:2]
    batch = TensorDict({}, batch_size=[T, N])
    batch["observation"], batch["next_observation"] = observation, next_observation
    batch["action"] = columns.get("action", torch.zeros(T, N, 2))
    batch["reward"] = columns.get("reward", torch.zeros(T, N, 1))
    for name in ("terminated", "truncated"):
        batch[name] = columns.get(name, torch.zeros(T, N, 1, dtype=torch.bool))
    batch["done"] = batch["terminated"] | batch["truncated"]
    return batch


def one_env(
    observation: Sequence[float],
    next_observation: Sequence[float],
    reward: Sequence[float],
    terminated: Sequence[int] = (),
    truncated: Sequence[int] = (),
) -> TensorDict:
    """Make a batch [T, 1] of numbers; ``terminated`` and ``truncated`` name steps."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)

    def flags(steps: Sequence[int]) -> Tensor:
        return torch.tensor([t in steps for t in range(len(reward))]).view(-1, 1, 1)

    return make_batch(
        column(observation),
        column(next_observation),
        action=column(observation) * 2,
        reward=column(reward),
        terminated=flags(terminated),
        truncated=flags(truncated),
    )


def targets(buffer: ReplayBuffer, n_step: int, gamma: float = 0.5) -> dict[float, tuple[float, float, float, float]]:
    """Draw everything that is held: observation -> reward, discount, next observation, weight."""
    sample = buffer.sample(60 * len(buffer), n_step=n_step, gamma=gamma)
    torch.testing.assert_close(sample["action"], 2 * sample["observation"])
    columns = [sample[name] for name in ("observation", "reward", "discount", "next_observation", "weight")]
    found = {row[0]: (row[1], row[2], row[3], row[4]) for row in torch.cat(columns, 1).tolist()}
    assert len(found) == len(buffer)
    return found


# Targets worked by hand, γ = ½: step 1 is cut in state 10, step 3 terminates in state 30, step 4 is the newest.


def five_steps() -> TensorDict:
    return one_env([0, 1, 2, 3, 4], [1, 10, 3, 30, 5], [1, 2, 3, 4, 5], terminated=[3], truncated=[1])


def test_one_step_targets() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(5)
    buffer.add(five_steps())
    assert targets(buffer, n_step=1) == {
        0: (1, 0.5, 1, 1),
        1: (2, 0.5, 10, 1),
        2: (3, 0.5, 3, 1),
        3: (4, 0, 3, 1),  # nothing to bootstrap from; the step's own state stands there
        4: (5, 0.5, 5, 1),
    }


def test_three_step_targets_stop_at_ends_of_episodes_and_at_the_newest_step() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(5)
    buffer.add(five_steps())
    assert targets(buffer, n_step=3) == {
        0: (1 + 2 / 2, 0.25, 10, 1),
        1: (2, 0.5, 10, 1),
        2: (3 + 4 / 2, 0, 3, 1),
        3: (4, 0, 3, 1),
        4: (5, 0.5, 5, 1),
    }


def test_windows_go_on_into_the_next_batch_and_not_over_the_seam() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(5)
    buffer.add(five_steps())
    buffer.add(one_env([5, 6], [6, 7], [6, 7]))
    assert targets(buffer, n_step=3) == {
        2: (3 + 4 / 2, 0, 3, 1),
        3: (4, 0, 3, 1),
        4: (5 + 6 / 2 + 7 / 4, 0.125, 7, 1),
        5: (6 + 7 / 2, 0.25, 7, 1),
        6: (7, 0.5, 7, 1),
    }


def test_a_batch_may_fill_the_buffer_but_not_more() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(2)
    buffer.add(one_env([0, 1], [1, 2], [1, 2]))
    buffer.add(one_env([2, 3], [3, 4], [3, 4]))
    assert targets(buffer, n_step=2) == {2: (3 + 4 / 2, 0.25, 4, 1), 3: (4, 0.5, 4, 1)}
    with refused(ConfigError, "algo.buffer_size", 2, 3):
        buffer.add(one_env([4, 5, 6], [5, 6, 7], [1, 1, 1]))
    with refused(ConfigError, "algo.buffer_size", 1, 0):
        ReplayBuffer(0)


def test_environments_do_not_mix() -> None:
    torch.manual_seed(0)
    # Environment n is at 100 n: 0 goes on, 1 is cut at its first step, 2 terminates there.
    observation = torch.tensor([[0.0, 100.0, 200.0], [1.0, 150.0, 250.0]]).unsqueeze(-1)
    successor = torch.tensor([[1.0, 101.0, 201.0], [2.0, 151.0, 251.0]]).unsqueeze(-1)
    ends = torch.tensor([[False, True, True], [False, False, False]]).unsqueeze(-1)
    cut = torch.tensor([[False, True, False], [False, False, False]]).unsqueeze(-1)
    buffer = ReplayBuffer(4)  # rounded up to two rows of three
    reward = torch.ones(2, 3, 1)
    batch = make_batch(
        observation, successor, action=2 * observation, reward=reward, terminated=ends & ~cut, truncated=cut
    )
    buffer.add(batch)
    assert len(buffer) == 6
    assert targets(buffer, n_step=2) == {
        0: (1.5, 0.25, 2, 1),
        1: (1, 0.5, 2, 1),
        100: (1, 0.5, 101, 1),
        150: (1, 0.5, 151, 1),
        200: (1, 0, 200, 1),
        250: (1, 0.5, 251, 1),
    }


def test_terminated_wins_over_truncated() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(2)
    buffer.add(one_env([0], [9], [1], terminated=[0], truncated=[0]))
    assert targets(buffer, n_step=1) == {0: (1, 0, 0, 1)}


def test_what_follows_a_terminated_step_is_finite_whatever_the_simulator_left_there() -> None:
    buffer = ReplayBuffer(4)
    buffer.add(one_env([0, 1], [math.nan, math.inf], [1, 1], terminated=[0, 1]))
    sample = buffer.sample(32, n_step=2)
    assert sample["next_observation"].isfinite().all()
    assert (sample["discount"] == 0).all()


def test_a_batch_that_does_not_continue_the_last_cuts_its_episodes() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(8)
    buffer.add(one_env([0, 1], [1, 2], [1, 2]))
    buffer.add(one_env([50], [51], [3], terminated=[0]))
    buffer.add(one_env([60], [61], [4]))
    assert targets(buffer, n_step=3) == {
        0: (1 + 2 / 2, 0.25, 2, 1),
        1: (2, 0.5, 2, 1),
        50: (3, 0, 50, 1),
        60: (4, 0.5, 61, 1),
    }


# Against lists


class Step(NamedTuple):
    observation: int
    reward: float
    terminated: bool
    truncated: bool
    successor: int


class ListReplay:
    """Endless random episodes in N environments, and what a replay buffer of them should draw."""

    def __init__(self, num_envs: int, max_rows: int, truncation: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.truncation, self.num_states = num_envs, truncation, 0
        self.current = [self.new_state() for _ in range(num_envs)]
        self.steps: list[deque[Step]] = [deque(maxlen=max_rows) for _ in range(num_envs)]
        self.finals: deque[int] = deque(maxlen=math.ceil(max_rows / FINAL_SPACING) * num_envs)

    def new_state(self) -> int:
        self.num_states += 1
        return self.num_states

    def batch(self, num_steps: int) -> TensorDict:
        rows = [[self.step(env) for env in range(self.num_envs)] for _ in range(num_steps)]
        columns = {
            name: torch.tensor([[[getattr(s, name)] for s in row] for row in rows]) for name in Step.__annotations__
        }
        observation, successor = columns.pop("observation").float(), columns.pop("successor").float()
        return make_batch(observation, successor, action=-observation, **columns)

    def step(self, env: int) -> Step:
        terminated, truncated = self.rng.random() < 0.05, self.rng.random() < self.truncation
        step = Step(self.current[env], float(self.rng.integers(-9, 9)), terminated, truncated, self.new_state())
        self.current[env] = self.new_state() if terminated or truncated else step.successor
        self.steps[env].append(step)
        if truncated and not terminated:
            self.finals.append(step.observation)
        return step

    def expected(self, n_step: int, gamma: float) -> dict[int, tuple[float, float, int, float]]:
        """Observation -> reward, discount, next observation (-1: none), weight."""
        found = {}
        for steps in map(list, self.steps):
            for start, first in enumerate(steps):
                window = []
                for step in steps[start : start + n_step]:
                    window.append(step)
                    if step.terminated or step.truncated:
                        break
                last, reward = window[-1], sum(gamma**k * step.reward for k, step in enumerate(window))
                if last.terminated:
                    found[first.observation] = (reward, 0.0, -1, 1.0)
                elif last.truncated and last.observation not in self.finals:
                    found[first.observation] = (reward, gamma ** len(window), -1, 0.0)
                else:
                    found[first.observation] = (reward, gamma ** len(window), last.successor, 1.0)
        return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("truncation", [0.03, 0.4])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("prioritised", [False, True])
def test_every_sample_is_what_lists_say(
    num_envs: int, n_step: int, truncation: float, prioritised: bool, device: str
) -> None:
    torch.manual_seed(0)
    gamma, lost = 0.5, 0
    for seed, max_rows in enumerate((1, 5, 40)):
        lists = ListReplay(num_envs, max_rows, truncation, seed)
        buffer = ReplayBuffer(max_rows * num_envs, device=device, priority_exponent=float(prioritised))
        for _ in range(60):
            buffer.add(lists.batch(int(lists.rng.integers(1, max_rows + 1))))
            expected = lists.expected(n_step, gamma)
            assert len(buffer) == len(expected)
            sample = buffer.sample(64, n_step=n_step, gamma=gamma)
            assert torch.equal(sample["action"], -sample["observation"])
            columns = [sample[name] for name in ("observation", "reward", "discount", "next_observation", "weight")]
            for observation, reward, discount, successor, weight in torch.cat(columns, 1).tolist():
                wanted = expected[int(observation)]  # fails where the step is no longer held
                assert (reward, discount, weight) == (wanted[0], wanted[1], wanted[3])
                assert wanted[2] in (-1, successor)
                lost += not weight
        everything = buffer.sample(40 * len(buffer), n_step=n_step)["observation"]
        assert set(everything.flatten().int().tolist()) == set(lists.expected(n_step, gamma))
    assert lost > 0 or truncation < 0.4, "final observations overflow"


def test_time_limits_from_sixteen_steps_on_never_lose_a_final_observation() -> None:
    # Both environments are cut every 16 steps, out of phase, for three times the capacity of 100 rows.
    buffer = ReplayBuffer(200)
    for t in range(300):
        state = torch.tensor([[[float(t)], [1000.0 + t]]])
        cut = torch.tensor([[[t % 16 == 15], [t % 16 == 3]]])
        buffer.add(make_batch(state, state + torch.where(cut, 0.5, 1.0), truncated=cut))
    sample = buffer.sample(10_000)
    assert (sample["weight"] == 1).all()
    step = sample["observation"] % 1000
    wanted = torch.where(sample["observation"] < 1000, step % 16 == 15, step % 16 == 3)
    assert torch.equal(sample["next_observation"] - sample["observation"], torch.where(wanted, 0.5, 1.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [True, False])
def test_where_final_observations_overflow_the_oldest_lose_their_weight(at_once: bool, device: str) -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(32, device=device)  # keeps 32 / 16 = 2 final observations
    if at_once:
        buffer.add(one_env(range(5), range(10, 15), [1] * 5, truncated=range(5)))
    else:
        for t in range(5):
            buffer.add(one_env([t], [10 + t], [1], truncated=[0]))
    found = targets(buffer, n_step=1)
    assert [found[t][3] for t in range(5)] == [0, 0, 0, 1, 1]
    assert [found[t][2] for t in (3, 4)] == [13, 14]
    assert all(found[t][2] == t for t in range(3)), "no other step's final observation"


# What is stored, and what it takes


def test_images_are_stored_once_and_stay_bytes() -> None:
    image = torch.randint(0, 256, (4, 2, 8, 8, 3), dtype=torch.uint8)
    batch = make_batch(image, image, action=torch.randint(0, 5, (4, 2, 1)))
    buffer = ReplayBuffer(160)
    assert buffer.num_bytes == 0
    buffer.add(batch)
    # 80 rows of 2 and a row of successors; 80 / 16 · 2 final images and one place to throw away.
    images = (162 + 10 + 1) * 8 * 8 * 3
    assert buffer.num_bytes == images + 162 * (8 + 4 + 8)  # and action, reward, ending
    assert ReplayBuffer.bytes_for(batch, 160) == buffer.num_bytes
    assert images < 1.1 * 160 * 8 * 8 * 3
    sample = buffer.sample(7)
    assert sample["observation"].dtype == sample["next_observation"].dtype == torch.uint8
    assert sample["observation"].shape == (7, 8, 8, 3)
    assert sample["action"].dtype == torch.int64
    assert "8 of 160 transitions" in repr(buffer)


def test_priorities_are_counted_in_the_memory() -> None:
    batch = one_env([0], [1], [1])
    buffer = ReplayBuffer(1000, priority_exponent=0.6)
    buffer.add(batch)
    assert buffer.num_bytes == ReplayBuffer.bytes_for(batch, 1000, 0.6)
    assert buffer.num_bytes >= ReplayBuffer.bytes_for(batch, 1000) + 8 * 1001


def test_more_memory_than_there_is_is_refused_before_it_is_allocated() -> None:
    buffer = ReplayBuffer(10**15)
    with pytest.raises(ConfigError, match=r"needs \d+\.\d\d GB on cpu, and \d+\.\d\d GB .* lower algo.buffer_size"):
        buffer.add(one_env([0], [1], [1]))
    assert buffer.num_bytes == 0


def test_nested_observations_keep_their_structure() -> None:
    torch.manual_seed(0)

    def nested(number: Tensor) -> TensorDict:
        camera = TensorDict({"front": (number * 3).byte()}, batch_size=number.shape[:2])
        return TensorDict({"policy": number, "camera": camera, "phase": number[..., 0]}, batch_size=number.shape[:2])

    buffer = ReplayBuffer(8)
    state = torch.arange(12.0).view(6, 2, 1)
    cut = torch.zeros(6, 2, 1, dtype=torch.bool)
    cut[1, 1] = True
    for t in range(6):
        batch = make_batch(nested(state[t : t + 1]), nested(state[t : t + 1] + 2 + 50 * cut[t]), truncated=cut[t][None])
        buffer.add(batch)
    sample = buffer.sample(400)
    for name in ("observation", "next_observation"):
        obs = sample[name]
        assert obs.batch_size == (400,)
        assert torch.equal(obs["camera", "front"], (obs["policy"] * 3).byte())
        assert torch.equal(obs["phase"], obs["policy"][:, 0])
    assert set(sample["observation"]["phase"].tolist()) == set(range(4, 12))
    assert torch.equal(sample["next_observation"]["policy"], sample["observation"]["policy"] + 2)
    again = ReplayBuffer(8)
    again.load_state_dict(buffer.state_dict())
    assert again.sample(2)["observation"]["camera", "front"].dtype == torch.uint8


def test_a_group_named_observation_stays_a_group() -> None:
    obs = TensorDict({"observation": torch.zeros(1, 2, 3)}, batch_size=[1, 2])
    buffer = ReplayBuffer(8)
    buffer.add(make_batch(obs, obs))
    assert buffer.sample(4)["observation"]["observation"].shape == (4, 3)


def test_other_shapes_and_missing_keys_are_named() -> None:
    buffer = ReplayBuffer(8)
    with refused(KeyError, "ReplayBuffer.add", ["next_observation"]):
        buffer.add(one_env([0], [1], [1]).exclude("next_observation"))
    with refused(RuntimeError, "empty", "add"):
        buffer.sample(1)
    buffer.add(one_env([0], [1], [1]))
    with refused(ValueError, "observation", [1, 1], [2, 1]):
        buffer.add(make_batch(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1)))


def test_nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    lists = ListReplay(3, 20, 0.1, seed=0)
    buffer = ReplayBuffer(60, priority_exponent=0.5)
    batches = [lists.batch(7) for _ in range(5)]
    reads: list[str] = []

    def counting(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def read(*args: Any, **kwargs: Any) -> Any:
            reads.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, read)

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"):
        counting(Tensor, name)
    for name in ("nonzero", "masked_select"):
        counting(torch, name)
    for batch in batches:
        buffer.add(batch)
        sample = buffer.sample(8, n_step=3)
        buffer.set_priorities(sample["index"], sample["reward"])
    assert reads == []
    bool(torch.zeros(1))
    assert reads == ["__bool__"], "the counter counts"


# How samples are drawn


def test_uniform_samples_are_uniform() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(60)
    for t in range(27):  # goes around, to a seam in the middle
        state = torch.tensor([[[3.0 * t], [3.0 * t + 1], [3.0 * t + 2]]])
        buffer.add(make_batch(state, state))
    count = torch.bincount(buffer.sample(60_000)["observation"].long().flatten(), minlength=81)
    assert count[:21].sum() == 0
    statistic = ((count[21:] - 1000.0) ** 2 / 1000.0).sum()
    assert 1e-4 < stats.chi2.sf(float(statistic), 59) < 1 - 1e-4


def test_priorities_give_the_exact_probabilities_and_weights() -> None:
    torch.manual_seed(0)
    alpha, beta = 0.7, 0.4
    buffer = ReplayBuffer(50, priority_exponent=alpha, importance_exponent=beta)
    buffer.add(one_env(range(40), range(1, 41), [0] * 40))
    error = torch.rand(40) * 4 - 2
    error[7] = 0.0
    # Draws before any error is known are uniform, and every step is among them.
    sample = buffer.sample(40)
    assert sorted(sample["observation"].flatten().tolist()) == list(range(40))
    assert (sample["weight"] == 1).all()
    buffer.set_priorities(sample["index"], error[sample["observation"].long()])

    priority = (error.double().abs() + 1e-6).numpy() ** alpha
    probability = priority / priority.sum()
    # One at a time: draws of one call are spread evenly, which would make the statistic too small.
    drawn = torch.cat([buffer.sample(1)["observation"] for _ in range(10_000)]).long().flatten()
    count = np.bincount(drawn.numpy(), minlength=40)
    big = probability * 10_000 >= 5
    statistic = ((count - 10_000 * probability) ** 2 / (10_000 * probability))[big].sum()
    assert 1e-4 < stats.chi2.sf(statistic, big.sum()) < 1 - 1e-4
    sample = buffer.sample(256)
    weight = (40 * probability[sample["observation"].long().flatten().numpy()]) ** -beta
    np.testing.assert_allclose(sample["weight"].flatten().numpy(), weight / weight.max(), rtol=1e-6)


def test_new_transitions_get_the_greatest_priority_so_far() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(10, priority_exponent=1.0)
    buffer.add(one_env([0, 1], [1, 2], [0, 0]))
    index = buffer.sample(2)["index"]
    buffer.set_priorities(index, torch.tensor([6.0, 1.0]))
    buffer.set_priorities(index, torch.tensor([3.0, 1.0]))
    buffer.add(one_env([2], [3], [0]))
    # Priorities 3, 1 and 6 (the greatest so far): of 1000 draws, 300, 100 and 600.
    count = torch.bincount(buffer.sample(1000)["observation"].long().flatten())
    torch.testing.assert_close(count, torch.tensor([300, 100, 600]), rtol=0, atol=2)


def test_an_error_that_comes_late_does_not_bring_the_row_of_successors_to_life() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(4, priority_exponent=1.0)
    buffer.add(one_env(range(4), range(1, 5), [0] * 4))
    index = buffer.sample(64)["index"]
    buffer.add(one_env([4], [5], [0]))  # the successor of 4 now lies where 0 was
    buffer.set_priorities(index, torch.full((64, 1), 100.0))
    assert set(buffer.sample(256)["observation"].flatten().tolist()) == {1, 2, 3, 4}


# Saving


@pytest.mark.parametrize("num_batches", [1, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_state_continues_bit_for_bit(alpha: float, num_batches: int) -> None:
    torch.manual_seed(0)
    lists = ListReplay(3, 20, 0.1, seed=0)
    buffer = ReplayBuffer(60, priority_exponent=alpha)
    for _ in range(num_batches):
        buffer.add(lists.batch(7))
        sample = buffer.sample(16)
        buffer.set_priorities(sample["index"], sample["reward"])
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh, used = (ReplayBuffer(60, priority_exponent=alpha) for _ in range(2))
    used.add(ListReplay(3, 20, 0.5, seed=1).batch(20))
    more = lists.batch(5)
    copies = [buffer, fresh, used]
    for copy in copies[1:]:
        copy.load_state_dict(state)
    for _ in range(3):
        samples = []
        for copy in copies:
            torch.manual_seed(1)
            copy.add(more)
            sample = copy.sample(64, n_step=3)
            copy.set_priorities(sample["index"], sample["reward"])
            samples.append(sample)
        for other in samples[1:]:
            for name, value in samples[0].items():
                assert torch.equal(value, other[name]), name


def test_a_state_has_no_memory_that_is_not_filled_and_shares_none() -> None:
    buffer = ReplayBuffer(100_000)
    buffer.add(one_env([0, 1], [1, 2], [0, 0], truncated=[0]))
    state = buffer.state_dict()
    assert state["rows"]["observation"].flatten().tolist() == [0, 1, 2]
    assert state["finals"]["observation"].flatten().tolist() == [1]
    file = io.BytesIO()
    torch.save(state, file)
    assert len(file.getvalue()) < 10_000
    buffer.add(one_env([7], [8], [0]))
    assert state["rows"]["observation"].flatten().tolist() == [0, 1, 2]


def test_an_empty_state_goes_into_an_empty_buffer_only() -> None:
    buffer = ReplayBuffer(4)
    buffer.load_state_dict(ReplayBuffer(4).state_dict())
    assert len(buffer) == 0
    buffer.add(one_env([0], [1], [0]))
    with refused(ValueError, "saved", "empty"):
        buffer.load_state_dict(ReplayBuffer(4).state_dict())


def test_a_state_that_does_not_fit_says_what_differs() -> None:
    buffer = ReplayBuffer(12)
    buffer.add(make_batch(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)))
    state = buffer.state_dict()
    with refused(ValueError, "capacity", 4, 5):
        ReplayBuffer(15).load_state_dict(state)
    with refused(ValueError, "priorities", False, True):
        ReplayBuffer(12, priority_exponent=1.0).load_state_dict(state)
    other = ReplayBuffer(8)
    other.add(make_batch(torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)))
    with refused(ValueError, "environments", 3, 2):
        other.load_state_dict(state)
    other = ReplayBuffer(12)
    other.add(make_batch(torch.zeros(2, 3, 5), torch.zeros(2, 3, 5)))
    with refused(ValueError, "columns", (4,), (5,)):
        other.load_state_dict(state)


@pytest.mark.gpu
def test_a_captured_sample_sees_what_is_added_later() -> None:
    lists = ListReplay(3, 40, 0.03, seed=0)
    buffer = ReplayBuffer(120, device="cuda", priority_exponent=0.5)
    captured = Captured("sample", lambda: buffer.sample(64, n_step=3, gamma=0.5))
    for _ in range(40):
        buffer.add(lists.batch(9))
        sample, expected = captured(), lists.expected(3, 0.5)
        for observation, reward in torch.cat((sample["observation"], sample["reward"]), 1).tolist():
            assert reward == expected[int(observation)][0]
        buffer.set_priorities(sample["index"], sample["reward"])
    assert captured.enabled, "it was captured"


def test_transitions_whose_successor_is_lost_are_not_drawn_again() -> None:
    torch.manual_seed(0)
    buffer = ReplayBuffer(32, priority_exponent=1.0)  # keeps two final observations
    buffer.add(one_env(range(5), range(10, 15), [1] * 5, truncated=range(5)))
    for _ in range(8):
        sample = buffer.sample(16)
        buffer.set_priorities(sample["index"], torch.ones(16), sample["weight"])
    assert set(buffer.sample(64)["observation"].flatten().tolist()) == {3.0, 4.0}
