"""The figures of the site, each drawn by one call on a recording.

    from rmsnorm_ref.measure import figures, recording
    figures.bandwidth_by_cell(recording.load("h200"), pass_="forward")

Every function but two takes a `Recording`, shipped or just measured, and says in the image which of
the two it is; `curves` and `dots` draw what a script computed on the spot. Each returns a
`Drawing`: the figure, and one sentence of alt text made from the same rows. Numbers in titles and
sentences are computed from the rows too. Where rows are missing, a ValueError names them; without
matplotlib, an ImportError says how to get it.
"""

from .diagnostics import counters, eager_chain, error_by_cell, host_time
from .plain import Words, curves, dots
from .results import bandwidth_by_cell, prediction, time_by_cell
from .style import Drawing
from .sweeps import ablation, config_cost, size_sweep, width_sweep

__all__ = [
    "Drawing",
    "Words",
    "ablation",
    "bandwidth_by_cell",
    "config_cost",
    "counters",
    "curves",
    "dots",
    "eager_chain",
    "error_by_cell",
    "host_time",
    "prediction",
    "size_sweep",
    "time_by_cell",
    "width_sweep",
]
