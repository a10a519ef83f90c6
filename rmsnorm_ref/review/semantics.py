"""Which function a kernel computes, found by fitting: no hypothesis is assumed, many are tried.

The inputs are chosen so that hypotheses differ by far more than rounding: a width that is no power
of two, means that are not zero, gains far from one, rows from far below the root of eps to far
above it, and two values of eps.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import gradients
from .arithmetic import NARROW, arithmetic, weight_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .candidate import Call

M, N = 12, 6
EPS = (1e-6, 1e-3)
GAINS = {False: "w", True: "(1 + w)"}
PADDED = 8  # the power of two above N
FIXED = (1e-5, 1e-6, 1e-8, 1e-12, 1.1920928955078125e-07, 0.0078125, 0.0009765625)

# Each takes x in float64 and gives what stands under the root, [M, 1].
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean(x^2)": lambda x: x.square().mean(-1, keepdim=True),
    "sum(x^2)": lambda x: x.square().sum(-1, keepdim=True),
    "sum(x^2) / next_power_of_2(N)": lambda x: x.square().sum(-1, keepdim=True) / PADDED,
    "sum(x^2) / (N - 1)": lambda x: x.square().sum(-1, keepdim=True) / (N - 1),
    "sum(x^2) / (N + 1)": lambda x: x.square().sum(-1, keepdim=True) / (N + 1),
    "var(x)": lambda x: x.var(-1, keepdim=True, correction=0),
    "mean(|x|)": lambda x: x.abs().mean(-1, keepdim=True),
    "mean(|x|)^2": lambda x: x.abs().mean(-1, keepdim=True).square(),
    "max(x^2)": lambda x: x.square().amax(-1, keepdim=True),
    "mean of the first N - 1 squares": lambda x: x[:, :-1].square().mean(-1, keepdim=True),
}
# s is the statistic, e is eps; each gives what x is multiplied by.
ROOTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "x / sqrt(s + eps)": lambda s, e: (s + e).rsqrt(),
    "x / (sqrt(s) + eps)": lambda s, e: 1 / (s.sqrt() + e),
    "x * (1 / sqrt(s) + eps)": lambda s, e: s.rsqrt() + e,
    "x / sqrt(s)": lambda s, _: s.rsqrt(),
    "x / sqrt(max(s, eps))": lambda s, e: s.clamp(min=e).rsqrt(),
    "x / max(sqrt(s), eps)": lambda s, e: 1 / s.sqrt().clamp(min=e),
    "x / sqrt(s + eps^2)": lambda s, e: (s + e * e).rsqrt(),
    "x * sqrt(s + eps)": lambda s, e: (s + e).sqrt(),
    "x / (s + eps)": lambda s, e: 1 / (s + e),
}
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "w": lambda w: w,
    "(1 + w)": lambda w: 1 + w,
    "1 (w is not used)": torch.ones_like,
    "w^2": torch.square,
    "|w|": torch.abs,
    "w shifted by one column": lambda w: w.roll(1),
}
RIGHT = ("mean(x^2)", "x / sqrt(s + eps)", "w", "")


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [M, N], w [N], dy [M, N] as the docstring above says, on the CPU."""
    g = torch.Generator().manual_seed(1)
    scales = 10.0 ** torch.linspace(-3.5, 1, M)[:, None]
    x = torch.randn(M, N, generator=g).sign() * (torch.rand(M, N, generator=g) + 0.5) + 0.4
    w = torch.tensor([-1.75, 0.5, 2.25, 3.0, -0.625, 1.375])
    dy = torch.randn(M, N, generator=g) + 0.5
    return (x * scales).to(dtype), w.to(dtype), dy.to(dtype)


