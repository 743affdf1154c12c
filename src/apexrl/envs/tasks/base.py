"""The common part of the tensor-native tasks: stepping, resetting in place, saving and rendering."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apexrl.core.errors import EnvError, EnvStateError
from apexrl.core.metrics import MetricSpec
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import EnvStep, Observation
from apexrl.envs.base import VecEnv
from apexrl.envs.options import check_count
from apexrl.envs.tasks.canvas import Canvas


class Transition(NamedTuple):
    """What the dynamics of a task return for one step, before any reset."""

    state: Tensor
    """``[N, S]`` the successor, in a tensor of its own."""
    reward: Tensor
    """``[N, 1]`` float32."""
    terminated: Tensor
    """``[N, 1]`` bool."""
    metric: dict[str, Tensor]
    """``[N, 1]`` float32 for each of the task's metrics."""


class TensorTask(VecEnv):
    """N copies of a task whose whole state is one tensor ``[N, S]`` on any device.

    A step runs a fixed sequence of fixed-shape operations: fresh states are drawn for all N and selected
    where an episode ended. All random numbers are drawn by ``_draw`` and ``_draw_noise``; the rest of a step can be
    compiled. ``state`` and ``elapsed`` keep their storage and everything that is returned is a
    new tensor, so a step can be captured as a CUDA graph (register ``generator`` with the graph).

    A subclass sets its spaces and ``max_episode_steps`` before it calls this constructor.

    Args:
        num_envs: N.
        device: where the state lives and actions are expected.
        options: the subclass's own options, with which ``spawn`` makes another one.
    """

    state_size: ClassVar[int]
    dt: ClassVar[float | None] = None
    """Simulated seconds of a step; None for a task without time."""
    metrics: ClassVar[tuple[MetricSpec, ...]] = ()
    metric_specs: Mapping[str, MetricSpec] = {}
    """``metrics`` by name."""
    capturable = True
    max_episode_steps: int

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", **options: Any) -> None:
        check_count(f"{type(self).__name__}.num_envs", num_envs)
        check_count(f"{type(self).__name__}.max_episode_steps", self.max_episode_steps)
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.state = torch.zeros(num_envs, self.state_size, device=self.device)
        self.elapsed = torch.zeros(num_envs, 1, dtype=torch.int64, device=self.device)
        self.generator = torch.Generator(self.device)
        self.generators = (self.generator,)
        # Two tasks differ from each other, yet both follow from torch.manual_seed.
        self.generator.manual_seed(int(torch.randint(2**62, ())))
        self._options = options
        self._transition: Callable[..., Any] = self._eager_transition
        self.metric_specs = {spec.name: spec for spec in self.metrics}
        size = gym.spaces.flatdim(self.action_space) if isinstance(self.action_space, gym.spaces.Box) else 1
        self._action_shape = (num_envs, size)

    @abstractmethod
    def _draw(self) -> Tensor:
        """Draw a first state of an episode for each environment, ``[N, S]``."""

    def _draw_noise(self) -> tuple[Tensor, ...]:
        """Draw the random numbers of one step, ``[N, ...]`` each; ``_advance`` receives them after the action."""
        return ()

    @abstractmethod
    def _advance(self, state: Tensor, action: Tensor, *noise: Any, **_: Any) -> Transition:
        """Move ``state [N, S]`` on by one ``action [N, A]`` without changing it; ``noise`` is from ``_draw_noise``."""

    @abstractmethod
    def _observe(self, state: Tensor) -> Any:
        """Return what is seen in ``state``: ``[N, O]``, or named groups of that; parts of the state will do."""

    @abstractmethod
    def _render(self, canvas: Canvas, state: list[float]) -> None:
        """Render one environment's state."""

    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere; a seed makes everything that follows repeatable."""
        if seed is not None:
            self.generator.manual_seed(seed)
        fresh = self._draw()
        self.state.copy_(fresh)
        self.elapsed.zero_()
        obs: Observation = self._observe(fresh)
        return obs

    def step(self, action: Tensor) -> EnvStep:
        """Apply the actions ``[N, A]``; ``final_obs`` is the true successor of every row."""
        if action.shape != self._action_shape:
            needed, name = list(self._action_shape), type(self).__name__
            raise EnvError(f"{name} needs actions of shape {needed}, got {list(action.shape)}.")
        drawn = self._draw(), *self._draw_noise()
        state, elapsed, step = self._transition(self.state, self.elapsed, action.detach(), *drawn)
        self.state.copy_(state)
        self.elapsed.copy_(elapsed)
        return EnvStep(*step)

    def _eager_transition(
        self, state: Tensor, elapsed: Tensor, action: Tensor, fresh: Tensor, *noise: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """Return the next state, the steps taken in its episode, and the fields of an ``EnvStep``; changes nothing."""
        successor, reward, terminated, metric = self._advance(state, action, *noise)
        elapsed = elapsed + 1
        truncated = (elapsed >= self.max_episode_steps) & ~terminated
        done = terminated | truncated
        current = torch.where(done, fresh, successor)
        step = (self._observe(current), reward, terminated, truncated, self._observe(successor), metric)
        return current, elapsed.masked_fill(done, 0), step

    def accelerate(self, acceleration: Acceleration) -> None:
        """Compile the transition, when asked for."""
        self._transition = acceleration.wrap(self._eager_transition, self.device)

    def spawn(self, num_envs: int) -> Self:
        """Make an independent task with the same options."""
        return type(self)(num_envs, self.device, **self._options)

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state of the episodes and of the random generator as tensors."""
        parts = {"state": self.state, "elapsed": self.elapsed, "generator": self.generator.get_state()}
        return {name: tensor.clone() for name, tensor in parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state from ``state_dict``; nothing changes when it does not fit."""
        for name, ours in self.state_dict().items():
            saved = state.get(name)
            if not isinstance(saved, Tensor) or saved.shape != ours.shape or saved.dtype != ours.dtype:
                found = f"{saved.dtype} {list(saved.shape)}" if isinstance(saved, Tensor) else repr(saved)
                raise EnvStateError(
                    f"{type(self).__name__} needs {name!r} as {ours.dtype} {list(ours.shape)}, the saved state has "
                    f"{found}. Restore with the same num_envs, options and kind of device."
                )
        self.generator.set_state(state["generator"].cpu())
        self.state.copy_(state["state"])
        self.elapsed.copy_(state["elapsed"])

    def step_time(self) -> tuple[float | None, float | None]:
        """Return ``dt``."""
        return self.dt, None

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Render environment ``index`` as a ``[300, 400, 3]`` image."""
        if not 0 <= index < self.num_envs:
            raise EnvError(f"{type(self).__name__} has environments 0 to {self.num_envs - 1}, not {index}.")
        canvas = Canvas()
        self._render(canvas, self.state[index].tolist())
        canvas.caption(f"step {int(self.elapsed[index])} / {self.max_episode_steps}")
        return canvas.pixels()
