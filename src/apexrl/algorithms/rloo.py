"""REINFORCE with a leave-one-out baseline on groups of episodes (arXiv 2402.14740; for robots, 2505.17016)."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from apexrl.algorithms.base import MAX_BEHAVIOUR_WEIGHT, AlgorithmConfig, BaseAlgorithm, own_config
from apexrl.algorithms.bc import BCConfig
from apexrl.algorithms.collapse import CollapseGuard
from apexrl.algorithms.gradient_step import GradientStep, Loss, UpdateStats
from apexrl.algorithms.optimizer import FlatAdam
from apexrl.algorithms.terms import Imitation, Term
from apexrl.core.errors import ConfigError
from apexrl.core.functional import approx_kl, clipped_surrogate, probability_ratio
from apexrl.core.functional.episodes import stack_episodes
from apexrl.core.functional.rloo import group_std, leave_one_out, reverse_kl
from apexrl.core.system import distributed
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import (
    ACTION,
    ADVANTAGE,
    CONTROL_STEPS,
    GROUP,
    INFO,
    METRIC,
    OBSERVATION,
    POLICY_VERSION,
    PRE_TANH,
    REWARD,
    SAMPLE_LOG_PROB,
    SAMPLED_SUCCESS,
    VALID,
)
from apexrl.core.validation import (
    Count,
    Integer,
    NonNegative,
    NonNegativeInteger,
    Number,
    Positive,
    ProperFraction,
    options,
)
from apexrl.policies import ActorCritic, Policy
from apexrl.policies.vla import VALID_STEPS, PI0_CFG_Adapter, VLAPolicy

REFERENCE_LOG_PROB = "reference_log_prob"
ROWS_WITHOUT_GRADIENT = 4096
"""Samples that are evaluated at once where no gradient is needed and ``micro_batch_size`` says nothing."""


@options("algo")
class RLOOConfig(AlgorithmConfig):
    """Options of RLOO."""

    name: str = "rloo"
    """The algorithm."""
    rloo_batch_size: Annotated[Integer, Field(ge=2)] = 8
    """Rollouts from one initial state: a group."""
    num_groups: Count = 12
    """Groups wanted in a batch. More give steadier but slower updates; usually 8 to 128."""
    baseline: Literal["group", "batch"] = "group"
    """What an episode is compared with: the others of its group, or all others of the batch."""
    normalize_advantage: Literal["none", "group", "batch"] = "none"
    """Divides advantages by the standard deviation of the returns of their group, or of all advantages."""
    loss: Literal["policy_gradient", "weighted_flow"] = "policy_gradient"
    """policy_gradient: clipped ratio; weighted_flow: advantage-conditioned flow matching, for flow heads."""
    num_epochs: Count = 5
    """Passes over each batch. More learn faster from the same episodes, but less stably; usually 1 to 6."""
    num_minibatches: Count = 4
    """Parts into which each pass splits the chunks of the batch."""
    minibatch_size: Count | None = None
    """Chunks of one optimizer step at most; takes the place of num_minibatches unless null."""
    micro_batch_size: Count | None = None
    """Chunks of one forward and backward pass at most, whose gradients are summed; null takes a minibatch at once."""
    learning_rate: Positive = 3e-4
    """Adam's step size, at the start. Larger learns faster but may forget what was imitated; usually 1e-5 to 5e-4."""
    schedule: Literal["fixed", "linear"] = "fixed"
    """fixed, or linear: falls to 0 at the end of training."""
    warmup_steps: NonNegativeInteger = 0
    """Optimizer steps over which the step size rises from 0: Adam's first steps are as large on noise as on signal."""
    clip_coef: ProperFraction = 0.2
    """Clipping range of the probability ratio of a whole chunk, below 1 and, unless clip_coef_high is given, above."""
    clip_coef_high: Positive | None = None
    """Clipping range above 1; null takes clip_coef."""
    target_kl: Positive | None = None
    """Skips the rest of an update once a minibatch's KL divergence exceeds 1.5 times this; null never does."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the policy that training started with; 0 keeps no copy of it."""
    imitation_updates: NonNegativeInteger = 0
    """Gradient steps of behaviour cloning on the demonstrations (task.num_demos or task.demos) before the first
    rollout, as a run of its own in imitation in the run directory; usually 500 to 4000; 0 starts without. Not with
    training.init_from, which names a policy to start from."""
    imitation_learning_rate: Positive = 5e-4
    """Adam's step size of imitation_updates, at the start; it falls to 0."""
    imitation_coef: NonNegative = 0.0
    """Weight of the mean squared error of the demonstrated actions (task.demos; normalised ones of a vla, and of the
    field of a flow head), so that what they taught is not forgotten while other tasks are learned; 0 reads none."""
    imitation_batch_size: Count = 256
    """Demonstrated chunks of one optimizer step, sampled with replacement."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    adam_eps: Positive = 1e-8
    """Adam's ε."""
    collapse_ratio: ProperFraction | None = None
    """Goes back to the best policy so far when a batch's success falls below this share of its; null never does."""
    enable_dynamic_sampling: bool = True
    """Replace groups whose outcomes are all equal, and skip initial states that are mastered."""
    rollout_skip_threshold: NonNegativeInteger = 3
    """Skips of a mastered initial state after which its history is forgotten, so that it is tested again."""
    enable_rollout_stats_tracking: bool = True
    """Keep the outcomes of every initial state in a file."""
    rollout_stats_path: str = ""
    """That file; empty for rollout_stats.json in the run directory."""
    use_val_init: bool = False
    """Take initial states from the validation split, which evaluation uses: to debug, never for results."""
    oversample: Annotated[Number, Field(ge=1)] = 1.5
    """Groups run for each one still missing, when some may be dropped."""
    max_attempts: Count = 4
    """Times that groups are run for one batch; then training continues with the mixed ones that were found."""

    def __post_init__(self) -> None:
        for name in ("kl_coef", "entropy_coef", "target_kl"):
            if self.loss == "weighted_flow" and getattr(self, name):
                raise ConfigError(f"algo.{name} has no effect with algo.loss weighted_flow, got {getattr(self, name)}.")

    @property
    def demo_reader(self) -> str:  # type: ignore[override]
        """The weight of the demonstrations, where they have one."""
        return "algo.imitation_coef" if self.imitation_coef else ""

    def without_demos(self) -> Self:
        """Return the options for training without demonstrations."""
        return replace(self, imitation_coef=0.0)

    def imitation(self, init_from: str) -> BCConfig | None:
        """Return the imitation before the first rollout, where ``imitation_updates`` asks for it."""
        if init_from or not self.imitation_updates:
            return None
        return BCConfig(
            num_updates=self.imitation_updates,
            batch_size=self.imitation_batch_size,
            micro_batch_size=self.micro_batch_size,
            learning_rate=self.imitation_learning_rate,
            schedule="linear",
        )


