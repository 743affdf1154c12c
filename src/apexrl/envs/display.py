"""How MuJoCo draws where there is no display; processes that simulate import this, so it must not need PyTorch."""

from __future__ import annotations

import ctypes.util
import functools
import os
import sys

MUJOCO_HINT = (
    "A MuJoCo task is drawn on a machine without a display when MUJOCO_GL=egl is set (needs the library libEGL)."
)


def draw_without_display() -> None:
    """Let MuJoCo draw by EGL where there is no display, unless ``MUJOCO_GL`` is set; call it before it is imported."""
    # Without the library MuJoCo could not even be imported.
    if not has_display() and "MUJOCO_GL" not in os.environ and _has_egl():
        os.environ["MUJOCO_GL"] = "egl"


def has_display() -> bool:
    """Whether there is a screen to open windows on."""
    return sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ


@functools.cache
def _has_egl() -> bool:
    return ctypes.util.find_library("EGL") is not None
