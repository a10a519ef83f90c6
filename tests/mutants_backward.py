"""Faults of the backward, in the form of `mutants.py`."""

from __future__ import annotations

from mutants import (
    LIKE_X,
    BACKWARD,
    COLUMN,
    FP16,
    FP32,
    REDUCE,
    ROW_MEAN,
    SHORT,
    STRIDE,
    WIDE_BACKWARD,
    Case,
    Fault,
    in_each,
)

DX, DW, BOTH = ("dx",), ("dw",), ("dx", "dw")
CHUNKED = (WIDE_BACKWARD, COLUMN)
MEANS = (WIDE_BACKWARD, ROW_MEAN)
DY_STRIDE = STRIDE.replace("x_", "dy_")
LAUNCH = "backward.launch_backward"
TO_BF16 = ".to(tl.bfloat16)"

FORMULA = [
    Fault(
        "no mean term",
        DX,
        "the weight's part of the gradient alone: training still converges, more slowly",
        (
            (BACKWARD, "(dyw - x_hat * mean) => dyw"),
            *in_each("(dy * w - x_hat * mean) => (dy * w)", *CHUNKED),
        ),
    ),
    Fault(
        "mean term added",
        DX,
        "a sign",
        in_each("- x_hat * mean => + x_hat * mean", BACKWARD, *CHUNKED),
    ),
    Fault(
        "mean without the weight",
        DX,
        "mean(dy * x_hat) is right for a weight of ones",
        (
            (BACKWARD, "tl.sum(dyw * x_hat => tl.sum(dy * x_hat"),
            (WIDE_BACKWARD, "dy.to(tl.float32) * w * => dy.to(tl.float32) *"),
            (ROW_MEAN, "dy * w * => dy *"),
        ),
    ),
    Fault(
        "mean from x for x_hat",
        DX,
        "one factor of rstd short of three",
        (
            (BACKWARD, "tl.sum(dyw * x_hat => tl.sum(dyw * x"),
            (WIDE_BACKWARD, "(x.to(tl.float32) * rstd) => x.to(tl.float32)"),
            (ROW_MEAN, "(x * rstd) => x"),
        ),
    ),
    Fault(
        "rstd squared, not cubed",
        DX,
        "written out, the second term is x * rstd^3 * mean(dyw * x), and a factor gets lost",
        (
            (BACKWARD, "- x_hat * mean => - x * mean"),
            (WIDE_BACKWARD, "- x_hat * mean => - x.to(tl.float32) * mean"),
            (COLUMN, "- x_hat * mean => - x * mean"),
        ),
    ),
    Fault(
        "dx without the outer rstd",
        DX,
        "invisible on rows of unit scale",
        in_each("* mean) * rstd) => * mean))", BACKWARD, *CHUNKED),
        Case(scale=4.0),
    ),
    Fault(
        "sum for mean in dx",
        DX,
        "the reduction lacks its division",
        (
            (BACKWARD, "axis=1, keep_dims=True) / N => axis=1, keep_dims=True)"),
            *in_each("axis=0) / N => axis=0)", *MEANS),
        ),
    ),
    Fault(
        "mean in dx over the padded width",
        DX,
        "fixed in the forward and forgotten in the backward",
        (
            (BACKWARD, "keep_dims=True) / N => keep_dims=True) / BLOCK_SIZE"),
            (WIDE_BACKWARD, "axis=0) / N => axis=0) / (N_CHUNKS * CHUNK)"),
            (ROW_MEAN, "axis=0) / N => axis=0) / (tl.cdiv(N, CHUNK) * CHUNK)"),
        ),
    ),
    Fault(
        "mean broadcast along columns",
        DX,
        "a sum without keep_dims turns on its side in silence where the tile is square",
        ((BACKWARD, "axis=1, keep_dims=True) / N => axis=1)[None, :] / N"),),
        Case(M=9, N=64),
    ),
    Fault(
        "weight ignored in dx",
        DX,
        "invisible while the weight is all ones",
        (
            (BACKWARD, "dyw = dy * w => dyw = dy"),
            *in_each("(dy * w - => (dy -", *CHUNKED),
        ),
    ),
    Fault(
        "weight squared in dx",
        DX,
        "invisible while the weight is all ones",
        (
            (BACKWARD, "dyw = dy * w => dyw = dy * w * w"),
            *in_each("(dy * w - => (dy * w * w -", *CHUNKED),
        ),
    ),
    Fault(
        "dw from x for x_hat",
        DW,
        "invisible on rows of unit scale",
        (
            *in_each("dw += dy * x_hat => dw += dy * x", BACKWARD, COLUMN),
            (WIDE_BACKWARD, "+ dy * x_hat => + dy * x.to(tl.float32)"),
        ),
    ),
    Fault(
        "weight inside dw",
        DW,
        "dyw is at hand, and is the wrong one",
        (
            (BACKWARD, "dw += dy * => dw += dyw *"),
            (WIDE_BACKWARD, "+ dy * x_hat => + dy * w * x_hat"),
            (COLUMN, "dw += dy * => dw += dy * w *"),
        ),
    ),
]

