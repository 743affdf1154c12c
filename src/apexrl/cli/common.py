"""What the commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress

Overrides = list[tuple[str, str]]
"""``section.key`` and the text given for it."""
Command = Callable[[argparse.Namespace, Overrides], int]


def warn(note: str) -> None:
    """Say what is left out or done otherwise; it is no part of the output."""
    print(f"apexrl: {note}", file=sys.stderr)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while whole episodes are counted; nothing without a terminal."""
    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.update(task, completed=count)
