"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905), with the options of high update ratios."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.algorithms.base import AlgorithmConfig, BaseAlgorithm, check_source, find_device, own_config
from apexrl.algorithms.gradient_step import GradientStep, Loss, UpdateStats
from apexrl.algorithms.optimizer import FlatAdam, flatten
from apexrl.algorithms.replay import ReplayBuffer
from apexrl.core.errors import ConfigError
from apexrl.core.functional import soft_target
from apexrl.core.observations import leaves
from apexrl.core.system import distributed
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import ACTION, NEXT_OBSERVATION, OBSERVATION, REWARD, SAMPLE_LOG_PROB
from apexrl.core.validation import (
    Count,
    Fraction,
    Integer,
    NonNegative,
    NonNegativeInteger,
    Number,
    Positive,
    Share,
    options,
)
from apexrl.envs import as_vec_env
from apexrl.policies import Policy, SACPolicy
from apexrl.policies.networks import MLPActor, QEnsemble
from apexrl.rollout import evaluation_mode

MAX_CAPACITY = 10**12
"""Beyond what any machine holds: a typing mistake."""


@options("algo")
class SACConfig(AlgorithmConfig):
    """Options of SAC."""

    name: str = "sac"
    """The algorithm."""
    num_steps: Count = 4
    """Steps of each environment between updates. More collect longer with an older policy; usually 1 to 8."""
    batch_size: Count = 256
    """Transitions of one gradient step. Larger is steadier but slower; usually 128 to 1024."""
    utd_ratio: Positive = 1.0
    """Gradient steps for each environment step. Larger learns from fewer steps but takes longer and may overfit (see
    num_critics, dropout); usually 0.25 to 4, below 1 for many environments."""
    learning_starts: NonNegativeInteger = 1000
    """Transitions in the replay buffer before the first gradient step. More explore longer at random; usually 1,000
    to 10,000."""
    uniform_start: bool = True
    """Sample actions uniformly within their bounds until then; false lets the untrained policy act."""
    buffer_size: Annotated[Integer, Field(ge=1, le=MAX_CAPACITY)] = 1_000_000
    """Transitions that are kept; the oldest make room."""
    replay_device: Literal["auto", "cpu"] = "auto"
    """Where they are kept; auto is the policy's device."""
    save_replay: bool = False
    """Save the transitions with every checkpoint, so that a resumed run continues exactly; large."""
    priority_exponent: NonNegative = 0.0
    """Sample transitions in proportion to their TD error to this power; 0 samples uniformly."""
    importance_exponent: Fraction = 0.4
    """Corrects for the priorities at the start, from 0 (not) to 1 (fully); rises linearly to 1 over training."""
    n_step: Count = 1
    """Number of steps in the n-step return."""
    gamma: Fraction = 0.99
    """Discount per step. Larger looks further ahead, 1 / (1 - gamma) steps, but is noisier; usually 0.95 to 0.999."""
    tau: Share = 0.005
    """How far the target critics follow the critics at each gradient step."""
    learning_rate: Positive = 3e-4
    """Of actor, critics and temperature. Larger learns faster but may diverge; usually 1e-4 to 1e-3."""
    schedule: Literal["fixed", "linear"] = "fixed"
    """fixed, or linear: falls to 0 at the end of training."""
    temperature: Positive = 1.0
    """Weight of the entropy at the start."""
    learn_temperature: bool = True
    """Steer the temperature so that the entropy keeps its target."""
    target_entropy: Number | None = None
    """Of actions scaled to [−1, 1]; null for minus the number of action dimensions."""
    policy_delay: Count = 1
    """Gradient steps of the critics for each one of actor and temperature."""
    num_critics: Count = 2
    """Independent critics; 10 with utd_ratio 20 is REDQ."""
    target_subset: Count = 2
    """Critics, sampled at each gradient step, whose minimum is the target."""
    actor_value: Literal["min", "mean"] = "min"
    """What the actor climbs: the minimum of the critics, or their mean (REDQ, DroQ)."""
    layer_norm: bool = False
    """Normalise the critics' hidden layers (DroQ)."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Share of the critics' hidden units that is dropped; 0.01 with layer_norm is DroQ."""
    reward_scale: Positive = 1.0
    """Constant factor on rewards, for learning only."""
    max_grad_norm: Positive | None = None
    """Gradients are scaled down to this norm; null does not clip."""
    adam_eps: Positive = 1e-8
    """Adam's ε."""

    def __post_init__(self) -> None:
        for name, limit in (("target_subset", "num_critics"), ("learning_starts", "buffer_size")):
            value, most = getattr(self, name), getattr(self, limit)
            if value > most:
                raise ConfigError(f"algo.{name} must not be above algo.{limit} ({most}), got {value}.")

    def num_gradient_steps(self, total_steps: int, num_envs: int) -> int:
        """Return those after the start of learning."""
        return int(self.utd_ratio * max(0, total_steps - self.learning_starts))

    def check_rollout(self, num_envs: int, *, keeps_sequences: bool) -> None:
        """Raise when a rollout of this many environments does not fit into the replay buffer."""
        if self.num_steps * num_envs > self.buffer_size:
            what = f"{self.num_steps * num_envs} steps (algo.num_steps · task.num_envs)"
            raise ConfigError(f"algo.buffer_size is {self.buffer_size}, but one rollout has {what}; raise it.")


