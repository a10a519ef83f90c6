"""Save the gallery's figures with a palette: flat colours need few, and files get smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from sphinx_gallery.scrapers import matplotlib_scraper

N_COLOURS = 96  # a dozen flat ones, and the shades between them that smooth edges and letters


def scraper(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save the figures as sphinx-gallery does, then reduce the colours of the new files."""
    images = block_vars["image_path_iterator"]
    n_before = len(images)
    text: str = matplotlib_scraper(block, block_vars, gallery_conf)
    for first in images.paths[n_before:]:
        path = Path(first)
        for file in path.parent.glob(
            f"{path.stem}*.png"
        ):  # this one, and the one of twice its size
            with Image.open(file) as image:
                reduced = image.convert("RGB").quantize(N_COLOURS, dither=Image.Dither.NONE)
            reduced.save(file, optimize=True)
    return text
