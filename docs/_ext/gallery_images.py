"""Save the gallery's figures small, and say in their alt text where they come from.

Flat colours need a small palette. What stands at the foot of a figure, the source of what is drawn,
is for those too who do not see the picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """Write an image again with a palette of so many colours; return its width and height."""
    with Image.open(file) as image:
        reduced = image.convert("RGB").quantize(n_colours, dither=Image.Dither.NONE)
    reduced.save(file, optimize=True)
    return reduced.size


def foot(figure: Any) -> str:
    """Return what stands at a figure's foot, as a sentence."""
    said = " ".join(next(t for t in figure.texts if t.get_gid() == style.FOOT).get_text().split())
    return f"{said[0].upper()}{said[1:]}."
