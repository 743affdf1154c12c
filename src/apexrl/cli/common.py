"""What the commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from apexrl.core.errors import ConfigError

Overrides = list[tuple[str, str]]
"""``section.key`` and the text given for it."""
Command = Callable[[argparse.Namespace, Overrides], int]


class Parser(argparse.ArgumentParser):
    """Reports a problem as one message, like every other error of the command line."""

    more_help: Callable[[], str] | None = None

    def format_help(self) -> str:
        """Return the help, with what a command adds to it."""
        return super().format_help() + (self.more_help() if self.more_help else "")

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing."""
        raise ConfigError(f"{message[0].upper()}{message[1:]}. '{self.prog} --help' shows how.")


class AddCommand(Protocol):
    """Adds a command and returns its parser."""

    def __call__(self, name: str, help_text: str, run: Command) -> Parser:
        """Add the command ``name``."""
        ...


def positive(text: str) -> int:
    """Read a number of things, at least one."""
    return whole_number(text, 1, 2**31)


def not_negative(text: str) -> int:
    """Read a number of things, perhaps none."""
    return whole_number(text, 0, 2**31)


def seed_number(text: str) -> int:
    """Read a seed."""
    return whole_number(text, 0, 2**32)


def whole_number(text: str, least: int, most: int) -> int:
    """Read a whole number between two ends."""
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got '{text}'")
    return int(text)


def warn(note: str) -> None:
    """Say what is left out or done otherwise; it is no part of the output."""
    print(f"apexrl: {note}", file=sys.stderr)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while whole episodes are counted; nothing without a terminal."""
    from rich.progress import Progress

    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.update(task, completed=count)
