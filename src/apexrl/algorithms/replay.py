"""Replay for off-policy learning, and minibatches of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.algorithms.sum_tree import SumTree
from apexrl.core.errors import ConfigError
from apexrl.core.observations import leaves
from apexrl.core.types import ACTION, NEXT_OBSERVATION, OBSERVATION, REWARD, TERMINATED, TRUNCATED, Observation

FINAL_SPACING = 16
"""Final observations are kept for one step in this many: episodes cut after at least 16 steps never lose theirs."""
MIN_ERROR = 1e-6
"""Added to the size of a TD error, so that a transition without any can be drawn again."""
ENDING = "ending"
"""Column that says how a step ends: one of the two below, or, if truncated, the number of its final observation."""
GOES_ON, TERMINATES = -1, -2


class ReplayBuffer:
    """The newest transitions of N environments, drawn at random as n-step targets.

    Observations are stored once: the successor of a step is the observation of the next row, and behind the newest row
    lies one with its successors. Only a truncated step keeps a final observation of its own, in a ring for one step in
    ``FINAL_SPACING``; where shorter time limits overflow it, the oldest of those steps get weight 0 in samples.

    A batch that does not begin where the last one ended (the environments were reset, or a batch was dropped) cuts the
    episodes: their last steps count as truncated.
    Nothing is read back to the host, and ``sample`` may be captured as a CUDA graph after the first ``add``.

    Args:
        capacity: transitions to hold, rounded up to whole rows of N; memory is allocated by the first ``add``.
        device: where they are held; batches may come from another.
        priority_exponent: α in P(i) ∝ (|TD error| + 1e-6)^α; 0 draws uniformly.
        importance_exponent: β in the weights (size · P(i))^−β / max over the batch; a tensor afterwards, to be filled.
    """

    required_keys = frozenset({OBSERVATION, ACTION, REWARD, TERMINATED, TRUNCATED, NEXT_OBSERVATION})

    def __init__(
        self,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        priority_exponent: float = 0.0,
        importance_exponent: float = 0.4,
    ) -> None:
        if capacity < 1:
            raise ConfigError(f"algo.buffer_size must be at least 1, got {capacity}.")
        if min(priority_exponent, importance_exponent) < 0:
            given = f"{priority_exponent} and {importance_exponent}"
            raise ConfigError(f"algo.priority_exponent and algo.importance_exponent must not be negative, got {given}.")
        self.capacity, self.device = capacity, torch.device(device)
        self.priority_exponent = priority_exponent
        # On the device, so that a captured sample follows it when it is annealed.
        self.importance_exponent = torch.tensor(importance_exponent, dtype=torch.float64, device=self.device)
        self._storage: _Storage | None = None
        self._cursor = self._num_rows = 0
        # The same on the device, counted in transitions: sample reads these alone.
        self._oldest = torch.zeros((), dtype=torch.int64, device=self.device)
        self._size = torch.zeros((), dtype=torch.int64, device=self.device)
        self._max_priority = torch.ones((), dtype=torch.float64, device=self.device)

    def __len__(self) -> int:
        return 0 if self._storage is None else self._num_rows * self._storage.num_envs

    def __repr__(self) -> str:
        held = f"{len(self):,} of {self.capacity:,} transitions"
        return f"ReplayBuffer({held}, {self.num_bytes / 1e9:.2f} GB on {self.device})"

    @property
    def num_bytes(self) -> int:
        """Memory that is allocated: 0 before the first ``add``, then all of it."""
        return 0 if self._storage is None else self._storage.num_bytes

    @staticmethod
    def bytes_for(batch: TensorDict, capacity: int, priority_exponent: float = 0.0) -> int:
        """Return the memory that a buffer for batches like this one allocates."""
        return _Storage(_columns(batch), batch.shape[1], capacity, priority_exponent > 0, "meta").num_bytes

    @torch.no_grad()
    def add(self, batch: TensorDict) -> None:
        """Take in ``[T, N]`` steps, with ``required_keys``; the oldest make room.

        ``next_observation`` is the true successor of each step, also where its episode ended.
        """
        T, N = batch.batch_size
        if self.capacity + N <= T * N:
            raise ConfigError(f"algo.buffer_size is {self.capacity}, but a batch has {T * N} steps; raise it.")
        if missing := self.required_keys - set(batch.keys()):
            raise KeyError(f"ReplayBuffer.add needs {sorted(missing)}; the batch has {sorted(batch.keys())}.")
        columns = _columns(batch)
        storage = self._storage or self._allocate(columns, N)
        self._cut_before(_observation_columns(batch[OBSERVATION][0].to(self.device)))
        tail, successor = (self._cursor + T) % storage.num_rows, _observation_columns(batch[NEXT_OBSERVATION])
        for name, value in columns.items():
            storage.write(name, self._cursor, value)
        for name, value in successor.items():
            storage.write(name, tail, value[-1:])

        terminated = batch[TERMINATED].to(self.device).reshape(-1)
        cut = batch[TRUNCATED].to(self.device).reshape(-1) > terminated
        number = storage.keep_finals(cut, {name: value.flatten(0, 1) for name, value in successor.items()})
        ending = torch.where(cut, number, GOES_ON - terminated.long())
        storage.write(ENDING, self._cursor, ending.view(T, N))

        if storage.tree is not None:
            index = (torch.arange((T + 1) * N, device=self.device) + self._cursor * N) % storage.num_steps
            priority = self._max_priority.repeat(len(index))
            priority[T * N :] = 0.0  # the row of successors is no step yet
            storage.tree.set(index, priority)
        self._move_to(tail, min(self._num_rows + T, storage.num_rows - 1))

    def sample(self, batch_size: int, *, n_step: int = 1, gamma: float = 0.99) -> dict[str, Any]:
        """Draw n-step windows with replacement.

        A window is m = n_step steps, or fewer where an episode or the buffer ends. Its target is
        reward + discount · V(next_observation).

        Returns:
            ``observation``, ``action`` of the first step; ``reward`` Σ_{k<m} γᵏ r_k and ``discount`` γᵐ, or 0 where the
            last step terminated, ``[B, 1]``; ``next_observation`` after the last step (after a terminated one, the
            last of the episode); ``weight`` ``[B, 1]``, 1 if uniform; ``index`` ``[B]`` for ``set_priorities``.
        """
        storage = self._filled_storage()
        if storage.tree is None:
            draw = torch.rand(batch_size, dtype=torch.float64, device=self.device)
            index = ((draw * self._size).long() + self._oldest) % storage.num_steps
            weight = torch.ones(batch_size, device=self.device)
        else:
            index = storage.tree.sample(batch_size)
            priority = storage.tree.get(index)
            # (size · P(i))^−β / max: the size, and the sum in P, cancel.
            weight = ((priority / priority.amin()) ** -self.importance_exponent).float()
        last, reward, discount = self._follow(storage, index, n_step, gamma)
        ending = storage.ending.index_select(0, last)
        goes_on, has_final = ending == GOES_ON, ending > storage.newest_final - storage.num_finals
        # A step that terminated, or whose final observation is gone, leads to itself: finite, and nobody else's.
        elsewhere = torch.where(has_final, storage.num_steps + ending % storage.num_finals, last)
        successor = torch.where(goes_on, (last + storage.num_envs) % storage.num_steps, elsewhere)
        usable = (has_final | (ending < 0)).unsqueeze(1)
        return {
            OBSERVATION: storage.observation_at(index),
            ACTION: storage.action.index_select(0, index),
            REWARD: reward,
            "discount": torch.where((ending == TERMINATES).unsqueeze(1), 0.0, discount),
            NEXT_OBSERVATION: storage.observation_at(successor),
            "weight": torch.where(usable, weight.unsqueeze(1), 0.0),
            "index": index,
        }

    def set_priorities(self, index: Tensor, td_error: Tensor, weight: Tensor | None = None) -> None:
        """Draw transitions from now on by their TD errors, ``[B]`` or ``[B, 1]``; without priorities, do nothing.

        With the ``weight`` of the sample, those of weight 0, whose successor is lost, are not drawn again.
        """
        tree = self._filled_storage().tree
        if tree is None:
            return
        priority = (td_error.detach().reshape(-1).double().abs() + MIN_ERROR) ** self.priority_exponent
        self._max_priority.copy_(torch.maximum(self._max_priority, priority.amax()))
        # A row that was overwritten since it was drawn may be the row of successors now, which is never drawn.
        known = tree.get(index) > 0
        if weight is not None:
            known = known & (weight.reshape(-1) > 0)
        tree.set(index, torch.where(known, priority, 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is held as plain tensors and numbers; memory not filled yet is left out."""
        storage = self._storage
        if storage is None:
            return {"num_rows": 0}
        num_rows = self._num_rows + 1  # with the row of successors
        newest_final = int(storage.newest_final)
        num_finals = min(newest_final + 1 - storage.num_finals, storage.num_finals)
        return {
            "num_rows": self._num_rows,
            "cursor": self._cursor,
            "num_envs": storage.num_envs,
            "max_rows": storage.num_rows - 1,
            "newest_final": newest_final,
            # In main memory, whatever the device: a copy beside the buffer might not fit there.
            "rows": {name: rows[:num_rows].to("cpu", copy=True) for name, rows in storage.rows.items()},
            "finals": {name: finals[:num_finals].to("cpu", copy=True) for name, finals in storage.finals.items()},
            "max_priority": self._max_priority.clone(),
            "priority": [] if storage.tree is None else storage.tree.state(num_rows * storage.num_envs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, on this buffer's device; the same random numbers then draw the same samples.

        Raises:
            ValueError: the state is of another capacity, number of environments, layout, or way to draw.
        """
        if not state["num_rows"]:
            if self._storage is not None:
                raise ValueError("The saved replay buffer is empty, and this one is not.")
            return
        storage = self._storage or self._allocate(state["rows"], state["num_envs"])
        saved, ours = (
            {name: (tuple(rows.shape[2:]), rows.dtype) for name, rows in columns.items()}
            for columns in (state["rows"], storage.rows)
        )
        for what, theirs, here in (
            ("environments", state["num_envs"], storage.num_envs),
            ("time steps of capacity", state["max_rows"], storage.num_rows - 1),
            ("columns", saved, ours),
            ("priorities", bool(state["priority"]), storage.tree is not None),
        ):
            if theirs != here:
                raise ValueError(f"The saved replay buffer differs in {what}: it has {theirs}, this one {here}.")
        for held, columns in ((storage.rows, state["rows"]), (storage.finals, state["finals"])):
            for name, column in columns.items():
                held[name][: len(column)].copy_(column)
        storage.newest_final.fill_(state["newest_final"])
        self._max_priority.copy_(state["max_priority"])
        if storage.tree is not None:
            storage.tree.load_state(state["priority"])
        self._move_to(state["cursor"], state["num_rows"])

    def _filled_storage(self) -> _Storage:
        if self._storage is None or not self._num_rows:
            raise RuntimeError("The replay buffer is empty; add a batch before drawing from it.")
        return self._storage

    def _allocate(self, columns: Mapping[str, Tensor], num_envs: int) -> _Storage:
        layout = columns, num_envs, self.capacity, self.priority_exponent > 0
        needed, available = _Storage(*layout, "meta").num_bytes, available_bytes(self.device)
        if needed > available:
            raise ConfigError(
                f"A replay buffer for {self.capacity:,} transitions needs {needed / 1e9:.2f} GB on {self.device}, and "
                f"{available / 1e9:.2f} GB are available; lower algo.buffer_size."
            )
        self._storage = _Storage(*layout, self.device)
        return self._storage

    def _move_to(self, cursor: int, num_rows: int) -> None:
        self._cursor, self._num_rows = cursor, num_rows
        storage = self._filled_storage()
        self._oldest.fill_((cursor - num_rows) % storage.num_rows * storage.num_envs)
        self._size.fill_(num_rows * storage.num_envs)

    def _cut_before(self, first: Mapping[str, Tensor]) -> None:
        """Mark the newest steps as truncated where a batch begins with other observations than their successors."""
        if not self._num_rows:
            return
        storage = self._filled_storage()
        successor = {name: storage.rows[name][self._cursor] for name in storage.finals}
        if any(first[name].shape != value.shape for name, value in successor.items()):
            return  # which writing it will refuse
        if self.device.type == "cpu" and all(torch.equal(successor[name], first[name]) for name in successor):
            return  # as always, but for a device it would have to wait to know
        ending = storage.rows[ENDING][self._cursor - 1]
        differs = torch.zeros_like(ending, dtype=torch.bool)
        for name, value in successor.items():
            differs |= (value != first[name]).reshape(len(differs), -1).any(1)
        cut = differs & (ending == GOES_ON)
        number = storage.keep_finals(cut, successor)
        ending.copy_(torch.where(cut, number, ending))

    def _follow(
        self, storage: _Storage, index: Tensor, n_step: int, gamma: float
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return each window's last step, its sum of rewards, and γ to the number of its steps."""
        reward = storage.reward.index_select(0, index)
        if n_step == 1:
            return index, reward, gamma
        N, last, discount = storage.num_envs, index, torch.full_like(reward, gamma)
        age = (index - self._oldest) % storage.num_steps  # 0 for the oldest; it has no seam
        for k in range(1, n_step):
            goes_on = (storage.ending.index_select(0, last) == GOES_ON) & (age + N < self._size)
            age = age + N * goes_on
            last = (age + self._oldest) % storage.num_steps
            goes_on = goes_on.unsqueeze(1)
            reward = reward + torch.where(goes_on, storage.reward.index_select(0, last) * gamma**k, 0.0)
            discount = torch.where(goes_on, gamma ** (k + 1), discount)
        return last, reward, discount


class _Storage:
    """The memory of a replay buffer: a ring of rows, one more than the capacity, for the newest successors.

    Behind the rows of each observation lies a ring of final observations, so that one index reaches both, and one more
    place where those go that nobody needs: with it, every shape is fixed.
    """

    def __init__(
        self, columns: Mapping[str, Tensor], num_envs: int, capacity: int, prioritised: bool, device: torch.device | str
    ) -> None:
        max_rows = -(-capacity // num_envs)
        self.num_envs, self.num_rows, self.num_steps = num_envs, max_rows + 1, (max_rows + 1) * num_envs
        self.num_finals = -(-max_rows // FINAL_SPACING) * num_envs
        self.memory: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.finals: dict[str, Tensor] = {}
        for name, column in {**columns, ENDING: torch.empty((0, 0), dtype=torch.int64)}.items():
            is_observation = name.split(".")[0] == OBSERVATION
            length = self.num_steps + (self.num_finals + 1 if is_observation else 0)
            memory = torch.empty((length, *column.shape[2:]), dtype=column.dtype, device=device)
            self.memory[name] = memory
            self.rows[name] = memory[: self.num_steps].view(self.num_rows, num_envs, *column.shape[2:])
            if is_observation:
                self.finals[name] = memory[self.num_steps :]
        self.action, self.reward, self.ending = (self.memory[name] for name in (ACTION, REWARD, ENDING))
        # Numbers begin at num_finals: newest_final − num_finals, the newest of those overwritten, is then −1 or more.
        self.newest_final = torch.full((), self.num_finals - 1, dtype=torch.int64, device=device)
        self.tree = SumTree(self.num_steps, device) if prioritised else None

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in (*self.memory.values(), *(self.tree.levels if self.tree else ())))

    def write(self, name: str, row: int, values: Tensor) -> None:
        """Put ``[T, N, ...]`` into T rows from ``row`` on, around the end of the ring."""
        rows, count = self.rows[name], values.shape[0]
        if values.shape[1:] != rows.shape[1:]:
            held, given = list(rows.shape[1:]), list(values.shape[1:])
            raise ValueError(f"The replay buffer holds {name} of {held} per step, got {given}.")
        num_first = min(count, self.num_rows - row)
        rows[row : row + num_first].copy_(values[:num_first])
        rows[: count - num_first].copy_(values[num_first:])

    def keep_finals(self, cut: Tensor, observation: Mapping[str, Tensor]) -> Tensor:
        """Keep the observations ``[K, ...]`` where ``cut`` ``[K]``, and return the number that each has there."""
        number = cut.cumsum(0) + self.newest_final
        needed = cut
        if len(cut) > self.num_finals:  # the last of those that share a place
            needed = cut & (number > number[-1] - self.num_finals)
        place = torch.where(needed, number % self.num_finals, self.num_finals)
        for name, value in observation.items():
            self.finals[name].index_copy_(0, place, value.to(self.finals[name]))
        self.newest_final.copy_(number[-1])
        return number

    def observation_at(self, index: Tensor) -> Observation:
        """Return observations ``[B]`` from rows and final observations alike."""
        if OBSERVATION in self.memory:
            return self.memory[OBSERVATION].index_select(0, index)
        found = TensorDict({}, batch_size=index.shape, device=index.device)
        for name in self.finals:
            found[tuple(name.split(".")[1:])] = self.memory[name].index_select(0, index)
        return found


def available_bytes(device: torch.device) -> int:
    """Return the free memory of a device; where the system does not tell, as macOS, all there could be."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines()) if meminfo.exists() else {}
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else 2**63


def _columns(batch: TensorDict) -> dict[str, Tensor]:
    """Return the columns that are stored of a batch as they are; ``ENDING`` comes beside them."""
    return {**_observation_columns(batch[OBSERVATION]), ACTION: batch[ACTION], REWARD: batch[REWARD]}


def _observation_columns(obs: Observation) -> dict[str, Tensor]:
    if isinstance(obs, Tensor):
        return {OBSERVATION: obs}
    return {f"{OBSERVATION}.{path}": leaf for path, leaf in leaves(obs).items()}
