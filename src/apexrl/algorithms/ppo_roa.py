"""PPO with regularised online adaptation: a privileged teacher, and a student that infers what the teacher is told.

After ROA (Fu et al. 2022, arXiv 2210.10044) and RMA (Kumar et al. 2021, arXiv 2107.04034).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.algorithms.base import own_config
from apexrl.algorithms.gradient_step import GradientStep, Loss, UpdateStats, minibatches
from apexrl.algorithms.optimizer import FlatAdam, flatten
from apexrl.algorithms.ppo import PPO, PPOConfig
from apexrl.algorithms.terms import EncoderDistance
from apexrl.core.errors import ConfigError
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import NEXT_OBSERVATION, NEXT_VALUE, OBS_KEY, OBSERVATION, VALUE, Carry, Observation
from apexrl.core.validation import Count, NonNegative, Positive, Share, options
from apexrl.envs import VecEnv
from apexrl.policies import Policy, ROAPolicy
from apexrl.policies.networks import MLPActor

Phase = Literal["train", "finetune"]


@options("algo")
class PPOROAConfig(PPOConfig):
    """Options of PPO-ROA, besides those of PPO."""

    name: str = "ppo_roa"
    """The algorithm."""
    phase: Literal["both", "train", "finetune"] = "both"
    """train: the teacher acts and the student imitates it; finetune: the student acts; both: one after the other."""
    train_share: Share = 0.7
    """Share of the environment steps after which ``both`` goes from train to finetune."""
    adapt_epochs: Count = 2
    """Passes of adaptation module and student over each rollout."""
    adapt_minibatches: Count = 4
    """Minibatches of each of these passes."""
    adapt_learning_rate: Positive = 1e-3
    """Of the adaptation module, and of the student while it imitates."""
    ema_tau: Share = 0.04
    """How far the average of the adaptation module moves at each update."""
    min_frames: Count = 2
    """A window with fewer frames than this, at the start of an episode, teaches the adaptation module nothing."""
    encoder_penalty: NonNegative = 0.0
    """Weight of the distance between the encoder's feature and the adaptation module's guess, at the end; 0 is off."""
    finetune_learning_rate: Positive = 1e-4
    """Of PPO in finetune, where it stays fixed."""
    finetune_target_kl: Positive = 0.02
    """An update in finetune stops for good once its KL divergence is 1.5 times this."""

    def warning(self, init_from: str) -> str:
        """Say that there is nothing to fine-tune."""
        if self.phase != "finetune" or init_from:
            return ""
        return "algo.phase finetune without training.init_from: encoder and teacher are untrained; name a trained run."

    def check_rollout(self, num_envs: int, *, keeps_sequences: bool) -> None:
        """Raise when rollouts of this many environments cannot be cut into the wanted minibatches."""
        super().check_rollout(num_envs, keeps_sequences=keeps_sequences)
        self.check_adaptation(self.num_steps * num_envs)

    def check_adaptation(self, num_samples: int) -> None:
        """Raise when a rollout with so many samples cannot be cut into the wanted minibatches of the adaptation."""
        if self.adapt_minibatches > num_samples:
            what = f"only {num_samples} samples (algo.num_steps × task.num_envs)"
            raise ConfigError(f"algo.adapt_minibatches is {self.adapt_minibatches}, but a rollout has {what}.")


class RolloutPolicy(nn.Module):
    """A policy that maps a carry, or the observation that ``reset`` returned, to the carry with its action."""

    def __init__(self, policy: Policy, *, deterministic: bool) -> None:
        super().__init__()
        self.policy, self.deterministic = policy, deterministic

    def forward(self, carry: Carry | Observation) -> Carry:
        """Return the carry with ``action``, ``sample_log_prob`` and the privileged feature, known or guessed."""
        carry = carry if isinstance(carry, dict) else {OBSERVATION: carry}
        return {**carry, **self.policy.act(carry, self.deterministic)}

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Act as the policy does."""
        return self.policy.act(carry, deterministic)


