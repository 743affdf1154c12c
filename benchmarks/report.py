"""What every benchmark writes beside its numbers: machine, versions, commit, command, date."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Describe where a benchmark ran."""
    packages = ("apexrl", "torch", "gymnasium", "mujoco", "stable-baselines3", "rsl-rl-lib", "numpy")
    return {
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": _gpu(),
            "python": platform.python_version(),
        },
        "versions": {name: _version(name) for name in packages},
        "commit": commit(),
        **_command(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _command() -> dict[str, str]:
    """Return how to run it again; nothing for a program that lies elsewhere."""
    script = Path(sys.argv[0])
    if script.resolve().parent != Path(__file__).resolve().parent:
        return {}
    return {"command": shlex.join(["python", f"benchmarks/{script.name}", *sys.argv[1:]])}


def write(name: str, content: dict[str, Any], *, path: Path | None = None, commit: str | None = None) -> Path:
    """Write ``benchmarks/<name>.json``, or another file; the commit where git does not know it."""
    path = path or Path(__file__).parent / f"{name}.json"
    known = {**environment(), **({"commit": commit} if commit else {})}
    path.write_text(json.dumps({**content, **known}, indent=1) + "\n")
    return path


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
