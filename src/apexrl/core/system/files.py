"""Files that are there whole or not at all, files with one JSON object per line, and locked directories."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import IO, Any

from apexrl.core.errors import RunDirError

PART = ".part"
"""How the name of a file ends that is not whole yet."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file when the disk is full, or it cannot be written for another reason.

    Raises:
        RunDirError: in place of an ``OSError`` in the block, or of what HDF5 and PyTorch raise as they close a file.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # PyTorch's own error, about an archive without an end, hides what the file said; HDF5's holds the number.
        number = getattr(error.__context__ if isinstance(error, RuntimeError) else error, "errno", None)
        number = number or int((re.findall(r"errno = (\d+)", str(error)) or [0])[0])
        if isinstance(error, RuntimeError) and not number:
            raise
        reason = os.strerror(number) if number else error  # HDF5's own text is long, and names a temporary file
        raise RunDirError(f"{path} cannot be written: {reason}.") from error


@contextmanager
def replacing(path: Path) -> Iterator[BufferedWriter]:
    """Write a file under another name, force it to the disk, and rename: a kill leaves the old file or the new one.

    Raises:
        RunDirError: when it cannot be written; the old file is then as it was, and the space is free again.
    """
    temporary = path.with_name(f".{path.name}{PART}")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def replace_text(path: Path, text: str) -> Path:
    """Replace a file by a text, at once."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))
    return path


def write_json(path: Path, content: Any) -> Path:
    """Replace a JSON file atomically."""
    return replace_text(path, json.dumps(content, indent=1))


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one object to a JSON-lines file, without the numbers that JSON does not know: NaN and infinities.

    Raises:
        RunDirError: when it cannot be written.
    """
    known = {
        name: value
        for name, value in record.items()
        if all(not isinstance(x, float) or math.isfinite(x) for x in (value if isinstance(value, list) else [value]))
    }
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(known, allow_nan=False) + "\n")


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
    """Drop the lines after an iteration, so that a resumed run writes them again, and those that are damaged.

    The file is replaced atomically.

    Args:
        path: a file that need not exist.
        last_iteration: the newest that stays.
        max_lines: how many lines stay at most.
    """
    if not path.exists():
        return
    kept = []
    for record in read_json_lines(path):
        iteration = record.get("iteration", 0)
        if isinstance(iteration, int | float) and iteration <= last_iteration:
            kept.append(json.dumps(record) + "\n")
    replace_text(path, "".join(kept[:max_lines]))


def remove_parts(directory: Path) -> None:
    """Delete what processes that were killed while they wrote have left in a directory."""
    for path in directory.glob(f".*{PART}"):
        with suppress(OSError):
            path.unlink()


class DirectoryLock:
    """Keeps other processes from writing into a directory; it ends with the process, however that ends.

    Args:
        directory: that exists.
    """

    NAME = ".lock"

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / self.NAME
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take it.

        Raises:
            RunDirError: when another process has it, or the directory cannot be written.
        """
        while self._file is None:
            with writing(self.path):
                file = self.path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise RunDirError(
                    f"{self.directory} is in use: {holder} is training there. Wait for it or stop it, or name another "
                    "directory."
                ) from None
            except OSError:  # a network's file system without locks
                pass
            if self._is_current(file):
                self._file = file
            else:  # its last owner has deleted it meanwhile
                file.close()
        with suppress(OSError):  # a full disk: the lock holds without a name in it
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.flush()

    def _is_current(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give it back, if it is held."""
        if self._file is not None:
            with suppress(OSError):
                self.path.unlink()
            with suppress(OSError):
                self._file.close()
            self._file = None
