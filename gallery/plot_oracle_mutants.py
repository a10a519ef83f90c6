"""
Every planted fault leaves its bound; a customary tolerance lets some pass
==========================================================================

A bound is worth what it rejects. This script takes the package's own kernels, plants one fault in a
copy of their source, runs the copy, and holds the result against the oracle's bounds, and against
the tolerance that ``torch.testing.assert_close`` takes by default.
"""

# %%
# The faults
# ----------
#
# Each changes one spot of one file. The width is odd, because at a power of two some do not show.

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch

import rmsnorm_ref
from rmsnorm_ref import oracle
from rmsnorm_ref.measure import figures, live

device = "cuda" if torch.cuda.is_available() else "cpu"
copies = tempfile.TemporaryDirectory()
M, N = 24, 1023


class Fault(NamedTuple):
    """Say what is planted where: `new` takes the place of `old` in one file of the package."""

    name: str
    rejected_by: str = "y"  # the result that it spoils
    file: str = ""
    old: str = ""
    new: str = ""
    scale: float = 1.0  # of x


ROUND = ".to(tl.bfloat16).to(tl.float32)"
FAULTS = (
    Fault("no fault"),
    Fault("eps outside the root", "y", "forward", "/ N + eps)", "/ N) + eps", scale=1e-3),
    Fault("mean over the tile, not N", "y", "forward", "/ N + eps", "/ BLOCK_SIZE + eps"),
    Fault("rstd rounded to bf16", "y", "forward", "(x * rstd *", f"(x * rstd{ROUND} *"),
    Fault("y rounded twice", "y", "forward", "(x * rstd * w)", f"((x * rstd){ROUND} * w)"),
    Fault("rstd saved in bf16", "dw", "forward", "rows, rstd,", f"rows, rstd{ROUND},"),
    Fault("dx without its mean term", "dx", "backward", "(dyw - x_hat * mean)", "dyw"),
    Fault("mean without the gain", "dx", "backward", "tl.sum(dyw * x_hat", "tl.sum(dy * x_hat"),
    Fault("dw summed in bf16", "dw", "backward", "+= dy * x_hat", f"= (dw + dy * x_hat){ROUND}"),
)  # fmt: skip


def planted(fault: Fault) -> Any:
    """Import a copy of the package that has the fault."""
    name = f"mutant_{FAULTS.index(fault)}"
    folder = Path(copies.name, name)
    folder.mkdir()
    for file in Path(rmsnorm_ref.__file__).parent.glob("*.py"):
        source = file.read_text()
        if file.stem == fault.file:
            assert source.count(fault.old) == 1, fault
            source = source.replace(fault.old, fault.new)
        # An operator's name belongs to the whole process.
        (folder / file.name).write_text(source.replace("rmsnorm_ref::", f"{name}::"))
    sys.path.insert(0, copies.name)
    copy = importlib.import_module(name)
    importlib.import_module(f"{name}.tuning").set_mode("fixed")  # no search for each copy
    return copy


# %%
# Run every copy
# --------------
#
# A ratio above 1 is a rejection. The customary tolerance for bf16 is 1.6 % of the value and 1e-5.


def ratios(fault: Fault) -> tuple[float, float]:
    """Return the worst error of the spoilt result over its bound and the customary tolerance."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, M, N, generator=generator).to(device, torch.bfloat16)
    w = (1 + torch.randn(N, generator=generator) / 4).to(device, torch.bfloat16)
    x = (x * fault.scale).requires_grad_()
    y = planted(fault).rmsnorm(x, w.requires_grad_())
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w = x.detach(), w.detach()
    true_dx, true_dw = oracle.truth_backward(dy, x, w)
    actual, truth, bound = {
        "y": (y.detach(), oracle.truth(x, w), oracle.bound_y(x, w)),
        "dx": (dx, true_dx, oracle.bound_dx(dy, x, w)),
        "dw": (dw, true_dw, oracle.bound_dw(dy, x, w)),
    }[fault.rejected_by]
    allowed = (bound, 1e-5 + 1.6e-2 * truth.abs())
    strict, customary = (oracle.compare(actual, truth, each).worst_ratio for each in allowed)
    return strict, customary


found = {fault.name: ratios(fault) for fault in FAULTS}
for name, (bound, customary) in found.items():
    print(f"{name:26} {bound:9.3g} of the bound, {customary:8.3g} of the customary")

# The unchanged source is accepted and every fault rejected, or the script stops here.
assert found.pop("no fault")[0] <= 1
assert all(bound > 1 for bound, _ in found.values())
passed = sum(customary <= 1 for _, customary in found.values())
words = figures.Words(
    title=f"All {len(found)} faults leave the bound; {passed} pass the customary tolerance",
    shows="Worst error of each planted fault over its bound and over a customary tolerance",
    value="worst error / what is allowed",
)
labels = ("oracle's bound", "assert_close, bf16")
series = dict(zip(labels, zip(*found.values(), strict=True), strict=True))
figures.dots(list(found), series, words, live.here(), limit=("allowed", 1.0), log=True)
plt.show()
