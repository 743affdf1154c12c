"""The environment contract: N environments stepped together on one device."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.errors import EnvError, EnvStateError
from apexrl.core.metrics import MetricSpec
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import ACTION, DONE, OBSERVATION, REWARD, TERMINATED, TRUNCATED, Carry, EnvStep, Observation
from apexrl.envs.suites.base import EpisodeNumber, InitState, StateEpisode, TaskSuite

T = TypeVar("T")
EpisodeStart: TypeAlias = int | InitState
"""Where one episode starts: a seed, or the initial state of a suite."""


class SeedEpisode(NamedTuple):
    """An episode of an ordinary task, as a manifest names it."""

    seed: EpisodeNumber


@dataclass
class RunningEpisodes:
    """The episodes that run in an environment, which its next step continues, whoever takes it."""

    carry: Carry
    """In memory of its own, because it is updated in place."""
    unfinished: dict[str, Tensor]
    """``[N]`` what ``EpisodeMetrics`` has of these episodes so far."""
    handed_out: Observation | None = None
    """The observation that a caller got, to give it back for the next step."""

    def advance(self, carry: Carry) -> None:
        """Continue from this carry, in the same memory."""
        for name, value in carry.items():
            self.carry[name].copy_(value)


def _forgets(step: Callable[..., EnvStep]) -> Callable[..., EnvStep]:
    """Let a step forget the running episodes; whoever took it, and can continue them, says so afterwards."""

    @functools.wraps(step)
    def step_and_forget(self: VecEnv, *args: Any, **kwargs: Any) -> EnvStep:
        self.running = None
        taken = step(self, *args, **kwargs)
        if not isinstance(taken.obs, dict):
            return taken
        return taken._replace(obs=_grouped(taken.obs, self), final_obs=_grouped(taken.final_obs, self))

    return step_and_forget


def _ends_episodes(reset: Callable[..., Observation]) -> Callable[..., Observation]:
    """Let a method that resets forget the running episodes, so that nobody continues them."""

    @functools.wraps(reset)
    def reset_and_forget(self: VecEnv, *args: Any, **kwargs: Any) -> Observation:
        if self.can_reset:
            self.running = None
        return _grouped(reset(self, *args, **kwargs), self)

    return reset_and_forget


def _grouped(obs: T, env: VecEnv) -> T | TensorDict:
    """Take the groups of an observation as a plain dictionary, too."""
    return TensorDict(obs, batch_size=[env.num_envs], device=env.device) if isinstance(obs, dict) else obs


def choose(condition: Tensor, where_true: Any, where_false: Any) -> Any:
    """Take rows of one observation where a condition ``[...]`` holds, and of another elsewhere."""
    tensors = [isinstance(where_true, Tensor), isinstance(where_false, Tensor)]
    if all(tensors) and where_true.shape == where_false.shape:
        mask = condition.view(*condition.shape, *[1] * (where_true.ndim - condition.ndim))
        return torch.where(mask, where_true, where_false)
    # torch.where would spread one group, or one number, over all of the others.
    if any(tensors) or set(where_true.keys()) != set(where_false.keys()):
        raise EnvError(
            "final_obs must have the groups and shapes of the observation: "
            f"it is {_layout(where_true)}, the observation {_layout(where_false)}."
        )
    chosen = {key: choose(condition, value, where_false[key]) for key, value in where_true.items()}
    return TensorDict(chosen, batch_size=where_true.batch_size)


def _layout(obs: Any) -> str:
    return str(list(obs.shape)) if isinstance(obs, Tensor) else f"groups {sorted(obs.keys())}"


class VecEnv(ABC):
    """N environments stepped together on one device.

    The rules, each of which ``check_env`` verifies:

    - ``reset`` returns the observation ``[N, ...]``: a tensor, or a dictionary of groups, of which callers get a
      ``TensorDict``; ``step`` takes actions ``[N, A]`` and returns an ``EnvStep``.
    - An episode that ends is reset in the same step: ``obs`` is then the first observation of the next episode
      and ``final_obs`` the last one of the ended episode.
    - ``terminated`` and ``truncated`` are told apart and never both true.
    - Buffers may be reused between steps; whoever keeps an observation copies it.
    """

    num_envs: int
    device: torch.device
    observation_space: gym.Space[Any]
    """Of one environment: a Box, or a Dict of Boxes (nested Dicts are fine)."""
    action_space: gym.Space[Any]
    """Of one environment: Box, Discrete, MultiDiscrete or MultiBinary."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated; None when it is not known."""
    chunk: int = 1
    """Control steps that one action holds, one after another."""
    capturable: bool = False
    """True when ``step`` only runs fixed-shape tensor operations on ``device``, without reading a value back, and
    reports the same metrics at every step."""
    generators: Sequence[torch.Generator] = ()
    """Random generators that a capturable ``step`` draws from."""
    gives_final_obs: bool = True
    """False when the simulator hides the successor of an ended episode; the user is then warned once."""
    can_reset: bool = True
    """False when ``reset`` starts no new episodes, but returns the current observation of the running ones."""
    running: RunningEpisodes | None = None
    """The running episodes, set by whoever stepped last; None after a reset, and when they are not known."""
    own_seeds: bool = False
    """True when ``reset_each`` takes more seeds than one: no environment notices which others run beside it."""
    episode_type: type[SeedEpisode] | type[StateEpisode] = SeedEpisode
    """How manifests name its episodes."""
    can_spawn: bool = True
    """False when it is known that ``spawn`` cannot make others in this process."""

    made_from: Mapping[str, Any] | None = None
    """What ``make_env`` created it from: ``id``, ``kwargs`` and ``metrics``; None where it was created otherwise."""
    suite: TaskSuite | None = None
    """Where the episodes are those of a task suite."""
    task_names: Sequence[str] = ()
    """When there are several tasks; ``EnvStep.info`` then has the number of each as ``task_id``."""
    video_fps: float = 30.0
    """Frames per second of a video with one frame per step."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("reset", "reset_each"):
            if name in vars(cls):
                setattr(cls, name, _ends_episodes(vars(cls)[name]))
        if "step" in vars(cls):
            cls.step = _forgets(vars(cls)["step"])  # type: ignore[method-assign]

    @property
    def num_distinct_episodes(self) -> int | None:
        """How many different episodes there are, where every reset goes through the same list; None for no end."""
        return None

    @property
    def metric_specs(self) -> Mapping[str, MetricSpec]:
        """The metrics that ``EnvStep.metric`` may hold, by name."""
        return {}

    @abstractmethod
    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere. A seed makes everything that follows repeatable.

        No two environments share a random stream, of one seed or of two: ``spawn_seeds(seed, N)`` gives N seeds, where
        ``seed + i`` would give environment ``i + 1`` of a seed that of environment ``i`` of the next.
        """

    def reset_each(self, seeds: Sequence[int]) -> Observation:
        """Start a new episode everywhere, environment ``i`` from ``seeds[i]``.

        The same seed and actions give the same numbers to the last bit, in any environment and beside any others. That
        is so for one environment; environments that keep it for more say so by ``own_seeds``.
        """
        assert len(seeds) == 1
        return self.reset(seed=seeds[0])

    def independent(self) -> VecEnv:
        """Return environments whose episodes depend on their starts alone: these, or a new one that runs alone.

        A generator that N environments share gives each of them other numbers when N changes, and nothing promises that
        a row of a tensor operation comes out the same to the last bit when there are more rows.

        Raises:
            EnvError: when there is none.
        """
        if self.own_seeds:
            return self
        alone = self.spawn(1)
        if alone.num_envs != 1:
            alone.close()
            raise EnvError(
                f"{type(self).__name__} always has {alone.num_envs} environments and cannot start one alone from a "
                "seed of its own. Evaluate it with a number of episodes instead of a manifest."
            )
        return alone

    def start_episodes(self, starts: Sequence[Any]) -> tuple[Observation, Sequence[int]]:
        """Start an episode from each of at most N starts.

        Returns:
            The observation, and for each environment the index of its start; -1 for an episode that does not count.
        """
        order = [*range(len(starts)), *[-1] * (self.num_envs - len(starts))]
        return self.reset_each([starts[index] for index in order]), order

    def sample_episodes(self, count: int, rng: np.random.Generator) -> Sequence[SeedEpisode] | Sequence[StateEpisode]:
        """Draw different episodes for a manifest."""
        return [SeedEpisode(int(seed)) for seed in rng.choice(2**31, count, replace=False)]

    def find_starts(self, episodes: Sequence[Any]) -> Sequence[EpisodeStart]:
        """Return where the episodes of a manifest start."""
        return [episode.seed for episode in episodes]

    @abstractmethod
    def step(self, action: Tensor) -> EnvStep:
        """Apply one action ``[N, A]`` to each environment."""

    @torch.no_grad()
    def step_and_maybe_reset(self, carry: Mapping[str, Any]) -> tuple[TensorDict, Carry]:
        """Apply ``carry["action"]`` and return the transition and the next carry, as TorchRL's environments do.

        For loops of one's own around a policy without memory; ``apexrl.rollout.rollout`` takes many steps.

        Args:
            carry: ``observation``, ``action``, and whatever else belongs into the transition, ``[N]``.

        Returns:
            The transition ``[N]``: copies of the carry, ``reward``, ``terminated``, ``truncated``, ``done`` and, as
            ``next/observation``, the true successor; and the carry of the next step, its ``observation``.
        """
        td = TensorDict({name: value.clone() for name, value in carry.items()}, batch_size=[self.num_envs])
        self.running = None
        step = self.step(carry[ACTION])
        td[REWARD], td[TERMINATED], td[TRUNCATED] = step.reward, step.terminated, step.truncated
        td[DONE] = step.terminated | step.truncated
        successor: Any = step.obs
        if step.final_obs is not None or not self.gives_final_obs:
            final = td[OBSERVATION] if step.final_obs is None else step.final_obs
            successor = choose(td[DONE].squeeze(-1), final, successor)
        td["next", OBSERVATION] = successor
        return td.clone(), {OBSERVATION: step.obs}

    def find_moved(self) -> RunningEpisodes | None:
        """Return where a simulator stands that was stepped or reset by its own methods since ``running`` was set.

        Returns:
            Its episodes, without a memory; None where nobody moved it.
        """
        return None

    def accelerate(self, acceleration: Acceleration) -> None:
        """Make ``step`` faster, where the environment knows a way that changes no number but for rounding."""
        return

    def spawn(self, num_envs: int) -> VecEnv:
        """Make independent environments of the same kind, for evaluation.

        A simulator with a fixed number of environments may return that number instead.

        Raises:
            EnvError: when the environment cannot make another of its kind.
        """
        raise EnvError(f"{type(self).__name__} cannot make a second environment of its kind; pass eval_env.")

    def state_dict(self) -> dict[str, Any] | None:
        """Return everything needed to continue from here as tensors and plain values; None when that is impossible."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state from ``state_dict``.

        Raises:
            EnvStateError: when the state cannot be restored exactly.
        """
        raise EnvStateError(f"{type(self).__name__} cannot restore its state.")

    def step_time(self) -> tuple[float | None, float | None]:
        """Return the simulated seconds of a step, and the frames per second of its video; None for what is not known.

        The second stands in for the first, which it need not agree with.
        """
        return None, None

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Render environment ``index`` as an ``[H, W, 3]`` image.

        Raises:
            EnvError: when the environment cannot render.
        """
        raise EnvError(f"{type(self).__name__} cannot render.")

    def close(self) -> None:
        """Free simulators and processes. The environment cannot be used afterwards."""
        return
