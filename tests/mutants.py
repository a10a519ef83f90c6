"""Faults of the forward and of the host code, as one-spot changes of our own source.

A fault is written once and planted in every kernel that has the spot. Each is small, plausible and
public: it has shipped in somebody's kernel or in somebody's review. `test_mutants.py` plants them;
`mutants_backward.py` has those of the backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from paths import DEVICE

from rmsnorm_ref import tiling

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EVERY, SHORT = (FP16, BF16, FP32), (FP16, BF16)

FORWARD, WIDE_FORWARD = "forward.rmsnorm_forward_kernel", "wide.wide_forward_kernel"
BACKWARD, WIDE_BACKWARD = "backward.rmsnorm_backward_kernel", "wide.wide_backward_kernel"
ROW_MEAN, COLUMN = "wide.row_mean_kernel", "wide.column_backward_kernel"
REDUCE, FEW = "backward.reduce_dw_kernel", "few_rows.few_rows_backward_kernel"

# The smallest number of rows that leaves the kernel for few of them; one more than whole programs.
MANY = 1 + (tiling.FEW_ROWS_MAX if DEVICE == "cuda" else tiling.INTERPRETED_FEW_ROWS_MAX)

# The smallest input that reaches a kernel and has more than one row (M, N). A width that is no
# power of two, so that lanes are masked; for the chunked kernels more than one chunk.
SHAPES = {
    FORWARD: (3, 17),
    WIDE_FORWARD: (3, 9000),
    FEW: (3, 17),
    BACKWARD: (MANY, 1560),  # several programs, the last with one row in its tile of four
    WIDE_BACKWARD: (3, 17000),
    ROW_MEAN: (2, 33000),
    COLUMN: (2, 33000),
    REDUCE: (MANY, 1560),  # several rows of partial sums
    "forward._build": (3, 17),
    "wide.build_forward": (3, 9000),
    "wide.build_backward": (4, 17000),
    "wide.build_column_backward": (4, 33000),
}


class Case(NamedTuple):
    """Say what a mutant is run on; M and N of None are the kernel's own in `SHAPES`."""

    M: int | None = None
    N: int | None = None
    scale: float = 1.0
    layout: str = "packed"  # see test_mutants.lay_out
    w_dtype: torch.dtype | None = None  # None is the dtype of x
    needs: str = "xw"  # who asks for a gradient
    equal: bool = False  # all x of a row equal, so that rounding errors do not average out
    unit_w: bool = False
    alone: bool = False  # also run row 0 by itself, and compare bits


class Fault(NamedTuple):
    """Hold one fault: what must reject it, why it happens, and its spots in our source."""

    name: str
    rejected_by: tuple[str, ...]  # "y", "dx", "dw": a bound of oracle.py; others are exact
    why: str
    spots: tuple[tuple[str, str], ...]  # (module.function, "old => new")
    case: Case = Case()
    dtypes: tuple[torch.dtype, ...] = EVERY
    only: str = ""  # "cpu" or "cuda", where the fault shows on one of them alone


def in_each(change: str, *functions: str) -> tuple[tuple[str, str], ...]:
    """Plant the same change in several functions."""
    return tuple((function, change) for function in functions)


Y = ("y",)
FORWARDS = (FORWARD, WIDE_FORWARD)
LAUNCH, LIKE_X = (
    "forward.launch_forward",
    "torch.empty_like(x, memory_format=torch.contiguous_format)",
)
STRIDE = "(x_row_stride // ROW_ALIGN * ROW_ALIGN)"

