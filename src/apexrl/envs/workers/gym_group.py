"""Several Gymnasium environments stepped in one process, written into arrays that are allocated once.

Worker processes run it, ``python -m apexrl.envs.workers.gym_group CONNECTION_FD MEMORY_FD``.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from apexrl.envs.workers.arrays import (
    Array,
    Buffers,
    action_layout,
    decoder,
    flat_space,
    make_buffers,
    map_tree,
    tree_leaves,
    writer,
)
from apexrl.envs.workers.process import serve

MakeFn: TypeAlias = Callable[[], "gym.Env[Any, Any]"]

MAX_REPLAY = 100_000
"""Steps after which an episode that must be replayed to be restored can no longer be saved."""

MAX_METRICS = 256
"""Numbers of ``info`` that can be reported; memory for those that never appear takes no room."""

Found: TypeAlias = dict[str, dict[int, float]]
"""Metrics seen for the first time: what each reported, by the number of its environment."""

METRIC_KEYS = {"success": ("success", "is_success"), "fail": ("fail", "is_failure")}
"""The keys of ``info`` that carry a metric of another name; every other metric is its own key."""

_TRANSPARENT = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)

# Rewards of Gymnasium's MuJoCo tasks read these before a step. They lag the state by one substep, so that
# mj_forward would give other numbers than those the uninterrupted run has.
# fmt: off
_DERIVED = (
    "xpos", "xquat", "xmat", "xipos", "ximat", "xanchor", "xaxis", "geom_xpos", "geom_xmat", "site_xpos",
    "site_xmat", "cam_xpos", "cam_xmat", "subtree_com", "cdof", "cinert", "cvel", "cacc", "cfrc_int",
    "cfrc_ext", "subtree_linvel", "subtree_angmom", "ten_length", "ten_velocity", "actuator_length",
    "actuator_velocity", "actuator_force", "qfrc_actuator", "qfrc_passive", "qfrc_bias", "qfrc_constraint",
    "qacc", "sensordata", "energy",
)
# fmt: on


_NOT_THE_USERS = (f"{Path(__file__).parents[2]}{os.sep}", f"{Path(gym.__file__).parent}{os.sep}", "<frozen ")
"""How the files begin whose frames say nothing about an error in an environment."""


def users_frames(error: BaseException) -> list[str]:
    """Return the last three places outside of this package and Gymnasium where ``error`` passed, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in users[-3:]]


class StateError(RuntimeError):
    """An environment cannot be saved, or not be put back exactly."""


@dataclass
class _Start:
    """How the running episode of an environment began."""

    seed: int | None = None
    """The last seed given to ``reset``."""
    generator: Mapping[str, Any] | None = None
    """State of ``np_random`` before the episode's reset; None when that reset was given the seed."""
    step: int = 0
    """Index of the episode's first action in the history; -1 when it is no longer kept."""


def metric_name(key: Any) -> str | None:
    """Return which metric a number under this key of ``info`` is; None when it is none."""
    if not isinstance(key, str):
        return None
    is_reward = key != "reward" and (key.startswith("reward") or key.endswith("reward"))
    return next((name for name, keys in METRIC_KEYS.items() if key in keys), key if is_reward else None)


