"""Stopping at the end of an iteration instead of in the middle of one, unless that would take too long."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from apexrl.core.system import distributed

GRACE_SECONDS = 1.5
"""Seconds that SIGTERM leaves to the running iteration: who sends it kills soon after."""
TORCHRUN_PATIENCE, TIME_TO_SAVE = 30.0, 10.0
"""Seconds after which torchrun kills the processes that it has sent a signal to, unless told otherwise; and how long
before that the first of them saves what there is."""


class Abandoned(BaseException):
    """SIGTERM came, and its patience with the running iteration is over."""


class StopRequest:
    """Set by the first Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once, a second SIGTERM ends the patience.

    Args:
        save_in_time: called in another thread where processes learn together, shortly before torchrun kills them.
    """

    def __init__(self, save_in_time: Callable[[], None]) -> None:
        self.save_in_time = save_in_time
        self.signal_number: int | None = None
        self.asked = False
        """The program itself asked to stop, which is no reason to leave it."""
        self._may_abandon = False
        self._timer: threading.Timer | None = None

    def is_set_anywhere(self) -> bool:
        """Whether this process or one that learns with it was asked to stop; all of them stop at the same place."""
        number = distributed.all_reduce_max(self.signal_number or int(self.asked))
        if number > 1:  # below every signal that is handled
            self.signal_number = number
        self.asked = self.asked or number == 1
        return number > 0

    def raise_if_set(self) -> None:
        """Leave the way Python would have left without a handler."""
        if self.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal_number is not None:
            raise SystemExit(128 + self.signal_number)

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Let SIGTERM end the block with ``Abandoned`` when it takes long; not where processes learn together."""
        self._may_abandon = distributed.world_size() == 1
        try:
            yield
        finally:
            self._may_abandon = False

    def set(self, number: int) -> None:
        """Take a signal."""
        if self.signal_number is not None and number == signal.SIGTERM:
            if self._may_abandon:
                raise Abandoned
            return
        self.signal_number = number
        if self._timer is not None:
            return
        if distributed.world_size() > 1:
            self._timer = threading.Timer(TORCHRUN_PATIENCE - TIME_TO_SAVE, self.save_in_time)
        elif number == signal.SIGTERM:
            # A thread cannot raise here, but a signal can, and it also ends the waiting for a worker.
            arguments = (threading.main_thread().ident, signal.SIGTERM)
            self._timer = threading.Timer(GRACE_SECONDS, signal.pthread_kill, arguments)
        else:
            return
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Send no more signals."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


@contextmanager
def stop_on_signal(save_in_time: Callable[[], None]) -> Iterator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a request, while the block runs in the main thread; see ``StopRequest``."""
    request = StopRequest(save_in_time)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, _: FrameType | None) -> None:
        is_first = request.signal_number is None
        request.set(number)
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
