"""What is searched, what is pruned and what ships, and why (decision D4).

Pinned, because correctness or a row's bits hang on it, is all of `tiling.py`. Searched, because
only speed hangs on it: how many warps share a tile and how many tiles a loop keeps in flight.

The search runs once per kernel, N, dtypes and device, on an input made from N and dtype alone. It
never sees M: the number of warps sets the order in which a row is summed, so a choice that followed
M, or the batch that came first (`triton.autotune` times that one, and wraps nothing here), would
let a row's last bit depend on the rows beside it.

`RMSNORM_REF_TUNING=fixed`, or `set_mode("fixed")`, takes the shipped table: the same bits on every
run and machine of a kind, a cheap first call, safe to capture in a CUDA graph.
"""

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import interpreter, tiling
from .table import EXCEPTIONS, SHIPPED, Config

# ---- Searched ---------------------------------------------------------------------------------

WARPS = (1, 2, 4, 8, 16, 32)
STAGES = (1, 2, 3, 4)

# The least a challenger must gain on the shipped choice, as a share of its time: below that a
# difference is noise, and taking it would only make bits differ from one process to the next.
NOISE = 0.02
REMATCHES = 2  # as many more wins, side by side: a challenger is the luckiest of many samples
TRIAL_BYTES = 64 * 2**20  # of x in a trial: more than the L2 holds, so that HBM is what is timed
BURST = 8  # launches in a sample: one alone, on a cold cache, ranks configs otherwise


class Space(NamedTuple):
    """One kernel's share of the search."""

    tile_elements: Callable[[int], int]  # of N: elements that all warps of a program share
    most_per_thread: int  # elements; above it the kernel's live values spill
    pipelined: bool  # whether a loop keeps `num_stages` tiles of x and dy in flight
    teams: bool = False  # whether an SM must have room for all the programs that share its rows


def _elements(tile: tiling.Tile) -> int:
    return tile.block_size * tile.rows


SPACES = {
    "forward": Space(lambda N: _elements(tiling.forward_tile(N)), 64, pipelined=False),
    "backward": Space(lambda N: _elements(tiling.backward_tile(N)), 32, pipelined=True),
    "wide_forward": Space(tiling.forward_chunk, 32, pipelined=False),
    "wide_backward": Space(lambda _: tiling.TEAM_COLS, 32, pipelined=False, teams=True),
}


def pruned(
    path: str, N: int, dtype: torch.dtype, warp_size: int = 32, shared_bytes: int = 232448
) -> dict[Config, str | None]:
    """Return every config of the search with the reason that rules it out, or None if it is tried.

    Args:
        path: a key of `SPACES`.
        N: columns.
        dtype: of x.
        warp_size: threads in a warp, 64 on some AMD devices.
        shared_bytes: shared memory one program may have.
    """
    space = SPACES[path]
    elements = space.tile_elements(N)
    reasons: dict[Config, str | None] = {}
    for config in itertools.starmap(Config, itertools.product(WARPS, STAGES)):
        threads = config.num_warps * warp_size
        per_thread = elements / threads
        reason = None
        if not space.pipelined and config.num_stages > 1:
            reason = "no pipelined loop: the compiled code is the same for every num_stages"
        elif threads > 1024:
            reason = f"{threads} threads: a program may have 1024"
        elif per_thread < 16 // dtype.itemsize:
            reason = f"{per_thread:g} elements per thread: less than one 16-byte load each"
        elif per_thread > space.most_per_thread:
            reason = f"{per_thread:g} elements per thread: live values spill to memory"
        elif space.teams and per_thread * dtype.itemsize < tiling.TEAM_BYTES_PER_THREAD:
            reason = f"{threads} threads: not all programs of the launch would fit on the SMs"
        elif space.pipelined:
            n_bytes = 2 * (config.num_stages - 1) * elements * dtype.itemsize
            if n_bytes > shared_bytes:
                reason = f"{n_bytes} bytes of shared memory: a program may have {shared_bytes}"
        reasons[config] = reason
    return reasons


# ---- Taken from the table ----------------------------------------------------------------------


def shipped(
    path: str, N: int, dtype: torch.dtype, warp_size: int = 32, shared_bytes: int = 232448
) -> Config:
    """Return the table's choice for rows of N columns of a dtype.

    Where a device cannot launch it (64-wide warps, less shared memory), the nearest config that the
    device can launch takes its place. Arguments are those of `pruned`.
    """
    exception = EXCEPTIONS.get((path, tiling.next_power_of_2(N), dtype.itemsize))
    wanted = exception or SHIPPED[path][SPACES[path].tile_elements(N)]
    reasons = pruned(path, N, dtype, warp_size, shared_bytes)
    return min(
        (config for config, reason in reasons.items() if reason is None),
        key=lambda config: (
            abs(config.num_warps.bit_length() - wanted.num_warps.bit_length()),
            abs(config.num_stages - wanted.num_stages),
        ),
        default=wanted,
    )


# ---- Choosing ---------------------------------------------------------------------------------

