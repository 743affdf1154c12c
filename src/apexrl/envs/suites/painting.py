"""Pictures of MuJoCo simulations for task suites."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import EnvError
from apexrl.envs.display import MUJOCO_HINT


class Painter:
    """Draws one simulation, in a graphics context of its own that it makes current for every picture.

    Shadows, antialiasing and mirrors make software rendering several times slower.

    Args:
        model: MuJoCo's model; its settings of pictures are changed.
        data: its state, which is drawn as it is.
        max_size: height and width of the largest picture.
        fast: leave out shadows, antialiasing and mirrors.
        hidden_groups: groups of shapes that are not drawn.

    Raises:
        EnvError: when this machine has no way to draw.
    """

    def __init__(
        self, model: Any, data: Any, max_size: int, *, fast: bool = True, hidden_groups: Sequence[int] = ()
    ) -> None:
        self._mujoco = mujoco = importlib.import_module("mujoco")
        self._model, self._data = model, data
        model.vis.global_.offwidth = model.vis.global_.offheight = max_size
        if fast:
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        backend = os.environ.get("MUJOCO_GL") or "egl"
        try:
            self._gl = importlib.import_module(f"mujoco.{backend}").GLContext(max_size, max_size)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except Exception as error:
            raise EnvError(f"No picture can be drawn with MUJOCO_GL={backend} ({error}). {MUJOCO_HINT}") from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=2000)
        if fast:
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._scene.flags[flag] = False
        self._option, self._perturb, self._view = mujoco.MjvOption(), mujoco.MjvPerturb(), mujoco.MjvCamera()
        for group in hidden_groups:
            self._option.geomgroup[group] = 0
        self._view.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def draw(self, camera: str, size: int, *, upside_down: bool = False) -> NDArray[np.uint8]:
        """Draw what a camera sees, ``[size, size, 3]``, the first row on top; turned for one that hangs upside down."""
        mujoco = self._mujoco
        self._gl.make_current()
        self._view.fixedcamid = self._model.camera(camera).id
        every, rectangle = mujoco.mjtCatBit.mjCAT_ALL, mujoco.MjrRect(0, 0, size, size)
        mujoco.mjv_updateScene(self._model, self._data, self._option, self._perturb, self._view, every, self._scene)
        mujoco.mjr_render(rectangle, self._scene, self._context)
        pixels = np.empty((size, size, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, rectangle, self._context)
        # Rows come from the bottom up: those of a camera upside down are in order, and mirrored.
        return np.ascontiguousarray(pixels[:, ::-1] if upside_down else pixels[::-1])

    def close(self) -> None:
        """Free the graphics context."""
        self._gl.make_current()
        self._context.free()
        self._gl.free()
        self._model = self._data = None
