"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.algorithms.base import (
    MAX_BEHAVIOUR_WEIGHT,
    AlgorithmConfig,
    BaseAlgorithm,
    check_source,
    find_device,
)
from apexrl.algorithms.gradient_step import GradientStep, Loss, UpdateStats, minibatches
from apexrl.algorithms.optimizer import FlatAdam
from apexrl.algorithms.terms import Term
from apexrl.core.errors import ConfigError
from apexrl.core.functional import (
    approx_kl,
    clipped_surrogate,
    explained_variance,
    gae,
    normalize,
    probability_ratio,
    value_loss,
)
from apexrl.core.system import distributed
from apexrl.core.system.acceleration import Acceleration, Captured, memory_pool
from apexrl.core.types import (
    ACTION,
    ADVANTAGE,
    DONE,
    NEXT_VALUE,
    OBSERVATION,
    POLICY_VERSION,
    PRE_TANH,
    RETURN,
    REWARD,
    SAMPLE_LOG_PROB,
    TERMINATED,
    VALUE,
    Evaluation,
)
from apexrl.core.validation import Count, Fraction, NonNegative, Positive, ProperFraction, options
from apexrl.envs import VecEnv, as_vec_env
from apexrl.policies import ActorCritic, Policy, RecurrentActorCritic, SACPolicy, VLAPolicy
from apexrl.policies.networks import MLPActor, MLPCritic, RewardScaler
from apexrl.policies.networks.mlp import ActionHead


@options("algo")
class PPOConfig(AlgorithmConfig):
    """Options of PPO."""

    name: str = "ppo"
    """The algorithm."""
    num_steps: Count = 32
    """Steps of each environment in one rollout. More give better advantages and fewer updates; usually 16 to 64 with
    many environments, 512 to 2048 with few."""
    num_epochs: Count = 5
    """Passes over each rollout. More learn faster from the same data, but less stably; usually 3 to 10."""
    num_minibatches: Count = 4
    """Parts into which each pass splits the rollout. More take more, noisier gradient steps; usually 4 to 32."""
    learning_rate: Positive = 3e-4
    """Adam's step size, at the start. Larger learns faster but may diverge, smaller is slower but safer; usually
    1e-4 to 1e-3."""
    schedule: Literal["fixed", "linear", "adaptive"] = "fixed"
    """fixed; linear: falls to 0 at the end of training, for a better final policy; adaptive: follows desired_kl
    after each minibatch, usual for many environments."""
    desired_kl: Positive = 0.01
    """KL divergence that the adaptive schedule aims at."""
    target_kl: Positive | None = None
    """Skips the rest of an update once a minibatch's KL divergence exceeds 1.5 times this. Smaller stops earlier;
    usually 0.01 to 0.05; null never does."""
    gamma: Fraction = 0.99
    """Discount per step. Larger looks further ahead, 1 / (1 - gamma) steps, but is noisier; usually 0.9 to 0.999."""
    gae_lambda: Fraction = 0.95
    """Trace decay λ of generalised advantage estimation. Larger trusts the value function less: less bias, more
    variance; usually 0.9 to 0.98."""
    clip_coef: ProperFraction = 0.2
    """Clipping range of the probability ratio. Larger lets each update change the policy more, smaller is more
    stable; usually 0.1 to 0.3."""
    value_clip_coef: Positive | None = None
    """Clipping range of the value function around its old output; null does not clip."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss. Matters where actor and critic share parameters; usually 0.25 to 1."""
    entropy_coef: NonNegative = 0.001
    """Weight of the entropy bonus. Larger explores more and longer, too large stays random; usually 0 to 0.01."""
    std_schedule: Literal["learned", "capped", "imposed"] = "learned"
    """learned: σ is a parameter like others; capped: at most σ̄ after each update, which falls by equal ratios from
    policy.init_std to final_std at the end of training; imposed: σ̄ after each update."""
    final_std: Positive = 0.2
    """Standard deviation σ̄ at the end of training, usually 0.05 to 0.5 of policy.init_std; only for capped and
    imposed."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    normalize_advantage: Literal["batch", "minibatch", "none"] = "batch"
    """Where advantages are brought to mean 0 and standard deviation 1."""
    reward_scale: Positive = 1.0
    """Constant factor on rewards, for learning only."""
    normalize_reward: bool = False
    """Divides rewards by the running standard deviation of the discounted return, for learning only."""
    adam_eps: Positive = 1e-5
    """Adam's ε."""

    def num_gradient_steps(self, total_steps: int, num_envs: int) -> int:
        """Return those of all minibatches."""
        return total_steps // (self.num_steps * num_envs) * self.num_epochs * self.num_minibatches

    def check_rollout(self, num_envs: int, *, keeps_sequences: bool) -> None:
        """Raise when rollouts of this many environments cannot be cut into the wanted minibatches."""
        parts = num_envs if keeps_sequences else self.num_steps * num_envs
        if self.num_minibatches > parts:
            what = "samples (algo.num_steps × task.num_envs)"
            if keeps_sequences:
                what = "sequences (task.num_envs; a gru keeps them whole)"
            raise ConfigError(
                f"algo.num_minibatches is {self.num_minibatches}, but a rollout has {parts} {what}; lower it."
            )


