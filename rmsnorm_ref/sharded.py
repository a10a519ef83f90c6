"""DTensors: each rank normalises the rows that it holds, and nothing is sent.

RMSNorm is row-local. With x split by rows and all of w on every rank, y and dx are split as x is,
and what a rank adds up for dw is its share of a sum: a gradient laid out as `Partial`, as that of
torch.nn.RMSNorm is, which an optimizer or `full_tensor()` adds up over the ranks. Any other layout
would need data from other ranks before the first row can be read. The op does not communicate
behind its caller's back, so such a layout is refused, with the call that changes it.
"""

from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

Op = Callable[[Tensor, Tensor, float], Tensor]


def apply(x: Tensor, w: Tensor, eps: float, op: Op) -> Tensor:
    """Return y, split as x is; recorded for autograd.

    Args:
        x: [..., N], a DTensor, on each dimension of its mesh replicated or split by rows.
        w: [N], a DTensor, replicated on the mesh of x.
        eps: added to the mean square.
        op: does the same on this rank's plain tensors.

    Raises:
        TypeError: one of x and w is a plain tensor.
        ValueError: they are on different meshes, or not laid out as above.
    """
    if not (isinstance(x, DTensor) and isinstance(w, DTensor)):
        raise TypeError(_plain("w" if isinstance(x, DTensor) else "x"))
    _check(x, w)
    # Where a mesh dimension splits the rows, a rank's dw misses the rows of the others.
    dw_placements = [Partial() if place.is_shard() else Replicate() for place in x.placements]
    y = op(x.to_local(grad_placements=x.placements), w.to_local(grad_placements=dw_placements), eps)
    shape, mesh, placements = x.shape, x.device_mesh, x.placements
    return DTensor.from_local(y, mesh, placements, shape=shape, stride=_packed_strides(shape))


def _check(x: DTensor, w: DTensor) -> None:
    if w.device_mesh != x.device_mesh:
        raise ValueError(
            f"x is on {x.device_mesh} and w is on {w.device_mesh}; they must share a mesh: "
            "distribute_tensor(w, x.device_mesh) replicates a plain w on that of x"
        )
    columns = x.dim() - 1
    if not all(_splits_rows(place, columns) or place.is_replicate() for place in x.placements):
        raise ValueError(
            f"x is laid out as {x.placements}; each rank must hold whole rows, and this op does "
            "not communicate to get them: x.redistribute(placements=[Replicate()]), or [Shard(d)] "
            f"with d below {columns}, on each dimension of the mesh"
        )
    if not all(place.is_replicate() for place in w.placements):
        raise ValueError(
            f"w is laid out as {w.placements}; each rank must hold all of it, and this op does not "
            "communicate to get it: w.redistribute(placements=[Replicate()] * w.device_mesh.ndim)"
        )


def _splits_rows(place: Placement, columns: int) -> bool:
    return place.is_shard() and not place.is_shard(columns) and not place.is_shard(-1)


def _plain(name: str) -> str:
    if name == "w":
        return (
            "x is a DTensor and w is a plain tensor; a rank would take the sum over its own rows "
            "for dw, and the rest would be lost: distribute_tensor(w, x.device_mesh) replicates w, "
            "and parallelize_module(norm, mesh, SequenceParallel()) does it to a module"
        )
    return (
        "w is a DTensor and x is a plain tensor; both must be DTensors: "
        "DTensor.from_local(x, w.device_mesh, [Shard(0)]) where each rank holds its own rows, or "
        "w.full_tensor() for a plain w (under fully_shard call the module, which gathers w)"
    )


def _packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, n_elements = [], 1
    for size in reversed(shape):
        strides.append(n_elements)
        n_elements *= max(size, 1)
    return tuple(reversed(strides))
