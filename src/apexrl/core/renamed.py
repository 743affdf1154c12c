"""Fields of configurations that have another name now."""

from __future__ import annotations

from collections.abc import Iterable

RENAMED = {
    "actor_interval": "policy_delay",
    "chunk": "chunk_size",
    "clip": "clip_coef",
    "clip_high": "clip_coef_high",
    "clip_value": "value_clip_coef",
    "graphs": "cuda_graphs",
    "heads": "num_heads",
    "lam": "gae_lambda",
    "memory_dim": "rnn_hidden_dim",
    "picture_shift": "image_shift",
    "replay_capacity": "buffer_size",
}
"""Old name -> present name."""


def renamed(path: str, known: Iterable[str]) -> str:
    """Return a sentence about ``section.field`` if it has another name among ``known``, or an empty string."""
    section, _, name = path.rpartition(".")
    new = f"{section}.{RENAMED.get(name)}"
    return f"{path} was renamed to {new}." if new in known else ""
