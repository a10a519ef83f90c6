"""What is run, in which order: cases for both passes, and probes.

Every kind of kernel is reached: widths that are powers of two and widths that are not, below and
above what one tile, one chunk or one block holds; rows fewer and more than a GPU has programs. The
plainest cases come first. A candidate that is interpreted pays some milliseconds per row, so its
plan has fewer shapes and keeps all features.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import NamedTuple

from .cases import HEADS, NAN_AROUND, UNEVEN, Case
from .probes import HUGE, PROBES

ALL_DTYPES = ("float32", "bfloat16", "float16")

# (M, N) that reach most kernels: narrow, masked, few rows, one tile, chunks, columns.
CORE = ((3, 17), (8, 64), (7, 40), (9, 61), (9, 1561), (9, 513), (65, 17), (8, 1560), (24, 1561),
        (5, 8192), (3, 9000), (9, 9000), (9, 17000), (2, 33000), (4, 33000),
        (16, 12000))  # fmt: skip
EACH_KIND = ((3, 17), (7, 40), (9, 1561), (2, 8192), (3, 9000), (4, 17000), (2, 33000))
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 20, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100,
          127, 128, 129, 160, 192, 200, 255, 256, 257, 300, 320, 384, 500, 511, 512, 513, 576, 640,
          768, 769, 896, 1000, 1023, 1024, 1025, 1152, 1280, 1536, 1560, 1792, 2000, 2047, 2048,
          2049, 2304, 2560, 3000, 3072, 3584, 4095, 4096, 4097, 4608, 5000, 5120, 6144, 7168, 8191,
          8192, 8193, 10000, 10240, 12288, 14336, 16383, 16384, 16385, 18432, 20480, 24576, 28672,
          32767, 32768, 32769, 40000, 65535, 65536)  # fmt: skip
# Of heads and hidden states of models in use, beside those above.
OF_MODELS = (72, 112, 176, 288, 416, 448, 704, 832, 960, 1088, 1408, 1600, 1920, 2112, 2688, 2816,
             2880, 3200, 3840, 4544, 5376, 5632, 6656, 7680, 8960, 11008, 13824, 15360,
             21504)  # fmt: skip
HEIGHTS = (1, 2, 4, 6, 10, 11, 12, 14, 15, 16, 17, 23, 31, 32, 33, 47, 48, 63, 64, 65, 96, 100, 108,
           109, 127, 128, 129, 131, 132, 133, 147, 148, 149, 160, 192, 255, 256, 257, 264, 265, 300,
           384, 511, 512, 513, 600, 768, 1000, 1023, 1024, 1025, 1536, 2047, 2048, 2049, 3000, 4095,
           4096, 4097, 5000, 8191, 8192, 8193)  # fmt: skip
TALL_AND_WIDE = ((140, 1024), (300, 520), (1030, 260))
# Both many rows and wide ones, as in use: dear, so the short plan feeds each in one dtype.
ORDINARY = ((48, 4096), (160, 8192), (2048, 1024))
ORDINARY_TOO = ((520, 8200), (130, 16384), (260, 5120), (4096, 768))
TALL = (65535, 65536, 65537, 131073)  # a grid's second dimension ends at 65535
MANY_ROWS = ((33, 12), (70, 24), (300, 12), (1030, 6))
BEYOND = (65537, 131072, 131073, 262144, 300000)
X_LAYOUTS = ("offset by one", "aligned slice", "odd slice", "odd stride", "every other row",
             "every other column", "transposed", UNEVEN, "row expanded", NAN_AROUND)  # fmt: skip
DY_LAYOUTS = (*X_LAYOUTS, "one number expanded", "one number a row")
FEATURE_SHAPE = (6, 40)
HEADS_SHAPE = (12, 40)


class Scope(NamedTuple):
    """Say how much is run, of what, and on what."""

    dtypes: tuple[str, ...] = ALL_DTYPES
    full: bool = False
    interpreted: bool = False
    takes_eps: bool = True
    eps: float = 1e-6
    gives: str = "xw"
    seed: int = 0
    huge: bool = False
    sm_count: int = 0
    one_plus: bool = False


def cases(scope: Scope) -> list[Case]:
    """List all cases of a review, none twice, with its eps, seed and gradients."""
    found = [*_values(scope), *_features(scope), *_extremes(scope)]
    if scope.takes_eps:
        found += _eps(scope)
    fixed = [
        replace(
            case,
            eps=case.eps if scope.takes_eps and case.eps != 1e-6 else scope.eps,
            seed=scope.seed,
            one_plus=scope.one_plus,
            needs="".join(leaf for leaf in case.needs if leaf in scope.gives),
        )
        for case in found
    ]
    return list(dict.fromkeys(fixed))


def around(case: Case) -> Case:
    """Put NaN around the inputs: they stay packed."""
    return replace(case, x_layout=NAN_AROUND, dy_layout=NAN_AROUND, w_layout=NAN_AROUND)


def _values(scope: Scope) -> list[Case]:
    """Sweep shapes; in each dtype the core, and with torch at full speed every width and height."""
    plain = [Case(M, N, dtype) for dtype in scope.dtypes for M, N in ((1, 8), (4, 64), (8, 1000))]
    # Wide rows are dear: two dtypes show what three would.
    core = [(M, N, d) for M, N in CORE for d in scope.dtypes[: 3 if N <= 8192 or scope.full else 2]]
    found = [*plain, *(around(Case(*shape)) for shape in core)]
    # The order of a sum in 16 bits shows only where many rows or columns are added.
    found += [around(Case(300, 24, dtype)) for dtype in scope.dtypes if not scope.interpreted]
    every = (*WIDTHS, *OF_MODELS)
    widths = [(max(1, min(3 + index % 7, 24000 // N)), N) for index, N in enumerate(every)]
    if scope.interpreted:
        widths = [(2, N) for N in WIDTHS if N <= (8193 if scope.full else 4097)]
        turns = itertools.cycle(scope.dtypes)
        found += [around(Case(M, 12, next(turns))) for M in (1, 2, 5, 12, 16, 33)]
        # A lone column past a chunk's edge: one of many terms, so it shows in fp32 alone.
        found += [around(Case(4, 8193, d)) for d in scope.dtypes if d == "float32"]
        return found + [around(Case(M, N, next(turns))) for M, N in widths]
    heights = [(M, 8 + 12 * (index % 4) if M < 1000 else 6) for index, M in enumerate(HEIGHTS)]
    heights += [(M, 2) for M in (TALL if scope.full else TALL[2:3])]
    if scope.sm_count:
        sm = scope.sm_count
        heights += [(k * sm + d, 64) for k in (1, 2, 4) for d in (-1, 0, 1)]
    draw = random.Random(scope.seed)  # noqa: S311  # shapes, no secrets
    # Compiled for each width and dtype: the short plan gives every width one dtype, in turn.
    sparse = bool(scope.sm_count) and not scope.full
    n_drawn = 120 if scope.full else 12 if sparse else 30
    drawn = [
        (round(2 ** draw.uniform(0, 7)), round(2 ** draw.uniform(0, 10))) for _ in range(n_drawn)
    ]
    if scope.full:
        drawn += [(512, 4096), (1024, 2048), (2048, 1024), (64, 16384)]
    for shape in (*widths, *heights, *drawn):
        # Large ones in one dtype, in turn; small ones in all.
        large = sparse or (shape[0] * shape[1] > 4000 and not scope.full)
        turn = scope.dtypes[sum(shape) % len(scope.dtypes)]
        found += [around(Case(*shape, dtype)) for dtype in ((turn,) if large else scope.dtypes)]
    if not scope.sm_count and not scope.full:  # the other dtypes, with one row
        found += [
            around(Case(1, N, dtype))
            for M, N in widths
            for dtype in scope.dtypes
            if M * N > 4000 and N <= 16385 and dtype != scope.dtypes[(M + N) % len(scope.dtypes)]
        ]
    turns = itertools.cycle(scope.dtypes)
    found += [around(Case(*shape, next(turns))) for shape in (*TALL_AND_WIDE, *ORDINARY)]
    if scope.full:
        left = [(shape, d) for shape in ORDINARY for d in scope.dtypes]
        left += [(shape, next(turns)) for shape in ORDINARY_TOO]
        found += [around(Case(*shape, dtype)) for shape, dtype in left]
    beyond = BEYOND if scope.full else BEYOND[:3]
    found += [around(Case(1, N, scope.dtypes[0])) for N in beyond]
    return found


def _features(scope: Scope) -> list[Case]:
    """Change one thing at a time, then the layouts of x and dy in every pairing."""
    M, N = FEATURE_SHAPE
    found: list[Case] = []
    for dtype in scope.dtypes:
        base = Case(M, N, dtype)
        found += [replace(base, x_layout=layout) for layout in X_LAYOUTS]
        found += [replace(base, dy_layout=layout) for layout in DY_LAYOUTS]
        found += [replace(base, w_layout=layout) for layout in ("offset by one", "every other")]
        found += [replace(base, lead=lead) for lead in ((2, 3), (1, 2, 3), (6, 1), (2, 1, 3, 1))]
        found.append(Case(24, N, dtype, lead=(3, 8)))
        found += [replace(base, M=1, lead=()), replace(base, M=0), replace(base, M=0, lead=(3, 0))]
        found += [replace(base, needs="x"), replace(base, needs="w")]
        heads = Case(*HEADS_SHAPE, dtype)
        found += [
            replace(heads, x_layout=HEADS),
            replace(heads, dy_layout=HEADS),
            replace(heads, x_layout=HEADS, dy_layout=HEADS),
            replace(heads, lead=(2, 2, 3)),  # told from the layout by what is packed
        ]
    turns = itertools.cycle(scope.dtypes)
    pairs = itertools.product(X_LAYOUTS, DY_LAYOUTS)
    found += [Case(M, N, next(turns), x_layout=x, dy_layout=dy) for x, dy in pairs]
    # Each kind of kernel has strides, and flags, of its own.
    for index, (rows, width) in enumerate(CORE if scope.full else EACH_KIND):
        dtype = scope.dtypes[index % len(scope.dtypes)]
        base = Case(rows, width, dtype)
        found += [
            replace(base, x_layout="aligned slice", dy_layout="wider slice"),
            replace(base, x_layout="odd slice"),
            replace(base, dy_layout="odd slice"),
            replace(base, x_layout="every other column", dy_layout="transposed"),
            replace(base, dy_layout="one number expanded"),
            replace(base, needs="x"),
            replace(base, needs="w"),
        ]
        heads = Case(8, width, dtype, x_layout=HEADS)
        found.append(replace(heads, dy_layout=HEADS))
        found += [] if scope.interpreted else [replace(heads, dy_layout="row expanded")]
    # One gradient alone is often code of its own, and many rows are more than one program's.
    for rows, width in MANY_ROWS[:1] if scope.interpreted else MANY_ROWS:
        found += [Case(rows, width, next(turns), needs=needs) for needs in ("x", "w")]
    narrow = [dtype for dtype in scope.dtypes if dtype != "float32"]
    mixed = [(dtype, "float32") for dtype in narrow]
    if len(scope.dtypes) > 2:
        mixed += [("float32", "bfloat16"), ("bfloat16", "float16")]
        mixed += [("float32", "float16"), ("float16", "bfloat16")]
    # A dw in another dtype than x is often added up by code of its own: many rows too.
    shapes = [(3, 17), (8, 64), (8, 1000), (8, 9000), (40, 24)]
    shapes += [] if scope.interpreted else [(300, 64), (140, 1024)]
    for (dtype, w_dtype), shape in itertools.product(mixed, shapes):
        found.append(replace(Case(*shape, dtype), w_dtype=w_dtype))
    return found


def _extremes(scope: Scope) -> list[Case]:
    """Feed scales, outliers, equal rows, zeros, ones, real activations."""
    found: list[Case] = []
    for dtype in scope.dtypes:
        narrow = [(3, 17), (8, 64), (8, 1000)]
        wide = [(3, 9000), (9, 1561), (3, 17000), (2, 33000)]
        shapes = narrow + (wide if scope.full or dtype == scope.dtypes[0] else [])
        for shape in shapes:
            base = Case(*shape, dtype)
            found += [replace(base, scale=scale) for scale in (1e-3, 4.0, 1e3)]
            found.append(replace(base, values="ones", scale=300.0))
            found.append(replace(base, values="equal in a row"))
        for values in ("equal in a row", "zeros", "a row of zeros", "outlier channel", "negative",
                       "dy like x", "steps", "zeros in w", "small dy", "large dy"):  # fmt: skip
            if values == "large dy" and dtype == "float16":
                continue  # eager code overflows there: the probe "loss_scale" says what it means
            found += [Case(*shape, dtype, values=values) for shape in ((4, 17), (8, 64))]
        found += [Case(M, N, dtype, values="one-hot", eps=1e-4 if scope.takes_eps else 1e-6)
                  for M, N in ((1, 4), (3, 17), (2, 2048))]  # fmt: skip
        found += [Case(8, 9000, dtype, values="equal in a row")]
        found += [Case(2, 4096, dtype, values="ones"), Case(1, 40000, dtype, values="ones")]
        if not scope.interpreted:
            found += [
                Case(1024, 8, dtype, values="ones"),
                Case(4096, 16, dtype, values="dy like x"),
            ]
        found += [Case(8, 384, dtype, values=layer) for layer in ("layer 0", "layer 5")]
    if "float32" in scope.dtypes:
        found += [Case(4, 64, scale=scale) for scale in (1e-12, 1e-6, 1e6, 1e12)]
    return found


def _eps(scope: Scope) -> list[Case]:
    """Feed rows about as small as the root of eps, with several eps, on each kind of kernel."""
    found = []
    for dtype in scope.dtypes:
        for eps in (1e-6, 1e-5, 1e-2):
            size = eps**0.5
            found += [Case(*shape, dtype, scale=size, eps=eps) for shape in ((3, 17), (8, 64))]
    # A default that takes the place of 0, a floor below which eps is not followed.
    for eps, size in ((0.0, 1e-3), (1e-12, 1e-6)):
        if "float32" in scope.dtypes:
            found += [Case(*shape, scale=size, eps=eps) for shape in ((3, 17), (8, 64))]
    wide = ((7, 40), (9, 1561), (3, 9000), (3, 17000), (2, 33000))
    return found + [Case(*shape, scope.dtypes[0], scale=1e-3) for shape in wide]


def probes(scope: Scope) -> list[tuple[str, Case]]:
    """List probes with the case they are run on, the smallest first."""
    shapes = [(4, 8), (5, 1000)] + ([] if scope.interpreted else [(9, 9000), (64, 384), (7, 33000)])
    if scope.interpreted:
        shapes += [(5, 9000)]
    found = []
    for name, probe in PROBES.items():
        if not set(probe.needs) <= set(scope.gives) or name in HUGE:
            continue
        dtypes = [d for d in scope.dtypes if not probe.dtypes or d in probe.dtypes]
        once = {"short_w", "float64", "double_vanishes", "state", "state_grads"}
        chosen = shapes[:1] if name in once else shapes
        if name == "loss_scale":
            chosen = [(5, 1000)] if scope.interpreted else [(5, 1000), (9, 9000)]
        if name.startswith("stale"):
            chosen = shapes[:2]
        if name.startswith(("batch", "same")):
            chosen = [*chosen, (5, 8192), (5, 17000), (3, 33000), (8, 64)]
        if name == "double":
            chosen = shapes[:2]
        for M, N in chosen:
            turn = dtypes if N < 500 else dtypes[:1]
            fed = [
                Case(M, N, d, eps=scope.eps, seed=scope.seed, one_plus=scope.one_plus)
                for d in turn
                if M >= probe.least_m
            ]
            found += [(name, case) for case in fed]
    if scope.huge:
        dtype = "bfloat16" if "bfloat16" in scope.dtypes else scope.dtypes[0]
        case = Case(2, 4096, dtype, eps=scope.eps, seed=scope.seed, one_plus=scope.one_plus)
        found += [(n, case) for n in sorted(HUGE) if set(PROBES[n].needs) <= set(scope.gives)]
    return found
