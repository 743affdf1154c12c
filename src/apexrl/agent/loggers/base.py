"""The logger contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar


class Logger(ABC):
    """Receives numbers by name. ``values`` always holds ``iteration`` and ``total_steps``."""

    shows_stages: ClassVar[bool] = False
    """Whether it also follows what a run does before its first iteration, such as imitation, from 0 to 1 on its own."""

    @abstractmethod
    def log(self, values: Mapping[str, float]) -> None:
        """Record the numbers of one logged iteration or evaluation."""

    def progress(self, values: Mapping[str, float], done: float) -> None:
        """Show how far training is, ``done`` from 0 to 1; called every iteration, also those that are not logged."""
        return

    def message(self, text: str) -> None:
        """Show a line of text."""
        return

    def close(self) -> None:
        """Flush and close."""
        return
