"""Trained policies outside of training: load one from a file, and let it act on observations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from apexrl.agent.recipe import Spaces, read_policy
from apexrl.core.errors import CheckpointError, ConfigError, ObservationError
from apexrl.core.instructions import encode_instruction
from apexrl.core.observations import leaf_spaces
from apexrl.core.plugins import imports_allowed
from apexrl.core.spaces import space_from_plain
from apexrl.core.types import ACTION, INSTRUCTION_KEY, OBSERVATION, Observation
from apexrl.deploy.card import num_frames
from apexrl.deploy.model import CARD, CARD_FORMAT, FILES, READERS, DeployedPolicy, Model, as_model, traced
from apexrl.envs.workers.arrays import choice_ranges, decoder, writer
from apexrl.policies import Policy
from apexrl.run.build import load_content, usable_device

RecurrentState: TypeAlias = dict[str, Tensor]
Act: TypeAlias = Callable[[Sequence[Tensor], RecurrentState, bool], tuple[Tensor, RecurrentState]]
"""From the tensors of observations ``[N, ...]``, the recurrent state and ``deterministic`` to actions ``[N, A]`` and
the next recurrent state."""

VLA = "apexrl.policies.vla"
"""Where policies lie that draw even deterministic actions."""


class Input(NamedTuple):
    """A tensor of the observation that a policy reads."""

    path: str
    """Dotted; ``observation`` where the observation is one tensor."""
    shape: tuple[int, ...]
    """Of one environment."""
    dtype: np.dtype[Any]
    num_frames: int = 1
    """Frames that it holds one after another, the oldest first; where there are several, one can be given alone."""
    source: gym.Space[Any] | None = None
    """Space of what the environment gives, where that is encoded."""


def load_policy(path: str | Path, *, device: torch.device | str = "cpu", allow_imports: bool = False) -> LoadedPolicy:
    """Load a trained policy, without its environment or simulator. No code in a file is executed.

    Args:
        path: a run directory (of which the newest checkpoint is taken), a checkpoint, or what ``apexrl export`` wrote:
            its directory, or one file in it.
        device: where the policy of a checkpoint acts; an exported one acts on the CPU.
        allow_imports: import the modules of your own policies and networks, which a checkpoint names.

    Raises:
        CheckpointError: when there is no policy, or it is damaged, or names a module that is not to be imported.
    """
    path = Path(path)
    if (path / CARD).is_file() or path.name == CARD or path.suffix == ".onnx" or _is_exported(path):
        return _load_exported(path)
    path, content = load_content(path)
    with imports_allowed(allow_imports):
        policy, spaces = read_policy(content, path)
    place = usable_device(str(device), "load_policy: device")
    return of_policy(policy.requires_grad_(False).to(place), spaces)


class LoadedPolicy:
    """A trained policy that acts on observations as its environment gives them; ``load_policy`` creates it.

    It remembers what belongs to the running episodes: the recurrent state, the rest of a chunk of actions, and past
    frames. Call ``reset`` when episodes begin.

    Args:
        inputs: what it reads.
        action_space: of one step of one environment.
        act: acts on tensors.
        initial_state: returns the recurrent state of N environments at the start of an episode.
        chunk: steps that one action of ``act`` holds, which are returned one by one.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        action_space: gym.Space[Any],
        act: Act,
        initial_state: Callable[[int], RecurrentState],
        chunk: int = 1,
    ) -> None:
        self.inputs, self.action_space, self.chunk = list(inputs), action_space, chunk
        self._act, self._initial_state, self._decode = act, initial_state, decoder(action_space)
        self._remembers = chunk > 1 or bool(initial_state(1)) or any(entry.num_frames > 1 for entry in inputs)
        self.reset()

    def reset(self, mask: NDArray[np.bool_] | Tensor | Sequence[bool] | None = None) -> None:
        """Begin new episodes: in all environments, or in those of a boolean mask ``[N]``."""
        if mask is None:
            self._num_envs: int | None = None
            self._states: RecurrentState = {}
            self._frames: dict[str, NDArray[Any]] = {}
            self._chunks = np.zeros(0)
            self._left = np.zeros(0, np.int64)
            """Steps of each environment's chunk that are still to be returned."""
            return
        chosen = np.atleast_1d(mask.cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask))
        if chosen.dtype != np.bool_ or chosen.ndim != 1 or len(chosen) != (self._num_envs or len(chosen)):
            count = "N" if self._num_envs is None else self._num_envs
            given = f"{chosen.dtype} of shape {list(chosen.shape)}"
            raise ObservationError(f"reset needs a mask of bool of shape [{count}], got {given}.")
        if self._num_envs is not None:
            self._left[chosen] = 0
            for window in self._frames.values():
                window[chosen] = 0
            for state in self._states.values():
                state[torch.from_numpy(chosen)] = 0

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Return the action for an observation, or the actions ``[N, ...]`` for those of N environments.

        Args:
            obs: an array or tensor, or a mapping of them by group, as the environment gives it. Groups that the policy
                does not read may be missing.
            deterministic: take the mode of the action distribution instead of sampling.

        Returns:
            NumPy values that ``env.step`` takes: in the units of the environment, inside the action space; integers of
            discrete actions.

        Raises:
            ObservationError: names the group, and the shape that it must have or the value that it cannot have.
        """
        tensors, is_single = self._read(obs)
        if self._remembers:
            self._begin(len(tensors[0]))
        if self.chunk > 1:
            actions = self._next_of_chunk(tensors, deterministic)
        else:
            action, self._states = self._act(tensors, self._states, deterministic)
            actions = self._decode(action.numpy())
        return actions[0] if is_single else actions

    def _begin(self, num_envs: int) -> None:
        """Create the memory of N environments; later calls must be for as many."""
        if self._num_envs is None:
            self._num_envs, self._states = num_envs, self._initial_state(num_envs)
            self._left = np.zeros(num_envs, np.int64)
            self._chunks = np.zeros((num_envs, self.chunk, *self.action_space.shape), self.action_space.dtype)  # type: ignore[misc]
        elif self._num_envs != num_envs:
            raise ObservationError(
                f"predict got {num_envs} observations, but remembers the episodes of {self._num_envs} environments; "
                "call reset() before you change their number."
            )

    def _next_of_chunk(self, tensors: Sequence[Tensor], deterministic: bool) -> NDArray[Any]:
        """Return the next step of every environment's chunk; where one is used up, the policy gives another."""
        rows = np.flatnonzero(self._left == 0)
        if len(rows):
            states = {name: state[rows] for name, state in self._states.items()}
            action, after = self._act([tensor[rows] for tensor in tensors], states, deterministic)
            for name, state in after.items():
                self._states[name][rows] = state
            steps = self._decode(action.numpy().reshape(len(rows) * self.chunk, -1))
            self._chunks[rows] = steps.reshape(len(rows), *self._chunks.shape[1:])
            self._left[rows] = self.chunk
        actions = self._chunks[np.arange(len(self._left)), self.chunk - self._left]
        self._left -= 1
        return actions

    def _read(self, obs: Any) -> tuple[list[Tensor], bool]:
        """Return the tensors ``[N, ...]`` of observations, and whether it is one observation."""
        tensors: list[Tensor] = []
        is_single = False
        for entry in self.inputs:
            array = self._array(entry, obs)
            is_alone = array.shape == entry.shape
            if is_alone:
                array = array[None]
            elif array.shape[1:] != entry.shape or not array.ndim:
                array, is_alone = self._with_past_frames(entry, array)
            if tensors and (is_alone, len(array)) != (is_single, len(tensors[0])):
                count = "one observation" if is_single else f"{len(tensors[0])} observations"
                raise _refused(entry, f"shape {list(array.shape)[is_alone:]} beside {count} of '{self.inputs[0].path}'")
            is_single = is_alone
            tensors.append(torch.from_numpy(array))
        return tensors, is_single

    def _array(self, entry: Input, obs: Any) -> NDArray[Any]:
        """Return a copy of one tensor of the observation as a contiguous array of its type."""
        value = obs
        if entry.path != OBSERVATION or hasattr(obs, "keys"):
            for key in entry.path.split("."):
                try:
                    value = value[int(key) if isinstance(value, tuple) else key]
                except (KeyError, IndexError, TypeError, ValueError):
                    found = sorted(map(str, obs.keys())) if hasattr(obs, "keys") else type(obs).__name__
                    raise _refused(entry, f"an observation without it: {found}") from None
        if isinstance(value, Tensor):
            # NumPy has no bfloat16.
            value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
        elif entry.path == INSTRUCTION_KEY and not isinstance(value, np.ndarray):
            value = _encoded(value)
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            raise _refused(entry, f"{value!r:.80}") from None
        if array.dtype.kind not in ("iub" if entry.dtype == np.uint8 else "fiub"):
            what = f"{array.dtype} of shape {list(array.shape)}" if array.dtype.kind != "O" else type(value).__name__
            raise _refused(entry, what)
        if entry.source is not None:
            array = _encoded_rows(entry, entry.source, array)
        if entry.dtype.kind != "f":
            return array.astype(entry.dtype, order="C")
        with np.errstate(over="ignore"):  # beyond the type is infinite, and refused
            numbers = array.astype(entry.dtype, order="C")
        if not np.isfinite(numbers).all():
            index = tuple(np.argwhere(~np.isfinite(numbers))[0].tolist())
            raise ObservationError(
                f"predict needs finite numbers of {entry.dtype} in {_name(entry)}, got {array[index]} at {list(index)}."
            )
        return numbers

    def _with_past_frames(self, entry: Input, array: NDArray[Any]) -> tuple[NDArray[Any], bool]:
        """Return windows ``[N, F * size]`` that end with the frames that were given, or refuse what is none."""
        size = entry.shape[0] // entry.num_frames if entry.num_frames > 1 and len(entry.shape) == 1 else None
        if array.ndim not in (1, 2) or array.shape[-1] != size:
            raise _refused(entry, f"shape {list(array.shape)}")
        is_single, frames = array.ndim == 1, np.atleast_2d(array)
        self._begin(len(frames))
        window = self._frames.get(entry.path, np.zeros((len(frames), *entry.shape), entry.dtype))
        self._frames[entry.path] = window = np.concatenate((window[:, size:], frames), 1)
        return window.copy(), is_single


