"""
A wrong gradient is invisible while all weights are one
=======================================================

The kernel below is right in the forward. Its backward leaves the weight out of the mean term, which
no test on a fresh module sees: there every weight is one. The review feeds other weights, names
what is wrong, and prints the lines that show it again.
"""

# %%
# The kernel
# ----------

from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import rmsnorm_ref
from rmsnorm_ref import review
from rmsnorm_ref.measure import figures, live

device = "cuda" if torch.cuda.is_available() else "cpu"


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
# A test that it passes
# ---------------------
#
# With weights of one its dx agrees with the reference's to the last digits of fp32.

g = torch.Generator().manual_seed(0)
x, dy = torch.randn(2, 16, 64, generator=g).to(device)
x, ones = x.requires_grad_(), torch.ones(64, device=device)
(ours,) = torch.autograd.grad(rmsnorm_ref.rmsnorm(x, ones, 1e-6), x, dy)
(theirs,) = torch.autograd.grad(norm(x, ones, 1e-6), x, dy)
print(f"largest difference in dx: {(theirs - ours).abs().max():.1e}")
assert torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5)

# %%
# The review
# ----------
#
# One call. ``python -m rmsnorm_ref review file.py:norm --out report.html`` does the same from a
# shell, in a process of its own, and writes a page that can be handed on.

report = review.review(norm, device=device, dtypes=("float32", "bfloat16"))
print(report.text().rsplit("\n", 2)[0])  # all but how long it took

# %%
# What a finding carries
# ----------------------
#
# Its rule with a permalink, the smallest input that shows it, and the code that was run on it.
# Pasted behind the kernel, that code raises.

finding = report.findings[0]
print(finding.rule, finding.url, sep="\n")
print(f"expected {finding.expected}\ngot      {finding.got}\n\n{finding.code}")

# %%
# Where it is right, it is as exact as the reference. So nothing but a comparison of dx, element by
# element and under weights other than one, finds the fault.

assert report.rules() >= {"r-value-dx"}
assert not {"r-value-y", "r-value-dw"} & report.rules()
rows = {(r["dtype"], r["result"], r["contender"]): r for r in report.told["accuracy"]["rows"]}
lines = [(d, r) for d in ("float32", "bfloat16") for r in ("y", "dx", "dw")]
whose = {"candidate": "this kernel", "reference": "the reference", "eager": "eager"}
series = {label: [rows[*line, name]["ratio"] for line in lines] for name, label in whose.items()}
off = [rows[dtype, "dx", "candidate"]["ratio"] for dtype in ("float32", "bfloat16")]
shape = report.told["accuracy"]["label"]  # one random input, the same for all three
words = figures.Words(
    title=f"On {shape} dx is {off[1]:,.0f} bounds off in bf16, {off[0]:,.0f} in fp32",
    shows="Worst error over the oracle's bound, by dtype and result, of the kernel and of others",
    value="worst error / the bound",
)
names = [f"{result}, {dtype}" for dtype, result in lines]
figures.dots(names, series, words, live.here(), log=True)
plt.show()
