"""Make a failing case small: fewer features, plainer values, fewer rows and columns, float32."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .cases import Case

MOST_RUNS = 90
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 64, 65, 100, 128, 129, 256, 257, 300, 512, 513,
        1024, 1025, 2048, 2049, 4096, 4097, 32768, 65535, 65536, 65537)  # fmt: skip
# One column is small and says little: there dx is nearly nothing.
COLUMNS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 40, 64, 65, 100, 128, 129, 256, 257, 384,
           512, 513, 768, 1000, 1024, 1025, 1536, 2048, 2049, 3000, 4096, 4097, 8192, 8193, 9000, 12000,
           16384, 16385, 17000, 32768, 32769, 33000, 65536, 65537)  # fmt: skip
PLAIN: dict[str, Any] = {
    "x_layout": "packed",
    "dy_layout": "packed",
    "w_layout": "packed",
    "lead": None,
    "w_dtype": "",
    "needs": "xw",
    "values": "random",
    "scale": 1.0,
    "eps": 1e-6,
}


class Shrinker:
    """Try smaller cases with `fails`, which is asked once about each.

    `plain` says what is plain for this candidate; None leaves a field as it is. `ahead` is told
    which `at_once` cases are asked about next: it may run them side by side. Up to `fine_up_to`
    columns are known to be fine: no narrower case is asked about.
    """

    def __init__(
        self,
        fails: Callable[[Case], bool],
        plain: dict[str, Any],
        dtypes: tuple[str, ...],
        ahead: Callable[[list[Case]], object] = len,
        at_once: int = 1,
        fine_up_to: int = 0,
    ) -> None:
        self._fine_up_to = fine_up_to
        self._fails, self._ahead, self._at_once = fails, ahead, at_once
        together = PLAIN | plain
        self._plain = {name: value for name, value in together.items() if value is not None}
        self._plain["lead"] = None
        self._dtypes = dtypes
        self._known: dict[Case, bool] = {}
        self._runs = 0

    def shrink(self, case: Case) -> tuple[Case, Case]:
        """Return the smallest failing case, and the one that still has the values it began with.

        The latter tells which feature is to blame: plain numbers are easier to read, and no cause.
        """
        self._runs = 0
        case = self._first(self._all_plain, case)
        for _ in PLAIN:
            case = self._first(self._one_plain, case)
        for _ in range(2):
            for stage in (self._rows, self._columns, self._dtype):
                case = self._first(stage, case)
        blamed = case
        for stage in (self._values, self._rows, self._columns):
            case = self._first(stage, case)
        return case, blamed

    def _first(self, stage: Callable[[Case], Iterator[Case]], case: Case) -> Case:
        tries = stage(case)
        while batch := list(itertools.islice(tries, self._at_once)):
            if self._runs < MOST_RUNS:
                self._ahead([smaller for smaller in batch if smaller not in self._known])
            for smaller in batch:
                if self._try(smaller):
                    return smaller
        return case

    def _try(self, case: Case) -> bool:
        if case not in self._known:
            if self._runs >= MOST_RUNS:
                return False
            self._runs += 1
            self._known[case] = self._fails(case)
        return self._known[case]

    def _all_plain(self, case: Case) -> Iterator[Case]:
        plain = replace(case, **self._plain)
        if plain != case and case.M:
            yield plain

    def _one_plain(self, case: Case) -> Iterator[Case]:
        if case.rows_in > 1:
            # More than two dimensions may be all that is wrong with it.
            lead, plain = case.shape[:-1], {"x_layout": "packed", "dy_layout": "packed"}
            yield replace(case, lead=lead, **plain)  # type: ignore[arg-type]
        for name, value in self._plain.items():
            if getattr(case, name) != value:
                yield replace(case, **{name: value})

    def _values(self, case: Case) -> Iterator[Case]:
        if case.values == "random":
            yield replace(case, values="ones")
            yield replace(case, values="steps")

    def _rows(self, case: Case) -> Iterator[Case]:
        if case.lead is not None:
            return
        for M in ROWS:
            if M < case.M and M % case.rows_in == 0:
                yield replace(case, M=M)

    def _columns(self, case: Case) -> Iterator[Case]:
        if case.values.startswith("layer"):
            return
        for N in COLUMNS:
            if self._fine_up_to < N < case.N:
                yield replace(case, N=N)

    def _dtype(self, case: Case) -> Iterator[Case]:
        for dtype in self._dtypes:
            if dtype in {case.dtype, case.w_dtype}:
                return
            yield replace(case, dtype=dtype)
