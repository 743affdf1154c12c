"""User code at the trainer's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apexrl.core.errors import ConfigError, did_you_mean

EVENTS = ("pre_iteration", "post_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update")


class Callbacks:
    """Handlers by event, called in the order in which they were added.

    ``pre_*`` handlers get ``(runner)``, ``post_*`` handlers ``(runner, stats)``. An exception in a handler stops the
    run with its own traceback.
    """

    def __init__(self) -> None:
        self.handlers: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}

    def add(self, event: str, handler: Callable[..., Any]) -> None:
        """Add a handler to an event."""
        if event not in self.handlers:
            raise ConfigError(f"Unknown event '{event}'; events are {list(EVENTS)}.{did_you_mean(event, EVENTS)}")
        self.handlers[event].append(handler)

    def wanted(self, event: str) -> bool:
        """Say whether anything listens, so that nothing is brought to the host for nobody."""
        return bool(self.handlers[event])

    def fire(self, event: str, *arguments: Any) -> None:
        """Call the handlers of an event."""
        for handler in self.handlers[event]:
            handler(*arguments)
