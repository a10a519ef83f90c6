import functools
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import node
from race_site import ROOT, data, site

from rmsnorm_ref import traffic
from rmsnorm_ref.measure import chain, choice, recording

__all__ = ["site"]  # the fixture
STATIC = ROOT / "docs/_static"
SPELLINGS: dict[int, tuple[str, traffic.Spelling]] = {
    0: ("eager", "seed"),
    1: ("eager_fp32", "fp32"),
}
CONTENDERS = ("eager", "eager_fp32", "ours")


load = functools.cache(recording.load)


@pytest.fixture(scope="module")
def evaluated(site: Path) -> list[dict[str, Any]]:
    """Return every race of the page as its script lays it out, run in node."""
    result = subprocess.run(
        [node(), str(ROOT / "tests/race_check.mjs")],
        input=json.dumps(data(site)),
        capture_output=True,
        text=True,
        check=True,
    )
    return list(json.loads(result.stdout))


def row_of(race: dict[str, Any], contender: str) -> recording.Row:
    """Return the kernel row that a lane's time must be from."""
    rows = recording.select(
        load(race["recording"]).rows,
        kind="kernel", section="seed", contender=contender, pass_=race["pass"],
        M=race["M"], N=race["N"], dtype=race["dtype"],
    )  # fmt: skip
    assert len(rows) == 1
    return rows[0]


def fused(race: dict[str, Any]) -> traffic.Traffic:
    """Count the fused lane anew."""
    count = {"forward": traffic.forward, "backward": traffic.backward}[race["pass"]]
    return count(race["M"], race["N"], getattr(torch, race["dtype"]))


def test_every_recorded_seed_cell_can_be_chosen(evaluated: list[dict[str, Any]]) -> None:
    """The race offers each cell of the seed's grid that some recording has with all lanes."""
    offered = {(race["M"], race["N"], race["dtype"]) for race in evaluated}
    for name in recording.shipped():
        rows = recording.select(load(name).rows, kind="kernel", section="seed")
        cells = {(row.M, row.N, row.dtype) for row in rows}
        for M, N, dtype in cells:
            of_cell = recording.select(rows, M=M, N=N, dtype=dtype)
            if len({row.contender for row in of_cell} & set(CONTENDERS)) == 3:
                assert (M, N, dtype) in offered
    assert len(offered) >= 24


def test_eager_lanes_are_the_modelled_chains(evaluated: list[dict[str, Any]]) -> None:
    """Kernels of eager lanes have the names, the order and the bytes that traffic.py counts."""
    for race in evaluated:
        for i, (_, spelling) in SPELLINGS.items():
            dtype = getattr(torch, race["dtype"])
            modelled = chain.model(race["M"], race["N"], dtype, spelling, race["pass"])
            kernels = race["lanes"][i]["kernels"]
            assert [(k["name"], k["bytes"]) for k in kernels] == [
                (kernel.name.replace("->", "→").replace("_to_copy", "cast"), kernel.n_bytes)
                for kernel in modelled
            ]


def test_fused_lane_moves_what_the_model_expects(evaluated: list[dict[str, Any]]) -> None:
    """The fused lane moves each tensor's bytes once, and the scratch of the recorded launch."""
    for race in evaluated:
        counted, lane = fused(race), race["lanes"][2]
        n_programs = row_of(race, "ours").n_programs or 0
        scratch = counted.scratch_bytes(n_programs)
        assert lane["bytes"] == counted.total_bytes + scratch
        expected = counted.per_tensor()
        if scratch:
            expected |= {
                ("partial_dw", "write"): scratch // 2,
                ("partial_dw", "read"): scratch // 2,
            }
        moved = {
            (tensor["tensor"], access): tensor["bytes"]
            for kernel in lane["kernels"]
            for access in ("read", "write")
            for tensor in kernel[f"{access}s"]
        }
        assert moved == expected


def test_lanes_end_when_they_were_measured_to(evaluated: list[dict[str, Any]]) -> None:
    """On the measured clock a lane ends at its recorded median, on the other at bytes over rate."""
    for race in evaluated:
        ours = row_of(race, "ours")
        assert ours.ceiling is not None
        assert ours.obligatory_bytes is not None
        for name, lane in zip(CONTENDERS, race["lanes"], strict=True):
            time_s = row_of(race, name).time_s
            assert time_s is not None
            modelled = lane["bytes"] * ours.ceiling.time_s / ours.obligatory_bytes
            assert lane["end"] == pytest.approx(modelled if race["byBytes"] else time_s.p50)
        assert race["end"] == max(lane["end"] for lane in race["lanes"])


