"""A policy as a function of plain tensors, and the files that hold such a function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.errors import ExportError
from apexrl.core.observations import leaves
from apexrl.core.types import ACTION, OBSERVATION, Observation
from apexrl.policies import Policy

CARD_FORMAT = 1
"""Version of the card's layout."""
CARD = "policy.json"
FILES = {"onnx": "policy.onnx", "torchscript": "policy.pt"}
"""Format -> the file it is written to."""

Model: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Inputs in the card's order to outputs in the card's order."""


class DeployedPolicy(nn.Module):
    """The deterministic policy as a function of plain tensors ``[B, ...]``.

    Takes the observation's tensors that the policy reads, then its recurrent state; returns the action, inside its
    bounds, and the next recurrent state. The environments of the package clip actions as well, so in them the
    clipping changes nothing.

    The policy is in evaluation mode, and its normaliser part of the function; ``obs`` is an example ``[B, ...]``.
    """

    low: Tensor
    high: Tensor

    def __init__(self, policy: Policy, action_space: gym.Space[Any], obs: Observation) -> None:
        super().__init__()
        self.policy = policy
        self.has_groups = not isinstance(obs, Tensor)
        self.paths = read_paths(policy, obs)
        self.state_names = list(policy.initial_memory(1))
        self.has_bounds = isinstance(action_space, gym.spaces.Box)
        if isinstance(action_space, gym.spaces.Box):
            self.register_buffer("low", torch.as_tensor(action_space.low, dtype=torch.float32).flatten())
            self.register_buffer("high", torch.as_tensor(action_space.high, dtype=torch.float32).flatten())

    @property
    def input_names(self) -> list[str]:
        """Paths of the observation, then names of the recurrent state."""
        return [*self.paths, *self.state_names]

    @property
    def output_names(self) -> list[str]:
        """The action, then the recurrent state of the next step."""
        return [ACTION, *(f"next_{name}" for name in self.state_names)]

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Act; a policy without memory returns the action alone."""
        states = dict(zip(self.state_names, inputs[len(self.paths) :], strict=True))
        output = self.act(inputs[: len(self.paths)], states, deterministic=True)
        return (output[ACTION], *(output[name] for name in self.state_names)) if states else output[ACTION]

    def act(self, inputs: Sequence[Tensor], states: Mapping[str, Tensor], *, deterministic: bool) -> dict[str, Tensor]:
        """Return what the policy does, with the action inside its bounds."""
        obs: Observation = inputs[0]
        if self.has_groups:
            obs = TensorDict({}, batch_size=inputs[0].shape[:1])
            for path, value in zip(self.paths, inputs, strict=True):
                obs[tuple(path.split("."))] = value
        output = self.policy.act({OBSERVATION: obs, **states}, deterministic=deterministic)
        return {**output, ACTION: self.clipped(output[ACTION])}

    def clipped(self, action: Tensor) -> Tensor:
        """Bring continuous actions inside their bounds, which may be infinite."""
        return torch.minimum(torch.maximum(action, self.low), self.high) if self.has_bounds else action


def read_paths(policy: Policy, obs: Observation) -> list[str]:
    """Return the tensors of an observation that a policy cannot act without."""
    if isinstance(obs, Tensor):
        return [OBSERVATION]

    def acts_without(path: str) -> bool:
        try:
            rest = obs.exclude(tuple(path.split(".")))
            policy.act({OBSERVATION: rest, **policy.initial_memory(len(obs))}, deterministic=True)
        except KeyError:
            return False
        return True

    return [path for path in leaves(obs) if not acts_without(path)]


def traced(model: DeployedPolicy, inputs: Sequence[Tensor]) -> Any:
    """Return a flat TorchScript function, without the critic and other unused networks."""
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        return torch.jit.freeze(torch.jit.trace(model, tuple(inputs), check_trace=False).eval())


def as_model(function: Callable[..., Any]) -> Model:
    """Return a function of tensors as a ``Model``; of a single output it makes a list."""

    def call(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        output = function(*tensors)
        return [output] if isinstance(output, Tensor) else list(output)

    return call


def read_torchscript(path: Path, input_names: Sequence[str]) -> Model:
    """Read a TorchScript file."""
    with warnings.catch_warnings(action="ignore"):
        return as_model(torch.jit.load(path, map_location="cpu").forward)


def read_onnx(path: Path, input_names: Sequence[str]) -> Model:
    """Read an ONNX file."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ExportError(
            f"{path} needs onnxruntime: pip install 'apexrl[export]', or load {FILES['torchscript']}."
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def call(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in zip(input_names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return call


READERS: dict[str, Callable[[Path, Sequence[str]], Model]] = {"onnx": read_onnx, "torchscript": read_torchscript}
