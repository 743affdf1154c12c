"""Files that are damaged, and files that would run code if anybody let them."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from tests.contract.test_resume import Kill, arm
from tests.torture.harness import Line, Report, TinyRun, command, first_difference, output_of

from apexrl.agent import checkpoint

ALGORITHM_UPDATES = {"ppo": "ppo:PPO", "sac": "sac:SAC", "ppo_roa": "ppo_roa:PPOROA", "rloo": "rloo:RLOO"}


def interrupted(work: Path, run: TinyRun, after: int) -> Path:
    """Return a run that was killed in the update after ``after`` others."""
    run.complete(work)
    run_dir = work / f"{run.name}-interrupted"
    if not run_dir.exists():
        kill = Kill(f"apexrl.algorithms.{ALGORITHM_UPDATES[run.name]}.update", after)
        run.start(run_dir, (arm, (kill,)))
        assert len(checkpoint.numbered(run_dir / "checkpoints")) == 3
    return run_dir


def _truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(8 * len(content))
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def _zero(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content) - 512)
    return content[:start] + bytes(512) + content[start + 512 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": _truncate,
    "bit-flipped": _flip,
    "partly zeroed": _zero,
}


def damaged_checkpoints(report: Report, work: Path, run: TinyRun, count: int, draw: random.Random) -> None:
    """Damage the newest checkpoint, or the two newest, and resume: the one before is used, with a message.

    One that is read in spite of its damage, because that lies in padding, must have the same content.
    """
    source = interrupted(work, run, 11)
    for name, damage in DAMAGES.items():
        line = report.line(f"a {name} checkpoint, {run.name}")
        for number in range(count):
            run_dir = work / f"{run.name}-{name.split()[-1]}-{number}"
            shutil.copytree(source, run_dir)
            damaged = checkpoint.numbered(run_dir / "checkpoints")[-draw.choice((1, 1, 2)) :]
            for path in damaged:
                content = path.read_bytes()
                while (changed := damage(content, draw)) == content:
                    pass
                path.write_bytes(changed)
            rejected = list(takewhile(is_rejected, reversed(damaged)))
            problem = run.finish(run_dir)
            said = " ".join(output_of(run_dir).read_text().split())
            missing = [path.name for path in rejected if f"{path.name} is not a readable checkpoint" not in said]
            line.add(problem or (f"{run_dir.name}: nothing was said about {missing}" if missing else ""))
            shutil.rmtree(run_dir)


def damaged_reads(report: Report, work: Path, run: TinyRun, count: int, draw: random.Random) -> None:
    """Read a checkpoint with one changed bit, wherever it is: it is rejected, or has the same content."""
    line = report.line(f"a checkpoint with one changed bit is read, {run.name}")
    intact = checkpoint.latest(interrupted(work, run, 11) / "checkpoints")
    before, path = checkpoint.load(intact), work / "changed.pt"
    for _ in range(count):
        path.write_bytes(_flip(intact.read_bytes(), draw))
        place = "" if is_rejected(path) else first_difference(checkpoint.load(path), before, "checkpoint")
        line.add(f"a changed bit was read as another {place}" if place else "")


def is_rejected(path: Path) -> bool:
    """Whether a checkpoint is refused as damaged."""
    try:
        checkpoint.load(path)
    except checkpoint.DamagedCheckpointError:
        return True
    return False


def nothing_left(report: Report, work: Path, run: TinyRun, draw: random.Random) -> None:
    """Damage every checkpoint, the configuration, or the statistics: one message, and nothing changes."""
    line = report.line(f"files that nothing can replace are damaged, {run.name}")
    source = interrupted(work, run, 11)
    cases = {"every checkpoint": "checkpoints/*.pt", "the configuration": "config.yaml"}
    cases |= {"the statistics": "rollout_stats.json"} if (source / "rollout_stats.json").exists() else {}
    for name, pattern in cases.items():
        run_dir = work / f"{run.name}-without-{name.split()[-1]}"
        shutil.copytree(source, run_dir)
        for path in run_dir.glob(pattern):
            path.write_bytes(path.read_bytes()[: draw.randrange(20, 40)] + b": [")
        (run_dir / ".lock").unlink()  # of the process that was killed
        before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
        outcome = run.start(run_dir)
        after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
        problem = outcome.refusal(str(run_dir), names=f"{name}: ")
        line.add(problem or ("" if before == after else f"{name}: a refused resume changed files"))


# Code in files


class Payload:
    """Runs a command when it is unpickled by somebody who lets it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def _pickled(content: dict[str, Any], payload: Payload) -> bytes:
    return pickle.dumps({**content, "policy": payload})


def _archived(part: str, content: dict[str, Any], payload: Payload) -> bytes:
    buffer = io.BytesIO()
    torch.save({**content, part: {"x": payload}}, buffer)
    return buffer.getvalue()


def _scripted(content: dict[str, Any], payload: Payload) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), buffer)
    return buffer.getvalue()


