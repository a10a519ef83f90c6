"""The lines that show a finding again: paste them, run them, and the last one raises."""

from __future__ import annotations

from .cases import Case, source
from .probes import text

_TRUTHS = {
    "y": "oracle.assert_within(y, oracle.truth(x, w, eps), oracle.bound_y(x, w, eps), 'y')",
    "dx": (
        "oracle.assert_within(dx, oracle.truth_backward(dy, x, w, eps)[0], "
        "oracle.bound_dx(dy, x, w, eps), 'dx')"
    ),
    "dw": (
        "oracle.assert_within(dw, oracle.truth_backward(dy, x, w, eps)[1], "
        "oracle.bound_dw(dy, x, w, eps), 'dw')"
    ),
}


_FENCES = "from rmsnorm_ref.review import fences"


def _fenced(passes: list[str]) -> list[str]:
    first = "with fences.raised() as fence:  # new memory is full of NaN, between painted fields"
    return [first, *(f"    {line}" for line in passes)]


def head(loads: str) -> str:
    """Write the imports and the line that finds the candidate."""
    lines = ["import torch", "from rmsnorm_ref import oracle"]
    if loads.startswith("load("):
        lines += ["from rmsnorm_ref.review import load", "", f"f = {loads}"]
    else:
        lines += ["", f"# f is {loads}"]
    return "\n".join(lines)


def value(loads: str, case: Case, tensor: str, device: str, *, fenced: bool = False) -> str:
    """Show that one result leaves its bound; `fenced`: memory that nobody writes reads as NaN."""
    passes = _passes(case, tensor)
    lines = [head(loads), source(case, device), *(_fenced(passes) if fenced else passes)]
    if fenced:
        lines.insert(0, _FENCES)
    if tensor != "y":
        lines.append("x, w = x.detach(), w.detach()")
    truth = _TRUTHS[tensor]
    return "\n".join(
        [*lines, truth.replace("x, w, eps", "x, 1 + w, eps") if case.one_plus else truth]
    )


def _passes(case: Case, tensor: str) -> list[str]:
    if tensor == "y" or not case.needs:
        return ["y = f(x, w, eps)"]
    leaves = list(case.needs)
    lines = [f"{leaf}.requires_grad_()" for leaf in leaves]
    names = ", ".join("d" + leaf for leaf in leaves) + ("," if len(leaves) == 1 else "")
    lines += ["y = f(x, w, eps)"]
    lines += [f"{names} = torch.autograd.grad(y, [{', '.join(leaves)}], dy.to(y.dtype))"]
    return lines


def flag(loads: str, case: Case, rule: str, device: str) -> str:
    """Show that a property of the contract does not hold."""
    lines = [head(loads), source(case, device)]
    passes = _passes(case, "dx")
    if rule == "r-inputs-untouched":
        # y is kept as the forward left it, if there is a backward that may write to it.
        cut = len(passes) - (len(passes) > 1)
        lines += ["before = [t.clone() for t in (x, w, dy)]", *passes[:cut]]
        lines += ["kept = y.detach().clone()", *passes[cut:]]
        lines += ["assert all(map(torch.equal, (*before, kept), (x, w, dy, y)))"]
        lines += ["assert x.grad is None and w.grad is None"]
    elif rule == "r-outside":
        lines.insert(0, _FENCES)
        lines += [*_fenced(passes), "assert fence.are_whole()"]
    elif rule == "r-alias":
        lines += ["y = f(x, w, eps)"]
        lines += ["assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()"]
    elif rule == "r-dtypes":
        lines += ["y = f(x, w, eps)", "assert y.dtype == x.dtype, y.dtype"]
    elif rule == "r-shape":
        lines += [*passes, "assert y.shape == x.shape, y.shape"]
        lines += [f"assert d{leaf}.shape == {leaf}.shape" for leaf in case.needs]
    else:
        lines += passes
    return "\n".join(lines)


def probe(loads: str, name: str, case: Case, gives: str, device: str) -> str:
    """Show that a probe does not hold."""
    return "\n".join([head(loads), text(name, case, gives, device)])


def missing(loads: str, case: Case, tensor: str, device: str) -> str:
    """Show that a gradient does not come."""
    leaf = tensor[1:]
    lines = [head(loads), source(case, device), f"{leaf}.requires_grad_()", "y = f(x, w, eps)"]
    lines += [
        f"assert torch.autograd.grad(y, {leaf}, dy.to(y.dtype), allow_unused=True)[0] is not None"
    ]
    return "\n".join(lines)
