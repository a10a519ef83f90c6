"""Which cells each section of a run measures, and with whom."""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch

from rmsnorm_ref.check import SEED_M, SEED_N

from .schema import CellSection, ExtraSection, Section

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = {"float16": FP16, "bfloat16": BF16, "float32": FP32}

CELL_SECTIONS: tuple[CellSection, ...] = get_args(CellSection)
EXTRA_SECTIONS: tuple[ExtraSection, ...] = get_args(ExtraSection)

SHAPES: dict[CellSection, tuple[tuple[int, int], ...]] = {
    "seed": tuple((M, N) for N in SEED_N for M in SEED_M),
    "narrow": ((262144, 128), (65536, 512), (524288, 64), (131072, 256)),
    "wide": ((8192, 16384), (8192, 32768), (2048, 65536), (32768, 8192)),
    "few": tuple((M, N) for N in (2048, 8192) for M in (1, 16, 64, 128, 256)),
    # Through the size of the L2, from one tenth of it to ten times.
    "sizes": tuple((2**i, 4096) for i in range(6, 17)),
    # 2^25 elements, 64 MiB in 16 bits, at every width; odd ones at about as many.
    "widths": tuple(
        (2**25 // N, N) for N in sorted({*(2**i for i in range(6, 17)), 769, 4095, 5120, 7168})
    ),
}
# Sections that follow one quantity and not the field of peers.
FEW_CONTENDERS = ("ours", "F.rms_norm")
PAIRED: tuple[CellSection, ...] = ("sizes", "widths")

COLD = (4096, 8192)
CONFIG_N = (64, 128, 512, 2048, 4096, 8192, 16384, 32768, 65536)
ABLATION_SHAPES = tuple((4096, N) for N in SEED_N)
HOST = (16, 2048)
SCALING = (32768, 8192)  # rows of each GPU
ERROR_CONTENDERS = ("ours", "F.rms_norm", "eager", "eager_fp32")
# One for each path that the seed's cells do not take, and one for many rows to a tile.
OTHER_PATHS = ((64, 2048), (4096, 128), (2048, 16384), (512, 65536))


class Cell(NamedTuple):
    """Name one shape and dtype of a section, and who is measured on it; None means everyone."""

    section: Section
    M: int
    N: int
    dtype: torch.dtype
    contenders: tuple[str, ...] | None = None

    def label(self) -> str:
        """Return the cell's name in messages and tables."""
        return f"{self.section} {self.M} x {self.N} {dtype_name(self.dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def sections(words: str) -> list[Section]:
    """Return the sections that a comma-separated list names, in the order of a full run.

    Raises:
        ValueError: a word is no section.

    Example:
        >>> sections("few,seed")
        ['seed', 'few']
    """
    known = (*CELL_SECTIONS, *EXTRA_SECTIONS)
    wanted = set(_words(words, (*known, "all"), "--cells"))
    return [name for name in known if name in wanted or "all" in wanted]


def dtypes(words: str | None) -> tuple[torch.dtype, ...] | None:
    """Return the dtypes that a comma-separated list names; None if there is no list."""
    if words is None:
        return None
    return tuple(DTYPES[word] for word in _words(words, tuple(DTYPES), "--dtype"))


def cells(section: CellSection, chosen: tuple[torch.dtype, ...] | None = None) -> list[Cell]:
    """Return a section's cells; by default the seed's are in fp16 and bf16, the others in bf16."""
    found = chosen or ((FP16, BF16) if section == "seed" else (BF16,))
    who = FEW_CONTENDERS if section in PAIRED else None
    return [Cell(section, M, N, dtype, who) for M, N in SHAPES[section] for dtype in found]


def error_cells(chosen: tuple[torch.dtype, ...] | None = None) -> list[Cell]:
    """Return the cells whose error is recorded: the seed's, and one for each other path."""
    shapes = (*SHAPES["seed"], *OTHER_PATHS)
    who = ERROR_CONTENDERS
    return [Cell("errors", M, N, dtype, who) for M, N in shapes for dtype in chosen or (FP16, BF16)]


def _words(text: str, known: tuple[str, ...], option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise ValueError(
            f"{option} {text!r}: expected a comma-separated list of {', '.join(known)}"
        )
    return words
