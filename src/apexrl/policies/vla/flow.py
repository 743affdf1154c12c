"""The flow head: chunks are denoised by a learned velocity field, exactly or with noise in every step.

Noise ε and chunk a are joined by the straight line x_t = (1 − t) ε + t a, with velocity a − ε. The field v(x, t) is
trained to that velocity; the ordinary equation dx = v dt then carries noise at t = 0 to chunks at t = 1.

The stochastic sampler follows (arXiv 2505.05470, 2510.25889)

dx = (v + ½ g² ∇log p_t) dt + g dW,   ∇log p_t(x) = −(x − t v) / (1 − t),   g² = η² (1 − t),

which has the same marginals p_t for every noise level η. With this g the drift is v − ½ η² (x − t v), without a
singularity, and an Euler step of length h from t is Gaussian with known mean and a standard deviation above zero:

x' ~ N(x + h (v − ½ η² (x − t v)),  η² (1 − t) h)

so that a whole path has a likelihood: log π = Σ_k log N(x_{k+1}; mean_k, std_k), given its first noise.

Or only the last step is noisy: a ~ N(F(ε), η²), F the end of the ordinary equation that starts at the first noise ε.
Given ε, whose density does not depend on the weights, ratio and divergence are exact, and gradients pass through all
steps. What is explored is then what the probability is of, while noise in an earlier step is mostly undone by the steps
that follow and is only noise in the gradient.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from apexrl.core.errors import ConfigError
from apexrl.policies.networks import DiagGaussian
from apexrl.policies.vla.model import ActionExpert, Prefix

UNCONDITIONAL, CONDITIONAL = 0, 1
NoiseKind = Literal["every_step", "last_step"]


def sde_step(x: Tensor, velocity: Tensor, time: Tensor, length: float, noise_level: float) -> DiagGaussian:
    """Return the distribution of what follows points ``[..., D]`` at times ``[..., 1]`` in [0, 1); the level is η."""
    mean = x + length * (velocity - 0.5 * noise_level**2 * (x - time * velocity))
    log_std = 0.5 * torch.log((1.0 - time) * length) + math.log(noise_level)
    return DiagGaussian(mean, log_std)


class FlowHead(nn.Module):
    """Embeds noisy chunks, their time and their condition for the expert, and samples.

    Args:
        expert_width: E.
        num_actions: A, numbers of one action.
        denoising_steps: K.
        noise: every_step, the stochastic equation, or last_step, a Gaussian around the end of the ordinary one.
        noise_level: η.
        guidance: scale s of classifier-free guidance; 1 is the conditional field alone.
        condition_dropout: share of demonstrations that train the unconditional branch.
    """

    times: Tensor
    frequencies: Tensor

    def __init__(
        self,
        expert_width: int,
        num_actions: int,
        *,
        denoising_steps: int = 5,
        noise: NoiseKind = "every_step",
        noise_level: float = 0.5,
        guidance: float = 1.0,
        condition_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        for name, value, ok, rule in (
            ("noise", noise, noise in get_args(NoiseKind), "be every_step or last_step"),
            ("denoising_steps", denoising_steps, denoising_steps >= 1, "be at least 1"),
            ("noise_level", noise_level, 0.0 < noise_level < math.inf, "be above 0"),
            ("guidance", guidance, 0.0 <= guidance < math.inf, "be at least 0"),
            ("condition_dropout", condition_dropout, 0.0 <= condition_dropout <= 1.0, "lie in [0, 1]"),
        ):
            if not ok:
                raise ConfigError(f"policy.{name} must {rule}, got {value!r}.")
        self.steps, self.noise, self.noise_level, self.guidance = denoising_steps, noise, noise_level, guidance
        self.num_noisy = denoising_steps if noise == "every_step" else 1
        """Steps in which noise is added."""
        self.condition_dropout = condition_dropout
        self.action = nn.Linear(num_actions, expert_width)
        self.time = nn.Sequential(
            nn.Linear(expert_width, expert_width), nn.SiLU(), nn.Linear(expert_width, expert_width)
        )
        self.condition = nn.Embedding(2, expert_width)
        nn.init.normal_(self.condition.weight, std=0.5)
        periods = torch.logspace(math.log10(4e-3), math.log10(4.0), expert_width // 2)
        self.register_buffer("frequencies", 2.0 * math.pi / periods, persistent=False)
        self.register_buffer("times", torch.arange(denoising_steps) / denoising_steps, persistent=False)

    def tokens(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Embed points ``[B, S, C * A]`` at times and conditions that broadcast to ``[B, S]``; ``[B, S, C, E]``."""
        angle = time.unsqueeze(-1) * self.frequencies
        embedded = self.time(torch.cat((angle.sin(), angle.cos()), -1)) + self.condition(condition)
        tokens: Tensor = self.action(x.unflatten(-1, (-1, self.action.in_features))) + embedded.unsqueeze(-2)
        return tokens

    def branch(self, expert: ActionExpert, prefix: Prefix, x: Tensor, time: Tensor, condition: int) -> Tensor:
        """Return one branch's field ``[B, S, C * A]`` at times ``[S]`` or ``[B, S]``."""
        index = torch.full((1, 1), condition, device=x.device)
        field: Tensor = expert(prefix, self.tokens(x, time, index)).float()
        return field

    def field(self, expert: ActionExpert, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Return the guided field v = v_u + s (v_c − v_u); s = 1 is v_c itself, s = 0 is v_u."""
        if self.guidance in (0.0, 1.0):
            return self.branch(expert, prefix, x, time, CONDITIONAL if self.guidance else UNCONDITIONAL)
        conditional = self.branch(expert, prefix, x, time, CONDITIONAL)
        unconditional = self.branch(expert, prefix, x, time, UNCONDITIONAL)
        return unconditional + self.guidance * (conditional - unconditional)

    def sample(self, expert: ActionExpert, prefix: Prefix, *, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Return paths to normalised chunks and their log-probabilities ``[B, 1]``.

        A path is ``[B, num_noisy + 1, C * A]``: the first noise, then every point that has a density. A deterministic
        one also begins at drawn noise, because the middle of it may lie between modes, and follows the ordinary
        equation.
        """
        x = torch.randn(prefix.keys[0].shape[0], 1, expert.chunk * expert.num_actions, device=self.times.device)
        path, log_prob = [x], torch.zeros_like(x[..., :1])
        for time in self.times.split(1)[-self.num_noisy :]:
            step, end = self._step(expert, prefix, x, time)
            x = end if deterministic else step.sample()
            log_prob = log_prob + step.log_prob(x)
            path.append(x)
        return torch.cat(path, 1), log_prob.squeeze(1)

    def evaluate(self, expert: ActionExpert, prefix: Prefix, path: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy ``[B, 1]`` of paths that ``sample`` returned, all noisy steps at once.

        The mask ``[B, C * A]`` is 0 for actions that were never executed. They count up to the last step, where they
        still move the others.
        """
        steps, _ = self._step(expert, prefix, path[:, :-1], self.times[-self.num_noisy :])
        elements = steps.elements(path[:, 1:])
        log_prob = elements[:, :-1].sum((1, 2)) + (elements[:, -1] * mask).sum(-1)
        return log_prob.unsqueeze(-1), steps.entropy().sum(1)

    def _step(self, expert: ActionExpert, prefix: Prefix, x: Tensor, time: Tensor) -> tuple[DiagGaussian, Tensor]:
        """Return the distributions of what follows points ``[B, S, C * A]`` at times ``[S]``, and it without noise.

        With ``every_step`` that is the next point; with ``last_step`` the points are the first noise, and what follows
        is the chunk.
        """
        if self.noise == "every_step":
            velocity = self.field(expert, prefix, x, time)
            step = sde_step(x, velocity, time.unsqueeze(-1), 1.0 / self.steps, self.noise_level)
            return step, x + velocity / self.steps
        for each in self.times.split(1):
            x = x + self.field(expert, prefix, x, each) / self.steps
        return DiagGaussian(x, torch.full_like(x[:1, :1, :1], math.log(self.noise_level))), x

    def interpolate(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw noise and time; returns points ``[B, 1, D]``, times ``[B, 1]`` and the velocity to learn."""
        noise = torch.randn_like(action)
        time = torch.rand(action.shape[0], 1, device=action.device)
        point = (1.0 - time) * noise + time * action
        return point.unsqueeze(1), time, action - noise

    def imitation_loss(self, expert: ActionExpert, prefix: Prefix, action: Tensor, mask: Tensor) -> Tensor:
        """Mean squared error of the field ``[B]``; some samples train the unconditional branch, so that guidance works.

        L = ‖v(x_t, t) − (a − ε)‖² / D
        """
        point, time, target = self.interpolate(action)
        keep = torch.rand(action.shape[0], 1, device=action.device) >= self.condition_dropout
        field = expert(prefix, self.tokens(point, time, keep.long())).float()
        return masked_mean_square(field.squeeze(1) - target, mask)


def masked_mean_square(error: Tensor, mask: Tensor) -> Tensor:
    """Mean of the squares ``[B]`` over the dimensions that the mask ``[B, D]`` keeps; 0 where it keeps none."""
    return (error.square() * mask).sum(-1) / mask.sum(-1).clamp_min(1.0)
