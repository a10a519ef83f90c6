"""Every launch that could happen, compiled for GPUs that are not there, and held to their limits.

The interpreter accepts what the compiler refuses, and the compiler accepts what a GPU cannot
launch. So configs are compiled by `offline.py`, through the package's own launchers, and what they
take is compared with what a GPU of the target has.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from compilers import Compilers
from offline import FEW, FEW_MEANT, MANY, Compiled, Job

from rmsnorm_ref import tiling, tuning
from rmsnorm_ref.table import Config

if TYPE_CHECKING:
    from collections.abc import Iterator


class Limits(NamedTuple):
    """Hold what one program may have on a target."""

    warp_size: int
    n_shared_bytes: int


# Shared memory a block may ask for: CUDA programming guide, "Technical Specifications per Compute
# Capability" (163, 227 and 227 KiB), and the 64 KiB of LDS in the CDNA 3 instruction set manual.
TARGETS = {
    "sm_80": Limits(32, 163 * 1024),
    "sm_90": Limits(32, 227 * 1024),
    "sm_100": Limits(32, 227 * 1024),
    "gfx942": Limits(64, 64 * 1024),
}
MOST_THREADS = 1024

# A thread has 255 registers of 4 bytes. What it spills goes through L1 twice, where a few values of
# a wide row do not show in the time; past a quarter of the registers the compiler has given up (a
# 65536-wide row in one tile spills kilobytes). What ships gets an eighth on its own target.
MOST_SPILL_BYTES = 255
MOST_SPILL_BYTES_SHIPPED = 127
CHOSEN_ON = "sm_90"  # the whole search is compiled, of other targets its corners

# Narrow rows that share a tile, one row per tile, one chunk, several, the widest; some of them odd.
WIDTHS = (64, 128, 256, 513, 1560, 2048, 4096, 8192, 16384, 20000, 32768, 40000, 65536)
MASKED = (1560, 20000, 40000)  # tiles of a width above that is searched whole: these get corners
WHOLE = os.environ.get("RMSNORM_REF_COMPILE") == "whole"
WIDTHS_ELSEWHERE = (64, 513, 2048, 8192, 16384, 32768, 65536)
ONE_PER_PATH = (513, 8192, 20000, 40000)


def backwards_of(N: int) -> list[str]:
    """Name the backwards that serve rows of N columns, few of them and many."""
    return sorted(
        {tiling.backward_path(M, N, torch.device("cpu"), torch.bfloat16) for M in (FEW, MANY)}
    )


def paths_of(N: int) -> list[str]:
    """Name all that rows of N columns may launch."""
    return ["forward" if N <= tiling.ONE_TILE_MAX else "wide_forward", *backwards_of(N)]


def shipped(path: str, N: int, dtype: str) -> Config:
    """Give the table's choice; few rows take the one for many."""
    searched = "backward" if path == "few_rows_backward" else path
    return tuning.shipped(searched, N, getattr(torch, dtype))


def launchable(target: str, path: str, N: int, dtype: str) -> list[Config]:
    """List what the search would try: all of it on one target, corners elsewhere and if masked.

    RMSNORM_REF_COMPILE=whole in the environment: all of it everywhere, which takes minutes more.
    """
    searched = "backward" if path == "few_rows_backward" else path
    reasons = tuning.pruned(searched, N, getattr(torch, dtype), *TARGETS[target])
    tried = [config for config, reason in reasons.items() if reason is None]
    tried = tried or [shipped(path, N, dtype)]  # one warp of 64 threads is a program of a team
    if path == "few_rows_backward":
        tried = [config for config in tried if config.num_stages in {1, 3}]  # pipelined or not
    if WHOLE or (target == CHOSEN_ON and N not in MASKED):
        return tried
    fewest, most = min(c.num_warps for c in tried), max(c.num_warps for c in tried)
    deepest = max(c for c in tried if c.num_warps == fewest)
    corners = {deepest, max(c for c in tried if c.num_warps == most)}
    return sorted(corners | ({shipped(path, N, dtype)} & set(tried)))


def jobs_for(target: str) -> list[Job]:
    """List the launches to compile for a target."""
    return [
        Job(target, path, N, dtype, dtype, *config)
        for N in (WIDTHS if WHOLE or target == CHOSEN_ON else WIDTHS_ELSEWHERE)
        for dtype in ("bfloat16", "float32")
        for path in paths_of(N)
        for config in launchable(target, path, N, dtype)
    ]


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compilers]:
    """Keep the processes that compile, and what they compiled, for all tests of this file."""
    kept = Compilers(tmp_path_factory.mktemp("triton"))
    yield kept
    kept.close()


