"""The collector contract."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

from tensordict import TensorDict

from apexrl.core.metrics import EpisodeMetrics
from apexrl.policies.base import Policy


class Collected(NamedTuple):
    """What a collector that works in the background hands over."""

    batch: TensorDict
    """On the policy's device."""
    outcomes: list[TensorDict]
    """What episode statistics are made of, on the environment's device."""
    num_steps: int
    """Environment steps that the batch stands for."""
    metrics: dict[str, float]
    """Numbers about this batch's collection."""


class BaseCollector(ABC):
    """Collects batches ``[T, N]`` with the current policy. A new collector implements ``collect``."""

    seed: int | None = None
    """Of the next reset."""
    on_message: Callable[[str], None] = logging.getLogger("apexrl").info
    """Told what people should know of the collecting."""
    in_background: ClassVar[bool] = False
    """Whether another thread may use the policy's device at any time."""

    @cached_property
    def episode_metrics(self) -> EpisodeMetrics:
        """Episodes that ended while collecting, and the running ones; stays empty where ``collect`` adds none."""
        return EpisodeMetrics()

    @abstractmethod
    def collect(self, n_steps: int, reset: bool = False) -> TensorDict:
        """Take ``n_steps`` in every environment; ``reset`` starts new episodes first and cuts the running ones."""

    def collect_for_normalizer(self, n_steps: int) -> TensorDict:
        """Collect what a new normaliser sees before anything is learned; nobody learns from it."""
        return self.collect(n_steps)

    def steps_in(self, batch: TensorDict) -> int:
        """Return how many environment steps a batch of ``collect`` stands for."""
        return batch.shape[0] * batch.shape[1]

    def metrics(self) -> dict[str, float]:
        """Return numbers about the collecting itself, by their full log names; read once a logged iteration."""
        return {}

    def quiet(self) -> AbstractContextManager[None]:
        """Hold the environments still for a block that reads or writes their state, or the random generators."""
        return nullcontext()

    def follow(self, policy: Policy) -> None:
        """Act with this policy from the next rollout on; collectors that only ever know one need not care."""
        return

    def adopt(self) -> None:
        """Let the first call of ``collect`` continue the episodes that run in the environment, where it can."""
        return

    def forget(self) -> None:
        """Forget the running episodes, where they last from one call of ``collect`` to the next."""
        return

    def restart(self, seed: int) -> None:
        """Forget the running episodes; the next call of ``collect`` starts new ones from a seed."""
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on, without the environment, as tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        return

    def close(self) -> None:
        """End what runs in the background; the environments stay open. The collector cannot be used afterwards."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WarmUp:
    """The time until the policy's normaliser has seen observations, for collectors that run ahead.

    What was collected before then is of no use to a policy that no longer sees observations as they are.
    """

    def __init__(self) -> None:
        self.lasts = True

    def ends(self, policy: Policy) -> bool:
        """Say, at one call, that the time is over."""
        before = self.lasts
        self.lasts = before and policy.has_new_normalizer  # which is read from the device, but not any more afterwards
        return before and not self.lasts
