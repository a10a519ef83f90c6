"""What the op promises around its kernels: refusals by name, memory, layout, the module."""

from __future__ import annotations

import copy
import math
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from paths import (
    DTYPES,
    LAYOUTS,
    assert_same_bits,
    bits,
    in_every_dtype,
    make,
    on_every_kernel,
    on_every_shape,
    run,
    stored,
)

from rmsnorm_ref import RMSNorm, layout, rmsnorm, tiling

if TYPE_CHECKING:
    from collections.abc import Callable

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# ---- Refusals ---------------------------------------------------------------------------------

THREE = ("must be float16, bfloat16 or float32", "Nothing is rounded for you")
A_NUMBER, IN_RANGE = ("must be a number", "1e-6"), ("must be finite and not negative", "1e-6")
Case = tuple["Callable[[torch.Tensor, torch.Tensor], Any]", type[Exception], tuple[str, ...]]
REFUSED: dict[str, Case] = {
    "x list": (
        lambda _, w: rmsnorm([1.0], w),  # type: ignore[arg-type]
        TypeError,
        ("x is a list", "must be a torch.Tensor", "torch.as_tensor(x)"),
    ),
    "x numpy": (lambda x, w: rmsnorm(x.cpu().numpy(), w), TypeError, ("x is a ndarray",)),
    "w float": (lambda x, _: rmsnorm(x, 1.0), TypeError, ("w is a float", "torch.as_tensor(w)")),
    "w None": (lambda x, _: rmsnorm(x, None), TypeError, ("w is a NoneType",)),
    "x float64": (
        lambda x, w: rmsnorm(x.double(), w),
        TypeError,
        ("x is torch.float64", *THREE, "x.float()", "oracle.truth"),
    ),
    "w float64": (lambda x, w: rmsnorm(x, w.double()), TypeError, ("w is torch.float64", *THREE)),
    "x int": (lambda x, w: rmsnorm(x.long(), w), TypeError, ("x is torch.int64", *THREE)),
    "w bool": (lambda x, w: rmsnorm(x, w.bool()), TypeError, ("w is torch.bool", *THREE)),
    "x complex": (lambda x, w: rmsnorm(x.cfloat(), w), TypeError, (*THREE, "view_as_real(x)")),
    "x sparse": (
        lambda x, w: rmsnorm(x.to_sparse(), w),
        TypeError,
        ("x has layout torch.sparse_coo", "x.to_dense()"),
    ),
    "w sparse": (lambda x, w: rmsnorm(x, w.to_sparse()), TypeError, ("w.to_dense()",)),
    "x scalar": (
        lambda x, w: rmsnorm(x[0, 0], w),
        ValueError,
        ("x is a scalar", "[..., N]", "x.reshape(1)"),
    ),
    "w 2-D": (
        lambda x, w: rmsnorm(x, w[None]),
        ValueError,
        ("w has shape [1, 8]", "x has shape [2, 8]", "w must be [8]"),
    ),
    "w short": (lambda x, w: rmsnorm(x, w[:4]), ValueError, ("[4]", "[2, 8]", "w must be [8]")),
    "w of one": (lambda x, w: rmsnorm(x, w[:1]), ValueError, ("[1]", "w must be [8]")),
    "w scalar": (lambda x, w: rmsnorm(x, w[0]), ValueError, ("w has shape []", "w must be [8]")),
    "N 0": (
        lambda x, w: rmsnorm(x[:, :0], w[:0]),
        ValueError,
        ("x.shape[-1] is 0", "at least one element"),
    ),
    "N 65537": (
        lambda x, w: rmsnorm(x.new_ones(2, 65537), w.new_ones(65537)),
        ValueError,
        ("x.shape[-1] is 65537", "1 to 65536", "multi-pass"),
    ),
    "w elsewhere": (
        lambda x, w: rmsnorm(x, w.to("meta")),
        ValueError,
        ("w is on meta", "must share a device", "w.to("),
    ),
    "eps word": (lambda x, w: rmsnorm(x, w, "1e-6"), TypeError, ("eps is '1e-6'", *A_NUMBER)),
    "eps None": (lambda x, w: rmsnorm(x, w, None), TypeError, ("eps is None", *A_NUMBER)),
    "eps bool": (lambda x, w: rmsnorm(x, w, eps=True), TypeError, ("eps is True", *A_NUMBER)),
    "eps tensor": (lambda x, w: rmsnorm(x, w, w[0]), TypeError, ("eps is tensor", "eps.item()")),
    "eps negative": (lambda x, w: rmsnorm(x, w, -1e-6), ValueError, ("eps is -1e-06", *IN_RANGE)),
    "eps nan": (lambda x, w: rmsnorm(x, w, math.nan), ValueError, ("eps is nan", *IN_RANGE)),
    "eps inf": (lambda x, w: rmsnorm(x, w, math.inf), ValueError, ("eps is inf", *IN_RANGE)),
    "module N list": (lambda *_: RMSNorm([8]), TypeError, ("N is [8]", "int", "flattening")),
    "module N bool": (lambda *_: RMSNorm(N=True), TypeError, ("N is True", "int")),
    "module N float": (lambda *_: RMSNorm(8.0), TypeError, ("N is 8.0", "int")),
    "module N 0": (lambda *_: RMSNorm(0), ValueError, ("N is 0", "at least one element")),
    "module N -1": (lambda *_: RMSNorm(-1), ValueError, ("N is -1", "1 to 65536")),
    "module N 65537": (lambda *_: RMSNorm(65537), ValueError, ("N is 65537", "multi-pass")),
    "module eps": (lambda *_: RMSNorm(8, eps=-1.0), ValueError, ("eps is -1.0", *IN_RANGE)),
    "module eps word": (lambda *_: RMSNorm(8, eps="0"), TypeError, ("eps is '0'", *A_NUMBER)),
    "module float64": (lambda *_: RMSNorm(8, dtype=FP64), TypeError, ("torch.float64", *THREE)),
    "module int": (lambda *_: RMSNorm(8, dtype=torch.int64), TypeError, ("torch.int64", *THREE)),
    "module used as float64": (
        lambda x, _: RMSNorm(8, device=x.device).double()(x),
        TypeError,
        ("w is torch.float64", *THREE),
    ),
    "module on another N": (
        lambda x, _: RMSNorm(4, device=x.device)(x),
        ValueError,
        ("w has shape [4]", "x has shape [2, 8]"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, device: str) -> None:
    """An error names the argument and its value, what is required, and the fix."""
    call, error, parts = REFUSED[name]
    with pytest.raises(error) as caught:
        call(torch.ones(2, 8, device=device), torch.ones(8, device=device))
    assert type(caught.value) is error
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.gpu
def test_w_on_the_cpu_is_refused_beside_x_on_a_gpu(device: str) -> None:
    """The error names both devices and the call that moves w."""
    with pytest.raises(ValueError, match=r"x is on cuda:0 and w is on cpu.*w\.to\('cuda:0'\)"):
        rmsnorm(torch.ones(2, 8, device=device), torch.ones(8))


@pytest.mark.parametrize("eps", [0, 0.0, 1, 1e-12, 1e3])
def test_any_finite_eps_from_zero_on(eps: float, device: str) -> None:
    """An int is a number, and zero is allowed: a row with a non-zero element needs no eps."""
    x, w, dy = make(3, 8, FP32, device=device)
    assert_same_bits(run(x, w, dy, eps), run(x, w, dy, float(eps)))
    assert run(x, w, dy, eps).y.isfinite().all()


# ---- Memory -----------------------------------------------------------------------------------


@on_every_shape
def test_results_are_fresh_memory(N: int, M: int, device: str) -> None:
    """No result shares its storage with an input or another result, not even where N is 1."""
    x, w, dy = make(M, N, FP32, device=device)
    tensors = [x, w, dy, *run(x, w, dy)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


@on_every_kernel
def test_inputs_are_left_as_they_were(N: int, M: int, device: str) -> None:
    """Neither pass writes to x, w or dy, or to what lies between their rows, in any layout."""
    x, w, dy = make(M, N, BF16, device=device)
    for place in LAYOUTS.values():
        inputs = (place(x), LAYOUTS["offset"](w[None])[0], place(dy))
        before = [stored(tensor) for tensor in inputs]
        run(*inputs)
        after = [stored(tensor) for tensor in inputs]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@on_every_kernel
def test_expanded_dy_is_left_as_it_was(N: int, M: int, device: str) -> None:
    """A dy that is one number in memory is still that number after the backward."""
    x, w, _ = make(M, N, BF16, device=device)
    one = torch.ones((), dtype=BF16, device=device)
    run(x, w, one.expand(M, N))
    assert one.item() == 1


@pytest.mark.usefixtures("poisoned")
@on_every_shape
@pytest.mark.parametrize(("needs_dx", "needs_dw"), [(True, True), (True, False), (False, True)])
def test_every_element_is_written(
    N: int, M: int, needs_dx: bool, needs_dw: bool, device: str
) -> None:
    """In memory that starts out as NaN no NaN is left, whichever gradients are asked for."""
    x, w, dy = make(M, N, FP16, device=device)
    results = run(x, w, dy, needs_dx=needs_dx, needs_dw=needs_dw)
    assert not any(result.isnan().any() for result in results if result is not None)


# ---- Layout -----------------------------------------------------------------------------------

IN_PLACE = ("packed", "aligned slice", "every other row")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("N", [24, 769, 8192])
@in_every_dtype
def test_regular_rows_are_read_in_place(name: str, N: int, dtype: torch.dtype, device: str) -> None:
    """Evenly spaced, aligned rows are not copied; any other layout is, and packed."""
    x = LAYOUTS[name](make(4, N, dtype, device=device)[0])
    read, row_stride = layout.rows(x, tiling.row_align(N, dtype))
    assert torch.equal(bits(read), bits(x))
    assert (read.data_ptr() == x.data_ptr()) == (name in IN_PLACE)
    assert row_stride == (x.stride(0) if name in IN_PLACE else N)


def test_strides_that_are_never_used_cost_no_copy(device: str) -> None:
    """A dimension of one may have any stride, and so may the columns of an N of 1."""
    row = torch.zeros(64, device=device).as_strided((1, 1, 16), (7, 3, 1))
    column = torch.zeros(64, device=device)[::5][:, None]
    expanded = torch.zeros(16, device=device).expand(3, 16)
    apart = torch.zeros(64, device=device).as_strided((2, 1, 8), (16, 3, 1))
    for tensor, row_stride in ((row, 16), (column, 5), (expanded, 0), (apart, 16)):
        read, found = layout.rows(tensor, tiling.row_align(tensor.shape[-1], FP32))
        assert (read.data_ptr(), found) == (tensor.data_ptr(), row_stride)


# ---- The module -------------------------------------------------------------------------------


def trained(N: int = 8, **kwargs: Any) -> RMSNorm:
    """Make a module whose weight is not all ones."""
    module = RMSNorm(N, eps=1e-5, **kwargs)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 2, N))
    return module


def test_state_dicts_load_both_ways_with_torch() -> None:
    """A checkpoint of torch.nn.RMSNorm loads, strictly, and one of ours loads there."""
    ours, theirs = trained(), torch.nn.RMSNorm(8)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.weight, ours.weight)
    fresh = RMSNorm(8)
    fresh.load_state_dict(theirs.state_dict())
    assert torch.equal(fresh.weight, ours.weight)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],  # noqa: S301  # our own bytes
)
def test_copies_are_equal_and_independent(
    duplicate: Callable[[RMSNorm], RMSNorm], device: str
) -> None:
    """A deep copy and a pickle give the same bits, and share no weight with their original."""
    module, x = trained(device=device), make(2, 8, FP32, device=device)[0]
    other = duplicate(module)
    assert (other.N, other.eps, repr(other)) == (module.N, module.eps, repr(module))
    assert_same_bits([other(x)], [module(x)])
    other.reset_parameters()
    assert not torch.equal(other.weight, module.weight)


