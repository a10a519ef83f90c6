"""More facts for prose: spans over the cells of a section, and what explains a speed-up.

`evidence.py` has single cells; here are the functions over many. `results_tables.py` adds `NAMES`
to what the `fact` role may use.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from evidence import Fact, n, percent

from rmsnorm_ref import traffic
from rmsnorm_ref.measure import again, choice, explanation, recording
from rmsnorm_ref.measure.cells import CELL_SECTIONS
from rmsnorm_ref.measure.choice import picked
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rmsnorm_ref.measure.recording import Recording, Row

TIMES = "\u00d7"  # the multiplication sign
NO_BREAK = "\u00a0"
SPELLINGS: dict[str, traffic.Spelling] = {"eager": "seed", "eager_fp32": "fp32"}


def seconds(row: Row) -> float:
    """Return the median time of a timed row."""
    assert row.time_s is not None
    return row.time_s.p50


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Print the smallest and the largest value, or one where both print alike."""
    found = sorted(values)
    low, high = form.format(found[0]), form.format(found[-1])
    return low if low == high else f"{low} to {high}"


def cell_name(row: Row) -> str:
    """Return the shape as the site writes it: M, a multiplication sign, N."""
    return f"{row.M} {TIMES} {row.N}".replace(" ", NO_BREAK)


def _cell(row: Row) -> tuple[Any, ...]:
    return row.M, row.N, row.dtype, row.pass_


# ---- Spans over a section ---------------------------------------------------------------------


def shares(pass_: str, section: str = "seed", **equal: Any) -> Fact:
    """Return the least and the largest share of the ceiling that ours reaches in a section."""
    rows, source = picked(kind="kernel", section=section, contender="ours", pass_=pass_, **equal)
    found = spread((100 * row.share_of_ceiling for row in rows), "{:.0f}")
    return Fact(f"{found} %", source.id)


class Race(NamedTuple):
    """Hold one cell's time of ours and of one other contender."""

    ours: Row
    other: Row

    @property
    def ratio(self) -> float:
        """Return how many times as long as ours the other one takes."""
        return seconds(self.other) / seconds(self.ours)


def races(rows: Sequence[Row]) -> list[Race]:
    """Pair every row of another contender with ours of the same cell, pass and dtype."""
    ours = {_cell(row): row for row in rows if row.contender == "ours"}
    return [
        Race(ours[_cell(row)], row)
        for row in rows
        if row.contender != "ours" and _cell(row) in ours
    ]


def speedups(other: str, pass_: str, section: str = "seed", **equal: Any) -> Fact:
    """Return the least and the largest factor by which another contender takes longer."""
    rows, source = picked(kind="kernel", section=section, pass_=pass_, **equal)
    ratios = [race.ratio for race in races(rows) if race.other.contender == other]
    return Fact(spread(ratios, "{:.2f}"), source.id)


def lost(rows: Sequence[Row]) -> list[Race]:
    """Return our race against the fastest peer of each cell where it beats us beyond the noise."""
    fastest: dict[tuple[Any, ...], Race] = {}
    for race in races(rows):
        best = fastest.get(_cell(race.ours))
        if best is None or race.ratio < best.ratio:
            fastest[_cell(race.ours)] = race
    noise = {at: max(_noise(race.ours), _noise(race.other)) for at, race in fastest.items()}
    return [race for at, race in fastest.items() if race.ratio < 1 - noise[at]]


def _noise(row: Row) -> float:
    return row.noise if row.repeat_time_s is not None else 0.0


def all_lost() -> tuple[list[Race], tuple[str, ...]]:
    """Return the lost races of all sections, and the ids of the recordings that were looked at."""
    found: list[Race] = []
    sources: dict[str, None] = {}
    for section, pass_ in itertools.product(CELL_SECTIONS, (FORWARD, BACKWARD)):
        try:
            rows, source = picked(kind="kernel", section=section, pass_=pass_)
        except LookupError:
            continue
        sources[source.id] = None
        found += lost(rows)
    return found, tuple(sources)


def worst_loss() -> Fact:
    """Return by how much the fastest peer is faster where we lose most: a share of our time."""
    races, sources = all_lost()
    most = max((1 - race.ratio for race in races), default=0)
    return Fact(percent(most, 1), sources[0])


class Repeat(NamedTuple):
    """Hold two full runs of the seed's cells, and how far each median moved between them."""

    moved: dict[Row, float]
    after: Recording
    before: Recording


