"""The policy contract."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, Self

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.errors import ConfigError
from apexrl.core.observations import leaf_spaces
from apexrl.core.plugins import accepted
from apexrl.core.types import (
    ACTION,
    NEXT_OBSERVATION,
    OBSERVATION,
    PRE_TANH,
    SAMPLE_LOG_PROB,
    TRUNCATED,
    Carry,
    Evaluation,
    Observation,
    PolicyOutput,
)
from apexrl.policies.networks import Distribution, ObservationNormalizer, SquashedGaussian
from apexrl.policies.networks.distributions import StateDependentGaussian

NOISE, NOISE_AGE = "noise", "noise_age"
NOISE_KEYS = frozenset({NOISE, NOISE_AGE})
"""Carried, but too large to be stored with a batch: ε ``[N, F, A]``, and the steps that it was used for, ``[N, 1]``."""
_IMPLEMENT_ONE = (("act", "forward"), ("evaluate", "distribution", "evaluate_actions"), ("values", "get_value"))
"""Of each of these a policy has its own; the base class derives the others."""


class HasSpaces(Protocol):
    """Anything with the spaces of one environment, such as a ``VecEnv``."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


class Policy(nn.Module):
    """Networks that act, evaluate stored actions, and value states.

    A policy implements ``act``, ``evaluate`` (or ``distribution``) and ``values``, or their simple forms ``forward``,
    ``evaluate_actions`` and ``get_value``, which take observations alone: either three are derived from the other.
    """

    normalizer: ObservationNormalizer | None
    """Running statistics of the observations, for policies that normalise them."""
    options: Mapping[str, Any] | None = None
    """What ``for_env`` created the policy with; None where it was created otherwise."""
    sequential: bool = False
    """True when minibatches must keep whole sequences ``[T, n]`` (memory); False for shuffled samples ``[B]``."""
    has_value: bool = True
    """Whether a critic of states is learned, as PPO needs it."""
    extra_keys: tuple[str, ...] = ()
    """What ``act`` returns besides action and log-probability, and ``evaluate`` needs back."""
    chunk: int = 1
    """Actions that one step takes; where there are more, ``evaluate`` leaves out those beyond ``valid_steps``."""
    has_own_loss: bool = False
    """Whether it has an ``imitation_loss`` of its own."""

    def __init__(
        self, observation_space: gym.Space[Any] | None = None, action_space: gym.Space[Any] | None = None
    ) -> None:
        super().__init__()
        for methods in _IMPLEMENT_ONE:
            if not any(self._implements(method) for method in methods):
                raise TypeError(f"{type(self).__name__} must implement one of {', '.join(methods)}.")
        self.normalizer = None
        self.observation_space, self.action_space = observation_space, action_space
        """Of the environments that it was made for; None when they are not known, and then not checked."""

    @classmethod
    def for_env(cls, env: HasSpaces, **options: Any) -> Self:
        """Make a policy for an environment's spaces; for classes whose constructor begins with the two spaces."""
        make: Any = cls
        policy: Self = make(env.observation_space, env.action_space, **options)
        policy.observation_space, policy.action_space = env.observation_space, env.action_space
        policy.options = options
        return policy

    @classmethod
    def from_config(cls, cfg: Any, env: HasSpaces, critic_options: Mapping[str, Any], *, needs_value: bool) -> Self:
        """Create the policy that the section ``policy`` of a configuration describes.

        Args:
            cfg: the section; here a ``PolicyConfig``, for policies of an actor and critics.
            env: an environment of the task.
            critic_options: what the algorithm's section says of critics.
            needs_value: whether the algorithm reads the value of states.
        """
        own = cfg.own_class
        options = {
            "actor_cfg": {**cfg.layers, "groups": cfg.actor_groups, **cfg.head},
            "critic_cfg": {**cfg.critic, **critic_options},
            "normalize_obs": cfg.normalize_obs,
        }
        if own is None:
            return cls.for_env(env, **options)
        if issubclass(own, Policy):
            named = inspect.signature(cls).parameters
            layers = {name: value for name, value in {**cfg.layers, **cfg.head}.items() if name in named}
            return cls.for_env(env, **accepted(cls, options), **layers, **cfg.kwargs)
        options["actor_cfg"] = {**accepted(own, options["actor_cfg"]), **cfg.kwargs}
        return cls.for_env(env, actor_class=own, **options)

    def check_fits(self, env: HasSpaces) -> None:
        """Check that an environment has the observations and actions that the policy was made for.

        Raises:
            ConfigError: names both spaces when they differ in kind or shape; bounds may differ.
        """
        name, remedy = type(env).__name__, f"Make it for this environment: {type(self).__name__}.for_env(env)."
        if self.observation_space is not None:
            needed, given = (_shapes(space) for space in (self.observation_space, env.observation_space))
            if not needed.items() <= given.items():
                raise ConfigError(f"The policy was made for observations {needed}, but {name} has {given}. {remedy}")
        ours, theirs = self.action_space, env.action_space
        if ours is not None and (type(ours) is not type(theirs) or _choices(ours) != _choices(theirs)):
            raise ConfigError(f"The policy was made for actions {ours}, but {name} takes {theirs}. {remedy}")

    def __call__(self, *args: Any, **kwargs: Any) -> PolicyOutput:
        """``forward``, typed; a plain tuple becomes a ``PolicyOutput``."""
        output = super().__call__(*args, **kwargs)
        if not isinstance(output, tuple) or len(output) != 3:
            found = f"{len(output)} values" if isinstance(output, tuple) else type(output).__name__
            raise TypeError(f"{type(self).__name__}.forward must return (action, log_prob, value), got {found}.")
        return PolicyOutput(*output)

    @property
    def device(self) -> torch.device:
        """Where the parameters are, or else the buffers; the CPU where there are neither."""
        tensors: Iterator[Tensor] = itertools.chain(self.parameters(), self.buffers(), [torch.empty(0)])
        return next(tensors).device

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        """Return what the policy carries between steps, as it is when an episode starts: all zeros."""
        return {}

    def initial_memory(self, num_envs: int) -> dict[str, Tensor]:
        """Return ``initial_state`` without noise: what ``evaluate`` and ``values`` read, and batches hold."""
        state = self.initial_state(num_envs)
        return {name: value for name, value in state.items() if name not in NOISE_KEYS}

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Act on a carry, which starts from an empty memory where it holds none.

        Returns:
            ``action``, ``sample_log_prob`` (where the policy gives one), ``extra_keys``, the next recurrent state.
        """
        obs = carry[OBSERVATION]
        output = self(obs, deterministic=deterministic)
        self._check_column("log_prob of forward", output.log_prob, obs.shape[:1])
        return {ACTION: output.action, SAMPLE_LOG_PROB: output.log_prob}

    def evaluate(self, batch: Mapping[str, Any] | TensorDict) -> Evaluation:
        """Evaluate the stored actions of a minibatch under the current weights, each result ``[..., 1]``.

        Without a recurrent state in the batch, every row starts from an empty memory.
        """
        log_prob, entropy = self.evaluate_actions(batch[OBSERVATION], batch[ACTION])
        value = self.get_value(batch[OBSERVATION])
        rows = batch[ACTION].shape[: max(1, value.ndim - 1)]
        self._check_column("value of get_value", value, rows)
        self._check_column("log_prob of evaluate_actions", log_prob, rows)
        self._check_column("entropy of evaluate_actions", entropy, rows)
        return Evaluation(log_prob, entropy, value)

    def values(self, batch: Mapping[str, Any] | TensorDict) -> tuple[Tensor, Tensor]:
        """Value every state of a batch ``[T, N]``, and the true successor of every step.

        The successor of a terminated step has no value; what stands there is not used. A batch ``[...]`` without
        ``next_observation`` has values alone, and NaN for its successors.
        """
        value, next_value = state_values(batch, self.get_value)
        self._check_column("value of get_value", value, batch[OBSERVATION].shape[: max(1, value.ndim - 1)])
        return value, next_value

    def distribution(self, obs: Observation) -> Distribution:
        """Return the action distribution, for policies that have one for observations alone."""
        raise TypeError(
            f"{type(self).__name__} has no action distribution for observations alone; use act(carry), evaluate(batch)."
        )

    def get_dist(self, obs: Observation) -> Distribution:
        """Do the same as ``distribution``."""
        return self.distribution(obs)

    def forward(self, obs: Observation, deterministic: bool = False) -> PolicyOutput:
        """Return action, log-probability and value; the action is sampled unless ``deterministic``."""
        output = self.act({OBSERVATION: obs}, deterministic)
        log_prob = output.get(SAMPLE_LOG_PROB)
        if log_prob is None:
            log_prob, _ = self.evaluate_actions(obs, output[ACTION])
        return PolicyOutput(output[ACTION], log_prob, self.get_value(obs))

    def evaluate_actions(self, obs: Observation, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of stored actions, each ``[..., 1]``.

        Where there is a ``distribution``, the critic, which may need privileged groups, does not run.
        """
        if self._implements("distribution"):
            distribution = self.distribution(obs)
            return distribution.log_prob(action), distribution.entropy()
        log_prob, entropy, _ = self.evaluate({OBSERVATION: obs, ACTION: action})
        return log_prob, entropy

    def get_value(self, obs: Observation) -> Tensor:
        """Return the value of states, ``[..., 1]``."""
        return self.values({OBSERVATION: obs})[0]

    def _implements(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Policy, method)

    def _check_column(self, what: str, tensor: Tensor, rows: torch.Size) -> None:
        """Refuse what has not one number a row: losses would silently be spread over ``[B, B]``."""
        if tensor.shape != (*rows, 1):
            raise ConfigError(
                f"{type(self).__name__}: the {what} must be {[*rows, 1]}, got {list(tensor.shape)}. Keep the last "
                "dimension: sum(-1, keepdim=True), or unsqueeze(-1)."
            )

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


