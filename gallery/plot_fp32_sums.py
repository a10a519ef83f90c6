"""
A sum kept in 16 bits stops growing, and the error grows with N
===============================================================

Decision D2 keeps every reduction in fp32 whatever the storage. This page is its counter-example:
the same sum of squares with an accumulator in fp16 and in bf16. The error is not noise. It has one
sign, and a longer row makes it worse.
"""

# %%
# A kernel with a narrow accumulator
# ----------------------------------
#
# Each lane adds the squares of its share of a row one after the other, as a thread does. ``ACC`` is
# the dtype in which the running total is kept; it is the only difference between the three runs.

import matplotlib.pyplot as plt
import torch

from rmsnorm_ref import interpreter, oracle
from rmsnorm_ref.autograd import launch_forward
from rmsnorm_ref.measure import figures, live

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
interpreter.prepare(device)  # before Triton is imported: with no GPU, to interpret
import triton
import triton.language as tl

M, LANES, EPS = 16, 16, 1e-6
WIDTHS = tuple(2**i for i in range(6, 15))


@triton.jit
def rstd_kernel(x_ptr, rstd_ptr, eps, M: tl.constexpr, N, LANES: tl.constexpr, ACC: tl.constexpr):
    rows, lanes = tl.arange(0, M)[:, None], tl.arange(0, LANES)[None, :]
    total = tl.zeros([M, LANES], dtype=tl.float32)
    for first in range(0, N, LANES):
        x = tl.load(x_ptr + rows * N + first + lanes).to(tl.float32)
        total = (total + x * x).to(ACC).to(tl.float32)  # the one line at fault
    rstd = 1 / tl.sqrt(tl.sum(total, axis=1) / N + eps)
    tl.store(rstd_ptr + tl.arange(0, M), rstd)


# %%
# Run it, and ours
# ----------------
#
# x is random, of unit size, in bf16. rstd is compared with its float64 value, row by row: positive
# means that rstd came out too large, because the sum came out too small.

ACCUMULATORS = {"bf16 sums": tl.bfloat16, "fp16 sums": tl.float16, "fp32 sums": tl.float32}
errors: dict[str, list[torch.Tensor]] = {name: [] for name in (*ACCUMULATORS, "rmsnorm_ref")}
for N in WIDTHS:
    x = torch.randn(M, N, generator=torch.Generator().manual_seed(N)).to(device, torch.bfloat16)
    truth = torch.rsqrt(x.double().square().mean(-1) + EPS)
    for name, acc in ACCUMULATORS.items():
        rstd = torch.empty(M, device=device)
        rstd_kernel[1,](x, rstd, EPS, M, N, LANES, acc)
        errors[name].append(rstd.double() / truth - 1)
    rstd = launch_forward(x, torch.ones(N, dtype=x.dtype, device=device), EPS)[1]
    errors["rmsnorm_ref"].append(rstd.double() / truth - 1)
    assert errors["rmsnorm_ref"][-1].abs().max() <= oracle.rstd_roundings(N) * oracle.U

print(f"relative error of rstd over {M} rows, least to most")
for name, found in errors.items():
    least, most = found[-1].min().item(), found[-1].max().item()
    print(f"{name:12} N = {WIDTHS[-1]}: {least:+.1e} to {most:+.1e}")

# %%
# Where it stops
# --------------
#
# bf16 has 8 bits. Once a total is 256 times what is added, the next term is half the spacing or
# less: it is lost, and so is every term after it. Terms all have one sign here, so nothing makes up
# for the loss. fp16 has 11 bits and gets there eight times later; its own trouble is range, as the
# square of 256 overflows it. fp32 has 24 bits: it would take a row of some 16 million terms.

counter = torch.zeros((), dtype=torch.bfloat16)
for _ in range(1000):
    counter.add_(1)
print(f"one added a thousand times in bf16: {counter.item():.0f}")

# %%
# The figure
# ----------
#
# The black line is what the oracle allows rstd. In a kernel bound by memory fp32 costs nothing, as
# the registers were free; one bound by arithmetic might have to pay.

means = {name: [e.abs().mean().item() for e in found] for name, found in errors.items()}
narrow, ours = means["bf16 sums"][-1], means["rmsnorm_ref"][-1]
words = figures.Words(
    title=f"N = {WIDTHS[-1]}: a bf16 sum puts rstd off by {narrow:.0%}, rmsnorm_ref by {ours:.0e}",
    shows="Mean error of rstd for sums kept in bf16, fp16 and fp32, growing with N",
    value="mean relative error of rstd",
    place="N, elements per row",
)
bound = [oracle.rstd_roundings(N) * oracle.U for N in WIDTHS]
figures.curves(WIDTHS, means, words, live.here(), log_y=True, line=("the bound", bound))
plt.show()