STATISTIC = [
    Fault(
        "eps outside the root",
        Y,
        "rsqrt(mean) + eps reads like the formula; it only shows where x is as small as eps",
        in_each("/ N + eps) => / N) + eps", *FORWARDS),
        Case(scale=1e-3),
    ),
    Fault(
        "no eps",
        Y,
        "fine on activations, until a padded row of zeros gives NaN",
        in_each("/ N + eps) => / N)", *FORWARDS),
        Case(scale=1e-3),
    ),
    Fault(
        "mean over the padded width",
        Y,
        "tl.sum(...) / BLOCK_SIZE is right for every power of two that anybody tests",
        (
            (FORWARD, "/ N + eps => / BLOCK_SIZE + eps"),
            (WIDE_FORWARD, "/ N + eps => / (tl.cdiv(N, CHUNK) * CHUNK) + eps"),
        ),
    ),
    Fault(
        "sum for mean",
        Y,
        "a norm and a root mean square differ by sqrt(N)",
        in_each("/ N + eps => + eps", *FORWARDS),
    ),
    Fault(
        "root not inverted",
        Y,
        "sqrt and rsqrt agree where x has unit scale, as random tests have",
        in_each("tl.rsqrt( => tl.sqrt(", *FORWARDS),
    ),
    Fault(
        "absolute value for square",
        Y,
        "the mean of |x| is an L1 norm, and close enough to pass a loose tolerance",
        (
            (FORWARD, "tl.sum(x * x => tl.sum(tl.abs(x)"),
            (WIDE_FORWARD, "+= x * x => += tl.abs(x)"),
        ),
    ),
    Fault(
        "squares in fp16",
        Y,
        "without the upcast a square overflows from x = 256 on, and the row becomes zeros",
        (
            (FORWARD, "mask=mask, other=0.0).to(tl.float32 => mask=mask, other=0.0).to(tl.float16"),
            (WIDE_FORWARD, "x = x.to(tl.float32) => x = x.to(tl.float16)"),
        ),
        Case(scale=300.0),
    ),
    Fault(
        "squares summed in bf16",
        Y,
        "the accumulator inherits the dtype of what it adds; errors of equal terms add up",
        (
            (FORWARD, "tl.sum(x * x => tl.sum((x * x).to(tl.bfloat16).to(tl.float32)"),
            (
                WIDE_FORWARD,
                "sum_of_squares += x * x => "
                "sum_of_squares = (sum_of_squares + x * x).to(tl.bfloat16).to(tl.float32)",
            ),
        ),
        Case(M=16, equal=True),
        (FP16, FP32),
    ),
    Fault(
        "tl.sum over bf16",
        Y,
        "a compiled tl.sum adds bf16 in fp32 and hides it; the interpreter adds what it is given",
        ((FORWARD, "tl.sum(x * x => tl.sum((x * x).to(tl.bfloat16)"),),
        Case(N=4096),
        only="cpu",
    ),
    Fault(
        "rstd rounded to bf16",
        (*Y, "dx", "dw"),
        "a whole row is off by the same factor, which no average over elements reveals",
        in_each("/ N + eps) => / N + eps).to(tl.bfloat16).to(tl.float32)", *FORWARDS),
        Case(M=8),
    ),
    Fault(
        "rstd saved in bf16",
        ("dx", "dw"),
        "the statistic is stored like the activations; y is right, both gradients are not",
        (
            (FORWARD, "rows, rstd, => rows, rstd.to(tl.bfloat16),"),
            (WIDE_FORWARD, "row, rstd) => row, rstd.to(tl.bfloat16))"),
        ),
        Case(M=8),
    ),
    Fault(
        "rstd saved in the dtype of x",
        ("dx", "dw"),
        "new_empty without a dtype takes that of its parent",
        ((LAUNCH, "N, dtype=torch.float32) => N)"),),
        Case(M=8, N=17),
        SHORT,
    ),
    Fault(
        "mean square saved for rstd",
        ("dx", "dw"),
        "other libraries save the variance, and a backward pasted from there expects it",
        (
            (FORWARD, "rows, rstd, => rows, 1 / (rstd * rstd),"),
            (WIDE_FORWARD, "row, rstd) => row, 1 / (rstd * rstd))"),
        ),
        Case(scale=4.0),
    ),
]

