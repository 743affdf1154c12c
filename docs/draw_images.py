"""Draw the images of the README from a finished run of ``lift_ppo``: ``python docs/draw_images.py RUN_DIR``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
from PIL import Image

from apexrl.experiments.plots import plot_runs

IMAGES = Path(__file__).parent / "images"
FRAMES = (0, 8, 14, 20, 28, 60)
"""Steps of the first episode that are shown."""
WIDTH, HEIGHT, GAP = 240, 180, 6


def draw_frames(video: Path, path: Path) -> None:
    """Lay frames of a video out in two rows of three."""
    reader: Any
    with imageio.get_reader(video) as reader:
        frames = [Image.fromarray(reader.get_data(step)).resize((WIDTH, HEIGHT)) for step in FRAMES]
    sheet = Image.new("RGB", (3 * WIDTH + 2 * GAP, 2 * HEIGHT + GAP), "white")
    for position, frame in enumerate(frames):
        row, column = divmod(position, 3)
        sheet.paste(frame, (column * (WIDTH + GAP), row * (HEIGHT + GAP)))
    sheet.save(path, optimize=True)


if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    plot_runs([run_dir], IMAGES / "lift_curve.png", print)
    draw_frames(run_dir / "video.mp4", IMAGES / "lift_frames.png")
