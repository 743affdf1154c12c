import torch
from tensordict import TensorDict
from tests.refusals import refused

from apexrl.core.functional.episodes import stack_episodes


def test_episodes_become_columns_with_zeros_below_the_shorter_ones() -> None:
    episodes = [
        {
            "group": group,
            "task_name": "reach",
            "reward": torch.full((length, 1), float(group)),
            "valid": torch.ones(length, 1, dtype=torch.bool),
            "observation": TensorDict({"state": torch.ones(length, 2)}, batch_size=[length]),
        }
        for group, length in ((7, 1), (7, 3), (2, 2))
    ]
    batch = stack_episodes(episodes)
    assert batch.shape == (3, 3)
    assert set(batch.keys()) == {"group", "reward", "valid", "observation"}
    assert batch["group"][..., 0].tolist() == [[0, 0, 1]] * 3
    assert batch["reward"][..., 0].tolist() == [[7, 7, 2], [0, 7, 2], [0, 7, 0]]
    assert torch.equal(batch["valid"], batch["observation", "state"][..., :1] > 0)


def test_lists_of_two_batches_that_are_joined_keep_their_groups_apart() -> None:
    # Both batches number their groups from 0; the second meets the state "a" again, in another place.
    batches = [[(0, "a"), (0, "a"), (1, "b"), (1, "b")], [(0, "c"), (0, "c"), (1, "a"), (1, "a")]]
    valid = torch.ones(1, 1, dtype=torch.bool)
    episodes = [
        {"group": group, "init_state_hash": state, "valid": valid} for found in batches for group, state in found
    ]
    assert stack_episodes(episodes)["group"].flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_is_no_list_of_episodes_is_refused() -> None:
    with refused(ValueError, "empty"):
        stack_episodes([])
    with refused(TypeError, "generate_rollouts()", "Tensor"):
        stack_episodes([torch.zeros(3)])  # type: ignore[list-item]