ROUNDING = [
    Fault(
        "dx rounded twice",
        DX,
        "an intermediate falls back to the storage dtype",
        (
            (BACKWARD, "* mean) * rstd) => * mean).to(dx_ptr.dtype.element_ty) * rstd)"),
            *in_each("* mean) * rstd) => * mean).to(dx_ptr.dtype.element_ty) * rstd)", *CHUNKED),
        ),
        dtypes=SHORT,
    ),
    Fault(
        "x_hat rounded in the backward",
        BOTH,
        "the x_hat that the eager forward made was rounded, and so is this one",
        (
            *in_each(
                "x_hat = x * rstd => x_hat = (x * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)",
                BACKWARD,
                COLUMN,
            ),
            (
                WIDE_BACKWARD,
                "x_hat = x.to(tl.float32) * rstd => "
                "x_hat = (x.to(tl.float32) * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)",
            ),
        ),
        Case(M=8),
        SHORT,
    ),
    Fault(
        "dw added up in bf16",
        DW,
        "an accumulator made with zeros_like(w): the more rows, the less each one counts",
        (
            *in_each(
                f"dw += dy * x_hat => dw = (dw + dy * x_hat){TO_BF16}.to(tl.float32)",
                BACKWARD,
                COLUMN,
            ),
            (
                WIDE_BACKWARD,
                f"dw[chunk] + dy * x_hat => (dw[chunk] + dy * x_hat){TO_BF16}.to(tl.float32)",
            ),
        ),
        Case(M=16),
    ),
    Fault(
        "partial dw in bf16",
        DW,
        "the buffer between the kernels is made in the dtype of the weight",
        (
            (BACKWARD, f"cols, dw_row, => cols, dw_row{TO_BF16},"),
            (WIDE_BACKWARD, f"cols, dw[chunk], => cols, dw[chunk]{TO_BF16},"),
            (REDUCE, f"mask=mask, other=0.0) => mask=mask, other=0.0){TO_BF16}"),
        ),
        Case(M=16),
    ),
    Fault(
        "partial dw in the dtype of x",
        DW,
        "new_empty without a dtype takes that of its parent",
        (
            (
                LAUNCH,
                "new_empty((n_programs, N), dtype=torch.float32) => new_empty((n_programs, N))",
            ),
        ),
        Case(M=16, N=1560),
        SHORT,
    ),
    Fault(
        "the one partial dw in bf16",
        DW,
        "the same, where a single program is launched and a bf16 weight would hide it",
        ((COLUMN, f"cols, dw, => cols, dw{TO_BF16},"),),
        dtypes=(FP16, FP32),
    ),
    Fault(
        "dw in the dtype of x",
        DW,
        "one dtype for all results, where the weight is kept in fp32",
        ((LAUNCH, "dw = torch.empty_like(w) => dw = torch.empty_like(w, dtype=x.dtype)"),),
        Case(M=3, N=17, w_dtype=FP32),
        SHORT,
    ),
]

