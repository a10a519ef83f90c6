"""What the sections of one run share: the GPU, the contenders, what failed, how a row is made."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

import rmsnorm_ref
from rmsnorm_ref import tiling, traffic, tuning

from . import peers, timing
from .calls import make_inputs, n_input_sets
from .cells import dtype_name
from .schema import BACKWARD, FORWARD, Ceiling, Config, OnePass, Pass, Quantiles, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .calls import Call, InputSet
    from .cells import Cell
    from .recording import Recording


class Stopped(BaseException):
    """A signal asked the run to stop; no `except Exception` on the way may swallow it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


# Most a contender may take to be built and checked on one cell; one searched for longer than this
# at 65536 x 512, and a run has to end.
PATIENCE_S = 90.0


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside if it takes longer; only where Python may set an alarm."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s to build and check")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class GpuLostError(RuntimeError):
    """A contender left the GPU in a state in which nothing runs any more. Exit code 2."""


def _build_ours(N: int, dtype: torch.dtype, eps: float = peers.EPS) -> Call:
    del N, dtype
    return lambda x, w: rmsnorm_ref.rmsnorm(x, w, eps)


OURS = peers.Peer("ours", "rmsnorm_ref", rmsnorm_ref.__version__, None, _build_ours)


@dataclass
class Session:
    """Hold what is the same for all cells of a run.

    `peers` are those that were asked for and are installed. `clock` is None for CUDA.
    `heed_signals` is called after a peer was built: importing one may take a handler away.
    `before` is a recording of an earlier run, which this one is held against.
    """

    device: torch.device
    l2_bytes: int
    passes: tuple[OnePass, ...] = (FORWARD, BACKWARD)
    peers: dict[str, peers.Peer] = field(default_factory=dict)
    clock: timing.Clock | None = None
    notes: list[str] = field(default_factory=list)
    stop_signal: int | None = None
    before: Recording | None = None
    heed_signals: Callable[[], object] = lambda: None

    def note(self, text: str) -> None:
        """Keep a remark for the recording and show it at once, above the progress bar."""
        self.notes.append(text)
        tqdm.write(f"rmsnorm_ref: {text}", file=sys.stderr)

    def failed(self, where: str, name: str, error: Exception) -> None:
        """Note that a contender is missing somewhere, and make sure that the others can go on.

        Raises:
            Stopped: a signal came, and whatever it interrupted raised something of its own.
            GpuLostError: the GPU no longer answers.
        """
        if self.stop_signal is not None:
            raise Stopped(self.stop_signal) from error
        reason = "out of memory" if isinstance(error, torch.OutOfMemoryError) else _one_line(error)
        self.note(f"{where}: {name} is missing: {reason}")
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise GpuLostError(f"{where}: {name} broke the GPU's context: {reason}") from lost
        torch.cuda.empty_cache()

    def inputs(self, cell: Cell, n_sets: int | None = None) -> list[InputSet]:
        """Draw a cell's inputs: so many that the forward's alone exceed the L2 several times."""
        per_set = traffic.forward(cell.M, cell.N, cell.dtype).obligatory_bytes
        n_sets = n_sets or n_input_sets(per_set, self.l2_bytes)
        return make_inputs(cell.M, cell.N, cell.dtype, n_sets, self.device)

    def calls(self, cell: Cell, inputs: InputSet) -> dict[str, Call]:
        """Build the contenders of a cell, ours first; who is not RMSNorm or fails is noted."""
        known = {OURS.name: OURS, **self.peers}
        found: dict[str, Call] = {}
        for name in cell.contenders or tuple(known):
            if name not in known:
                continue  # not asked for, or not installed, which was said once
            try:
                with time_limit(PATIENCE_S):
                    call = known[name].build(cell.N, cell.dtype)
                    verdict = peers.verify(known[name], inputs.x, inputs.w, inputs.dy, call)
            except Exception as error:  # noqa: BLE001  # a peer may raise whatever it likes
                self.failed(cell.label(), name, error)
                continue
            finally:
                self.heed_signals()
            if verdict.ok:
                found[name] = call
            else:
                self.note(f"{cell.label()}: {name} is not timed: {verdict.reason()}")
        return found

    def row(
        self, cell: Cell, pass_: Pass, contender: str, sample: timing.Sample | None, **more: Any
    ) -> Row:
        """Make a row; what only ours has is filled in by `ours_fields`."""
        timed: dict[str, Any] = {}
        if sample is not None:
            timed["time_s"] = Quantiles(sample.p20_s, sample.p50_s, sample.p80_s)
            timed["repeat_time_s"], timed["n_samples"] = sample.repeat_p50_s, sample.n_samples
        known = self.ours_fields(cell, pass_) if contender == OURS.name else {}
        fields: dict[str, Any] = {
            "section": cell.section,
            "contender": contender,
            "pass_": pass_,
            "M": cell.M,
            "N": cell.N,
            "dtype": dtype_name(cell.dtype),
            "w_dtype": dtype_name(cell.dtype),
            "obligatory_bytes": obligatory_bytes(pass_, cell),
        }
        return Row(**(fields | timed | known | more))

    def ours_fields(self, cell: Cell, pass_: Pass) -> dict[str, Any]:
        """Return path, config, programs and scratch of our kernels on a cell, once they ran."""
        M, N, dtype = cell.M, cell.N, cell.dtype
        if pass_ == FORWARD:
            path = tiling.forward_path(N)
            rows = tiling.forward_tile(N).rows if N <= tiling.ONE_TILE_MAX else 1
            n_programs, scratch = -(-M // rows), 0
        elif pass_ == BACKWARD:
            path = tiling.backward_path(M, N, self.device, dtype)
            few = path == "few_rows_backward"
            n_programs = 0 if few else tiling.n_programs(M, N, dtype, self.device)
            scratch = traffic.backward(M, N, dtype, device=self.device).scratch_bytes(n_programs)
        else:
            return {}
        config = tuning.chosen().get((searched(path), N, dtype, dtype, self.device))
        return {
            "path": path,
            "config": config and Config(config.num_warps, config.num_stages),
            "n_programs": n_programs,
            "scratch_bytes": scratch,
        }


def searched(path: str) -> str:
    """Return the key of `tuning.SPACES` that a path takes: few rows, the choice for many."""
    return "backward" if path == "few_rows_backward" else path


def obligatory_bytes(pass_: Pass, cell: Cell) -> int | None:
    """Return the bytes that a pass must move; None for the two passes in one."""
    if pass_ == FORWARD:
        return traffic.forward(cell.M, cell.N, cell.dtype).obligatory_bytes
    if pass_ == BACKWARD:
        return traffic.backward(cell.M, cell.N, cell.dtype).obligatory_bytes
    return None


def best(samples: dict[str, timing.Sample]) -> Ceiling | None:
    """Return the fastest of the kernels that only move bytes."""
    if not samples:
        return None
    name = min(samples, key=lambda found: samples[found].p50_s)
    return Ceiling(name, samples[name].p50_s)


def _one_line(error: Exception) -> str:
    """Return an exception's type and the first line of what it says."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"
