"""One JSON object a line: the record that every run keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apexrl.loggers.base import Logger


class JsonlLogger(Logger):
    """Appends to a file. A line is written whole or, after a kill, cut off at the next resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, values: Mapping[str, float]) -> None:
        """Append one line."""
        append_json_line(self.path, values)


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one object to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file; a line that a kill cut off in the middle is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def cut_json_lines(path: Path, last_iteration: int) -> None:
    """Drop the lines after an iteration, so that a resumed run writes them anew. The file is replaced atomically."""
    if not path.exists():
        return
    kept = [record for record in read_json_lines(path) if record["iteration"] <= last_iteration]
    temporary = path.with_suffix(".part")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
