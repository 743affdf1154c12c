"""Files that are there whole or not at all, and directories that one process at a time writes into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.refusals import refused

from apexrl.core.errors import RunDirError
from apexrl.core.system.files import DirectoryLock, remove_parts, replace_text, replacing, writing


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    replace_text(path, "old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(path.parent) == ["a.txt"]


def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path: Path) -> None:
    path = replace_text(tmp_path / "a.txt", "old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise OSError(28, "No space left on device")

    with refused(RunDirError, path, "No space left on device"):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_other_exceptions_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(tmp_path):
        _ = 1 / 0


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.pt.part", "b.part", ".c"):
        (tmp_path / name).touch()
    remove_parts(tmp_path)
    assert names(tmp_path) == [".c", "b.part"]


def test_a_directory_has_one_writer_and_another_after_it(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    with refused(RunDirError, tmp_path, os.getpid()):
        second.acquire()
    second.release()  # holds nothing, so it takes nothing away
    with refused(RunDirError, tmp_path, "is in use"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    assert names(tmp_path) == []


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from apexrl.core.system.files import DirectoryLock\n"
        "DirectoryLock(Path(sys.argv[1])).acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert (tmp_path / DirectoryLock.NAME).exists()
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_file_that_was_deleted_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, other = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    opened = Path.open
    is_first = True

    def open_and_delete(path: Path, *arguments: str, **options: str) -> object:
        file = opened(path, *arguments, **options)  # type: ignore[call-overload]
        nonlocal is_first
        if is_first:
            is_first = False
            path.unlink()
        return file

    monkeypatch.setattr(Path, "open", open_and_delete)
    lock.acquire()
    with refused(RunDirError, tmp_path, "is in use"):
        other.acquire()
    lock.release()


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "Unable to create file (errno = 28, error message = 'No space left on device', buf = 0x55732e34)"),
        RuntimeError("Can't decrement id ref count (unable to close file, errno = 28, error message = '...')"),
    ],
    ids=["write", "close"],
)
def test_a_full_disk_that_hdf5_meets_is_said_in_few_words(tmp_path: Path, error: Exception) -> None:
    def fail(error: Exception) -> None:
        with writing(tmp_path / "a.hdf5"):
            raise error

    with refused(RunDirError, tmp_path / "a.hdf5", "No space left on device") as caught:
        fail(error)
    assert "buf" not in str(caught.value)
    with refused(RuntimeError, "another"):
        fail(RuntimeError("another"))
