"""No stale page: what a page says follows the package, so a changed package rebuilds it.

Sphinx re-reads a page when its own text changes and sphinx-gallery re-runs a script when the
script changes. Neither sees that a page quotes a constant of the package. This extension hashes
all that a page may quote; when the hash differs from the one before, every page is read again and
every script runs again, with no option to remember.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import rmsnorm_ref

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.config import Config

PACKAGE = Path(rmsnorm_ref.__file__).parent
EXTENSIONS = Path(__file__).parent
SUFFIXES = {".py", ".json", ".npz", ".txt", ".cff"}


def fingerprint(*places: Path) -> str:
    """Hash files, and all sources, recordings and data of folders; the versions and the device."""
    digest = hashlib.sha256()
    for place in places:
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for path in files:
            if path.suffix in SUFFIXES and path.is_file():
                digest.update(str(path.relative_to(place.parent)).encode() + path.read_bytes())
    for name in ("torch", "triton", "matplotlib"):
        try:
            digest.update(f"{name} {importlib.metadata.version(name)}".encode())
        except importlib.metadata.PackageNotFoundError:
            continue  # Triton is not installed everywhere, and pages without kernels need none
    digest.update((torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu").encode())
    return digest.hexdigest()


def prepare(app: Sphinx, config: Config) -> None:
    """Compare with what the last build saw; where it differs, forget what that build made."""
    root = Path(app.srcdir).parent
    listed = [root / "CITATION.cff", *sorted((root / "tests").glob("*.txt"))]  # mutants, by name
    config.sources_hash = fingerprint(PACKAGE, EXTENSIONS, *listed)
    for folder in config.sphinx_gallery_conf["gallery_dirs"].split():
        made = Path(app.srcdir) / folder
        stamp = made / "sources_hash"
        if stamp.is_file() and stamp.read_text() == config.sources_hash:
            continue
        # Without these sums sphinx-gallery runs every script again.
        for md5 in made.rglob("*.md5"):
            md5.unlink()
        made.mkdir(exist_ok=True)
        stamp.write_text(config.sources_hash)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the hash as a setting on which every page depends."""
    app.add_config_value("sources_hash", "", "env", frozenset({str}))
    app.connect("config-inited", prepare, priority=100)  # before sphinx-gallery looks
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