RLOO_METRICS = ("loss", "policy_loss", "entropy_loss", "approx_kl", "clip_frac", "start_kl")
"""What is logged of the loss, before what terms add; the norm of the gradient comes last."""


def evaluate_chunks(policy: Policy, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of stored chunks, as far as they were executed, both ``[B, 1]``."""
    if policy.extra_keys or VALID_STEPS in batch or PRE_TANH in batch:
        log_prob, entropy, _ = policy.evaluate(batch)
    else:  # without the critic, which has no part in this
        log_prob, entropy = policy.evaluate_actions(batch[OBSERVATION], batch[ACTION])
    return log_prob.float(), entropy.float()


class RLOOLoss(Loss):
    """L = L_clip(ρ A) − c_H H + c_KL KL(π ‖ π_start) + Σ terms, of stored chunks."""

    def __init__(self, policy: Policy, cfg: RLOOConfig, acceleration: Acceleration, terms: Sequence[Term] = ()) -> None:
        super().__init__(acceleration, terms)
        self.policy, self.cfg = policy, cfg
        self.clip_coef_high = cfg.clip_coef if cfg.clip_coef_high is None else cfg.clip_coef_high
        # The number of chunks changes from batch to batch.
        self._run = torch.compile(evaluate_chunks, dynamic=True) if acceleration.compile else evaluate_chunks

    def evaluate(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy in the precision of the acceleration."""
        with self.acceleration.autocast(self.policy.device):
            return self._run(self.policy, batch)

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, tuple[()]]:
        """Return the loss, and what is logged of it in the order of ``RLOO_METRICS``."""
        cfg = self.cfg
        log_prob, entropy = evaluation = self.evaluate(batch)
        log_ratio = log_prob - batch[SAMPLE_LOG_PROB]
        ratio = probability_ratio(log_ratio)
        policy_loss = clipped_surrogate(ratio, batch[ADVANTAGE], cfg.clip_coef, self.clip_coef_high)
        entropy_loss = -entropy.mean()
        start_kl = torch.zeros_like(policy_loss)
        if REFERENCE_LOG_PROB in batch:
            start_kl = reverse_kl(log_prob, batch[REFERENCE_LOG_PROB], batch[SAMPLE_LOG_PROB]).mean()
        loss = policy_loss + cfg.entropy_coef * entropy_loss + cfg.kl_coef * start_kl
        with torch.no_grad():
            clip_frac = ((ratio < 1.0 - cfg.clip_coef) | (ratio > 1.0 + self.clip_coef_high)).float().mean()
        numbers = policy_loss, entropy_loss, approx_kl(log_ratio), clip_frac, start_kl
        return self.result(loss, numbers, batch, evaluation)


