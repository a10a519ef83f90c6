"""The built site in a real browser: narrow windows, accessibility, what it asks the network for."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from site_build import pages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HEAVIEST = 300_000  # bytes of a page and all that it loads, formulas left out
# Images further down load when a reader comes to them; here at once, to be weighed.
ALL_IMAGES = """Promise.all([...document.images].map(image => {
    image.loading = 'eager'
    return image.decode()
}))"""
# Colours are those of a theme at once, and do not fade from one to the other.
STILL = """document.head.insertAdjacentHTML(
    'beforeend', '<style>*, *::before, *::after { transition: none !important }</style>')"""
FORMULAS = "[...document.querySelectorAll('math')].map(m => m.outerHTML).join('')"
# What is torn or sticks out: a part of a signature or an option on two lines, a heading that its
# link makes higher, a table wider than the column.
ASKEW = """() => {
    const all = (selector) => [...document.querySelectorAll(selector)]
    const torn = all('.sig .pre:not(:has(wbr)), .pre.whole')
        .filter(e => e.getClientRects().length > 1)
    const high = all(':is(h1, h2, h3, h4) > .headerlink').map(e => e.parentElement).filter(e => {
        const height = e.offsetHeight
        e.lastElementChild.style.display = 'none'
        return e.offsetHeight < height
    })
    const wide = all('article .table-wrapper').filter(e =>
        e.getBoundingClientRect().right > e.closest('article').getBoundingClientRect().right + 1)
    return [...torn, ...high, ...wide].map(e => e.outerHTML.slice(0, 200))
}"""
# Marks every block of code whose kinds of tokens were all seen before, on this page or another:
# one style sheet gives them their colours.
MARK_SAME = """(before) => {
    const seen = new Set(before)
    for (const block of document.querySelectorAll('.highlight')) {
        const ground = block.parentElement.className
        const tokens = [...block.querySelectorAll('span')].map(token =>
            `${ground}: ${token.parentElement.className}: ${token.className}`)
        const kinds = [ground, ...tokens]
        if (kinds.every(kind => seen.has(kind))) block.dataset.same = ''
        kinds.forEach(kind => seen.add(kind))
    }
    return [...seen]
}"""
# At each width: all rules of accessibility once; then those that another theme or width can break.
LOOKS: dict[int, dict[str, list[str]]] = {
    1400: {"light": [], "dark": ["color-contrast", "link-in-text-block"]},
    900: {},
    400: {"light": ["scrollable-region-focusable", "target-size", "landmark-unique", "link-name"]},
}
CONTRAST = "color-contrast"  # the dearest rule by far: half of it on tokens of code
RUN_AXE = "([context, options]) => axe.run(context ?? document, options)"
AT_ONCE = 8  # pages that load together: each is watched until its network has been still a while


class Tab:
    """One of several pages that load at once, with no cache: what each asks for, and what comes."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        session = context.new_cdp_session(self.page)
        session.send("Network.enable")
        session.send("Network.setCacheDisabled", {"cacheDisabled": True})
        self.asked: list[str] = []
        self.n_bytes: list[int] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("response", lambda found: self.n_bytes.append(len(found.body())))

    def go(self, address: str) -> None:
        """Load another page, and count from nothing."""
        self.asked.clear()
        self.n_bytes.clear()
        self.page.goto(address)


class Visit:
    """All pages in one window, each loaded once: rules that it breaks, its size, its formulas."""

    def __init__(self, browser: Any, width: int) -> None:
        self.broken: list[str] = []
        self.widths: dict[str, int] = {}
        self.askew: dict[str, list[str]] = {}
        self.heights: dict[str, list[float]] = {}
        self._axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
        self._page = browser.new_page(viewport={"width": width, "height": 900})
        self._looks = LOOKS[width]
        self._loaded_ahead = False
        self._kinds: list[str] = []

    def go(self, address: str, name: str) -> None:
        """Load a page and look at it."""
        self._page.emulate_media(color_scheme="light")
        self._page.goto(f"{address}/{name}")
        self.widths[name] = self._page.evaluate("document.documentElement.scrollWidth")
        self.heights[name] = self._page.evaluate(
            "[...document.querySelectorAll('math')].map(m => m.getBoundingClientRect().height)"
        )
        if self._looks:
            self._page.evaluate(STILL)
            self._page.evaluate(self._axe)
            self._kinds = self._page.evaluate(MARK_SAME, self._kinds)
        for theme, rules in self._looks.items():
            self._page.emulate_media(color_scheme=theme)
            self.broken += [f"{name}, {theme}: {found}" for found in self._violations(rules)]
        self.askew[name] = self._page.evaluate(ASKEW)

    def _violations(self, rules: list[str]) -> Iterator[str]:
        # What axe loads ahead are style sheets, for one rule, and all pages have the same.
        options = {"resultTypes": ["violations"], "preload": not self._loaded_ahead}
        self._loaded_ahead = True
        others = [rule for rule in rules if rule != CONTRAST]
        asked: list[tuple[Any, Any]] = []
        if others or not rules:
            chosen = {"runOnly": others} if rules else {"rules": {CONTRAST: {"enabled": False}}}
            asked.append((None, chosen))
        if CONTRAST in rules or not rules:
            asked.append(({"exclude": [["[data-same]"]]}, {"runOnly": [CONTRAST]}))
        for context, chosen in asked:
            found = self._page.evaluate(RUN_AXE, [context, options | chosen])
            for rule in found["violations"]:
                where = rule["nodes"][0]["html"][:200]
                yield f"{rule['id']} x{len(rule['nodes'])}: {where}"

    def close(self) -> None:
        """Close the window."""
        self._page.close()