def test_a_new_module_has_ones_and_says_what_it_is() -> None:
    """The weight starts as ones, again after a reset, and the repr can be typed back in."""
    module = RMSNorm(4096, eps=1e-5)
    assert repr(module) == "RMSNorm(4096, eps=1e-05)"
    assert torch.equal(module.weight, torch.ones(4096))
    changed = trained()
    changed.reset_parameters()
    assert torch.equal(changed.weight, torch.ones(8))
    assert changed.weight.requires_grad


@in_every_dtype
def test_device_and_dtype_of_the_weight(dtype: torch.dtype, device: str) -> None:
    """The weight is made where and as it is asked for, and the output follows x, not the weight."""
    module = RMSNorm(8, device=device, dtype=dtype)
    assert (module.weight.device.type, module.weight.dtype) == (device, dtype)
    assert RMSNorm(8, device="meta").weight.is_meta
    for x_dtype in DTYPES:
        assert module(torch.ones(2, 8, dtype=x_dtype, device=device)).dtype == x_dtype


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_converted_module_computes_with_its_rounded_weight(
    dtype: torch.dtype, device: str
) -> None:
    """After half() or to() the weight is rounded, and the module gives what the function gives."""
    x = make(2, 8, dtype, device=device)[0]
    module = trained().to(device, dtype)
    assert_same_bits([module(x)], [rmsnorm(x, trained().weight.to(device, dtype), 1e-5)])
    assert trained().half().weight.dtype == FP16


def test_the_module_trains(device: str) -> None:
    """A step along the gradient of a loss changes the weight as the function's gradient says."""
    x, _, dy = make(4, 8, FP32, device=device)
    module = trained(device=device)
    expected = run(x, module.weight, dy, 1e-5)
    x.requires_grad_()
    module(x).backward(dy)
    assert_same_bits((x.grad, module.weight.grad), (expected.dx, expected.dw))
