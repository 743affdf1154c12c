"""A live progress display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from apexrl.agent.loggers.base import Logger

_SHOWN = {
    "time/fps": ("steps/s", "{:,.0f}"),
    "rollout/return": ("return", "{:.1f}"),
    "rollout/success_rate": ("success", "{:.0%}"),
    "eval/return": ("eval", "{:.1f}"),
    "eval/success_rate": ("eval success", "{:.0%}"),
}


class ConsoleLogger(Logger):
    """Shows iteration, speed, return, success and time left."""

    shows_stages = True

    def __init__(self, console: Console | None = None, seconds_between_lines: float = 5.0) -> None:
        self.console = console or Console()
        self.seconds_between_lines = seconds_between_lines
        self.seen: dict[str, float] = {}
        self.started = time.monotonic()
        self.first_done: float | None = None
        self.last_line = -float("inf")
        self.bar: Progress | None = None
        self.task: TaskID | None = None

    def log(self, values: Mapping[str, float]) -> None:
        """Remember the newest number of each kind."""
        self.seen.update(values)

    def progress(self, values: Mapping[str, float], done: float) -> None:
        """Move the bar, or print a line every few seconds and at the end."""
        self.seen.update(values)
        if self.first_done is None:
            self.first_done = done
            self.started = time.monotonic()
        if self.console.is_terminal:
            self._move_bar(done)
            return
        now = time.monotonic()
        if now - self.last_line >= self.seconds_between_lines or done >= 1.0:
            self.last_line = now
            self.console.print(
                f"{done:4.0%}  steps {int(values['total_steps']):,}  {self._status()}  left {self._seconds_left(done)}",
                highlight=False,
                soft_wrap=True,
            )

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        (self.bar.console if self.bar else self.console).print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it is and free the terminal; what follows is shown from its own beginning."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        self.first_done, self.last_line = None, -float("inf")
        self.seen.clear()

    def _status(self) -> str:
        parts = [f"iteration {int(self.seen['iteration'])}"]
        parts += [
            f"{label} {style.format(self.seen[key])}" for key, (label, style) in _SHOWN.items() if key in self.seen
        ]
        return "  ".join(parts)

    def _seconds_left(self, done: float) -> str:
        assert self.first_done is not None
        since = done - self.first_done
        if since <= 0:
            return "?"
        seconds = max(0, int((1.0 - done) * (time.monotonic() - self.started) / since))
        return f"{seconds // 60}:{seconds % 60:02d}"

    def _move_bar(self, done: float) -> None:
        if self.bar is None:
            self.bar = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.description}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task(self._status(), total=1.0)
        assert self.task is not None
        self.bar.update(self.task, completed=done, description=self._status())
        self.bar.start()  # again does no harm
