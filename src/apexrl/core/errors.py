"""The exceptions users meet. The command line prints their message alone and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ApexRLError(Exception):
    """Base of every error whose message is written for the user."""


class ConfigError(ApexRLError, ValueError):
    """A configuration names an unknown field, or a field has an impossible value."""


class UntrustedError(ConfigError):
    """A file names a module that the user has not allowed to be imported."""


class EnvError(ApexRLError, RuntimeError):
    """An environment cannot be made, or broke its contract."""


class EnvStateError(ApexRLError, RuntimeError):
    """An environment could not be restored to a saved state."""


class CheckpointError(ApexRLError, RuntimeError):
    """A checkpoint is missing, damaged, of another version, or of another shape."""


class ObservationError(ApexRLError, ValueError):
    """An observation is not what a policy was trained on."""


class RunDirError(ApexRLError, RuntimeError):
    """A run directory is missing, not empty, or not writable."""


class DivergenceError(ApexRLError, RuntimeError):
    """A loss or a gradient is not finite."""


class ExportError(ApexRLError, RuntimeError):
    """A policy cannot be exported, or what was exported acts differently."""


class FewSamplesWarning(UserWarning):
    """A confidence interval rests on fewer than five samples."""


def plural(number: int, noun: str) -> str:
    """Return ``"1 group"`` or ``"2 groups"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def sentences(*parts: object) -> str:
    """Join messages, with a full stop between two where the first has no punctuation of its own."""
    *texts, last = (str(part).rstrip() for part in parts)
    return " ".join([*(text if text.endswith((".", "!", "?")) else f"{text}." for text in texts), last])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)
    return f" Did you mean '{close[0]}'?" if close else ""