def malicious_checkpoints(report: Report, work: Path, run: TinyRun, ways: int) -> None:
    """Put code into the checkpoints of a run, in several ways, and give it to every command that reads one."""
    line = report.line("a checkpoint that holds code, by every command")
    source, marker = interrupted(work, run, 11), work / "payload_ran"
    content = checkpoint.load(checkpoint.latest(source / "checkpoints"))
    payload = Payload(marker)
    makers: dict[str, Callable[[dict[str, Any], Payload], bytes]] = {
        "policy": partial(_archived, "policy"),
        "a pickle": _pickled,
        "a script": _scripted,
        **{part: partial(_archived, part) for part in ("algorithm", "rng", "config")},
    }
    for name, make in list(makers.items())[:ways]:
        run_dir = work / f"malicious-{name.split()[-1]}"
        shutil.copytree(source, run_dir)
        for path in checkpoint.numbered(run_dir / "checkpoints"):
            path.write_bytes(make(content, payload))
        if "script" not in name:
            pickle_runs(line, checkpoint.latest(run_dir / "checkpoints"), marker)
        newest = str(checkpoint.latest(run_dir / "checkpoints"))
        output = work / "malicious.txt"
        for arguments in (
            ["train", "--resume", str(run_dir)],
            ["train", "lift_ppo", "--training.init_from", str(run_dir), "--run-dir", str(work / "from")],
            ["eval", str(run_dir)],
            ["play", newest],
            ["export", str(run_dir)],
        ):
            parts = [
                newest,
                *(["it holds code (posix.system)"] if "pickle" not in name and "script" not in name else []),
            ]
            problem = command(arguments, output).refusal(*parts, names=f"{name} to {arguments[0]}: ")
            line.add(f"{name} to {arguments[0]}: ITS CODE RAN" if marker.exists() else problem)
            marker.unlink(missing_ok=True)
        shutil.rmtree(run_dir)


def pickle_runs(line: Line, path: Path, marker: Path) -> None:
    """Make sure that the payload runs where it may: else nothing would be shown by its silence."""
    try:
        torch.load(path, weights_only=False)
    except Exception:
        with path.open("rb") as file, suppress(Exception):
            pickle.load(file)
    if not marker.exists():
        line.add(f"the payload of {path} cannot run at all")
    marker.unlink(missing_ok=True)


YAML_CODE = (
    "task: !!python/object/apply:os.system ['touch {marker}']",
    "!!python/object/apply:os.system ['touch {marker}']",
    "task: {{id: !!python/object/new:os.system ['touch {marker}']}}",
    'algo: {{learning_rate: !!python/object/apply:eval [\'open("{marker}", "w")\']}}',
    "training: !!python/name:os.system",
    "task: !!python/module:os",
    "task: &a !!python/object/apply:subprocess.check_call [[touch, {marker}]]",
    "? !!python/object/apply:os.system ['touch {marker}']\n: 1",
)
YAML_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML_MAPPING_BOMB = "task:\n  kwargs: &a {x: 1}\n" + "\n".join(
    f"{name}: &{name} {{{', '.join(f'k{i}: *{before}' for i in range(9))}}}"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def malicious_configurations(report: Report, work: Path, run: TinyRun, ways: int) -> None:
    """Put code into configurations: files, overrides, and the file of a run that is resumed."""
    line = report.line("a configuration that holds code or a bomb")
    source, marker, output = interrupted(work, run, 11), work / "payload_ran", work / "malicious.txt"
    run_dir = work / "malicious-config"
    shutil.copytree(source, run_dir)
    bombs = (YAML_BOMB, YAML_MAPPING_BOMB, "task: {kwargs: " + "[" * 4000 + "]" * 4000 + "}")
    for text in (*YAML_CODE[:ways], *bombs[:ways]):
        code = text.format(marker=marker) if text in YAML_CODE else text
        file = work / "malicious.yaml"
        file.write_text(code)
        (run_dir / "config.yaml").write_text(code)
        override = code.partition(": ")[2] if code.startswith("task: ") and len(code) < 2000 else code
        for arguments in (
            ["train", str(file), "--run-dir", str(work / "new")],
            ["train", "--resume", str(run_dir)],
            ["train", "lift_ppo", "--task.id", override[:100_000], "--run-dir", str(work / "new")],
        ):
            problem = command(arguments, output).refusal(names=f"{code[:60]!r} to {arguments[1:3]}: ")
            ran = f"{code!r} to {arguments[1]}: ITS CODE RAN"
            line.add(ran if marker.exists() else problem or ("it was begun" if (work / "new").exists() else ""))
            marker.unlink(missing_ok=True)


def malicious_data(report: Report, work: Path) -> None:
    """Put code into demonstrations and statistics."""
    line = report.line("demonstrations and statistics that hold code")
    marker, output, demos = work / "payload_ran", work / "malicious.txt", work / "demos"
    demos.mkdir()
    stolen = np.frombuffer(pickle.dumps(Payload(marker)), np.uint8)
    with h5py.File(demos / "reach-v3_demo.hdf5", "w") as file:
        group = file.create_group("data/demo_0")
        file["data"].attrs["env_args"] = file["data"].attrs["problem_info"] = np.void(stolen.tobytes())
        group.attrs["init_state"] = group.attrs["num_samples"] = np.void(stolen.tobytes())
        for name in ("actions", "states", "rewards", "dones", "obs/state"):
            group[name] = stolen
    statistics = work / "stats.json"
    statistics.write_bytes(stolen.tobytes())
    suite = ["--task.benchmark_name", "metaworld:reach-v3", "--run-dir", str(work / "new"), "--training.device", "cpu"]
    for name, arguments in {
        "task.demos": ["train", "mt10_bc", "--task.demos", str(demos), *suite],
        "algo.rollout_stats_path": ["train", "stage11_ript_vla", "--algo.rollout_stats_path", str(statistics), *suite],
    }.items():
        problem = command(arguments, output).refusal(name, names=f"{name}: ")
        line.add(f"{name}: ITS CODE RAN" if marker.exists() else problem)
        marker.unlink(missing_ok=True)
