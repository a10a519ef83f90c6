"""What each pinned choice is worth: alternatives differ, are right, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
from made_up_clock import made_up_session
from paths import DEVICE

from rmsnorm_ref import launch, oracle, tiling, traffic, tuning
from rmsnorm_ref.measure import alternatives, calls, knobs, peers, pinned, plan, schema, table
from rmsnorm_ref.measure.cells import BF16, Cell
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD
from rmsnorm_ref.measure.session import Session
from rmsnorm_ref.table import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rmsnorm_ref.measure.alternatives import Trial
    from rmsnorm_ref.measure.pinned import Choice, Value

# Where alternatives differ, on inputs that an interpreter can take where there is one; (M, N).
# What differs in the kernel shows where programs are several, and have several tiles each.
SEVERAL = (2200, 2048) if DEVICE == "cuda" else (40, 2048)
TINY = {
    "team_cols": (4, 8200),
    "one_row_per_sm": (2, 8200),
    "few_rows_tiles": (12, 512),
    "dx_rows": (4, 2048),
    "walk": SEVERAL,
    "dw_sum": SEVERAL,
}
USUAL = 12, 96
KNOBS = [choice.knob for choice in pinned.CHOICES]
COMPILED = {"reduction_start", "team_cols"}  # what an interpreter has not, or has otherwise
EACH = [
    pytest.param(choice, pass_, id=f"{choice.knob} {pass_}", marks=marks)
    for choice in pinned.CHOICES
    for pass_ in choice.passes
    for marks in [[pytest.mark.gpu] if choice.knob in COMPILED else []]
]
MADE_UP = [each for each in pinned.CHOICES if DEVICE == "cuda" or each.knob not in COMPILED]
on_each = pytest.mark.parametrize(("choice", "pass_"), EACH)
Launched = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Hold every test to it: neither the tiling nor a remembered launch is another afterwards."""
    before, chosen, prepared = dict(vars(tiling)), tuning.chosen(), dict(tuning._prepared)
    yield
    assert dict(vars(tiling)) == before
    assert tuning.chosen() == chosen
    assert tuning._prepared == prepared


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Collect what is launched: kernel, constants, options but the warps, grid, numbers, Nones."""
    seen: Launched = []
    really = launch.Launch.__call__

    def spy(self: Any, grid: Any, *args: Any) -> None:
        others = [arg for arg in args if not isinstance(arg, torch.Tensor)]
        options = {key: value for key, value in self._options.items() if key != "num_warps"}
        kernel = getattr(self._kernel, "fn", self._kernel).__name__
        seen.append((kernel, self._constants, options, grid, others))
        really(self, grid, *args)

    monkeypatch.setattr(launch.Launch, "__call__", spy)
    return seen


def tiny(choice: Choice, pass_: schema.OnePass) -> tuple[calls.InputSet, dict[Value, Trial]]:
    """Return an input, and each alternative at one of its configs."""
    session = made_up_session()
    cell = Cell("ablations", *TINY.get(choice.knob, USUAL), BF16)
    (inputs,) = session.inputs(cell, 1)
    rstd = {inputs: alternatives._rstd(inputs.x)}
    found = alternatives.trials(choice, cell, pass_, session.device, rstd)
    return inputs, {trial.alternative.value: trial for trial in found}


# ---- What is measured -------------------------------------------------------------------------


def test_every_knob_of_the_schema_is_measured() -> None:
    """Each knob belongs to one choice or is turned by `knobs.py`, and each value has one name."""
    device = torch.device("cpu")
    turned = {each.knob for each in knobs.variants(Cell("ablations", 64, 64, BF16), device)}
    assert sorted([*turned, *KNOBS]) == sorted(get_args(schema.Knob))
    for choice in pinned.CHOICES:
        values = [each.value for each in choice.alternatives]
        assert len(set(values)) == len(values) > 1
        assert len(set(choice.shapes)) == len(choice.shapes)
        assert {choice.taken(*shape) for shape in choice.shapes} <= {*values, None}


def decided(M: int, N: int) -> tuple[Any, ...]:
    """Return all that the tiling of a GPU says of a shape."""
    x = torch.empty(M, N, dtype=BF16, device="meta")
    path = tiling.backward_path(M, N, traffic.GPU, BF16)
    early = tiling.reduces_early(tiling.n_programs(M, N, BF16, traffic.GPU), x)
    few = (
        tiling.dx_rows(M, N, BF16, Config(8, 3)),
        tiling.dw_rows(M, N, 8, traffic.GPU),
        tiling.dw_cols(M, N, traffic.GPU),
        tiling.dw_stages(M, N, 8),
    )
    return (
        tiling.forward_path(N),
        path,
        few if path == "few_rows_backward" else None,
        tiling.backward_tile(N),
        tiling.shares_sm(N),
        tiling.n_programs(M, N, BF16, traffic.GPU),
        tiling.team(N, traffic.GPU) if path == "wide_backward" else None,
        tiling.reduce_rows(N, traffic.GPU, early=early),
        tiling.reduce_cols(N, traffic.GPU, early=early),
        early,
        tiling.one_row_per_sm(N, BF16, traffic.GPU),
        M in tiling.one_wave(N, BF16, -(-N // 512), 132, 2048),
        tiling.eviction(x),
    )


@pytest.mark.parametrize("choice", pinned.CHOICES, ids=KNOBS)
def test_what_is_taken_is_what_the_package_does(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the alternative named as taken is the tiling as it is, and every other is not."""
    monkeypatch.setattr(tiling, "sm_count", lambda _: 132)
    monkeypatch.setattr(tiling, "overlaps", lambda _: True)
    for M, N in choice.shapes:
        with alternatives.replaced((tiling, choice.base)):
            as_it_is = decided(M, N)
        for one in choice.alternatives:
            with alternatives.replaced((tiling, {**choice.base, **one.sets})):
                alike = decided(M, N) == as_it_is
            told_apart = choice.knob not in {"rstd", "reduction", "walk", "dw_sum"}  # by the tiling
            assert alike == (one.value == choice.taken(M, N)) or not told_apart


