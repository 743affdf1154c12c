"""TensorBoard event files."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from apexrl.agent.loggers.base import Logger
from apexrl.core.system import files

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
        with files.writing(self.directory):
            self.writer = self.writer or self._open(total_steps)
            for name, value in values.items():
                if "/" in name:
                    self.writer.add_scalar(name, value, total_steps)

    def close(self) -> None:
        """Flush and close the event file; on a full disk what is left is lost, the other logs have it."""
        if self.writer is not None:
            with suppress(OSError):
                self.writer.close()


def _show_unless_handed_on(arguments: threading.ExceptHookArgs) -> None:
    """Leave the exceptions of TensorBoard's thread to the next ``log``, which raises them."""
    if not type(arguments.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(arguments)