ANCHOR_LOG_PROB = "anchor_log_prob"
"""Log-probability of a stored action under the policy at the start of the update, where it is not ``SAMPLE_LOG_PROB``:
where the update computes in bfloat16, and in rollouts of older weights."""
BEHAVIOUR_WEIGHT = "behaviour_weight"
"""Of a sample that older weights collected: how much likelier the policy at the start of the update takes its action
than those did, at most ``MAX_BEHAVIOUR_WEIGHT``."""
PPO_METRICS = ("loss", "policy_loss", "value_loss", "entropy_loss", "approx_kl", "clip_frac")
"""What is logged of the loss, before what terms add; the norm of the gradient comes last."""


class PPOLoss(Loss):
    """L = L_clip(ρ A) + c_V L_V − c_H H + Σ terms, of a minibatch."""

    def __init__(self, policy: Policy, cfg: PPOConfig, acceleration: Acceleration, terms: Sequence[Term] = ()) -> None:
        super().__init__(acceleration, terms)
        self.policy, self.cfg = policy, cfg
        self.evaluate = self._evaluate_in_bf16 if acceleration.precision == "bf16" else policy.evaluate

    def _evaluate_in_bf16(self, batch: Mapping[str, Any]) -> Evaluation:
        """Return log-probabilities, entropies and values in float32."""
        with self.acceleration.autocast(self.policy.device):
            evaluation = self.policy.evaluate(batch)
        return Evaluation(*(x.float() for x in evaluation))

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, tuple[()]]:
        """Return the loss, and what is logged of it in the order of ``PPO_METRICS``."""
        cfg = self.cfg
        evaluation = self.evaluate(batch)
        log_prob, entropy, value = evaluation
        advantage = batch[ADVANTAGE]
        if cfg.normalize_advantage == "minibatch":
            advantage = normalize(advantage, distributed.all_gather(advantage))
        if BEHAVIOUR_WEIGHT in batch:
            advantage = advantage * batch[BEHAVIOUR_WEIGHT]
        log_ratio = log_prob - batch[ANCHOR_LOG_PROB if ANCHOR_LOG_PROB in batch else SAMPLE_LOG_PROB]
        ratio = probability_ratio(log_ratio)
        policy_loss = clipped_surrogate(ratio, advantage, cfg.clip_coef)
        critic_loss = value_loss(value, batch[RETURN], batch[VALUE], cfg.value_clip_coef)
        entropy_loss = -entropy.mean()
        loss = policy_loss + cfg.value_coef * critic_loss + cfg.entropy_coef * entropy_loss
        with torch.no_grad():
            clip_frac = ((ratio - 1.0).abs() > cfg.clip_coef).float().mean()
            numbers = policy_loss, critic_loss, entropy_loss, approx_kl(log_ratio), clip_frac
        return self.result(loss, numbers, batch, evaluation)