CRITIC_METRICS = ("critic_loss", "q_value", "grad_norm")
ACTOR_METRICS = ("actor_loss", "temperature", "entropy", "actor_grad_norm")


class SAC(BaseAlgorithm):
    """Off-policy actor-critic with a replay buffer and an automatically tuned entropy bonus.

    Created from a policy, ``SAC(policy=policy, cfg=cfg)``, or from an environment, ``SAC(env, cfg)``, which creates a
    ``SACPolicy`` on ``device``, or on CUDA when there is one.
    """

    advice_without_steps = "Train for more steps than algo.learning_starts, or lower it."
    required_keys = ReplayBuffer.required_keys
    on_policy = False
    own_keys = ("replay",)
    shared_fields: ClassVar[Mapping[str, Callable[[int, str], int]] | None] = {
        "batch_size": distributed.share,
        "learning_starts": distributed.share_rounded,
        "buffer_size": distributed.share_rounded,
    }
    cfg: SACConfig
    config_class = SACConfig
    policies: ClassVar[Mapping[str, type[Policy]]] = {"mlp": SACPolicy}

    def __init__(
        self,
        env: Any = None,
        cfg: SACConfig | None = None,
        actor_class: type[nn.Module] = MLPActor,
        critic_class: type[nn.Module] = QEnsemble,
        *,
        actor_cfg: Mapping[str, Any] | None = None,
        critic_cfg: Mapping[str, Any] | None = None,
        policy: SACPolicy | None = None,
        device: torch.device | str | None = None,
        acceleration: Acceleration | None = None,
    ) -> None:
        check_source("SAC", env, policy)
        if not isinstance(policy, SACPolicy | None):
            raise ConfigError(
                f"SAC trains a SACPolicy, got {type(policy).__name__}; use SACPolicy.for_env(env), or train with PPO."
            )
        cfg = own_config(cfg, SACConfig)
        if policy is None:
            policy = SACPolicy.for_env(
                as_vec_env(env),
                actor_class=actor_class,
                critic_class=critic_class,
                actor_cfg=actor_cfg,
                critic_cfg={**self.critic_options(cfg), **(critic_cfg or {})},
            )
            device = device or find_device()
        if device is not None:
            policy.to(device)
        super().__init__(policy, cfg)
        self.policy: SACPolicy = policy
        self.acceleration = acceleration or Acceleration()
        here = policy.device
        self.log_temperature = nn.Parameter(torch.full((1,), math.log(cfg.temperature), device=here))
        self.target_flat = flatten(policy.target_critics.parameters())
        self.target_entropy = -float(policy.scale.numel()) if cfg.target_entropy is None else cfg.target_entropy
        self.stats = UpdateStats(CRITIC_METRICS, here)
        critic_loss = CriticLoss(policy, self.acceleration)
        actor_loss = ActorLoss(policy, cfg.actor_value, self.acceleration)
        temperature_loss = TemperatureLoss(self.log_temperature, self.target_entropy, self.acceleration)
        actor_stats, temperature_stats = (
            UpdateStats(names, here, self.stats.nonfinite) for names in (ACTOR_METRICS, ("", ""))
        )
        self.critic_step = self._gradient_step(critic_loss, policy.critics.named_parameters(), self.stats)
        self.actor_step = self._gradient_step(actor_loss, policy.actor.named_parameters(), actor_stats)
        temperature = [("log_temperature", self.log_temperature)]
        self.temperature_step = self._gradient_step(temperature_loss, temperature, temperature_stats)
        self.optimizers = {
            "actor": self.actor_step.optimizer,
            "critics": self.critic_step.optimizer,
            "temperature": self.temperature_step.optimizer,
        }
        self.replay = self._empty_replay()
        self._draw_and_step = self._wrapped()
        self._due = 0.0
        """Gradient steps that the environment steps so far have earned and that were not taken yet."""
        self._num_updates = 0
        policy.acts_uniformly.fill_(cfg.uniform_start and cfg.learning_starts > 0)

    def _gradient_step(
        self, loss: Loss, parameters: Iterable[tuple[str, nn.Parameter]], stats: UpdateStats
    ) -> GradientStep:
        cfg = self.cfg
        optimizer = FlatAdam(parameters, cfg.learning_rate, cfg.adam_eps, cfg.max_grad_norm or math.inf)
        return GradientStep(loss, optimizer, stats, functional=self.acceleration.compile)

    def _wrapped(self) -> dict[bool, Callable[[], None]]:
        """Return the step without and with the actor, to be called; they work on the memory of the replay buffer."""
        here, is_eager = self.policy.device, self.replay.device != self.policy.device
        wrapped: dict[bool, Callable[[], None]] = {}
        for with_actor in (False, True):
            step = self.acceleration.wrap(partial(self._eager_step, with_actor), here)
            draw = partial(self._eager_draw_and_step, step)
            wrapped[with_actor] = draw if is_eager else self.acceleration.wrap(draw, here, graph="The update")
        return wrapped

    def begin_trained(self, init_std: float) -> None:
        """Act with the policy from the first step on: it explores better than chance."""
        self.policy.acts_uniformly.fill_(False)

    def _empty_replay(self) -> ReplayBuffer:
        return ReplayBuffer(
            self.cfg.buffer_size,
            device="cpu" if self.cfg.replay_device == "cpu" else self.policy.device,
            priority_exponent=self.cfg.priority_exponent,
            importance_exponent=self.cfg.importance_exponent,
        )

    @classmethod
    def critic_options(cls, cfg: Any) -> dict[str, Any]:
        """Return the options of the critics that the algorithm's configuration holds."""
        return {"num_critics": cfg.num_critics, "layer_norm": cfg.layer_norm, "dropout": cfg.dropout}

    def notice(self, batch: TensorDict) -> str | None:
        """State the memory of the replay buffer before it is allocated, and whether it is saved."""
        cfg = self.cfg
        size = self.replay.bytes_for(batch, cfg.buffer_size, cfg.priority_exponent) / 1e6
        amount = f"{size / 1e3:.1f} GB" if size >= 1e3 else f"{size:.0f} MB"
        saved = "not saved (algo.save_replay), so a resumed run fills it again"
        if cfg.save_replay:
            saved = "and once more in main memory while a checkpoint is written"
        return f"Replay: {cfg.buffer_size:,} transitions, {amount} on {self.replay.device}, {saved}."

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Put one rollout ``[T, N]`` into the replay buffer and take the gradient steps that it has earned."""
        self.check_batch(rollout)
        self.replay.add(rollout)
        num_updates, stats = self._num_updates, self.stats
        for step in (self.critic_step, self.actor_step, self.temperature_step):
            step.stats.reset()
        # Noticed now, not when it happens to be drawn: the report can still name what is not finite.
        stats.nonfinite.copy_(distributed.any_rank(_is_nonfinite(rollout)))
        if len(self.replay) >= max(self.cfg.learning_starts, 1):
            self.policy.acts_uniformly.fill_(False)
            self._due += self.cfg.utd_ratio * rollout.numel() * distributed.world_size()
            self.policy.train()
            while self._due >= 1.0:
                self._due -= 1.0
                self._num_updates += 1
                self._draw_and_step[self._num_updates % self.cfg.policy_delay == 0]()
            self.policy.eval()
        self.policy.update_normalizer(rollout[OBSERVATION], apply=stats.nonfinite == 0)
        # NaN stands for what no gradient step of this update says; the trainer leaves it out.
        metrics = {**stats.report(), **self.actor_step.stats.report()}
        loss = metrics["critic_loss"] + metrics["actor_loss"].nan_to_num(0.0)
        return {
            "loss": loss if self._num_updates > num_updates else self._critic_loss_now(),
            **metrics,
            "learning_rate": self.optimizers["actor"].learning_rate.clone(),
        }

    @torch.no_grad()
    def _critic_loss_now(self) -> Tensor:
        """Return the loss of the critics on a batch, for an update without a gradient step; uses no random numbers."""
        with evaluation_mode(self.policy, seed=0):
            batch, _ = self._draw()
            loss: Tensor = self.critic_step.loss(self._with_target(batch, self.log_temperature.exp()))[0]
        return loss

    def _draw(self) -> tuple[dict[str, Any], Tensor]:
        """Draw a minibatch to the policy's device; its index stays where the replay buffer is."""
        cfg, here = self.cfg, self.policy.device
        batch = self.replay.sample(cfg.batch_size, n_step=cfg.n_step, gamma=cfg.gamma)
        index = batch.pop("index")
        return {name: value.to(here, non_blocking=True) for name, value in batch.items()}, index

    def _eager_draw_and_step(self, step: Callable[[Mapping[str, Any]], Tensor]) -> None:
        batch, index = self._draw()
        td_error = step(batch)
        if self.cfg.priority_exponent > 0:
            here = self.replay.device
            self.replay.set_priorities(index, td_error.to(here), batch["weight"].to(here))

    def _eager_step(self, with_actor: bool, batch: Mapping[str, Any]) -> Tensor:
        """Take one gradient step; returns the size of the critics' errors ``[B, 1]``."""
        temperature = self.log_temperature.detach().exp()
        batch = self._with_target(batch, temperature)
        td_error: Tensor = self.critic_step(batch)
        if with_actor:
            log_prob = self.actor_step({OBSERVATION: batch[OBSERVATION], "temperature": temperature})
            if self.cfg.learn_temperature:
                self.temperature_step({SAMPLE_LOG_PROB: log_prob})
        with torch.no_grad():
            follow = self.cfg.tau * (1.0 - self.stats.nonfinite)
            self.target_flat.lerp_(self.optimizers["critics"].flat, follow)
        return td_error

    @torch.no_grad()
    def _with_target(self, batch: Mapping[str, Any], temperature: Tensor) -> dict[str, Any]:
        """Return a batch with normalised observations and the target of the critics."""
        policy, cfg = self.policy, self.cfg
        next_obs = policy.normalized(batch[NEXT_OBSERVATION])
        with self.acceleration.autocast(policy.device):
            action, log_prob = policy.draw_unit_action(policy.actor(next_obs))
            values = policy.target_critics(next_obs, action)
        if cfg.target_subset < cfg.num_critics:
            drawn = torch.rand(cfg.num_critics, device=values.device).argsort()[: cfg.target_subset]
            values = values.index_select(0, drawn)
        reward = batch[REWARD] * cfg.reward_scale
        target = soft_target(reward, batch["discount"], values.amin(0), log_prob, temperature).float()
        return {**batch, OBSERVATION: policy.normalized(batch[OBSERVATION]), "target": target}

    def adjust_learning_rate(self, progress: float) -> None:
        """Follow the linear schedule, and that of the importance exponent: β = β₀ + progress (1 − β₀)."""
        start = self.cfg.importance_exponent
        self.replay.importance_exponent.fill_(start + min(1.0, progress) * (1.0 - start))
        if self.cfg.schedule == "linear":
            for optimizer in self.optimizers.values():
                optimizer.learning_rate.fill_(self.cfg.learning_rate * (1.0 - progress))

    def state_dict(self) -> dict[str, Any]:
        """Return optimizers, temperature, counters, and the replay buffer when it is to be saved."""
        return {
            "optimizer": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "log_temperature": self.log_temperature.detach().clone(),
            "due": self._due,
            "num_updates": self._num_updates,
            "importance_exponent": self.replay.importance_exponent.clone(),
            "replay": self.replay.state_dict() if self.cfg.save_replay else {},
            "config": asdict(self.cfg),
        }

    def without_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave out the replay buffer, which holds the steps of one process."""
        return {**state, "replay": None if state["replay"] else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizer"][name])
        with torch.no_grad():
            self.log_temperature.copy_(state["log_temperature"])
        self._due, self._num_updates = state["due"], state["num_updates"]
        if state["replay"]:
            if not state["replay"]["num_rows"] and len(self.replay):
                self.replay = self._empty_replay()
                self._draw_and_step = self._wrapped()
            self.replay.load_state_dict(state["replay"])
        elif self._num_updates and not len(self.replay) and distributed.is_main_process():
            why = "The checkpoint holds no replay buffer (algo.save_replay is false)"
            if state["replay"] is None:
                why = "The replay buffers in the checkpoint are left out, because other processes wrote them"
            when = f"once {self.cfg.learning_starts * distributed.world_size():,} new steps are collected"
            warnings.warn(f"{why}: learning resumes {when}, unlike in an uninterrupted run.", stacklevel=2)
        self.replay.importance_exponent.copy_(state["importance_exponent"])


class CriticLoss(Loss):
    """L = ½ Σ_i mean(w (Q_i(s, a) − y)²) over the critics i; y is ``target``."""

    def __init__(self, policy: SACPolicy, acceleration: Acceleration) -> None:
        super().__init__(acceleration)
        self.policy = policy

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, ``CRITIC_METRICS``, and the size of the errors ``[B, 1]``."""
        action = self.policy.unit_action(batch[ACTION])
        with self.acceleration.autocast(action.device):
            values = self.policy.critics(batch[OBSERVATION], action)
        error = values.float() - batch["target"]
        loss = 0.5 * (batch["weight"] * error.square()).mean((1, 2)).sum()
        return loss, torch.stack((loss.detach(), values.detach().float().mean())), error.detach().abs().mean(0)