RESULT = [
    Fault(
        "weight ignored",
        Y,
        "invisible while the weight is all ones, as a fresh module's is",
        in_each("* rstd * w) => * rstd)", *FORWARDS),
    ),
    Fault(
        "weight squared",
        Y,
        "folded in twice; invisible while the weight is all ones",
        in_each("* rstd * w) => * rstd * w * w)", *FORWARDS),
    ),
    Fault(
        "one plus weight",
        Y,
        "some models store the gain less one, and a kernel switch gets it wrong",
        in_each("* rstd * w) => * rstd * (1.0 + w))", *FORWARDS),
    ),
    Fault(
        "x_hat rounded before the weight",
        Y,
        "the common eager spelling casts back and then multiplies: two roundings, not one",
        (
            (FORWARD, "(x * rstd * w) => ((x * rstd).to(y_ptr.dtype.element_ty) * w)"),
            (
                WIDE_FORWARD,
                "(x.to(tl.float32) * rstd * w) => "
                "((x.to(tl.float32) * rstd).to(y_ptr.dtype.element_ty) * w)",
            ),
        ),
        Case(M=8),
        SHORT,
    ),
    Fault(
        "weight rounded to the dtype of x",
        Y,
        "weight.to(x.dtype) beside an fp32 weight loses what the weight was kept in fp32 for",
        (
            (FORWARD, "w = w.to( => w = w.to(x_ptr.dtype.element_ty).to("),
            (WIDE_FORWARD, "other=0.0).to( => other=0.0).to(x_ptr.dtype.element_ty).to("),
        ),
        Case(M=8, w_dtype=FP32),
        SHORT,
    ),
    Fault(
        "y promoted to the dtype of w",
        ("dtypes",),
        "an fp32 weight times a bf16 row is fp32, unless somebody casts it back",
        ((LAUNCH, "y = torch.empty_like(x, => y = torch.empty_like(x, dtype=w.dtype,"),),
        Case(N=17, M=3, w_dtype=FP32),
        SHORT,
    ),
    Fault(
        "y written over x",
        ("inputs",),
        "in place saves a buffer, and spoils what the backward and the caller still read",
        ((LAUNCH, f"y = {LIKE_X} => y = x"),),
        Case(N=17, M=3),
    ),
    Fault(
        "last tile of rows lost",
        Y,
        "floor division in the grid is right whenever M divides evenly",
        (
            ("forward._build", "-(-M // tile.rows) => M // tile.rows"),
            ("wide.build_forward", "((rstd.numel(), => ((rstd.numel() - 1,"),
        ),
        Case(M=65),
    ),
    Fault(
        "last chunk of columns lost",
        Y,
        "a loop over whole chunks drops the tail",
        in_each(
            "tl.float32)\n    for start in tl.range(0, N, => "
            "tl.float32)\n    for start in tl.range(0, N - CHUNK,",
            WIDE_FORWARD,
        )
        + in_each(
            "of x.\n    for start in tl.range(0, N, => of x.\n    for start in tl.range(0, N - CHUNK,",
            WIDE_FORWARD,
        ),
    ),
    Fault(
        "chunk at the wrong offset",
        Y,
        "the pointer is advanced in one place and not in the other",
        in_each("(w_ptr + cols => (w_ptr + cols - start", WIDE_FORWARD)
        + in_each("row * N + cols => row * N + cols - start", WIDE_FORWARD),
    ),
    Fault(
        "tile narrower than the row",
        Y,
        "the power of two below N in place of the one above it",
        (("tiling.next_power_of_2", "(n - 1).bit_length() => (n.bit_length() - 1)"),),
        Case(N=17, M=3),
    ),
]

MASKS = [
    Fault(
        "no column mask",
        Y,
        "at a power of two there is nothing to mask; elsewhere the next row leaks into the sum",
        (
            (FORWARD, "mask = row_mask & col_mask => mask = row_mask"),
            (WIDE_FORWARD, 'mask=cols < N, other=0.0, eviction_policy="evict_last" => '),
        ),
    ),
    Fault(
        "masked lanes hold one",
        Y,
        "the neutral element of a product, where that of a sum is needed",
        (
            (FORWARD, "mask=mask, other=0.0 => mask=mask, other=1.0"),
            (WIDE_FORWARD, 'other=0.0, eviction_policy="evict_last" => other=1.0'),
        ),
    ),
    Fault(
        "store without a column mask",
        ("outside",),
        "the next row is written later and repairs it; behind the last row nothing does",
        (
            (FORWARD, "y, mask=mask) => y, mask=row_mask)"),
            (WIDE_FORWARD, "y, mask=cols < N, => y,"),
        ),
    ),
    Fault(
        "store without a row mask",
        ("outside",),
        "a tile of several rows runs over the end of the batch",
        (
            (FORWARD, "row_mask & col_mask => col_mask & (rows >= 0)"),
            (FORWARD, "rstd, mask=row_mask) => rstd)"),
        ),
    ),
]

