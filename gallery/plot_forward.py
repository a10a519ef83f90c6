"""
Every element of y lies within its bound of the true value
==========================================================

RMSNorm divides a row x of N numbers by its root mean square and multiplies it by a learned gain w:
y = x * rstd * w, with rstd = 1 / sqrt(mean(x^2) + eps). This script runs the forward kernel and
holds every element of y against the float64 truth. One element out of bounds stops the script, and
with it the build of this page.
"""

# %%
# Three computations of y, three roles
# ------------------------------------
#
# *Truth* is float64. The *oracle* is fp32 from end to end, rounded once to the dtype of x. The
# *kernel* is what we test. The bound is argued from the truth: half an ulp for the one rounding at
# the store, and what fp32 arithmetic may lose before it. No other kernel is looked at, so the claim
# is "within so much of the true value" and not "same bits as theirs".
#
# With a GPU the kernel is compiled. With none, the first call turns Triton's interpreter on and
# runs the same source on the CPU, about two milliseconds a row: hence the few rows.

import matplotlib.pyplot as plt
import torch

from rmsnorm_ref import oracle, rmsnorm, tiling, tuning
from rmsnorm_ref.data import hidden_states
from rmsnorm_ref.measure import figures, live

device = "cuda" if torch.cuda.is_available() else "cpu"
M = 4
WIDTHS = (1, 3, 16, 100, 384, 1000, 2048, 4095, 8192, 12000, 20000)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
tuning.set_mode("fixed")  # with a GPU, no search at each of these widths: values are the question

# %%
# Random rows
# -----------
#
# The inputs are rounded to their dtype first and only then given to the truth, so what is measured
# is the kernel's error and not that of its input. Widths that are no power of two have a masked
# tail; the two widest take the kernel that reads a row in chunks.


def worst(x: torch.Tensor, w: torch.Tensor) -> tuple[float, float]:
    """Return the largest error of y over its bound, and how many y equal the oracle's, as shares.

    x is [M, N], w is [N]. Raises AssertionError if an element is out of bounds.
    """
    y = rmsnorm(x, w)
    truth, bound = oracle.truth(x, w), oracle.bound_y(x, w)
    oracle.assert_within(y, truth, bound, "y", dtype=x.dtype)
    same = float((y == oracle.rmsnorm(x, w)).double().mean())
    return oracle.compare(y, truth, bound).worst_ratio, same


ratios: dict[torch.dtype, list[float]] = {dtype: [] for dtype in DTYPES}
print("worst error over bound, and how many y have the oracle's bits")
print(f"{'N':>5}  {'kernel':12}" + "".join(f"{str(dtype)[6:]:>17}" for dtype in DTYPES))
for N in WIDTHS:
    line = f"{N:5}  {tiling.forward_path(N):12}"
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(N)
        x = torch.randn(M, N, generator=generator).to(device, dtype)
        w = (1 + torch.randn(N, generator=generator) / 4).to(device, dtype)
        ratio, same = worst(x, w)
        ratios[dtype].append(ratio)
        line += f"  {ratio:.3f} {same:8.2%}"
    print(line)

# %%
# The percentages are why nobody's bits are matched here: kernel and oracle are both right, and
# where they add a row up in different orders, some last bits differ.
#
# Real rows
# ---------
#
# A trained transformer's rows have a few channels tens of times larger than the rest, and those
# dominate the mean square. The bound is relative to each element, so it needs no other tolerance.

states = hidden_states()
for layer in ("layer_0", "layer_5"):
    x = states[f"{layer}_x"][:16].to(device)
    ratio, same = worst(x, states[f"{layer}_weight"].to(device))
    print(f"{layer}: {ratio:.3f} of the bound, {same:.2%} as the oracle")
tuning.set_mode(None)

# %%
# The figure
# ----------
#
# In 16 bits the bound is nearly all store: half an ulp, and the worst of many elements comes close
# to it at every width. In float32 the bound must also allow every rounding of the sum over a row,
# which a kernel that adds in a tree does not use up.

most = max(map(max, ratios.values()))
words = figures.Words(
    title=f"y stays within its bound: at most {most:.3f} of it",
    shows=f"Worst error of y over its bound for {len(WIDTHS)} widths in three dtypes",
    value="worst error of y / its bound",
    place="N, elements per row",
)
series = {str(dtype)[6:]: found for dtype, found in ratios.items()}
figures.curves(WIDTHS, series, words, live.here(), line=("the bound", [1] * len(WIDTHS)))
plt.show()
