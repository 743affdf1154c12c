"""The card of an exported policy: what goes in, what comes out, how often, and in which units."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from tensordict import TensorDict
from torch import Tensor

from apexrl.core.observations import is_image, leaf_spaces, leaves
from apexrl.core.spaces import space_to_plain
from apexrl.core.types import ACTION, CMD_KEY, OBJECT_KEY, OBS_KEY, OBSERVATION
from apexrl.envs import VecEnv
from apexrl.policies import Policy
from apexrl.policies.networks.mlp import choice_sizes
from apexrl.policies.networks.normalizer import RunningNormalizer

MEANINGS = {
    OBSERVATION: "what the task observes",
    OBS_KEY: "what the robot measures",
    CMD_KEY: "what the robot is asked to do",
    OBJECT_KEY: "what is known about the object",
}


def as_json(card: Mapping[str, Any]) -> str:
    """Return text for people: indented, but a list of plain values on one line."""
    text = json.dumps(card, indent=2, allow_nan=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda values: re.sub(r"\s*\n\s*", " ", values[0]), text) + "\n"


def inputs_and_outputs(policy: Policy, paths: Sequence[str], env: VecEnv, step: TensorDict) -> dict[str, Any]:
    """Describe inputs and outputs in the files' order: the tensors of the observation at ``paths``, then the memory.

    ``step`` is a recorded step ``[N]`` with observation and action.
    """
    spaces, tensors = leaf_spaces(env.observation_space), leaves(step[OBSERVATION])
    inputs = [
        {
            **_tensor_entry(path, tensors[path]),
            "group": path.split(".")[0],
            "meaning": _meaning(path, spaces[path], policy, env),
            "normalizer": _normalizer(path, policy),
            "frames": num_frames(path, policy),
            "space": space_to_plain(source) if (source := getattr(spaces[path], "source", None)) else None,
        }
        for path in paths
    ]
    states = policy.initial_memory(1)
    outputs = [{**_tensor_entry(ACTION, step[ACTION]), **action_entry(env.action_space)}]
    for name, state in states.items():
        meaning = f"memory: zeros when an episode starts, then next_{name} of the last call"
        inputs.append({**_tensor_entry(name, state), "meaning": meaning})
        meaning = f"give it to {name} at the next call"
        outputs.append({**_tensor_entry(f"next_{name}", state), "meaning": meaning})
    return {"inputs": inputs, "outputs": outputs}


def _tensor_entry(name: str, tensor: Tensor) -> dict[str, Any]:
    return {"name": name, "shape": ["batch", *tensor.shape[1:]], "dtype": str(tensor.dtype).removeprefix("torch.")}


def _meaning(path: str, space: gym.spaces.Box, policy: Policy, env: VecEnv) -> str:
    if is_image(space):
        return "image, 0 to 255, as the task gives it"
    text = MEANINGS.get(path, f"observation '{path}' of the task")
    history = num_frames(path, policy)
    if history == 1:
        return text
    parts: Mapping[str, int] = getattr(getattr(env, "task", env), "frame_parts", {})
    held = "; ".join(f"{name} ({number})" for name, number in parts.items()) or "as the task stacks them"
    frames = f"{history} frames of {math.prod(space.shape) // history} numbers, the oldest first"
    return f"{text}: {frames}; frames from before the episode are zeros. In each frame, in order: {held}"


def num_frames(path: str, policy: Policy) -> int:
    """Return how many frames a tensor of the observation holds, one after another."""
    return getattr(policy, "history", 1) if path == OBS_KEY else 1


def _normalizer(path: str, policy: Policy) -> dict[str, Any] | None:
    """Return what the model itself does to an input: ``clamp((x − mean) · scale, ±clip)``."""
    name = path.replace(".", "/")
    if policy.normalizer is None or name not in policy.normalizer.normalizers:
        return None
    statistics = policy.normalizer.normalizers[name]
    assert isinstance(statistics, RunningNormalizer)
    scale = (statistics.var + statistics.eps).rsqrt()
    return {"inside": True, "mean": statistics.mean.tolist(), "scale": scale.tolist(), "clip": statistics.clip}


def action_entry(space: gym.Space[Any]) -> dict[str, Any]:
    """Describe the action that the model gives, and what is left to its caller."""
    sizes = choice_sizes(space)
    shape = list(space.shape or ())
    if sizes is not None:
        start = np.broadcast_to(np.ravel(getattr(space, "start", 0)), len(sizes)).tolist()
        caller = f"add {start}: the task counts from there" if any(start) else "nothing"
        return {
            "meaning": "index of each choice, from 0",
            "choices": sizes,
            "space_shape": shape,
            "caller": caller,
            "space": space_to_plain(space),
        }
    assert isinstance(space, gym.spaces.Box)
    integer = np.issubdtype(space.low.dtype, np.integer)
    return {
        "meaning": "the deterministic action in the units of the task, clipped to low and high by the model",
        "low": [float(x) if np.isfinite(x) else None for x in space.low.ravel()],
        "high": [float(x) if np.isfinite(x) else None for x in space.high.ravel()],
        "space_shape": shape,
        "caller": "round to integers" if integer else "nothing",
        "space": space_to_plain(space),
    }


def control(env: VecEnv) -> dict[str, Any]:
    """Return how many actions a second the policy was trained to give, and who says so; None when nobody does."""
    seconds, fps = env.step_time()
    if seconds is not None:
        return {"hz": round(1.0 / seconds, 6), "source": "time step of the task"}
    if fps:
        return {"hz": float(fps), "source": "render_fps of the task, which need not be its time step"}
    return {"hz": None, "source": None}