def fit(
    f: Call,
    device: str,
    dtypes: list[str],
    *,
    takes_eps: bool,
    fixed_eps: float,
    gives: str = "",
    gain: str = "w",
) -> dict[str, Any]:
    """Return what the forward computes, by name, and how it rounds in each 16-bit dtype.

    Keys: `statistic`, `root`, `weight`, `eps` ("" if it is the one passed), `right` (with `gain`
    for the weight), `says`, `arithmetic` by dtype, and `backward`, if the forward is as it should
    be, with what is said of each gradient in `gives`.
    """
    dtype = "float32" if "float32" in dtypes else dtypes[0]
    x, w, _ = inputs(getattr(torch, dtype))
    passed = EPS if takes_eps else (fixed_eps,)
    with torch.no_grad():
        results = [f(x.to(device), w.to(device), eps).double().cpu() for eps in passed]
    tolerance = 2e-5 if dtype == "float32" else 4 * torch.finfo(x.dtype).eps
    found = _search(x.double(), w.double(), passed, results, tolerance)
    narrow = [d for d in dtypes if d in NARROW]
    arithmetics = {d: arithmetic(f, d, device, fixed_eps, plus=gain != "w") for d in narrow}
    fitted = (
        {}
        if found is None
        else dict(zip(("statistic", "root", "weight", "eps"), found, strict=True))
    )
    wide = {d: weight_dtype(f, d, device, fixed_eps) for d in narrow}
    right = found == (*RIGHT[:2], gain, "")
    backward: dict[str, str] = {}
    if right and gives:
        backward = _backward(f, device, getattr(torch, dtype), passed, gives, gain, tolerance)
    return fitted | {
        "right": right,
        "backward": backward,
        "says": _says(found),
        "arithmetic": arithmetics,
        "fp32_weight": wide,
    }


def _backward(
    f: Call,
    device: str,
    dtype: torch.dtype,
    passed: tuple[float, ...],
    gives: str,
    gain: str,
    tolerance: float,
) -> dict[str, str]:
    x, w, dy = inputs(dtype)
    runs = []
    for eps in passed:
        leaves = {"dx": x.to(device).requires_grad_(), "dw": w.to(device).requires_grad_()}
        try:
            y = f(leaves["dx"], leaves["dw"], eps)
            wanted = [leaves["d" + leaf] for leaf in gives]
            found = torch.autograd.grad(y, wanted, dy.to(device, y.dtype))
        except Exception:  # noqa: BLE001  # what it refuses, cases tell
            return {}
        names = ["d" + leaf for leaf in gives]
        runs.append((eps, {n: g.double().cpu() for n, g in zip(names, found, strict=True)}))
    given = x.double(), WEIGHTS[gain](w.double()), dy.double()
    return gradients.fit(given, runs, gain, tolerance)


def _search(
    x: Tensor, w: Tensor, passed: tuple[float, ...], results: list[Tensor], tolerance: float
) -> tuple[str, str, str, str] | None:
    for statistic, root, weight, eps in _hypotheses():
        rows = STATISTICS[statistic](x)
        for e, result in zip(passed, results, strict=True):
            expected = x * ROOTS[root](rows, float(eps) if eps else e) * WEIGHTS[weight](w)
            error = (result - expected).abs()
            if not bool((error <= tolerance * expected.abs() + 1e-30).all()):
                break
        else:
            return statistic, root, weight, eps
    return None


def _hypotheses() -> Iterator[tuple[str, str, str, str]]:
    """List the right one first, then those with the eps that was passed, then fixed ones."""
    for eps in ("", *(repr(e) for e in FIXED)):
        for names in itertools.product(STATISTICS, ROOTS, WEIGHTS):
            if not eps or names[1] == RIGHT[1]:
                yield (*names, eps)


def _says(found: tuple[str, str, str, str] | None) -> str:
    if found is None:
        return "something that none of the spellings tried describes"
    statistic, root, weight, eps = found
    text = f"y = {root.replace('s + ', statistic + ' + ')}"
    for old in ("sqrt(s)", "max(s,", "(s)"):
        text = text.replace(old, old.replace("s)", statistic + ")").replace("s,", statistic + ","))
    text = text.replace("sqrt" + statistic, "sqrt")
    text += "" if weight.startswith("1 ") else f" * {weight}"
    text += ", with w not used" if weight.startswith("1 ") else ""
    return text + (f", with eps = {float(eps):g} whatever is passed" if eps else "")