def metric_names(info: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics that the ``info`` of a step holds."""
    names = (metric_name(key) for key, value in info.items() if _is_number(value))
    return [name for name in dict.fromkeys(names) if name is not None]


class EnvGroup:
    """Several environments of one kind, stepped in sequence; an episode that ends is reset in the same step.

    Call ``allocate`` or ``bind`` once, then ``reset``, then ``step``. Messages count environments from ``first``.
    """

    def __init__(self, make_fns: Sequence[MakeFn], first: int = 0) -> None:
        self.first = first
        self.simulators = [make() for make in make_fns]
        simulator = self.simulators[0]
        for i, other in enumerate(self.simulators, first):
            for kind in ("observation_space", "action_space"):
                ours, theirs = getattr(simulator, kind), getattr(other, kind)
                if theirs != ours:
                    raise TypeError(
                        f"{kind} must be the same everywhere: environment {first}: {ours}, environment {i}: {theirs}."
                    )
        self.observation_space = flat_space(simulator.observation_space)
        self.action_space = simulator.action_space
        action_layout(self.action_space)
        limits = [_max_episode_steps(other) or math.inf for other in self.simulators]
        self.max_episode_steps = None if math.inf in limits else int(max(limits))
        self._exact = [_is_plain_mujoco(other) for other in self.simulators]
        self._starts = [_Start() for _ in self.simulators]
        self._history: list[Array] = []
        self._was_reset = False

    def allocate(self, metrics: Sequence[str]) -> Buffers:
        """Make buffers, write into them from now on, and read these metrics from ``info``."""
        buffers, _ = make_buffers(self.observation_space, self.action_space, len(self.simulators), MAX_METRICS)
        self.bind(buffers, metrics)
        return buffers

    def bind(self, buffers: Buffers, metrics: Sequence[str]) -> None:
        """Write into these buffers from now on, and read these metrics from ``info``."""
        self._buffers = buffers
        self._names: set[str] = set()
        self._known: set[str] = set()
        """Keys of ``info`` that need no second look: they are read already, or are no metrics."""
        self.watch(metrics)
        self._metric_rows = [buffers.metric[:, i, 0] for i in range(len(self.simulators))]
        self._reward = buffers.reward[:, 0]
        self._rows = [map_tree(itemgetter(i), buffers.obs) for i in range(len(self.simulators))]
        self._steps = [simulator.step for simulator in self.simulators]
        self._write = writer(self.simulators[0].observation_space)
        self._decode = decoder(self.action_space)
        self._keeps_history = not all(self._exact)
        self._any_ended = True

    def watch(self, metrics: Sequence[str]) -> None:
        """Read these metrics into the first rows of ``buffers.metric``; others that appear are found by ``step``."""
        self._metric_keys = [METRIC_KEYS.get(name, (name,)) for name in metrics]
        self._metric = self._buffers.metric[: len(metrics)]
        self._names.update(metrics)

    def reset(self, seeds: Sequence[int] | None = None) -> None:
        """Start a new episode everywhere; environment ``i`` of this group gets ``seeds[i]``."""
        self._history.clear()
        self._was_reset = True
        for i, simulator in enumerate(self.simulators):
            if seeds is None:
                obs = self._restart(i)
            else:
                self._starts[i] = _Start(seed=seeds[i])
                obs = _begin(simulator, seed=seeds[i])
            self._write(self._rows[i], obs)

    def step(self) -> tuple[bool, Found]:
        """Apply ``buffers.action``; return whether any episode ended, and metrics that are not watched yet."""
        buffers, write, rows, reward = self._buffers, self._write, self._rows, self._reward
        if self._any_ended:
            buffers.terminated.fill(False)
            buffers.truncated.fill(False)
            self._any_ended = False
        self._metric.fill(np.nan)
        found: Found = {}
        if self._keeps_history:
            self._history.append(buffers.action.copy())
            if len(self._history) > 2 * MAX_REPLAY:
                self._forget()
        i = 0
        try:
            for i, action in enumerate(self._decode(buffers.action)):
                obs, reward[i], terminated, truncated, info = self._steps[i](action)
                if info:
                    self._read_metrics(i, info)
                    if not self._known.issuperset(info):
                        self._find_metrics(i, info, found)
                if terminated or truncated:
                    obs = self._end(i, obs, bool(terminated))
                write(rows[i], obs)
        except Exception as error:
            if "unpack" in str(error) and not users_frames(error):
                needed = "must return (obs, reward, terminated, truncated, info)"
                error = TypeError(f"{_type_name(self.simulators[i])}.step {needed}: {error}")
            error.add_note(f"(in environment {self.first + i})")
            raise error
        self._names.update(found)
        return self._any_ended, found

    def _end(self, i: int, obs: Any, terminated: bool) -> Any:
        buffers = self._buffers
        self._any_ended = True
        buffers.terminated[i] = terminated
        buffers.truncated[i] = not terminated
        self._write(map_tree(itemgetter(i), buffers.final_obs), obs)
        return self._restart(i)

    def _restart(self, i: int) -> Any:
        """Reset one environment without a seed and remember how its episode began."""
        if not self._exact[i]:
            generator = self.simulators[i].unwrapped.np_random.bit_generator.state
            self._starts[i] = _Start(self._starts[i].seed, generator, len(self._history))
        return _begin(self.simulators[i])

    def _forget(self) -> None:
        """Keep the last ``MAX_REPLAY`` actions only."""
        cut = len(self._history) - MAX_REPLAY
        del self._history[:cut]
        for start in self._starts:
            start.step = start.step - cut if start.step >= cut else -1

    def _read_metrics(self, i: int, info: Mapping[str, Any]) -> None:
        row = self._metric_rows[i]
        for m, keys in enumerate(self._metric_keys):
            for key in keys:
                if key in info:
                    row[m] = info[key]

    def _find_metrics(self, i: int, info: Mapping[str, Any], found: Found) -> None:
        """Note the metrics of ``info`` that are not watched."""
        for key, value in info.items():
            name = metric_name(key)
            if name is None or name in self._names:
                self._known.add(key)
            elif _is_number(value):
                found.setdefault(name, {})[i] = float(value)

    def state(self) -> list[dict[str, Any]]:
        """Return what each environment needs to continue from here, as arrays and plain values."""
        if not self._was_reset:
            raise StateError("Call reset before saving the environments.")
        return [self._state(i) for i in range(len(self.simulators))]

    def _state(self, i: int) -> dict[str, Any]:
        simulator, start = self.simulators[i], self._starts[i]
        state = {"type": _type_name(simulator), "obs": map_tree(np.copy, self._rows[i])}
        if self._exact[i]:
            return state | _mujoco_state(simulator)
        if start.step < 0:
            raise StateError(f"Environment {self.first + i} has an episode of more than {MAX_REPLAY} steps.")
        taken = [actions[i] for actions in self._history[start.step :]]
        actions = np.array(taken).reshape(len(taken), self._buffers.action.shape[1])
        return state | {"seed": start.seed, "generator": _to_json(start.generator), "actions": actions}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Put every environment back into its saved state, or raise a StateError: they must then be reset."""
        longest = max(len(state.get("actions", ())) for state in states)
        self._history = [np.zeros_like(self._buffers.action) for _ in range(longest)]
        self._was_reset = True
        for i, state in enumerate(states):
            if state["type"] != (ours := _type_name(self.simulators[i])):
                raise StateError(f"Environment {self.first + i} is a {ours}, the saved one was a {state['type']}.")
            if self._exact[i]:
                _restore_mujoco(self.simulators[i], state)
                for row, saved in zip(tree_leaves(self._rows[i]), tree_leaves(state["obs"]), strict=True):
                    row[...] = saved
            else:
                self._replay(i, state, longest)

    def _replay(self, i: int, state: Mapping[str, Any], longest: int) -> None:
        """Begin the saved episode again and repeat its actions."""
        simulator, actions = self.simulators[i], state["actions"]
        begin = longest - len(actions)
        generator = json.loads(state["generator"])
        self._starts[i] = _Start(state["seed"], generator, begin)
        obs = _begin(simulator, seed=state["seed"])
        if generator is not None:
            simulator.unwrapped.np_random.bit_generator.state = generator
            obs = _begin(simulator)
        for t, action in enumerate(self._decode(actions) if len(actions) else ()):
            self._history[begin + t][i] = actions[t]
            obs = simulator.step(action)[0]
        self._write(self._rows[i], obs)
        pairs = zip(tree_leaves(self._rows[i]), tree_leaves(state["obs"]), strict=True)
        if any(now.tobytes() != saved.tobytes() for now, saved in pairs):
            raise StateError(
                f"Environment {self.first + i} ({state['type']}) gave another observation after its {len(actions)} "
                "actions: it draws random numbers not only from np_random, or keeps something over episodes."
            )

    def render(self, i: int) -> NDArray[np.uint8]:
        """Render environment ``i`` of this group as an ``[H, W, 3]`` image."""
        image = self.simulators[i].render()
        if not (isinstance(image, np.ndarray) and image.ndim == 3):
            mode = self.simulators[i].render_mode
            raise RuntimeError(
                f"Environment {self.first + i} with render_mode={mode!r} gave no image; use render_mode='rgb_array'."
            )
        return image.astype(np.uint8, copy=False)

    def close(self) -> None:
        """Close every environment."""
        for simulator in self.simulators:
            simulator.close()


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf"


def _begin(simulator: gym.Env[Any, Any], **options: Any) -> Any:
    """Reset one environment; returns its observation."""
    result: Any = simulator.reset(**options)
    if not (isinstance(result, tuple) and len(result) == 2):
        found = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(f"{_type_name(simulator)}.reset must return (obs, info), got {found}")
    return result[0]


def _type_name(simulator: gym.Env[Any, Any]) -> str:
    return f"{type(simulator.unwrapped).__module__}.{type(simulator.unwrapped).__qualname__}"


def _wrappers(simulator: gym.Env[Any, Any]) -> Iterator[gym.Wrapper[Any, Any, Any, Any]]:
    while isinstance(simulator, gym.Wrapper):
        yield simulator
        simulator = simulator.env


def _time_limits(simulator: gym.Env[Any, Any]) -> list[gym.wrappers.TimeLimit[Any, Any]]:
    return [wrapper for wrapper in _wrappers(simulator) if isinstance(wrapper, gym.wrappers.TimeLimit)]


def _max_episode_steps(simulator: gym.Env[Any, Any]) -> int | None:
    limits = [limit._max_episode_steps for limit in _time_limits(simulator)]
    return min(limits, default=None if simulator.spec is None else simulator.spec.max_episode_steps)


def _to_json(generator: Mapping[str, Any] | None) -> str:
    # The state of a generator holds integers of 128 bits, which fit in no tensor.
    return json.dumps(generator, default=np.ndarray.tolist)


def _is_plain_mujoco(simulator: gym.Env[Any, Any]) -> bool:
    """Whether the simulator's data and the time limit are all the state there is.

    Only Gymnasium's own tasks: a class derived from them elsewhere may keep more.
    """
    own = type(simulator.unwrapped).__module__.startswith("gymnasium.envs.mujoco.")
    return own and all(type(wrapper) in _TRANSPARENT for wrapper in _wrappers(simulator))


def _mujoco_state(simulator: gym.Env[Any, Any]) -> dict[str, Any]:
    import mujoco

    model, data = simulator.unwrapped.model, simulator.unwrapped.data  # type: ignore[attr-defined]
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    physics = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, physics, kind)
    return {
        "physics": physics,
        "derived": {name: np.copy(getattr(data, name)) for name in _DERIVED if hasattr(data, name)},
        "elapsed": [limit._elapsed_steps for limit in _time_limits(simulator)],
        "generator": _to_json(simulator.unwrapped.np_random.bit_generator.state),
    }


