"""Try an installed wheel outside of the source tree: import everything, train, resume, evaluate, load from Python.

``make test-wheel`` runs it in an environment that holds the wheel and its base dependencies only.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import apexrl
from apexrl.core.errors import ApexRLError

OPTIONAL = {"h5py", "mujoco", "optuna", "plotly", "jinja2", "ray", "wandb", "onnx", "metaworld", "gymnasium_robotics"}
"""What extras install: a module of the package may ask for one of these, and for nothing else."""
COMMANDS = (
    "--help",
    "list",
    "train lift_ppo --training.total_timesteps 20000 --training.final_eval_episodes 5 --run-dir runs/first",
    "train --resume runs/first --training.total_timesteps 30000",
    "eval runs/first --episodes 5",
    "play runs/first",
    "plot runs/first",
    "export runs/first --format torchscript",
)


def import_all() -> int:
    """Import every module; what is missing must be optional."""
    modules = [module.name for module in pkgutil.walk_packages(apexrl.__path__, "apexrl.")]
    for name in modules:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise
        except ApexRLError as error:
            if "pip install" not in str(error):
                raise
    return len(modules)


def main() -> None:
    """Run every command in an empty directory."""
    place = Path(apexrl.__file__).resolve()
    assert place.is_relative_to(Path(sys.prefix).resolve()), f"apexrl comes from {place}, not from the wheel"
    assert version("apexrl") == apexrl.__version__
    print(f"{import_all()} modules")
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for command in COMMANDS:
            print(f"apexrl {command}", flush=True)
            program = Path(sys.prefix) / "bin" / "apexrl"
            subprocess.run([program, *command.split()], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