class ActorLoss(Loss):
    """L = mean(α log π(a|s) − Q(s, a)), with a new sample a."""

    def __init__(self, policy: SACPolicy, actor_value: str, acceleration: Acceleration) -> None:
        super().__init__(acceleration)
        self.policy, self.actor_value = policy, actor_value

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, ``ACTOR_METRICS``, and the log-probabilities ``[B, 1]``."""
        policy, obs, temperature = self.policy, batch[OBSERVATION], batch["temperature"]
        with self.acceleration.autocast(temperature.device):
            action, log_prob = policy.draw_unit_action(policy.actor(obs))
            values = policy.critics(obs, action)
        value = values.amin(0) if self.actor_value == "min" else values.mean(0)
        log_prob = log_prob.float()
        loss = (temperature * log_prob - value.float()).mean()
        drawn = log_prob.detach()
        return loss, torch.stack((loss.detach(), temperature.squeeze(0), -drawn.mean())), drawn


class TemperatureLoss(Loss):
    """J(log α) = −log α · mean(log π + H̄): α grows while the entropy −log π is below its target H̄."""

    def __init__(self, log_temperature: nn.Parameter, target_entropy: float, acceleration: Acceleration) -> None:
        super().__init__(acceleration)
        self.log_temperature, self.target_entropy = log_temperature, target_entropy

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, tuple[()]]:
        """Return the loss for the log-probabilities of a batch."""
        loss = -(self.log_temperature * (batch[SAMPLE_LOG_PROB] + self.target_entropy).mean()).sum()
        return loss, loss.detach().view(1), ()


def _is_nonfinite(rollout: TensorDict) -> Tensor:
    """Say on the device whether any number of a rollout is not finite; 0-d."""
    numbers = leaves(rollout.select(ACTION, REWARD, OBSERVATION, NEXT_OBSERVATION)).values()
    return ~torch.stack([number.isfinite().all() for number in numbers if number.is_floating_point()]).all()