@on_each
def test_alternatives_differ_in_what_is_launched(
    choice: Choice, pass_: schema.OnePass, launched: Launched
) -> None:
    """No two alternatives of a choice launch the same kernels with the same constants."""
    inputs, found = tiny(choice, pass_)
    seen = []
    for trial in found.values():
        launched.clear()
        trial.call(inputs)
        seen.append(list(launched))
        trial.call(inputs)  # again, from what was remembered
        assert launched == 2 * seen[-1]
    assert all(seen)
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])


@on_each
def test_alternatives_are_right(choice: Choice, pass_: schema.OnePass) -> None:
    """What every alternative returns lies within the oracle's bounds."""
    s, found = tiny(choice, pass_)
    shared: dict[str, Any] = {"dtype": BF16}
    for trial in found.values():
        results: Any = trial.call(s)
        if pass_ == FORWARD:
            bound = oracle.bound_y(s.x, s.w, peers.EPS)
            oracle.assert_within(
                results[0], oracle.truth(s.x, s.w, peers.EPS), bound, "y", **shared
            )
            continue
        arguments = s.dy, s.x, s.w, peers.EPS
        bounds = oracle.bound_dx(*arguments), oracle.bound_dw(*arguments)
        truths = oracle.truth_backward(*arguments)
        for name, *three in zip(("dx", "dw"), results, truths, bounds, strict=True):
            oracle.assert_within(*three, name, **shared)


# ---- Rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", MADE_UP, ids=[choice.knob for choice in MADE_UP])
def test_rows_say_what_was_decided(choice: Choice) -> None:
    """Each alternative has one valid row per pass, with its knob, its value and the ceiling."""
    session = made_up_session()
    rows = alternatives.measure(session, choice, *TINY.get(choice.knob, USUAL))
    values = [each.value for each in choice.alternatives]
    assert session.notes == []
    assert [(row.pass_, row.detail) for row in rows] == [
        (pass_, {"knob": choice.knob, "value": value})
        for pass_ in choice.passes
        for value in values
    ]
    for row in rows:
        assert schema.checked(row, "row") == row
        assert row.knob == choice.knob
        assert row.config is not None
        assert row.ceiling is not None
    assert f"{len(rows)} ablation" in table.table(rows)


def by_knob(knob: str) -> Choice:
    """Return the choice of a knob."""
    return next(choice for choice in pinned.CHOICES if choice.knob == knob)


def test_rows_tell_the_alternative_that_ran() -> None:
    """Path, programs and scratch are those of the alternative, not those of the package."""
    tile, chunks, *_ = alternatives.measure(made_up_session(), by_knob("path"), *USUAL)
    assert (tile.path, chunks.path) == ("forward", "wide_forward")
    session, (M, N) = made_up_session(), SEVERAL
    assert tiling.backward_tile(N).rows * 2 * tiling.n_programs(M, N, BF16, session.device) <= M
    added, *atomics = alternatives.measure(session, by_knob("dw_sum"), M, N)
    assert added.scratch_bytes == 2 * 4 * N * tiling.n_programs(M, N, BF16, session.device)
    assert [row.scratch_bytes for row in atomics] == [2 * 4 * N] * 2
    few, buffer = alternatives.measure(made_up_session(), by_knob("few_rows"), *USUAL)
    assert (few.path, few.n_programs, few.scratch_bytes) == ("few_rows_backward", 0, 0)
    assert buffer.path == "backward"
    assert buffer.scratch_bytes