class WeightedFlowLoss(Loss):
    """Flow matching that is conditioned on the sign of the advantage, and weighted by its size."""

    def __init__(self, policy: Policy, acceleration: Acceleration, terms: Sequence[Term] = ()) -> None:
        super().__init__(acceleration, terms)
        if not isinstance(policy, VLAPolicy) or policy.flow is None:
            raise ConfigError("algo.loss weighted_flow needs policy.kind vla with policy.head flow.")
        if policy.flow.noise == "last_step":
            raise ConfigError(
                "algo.loss weighted_flow imitates sampled chunks, which policy.noise last_step makes wider than the "
                "flow, and wider again in every iteration; set policy.noise to every_step."
            )
        self.policy, self.flow = policy, PI0_CFG_Adapter(policy)

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, tuple[()]]:
        """Return the loss, and what is logged of it in the order of ``RLOO_METRICS``."""
        with self.acceleration.autocast(self.policy.device):
            loss = self.flow.compute_weighted_loss(batch, batch[ADVANTAGE]).float()
        return self.result(loss, (loss, *torch.zeros(4, device=loss.device)), batch, None)


class RLOO(BaseAlgorithm):
    """Policy gradient without a critic: an episode's advantage is its return minus the mean of the rest of its group.

    Batches are ``[T, E]``: E episodes from P initial states, T action chunks, padded where ``valid`` is false.
    Statistics by which the policy normalises observations stay as they are: to move them would move the policy.

    Args:
        policy: what learns; a critic that it may have is left alone.
        cfg: the options.
        acceleration: precision, and whether the policy's evaluation is compiled.
    """

    shared_fields: ClassVar[Mapping[str, Callable[[int, str], int]] | None] = {
        "num_groups": distributed.share,
        "minibatch_size": distributed.share_rounded,
    }
    cfg: RLOOConfig
    config_class = RLOOConfig
    policies: ClassVar[Mapping[str, type[Policy]]] = {"vla": VLAPolicy, "mlp": ActorCritic}
    advice_without_steps = (
        "In no batch did a group have both successes and failures. Start from demonstrations (task.num_demos with "
        "algo.imitation_updates) or an imitated policy (training.init_from), raise policy.init_std (policy.noise_level "
        "of a flow head), or lengthen task.max_episode_length."
    )
    required_keys = frozenset({OBSERVATION, ACTION, REWARD, SAMPLE_LOG_PROB, VALID, GROUP})
    learns_from = "groups"

    def __init__(
        self, *, policy: Policy, cfg: RLOOConfig | None = None, acceleration: Acceleration | None = None
    ) -> None:
        cfg = own_config(cfg, RLOOConfig)
        super().__init__(policy, cfg, num_steps=cfg.num_groups)
        self.acceleration = acceleration or Acceleration()
        self.reference = copy.deepcopy(policy).eval().requires_grad_(False) if cfg.kl_coef > 0 else None
        """The policy that training started with."""
        trained = [(name, p) for name, p in policy.named_parameters() if not name.startswith("critic.")]
        self.optimizer = FlatAdam(trained, cfg.learning_rate, cfg.adam_eps, cfg.max_grad_norm)
        self.guard = None if cfg.collapse_ratio is None else CollapseGuard(cfg.collapse_ratio, self.optimizer)

        self.imitation: Imitation | None = None
        if cfg.imitation_coef:
            self.imitation = Imitation(policy, cfg.imitation_coef, cfg.imitation_batch_size, self.acceleration)
        terms = () if self.imitation is None else (self.imitation,)
        self.loss: RLOOLoss | WeightedFlowLoss
        if cfg.loss == "weighted_flow":
            self.loss = WeightedFlowLoss(policy, self.acceleration, terms)
        else:
            self.loss = RLOOLoss(policy, cfg, self.acceleration, terms)
        self.stats = UpdateStats((*RLOO_METRICS, *(term.name for term in terms), "grad_norm"), policy.device)
        self.gradient_step = GradientStep(
            self.loss,
            self.optimizer,
            self.stats,
            target_kl=cfg.target_kl,
            micro_batch_size=cfg.micro_batch_size or sys.maxsize,
        )
        self._rate = cfg.learning_rate
        """Where the schedule stands; warm-up multiplies it."""
        self._num_steps = torch.zeros((), device=policy.device)
        """Optimizer steps taken before this update, since Adam's moments were zero."""

    def begin_trained(self, init_std: float) -> None:
        """Explore as asked, where the training before has left exploration as it was."""
        for policy in filter(None, (self.policy, self.reference)):
            explore_with(policy, init_std)

    def remember(self, demonstrations: TensorDict, *, is_new: bool = True) -> None:
        """Hold on to demonstrations ``[M]``, as ``load_demos`` returns them, by ``imitation_coef``."""
        if self.imitation is not None:
            samples: TensorDict = demonstrations.select(OBSERVATION, ACTION, VALID_STEPS, strict=False)
            self.imitation.demonstrations = samples.to(self.policy.device)

    def initial_tensors(self) -> list[Tensor]:
        """Return the policy, and the copy of it that training must not leave far behind."""
        reference = [] if self.reference is None else list(self.reference.state_dict().values())
        return [*super().initial_tensors(), *reference]

    def update(self, rollout: TensorDict | Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Learn from one batch ``[T, E]``, or from the episodes that ``RolloutGenerator.generate_rollouts`` returns."""
        if isinstance(rollout, Sequence):
            rollout = stack_episodes(rollout)
        if missing := {VALID, GROUP} - set(rollout.keys()):
            raise KeyError(
                f"RLOO.update needs groups of whole episodes ({sorted(missing)} of the batch). Collect them with "
                "RolloutGenerator(SuiteRunner(env, policy)), or with AsyncCollector on a suite; "
                "Trainer(..., collector=...) takes either."
            )
        self.check_batch(rollout)
        if self.imitation is not None and self.imitation.demonstrations is None:
            raise ConfigError("algo.imitation_coef needs demonstrations: set task.demos, or call remember.")
        if missing := set(self.policy.extra_keys) - set(rollout.keys()):
            raise KeyError(f"RLOO.update needs {sorted(missing)}, which the policy returned; collect with keep=None.")
        self.stats.reset()
        returns, advantage = self._episodes(rollout)
        counts = advantage != 0
        success, mixed = distributed.all_reduce_mean(
            self._success(rollout, returns), counts.float().mean(), weight=len(counts)
        )
        # The one read of an update, besides the numbers of valid chunks and of those that were cut.
        success_rate, has_signal = torch.stack((success, (mixed > 0).to(success.dtype))).tolist()
        collapsed = self.guard is not None and self.guard.check(success_rate)
        if collapsed:  # which also forgot Adam's moments
            self._num_steps.zero_()
        # Without a mixed group only the optimizer's momentum would move the weights.
        needless = not has_signal and not (self.cfg.kl_coef or self.cfg.entropy_coef)
        if not collapsed and not needless:
            self._learn(self._samples(rollout, advantage))
        here = self.policy.device
        return {
            **self.stats.report(),
            "success": success.to(here),
            "mixed": mixed.to(here),
            "collapsed": torch.tensor(float(collapsed), device=here),
            "learning_rate": self.optimizer.learning_rate.clone(),
            "skipped": self.stats.stop.clone(),
        }

    @torch.no_grad()
    def _episodes(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Return the return and the advantage of every episode, ``[E]`` each."""
        cfg = self.cfg
        returns = torch.where(batch[VALID], batch[REWARD], 0.0).sum(0).squeeze(-1)
        group = batch[GROUP][0].squeeze(-1)
        if cfg.baseline == "group":
            advantage = leave_one_out(returns, group)
        else:
            everyone, own = distributed.all_gather_rows(returns)
            advantage = leave_one_out(everyone, torch.zeros_like(everyone, dtype=group.dtype))[own]
        if cfg.normalize_advantage == "group":
            advantage = advantage / (group_std(returns, group) + 1e-6)
        elif cfg.normalize_advantage == "batch":
            everyone, own = distributed.all_gather_rows(advantage)
            if len(everyone) > 1:
                advantage = advantage / (everyone.std() + 1e-6)
        return returns, advantage

    @staticmethod
    def _success(batch: TensorDict, returns: Tensor) -> Tensor:
        """Share of episodes that succeeded: of all that were sampled where the batch says so, else of its own."""
        if SAMPLED_SUCCESS in batch:
            return torch.flatten(batch[SAMPLED_SUCCESS])[0].float()
        if (METRIC, "success") in batch:
            return torch.where(batch[VALID], batch[METRIC, "success"], 0.0).amax(0).mean()
        return (returns > 0).float().mean()

    @torch.no_grad()
    def _samples(self, batch: TensorDict, advantage: Tensor) -> TensorDict:
        """Gather the valid chunks ``[B]`` with the advantage of their episode."""
        rows = batch[VALID].squeeze(-1).nonzero(as_tuple=True)
        stored = (OBSERVATION, ACTION, SAMPLE_LOG_PROB, PRE_TANH, *self.policy.extra_keys)
        samples: TensorDict = batch.select(*stored, strict=False)[rows]
        samples[ADVANTAGE] = advantage[rows[1]].unsqueeze(-1)
        if (INFO, CONTROL_STEPS) in batch and isinstance(self.policy, VLAPolicy):
            # A chunk that reached the goal was cut there: what would have come after was never executed.
            samples[VALID_STEPS] = batch[INFO][CONTROL_STEPS][rows]
        if isinstance(self.loss, RLOOLoss):
            self._anchor(self.loss, samples, is_stale=POLICY_VERSION in batch)
        if self.reference is not None:
            reference = RLOOLoss(self.reference, self.cfg, replace(self.acceleration, compile=False))
            samples[REFERENCE_LOG_PROB] = self._log_probs(reference, samples)
        return samples

    def _anchor(self, loss: RLOOLoss, samples: TensorDict, *, is_stale: bool) -> None:
        """Compute log-probabilities again where they are not what the actor stored: the ratio must begin at 1.

        A sample that older weights collected counts as often as the policy now takes its chunk more often than those
        did, at most ``MAX_BEHAVIOUR_WEIGHT`` times. For a chunk that was cut this is the ratio of the whole chunk,
        whose probability is stored; that of the actions that were never executed has mean 1.
        """
        stored = samples[SAMPLE_LOG_PROB]
        if is_stale or self.acceleration.precision == "bf16":  # acting was more exact, and a chunk sums many roundings
            samples[SAMPLE_LOG_PROB] = self._log_probs(loss, samples.exclude(VALID_STEPS))
        if is_stale:
            samples[ADVANTAGE] *= (samples[SAMPLE_LOG_PROB] - stored).exp().clamp(max=MAX_BEHAVIOUR_WEIGHT)
        if VALID_STEPS in samples:
            chunked: Any = self.policy
            rows = (samples[VALID_STEPS] < chunked.chunk).squeeze(-1).nonzero().squeeze(-1)
            if len(rows):
                samples[SAMPLE_LOG_PROB][rows] = self._log_probs(loss, samples[rows])

    def _log_probs(self, loss: RLOOLoss, samples: TensorDict) -> Tensor:
        size, here = self.cfg.micro_batch_size or ROWS_WITHOUT_GRADIENT, self.policy.device
        parts = [loss.evaluate(dict(part.to(here).items()))[0] for part in samples.split(size)]
        return torch.cat(parts).to(samples[ADVANTAGE].device)

    def _learn(self, samples: TensorDict) -> None:
        """Run the epochs over flat samples ``[B]``."""
        cfg, count = self.cfg, samples.shape[0]
        wanted = cfg.num_minibatches if cfg.minibatch_size is None else math.ceil(count / cfg.minibatch_size)
        num_parts = distributed.all_reduce_max(min(wanted, count))
        self.policy.train()
        for _ in range(cfg.num_epochs):
            order = torch.randperm(count, device=samples[ADVANTAGE].device)
            for rows in order.tensor_split(num_parts):
                num_steps = self._num_steps + self.stats.num_taken
                warm = ((num_steps + 1.0) / max(1, cfg.warmup_steps)).clamp(max=1.0)
                self.optimizer.learning_rate.copy_(self._rate * warm)
                minibatch = dict(samples[rows].items())
                # This process may have fewer samples than others have minibatches.
                self.gradient_step(minibatch if len(rows) else None, weight=len(rows))
        self.policy.eval()
        self._num_steps += self.stats.num_taken

    def adjust_learning_rate(self, progress: float) -> None:
        """Follow the linear schedule."""
        if self.cfg.schedule == "linear":
            self._rate = self.cfg.learning_rate * (1.0 - progress)

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer, schedule, starting policy and what the guard against collapse remembers."""
        reference = {} if self.reference is None else self.reference.state_dict()
        return {
            "optimizer": self.optimizer.state_dict(),
            "reference": {name: value.clone() for name, value in reference.items()},
            "guard": {} if self.guard is None else self.guard.state_dict(),
            "num_steps": int(self._num_steps),
            "rate": self._rate,
            "config": asdict(self.cfg),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._num_steps.fill_(state["num_steps"])
        self._rate = state["rate"]
        if self.reference is not None and state["reference"]:
            self.reference.load_state_dict(state["reference"])
        if self.guard is not None and state["guard"]:
            self.guard.load_state_dict(state["guard"])


@torch.no_grad()
def explore_with(policy: Policy, init_std: float) -> None:
    """Set a standard deviation that imitation has left as it was; one that was learned stays."""
    for name, value in policy.named_parameters():
        if name.endswith("log_std") and value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            value.fill_(math.log(init_std))