def _shapes(space: gym.Space[Any]) -> dict[str, tuple[int, ...]]:
    return {name: box.shape for name, box in leaf_spaces(space).items()}


def _choices(space: Any) -> tuple[int, ...]:
    """Return what tells two action spaces of one kind apart: the sizes of discrete ones, else the shape."""
    sizes = getattr(space, "nvec", getattr(space, "n", space.shape))
    return tuple(np.ravel(sizes).tolist())


def state_values(batch: Mapping[str, Any] | TensorDict, value_of: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
    """Return what ``Policy.values`` does, for a policy that values observations without a memory."""
    if NEXT_OBSERVATION in batch and batch[TRUNCATED].is_cuda:
        value_of = partial(_in_chunks, value_of)
    value = value_of(batch[OBSERVATION])
    return value, successor_values(batch, value, lambda rows: value_of(batch[NEXT_OBSERVATION][rows]))


def successor_values(
    batch: Mapping[str, Any] | TensorDict, value: Tensor, value_after: Callable[[Any], Tensor]
) -> Tensor:
    """Return V(s'_t) of a batch ``[T, N]`` with the values V(s_t); NaN for a batch without ``next_observation``.

    A step that does not end an episode shares its successor with the next step, so on the CPU only truncated steps and
    the last one are evaluated again. ``value_after`` values the successors of the steps that an index picks.
    """
    if NEXT_OBSERVATION not in batch:
        return torch.full_like(value, torch.nan)
    if value.is_cuda:  # to count the rows would wait for the device
        return value_after(slice(None))
    ends = batch[TRUNCATED].squeeze(-1).clone()
    ends[-1] = True
    rows = ends.nonzero(as_tuple=True)
    next_value = torch.cat((value[1:], value[-1:]))
    next_value[rows] = value_after(rows)
    return next_value


def _in_chunks(function: Callable[[Any], Tensor], obs: Observation, max_rows: int = 65_536) -> Tensor:
    """Apply a function to ``[T, N, ...]`` some steps at a time, so that its activations stay small."""
    steps = max(1, max_rows // obs.shape[1])
    return torch.cat([function(obs[start : start + steps]) for start in range(0, obs.shape[0], steps)])


def initial_noise(head: nn.Module, num_envs: int) -> dict[str, Tensor]:
    """Return the noise at the start of an episode: zeros, of age 0, which ``explore`` replaces by a draw."""
    if getattr(head, "gsde_interval", None) is None:
        return {}
    weights: Tensor = head.log_std  # type: ignore[assignment]
    zeros = torch.zeros(num_envs, *weights.shape, device=weights.device)
    return {NOISE: zeros, NOISE_AGE: torch.zeros(num_envs, 1, device=weights.device)}


def explore(distribution: Distribution, carry: Carry, deterministic: bool) -> dict[str, Tensor]:
    """Return ``action``, ``sample_log_prob``, of squashed actions ``pre_tanh``, and with gSDE the next step's noise.

    Noise of age 0 is drawn again; its age returns to 0 after the interval and, as all that is carried, where an
    episode ends. A draw at every step, kept only there, spares the device a question.
    """
    state = {name: carry[name] for name in NOISE_KEYS if name in carry}
    if isinstance(distribution, SquashedGaussian):
        u = distribution.base.mode if deterministic else distribution.base.sample()
        return {ACTION: distribution.squash(u), SAMPLE_LOG_PROB: distribution.log_prob_before_tanh(u), PRE_TANH: u}
    if deterministic:
        action = distribution.mode
    elif isinstance(distribution, StateDependentGaussian) and state:
        action, noise, age = distribution.sample_held(state[NOISE], state[NOISE_AGE])
        state = {NOISE: noise, NOISE_AGE: age}
    else:
        action = distribution.sample()
    return {ACTION: action, SAMPLE_LOG_PROB: distribution.log_prob(action), **state}


def stored_log_prob(distribution: Distribution, batch: Mapping[str, Any] | TensorDict) -> Tensor:
    """Return the log-probability of the actions of a batch, of squashed ones from ``pre_tanh`` where it has that."""
    if isinstance(distribution, SquashedGaussian) and PRE_TANH in batch:
        return distribution.log_prob_before_tanh(batch[PRE_TANH])
    return distribution.log_prob(batch[ACTION])
