"""The child's side: load a candidate, answer requests, one JSON line each.

Before a request is begun a line says so: a child that dies or hangs has named what it was at.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from rmsnorm_ref import interpreter

from . import accuracy, judge, probes, semantics, speed, tuners
from .cases import Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from .candidate import Call, Candidate

ENOUGH_BYTES = 2 * 2**30  # of a GPU's free memory, for any input that is not huge
# eps of kernels that take none, rounded to the nearest of these where one is within 2 %.
_USUAL_EPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 2.0**-23, 2.0**-7, 2.0**-10, 0.0)


class Worker:
    """Answer requests about one candidate on one device."""

    def __init__(self, find: Callable[[], Candidate], device: str) -> None:
        self._find = find
        self._device = device
        self._candidate: Candidate | None = None
        self._tuned: dict[str, int] = {}  # kernels that search, and among how many configs

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the result of one request."""
        op = request["op"]
        if op == "load":
            return self._load()
        if op == "tuned":
            return {"tuned": self._tuned}
        assert self._candidate is not None
        f = self._candidate.call
        if op == "bench":  # with the launches that the candidate's own search finds
            return speed.measure(f, request["full"], request["dtype"], request["gives"])
        interpreter.mend_for_others()  # each time: a candidate may import Triton at its first call
        with tuners.drawn(self._tuned):
            return self._called(f, request)

    def _called(self, f: Call, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "case":
            return judge.run(f, Case.of(request["case"]), self._device)
        if op == "probe":
            case = Case.of(request["case"])
            return probes.run(f, request["probe"], case, request["gives"], self._device)
        if op == "interpreted":
            return {"interpreted": self._device == "cpu" and _interprets(f, request["dtype"])}
        if op == "eps":
            return {
                "eps": fixed_eps(f, self._device, request["dtype"], one_plus=request["one_plus"])
            }
        if op == "semantics":
            return self._semantics(request)
        words = request["dtypes"], request["gives"], request["eps"]
        return accuracy.table(f, self._device, *words, one_plus=request["one_plus"])

    def _load(self) -> dict[str, Any]:
        self._candidate = self._find()
        torch.zeros(1, device=self._device)  # a context is made here, not in the first case's time
        return {"signature": self._candidate.signature, "takes_eps": self._candidate.takes_eps}

    def _semantics(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._candidate is not None
        f = self._candidate.call
        try:
            return semantics.fit(
                f,
                self._device,
                request["dtypes"],
                takes_eps=request["takes_eps"],
                fixed_eps=request["eps"],
                gives=request["gives"],
                gain=semantics.GAINS[request["one_plus"]],
            )
        except Exception as error:  # noqa: BLE001  # what it refuses, cases tell
            return {"raised": judge.raised("forward", error)}


def _interprets(f: Call, dtype: str) -> bool:
    """Tell whether a call runs kernels in Triton's interpreter: then each row costs milliseconds.

    That Triton was imported says little: another test of the same process may have done so.
    """
    x = torch.ones(1, 8, dtype=getattr(torch, dtype))
    f(x, x[0], 1e-6)  # the first call may import Triton
    tritons: Any = sys.modules.get("triton.runtime.interpreter")
    if tritons is None:
        return False
    launched = []
    original = tritons.GridExecutor.__call__

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        launched.append(True)
        return original(self, *args, **options)

    tritons.GridExecutor.__call__ = launch
    try:
        f(x, x[0], 1e-6)
    finally:
        tritons.GridExecutor.__call__ = original
    return bool(launched)


def fixed_eps(f: Any, device: str, dtype: str, *, one_plus: bool = False) -> float:
    """Find the eps of a kernel that takes none, from a row far below its root."""
    size = 1e-4
    x = torch.full((2, 8), size, device=device, dtype=getattr(torch, dtype))
    w = torch.full((8,), 0.0 if one_plus else 1.0, device=device, dtype=x.dtype)
    with torch.no_grad():
        y = float(f(x, w, 0.0).double().mean())
    size = float(x[0, 0])
    eps = max(0.0, (size / y) ** 2 - size**2) if y and math.isfinite(y) else 0.0
    return min(_USUAL_EPS, key=lambda usual: abs(usual - eps)) if _usual(eps) else eps


def _usual(eps: float) -> bool:
    return any(abs(eps - usual) <= 0.02 * usual + 1e-10 for usual in _USUAL_EPS)


def serve(worker: Worker, requests: int, answers: int) -> None:
    """Read requests from one file descriptor, write answers to another, until it is closed."""
    torch.set_num_threads(1)  # inputs are small: threads would only wait for each other
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:

        def say(**words: Any) -> None:
            out.write(json.dumps(words) + "\n")
            out.flush()

        for line in lines:
            for request in json.loads(line):
                say(begun=request["id"])
                result = answered(worker, request)
                say(done=request["id"], result=result)
                if "cuda_error" in result:
                    os._exit(0)  # nothing works in this process any more


def answered(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """Return what a request gives, whatever is raised; `cuda_error` if it broke the GPU's context.

    The GPU is waited for: an error that comes late is one of this request.
    """
    try:
        result = worker.answer(request)
    except torch.OutOfMemoryError as error:
        # A small or a shared GPU is no fault of the candidate; what it asks for beyond is.
        result = {"not_run": True} if _is_short(request) else {"failed": judge.raised("", error)}
    except Exception as error:  # noqa: BLE001  # told, and judged by whoever asked
        result = {"failed": judge.raised("", error)}
    broken = _broken_gpu()
    return {"cuda_error": broken} if broken else result


def _is_short(request: dict[str, Any]) -> bool:
    """Tell whether there is less memory than an input of this size may ask for."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return False
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return request.get("probe") in probes.HUGE or free < ENOUGH_BYTES


def _broken_gpu() -> str:
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0][:200]
    return ""