def test_another_tile_gets_its_best_number_of_warps() -> None:
    """Of the configs of an alternative the fastest is recorded, with its own time and warps."""
    choice = by_knob("backward_tile")
    _, found = tiny(choice, BACKWARD)
    session = made_up_session(lambda graph, _: (9 - graph) * 1e-6)  # a later graph is faster
    rows = alternatives.measure(session, choice, *USUAL)
    for row, trial in zip(rows, found.values(), strict=True):
        (config,) = trial.changes[1][1]["_chosen"].values()  # the last of this alternative
        assert row.config == schema.Config(*config)
    assert rows[1].time_s is not None
    assert rows[0].time_s is not None
    assert rows[1].time_s.p50 < rows[0].time_s.p50


def test_all_choices_are_steps_of_a_run_in_bf16() -> None:
    """A run has one step per choice and shape, in bf16 alone, and only passes that were asked."""
    asked = Session(torch.device("cpu"), 1024)
    steps = list(plan.steps(asked, ["ablations"], None))
    shapes = [(choice.knob, *shape) for choice in pinned.CHOICES for shape in choice.shapes]
    assert {f"ablations {knob} {M} x {N} bfloat16" for knob, M, N in shapes} < {
        step.label for step in steps
    }
    assert sum(step.weight for step in steps[-len(shapes) :]) <= 90
    in_fp32 = list(plan.steps(asked, ["ablations"], (torch.float32,)))
    assert len(in_fp32) == len(steps) - len(shapes)
    forward = Session(torch.device("cpu"), 1024, (FORWARD,))
    found = list(plan.steps(forward, ["ablations"], None))
    assert len(found) == sum(len(c.shapes) for c in pinned.CHOICES if FORWARD in c.passes)


# ---- What goes wrong --------------------------------------------------------------------------


def raising(*_: Any, **__: Any) -> None:
    """Stand for a builder or a launcher that fails."""
    raise RuntimeError("no such tile")


@pytest.mark.parametrize("knob", KNOBS)
def test_the_tiling_is_restored_where_a_build_raises(
    knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alternatives that cannot be built are noted, and the fixture finds the tiling as it was."""
    choice, session = by_knob(knob), made_up_session()
    monkeypatch.setattr(launch.Launch, "__init__", raising)
    assert alternatives.measure(session, choice, *USUAL) == []
    assert len(session.notes) >= len(choice.alternatives)
    assert all("RuntimeError: no such tile" in note for note in session.notes)


def test_an_attribute_that_is_gone_is_named() -> None:
    """Setting what a module no longer has raises before anything is set."""
    gone = {"FORWARD_TILE": 1, "BACKWARDS_TILE": 2}
    with (
        pytest.raises(AttributeError, match="BACKWARDS_TILE"),
        alternatives.replaced((tiling, gone)),
    ):
        pytest.fail("it was entered")


def test_one_alternative_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have rows, and the note names choice and alternative."""
    session = made_up_session()
    monkeypatch.setattr(alternatives, "_build_sum", raising)
    rows = alternatives.measure(session, by_knob("reduction"), *USUAL)
    assert [row.detail and row.detail["value"] for row in rows] == ["kernel"]
    (note,) = session.notes
    assert "reduction torch.sum" in note


@pytest.mark.parametrize("value", [True, None, 1.5, ["8"]])
def test_a_value_is_a_number_or_a_word(value: Any) -> None:
    """Anything else is refused, and the message says where and what was expected."""
    choice = by_knob("rstd")
    row, *_ = alternatives.measure(made_up_session(), choice, *USUAL)
    assert row.detail is not None
    broken = dataclasses.replace(row, detail={**row.detail, "value": value})
    with pytest.raises(schema.SchemaError, match=r"row\.detail\.value: expected a whole number or"):
        schema.checked(broken, "row")


# ---- On a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
def test_all_choices_are_measured_on_a_gpu() -> None:
    """Every alternative of every choice has a row, and all of them take two minutes at most."""
    device = torch.device("cuda", 0)
    session = Session(device, torch.cuda.get_device_properties(device).L2_cache_size)
    start = time.monotonic()
    for choice in pinned.CHOICES:
        for M, N in choice.shapes:
            rows = alternatives.measure(session, choice, M, N)
            assert len(rows) == len(choice.passes) * len(choice.alternatives)
    assert session.notes == []
    assert time.monotonic() - start < 120
