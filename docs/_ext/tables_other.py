"""Tables of all other rows: eager chains, host times, counters; and of kernels broken on purpose.

The functions are used as those of `tables.py` are.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import findings
import proofs
from evidence import percent
from findings import TIMES, cell_name, seconds
from tables import DASH, SHAPE, Table, label

from rmsnorm_ref.measure import again
from rmsnorm_ref.measure.choice import picked
from rmsnorm_ref.measure.schema import FORWARD

if TYPE_CHECKING:
    from collections.abc import Callable


def chain(contender: str, pass_: str) -> Table:
    """List the kernels of an eager chain: time, bytes, bandwidth; the largest cell recorded."""
    rows, source = findings.largest_chain(contender, pass_)
    largest = rows[0]
    body = []
    for row in rows:
        assert row.detail is not None
        n_bytes = row.detail["n_bytes"]
        name = " + ".join(row.detail["steps"]) or row.detail["kernel"]
        rate = n_bytes / seconds(row) / 1e12
        small = n_bytes < largest.M * largest.N
        body.append(
            (
                name.replace("->", "→"),
                findings.kernel_name(row).replace("_", " "),
                f"{1e6 * seconds(row):.1f}",
                f"{n_bytes / 1e6:.1f}" if n_bytes else "not in the model",
                DASH if small else f"{rate:.2f}",
            )
        )
    caption = (
        f"{label(contender)}, {pass_}, {cell_name(largest)}, {largest.dtype}, kernel by kernel"
    )
    return Table(
        caption, ("operator → output", "CUDA kernel", "µs", "MB", "TB/s"), body, (source.id,)
    )


SHORT = {"eager": "eager", "eager_fp32": "fp32"}


def explained() -> Table:
    """List what lies between predicted and measured speed-up for every profiled chain."""
    body = []
    sources: dict[str, None] = {}
    for row, numbers, source in findings.explanations():
        sources |= dict.fromkeys(source)
        body.append(
            (
                f"{SHORT[row.contender]} {row.pass_}, {cell_name(row)}",
                f"{numbers.predicted:.2f}",
                f"{numbers.fused_bandwidth / 1e12:.2f}",
                f"{numbers.eager_bandwidth / 1e12:.2f}",
                f"{numbers.bandwidth_factor:.3f}",
                f"{numbers.left_out:.3f}",
                f"{numbers.measured:.2f}",
            )
        )
    titles = (
        "chain", "predicted", "fused", "eager", f"{TIMES} bandwidths", "+ left out", "measured",
    )  # fmt: skip
    caption = f"Predicted {TIMES} bandwidths + left out = measured"
    caption += "; fp32: eager with fp32 inside; fused, eager: TB/s"
    return Table(caption, titles, body, tuple(sources))


def host() -> Table:
    """List the host's time per call by contender."""
    rows, source = picked(kind="host")
    kinds: tuple[tuple[str, bool], ...] = (
        (FORWARD, False), (FORWARD, True), ("forward+backward", True),
    )  # fmt: skip
    times: dict[tuple[str, tuple[str, bool]], float] = {
        (row.contender, (row.pass_, row.detail["requires_grad"])): seconds(row)
        for row in rows
        if row.detail
    }
    body = [
        (
            label(name),
            *(
                f"{1e6 * times[name, kind]:.0f}" if (name, kind) in times else DASH
                for kind in kinds
            ),
        )
        for name in dict.fromkeys(row.contender for row in rows)
    ]
    caption = f"Host time per call in µs, {cell_name(rows[0])}, {rows[0].dtype}"
    kinds_said = ("forward, no gradients", "forward, for a backward", "forward and backward")
    return Table(caption, ("implementation", *kinds_said), body, (source.id,))


def cold() -> Table:
    """List the time of one call after the L2 was overwritten."""
    rows, source = picked(kind="cold")
    body = [
        (
            f"{row.pass_}, {cell_name(row)}",
            label(row.contender),
            f"{1e6 * seconds(row):.1f}",
        )
        for row in rows
    ]
    caption = f"One call with a cold L2, {rows[0].dtype}"
    return Table(caption, (f"pass, {SHAPE}", "kernel", "µs"), body, (source.id,))


def scaling() -> Table:
    """List the time of a call by how many GPUs work at once."""
    rows, source = picked(kind="scaling")
    first = rows[0]
    times = {row.detail["n_gpus"]: seconds(row) for row in rows if row.detail}
    body = [
        (str(n_gpus), f"{1e6 * time_s:.1f}", f"{100 * times[min(times)] / time_s:.1f} %")
        for n_gpus, time_s in sorted(times.items())
    ]
    caption = (
        f"Both passes of {cell_name(first)} {first.dtype} on each of several GPUs at once: "
        "a call on the slowest"
    )
    return Table(caption, ("GPUs", "µs", "one alone / slowest"), body, (source.id,))


def counters() -> Table:
    """List DRAM bytes counted beside bytes modelled."""
    rows, source = picked(kind="counter")
    body = []
    for row in rows:
        assert row.detail is not None
        read, written = row.detail["dram_read_bytes"], row.detail["dram_write_bytes"]
        model = row.detail["model_read_bytes"], row.detail["model_write_bytes"]
        numbers = (read, model[0], written, model[1])
        total = (read + written) / sum(model)
        body.append(
            (
                f"{label(row.contender)}, {row.pass_}, {cell_name(row)}",
                *(f"{number / 1e6:.1f}" for number in numbers),
                f"{total:.2f}",
            )
        )
    counted = ("read, MB", "model", "written, MB", "model", "counted / model")
    titles = ("implementation, pass, shape", *counted)
    caption = f"DRAM bytes by hardware counters beside the model's, {rows[0].dtype}"
    return Table(caption, titles, body, (source.id,))


def repeat() -> Table:
    """List by contender how far two runs of all seed cells lie apart, on kernels as they are."""
    moved, after, before = findings.repeated()
    by: dict[str, list[float]] = {}
    for row, move in moved.items():
        by.setdefault(row.contender, []).append(abs(move))
    body = [
        (
            label(name),
            percent(statistics.median(found), 1),
            percent(max(found), 1),
            f"{sum(move >= again.FAR for move in found)} of {len(found)}",
        )
        for name, found in by.items()
    ]
    far = f"{percent(again.FAR)} or more"
    caption = "How far the median of a seed cell lies from that of another run"
    titles = ("implementation", "median", "largest", far)
    return Table(caption, titles, body, (after.id, before.id))


def faults(by: str) -> Table:
    """List the broken kernels that a bound or a property rejects, and why each one happens."""
    names = [fault for fault in proofs.faults() if by in fault.rejected_by]
    if not names:
        raise LookupError(f"no broken kernel is rejected by {by!r}")
    what = f"the bound of {by}" if by in {"y", "dx", "dw"} else f"the property “{by}”"
    caption = f"Broken kernels that {what} rejects"
    return Table(caption, ("fault", "why it happens"), [(fault.name, fault.why) for fault in names])


TABLES: dict[str, Callable[..., Table]] = {
    function.__name__: function
    for function in (chain, explained, host, cold, scaling, counters, repeat, faults)
}
