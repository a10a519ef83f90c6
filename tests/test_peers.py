"""Peers: named whether installed or not, and refused where they compute something else."""

from __future__ import annotations

import dataclasses
import doctest
import subprocess
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from rmsnorm_ref import oracle
from rmsnorm_ref.measure import peers
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD, Config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WITHOUT_PACKAGES = ("eager", "eager_fp32", "F.rms_norm")
# (M, N): few long rows, many short ones, an odd width.
SHAPES = ((4, 65536), (2048, 64), (40, 769))

Formulas = tuple["Callable[..., Any]", "Callable[..., Any]"]


def inputs(M: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Make x, w and an unrelated dy."""
    return torch.randn(M, N).to(dtype), torch.randn(N).to(dtype), torch.randn(M, N).to(dtype)


def made_of(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> peers.Peer:
    """Make a peer out of `forward(x, w)` and `backward(dy, x, w)`, computed in fp32."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return forward(x.float(), w.float()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, w = ctx.saved_tensors
            dx, dw = backward(dy.float(), x.float(), w.float())
            return dx.to(x.dtype), dw.to(w.dtype)

    def build(N: int, dtype: torch.dtype, eps: float = peers.EPS) -> peers.Call:
        del N, dtype, eps
        apply: peers.Call = Function.apply
        return apply

    return peers.Peer("made up", "none", "0", None, build)


def rstd(x: Tensor) -> Tensor:
    """Compute the right rstd."""
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + peers.EPS)


def right_y(x: Tensor, w: Tensor) -> Tensor:
    """Compute the right y."""
    return x * rstd(x) * w


