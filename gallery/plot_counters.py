"""
A fused pass moves the bytes that the model counts
==================================================

The byte model adds up tensors and reads no hardware. A GPU counts what crosses its DRAM bus. This
page holds the one against the other: where they agree the model is a measurement in advance, and
where they do not the L2 cache is at work, mostly in favour of eager PyTorch.
"""

# %%
# What the model counts
# ---------------------
#
# Every tensor of a pass once, the small ones too: w, dw, and rstd, one float a row, which the
# forward saves for the backward. The sizes below are those of real tensors, after both passes ran.

import matplotlib.pyplot as plt
import torch

from rmsnorm_ref import rmsnorm, traffic
from rmsnorm_ref.measure import figures, live, recording

device = "cuda" if torch.cuda.is_available() else "cpu"
M, N, DTYPE = 32, 2048, torch.bfloat16

x = torch.randn(M, N).to(device, DTYPE).requires_grad_()
w = torch.ones(N, dtype=DTYPE, device=device, requires_grad=True)
y = rmsnorm(x, w)
dy = torch.randn_like(y)
dx, dw = torch.autograd.grad(y, (x, w), dy)

forward, backward = traffic.forward(M, N, DTYPE), traffic.backward(M, N, DTYPE)
assert forward.total_bytes == sum(tensor.nbytes for tensor in (x, w, y)) + 4 * M
assert backward.total_bytes == sum(tensor.nbytes for tensor in (x, w, dy, dx, dw)) + 4 * M
print(f"forward  {forward.total_bytes:9,} bytes")
print(f"backward {backward.total_bytes:9,} bytes")

# %%
# What the bus counts
# -------------------
#
# Reads and writes of the same passes under a profiler, beside what the model says, scratch
# included. Counters need a profiler's rights, so these are never taken live.

counted = live.recorded("counters")
print(live.source(counted, "bytes"))
for pass_ in ("forward", "backward"):
    if recording.select(counted.rows, kind="counter", pass_=pass_, dtype="bfloat16"):
        figures.counters(counted, pass_=pass_)
plt.show()

# %%
# Where they part
# ---------------
#
# Counted over model, reads and writes apart. Writes fall short first: a result that fits in the L2
# need not have left it when the kernel ends. Eager's reads fall short next, because an operand that
# the kernel before has just written is still there: a small eager chain pays fewer round trips than
# the model charges it with. A fused pass has less to find again: the partial sums of dw, which its
# second kernel reads while the L2 still holds them, and where rows are few x and dy, which the
# model therefore charges once. So its reads hold within a few per cent at every size.

for contender in ("ours", "eager"):
    for row in recording.select(counted.rows, kind="counter", contender=contender):
        found = row.detail or {}
        reads = found["dram_read_bytes"] / found["model_read_bytes"]
        writes = found["dram_write_bytes"] / found["model_write_bytes"]
        shape = f"{row.M} x {row.N}"
        print(f"{contender:5} {row.pass_:8} {shape:12} reads {reads:4.0%} writes {writes:4.0%}")
