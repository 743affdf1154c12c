"""Behaviour cloning: the policy learns to do what demonstrations do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.algorithms.base import AlgorithmConfig, BaseAlgorithm, own_config
from apexrl.algorithms.gradient_step import GradientStep, Loss, UpdateStats
from apexrl.algorithms.optimizer import FlatAdam
from apexrl.algorithms.terms.imitation import imitation_loss, squared_error
from apexrl.core.errors import ConfigError
from apexrl.core.observations import leaves
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import ACTION, OBSERVATION
from apexrl.core.validation import Count, NonNegative, NonNegativeInteger, Positive, options
from apexrl.policies import ActorCritic, Policy
from apexrl.policies.networks.mlp import map_leaves
from apexrl.policies.networks.normalizer import RunningNormalizer
from apexrl.policies.vla import VALID_STEPS, VLAPolicy
from apexrl.policies.vla.lerobot import LeRobotPolicy


@options("algo")
class BCConfig(AlgorithmConfig):
    """Options of behaviour cloning."""

    name: str = "bc"
    """The algorithm."""
    num_updates: Count = 1500
    """Gradient steps of a fit. More fit the demonstrations better, too many overfit; usually 500 to 20,000."""
    batch_size: Count = 128
    """Samples of one gradient step, sampled with replacement. Larger is steadier but slower; usually 64 to 512."""
    micro_batch_size: Count | None = None
    """Samples of one forward and backward pass at most, whose gradients are summed; null takes all at once."""
    learning_rate: Positive = 1e-3
    """Adam's step size, at the start. Larger learns faster but may diverge; usually 1e-4 to 1e-3."""
    schedule: Literal["fixed", "linear"] = "fixed"
    """fixed, or linear: falls to 0 at the end of a fit."""
    weight_decay: NonNegative = 0.0
    """Share of a weight that is taken off at every step, times learning_rate."""
    state_noise: NonNegative = 0.0
    """Standard deviation of noise on the vectors of an observation, in their units; 0 adds none."""
    image_shift: NonNegativeInteger = 0
    """Pixels by which every image is moved at random, up to this many each way; 0 moves none."""
    loss: Literal["auto", "likelihood", "mse"] = "auto"
    """Of an mlp: minus the log-probability, or the squared error of its mode; auto is mse while learn_std is false. A
    vla has a loss of its own."""
    learn_std: bool = False
    """Let an mlp's standard deviation fit the demonstrations; false keeps it for exploration."""
    min_std: Positive = 0.1
    """Lower bound of the standard deviations that observations are normalised by, in their units: what stood still in
    a few demonstrations may move later."""
    min_action_std: Positive = 0.1
    """Lower bound of the standard deviations that a vla's actions are normalised by."""
    max_grad_norm: Positive = 10.0
    """Gradients are scaled down to this norm."""
    adam_eps: Positive = 1e-8
    """Adam's ε."""
    demo_reader = "algo.name bc"

    def __post_init__(self) -> None:
        if self.loss == "mse" and self.learn_std:
            raise ConfigError("algo.loss must not be mse while algo.learn_std is true, got mse.")

    def check_policy(self, policy: type[Policy]) -> None:
        """Raise when a loss is asked for that a policy with a loss of its own does not read."""
        for name, default in (("loss", "auto"), ("learn_std", False)):
            if policy.has_own_loss and getattr(self, name) != default:
                raise ConfigError(f"algo.{name} is for policy.kind mlp; a vla has its own loss. Leave it out.")


