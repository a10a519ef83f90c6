"""The order of the gallery's pages: that of the argument, which no file name carries."""

from __future__ import annotations

from pathlib import Path

ORDER = (
    "plot_forward.py",
    "plot_backward.py",
    "plot_bytes.py",
    "plot_bandwidth.py",
    "plot_counters.py",
    "plot_widths.py",
    "plot_fp32_sums.py",
    "plot_dw_without_atomics.py",
    "plot_autotuning.py",
    "plot_oracle_mutants.py",
    "plot_foreign_kernel.py",
    "plot_review_a_wrong_kernel.py",
    "plot_language_model.py",
)


class Argument:
    """Sort scripts as `ORDER` does, and what it does not have after that, by name."""

    def __init__(self, src_dir: str) -> None:
        del src_dir  # sphinx-gallery hands it to every key

    def __call__(self, name: str) -> tuple[int, str]:
        """Return the place of a script."""
        file = Path(name).name
        return ORDER.index(file) if file in ORDER else len(ORDER), file

    def __repr__(self) -> str:
        """Return what sphinx-gallery keeps to tell whether its configuration changed."""
        return f"<Argument {ORDER}>"
