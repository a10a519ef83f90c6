"""The byte model against the interpreter: every load and store of both passes, counted.

Each kernel runs in Triton's interpreter, where a load or store is a list of addresses and a mask.
The addresses are looked up in the tensors of the launch, so what is counted is elements of x, w,
dy and so on, and an address that belongs to none of them is an error. Masked lanes do not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from paths import DTYPES, INTERPRETED, make

from rmsnorm_ref import interpreter, tiling, traffic, tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt
    from torch import Tensor

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="counts the interpreter's loads; test_in_a_process_without_gpu runs it"
)
FP16, BF16, FP32 = DTYPES
CPU = torch.device("cpu")

# One row, odd widths, more rows than a tile and than the programs, a last chunk that is not full.
SHAPES = (
    *((1, 1), (1030, 3), (300, 17), (40, 64), (33, 513), (19, 769), (37, 1560), (21, 2048)),
    *((6, 8192), (21, 8191), (5, 12000), (9, 20000), (3, 32768), (9, 40000), (2, 65536)),
    *((8, 3), (7, 100), (8, 513), (5, 2048)),  # few rows
)
NOTHING: Mapping[tuple[str, str], int] = {}
MIXED = ((FP16, FP16), (BF16, FP32), (FP32, BF16))
N_SM = 24  # enough for several teams of programs on the widest rows


@dataclass
class Region:
    """Hold one tensor's address range, and how often each element was loaded and stored."""

    tensor: Tensor
    start: int
    counts: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)

    def count(self, access: str, addresses: npt.NDArray[np.uint64]) -> None:
        """Count addresses; the gaps between strided rows are counted too, and judged later."""
        elements, rest = np.divmod(addresses.astype(np.int64) - self.start, self.tensor.itemsize)
        assert not rest.any(), "an address lies inside an element"
        shape = span(self.tensor)
        counts = self.counts.setdefault(access, np.zeros(shape, dtype=np.int64))
        np.add.at(counts, elements, 1)

    def per_element(self, access: str) -> npt.NDArray[np.int64]:
        """Return the counts of the tensor's own elements, having found none between its rows."""
        flat = torch.from_numpy(self.counts[access])
        own = flat.as_strided(self.tensor.shape, self.tensor.stride())
        assert int(own.sum()) == int(flat.sum()), "an address lies between two rows"
        return own.numpy()


