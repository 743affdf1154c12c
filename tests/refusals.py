"""What a test asserts about an error: its class, and the field, the value or the file that its message names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(error: type[BaseException], *named: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error whose message names all of these; the wording around them is free to change."""
    with pytest.raises(error) as caught:
        yield caught
    missing = [str(what) for what in named if not _names(str(caught.value), str(what))]
    assert not missing, f"{missing} not in: {caught.value}"


def _names(message: str, what: str) -> bool:
    """Whether a message names it: a number or a word as a whole, not as a part of another."""
    return re.search(rf"(?<!\w){re.escape(what)}(?!\w)", message) is not None
