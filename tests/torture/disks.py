"""A disk that is full or read-only: a small tmpfs in a mount namespace of its own, which needs no more rights."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import time
from contextlib import suppress
from pathlib import Path

from tests.torture import harness
from tests.torture.harness import Line, Outcome, Report, TinyRun, command, difference, end, output_of, unreadable

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18
DISK_SIZE = 8 * 2**20


class NoNamespaceError(Exception):
    """This system lets nobody mount a file system of his own."""


def disks(report: Report, work: Path, run: TinyRun, full: int, read_only: int, seed: int) -> None:
    """Fill a disk at different places of a run, and make one read-only; then mend that and go on."""
    run.complete(work)
    work.mkdir(exist_ok=True)
    result = work / "disks.json"
    process = harness.FORKSERVER.Process(target=_in_namespace, args=(str(work), run, full, read_only, seed))
    process.start()
    process.join()
    if not result.exists():
        report.line("a full or read-only disk").add(f"the scenario itself ended with exit code {process.exitcode}")
        return
    for found in json.loads(result.read_text()):
        line = report.line(found["what"])
        line.note = found["note"]
        line.lost += found["lost"]
        line.add(count=found["tried"])


def _in_namespace(work: str, run: TinyRun, full: int, read_only: int, seed: int) -> None:
    harness.context = multiprocessing.get_context("fork")  # the children must see the mount
    harness.outputs = Path(work)
    report, draw, disk = Report(), random.Random(seed), Path(work) / "disk"
    disk.mkdir()
    try:
        _mount(disk)
        _full_disk(report.line(f"a full disk (tmpfs), {run.name}"), disk, run, full, draw)
        _read_only_disk(report.line(f"a read-only disk, {run.name}"), disk, run, read_only, draw)
    except NoNamespaceError as error:
        report.line("a full or read-only disk").note = f"not tried: {error}"
    lines = [{"what": line.what, "tried": line.tried, "lost": line.lost, "note": line.note} for line in report.lines]
    (Path(work) / "disks.json").write_text(json.dumps(lines))


def _mount(disk: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS) and libc.unshare(CLONE_NEWNS | CLONE_NEWUSER):
        raise NoNamespaceError(f"unshare: {os.strerror(ctypes.get_errno())}")
    if user and os.getuid() != user:  # a new user namespace: be who we were, with the rights to mount
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call_mount(libc, None, Path("/"), MS_REC | MS_PRIVATE, None)
    _call_mount(libc, b"tmpfs", disk, 0, f"size={DISK_SIZE}".encode())


def _call_mount(libc: ctypes.CDLL, kind: bytes | None, path: Path, flags: int, options: bytes | None) -> None:
    if libc.mount(b"none", str(path).encode(), kind, flags, options):
        raise NoNamespaceError(f"mount: {os.strerror(ctypes.get_errno())}")


def _full_disk(line: Line, disk: Path, run: TinyRun, count: int, draw: random.Random) -> None:
    size = sum(path.stat().st_size for path in run.whole.rglob("*"))
    ballast, reasons = disk / "ballast", set()
    while line.tried < count:
        run_dir = disk / f"full-{line.tried}"
        if line.tried % 2:  # full when it is resumed
            process = run.launch(run_dir)
            process.join(draw.uniform(0.3, 0.9) * run.seconds)
            process.kill()
            process.join()
        left = draw.choice((0, 4096, draw.randrange(2**14), draw.randrange(size)))
        _fill(ballast, DISK_SIZE - left)
        outcome = run.start(run_dir)
        ballast.unlink()
        if outcome.code == 0:  # there was room for everything
            problem = difference(run_dir, run.whole)
        else:
            problem = outcome.refusal("cannot be written: No space left on device", names=f"{left} bytes were left: ")
            problem = problem or unreadable(run_dir) or run.finish(run_dir)
            reasons.add(_refused_file(outcome))
        line.add(problem)
        _remove(run_dir)
    line.note = f"met by {', '.join(sorted(reasons))}"


def _fill(path: Path, size: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):  # directories take some
        for _ in range(size // 4096):
            os.write(file, b"\0" * 4096)
    os.close(file)


def _refused_file(outcome: Outcome) -> str:
    path = (outcome.said.partition(" cannot be")[0].split() or [""])[-1]
    return "a checkpoint" if path.endswith(".pt") else "TensorBoard" if Path(path).is_dir() else Path(path).name


def _remove(run_dir: Path) -> None:
    if not run_dir.exists():  # it was refused before anything was written
        return
    for path in sorted(run_dir.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run_dir.rmdir()


def _read_only_disk(line: Line, disk: Path, run: TinyRun, count: int, draw: random.Random) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(count):
        run_dir = disk / f"read-only-{number}"
        process = run.launch(run_dir)
        process.join(draw.uniform(0.2, 0.9) * run.seconds)
        while process.exitcode is None:  # no file may be open for writing at that moment
            if not libc.mount(b"none", str(disk).encode(), None, MS_REMOUNT | MS_RDONLY, None):
                break
            time.sleep(0.0005)
        outcome = end(process, output_of(run_dir))
        problem = outcome.refusal("ead-only file system") if outcome.code else ""
        if outcome.code:
            problem = problem or _is_refused_now(run, run_dir, disk.parent / "read-only.txt")
        libc.mount(b"none", str(disk).encode(), None, MS_REMOUNT, None)
        line.add(problem or unreadable(run_dir) or run.finish(run_dir))
        _remove(run_dir)


def _is_refused_now(run: TinyRun, run_dir: Path, output: Path) -> str:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for arguments in (["train", "--resume", str(run_dir)], ["train", "lift_ppo", "--run-dir", str(run_dir / "new")]):
        problem = command(arguments, output, run.preparations).refusal("ead-only file system", names=f"{arguments}: ")
        if problem:
            return problem
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    return "" if before == after else "a refused run changed files"