LAYOUT = [
    Fault(
        "x read as if packed",
        Y,
        "the row stride is taken to be N: right until somebody passes a slice",
        in_each(f"{STRIDE} => N", *FORWARDS),
        Case(layout="padded"),
    ),
    Fault(
        "y written with the stride of x",
        (*Y, "outside"),
        "one stride argument for both: right until x is a slice and y is not",
        (
            (FORWARD, "y_ptr + rows * N => y_ptr + x_row_start"),
            (WIDE_FORWARD, "y_ptr + row * N => y_ptr + row * x_row_stride"),
        ),
        Case(layout="padded"),
    ),
    Fault(
        "offset in too few bits",
        Y,
        "32-bit products wrap past 2^31; here 16 bits wrap past 2^15, which fits any machine",
        (
            (WIDE_FORWARD, f"row * {STRIDE} => (row * x_row_stride).to(tl.int16).to(tl.int64)"),
            (WIDE_FORWARD, "y_ptr + row * N => y_ptr + (row * N).to(tl.int16).to(tl.int64)"),
        ),
        Case(M=4),
    ),
    Fault(
        "offset in too few bits",
        Y,
        "the same where a tile holds a row",
        (
            (FORWARD, f"rows * {STRIDE} => (rows * x_row_stride).to(tl.int16).to(tl.int64)"),
            (FORWARD, "y_ptr + rows * N => y_ptr + (rows * N).to(tl.int16).to(tl.int64)"),
        ),
        Case(M=5, N=8192),
    ),
    Fault(
        "column stride ignored",
        Y,
        "a transposed x has its columns far apart",
        (
            ("layout.row_stride", "if N > 1 and tensor.stride(-1) != 1: => if N == 0:"),
            ("layout.rows", "torch.contiguous_format => torch.preserve_format"),
        ),
        Case(M=5, N=17, layout="transposed"),
    ),
    Fault(
        "rows taken to be evenly spaced",
        Y,
        "x.stride(-2) speaks for one leading dimension, not for two",
        (("layout.row_stride", "elif stride != expected: => elif stride < 0:"),),
        Case(M=6, N=17, layout="uneven rows, 3-D"),
    ),
    Fault(
        "alignment promised and not checked",
        Y,
        "the compiler is told that strides are multiples of 16 bytes, and believes it",
        (("layout.rows", "or stride % row_align or => or"),),
        Case(M=3, N=64, layout="odd"),
    ),
    Fault(
        "stride of the weight ignored",
        Y,
        "w[::2] has N elements, and they do not lie side by side",
        (("op._launch_forward", "w, _ = layout.rows(w, 1) => w = w.detach()"),),
        Case(M=3, N=17, layout="sliced weight"),
    ),
    Fault(
        "chunk chosen by M",
        ("alone",),
        "a tuning key with M in it: a row's last bit then depends on its neighbours",
        (
            (
                "wide.build_forward",
                "kernel((rstd => Launch(wide_forward_kernel, "
                "(N, constants[1] // min(len(rstd), 2), constants[2]), config, device)((rstd",
            ),
        ),
        Case(M=16, alone=True),
        (FP32,),
    ),
    Fault(
        "warps chosen by M",
        ("alone",),
        "the same, by num_warps: the order of additions follows it",
        (
            (
                "forward._build",
                "kernel((-(-M => "
                "Launch(rmsnorm_forward_kernel, constants, tuning.Config(min(M, 8)), device)((-(-M",
            ),
        ),
        Case(M=64, N=8192, alone=True),
        (FP32,),
        only="cuda",
    ),
]

FORWARD_FAULTS = STATISTIC + RESULT + MASKS + LAYOUT
