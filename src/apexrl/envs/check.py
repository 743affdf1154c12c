"""Tries an environment against the rules of ``VecEnv`` and says which it breaks.

It steps the environment that it checks; to act in one is the business of ``rollout`` alone.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor

from apexrl.core.errors import EnvError
from apexrl.core.metrics import RESERVED_NAMES
from apexrl.core.types import EnvStep, Observation
from apexrl.envs.base import VecEnv

_BOUND_TOLERANCE = 1e-4
"""How far an observation may leave its Box by rounding, relative to a bound above 1."""
_STATE_STEPS = 20
"""Steps that are repeated after ``load_state_dict``, and in other environments after ``reset_each``."""


def check_env(env: VecEnv, num_steps: int = 200, seed: int = 0) -> list[str]:
    """Run an environment with random actions and return every rule of ``VecEnv`` that it breaks.

    What only shows when an episode ends is found only if one ends within ``num_steps``.

    Args:
        env: the environment; it is reset, and left in the middle of an episode.
        num_steps: steps of the run, which is done twice to compare.
        seed: of the environment and of the actions.

    Returns:
        One sentence for each broken rule; empty when there is none.
    """
    problems = _check_spaces(env)
    if problems:
        return problems
    check = _Check(env)
    try:
        actions = [_random_action(env, torch.Generator().manual_seed(seed + t)) for t in range(num_steps)]
        first = check.run(seed, actions)
        check.episodes()
        check.repeats(first, seed, actions)
        check.restores(actions[:_STATE_STEPS])
        check.own_seeds(seed, actions[:_STATE_STEPS])
        check.spawns()
    except Exception as error:
        check.add(f"{type(error).__name__} was raised: {error}")
    return list(check.problems)


def _check_spaces(env: VecEnv) -> list[str]:
    problems = []
    if not all(isinstance(part, spaces.Box) for part in _leaves(env.observation_space, "").values()):
        problems.append(f"observation_space must be a Box or a Dict of Boxes, it is {env.observation_space}.")
    if not isinstance(env.action_space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        problems.append(f"action_space must be Box, Discrete, MultiDiscrete or MultiBinary, it is {env.action_space}.")
    return problems


def _random_action(env: VecEnv, generator: torch.Generator) -> Tensor:
    """Draw actions ``[N, A]`` from the action space; dimensions without bounds from [-1, 1]."""
    space = env.action_space
    match space:
        case spaces.Box():
            low, high = (torch.as_tensor(bound.ravel(), dtype=torch.float32) for bound in (space.low, space.high))
            low, high = torch.where(low > -1e6, low, -1.0), torch.where(high < 1e6, high, 1.0)
            action = low + (high - low) * torch.rand(env.num_envs, len(low), generator=generator)
            return action.to(env.device)
        case spaces.Discrete():
            sizes = [int(space.n)]
        case spaces.MultiDiscrete():
            sizes = space.nvec.ravel().tolist()
        case _:
            sizes = [2] * int(np.prod(space.shape or ()))
    columns = [torch.randint(size, (env.num_envs, 1), generator=generator) for size in sizes]
    return torch.cat(columns, dim=1).to(env.device)


def _leaves(tree: Any, name: str) -> dict[str, Any]:
    """The tensors of an observation, or the spaces of a space, by their path."""
    if isinstance(tree, TensorDictBase | dict | spaces.Dict):
        return {path: x for key, part in tree.items() for path, x in _leaves(part, f"{name}[{key!r}]").items()}
    return {name: tree}


def _outside(x: Tensor, space: spaces.Box) -> str | None:
    """Name the value that is farthest outside its bounds, beyond rounding; infinite bounds are none."""
    low, high = (torch.as_tensor(bound, dtype=torch.float64).reshape(-1) for bound in (space.low, space.high))
    values = x.detach().cpu().double().reshape(-1, len(low))
    slack = [_BOUND_TOLERANCE * bound.abs().clamp(min=1.0).nan_to_num(posinf=0.0) for bound in (low, high)]
    excess = torch.maximum(low - slack[0] - values, values - high - slack[1]).nan_to_num(neginf=-1.0)
    row, place = divmod(int(excess.argmax()), len(low))
    if excess[row, place] <= 0:
        return None
    return f"{values[row, place]:.6g} at place {place} is not in [{low[place]:.6g}, {high[place]:.6g}]"


def _copy(obs: Observation) -> list[Tensor]:
    return [leaf.clone() for leaf in _leaves(obs, "").values()]


def _copy_step(step: EnvStep) -> list[Tensor]:
    return [*_copy(step.obs), step.reward.clone(), step.terminated.clone(), step.truncated.clone()]


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have an element of memory in common."""
    storage = a.untyped_storage()
    if storage.data_ptr() != b.untyped_storage().data_ptr() or storage.nbytes() == 0:
        return False
    index = torch.arange(storage.nbytes() // a.element_size())
    places = [index.as_strided(x.shape, x.stride(), x.storage_offset()).reshape(-1) for x in (a, b)]
    return bool(torch.isin(*places).any())


@dataclass
class _Check:
    """The problems found so far, and what the run has shown of the episodes."""

    env: VecEnv
    problems: dict[str, None] = field(default_factory=dict)
    length: Tensor = field(init=False)
    """``[N]`` steps of the running episodes."""
    lengths: list[list[int]] = field(init=False)
    """For each environment, the lengths of its ended episodes."""
    cut_lengths: list[int] = field(default_factory=list)
    """Of all that were truncated."""
    final_is_reset: list[bool] = field(default_factory=list)
    """For each ended episode, whether ``final_obs`` was the same as ``obs``."""
    observations_differ: bool = False
    seen: set[str] = field(default_factory=set)
    """Metrics that were reported with a number."""
    named: set[str] = field(default_factory=set)
    """Metrics that were reported at all."""

    def add(self, problem: str) -> None:
        """Note a problem once."""
        self.problems.setdefault(problem)

    def run(self, seed: int, actions: Sequence[Tensor]) -> list[list[Tensor]]:
        """Take the steps, check each, and return copies of what came back."""
        env = self.env
        self.length = torch.zeros(env.num_envs, dtype=torch.int64)
        self.lengths = [[] for _ in range(env.num_envs)]
        obs = env.reset(seed)
        self.observation(obs, "reset", "observation")
        trace = [_copy(obs)]
        for action in actions:
            given = action.clone()
            step = env.step(action)
            if not torch.equal(action, given):
                self.add("step changed the action tensor that it was given.")
                action.copy_(given)
            self.step(step)
            trace.append(_copy_step(step))
            self.observations_differ |= not _same(trace[-1][: len(trace[0])], trace[0])
        return trace

    def tensor(self, x: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> bool:
        """Check one tensor, of any type where none is given, and return whether it can be looked at further."""
        if not isinstance(x, Tensor):
            self.add(f"{name} must be a tensor, it is a {type(x).__name__}.")
            return False
        if tuple(x.shape) != shape:
            self.add(f"{name} must have the shape {list(shape)}, it has {list(x.shape)}.")
        if dtype is not None and x.dtype != dtype:
            self.add(f"{name} must be {dtype}, it is {x.dtype}.")
        device = self.env.device
        if x.device.type != device.type or (device.index is not None and x.device.index != device.index):
            self.add(f"{name} must be on {device}, it is on {x.device}.")
        return tuple(x.shape) == shape

    def observation(self, obs: Any, where: str, name: str) -> bool:
        """Check an observation against ``observation_space``."""
        found, wanted = _leaves(obs, name), _leaves(self.env.observation_space, name)
        if found.keys() != wanted.keys():
            self.add(f"{where} must return {sorted(wanted)} as observation_space says, not {sorted(found)}.")
            return False
        good = True
        for path, space in wanted.items():
            dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
            good &= self.tensor(found[path], f"{path} of {where}", (self.env.num_envs, *space.shape), dtype)
            if isinstance(found[path], Tensor) and not found[path].isfinite().all():
                self.add(f"{path} of {where} has values that are not finite.")
            told = any(problem.startswith(f"{path} leaves its Box") for problem in self.problems)
            if good and not told and (outside := _outside(found[path], space)):
                self.add(f"{path} leaves its Box: {outside}.")
        return good

    def step(self, step: EnvStep) -> None:
        """Check what one step returned."""
        N = self.env.num_envs
        good = self.observation(step.obs, "step", "observation")
        good &= self.tensor(step.reward, "reward", (N, 1), torch.float32)
        good &= self.tensor(step.terminated, "terminated", (N, 1), torch.bool)
        good &= self.tensor(step.truncated, "truncated", (N, 1), torch.bool)
        self.metrics(step)
        for name, value in step.info.items():
            self.tensor(value, f"info {name!r}", (N, 1))
        if isinstance(step.reward, Tensor) and not step.reward.isfinite().all():
            self.add("reward has values that are not finite.")
        if not good:
            return
        if (step.terminated.bool() & step.truncated.bool()).any():
            self.add("terminated and truncated are both true in the same step.")
        ended = (step.terminated.bool() | step.truncated.bool()).squeeze(1).cpu()
        self.length += 1
        limit = self.env.max_episode_steps
        if limit is not None and (self.length > limit).any():
            self.add(f"An episode went on after max_episode_steps ({limit}) without being truncated.")
        for i in ended.nonzero().flatten().tolist():
            self.lengths[i].append(int(self.length[i]))
        self.cut_lengths += self.length[step.truncated.squeeze(1).cpu()].tolist()
        self.length[ended] = 0
        if ended.any() and self.env.gives_final_obs:
            self.final_observation(step, ended)

    def final_observation(self, step: EnvStep, ended: Tensor) -> None:
        """Check ``final_obs`` in a step in which episodes ended."""
        if step.final_obs is None:
            self.add("An episode ended without final_obs; return it, or set gives_final_obs to False.")
            return
        obs, final = _leaves(step.obs, "").values(), _leaves(step.final_obs, "").values()
        if [x.shape for x in obs] != [x.shape for x in final]:
            self.add("final_obs must have the keys and shapes of obs.")
            return
        rows = ended.to(self.env.device)
        if not all(x[rows].isfinite().all() for x in final):
            self.add("final_obs has values that are not finite.")
        if any(_share_memory(a, b) for a, b in zip(obs, final, strict=True)):
            self.add("final_obs shares memory with obs, so the reset overwrites it.")
        for i in ended.nonzero().flatten().tolist():
            self.final_is_reset.append(_same([x[i] for x in obs], [x[i] for x in final]))

    def metrics(self, step: EnvStep) -> None:
        """Check the metrics of one step."""
        for name, value in step.metric.items():
            if name not in self.env.metric_specs:
                self.add(f"The metric {name!r} is not declared in metric_specs.")
            self.named.add(name)
            if self.tensor(value, f"metric {name!r}", (self.env.num_envs, 1), torch.float32):
                if value.isinf().any():
                    self.add(f"metric {name!r} has infinite values.")
                if not value.isnan().all():
                    self.seen.add(name)

    def episodes(self) -> None:
        """Judge what only the whole run shows."""
        ended = any(self.lengths)
        for name in sorted(RESERVED_NAMES & {*self.env.metric_specs, *self.named}):
            self.add(f"The metric {name!r} has the name of a field that every episode has; rename it.")
        for name, spec in self.env.metric_specs.items():
            if spec.name != name:
                self.add(f"metric_specs[{name!r}] declares the metric {spec.name!r}; both names must be the same.")
            # A metric may come with the end of an episode only, so NaN until then is fine.
            if name not in (self.seen if ended else self.named):
                self.add(f"The metric {name!r} is declared in metric_specs but never reported.")
        if self.final_is_reset and all(self.final_is_reset) and self.observations_differ:
            self.add("final_obs is the same as obs wherever an episode ended; it must be the one before the reset.")
        limit, cut = self.env.max_episode_steps, self.cut_lengths
        # A single one may have another reason, such as a worker that died.
        if limit is not None and len(cut) > 1 and len(set(cut)) == 1 and cut[0] < limit:
            self.add(f"Episodes are truncated after {cut[0]} steps, before max_episode_steps ({limit}).")
        for lengths in self.lengths:
            if len(lengths) > 3 and lengths[0] > 1 and all(length == 1 for length in lengths[1:]):
                self.add("After its first end every episode ends at its first step: an ended one is not reset.")

    def repeats(self, first: list[list[Tensor]], seed: int, actions: Sequence[Tensor]) -> None:
        """Run again with the same seed and compare."""
        again = self.run(seed, actions)
        differs = [not _same(a, b) for a, b in zip(first, again, strict=True)]
        if any(differs):
            where = f"step {t}" if (t := differs.index(True)) else "reset"
            self.add(f"The same seed and actions gave another result, first at {where}.")

    def restores(self, actions: Sequence[Tensor]) -> None:
        """Save, step, restore, and step again."""
        env = self.env
        state = env.state_dict()
        if state is None:
            return
        file = io.BytesIO()
        try:
            torch.save(state, file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except Exception as error:
            self.add(f"state_dict holds what torch.load(weights_only=True) refuses: {error}")
        trace = [_copy_step(env.step(action)) for action in actions]
        try:
            env.load_state_dict(state)
        except Exception as error:
            self.add(f"load_state_dict refused what state_dict gave: {error}")
            return
        again = [_copy_step(env.step(action)) for action in actions]
        if not all(_same(a, b) for a, b in zip(trace, again, strict=True)):
            self.add("After load_state_dict the same actions gave another result than before.")

    def own_seeds(self, seed: int, actions: Sequence[Tensor]) -> None:
        """Start episodes from their own seeds, and again in the reverse order."""
        env = self.env
        if not env.own_seeds:
            return
        seeds = range(seed, seed + env.num_envs)
        trace = [_copy(env.reset_each(seeds)), *(_copy_step(env.step(action)) for action in actions)]
        again = [_copy(env.reset_each(seeds[::-1]))]
        again += [_copy_step(env.step(action.flip(0))) for action in actions]
        if not all(_same(a, [x.flip(0) for x in b]) for a, b in zip(trace, again, strict=True)):
            self.add("The same seed of reset_each and actions gave another result in another environment.")

    def spawns(self) -> None:
        """Make other environments, where that is possible."""
        try:
            other = self.env.spawn(1)
        except EnvError:
            return
        if other is self.env:
            self.add("spawn returned the environment itself; it must make others, or raise EnvError.")
        else:
            other.close()
