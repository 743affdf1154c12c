"""A policy with memory: a GRU between encoder and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.models import Distribution, ObservationEncoder, ObservationNormalizer
from apexrl.models.actor import ActionHead
from apexrl.models.encoder import linear, mlp
from apexrl.policies.base import Policy, open_ends, shift
from apexrl.types import (
    ACTION,
    DONE,
    NEXT_OBSERVATION,
    OBSERVATION,
    SAMPLE_LOG_PROB,
    Carry,
    Evaluation,
    Observation,
    PolicyOutput,
)

HIDDEN = "hidden"


class RecurrentActorCritic(Policy):
    """Encoder, GRU and two heads. The rollout carries the hidden state and zeroes it where an episode ended.

    ``forward``, ``evaluate_actions`` and ``get_value`` take single observations and start from an empty memory;
    ``act``, ``evaluate`` and ``values`` use the memory that the carry or the batch holds.
    """

    sequential = True

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden_dims: Sequence[int] = (64,),
        memory_dim: int = 64,
        activation: str = "tanh",
        groups: Sequence[str] | None = None,
        normalize_obs: bool = False,
        **head_options: Any,
    ) -> None:
        super().__init__()
        self.memory_dim = memory_dim
        self.encoder = ObservationEncoder(observation_space, groups)
        self.trunk = mlp([self.encoder.num_features, *hidden_dims], activation)
        self.cell = nn.GRUCell([self.encoder.num_features, *hidden_dims][-1], memory_dim)
        self.action_head = ActionHead(memory_dim, action_space, **head_options)
        self.value_head = linear(memory_dim, 1, gain=1.0)
        self.normalizer = ObservationNormalizer(observation_space) if normalize_obs else None

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        """Return an empty memory."""
        return {HIDDEN: torch.zeros(num_envs, self.memory_dim, device=self.device)}

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Act and return the next memory."""
        hidden = self._remember(self._features(carry[OBSERVATION]), carry[HIDDEN])
        distribution: Distribution = self.action_head(hidden)
        action = distribution.mode if deterministic else distribution.sample()
        return {ACTION: action, SAMPLE_LOG_PROB: distribution.log_prob(action), HIDDEN: hidden}

    def evaluate(self, batch: Mapping[str, Any] | TensorDict) -> Evaluation:
        """Run through the sequences ``[T, n]`` from the memory at their first step."""
        features = self._features(batch[OBSERVATION])
        alive = (~batch[DONE]).to(features.dtype)
        hidden, memories = batch[HIDDEN][0], []
        for t in range(features.shape[0]):
            hidden = self._remember(features[t], hidden)
            memories.append(hidden)
            hidden = hidden * alive[t]
        memory = torch.stack(memories)
        distribution: Distribution = self.action_head(memory)
        return Evaluation(distribution.log_prob(batch[ACTION]), distribution.entropy(), self.value_head(memory))

    def values(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Value every step from the memory stored with it: one batched step of the GRU, no loop."""
        memory = self._remember(self._features(batch[OBSERVATION]), batch[HIDDEN])
        value: Tensor = self.value_head(memory)
        if value.is_cuda:  # to count the rows would wait for the device
            return value, self.value_head(self._remember(self._features(batch[NEXT_OBSERVATION]), memory))
        rows = open_ends(batch)
        next_value = shift(value)
        next_memory = self._remember(self._features(batch[NEXT_OBSERVATION][rows]), memory[rows])
        next_value[rows] = self.value_head(next_memory)
        return value, next_value

    def forward(self, obs: Observation, deterministic: bool = False) -> PolicyOutput:
        """Act from an empty memory."""
        memory = self._first_memory(obs)
        distribution: Distribution = self.action_head(memory)
        action = distribution.mode if deterministic else distribution.sample()
        return PolicyOutput(action, distribution.log_prob(action), self.value_head(memory))

    def evaluate_actions(self, obs: Observation, action: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate actions taken from an empty memory."""
        distribution: Distribution = self.action_head(self._first_memory(obs))
        return distribution.log_prob(action), distribution.entropy()

    def get_value(self, obs: Observation) -> Tensor:
        """Value states from an empty memory."""
        value: Tensor = self.value_head(self._first_memory(obs))
        return value

    def _features(self, obs: Observation) -> Tensor:
        features: Tensor = self.trunk(self.encoder(self.normalized(obs)))
        return features

    def _remember(self, features: Tensor, hidden: Tensor) -> Tensor:
        flat: Tensor = self.cell(features.flatten(0, -2), hidden.flatten(0, -2))
        return flat.reshape(*features.shape[:-1], -1)

    def _first_memory(self, obs: Observation) -> Tensor:
        features = self._features(obs)
        return self._remember(features, features.new_zeros(*features.shape[:-1], self.memory_dim))