_MODES = ("search", "fixed")
_mode: str | None = None
_chosen: dict[tuple[Any, ...], Config] = {}
_prepared: dict[tuple[Any, ...], Callable[..., None]] = {}
Build = Callable[..., Callable[..., None]]
Trial = Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]


def mode() -> str:
    """Return "search" or "fixed": what `set_mode` said, else RMSNORM_REF_TUNING, else "search"."""
    found = _mode or os.environ.get("RMSNORM_REF_TUNING") or "search"
    if found not in _MODES:
        raise ValueError(
            f"RMSNORM_REF_TUNING is {found!r}; it must be 'search' or 'fixed', or be left unset"
        )
    return found


def set_mode(new: str | None) -> None:
    """Choose between "search" and "fixed" for all calls from now on; None: as RMSNORM_REF_TUNING.

    Args:
        new: "search" (time configs at the first call of each width), "fixed" (the table), or None.

    Raises:
        ValueError: any other word.

    Example:
        >>> set_mode("fixed"); mode(); set_mode(None)
        'fixed'
    """
    global _mode
    if new is not None and new not in _MODES:
        raise ValueError(f"mode is {new!r}; it must be 'search', 'fixed' or None")
    _mode = new
    _chosen.clear()
    _prepared.clear()


def chosen() -> dict[tuple[Any, ...], Config]:
    """Return what has been chosen so far: {(path, N, dtype of x, dtype of w, device): Config}."""
    return dict(_chosen)


def prepared(
    path: str,
    build: Build,
    x: torch.Tensor,
    w: torch.Tensor,
    trial: Trial,
    *variant: bool,
    searched: Build | None = None,
) -> Callable[..., None]:
    """Return the launch of `path` for these dtypes and this N, built at the first call.

    Args:
        path: a key of `SPACES`.
        build: `(N, dtype of x, device, config, *variant) -> launch`.
        x: any tensor of the call's dtype and device.
        w: [N].
        trial: `(x, w) -> arguments of a launch`, the input of the search.
        variant: what else a compiled kernel depends on: which gradients are asked for.
        searched: the build that the search times, where it is not `build` itself.
    """
    key = (build, w.numel(), x.dtype, w.dtype, x.device, *variant)
    launch = _prepared.get(key)
    if launch is None:
        config = _config(path, searched or build, x, w, trial)
        launch = _prepared[key] = build(w.numel(), x.dtype, x.device, config, *variant)
    return launch


def trial_rows(N: int, dtype: torch.dtype) -> int:
    """Return how many rows a trial has: `TRIAL_BYTES` of x, whatever the caller's M."""
    return max(1, TRIAL_BYTES // (N * dtype.itemsize))


def _config(path: str, build: Build, x: torch.Tensor, w: torch.Tensor, trial: Trial) -> Config:
    key = (path, w.numel(), x.dtype, w.dtype, x.device)
    if key not in _chosen:
        if mode() == "fixed" or interpreter.interprets():
            _chosen[key] = shipped(path, w.numel(), x.dtype, *_limits(x.device))
        else:
            _chosen[key] = _search(path, build, x, w, trial)
    return _chosen[key]


@functools.lru_cache(maxsize=64)
def _limits(device: torch.device) -> tuple[int, int]:
    """Return (threads in a warp, bytes of shared memory a program may have) of a device."""
    import triton

    if device.type != "cuda":
        return 32, 232448  # interpreted: nothing is limited, the table is taken as it is
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    warp_size = torch.cuda.get_device_properties(device).warp_size
    return warp_size, int(properties["max_shared_mem"])


def _search(path: str, build: Build, x: torch.Tensor, w: torch.Tensor, trial: Trial) -> Config:
    import triton.testing
    from triton.runtime.errors import OutOfResources

    from .launch import compile_together

    N, dtype, device = w.numel(), x.dtype, x.device
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph is being captured and N = {N} has not been tuned yet: call rmsnorm once "
            "with this N and dtype before the capture, or set RMSNORM_REF_TUNING=fixed"
        )
    reasons = pruned(path, N, dtype, *_limits(device))
    default = shipped(path, N, dtype, *_limits(device))
    tried = [config for config, reason in reasons.items() if reason is None]
    if tried == [default]:
        return default
    times_ms: dict[Config, float] = {}
    with torch.no_grad():
        arguments = trial(x, w)
        launches = {config: build(N, dtype, device, config) for config in tried}

        def time_ms(config: Config) -> float:
            def burst() -> None:
                for _ in range(BURST):
                    launches[config](*arguments)

            return float(triton.testing.do_bench(burst, warmup=5, rep=20, quantiles=[0.5]))

        compile_together(functools.partial(launch, *arguments) for launch in launches.values())
        for config in launches:
            try:
                times_ms[config] = time_ms(config)
            except OutOfResources:
                continue  # this device has less than the rules above assume
        best = min(times_ms, key=times_ms.__getitem__, default=default)
        if default not in times_ms or best == default:
            return best
        gain = 1 - NOISE
        wins = times_ms[best] < gain * times_ms[default] and all(
            time_ms(best) < gain * time_ms(default) for _ in range(REMATCHES)
        )
        return best if wins else default