def test_profiled_kernels_keep_their_shares(evaluated: list[dict[str, Any]]) -> None:
    """Where a profile is shipped, eager kernels share the lane's time as it says, else by bytes."""
    seen = set()
    for race, i in itertools.product(evaluated, SPELLINGS):
        lane = race["lanes"][i]
        took = [(kernel["end"] - kernel["start"]) / lane["end"] for kernel in lane["kernels"]]
        expected = [kernel["bytes"] / lane["bytes"] for kernel in lane["kernels"]]
        profiled = profile(race, SPELLINGS[i][0])
        if profiled and not race["byBytes"]:
            seen.add(race["pass"])
            expected = profiled
        assert took == pytest.approx(expected, abs=1e-5)
    assert seen == {"forward", "backward"}


def profile(race: dict[str, Any], contender: str) -> list[float]:
    """Return the shares of time of a chain's kernels in the first profile of it."""
    wanted = {
        "kind": "eager_kernel", "contender": contender, "pass_": race["pass"],
        "M": race["M"], "N": race["N"], "dtype": race["dtype"],
    }  # fmt: skip
    for found in choice.ranked(**wanted):
        rows = recording.select(found.rows, **wanted)
        times: list[float] = []
        fill = 0.0  # a fill of memory belongs to the reduction that it precedes
        for row in rows:
            assert row.time_s is not None
            assert row.detail is not None
            if row.detail["steps"]:
                times.append(row.time_s.p50 + fill)
            fill = 0.0 if row.detail["steps"] else row.time_s.p50
        if rows:
            return [time / sum(times) for time in times]
    return []


def test_bytes_moved_follow_the_kernels(evaluated: list[dict[str, Any]]) -> None:
    """Bytes moved start at 0, never fall, and at each kernel's end are those of all before."""
    for lane in (lane for race in evaluated for lane in race["lanes"]):
        assert lane["moved"][0] == 0
        assert lane["moved"] == sorted(lane["moved"])
        assert lane["moved"][-1] == pytest.approx(lane["bytes"])
        assert lane["finished"]
        totals = list(itertools.accumulate(kernel["bytes"] for kernel in lane["kernels"]))
        assert lane["atEnds"] == pytest.approx(totals)
        assert lane["atMiddles"] == list(range(len(totals)))
        assert lane["kernels"][0]["start"] == 0
        for one, after in itertools.pairwise(lane["kernels"]):
            assert one["end"] == after["start"]
        assert lane["kernels"][-1]["end"] == lane["end"]


def test_blocks_cross_the_whole_bus(evaluated: list[dict[str, Any]]) -> None:
    """A kernel's blocks are all off the bus when it begins, all across when it ends."""
    for lane in (lane for race in evaluated for lane in race["lanes"]):
        for before, midway, after in lane["trains"]:
            assert all(block["left"] + block["width"] <= 1e-9 for block in before)
            assert all(
                block["left"] >= -1e-9 + 1 - sum(b["width"] for b in after) for block in after
            )
            assert after[-1]["left"] == pytest.approx(1)
            assert any(-block["width"] < block["left"] < 1 for block in midway)


def test_a_cell_without_a_lane_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell in which one of the three was not recorded makes no race."""
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    import race_data  # type: ignore[import-not-found]  # found by the line above

    some = race_data.races()[0]
    rows = recording.select(
        load(some.recording).rows,
        kind="kernel", section="seed", M=some.M, N=some.N, dtype=some.dtype,
    )  # fmt: skip
    assert race_data.race("whole", rows, "forward") is not None
    for contender in CONTENDERS:
        fewer = [row for row in rows if row.contender != contender]
        assert race_data.race("less", fewer, "forward") is None


def test_script_is_small_and_asks_nobody() -> None:
    """The script is at most 15 kB, the style 6, and neither names another file or host."""
    for name, most in (("race.js", 15_000), ("race.css", 6_000)):
        text = (STATIC / name).read_text(encoding="utf-8")
        assert len(text.encode()) <= most
        for word in ("import ", "fetch(", "http", "url(", "XMLHttpRequest"):
            assert word not in text


def test_pages_without_a_race_load_no_script(site: Path) -> None:
    """Only a page with a race loads its script and style; the site's first page has one."""
    assert "race.js" in (site / "index.html").read_text(encoding="utf-8")
    assert "race." not in (site / "recordings.html").read_text(encoding="utf-8")
    assert "```{race}" in (ROOT / "docs/index.md").read_text(encoding="utf-8")
