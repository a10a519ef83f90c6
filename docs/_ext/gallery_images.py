"""Save the gallery's figures small, and say in their alt text where they come from.

A small palette will do: the flat colours of the style, and the shades between. What stands at the
foot of a figure, the source of what is drawn, is for those too who do not see the picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from PIL import Image
from sphinx_gallery.scrapers import matplotlib_scraper

from rmsnorm_ref.measure import style

N_COLOURS = 96  # a dozen flat ones, and the shades between them that smooth edges and letters


def scraper(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save the figures as sphinx-gallery does, then reduce the colours of the new files."""
    images = block_vars["image_path_iterator"]
    n_before = len(images)
    feet = [foot(plt.figure(number)) for number in plt.get_fignums()]
    text: str = matplotlib_scraper(block, block_vars, gallery_conf)
    for first in images.paths[n_before:]:
        path = Path(first)
        for file in path.parent.glob(f"{path.stem}*.png"):  # this one, and that of twice its size
            reduce_colours(file, N_COLOURS)
    lines = text.splitlines(keepends=True)
    for i in [i for i, line in enumerate(lines) if line.lstrip().startswith(":alt: ")]:
        lines[i] = f"{lines[i].rstrip()} {feet.pop(0)}\n"
    return "".join(lines)


def reduce_colours(file: Path, n_colours: int) -> tuple[int, int]:
    """Write an image again with a palette of so many colours; return its width and height.

    The style's own colours that it has are in the palette as they are, however few pixels have
    them: a contender looks the same in every figure. The rest are found by PIL.
    """
    with Image.open(file) as image:
        rgb = image.convert("RGB")
    values = np.asarray(rgb).astype(np.int64) @ (1 << 16, 1 << 8, 1)  # 0xrrggbb
    drawn, where = np.unique(values, return_inverse=True)
    flat = np.intersect1d([int(c.removeprefix("#"), 16) for c in style.COLOURS], drawn)
    shades: Any = rgb.quantize(n_colours - len(flat), dither=Image.Dither.NONE).getpalette()
    palette = np.concatenate([_channels(flat), np.reshape(shades, (-1, 3))])
    nearest = ((_channels(drawn)[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1)
    reduced = Image.fromarray(nearest[where].reshape(values.shape).astype(np.uint8))
    reduced.putpalette(palette.astype(np.uint8).tobytes())
    reduced.save(file, optimize=True)
    return reduced.size


def _channels(values: Any) -> Any:
    """Return 0xrrggbb as rows of red, green and blue."""
    return values[:, None] >> np.array([16, 8, 0]) & 0xFF


def foot(figure: Any) -> str:
    """Return what stands at a figure's foot, as a sentence."""
    said = " ".join(next(t for t in figure.texts if t.get_gid() == style.FOOT).get_text().split())
    return f"{said[0].upper()}{said[1:]}."
