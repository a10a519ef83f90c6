"""How far a candidate is from the truth, beside the reference's own error and eager's."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmsnorm_ref import oracle

from .cases import Case, make
from .tolerance import SPELLINGS, Inputs, grads, truths

if TYPE_CHECKING:
    from collections.abc import Callable

    from .candidate import Call

EDGES_ULP = (0.5, 1.0, 2.0, 4.0, 8.0)  # of the histogram's bins; the last one is open
SHAPE = (16, 1024)


def table(
    f: Call, device: str, dtypes: list[str], gives: str, eps: float, *, one_plus: bool = False
) -> dict[str, Any]:
    """Return the errors of candidate, reference and both eager spellings, by dtype and result."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    contenders: dict[str, Callable[..., Tensor]] = {"candidate": f, **SPELLINGS}
    reference = _reference(device, notes)
    if reference is not None:
        contenders["reference"] = reference
    for dtype in dtypes:
        case = Case(*SHAPE, dtype=dtype, eps=eps, one_plus=one_plus)
        names = make(case, device)
        own = Inputs(names["x"], names["w"], names["dy"], eps)
        given = own._replace(w=1 + own.w) if one_plus else own
        known = truths(given, {"y", "dx", "dw"})
        for name, contender in contenders.items():
            is_own = name == "candidate"
            found = _results(contender, own if is_own else given, gives if is_own else "xw")
            rows += [
                {
                    "contender": name,
                    "dtype": dtype,
                    "result": result,
                    **_errors(actual, *known[result]),
                }
                for result, actual in found.items()
            ]
    return {"rows": rows, "notes": notes, "label": f"[{SHAPE[0]}, {SHAPE[1]}]"}


def _reference(device: str, notes: list[str]) -> Call | None:
    from rmsnorm_ref import rmsnorm  # noqa: PLC0415  # it brings Triton in, and nothing else does

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rmsnorm(torch.ones(1, 8, device=device), torch.ones(8, device=device))
    except RuntimeError as error:
        notes.append(f"the reference does not run beside the candidate: {error}")
        return None
    return rmsnorm


def _results(f: Callable[..., Tensor], given: Inputs, gives: str) -> dict[str, Tensor]:
    try:
        if gives == "xw":
            return grads(f, given)
        x = given.x.detach().requires_grad_("x" in gives)
        w = given.w.detach().requires_grad_("w" in gives)
        with torch.set_grad_enabled(bool(gives)):
            y = f(x, w, given.eps)
        leaves = {"d" + n: t for n, t in (("x", x), ("w", w)) if n in gives}
        if not leaves:
            return {"y": y.detach()}
        found = torch.autograd.grad(y, list(leaves.values()), given.dy.to(y.dtype))
        return {"y": y.detach(), **dict(zip(leaves, found, strict=True))}
    except Exception:  # noqa: BLE001  # whatever it is, the cases have met it
        return {}


def _errors(actual: Tensor, truth: Tensor, bound: Tensor) -> dict[str, Any]:
    if actual.shape != truth.shape or actual.dtype not in oracle.DTYPES:
        return {"relative_l2": math.inf, "max_ulp": math.inf, "ratio": math.inf, "histogram": []}
    verdict = oracle.compare(actual, truth, bound)
    n_ulps = ((actual.double() - truth).abs() / oracle.ulp(truth, actual.dtype)).flatten()
    n_ulps = n_ulps.nan_to_num(nan=math.inf, posinf=math.inf)
    edges = [-1.0, *EDGES_ULP, math.inf]
    counts = [int(((n_ulps > a) & (n_ulps <= b)).sum()) for a, b in itertools.pairwise(edges)]
    return {
        "relative_l2": verdict.errors.relative_l2,
        "max_ulp": verdict.errors.max_ulp,
        "ratio": verdict.worst_ratio,
        "histogram": [count / max(1, n_ulps.numel()) for count in counts],
    }
