"""The towers of the prefix: state, instruction and images become tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from apexrl.core.errors import ConfigError
from apexrl.policies.vla.model import Dimensions
from apexrl.policies.vla.tokenizer import NUM_HASHES, WordTokenizer


class StateTower(nn.Module):
    """One token for the state ``[B, S]``."""

    def __init__(self, num_states: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_states, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, state: Tensor) -> Tensor:
        """Return ``[B, 1, W]``."""
        tokens: Tensor = self.layers(state)
        return tokens.unsqueeze(-2)


class TextTower(nn.Module):
    """A token for each word, or one for the whole instruction.

    One token joins the words with their places: faster, and enough to tell some dozen tasks apart. Words beyond
    ``max_words`` are left out.
    """

    def __init__(self, size: Dimensions, max_words: int) -> None:
        super().__init__()
        width = size.width
        self.tokenizer = WordTokenizer(max_words, size.num_buckets)
        # The two tables are one: the second hash looks up rows of its second half.
        self.words = nn.Embedding(NUM_HASHES * size.num_buckets, width)
        nn.init.normal_(self.words.weight, std=NUM_HASHES**-0.5)
        self.join: nn.Sequential | None = None
        if size.pool_text:
            # A word counts by its place, so that the sum tells an order.
            self.places = nn.Parameter(1.0 + 0.3 * torch.randn(max_words, 1))
            self.join = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        else:
            self.places = nn.Parameter(0.3 * torch.randn(max_words, width))

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens ``[B, L, W]`` of bytes, and which of them there are; None when all."""
        buckets, present = self.tokenizer(text)
        rows = buckets + torch.arange(NUM_HASHES, device=text.device) * self.tokenizer.num_buckets
        if self.join is None:
            return self.words(rows).sum(-2) + self.places, present
        weight = present.unsqueeze(-1) * self.places / present.sum(-1).clamp_min(1).sqrt()[:, None, None]
        weight = weight.to(self.words.weight.dtype).expand_as(rows).flatten(1)
        pooled = functional.embedding_bag(rows.flatten(1), self.words.weight, per_sample_weights=weight, mode="sum")
        return self.join(pooled).unsqueeze(-2), None


class ImageTower(nn.Module):
    """Stride-2 convolutions down to a grid of patches, for each camera its own places.

    Args:
        shape: of an image, ``[H, W, C]`` or ``[C, H, W]``.
        width: of a token.
        patch: pixels of a patch's side, a power of two.
        name: of the camera, for messages.
    """

    def __init__(self, shape: tuple[int, ...], width: int, patch: int, name: str) -> None:
        super().__init__()
        self.channels_last = shape[-1] < shape[0]
        channels, height, breadth = (shape[2], *shape[:2]) if self.channels_last else shape
        if patch < 2 or patch & (patch - 1) or patch > min(height, breadth):
            limit = f"the side of the images of '{name}' ({height} by {breadth})"
            raise ConfigError(f"policy.patch_size must be a power of two from 2 to {limit}, got {patch}.")
        num_layers = int(math.log2(patch))
        widths = [channels, *(max(16, width >> (num_layers - i)) for i in range(1, num_layers)), width]
        layers: list[nn.Module] = []
        for i in range(num_layers):
            layers += [nn.Conv2d(widths[i], widths[i + 1], 3, stride=2, padding=1), nn.SiLU()]
        self.stem = nn.Sequential(*layers[:-1])
        self.num_tokens = math.ceil(height / patch) * math.ceil(breadth / patch)
        self.places = nn.Parameter(0.02 * torch.randn(self.num_tokens, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, images: Tensor) -> Tensor:
        """Return tokens ``[B, num_tokens, W]`` of uint8 images ``[B, ...]``."""
        x = images.permute(0, 3, 1, 2) if self.channels_last else images
        # The image is converted in the weights' type, and centred.
        tokens = self.stem(x.to(self.places.dtype) / 127.5 - 1.0).flatten(2).transpose(1, 2)
        placed: Tensor = self.norm(tokens) + self.places
        return placed


def default_patch(shape: tuple[int, ...]) -> int:
    """An eighth of the image's height, rounded down to a power of two: at most some 64 patches."""
    height = shape[0] if shape[-1] < shape[0] else shape[1]
    return 1 << max(1, int(math.log2(max(2, height // 8))))