def randomly_moved(images: Tensor, most: int) -> Tensor:
    """Move each image (``[B, H, W, C]`` or ``[B, C, H, W]``) by up to ``most`` pixels; its border is replicated."""
    channels_last = images.shape[-1] < images.shape[1]
    upright = images if channels_last else images.permute(0, 2, 3, 1)
    count, here = len(images), images.device
    down, right = torch.randint(-most, most + 1, (2, count, 1), device=here)
    rows = (torch.arange(upright.shape[1], device=here) - down).clamp(0, upright.shape[1] - 1)
    columns = (torch.arange(upright.shape[2], device=here) - right).clamp(0, upright.shape[2] - 1)
    moved = upright[torch.arange(count, device=here)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return moved if channels_last else moved.permute(0, 3, 1, 2)


class BCLoss(Loss):
    """Minus the log-probability of demonstrated chunks, the squared error of the mode, or the policy's own loss."""

    def __init__(self, policy: Policy, cfg: BCConfig, acceleration: Acceleration) -> None:
        super().__init__(acceleration)
        self.policy, self.cfg = policy, cfg

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, tuple[()]]:
        """Return the mean loss of samples ``[B]``."""
        policy, cfg = self.policy, self.cfg
        if cfg.state_noise or cfg.image_shift:
            batch = {**batch, OBSERVATION: self._varied(batch[OBSERVATION])}
        by_error = cfg.loss == "mse" or (cfg.loss == "auto" and not cfg.learn_std)
        with self.acceleration.autocast(policy.device):
            if by_error and batch[ACTION].is_floating_point() and not hasattr(policy, "imitation_loss"):
                loss = squared_error(policy, batch).float().mean()
            else:
                loss = imitation_loss(policy, batch)
        return self.result(loss, (), batch, None)

    def _varied(self, obs: Tensor | TensorDict) -> Tensor | TensorDict:
        """Add noise to the vectors of observations, and move the images."""
        cfg, found = self.cfg, leaves(obs)
        images = [path for path, leaf in found.items() if leaf.dtype == torch.uint8 and leaf.ndim == 4]
        if cfg.image_shift and not images:
            raise ConfigError(
                f"algo.image_shift is {cfg.image_shift}, but the demonstrations hold no images, only "
                f"{', '.join(found)}; leave it out, or name cameras in task.cameras."
            )

        def vary(path: str, leaf: Tensor) -> Tensor:
            if leaf.is_floating_point() and cfg.state_noise:
                return leaf + cfg.state_noise * torch.randn_like(leaf)
            return randomly_moved(leaf, cfg.image_shift) if path in images and cfg.image_shift else leaf

        return map_leaves(obs, {path: partial(vary, path) for path in found})