def _restore_mujoco(simulator: gym.Env[Any, Any], state: Mapping[str, Any]) -> None:
    import mujoco

    simulator.reset()  # tells the wrappers that an episode is running
    model, data = simulator.unwrapped.model, simulator.unwrapped.data  # type: ignore[attr-defined]
    physics, kind = np.asarray(state["physics"]), mujoco.mjtState.mjSTATE_INTEGRATION
    if len(physics) != (size := mujoco.mj_stateSize(model, kind)):
        raise StateError(f"{state['type']} needs {size} numbers for its state, {len(physics)} were saved.")
    mujoco.mj_setState(model, data, physics, kind)
    mujoco.mj_forward(model, data)
    for name, saved in state["derived"].items():
        getattr(data, name)[...] = saved
    for limit, elapsed in zip(_time_limits(simulator), state["elapsed"], strict=True):
        limit._elapsed_steps = elapsed
    simulator.unwrapped.np_random.bit_generator.state = json.loads(state["generator"])


class _SharingGroup(EnvGroup):
    """A group in a worker process; its arrays lie in memory that the parent has mapped too."""

    def __init__(self, memory_fd: int, make_fns: bytes, first: int) -> None:
        super().__init__(pickle.loads(make_fns), first)
        self.memory_fd = memory_fd

    def describe(self) -> tuple[Any, ...]:
        return self.observation_space, self.action_space, self.max_episode_steps

    def share(self, num_envs: int, size: int, metrics: Sequence[str]) -> None:
        memory = mmap.mmap(self.memory_fd, size)
        buffers, _ = make_buffers(self.observation_space, self.action_space, num_envs, MAX_METRICS, memory)
        self.bind(buffers.rows(self.first, self.first + len(self.simulators)), metrics)


if __name__ == "__main__":
    serve(int(sys.argv[1]), functools.partial(_SharingGroup, int(sys.argv[2])))
