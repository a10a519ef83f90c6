"""
Eager moves several times the bytes of one fused pass
=====================================================

A kernel reads its inputs from HBM, the GPU's main memory, and writes its result back. Eager PyTorch
runs RMSNorm as a chain of kernels, and every link of the chain is such a round trip. This script
counts them: first in the model of cost, then in what PyTorch really runs, step by step.
"""

# %%
# What eager PyTorch runs
# -----------------------
#
# The usual three lines become six operators. A dispatch mode sees each operator with the tensors it
# is given and the one it returns, so its bytes can be added up as it runs. The fused pass must move
# x once and y once: 2·M·N elements of e bytes.

import itertools
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm_ref import rmsnorm, traffic
from rmsnorm_ref.measure import figures, live, panels, recording, style

device = "cuda" if torch.cuda.is_available() else "cpu"
M, N, DTYPE = 16, 2048, torch.bfloat16


class CountBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Print every operator with the bytes of [M, N] tensors that it reads and writes."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count."""
        del types  # torch hands it over, and no subclass is in sight
        out = func(*args, **(kwargs or {}))
        read = sum(t.nbytes for t in args if isinstance(t, torch.Tensor) and t.shape == (M, N))
        written = out.nbytes if out.shape == (M, N) else 0
        self.n_bytes += read + written
        print(f"{func.__name__:20} reads {read:7,}  writes {written:7,}")
        return out


x, w = torch.randn(M, N).to(device, DTYPE), torch.ones(N, dtype=DTYPE, device=device)
y = rmsnorm(x, w)
with CountBytes() as counted:  # type: ignore[no-untyped-call]  # the same
    variance = x.pow(2).mean(dim=-1, keepdim=True)
    w * (x * torch.rsqrt(variance + 1e-6))  # the three lines, without a name for the result

eager, fused = traffic.eager_forward(M, N, DTYPE), traffic.forward(M, N, DTYPE)
assert counted.n_bytes == eager.obligatory_bytes
assert x.nbytes + y.nbytes == fused.obligatory_bytes
print(f"eager {counted.n_bytes:,} bytes, fused {x.nbytes + y.nbytes:,} bytes")
print(f"predicted speed-up, forward: {traffic.predicted_speedup(eager, fused):.2f}")

# %%
# Model and run agree to the byte. Tensors of M or N elements (w, the mean square, rstd) are left
# out of this headline and itemised in :func:`rmsnorm_ref.traffic.forward`.
#
# Both passes
# -----------
#
# Autograd's chain is longer still, and some models write ``x.float()`` first, so that every
# intermediate has twice the size. The quotient of bytes is the speed-up to expect if the fused
# kernel and the chain use the bus equally well: a prediction, made before anything is timed.

PASSES: dict[str, tuple[Any, Any]] = {
    "forward": (traffic.forward, traffic.eager_forward),
    "backward": (traffic.backward, traffic.eager_backward),
}
LANES: dict[str, traffic.Spelling | None] = {"ours": None, "eager": "seed", "eager_fp32": "fp32"}
SHAPE = (4096, 4096, DTYPE)
elements = {}
for (name, (fused_pass, chain)), lane in itertools.product(PASSES.items(), LANES):
    spelling = LANES[lane]
    found = chain(*SHAPE, spelling=spelling) if spelling else fused_pass(*SHAPE)
    elements[name, lane] = found.obligatory_bytes / (4096 * 4096 * DTYPE.itemsize)
    kernels = panels.some({step.kernel for step in found.steps}, "kernel")
    print(f"{name:9} {lane:10} {kernels:>10}, {elements[name, lane]:4.1f} M·N·e bytes")


@style.styled
def draw() -> style.Drawing:
    """Draw bytes over M*N*e, by pass and spelling."""
    figure, (panel,) = style.card(2.6)
    for i, (name, lane) in enumerate(elements):
        y, length = i + i // len(LANES) * 0.6, elements[name, lane]
        panels.bar(panel, y, length, style.LOOKS[lane].colour, 0.8)
        times = length / elements[name, "ours"]
        panel.text(length, y, f" {length:.0f}   ({times:.1f} times)", va="center")
    panel.set_yticks([1, 4.6], list(PASSES))
    panel.set_ylim(6.2, -0.6)
    style.value_axis(panel.xaxis, "bytes / (M·N·e)", 1.3 * max(elements.values()))
    said = [elements[name, "eager"] / elements[name, "ours"] for name in PASSES]
    title = f"Eager moves {said[0]:.1f} times the bytes forward, {said[1]:.1f} times backward"
    alt = f"Bytes that the fused kernel and two eager spellings must move: {title}."
    entries = style.patches(panel, [style.LOOKS[lane] for lane in LANES])
    note = "counted by rmsnorm_ref.traffic, the same for every M and N and for both 16-bit dtypes"
    return style.finish(figure, title, alt, note, entries)


draw()

# %%
# The same chain in time
# ----------------------
#
# What the chain of one shape took, kernel by kernel, as PyTorch's profiler saw it on a GPU. Where a
# kernel touches only M numbers it moves next to nothing and still takes a launch.

shown = live.evidence("eager", [(4096, 4096)])
print(live.source(shown))
row = max(recording.select(shown.rows, kind="eager_kernel"), key=lambda r: r.M * r.N)
figures.eager_chain(shown, M=row.M, N=row.N, dtype=row.dtype)
plt.show()
