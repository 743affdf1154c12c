"""Instructions in plain language, as the bytes that observations hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import ConfigError

INSTRUCTION_BYTES = 96
"""How long an instruction is in an observation: UTF-8, padded with zeros."""


def encode_instruction(text: str) -> NDArray[np.uint8]:
    """Return an instruction as observations hold it, padded with zeros to ``INSTRUCTION_BYTES``.

    Raises:
        ConfigError: when it is longer.
    """
    data = text.encode()
    if len(data) > INSTRUCTION_BYTES:
        raise ConfigError(
            f"An instruction may have {INSTRUCTION_BYTES} bytes, got {len(data)} bytes: '{text}'. Shorten it."
        )
    return np.frombuffer(data.ljust(INSTRUCTION_BYTES, b"\0"), np.uint8)
