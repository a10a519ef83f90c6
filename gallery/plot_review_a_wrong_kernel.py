"""
Review a wrong kernel
=====================

This script takes a kernel with one small fault, has it reviewed, and shows the report.

The kernel below is right in the forward. Its backward leaves the weight out of the mean term, which
nobody sees while all weights are one, as in a fresh module.
"""

# %%
# The kernel
# ----------

from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from rmsnorm_ref import review


class Norm(torch.autograd.Function):
    """Normalise, with a gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        """Compute in fp32 and round once."""
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, w, rstd)
        return (x32 * rstd * w.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Compute dx and dw."""
        x, w, rstd = ctx.saved_tensors
        x_hat, dy32 = x.float() * rstd, dy.float()
        mean = (dy32 * x_hat).mean(-1, keepdim=True)  # the fault: dy * w belongs here
        dx = (dy32 * w.float() - x_hat * mean) * rstd
        dw = (dy32 * x_hat).reshape(-1, len(w)).sum(0)
        return dx.to(x.dtype), dw.to(w.dtype), None


def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Apply the function."""
    y: Tensor = Norm.apply(x, w, eps)  # type: ignore[no-untyped-call]  # torch's has no types
    return y


# %%
# With weights of one it agrees with PyTorch, and a test that uses a fresh module passes.

x = torch.randn(16, 64, requires_grad=True)
ones = torch.ones(64)
dy = torch.randn(16, 64)
(theirs,) = torch.autograd.grad(torch.nn.functional.rms_norm(x, (64,), ones, 1e-6), x, dy)
(own,) = torch.autograd.grad(norm(x, ones, 1e-6), x, dy)
print(f"largest difference in dx: {(own - theirs).abs().max():.1e}")

# %%
# The review
# ----------
#
# One call. ``python -m rmsnorm_ref review file.py:norm --out report.html`` does the same from a
# shell, and writes the page that is drawn further down.

report = review.review(norm, device="cpu", dtypes=("float32", "bfloat16"))
print(report.text().rsplit("\n", 2)[0])

# %%
# The first finding
# -----------------
#
# It carries its rule, the smallest input that shows it, and the code that was run. Pasted behind
# the kernel, that code raises.

finding = report.findings[0]
print(finding.rule, finding.url, sep="\n")
print(f"expected {finding.expected}\ngot      {finding.got}\n\n{finding.code}")

# %%
# What comes out is far off where it is wrong, and as exact as the reference where it is right.

rows = [row for row in report.told["accuracy"]["rows"] if row["dtype"] == "bfloat16"]
figure, axes = plt.subplots(figsize=(7, 3.2), facecolor="white")
for index, who in enumerate(("candidate", "reference", "eager_fp32", "eager")):
    sizes = [row["relative_l2"] for row in rows if row["contender"] == who]
    places = [place + 0.2 * index for place in range(len(sizes))]
    axes.bar(places, sizes, 0.18, label=who)
axes.set(yscale="log", ylabel="relative L2 error", title="bfloat16, against the float64 truth")
axes.set_xticks([place + 0.3 for place in range(3)], ["y", "dx", "dw"])
axes.legend(ncols=4, fontsize=8, loc="upper right")
axes.set_ylim(top=10)
figure.tight_layout()
plt.show()
