"""`python -m rmsnorm_ref check`: hold the kernels of this machine against the oracle.

Each cell is one shape and dtype on random or real input. y, dx and dw are compared, element by
element, with the float64 truth; a cell passes if every error is within the bound that `oracle.py`
argues.
"""

import json
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from . import interpreter, oracle, tiling
from .data import hidden_states
from .op import rmsnorm

SEED_N, SEED_M = (2048, 4096, 8192), (512, 1024, 2048, 4096)
# One width for every kernel and, where a kernel has one, for its masked tail.
OTHER_N = (1, 64, 769, 12000, 20000, 40000)
REAL_LAYERS = ("layer_0", "layer_5")
EPS = 1e-6
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Cell(NamedTuple):
    """One comparison to make: x is [M, N], or real hidden states where `layer` names some."""

    M: int
    N: int
    dtype: torch.dtype
    layer: str = ""

    def label(self) -> str:
        """Return the cell's name in the table."""
        return f"{self.M} x {self.N} {str(self.dtype).removeprefix('torch.')} {self.layer}".strip()


def cells(*, full: bool, interpreted: bool) -> list[Cell]:
    """Return what is checked: the seed's sweep, a width for every kernel, real input.

    Args:
        full: all 24 cells of the seed's sweep; otherwise one M of it per N and dtype.
        interpreted: the kernels run at about 2 ms a row, so the short check takes few rows.
    """
    few = 8 if interpreted else 512
    seed_m = SEED_M if full else (few,)
    found = [Cell(M, N, dtype) for N in SEED_N for M in seed_m for dtype in (FP16, BF16)]
    found += [Cell(few, N, dtype) for N in OTHER_N for dtype in (FP16, BF16, FP32)]
    # More rows than the backward has programs, so that a program walks several.
    found += [Cell(8 * few, 2048, dtype) for dtype in (FP16, BF16, FP32)]
    for layer in REAL_LAYERS:
        M, N = hidden_states()[f"{layer}_x"].shape
        found += [Cell(M, N, dtype, layer) for dtype in (FP16, BF16, FP32)]
    return list(dict.fromkeys(found))


def verdicts(cell: Cell, device: torch.device) -> dict[str, oracle.Verdict]:
    """Run both passes on one cell; return the verdict on y, dx and dw."""
    torch.manual_seed(cell.M * 65537 + cell.N)
    if cell.layer:
        states = hidden_states()
        x = states[f"{cell.layer}_x"].to(device, cell.dtype)
        w = states[f"{cell.layer}_weight"].to(device)  # fp32, whatever the dtype of x
    else:
        x = torch.randn(cell.M, cell.N, device=device).to(cell.dtype)
        w = torch.randn(cell.N, device=device).to(cell.dtype)
    dy = torch.randn(cell.M, cell.N, device=device).to(cell.dtype)
    x.requires_grad_()
    w.requires_grad_()
    y = rmsnorm(x, w, EPS)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w = x.detach(), w.detach()
    true_dx, true_dw = oracle.truth_backward(dy, x, w, EPS)
    return {
        "y": oracle.compare(y.detach(), oracle.truth(x, w, EPS), oracle.bound_y(x, w, EPS)),
        "dx": oracle.compare(dx, true_dx, oracle.bound_dx(dy, x, w, EPS)),
        "dw": oracle.compare(dw, true_dw, oracle.bound_dw(dy, x, w, EPS)),
    }


def provenance(device: torch.device) -> dict[str, Any]:
    """Return where and on what the kernels ran; call it after the first launch."""
    import triton

    from . import __version__

    on_gpu = device.type == "cuda"
    return {
        "kernels": "interpreted" if interpreter.interprets() else "compiled",
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "sm_count": tiling.sm_count(device) if on_gpu else None,
        "rmsnorm_ref": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


def run(*, full: bool = False, as_json: bool = False) -> int:
    """Check every cell, print a table or JSON; return the exit code.

    Args:
        full: all 24 cells of the seed's sweep instead of six.
        as_json: print one JSON object and no table.

    Returns:
        0 if every error is within its bound, 1 if one is not.
    """
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    rows = list(_rows(cells(full=full, interpreted=not has_gpu), device))
    ok = all(row["ok"] for row in rows)
    report = {**provenance(device), "eps": EPS, "ok": ok, "cells": rows}
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print(_table(report))
    return 0 if ok else 1


def _rows(todo: list[Cell], device: torch.device) -> Iterator[dict[str, Any]]:
    for cell in tqdm(todo, unit="cell", file=sys.stderr, dynamic_ncols=True, leave=False):
        found = verdicts(cell, device)
        yield {
            "cell": cell.label(),
            "path": [
                tiling.forward_path(cell.N),
                tiling.backward_path(
                    cell.M, cell.N, device, cell.dtype, FP32 if cell.layer else cell.dtype
                ),
            ],
            "max_ulp": {name: _json(verdict.errors.max_ulp) for name, verdict in found.items()},
            "error_over_bound": {
                name: _json(verdict.worst_ratio) for name, verdict in found.items()
            },
            "ok": all(verdict.ok for verdict in found.values()),
        }


def _json(value: float) -> float | str:
    """Return what JSON can hold: it has no infinity and no NaN."""
    return value if math.isfinite(value) else str(value)


def _table(report: dict[str, Any]) -> str:
    titles = ("cell", "max ulp  y", "dx", "dw", "error / bound  y", "dx", "dw", "verdict")
    table = [titles]
    for row in report["cells"]:
        ulps = [f"{float(value):.3g}" for value in row["max_ulp"].values()]
        ratios = [f"{float(value):.3f}" for value in row["error_over_bound"].values()]
        verdict = "within" if row["ok"] else "OUTSIDE"
        table.append((row["cell"], *ulps, *ratios, verdict))
    widths = [max(len(line[i]) for line in table) for i in range(len(titles))]
    lines = [
        "  ".join(
            text.ljust(width) if i in (0, len(titles) - 1) else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    n_outside = sum(not row["ok"] for row in report["cells"])
    where = f"{report['kernels']} on {report['device']}"
    result = f"{n_outside} OUTSIDE" if n_outside else "all within"
    return "\n".join(
        [
            *lines,
            "",
            f"kernels {where}; torch {report['torch']}, triton {report['triton']}",
            f"{len(report['cells'])} cells against the float64 truth: {result} the bounds",
            "ulp are counted at the true value, so they are many where it is close to 0 by",
            "cancellation; the verdict is by the bound, which knows what was cancelled",
        ]
    )
