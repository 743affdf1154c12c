"""Files that the documentation has users write: blocks of code that begin with a file name."""

from __future__ import annotations

import re
from pathlib import Path

EXTENDING = Path(__file__).parents[1] / "docs" / "extending.md"


def write_files(directory: Path, page: Path = EXTENDING) -> dict[str, str]:
    """Write every file of a page, word for word; returns the files by name."""
    found = re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    files = {name: code for code, name in found}
    for name, code in files.items():
        (directory / name).write_text(code)
    return files
