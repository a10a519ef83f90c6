"""How a tensor of any strides becomes M rows that a kernel can walk with one stride.

Which instructions load a row follows from its alignment, and they fix the order in which the row is
summed. So layouts that differ in alignment would differ in the last bit. Here every layout is
brought to the alignment that a packed [M, N] tensor has: one compiled kernel per N and dtype, the
same bits from every view, at the price of a copy for the few that do not line up.
"""

import torch
from torch import Tensor


def rows(tensor: Tensor, row_align: int, name: str = "a tensor") -> tuple[Tensor, int]:
    """Return the tensor and its row stride, or a packed copy where it has no usable one.

    The kernels ask for rows that are evenly spaced, a multiple of `row_align` elements apart, with
    unit column stride, the first on 16 bytes. A layout that meets this is read in place. Any other
    is copied, so that all layouts run the very same instructions and give the same bits.

    Raises:
        RuntimeError: the tensor, called `name` in the message, has lost its memory.
    """
    stride = row_stride(tensor)
    address = tensor.data_ptr()
    if not address and tensor.numel():
        return _without_memory(tensor, name), tensor.shape[-1]
    if stride is None or stride % row_align or address % 16 or tensor.is_neg():
        tensor = tensor.resolve_neg().clone(memory_format=torch.contiguous_format)
        stride = tensor.shape[-1]
    return tensor, stride


def row_stride(tensor: Tensor) -> int | None:
    """Return how many elements lie between rows of [..., N], or None if no one number says it."""
    N = tensor.shape[-1]
    if tensor.is_contiguous():
        return N
    if N > 1 and tensor.stride(-1) != 1:
        return None
    found = expected = None
    for size, stride in zip(tensor.shape[-2::-1], tensor.stride()[-2::-1], strict=True):
        if size == 1:
            continue  # the stride of a dimension of one is never used, and may be anything
        if found is None:
            found = stride
        elif stride != expected:
            return None
        expected = stride * size
    return N if found is None else found


def _without_memory(tensor: Tensor, name: str) -> Tensor:
    """Return the zeros that a tensor of autograd's stands for; a kernel would read at address 0."""
    if tensor._is_zerotensor():  # noqa: SLF001  # torch has no public name for it
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    raise RuntimeError(
        f"{name} has shape {list(tensor.shape)} and no memory: its storage was freed, as FSDP "
        "frees a parameter outside of its module's forward; use it while it is whole"
    )
