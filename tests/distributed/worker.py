"""One of the processes that ``torchrun`` starts for the tests: ``python -m tests.distributed.worker DIRECTORY``."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from pathlib import Path

import torch
from tests.distributed.cases import CASES
from tests.distributed.commands import commands

from apexrl import cli
from apexrl.core.system import distributed


def run(directory: Path) -> None:
    """Run every case and every command, and write down what came of it."""
    torch.set_num_threads(1)
    distributed.join_ranks(torch.device("cpu"))
    own = f"rank{distributed.rank()}"
    for name, case in CASES.items():
        try:
            torch.save(case(), directory / f"{name}.{own}.pt")
        except Exception:
            (directory / f"{name}.{own}.txt").write_text(traceback.format_exc())
    for name, arguments in commands(directory, distributed.rank()).items():
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code = cli.main(arguments)
        (directory / f"{name}.{own}.txt").write_text(f"{code}\n{errors.getvalue()}")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
