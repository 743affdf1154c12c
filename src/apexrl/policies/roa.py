"""A teacher that sees privileged information, and a student that infers it from history (ROA, arXiv 2210.10044)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.errors import ConfigError
from apexrl.core.observations import is_image, leaf_spaces, leaves, select_groups
from apexrl.core.types import (
    CMD_KEY,
    OBJECT_KEY,
    OBS_KEY,
    OBS_PRIV_KEY,
    OBSERVATION,
    PRIV_FEATURE_KEY,
    PRIV_PRED_KEY,
    Carry,
    Evaluation,
    Observation,
)
from apexrl.policies.actor_critic import ActorCritic
from apexrl.policies.base import HasSpaces, Policy, explore, stored_log_prob
from apexrl.policies.networks import Distribution, MLPActor, MLPCritic, ObservationNormalizer
from apexrl.policies.networks.mlp import ObservationEncoder, ObservationMLP, choice_sizes, linear, mlp

HistoryKind = Literal["mlp", "conv", "gru"]


class AdaptationModule(nn.Module):
    """From a window of past frames, and what else the robot knows, to a guess of the privileged feature.

    Args:
        observation_space: of one environment; its group ``policy`` is the window, oldest frame first.
        history: frames in the window.
        kind: how the window is read: flat, by convolutions over time, or by a GRU from the oldest frame on.
        groups: the other groups that it sees.
        hidden_dims: widths of the layers after the window (with ``mlp``, of all).
        num_features: width of the guess.
        activation: between the layers.
    """

    def __init__(
        self,
        observation_space: gym.spaces.Dict,
        *,
        history: int,
        kind: HistoryKind,
        groups: Sequence[str],
        hidden_dims: Sequence[int],
        num_features: int,
        activation: str,
    ) -> None:
        super().__init__()
        space = observation_space[OBS_KEY]
        if not isinstance(space, gym.spaces.Box) or is_image(space) or not space.shape:
            raise ConfigError(f"ROA needs a vector of stacked frames as observation group '{OBS_KEY}', got {space}.")
        if kind not in get_args(HistoryKind):
            raise ConfigError(f"policy.history_kind must be one of {list(get_args(HistoryKind))}, got '{kind}'.")
        size, self.num_dims = gym.spaces.flatdim(space), len(space.shape)
        if history < 1 or size % history:
            raise ConfigError(
                f"policy.history must be the number of frames that the task stacks, at least 1, and divide the {size} "
                f"numbers of observation group '{OBS_KEY}', got {history}."
            )
        self.history, self.kind = history, kind
        frame = size // history
        self.others = ObservationEncoder(observation_space, groups) if groups else None
        window: nn.Module
        if kind == "conv":
            if history < 9:
                raise ConfigError(f"policy.history is {history}; convolutions need at least 9 frames.")
            # Both convolutions fit windows of 9, 13, 17 … frames: at any other length they would miss the newest.
            padding = (9 - history) % 4
            window = nn.Sequential(
                nn.ConstantPad1d((padding, 0), 0.0),
                nn.Conv1d(frame, 32, 5, stride=2),
                nn.ELU(),
                nn.Conv1d(32, 32, 3, stride=2),
                nn.ELU(),
                nn.Flatten(),
            )
            width = 32 * ((history + padding - 5) // 4)
        elif kind == "gru":
            window, width = nn.GRU(frame, 64, batch_first=True), 64
        else:
            window, width = nn.Identity(), size
        self.window = window
        widths = [width + (self.others.num_features if self.others else 0), *hidden_dims]
        self.trunk = mlp(widths, activation)
        self.head = linear(widths[-1], num_features, gain=1.0)

    def forward(self, obs: Any) -> Tensor:
        """Return the guess ``[..., F]``."""
        window = obs[OBS_KEY].flatten(-self.num_dims)
        leading = window.shape[:-1]
        if self.kind != "mlp":
            frames = window.reshape(-1, self.history, window.shape[-1] // self.history)
            read = self.window(frames.transpose(1, 2)) if self.kind == "conv" else self.window(frames)[0][:, -1]
            window = read.reshape(*leading, -1)
        parts = window if self.others is None else torch.cat((window, self.others(obs)), dim=-1)
        guess: Tensor = self.head(self.trunk(parts))
        return guess


class LatentActor(MLPActor):
    """From command, observation and a privileged feature, known or guessed, to an action distribution."""

    def forward(self, obs: Observation, feature: Tensor) -> Distribution:  # type: ignore[override]
        """Return the distribution for observations and features."""
        distribution: Distribution = self.action_head(self.trunk(torch.cat((self.encoder(obs), feature), dim=-1)))
        return distribution


class _View(ActorCritic):
    """An actor, what gives it the latent, and the critic, as one policy; the modules are shared with the whole."""

    def __init__(self, whole: ROAPolicy, actor: nn.Module, latent: nn.Module, latent_key: str) -> None:
        Policy.__init__(self)  # ActorCritic would create networks
        self.actor, self.latent, self.critic = actor, latent, whole.critic
        self.normalizer, self.latent_key = whole.normalizer, latent_key

    def distribution(self, obs: Observation) -> Distribution:
        """Return the action distribution for observations."""
        obs = self.normalized(obs)
        distribution: Distribution = self.actor(obs, self.latent(obs))
        return distribution

    def evaluate(self, batch: Mapping[str, Any] | TensorDict) -> Evaluation:
        """Evaluate stored actions, normalising the observations once."""
        obs = self.normalized(batch[OBSERVATION])
        distribution: Distribution = self.actor(obs, self.latent(obs))
        return Evaluation(stored_log_prob(distribution, batch), distribution.entropy(), self.critic(obs))

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Act without the critic; the latent comes along."""
        obs = self.normalized(carry[OBSERVATION])
        latent = self.latent(obs)
        distribution: Distribution = self.actor(obs, latent)
        return {**explore(distribution, carry, deterministic), self.latent_key: latent}


