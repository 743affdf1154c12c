"""``apexrl report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from apexrl.cli.common import AddCommand, Overrides
from apexrl.cli.evaluate import check_output


def register(command: AddCommand) -> None:
    """Add the command."""
    report = command("report", "Write one HTML page about runs: curves, results, videos, configurations.", _report)
    report.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a run, or a directory of runs")
    report.add_argument("--output", type=Path, metavar="FILE.html", help="default report.html in the first directory")


def _report(options: argparse.Namespace, _: Overrides) -> int:
    from apexrl.experiments.report import write_report

    if options.output is not None:
        check_output(options.output)
    path = write_report(options.run_dirs, options.output or options.run_dirs[0] / "report.html")
    print(f"{path} ({path.stat().st_size / 2**20:.1f} MB)")
    return 0
