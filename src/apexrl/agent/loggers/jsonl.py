"""One JSON object a line: the record that every run keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from apexrl.agent.loggers.base import Logger
from apexrl.core.system.json_lines import append_json_line


class JsonlLogger(Logger):
    """Appends to a file. A line is written whole or, after a kill, cut off at the next resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, values: Mapping[str, float]) -> None:
        """Append one line."""
        append_json_line(self.path, values)