ROWS = [
    Fault(
        "last row lost",
        BOTH,
        "an exclusive bound taken for an inclusive one",
        in_each("rows_per_program, M) => rows_per_program, M - 1)", BACKWARD, *CHUNKED),
    ),
    Fault(
        "last row of every chunk lost",
        BOTH,
        "the same, inside the batch",
        in_each("+ rows_per_program, M) => + rows_per_program - 1, M)", *CHUNKED),
        Case(M=16),
    ),
    Fault(
        "chunks of rows overlap",
        DW,
        "a row counted twice changes no dx, since both programs write the same",
        in_each("+ rows_per_program, M) => + rows_per_program + 1, M)", WIDE_BACKWARD),
        Case(M=16),
    ),
    Fault(
        "partial sums in one row",
        DW,
        "every program writes to the first row of the buffer",
        in_each("partial_dw_ptr + program * N => partial_dw_ptr", BACKWARD, WIDE_BACKWARD),
        Case(M=16),
    ),
    Fault(
        "last partial row lost",
        DW,
        "off by one in the second kernel, seen by the last program's rows alone",
        ((REDUCE, "(rows < n_programs) => (rows < n_programs - 1)"),),
    ),
    Fault(
        "rows beyond one step of the reduction lost",
        DW,
        "one step holds more partial rows than a small GPU has programs",
        ((REDUCE, "range(0, n_programs, ROWS) => range(0, ROWS, ROWS)"),),
        Case(M=528, N=1560),
        only="cuda",
    ),
    Fault(
        "mean of the partial sums",
        DW,
        "the reduction that makes a batch mean elsewhere",
        (
            (
                REDUCE,
                "tl.sum(total, axis=0, keep_dims=True) => tl.sum(total, axis=0, keep_dims=True) / n_programs",
            ),
        ),
    ),
    Fault(
        "buffer shorter than the grid",
        (*DW, "outside"),
        "rounded down where the grid is rounded up: the last program writes behind the buffer",
        (
            (
                "tiling.split_rows",
                "return -(-M // rows_per_program), => return M // rows_per_program,",
            ),
        ),
        Case(M=9, N=1560),
    ),
    Fault(
        "last block of columns lost",
        DW,
        "floor division in a grid",
        (
            ("backward._build_reduction", "(-(-N // cols), => (N // cols,"),
            ("wide.build_column_backward", "-(-N // tiling => N // tiling"),
        ),
        Case(M=3, N=33000),
    ),
    Fault(
        "mean of another row",
        DX,
        "a per-row load left outside the loop",
        ((COLUMN, "mean_ptr + row) => mean_ptr + first_row)"),),
    ),
    Fault(
        "rstd of another row",
        BOTH,
        "a per-row load left outside the loop",
        (
            (BACKWARD, "rstd_ptr + rows, => rstd_ptr + rows * 0 + first_row,"),
            *in_each("rstd_ptr + row) => rstd_ptr + first_row)", *CHUNKED),
        ),
    ),
    Fault(
        "last chunk left out of the mean",
        DX,
        "a loop over whole chunks drops the tail",
        (
            (WIDE_BACKWARD, "tl.range(0, N_CHUNKS) => tl.range(0, N_CHUNKS - 1)"),
            (ROW_MEAN, "tl.range(0, N, => tl.range(0, N - CHUNK,"),
        ),
    ),
    Fault(
        "chunk of another offset in dw",
        DW,
        "an unrolled index left at its first value",
        (
            (WIDE_BACKWARD, "dw[chunk] + dy => dw[0] + dy"),
            (WIDE_BACKWARD, "program * N + cols => program * N + cols - chunk * CHUNK"),
        ),
    ),
]

