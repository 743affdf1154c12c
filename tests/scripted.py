"""An environment whose every number can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from apexrl.algorithms.optimizer import FlatAdam
from apexrl.core.metrics import MetricSpec
from apexrl.core.types import EnvStep
from apexrl.envs import VecEnv


class ScriptedEnv(VecEnv):
    """Environment n counts its steps: observation ``[100 n + t, episodes so far]``, reward ``t + 1``.

    Its episodes last ``lengths[n]`` steps and end by ``truncated`` where that is true, else by ``terminated``. Like a
    simulator, it writes every observation into the same buffer.
    """

    def __init__(self, lengths: list[int], truncates: list[bool], gives_final_obs: bool = True) -> None:
        self.num_envs, self.device = len(lengths), torch.device("cpu")
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (2,))
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,))
        self.lengths, self.truncates = torch.tensor(lengths), torch.tensor(truncates)
        self.gives_final_obs = gives_final_obs
        self.buffer = torch.zeros(self.num_envs, 2)
        self.time = torch.zeros(self.num_envs, dtype=torch.long)
        self.episode = torch.zeros(self.num_envs, dtype=torch.long)
        self.actions: list[Tensor] = []

    @property
    def metric_specs(self) -> Mapping[str, MetricSpec]:
        return {"success": MetricSpec("success"), "odd": MetricSpec("odd", "sum")}

    def reset(self, seed: int | None = None) -> Tensor:
        self.time.zero_()
        self.episode.zero_()
        return self._observe()

    def step(self, action: Tensor) -> EnvStep:
        self.actions.append(action.clone())
        self.time += 1
        done = self.time >= self.lengths
        reward = self.time.float().unsqueeze(-1)
        final = self._observe().clone() if done.any() and self.gives_final_obs else None
        odd = (self.time % 2).float()
        odd[done] = torch.nan
        success = (self.time == 2).float()
        self.time[done] = 0
        self.episode[done] += 1
        return EnvStep(
            obs=self._observe(),
            reward=reward,
            terminated=(done & ~self.truncates).unsqueeze(-1),
            truncated=(done & self.truncates).unsqueeze(-1),
            final_obs=final,
            metric={"success": success.unsqueeze(-1), "odd": odd.unsqueeze(-1)},
            log={"height": reward.mean()},
        )

    def spawn(self, num_envs: int) -> ScriptedEnv:
        lengths, truncates = self.lengths.tolist(), self.truncates.tolist()
        return ScriptedEnv(
            [lengths[i % len(lengths)] for i in range(num_envs)], [truncates[i % len(lengths)] for i in range(num_envs)]
        )

    def state_dict(self) -> dict[str, Any]:
        return {"time": self.time.clone(), "episode": self.episode.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.time.copy_(state["time"])
        self.episode.copy_(state["episode"])
        self._observe()

    def _observe(self) -> Tensor:
        self.buffer[:, 0] = 100.0 * torch.arange(self.num_envs) + self.time
        self.buffer[:, 1] = self.episode.float()
        return self.buffer


def flat_gradient(optimizer: FlatAdam, loss: Tensor) -> Tensor:
    """The gradient of a loss, as an optimizer's step takes it."""
    gradients = torch.autograd.grad(loss, list(optimizer.parameters.values()), materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])
