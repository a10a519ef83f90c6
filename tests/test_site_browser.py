"""The built site in a real browser: narrow windows, accessibility, what it asks the network for."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from site_build import pages_of

if TYPE_CHECKING:
    from pathlib import Path

HEAVIEST = 300_000  # bytes of a page and all that it loads, formulas left out
# Images further down load when a reader comes to them; here at once, to be weighed.
ALL_IMAGES = """Promise.all([...document.images].map(image => {
    image.loading = 'eager'
    return image.decode()
}))"""
FORMULAS = "[...document.querySelectorAll('math')].map(m => m.outerHTML).join('')"
# All rules once; then those that another theme or width can break.
LOOKS = [
    ("light", 1400, []),
    ("dark", 1400, ["color-contrast", "link-in-text-block"]),
    ("light", 400, ["scrollable-region-focusable", "target-size", "landmark-unique", "link-name"]),
]
WIDTHS = (400, 900, 1400)
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


@pytest.fixture
def names(site: Path) -> list[str]:
    """Name all pages of the site, from its root."""
    return [path.relative_to(site).as_posix() for path in pages_of(site)]


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "width", "rules"), LOOKS)
def test_no_page_breaks_a_rule_of_accessibility(
    chromium: Any, served: str, names: list[str], theme: str, width: int, rules: list[str]
) -> None:
    """axe-core finds nothing wrong on any page: light, dark, and where everything scrolls."""
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    context = chromium.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
    page = context.new_page()
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    wrong = []
    for name in names:
        page.goto(f"{served}/{name}")
        page.evaluate(axe)
        for rule in page.evaluate("options => axe.run(document, options)", options)["violations"]:
            where = rule["nodes"][0]
            wrong.append(f"{name}: {rule['id']} x{len(rule['nodes'])}: {where['html'][:200]}")
    context.close()
    assert not wrong, "\n".join(wrong)


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


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways(chromium: Any, served: str, names: list[str], width: int) -> None:
    """No page is wider than its window, and formulas are drawn, not shown as TeX."""
    context = chromium.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    n_formulas = 0
    for name in names:
        page.goto(f"{served}/{name}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        heights = page.evaluate(
            "[...document.querySelectorAll('math')].map(m => m.getBoundingClientRect().height)"
        )
        assert all(height >= 5 for height in heights), name
        n_formulas += len(heights)
    context.close()
    assert n_formulas


def test_search_finds_a_decision(chromium: Any, served: str) -> None:
    """The search, which runs in the browser alone, finds the page that a word stands on."""
    page = chromium.new_page()
    page.goto(f"{served}/search.html?q=atomics")
    page.wait_for_selector("ul.search li a", timeout=20_000)
    found = page.eval_on_selector_all("ul.search li a", "links => links.map(a => a.href)")
    page.close()
    assert any("design" in address for address in found)


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
