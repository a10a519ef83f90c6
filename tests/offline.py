"""Compile kernels for GPUs that are not there: `python offline.py`, jobs in, measurements out.

Compiling needs a process in which Triton does not interpret, so this is a program of its own. It
calls the package's own launchers and stops each launch after the compiler: what is compiled is what
would run, arguments, options and all. Each line of standard input is JSON, a list of `Job`; it is
answered on standard output by a line: for each job a list of `Compiled`, one for each kernel of the
launch.
"""

from __future__ import annotations

import functools
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
FEW_MEANT = (1, 100, 200, 1024)  # what few stands for: each has tiles of its own on a GPU


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
    only_spread: bool = False  # stop before machine code: only the spread is looked at


class Compiled(NamedTuple):
    """Tell what one kernel takes from the machine; sizes in bytes; None where no code was made."""

    kernel: str
    n_threads: int
    n_registers: int | None
    n_shared_bytes: int | None
    n_spill_bytes: int | None  # per thread: the stack that holds spilled registers
    assembly: str  # a digest of the PTX or the AMD assembly
    spread: str  # how a row that is summed lies over elements of a thread, lanes and warps
    handover: str  # to or from the next launch, before memory is touched: what it does, or ""
    starts_early: bool  # whether it is launched while the kernel before it runs


SPREAD_OVER = ("sizePerThread", "threadsPerWarp", "warpsPerCTA")


class OfflineDriver:
    """Stand for a driver: Triton asks it which target is current, and nothing else."""

    def __init__(self, target: Any, *, only_spread: bool) -> None:
        self.target = target
        self.only_spread = only_spread

    def get_current_target(self) -> Any:
        """Name the GPU to compile for."""
        return self.target

    def get_current_device(self) -> Any:
        """Name the device; compiled kernels are kept by it."""
        return self.target, self.only_spread

    def get_current_stream(self, device: Any = None) -> int:
        """Return the default stream, on which nothing is launched."""
        del device
        return 0


def use_target(name: str, *, only_spread: bool) -> None:
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
    triton.runtime.driver.set_active(OfflineDriver(target, only_spread=only_spread))


def stop_before_code() -> None:
    """Make the compiler for NVIDIA end at layouts, under a key of its own, where no more is asked.

    Layouts are final in TTGIR, and the stages after it take most of the time.
    """
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages, digest = CUDABackend.add_stages, CUDABackend.hash

    def without_code(ir: Any, metadata: dict[str, Any]) -> str:
        name = re.search(r"tt\.func public @(\w+)", str(ir))[1]
        metadata |= {"name": name, "shared": None}
        return ""

    def add_fewer(self: Any, stages: dict[str, Any], *args: Any) -> None:
        add_stages(self, stages, *args)
        if triton.runtime.driver.active.only_spread:
            stages |= {"llir": without_code, "ptx": lambda *_: "", "cubin": lambda *_: b""}

    def own_digest(self: Any) -> str:
        return digest(self) + "-only_spread" * triton.runtime.driver.active.only_spread

    CUDABackend.add_stages, CUDABackend.hash = add_fewer, own_digest


def stop_before_launch(compiled: list[Any]) -> dict[str, int]:
    """Make every launch end with its compiled kernel in `compiled`; return options to add."""
    from triton.runtime.jit import JITFunction

    run, options = JITFunction.run, {}

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
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
    tiling.reduce_cols = lambda N, _, **early: reduce_cols(N, gpu, **early)
    tiling.reduce_rows = lambda N, _, **early: reduce_rows(N, gpu, **early)
    tiling.dx_rows = lambda _, *args: dx_rows(meant[0], *args)
    tiling.dw_stages = lambda _, *args: dw_stages(meant[0], *args)
    tiling.dw_rows = lambda _, N, num_warps, __: dw_rows(meant[0], N, num_warps, gpu)
    tiling.dw_cols = lambda _, N, __: dw_cols(meant[0], N, gpu)
    tiling.one_row_per_sm = lambda N, dtype, _: one_row_per_sm(N, dtype, gpu)
    team, resident_team = tiling.team, tiling.resident_team
    tiling.team = lambda N, _: team(N, gpu)
    tiling.resident_team = lambda _: resident_team(gpu)
    tiling.patience = lambda _: tiling.PATIENCE
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


@functools.cache
def measure(kernel: Any) -> Compiled:
    """Read from a compiled kernel what it takes from the machine."""
    metadata, assembly = kernel.metadata, kernel.asm.get("ptx") or kernel.asm.get("amdgcn", "")
    if not assembly:
        n_registers = n_spill_bytes = None
    elif "ptx" in kernel.asm:
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
        handover(assembly),
        getattr(metadata, "launch_pdl", False),
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


def handover(assembly: str) -> str:
    """Return what PTX does about the launch before or after, where that comes before any access."""
    first = re.search(r"griddepcontrol\.(\w+)|(?:ld|st|cp\.async\S*)\.global", assembly)
    return (first and first[1]) or ""


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
    """Compile the jobs of every line of standard input."""
    compiled: list[Any] = []
    options = stop_before_launch(compiled)
    stop_before_code()
    meant = pretend_gpu()
    for line in sys.stdin:
        results = []
        for job in (Job(*fields) for fields in json.loads(line)):
            use_target(job.target, only_spread=job.only_spread)
            options.clear()
            if job.force_stages:
                options["num_stages"] = job.force_stages
            launch(job, meant)
            results.append([measure(kernel) for kernel in compiled])
            compiled.clear()
        sys.stdout.write(json.dumps(results) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
