"""A policy with memory: a GRU between encoder and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.types import DONE, NEXT_OBSERVATION, OBSERVATION, Carry, Evaluation, Observation
from apexrl.policies.base import HasSpaces, Policy, explore, initial_noise, stored_log_prob, successor_values
from apexrl.policies.networks import Distribution, ObservationEncoder, ObservationNormalizer
from apexrl.policies.networks.mlp import ActionHead, linear, mlp

HIDDEN = "hidden"


class RecurrentActorCritic(Policy):
    """Encoder, GRU and two heads. The rollout carries the hidden state and zeroes it where an episode ended.

    ``act``, ``evaluate`` and ``values`` use the memory that the carry or the batch holds; without one, as in
    ``forward``, ``evaluate_actions`` and ``get_value``, every observation is the first of an episode.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        hidden_dims: widths of the layers before the memory.
        rnn_hidden_dim: width of the memory.
        activation: between the layers.
        groups: observation groups that the memory sees; None for all but the privileged ones.
        critic_groups: observation groups that the critic sees beside the memory, privileged ones too; None for none.
        critic_hidden_dims: widths of the critic's layers; only with ``critic_groups``.
        normalize_obs: normalise observations by running statistics.
        head_options: of ``ActionHead``.
    """

    sequential = True

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden_dims: Sequence[int] = (64,),
        rnn_hidden_dim: int = 64,
        activation: str = "tanh",
        groups: Sequence[str] | None = None,
        critic_groups: Sequence[str] | None = None,
        critic_hidden_dims: Sequence[int] = (64,),
        normalize_obs: bool = False,
        **head_options: Any,
    ) -> None:
        super().__init__(observation_space, action_space)
        self.rnn_hidden_dim = rnn_hidden_dim
        self.encoder = ObservationEncoder(observation_space, groups)
        widths = [self.encoder.num_features, *hidden_dims]
        self.trunk = mlp(widths, activation)
        self.cell = nn.GRUCell(widths[-1], rnn_hidden_dim)
        self.action_head = ActionHead(rnn_hidden_dim, action_space, **head_options)
        self.critic_encoder: ObservationEncoder | None = None
        self.value_head: nn.Module
        if critic_groups is None:
            self.value_head = linear(rnn_hidden_dim, 1, gain=1.0)
        else:
            self.critic_encoder = ObservationEncoder(observation_space, critic_groups, privileged=True)
            widths = [rnn_hidden_dim + self.critic_encoder.num_features, *critic_hidden_dims]
            self.value_head = nn.Sequential(mlp(widths, activation), linear(widths[-1], 1, gain=1.0))
        self.normalizer = ObservationNormalizer(observation_space) if normalize_obs else None

    @classmethod
    def from_config(cls, cfg: Any, env: HasSpaces, critic_options: Mapping[str, Any], *, needs_value: bool) -> Self:
        """Create the policy of a ``PolicyConfig``."""
        return cls.for_env(
            env,
            **cfg.layers,
            groups=cfg.actor_groups,
            rnn_hidden_dim=cfg.rnn_hidden_dim,
            critic_groups=cfg.critic_groups,
            critic_hidden_dims=cfg.critic["hidden_dims"],
            **cfg.head,
            normalize_obs=cfg.normalize_obs,
        )

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        """Return an empty memory, and the noise of gSDE."""
        hidden = torch.zeros(num_envs, self.rnn_hidden_dim, device=self.device)
        return {HIDDEN: hidden, **initial_noise(self.action_head, num_envs)}

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Act and return the next memory."""
        hidden = self._remember(self._features(self.normalized(carry[OBSERVATION])), carry.get(HIDDEN))
        return {**explore(self.action_head(hidden), carry, deterministic), HIDDEN: hidden}

    def evaluate(self, batch: Mapping[str, Any] | TensorDict) -> Evaluation:
        """Run through the sequences ``[T, n]`` from the memory at their first step."""
        obs = self.normalized(batch[OBSERVATION])
        memory = self._memories(self._features(obs), batch)
        distribution: Distribution = self.action_head(memory)
        return Evaluation(stored_log_prob(distribution, batch), distribution.entropy(), self._value(memory, obs))

    def values(self, batch: Mapping[str, Any] | TensorDict) -> tuple[Tensor, Tensor]:
        """Value every step from the memory stored with it: one batched step of the GRU, no loop."""
        memory, value = self._remember_and_value(batch[OBSERVATION], batch.get(HIDDEN))

        def value_after(rows: Any) -> Tensor:
            return self._remember_and_value(batch[NEXT_OBSERVATION][rows], memory[rows])[1]

        return value, successor_values(batch, value, value_after)

    def _memories(self, features: Tensor, batch: Mapping[str, Any] | TensorDict) -> Tensor:
        """Return the memory after every step; without one to begin with, every row is the first of an episode."""
        if HIDDEN not in batch:
            return self._remember(features)
        alive = (~batch[DONE]).to(features.dtype)
        hidden, memories = batch[HIDDEN][0], []
        for t in range(features.shape[0]):
            hidden = self._remember(features[t], hidden)
            memories.append(hidden)
            hidden = hidden * alive[t]
        return torch.stack(memories)

    def _features(self, obs: Observation) -> Tensor:
        features: Tensor = self.trunk(self.encoder(obs))
        return features

    def _remember(self, features: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Take one step of the GRU, from an empty memory when none is given."""
        flat: Tensor = self.cell(features.flatten(0, -2), None if hidden is None else hidden.flatten(0, -2))
        return flat.reshape(*features.shape[:-1], -1)

    def _value(self, memory: Tensor, obs: Observation) -> Tensor:
        """Value states from the memory and, of normalised observations, the groups that the critic sees."""
        if self.critic_encoder is not None:
            memory = torch.cat((memory, self.critic_encoder(obs)), dim=-1)
        value: Tensor = self.value_head(memory)
        return value

    def _remember_and_value(self, obs: Observation, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        obs = self.normalized(obs)
        memory = self._remember(self._features(obs), hidden)
        return memory, self._value(memory, obs)
