"""How simulators render where there is no display; processes that simulate import this, so it must not need PyTorch."""

from __future__ import annotations

import ctypes.util
import functools
import os
import sys

MUJOCO_HINT = "To render a MuJoCo task on a machine without a display, set MUJOCO_GL=egl (needs the library libEGL)."


def render_without_display() -> None:
    """Make MuJoCo (with EGL) and pygame render without a display, unless their variables are set.

    Call it before importing either.
    """
    if has_display():
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    # Without the library MuJoCo could not even be imported.
    if "MUJOCO_GL" not in os.environ and _has_egl():
        os.environ["MUJOCO_GL"] = "egl"


def has_display() -> bool:
    """Whether there is a screen to open windows on."""
    return sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ


@functools.cache
def _has_egl() -> bool:
    return ctypes.util.find_library("EGL") is not None
