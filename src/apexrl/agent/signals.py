"""Stopping at the end of an iteration instead of in the middle of one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from apexrl import distributed


class StopRequest:
    """Set by the first Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once."""

    signal_number: int | None = None

    def is_set_anywhere(self) -> bool:
        """Whether this process or one that learns with it was asked to stop; all of them stop at the same place."""
        number = distributed.most(self.signal_number or 0)
        if number:
            self.signal_number = number
        return number > 0

    def raise_if_set(self) -> None:
        """Leave the way Python would have left without a handler."""
        if self.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal_number is not None:
            raise SystemExit(128 + self.signal_number)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a request, while the block runs in the main thread."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, _: FrameType | None) -> None:
        request.signal_number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not print: it fails when the signal comes in the middle of another print.
        more = b"; press Ctrl-C again to stop at once" if number == signal.SIGINT else b""
        with suppress(OSError):
            os.write(2, b"\nStopping after this iteration, to save" + more + b".\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
