"""What is timed: inputs that take turns, a contender's two passes, kernels that only move bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from .schema import FORWARD, Pass

Call = Callable[[Tensor, Tensor], Tensor]

L2_MULTIPLE = 4  # footprint of the inputs over the size of the L2
MOST_INPUT_SETS = 256  # a graph of more calls takes longer to capture than all its samples
GRAPH_S = 5e-4  # least length of a graph at the bandwidth below, so that its start does not count
ASSUMED_BANDWIDTH, ASSUMED_LAUNCH_S = 4e12, 2e-6  # only to choose a number of loops


@dataclass(frozen=True, eq=False)
class InputSet:
    """Hold one turn's tensors: x, dy and out are [M, N] in one dtype, w is [N].

    `out` is what a ceiling writes to; contenders allocate their own results.
    """

    x: Tensor
    w: Tensor
    dy: Tensor
    out: Tensor


def make_inputs(
    M: int, N: int, dtype: torch.dtype, n_sets: int, device: torch.device | str = "cuda"
) -> list[InputSet]:
    """Draw `n_sets` different inputs around one w, the same on every run."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        # Drawn in the dtype itself: at 32768 x 8192 a copy in fp32 would take another GB.
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    w = draw(N).abs_().add_(0.5)
    return [InputSet(draw(M, N), w, draw(M, N), draw(M, N)) for _ in range(n_sets)]


def n_input_sets(bytes_per_set: int, l2_bytes: int) -> int:
    """Return how many inputs take turns so that none is still in L2 when its turn comes again.

    Example:
        >>> n_input_sets(2 * 4096 * 8192 * 2, 50 * 2**20), n_input_sets(2**20, 50 * 2**20)
        (2, 200)
    """
    wanted = math.ceil(L2_MULTIPLE * l2_bytes / bytes_per_set)
    return min(max(wanted, 2), MOST_INPUT_SETS)


def n_loops(n_sets: int, n_bytes: int) -> int:
    """Return how often a graph goes through all inputs, from the bytes of one call alone.

    Not from a trial: all contenders of a cell get graphs of the same number of calls.
    """
    one_s = n_bytes / ASSUMED_BANDWIDTH + ASSUMED_LAUNCH_S
    return max(1, math.ceil(GRAPH_S / one_s / n_sets))


class Forward:
    """Call f(x, w) without recording for autograd."""

    def __init__(self, f: Call) -> None:
        self._f = f

    def __call__(self, inputs: InputSet) -> object:
        """Return y."""
        with torch.no_grad():
            return self._f(inputs.x, inputs.w)


class Backward:
    """Differentiate f(x, w) with respect to x and w; the forward runs at a set's first call only.

    That first call is the warm-up of `graphed`, so a graph holds no forward.
    """

    def __init__(self, f: Call) -> None:
        self._f = f
        self._recorded: dict[InputSet, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, inputs: InputSet) -> object:
        """Return (dx, dw)."""
        if inputs not in self._recorded:
            x, w = leaves(inputs)
            self._recorded[inputs] = (self._f(x, w), x, w)
        y, x, w = self._recorded[inputs]
        return torch.autograd.grad(y, (x, w), inputs.dy, retain_graph=True)


class Recorded:
    """Call f(x, w) and record for autograd; x and w become leaves at a set's first call."""

    def __init__(self, f: Call) -> None:
        self._f = f
        self._leaves: dict[InputSet, tuple[Tensor, Tensor]] = {}

    def __call__(self, inputs: InputSet) -> object:
        """Return y."""
        if inputs not in self._leaves:
            self._leaves[inputs] = leaves(inputs)
        return self._f(*self._leaves[inputs])


class ForwardBackward:
    """Run both passes: for a contender whose backward alone cannot be captured."""

    def __init__(self, f: Call) -> None:
        self._f = f

    def __call__(self, inputs: InputSet) -> object:
        """Return (dx, dw)."""
        x, w = leaves(inputs)
        return torch.autograd.grad(self._f(x, w), (x, w), inputs.dy)


def leaves(inputs: InputSet) -> tuple[Tensor, Tensor]:
    """Return x and w, sharing memory with the inputs, as leaves of a graph of their own."""
    return inputs.x.detach().requires_grad_(), inputs.w.detach().requires_grad_()


def ceilings(pass_: Pass) -> dict[str, Callable[[InputSet], object]]:
    """Return kernels that move a pass's obligatory bytes and do nothing else, by name.

    The fastest is the ceiling. One read and one write for the forward, two reads and one write for
    the backward; several, because no single one is fastest everywhere: at 32768 x 8192 `copy_`
    reached 2.8 TB/s on an H200 where `torch.neg` reached 4.2.
    """
    kernels = import_module(f"{__package__}.ceiling_kernels")  # it imports Triton
    found: dict[str, Callable[[InputSet], object]]
    if pass_ == FORWARD:
        found = {
            "torch.neg": lambda s: torch.neg(s.x, out=s.out),
            "copy_": lambda s: s.out.copy_(s.x),
        }
        found.update(kernels.copies())
    else:
        found = {"torch.add": lambda s: torch.add(s.x, s.dy, out=s.out)}
        found.update(kernels.additions())
    return found
