"""The table that ends a run."""

from __future__ import annotations

import dataclasses

from fabricated import fabricated

from rmsnorm_ref.measure import recording, schema, table


def test_table_shows_ours_beside_ceiling_and_best_peer() -> None:
    """One line per cell and pass: time, bandwidth, share of the ceiling, best peer, flags."""
    (some,) = recording.select(
        fabricated().rows,
        kind="kernel",
        section="seed",
        contender="ours",
        pass_=schema.FORWARD,
        M=512,
        N=2048,
    )
    ours = dataclasses.replace(
        some,
        time_s=schema.Quantiles(3.9e-6, 4e-6, 4.1e-6),
        repeat_time_s=4.04e-6,
        obligatory_bytes=8_000_000,
        ceiling=schema.Ceiling("torch.neg", 3e-6),
        flags=("fits_in_l2",),
    )
    slow, fast = (
        dataclasses.replace(ours, contender=name, time_s=schema.Quantiles(t, t, t), flags=flags)
        for name, t, flags in (("eager", 9e-6, ()), ("fla", 5e-6, ("by_difference",)))
    )
    line = table.table([slow, ours, fast]).splitlines()[1]
    assert line.split() == [
        *("seed", "512", "x", "2048", "bfloat16", "forward", "4.00", "3.90", "-", "4.10", "2.00"),
        *("0.750", "fla", "5.00", "1.25", "1.0%", "ld"),
    ]


def test_table_covers_every_kind() -> None:
    """Host times have lines of their own, other kinds are counted, and no rows are no table."""
    rows = list(fabricated().rows)
    text = table.table(rows)
    assert "host, us per call" in text
    assert "GPUs at once" in text
    for kind in ("config", "ablation", "error", "counter", "eager_kernel"):
        assert f"{len(recording.select(rows, kind=kind))} {kind}" in text
    assert table.table([]) == ""
