"""Files with one JSON object per line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apexrl.core.system import files


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one object to a JSON-lines file, without the numbers that JSON does not know: NaN and infinities.

    Raises:
        RunDirError: when it cannot be written.
    """
    known = {name: value for name, value in record.items() if _is_finite(value)}
    with files.writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(known, allow_nan=False) + "\n")


def _is_finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file; a line that a kill cut off in the middle is left out."""
    return parse_json_lines(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []


def parse_json_lines(text: str) -> list[dict[str, Any]]:
    """Return the objects of a text with one a line; other lines are left out."""
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def cut_json_lines(path: Path, last_iteration: int, max_lines: int | None = None) -> None:
    """Drop the lines after an iteration, so that a resumed run writes them anew, and those that are damaged.

    The file is replaced atomically.

    Args:
        path: a file that need not exist.
        last_iteration: the newest that stays.
        max_lines: how many lines stay at most.
    """
    if not path.exists():
        return
    kept = [record for record in read_json_lines(path) if _is_up_to(last_iteration, record.get("iteration", 0))]
    kept = kept[:max_lines]
    files.replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def _is_up_to(last_iteration: int, iteration: Any) -> bool:
    return isinstance(iteration, int | float) and iteration <= last_iteration
