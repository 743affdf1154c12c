"""A live progress display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from apexrl.loggers.base import Logger

_SHOWN = {
    "time/fps": ("steps/s", "{:,.0f}"),
    "rollout/return": ("return", "{:.1f}"),
    "rollout/success_rate": ("success", "{:.0%}"),
    "eval/return": ("eval", "{:.1f}"),
    "eval/success_rate": ("eval success", "{:.0%}"),
}


class ConsoleLogger(Logger):
    """Shows iteration, speed, return, success and time left."""

    def __init__(self, console: Console | None = None, seconds_between_lines: float = 5.0) -> None:
        self.console = console or Console()
        self.seconds_between_lines = seconds_between_lines
        self.seen: dict[str, float] = {}
        self.started = time.monotonic()
        self.first_steps: float | None = None
        self.last_line = -float("inf")
        self.bar: Progress | None = None
        self.task: TaskID | None = None

    def log(self, values: Mapping[str, float]) -> None:
        """Remember the newest number of each kind."""
        self.seen.update(values)

    def progress(self, values: Mapping[str, float], target_steps: int) -> None:
        """Move the bar, or print a line every few seconds and at the end."""
        self.seen.update(values)
        if self.first_steps is None:
            self.first_steps = values["total_steps"]
            self.started = time.monotonic()
        if self.console.is_terminal:
            self._move_bar(values["total_steps"], target_steps)
            return
        now = time.monotonic()
        if now - self.last_line >= self.seconds_between_lines or values["total_steps"] >= target_steps:
            self.last_line = now
            left = self._seconds_left(values["total_steps"], target_steps)
            self.console.print(
                f"steps {int(values['total_steps']):,}/{target_steps:,}  {self._status()}  left {left}",
                highlight=False,
                soft_wrap=True,
            )

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        (self.bar.console if self.bar else self.console).print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it is and free the terminal."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _status(self) -> str:
        parts = [f"iteration {int(self.seen['iteration'])}"]
        parts += [
            f"{label} {style.format(self.seen[key])}" for key, (label, style) in _SHOWN.items() if key in self.seen
        ]
        return "  ".join(parts)

    def _seconds_left(self, steps: float, target: int) -> str:
        assert self.first_steps is not None
        done = steps - self.first_steps
        if done <= 0:
            return "?"
        seconds = int((target - steps) * (time.monotonic() - self.started) / done)
        return f"{max(seconds, 0) // 60}:{max(seconds, 0) % 60:02d}"

    def _move_bar(self, steps: float, target: int) -> None:
        if self.bar is None:
            self.bar = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.description}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task(self._status(), total=target, completed=int(steps))
            self.bar.start()
        assert self.task is not None
        self.bar.update(self.task, completed=steps, total=target, description=self._status())
