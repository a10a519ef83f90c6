"""Memory with fences: what a kernel allocates is full of NaN and lies between painted fields.

torch's own makers of uninitialised memory are replaced while a candidate runs, by Python name. What
C++ allocates goes unseen. A tensor that is made larger in place takes its fence along.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cases import FENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAINT = -77.0  # a value that no result takes
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_FILLED = {"zeros", "zeros_like", "new_zeros"}
_OF_TENSORS = {"new_empty", "new_empty_strided", "new_zeros"}
_RESIZE = ("resize_", "resize_as_")
_LARGEST = 2**24  # elements; a larger result is handed out as it is


class Fences:
    """Remember what was handed out, and tell whether the paint around it is whole."""

    def __init__(self) -> None:
        self._storages: list[Tensor] = []
        self._broken = False

    def surround(self, made: Tensor, fill: float) -> Tensor:
        """Return a tensor like `made`, between fences."""
        storage = made.new_full((2 * FENCE + made.numel(),), PAINT)
        storage[FENCE : len(storage) - FENCE] = fill
        self._storages.append(storage)
        with torch.no_grad():
            # No view of the storage: autograd treats views apart.
            return made.set_(storage.untyped_storage(), FENCE, made.shape, made.stride())  # type: ignore[arg-type, call-overload, no-any-return, unused-ignore]

    def stretch(self, made: Tensor, resize: Callable[..., Any]) -> None:
        """Move the fence behind a tensor that was made larger than the memory handed out."""
        start = made.untyped_storage().data_ptr()
        held = (s for s in self._storages if s.untyped_storage().data_ptr() == start)
        storage = next(held, None)
        end = made.storage_offset() + made.numel()
        if storage is None or end <= len(storage) - FENCE:
            return
        old = len(storage) - FENCE
        self._broken |= not _is_whole(storage)
        with torch.no_grad():
            resize(storage, end + FENCE)  # for all views of it at once
            storage[old:end], storage[end:] = math.nan, PAINT

    def are_whole(self) -> bool:
        """Tell whether nothing was written outside of what was handed out."""
        return not self._broken and all(map(_is_whole, self._storages))


def _is_whole(storage: Tensor) -> bool:
    if storage.untyped_storage().nbytes() < storage.nbytes:  # the candidate has given it back
        return True
    return all(bool((s == PAINT).all()) for s in (storage[:FENCE], storage[len(storage) - FENCE :]))


@contextlib.contextmanager
def raised() -> Iterator[Fences]:
    """Replace torch's makers of tensors while a candidate runs."""
    fences = Fences()
    places: list[tuple[Any, str, Any]] = []
    for name in _EMPTY | _FILLED:
        place: Any = Tensor if name in _OF_TENSORS else torch
        original = getattr(place, name)
        places.append((place, name, original))
        setattr(place, name, _fenced(fences, original, 0.0 if name in _FILLED else math.nan))
    resize = Tensor.resize_
    for name in _RESIZE:
        places.append((Tensor, name, getattr(Tensor, name)))
        setattr(Tensor, name, _stretched(fences, getattr(Tensor, name), resize))
    try:
        yield fences
    finally:
        for place, name, original in places:
            setattr(place, name, original)


def _fenced(fences: Fences, original: Callable[..., Any], fill: float) -> Callable[..., Any]:
    def make(*args: Any, **options: Any) -> Any:
        made = original(*args, **options)
        plain = type(made) is Tensor and made.dtype in _FLOATS and made.layout is torch.strided
        if not plain or not made.is_contiguous() or not 0 < made.numel() <= _LARGEST:
            return made
        if options.get("out") is not None or made.requires_grad or made.device.type == "meta":
            return made
        if torch.compiler.is_compiling():
            return made
        return fences.surround(made, fill)

    return make


def _stretched(
    fences: Fences, original: Callable[..., Any], resize: Callable[..., Any]
) -> Callable[..., Any]:
    def grow(self: Tensor, *args: Any, **options: Any) -> Any:
        made = original(self, *args, **options)
        if self.layout is torch.strided and not torch.compiler.is_compiling():
            fences.stretch(self, resize)
        return made

    return grow
