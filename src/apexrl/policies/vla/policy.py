"""A vision-language-action policy: images, state and instruction in, a chunk of actions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, Self, get_args

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.core.observations import is_image, leaf_spaces, leaves, select_groups
from apexrl.core.types import ACTION, INSTRUCTION_KEY, OBSERVATION, SAMPLE_LOG_PROB, Carry, Evaluation, Observation
from apexrl.policies.base import Policy, state_values
from apexrl.policies.vla.flow import FlowHead, masked_mean_square
from apexrl.policies.vla.likelihood import LikelihoodHead
from apexrl.policies.vla.model import SIZES, ActionExpert, Dimensions, Prefix, PrefixTransformer
from apexrl.policies.vla.scaling import Scaling
from apexrl.policies.vla.towers import ImageTower, StateTower, TextTower, default_patch

DENOISING = "denoising"
"""``[..., K + 1, chunk * A]``: the path from noise to the normalised chunk that a flow policy took."""
VALID_STEPS = "valid_steps"
"""``[..., 1]``: how many actions of a chunk were demonstrated, or executed; the others do not count."""
HEAD_OPTIONS = {
    "likelihood": ("distribution", "init_std", "learn_std"),
    "flow": ("denoising_steps", "noise", "noise_level", "guidance"),
}
"""The fields of a ``VLAConfig`` that one head alone reads."""
Freezable = Literal["vision", "text", "state", "prefix", "expert"]
FREEZABLE = get_args(Freezable)


class VLAPolicy(Policy):
    """Tokens of images, instruction and state as a prefix; an action expert that attends to it; one of two heads.

    Args:
        observation_space: vectors (joined into the state), ``instruction`` (uint8 bytes), images; each may be absent.
        action_space: a Box of ``chunk * A`` numbers, row by row.
        chunk: actions that one step takes.
        head: like ``size``, ``width``, ``depth``, ``num_heads``, ``lora_rank`` and ``freeze`` as in ``VLAConfig``.
        expert_width: of the action expert; None is half of ``width``.
        pool_text: one token for the whole instruction instead of one per word; None is that of the size.
        max_words: of an instruction.
        patch_size: pixels of an image token's side; None makes about 8 by 8 tokens per image.
        normalize_obs: normalise the state by the statistics of demonstrations.
        value_head: value states, for PPO: a small network on the mean of the prefix's tokens.
        **head_options: of ``LikelihoodHead`` or ``FlowHead``.
    """

    has_own_loss = True

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        chunk: int = 1,
        head: Literal["likelihood", "flow"] = "likelihood",
        size: str = "tiny",
        width: int | None = None,
        depth: int | None = None,
        num_heads: int | None = None,
        expert_width: int | None = None,
        pool_text: bool | None = None,
        max_words: int = 20,
        patch_size: int | None = None,
        normalize_obs: bool = True,
        lora_rank: int = 0,
        freeze: Sequence[str] = (),
        value_head: bool = False,
        **head_options: Any,
    ) -> None:
        super().__init__(observation_space, action_space)
        num_actions = action_size(action_space, chunk)
        spaces = select_groups(leaf_spaces(observation_space), None, privileged=False)
        self.cameras = [path for path, box in spaces.items() if is_image(box)]
        self.vectors = [path for path in spaces if path not in self.cameras and path != INSTRUCTION_KEY]
        self.num_dims = {path: len(box.shape) for path, box in spaces.items()}
        if not self.cameras and not self.vectors:
            raise ConfigError(f"A vla policy needs a state or an image in the observation, got {observation_space}.")
        num_states = sum(int(np.prod(spaces[path].shape)) for path in self.vectors)
        dimensions = _dimensions(
            size, width=width, depth=depth, num_heads=num_heads, expert_width=expert_width, pool_text=pool_text
        )
        self.chunk, self.dimensions = chunk, dimensions
        self.scaling = Scaling(num_states, chunk * num_actions, scale_states=normalize_obs)
        self.state_tower = StateTower(num_states, dimensions.width) if self.vectors else None
        self.text_tower = TextTower(dimensions, max_words) if INSTRUCTION_KEY in spaces else None
        # nn.ModuleDict refuses dots in names.
        self.vision_towers = nn.ModuleDict()
        for path in self.cameras:
            shape = spaces[path].shape
            tower = ImageTower(shape, dimensions.width, patch_size or default_patch(shape), path)
            self.vision_towers[path.replace(".", "/")] = tower
        self.prefix = PrefixTransformer(dimensions, lora_rank)
        self.expert = ActionExpert(dimensions, chunk, num_actions, lora_rank)
        self.likelihood: LikelihoodHead | None = None
        self.flow: FlowHead | None = None
        if head == "likelihood":
            self.likelihood = LikelihoodHead(chunk, num_actions, **head_options)
        elif head == "flow":
            self.flow = FlowHead(dimensions.expert_width, num_actions, **head_options)
        else:
            raise ConfigError(f"policy.head must be likelihood or flow, got '{head}'.")
        self._freeze(freeze, lora_rank)
        self.critic: nn.Sequential | None = None
        if value_head:
            D = dimensions.width
            self.critic = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU(), nn.Linear(D, 1))
        self.has_value = value_head
        self.extra_keys = () if self.flow is None else (DENOISING,)

    @classmethod
    def from_config(cls, cfg: Any, env: Any, critic_options: Mapping[str, Any], *, needs_value: bool) -> Self:
        """Create the policy of a ``VLAConfig``, whose fields are its options; it plans as the environment acts."""
        unread = {"kind", *(name for head, names in HEAD_OPTIONS.items() if head != cfg.head for name in names)}
        options = {name: value for name, value in asdict(cfg).items() if name not in unread}
        return cls.for_env(env, **options, chunk=env.chunk, value_head=needs_value)

    def set_statistics(
        self, state_mean: Tensor, state_std: Tensor, action_mean: Tensor, action_std: Tensor, *, min_std: float = 0.05
    ) -> None:
        """Normalise by statistics of demonstrations from here on: of states ``[S]``, of actions ``[A]`` or a chunk.

        ``min_std`` bounds the standard deviations: what hardly moved in a few demonstrations may move later.
        """
        self.scaling.set_statistics(state_mean, state_std, action_mean, action_std, min_std=min_std)

    def act(self, carry: Carry, deterministic: bool = False) -> dict[str, Tensor]:
        """Return ``action``, ``sample_log_prob`` and, of a flow policy, ``denoising``.

        ``deterministic`` takes the mean of the likelihood head, and the ordinary equation of the flow head, which draws
        where that starts: seed PyTorch to get the same action again.
        """
        shape, prefix = self._read(carry[OBSERVATION])
        if self.likelihood is not None:
            distribution = self.likelihood.forward(self._mean(shape, prefix))
            normalized = distribution.mode if deterministic else distribution.sample()
            action = self.scaling.restore_action(normalized)
            # Of the stored action, as training will see it, not of the number before rounding.
            return {ACTION: action, SAMPLE_LOG_PROB: distribution.log_prob(self.scaling.action(action))}
        assert self.flow is not None
        path, log_prob = self.flow.sample(self.expert, prefix, deterministic=deterministic)
        return {
            ACTION: self.scaling.restore_action(path[:, -1]).reshape(*shape, -1),
            SAMPLE_LOG_PROB: log_prob.reshape(*shape, 1),
            DENOISING: path.reshape(*shape, *path.shape[1:]),
        }

    def _score(
        self, shape: torch.Size, prefix: Prefix, action: Tensor, valid_steps: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        mask = self._mask(shape, valid_steps)
        if self.likelihood is not None:
            distribution = self.likelihood.forward(self._mean(shape, prefix))
            elements = distribution.elements(self.scaling.action(action)) * mask
            return elements.sum(-1, keepdim=True), distribution.entropy()
        assert self.flow is not None
        if action.ndim != len(shape) + 2:
            raise ValueError(
                f"A flow policy evaluates paths [..., {self.flow.num_noisy + 1}, {action.shape[-1]}], got actions "
                f"{list(action.shape)}. Give batch['{DENOISING}'], which act() returned, or call evaluate(batch)."
            )
        path = action.reshape(-1, *action.shape[-2:])
        log_prob, entropy = self.flow.evaluate(self.expert, prefix, path, mask.flatten(0, -2))
        return log_prob.reshape(*shape, 1), entropy.reshape(*shape, 1)

    def values(self, batch: Mapping[str, Any] | TensorDict) -> tuple[Tensor, Tensor]:
        """Value states; zeros without a value head."""

        if self.critic is None:
            return state_values(batch, lambda obs: torch.zeros(*self._shape(leaves(obs)), 1, device=self.device))
        return state_values(batch, lambda obs: self._value(*self._read(obs)))

    def _value(self, shape: torch.Size, prefix: Prefix) -> Tensor:
        """Return values ``[*shape, 1]`` from the mean of what the last layer makes of the tokens."""
        if self.critic is None:
            return torch.zeros(*shape, 1, device=self.device)
        tokens = prefix.values[-1].transpose(1, 2).flatten(2)
        if prefix.bias is None:
            mean = tokens.mean(1)
        else:
            present = (prefix.bias[:, 0, 0] == 0).unsqueeze(-1)
            mean = torch.where(present, tokens, 0.0).sum(1) / present.sum(1)
        value: Tensor = self.critic(mean)
        return value.float().reshape(*shape, 1)

    def evaluate(self, batch: Mapping[str, Any] | TensorDict) -> Evaluation:
        """Evaluate stored chunks ``[..., chunk * A]``; where ``valid_steps`` is given, only so many actions count.

        A flow policy gives probabilities to whole paths: ``denoising``, or else a path in the place of the action.
        """
        shape, prefix = self._read(batch[OBSERVATION])
        stored = batch[DENOISING if DENOISING in batch else ACTION]
        log_prob, entropy = self._score(shape, prefix, stored, batch.get(VALID_STEPS))
        return Evaluation(log_prob, entropy, self._value(shape, prefix))

    def imitation_loss(self, batch: Mapping[str, Any] | TensorDict) -> Tensor:
        """Return the loss ``[...]`` of each demonstrated chunk, ``[..., chunk * A]``.

        The negative log-likelihood, summed over the chunk, or the mean squared error of the flow's field.
        """
        shape, prefix = self._read(batch[OBSERVATION])
        action, mask = self.targets(batch)
        if self.likelihood is not None:
            loss = self.likelihood.imitation_loss(self._mean([len(action)], prefix), action, mask)
        else:
            assert self.flow is not None
            loss = self.flow.imitation_loss(self.expert, prefix, action, mask)
        return loss.reshape(shape)

    def imitation_error(self, batch: Mapping[str, Any] | TensorDict) -> Tensor:
        """Return the mean squared error ``[...]`` of each demonstrated chunk, over its numbers and for both heads.

        Of the likelihood head's mean, on normalised actions, or of the flow's field.
        """
        if self.flow is not None:
            return self.imitation_loss(batch)
        shape, prefix = self._read(batch[OBSERVATION])
        action, mask = self.targets(batch)
        return masked_mean_square(self._mean([len(action)], prefix) - action, mask).reshape(shape)

    def targets(self, batch: Mapping[str, Any] | TensorDict) -> tuple[Tensor, Tensor]:
        """Return normalised chunks ``[B, chunk * A]`` of a batch, and 1 for every number that is no padding."""
        action = self.scaling.action(batch[ACTION])
        return action.flatten(0, -2), self._mask(action.shape[:-1], batch.get(VALID_STEPS)).flatten(0, -2)

    def _mask(self, shape: torch.Size, valid_steps: Tensor | None) -> Tensor:
        """Return 1 for the numbers of a chunk that count, ``[*shape, chunk * A]``."""
        if valid_steps is None:
            return torch.ones(*shape, self.chunk * self.expert.num_actions, device=self.device)
        counts = torch.arange(self.chunk, device=self.device) < valid_steps
        return counts.repeat_interleave(self.expert.num_actions, -1).float()

    def read(self, obs: Observation) -> Prefix:
        """Return the prefix of observations, their leading dimensions made one."""
        return self._read(obs)[1]

    def _mean(self, shape: Sequence[int], prefix: Prefix) -> Tensor:
        """Return the mean of the likelihood head, ``[*shape, chunk * A]``."""
        mean: Tensor = self.expert(prefix).squeeze(1).float()
        return mean.reshape(*shape, -1)

    def _read(self, obs: Observation) -> tuple[torch.Size, Prefix]:
        """Return the leading dimensions of observations, and the prefix of all of them as one batch."""
        found = leaves(obs)
        shape = self._shape(found)
        tokens, present = [], None
        if self.state_tower is not None:
            parts = [found[path].reshape(shape.numel(), -1).float() for path in self.vectors]
            state = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            tokens.append(self.state_tower(self.scaling.state(state)))
        for path in self.cameras:
            images = found[path]
            tokens.append(self.vision_towers[path.replace(".", "/")](images.reshape(-1, *images.shape[-3:])))
        if self.text_tower is not None:
            words, present = self.text_tower(found[INSTRUCTION_KEY].reshape(shape.numel(), -1))
            if present is not None:
                others = present.new_ones(len(present), sum(part.shape[1] for part in tokens))
                present = torch.cat((others, present), -1)
            tokens.append(words)
        return shape, self.prefix(torch.cat(tokens, 1), present)

    def _shape(self, found: Mapping[str, Tensor]) -> torch.Size:
        """Return the leading dimensions of an observation's tensors."""
        path = (self.vectors or self.cameras)[0]
        return found[path].shape[: found[path].ndim - self.num_dims[path]]

    def _freeze(self, freeze: Sequence[str], lora_rank: int) -> None:
        modules = self.vision_towers, self.text_tower, self.state_tower, self.prefix, self.expert
        parts: dict[str, nn.Module | None] = dict(zip(FREEZABLE, modules, strict=True))
        for name, parameter in [*self.prefix.named_parameters(), *self.expert.layers.named_parameters()]:
            parameter.requires_grad_(not lora_rank or name.endswith(("lora_a", "lora_b")))
        for name in freeze:
            if name not in parts:
                hint = did_you_mean(name, FREEZABLE)
                raise ConfigError(f"policy.freeze must hold names of {list(FREEZABLE)}, got '{name}'.{hint}")
            if (part := parts[name]) is not None:
                part.requires_grad_(False)


def _dimensions(size: str, **changes: Any) -> Dimensions:
    """Return a named size with the parts that are given changed; the expert stays half as wide as the prefix."""
    if size not in SIZES:
        raise ConfigError(f"policy.size must be one of {list(SIZES)}, got '{size}'." + did_you_mean(size, SIZES))
    if changes["width"] is not None and changes["expert_width"] is None:
        changes["expert_width"] = changes["width"] // 2
    return replace(SIZES[size], **{name: value for name, value in changes.items() if value is not None})


def action_size(action_space: gym.Space[Any], chunk: int) -> int:
    """Return the numbers of one action of a chunk."""
    if not isinstance(action_space, gym.spaces.Box):
        raise ConfigError(f"A vla policy needs continuous actions (a Box), got {action_space}.")
    total = int(np.prod(action_space.shape))
    if chunk < 1 or total % chunk:
        raise ConfigError(f"policy.chunk must divide the {total} numbers of the action space, got {chunk}.")
    return total // chunk
