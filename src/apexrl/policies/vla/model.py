"""Two transformers with joint attention: a prefix that reads the observation, an expert that writes actions.

Layer l of the expert attends to the keys and values of layer l of the prefix, and to its own tokens. The prefix never
sees the expert, so it is computed once for an observation and serves every denoising step. The two have the same heads
and their own widths (pi0, arXiv 2410.24164). Shapes: ``P`` tokens of the prefix, ``S`` denoising steps evaluated
together, ``C`` tokens of the chunk, ``H`` heads of width ``D``, ``W`` width of the prefix, ``E`` of the expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from apexrl.core.errors import ConfigError
from apexrl.policies.vla.lora import projection


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """How large the two transformers are."""

    width: int
    """Of the prefix."""
    depth: int
    """Layers of both."""
    num_heads: int
    """Attention heads of both."""
    expert_width: int
    """Of the action expert."""
    pool_text: bool = False
    """One token for the instruction instead of one a word."""
    num_buckets: int = 1024
    """Rows of each embedding table of words; a power of two."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "num_heads", "expert_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"policy.{name} must be at least 1, got {getattr(self, name)}.")
        if self.width % self.num_heads:
            raise ConfigError(f"policy.num_heads must divide policy.width {self.width}, got {self.num_heads}.")
        if self.expert_width % 2:
            raise ConfigError(f"policy.expert_width must be even, got {self.expert_width}.")


SIZES = {
    "tiny": Dimensions(width=128, depth=2, num_heads=4, expert_width=64, pool_text=True, num_buckets=512),
    "small": Dimensions(width=384, depth=6, num_heads=6, expert_width=192),
    "base": Dimensions(width=768, depth=12, num_heads=12, expert_width=384),
    "large": Dimensions(width=1024, depth=18, num_heads=16, expert_width=512),
}


@dataclass
class Prefix:
    """What the expert attends to: keys and values ``[B, H, P, D]`` of every layer."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    bias: Tensor | None
    """``[B, 1, 1, P]``: 0, or −∞ where a token is padding; None when nothing is."""


class PrefixLayer(nn.Module):
    """Attention over the prefix and a two-layer network, each with a residual."""

    def __init__(self, width: int, heads: int, depth: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = projection(width, 3 * width, rank=rank)
        self.out = projection(width, width, rank=rank, gain=(2 * depth) ** -0.5)
        self.mlp = feed_forward(width, depth, rank)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens ``[B, P, W]`` of the next layer, and this one's keys and values."""
        q, k, v = split_heads(self.qkv(self.norm(x)), 3, self.heads)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x), k, v


class LastPrefixLayer(nn.Module):
    """Keys and values alone: nobody reads what the last layer's tokens would become."""

    def __init__(self, width: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.kv = projection(width, 2 * width, rank=rank)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values."""
        k, v = split_heads(self.kv(self.norm(x)), 2, self.heads)
        return k, v


class PrefixTransformer(nn.Module):
    """Reads the tokens of an observation."""

    def __init__(self, size: Dimensions, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            PrefixLayer(size.width, size.num_heads, size.depth, rank) for _ in range(size.depth - 1)
        )
        self.last = LastPrefixLayer(size.width, size.num_heads, rank)

    def forward(self, x: Tensor, present: Tensor | None) -> Prefix:
        """Return keys and values of tokens ``[B, P, W]``; ``present [B, P]`` says which are no padding."""
        bias = None
        if present is not None:
            bias = torch.zeros_like(present, dtype=x.dtype).masked_fill_(~present, -math.inf)[:, None, None]
        keys_and_values = []
        for layer in self.layers:
            x, *pair = layer(x, bias)
            keys_and_values.append(pair)
        keys, values = zip(*keys_and_values, self.last(x), strict=True)
        return Prefix(keys, values, bias)


class ExpertLayer(nn.Module):
    """Joint attention over the prefix and the chunk, and a two-layer network, each with a residual."""

    def __init__(self, size: Dimensions, rank: int) -> None:
        super().__init__()
        self.heads = size.num_heads
        self.scale = (size.width // size.num_heads) ** -0.5
        self.norm = nn.LayerNorm(size.expert_width)
        self.qkv = projection(size.expert_width, 3 * size.width, rank=rank)
        self.out = projection(size.width, size.expert_width, rank=rank, gain=(2 * size.depth) ** -0.5)
        self.mlp = feed_forward(size.expert_width, size.depth, rank)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``[B, S, C, E]``; the chunks of different steps do not see each other."""
        batch, steps, chunk, _ = x.shape
        q, k, v = split_heads(self.qkv(self.norm(x)).flatten(1, 2), 3, self.heads)
        q = q * self.scale
        to_prefix = q @ keys.transpose(-1, -2)
        if bias is not None:
            to_prefix = to_prefix + bias
        # [B, H, S C, D] -> [B, H, S, C, D]: the prefix is shared by the steps and never copied for each.
        per_step = (batch, self.heads, steps, chunk, -1)
        to_chunk = (q.reshape(per_step) @ k.reshape(per_step).transpose(-1, -2)).flatten(2, 3)
        weight = torch.cat((to_prefix, to_chunk), -1).softmax(-1)
        on_prefix, on_chunk = weight.split((keys.shape[-2], chunk), -1)
        own = on_chunk.reshape(per_step) @ v.reshape(per_step)
        attended = on_prefix @ values + own.flatten(2, 3)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, steps, chunk, -1))
        output: Tensor = x + self.mlp(x)
        return output


class ActionExpert(nn.Module):
    """Turns the tokens of a chunk into one vector ``[A]`` each, looking at the prefix; LoRA ``rank`` 0 is none."""

    def __init__(self, size: Dimensions, chunk: int, num_actions: int, rank: int) -> None:
        super().__init__()
        self.chunk, self.num_actions = chunk, num_actions
        self.places = nn.Parameter(0.5 * torch.randn(chunk, size.expert_width))
        self.layers = nn.ModuleList(ExpertLayer(size, rank) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.expert_width)
        self.head = nn.Linear(size.expert_width, num_actions)
        nn.init.normal_(self.head.weight, std=0.01 * size.expert_width**-0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, prefix: Prefix, tokens: Tensor | None = None) -> Tensor:
        """Return ``[B, S, C * A]`` for tokens ``[B, S, C, E]`` that are added to the places; None is S = 1 without."""
        x = self.places.expand(prefix.keys[0].shape[0], 1, -1, -1) if tokens is None else tokens + self.places
        for layer, keys, values in zip(self.layers, prefix.keys, prefix.values, strict=True):
            x = layer(x, keys, values, prefix.bias)
        output: Tensor = self.head(self.norm(x))
        return output.flatten(-2)


def feed_forward(width: int, depth: int, rank: int) -> nn.Sequential:
    """Normalise, widen four times, narrow."""
    return nn.Sequential(
        nn.LayerNorm(width),
        projection(width, 4 * width, rank=rank),
        nn.GELU(approximate="tanh"),
        projection(4 * width, width, rank=rank, gain=(2 * depth) ** -0.5),
    )


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """``[B, L, parts * H * D]`` to ``parts`` tensors ``[B, H, L, D]``."""
    batch, length, _ = x.shape
    return x.view(batch, length, parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
