"""Episodes side by side: columns of one batch, padded with zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from apexrl.core.types import GROUP, VALID


def side_by_side(parts: Sequence[TensorDict]) -> TensorDict:
    """Put batches ``[T_p, n_p]`` side by side: ``[T, Σ n_p]``, with zeros below the shorter ones."""
    num_steps = max(part.shape[0] for part in parts)
    columns = []
    for part in parts:
        missing = num_steps - part.shape[0]
        padding = torch.zeros_like(part[:1]).expand(missing, part.shape[1])
        columns.append(TensorDict.cat([part, padding]) if missing else part)
    batch: TensorDict = TensorDict.cat(columns, 1)
    return batch


def stack_episodes(episodes: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Return episodes, as ``RolloutGenerator.generate_rollouts`` gives them, as one batch ``[T, E]``.

    Args:
        episodes: each with tensors ``[L, ...]``, among them ``valid``, and the number ``group``; what is neither a
            tensor nor ``group`` is left out. The lists of several batches may be joined: episodes are of one group
            where both ``group`` and ``init_state_hash`` are the same.

    """
    if not episodes:
        raise ValueError("There are no episodes to learn from; the list is empty.")
    parts = []
    for episode in episodes:
        if not isinstance(episode, Mapping) or not {GROUP, VALID} <= episode.keys():
            given = sorted(map(str, episode)) if isinstance(episode, Mapping) else type(episode).__name__
            raise TypeError(
                f"An episode must be a mapping with tensors [L, ...], among them '{VALID}', and the number '{GROUP}', "
                f"as RolloutGenerator.generate_rollouts() returns them, got {given}."
            )
        tensors = {key: value for key, value in episode.items() if isinstance(value, Tensor | TensorDictBase)}
        parts.append(TensorDict(tensors, batch_size=[len(next(iter(tensors.values())))]).unsqueeze(1))
    batch = side_by_side(parts)
    names = [(int(episode[GROUP]), episode.get("init_state_hash")) for episode in episodes]
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    groups = torch.tensor([number[name] for name in names], device=batch.device)
    batch[GROUP] = groups.view(1, -1, 1).repeat(len(batch), 1, 1)
    return batch