def _refused(entry: Input, given: str) -> ObservationError:
    """Name what a policy needs and what it got."""
    shape = ", ".join(map(str, entry.shape))
    batch = f"[N, {shape}]" if shape else "[N]"
    source = f"{entry.source}, or encoded as " if entry.source is not None else ""
    return ObservationError(
        f"predict needs {_name(entry)} as {source}{entry.dtype} of shape [{shape}] or {batch}, got {given}."
    )


def _name(entry: Input) -> str:
    return "the observation" if entry.path == OBSERVATION else f"observation group '{entry.path}'"


def _encoded_rows(entry: Input, source: gym.Space[Any], array: NDArray[Any]) -> NDArray[Any]:
    """Encode what the environment gives as its adapter does; what is encoded already stays as it is.

    Integers in the shape of a discrete space, or of a batch of it, are values of it, not one-hot vectors.
    """
    shape = source.shape or ()
    is_single = array.shape == shape
    if not is_single and (array.ndim != len(shape) + 1 or array.shape[1:] != shape):
        return array
    if isinstance(source, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        if array.dtype.kind not in "iu":
            return array
        start, sizes = choice_ranges(source)
        array = array.astype(np.int64)
        values = array.reshape(-1, len(sizes))
        outside = (values < start) | (values >= start + sizes)
        if outside.any():
            raise _refused(entry, f"{values[outside][0]}")
    elif array.shape == entry.shape:
        return array
    rows, write = np.zeros((1 if is_single else len(array), *entry.shape), array.dtype), writer(source)
    for row, value in zip(rows, array[None] if is_single else array, strict=True):
        write(row, value)
    return rows[0] if is_single else rows


def _encoded(value: Any) -> Any:
    """Return an instruction, or a list of them, as the bytes that policies read."""
    if isinstance(value, str):
        return encode_instruction(value)
    if isinstance(value, list | tuple) and all(isinstance(text, str) for text in value):
        return np.stack([encode_instruction(text) for text in value])
    return value


# Policies of checkpoints


def of_policy(policy: Policy, spaces: Spaces) -> LoadedPolicy:
    """Let a policy in evaluation mode act; its parameters need no gradients."""
    boxes, device = leaf_spaces(spaces.observation_space), policy.device
    example = _example(spaces.observation_space, device)
    model = DeployedPolicy(policy, spaces.action_space, example).to(device)
    inputs = [
        Input(path, box.shape, box.dtype, num_frames(path, policy), getattr(box, "source", None))
        for path, box in ((path, boxes[path]) for path in model.paths)
    ]
    tensors = [torch.zeros(1, *entry.shape, dtype=_dtype(entry.dtype), device=device) for entry in inputs]
    memory = model.state_names
    flat = _flat(model, [*tensors, *policy.initial_memory(1).values()])

    @torch.no_grad()
    def act(tensors: Sequence[Tensor], states: RecurrentState, deterministic: bool) -> tuple[Tensor, RecurrentState]:
        if device.type != "cpu":
            tensors = [tensor.to(device) for tensor in tensors]
        if deterministic:
            action, *after = flat([*tensors, *(states[name] for name in memory)])
            states = {**states, **dict(zip(memory, after, strict=True))} if memory else states
        else:
            output = model.act(tensors, states, deterministic=False)
            action, states = output[ACTION], {name: output[name] for name in states}
        return action.cpu(), states

    return LoadedPolicy(inputs, _step_space(spaces), act, policy.initial_state, spaces.chunk)


def _flat(model: DeployedPolicy, inputs: Sequence[Tensor]) -> Model:
    """Return the model as one traced function, where it is known that nothing in it depends on data or is drawn."""
    modules = {type(module).__module__ for module in model.modules()}
    if all(name.startswith(("apexrl.", "torch.")) and not name.startswith(VLA) for name in modules):
        return as_model(traced(model, inputs).forward)
    return as_model(model)


def _step_space(spaces: Spaces) -> gym.Space[Any]:
    """Return the action space of one step: of a chunk, which holds several, the first."""
    space = spaces.action_space
    if spaces.chunk == 1:
        return space
    assert isinstance(space, gym.spaces.Box)
    low, high = (bound.reshape(spaces.chunk, -1)[0] for bound in (space.low, space.high))
    return gym.spaces.Box(low, high, dtype=space.dtype.type)


def _example(space: gym.Space[Any], device: torch.device) -> Observation:
    """Return an observation ``[1, ...]`` of zeros."""
    if isinstance(space, gym.spaces.Dict):
        parts = {name: _example(part, device) for name, part in space.spaces.items()}
        return TensorDict(parts, batch_size=[1], device=device)
    assert isinstance(space, gym.spaces.Box)
    return torch.zeros(1, *space.shape, dtype=_dtype(space.dtype), device=device)


def _dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype


# Exported policies


def _is_exported(path: Path) -> bool:
    """Whether a card lies beside a file and names it."""
    card = path.parent / CARD
    return path.name in FILES.values() and card.is_file() and path.name in _read_card(card)["files"]


def _read_card(path: Path) -> dict[str, Any]:
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        if card["format"] != CARD_FORMAT:
            raise CheckpointError(f"{path} has card format {card['format']}, but this apexrl reads {CARD_FORMAT}.")
        return {name: card[name] for name in ("files", "inputs", "outputs")}
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; it belongs to every exported policy."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no card of an exported policy ({error!r}). Export the policy again."
        ) from error