def span(tensor: Tensor) -> int:
    """Count the elements from a tensor's first to its last, gaps included."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


class Recorder:
    """Count what the launches of one pass load and store, by (tensor, access)."""

    def __init__(self) -> None:
        self.regions: dict[str, Region] = {}
        self.in_launch: list[Region] = []

    def enter(self, arg_names: list[str], args: tuple[Any, ...]) -> None:
        """Learn where the tensors of a launch lie; two launches share what has one name."""
        self.in_launch = []
        for name, arg in zip(arg_names, args, strict=False):
            if isinstance(arg, torch.Tensor):
                tensor = self.regions.setdefault(
                    name.removesuffix("_ptr"), Region(arg, arg.data_ptr())
                )
                assert tensor.start == arg.data_ptr(), f"{name} differs from launch to launch"
                self.in_launch.append(tensor)

    def count(self, access: str, ptrs: Any, mask: Any) -> None:
        """Count the lanes that the mask lets through; all must fall into one tensor."""
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        if not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max())
        for region in self.in_launch:
            end = region.start + span(region.tensor) * region.tensor.itemsize
            if region.start <= low and high < end:
                region.count(access, addresses)
                return
        raise AssertionError(f"{access} of addresses outside every tensor: {low:#x} to {high:#x}")

    def requested(self) -> dict[tuple[str, str], int]:
        """Sum the bytes that were asked for."""
        return self._bytes(lambda counts: int(counts.sum()))

    def distinct(self) -> dict[tuple[str, str], int]:
        """Sum the bytes of the elements that were asked for at least once."""
        return self._bytes(np.count_nonzero)

    def _bytes(self, measure: Callable[[npt.NDArray[np.int64]], int]) -> dict[tuple[str, str], int]:
        return {
            (name, access): measure(region.per_element(access)) * region.tensor.itemsize
            for name, region in self.regions.items()
            for access in region.counts
        }


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Listen to the interpreter; atomics are refused, but for the exchange, which is a store."""
    interpreter.prepare(CPU)
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import GridExecutor as executor  # noqa: N813  # as a variable
    from triton.runtime.interpreter import InterpreterBuilder as builder  # noqa: N813  # the same

    found = Recorder()
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
    atomic = builder.create_atomic_rmw

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        found.count("read", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found.count("write", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.enter(self.arg_names, args)
        return call(self, *args, **kwargs)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if op != ir.ATOMIC_OP.XCHG:
            refuse()
        found.count("write", ptr, mask)
        return atomic(self, op, ptr, value, mask, *rest)

    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel uses an atomic")

    monkeypatch.setattr(builder, "create_masked_load", create_masked_load)
    monkeypatch.setattr(builder, "create_masked_store", create_masked_store)
    monkeypatch.setattr(builder, "create_atomic_rmw", create_atomic_rmw)
    monkeypatch.setattr(builder, "create_atomic_cas", refuse)
    monkeypatch.setattr(executor, "__call__", launch)
    monkeypatch.setattr(tiling, "sm_count", lambda _: N_SM)
    return found


def strided(tensor: Tensor, gap: int) -> Tensor:
    """Copy [M, N] into a buffer whose rows lie `gap` elements apart; 16 keeps them aligned."""
    M, N = tensor.shape
    return tensor.new_full((M, N + gap), float("nan"))[:, :N].copy_(tensor)


def judge(
    recorder: Recorder,
    counted: traffic.Traffic,
    n_programs: int,
    helped: Mapping[tuple[str, str], int] = NOTHING,
) -> None:
    """Compare one recorded pass with the model, and find every output element stored once.

    `helped` is what is asked for beyond the model because programs run one after the other. The
    fill of a buffer is PyTorch's, which is not recorded.
    """
    counted = replace(counted, steps=tuple(s for s in counted.steps if s.kernel != "fill"))
    expected = Counter(counted.requested_bytes(n_programs)) + Counter(helped)
    assert recorder.requested() == expected
    distinct = counted.per_tensor()
    half = counted.scratch_bytes(n_programs) // 2
    if half:
        distinct |= {("partial_dw", "write"): half, ("partial_dw", "read"): half}
    assert recorder.distinct() == distinct
    for name, region in recorder.regions.items():
        if "write" in region.counts:
            assert name == "parts" or (region.per_element("write") == 1).all()


on_every_shape = pytest.mark.parametrize(("M", "N"), SHAPES)
in_mixed_dtypes = pytest.mark.parametrize(("dtype", "w_dtype"), MIXED)


@interpreted
@on_every_shape
@in_mixed_dtypes
@pytest.mark.parametrize("needs_rstd", [True, False])
def test_forward_moves_what_the_model_says(
    recorder: Recorder,
    M: int,
    N: int,
    dtype: torch.dtype,
    w_dtype: torch.dtype,
    needs_rstd: bool,
) -> None:
    """The forward asks for exactly the modelled bytes, and stores y, and rstd if asked to, once."""
    from rmsnorm_ref import forward

    x, w, _ = make(M, N, dtype, w_dtype, device="cpu")
    forward.launch_forward(strided(x, 16), N + 16, w, 1e-6, needs_rstd=needs_rstd)
    n_tiles = M if N > tiling.ONE_TILE_MAX else -(-M // tiling.forward_tile(N).rows)
    judge(recorder, traffic.forward(M, N, dtype, w_dtype, needs_rstd=needs_rstd), n_tiles)


@interpreted
@on_every_shape
@in_mixed_dtypes
@pytest.mark.parametrize(("needs_dx", "needs_dw"), [(True, True), (True, False), (False, True)])
def test_backward_moves_what_the_model_says(
    recorder: Recorder,
    M: int,
    N: int,
    dtype: torch.dtype,
    w_dtype: torch.dtype,
    needs_dx: bool,
    needs_dw: bool,
) -> None:
    """The backward asks for exactly the modelled bytes, whichever gradients are wanted."""
    from rmsnorm_ref import backward

    x, w, dy = make(M, N, dtype, w_dtype, device="cpu")
    needs = {"needs_dx": needs_dx, "needs_dw": needs_dw}
    x, dy = strided(x, 16), strided(dy, 32)
    backward.launch_backward(dy, N + 32, x, N + 16, w, torch.ones(M), **needs)
    if tiling.backward_path(M, N, CPU, dtype, w_dtype) == "few_rows_backward":
        config = tuning.shipped("backward", N, dtype)
        n_programs = -(-M // tiling.dx_rows(M, N, dtype, config))
    else:
        n_programs = tiling.n_programs(M, N, dtype, CPU)
    counted = traffic.backward(M, N, dtype, w_dtype, **needs, device=CPU)
    helped = help_of_the_first(M, N, dtype, w_dtype) if needs_dx and N > tiling.ONE_TILE_MAX else {}
    judge(recorder, counted, n_programs, helped)


def help_of_the_first(
    M: int, N: int, dtype: torch.dtype, w_dtype: torch.dtype
) -> dict[tuple[str, str], int]:
    """Count what a team's first program asks for more, as the others have not started.

    It makes their parts of every row: one at a time, and looks at all of them after each.
    """
    members, cols = tiling.team(N, CPU)
    data, others = M * (N - cols), M * (members - 1)
    return {
        ("x", "read"): data * dtype.itemsize,
        ("dy", "read"): data * dtype.itemsize,
        ("w", "read"): data * w_dtype.itemsize,
        ("parts", "write"): 4 * others,
        ("parts", "read"): 4 * others * members,
    }


@interpreted
@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize("N", [72, 200, 1024])
def test_few_rows_move_as_much_in_any_number_of_column_blocks(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, N: int
) -> None:
    """With as few columns to a program as on a GPU, the model still counts every byte."""
    from rmsnorm_ref import backward

    monkeypatch.setattr(tiling, "dw_cols", lambda *_: 16)
    M = 6
    x, w, dy = make(M, N, BF16, device="cpu")
    backward.launch_backward(dy, N, x, N, w, torch.ones(M))
    config = tuning.shipped("backward", N, BF16)
    n_programs = -(-M // tiling.dx_rows(M, N, BF16, config))
    judge(recorder, traffic.backward(M, N, BF16, device=CPU), n_programs)


@interpreted
@pytest.mark.parametrize(
    ("gap", "row_stride", "fault"), [(0, 80, "outside every tensor"), (16, 72, "between two rows")]
)
def test_recorder_sees_stray_addresses(
    recorder: Recorder, gap: int, row_stride: int, fault: str
) -> None:
    """A launch with a wrong row stride is caught, past the end of x and in the gaps of x."""
    from rmsnorm_ref import forward

    x, w, _ = make(2, 64, FP32, device="cpu")
    with pytest.raises(Exception, match=fault):  # noqa: PT012  # the second is found when summed
        forward.launch_forward(strided(x, gap), row_stride, w, 1e-6)
        recorder.requested()


@pytest.mark.gpu
def test_in_a_process_without_gpu() -> None:
    """On a machine with a GPU the same counts hold in a process that cannot see it."""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