class BC(BaseAlgorithm):
    """Behaviour cloning: supervised learning of the actions of demonstrations.

    Samples ``[B]`` hold ``observation``, ``action`` and, for action chunks, ``valid_steps``. It is not driven by
    rollouts: ``fit`` draws minibatches from demonstrations, ``update`` takes one. An mlp also learns the padding at the
    end of a demonstration, which repeats the last action; a vla leaves it out by ``valid_steps``.

    Args:
        policy: what learns; a critic that it may have is left alone.
        cfg: the options.
        acceleration: precision of the networks.
    """

    cfg: BCConfig
    config_class = BCConfig
    policies: ClassVar[Mapping[str, type[Policy]]] = {"vla": VLAPolicy, "mlp": ActorCritic}
    required_keys = frozenset({OBSERVATION, ACTION})
    on_policy = False
    learns_from = "demonstrations"

    def __init__(
        self, *, policy: Policy, cfg: BCConfig | None = None, acceleration: Acceleration | None = None
    ) -> None:
        cfg = own_config(cfg, BCConfig)
        super().__init__(policy, cfg, num_steps=1)
        self.acceleration = acceleration or Acceleration()
        trained = [(name, p) for name, p in policy.named_parameters() if not name.startswith("critic.")]
        if not cfg.learn_std:
            trained = [(name, p) for name, p in trained if not name.endswith("log_std")]
        self.optimizer = FlatAdam(
            trained, cfg.learning_rate, cfg.adam_eps, cfg.max_grad_norm, weight_decay=cfg.weight_decay
        )
        self.stats = UpdateStats(("loss", "grad_norm"), policy.device)
        loss = BCLoss(policy, cfg, self.acceleration)
        self.gradient_step = GradientStep(
            loss, self.optimizer, self.stats, micro_batch_size=cfg.micro_batch_size or sys.maxsize
        )

    def fit(
        self, demonstrations: TensorDict, steps: int | None = None, on_progress: Callable[[int], None] | None = None
    ) -> dict[str, float]:
        """Set the policy's statistics from demonstrations, then learn from them.

        Args:
            demonstrations: samples ``[B]``, as ``load_demos`` returns them.
            steps: gradient steps; ``num_updates`` when None.
            on_progress: called with the number of steps done, about a hundred times.

        Returns:
            Means over the last tenth of the steps.
        """
        self.check_batch(demonstrations)
        count, steps = demonstrations.shape[0], self.cfg.num_updates if steps is None else steps
        if count < 1:
            raise ConfigError("BC.fit got no demonstrations; record some first.")
        self.set_statistics(demonstrations)
        samples = demonstrations.select(OBSERVATION, ACTION, VALID_STEPS, strict=False)
        often = max(1, steps // 100)
        self.stats.reset()
        self.policy.train()
        for step in range(steps):
            self.adjust_learning_rate(step / steps)
            if step == steps - max(1, steps // 10):
                self.stats.sums.zero_()
            rows = torch.randint(count, (self.cfg.batch_size,), device=samples[ACTION].device)
            self.gradient_step(dict(samples[rows].items()))
            if on_progress is not None and ((step + 1) % often == 0 or step + 1 == steps):
                on_progress(step + 1)
        self.policy.eval()
        metrics = {name: value.item() for name, value in self._metrics().items()}
        if metrics["nonfinite"] > 0:
            self.raise_diverged(demonstrations.unsqueeze(-1))
        return metrics

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Take one gradient step on samples of any leading dimensions."""
        self.check_batch(rollout)
        self.stats.reset()
        self.policy.train()
        self.gradient_step(dict(rollout.select(OBSERVATION, ACTION, VALID_STEPS, strict=False).reshape(-1).items()))
        self.policy.eval()
        return self._metrics()

    def _metrics(self) -> dict[str, Tensor]:
        return {**self.stats.report(), "learning_rate": self.optimizer.learning_rate.clone()}

    def remember(self, demonstrations: TensorDict, *, is_new: bool = True) -> None:
        """Normalise by the statistics of demonstrations; networks that were trained expect those of their training."""
        if is_new:
            self.set_statistics(demonstrations)

    @torch.no_grad()
    def set_statistics(self, demonstrations: TensorDict) -> None:
        """Let the policy normalise by the mean and standard deviation of demonstrations."""
        policy, obs, here = self.policy, demonstrations[OBSERVATION], self.policy.device
        if isinstance(policy, VLAPolicy | LeRobotPolicy):
            found = leaves(obs)
            vectors = [found[path].flatten(1).float() for path in policy.vectors]
            state = torch.cat(vectors, -1) if vectors else torch.zeros(len(demonstrations), 0)
            action = demonstrations[ACTION].unflatten(-1, (policy.chunk, -1))
            if VALID_STEPS in demonstrations:  # without the padding at the end of a demonstration
                action = action[torch.arange(policy.chunk) < demonstrations[VALID_STEPS].cpu()]
            action = action.reshape(-1, action.shape[-1])
            statistics = []
            for values, least in ((state, self.cfg.min_std), (action, self.cfg.min_action_std)):
                statistics += [values.mean(0).to(here), values.std(0, unbiased=False).clamp_min(least).to(here)]
            policy.set_statistics(*statistics, min_std=0.0)
        elif policy.normalizer is not None:
            modules = [module for module in policy.normalizer.modules() if isinstance(module, RunningNormalizer)]
            for module in modules:
                module.count.zero_()  # the mean and variance before then count nothing
            policy.normalizer.update(obs.to(here))
            for module in modules:
                module.var.clamp_(min=self.cfg.min_std**2)

    def adjust_learning_rate(self, progress: float) -> None:
        """Follow the linear schedule."""
        if self.cfg.schedule == "linear":
            self.optimizer.learning_rate.fill_(self.cfg.learning_rate * (1.0 - progress))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer."""
        return {"optimizer": self.optimizer.state_dict(), "config": asdict(self.cfg)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
