"""Where, on what and with which words a review ran."""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rmsnorm_ref import __version__
from rmsnorm_ref.measure import provenance as measured

if TYPE_CHECKING:
    from .run import Options

NOT_INSTALLED = "not installed"
DRAWN = "each key and width took one, drawn by them: "


def provenance(options: Options, device: str, told: dict[str, Any]) -> dict[str, str]:
    """Return what repeats the review; nothing in it changes from run to run on one machine."""
    name, signature, init, function = options.target
    head, clean, _ = measured.commit()
    words = ["python -m rmsnorm_ref review", name, "--device", device]
    words += ["--signature", repr(signature)] if signature else []
    words += ["--init", repr(init)] if init else []
    words += ["--dtype", ",".join(options.dtypes), "--full" if options.full else "--quick"]
    words += ["--seed", str(options.seed), *(["--strict"] if options.strict else [])]
    words += ["--one-plus-w"] if options.one_plus_w else []
    words += [f"--{name}" for name in ("bench", "huge") if getattr(options, name)]
    differ = "" if clean else " (files differ)"
    kernels = "interpreted by Triton" if told.get("interpreted") else "as they run on this device"
    tuned = [f"{kernel} of {n}" for kernel, n in sorted(told.get("tuned", {}).items())]
    return {
        "candidate": name,
        "source": _source(name) if function is None else "a Python function of the calling process",
        "called as": str(told.get("signature", "never")),
        "command": " ".join(words) if function is None else "rmsnorm_ref.review.review(...)",
        "kernels": kernels,
        **({"configs": DRAWN + ", ".join(tuned)} if tuned else {}),
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": sys.version.split()[0],
        "rmsnorm_ref": f"{__version__}, commit {head or 'unknown'}{differ}",
        "seed": str(options.seed),
    }


def _source(name: str) -> str:
    """Identify what was reviewed: a file by its hash, a package by its version."""
    place = name.rpartition(":")[0]
    path = Path(place)
    if path.suffix == ".py" and path.is_file():
        return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    top = place.split(".")[0]
    packages = [top]
    if _version(top) == NOT_INSTALLED:  # by that name: to read what all packages hold takes a while
        packages = metadata.packages_distributions().get(top, [top])
    return ", ".join(f"{package} {_version(package)}" for package in packages)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
