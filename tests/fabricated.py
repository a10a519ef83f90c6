"""A recording with rows for every figure, none of them measured."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch

from rmsnorm_ref import tiling, traffic, tuning
from rmsnorm_ref.measure import pinned
from rmsnorm_ref.measure.recording import (
    Ceiling,
    Config,
    Provenance,
    Quantiles,
    Recording,
    Row,
)
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = tuple(itertools.product((512, 1024, 2048, 4096), (2048, 4096, 8192)))
CELLS = {
    "seed": SEED,
    "narrow": ((262144, 128), (65536, 512), (524288, 64), (131072, 256)),
    "few": tuple(itertools.product((1, 16, 64, 128, 256), (2048, 8192))),
}
# How far below the ceiling each contender runs; made up, and spread as real ones are.
SHARES = {
    "ours": 0.97, "eager": 0.15, "eager_fp32": 0.08, "F.rms_norm": 0.66, "torch.compile": 0.93,
    "liger": 0.94, "fla": 0.95, "flash_attn": 0.955, "quack": 0.98,
}  # fmt: skip
PASSES = (FORWARD, BACKWARD)
PATHS = {
    "forward": tiling.forward_path,
    "backward": lambda N: tiling.backward_path(4096, N, traffic.GPU, torch.bfloat16),
}
WIDTHS = (64, 128, 512, 2048, 4096, 8192, 16384, 32768, 65536)
LAUNCH_S, BUS = 2e-6, 4.2e12


def kernel_row(section: str, contender: str, pass_: str, M: int, N: int, **fields: Any) -> Row:
    """Make a row whose time follows from its bytes, a launch and its contender's share."""
    n_bytes = (2 if pass_ == FORWARD else 3) * M * N * 2
    ceiling_s = LAUNCH_S + n_bytes / BUS
    time_s = ceiling_s / SHARES[contender] * (1 + 0.02 * (M.bit_length() % 5))
    fields = {"kind": "kernel", "n_samples": 15, "obligatory_bytes": n_bytes, **fields}
    return Row(
        section=section, contender=contender, pass_=pass_, M=M, N=N, dtype="bfloat16",
        w_dtype="bfloat16", time_s=Quantiles(0.98 * time_s, time_s, 1.03 * time_s),
        ceiling=Ceiling("torch.neg", ceiling_s), **fields,
    )  # fmt: skip


def slowed(row: Row, factor: float) -> Row:
    """Return the row with its times multiplied."""
    assert row.time_s is not None
    times_s = (factor * time_s for time_s in dataclasses.astuple(row.time_s))
    return dataclasses.replace(row, time_s=Quantiles(*times_s))


def untimed_row(kind: str, contender: str, pass_: str, M: int, N: int, detail: Any) -> Row:
    """Make a row of a kind that has no times."""
    return Row(
        kind=kind, section=f"{kind}s", contender=contender, pass_=pass_, M=M, N=N,
        dtype="bfloat16", w_dtype="bfloat16", detail=detail,
    )  # fmt: skip


