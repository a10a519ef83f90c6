"""
A wrong launch costs time, a wrong tile costs the answer
========================================================

Decision D4 searches, for each width N, how many warps share a tile and how many tiles are in
flight. It does not search the tile. This page shows both halves: what goes wrong with a tile
that is too narrow, and what the launches cost that the search tries.
"""

# %%
# The tile is pinned
# ------------------
#
# A row sits in one tile of ``BLOCK_SIZE = next_power_of_2(N)`` lanes. The kernel below is the
# package's own, launched by hand: once with that tile and once with half of it, a choice that a
# search over tiles would call faster, as it leaves out what does not fit.

import collections

import matplotlib.pyplot as plt
import torch

from rmsnorm_ref import interpreter, oracle, rmsnorm, tiling, tuning
from rmsnorm_ref.measure import figures, live, recording

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
interpreter.prepare(device)  # before Triton is imported: with no GPU, to interpret
from rmsnorm_ref.forward import rmsnorm_forward_kernel

M, N, EPS = 4, 1500, 1e-6
x = torch.randn(M, N, generator=torch.Generator().manual_seed(0)).to(device)
w = torch.ones(N, device=device)
truth, bound = oracle.truth(x, w, EPS), oracle.bound_y(x, w, EPS)
for block_size in (tiling.next_power_of_2(N), tiling.next_power_of_2(N) // 2):
    y, rstd = torch.zeros_like(x), torch.empty(M, device=device)
    align = tiling.row_align(N, x.dtype)
    rmsnorm_forward_kernel[M,](x, w, y, rstd, N, M, EPS, N, block_size, 1, align, "")
    verdict = oracle.compare(y, truth, bound)
    unwritten = (y == 0).double().mean().item()
    word = "right" if verdict.ok else "WRONG"
    print(f"BLOCK_SIZE {block_size}: {word}, {unwritten:.0%} of y unwritten")
    assert verdict.ok == (block_size >= N)

# %%
# The launch is searched
# ----------------------
#
# Most configs are ruled out before they are timed, each for a reason.

for path, width in (("forward", 4096), ("backward", 4096)):
    reasons = tuning.pruned(path, width, torch.bfloat16)
    print(f"{path}, N = {width}: {list(reasons.values()).count(None)} of {len(reasons)} are tried")
    why = collections.Counter((r or "").partition(":")[2].strip() for r in reasons.values() if r)
    for reason, n_configs in why.most_common():
        print(f"  {n_configs:2} left out: {reason}")

# %%
# The choice never follows the number of rows. How many warps share a row sets the order in which it
# is summed, and a row's last bit must not depend on the rows beside it: the first three rows of a
# batch and the three alone are equal, bit for bit.

x = torch.randn(40, 768, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
w = torch.ones(768, dtype=x.dtype, device=device)
assert torch.equal(rmsnorm(x, w)[:3], rmsnorm(x[:3], w))

# %%
# What a wrong launch costs
# -------------------------
#
# One dot per config that was tried, above the time of the best one at that width. The ring is the
# config of the shipped table, which ``RMSNORM_REF_TUNING=fixed`` takes without a search; the search
# itself replaces it only by one that is faster by more than the noise. The search space is small:
# two knobs. How far from the ceiling the best config still is, the page on bandwidth shows.

shown = live.evidence("configs", [(1, 2048)])
print(live.source(shown))
for pass_ in ("forward", "backward"):
    figures.config_cost(shown, pass_=pass_)
plt.show()

# %%
# In numbers, the cost of taking the shipped config, and of the worst one that was tried:

for pass_ in ("forward", "backward"):
    rows = recording.select(shown.rows, kind="config", pass_=pass_)
    for width in sorted({row.N for row in rows}):
        times = {row.config: row.time_s.p50 for row in rows if row.N == width and row.time_s}
        shipped = [r.config for r in rows if r.N == width and r.detail and r.detail["shipped"]]
        best, worst = min(times.values()), max(times.values())
        line = f"{pass_:8} N = {width:5}: worst {worst / best:.2f} of the best"
        print(line + "".join(f", shipped {times[config] / best:.2f}" for config in shipped))
