"""The policy contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.models import ObservationNormalizer
from apexrl.types import (
    ACTION,
    NEXT_OBSERVATION,
    OBSERVATION,
    SAMPLE_LOG_PROB,
    TRUNCATED,
    Carry,
    Evaluation,
    Observation,
    PolicyOutput,
)


class HasSpaces(Protocol):
    """Anything with the spaces of one environment, such as a ``VecEnv``."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


class Policy(nn.Module, ABC):
    """Networks that act, evaluate stored actions, and value states.

    A new policy implements ``forward``, ``evaluate_actions`` and ``get_value``. The other methods have defaults in
    terms of these three; a policy with memory, or one that can share work between them, overrides them.
    """

    normalizer: ObservationNormalizer | None
    """Running statistics of the observations, for policies that normalise them."""
    sequential: bool = False
    """True when minibatches must keep whole sequences ``[T, n]`` (memory); False for shuffled samples ``[B]``."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = None

    @classmethod
    def for_env(cls, env: HasSpaces, **options: Any) -> Self:
        """Make a policy for an environment's spaces; for classes whose constructor begins with the two spaces."""
        make: Any = cls
        policy: Self = make(env.observation_space, env.action_space, **options)
        return policy

    @abstractmethod
    def forward(self, obs: Observation, deterministic: bool = False) -> PolicyOutput:
        """Return action, log-probability and value; the action is sampled unless ``deterministic``."""

    @abstractmethod
    def evaluate_actions(self, obs: Observation, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of stored actions, each ``[..., 1]``."""

    @abstractmethod
    def get_value(self, obs: Observation) -> Tensor:
        """Return the value of states, ``[..., 1]``."""

    def __call__(self, *args: Any, **kwargs: Any) -> PolicyOutput:
        """``forward``, typed."""
        output: PolicyOutput = super().__call__(*args, **kwargs)
        return output

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        """Return what the policy carries between steps, as it is when an episode starts: all zeros."""
        return {}

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Act on a carry: returns ``action``, ``sample_log_prob`` and the next recurrent state."""
        output = self(carry[OBSERVATION], deterministic=deterministic)
        return {ACTION: output.action, SAMPLE_LOG_PROB: output.log_prob}

    def evaluate(self, batch: Mapping[str, Any] | TensorDict) -> Evaluation:
        """Evaluate the stored actions of a minibatch under the current weights."""
        log_prob, entropy = self.evaluate_actions(batch[OBSERVATION], batch[ACTION])
        return Evaluation(log_prob, entropy, self.get_value(batch[OBSERVATION]))

    def values(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Value every state of a batch ``[T, N]``, and the true successor of every step.

        A step that goes on shares its successor with the next step, so on the CPU only truncated steps and the last
        one are evaluated again. The successor of a terminated step has no value; what stands there is not used.
        """
        if batch[TRUNCATED].is_cuda:  # to count the rows would wait for the device
            return in_chunks(self.get_value, batch[OBSERVATION]), in_chunks(self.get_value, batch[NEXT_OBSERVATION])
        value = self.get_value(batch[OBSERVATION])
        rows = open_ends(batch)
        next_value = shift(value)
        next_value[rows] = self.get_value(batch[NEXT_OBSERVATION][rows])
        return value, next_value

    def update_normalizer(self, obs: Observation, apply: Tensor | None = None) -> None:
        """Merge observations into the running statistics; where ``apply`` is false nothing changes."""
        if self.normalizer is not None:
            self.normalizer.update(obs, apply)

    @property
    def has_new_normalizer(self) -> bool:
        """Whether there is a normaliser, and it has seen nothing yet."""
        return self.normalizer is not None and not self.normalizer.has_seen()

    def normalized(self, obs: Observation) -> Observation:
        """Normalise observations with the statistics as they are."""
        return obs if self.normalizer is None else self.normalizer(obs)


def open_ends(batch: TensorDict) -> tuple[Tensor, ...]:
    """Index the steps of a batch whose successor is not the next step's state: truncated ones and the last."""
    ends = batch[TRUNCATED].squeeze(-1).clone()
    ends[-1] = True
    rows: tuple[Tensor, ...] = ends.nonzero(as_tuple=True)
    return rows


def in_chunks(function: Callable[[Any], Tensor], obs: Observation, max_rows: int = 65_536) -> Tensor:
    """Apply a function to ``[T, N, ...]`` some steps at a time, so that its activations stay small."""
    steps = max(1, max_rows // obs.shape[1])
    return torch.cat([function(obs[start : start + steps]) for start in range(0, obs.shape[0], steps)])


def shift(value: Tensor) -> Tensor:
    """Move ``[T, ...]`` one step earlier; the last entry is a copy to be overwritten."""
    return torch.cat((value[1:], value[-1:]))