class PPO(BaseAlgorithm):
    """Proximal policy optimisation: clipped policy gradient on rollouts of the current policy.

    Created from a policy, ``PPO(policy=policy, cfg=cfg)``, or from an environment, ``PPO(env, cfg, actor_class,
    critic_class)``, which creates an ``ActorCritic`` on ``device``, or on CUDA when there is one.
    """

    cfg: PPOConfig
    config_class = PPOConfig
    policies: ClassVar[Mapping[str, type[Policy]]] = {
        "mlp": ActorCritic,
        "gru": RecurrentActorCritic,
        "vla": VLAPolicy,
    }
    shared_fields: ClassVar[Mapping[str, Callable[[int, str], int]] | None] = {}
    own_keys = ("reward_scaler",)
    advice_without_steps = "Lower algo.learning_rate, or raise algo.target_kl."
    moves_normalizer: ClassVar[bool] = True
    """Whether ``update`` shows the rollout to the normaliser at its end."""

    def __init__(
        self,
        env: Any = None,
        cfg: PPOConfig | None = None,
        actor_class: type[nn.Module] = MLPActor,
        critic_class: type[nn.Module] = MLPCritic,
        *,
        actor_cfg: Mapping[str, Any] | None = None,
        critic_cfg: Mapping[str, Any] | None = None,
        policy: Policy | None = None,
        device: torch.device | str | None = None,
        acceleration: Acceleration | None = None,
        terms: Sequence[Term] = (),
    ) -> None:
        check_source("PPO", env, policy)
        if isinstance(policy, SACPolicy):
            raise ConfigError(
                "PPO cannot train a SACPolicy, whose critics value actions instead of states; give it an ActorCritic, "
                "or train this policy with SAC."
            )
        if policy is not None and not policy.has_value:
            raise ConfigError(
                f"PPO needs a policy that values states, and this {type(policy).__name__} has no value head. Create it "
                "with value_head=True, or train it with RLOO, which needs none."
            )
        if policy is None:
            policy = self.policy_for(as_vec_env(env), actor_class, critic_class, actor_cfg, critic_cfg)
            device = device or find_device()
        if device is not None:
            policy.to(device)
        super().__init__(policy, cfg)
        self.reward_scaler = RewardScaler(self.cfg.gamma).to(policy.device) if self.cfg.normalize_reward else None
        self.acceleration = acceleration or Acceleration()
        self.terms = tuple(terms)
        """What is added to the loss."""
        self._own_keys = (*policy.initial_memory(1), *policy.extra_keys, PRE_TANH)
        """What a policy may store besides what every policy does."""
        self._heads = [
            head for head in policy.modules() if isinstance(head, ActionHead) and isinstance(head.log_std, nn.Parameter)
        ]
        if self.cfg.std_schedule != "learned" and not self._heads:
            raise ConfigError(
                f"algo.std_schedule {self.cfg.std_schedule} needs an ActionHead over continuous actions with "
                "policy.state_dependent_std false; use learned."
            )
        self._prepare(policy)

    @classmethod
    def policy_for(
        cls,
        env: VecEnv,
        actor_class: type[nn.Module],
        critic_class: type[nn.Module],
        actor_cfg: Mapping[str, Any] | None,
        critic_cfg: Mapping[str, Any] | None,
    ) -> Policy:
        """Create the policy that is trained when none is given."""
        return ActorCritic.for_env(
            env, actor_class=actor_class, critic_class=critic_class, actor_cfg=actor_cfg, critic_cfg=critic_cfg
        )

    def _prepare(self, learner: Policy, separate_clip_prefix: str | None = None) -> None:
        """Get ready to train the networks of a policy, with an optimizer that knows nothing yet.

        Args:
            learner: the policy, or a view of it.
            separate_clip_prefix: networks whose gradients are clipped by themselves.
        """
        cfg, device = self.cfg, self.policy.device
        own = [(f"{term.name}.{name}", p) for term in self.terms for name, p in term.named_parameters()]
        self.optimizer = FlatAdam(
            [*learner.named_parameters(), *own],
            cfg.learning_rate,
            cfg.adam_eps,
            cfg.max_grad_norm,
            separate_clip_prefix=separate_clip_prefix,
        )
        self.stats = UpdateStats((*PPO_METRICS, *(term.name for term in self.terms), "grad_norm"), device)
        self.loss = PPOLoss(learner, cfg, self.acceleration, self.terms)
        self.gradient_step = GradientStep(
            self.loss,
            self.optimizer,
            self.stats,
            target_kl=cfg.target_kl,
            desired_kl=cfg.desired_kl if cfg.schedule == "adaptive" else None,
            functional=self.acceleration.compile,
        )
        self.batch = TensorDict({}, batch_size=[0, 0])
        """The rollout that was learned from last, with its advantages and returns."""
        self._samples: dict[str, Any] = {}
        """What the loss reads of it, ``[T · N, ...]``, or ``[T, N, ...]`` for a policy that learns from sequences."""
        self._num_rows = 0
        """Of these, which minibatches share."""
        self._wrap()

    def _wrap(self) -> None:
        """Compile and capture again what works on the memory of a batch."""
        wrap, device, pool = self.acceleration.wrap, self.policy.device, memory_pool()
        self._pool = pool
        self.take_step = wrap(self.gradient_step, device)
        self._log_prob = wrap(self._eager_log_prob, device)
        self.epoch = wrap(self._eager_epoch, device, graph="The update", pool=pool)
        self.compute_advantage = wrap(self._eager_advantage, device, graph="The advantage", pool=pool)
        self.anchor = wrap(self._eager_anchor, device, graph="The start of the update", pool=pool)

    def initial_tensors(self) -> list[Tensor]:
        """Return the policy, and what terms have of their own."""
        return [*super().initial_tensors(), *(x for term in self.terms for x in term.state_dict().values())]

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Learn from one rollout ``[T, N]``; the normaliser sees it last, so that the first ratio is exactly 1."""
        self._load(rollout)
        self.compute_advantage()
        self.stats.reset()
        self.policy.train()
        if ANCHOR_LOG_PROB in self._samples:
            self.anchor()
        for _ in range(self.cfg.num_epochs):
            self.epoch(torch.randperm(self._num_rows, device=self.stats.device))
        self.policy.eval()
        if self.moves_normalizer:
            self.policy.update_normalizer(rollout[OBSERVATION], apply=self.stats.nonfinite == 0)
        value, target = distributed.all_gather(self.batch[VALUE]), distributed.all_gather(self.batch[RETURN])
        return {
            **self.stats.report(),
            "skipped": self.stats.stop.clone(),
            "learning_rate": self.optimizer.learning_rate.clone(),
            "explained_variance": explained_variance(value, target),
        }

    def _load(self, rollout: TensorDict) -> None:
        """Put a rollout where the minibatch step reads it; with graphs, into the same memory every time."""
        computed = [ADVANTAGE, RETURN]
        if POLICY_VERSION in rollout:
            computed += [ANCHOR_LOG_PROB, BEHAVIOUR_WEIGHT]
        elif self.acceleration.precision == "bf16":
            computed += [ANCHOR_LOG_PROB]
        batch = rollout.select(*self.required_keys, *self._own_keys, strict=False)
        is_captured = isinstance(self.epoch, Captured)
        if self.batch.shape != batch.shape or set(self.batch.keys()) != {*batch.keys(), *computed}:
            self._begin_shape(rollout)
        elif is_captured:
            self.batch.update_(batch)
            return
        batch = batch.clone() if is_captured else batch
        for name in computed:
            batch[name] = torch.empty_like(batch[VALUE], memory_format=torch.contiguous_format)
        read_by_loss = [OBSERVATION, ACTION, SAMPLE_LOG_PROB, VALUE, *computed, *self._own_keys]
        if self.policy.sequential:
            samples, self._num_rows = batch.select(*read_by_loss, DONE, strict=False), batch.shape[1]
        else:
            samples, self._num_rows = batch.select(*read_by_loss, strict=False).reshape(-1), batch.numel()
        self._samples = dict(samples.items())
        self.batch = batch

    def _begin_shape(self, rollout: TensorDict) -> None:
        """Check the first rollout of a shape, and leave what was captured for another."""
        self.check_batch(rollout)
        count = rollout.shape[1] if self.policy.sequential else rollout.numel()
        if self.cfg.num_minibatches > count:
            parts = "sequences (one per environment)" if self.policy.sequential else "samples"
            raise ConfigError(
                f"algo.num_minibatches is {self.cfg.num_minibatches}, but the rollout has {count} {parts}; lower it."
            )
        if self._samples:
            self._wrap()

    @torch.no_grad()
    def _eager_advantage(self) -> None:
        """Compute advantages and returns, from rewards and what terms add to them."""
        batch, cfg = self.batch, self.cfg
        value, done, reward = batch[VALUE], batch[DONE], batch[REWARD] * cfg.reward_scale
        for term in self.terms:
            reward = reward + term.reward(batch)
        if self.reward_scaler is not None:
            reward = self.reward_scaler(reward, done)
        advantage, target = gae(
            reward, value, batch[NEXT_VALUE], batch[TERMINATED], done, gamma=cfg.gamma, gae_lambda=cfg.gae_lambda
        )
        if cfg.normalize_advantage == "batch":
            advantage = normalize(advantage, distributed.all_gather(advantage))
        batch[ADVANTAGE].copy_(advantage)
        batch[RETURN].copy_(target)

    @torch.no_grad()
    def _eager_anchor(self) -> None:
        """Evaluate the stored actions under the policy as it is, a minibatch at a time, and weight stale samples.

        w = min(π_start(a|s) / π_sample(a|s), MAX_BEHAVIOUR_WEIGHT)
        """
        samples, before = self._samples, (slice(None),) if self.policy.sequential else ()
        rows = torch.arange(self._num_rows, device=self.stats.device)
        for place in ((*before, part) for part in rows.tensor_split(self.cfg.num_minibatches)):
            part = {name: value[place] for name, value in samples.items()}
            samples[ANCHOR_LOG_PROB][place] = self._log_prob(part)
        if BEHAVIOUR_WEIGHT in samples:
            ratio = (samples[ANCHOR_LOG_PROB] - samples[SAMPLE_LOG_PROB]).exp()
            samples[BEHAVIOUR_WEIGHT].copy_(ratio.clamp(max=MAX_BEHAVIOUR_WEIGHT))

    def _eager_log_prob(self, batch: Mapping[str, Any]) -> Tensor:
        return self.loss.evaluate(batch).log_prob

    def _eager_epoch(self, order: Tensor) -> None:
        """Go once over the batch in a given order."""
        for minibatch in minibatches(self._samples, order, self.cfg.num_minibatches, int(self.policy.sequential)):
            self.take_step(minibatch)

    def adjust_learning_rate(self, progress: float) -> None:
        """Follow the linear schedule, and that of σ; the others need nothing here.

        log σ̄ = (1 − progress) log init_std + progress log final_std
        """
        if self.cfg.std_schedule != "learned":
            for head in self._heads:
                start, end = math.log(head.init_std), math.log(self.cfg.final_std)
                limit = start + progress * (end - start)
                head.limit_log_std(-math.inf if self.cfg.std_schedule == "capped" else limit, limit)
        if self.cfg.schedule == "linear":
            self.optimizer.learning_rate.fill_(self.cfg.learning_rate * (1.0 - progress))
        for term in self.terms:
            term.follow(progress)

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer, learning rate and reward statistics."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "reward_scaler": {} if self.reward_scaler is None else dict(self.reward_scaler.state_dict()),
            "terms": {term.name: copy.deepcopy(dict(term.state_dict())) for term in self.terms},
            "config": asdict(self.cfg),
        }

    def without_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave out the returns of running episodes, which end here; the statistics are those of all processes."""
        scaler = state["reward_scaler"]
        return {**state, "reward_scaler": {**scaler, "running": scaler["running"][:0]} if scaler else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        for term in self.terms:
            term.load_state_dict(state["terms"][term.name])
        if self.reward_scaler is not None and state["reward_scaler"]:
            self.reward_scaler.running = state["reward_scaler"]["running"].to(self.policy.device, copy=True)
            self.reward_scaler.load_state_dict(state["reward_scaler"])
            self._wrap()