def right_gradients(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the right dx and dw."""
    x_hat, dyw = x * rstd(x), dy * w
    dx = (dyw - x_hat * (dyw * x_hat).mean(-1, keepdim=True)) * rstd(x)
    return dx, (dy * x_hat).sum(0)


# What is wrong -> (y, gradients, the tensors that must be refused).
WRONG: dict[str, tuple[Callable[..., Tensor], Callable[..., Any], set[str]]] = {
    "eps outside the root": (
        lambda x, w: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + peers.EPS) * w,
        right_gradients,
        {"y_small"},
    ),
    "no eps": (
        lambda x, w: x * x.pow(2).mean(-1, keepdim=True).rsqrt() * w,
        right_gradients,
        {"y_small"},
    ),
    "weight ignored": (lambda x, w: x * rstd(x) + 0 * w, right_gradients, {"y", "y_small"}),
    "weight from 1": (lambda x, w: x * rstd(x) * (1 + w), right_gradients, {"y", "y_small"}),
    "mean subtracted": (
        lambda x, w: right_y(x - x.mean(-1, keepdim=True), w),
        right_gradients,
        {"y", "y_small"},
    ),
    "no mean term in dx": (
        right_y,
        lambda dy, x, w: (dy * w * rstd(x), right_gradients(dy, x, w)[1]),
        {"dx"},
    ),
    "dx without the last rstd": (
        right_y,
        lambda dy, x, w: (right_gradients(dy, x, w)[0] / rstd(x), right_gradients(dy, x, w)[1]),
        {"dx"},
    ),
    "dw from x": (
        right_y,
        lambda dy, x, w: (right_gradients(dy, x, w)[0], (dy * x).sum(0)),
        {"dw"},
    ),
    "last row lost in dw": (
        right_y,
        lambda dy, x, w: (
            right_gradients(dy, x, w)[0],
            right_gradients(dy, x, w)[1] - right_gradients(dy[-1:], x[-1:], w)[1],
        ),
        {"dw"},
    ),
}


def test_examples_in_the_docstrings_run() -> None:
    """What the docstrings promise is what they print."""
    assert doctest.testmod(peers).failed == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), SHAPES)
@pytest.mark.parametrize("name", WITHOUT_PACKAGES)
def test_right_peers_pass(name: str, M: int, N: int, dtype: torch.dtype) -> None:
    """Eager code that rounds every intermediate to the storage dtype is still RMSNorm."""
    verification = peers.verify(peers.contenders()[name], *inputs(M, N, dtype))
    assert verification.ok, verification.reason()
    assert verification.verdicts.keys() == {"y", "y_small", "dx", "dw"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_peers_are_refused(wrong: str, dtype: torch.dtype) -> None:
    """Each wrong formula is refused, at unit scale, for the tensor that it spoils and no other."""
    forward, backward, spoiled = WRONG[wrong]
    # A lost row is as small as 1/M of dw, so few rows keep it above the roundings of bf16.
    verification = peers.verify(made_of(forward, backward), *inputs(16, 4096, dtype))
    assert not verification.ok
    assert {name for name, v in verification.verdicts.items() if not v.ok} == spoiled
    assert all(name in verification.reason() for name in spoiled)


def test_peer_made_of_the_right_formulas_passes() -> None:
    """The wrong peers above are wrong by their formulas and not by how they are made."""
    assert peers.verify(made_of(right_y, right_gradients), *inputs(16, 4096, torch.bfloat16)).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_tolerance_is_the_oracles_bound_and_storage_roundings(dtype: torch.dtype) -> None:
    """The slack over the oracle's bound is a few units in the last place, at any size of y."""
    x, w, _ = inputs(8, 512, dtype)
    slack = peers._y_tolerance(x, w) - oracle.bound_y(x, w, peers.EPS)
    unit = oracle.ulp(oracle.truth(x, w, peers.EPS), dtype)
    assert (slack > 0).all()
    # 4.5 roundings of u, none of them more than an ulp, and one for numbers below the normal ones.
    assert (slack <= (4.5 + 1 + w.double().abs()) * unit).all()


def test_given_call_is_verified_without_building() -> None:
    """A call that is at hand, compiled maybe, is used as it is: nothing is built twice."""
    eager = peers.contenders()["eager"]
    call = eager.build(64, torch.float32)

    def refuse(N: int, dtype: torch.dtype, eps: float = peers.EPS) -> peers.Call:
        raise AssertionError((N, dtype, eps))

    unbuildable = dataclasses.replace(eager, build=refuse)
    assert peers.verify(unbuildable, *inputs(8, 64, torch.float32), call=call).ok


def test_every_contender_is_named_with_its_version_or_why_it_is_missing() -> None:
    """All eight are there in a fixed order; a missing one says which packages would help."""
    found = peers.contenders()
    assert [*found] == [*WITHOUT_PACKAGES, "torch.compile", "liger", "fla", "flash_attn", "quack"]
    for name, peer in found.items():
        assert peer.name == name
        if peer.missing_reason is None:
            assert peer.version == metadata.version(peer.package)
        else:
            assert "not installed" in peer.missing_reason


def test_companion_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed without what it needs is missing, and says what it lacks."""
    installed = {"fla-core": "0.6.0", "quack-kernels": "0.2.4", "apache-tvm-ffi": "0.1"}
    monkeypatch.setattr(peers, "_version", installed.get)
    found = peers.contenders()
    assert found["fla"].version == "0.6.0"
    assert str(found["fla"].missing_reason).startswith("einops not installed")
    assert "nvidia-cutlass-dsl and torch-c-dlpack-ext" in str(found["quack"].missing_reason)


# Where each package keeps its function, and the arguments after x and w.
ELSEWHERE: dict[str, tuple[str, str, tuple[Any, ...], dict[str, Any]]] = {
    "liger": (
        "liger_kernel.ops.rms_norm",
        "LigerRMSNormFunction",
        (1e-6, 0.0, "llama", False),
        {},
    ),
    "fla": ("fla.modules.layernorm", "rms_norm", (None,), {"eps": 1e-6}),
    "flash_attn": ("flash_attn.ops.triton.layer_norm", "rms_norm_fn", (None,), {"eps": 1e-6}),
    "quack": ("quack", "rmsnorm", (), {"eps": 1e-6}),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_packages_are_called_by_their_own_signature(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A build imports the package's module and passes x, w, eps where its function takes them."""
    module_name, function, arguments, keywords = ELSEWHERE[name]
    build = peers.contenders()[name].build
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        return torch.zeros(1)

    module = ModuleType(module_name)
    setattr(module, function, SimpleNamespace(apply=record) if name == "liger" else record)
    parts = module_name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    monkeypatch.setitem(sys.modules, module_name, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    wheel = SimpleNamespace(locate_file=lambda inside: tmp_path / inside)
    monkeypatch.setattr(metadata, "distribution", lambda _: wheel)
    x, w = torch.ones(2, 8), torch.ones(8)
    build(8, torch.float32)(x, w)
    assert calls == [((x, w, *arguments), keywords)]
    cutlass = str(tmp_path / "nvidia_cutlass_dsl" / "python_packages")
    assert (cutlass in sys.path) == (name == "quack")


def made_up_tuner(*warps: int) -> SimpleNamespace:
    """Return what has configs, as Triton's autotuner has."""
    return SimpleNamespace(configs=[SimpleNamespace(num_warps=n, num_stages=3) for n in warps])


def test_configs_of_fla_are_those_that_its_search_would_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are found through decorators, in the kernel that serves N; another FLA has none."""
    fla = peers.contenders()["fla"]
    module: Any = ModuleType("fla.modules.layernorm")
    monkeypatch.setitem(sys.modules, "fla.modules.layernorm", module)
    assert fla.pins(FORWARD, 4096) == ()
    module.layer_norm_fwd_kernel_row = made_up_tuner(2, 16)
    module.layer_norm_bwd_kernel_row = SimpleNamespace(fn=made_up_tuner(4))
    module.layer_norm_fwd_kernel = made_up_tuner(8)
    assert [pin.config for pin in fla.pins(FORWARD, 4096)] == [Config(2, 3), Config(16, 3)]
    assert [pin.config for pin in fla.pins(BACKWARD, 513)] == [Config(4, 3)]
    assert [pin.config for pin in fla.pins(FORWARD, 512)] == [Config(8, 3)]
    assert fla.pins(BACKWARD, 512) == ()


def test_a_held_config_is_let_go() -> None:
    """Inside, a search has one config to choose from; after, also after an error, it has all."""
    tuner = made_up_tuner(2, 4, 8)
    whole = list(tuner.configs)
    seen: list[Any] = []

    def called() -> None:
        with peers.Pin(tuner, whole[1]).held():
            seen.extend(tuner.configs)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        called()
    assert seen == [whole[1]]
    assert tuner.configs == whole


def test_listing_peers_imports_none_of_them() -> None:
    """Importing the module and listing it loads no Triton, no Dynamo, no peer, and no CUDA."""
    code = (
        "import sys, torch; from rmsnorm_ref.measure import peers; peers.contenders();"
        "loaded = {'triton', 'torch._dynamo', 'liger_kernel', 'fla', 'quack', 'flash_attn'};"
        "assert not loaded & sys.modules.keys(); assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*peers.contenders()])
def test_installed_peers_are_rmsnorm(name: str, dtype: torch.dtype) -> None:
    """Every peer that is installed on a GPU machine passes, so that it may be timed there."""
    peer = peers.contenders()[name]
    if peer.missing_reason:
        pytest.skip(peer.missing_reason)
    x, w, dy = (t.cuda() for t in inputs(512, 2048, dtype))
    verification = peers.verify(peer, x, w, dy)
    assert verification.ok, verification.reason()
