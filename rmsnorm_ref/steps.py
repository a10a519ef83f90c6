"""Kernels as data, and how `traffic.py` spells them out as steps with elements and bytes.

The chains that eager PyTorch launches for RMSNorm are listed here in order. fp16 and bf16 have the
same ones. A test holds them against what PyTorch dispatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch

Access = Literal["read", "write"]
Role = Literal["obligatory", "small", "cached", "scratch"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# (operator, tensors read, tensors written). `traffic.py` writes the fused kernels the same way;
# there "x@cached" gives x another role than its usual one, "w*7" says that w is asked for 7 times,
# and "w*P" that each program asks for it.
Kernels = tuple[tuple[str, str, str], ...]

EAGER_FORWARD: Kernels = (
    ("_to_copy", "x", "h"),
    ("pow", "h", "square"),
    ("mean", "square", "variance"),
    ("add", "variance", "shifted"),
    ("rsqrt", "shifted", "rstd"),
    ("mul", "h rstd", "h_hat"),
    ("_to_copy", "h_hat", "x_hat"),
    ("mul", "w x_hat", "y"),
)
EAGER_BACKWARD: Kernels = (
    ("mul", "dy w", "dx_hat_promoted"),
    ("mul", "dy x_hat", "dw_terms"),
    ("sum", "dw_terms", "dw_promoted"),  # w was broadcast down the rows
    ("_to_copy", "dw_promoted", "dw"),
    ("_to_copy", "dx_hat_promoted", "dx_hat"),
    ("_to_copy", "dx_hat", "dh_hat"),
    ("mul", "dh_hat h", "drstd_terms"),
    ("mul", "dh_hat rstd", "dh_direct"),
    ("sum", "drstd_terms", "drstd"),  # rstd was broadcast along the row
    ("pow", "rstd", "rstd_cubed"),  # rsqrt: -rstd**3 / 2 times its gradient
    ("mul", "drstd", "drstd_halved"),
    ("mul", "drstd_halved rstd_cubed", "dvariance"),
    ("div", "dvariance", "dsquare"),  # mean: one number per row, spread over it and divided by N
    ("pow", "h", "h_power"),  # pow(2): 2 * h**1, whose power is a copy that nobody would write
    ("mul", "h_power", "h_doubled"),
    ("mul", "dsquare h_doubled", "dh_statistics"),
    ("add", "dh_direct dh_statistics", "dh"),  # h is used twice
    ("_to_copy", "dh", "dx"),
)
# A cast between equal dtypes launches nothing: the copy is then its original, on the right.
COPY_OF = {"h": "x", "h_hat": "x_hat", "dh_hat": "dx_hat", "dh": "dx"}
COPY_OF |= {"dx_hat_promoted": "dx_hat", "dw_promoted": "dw"}


@dataclass(frozen=True)
class Step:
    """Record one tensor's passage through one kernel.

    Role "obligatory" marks an [M, N] tensor, "small" one of M or N elements, or of a number per
    row and program. "cached" is a second read, which a cache serves. "scratch" is a buffer with N
    elements per program, counted for one program. `repeats` is how often all programs together ask
    for it; None means once each.
    """

    kernel: str
    tensor: str
    access: Access
    n_elements: int
    n_bytes: int
    role: Role
    repeats: int | None = 1


def spell_out(
    kernels: Kernels,
    M: int,
    N: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype | None,
    spelling: str | None,
    members: int = 1,
) -> tuple[Step, ...]:
    """Spell out kernels as steps; no spelling means the fused ones, see `Kernels`.

    `members` programs share a row, if it is wide.
    """
    require_count("M", M, minimum=0)
    require_count("N", N, minimum=1)
    w_dtype = x_dtype if w_dtype is None else w_dtype
    for argument, dtype in (("x_dtype", x_dtype), ("w_dtype", w_dtype)):
        if dtype not in DTYPES:
            raise TypeError(f"{argument} is {dtype}: pass one of {', '.join(map(str, DTYPES))}")
    if spelling not in {None, "seed", "fp32"}:
        raise ValueError(f"spelling is {spelling!r}: pass 'seed' or 'fp32'")
    y_dtype = torch.promote_types(x_dtype, w_dtype) if spelling else x_dtype
    inside = x_dtype if spelling == "seed" else torch.float32  # what holds the statistics
    shapes: tuple[tuple[Role, int, torch.dtype, str], ...] = (
        ("obligatory", M * N, x_dtype, "x dx x_hat dx_hat"),
        ("obligatory", M * N, y_dtype, "y dy dx_hat_promoted dw_terms"),
        ("obligatory", M * N, inside, "h h_hat square dh dh_hat dh_direct dh_statistics"),
        ("obligatory", M * N, inside, "drstd_terms dsquare h_power h_doubled"),
        ("small", M, inside, "rstd variance shifted drstd rstd_cubed drstd_halved dvariance"),
        ("small", M * members, torch.float32, "parts"),
        ("small", N if M else 0, w_dtype, "w"),
        ("small", N, w_dtype, "dw"),
        ("small", N, y_dtype, "dw_promoted"),
        ("scratch", N, torch.float32, "partial_dw"),
    )
    sizes = {name: (role, n, dtype) for role, n, dtype, names in shapes for name in names.split()}
    same = {copy: name for copy, name in COPY_OF.items() if sizes[copy] == sizes[name]}
    steps: list[Step] = []
    for operator, reads, writes in kernels:
        moved: list[tuple[Access, str]] = [("read", same.get(t, t)) for t in reads.split()]
        moved += [("write", same.get(t, t)) for t in writes.split()]
        if operator == "_to_copy" and moved[0][1] == moved[1][1]:
            continue
        kernel = f"{operator} -> {moved[-1][1]}" if spelling else operator
        for access, token in moved:
            name, _, asked = token.partition("*")
            tensor, _, other_role = name.partition("@")
            role, n, dtype = sizes[tensor]
            role = cast("Role", other_role) or role
            repeats = None if asked == "P" else int(asked or 1)
            steps.append(Step(kernel, tensor, access, n, n * dtype.itemsize, role, repeats))
    return tuple(steps)


def require_count(name: str, value: object, *, minimum: int) -> None:
    """Refuse what is no whole number of `minimum` or more; a bool is a mistake, not a count."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: pass an int, such as x.shape[0]")
    if value < minimum:
        raise ValueError(f"{name} is {value}: it must be {minimum} or more; check the shape")
