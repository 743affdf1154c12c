"""Files that are there whole or not at all, and directories that one process at a time writes into."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import IO, Any

from apexrl.core.errors import RunDirError
from apexrl.core.system import files

PART = ".part"
"""How the name of a file ends that is not whole yet."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file when the disk is full, or it cannot be written for another reason.

    Raises:
        RunDirError: in place of an ``OSError`` in the block, or of what HDF5 raises as it closes a file.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        number = getattr(error, "errno", None) or int((re.findall(r"errno = (\d+)", str(error)) or [0])[0])
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


def write_json(path: Path, content: Any) -> Path:
    """Replace a JSON file atomically."""
    return files.replace_text(path, json.dumps(content, indent=1))
