"""What the environments that simulate in NumPy return: tensors over arrays that are allocated once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.core.types import EnvStep, Observation
from apexrl.envs.workers.arrays import Buffers, Tree


class StepBuffers:
    """The arrays that a step reads and writes, and the tensors that share their memory.

    Args:
        arrays: for N environments.
        metrics: what the first rows of ``arrays.metric`` hold.
        device: where the tensors are wanted; on any but the CPU every step is copied.
        info: ``[N, 1]`` control data.
    """

    def __init__(
        self, arrays: Buffers, metrics: Iterable[str], device: torch.device, info: Mapping[str, NDArray[Any]] = {}
    ) -> None:
        self.arrays, self.device = arrays, device
        self._action = torch.from_numpy(arrays.action)
        self.metric = {name: torch.from_numpy(row) for name, row in zip(metrics, arrays.metric, strict=False)}
        self._running = EnvStep(
            obs=_tensors(arrays.obs, len(arrays.action)),
            reward=torch.from_numpy(arrays.reward),
            terminated=torch.from_numpy(arrays.terminated),
            truncated=torch.from_numpy(arrays.truncated),
            metric=self.metric,
            info={name: torch.from_numpy(column) for name, column in info.items()},
        )
        self._ended = self._running._replace(final_obs=_tensors(arrays.final_obs, len(arrays.action)))

    def take(self, action: Tensor) -> None:
        """Write the actions ``[N, A]`` into their array."""
        if action.shape != self._action.shape:
            raise EnvError(f"step needs actions {list(self._action.shape)}, got {list(action.shape)}.")
        self._action.copy_(action.detach())

    def observation(self) -> Observation:
        """Return what is seen now."""
        return self._running.obs.to(self.device)

    def step(self, any_ended: bool) -> EnvStep:
        """Return what the arrays hold; ``final_obs`` only where an episode ended."""
        step = self._ended if any_ended else self._running
        if self.device.type == "cpu":
            return step
        return EnvStep(*(self._to_device(part) for part in step))

    def _to_device(self, part: Any) -> Any:
        if isinstance(part, dict):
            return {name: value.to(self.device) for name, value in part.items()}
        return None if part is None else part.to(self.device)


def _tensors(tree: Tree, num_envs: int) -> Observation:
    if not isinstance(tree, Mapping):
        return torch.from_numpy(tree)
    parts = {key: _tensors(part, num_envs) for key, part in tree.items()}
    groups = TensorDict(parts, batch_size=[num_envs], device="cpu")
    groups.lock_()  # every step returns this object, so a key added by one reader would stay
    return groups
