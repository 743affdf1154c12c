"""PPO with regularised online adaptation: a privileged teacher, and a student that infers what the teacher is told.

After ROA (Fu et al. 2022, arXiv 2210.10044) and RMA (Kumar et al. 2021, arXiv 2107.04034).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.algorithms.base import UpdateStats
from apexrl.algorithms.minibatches import bounds
from apexrl.algorithms.optimizer import FlatAdam, flatten
from apexrl.algorithms.ppo import PPO, PPOConfig
from apexrl.core.errors import ConfigError, requirement
from apexrl.core.system.acceleration import Acceleration, Compiled
from apexrl.core.types import NEXT_OBSERVATION, NEXT_VALUE, OBS_KEY, OBSERVATION, VALUE, Carry, Observation
from apexrl.envs import VecEnv
from apexrl.policies import Policy, ROAPolicy
from apexrl.policies.networks import MLPActor

Phase = Literal["train", "finetune"]


@dataclass(frozen=True, kw_only=True)
class PPOROAConfig(PPOConfig):
    """Options of PPO-ROA, besides those of PPO."""

    name: Literal["ppo_roa"] = "ppo_roa"  # type: ignore[assignment]
    """The algorithm."""
    phase: Literal["both", "train", "finetune"] = "both"
    """train: the teacher acts and the student imitates it; finetune: the student acts; both: one after the other."""
    train_share: float = 0.7
    """Share of the environment steps after which ``both`` goes from train to finetune."""
    adapt_epochs: int = 2
    """Passes of adaptation module and student over each rollout."""
    adapt_minibatches: int = 4
    """Minibatches of each of these passes."""
    adapt_learning_rate: float = 1e-3
    """Of the adaptation module, and of the student while it imitates."""
    ema_tau: float = 0.04
    """How far the average of the adaptation module moves at each update."""
    min_frames: int = 2
    """A window with fewer frames than this, at the start of an episode, teaches the adaptation module nothing."""
    encoder_penalty: float = 0.0
    """Weight of the distance between the encoder's feature and the adaptation module's guess, at the end; 0 is off."""
    finetune_learning_rate: float = 1e-4
    """Of PPO in finetune, where it stays fixed."""
    finetune_target_kl: float = 0.02
    """An update in finetune stops for good once its KL divergence is 1.5 times this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require = requirement(self, "algo")
        for name in ("adapt_epochs", "adapt_minibatches", "min_frames"):
            require(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("adapt_learning_rate", "finetune_learning_rate", "finetune_target_kl"):
            require(name, getattr(self, name) > 0, "must be positive")
        for name in ("train_share", "ema_tau"):
            require(name, 0 < getattr(self, name) <= 1, "must lie in (0, 1]")
        require("encoder_penalty", self.encoder_penalty >= 0, "must not be negative")

    def warning(self, init_from: str) -> str:
        """Say that there is nothing to fine-tune."""
        if self.phase != "finetune" or init_from:
            return ""
        return (
            "algo.phase finetune without training.init_from: encoder and teacher are untrained and stay so. Name a run "
            "of phase train."
        )

    def check_rollout(self, num_envs: int, *, keeps_sequences: bool) -> None:
        """Raise when rollouts of this many environments cannot be cut into the wanted minibatches."""
        super().check_rollout(num_envs, keeps_sequences=keeps_sequences)
        if self.adapt_minibatches > self.num_steps * num_envs:
            raise ConfigError(
                f"algo.adapt_minibatches is {self.adapt_minibatches}, but a rollout has {self.num_steps * num_envs} "
                "samples (algo.num_steps × task.num_envs); lower it."
            )


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
    """Trains a teacher with privileged information, and a student that adapts from history.

    Phase ``train``: the teacher acts; PPO trains encoder, teacher and critic; the adaptation module learns to guess the
    encoder's feature, and the student to act as the teacher does, given the guess. Phase ``finetune``: the student
    acts with the average of the adaptation module; PPO trains student and critic; encoder, teacher and normaliser stay
    as they are.

    Args:
        policy: the networks.
        cfg: the options.
        acceleration: how the update runs.
    """

    policies: ClassVar[Mapping[str, type[Policy]]] = {"roa": ROAPolicy}

    def __init__(
        self, policy: ROAPolicy, cfg: PPOROAConfig | None = None, *, acceleration: Acceleration | None = None
    ) -> None:
        if not isinstance(policy, ROAPolicy):
            raise ConfigError(
                f"PPOROA trains a ROAPolicy, got {type(policy).__name__}; make one with ROAPolicy.for_env(env)."
            )
        self.roa_cfg = cfg or PPOROAConfig()
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
        """Go on in a phase, with new optimizers; everything that depends on the phase is chosen here."""
        cfg, policy = self.roa_cfg, self.roa
        starts_finetune = phase == "finetune" and self.phase == "train"
        self.phase = phase
        options = (cfg.adapt_learning_rate, cfg.adam_eps, cfg.max_grad_norm)
        if phase == "train":
            self.cfg, self._acting = cfg, policy.teacher
            self.student_optimizer: FlatAdam | None = FlatAdam(policy.actor_adapt.named_parameters(), *options)
            self._student_steps: dict[str, Callable[..., Tensor]] = {"imitation_loss": self._imitate}
            self._added_loss = self._encoder_penalty if cfg.encoder_penalty else super()._penalty
            self._observers: tuple[Callable[[TensorDict], None], ...] = (self._update_normalizer,)
        else:
            self.cfg = replace(
                cfg, learning_rate=cfg.finetune_learning_rate, schedule="fixed", target_kl=cfg.finetune_target_kl
            )
            self._acting = policy.student
            self.student_optimizer, self._student_steps = None, {}  # the student's weights are PPO's own
            self._added_loss = super()._penalty
            self._observers = ()  # the normaliser would move the frozen teacher's inputs, and so what it teaches
        if starts_finetune:
            self._explore_as_the_teacher()
        self._prepare(self._acting, separate_clip_prefix="critic.")
        self.adapt_optimizer = FlatAdam(policy.adapt_module.named_parameters(), *options)
        self._average = flatten(policy.adapt_ema.parameters())
        self._run_adapt_step = Compiled(self._adapt_step, enabled=self.acceleration.compile, device=policy.device)
        self._captured_adapt_epoch = self._captured("The adaptation", self._adapt_epoch)
        self._adapt_progress = UpdateStats(("adapt_loss", *self._student_steps), policy.device)
        self._penalty_weight = torch.zeros((), device=policy.device)

    def _explore_as_the_teacher(self) -> None:
        """Give the student the teacher's standard deviation; one that depends on the state it has imitated."""
        theirs, ours = self.roa.actor.action_head.log_std, self.roa.actor_adapt.action_head.log_std
        if theirs is not None and ours is not None:
            with torch.no_grad():
                ours.copy_(theirs)

    @property
    def rollout_policy(self) -> Policy:
        """The teacher in phase train, the student in finetune."""
        return self._acting

    def get_rollout_policy(self, mode: str = "train") -> RolloutPolicy:
        """Return what acts: in mode ``train`` that of the phase, in mode ``eval`` the deployable student's mean."""
        if mode not in ("train", "eval"):
            raise ConfigError(f"get_rollout_policy knows the modes train and eval, got '{mode}'.")
        return RolloutPolicy(self._acting if mode == "train" else self.roa, deterministic=mode == "eval")

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
        for observe in self._observers:
            observe(rollout)
        return metrics

    def train_op(self, tensordict: TensorDict) -> dict[str, Tensor]:
        """Do the same as ``update``, also with transitions ``[N, T]`` of ``step_and_maybe_reset`` and ``critic``."""
        return self.update(self._as_batch(tensordict))

    def train_policy(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Run the epochs of PPO over one rollout."""
        return super().train_policy(self._as_batch(rollout))

    def train_adapt(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Train the adaptation module on the rollout that ``train_policy`` has just seen, and move its average.

        In phase train the student imitates the teacher besides.
        """
        if self.roa_cfg.adapt_minibatches > rollout.numel():
            raise ConfigError(
                f"algo.adapt_minibatches is {self.roa_cfg.adapt_minibatches}, but the rollout has {rollout.numel()} "
                "samples; lower it."
            )
        progress = self._adapt_progress
        progress.restart()
        self.policy.train()
        for _ in range(self.roa_cfg.adapt_epochs):
            self._captured_adapt_epoch(torch.randperm(rollout.numel(), device=self.policy.device))
        self.policy.eval()
        with torch.no_grad():
            tau = self.roa_cfg.ema_tau
            moved = (1.0 - tau) * self._average + tau * self.adapt_optimizer.flat
            self._average.copy_(torch.where(self._progress.nonfinite == 0, moved, self._average))
        # Once more: the adaptation may be what was not finite.
        return {**progress.means(), "nonfinite": self._progress.nonfinite.clone()}

    def _forget_batch(self) -> None:
        super()._forget_batch()
        self._run_adapt_step.forget()
        self._captured_adapt_epoch.forget()

    def _adapt_epoch(self, order: Tensor) -> None:
        obs = self._data[OBSERVATION][order]
        for start, end in bounds(len(order), self.roa_cfg.adapt_minibatches):
            self._run_adapt_step(dict(obs[start:end].items()), key=end - start)

    def _adapt_step(self, groups: Mapping[str, Tensor]) -> None:
        """Regress the adaptation module to the encoder, then, in phase train, the student to the teacher."""
        policy = self.roa
        raw = TensorDict(dict(groups), batch_size=[len(groups[OBS_KEY])])
        weight = self._has_history(groups[OBS_KEY])
        obs = policy.normalized(raw)
        with torch.no_grad():
            feature = policy.encoder_priv(obs)

        def adapt_loss(parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            guess = torch.func.functional_call(policy.adapt_module, dict(parameters), (obs,))
            error = (guess - feature).square().mean(-1, keepdim=True)
            return (weight * error).sum() / weight.sum().clamp(min=1.0), guess.detach()

        loss, guess, gradient = self.adapt_optimizer.gradient_at(adapt_loss, functional=self.acceleration.compile)
        loss, _ = self._progress.apply(self.adapt_optimizer, loss, gradient, weight=weight)
        losses = (loss, *(step(obs, feature, guess) for step in self._student_steps.values()))
        with torch.no_grad():
            taken = self._progress.nonfinite == 0
            self._adapt_progress.add(torch.stack(losses), taken)

    def _imitate(self, obs: Observation, feature: Tensor, guess: Tensor) -> Tensor:
        """Regress the student, given the guess, to the teacher, given the feature; returns the loss.

        L = mean((a − a*)²), and + mean((log σ − log σ*)²) where σ depends on the state.
        """
        policy, optimizer = self.roa, self.student_optimizer
        assert optimizer is not None
        with torch.no_grad():
            wanted = policy.actor(obs, feature)

        def imitation_loss(parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            given = torch.func.functional_call(policy.actor_adapt, dict(parameters), (obs, guess))
            loss = (given.mode - wanted.mode).square().mean()
            if policy.actor.action_head.log_std is None:
                loss = loss + (_log_std(given) - _log_std(wanted)).square().mean()
            return loss, given.mode.detach()

        loss, _, gradient = optimizer.gradient_at(imitation_loss, functional=self.acceleration.compile)
        return self._progress.apply(optimizer, loss, gradient)[0]

    def _has_history(self, window: Tensor) -> Tensor:
        """Return 1 where a window ``[B, F]`` holds enough frames, else 0; frames before the episode are zeros."""
        frames = window.reshape(len(window), self.roa.history, -1)
        needed = min(self.roa_cfg.min_frames, self.roa.history)
        return ((frames != 0).any(-1).sum(-1, keepdim=True) >= needed).to(window.dtype)

    def _penalty(self, parameters: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor | float:
        return self._added_loss(parameters, batch)

    def _encoder_penalty(self, parameters: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
        """Draw the encoder towards what can be inferred: λ mean((z − sg(ẑ))²)."""
        obs = self.roa.normalized(batch[OBSERVATION])
        prefix = "policy.latent."
        encoder = {name[len(prefix) :]: value for name, value in parameters.items() if name.startswith(prefix)}
        feature = torch.func.functional_call(self.roa.encoder_priv, encoder, (obs,))
        with torch.no_grad():
            guess = self.roa.adapt_module(obs)
        distance: Tensor = (feature - guess).square().mean()
        return self._penalty_weight * distance

    def adjust_learning_rate(self, progress: float) -> None:
        """Follow the schedules, and go on to finetune when its time has come."""
        super().adjust_learning_rate(progress)
        share = progress / self.roa_cfg.train_share if self.roa_cfg.phase == "both" else progress
        self._penalty_weight.fill_(self.roa_cfg.encoder_penalty * min(1.0, share))
        if self.roa_cfg.phase == "both" and self.phase == "train" and share >= 1.0:
            self.begin_phase("finetune")

    def state_dict(self) -> dict[str, Any]:
        """Return the phase and what PPO and the adaptation need to go on."""
        state = super().state_dict()
        student = {} if self.student_optimizer is None else self.student_optimizer.state_dict()
        adaptation = {"adapt": self.adapt_optimizer.state_dict(), "student": student}
        return {**state, **adaptation, "phase": self.phase, "penalty_weight": self._penalty_weight.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, in its phase."""
        if state["phase"] != self.phase:
            weights = {name: value.clone() for name, value in self.policy.state_dict().items()}
            self.begin_phase(state["phase"])
            self.policy.load_state_dict(weights)
        super().load_state_dict(state)
        self.adapt_optimizer.load_state_dict(state["adapt"])
        if self.student_optimizer is not None:
            self.student_optimizer.load_state_dict(state["student"])
        self._penalty_weight.copy_(state["penalty_weight"])


def _log_std(distribution: Any) -> Tensor:
    """Return log σ of a normal distribution, squashed or not."""
    log_std: Tensor = getattr(distribution, "base", distribution).log_std
    return log_std
