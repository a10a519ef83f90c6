"""What a wrong choice costs: every config of the search, and the backward's two other knobs.

Kernels are launched as the package launches them, by its own builders, one argument changed.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from rmsnorm_ref import table, tiling, traffic, tuning

from . import timing
from .calls import ceilings, n_input_sets, n_loops
from .cells import BF16, Cell
from .peers import EPS
from .schema import BACKWARD, FORWARD, Config, Pass, Row
from .session import OURS, Session, best

if TYPE_CHECKING:
    from collections.abc import Callable

    from .calls import InputSet

MANY_ROWS = 2**20  # the search makes its choice for many rows


def configs(session: Session, N: int, dtype: torch.dtype = BF16) -> list[Row]:
    """Return the time of every config that the search tries at one width, on the search's input."""
    rows: list[Row] = []
    for pass_ in session.passes:
        rows += _configs(session, Cell("configs", tuning.trial_rows(N, dtype), N, dtype), pass_)
    return rows


def _configs(session: Session, cell: Cell, pass_: Pass) -> list[Row]:
    _, M, N, dtype, _ = cell
    kernels = import_module(f"rmsnorm_ref.{pass_}")  # "forward" or "backward"; imports Triton
    if pass_ == FORWARD:
        path, n_bytes = tiling.forward_path(N), traffic.forward(M, N, dtype).obligatory_bytes
    else:
        path = tiling.backward_path(MANY_ROWS, N, session.device, dtype)
        n_bytes = traffic.backward(M, N, dtype).obligatory_bytes
    n_sets = n_input_sets(n_bytes, session.l2_bytes)
    x = torch.empty(1, N, dtype=dtype, device=session.device)
    w = torch.ones(N, dtype=dtype, device=session.device)
    arguments = [kernels._trial(x, w) for _ in range(n_sets)]  # noqa: SLF001  # the search's own
    tried = [config for config, reason in tuning.pruned(path, N, dtype).items() if reason is None]
    build = kernels._BUILD[path]  # noqa: SLF001  # the same
    launches = {str(c): _unpacking(build(N, dtype, session.device, c)) for c in tried}
    if session.device.type == "cuda":  # 16 kernels one after the other take longer than timing them
        import_module("rmsnorm_ref.launch").compile_together(
            functools.partial(launch, arguments[0]) for launch in launches.values()
        )
    samples = timing.graphed(
        launches,
        arguments,
        loops=n_loops(n_sets, n_bytes),
        clock=session.clock,
        on_failure=lambda name, error: session.failed(f"{cell.label()} {path}", name, error),
    )
    shipped = tuning.shipped(path, N, dtype)
    return [
        session.row(
            cell,
            pass_,
            OURS.name,
            samples[str(config)],
            kind="config",
            path=path,
            config=Config(config.num_warps, config.num_stages),
            n_input_sets=n_sets,
            detail={"shipped": config == shipped},
        )
        for config in tried
        if str(config) in samples
    ]


def _unpacking(launch: Callable[..., object]) -> Callable[[tuple[Any, ...]], object]:
    return lambda arguments: launch(*arguments)


class Variant(NamedTuple):
    """Hold one turn of a knob of the one-tile backward."""

    knob: Literal["num_stages", "programs_per_sm"]
    value: int
    config: table.Config
    n_programs: int

    @property
    def name(self) -> str:
        """Return the variant's name in messages."""
        return f"{self.knob} {self.value}"


def variants(cell: Cell, device: torch.device) -> list[Variant]:
    """Return num_stages 1 to 4 at the shipped warps, and 1, 2, 4 programs per SM as shipped."""
    shipped = tuning.shipped("backward", cell.N, cell.dtype)
    n_programs = tiling.n_programs(cell.M, cell.N, cell.dtype, device)
    found = [
        Variant("num_stages", stages, shipped._replace(num_stages=stages), n_programs)
        for stages in tuning.STAGES
    ]
    n_tiles = -(-cell.M // tiling.backward_tile(cell.N).rows)
    for per_sm in (1, 2, 4):
        n_programs = min(n_tiles, per_sm * tiling.sm_count(device))
        found.append(Variant("programs_per_sm", per_sm, shipped, n_programs))
    return found


def ablation(session: Session, cell: Cell) -> list[Row]:
    """Return the one-tile backward's time with one knob turned, the dw reduction included."""
    M, N, dtype = cell.M, cell.N, cell.dtype
    launch_forward = import_module("rmsnorm_ref.autograd").launch_forward
    inputs = session.inputs(cell)
    rstd = {each: launch_forward(each.x, each.w, EPS)[1] for each in inputs}
    turned = variants(cell, session.device)
    work: dict[str, Callable[[InputSet], object]] = {
        variant.name: _backward(cell, session.device, variant, rstd) for variant in turned
    }
    floor = ceilings(BACKWARD)
    samples = timing.graphed(
        work | floor,
        inputs,
        loops=n_loops(len(inputs), traffic.backward(M, N, dtype).obligatory_bytes),
        clock=session.clock,
        on_failure=lambda name, error: session.failed(cell.label(), name, error),
    )
    ceiling = best({name: samples[name] for name in floor if name in samples})
    rows = []
    for variant in turned:
        if variant.name not in samples:
            continue
        rows.append(
            session.row(
                cell,
                BACKWARD,
                OURS.name,
                samples[variant.name],
                kind="ablation",
                path="backward",
                config=Config(variant.config.num_warps, variant.config.num_stages),
                n_programs=variant.n_programs,
                scratch_bytes=traffic.buffer_bytes(variant.n_programs, N),
                n_input_sets=len(inputs),
                ceiling=ceiling,
                detail={"knob": variant.knob, "value": variant.value},
            )
        )
    return rows


def _backward(
    cell: Cell, device: torch.device, variant: Variant, rstd: dict[InputSet, torch.Tensor]
) -> Callable[[InputSet], object]:
    """Return a call of the backward's two kernels with buffers of its own; dx goes to `out`."""
    N, dtype = cell.N, cell.dtype
    kernels = import_module("rmsnorm_ref.backward")
    launch = kernels._build(N, dtype, device, variant.config)  # noqa: SLF001  # as launch_backward
    early = tiling.reduces_early(variant.n_programs, next(iter(rstd)).x)
    reduce_dw = kernels._build_reduction(N, dtype, device, early)  # noqa: SLF001  # the same
    partial_dw = torch.empty(variant.n_programs, N, dtype=torch.float32, device=device)
    dw = torch.empty(N, dtype=dtype, device=device)

    def call(s: InputSet) -> object:
        launch(s.dy, N, s.x, N, s.w, rstd[s], s.out, partial_dw, variant.n_programs)
        return reduce_dw(partial_dw, dw)

    return call
