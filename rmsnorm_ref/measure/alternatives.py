"""What each pinned choice is worth: the package as it is beside the package decided otherwise.

Both are the package's own launchers, with the attributes of `tiling` that `pinned.py` names set
while they build and launch. Where the tile itself is what differs, each alternative is launched
with every number of warps that a search would try for it (and every number of stages, where the
shipped table does not know the tile), and the fastest counts: no choice wins because its rival was
launched badly. Everything else runs with the config that ships.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from rmsnorm_ref import interpreter, table, tiling, traffic, tuning

from . import timing, variants
from .calls import ceilings, n_loops
from .cells import BF16, Cell
from .peers import EPS
from .schema import FORWARD, OnePass, Row
from .session import OURS, Session, best, obligatory_bytes, searched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    import torch

    from .calls import InputSet
    from .pinned import Alternative, Choice


@contextlib.contextmanager
def replaced(*changes: tuple[ModuleType, Mapping[str, Any]]) -> Iterator[None]:
    """Set attributes of modules inside, and put them back however it ends.

    Raises:
        AttributeError: a module has no such attribute; none is set then.
    """
    before = [(module, name, getattr(module, name)) for module, new in changes for name in new]
    try:
        for module, new in changes:
            for name, value in new.items():
                setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class Trial(NamedTuple):
    """Hold one alternative with one config, and the attributes that only its own calls see."""

    name: str
    alternative: Alternative
    changes: tuple[tuple[ModuleType, Mapping[str, Any]], ...]
    call: Callable[[InputSet], object]


def measure(session: Session, choice: Choice, M: int, N: int) -> list[Row]:
    """Return the times of a choice's alternatives at one shape, in the passes that it touches."""
    interpreter.prepare(session.device)
    cell = Cell("ablations", M, N, BF16)
    inputs = session.inputs(cell)
    rstd = {each: _rstd(each.x) for each in inputs}
    rows: list[Row] = []
    for pass_ in session.passes:
        if pass_ in choice.passes:
            found = trials(choice, cell, pass_, session.device, rstd)
            rows += _time(session, choice, cell, pass_, inputs, found)
    return rows


def _rstd(x: torch.Tensor) -> torch.Tensor:
    return x.float().square_().mean(dim=-1).add_(EPS).rsqrt_()


def trials(
    choice: Choice,
    cell: Cell,
    pass_: OnePass,
    device: torch.device,
    rstd: Mapping[InputSet, torch.Tensor],
) -> list[Trial]:
    """Return every alternative with every config that it is to be timed with."""
    launchers = import_module("rmsnorm_ref.autograd")
    kernels = import_module("rmsnorm_ref.backward")  # it imports Triton
    found = []
    for one in choice.alternatives:
        sets = {**choice.base, **one.sets}
        with replaced((tiling, sets)):
            path, configs = _configs(cell, pass_, device, all_configs=choice.searched)
        own = _replaced_in_backward(one, kernels)
        for config in configs:
            chosen = {(path, cell.N, BF16, BF16, device): config}  # so nothing is searched
            changes = (
                (tiling, sets),
                (tuning, {"_chosen": chosen, "_prepared": {}}),
                (kernels, own),
            )

            def call(s: InputSet, one: Alternative = one, changes: Any = changes) -> object:
                with replaced(*changes):
                    if pass_ == FORWARD:
                        return launchers.launch_forward(s.x, s.w, EPS, needs_rstd=one.needs_rstd)
                    tensors = s.dy, s.x, s.w, rstd[s]
                    return launchers.launch_backward(*tensors, needs_dx=True, needs_dw=True)

            launched = f"{config.num_warps} warps, {config.num_stages} stages"
            name = f"{choice.knob} {one.value}, {launched}"
            found.append(Trial(name, one, changes, call))
    return found


def _replaced_in_backward(one: Alternative, kernels: Any) -> dict[str, Any]:
    """Return attributes of backward.py that an alternative has otherwise; none is shared."""
    reduction = _build_sum if one.torch_sum else kernels._build_reduction.__wrapped__  # noqa: SLF001
    own: dict[str, Any] = {}
    if one.kernel:
        own["rmsnorm_backward_kernel"] = variants.kernel(one.kernel)
        if one.atomic:
            reduction = variants.build_copy
            build = kernels._build  # noqa: SLF001
            own["_BUILD"] = {"backward": variants.build_on_zeros(build)}
    return own | {"_build_reduction": functools.cache(reduction)}


def _configs(
    cell: Cell, pass_: OnePass, device: torch.device, *, all_configs: bool
) -> tuple[str, list[table.Config]]:
    """Return the key of `tuning.SPACES` that a pass takes, and configs of it."""
    _, M, N, dtype, _ = cell
    path = tiling.forward_path(N)
    if pass_ != FORWARD:
        path = tiling.backward_path(M, N, device, dtype)
    path = searched(path)
    if not all_configs:
        return path, [tuning.shipped(path, N, dtype)]
    known = table.SHIPPED[path].get(tuning.SPACES[path].tile_elements(N))
    stages = (known.num_stages,) if known else tuning.STAGES
    tried = [config for config, reason in tuning.pruned(path, N, dtype).items() if reason is None]
    return path, [config for config in tried if config.num_stages in stages]


def _build_sum(*_: Any) -> Callable[[torch.Tensor, torch.Tensor], object]:
    return lambda partial_dw, dw: dw.copy_(partial_dw.sum(dim=0))


def _tried(trial: Trial, inputs: InputSet) -> None:
    with contextlib.suppress(Exception):  # it is raised again, and noted, where it is timed
        trial.call(inputs)


def _time(
    session: Session,
    choice: Choice,
    cell: Cell,
    pass_: OnePass,
    inputs: Sequence[InputSet],
    found: Sequence[Trial],
) -> list[Row]:
    n_bytes = obligatory_bytes(pass_, cell) or 0
    work: dict[str, Callable[[InputSet], object]] = {trial.name: trial.call for trial in found}
    if session.device.type == "cuda":  # all kernels side by side
        import_module("rmsnorm_ref.launch").compile_together(
            functools.partial(_tried, trial, inputs[0]) for trial in found
        )
    floor = ceilings(pass_)
    samples = timing.graphed(
        work | floor,
        inputs,
        loops=n_loops(len(inputs), n_bytes),
        clock=session.clock,
        on_failure=lambda name, error: session.failed(cell.label(), name, error),
    )
    ceiling = best({name: samples[name] for name in floor if name in samples})
    most = n_bytes / ceiling.time_s if ceiling else None
    rows = []
    for alternative in choice.alternatives:
        timed = [t for t in found if t.alternative is alternative and t.name in samples]
        for trial in sorted(timed, key=lambda t: samples[t.name].p50_s)[:1]:
            time_s = samples[trial.name].p50_s
            flags = timing.flags(n_bytes / time_s, most, n_bytes * len(inputs), session.l2_bytes)
            with replaced(*trial.changes):  # path, config and programs are those of the alternative
                row = session.row(
                    cell, pass_, OURS.name, samples[trial.name],
                    kind="ablation", n_input_sets=len(inputs), ceiling=ceiling, flags=flags,
                    detail={"knob": choice.knob, "value": alternative.value},
                )  # fmt: skip
            if alternative.atomic:
                scratch_bytes = traffic.buffer_bytes(1, cell.N)
                row = dataclasses.replace(row, n_programs=1, scratch_bytes=scratch_bytes)
            rows.append(row)
    return rows
