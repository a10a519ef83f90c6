"""Triton kernels that move bytes and do nothing else: a copy and an addition.

Imported at the first measurement, as it imports Triton. Several block sizes, because the best one
moves with the size of the tensors.
"""

# A kernel's parameters are typed by Triton's compiler, and comments explain it.
# ruff: noqa: ANN001, ANN201, D103
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# (BLOCK_SIZE, num_warps): 8 to 32 elements per thread, the range in which one of them wins.
BLOCKS = ((1024, 4), (2048, 4), (4096, 8), (8192, 8))


@triton.jit
def copy_kernel(x_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # One block per program, in 64 bits.
    i = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = i < n_elements
    # n * e bytes read, n * e bytes written: what a forward must move.
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=mask), mask=mask)


@triton.jit
def addition_kernel(x_ptr, dy_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # One block per program, in 64 bits.
    i = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = i < n_elements
    # 2 * n * e bytes read, n * e bytes written: what a backward must move.
    total = tl.load(x_ptr + i, mask=mask) + tl.load(dy_ptr + i, mask=mask)
    tl.store(out_ptr + i, total, mask=mask)


def copies() -> dict[str, Callable[[Any], object]]:
    """Return the copies by name, each to be called with a `calls.InputSet`."""

    def copy(block_size: int, num_warps: int) -> Callable[[Any], object]:
        def call(s: Any) -> object:
            n = s.x.numel()
            grid = (triton.cdiv(n, block_size),)
            return copy_kernel[grid](s.x, s.out, n, block_size, num_warps=num_warps)

        return call

    return {f"triton copy {size}": copy(size, warps) for size, warps in BLOCKS}


def additions() -> dict[str, Callable[[Any], object]]:
    """Return the additions by name, each to be called with a `calls.InputSet`."""

    def addition(block_size: int, num_warps: int) -> Callable[[Any], object]:
        def call(s: Any) -> object:
            n = s.x.numel()
            grid = (triton.cdiv(n, block_size),)
            return addition_kernel[grid](s.x, s.dy, s.out, n, block_size, num_warps=num_warps)

        return call

    return {f"triton addition {size}": addition(size, warps) for size, warps in BLOCKS}