def faults(job: Job, kernel: Compiled) -> list[str]:
    """List the limits of the target that a compiled kernel breaks."""
    config = Config(job.num_warps, job.num_stages)
    ships = shipped(job.path, job.N, job.dtype) == config
    strict = ships and job.target == CHOSEN_ON
    allowed = MOST_SPILL_BYTES_SHIPPED if strict else MOST_SPILL_BYTES
    measured = (
        ("threads", kernel.n_threads, MOST_THREADS),
        ("bytes of shared memory", kernel.n_shared_bytes, TARGETS[job.target].n_shared_bytes),
        ("bytes spilled per thread", kernel.n_spill_bytes, allowed),
    )
    return [
        f"{kernel.kernel}: {n} {what}, limit {limit}: {job}"
        for what, n, limit in measured
        if n > limit
    ]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles_within_the_limits(target: str, compilers: Compilers) -> None:
    """What the search would try and what ships fits the target's threads, memory and registers."""
    jobs = jobs_for(target)
    results = compilers.compile(jobs)
    found = [
        fault
        for job, kernels in zip(jobs, results, strict=True)
        for kernel in kernels
        for fault in faults(job, kernel)
    ]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_every_variant_compiles_to_its_kernels(compilers: Compilers) -> None:
    """Each wanted gradient, and w in another dtype, launches just the kernels that it needs."""
    jobs = [
        Job(CHOSEN_ON, path, N, x_dtype, w_dtype, *config, *needs)
        for N in ONE_PER_PATH
        for path in backwards_of(N)
        for x_dtype, w_dtype in (("bfloat16", "float32"), ("float16", "bfloat16"))
        if w_dtype != "float32" or path != "few_rows_backward"  # it takes w of x's size alone
        for config in [shipped(path, N, x_dtype)]
        for needs in ((True, True), (True, False), (False, True))
    ]
    for job, kernels in zip(jobs, compilers.compile(jobs), strict=True):
        name = job.path.replace("backward", "backward_kernel")
        expected = [f"rmsnorm_{name}" if job.path == "backward" else name]
        few = job.path == "few_rows_backward"
        repeats = len(FEW_MEANT)
        expected = expected * repeats if few else expected + ["reduce_dw_kernel"] * job.needs_dw
        assert [kernel.kernel for kernel in kernels] == expected
        assert not [fault for kernel in kernels for fault in faults(job, kernel)]


@pytest.mark.slow
def test_num_stages_changes_only_pipelined_loops(compilers: Compilers) -> None:
    """Paths whose stages are pruned give the same PTX for each; the others give different PTX."""
    jobs = [
        Job(
            CHOSEN_ON,
            path,
            N,
            "bfloat16",
            "bfloat16",
            config.num_warps,
            stages,
            force_stages=stages,
        )
        for N in ONE_PER_PATH
        for path in paths_of(N)
        if path in tuning.SPACES
        for config in [shipped(path, N, "bfloat16")]
        for stages in tuning.STAGES
    ]
    assembly: dict[tuple[str, int], set[str]] = {}
    for job, kernels in zip(jobs, compilers.compile(jobs), strict=True):
        assembly.setdefault((job.path, job.N), set()).add(kernels[0].assembly)
    for (path, _), distinct in assembly.items():
        assert len(distinct) == (len(tuning.STAGES) if tuning.SPACES[path].pipelined else 1), path


@pytest.mark.slow
@pytest.mark.parametrize(("target", "early"), [("sm_80", 0), ("sm_90", 1), ("sm_100", 1)])
def test_a_reduction_that_is_early_waits_first(
    compilers: Compilers, target: str, early: int
) -> None:
    """The one-tile kernel lets its successor in, which waits before it loads: where GPUs can.

    Without a dw the next launch is somebody else's, and is not let in.
    """
    jobs = [
        Job(
            target,
            path,
            N,
            "bfloat16",
            "bfloat16",
            *shipped(path, N, "bfloat16"),
            needs_dw=needs_dw,
        )
        for N in ONE_PER_PATH
        for path in paths_of(N)
        for needs_dw in (True, False)
    ]
    for job, kernels in zip(jobs, compilers.compile(jobs), strict=True):
        found = [(kernel.handover, kernel.starts_early) for kernel in kernels]
        expected = [("", False)] * len(kernels)
        if job.path == "backward" and early and job.needs_dw:
            expected = [("launch_dependents", False), ("wait", True)]
        assert found == expected, job


