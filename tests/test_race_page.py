import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from race_site import data, site

__all__ = ["site"]  # the fixture
Open = Callable[..., Any]
TIMES = "\N{MULTIPLICATION SIGN}"
PLAY_S = 12  # what race.js gives a whole race at 1 x


def status(page: Any) -> str:
    """Return what the live region says."""
    return str(page.get_by_role("status").inner_text())


def clock(page: Any) -> float:
    """Return the time that the race stands at, in microseconds."""
    found = re.match(r"([\d.]+) µs of", page.locator(".race-clock").inner_text())
    assert found is not None
    return float(found[1])


def end(page: Any) -> float:
    """Return when the last lane ends, in microseconds."""
    found = re.search(r"µs of ([\d.]+) µs", page.locator(".race-clock").inner_text())
    assert found is not None
    return float(found[1])


def done(page: Any) -> list[bool]:
    """Return which lanes have finished, by their text."""
    return ["✓ finished" in text for text in page.locator(".race-now").all_inner_texts()]


def tab_to(page: Any, selector: str) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            return
    raise AssertionError(f"{selector} cannot be reached with Tab")


def test_nothing_moves_before_play(page_of: Open, site: Path) -> None:
    """The race starts paused at 0, with its controls shown and the figure put away."""
    page = page_of(site, frozen=True)
    page.clock.run_for(2000)
    assert clock(page) == 0
    assert page.locator(".race-live").is_visible()
    assert not page.locator(".race-still").is_visible()
    assert done(page) == [False, False, False]


