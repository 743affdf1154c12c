"""LeRobot's policies (``smolvla``, ``pi0``) behind our interface; LeRobot is imported when one is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.core.observations import is_image, leaf_spaces, leaves
from apexrl.core.types import (
    ACTION,
    INSTRUCTION_KEY,
    OBSERVATION,
    SAMPLE_LOG_PROB,
    STATE_KEY,
    Carry,
    Evaluation,
    Observation,
)
from apexrl.policies.base import Policy, state_values
from apexrl.policies.vla.policy import VALID_STEPS, action_size
from apexrl.policies.vla.scaling import Scaling

KINDS = {
    "smolvla": ("lerobot.policies.smolvla.modeling_smolvla", "SmolVLAPolicy"),
    "pi0": ("lerobot.policies.pi0.modeling_pi0", "PI0Policy"),
}
STATE = "observation.state"
IMAGES = "observation.images"
TOKENS = "observation.language.tokens"
ATTENTION = "observation.language.attention_mask"

Tokenize: TypeAlias = Callable[[list[str]], tuple[Tensor, Tensor]]
"""Instructions to token ids ``[B, L]`` and a mask ``[B, L]`` of those that are no padding."""


class LeRobotPolicy(Policy):
    """A LeRobot policy that acts on our observations and learns by imitation.

    It gives no log-probabilities, so it is for BC and evaluation; ``evaluate`` and ``evaluate_actions`` say so.

    Args:
        observation_space: with ``state``, ``instruction`` and one uint8 ``[H, W, 3]`` group a camera.
        action_space: a Box of ``chunk * A`` numbers.
        policy: a LeRobot policy, or anything with its ``predict_action_chunk`` and ``forward``.
        tokenize: turns instructions into token ids ``[B, L]`` and a mask ``[B, L]``.
        chunk: actions that one step takes; the rest of the policy's own chunk is not used.
        cameras: LeRobot's name of each of our camera groups; None keeps the names.
    """

    has_value, has_own_loss = False, True

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        policy: nn.Module,
        tokenize: Tokenize,
        chunk: int,
        cameras: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(observation_space, action_space)
        spaces = leaf_spaces(observation_space)
        for name in (STATE_KEY, INSTRUCTION_KEY):
            if name not in spaces:
                raise ConfigError(f"A LeRobot policy needs the observation group '{name}'; there are {list(spaces)}.")
        images = [path for path, box in spaces.items() if is_image(box)]
        cameras = cameras or {path: path for path in images}
        for path in cameras:
            if path not in images:
                hint = did_you_mean(path, images)
                raise ConfigError(f"policy.cameras names '{path}'; there are {images}.{hint}")
        self.chunk, self.cameras, self.vectors = chunk, dict(cameras), [STATE_KEY]
        self.num_actions = action_size(action_space, chunk)
        self.inner, self.tokenize = policy, tokenize
        longest = int(policy.config.chunk_size)  # type: ignore[union-attr, arg-type]
        if chunk > longest:
            raise ConfigError(f"policy.chunk must be at most the {longest} actions that it plans, got {chunk}.")
        # LeRobot normalises outside of its policies, so it is done here, as for our own.
        self.scaling = Scaling(int(np.prod(spaces[STATE_KEY].shape)), chunk * self.num_actions)

    @classmethod
    def load(
        cls,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        path: Path | str,
        kind: str = "smolvla",
        chunk: int = 5,
        cameras: Mapping[str, str] | None = None,
        tokenizer: Path | str | None = None,
    ) -> LeRobotPolicy:
        """Load a policy from a local directory; nothing is downloaded. The other arguments are the constructor's.

        Args:
            path: holds ``config.json`` and ``model.safetensors``.
            kind: ``smolvla`` or ``pi0``.
            tokenizer: a local directory; None looks beside the policy, then where its ``vlm_model_name`` points.
        """
        policy_class, path = import_policy_class(kind), Path(path)
        if not (path / "config.json").is_file():
            raise ConfigError(f"policy.path '{path}' holds no LeRobot policy (config.json). Name a local directory.")
        policy = policy_class.from_pretrained(str(path), local_files_only=True)
        beside = path if (path / "tokenizer.json").is_file() else getattr(policy.config, "vlm_model_name", path)
        tokenize = _load_tokenizer(Path(tokenizer or beside), policy.config)
        return cls(observation_space, action_space, policy=policy, tokenize=tokenize, chunk=chunk, cameras=cameras)

    def set_statistics(self, *statistics: Tensor, min_std: float = 0.05) -> None:
        """Normalise by statistics of demonstrations from here on, as ``VLAPolicy.set_statistics``."""
        self.scaling.set_statistics(*statistics, min_std=min_std)

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Return ``action``, the first ``chunk`` actions of its own chunk, and NaN for its log-probability.

        It follows the ordinary equation from noise that is drawn, ``deterministic`` or not, for it never explores.
        """
        obs, predict = carry[OBSERVATION], cast(Any, self.inner.predict_action_chunk)
        actions = predict(self.inputs(obs))[:, : self.chunk, : self.num_actions]
        action = self.scaling.restore_action(actions.reshape(*leaves(obs)[STATE_KEY].shape[:-1], -1))
        return {ACTION: action, SAMPLE_LOG_PROB: torch.full_like(action[..., :1], torch.nan)}

    def evaluate(self, batch: Mapping[str, Any] | TensorDict) -> Evaluation:
        """Refuse: it gives no log-probabilities."""
        raise ConfigError("A LeRobot policy gives no log-probabilities; use algo.name bc, or policy.kind vla.")

    def values(self, batch: Mapping[str, Any] | TensorDict) -> tuple[Tensor, Tensor]:
        """Return zeros: there is no critic."""
        return state_values(batch, lambda obs: torch.zeros_like(leaves(obs)[STATE_KEY][..., :1]))

    def imitation_loss(self, batch: Mapping[str, Any] | TensorDict) -> Tensor:
        """Return LeRobot's own loss ``[...]`` of each demonstrated chunk."""
        shape = batch[ACTION].shape[:-1]
        inputs = self.inputs(batch[OBSERVATION])
        actions = self.scaling.action(batch[ACTION]).reshape(-1, self.chunk, self.num_actions)
        config: Any = self.inner.config
        # The policy's own chunk may be longer: there the last action is held, and marked as padding.
        missing = config.chunk_size - self.chunk
        real = torch.full((len(actions), 1), self.chunk, device=actions.device)
        if VALID_STEPS in batch:
            real = batch[VALID_STEPS].reshape(-1, 1)
        inputs[ACTION] = torch.cat((actions, actions[:, -1:].expand(-1, missing, -1)), 1)
        inputs["actions_id_pad"] = torch.arange(config.chunk_size, device=actions.device) >= real
        loss: Tensor = self.inner.forward(inputs, reduction="none")[0]
        return loss.reshape(shape)

    def inputs(self, obs: Observation) -> dict[str, Tensor]:
        """Return an observation as LeRobot names and shapes it, its leading dimensions made one."""
        found = leaves(obs)
        state = found[STATE_KEY]
        batch = {STATE: self.scaling.state(state.reshape(-1, state.shape[-1]).float())}
        for path, name in self.cameras.items():
            images = found[path].reshape(-1, *found[path].shape[-3:])
            batch[f"{IMAGES}.{name}"] = images.permute(0, 3, 1, 2).float() / 255.0
        text = found[INSTRUCTION_KEY]
        ids, mask = self.tokenize(instructions(text.reshape(-1, text.shape[-1])))
        batch[TOKENS], batch[ATTENTION] = ids.to(state.device), mask.bool().to(state.device)
        return batch


def instructions(text: Tensor) -> list[str]:
    """Return the instructions of bytes ``[B, L]`` padded with zeros."""
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in text.cpu().numpy()]


def import_policy_class(kind: str) -> Any:
    """Return LeRobot's class of a kind of policy."""
    if kind not in KINDS:
        raise ConfigError(f"policy.kind must be one of {sorted(KINDS)}, got '{kind}'." + did_you_mean(kind, KINDS))
    module, name = KINDS[kind]
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"policy.kind {kind} needs LeRobot, which cannot be imported here ({error}): run the Python of its "
            "environment, which 'make test-lerobot' makes."
        ) from error


def _load_tokenizer(path: Path, config: Any) -> Tokenize:
    transformers = importlib.import_module("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.tokenizer '{path}' cannot be loaded ({error}). Name a local directory.") from error

    def tokenize(texts: list[str]) -> tuple[Tensor, Tensor]:
        # LeRobot's own preprocessing ends an instruction with a new line.
        lines = [f"{text}\n" for text in texts]
        length = int(config.tokenizer_max_length)
        made = tokenizer(lines, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return made["input_ids"], made["attention_mask"]

    return tokenize
