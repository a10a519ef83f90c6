"""
A kernel that only moves the bytes is the ceiling
=================================================

FLOP/s say nothing about a kernel that waits for memory. What does is effective bandwidth: the bytes
that the pass must move over the time it took, beside the same for a kernel that moves those bytes
and computes nothing. This page counts the bytes on real tensors, then shows the bandwidths.
"""

# %%
# Bytes of a pass
# ---------------
#
# The forward must read x and write y, the backward must read x and dy and write dx: 2·M·N and 3·M·N
# elements. The bytes are those of the tensors themselves, so the script runs both passes and holds
# the model against what went in and came out.

import matplotlib.pyplot as plt
import torch

from rmsnorm_ref import rmsnorm, traffic
from rmsnorm_ref.measure import figures, live

device = "cuda" if torch.cuda.is_available() else "cpu"
M, N, DTYPE = 16, 2048, torch.bfloat16

x = torch.randn(M, N).to(device, DTYPE).requires_grad_()
w = torch.ones(N, dtype=DTYPE, device=device, requires_grad=True)
y = rmsnorm(x, w)
dy = torch.randn_like(y)
dx, dw = torch.autograd.grad(y, (x, w), dy)
forward, backward = traffic.forward(M, N, DTYPE), traffic.backward(M, N, DTYPE)
assert forward.obligatory_bytes == x.nbytes + y.nbytes
assert backward.obligatory_bytes == x.nbytes + dy.nbytes + dx.nbytes

# %%
# What the headline leaves out is small where rows are many, and counted all the same: w, dw, rstd,
# and, where rows are not few, the partial sums of dw: here one row of N for each SM, whose share of
# the backward shrinks as 1/M.

shown = live.evidence("seed", [(512, 2048), (4096, 4096), (4096, 8192)])
n_sm = shown.provenance.sm_count
for rows in (2048, 4096, 16384):
    for name, found in (
        ("forward", traffic.forward(rows, N, DTYPE)),
        ("backward", traffic.backward(rows, N, DTYPE)),
    ):
        small = found.total_bytes / found.obligatory_bytes - 1
        small_ones = "w and rstd" if name == "forward" else "w, dw and rstd"
        print(f"{rows:5} x {N} {name:8}: {small_ones} add {small:.2%}", end="")
        scratch = traffic.scratch_share(rows, N, DTYPE, n_sm) if name == "backward" else 0
        print(f", {n_sm} rows of partial sums {scratch:.1%}" * bool(scratch))

# %%
# Arithmetic is no ceiling
# ------------------------
#
# Per element the forward squares, adds, and multiplies twice. In the time in which HBM delivers one
# byte a GPU can do many fp32 operations; this pass has hardly any for it to do.

print(f"forward: {4 * M * N / forward.obligatory_bytes:.0f} floating-point operation per byte")

# %%
# The figures
# -----------
#
# One line per shape: the bar ends where the fastest of several copies (forward) or additions
# (backward) ends, timed among the contenders, on inputs that take turns so that none is still in
# the L2. The data sheet's bandwidth is no ceiling here: no kernel we know of reaches it. At the
# right stands the share of the ceiling that the fused kernel reaches. The forward is near it
# everywhere; the backward, on the whole, the nearer the larger the input, as decision D3 explains.

print(live.source(shown))
figures.bandwidth_by_cell(shown, pass_="forward")
figures.bandwidth_by_cell(shown, pass_="backward")
plt.show()
