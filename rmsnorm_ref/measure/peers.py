"""The contenders that are not ours: one record each, and a check that each one is RMSNorm.

A peer is used where its package is installed and named as missing where it is not. Nothing of a
peer is imported before `Peer.build`. Versions that are known to work beside torch 2.11 are the ones
of the extra `peers`: `pip install 'rmsnorm_ref[peers]'`.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rmsnorm_ref import oracle

from .schema import BACKWARD, FORWARD, Config, Pass

EPS = 1e-6  # every contender normalises with this one, in every recording
Call = Callable[[Tensor, Tensor], Tensor]


class Build(Protocol):
    """Import a peer and return its call."""

    def __call__(self, N: int, dtype: torch.dtype, eps: float = EPS) -> Call:
        """Return `f(x, w) -> y`, differentiable: x [M, N] of `dtype`, w [N], y [M, N]."""


@dataclass(frozen=True)
class Pin:
    """Hold one config that a peer's own search chooses among, to call the peer with no other."""

    tuner: Any  # a triton Autotuner: it takes the only config that it has without a search
    choice: Any  # a triton.Config

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let every call inside take this config."""
        before = self.tuner.configs
        self.tuner.configs = [self.choice]
        try:
            yield
        finally:
            self.tuner.configs = before

    @property
    def config(self) -> Config:
        """Return its warps and stages."""
        return Config(self.choice.num_warps, self.choice.num_stages)


class Pins(Protocol):
    """List what a peer's own search would try, once the peer is built."""

    def __call__(self, pass_: Pass, N: int) -> tuple[Pin, ...]:
        """Return one pin for each config of one pass at rows of N columns; none: no search."""


def _no_search(pass_: Pass, N: int) -> tuple[Pin, ...]:
    del pass_, N
    return ()


@dataclass(frozen=True)
class Peer:
    """Hold one contender: how to build it, or why it is missing.

    `version` is that of `package`, None if that is not installed; `missing_reason` is None where
    the peer can be built. `build(N, dtype)` may compile and may raise whatever its package raises.
    Where `pins` gives configs, each of them is timed, and the fastest stands for the peer.
    """

    name: str
    package: str
    version: str | None
    missing_reason: str | None
    build: Build
    pins: Pins = _no_search


def contenders() -> dict[str, Peer]:
    """Return every peer by name, installed or not, in the order of the tables.

    Only package metadata is read: no peer is imported and no GPU is touched.

    >>> eager = contenders()["eager"]
    >>> eager.missing_reason is None
    True
    >>> eager.build(2, torch.float32)(torch.tensor([[3.0, 4.0]]), torch.ones(2))
    tensor([[0.8485, 1.1314]])
    """
    return {
        "eager": _peer("eager", _eager, "torch"),
        "eager_fp32": _peer("eager_fp32", _eager_fp32, "torch"),
        "F.rms_norm": _peer("F.rms_norm", _functional, "torch"),
        "torch.compile": _peer("torch.compile", _compiled, "torch"),
        "liger": _peer("liger", _liger, "liger-kernel"),
        "fla": _peer("fla", _fla, "fla-core", "einops", pins=_pins_of_fla),
        "flash_attn": _peer("flash_attn", _flash_attn, "flash-attn"),
        "quack": _peer(
            "quack",
            _quack,
            "quack-kernels",
            "nvidia-cutlass-dsl",
            "apache-tvm-ffi",
            "torch-c-dlpack-ext",
        ),
    }


def _peer(name: str, build: Build, package: str, *needs: str, pins: Pins = _no_search) -> Peer:
    version = _version(package)
    absent = [needed for needed in (package, *needs) if _version(needed) is None]
    reason = None
    if absent:
        reason = f"{' and '.join(absent)} not installed: try pip install 'rmsnorm_ref[peers]'"
    return Peer(name, package, version, reason, build, pins)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---- How each is called -----------------------------------------------------------------------


def _eager(N: int, dtype: torch.dtype, eps: float = EPS) -> Call:
    """Spell the chain that `traffic.eager_forward(..., spelling="seed")` counts."""
    del N, dtype

    def call(x: Tensor, w: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + eps)
        return w * x

    return call


def _eager_fp32(N: int, dtype: torch.dtype, eps: float = EPS) -> Call:
    """Spell the chain that `traffic.eager_forward(..., spelling="fp32")` counts."""
    del N, dtype

    def call(x: Tensor, w: Tensor) -> Tensor:
        h = x.float()
        variance = h.pow(2).mean(-1, keepdim=True)
        h = h * torch.rsqrt(variance + eps)
        return w * h.to(x.dtype)

    return call


