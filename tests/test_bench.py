"""The command `python -m rmsnorm_ref bench`: its plan, its rows, its endings, its table."""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fabricated import fabricated, slowed
from made_up_clock import made_up_session
from paths import DEVICE

from rmsnorm_ref import __main__, tiling, traffic, tuning
from rmsnorm_ref.measure import (
    bench,
    cells,
    peers,
    plan,
    recording,
    schema,
    timing,
)
from rmsnorm_ref.measure.plan import Step
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD, Config
from rmsnorm_ref.measure.session import GpuLostError, Session, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from rmsnorm_ref.measure.recording import Provenance, Row

BF16 = torch.bfloat16


def facts(*, interrupted: bool) -> Provenance:
    """Return a provenance that nothing was measured for."""
    return dataclasses.replace(fabricated().provenance, interrupted=interrupted)


# ---- What is asked for ------------------------------------------------------------------------


def test_sections_hold_the_cells_they_are_named_for() -> None:
    """The seed has 12 shapes in two dtypes; each path and the whole range of widths occur."""
    seed = cells.cells("seed")
    assert len(set(seed)) == len(seed) == 24
    everything = [cell for name in cells.CELL_SECTIONS for cell in cells.cells(name)]
    paths = {tiling.backward_path(cell.M, cell.N, traffic.GPU, cell.dtype) for cell in everything}
    assert paths == {*tuning.SPACES, "few_rows_backward"} - {"forward", "wide_forward"}
    widths = cells.cells("widths")
    assert {64, 65536, 769, 4095} < {cell.N for cell in widths}
    sizes = [cell.M * cell.N for cell in widths]
    assert max(sizes) == 2**25
    assert min(sizes) > 2**25 - 2**16
    rows = [cell.M for cell in cells.cells("sizes")]
    assert rows == [64 * 2**i for i in range(11)]
    assert {cell.contenders for cell in widths} == {cells.FEW_CONTENDERS}


def test_errors_cover_every_path() -> None:
    """Cells whose error is recorded reach every kernel of both passes."""
    found = cells.error_cells()
    backward = {tiling.backward_path(cell.M, cell.N, traffic.GPU, cell.dtype) for cell in found}
    forward = {tiling.forward_path(cell.N) for cell in found}
    assert backward | forward == {*tuning.SPACES, "few_rows_backward"}


def test_all_is_every_section() -> None:
    """`all` names each section once, and a list keeps the order of a full run."""
    assert tuple(cells.sections("all")) == (*cells.CELL_SECTIONS, *cells.EXTRA_SECTIONS)
    assert cells.sections("host,wide") == ["wide", "host"]