def _kernels() -> Iterator[Row]:
    for pass_ in PASSES:
        for section, shapes in CELLS.items():
            for (M, N), contender in itertools.product(shapes, SHARES):
                yield kernel_row(section, contender, pass_, M, N)
        for i, contender in itertools.product(range(11), ("ours", "F.rms_norm")):
            yield kernel_row("sizes", contender, pass_, 64 << i, 4096)
            if i < 6:
                flags = ("above_ceiling", "fits_in_l2")
                row = kernel_row(
                    "sizes", contender, pass_, 64 << i, 4096, kind="resident", flags=flags
                )
                yield slowed(row, 0.8)
            yield kernel_row("widths", contender, pass_, 2**25 >> (6 + i), 64 << i)
        for N, contender in itertools.product((769, 4095, 5120, 7168), ("ours", "F.rms_norm")):
            yield kernel_row("widths", contender, pass_, 2**25 // N, N)


def _searched() -> Iterator[Row]:
    for pass_, N in itertools.product(PASSES, WIDTHS):
        path = PATHS[pass_](N)
        reasons = tuning.pruned(path, N, torch.bfloat16)
        ships = tuning.shipped(path, N, torch.bfloat16)
        for i, config in enumerate(c for c, reason in reasons.items() if reason is None):
            row = kernel_row("configs", "ours", pass_, 2**25 // N, N, kind="config")
            cost = 1 if config == ships else 1 + 0.02 * i**2
            detail = {"shipped": config == ships}
            row = dataclasses.replace(row, path=path, config=Config(*config), detail=detail)
            yield slowed(row, cost)
    for N, (knob, values) in itertools.product(
        (2048, 4096, 8192), (("programs_per_sm", (1, 2, 4)), ("num_stages", (1, 2, 3, 4)))
    ):
        for value in values:
            detail = {"knob": knob, "value": value}
            row = kernel_row(
                "ablations", "ours", "backward", 4096, N, kind="ablation", detail=detail
            )
            yield slowed(row, 1.3 + 0.1 * (value - 3) ** 2)
    for choice in pinned.CHOICES:
        for pass_, (M, N), (i, one) in itertools.product(
            choice.passes, choice.shapes, enumerate(choice.alternatives)
        ):
            detail = {"knob": choice.knob, "value": one.value}
            row = kernel_row("ablations", "ours", pass_, M, N, kind="ablation", detail=detail)
            yield slowed(row, 1 + 0.1 * i)


def _diagnosed() -> Iterator[Row]:
    for contender, (pass_, grad) in itertools.product(
        SHARES, (("forward", False), ("forward", True), ("forward+backward", True))
    ):
        detail = {"requires_grad": grad}
        row = kernel_row("host", contender, pass_, 16, 2048, kind="host", detail=detail)
        time_s = 20e-6 / SHARES[contender] * (1 + 7 * (pass_ != FORWARD) + 0.5 * grad)
        quantiles = Quantiles(0.95 * time_s, time_s, 1.1 * time_s)
        yield dataclasses.replace(row, ceiling=None, obligatory_bytes=None, time_s=quantiles)
    for n_gpus in (1, 2):
        row = kernel_row("scaling", "ours", BACKWARD, 32768, 8192, kind="scaling")
        both: dict[str, Any] = {"pass_": "forward+backward", "obligatory_bytes": None}
        yield dataclasses.replace(row, ceiling=None, detail={"n_gpus": n_gpus}, **both)
    for (M, N), contender in itertools.product(SEED, ("ours", "F.rms_norm", "eager", "eager_fp32")):
        for pass_, tensors in (("forward", ("y",)), ("backward", ("dx", "dw"))):
            ratio = {"ours": 0.9, "F.rms_norm": 0.95, "eager": 7.0, "eager_fp32": 1.6}[contender]
            ratios = dict.fromkeys(tensors, ratio)
            detail = {"max_ulp": ratios, "error_over_bound": ratios}
            yield untimed_row("error", contender, pass_, M, N, detail)
    shape = 4096, 4096, torch.bfloat16
    for pass_, contender in itertools.product(PASSES, ("eager", "eager_fp32")):
        spelling = "seed" if contender == "eager" else "fp32"
        chain = (traffic.eager_forward if pass_ == FORWARD else traffic.eager_backward)(
            *shape, spelling=spelling
        )
        for i, (name, steps) in enumerate(itertools.groupby(chain.steps, lambda s: s.kernel)):
            n_bytes = sum(step.n_bytes for step in steps)
            row = kernel_row("eager", contender, pass_, 4096, 4096, kind="eager_kernel")
            detail = {"kernel": "vectorized", "index": i, "steps": (name,), "n_bytes": n_bytes}
            time_s = LAUNCH_S + n_bytes / 2.5e12
            yield dataclasses.replace(
                row, time_s=Quantiles(time_s, time_s, time_s), detail=detail | {"matched": "order"}
            )
    for pass_, (M, N) in itertools.product(PASSES, ((4096, 2048), (4096, 8192), (262144, 128))):
        n_bytes = M * N * 2
        for contender, reads, writes in (("ours", 1, 1), ("eager", 4, 3)):
            detail = {
                "dram_read_bytes": int(reads * n_bytes * 1.01),
                "dram_write_bytes": int(writes * n_bytes * 0.9),
                "model_read_bytes": reads * n_bytes,
                "model_write_bytes": writes * n_bytes,
                "kernels": ("kernel",),
            }
            yield untimed_row("counter", contender, pass_, M, N, detail)


def fabricated() -> Recording:
    """Return a recording with rows for every figure, none of them measured."""
    provenance = Provenance(
        gpu="NVIDIA H200", sm_count=132, l2_bytes=60 * 2**20, memory_bytes=140 * 2**30,
        datasheet_bandwidth_bytes_per_s=4.8e12, datasheet="made up", driver="1", cuda="13.0",
        torch="2.11.0+cu130", triton="3.6.0", python="3.12.3", rmsnorm_ref="0.1.0", tuning="fixed",
        peers={}, clocks=None, date="2026-11-29T10:00:00+00:00", commit="abc1234" + 33 * "0",
        clean=True, fingerprint="0" * 64, command="none", duration_s=1.0, interrupted=False,
        notes=(),
    )  # fmt: skip
    return Recording("fabricated", provenance, (*_kernels(), *_searched(), *_diagnosed()))
