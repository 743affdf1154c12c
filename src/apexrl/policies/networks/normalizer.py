"""Running statistics. They belong to the policy, are saved with it, and change only when ``update`` is called."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from apexrl.core.functional import discounted_sum
from apexrl.core.observations import is_image, leaf_spaces, leaves
from apexrl.core.system import distributed
from apexrl.core.types import Observation
from apexrl.policies.networks.mlp import map_leaves


class RunningNormalizer(nn.Module):
    """Shifts and scales to running mean 0 and standard deviation 1, then clips.

    Merging a batch (mean m, variance v, n samples) into (M, V, C) with δ = m − M:
    M ← M + δ n / (C + n),  V ← (C V + n v + δ² C n / (C + n)) / (C + n).
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.clip, self.eps = clip, eps
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., *shape]`` with the statistics as they are."""
        mean = self.mean.to(x.dtype)
        scale = (self.var + self.eps).rsqrt().to(x.dtype)
        return ((x - mean) * scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: Tensor, apply: Tensor | None = None) -> None:
        """Merge samples ``[..., *shape]`` of all processes; where ``apply`` (a 0-d bool) is false nothing changes."""
        x = x.reshape(-1, *self.mean.shape).double()
        n, mean, var = distributed.merged_moments(len(x), x.mean(0), x.var(0, unbiased=False))
        total = self.count + n
        delta = mean - self.mean
        new = {
            "mean": self.mean + delta * (n / total),
            "var": (self.count * self.var + n * var + delta.square() * (self.count * n / total)) / total,
            "count": total,
        }
        for name, value in new.items():
            buffer = getattr(self, name)
            buffer.copy_(value if apply is None else torch.where(apply, value, buffer))


class ObservationNormalizer(nn.Module):
    """A running normaliser for every vector in an observation; images and bytes pass through."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__()
        spaces = leaf_spaces(observation_space)
        self.normalizers = nn.ModuleDict(
            {
                path.replace(".", "/"): RunningNormalizer(box.shape)
                for path, box in spaces.items()
                if not is_image(box) and box.dtype != np.uint8
            }
        )

    def forward(self, obs: Observation) -> Observation:
        """Normalise each vector."""
        return map_leaves(obs, {name.replace("/", "."): module for name, module in self.normalizers.items()})

    def has_seen(self) -> bool:
        """Whether every vector has statistics; reads them back from the device."""
        return all(bool(normalizer.get_buffer("count") > 0) for normalizer in self.normalizers.values())

    def update(self, obs: Observation, apply: Tensor | None = None) -> None:
        """Merge the observations of a batch."""
        for path, leaf in leaves(obs).items():
            name = path.replace(".", "/")
            if name in self.normalizers:
                normalizer = self.normalizers[name]
                assert isinstance(normalizer, RunningNormalizer)
                normalizer.update(leaf, apply)


class RewardScaler(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return.

    R_t = r_t + γ (1 − done_{t−1}) R_{t−1}; the scaled reward is clamp(r_t / std(R_0 … R_t), ±clip): each step knows the
    returns up to its own, as if the statistics moved with every step of the environments. Only the steps of the first
    batch, before which there is nothing, know all of its returns.
    """

    running: Tensor

    def __init__(self, gamma: float, clip: float = 10.0) -> None:
        super().__init__()
        self.gamma, self.clip = gamma, clip
        self.statistics = RunningNormalizer(())
        self.register_buffer("running", torch.zeros(0))

    @torch.no_grad()
    def forward(self, reward: Tensor, done: Tensor) -> Tensor:
        """Merge the returns of a batch ``[T, N, 1]`` into the statistics step by step, and scale its rewards."""
        if self.running.shape != reward.shape[1:]:
            self.running = torch.zeros_like(reward[0])  # kept in place from here on, for captured graphs
        # The same recursion as GAE's, run forwards: flip time, and let the last done cut the step after it.
        alive = (~done).to(reward.dtype)
        decay = self.gamma * torch.cat((torch.ones_like(alive[:1]), alive[:-1]))
        start = torch.cat((reward[:1] + decay[:1] * self.running, reward[1:]))
        returns = discounted_sum(start.flip(0), decay.flip(0)).flip(0)
        self.running.copy_(returns[-1] * alive[-1])
        scale = (self._variances(returns) + 1e-8).rsqrt().to(reward.dtype)
        return (reward * scale.view(-1, 1, 1)).clamp(-self.clip, self.clip)

    def _variances(self, returns: Tensor) -> Tensor:
        """Merge ``[T, N, 1]`` returns of all processes; give the variance ``[T]`` that each step knows.

        With S1 and S2 the sums so far of δ = R − M and of δ², for statistics (M, V, C) before and n samples since:
        V_t = (C V + S2) / (C + n) − (S1 / (C + n))².
        """
        returns, statistics = returns.flatten(1).double(), self.statistics
        n, mean, var = distributed.merged_moments(returns.shape[1], returns.mean(1), returns.var(1, unbiased=False))
        delta = mean - statistics.mean
        total = statistics.count + n * torch.arange(1, len(returns) + 1, device=returns.device)
        shift = (n * delta).cumsum(0) / total
        spread = (n * (var + delta.square())).cumsum(0)
        variance = ((statistics.count * statistics.var + spread) / total - shift.square()).clamp(min=0.0)
        variance = torch.where(statistics.count > 0, variance, variance[-1])
        statistics.mean.add_(shift[-1])
        statistics.var.copy_(variance[-1])
        statistics.count.copy_(total[-1])
        return variance
