"""TensorBoard event files."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from apexrl.agent.loggers.base import Logger
from apexrl.core.system import files


class TensorBoardLogger(Logger):
    """Writes every number as a scalar over environment steps."""

    def __init__(self, directory: Path, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # After a resume, points past the checkpoint are hidden instead of drawn twice.
        self.directory = directory
        threading.excepthook = _show_unless_handed_on
        with files.writing(directory):
            self.writer = SummaryWriter(str(directory), purge_step=purge_step)

    def log(self, values: Mapping[str, float]) -> None:
        """Write the scalars.

        Raises:
            RunDirError: when those of an earlier call could not be written.
        """
        with files.writing(self.directory):
            for name, value in values.items():
                if "/" in name:
                    self.writer.add_scalar(name, value, int(values["total_steps"]))

    def close(self) -> None:
        """Flush and close the event file; on a full disk what is left is lost, the other logs have it."""
        with suppress(OSError):
            self.writer.close()


def _show_unless_handed_on(arguments: threading.ExceptHookArgs) -> None:
    """Leave the exceptions of TensorBoard's thread to the next ``log``, which raises them."""
    if not type(arguments.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(arguments)
