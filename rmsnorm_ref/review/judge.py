"""Run a candidate on one case and say what came out, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import fences
from .cases import EQUAL, Case, make
from .tolerance import Inputs, judge, truths

if TYPE_CHECKING:
    from .candidate import Call

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_RANDOM = {"random", "negative", "equal in a row"}  # where an error's size as a whole means much


def bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a tensor, as integers."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])


def storage_bits(tensor: Tensor) -> Tensor:
    """Copy the bits of all memory that a tensor lies in, gaps included."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return bits(whole.set_(tensor.detach().untyped_storage())).clone()  # type: ignore[arg-type, unused-ignore]


def raised(stage: str, error: BaseException) -> dict[str, Any]:
    """Describe an exception in one line."""
    try:
        text = str(error).strip().splitlines() or [""]
    except Exception:  # noqa: BLE001  # it may be the candidate's own
        text = ["it cannot be printed"]
    return {"stage": stage, "type": type(error).__name__, "text": text[0][:300]}


def run(f: Call, case: Case, device: str = "cpu") -> dict[str, Any]:
    """Run both passes on a case, or the forward alone; return an outcome.

    Its keys: `raised`, or `tensors` with the judgement of each result, `flags` with the rules that
    were broken besides, and `missing` with gradients that did not come.
    """
    names = make(case, device)
    given = Inputs(names["x"], names["w"], names["dy"], case.eps)
    before = [storage_bits(tensor) for tensor in given[:3]]
    outcome: dict[str, Any] = {"tensors": {}, "flags": {}, "missing": []}
    with fences.raised() as fence:
        results, problem = _results(f, case, given)
    if problem:
        outcome["raised"] = problem
    if written := results.pop("written", ""):
        outcome["flags"]["r-inputs-untouched"] = written
    outcome["recorded"] = results.pop("recorded", False)
    if "y" in results and not outcome["recorded"]:
        outcome["missing"] = ["d" + leaf for leaf in case.needs]
    flags = outcome["flags"]
    for name, tensor, bits_before in zip(("x", "w", "dy"), given[:3], before, strict=True):
        if not torch.equal(storage_bits(tensor), bits_before):
            flags["r-inputs-untouched"] = f"{name} was written to"
    if not fence.are_whole():
        flags["r-outside"] = "memory outside of an allocated tensor was written to"
    if "y" in results and not isinstance(results["y"], Tensor):
        outcome["raised"] = {
            "stage": "forward",
            "type": "TypeError",
            "text": f"the result is a {type(results['y']).__name__}, no tensor",
        }
        return outcome
    if flags.get("r-inputs-untouched"):  # what it should have been is known from clean inputs
        names = make(case, device)
        given = Inputs(names["x"], names["w"], names["dy"], case.eps)
    # What is fed may be the gain less one; what is meant is the gain.
    meant = given._replace(w=1 + given.w) if case.one_plus else given
    _judge(outcome, results, meant, case)
    return outcome


def _results(f: Call, case: Case, given: Inputs) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return y and the gradients that came, and what was raised."""
    x = given.x.detach().requires_grad_("x" in case.needs)
    w = given.w.detach().requires_grad_("w" in case.needs)
    wanted = {"d" + n: t for n, t in (("x", x), ("w", w)) if n in case.needs}
    results: dict[str, Any] = {}
    stage = "forward"
    try:
        with torch.set_grad_enabled(bool(wanted)):
            y = f(x, w, given.eps)
        _wait(given.x)
        results["y"] = y.detach() if isinstance(y, Tensor) else y
        if isinstance(y, Tensor):
            results["alias"] = y.numel() > 0 and _share(y, given.x)
            results["recorded"] = y.requires_grad
        if wanted and isinstance(y, Tensor) and y.shape == given.x.shape and y.requires_grad:
            # Both passes read memory: keep y as the forward left it.
            results["y"] = y.detach().clone()
            stage = "backward"
            dy = given.dy if given.dy.dtype == y.dtype else given.dy.to(y.dtype)
            found = torch.autograd.grad(y, list(wanted.values()), dy, allow_unused=True)
            _wait(given.x)
            results |= dict(zip(wanted, found, strict=True))
            if y.dtype == results["y"].dtype and not torch.equal(bits(y), bits(results["y"])):
                results["written"] = "the backward wrote to y, which the caller still holds"
            for leaf, tensor in (("x", x), ("w", w)):
                if tensor.grad is not None:
                    results["written"] = f"{leaf}.grad was written to, where autograd.grad asked"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # a kernel may raise whatever it likes
        return results, raised(stage, error)
    return results, None


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _share(y: Tensor, x: Tensor) -> bool:
    return y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def _judge(outcome: dict[str, Any], results: dict[str, Any], given: Inputs, case: Case) -> None:
    """Hold what came against the truth."""
    flags, known = outcome["flags"], {}
    if results.pop("alias", False):
        flags["r-alias"] = "y shares memory with x"
    shapes = {"y": given.x.shape, "dx": given.x.shape, "dw": given.w.shape}
    for name, result in results.items():
        if result is None:
            outcome["missing"].append(name)
        elif result.shape != shapes[name]:
            flags["r-shape"] = f"{name} is {list(result.shape)}, not {list(shapes[name])}"
        else:
            known[name] = result
    y = known.get("y")
    if y is not None and y.dtype != given.x.dtype:
        outcome["dtype"] = str(y.dtype).removeprefix("torch.")
        flags["r-dtypes"] = f"y is {outcome['dtype']} where x is {case.dtype}"
        if not y.dtype.is_floating_point:
            del known["y"]
        elif y.dtype == torch.float64:
            known["y"] = y.float()
    # A module that casts to the dtype of w, as T5's, rounds to that one.
    own = given.x.dtype
    cast = given.w.dtype if y is not None and y.dtype == given.w.dtype != own else own
    drifts = case.values in EQUAL and case.dtype == "float32"
    random = case.values in _RANDOM and not drifts and cast == own
    dtype = max(own, cast, key=_eps)
    for name, (truth, bound) in truths(given, set(known)).items():
        outcome["tensors"][name] = judge(
            name, known[name], truth, bound, given, random=random, in_series=drifts, dtype=dtype
        )