def repeated() -> Repeat:
    """Return the two newest full runs of the same kernels, of these if there are two.

    What they tell is how well a run repeats, whichever kernels it timed.

    Raises:
        LookupError: no two full runs are of the same kernels.
    """
    run = {"kind": "kernel", "section": "seed"}
    ranked = choice.ranked(**run)  # those of these kernels first, then the newest
    n_rows = [len(recording.select(each.rows, **run)) for each in ranked]
    full = [each for each, found in zip(ranked, n_rows, strict=True) if found == max(n_rows)]
    for after in full:
        kernels = after.provenance.fingerprint
        same = [each for each in full if each.provenance.fingerprint == kernels]
        if len(same) > 1:
            before = same[1]
            return Repeat(again.moves(recording.select(after.rows, **run), before), after, before)
    raise LookupError("no two runs of all seed cells are of the same kernels")


def most_moved() -> Fact:
    """Return how far the median that moved most lies from that of the run before."""
    found = repeated()
    most = max(abs(move) for move in found.moved.values())
    return Fact(percent(most, 1), found.after.id)


def moved_between(contender: str, after: str, before: str) -> Fact:
    """Return how far a contender's median that moved most lies from that of another recording."""
    later, earlier = recording.load(after), recording.load(before)
    rows = recording.select(later.rows, section="seed", contender=contender)
    most = max(abs(move) for move in again.moves(rows, earlier).values())
    return Fact(percent(most, 1), later.id)


def not_beaten(pass_: str, section: str = "seed") -> Fact:
    """Return in how many cells of a section no peer was faster: "23 of 24"."""
    rows, source = picked(kind="kernel", section=section, pass_=pass_)
    n_cells = len({_cell(race.ours) for race in races(rows)})
    return Fact(f"{n_cells - len(lost(rows))} of {n_cells}", source.id)


# ---- Single kinds of rows ---------------------------------------------------------------------


def turned(knob: str, value: int | str, base: int | str, **shape: int) -> Fact:
    """Return how much longer the backward takes with a knob at one value than at another."""
    rows, source = picked(kind="ablation", knob=knob, **shape)
    by_cell: dict[tuple[Any, ...], dict[int | str, float]] = {}
    for row in rows:
        assert row.detail is not None
        by_cell.setdefault(_cell(row), {})[row.detail["value"]] = seconds(row)
    ratios = [times[value] / times[base] for times in by_cell.values()]
    return Fact(spread(ratios), source.id)


def config_cost(pass_: str, which: Literal["worst", "shipped"]) -> Fact:
    """Return the time of the slowest config that is tried, or of the shipped one, over the best."""
    rows, source = picked(kind="config", pass_=pass_)
    ratios = []
    for N in {row.N for row in rows}:
        times = {row.config: seconds(row) for row in rows if row.N == N}
        kept = {row.config for row in rows if row.N == N and row.detail and row.detail["shipped"]}
        among = times.values() if which == "worst" else [times[config] for config in kept]
        ratios.append(max(among, default=min(times.values())) / min(times.values()))
    return Fact(spread(ratios), source.id)


def counted(contender: str, pass_: str, M: int, N: int, access: Literal["read", "write"]) -> Fact:
    """Return DRAM bytes counted over bytes modelled for one access of one cell, in per cent."""
    rows, source = picked(kind="counter", contender=contender, pass_=pass_, M=M, N=N)
    assert rows[0].detail is not None
    detail = rows[0].detail
    ratio = detail[f"dram_{access}_bytes"] / detail[f"model_{access}_bytes"]
    return Fact(percent(ratio), source.id)


def partial_buffer_read(M: int, N: int) -> Fact:
    """Return what share of the partial buffer's reads reached DRAM in one backward, at least 0."""
    rows, source = picked(kind="counter", contender="ours", pass_=BACKWARD, M=M, N=N)
    assert rows[0].detail is not None
    detail = rows[0].detail
    model = traffic.backward(M, N, recorded_dtype(rows[0]))
    rest = detail["model_read_bytes"] - _reads(model)
    beyond = max(0, detail["dram_read_bytes"] - _reads(model))
    return Fact(percent(beyond / rest), source.id)


def _reads(model: traffic.Traffic) -> int:
    return sum(
        step.n_bytes
        for step in model.steps
        if step.access == "read" and step.role in {"obligatory", "small"}
    )


def recorded_dtype(row: Row) -> Any:
    """Return a row's dtype as torch has it."""
    import torch  # noqa: PLC0415  # the name alone is wanted, and only here

    return getattr(torch, row.dtype)


