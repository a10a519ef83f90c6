"""
Both gradients lie within their bounds, whichever kernel makes them
===================================================================

With x_hat = x * rstd and dyw = dy * w, the gradients are dx = (dyw - x_hat * mean(dyw * x_hat)) *
rstd, a reduction inside each row, and dw = the sum over all rows of dy * x_hat. Four kernels make
them, by shape. This script runs all four and holds every element against the float64 truth.
"""

# %%
# Why not gradcheck
# -----------------
#
# ``torch.autograd.gradcheck`` compares with finite differences in float64, which these kernels
# refuse: their statistics are fp32 by design. So there are two references of our own. The truth is
# the closed formula in float64. The oracle never sees that formula: it is autograd's derivative of
# the fp32 forward, and :func:`rmsnorm_ref.oracle.rmsnorm_backward` rounds it once. If the formula
# were wrong, the two would disagree, and the first thing below is that they do not.

import matplotlib.pyplot as plt
import torch

from rmsnorm_ref import oracle, rmsnorm, tiling, tuning
from rmsnorm_ref.measure import live, panels, style

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = ((5, 384), (12, 100), (33, 1000), (9, 4096), (3, 9000), (2, 32769))


def draw_inputs(M: int, N: int, dtype: torch.dtype) -> Tensors:
    """Return dy [M, N], x [M, N] and w [N], the same on every run."""
    generator = torch.Generator().manual_seed(N)
    x, dy = torch.randn(2, M, N, generator=generator)
    w = 1 + torch.randn(N, generator=generator) / 4
    return dy.to(device, dtype), x.to(device, dtype), w.to(device, dtype)


dy, x, w = draw_inputs(16, 1000, torch.float32)
for name, autograd, formula in zip(
    ("dx", "dw"), oracle.rmsnorm_backward(dy, x, w), oracle.truth_backward(dy, x, w), strict=True
):
    off = oracle.errors(autograd, formula).relative_l2
    print(f"{name}: autograd of the oracle is off the formula by {off:.1e} of its norm")

# %%
# Run the kernels
# ---------------
#
# Small shapes reach every kernel: a width that is no multiple of 8 has none for few rows, and where
# kernels are interpreted fewer rows count as few. An element of dx may be small because larger
# terms cancelled; it is then many of its own ulps away from the truth and still right, so its bound
# is relative to the terms.


def worst(M: int, N: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the largest error of dx and of dw, each over its bound; AssertionError if above 1."""
    dy, x, w = draw_inputs(M, N, dtype)
    y = rmsnorm(x.requires_grad_(), w.requires_grad_())
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w = x.detach(), w.detach()
    true_dx, true_dw = oracle.truth_backward(dy, x, w)
    ratios = {}
    for name, actual, truth, bound in (
        ("dx", dx, true_dx, oracle.bound_dx(dy, x, w)),
        ("dw", dw, true_dw, oracle.bound_dw(dy, x, w)),
    ):
        oracle.assert_within(actual, truth, bound, name, dtype=dtype)
        ratios[name] = oracle.compare(actual, truth, bound).worst_ratio
    return ratios


tuning.set_mode("fixed")  # with a GPU, no search at each of these widths: values are the question
found = {(M, N, dtype): worst(M, N, dtype) for M, N in SHAPES for dtype in DTYPES}
tuning.set_mode(None)
paths = [tiling.backward_path(M, N, device, torch.float16) for M, N in SHAPES]
labels = [f"{panels.shape(*shape)}\n{path}" for shape, path in zip(SHAPES, paths, strict=True)]

# %%
# The figure
# ----------
#
# As in the forward, 16-bit gradients come close to their half ulp, and fp32 ones do not use up what
# the bound allows the sums.


@style.styled
def draw() -> style.Drawing:
    """Draw the worst error over its bound, by shape, for dx and dw."""
    looks = style.series([str(dtype).removeprefix("torch.") for dtype in DTYPES])
    figure, axes = style.card(0.5 * len(SHAPES) + 0.6, 2, sharey=True)
    for panel, name in zip(axes, ("dx", "dw"), strict=True):
        panel.axvline(1, color=style.INK, linewidth=1.6)
        for i, (M, N) in enumerate(SHAPES):
            for offset, dtype, look in zip((-0.25, 0, 0.25), DTYPES, looks, strict=True):
                style.point(panel, found[M, N, dtype][name], i + offset, look)
        style.value_axis(panel.xaxis, f"{name}: error / bound", 1.15)
    axes[0].set_yticks(range(len(SHAPES)), labels, fontsize=style.NOTE_PT)
    axes[0].set_ylim(len(SHAPES) - 0.5, -0.5)
    most = max(ratio for ratios in found.values() for ratio in ratios.values())
    title = f"dx and dw stay within their bounds: the worst element at {most:.3f} of its own"
    alt = f"Worst error of dx and dw over its bound, {len(SHAPES)} shapes, three dtypes: {title}."
    entries = style.key(axes[0], looks)
    entries += axes[0].plot([], [], color=style.INK, linewidth=1.6, label="the bound")
    return style.finish(figure, title, alt, live.here(), entries)


draw()
plt.show()