@pytest.mark.slow
def test_large_data_compiles_too(compilers: Compilers) -> None:
    """The L2 policy of large data reaches the one-tile forward, within the limits, and no other."""
    jobs = [
        Job(CHOSEN_ON, path, N, "bfloat16", "bfloat16", *shipped(path, N, "bfloat16"), large=large)
        for N in ONE_PER_PATH
        for path in paths_of(N)
        for large in (False, True)
    ]
    results = compilers.compile(jobs)
    for job, small, large in zip(jobs[::2], results[::2], results[1::2], strict=True):
        assert not [fault for kernel in large for fault in faults(job, kernel)]
        same = [a.assembly == b.assembly for a, b in zip(small, large, strict=True)]
        assert same == [job.path != "forward", *[True] * (len(same) - 1)], job


@pytest.mark.slow
def test_few_rows_are_spread_over_threads_as_many_rows_are(compilers: Compilers) -> None:
    """Whatever the search chooses, a row's sum is taken over the same threads in both kernels.

    This is what makes dx independent of the number of rows: the order of the additions is that of
    elements in a thread, lanes, warps.
    """
    jobs = [
        Job(CHOSEN_ON, path, N, dtype, dtype, *config, only_spread=True)
        for N in (40, 128, 200, 512, 768, 2048, 4096, 8192)  # every BLOCK_SIZE, full or masked
        for dtype in ("bfloat16", "float32")
        for config in launchable(CHOSEN_ON, "few_rows_backward", N, dtype)
        for path in ("backward", "few_rows_backward")
    ]
    jobs += [
        Job(
            CHOSEN_ON,
            path,
            N,
            "float16",
            "bfloat16",
            config.num_warps,
            stages,
            needs_dw=needs_dw,
            only_spread=True,
        )
        for N in (64, 512, 1024, 2048, 8192)
        for config in [shipped("backward", N, "float16")]
        for stages, needs_dw in ((config.num_stages, False), (2, True), (4, True))
        for path in ("backward", "few_rows_backward")
    ]
    jobs += [
        Job(CHOSEN_ON, path, N, dtype, w_dtype, *config, only_spread=True)
        for N in (tiling.FEW_ROWS_MIXED_MIN + 7, 8192)
        for dtype, w_dtype in (("bfloat16", "float32"), ("float32", "bfloat16"))
        for config in launchable(CHOSEN_ON, "few_rows_backward", N, dtype)
        for path in ("backward", "few_rows_backward")
    ]
    found = compilers.compile(jobs)
    for job, many, few in zip(jobs[::2], found[::2], found[1::2], strict=True):
        assert many[0].spread, job
        assert {kernel.spread for kernel in few} == {many[0].spread}, job


@pytest.mark.slow
def test_the_cap_on_registers_costs_no_spill(compilers: Compilers) -> None:
    """Where one wave is made by a cap, 32 registers are enough, and the kernel would take more."""
    jobs = [
        Job(CHOSEN_ON, "forward", N, dtype, w_dtype, *config, capped=capped, needs_rstd=needs_rstd)
        for N in (1504, 2048, 3000, 4096)
        for dtype, w_dtype in (("bfloat16", "bfloat16"), ("float16", "bfloat16"))
        for config in [shipped("forward", N, dtype)]
        for needs_rstd in (False, True)
        for capped in (False, True)
    ]
    results = compilers.compile(jobs)
    for job, (free,), (capped,) in zip(jobs[::2], results[::2], results[1::2], strict=True):
        assert (capped.n_registers, capped.n_spill_bytes) == (32, 0), job
        assert capped.n_registers <= free.n_registers <= 40
        n_sm, threads = 132, 2048
        wave = tiling.one_wave(job.N, torch.bfloat16, job.num_warps, n_sm, threads)
        per_sm = [65536 // (n * free.n_threads) for n in (40, 32)]
        assert (wave.start - 1, wave.stop - 1) == (n_sm * per_sm[0], n_sm * per_sm[1])
        if not job.needs_rstd:
            assert free.n_registers > capped.n_registers, "nothing to cap"


def test_limits_are_felt() -> None:
    """A kernel one unit above each limit is found at fault, and one that meets them all is not."""
    job = Job(CHOSEN_ON, "forward", 2048, "float16", "float16", 2, 1)
    most_shared = TARGETS[CHOSEN_ON].n_shared_bytes
    fits = Compiled(
        "kernel", MOST_THREADS, 32, most_shared, MOST_SPILL_BYTES, "", "", "", starts_early=False
    )
    assert not faults(job, fits)
    for name in ("n_threads", "n_shared_bytes", "n_spill_bytes"):
        assert len(faults(job, fits._replace(**{name: getattr(fits, name) + 1}))) == 1
    ships = job._replace(num_warps=tuning.shipped("forward", 2048, torch.float16).num_warps)
    assert len(faults(ships, fits)) == 1
