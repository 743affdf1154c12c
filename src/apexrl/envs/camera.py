"""Offscreen images of MuJoCo simulations."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apexrl.core.errors import EnvError
from apexrl.envs.display import MUJOCO_HINT, has_display


class Camera:
    """Renders one simulation, in a graphics context of its own that it makes current for every image.

    Shadows, antialiasing and reflections make software rendering several times slower.

    Args:
        model: MuJoCo's model; its visual settings are changed.
        data: its state, which is rendered as it is.
        max_size: height and width of the largest image.
        fast: leave out shadows and antialiasing.
        reflections: render reflections although ``fast`` is set.
        hidden_groups: groups of geoms that are left out.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        max_size: int,
        *,
        fast: bool = True,
        reflections: bool = False,
        hidden_groups: Sequence[int] = (),
    ) -> None:
        self._mujoco = mujoco = importlib.import_module("mujoco")
        self.model, self.data, self.size = model, data, max_size
        model.vis.global_.offwidth = model.vis.global_.offheight = max_size
        if fast:
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        backend = os.environ.get("MUJOCO_GL") or ("glfw" if has_display() else "egl")
        try:
            kind = importlib.import_module(f"mujoco.{backend}").GLContext
            kind._context = None  # its __del__ reads it, also after Ctrl-C in its __init__
            self._gl = kind(max_size, max_size)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except Exception as error:
            raise EnvError(f"Rendering failed with MUJOCO_GL={backend} ({error}). {MUJOCO_HINT}") from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=2000)
        if fast:
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
            if not reflections:
                self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self._option, self._perturb, self._view = mujoco.MjvOption(), mujoco.MjvPerturb(), mujoco.MjvCamera()
        for group in hidden_groups:
            self._option.geomgroup[group] = 0
        mujoco.mjv_defaultFreeCamera(model, self._view)
        if model.ncam:
            self._view.type, self._view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0

    def render(
        self, camera: str | None = None, size: int | None = None, *, upside_down: bool = False
    ) -> NDArray[np.uint8]:
        """Render what a camera sees, ``[size, size, 3]``, the first row on top; turned for one that hangs upside down.

        Without a name it is the model's first camera, or a free one; without a size the largest.
        """
        mujoco, size = self._mujoco, size or self.size
        self._gl.make_current()
        if camera is not None:
            self._view.fixedcamid = self.model.camera(camera).id
        every, rectangle = mujoco.mjtCatBit.mjCAT_ALL, mujoco.MjrRect(0, 0, size, size)
        mujoco.mjv_updateScene(self.model, self.data, self._option, self._perturb, self._view, every, self._scene)
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
        self.model = self.data = None