@pytest.mark.parametrize("only", ["all", "seed", "cold", "configs", "counters", "eager", "scaling"])
@pytest.mark.parametrize("passes", [(FORWARD,), (FORWARD, BACKWARD)])
def test_every_section_has_steps(only: str, passes: tuple[schema.OnePass, ...]) -> None:
    """Each section gives steps with different labels, and `all` those of all sections.

    What a step calls takes the arguments that it is given.
    """
    asked = Session(torch.device("cpu"), 1024, passes)
    steps = list(plan.steps(asked, cells.sections(only), None))
    labels = [step.label for step in steps]
    assert labels
    for step in steps:
        inspect.signature(step.measure).bind()
    assert len(set(labels)) == len(labels)
    if only == "all":
        single = {
            step.label
            for name in (*cells.CELL_SECTIONS, *cells.EXTRA_SECTIONS)
            for step in plan.steps(asked, [name], None)
        }
        assert set(labels) == single


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cells", "seeds"], "--cells 'seeds'"),
        (["--cells", ""], "--cells ''"),
        (["--dtype", "fp16"], "--dtype 'fp16'"),
        (["--passes", "forwards"], "--passes 'forwards'"),
        (["--peers", "eager,apex"], "--peers 'eager,apex'"),
        (["--against", "yesterday"], "--against 'yesterday': no recording"),
    ],
)
def test_a_wrong_word_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown word gives exit code 2 and a list of the known ones, GPU or not."""
    assert __main__.main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_out_is_always_a_new_file(tmp_path: Path) -> None:
    """A file that is there, a missing folder or another ending is refused before any timing."""
    there = tmp_path / "there.json"
    there.touch()
    for wrong in (there, tmp_path / "no" / "a.json", tmp_path / "a.txt", tmp_path / "a.json.json"):
        with pytest.raises(ValueError, match="--out"):
            plan.out_path(str(wrong), "NVIDIA H200")
    assert plan.out_path(str(tmp_path / "new.json"), "NVIDIA H200").name == "new.json"
    assert plan.out_path(None, "NVIDIA H200").name.startswith("rmsnorm_ref-nvidia-h200-20")


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU here")
def test_no_gpu_gives_3(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU the command says so in one line, with an exit code of its own."""
    assert __main__.main(["bench"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_missing_peers_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A peer that is not installed is said once, with what to install; the others are taken."""
    asked = made_up_session()
    plan.choose_peers(asked, tuple(peers.contenders()))
    missing = [name for name, peer in peers.contenders().items() if peer.missing_reason]
    assert [note.split(" is missing")[0] for note in asked.notes] == missing
    assert set(asked.peers) == set(peers.contenders()) - set(missing)
    assert capsys.readouterr().err.count("is missing") == len(missing)


# ---- Endings ----------------------------------------------------------------------------------


def kernel_row(**more: Any) -> Row:
    """Return one valid kernel row of ours."""
    found = recording.select(
        fabricated().rows, kind="kernel", section="seed", contender="ours", pass_=FORWARD
    )
    return dataclasses.replace(found[0], **more)


def a_step(label: str, *rows: Row, before: Callable[[], object] = lambda: None) -> Step:
    """Make a step that does something and returns rows."""

    def measure() -> list[Row]:
        before()
        return list(rows)

    return Step(label, 1, measure)


def raising(error: BaseException) -> Callable[[], object]:
    """Return a call that raises."""

    def call() -> None:
        raise error

    return call


def test_a_run_ends_with_a_recording_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of all steps are saved in order, nothing else is left, and the table comes last."""
    path = tmp_path / "run.json"
    rows = [kernel_row(M=512), kernel_row(M=1024)]
    steps = [a_step("one", rows[0]), a_step("two", rows[1])]
    assert bench.execute(made_up_session(), steps, path, facts) == 0
    found = recording.load(path)
    assert list(found.rows) == rows
    assert not found.provenance.interrupted
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    printed = capsys.readouterr().out
    assert "512 x" in printed
    assert printed.splitlines()[-1] == f"recording: {path}"


def test_a_run_says_how_far_it_moved(tmp_path: Path) -> None:
    """Held against an earlier recording, a run notes its largest move, ours and peers apart."""
    before = fabricated()
    ours, peer = (
        recording.select(before.rows, kind="kernel", section="seed", contender=name)
        for name in ("ours", "liger")
    )
    (searched,) = recording.select(before.rows, kind="kernel", section="seed", contender="fla")[:1]
    was, now = (dataclasses.replace(searched, N=5, config=Config(n, 1)) for n in (4, 8))
    before = dataclasses.replace(before, rows=(*before.rows, was))
    anew = slowed(now, 1.1)
    rows = [*ours[:-1], slowed(ours[-1], 1.05), slowed(peer[0], 0.98), *peer[1:], anew]
    asked, path = made_up_session(), tmp_path / "run.json"
    asked.before = before
    assert bench.execute(asked, [a_step("all", *rows)], path, facts) == 0
    (note,) = asked.notes
    last = ours[-1]
    assert note == (
        f"against fabricated: ours: {len(ours)} medians moved by 0.0% (median), 5.0% at most "
        f"(ours, seed {last.M} x {last.N} bfloat16 {last.pass_}); 1 by 3% or more; "
        f"peers: {len(peer) + 1} medians moved by 0.0% (median), 10.0% at most "
        f"(fla, seed {anew.M} x 5 bfloat16 {anew.pass_}); 1 by 3% or more "
        "(1 of them with another config)"
    )
    asked.notes.clear()
    assert bench.execute(asked, [a_step("one", kernel_row(N=3))], tmp_path / "2.json", facts) == 0
    assert asked.notes == ["against fabricated: no cell in common"]


def test_a_step_that_fails_does_not_cost_the_run(tmp_path: Path) -> None:
    """What it raised becomes a note, and the steps after it are measured."""
    asked = made_up_session()
    steps = [a_step("bad", before=raising(ValueError("odd"))), a_step("good", kernel_row())]
    assert bench.execute(asked, steps, tmp_path / "run.json", facts) == 0
    assert asked.notes == ["bad: all of it is missing: ValueError: odd"]
    assert len(recording.load(tmp_path / "run.json").rows) == 1


def test_nothing_measured_gives_4(tmp_path: Path) -> None:
    """A run without a row writes no recording and says so."""
    with pytest.raises(timing.NoSamplesError) as raised:
        bench.execute(made_up_session(), [a_step("empty")], tmp_path / "run.json", facts)
    assert raised.value.exit_code == 4
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("lost", [False, True])
def test_a_signal_keeps_what_was_measured(
    tmp_path: Path, signal_number: signal.Signals, lost: bool
) -> None:
    """Earlier steps are saved and marked, later ones do not run, even if the exception got lost."""

    def kill() -> None:
        try:
            os.kill(os.getpid(), signal_number)
        except Stopped:
            if not lost:
                raise

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    ran: list[str] = []
    steps = [
        a_step("one", kernel_row()),
        a_step("two", before=kill),
        a_step("three", before=lambda: ran.append("three")),
    ]
    path = tmp_path / "run.json"
    assert bench.execute(made_up_session(), steps, path, facts) == 128 + signal_number
    assert ran == []
    found = recording.load(path)
    assert len(found.rows) == 1
    assert found.provenance.interrupted
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_signal_in_a_contender_is_no_failure_of_it() -> None:
    """An exception that a signal caused inside a peer stops the run and is not noted as missing."""
    asked = made_up_session()
    asked.stop_signal = signal.SIGTERM
    with pytest.raises(Stopped):
        asked.failed("a cell", "fla", RuntimeError("capture was interrupted"))
    assert asked.notes == []


def test_a_lost_gpu_keeps_what_was_measured(tmp_path: Path) -> None:
    """After a contender broke the context, rows so far are saved and the error comes through."""
    steps = [a_step("one", kernel_row()), a_step("two", before=raising(GpuLostError("illegal")))]
    path = tmp_path / "run.json"
    with pytest.raises(GpuLostError, match="illegal"):
        bench.execute(made_up_session(), steps, path, facts)
    assert recording.load(path).provenance.interrupted


def test_a_killed_run_leaves_what_it_had(tmp_path: Path) -> None:
    """SIGKILL cannot be caught: the file beside `--out` holds all steps that had ended."""
    code = """
import os, pathlib, signal, test_bench as t
steps = [t.a_step("one", t.kernel_row()),
         t.a_step("two", before=lambda: os.kill(os.getpid(), signal.SIGKILL))]
t.bench.execute(t.made_up_session(), steps, pathlib.Path("run.json"), t.facts)
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["run.json.partial"]
    found = recording.load(tmp_path / "run.json.partial")
    assert len(found.rows) == 1
    assert found.provenance.interrupted
