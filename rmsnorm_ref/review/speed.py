"""Effective bandwidth of a candidate beside the ceiling, the reference and eager."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from rmsnorm_ref import traffic
from rmsnorm_ref.measure import kernel_rows, peers, timing
from rmsnorm_ref.measure.cells import Cell
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD
from rmsnorm_ref.measure.session import OURS, Session

if TYPE_CHECKING:
    from rmsnorm_ref.measure.calls import Call as TimedCall
    from rmsnorm_ref.measure.calls import InputSet
    from rmsnorm_ref.measure.schema import OnePass

    from .candidate import Call

QUICK = ((4096, 4096),)
FULL = ((512, 2048), (2048, 4096), (4096, 4096), (4096, 8192), (16384, 1024), (2048, 16384))
NAME = "candidate"


class _Unverified(Session):
    """Time the candidate whatever it computes: the review has judged it, and says so beside."""

    candidate: Call

    def calls(self, cell: Cell, inputs: InputSet) -> dict[str, TimedCall]:
        """Return the contenders of a cell, the candidate as it is."""
        found = super().calls(cell, inputs)
        f = self.candidate
        return found | {NAME: lambda x, w: f(x, w, peers.EPS)}


def measure(f: Call, full: bool, dtype: str, gives: str) -> dict[str, Any]:
    """Return a row per cell, pass and contender, and what was noted on the way.

    Raises:
        timing.NoGpuError: there is no GPU.
    """
    device = timing.require_gpu()
    properties = torch.cuda.get_device_properties(device)
    passes: tuple[OnePass, ...] = (FORWARD, BACKWARD) if gives == "xw" else (FORWARD,)
    session = _Unverified(device, properties.L2_cache_size, passes)
    session.candidate = f
    known = peers.contenders()
    session.peers = {name: known[name] for name in ("eager", "F.rms_norm")}
    rows: list[dict[str, Any]] = []
    for M, N in FULL if full else QUICK:
        cell = Cell("seed", M, N, getattr(torch, dtype))
        for row in kernel_rows.measure(session, cell):
            assert row.time_s is not None
            assert row.obligatory_bytes is not None
            per_s = traffic.effective_bandwidth(row.obligatory_bytes, row.time_s.p50)
            ceiling_s = row.ceiling.time_s if row.ceiling else None
            rows.append(
                {
                    "contender": "reference" if row.contender == OURS.name else row.contender,
                    "pass": row.pass_,
                    "M": M,
                    "N": N,
                    "dtype": dtype,
                    "time_s": row.time_s.p50,
                    "quantiles_s": list(asdict(row.time_s).values()),
                    "bandwidth_bytes_per_s": per_s,
                    "share_of_ceiling": ceiling_s / row.time_s.p50 if ceiling_s else None,
                    "flags": list(row.flags),
                }
            )
    return {"rows": rows, "notes": session.notes}