def _functional(N: int, dtype: torch.dtype, eps: float = EPS) -> Call:
    del dtype
    return lambda x, w: torch.nn.functional.rms_norm(x, (N,), w, eps)


def _compiled(N: int, dtype: torch.dtype, eps: float = EPS) -> Call:
    """Compile F.rms_norm for the shapes it meets, one graph each.

    Dynamo counts recompilations per line of code and after a few silently runs that line eagerly.
    So it forgets earlier builds, is allowed more, and fullgraph turns the silence into an error.
    Donated buffers are switched off: with them a backward runs once per forward, and a timer's
    second `torch.autograd.grad(..., retain_graph=True)` raises.
    """
    dynamo: Any = import_module("torch._dynamo")
    dynamo.reset()
    dynamo.config.recompile_limit = 64
    functorch: Any = import_module("torch._functorch.config")
    functorch.donated_buffer = False
    return torch.compile(_functional(N, dtype, eps), dynamic=False, fullgraph=True)


def _liger(N: int, dtype: torch.dtype, eps: float = EPS) -> Call:
    del N, dtype
    function = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    # No offset on w; statistics in fp32; dx not written over dy, so that a graph can be replayed.
    offset, casting_mode, in_place = 0.0, "llama", False
    return lambda x, w: function.apply(x, w, eps, offset, casting_mode, in_place)


def _fla(N: int, dtype: torch.dtype, eps: float = EPS) -> Call:
    del N, dtype
    rms_norm = import_module("fla.modules.layernorm").rms_norm
    return lambda x, w: rms_norm(x, w, None, eps=eps)


def _flash_attn(N: int, dtype: torch.dtype, eps: float = EPS) -> Call:
    del N, dtype
    rms_norm = import_module("flash_attn.ops.triton.layer_norm").rms_norm_fn
    return lambda x, w: rms_norm(x, w, None, eps=eps)


def _pins_of_fla(pass_: Pass, N: int) -> tuple[Pin, ...]:
    """Return the configs of FLA's search for whole rows, or up to 512 columns for tiles of rows.

    Left to itself it searches at the first call of each N and dtype, at whatever M that has, by a
    short timing, and keeps the choice: two runs may time two kernels, and medians moved by 12 %
    (h200-2026-11-30d-again). The fastest of all that it would try is fair to it, and repeats. None
    where another version of FLA keeps its configs elsewhere.
    """
    short = {FORWARD: "fwd", BACKWARD: "bwd"}[pass_]
    kind = "kernel" if N <= 512 else "kernel_row"  # as FLA decides
    module: Any = sys.modules.get("fla.modules.layernorm")
    tuner = getattr(module, f"layer_norm_{short}_{kind}", None)
    while tuner is not None and not hasattr(tuner, "configs"):
        tuner = getattr(tuner, "fn", None)  # what a decorator wraps
    return tuple(Pin(tuner, choice) for choice in getattr(tuner, "configs", ()))


def _quack(N: int, dtype: torch.dtype, eps: float = EPS) -> Call:
    """Find cutlass first: its wheel keeps it in a folder that only a .pth file puts on the path.

    A `pip install --target` folder is no site directory, and its .pth files are not read.
    """
    del N, dtype
    inside = metadata.distribution("nvidia-cutlass-dsl").locate_file(
        "nvidia_cutlass_dsl/python_packages"
    )
    if str(inside) not in sys.path:
        sys.path.append(str(inside))
    rmsnorm = import_module("quack").rmsnorm
    return lambda x, w: rmsnorm(x, w, eps=eps)


# ---- Is it RMSNorm? ---------------------------------------------------------------------------


class Verification(NamedTuple):
    """Hold whether a peer may be timed, and the verdict on each tensor."""

    ok: bool
    verdicts: dict[str, oracle.Verdict]

    def reason(self) -> str:
        """Say in one line what failed, with its error over the tolerance; "" if nothing did."""
        return ", ".join(
            f"{name}{list(v.index)} is off by {v.worst_ratio:.3g} times the tolerance"
            for name, v in self.verdicts.items()
            if not v.ok
        )


