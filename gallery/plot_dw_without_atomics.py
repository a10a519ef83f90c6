"""
Partial rows of dw give the same bits on every run, and atomics need not
========================================================================

dw adds one term of every row of the input into N numbers, so all programs want to write to the same
place. Decision D3 gives each program a row of its own and adds those rows up afterwards. Here the
package's kernels run with 1 to 128 programs, beside a version with atomic additions.
"""

# %%
# The version with atomics
# ------------------------
#
# Shorter, and no second kernel. But additions to one address queue up, and they happen in whatever
# order the programs arrive.

from functools import reduce

import matplotlib.pyplot as plt
import torch

from rmsnorm_ref import interpreter, oracle, tiling, traffic
from rmsnorm_ref.measure import figures, live

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
interpreter.prepare(device)  # before Triton is imported: with no GPU, to interpret
import triton
import triton.language as tl

from rmsnorm_ref.backward import reduce_dw_kernel, rmsnorm_backward_kernel

M, N = 512, 1024
PROGRAMS = (1, 2, 8, 32, 128)


@triton.jit
def atomic_dw_kernel(dy_ptr, x_ptr, rstd_ptr, dw_ptr, rows: tl.constexpr, N: tl.constexpr):
    row, cols = tl.program_id(0) * rows, tl.arange(0, N)
    dw = tl.zeros([N], dtype=tl.float32)
    for i in range(row, row + rows):
        dy, x = tl.load(dy_ptr + i * N + cols), tl.load(x_ptr + i * N + cols)
        dw += dy * (x * tl.load(rstd_ptr + i))
    tl.atomic_add(dw_ptr + cols, dw)


# %%
# Ours, with any number of programs
# ---------------------------------
#
# The launcher takes a program or two per SM. Here the two kernels behind it are launched by hand,
# in fp32, on terms of one sign, so that what is seen is the error of the sum.

generator = torch.Generator().manual_seed(0)
x, dy = torch.rand(2, M, N, generator=generator).to(device) + 0.5
rstd = torch.rsqrt(x.square().mean(1) + 1e-6)
truth = (dy.double() * (x.double() * rstd.double()[:, None])).sum(0)


def partial_rows(n_programs: int) -> torch.Tensor:
    """Return dw [N] by the package's kernels."""
    partial_dw, dw = torch.empty(n_programs, N, device=device), torch.empty(N, device=device)
    tile, align = tiling.backward_tile(N), tiling.row_align(N, x.dtype)
    rmsnorm_backward_kernel[n_programs,](
        dy, x, None, rstd, None, partial_dw, N, N, M, N, *tile, align, 1, OVERLAP=False
    )  # fmt: skip
    rows, cols = (f(N, device, early=False) for f in (tiling.reduce_rows, tiling.reduce_cols))
    reduce_dw_kernel[-(-N // cols),](partial_dw, dw, n_programs, N, rows, cols, OVERLAP=False)
    return dw


def atomics(n_programs: int) -> torch.Tensor:
    """Return dw [N] by the kernel above."""
    dw = torch.zeros(N, device=device)
    atomic_dw_kernel[n_programs,](dy, x, rstd, dw, M // n_programs, N)
    return dw


errors: dict[str, list[float]] = {"partial rows": [], "atomics": []}
for n_programs in PROGRAMS:
    for name, run in (("partial rows", partial_rows), ("atomics", atomics)):
        errors[name].append(oracle.errors(run(n_programs), truth).relative_l2)
assert torch.equal(partial_rows(128), partial_rows(128)), "the same input gave other bits"
print("atomics, twice the same bits:", torch.equal(atomics(128), atomics(128)))

# %%
# Interpreted programs run one after the other, so there even atomics repeat themselves; on a GPU
# the order of arrival is anybody's. The same partial sums, added in a hundred orders:

parts = (dy * (x * rstd[:, None])).reshape(128, -1, N).sum(1)
orders = [reduce(torch.add, parts[torch.randperm(128, generator=generator)]) for _ in range(100)]
print(f"dw[0] has {len({dw[0].item() for dw in orders})} values in 100 orders of arrival")

# %%
# Few programs add many rows one after the other; many programs leave many partial rows to add up.
# The error of the sum is least in between. Ours adds up several sums side by side, in a program's
# tile and in the reduction, and the atomic version a single one: hence the gaps at both ends.

units = {name: [error / oracle.U for error in found] for name, found in errors.items()}
words = figures.Words(
    title="Error of dw: least between few and many programs, with atomics or without",
    shows=f"Relative error of dw over {M} rows against the number of programs",
    value="relative error of dw, units of 2⁻²⁴",
    place="programs, each with its own rows of the input",
)
figures.curves(PROGRAMS, units, words, live.here(), log_x=2)

# %%
# What it costs
# -------------
#
# A buffer of one fp32 row per program, written once and read once. For few rows of input that is no
# small part of the traffic, so they have a kernel without it. And more programs mean a larger one:
# the time of the backward against programs per SM, and against tiles in flight.

shown = live.evidence("ablations", [(4096, 2048)])
for rows in (2048, 4096, 16384):
    share = traffic.scratch_share(rows, 4096, torch.bfloat16, shown.provenance.sm_count)
    print(f"{rows:5} rows, one program per SM: the buffer adds {share:.1%} to the bytes in bf16")
figures.ablation(shown)
plt.show()
