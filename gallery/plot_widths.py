"""
Rows too wide for one tile are read in pieces, and stay within their bounds
===========================================================================

Decision D1 keeps a whole row in the registers of one program. Registers end, so that decision has
an end too. This page walks N from 64 to the widest row that is accepted: which kernel serves it,
whether its results hold, and what bandwidth it reaches.
"""

# %%
# Which kernel takes over where
# -----------------------------
#
# Narrow rows share a tile. Up to ``tiling.ONE_TILE_MAX`` columns a row is one tile: read once,
# reduced, written. A wider row is read in pieces, once for its sum and once for its result; the
# second read comes out of a cache, so HBM still sees x once. In the forward one program takes all
# pieces. The backward needs room for dw beside the row: there a team of programs shares it, each
# with columns of its own, and they hand each other their sums.

import matplotlib.pyplot as plt
import torch

from rmsnorm_ref import oracle, rmsnorm, tiling, tuning
from rmsnorm_ref.measure import figures, live

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = (64, 512, 2048, 8192, 8193, 16384, 40000, 65536)
MANY = 2**20  # rows, to name the kernel of a large input
BF16 = torch.bfloat16

print("    N  rows a tile  forward       backward       programs on a row")
for N in WIDTHS:
    rows = tiling.forward_tile(N).rows if N <= tiling.ONE_TILE_MAX else 1
    forward, backward = tiling.forward_path(N), tiling.backward_path(MANY, N, device, BF16)
    members = tiling.team(N, device).members if backward == "wide_backward" else 1
    print(f"{N:5}  {rows:11}  {forward:12}  {backward:13}  {members:17}")

# %%
# The results hold at every width
# -------------------------------
#
# Two rows of each width, in fp32, both passes, against the float64 truth. 65537 columns are not
# accepted: the call raises, and says what to use. fp32 is the strictest dtype here: what the store
# rounds away in 16 bits does not hide the sums.

worst: dict[str, list[float]] = {"y": [], "dx": [], "dw": []}
tuning.set_mode("fixed")  # with a GPU, no search at each of these widths: values are the question
for N in WIDTHS:
    generator = torch.Generator().manual_seed(N)
    x, dy = torch.randn(2, 2, N, generator=generator).to(device)
    w = (1 + torch.randn(N, generator=generator) / 4).to(device)
    y = rmsnorm(x.requires_grad_(), w.requires_grad_())
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    y, x, w = y.detach(), x.detach(), w.detach()
    true_dx, true_dw = oracle.truth_backward(dy, x, w)
    for name, actual, truth, bound in (
        ("y", y, oracle.truth(x, w), oracle.bound_y(x, w)),
        ("dx", dx, true_dx, oracle.bound_dx(dy, x, w)),
        ("dw", dw, true_dw, oracle.bound_dw(dy, x, w)),
    ):
        oracle.assert_within(actual, truth, bound, f"{name}, N = {N}")
        worst[name].append(oracle.compare(actual, truth, bound).worst_ratio)

tuning.set_mode(None)
try:
    rmsnorm(torch.ones(1, tiling.LARGEST_N + 1), torch.ones(tiling.LARGEST_N + 1))
except ValueError as error:
    print(error)

words = figures.Words(
    title=f"y, dx and dw stay within their bounds up to N = {WIDTHS[-1]}",
    shows=f"Worst error over bound for {len(WIDTHS)} widths in fp32",
    value="worst error / its bound",
    place="N, elements per row",
)
figures.curves(WIDTHS, worst, words, live.here(), line=("the bound", [1] * len(WIDTHS)))

# %%
# The bandwidth does not
# ----------------------
#
# Same bytes, other widths. Widths that are no power of two have masked lanes, and rows of an odd
# width start off a 16-byte boundary and are loaded a few bytes at a time. A figure whose foot says
# "earlier kernels" was timed before one of them was changed.

shown = live.evidence("widths", [(2**25 // N, N) for N in (128, 4096, 16384, 65536)])
print(live.source(shown))
for pass_ in ("forward", "backward"):
    figures.width_sweep(shown, pass_=pass_)
plt.show()
