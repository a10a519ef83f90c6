"""In which dtype each step of a kernel rounds, told by the bits of y and by which gradient fits.

Each hypothesis is spelled in torch and run on one random input; the one whose bits agree most is
named, if they agree nearly everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmsnorm_ref import oracle

from .tolerance import eager, eager_fp32

if TYPE_CHECKING:
    from collections.abc import Callable

    from .candidate import Call

NARROW = ("float16", "bfloat16")
M, N = 16, 512
CLEAR = 0.9  # share of equal bits from which a hypothesis is named; the next best reach 0.8

ONCE = "everything in fp32, rounded once"
STORAGE = "every step in {dtype}"


def _rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def _rounded_rstd(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (x.float() * _rstd(x, eps).to(x.dtype).float() * w.float()).to(x.dtype)


def _rounded_rstd_and_x_hat(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return ((x * _rstd(x, eps).to(x.dtype)).float() * w.float()).to(x.dtype)


def _rounded_xw(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return ((x.float() * w.float()).to(x.dtype).float() * _rstd(x, eps)).to(x.dtype)


def _rounded_squares(x: Tensor, w: Tensor, eps: float) -> Tensor:
    squares = (x * x).float().mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(squares + eps) * w.float()).to(x.dtype)


def _divided(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _bf16_rstd(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (x.float() * _rstd(x, eps).bfloat16().float() * w.float()).to(x.dtype)


HYPOTHESES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    ONCE: oracle.rmsnorm,
    "x_hat rounded to {dtype} before the weight": eager_fp32,
    STORAGE: eager,
    STORAGE + ", with a division by the root": _divided,
    "rstd rounded to {dtype}": _rounded_rstd,
    "rstd and x_hat rounded to {dtype}": _rounded_rstd_and_x_hat,
    "x * w rounded to {dtype} before rstd": _rounded_xw,
    "squares rounded to {dtype}": _rounded_squares,
    "rstd rounded to bfloat16": _bf16_rstd,
}


def _inputs(dtype: str, device: str, w_dtype: str = "") -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    x = (torch.randn(M, N, generator=g) + 0.5) * 2.0 ** (torch.arange(M) % 4 - 1)[:, None]
    w = 1.5 + torch.randn(N, generator=g) / 2
    return x.to(device, getattr(torch, dtype)), w.to(device, getattr(torch, w_dtype or dtype))


def arithmetic(
    f: Call, dtype: str, device: str, eps: float, *, plus: bool = False
) -> dict[str, Any]:
    """Return the hypothesis that fits y best, and the share of equal bits; `plus`: of 1 + w."""
    x, w = _inputs(dtype, device)
    with torch.no_grad():
        w = (w - 1) + 1
        y = f(x, w - 1 if plus else w, eps)
        shares = {
            text.format(dtype=dtype): float((spelled(x, w, eps) == y).double().mean())
            for text, spelled in HYPOTHESES.items()
        }
    best = max(shares, key=lambda text: shares[text])
    return {
        "says": best if shares[best] >= CLEAR else "no spelling that was tried",
        "share": shares[best],
        "storage": best.startswith(STORAGE.format(dtype=dtype)) and shares[best] >= CLEAR,
        "once": best == ONCE and shares[best] >= CLEAR,
    }


def weight_dtype(f: Call, dtype: str, device: str, eps: float) -> str:
    """Tell whether a fp32 weight is rounded to x's dtype first; "" where it cannot be told."""
    x, w = _inputs(dtype, device, "float32")
    try:
        with torch.no_grad():
            y, rounded = f(x, w, eps), f(x, w.to(x.dtype).float(), eps)
    except Exception:  # noqa: BLE001  # refusing a mixed pair is told elsewhere
        return ""
    return f"rounded to {dtype}" if torch.equal(y, rounded) else "used as it is"
