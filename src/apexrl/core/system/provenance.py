"""Where a number comes from: versions, commit and machine; and the record of them that every run keeps."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from apexrl.core.system import distributed, files
from apexrl.core.system.files import read_json_lines

PACKAGES = ("apexrl", "torch", "numpy", "scipy", "gymnasium", "mujoco", "gymnasium-robotics", "metaworld", "hf-libero")
"""Whose versions may change a result."""
STARTS = "starts.jsonl"
"""One line for every time that a run was started or resumed."""


def provenance() -> dict[str, Any]:
    """Return what a result may depend on: versions of packages, the commit of this one, the machine."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "commit": _commit(), "platform": platform.platform()}


def add_start(run_dir: Path, iteration: int, device: torch.device) -> None:
    """Add a line to ``starts.jsonl`` of a run that starts (iteration 0) or resumes; the file is replaced atomically."""
    machine = {
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": distributed.world_size(),
    }
    start = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "iteration": iteration, **provenance(), "machine": machine}
    path = run_dir / STARTS
    files.replace_text(path, "".join(f"{json.dumps(record)}\n" for record in [*read_json_lines(path), start]))


def _commit() -> str | None:
    """Return the commit of the package's sources, with ``-dirty`` when they were changed; None when it is not known."""
    file = Path(__file__).parents[2] / "__init__.py"
    try:
        # An installed package may lie inside of somebody else's repository.
        _git(file, "ls-files", "--error-unmatch", file.name)
        changed = _git(file, "status", "--porcelain", "--untracked-files=no", ".")
        return _git(file, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(file: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=file.parent, capture_output=True, text=True, check=True)
    return done.stdout.strip()
