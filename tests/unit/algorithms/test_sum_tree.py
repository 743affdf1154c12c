"""The sum tree against plain numpy."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from apexrl.algorithms.sum_tree import FANOUT, SumTree


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tree_of(*weights: float) -> SumTree:
    tree = SumTree(len(weights))
    tree.set(torch.arange(len(weights)), doubles(*weights))
    return tree


@pytest.mark.parametrize("num_leaves", [1, 2, FANOUT, FANOUT + 1, FANOUT**2, 3000])
def test_after_many_updates_the_nodes_are_the_sums_of_the_leaves(num_leaves: int) -> None:
    rng = np.random.default_rng(0)
    tree, expected = SumTree(num_leaves), np.zeros(num_leaves)
    for _ in range(300):
        # Without repetition: of two weights for one leaf, either may stay.
        index = rng.permutation(num_leaves)[: rng.integers(1, 40)]
        # Differences that were accumulated would drift by the large weights' rounding once they are gone.
        weight = rng.random(len(index)) * 10.0 ** rng.integers(-8, 12)
        expected[index] = weight
        tree.set(torch.from_numpy(index), torch.from_numpy(weight))
    np.testing.assert_array_equal(tree.get(torch.arange(num_leaves)).numpy(), expected)
    np.testing.assert_allclose(tree.total.numpy(), expected.sum(), rtol=1e-14)
    tree.set(torch.arange(num_leaves), torch.full((num_leaves,), 1e-9, dtype=torch.float64))
    np.testing.assert_allclose(tree.total.numpy(), 1e-9 * num_leaves, rtol=1e-14)


def test_a_leaf_named_twice_gets_one_of_its_weights_and_the_sums_follow() -> None:
    tree = tree_of(*[1.0] * 100)
    tree.set(torch.tensor([7, 7, 7]), doubles(2.0, 3.0, 4.0))
    kept = float(tree.get(torch.tensor([7])))
    assert kept in (2.0, 3.0, 4.0)
    assert float(tree.total) == 99.0 + kept


def test_each_leaf_is_drawn_as_often_as_its_weight_says() -> None:
    torch.manual_seed(0)
    weight = torch.rand(500, dtype=torch.float64) ** 4
    weight[::7] = 0.0
    tree = tree_of(*weight.tolist())
    # One at a time: draws of one call are spread evenly, which would make the statistic too small.
    drawn = torch.cat([tree.sample(1) for _ in range(20_000)])
    count = torch.bincount(drawn, minlength=500).double()
    assert count[::7].sum() == 0
    big = weight / weight.sum() * len(drawn) >= 5
    expected = weight / weight.sum() * len(drawn)
    statistic = ((count - expected)[big] ** 2 / expected[big]).sum()
    assert 1e-4 < stats.chi2.sf(float(statistic), int(big.sum())) < 1 - 1e-4


def test_draws_are_spread_over_equal_parts_of_the_total() -> None:
    # 64 parts over 64 equal leaves: one from each. Weight 3 of 4 gets 48 of 64, give or take the part in between.
    torch.manual_seed(0)
    assert tree_of(*[0.5] * 64).sample(64).tolist() == list(range(64))
    assert tree_of(1.0, 3.0).sample(64).tolist() == [0] * 16 + [1] * 48


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("batch_size", [1, 3, 256])
def test_an_empty_leaf_is_never_drawn_at_the_edges(
    number: float, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.full(size, number, **kwargs))
    rng = np.random.default_rng(0)
    for _ in range(200):
        # Thirds and sevenths do not add up exactly; empty leaves stand at both ends and in between.
        weight = np.where(rng.random(400) < 0.3, rng.integers(1, 100, 400) / 21.0, 0.0)
        weight[:3] = weight[-40:] = 0.0
        drawn = tree_of(*weight).sample(batch_size).numpy()
        assert (weight[drawn] > 0).all()
        filled = np.flatnonzero(weight)
        if number == 0.0:
            assert drawn[0] == filled[0]
        else:
            assert drawn[-1] == filled[-1]


def test_an_empty_leaf_is_never_drawn_however_partial_sums_round(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    exact = Tensor.cumsum
    # Parallel sums round each end in its own way; here, magnified.
    monkeypatch.setattr(Tensor, "cumsum", lambda x, dim: exact(x, dim) * (1 + 0.1 * torch.rand_like(x)))
    weight = torch.rand(2000, dtype=torch.float64) * (torch.rand(2000) < 0.3)
    assert (weight[tree_of(*weight.tolist()).sample(4096)] > 0).all()


def test_a_tiny_weight_behind_a_huge_one_is_no_empty_leaf() -> None:
    # 1e30 + 1e-30 rounds to 1e30: the second is out of reach, and the empty ones around must not stand in for it.
    torch.manual_seed(0)
    drawn = tree_of(0.0, 1e30, 1e-30, 0.0).sample(4096)
    assert set(drawn.tolist()) == {1}


def test_a_state_continues_exactly() -> None:
    torch.manual_seed(0)
    tree = SumTree(5000)
    for _ in range(50):
        tree.set(torch.randint(1200, (30,)), torch.rand(30, dtype=torch.float64))
    state = tree.state(1200)
    assert sum(level.numel() for level in state) < 1300
    other = tree_of(*[9.0] * 5000)
    other.load_state(state)
    for mine, theirs in zip(tree.levels, other.levels, strict=True):
        assert torch.equal(mine, theirs)