def worst_error(contender: str, tensor: str) -> Fact:
    """Return the largest error over bound that was recorded for y, dx or dw."""
    rows, source = picked(kind="error", contender=contender)
    found = [
        row.detail["error_over_bound"][tensor]
        for row in rows
        if row.detail and tensor in row.detail["error_over_bound"]
    ]
    worst = max(value for value in found if value is not None)
    form = f"{worst:.3f}" if worst < 1.1 else f"{worst:.3g}" if worst < 1000 else n(round(worst))
    return Fact(form, source.id)


def host_us(contender: str, pass_: str = FORWARD, *, gradients: bool = False) -> Fact:
    """Return the host's time per call in microseconds."""
    rows, source = picked(kind="host", contender=contender, pass_=pass_)
    row = next(row for row in rows if row.detail and row.detail["requires_grad"] == gradients)
    return Fact(f"{1e6 * seconds(row):.0f} µs", source.id)


# ---- Predicted and measured -------------------------------------------------------------------


def explanations() -> list[tuple[Row, explanation.Explanation, tuple[str, str]]]:
    """Explain every eager chain that was profiled: its first kernel's row, how, and its sources.

    The fused time comes from the same recording, or from the one that speaks for the cell.
    """
    rows, source = picked(kind="eager_kernel")
    found = []
    for key in dict.fromkeys((row.contender, *_cell(row)) for row in rows):
        kernels = [row for row in rows if (row.contender, *_cell(row)) == key]
        first = kernels[0]
        cell = {
            "kind": "kernel", "contender": "ours", "pass_": first.pass_,
            "M": first.M, "N": first.N, "dtype": first.dtype,
        }  # fmt: skip
        for candidate in (source, *choice.ranked(**cell)):
            fused = recording.select(candidate.rows, **cell)
            if fused:
                chain = recording.select(candidate.rows, **(cell | {"contender": first.contender}))
                explained = explanation.explain(kernels, fused[0], chain[0] if chain else None)
                found.append((first, explained, (source.id, candidate.id)))
                break
    return found


def explained(contender: str, pass_: str, what: str, form: str = "{:.2f}") -> Fact:
    """Return one number of the explanation of the largest chain that was profiled."""
    found = [e for e in explanations() if (e[0].contender, e[0].pass_) == (contender, pass_)]
    row, numbers, (source, _) = max(found, key=lambda each: each[0].M * each[0].N)
    if what == "cell":
        return Fact(cell_name(row), source)
    return Fact(form.format(getattr(numbers, what)), source)


def predicted(other: str, pass_: str, *, n_bytes: int = 2) -> str:
    """Return the speed-up that counting bytes predicts; it does not depend on the shape."""
    import torch  # noqa: PLC0415  # as above

    dtype = torch.bfloat16 if n_bytes == 2 else torch.float32
    eager = traffic.eager_forward if pass_ == FORWARD else traffic.eager_backward
    fused: Callable[..., traffic.Traffic] = (
        traffic.forward if pass_ == FORWARD else traffic.backward
    )
    spelling = SPELLINGS[other]
    ratio = traffic.predicted_speedup(
        eager(4096, 4096, dtype, spelling=spelling), fused(4096, 4096, dtype)
    )
    return f"{ratio:.3g}"


def largest_chain(contender: str, pass_: str) -> tuple[list[Row], Recording]:
    """Return the kernels of the largest chain that was profiled, and the recording."""
    rows, source = picked(kind="eager_kernel", contender=contender, pass_=pass_)
    largest = max(rows, key=lambda row: row.M * row.N)
    return recording.select(rows, M=largest.M, N=largest.N, dtype=largest.dtype), source


def general_share(contender: str, pass_: str) -> Fact:
    """Return which share of the largest chain's kernel time PyTorch's general kernels take.

    They serve operands that are broadcast or cast, element by element; the others load vectors.
    """
    rows, source = largest_chain(contender, pass_)
    whole = sum(map(seconds, rows))
    general = sum(seconds(row) for row in rows if kernel_name(row) == "elementwise_kernel")
    return Fact(percent(general / whole), source.id)


def kernel_name(row: Row) -> str:
    """Return the bare name of the CUDA kernel behind an "eager_kernel" row."""
    assert row.detail is not None
    name: str = row.detail["kernel"]
    found = re.search(r"(\w+)<", name)
    return found[1] if found else name.partition(" (")[0]


NAMES: dict[str, Any] = {
    function.__name__: function
    for function in (
        shares, speedups, not_beaten, turned, config_cost, counted, partial_buffer_read,
        worst_error, host_us, explained, predicted, general_share, worst_loss, most_moved,
        moved_between,
    )
}  # fmt: skip
