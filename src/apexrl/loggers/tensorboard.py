"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from apexrl.loggers.base import Logger


class TensorBoardLogger(Logger):
    """Writes every number as a scalar over environment steps."""

    def __init__(self, directory: Path, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # After a resume, points past the checkpoint are hidden instead of drawn twice.
        self.writer = SummaryWriter(str(directory), purge_step=purge_step)

    def log(self, values: Mapping[str, float]) -> None:
        """Write the scalars."""
        for name, value in values.items():
            if "/" in name:
                self.writer.add_scalar(name, value, int(values["total_steps"]))

    def close(self) -> None:
        """Flush and close the event file."""
        self.writer.close()