def _load_exported(path: Path) -> LoadedPolicy:
    """Load a directory that ``apexrl export`` wrote, or one file of it."""
    directory, name = (path, CARD) if path.is_dir() else (path.parent, path.name)
    card = _read_card(directory / CARD)
    formats = {FILES[kind]: kind for kind in ("torchscript", "onnx") if FILES[kind] in card["files"]}
    file = directory / (next(iter(formats), name) if name == CARD else name)
    if file.name not in formats:
        raise CheckpointError(f"{file} is not named in {directory / CARD}, which has {list(formats)}.")
    content = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(content).hexdigest() != card["files"][file.name]["sha256"]:
        raise CheckpointError(f"{file} is missing, or not the file that was exported with {CARD}. Export it again.")
    try:
        entries = [(entry, tuple(entry["shape"][1:])) for entry in card["inputs"]]
        inputs = [
            Input(entry["name"], shape, np.dtype(entry["dtype"]), entry["frames"], source and space_from_plain(source))
            for entry, shape in entries
            if "group" in entry
            for source in [entry.get("space")]
        ]
        memory = {entry["name"]: shape for entry, shape in entries if "group" not in entry}
        action_space = space_from_plain(card["outputs"][0]["space"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{directory / CARD} does not fit ({error!r}). Export the policy again.") from error
    model = READERS[formats[file.name]](file, [*(entry.path for entry in inputs), *memory])

    def act(tensors: Sequence[Tensor], states: RecurrentState, deterministic: bool) -> tuple[Tensor, RecurrentState]:
        if not deterministic:
            raise ConfigError(f"predict: {file} only gives deterministic actions; load the checkpoint to sample.")
        action, *after = model([*tensors, *(states[name] for name in memory)])
        return action, dict(zip(memory, after, strict=True))

    def initial_state(num_envs: int) -> RecurrentState:
        return {name: torch.zeros(num_envs, *shape) for name, shape in memory.items()}

    return LoadedPolicy(inputs, action_space, act, initial_state)
