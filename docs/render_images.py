"""Join videos side by side into the animation of the README: ``python docs/render_images.py VIDEO.mp4 VIDEO.mp4 …``.

The videos are those of ``apexrl play RUN_DIR`` for runs of ``walker_ppo`` and ``stage11_ript_vla``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
from numpy.typing import NDArray
from PIL import Image

ANIMATION = Path(__file__).parent / "images" / "robots.gif"
HEIGHT, SECONDS, FPS, COLOURS = 220, 6, 15, 200


def clip(video: Path) -> list[NDArray[np.uint8]]:
    """The first seconds of a video, repeated where it is shorter, at the size and speed of the animation."""
    frames = imageio.imread(video)
    step = imageio.immeta(video)["fps"] / FPS
    chosen = [frames[int(index * step) % len(frames)] for index in range(SECONDS * FPS)]
    width = round(HEIGHT * frames.shape[2] / frames.shape[1])
    return [np.asarray(Image.fromarray(frame).resize((width, HEIGHT))) for frame in chosen]


def main() -> None:
    """Write the animation."""
    clips = [clip(Path(name)) for name in sys.argv[1:]]
    joined = [Image.fromarray(np.concatenate(frames, axis=1)) for frames in zip(*clips, strict=True)]
    palette = joined[0].quantize(COLOURS, method=Image.Quantize.FASTOCTREE)  # keeps the colours of thin limbs
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in joined]
    images[0].save(ANIMATION, save_all=True, append_images=images[1:], duration=1000 // FPS, loop=0, optimize=True)
    print(f"{ANIMATION}: {ANIMATION.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
