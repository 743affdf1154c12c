"""Tasks of ManiSkill 3 as a ``VecEnv``.

ManiSkill's vector environment resets ended episodes in the same step. It then returns ``info`` of the new episodes,
and beside it what the ended ones had: ``final_info``, ``final_observation`` and the mask ``_final_info``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.core.metrics import RESERVED_NAMES, MetricSpec
from apexrl.core.system.seeding import spawn_seeds
from apexrl.core.types import EnvStep, Observation
from apexrl.envs.adapters.simulators import load_simulator, space_of
from apexrl.envs.base import VecEnv
from apexrl.envs.options import check_known

MakePart: TypeAlias = Callable[[int], Any]
"""Makes a ``ManiSkillVectorEnv`` with that many environments."""

_INSTALL = "ManiSkill has an environment of its own: pip install mani-skill==3.0.1."
_VULKAN = (
    "ManiSkill needs a Vulkan device even if nothing is rendered. Without a graphics card, let VK_ICD_FILENAMES "
    "name SwiftShader, as 'make test-maniskill' does; see docs/environments.md."
)


class ManiSkillVecEnv(VecEnv):
    """ManiSkill's vector environments as one batch.

    On a GPU one of them simulates all N. On the CPU ManiSkill simulates one environment at a time, so there are N of
    them. Truths in ``info``, such as ``success``, ``fail`` and ``is_grasped``, are metrics.

    Args:
        make: makes a ``ManiSkillVectorEnv`` that resets by itself, with the given number of environments.
        device: where the tensors are wanted.
        together: whether one simulator holds all N; on a GPU unless told.

    Raises:
        EnvError: when it cannot be made, or has several robots with an action space each.
    """

    metric_specs: Mapping[str, MetricSpec] = {}
    """The truths that the task evaluates at every step."""

    def __init__(
        self, make: MakePart, num_envs: int, device: torch.device | str = "cpu", *, together: bool | None = None
    ) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._make = make
        self._together = self.device.type == "cuda" if together is None else together
        self._parts = self._make_parts()
        first = self._parts[0]
        self.action_space = first.single_action_space
        if not isinstance(self.action_space, spaces.Box):
            raise EnvError(f"ManiSkill's action space {self.action_space} is not supported; a Box is.")
        limit = load_simulator("mani_skill.utils.gym_utils", _INSTALL).find_max_episode_steps_value(first)
        self.max_episode_steps = None if limit is None else int(limit)
        self.video_fps = float(first.base_env.control_freq)
        starts = [part.reset() for part in self._parts]
        self.observation_space = space_of(self._observation([obs for obs, _ in starts]))
        info = {name: value for name, value in starts[0][1].items() if name not in RESERVED_NAMES}
        self.metric_specs = {
            name: MetricSpec(name, "max", "reward" if name in ("success", "fail") else "task")
            for name, value in info.items()
            if isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim == 1
        }

    def reset(self, seed: int | None = None) -> Observation:
        """Start a new episode everywhere; each simulator from a stream of its own."""
        count = len(self._parts)
        seeds = [None] * count if seed is None else spawn_seeds(seed, count)
        starts = [part.reset(seed=own) for part, own in zip(self._parts, seeds, strict=True)]
        obs: Observation = self._observation([obs for obs, _ in starts])
        return obs

    def step(self, action: Tensor) -> EnvStep:
        """Apply one action ``[N, A]`` to each environment."""
        rows = action.detach().split(self.num_envs // len(self._parts))
        results = [part.step(row.clone()) for part, row in zip(self._parts, rows, strict=True)]
        obs, reward, terminated, truncated, infos = zip(*results, strict=True)
        done = self._column(terminated, torch.bool)
        # The info of an ended step is that of the new episode; what the step itself had is beside it.
        own = [info.get("final_info", info) for info in infos]
        last = [info.get("final_observation", now) for info, now in zip(infos, obs, strict=True)]
        return EnvStep(
            obs=self._observation(obs),
            reward=self._column(reward, torch.float32),
            terminated=done,
            truncated=self._column(truncated, torch.bool) & ~done,
            final_obs=self._observation(last) if any("final_observation" in info for info in infos) else None,
            metric={name: self._column([info[name] for info in own], torch.float32) for name in self.metric_specs},
        )

    def spawn(self, num_envs: int) -> ManiSkillVecEnv:
        """Make independent environments of the same task."""
        return ManiSkillVecEnv(self._make, num_envs, self.device, together=self._together)

    def render(self, index: int = 0) -> NDArray[np.uint8]:
        """Render environment ``index`` as an ``[H, W, 3]`` image."""
        size = self.num_envs // len(self._parts)
        part = self._parts[index // size]
        try:
            image = part.render()[index % size]
        except (RuntimeError, TypeError) as error:
            needs = "It needs a graphics card, render_mode 'rgb_array' and a render_backend."
            raise EnvError(f"ManiSkill cannot render here: {str(error).rstrip('.')}. {needs}") from error
        return np.asarray(image.cpu(), np.uint8)

    def close(self) -> None:
        """Close the simulators."""
        for part in self._parts:
            part.close()

    def _make_parts(self) -> list[Any]:
        sizes = [self.num_envs] if self._together else [1] * self.num_envs
        try:
            return [self._make(size) for size in sizes]
        except (RuntimeError, EOFError, OSError) as error:
            hint = f" {_VULKAN}" if any(word in str(error) for word in ("rendering device", "vk::")) else ""
            raise EnvError(f"ManiSkill could not make the environment: {str(error).rstrip('.')}.{hint}") from error

    def _observation(self, parts: Sequence[Any]) -> Any:
        """Join the observations of the simulators: float32, and uint8 for images."""
        if isinstance(parts[0], Mapping):
            return {key: self._observation([part[key] for part in parts]) for key in parts[0]}
        joined = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to(self.device)
        joined = joined if joined.dtype == torch.uint8 else joined.float()
        return joined[:, None] if joined.ndim == 1 else joined

    def _column(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat(list(parts)).to(self.device, dtype).reshape(self.num_envs, 1)


def make_maniskill(
    id: str, num_envs: int = 1, *, device: torch.device | str = "cpu", ignore_terminations: bool = True, **kwargs: Any
) -> ManiSkillVecEnv:
    """Make a task of ManiSkill by its name, such as ``"PickCube-v1"``; on a GPU ManiSkill simulates there.

    Args:
        ignore_terminations: whether an episode continues to its time limit after success or failure. ManiSkill's dense
            rewards are paid at every step, so that an end at success would cost the policy all rewards after it.
        **kwargs: passed to ``gymnasium.make``: ``obs_mode`` (``"state"`` unless told, ``"state_dict"`` for named
            groups), ``control_mode``, ``reward_mode``, ``max_episode_steps``, …

    Raises:
        EnvError: when ManiSkill is not installed or has no such task, or no Vulkan device is found.
    """
    load_simulator("mani_skill.envs", _INSTALL)
    vector = load_simulator("mani_skill.vector.wrappers.gymnasium", _INSTALL)
    registered = load_simulator("mani_skill.utils.registration", _INSTALL).REGISTERED_ENVS
    check_known("ManiSkill has no task", [id], registered)
    on_gpu = torch.device(device).type == "cuda"
    rendering = {"render_mode": "rgb_array"} if torch.cuda.is_available() else {"render_backend": "none"}
    options = {"obs_mode": "state", "sim_backend": "physx_cuda" if on_gpu else "physx_cpu"} | rendering | kwargs
    together = "cpu" not in options["sim_backend"]
    # With it resets draw from generators of their own, which follow from the seed. It gives one seed to all
    # environments that are reset together, and takes that of the first one even where that one is not reset.
    options.setdefault("enhanced_determinism", ignore_terminations or not together)

    def make(size: int) -> Any:
        return vector.ManiSkillVectorEnv(id, num_envs=size, ignore_terminations=ignore_terminations, **options)

    return ManiSkillVecEnv(make, num_envs, device, together=together)
