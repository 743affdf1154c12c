"""Where numbers go: JSON lines always; TensorBoard, Weights & Biases and the console on request."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from apexrl.core.errors import ConfigError
from apexrl.core.system.files import append_json_line, writing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_SHOWN = {
    "time/fps": ("steps/s", "{:,.0f}"),
    "rollout/return": ("return", "{:.1f}"),
    "rollout/success_rate": ("success", "{:.0%}"),
    "eval/return": ("eval", "{:.1f}"),
    "eval/success_rate": ("eval success", "{:.0%}"),
}


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

    def flush(self) -> None:
        """Write what is pending, and leave the terminal to others: training has ended for now."""
        return

    def close(self) -> None:
        """Flush and close."""
        return


class JsonlLogger(Logger):
    """Appends to a file. A line is written whole or, after a kill, cut off at the next resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, values: Mapping[str, float]) -> None:
        """Append one line."""
        append_json_line(self.path, values)


class TensorBoardLogger(Logger):
    """Writes every number as a scalar over environment steps; the first number opens the file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.writer: SummaryWriter | None = None

    def _open(self, total_steps: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _show_unless_handed_on
        # After a resume, points past the checkpoint are hidden instead of drawn twice.
        return SummaryWriter(str(self.directory), purge_step=total_steps)

    def log(self, values: Mapping[str, float]) -> None:
        """Write the scalars.

        Raises:
            RunDirError: when those of an earlier call could not be written.
        """
        total_steps = int(values["total_steps"])
        with writing(self.directory):
            self.writer = self.writer or self._open(total_steps)
            for name, value in values.items():
                if "/" in name:
                    self.writer.add_scalar(name, value, total_steps)

    def flush(self) -> None:
        """Write what is pending; on a full disk it is lost, the other logs have it."""
        if self.writer is not None:
            with suppress(OSError):
                self.writer.flush()

    def close(self) -> None:
        """Flush and close the event file; on a full disk what is left is lost, the other logs have it."""
        if self.writer is not None:
            with suppress(OSError):
                self.writer.close()


def _show_unless_handed_on(arguments: threading.ExceptHookArgs) -> None:
    """Leave the exceptions of TensorBoard's thread to the next ``log``, which raises them."""
    if not type(arguments.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(arguments)


class WandbLogger(Logger):
    """Sends numbers to a W&B run, or with ``mode="offline"`` to files that ``wandb sync`` can send later."""

    def __init__(
        self,
        directory: Path,
        *,
        project: str,
        mode: Literal["offline", "online"],
        run_id: str,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "logging.wandb needs the wandb package: pip install 'apexrl[wandb]', or set logging.wandb to disabled."
            ) from error
        try:
            self.run = wandb.init(
                project=project,
                mode=mode,
                dir=str(directory),
                id=run_id,
                name=name,
                resume="allow",
                config=dict(config or {}),
            )
        except Exception as error:
            raise ConfigError(
                f"logging.wandb is {mode}, but Weights & Biases could not start: {error} "
                "Log in with 'wandb login', or set logging.wandb to offline or disabled."
            ) from error

    def log(self, values: Mapping[str, float]) -> None:
        """Send the numbers, over environment steps."""
        self.run.log(dict(values), step=int(values["total_steps"]))

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class ConsoleLogger(Logger):
    """Shows iteration, speed, return, success and time left: a bar in a terminal, a line in a notebook's cell.

    Anywhere else it prints a line every few seconds.

    Args:
        console: where to; standard output when not given.
        seconds_between_lines: at least, where there is no terminal.
    """

    shows_stages = True

    def __init__(self, console: Console | None = None, seconds_between_lines: float | None = None) -> None:
        self.console = console or Console()
        if seconds_between_lines is None:
            seconds_between_lines = 0.5 if self.console.is_jupyter else 5.0
        self.seconds_between_lines = seconds_between_lines
        self.seen: dict[str, float] = {}
        self.started = time.monotonic()
        self.first_done: float | None = None
        self.last_line = -float("inf")
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.cell: Any = None
        """The line in a notebook."""

    def log(self, values: Mapping[str, float]) -> None:
        """Remember the newest number of each kind."""
        self.seen.update(values)

    def progress(self, values: Mapping[str, float], done: float) -> None:
        """Move the bar, or write a line every few seconds and at the end."""
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
            steps = int(values["total_steps"])
            self._show(f"{done:4.0%}  steps {steps:,}  {self._status()}  left {self._seconds_left(done)}")

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        (self.bar.console if self.bar else self.console).print(text, highlight=False, markup=False, soft_wrap=True)

    def flush(self) -> None:
        """Leave the bar as it is and free the terminal; what follows is shown from its own beginning."""
        if self.bar is not None:
            self.bar.stop()
        self.bar = self.cell = self.first_done = None
        self.last_line = -float("inf")
        self.seen.clear()

    def close(self) -> None:
        """Free the terminal."""
        self.flush()

    def _show(self, line: str) -> None:
        """Print a line, which in a notebook replaces the one before."""
        if not self.console.is_jupyter:
            self.console.print(line, highlight=False, soft_wrap=True)
            return
        content = {"text/plain": line}
        if self.cell is None:
            self.cell = import_module("IPython.display").display(content, raw=True, display_id=True)
        else:
            self.cell.update(content, raw=True)

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