class PPOROA(PPO):
    """PPO for a teacher with privileged information, and for a student that adapts from its past observations.

    Phase ``train``: the teacher acts; PPO trains encoder, teacher and critic; the adaptation module learns to guess the
    encoder's feature, and the student to act as the teacher does, given the guess. Phase ``finetune``: the student
    acts with the average of the adaptation module; PPO trains student and critic; encoder, teacher and normaliser stay
    as they are.

    Args:
        policy: the networks.
        cfg: the options.
        acceleration: how the update runs.
    """

    config_class = PPOROAConfig
    policies: ClassVar[Mapping[str, type[Policy]]] = {"roa": ROAPolicy}
    moves_normalizer = False

    def __init__(
        self, policy: ROAPolicy, cfg: PPOROAConfig | None = None, *, acceleration: Acceleration | None = None
    ) -> None:
        if not isinstance(policy, ROAPolicy):
            raise ConfigError(f"PPOROA trains a ROAPolicy, got {type(policy).__name__}; use ROAPolicy.for_env(env).")
        self.roa_cfg = own_config(cfg, PPOROAConfig)
        self.roa: ROAPolicy = policy
        self.phase: Phase = "train"
        super().__init__(policy=policy, cfg=self.roa_cfg, acceleration=acceleration)
        self.begin_phase("finetune" if self.roa_cfg.phase == "finetune" else "train")

    @classmethod
    def policy_for(
        cls,
        env: VecEnv,
        actor_class: type[nn.Module],
        critic_class: type[nn.Module],
        actor_cfg: Mapping[str, Any] | None,
        critic_cfg: Mapping[str, Any] | None,
    ) -> Policy:
        """Create a ``ROAPolicy``, whose options are ``actor_cfg``."""
        if actor_class is not MLPActor:
            raise ConfigError(f"ppo_roa has actors of its own; leave actor_class out, got {actor_class.__name__}.")
        return ROAPolicy.for_env(env, critic_class=critic_class, critic_cfg=critic_cfg, **(actor_cfg or {}))

    def begin_phase(self, phase: Phase) -> None:
        """Begin or continue in a phase, with new optimizers; everything that depends on the phase is chosen here."""
        cfg, policy = self.roa_cfg, self.roa
        starts_finetune = phase == "finetune" and self.phase == "train"
        self.phase = phase
        if phase == "train":
            self.cfg, self.rollout_policy = cfg, policy.teacher
            share = cfg.train_share if cfg.phase == "both" else 1.0
            self.terms = (EncoderDistance(policy, cfg.encoder_penalty, share),) if cfg.encoder_penalty else ()
        else:
            self.cfg = replace(
                cfg, learning_rate=cfg.finetune_learning_rate, schedule="fixed", target_kl=cfg.finetune_target_kl
            )
            self.rollout_policy, self.terms = policy.student, ()
        if starts_finetune:
            self._explore_as_the_teacher()
        self._prepare(self.rollout_policy, separate_clip_prefix="critic.")
        self.adapt = self._imitation_step(AdaptationLoss(policy, cfg, self.acceleration), policy.adapt_module)
        # In finetune the student's weights are PPO's own.
        self.imitate: GradientStep | None = None
        if phase == "train":
            self.imitate = self._imitation_step(StudentLoss(policy, self.acceleration), policy.actor_adapt)
        self._average = flatten(policy.adapt_ema.parameters())

    def _imitation_step(self, loss: Loss, learner: nn.Module) -> GradientStep:
        cfg = self.roa_cfg
        optimizer = FlatAdam(learner.named_parameters(), cfg.adapt_learning_rate, cfg.adam_eps, cfg.max_grad_norm)
        stats = UpdateStats((loss.name, ""), self.policy.device, nonfinite=self.stats.nonfinite)
        return GradientStep(loss, optimizer, stats, functional=self.acceleration.compile)

    def _wrap(self) -> None:
        super()._wrap()
        wrap, device = self.acceleration.wrap, self.policy.device
        self.adapt_step = wrap(self._eager_adapt_step, device)
        self.adapt_epoch = wrap(self._eager_adapt_epoch, device, graph="The adaptation", pool=self._pool)

    def _explore_as_the_teacher(self) -> None:
        """Give the student the teacher's standard deviation; one that depends on the state it has imitated."""
        theirs, ours = self.roa.actor.action_head.log_std, self.roa.actor_adapt.action_head.log_std
        if theirs is not None and ours is not None:
            with torch.no_grad():
                ours.copy_(theirs)

    def get_rollout_policy(self, mode: str = "train") -> RolloutPolicy:
        """Return what acts: in mode ``train`` that of the phase, in mode ``eval`` the deployable student's mean."""
        if mode not in ("train", "eval"):
            raise ConfigError(f"get_rollout_policy knows the modes train and eval, got '{mode}'.")
        return RolloutPolicy(self.rollout_policy if mode == "train" else self.roa, deterministic=mode == "eval")

    def critic(self, tensordict: TensorDict) -> TensorDict:
        """Value all states of a batch at once, as ``state_value``, and what the advantages need besides."""
        batch = self._as_batch(tensordict)
        value, next_value = self.policy.values(batch)
        if batch is not tensordict:
            value, next_value = value.transpose(0, 1), next_value.transpose(0, 1)
        tensordict[VALUE], tensordict[NEXT_VALUE], tensordict["state_value"] = value, next_value, value
        return tensordict

    def _as_batch(self, tensordict: TensorDict) -> TensorDict:
        """Return a batch ``[T, N]``; one of ``step_and_maybe_reset``, known by its ``next``, is ``[N, T]``."""
        if "next" not in tensordict:
            return tensordict
        view: Any = tensordict
        batch: TensorDict = view.transpose(0, 1).clone()  # autograd refuses the tensors of inference_mode themselves
        batch[NEXT_OBSERVATION] = batch["next", OBSERVATION]
        del batch["next"]
        return batch

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Learn from one rollout ``[T, N]``: PPO, then the adaptation, then, in phase train, the normaliser."""
        metrics = {**self.train_policy(rollout), **self.train_adapt(rollout)}
        if self.phase == "train":  # later it would move the frozen teacher's inputs, and so what it teaches
            self.policy.update_normalizer(rollout[OBSERVATION], apply=self.stats.nonfinite == 0)
        return metrics

    def train_op(self, tensordict: TensorDict) -> dict[str, Tensor]:
        """Do the same as ``update``, also with transitions ``[N, T]`` of ``step_and_maybe_reset`` and ``critic``."""
        return self.update(self._as_batch(tensordict))

    def train_policy(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Run the epochs of PPO over one rollout."""
        return super().update(self._as_batch(rollout))

    def train_adapt(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Train the adaptation module on the rollout that ``train_policy`` has just seen, and move its average.

        In phase train the student imitates the teacher besides.
        """
        self.roa_cfg.check_adaptation(rollout.numel())
        steps = [self.adapt] if self.imitate is None else [self.adapt, self.imitate]
        for step in steps:
            step.stats.reset()
        self.policy.train()
        for _ in range(self.roa_cfg.adapt_epochs):
            self.adapt_epoch(torch.randperm(rollout.numel(), device=self.policy.device))
        self.policy.eval()
        nonfinite = self.stats.nonfinite
        with torch.no_grad():
            tau = self.roa_cfg.ema_tau
            moved = (1.0 - tau) * self._average + tau * self.adapt.optimizer.flat
            self._average.copy_(torch.where(nonfinite == 0, moved, self._average))
        losses = {name: mean for step in steps for name, mean in step.stats.report().items()}
        # Once more: the adaptation may be what was not finite.
        return {**losses, "nonfinite": nonfinite.clone()}

    def _eager_adapt_epoch(self, order: Tensor) -> None:
        groups = dict(self._samples[OBSERVATION].items())
        for minibatch in minibatches(groups, order, self.roa_cfg.adapt_minibatches):
            self.adapt_step(minibatch)

    def _eager_adapt_step(self, groups: Mapping[str, Tensor]) -> None:
        """Regress the adaptation module to the encoder, then, in phase train, the student to the teacher."""
        seen = self.adapt(groups, weight=has_history(groups[OBS_KEY], self.roa.history, self.roa_cfg.min_frames))
        if self.imitate is not None:
            self.imitate(seen)

    def adjust_learning_rate(self, progress: float) -> None:
        """Follow the schedules, and begin finetune when its time has come."""
        super().adjust_learning_rate(progress)
        cfg = self.roa_cfg
        if cfg.phase == "both" and self.phase == "train" and progress / cfg.train_share >= 1.0:
            self.begin_phase("finetune")

    def state_dict(self) -> dict[str, Any]:
        """Return the phase and what PPO and the adaptation need to continue."""
        student = {} if self.imitate is None else self.imitate.optimizer.state_dict()
        adapt = self.adapt.optimizer.state_dict()
        return {**super().state_dict(), "adapt": adapt, "student": student, "phase": self.phase}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, in its phase."""
        if state["phase"] != self.phase:
            weights = {name: value.clone() for name, value in self.policy.state_dict().items()}
            self.begin_phase(state["phase"])
            self.policy.load_state_dict(weights)
        super().load_state_dict(state)
        self.adapt.optimizer.load_state_dict(state["adapt"])
        if self.imitate is not None:
            self.imitate.optimizer.load_state_dict(state["student"])


class AdaptationLoss(Loss):
    """What the adaptation module infers against the encoder's feature: Σ w mean((ẑ − z)²) / Σ w.

    Args:
        policy: has both.
        cfg: says which windows count (w = 1): those with enough frames.
        acceleration: precision of the networks.
    """

    name = "adapt_loss"

    def __init__(self, policy: ROAPolicy, cfg: PPOROAConfig, acceleration: Acceleration) -> None:
        super().__init__(acceleration)
        self.policy, self.min_frames = policy, cfg.min_frames

    def forward(self, groups: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the loss, and what ``StudentLoss`` takes."""
        policy, window = self.policy, groups[OBS_KEY]
        obs = policy.normalized(TensorDict(dict(groups), batch_size=[len(window)]))
        weight = has_history(window, policy.history, self.min_frames)
        with torch.no_grad():
            feature = policy.encoder_priv(obs)
        inferred = policy.adapt_module(obs)
        error = (inferred - feature).square().mean(-1, keepdim=True)
        loss = (weight * error).sum() / weight.sum().clamp(min=1.0)
        seen = {OBSERVATION: obs, "feature": feature, "inferred": inferred.detach()}
        return loss, loss.detach().view(1), seen


class StudentLoss(Loss):
    """The student, given the inferred feature, against the teacher, given the true one.

    L = mean((a − a*)²), and + mean((log σ − log σ*)²) where σ depends on the state.
    """

    name = "imitation_loss"

    def __init__(self, policy: ROAPolicy, acceleration: Acceleration) -> None:
        super().__init__(acceleration)
        self.policy = policy

    def forward(self, seen: Mapping[str, Any]) -> tuple[Tensor, Tensor, tuple[()]]:
        """Return the loss of what ``AdaptationLoss`` returned."""
        policy, obs = self.policy, seen[OBSERVATION]
        with torch.no_grad():
            wanted = policy.actor(obs, seen["feature"])
        given = policy.actor_adapt(obs, seen["inferred"])
        loss = (given.mode - wanted.mode).square().mean()
        if policy.actor.action_head.log_std is None:
            loss = loss + (_log_std(given) - _log_std(wanted)).square().mean()
        return loss, loss.detach().view(1), ()


def has_history(window: Tensor, history: int, min_frames: int) -> Tensor:
    """Return 1 where a window ``[B, F]`` holds enough frames, else 0; frames before the episode are zeros."""
    frames = window.reshape(len(window), history, -1)
    return ((frames != 0).any(-1).sum(-1, keepdim=True) >= min(min_frames, history)).to(window.dtype)


def _log_std(distribution: Any) -> Tensor:
    """Return log σ of a normal distribution, squashed or not."""
    log_std: Tensor = getattr(distribution, "base", distribution).log_std
    return log_std
