"""Why a measured speed-up is not the predicted one: exactly, and in bytes per second.

`traffic.predicted_speedup` divides bytes, which is right if eager and fused code use the bus
equally well and if nothing but [M, N] tensors takes time. Neither holds. With the kernels of a
chain timed one by one (`chain.py`) the measured speed-up is, without remainder,

    predicted * fused bandwidth / eager bandwidth + (small kernels + gaps) / fused time

where a kernel is small if it touches no [M, N] tensor, so that the headline counts nothing for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rmsnorm_ref import traffic

from . import chain as chains
from .schema import FORWARD, Row

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Explanation:
    """Hold one cell's speed-up, predicted and measured, and all that lies between the two.

    Times in seconds, bandwidths in bytes per second of obligatory bytes.
    """

    predicted: float  # bytes over bytes
    fused_s: float
    large_s: float  # kernels of the chain that touch an [M, N] tensor
    small_s: float  # its other kernels
    gaps_s: float  # the chain's time less all its kernels'; 0 if only kernels were timed
    fused_bandwidth: float
    eager_bandwidth: float  # over large_s

    @property
    def bandwidth_factor(self) -> float:
        """Return how much better the fused kernel uses the bus."""
        return self.fused_bandwidth / self.eager_bandwidth

    @property
    def left_out(self) -> float:
        """Return the share of the speed-up that the headline bytes cannot see."""
        return (self.small_s + self.gaps_s) / self.fused_s

    @property
    def measured(self) -> float:
        """Return the chain's time over the fused kernel's: predicted * factor + left_out."""
        return (self.large_s + self.small_s + self.gaps_s) / self.fused_s


def explain(kernels: Sequence[Row], fused: Row, chain: Row | None = None) -> Explanation:
    """Say how far bytes explain a measured speed-up, and what explains the rest.

    Args:
        kernels: "eager_kernel" rows of one cell, pass and spelling.
        fused: the "kernel" row of ours at that cell and pass.
        chain: the "kernel" row of the same eager contender, if the chain was timed as a whole.

    Raises:
        ValueError: the rows are not of one cell and pass, or `kernels` is empty.
    """
    cells = {(r.M, r.N, r.dtype, r.pass_) for r in (*kernels, fused, *([chain] if chain else []))}
    contenders = {r.contender for r in (*kernels, *([chain] if chain else []))}
    if not kernels or len(cells) > 1 or len(contenders) > 1:
        raise ValueError(f"rows are of {sorted(map(str, cells | contenders))}: one cell is wanted")
    M, N, dtype = fused.M, fused.N, getattr(torch, fused.dtype)
    spelling: traffic.Spelling = "seed" if kernels[0].contender == "eager" else "fp32"
    forward = fused.pass_ == FORWARD
    modelled = chains.model(M, N, dtype, spelling, "forward" if forward else "backward")
    large = {kernel.name for kernel in modelled if kernel.obligatory_bytes}
    seconds = {True: 0.0, False: 0.0}
    for row in kernels:
        steps = row.detail["steps"] if row.detail else ()
        seconds[any(step in large for step in steps)] += _p50(row)
    ours = (traffic.forward if forward else traffic.backward)(M, N, dtype).obligatory_bytes
    theirs = sum(kernel.obligatory_bytes for kernel in modelled)
    whole_s = _p50(chain) if chain else sum(seconds.values())
    return Explanation(
        predicted=theirs / ours,
        fused_s=_p50(fused),
        large_s=seconds[True],
        small_s=seconds[False],
        gaps_s=whole_s - sum(seconds.values()),
        fused_bandwidth=traffic.effective_bandwidth(ours, _p50(fused)),
        eager_bandwidth=traffic.effective_bandwidth(theirs, seconds[True]),
    )


def _p50(row: Row) -> float:
    if row.time_s is None:
        raise ValueError(f"a row of kind {row.kind} has no time")
    return row.time_s.p50
