"""Stopping at the end of an iteration instead of in the middle of one, unless that would take too long."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from apexrl.core.errors import ConfigError
from apexrl.core.system import distributed

GRACE_VARIABLE = "APEXRL_GRACE_SECONDS"
"""Environment variable: seconds within which SIGTERM ends a run, the last save included."""
GRACE_SECONDS = 20.0
"""Who sends SIGTERM kills 30 s later, as a rule: torchrun, Kubernetes, Slurm."""


class GivenUp(BaseException):
    """SIGTERM came, and the running iteration takes too long to wait for."""


def grace_seconds() -> float:
    """Return how long a run may take to end after SIGTERM."""
    text = os.environ.get(GRACE_VARIABLE, str(GRACE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise ConfigError(f"{GRACE_VARIABLE} must be a number of seconds, not negative, got '{text}'.")
    return seconds


class StopRequest:
    """Set by the first Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once.

    After SIGTERM the iteration is given up when it does not end in time, and at once at a second SIGTERM.

    Args:
        patience: returns the seconds that SIGTERM leaves to the running iteration.
        may_give_up: returns whether there is anything to give up now; a checkpoint is always written to its end.
    """

    def __init__(self, patience: Callable[[], float], may_give_up: Callable[[], bool]) -> None:
        self.patience, self.may_give_up = patience, may_give_up
        self.signal_number: int | None = None
        self.asked = False
        """The program itself asked to stop, which is no reason to leave it."""
        self._timer: threading.Timer | None = None
        self._is_over = False

    def requested(self) -> bool:
        """Whether this process or one that learns with it was asked to stop; all of them stop at the same place."""
        number = self.signal_number or int(self.asked)
        if distributed.world_size() > 1:
            number = distributed.all_reduce_max(number)
        if number > 1:  # below every signal that is handled
            self.signal_number = number
        self.asked = self.asked or number == 1
        self._is_over = number > 0
        return self._is_over

    def take(self, number: int) -> None:
        """Take a signal."""
        if self.signal_number is None:
            self.signal_number = number
            if number == signal.SIGTERM:
                # A thread cannot raise here, but a signal can, and it also ends the waiting for a worker.
                arguments = (threading.main_thread().ident, signal.SIGTERM)
                self._timer = threading.Timer(max(0.0, self.patience()), signal.pthread_kill, arguments)
                self._timer.daemon = True
                self._timer.start()
        elif number == signal.SIGTERM and not self._is_over and self.may_give_up():
            raise GivenUp

    def raise_if_set(self) -> None:
        """Leave the way Python would have left without a handler."""
        if self.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal_number is not None:
            raise SystemExit(128 + self.signal_number)

    def close(self) -> None:
        """Send no more signals."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


@contextmanager
def stop_on_signal(seconds_to_save: Callable[[], float], may_give_up: Callable[[], bool]) -> Iterator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a request, while the block runs in the main thread; see ``StopRequest``."""
    grace = grace_seconds()
    request = StopRequest(lambda: grace - seconds_to_save(), may_give_up)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, _: FrameType | None) -> None:
        is_first = request.signal_number is None
        request.take(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not is_first or not distributed.is_main_process():
            return
        # Not print: it fails when the signal comes in the middle of another print.
        more = b"; press Ctrl-C again to stop at once" if number == signal.SIGINT else b""
        if distributed.world_size() > 1:
            more = b"; torchrun waits 30 s for that, unless started with --shutdown-timeout SECONDS"
        with suppress(OSError):
            os.write(2, b"\nStopping after this iteration, to save" + more + b".\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        request.close()
        for number, handler in before.items():
            signal.signal(number, handler)
