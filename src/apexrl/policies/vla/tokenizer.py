"""From an instruction's bytes to word tokens, with tensor operations alone: nothing is downloaded, nothing waits.

A word is a run of letters and digits (bytes above 127 count as letters); capitals are small letters. Its hash is

h = Σ_j (b_j + 1) · R[j] mod 2³¹,   j the position in the word, R fixed random numbers,

and its token is a pair of buckets ``(h · C₁ >> 31, h · C₂ >> 31) mod num_buckets``. An embedding adds one row of each
of two tables (hash embeddings, arXiv 1709.03933), so two words are mixed up only where both buckets agree: with 512
buckets one pair of words in 262,144. A test checks that the words of our suites are all told apart.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from apexrl.core import instructions
from apexrl.core.instructions import INSTRUCTION_BYTES

NUM_HASHES = 2
_MULTIPLIERS = (1_540_483_477, 2_027_808_485)
_MODULUS_MASK = 2**31 - 1


def instruction_tensor(text: str) -> Tensor:
    """Return an instruction as observations hold it: uint8 ``[96]``, padded with zeros.

    Raises:
        ConfigError: when it is too long.
    """
    return torch.tensor(instructions.encode_instruction(text))


class WordTokenizer(nn.Module):
    """Splits instructions into words and gives each a pair of bucket numbers.

    Args:
        max_words: words beyond this number are left out.
        num_buckets: rows of each embedding table; a power of two.
        length: bytes of an instruction.
    """

    is_letter: Tensor
    small: Tensor
    factors: Tensor
    multipliers: Tensor

    def __init__(self, max_words: int = 20, num_buckets: int = 512, length: int = INSTRUCTION_BYTES) -> None:
        super().__init__()
        self.max_words, self.num_buckets = max_words, num_buckets
        code = torch.arange(256)
        capital = (code >= ord("A")) & (code <= ord("Z"))
        digit = (code >= ord("0")) & (code <= ord("9"))
        letter = capital | digit | ((code >= ord("a")) & (code <= ord("z"))) | (code > 127)
        random = torch.Generator().manual_seed(20_260_101)
        constants = {
            "is_letter": letter,
            "small": torch.where(capital, code + 32, code) + 1,
            "factors": torch.randint(1, _MODULUS_MASK, (length,), generator=random),
            "multipliers": torch.tensor(_MULTIPLIERS),
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return buckets ``[B, max_words, 2]`` of bytes ``[B, L]``, and which words there are, ``[B, max_words]``."""
        code = text.long()
        letter = self.is_letter[code]
        starts = letter & ~torch.nn.functional.pad(letter, (1, 0))[:, :-1]
        place = torch.arange(text.shape[-1], device=text.device)
        offset = place - torch.where(starts, place, 0).cummax(-1).values
        terms = torch.where(letter, self.small[code] * self.factors[offset], 0)
        # Word 0 is a bin for what is no letter; words that are too many share the last bin, which is cut off.
        word = torch.where(letter, starts.cumsum(-1), 0).clamp_max(self.max_words + 1)
        sums = terms.new_zeros(text.shape[0], self.max_words + 2).scatter_add_(-1, word, terms)[:, 1:-1]
        hashes = (sums & _MODULUS_MASK).unsqueeze(-1) * self.multipliers
        return (hashes >> 31) & (self.num_buckets - 1), sums > 0
