"""A small canvas with world coordinates, on which the tasks draw their images."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Color = tuple[int, int, int]
Point = tuple[float, float]

WIDTH: Final = 400
HEIGHT: Final = 300
# Drawn larger and scaled down, which smooths the edges.
OVERSAMPLING: Final = 3

PAPER: Final[Color] = (247, 248, 250)
GRID: Final[Color] = (226, 230, 236)
INK: Final[Color] = (38, 50, 66)
LIGHT: Final[Color] = (186, 196, 208)
MUTED: Final[Color] = (122, 134, 150)
STEEL: Final[Color] = (84, 102, 124)
WOOD: Final[Color] = (196, 160, 120)
BLUE: Final[Color] = (47, 111, 208)
ORANGE: Final[Color] = (238, 134, 52)
GREEN: Final[Color] = (46, 160, 96)
RED: Final[Color] = (208, 64, 60)


class Canvas:
    """A 400 × 300 image addressed in world coordinates, y upwards."""

    def __init__(self) -> None:
        from PIL import Image, ImageDraw, ImageFont

        self._image = Image.new("RGB", (WIDTH * OVERSAMPLING, HEIGHT * OVERSAMPLING), PAPER)
        self._draw, self._load_font = ImageDraw.Draw(self._image), ImageFont.load_default
        self.look_at((0.0, 0.0), 100.0)

    def look_at(self, center: Point, scale: float) -> None:
        """Draw from now on with this world point in the middle, and this number of pixels per world unit."""
        self._center, self._scale = center, scale * OVERSAMPLING

    def _pixel(self, point: Point) -> Point:
        x = (point[0] - self._center[0]) * self._scale + WIDTH * OVERSAMPLING / 2
        y = (self._center[1] - point[1]) * self._scale + HEIGHT * OVERSAMPLING / 2
        return x, y

    def box(self, low: Point, high: Point, color: Color, *, radius: float = 0.0) -> None:
        """Fill the rectangle between two corners, rounded by ``radius`` world units."""
        (left, bottom), (right, top) = self._pixel(low), self._pixel(high)
        self._draw.rounded_rectangle((left, top, right, bottom), radius * self._scale, color)

    def line(self, points: list[Point], color: Color, width: float = 2.0) -> None:
        """Draw a line through the points, ``width`` pixels thick."""
        self._draw.line([self._pixel(point) for point in points], color, round(width * OVERSAMPLING))

    def dashes(self, start: Point, end: Point, color: Color, num: int = 24) -> None:
        """Draw a dashed line of ``num`` dashes."""
        step = ((end[0] - start[0]) / num, (end[1] - start[1]) / num)
        for i in range(num):
            first = (start[0] + i * step[0], start[1] + i * step[1])
            self.line([first, (first[0] + 0.55 * step[0], first[1] + 0.55 * step[1])], color, 1.5)

    def disc(self, center: Point, radius: float, color: Color, *, edge: Color | None = None) -> None:
        """Fill a circle, with an outline of colour ``edge`` where given."""
        x, y = self._pixel(center)
        r = radius * self._scale
        self._draw.ellipse((x - r, y - r, x + r, y + r), color, edge, 2 * OVERSAMPLING if edge else 0)

    def rod(self, start: Point, end: Point, radius: float, color: Color) -> None:
        """Fill a rod with round ends between two points."""
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        x, y = -math.sin(angle) * radius, math.cos(angle) * radius
        corners = [(point[0] + side * x, point[1] + side * y) for side in (1, -1) for point in (start, end)[::side]]
        self._draw.polygon([self._pixel(corner) for corner in corners], color)
        self.disc(start, radius, color)
        self.disc(end, radius, color)

    def text(self, point: Point, text: str, color: Color = INK, *, size: float = 13, anchor: str = "mm") -> None:
        """Write at a world point; ``anchor`` is Pillow's two letters."""
        self._draw.text(self._pixel(point), text, color, self._load_font(size * OVERSAMPLING), anchor)

    def caption(self, text: str) -> None:
        """Write small in the upper left corner, wherever the view is."""
        self._draw.text((12 * OVERSAMPLING, 9 * OVERSAMPLING), text, MUTED, self._load_font(13 * OVERSAMPLING))

    def pixels(self) -> NDArray[np.uint8]:
        """Return the image, ``[300, 400, 3]``."""
        return np.asarray(self._image.reduce(OVERSAMPLING), dtype=np.uint8)
