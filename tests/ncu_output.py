"""What Nsight Compute prints, made up: its messages, then a table with a line per metric."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from rmsnorm_ref.measure import ncu

if TYPE_CHECKING:
    from collections.abc import Sequence

ERF = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::erf_kernel_cuda("
    "at::TensorIteratorBase &)::[lambda() (instance 1)]::operator ()() const, "
    'std::array<char *, 2>>(int, T2, "T3")'
)
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"\n'
)
Counted = tuple[str, str, str]


def table(launches: Sequence[Counted], unit: str = "byte") -> str:
    """Write what ncu writes for launches (kernel, bytes read, bytes written), all as text."""
    out = io.StringIO()
    out.write("==PROF== Connected to process 4711 (/usr/bin/python3.12)\n")
    for i, (kernel, _, _) in enumerate(launches):
        out.write(f'==PROF== Profiling "{kernel[:30]}" - {i}: 0%....50%....100% - 1 pass\n')
    out.write("==PROF== Disconnected from process 4711\n" + HEADER)
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    section = "Command line profiler metrics"
    for i, (kernel, *values) in enumerate(launches):
        where = [i, 4711, "python3.12", "127.0.0.1", kernel, 1, 7, "(128, 1, 1)", "(1, 1, 1)", 0]
        for metric, value in zip(ncu.METRICS, values, strict=True):
            writer.writerow([*where, "9.0", section, metric, unit, value])
    return out.getvalue()
