"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.algorithms.base import (
    MAX_BEHAVIOUR_WEIGHT,
    AlgorithmConfig,
    BaseAlgorithm,
    UpdateStats,
    check_source,
    checker,
    find_device,
)
from apexrl.algorithms.minibatches import bounds
from apexrl.algorithms.optimizer import FlatAdam
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
from apexrl.core.system.acceleration import Acceleration, Captured, Compiled, memory_pool
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
from apexrl.envs import VecEnv, as_vec_env
from apexrl.policies import ActorCritic, Policy, RecurrentActorCritic, SACPolicy, VLAPolicy
from apexrl.policies.networks import MLPActor, MLPCritic, RewardScaler
from apexrl.policies.networks.actor import ActionHead


@dataclass(frozen=True, kw_only=True)
class PPOConfig(AlgorithmConfig):
    """Options of PPO."""

    name: Literal["ppo"] = "ppo"
    """The algorithm."""
    num_steps: int = 32
    """Steps of each environment in one rollout."""
    num_epochs: int = 5
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Parts into which each pass splits the rollout."""
    learning_rate: float = 3e-4
    """Adam's step size, at the start."""
    schedule: Literal["fixed", "linear", "adaptive"] = "fixed"
    """fixed; linear: falls to 0 at the end of training; adaptive: follows desired_kl after each minibatch."""
    desired_kl: float = 0.01
    """KL divergence that the adaptive schedule aims at."""
    target_kl: float | None = None
    """Skips the rest of an update once a minibatch's KL divergence exceeds 1.5 times this; null never does."""
    gamma: float = 0.99
    """Discount per step."""
    lam: float = 0.95
    """Trace decay λ of generalised advantage estimation."""
    clip: float = 0.2
    """Clipping range of the probability ratio."""
    clip_value: float | None = None
    """Clipping range of the value function around its old output; null does not clip."""
    value_coef: float = 1.0
    """Weight of the value loss."""
    entropy_coef: float = 0.001
    """Weight of the entropy bonus."""
    std_schedule: Literal["learned", "capped", "imposed"] = "learned"
    """learned: σ is a parameter like others; capped: at most σ̄ after each update, which falls by equal ratios from
    policy.init_std to final_std at the end of training; imposed: σ̄ after each update."""
    final_std: float = 0.2
    """Standard deviation σ̄ at the end of training, usually 0.05 to 0.5 of policy.init_std; only for capped and
    imposed."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    normalize_advantage: Literal["batch", "minibatch", "none"] = "batch"
    """Where advantages are brought to mean 0 and standard deviation 1."""
    reward_scale: float = 1.0
    """Constant factor on rewards, for learning only."""
    normalize_reward: bool = False
    """Divides rewards by the running standard deviation of the discounted return, for learning only."""
    adam_eps: float = 1e-5
    """Adam's ε."""

    learning_rate_bounds: ClassVar[tuple[float, float]] = (1e-5, 1e-2)

    def __post_init__(self) -> None:
        require = checker(self, "algo")
        for name in ("num_steps", "num_epochs", "num_minibatches"):
            require(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("learning_rate", "desired_kl", "max_grad_norm", "adam_eps", "reward_scale", "final_std"):
            require(name, getattr(self, name) > 0, "must be positive")
        for name in ("gamma", "lam"):
            require(name, 0 <= getattr(self, name) <= 1, "must lie in [0, 1]")
        require("clip", 0 < self.clip < 1, "must lie in (0, 1)")
        for name in ("value_coef", "entropy_coef"):
            require(name, getattr(self, name) >= 0, "must not be negative")
        for name in ("target_kl", "clip_value"):
            value = getattr(self, name)
            require(name, value is None or value > 0, "must be positive or null")

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
PPO_METRICS = ("loss", "policy_loss", "value_loss", "entropy_loss", "approx_kl", "clip_frac", "grad_norm")


class _Evaluator(nn.Module):
    """The policy's evaluation of a minibatch as a module of its own, in the precision of the acceleration."""

    def __init__(self, policy: Policy, acceleration: Acceleration) -> None:
        super().__init__()
        self.policy = policy
        self.in_bf16 = acceleration.precision == "bf16"

    def forward(self, batch: Mapping[str, Any]) -> Evaluation:
        """Return log-probabilities, entropies and values in float32."""
        if not self.in_bf16:
            return self.policy.evaluate(batch)
        with torch.autocast(self.policy.device.type, dtype=torch.bfloat16):
            evaluation = self.policy.evaluate(batch)
        return Evaluation(*(x.float() for x in evaluation))


class PPO(BaseAlgorithm):
    """Clipped policy gradient on rollouts of the current policy.

    Made from a policy, ``PPO(policy=policy, cfg=cfg)``, or from an environment, ``PPO(env, cfg, actor_class,
    critic_class)``, which makes an ``ActorCritic`` on ``device``, or on CUDA when there is one.
    """

    policies: ClassVar[Mapping[str, type[Policy]]] = {
        "mlp": ActorCritic,
        "gru": RecurrentActorCritic,
        "vla": VLAPolicy,
    }
    shared_fields: ClassVar[Mapping[str, Callable[[int, str], int]] | None] = {}
    own_keys = ("reward_scaler",)
    advice_without_steps = "Lower algo.learning_rate, or raise algo.target_kl."

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
        self.cfg = cfg or PPOConfig()
        super().__init__(policy, self.cfg.num_steps)
        self.reward_scaler = RewardScaler(self.cfg.gamma).to(policy.device) if self.cfg.normalize_reward else None
        self.acceleration = acceleration or Acceleration()
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
        self.optimizer = FlatAdam(
            learner.named_parameters(),
            cfg.learning_rate,
            cfg.adam_eps,
            cfg.max_grad_norm,
            separate_clip_prefix=separate_clip_prefix,
        )
        self._evaluator = _Evaluator(learner, self.acceleration)
        self._pool = memory_pool()
        self._run_step = Compiled(self._step, enabled=self.acceleration.compile, device=device)
        self._captured_epoch = self._captured("The update", self._epoch)
        self._captured_advantage = self._captured("The advantage", self._compute_advantage)
        self._run_log_prob = Compiled(self._log_prob, enabled=self.acceleration.compile, device=device)
        self._captured_anchor = self._captured("The start of the update", self._anchor)
        self._progress = UpdateStats(PPO_METRICS, device)
        self._batch = TensorDict({}, batch_size=[0, 0])
        self._data: dict[str, Any] = {}

    def _captured(self, name: str, function: Callable[..., Any]) -> Captured:
        enabled = self.acceleration.graphs and self.policy.device.type == "cuda"
        return Captured(name, function, enabled=enabled, pool=self._pool)

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Learn from one rollout ``[T, N]``, then let the normaliser see it."""
        metrics = self.train_policy(rollout)
        self._update_normalizer(rollout)
        return metrics

    def _update_normalizer(self, rollout: TensorDict) -> None:
        # Last, so that the rollout and every minibatch of this update saw the same normaliser.
        self.policy.update_normalizer(rollout[OBSERVATION], apply=self._progress.nonfinite == 0)

    def train_policy(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Run the epochs over one rollout."""
        self.check_batch(rollout)
        count = rollout.shape[1] if self.policy.sequential else rollout.numel()
        if self.cfg.num_minibatches > count:
            parts = "sequences (one an environment)" if self.policy.sequential else "samples"
            raise ConfigError(
                f"algo.num_minibatches is {self.cfg.num_minibatches}, but the rollout has {count} {parts}; lower it."
            )
        self._load(rollout)
        self._captured_advantage()
        rollout[ADVANTAGE], rollout[RETURN] = self._batch[ADVANTAGE], self._batch[RETURN]
        progress = self._progress
        progress.restart()
        self.policy.train()
        if ANCHOR_LOG_PROB in self._data:
            self._captured_anchor()
        for _ in range(self.cfg.num_epochs):
            self._captured_epoch(torch.randperm(count, device=self.policy.device))
        self.policy.eval()
        return {
            **progress.means(),
            "learning_rate": self.optimizer.learning_rate.clone(),
            "explained_variance": explained_variance(
                distributed.all_gather(self._batch[VALUE]), distributed.all_gather(self._batch[RETURN])
            ),
            "updates": progress.sums[-1].clone(),
            "skipped": progress.stop.clone(),
            "nonfinite": progress.nonfinite.clone(),
        }

    def _load(self, rollout: TensorDict) -> None:
        """Put a rollout where the minibatch step reads it; with graphs, into the same memory every time."""
        stored = [*self.policy.initial_memory(1), *self.policy.extra_keys]
        stored += [PRE_TANH] if PRE_TANH in rollout.keys() else []  # noqa: SIM118
        batch = rollout.select(*self.required_keys, *stored)
        is_stale = POLICY_VERSION in rollout.keys()  # noqa: SIM118
        anchor = [ANCHOR_LOG_PROB] if is_stale or self.acceleration.precision == "bf16" else []
        computed = [ADVANTAGE, RETURN, *anchor, *([BEHAVIOUR_WEIGHT] if is_stale else [])]
        same_layout = self._batch.shape == batch.shape and set(self._batch.keys()) == {*batch.keys(), *computed}
        if same_layout and self._captured_epoch.enabled:
            self._batch.update_(batch)
            return
        if not same_layout:
            self._forget_batch()
        self._batch = batch.clone() if self._captured_epoch.enabled else batch
        for name in computed:
            self._batch[name] = torch.empty_like(batch[VALUE], memory_format=torch.contiguous_format)
        read_by_loss = [OBSERVATION, ACTION, SAMPLE_LOG_PROB, VALUE, *computed, *stored]
        data = self._batch.select(*read_by_loss, *([DONE] if self.policy.sequential else []))
        self._data = dict((data if self.policy.sequential else data.reshape(-1)).items())

    def _forget_batch(self) -> None:
        """Drop what was captured or compiled for the memory and the shape of the batch before."""
        self._run_step.forget()
        self._captured_epoch.forget()
        self._captured_advantage.forget()
        self._run_log_prob.forget()
        self._captured_anchor.forget()

    @torch.no_grad()
    def _compute_advantage(self) -> None:
        batch = self._batch
        reward = batch[REWARD] * self.cfg.reward_scale
        if self.reward_scaler is not None:
            reward = self.reward_scaler(reward, batch[DONE])
        advantage, target = gae(
            reward,
            batch[VALUE],
            batch[NEXT_VALUE],
            batch[TERMINATED],
            batch[DONE],
            gamma=self.cfg.gamma,
            lam=self.cfg.lam,
        )
        if self.cfg.normalize_advantage == "batch":
            advantage = _normalize(advantage)
        batch[ADVANTAGE].copy_(advantage)
        batch[RETURN].copy_(target)

    @torch.no_grad()
    def _anchor(self) -> None:
        """Evaluate the stored actions under the policy as it is, a minibatch at a time, and weight stale samples.

        w = min(π_start(a|s) / π_sample(a|s), MAX_BEHAVIOUR_WEIGHT)
        """
        data, leading = self._data, (slice(None),) if self.policy.sequential else ()
        for start, end in bounds(data[VALUE].shape[len(leading)], self.cfg.num_minibatches):
            place = (*leading, slice(start, end))
            part = {name: value[place] for name, value in data.items()}
            data[ANCHOR_LOG_PROB][place].copy_(self._run_log_prob(part, key=end - start))
        if BEHAVIOUR_WEIGHT in data:
            ratio = (data[ANCHOR_LOG_PROB] - data[SAMPLE_LOG_PROB]).exp()
            data[BEHAVIOUR_WEIGHT].copy_(ratio.clamp(max=MAX_BEHAVIOUR_WEIGHT))

    def _log_prob(self, batch: Mapping[str, Any]) -> Tensor:
        evaluation: Evaluation = self._evaluator(batch)
        return evaluation.log_prob

    def _loss(self, batch: Mapping[str, Any], evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        """Return the loss, and what is logged of it in the order of ``PPO_METRICS``."""
        cfg = self.cfg
        log_prob, entropy, value = evaluation
        advantage = batch[ADVANTAGE]
        if cfg.normalize_advantage == "minibatch":
            advantage = _normalize(advantage)
        if BEHAVIOUR_WEIGHT in batch:
            advantage = advantage * batch[BEHAVIOUR_WEIGHT]
        log_ratio = log_prob - batch[ANCHOR_LOG_PROB if ANCHOR_LOG_PROB in batch else SAMPLE_LOG_PROB]
        ratio = probability_ratio(log_ratio)
        policy_term = clipped_surrogate(ratio, advantage, cfg.clip)
        value_term = value_loss(value, batch[RETURN], batch[VALUE], cfg.clip_value)
        entropy_term = -entropy.mean()
        loss = policy_term + cfg.value_coef * value_term + cfg.entropy_coef * entropy_term
        with torch.no_grad():
            clip_frac = ((ratio - 1.0).abs() > cfg.clip).float().mean()
            metrics = torch.stack((loss, policy_term, value_term, entropy_term, approx_kl(log_ratio), clip_frac))
        return loss, metrics

    def _gradient(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, metrics and flat gradient."""

        def loss_at(parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            named = {f"policy.{name}": value for name, value in parameters.items()}
            evaluation: Evaluation = torch.func.functional_call(self._evaluator, named, (batch,))
            loss, metrics = self._loss(batch, evaluation)
            return loss + self._penalty(named, batch), metrics

        return self.optimizer.gradient_at(loss_at, functional=self.acceleration.compile)

    def _penalty(self, parameters: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor | float:
        """Return what a variant adds to the loss, given the evaluator's parameters by name."""
        return 0.0

    def _epoch(self, order: Tensor) -> None:
        """Go once over the batch in a given order: shuffle all of it at once, then cut it into minibatches."""
        leading = (slice(None),) if self.policy.sequential else ()
        shuffled = {name: value[(*leading, order)] for name, value in self._data.items()}
        for start, end in bounds(len(order), self.cfg.num_minibatches):
            place = (*leading, slice(start, end))
            self._run_step({name: value[place] for name, value in shuffled.items()}, key=end - start)

    def _step(self, minibatch: Mapping[str, Any]) -> None:
        """Take one optimizer step, unless the update was stopped before or this step is not finite."""
        progress = self._progress
        loss, metrics, gradient = distributed.all_reduce_mean(*self._gradient(minibatch))
        with torch.no_grad():
            gradient_norm, kl = gradient.norm(), metrics[PPO_METRICS.index("approx_kl")]
            if adaptive := self.cfg.schedule == "adaptive":
                # Before the first step nothing has moved, and after the stop nothing moves: neither tells of the rate.
                ignored = (progress.sums[-1] == 0) | (progress.stop > 0)
            if self.cfg.target_kl is not None:
                progress.stop.copy_(torch.max(progress.stop, kl > 1.5 * self.cfg.target_kl))
            progress.nonfinite.copy_(torch.max(progress.nonfinite, ~(loss + gradient_norm).isfinite()))
            skip = torch.max(progress.stop, progress.nonfinite)
            self.optimizer.step(gradient, gradient_norm, skip)
            if adaptive:
                self._adapt_learning_rate(kl, progress.stop > 0, ignored | (progress.nonfinite > 0))
            progress.add(torch.cat((metrics, gradient_norm.view(1))), taken=skip == 0)

    def _adapt_learning_rate(self, kl: Tensor, stops: Tensor, ignored: Tensor) -> None:
        """Follow the KL divergence of a minibatch; one that stops the update always lowers the rate."""
        low, high = self.cfg.learning_rate_bounds
        rate = self.optimizer.learning_rate
        slower = (rate / 1.5).clamp(min=low)
        faster = (rate * 1.5).clamp(max=high)
        too_far, too_near = (kl > 2.0 * self.cfg.desired_kl) | stops, kl < 0.5 * self.cfg.desired_kl
        followed = torch.where(too_far, slower, torch.where(too_near, faster, rate))
        rate.copy_(torch.where(ignored, rate, followed))

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
            self.optimizer.learning_rate.fill_(self.cfg.learning_rate * max(0.0, 1.0 - progress))

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer, learning rate and reward statistics."""
        scaler = {} if self.reward_scaler is None else dict(self.reward_scaler.state_dict())
        return {"optimizer": self.optimizer.state_dict(), "reward_scaler": scaler, "config": asdict(self.cfg)}

    def without_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave out the returns of running episodes, which end here; the statistics are those of all processes."""
        scaler = state["reward_scaler"]
        return {**state, "reward_scaler": {**scaler, "running": scaler["running"][:0]} if scaler else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.reward_scaler is not None and state["reward_scaler"]:
            self.reward_scaler.running = state["reward_scaler"]["running"].to(self.policy.device, copy=True)
            self.reward_scaler.load_state_dict(state["reward_scaler"])
            self._captured_advantage.forget()


def _normalize(advantage: Tensor) -> Tensor:
    """Bring advantages to mean 0 and standard deviation 1 over all that learn together."""
    return distributed.own_shard(normalize(distributed.all_gather(advantage)))