@pytest.fixture(scope="module")
def names(site: Path) -> list[str]:
    """Name all pages of the site, from its root."""
    return [path.relative_to(site).as_posix() for path in pages_of(site)]


@pytest.fixture(scope="module")
def visit(chromium: Any, served: str, names: list[str]) -> Callable[[int], Visit]:
    """Visit all pages at a width, once for all tests."""

    @functools.cache
    def visited(width: int) -> Visit:
        found = Visit(chromium, width)
        for name in names:
            found.go(served, name)
        found.close()
        return found

    return visited


@pytest.mark.slow
@pytest.mark.parametrize("width", [w for w, looks in LOOKS.items() if looks])
def test_no_page_breaks_a_rule_of_accessibility(visit: Callable[[int], Visit], width: int) -> None:
    """axe-core finds nothing wrong on any page: light, dark, and where everything scrolls."""
    assert not visit(width).broken, "\n".join(visit(width).broken)


@pytest.mark.slow
@pytest.mark.parametrize("width", LOOKS)
def test_no_page_scrolls_sideways(visit: Callable[[int], Visit], width: int) -> None:
    """No page is wider than its window, and formulas are drawn, not shown as TeX."""
    seen = visit(width)
    assert not {name: found for name, found in seen.widths.items() if found > width}
    flat = [name for name, heights in seen.heights.items() if any(h < 5 for h in heights)]
    assert not flat
    assert any(seen.heights.values())


@pytest.mark.slow
@pytest.mark.parametrize("width", LOOKS)
def test_nothing_is_askew(visit: Callable[[int], Visit], width: int) -> None:
    """No option and no part of a signature is torn, no link of a heading takes a line."""
    assert not {name: found for name, found in visit(width).askew.items() if found}


def test_pages_ask_nobody_else_and_are_light(chromium: Any, served: str, names: list[str]) -> None:
    """Reading a page asks this site alone, and takes at most 300 kB besides formulas."""
    heavy = {}
    context = chromium.new_context()
    tabs = [Tab(context) for _ in range(AT_ONCE)]
    for first in range(0, len(names), AT_ONCE):
        loading = list(zip(names[first : first + AT_ONCE], tabs, strict=False))
        for name, tab in loading:
            tab.go(f"{served}/{name}")
        for name, tab in loading:
            tab.page.evaluate(ALL_IMAGES)
            tab.page.wait_for_load_state("networkidle")
            outside = [url for url in tab.asked if not url.startswith((served, "data:"))]
            assert not outside, f"{name}: {outside}"
            total = sum(tab.n_bytes) - len(tab.page.evaluate(FORMULAS).encode())
            if total > HEAVIEST:
                heavy[name] = total
    context.close()
    assert not heavy


def test_search_finds_a_decision(chromium: Any, served: str) -> None:
    """The search, which runs in the browser alone, finds the page that a word stands on."""
    page = chromium.new_page()
    page.goto(f"{served}/search.html?q=atomics")
    page.wait_for_selector("ul.search li a", timeout=20_000)
    found = page.eval_on_selector_all("ul.search li a", "links => links.map(a => a.href)")
    page.close()
    assert any("design" in address for address in found)


def test_search_says_where_its_field_is(chromium: Any, served: str) -> None:
    """The page of the search, opened with nothing to search for, leads to the field."""
    page = chromium.new_page()
    page.goto(f"{served}/search.html", wait_until="networkidle")
    assert page.locator(".search-where").is_visible()
    page.goto(f"{served}/search.html?q=atomics")
    page.wait_for_selector("ul.search li a", timeout=20_000)
    assert not page.locator(".search-where").is_visible()
    page.close()


def test_code_can_be_copied(chromium: Any, served: str) -> None:
    """Each block of code has a button that copies it, and the keyboard reaches it."""
    page = chromium.new_page()
    page.goto(f"{served}/cite.html")
    blocks = page.locator("div.highlight").count()
    buttons = page.locator("button.copybtn")
    assert buttons.count() == blocks > 0
    buttons.first.focus()
    assert page.evaluate("document.activeElement.classList.contains('copybtn')")
    page.close()