def verify(peer: Peer, x: Tensor, w: Tensor, dy: Tensor, call: Call | None = None) -> Verification:
    """Hold a peer against the float64 truth: it must be RMSNorm before it is timed.

    A peer need not meet the bounds of `oracle.py`: eager code that stays in bf16 rounds every
    intermediate. What is asked is what any order of the right operations reaches: the oracle's
    bound, and on top one rounding to the storage dtype (u relative) for every operation of that
    longest chain. Three before the root, halved by it, and the root's own make 2.5 u in rstd; y
    adds 2 u. In dx the direct part adds 3 u, and the mean part 3 times rstd's and 8 u, each
    relative to its own part; dw adds 3 u to every term. In fp16 squares also underflow.

    That is 2 to 6 % in bf16, so the inputs are made to show a wrong formula above it:
    rows of x are scaled by 1/2, 1, 2, 4 (x in place of x_hat); dy leans towards x (the mean term
    of dx is as large as dx, not its N**-0.5 th part); y is compared a second time on rows as small
    as the root of eps (where eps stands). dy is small enough for no fp16 sum to overflow.

    Args:
        peer: one of `contenders()`, installed.
        x: [M, N], fp16, bf16 or fp32, of about unit size.
        w: [N], x's dtype; not all ones, or a forgotten weight goes unseen.
        dy: [M, N], x's dtype.
        call: what `peer.build` returned, where it is at hand; built otherwise.

    Returns:
        Verification with verdicts on y, y_small, dx, dw.

    Raises:
        Whatever the peer raises.

    >>> x, w = torch.linspace(-2, 2, 64).reshape(4, 16), torch.linspace(0.5, 2, 16)
    >>> verify(contenders()["F.rms_norm"], x, w, torch.ones_like(x)).ok
    True
    """
    M, N = x.shape
    f = peer.build(N, x.dtype) if call is None else call
    x, w = x.detach(), w.detach()
    with torch.no_grad():
        small = x * 2.0 ** round(math.log2(EPS) / 2)
        y_small = f(small, w)
        row_scale = 2.0 ** (torch.arange(M, device=x.device) % 4 - 1)
        x = (x * row_scale[:, None]).to(x.dtype)
        lean = oracle.truth(x, torch.ones_like(w), EPS) * torch.where(w < 0, -1.0, 1.0)
        shrink = 2.0 ** -max(3, math.ceil(math.log2(max(M, N, 1))) - 12)
        dy = ((dy.double() + lean) * shrink).to(x.dtype)
        del lean
    leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = f(leaf_x, leaf_w)
    dx, dw = torch.autograd.grad(y, (leaf_x, leaf_w), dy)
    true_dx, true_dw = oracle.truth_backward(dy, x, w, EPS)
    dx_tolerance, dw_tolerance = _backward_tolerance(dy, x, w)
    verdicts = {
        "y": oracle.compare(y.detach(), oracle.truth(x, w, EPS), _y_tolerance(x, w)),
        "y_small": oracle.compare(y_small, oracle.truth(small, w, EPS), _y_tolerance(small, w)),
        "dx": oracle.compare(dx, true_dx, dx_tolerance),
        "dw": oracle.compare(dw, true_dw, dw_tolerance),
    }
    return Verification(all(v.ok for v in verdicts.values()), verdicts)


def _roundings(x: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Return rstd [M, 1], its relative error with storage rounding, u, the smallest number."""
    limits = torch.finfo(x.dtype)
    u, smallest = limits.eps / 2, limits.tiny * limits.eps
    rstd = torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS)
    # Square, mean and sum with eps may each lose half the smallest number, beside 1 / rstd**2.
    return rstd, 2.5 * u + 0.75 * smallest * rstd**2, u, smallest


def _y_tolerance(x: Tensor, w: Tensor) -> Tensor:
    """Return the tolerance of y, float64 [M, N]; argued in `verify`."""
    _, in_rstd, u, smallest = _roundings(x)
    slack = (in_rstd + 2 * u) * oracle.truth(x, w, EPS).abs()
    return oracle.bound_y(x, w, EPS) + slack + smallest * (1 + w.double().abs())


def _backward_tolerance(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tolerances of dx, float64 [M, N], and dw, float64 [N]; argued in `verify`."""
    rstd, in_rstd, u, smallest = _roundings(x)
    x_hat = (x.double() * rstd).abs()
    dyw = (dy.double() * w.double()).abs()
    mean_part = x_hat * (dyw * x_hat).mean(-1, keepdim=True)
    in_dx = rstd * ((in_rstd + 3 * u) * dyw + (3 * in_rstd + 8 * u) * mean_part)
    in_dw = ((in_rstd + 3 * u) * dy.double().abs() * x_hat + smallest).sum(0)
    dx_tolerance = oracle.bound_dx(dy, x, w, EPS) + in_dx + smallest * (1 + rstd)
    return dx_tolerance, oracle.bound_dw(dy, x, w, EPS) + in_dw
