"""
How far from the truth?
=======================

This script runs the forward and the backward kernel on small inputs, measures every element of y,
dx and dw against a float64 truth, and draws the element that comes closest to its bound.

The truth and the bounds come from :mod:`rmsnorm_ref.oracle`, which shares no code with the kernels.
A result that leaves its bound stops the script, and with it the build of this page.
"""

# %%
# Where it runs
# -------------
#
# With a GPU the kernels are compiled. With none, the first call turns Triton's interpreter on and
# runs the same source on the CPU, a few milliseconds per row: hence the few rows.

import matplotlib.pyplot as plt
import torch

from rmsnorm_ref import oracle, rmsnorm

if torch.cuda.is_available():
    device, where = "cuda", f"compiled, on {torch.cuda.get_device_name()}"
else:
    device, where = "cpu", "interpreted, on a CPU"
print(f"kernels: {where}; torch {torch.__version__}")

# %%
# Measure
# -------
#
# The inputs are rounded to their dtype first and only then given to the truth, so the error below
# is the kernels' own. Some widths are no power of two: there the tile is wider than the row, and
# its tail is masked.

M = 12
WIDTHS = (3, 16, 100, 384, 1000, 2048, 4096)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def worst_elements(dtype: torch.dtype, N: int) -> dict[str, tuple[float, float]]:
    """Run both passes; per result, return its worst element's error and bound, in ulps."""
    generator = torch.Generator().manual_seed(N)
    x, dy = torch.randn(2, M, N, generator=generator).to(device, dtype)
    w = (1 + torch.randn(N, generator=generator) / 4).to(device, dtype)
    y = rmsnorm(x.requires_grad_(), w.requires_grad_())
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w = x.detach(), w.detach()
    true_dx, true_dw = oracle.truth_backward(dy, x, w)
    worst = {}
    for name, actual, truth, bound in (
        ("y", y.detach(), oracle.truth(x, w), oracle.bound_y(x, w)),
        ("dx", dx, true_dx, oracle.bound_dx(dy, x, w)),
        ("dw", dw, true_dw, oracle.bound_dw(dy, x, w)),
    ):
        oracle.assert_within(actual, truth, bound, f"{name}, {dtype}, N={N}")
        index = oracle.compare(actual, truth, bound).index
        ulp = oracle.ulp(truth[index], dtype)
        error = (actual[index].double() - truth[index]).abs()
        worst[name] = (float(error / ulp), float(bound[index] / ulp))
    return worst


cells = {(dtype, N): worst_elements(dtype, N) for dtype in DTYPES for N in WIDTHS}

# %%
# Draw
# ----
#
# Markers are what the kernels did; the line of the same colour is what the bound allows that very
# element. In 16 bits the one rounding at the store is nearly all of it: half an ulp. In float32
# the sum over the row is as coarse as the store, so its share shows. An element of dx or dw that is
# small because larger terms cancelled may be many of its own ulps away, and the bound knows it.

STYLE = {"float16": ("C0", "o"), "bfloat16": ("C1", "s"), "float32": ("C2", "^")}
figure, panels = plt.subplots(1, 3, figsize=(10, 4.2), sharey=True, facecolor="white")
figure.suptitle("Every element of y, dx and dw stays within its bound")
for panel, name in zip(panels, ("y", "dx", "dw"), strict=True):
    for dtype, (label, (colour, marker)) in zip(DTYPES, STYLE.items(), strict=True):
        error, bound = zip(*(cells[dtype, N][name] for N in WIDTHS), strict=True)
        panel.plot(WIDTHS, bound, color=colour)
        panel.plot(WIDTHS, error, marker, color=colour, label=label)
    panel.set(title=name, xlabel="N, elements per row", xscale="log", yscale="log")
    panel.grid(alpha=0.3)
panels[0].set_ylabel("error of the worst element, ulps")
figure.legend(*panels[0].get_legend_handles_labels(), loc="lower right", ncols=3)
note = f"Markers: measured as this page was built, {where}, M = {M}. Lines: the bound."
figure.text(0.01, 0.03, note, fontsize=8)
figure.tight_layout(rect=(0, 0.07, 1, 1))
plt.show()