BOUNDARIES = [
    Fault(
        "store of a gradient without a column mask",
        ("outside",),
        "the row behind is written later and repairs it; behind the last row nothing does",
        (
            (BACKWARD, "dx, mask=mask) => dx, mask=row_mask)"),
            (BACKWARD, "dw_row, mask=col_mask) => dw_row)"),
            *in_each("dx, mask=mask) => dx)", *CHUNKED),
            (WIDE_BACKWARD, "dw[chunk], mask=cols < N) => dw[chunk])"),
            (COLUMN, "dw, mask=mask) => dw)"),
            (REDUCE, "element_ty), mask=col_mask) => element_ty))"),
        ),
    ),
    Fault(
        "no row mask in the backward",
        (*DW, "outside"),
        "whatever lies behind the batch is added to dw",
        ((BACKWARD, "row_mask & col_mask => col_mask & (rows >= 0)"),),
    ),
    Fault(
        "no row mask in the reduction",
        DW,
        "whatever lies behind the buffer is added to dw",
        ((REDUCE, "(rows < n_programs) & col_mask => col_mask & (rows >= 0)"),),
    ),
    Fault(
        "masked partial rows hold one",
        DW,
        "the neutral element of a product, where that of a sum is needed",
        ((REDUCE, "other=0.0 => other=1.0"),),
    ),
    Fault(
        "gradients read as if packed",
        BOTH,
        "the stride of x, or of dy, is taken to be N",
        (
            *in_each(f"x_row_start = rows * {STRIDE} => x_row_start = rows * N", BACKWARD),
            *in_each(f"{DY_STRIDE} => N", BACKWARD, *CHUNKED),
            *in_each(f"row * {STRIDE} => row * N", *CHUNKED),
        ),
        Case(layout="padded"),
    ),
    Fault(
        "dy read with the stride of x",
        DX,
        "one stride for two tensors: right while both are packed",
        (*in_each(f"{DY_STRIDE} => x_row_stride", BACKWARD, *CHUNKED, ROW_MEAN),),
        Case(layout="padded"),
    ),
    Fault(
        "dx written with the stride of x",
        (*DX, "outside"),
        "dx is packed, x need not be",
        (
            (BACKWARD, "dx_ptr + rows * N => dx_ptr + rows * x_row_stride"),
            *in_each("dx_ptr + row * N => dx_ptr + row * x_row_stride", *CHUNKED),
        ),
        Case(layout="padded"),
    ),
    Fault(
        "offset of a gradient in too few bits",
        DX,
        "32-bit products wrap past 2^31; here 16 bits wrap past 2^15, which fits any machine",
        (
            *in_each("dx_ptr + row * N => dx_ptr + (row * N).to(tl.int16).to(tl.int64)", *CHUNKED),
            *in_each(
                f"row * {DY_STRIDE} => (row * dy_row_stride).to(tl.int16).to(tl.int64)",
                *CHUNKED,
                ROW_MEAN,
            ),
        ),
    ),
    Fault(
        "offset of a gradient in too few bits",
        DX,
        "the same where a tile holds several rows",
        (
            (BACKWARD, "dx_ptr + rows * N => dx_ptr + (rows * N).to(tl.int16).to(tl.int64)"),
            (BACKWARD, f"rows * {DY_STRIDE} => (rows * dy_row_stride).to(tl.int16).to(tl.int64)"),
        ),
        Case(M=24),
    ),
    Fault(
        "offset of a partial row in too few bits",
        DW,
        "the same in the second kernel, whose buffer is as wide as the row",
        ((REDUCE, "rows.to(tl.int64) * N => (rows * N).to(tl.int16).to(tl.int64)"),),
        Case(M=16, N=12000),
    ),
]

CONTRACT = [
    Fault(
        "dx written over an input",
        ("inputs",),
        "in place saves a buffer; dy may be shared with another branch of the graph",
        ((LAUNCH, f"dx = {LIKE_X} => dx = dy"), (LAUNCH, f"dx = {LIKE_X} => dx = x")),
        Case(M=3, N=17),
    ),
    Fault(
        "dw only where dx is wanted",
        DW,
        "one flag for two gradients: a frozen embedding below takes dw with it",
        (
            *in_each("        dw += dy * x_hat =>             dw += dy * x_hat", BACKWARD, COLUMN),
            (
                WIDE_BACKWARD,
                "dw[chunk] + dy * x_hat => dw[chunk] + (dy * x_hat if dx_ptr is not None else 0.0)",
            ),
        ),
        Case(needs="w"),
    ),
    Fault(
        "flags of the gradients swapped",
        DX,
        "two booleans in a row, told apart by their order",
        (("op._RMSNorm", "needs_dx, needs_dw, _ = => needs_dw, needs_dx, _ ="),),
        Case(M=3, N=17, needs="x"),
    ),
    Fault(
        "column stride of dy ignored",
        BOTH,
        "y.sum().backward() sends a dy whose strides are all 0",
        (
            (
                "op._launch_backward",
                "dy, dy_row_stride = layout.rows(dy, row_align) => dy_row_stride = dy.shape[-1]",
            ),
        ),
        Case(M=3, N=17, layout="expanded dy"),
    ),
    Fault(
        "mean chosen by M",
        ("alone",),
        "a tuning key with M in it: a row's last bit then depends on its neighbours",
        (
            (
                "wide.build_backward",
                "kernel(grid => Launch(wide_backward_kernel, (N, chunk // min(M, 2), "
                "-(-N // (chunk // min(M, 2))), constants[3]), config)(grid",
            ),
            (
                "wide.build_column_backward",
                "row_mean((M => Launch(row_mean_kernel, "
                "(N, mean_constants[1] // min(M, 2), *mean_constants[2:]), tuning.ROW_MEAN)((M",
            ),
        ),
        Case(alone=True),
        (FP32,),
    ),
]

BACKWARD_FAULTS = FORMULA + ROUNDING + ROWS + BOUNDARIES + CONTRACT