def test_play_and_pause_by_keyboard(page_of: Open, site: Path) -> None:
    """Tab reaches Play; Enter starts the race, Space pauses it where it is, and both are said."""
    page = page_of(site, frozen=True)
    tab_to(page, ".race-play")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # the focus is seen
    page.keyboard.press("Enter")
    assert page.locator(".race-play").inner_text() == "Pause"
    assert status(page) == "Playing."
    page.clock.run_for(1000 * PLAY_S // 4)
    page.keyboard.press("Space")
    at = clock(page)
    assert at == pytest.approx(end(page) / 4, rel=0.02)
    assert status(page).startswith("Paused at")
    page.clock.run_for(1000)
    assert clock(page) == at


def test_fused_finishes_while_eager_still_moves(page_of: Open, site: Path) -> None:
    """Played to its end, fused is announced first, then the others, then all times."""
    page = page_of(site, frozen=True)
    page.locator(".race-play").press("Enter")
    said: list[str] = []
    for _ in range(10 * (PLAY_S + 1)):
        page.clock.run_for(100)
        if not said or status(page) != said[-1]:
            said.append(status(page))
        if said[-1].startswith("fused finished"):
            assert done(page) == [False, False, True]
    assert [text.split(" finished")[0] for text in said[:3]] == ["Playing.", "fused", "eager"]
    assert said[-1].startswith("All finished: eager ")
    assert done(page) == [True, True, True]
    assert page.locator(".race-play").inner_text() == "Play again"
    assert clock(page) == end(page)
    page.locator(".race-play").press("Enter")
    assert clock(page) < end(page) / 10


def test_scrub_by_keyboard(page_of: Open, site: Path) -> None:
    """The slider goes to both ends and one step at a time, and speaks in microseconds."""
    page = page_of(site)
    tab_to(page, ".race-scrub input")
    page.keyboard.press("End")
    assert done(page) == [True, True, True]
    slider = page.get_by_role("slider")
    assert slider.get_attribute("aria-valuetext") == f"{end(page):.1f} µs of {end(page):.1f} µs"
    page.keyboard.press("Home")
    assert clock(page) == 0
    page.keyboard.press("ArrowRight")
    assert clock(page) == pytest.approx(end(page) / 200, abs=0.06)
    assert status(page).startswith("At ")


def test_steps_go_from_kernel_to_kernel(page_of: Open, site: Path) -> None:
    """The step buttons visit every kernel of every lane, forwards and back to 0."""
    page = page_of(site)
    tab_to(page, ".race-next")
    seen = set()
    while clock(page) < end(page):
        page.keyboard.press("Enter")
        seen |= {(i, text.split(":")[0]) for i, text in enumerate(now(page))}
    for i, lane in enumerate(chosen(site, "forward")["lanes"]):
        n = len(data(site)["chains"][lane["chain"]])
        assert {(i, f"{k + 1} of {n}") for k in range(n)} <= seen
    page.keyboard.press("Shift+Tab")
    while clock(page):
        page.keyboard.press("Enter")
    assert done(page) == [False, False, False]


def now(page: Any) -> list[str]:
    """Return the line on each lane's kernel."""
    return list(page.locator(".race-now").all_inner_texts())


def chosen(site: Path, pass_: str, start: int | None = None) -> dict[str, Any]:
    """Return a cell's pass in the page's data; the one that is shown first, if no other."""
    found = data(site)
    return dict(found["cells"][found["start"] if start is None else start][pass_])


@pytest.mark.parametrize(("speed", "factor"), [("0.25", 0.25), ("4", 4)])
def test_speed(page_of: Open, site: Path, speed: str, factor: float) -> None:
    """A second on screen is as much of the race as the chosen speed says."""
    page = page_of(site, frozen=True)
    page.locator(".race-speed").select_option(speed)
    page.locator(".race-play").press("Enter")
    page.clock.run_for(2000)
    assert clock(page) == pytest.approx(end(page) * factor * 2 / PLAY_S, rel=0.02)


def test_choices_by_keyboard(page_of: Open, site: Path) -> None:
    """Arrow keys choose pass, clock and cell; each starts the race anew with its own times."""
    page = page_of(site)
    found = data(site)
    tab_to(page, "[value=forward]")
    page.keyboard.press("ArrowRight")
    times = [lane["time"] * 1e6 for lane in chosen(site, "backward")["lanes"]]
    assert end(page) == pytest.approx(max(times), abs=0.06)
    assert "backward" in status(page)
    tab_to(page, "[value=measured]")
    page.keyboard.press("ArrowRight")
    lanes = [sum(found["bytes"][lane["bytes"]]) for lane in chosen(site, "backward")["lanes"]]
    seconds = max(lanes) / chosen(site, "backward")["bandwidth"]
    assert end(page) == pytest.approx(seconds * 1e6, abs=0.06)
    assert page.locator(".race-if-bytes").is_visible()
    page.keyboard.press("ArrowLeft")
    assert not page.locator(".race-if-bytes").is_visible()
    tab_to(page, ".race-cell")
    page.keyboard.press("Home")
    times = [lane["time"] * 1e6 for lane in chosen(site, "backward", 0)["lanes"]]
    assert end(page) == pytest.approx(max(times), abs=0.06)
    first = found["cells"][0]
    assert status(page).startswith(
        f"{first['M']} {TIMES} {first['N']} {first['dtype']}, backward: "
    )
    page.locator("summary").click()
    n_kernels = sum(len(found["chains"][lane["chain"]]) for lane in first["backward"]["lanes"])
    assert page.locator(".race-steps tbody tr").count() == n_kernels


def test_statement_names_the_sources_of_the_cell(page_of: Open, site: Path) -> None:
    """For every cell the page links its recording and, where there is one, its profile alone."""
    page = page_of(site)
    found = data(site)
    for i, cell in enumerate(found["cells"]):
        page.locator(".race-cell").select_option(str(i))
        sources = [cell["recording"], *{cell["forward"]["lanes"][0]["profile"]} - {-1}]
        links = page.locator(".race-statement p:visible a").all_inner_texts()
        assert links == [found["recordings"][source] for source in sources]


def test_reduced_motion_steps(page_of: Open, site: Path) -> None:
    """With reduced motion nothing starts by itself, and Play goes from kernel to kernel."""
    page = page_of(site, frozen=True, reduced_motion=True)
    page.clock.run_for(2000)
    assert clock(page) == 0
    page.locator(".race-play").press("Enter")
    seen = []
    for _ in range(60):
        page.clock.run_for(100)
        seen.append(clock(page))
    assert len(set(seen)) in {6, 7}  # one a second
    page.locator(".race-play").press("Enter")
    page.locator(".race-next").press("Enter")
    assert clock(page) > seen[-1]


def test_out_of_sight_it_stops(page_of: Open, site: Path) -> None:
    """A race that is scrolled off the screen pauses, says so, and stays paused."""
    page = page_of(site, height=300)
    page.locator(".race-speed").select_option("0.25")
    page.locator(".race-play").press("Enter")
    page.wait_for_function("!document.querySelector('.race-clock').innerText.startsWith('0.0')")
    page.evaluate("scrollTo({top: document.body.scrollHeight, behavior: 'instant'})")
    page.get_by_role("status").filter(has_text="Paused out of sight").wait_for()
    at = clock(page)
    page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
    page.wait_for_timeout(300)
    assert clock(page) == at
    assert page.locator(".race-play").inner_text() == "Play"


def test_live_region_does_not_chatter(page_of: Open, site: Path) -> None:
    """The region is polite, and between two events it says nothing."""
    page = page_of(site, frozen=True)
    region = page.get_by_role("status")
    assert region.get_attribute("aria-live") == "polite"
    page.locator(".race-speed").select_option("0.25")
    page.locator(".race-play").press("Enter")
    for _ in range(5):
        page.clock.run_for(200)
        assert status(page) == "Playing."


def test_without_javascript_figure_and_tables_remain(page_of: Open, site: Path) -> None:
    """With scripts off the page shows both figures, in words too, and the bytes as tables."""
    page = page_of(site, javascript=False)
    assert not page.locator(".race-live").is_visible()
    figures = page.get_by_role("img").filter(has=page.locator("rect"))
    labels = [figure.get_attribute("aria-label") for figure in figures.all()]
    assert [label.split()[0] for label in labels] == ["Forward", "Backward"]
    assert page.locator(".race-still tbody tr").count() == 6
    page.locator("summary").click()
    rows = page.locator(".race-steps tbody tr")
    assert rows.count() == sum(
        len(data(site)["chains"][lane["chain"]])
        for pass_ in ("forward", "backward")
        for lane in chosen(site, pass_)["lanes"]
    )
    assert rows.first.is_visible()
    assert page.locator(".race-statement p:visible").count() >= 2


@pytest.mark.parametrize("width", [400, 1400])
def test_the_shortest_lane_is_labelled(page_of: Open, site: Path, width: int) -> None:
    """The fused lane names its kernels in full, in either pass, in the empty track beside them."""
    page = page_of(site, width=width)
    label = page.locator(".race-lane").last.locator(".race-track i")
    for pass_ in ("forward", "backward"):
        page.locator(f"[value={pass_}]").check()
        chain = data(site)["chains"][chosen(site, pass_)["lanes"][-1]["chain"]]
        assert label.inner_text() == ", ".join(kernel[0] for kernel in chain)
        assert label.evaluate("e => e.scrollWidth <= e.clientWidth")


@pytest.mark.parametrize("javascript", [True, False])
def test_fits_a_narrow_page(page_of: Open, site: Path, *, javascript: bool) -> None:
    """At 360 pixels nothing is wider than the page, and every control is 24 pixels or more."""
    page = page_of(site, width=360, javascript=javascript)
    box = page.locator(".race").bounding_box()
    assert box["x"] + box["width"] <= 360
    if javascript:
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        for control in page.locator(".race-live :is(button, select, label)").all():
            assert control.bounding_box()["height"] >= 24


def test_colours_follow_the_theme(page_of: Open, site: Path) -> None:
    """Reads and writes have other colours on dark, by the system's setting and by Furo's switch."""
    colours = "e => getComputedStyle(e).getPropertyValue('--race-read')"
    light, dark = (page_of(site, dark=dark) for dark in (False, True))
    by_system = dark.locator(".race").evaluate(colours)
    assert light.locator(".race").evaluate(colours) != by_system
    light.evaluate("document.body.dataset.theme = 'dark'")
    assert light.locator(".race").evaluate(colours) == by_system