class ROAPolicy(Policy):
    """Teacher, student and critic over the observation groups ``policy``, ``command``, ``object`` and ``priv``.

    The policy itself is the deployable student, ``adapt_ema`` and ``actor_adapt``, which never read ``priv``. The views
    ``teacher`` and ``student`` are policies that share its networks. A task may lack ``command`` and ``object``.

    Args:
        observation_space: a Dict of one environment.
        action_space: of one environment.
        critic_class: called as ``critic_class(observation_space, **critic_cfg)``.
        critic_cfg: options of the critic.
        history: frames stacked in the group ``policy``, oldest first.
        history_kind: how the adaptation module reads them: mlp, conv or gru.
        num_features: width of the privileged feature.
        hidden_dims: widths of both actors' hidden layers.
        encoder_dims: widths of the privileged encoder's hidden layers.
        adapt_dims: widths of the adaptation module's hidden layers.
        activation: between the layers.
        head_options: options of the action heads, such as ``init_std``.
        normalize_obs: keep running statistics of the observations and normalise with them.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        critic_class: type[nn.Module] = MLPCritic,
        critic_cfg: Mapping[str, Any] | None = None,
        history: int = 1,
        history_kind: HistoryKind = "mlp",
        num_features: int = 8,
        hidden_dims: Sequence[int] = (64, 64),
        encoder_dims: Sequence[int] = (64,),
        adapt_dims: Sequence[int] = (128, 64),
        activation: str = "elu",
        head_options: Mapping[str, Any] | None = None,
        normalize_obs: bool = False,
    ) -> None:
        super().__init__(observation_space, action_space)
        groups = list(observation_space.spaces) if isinstance(observation_space, gym.spaces.Dict) else []
        if not isinstance(observation_space, gym.spaces.Dict) or not {OBS_KEY, OBS_PRIV_KEY} <= set(groups):
            raise ConfigError(
                f"policy.kind roa needs a Dict observation with the groups '{OBS_KEY}' and '{OBS_PRIV_KEY}', and, "
                f"where the task has them, '{CMD_KEY}' and '{OBJECT_KEY}'; this one's groups are {groups}."
            )
        if choice_sizes(action_space) is not None:
            raise ConfigError(f"ROA needs continuous actions (a Box), whose mean is imitated; got {action_space}.")
        command, thing = ([name] if name in groups else [] for name in (CMD_KEY, OBJECT_KEY))
        self.history = history
        seen = select_groups(leaf_spaces(observation_space), [OBS_KEY, *command, *thing], privileged=False)
        self._student_shapes = {path: box.shape or (1,) for path, box in seen.items()}
        self.encoder_priv = ObservationMLP(
            observation_space, [OBS_PRIV_KEY, *thing], encoder_dims, activation, num_features
        )
        actor_cfg: dict[str, Any] = {"hidden_dims": hidden_dims, "activation": activation, "num_latents": num_features}
        actor_cfg |= head_options or {}
        self.actor, self.actor_adapt = (
            LatentActor(observation_space, action_space, groups=[*command, OBS_KEY], **actor_cfg) for _ in range(2)
        )
        self.adapt_module = AdaptationModule(
            observation_space,
            history=history,
            kind=history_kind,
            groups=[*command, *thing],
            hidden_dims=adapt_dims,
            num_features=num_features,
            activation=activation,
        )
        self.adapt_ema = copy.deepcopy(self.adapt_module).requires_grad_(False)
        self.critic = critic_class(observation_space, **{"activation": activation, **(critic_cfg or {})})
        self.normalizer = ObservationNormalizer(observation_space) if normalize_obs else None
        # In a tuple, where PyTorch does not look: the views own nothing.
        self._views = (
            _View(self, self.actor, self.encoder_priv, PRIV_FEATURE_KEY),
            _View(self, self.actor_adapt, self.adapt_ema, PRIV_PRED_KEY),
        )

    @classmethod
    def for_env(cls, env: HasSpaces, **options: Any) -> Self:
        """Make a policy for an environment, which, or the MuJoCo task in it, may say how many frames it stacks."""
        stacked = getattr(getattr(env, "task", env), "history", None)
        if isinstance(stacked, int) and (history := options.setdefault("history", stacked)) != stacked:
            raise ConfigError(f"policy.history is {history}, but the task stacks {stacked} frames: set it to that.")
        return super().for_env(env, **options)

    @classmethod
    def from_config(cls, cfg: Any, env: HasSpaces, critic_options: Mapping[str, Any], *, needs_value: bool) -> Self:
        """Create the policy of a ``PolicyConfig``, which must not set what only other kinds read."""
        if cfg.actor_groups is not None or cfg.rnn_hidden_dim != type(cfg).rnn_hidden_dim:
            raise ConfigError(
                f"policy.actor_groups must be null and policy.rnn_hidden_dim {type(cfg).rnn_hidden_dim} with "
                f"policy.kind roa, which reads neither; got {cfg.actor_groups and list(cfg.actor_groups)} "
                f"and {cfg.rnn_hidden_dim}."
            )
        return cls.for_env(
            env,
            **cfg.layers,
            critic_cfg={**cfg.critic, **critic_options},
            history=cfg.history,
            history_kind=cfg.history_kind,
            num_features=cfg.latent_dim,
            encoder_dims=cfg.encoder_dims,
            adapt_dims=cfg.adapt_dims,
            head_options=cfg.head,
            normalize_obs=cfg.normalize_obs,
        )

    @property
    def teacher(self) -> Policy:
        """``encoder_priv``, ``actor`` and ``critic`` as a policy."""
        return self._views[0]

    @property
    def student(self) -> Policy:
        """``adapt_ema``, ``actor_adapt`` and ``critic`` as a policy; acting needs no privileged group."""
        return self._views[1]

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Act as the student; an error names a group of the observation that is missing or has another shape."""
        try:
            return self.student.act(carry, deterministic)
        except (KeyError, IndexError, RuntimeError):
            self._check_groups(carry[OBSERVATION])  # only now: looking first would take time at every step
            raise

    def distribution(self, obs: Observation) -> Distribution:
        """Return the student's action distribution."""
        return self.student.distribution(obs)

    def values(self, batch: Mapping[str, Any] | TensorDict) -> tuple[Tensor, Tensor]:
        """Value states, which needs the privileged groups."""
        return self.student.values(batch)

    def _check_groups(self, obs: Observation) -> None:
        """Raise when the student cannot see what it needs."""
        found = leaves(obs)
        for path, shape in self._student_shapes.items():
            expected = f"the observation group '{path}' of shape [..., {', '.join(map(str, shape))}]"
            if path not in found:
                raise KeyError(f"ROAPolicy.act needs {expected}; the groups given are {list(found)}.") from None
            if found[path].shape[-len(shape) :] != shape:
                raise ValueError(f"ROAPolicy.act needs {expected}, got {list(found[path].shape)}.") from None
