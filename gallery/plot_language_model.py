"""
A language model trains the same with RMSNorm as with torch.nn.RMSNorm
======================================================================

The last test of a layer is a training run. A character model of one block is trained from the same
start with :class:`rmsnorm_ref.RMSNorm`, with :class:`torch.nn.RMSNorm` and with an exact norm. Two
correct kernels round differently, so the runs are not equal to the bit; the question is whether
they differ by more than a correct norm and an exact one do.
"""

# %%
# The model
# ---------
#
# Characters in, characters out: the block mixes the past with causal attention, then each position
# by itself, and normalises before both. The text is this package's own source, so nothing is
# downloaded. The size is what an interpreter can train in seconds.

import inspect

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional

from rmsnorm_ref import RMSNorm, oracle, rmsnorm
from rmsnorm_ref.measure import figures, live

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
rmsnorm(torch.ones(1, 8, device=device), torch.ones(8, device=device))  # before torch's optimizer
WIDTH, CONTEXT, BATCH, STEPS = 32, 16, 2, 24

text = inspect.getsource(oracle)
alphabet = sorted(set(text))
codes = torch.tensor([alphabet.index(letter) for letter in text], device=device)


class ExactNorm(RMSNorm):
    """Normalise in float64 and round once: what the other two are roundings of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y."""
        return oracle.truth(x, self.weight, self.eps).to(x.dtype)


class Block(nn.Module):
    """Mix along the text, then within each position; x is [BATCH, CONTEXT, WIDTH]."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(WIDTH, eps=1e-6), norm(WIDTH, eps=1e-6)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the block."""
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        mixed: torch.Tensor = x + self.mlp(self.norm_2(x))
        return mixed


def train(norm: type[nn.Module]) -> list[float]:
    """Train a model from a fixed start; return its loss at every step."""
    torch.manual_seed(0)
    place = nn.Parameter(torch.randn(CONTEXT, WIDTH, device=device) / 8)
    blocks = [Block(norm), norm(WIDTH, eps=1e-6), nn.Linear(WIDTH, len(alphabet))]
    embed, rest = nn.Embedding(len(alphabet), WIDTH).to(device), nn.Sequential(*blocks).to(device)
    parameters = [place, *embed.parameters(), *rest.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(codes) - CONTEXT - 1, (BATCH,), generator=generator)
        windows = torch.stack([codes[i : i + CONTEXT + 1] for i in starts])
        logits = rest(embed(windows[:, :-1]) + place)
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
# Three runs
# ----------
#
# Ours, PyTorch's, and float64 rounded once, from equal weights on equal batches.

losses = {"rmsnorm_ref.RMSNorm": train(RMSNorm), "torch.nn.RMSNorm": train(nn.RMSNorm)}
exact = train(ExactNorm)
ours, theirs = losses.values()
apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
control = max(abs(a - b) for a, b in zip(exact, theirs, strict=True))
assert ours[-1] < ours[0], "the model did not learn"
print(f"largest difference in loss: rmsnorm_ref and torch.nn {apart:.1e}")
print(f"largest difference in loss: float64 and torch.nn     {control:.1e}")

words = figures.Words(
    title=f"The losses differ by {apart:.1e} at most",
    shows=f"Loss of a small language model over {STEPS} steps with both norms, curves coinciding",
    value="loss, nats per character",
    place="step",
)
figures.curves(range(STEPS), losses, words, live.here(), log_x=None)
plt.show()
