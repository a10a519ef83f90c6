"""Compile kernels for GPUs that are not there: `python offline.py`, jobs in, measurements out.

Compiling needs a process in which Triton does not interpret, so this is a program of its own. It
calls the package's own launchers and stops each launch after the compiler: what is compiled is what
would run, arguments, options and all. Read as JSON from standard input: a list of `Job`; written
to standard output: for each job a list of `Compiled`, one for each kernel of the launch.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

FEW, MANY = 2, 16  # rows of a launch: few and many to the tiling of tensors on the CPU
FEW_MEANT = (1, 200, 1024)  # what few stands for: each has tiles of its own on a GPU


class Job(NamedTuple):
    """Ask for one launch: its width and dtypes, the config to launch it with, and the target."""

    target: str  # "sm_90", "gfx942"
    path: str  # a key of tuning.SPACES, or "few_rows_backward"
    N: int
    dtype: str
    w_dtype: str
    num_warps: int
    num_stages: int
    needs_dx: bool = True
    needs_dw: bool = True
    large: bool = False  # as for so many rows that the L2 policy is another
    capped: bool = False  # as for as many rows as a cap on registers makes one wave
    needs_rstd: bool = True
    force_stages: int = 0  # passed as a launch option, which no launcher does; 0: it is not


class Compiled(NamedTuple):
    """Tell what one kernel takes from the machine; sizes in bytes."""

    kernel: str
    n_threads: int
    n_registers: int
    n_shared_bytes: int
    n_spill_bytes: int  # per thread: the stack that holds spilled registers
    assembly: str  # a digest of the PTX or the AMD assembly
    spread: str  # how a row that is summed lies over elements of a thread, lanes and warps


SPREAD_OVER = ("sizePerThread", "threadsPerWarp", "warpsPerCTA")


class OfflineDriver:
    """Stand for a driver: Triton asks it which target is current, and nothing else."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """Name the GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Number the device; compiled kernels are kept by it."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the default stream, on which nothing is launched."""
        del device
        return 0


def use_target(name: str) -> None:
    """Make `name` the current GPU, and the package see it as its device."""
    import triton
    from triton.backends.compiler import GPUTarget

    from rmsnorm_ref import tiling

    if name.startswith("sm_"):
        target = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    else:
        target = GPUTarget("hip", name, 64)
    torch.version.hip = None if target.backend == "cuda" else "offline"  # what tiling.py looks at
    tiling.overlaps = lambda _: target.backend == "cuda" and target.arch >= 90
    triton.runtime.driver.set_active(OfflineDriver(target))


def stop_before_launch(compiled: list[Any]) -> dict[str, int]:
    """Make every launch end with its compiled kernel in `compiled`; return options to add."""
    from triton.runtime.jit import JITFunction

    run, options = JITFunction.run, {}

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        self.device_caches.clear()  # it holds the target of the launch before
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs, **options))

    JITFunction.run = warm_up
    return options


def pretend_gpu() -> list[int]:
    """Take the tiling of a GPU for tensors that lie on the CPU; return how many few rows are."""
    from rmsnorm_ref import tiling

    meant, gpu = [FEW], torch.device("cuda")
    reduce_cols, reduce_rows = tiling.reduce_cols, tiling.reduce_rows
    one_row_per_sm = tiling.one_row_per_sm
    dx_rows, dw_stages = tiling.dx_rows, tiling.dw_stages
    dw_rows, dw_cols = tiling.dw_rows, tiling.dw_cols
    tiling.reduces_early = lambda _, x: tiling.overlaps(x.device)
    tiling.reduce_cols = lambda N, _: reduce_cols(N, gpu)
    tiling.reduce_rows = lambda N, _: reduce_rows(N, gpu)
    tiling.dx_rows = lambda _, *args: dx_rows(meant[0], *args)
    tiling.dw_stages = lambda _, *args: dw_stages(meant[0], *args)
    tiling.dw_rows = lambda _, N, num_warps, __: dw_rows(meant[0], N, num_warps, gpu)
    tiling.dw_cols = lambda _, N, __: dw_cols(meant[0], N, gpu)
    tiling.one_row_per_sm = lambda N, dtype, _: one_row_per_sm(N, dtype, gpu)
    return meant


def launch(job: Job, meant: list[int]) -> None:
    """Run the launcher of one pass on a few rows, with the job's config."""
    from rmsnorm_ref import backward, forward, table, tiling, tuning

    tiling.LARGE_BYTES = 0 if job.large else sys.maxsize
    tiling.one_wave = lambda *_: range(MANY + 1) if job.capped else range(0)
    dtype, w_dtype = getattr(torch, job.dtype), getattr(torch, job.w_dtype)
    tuning.set_mode("fixed")  # and forget the launches of the job before
    tuning.shipped = lambda *_: table.Config(job.num_warps, job.num_stages)
    M = FEW if job.path == "few_rows_backward" else MANY
    x, w = torch.empty(M, job.N, dtype=dtype), torch.empty(job.N, dtype=w_dtype)
    if job.path.endswith("forward"):
        forward.launch_forward(x, job.N, w, 1e-6, needs_rstd=job.needs_rstd)
    else:
        needs = {"needs_dx": job.needs_dx, "needs_dw": job.needs_dw}
        for meant[0] in FEW_MEANT if M == FEW else (MANY,):
            tuning.set_mode("fixed")  # a kernel that is launched again is not compiled
            backward.launch_backward(x.clone(), job.N, x, job.N, w, torch.empty(M), **needs)


def measure(kernel: Any) -> Compiled:
    """Read from a compiled kernel what it takes from the machine."""
    metadata, assembly = kernel.metadata, kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    if "ptx" in kernel.asm:
        n_registers, n_spill_bytes = cubin_usage(kernel.asm["cubin"])
    else:
        # Scratch memory counts the same as a stack: registers that did not fit.
        n_registers, n_spill_bytes = (
            int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
    return Compiled(
        metadata.name,
        metadata.num_warps * metadata.target.warp_size,
        n_registers,
        metadata.shared,
        n_spill_bytes,
        hashlib.sha256(assembly.encode()).hexdigest(),
        spread(kernel.asm["ttgir"]),
    )


def spread(ir: str) -> str:
    """Read from Triton's own code how the columns lie in a sum over columns; "" without one."""
    over_columns = r'"tt.reduce"[^\n]*axis = 1.*?tensor<[^,]*, #(\w+)>\) ->'
    layout = re.search(over_columns, ir, re.DOTALL)
    if layout is None:
        return ""
    blocked = re.search(rf"^#{layout[1]} = #ttg.blocked<(.*)>$", ir, re.MULTILINE)[1]
    per = (re.search(rf"{name} = \[\d+, (\d+)\]", blocked)[1] for name in SPREAD_OVER)
    return " x ".join(per)


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Ask cuobjdump, which ships with Triton, for registers and bytes of stack per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))


def main() -> None:
    """Compile every job of standard input."""
    compiled: list[Any] = []
    options = stop_before_launch(compiled)
    meant = pretend_gpu()
    results = []
    for job in (Job(*fields) for fields in json.load(sys.stdin)):
        use_target(job.target)
        options.clear()
        if job.force_stages:
            options["num_stages"] = job.force_stages
        launch(job, meant)
        results.append([measure(kernel) for kernel in compiled])
        compiled.clear()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
