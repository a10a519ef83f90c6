"""A real Chromium for tests of built pages, and a node for their scripts.

Playwright drives the Chromium that is on the path; its own browsers are never downloaded. Where
there is none the tests skip and say so, except in CI, where a missing browser is a failure.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]


def missing(what: str) -> None:
    """Skip the test with the reason; in CI fail it."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {what}")


def node() -> str:
    """Return a node: the one on the path, else the one that Playwright carries."""
    found = shutil.which("node")
    if found:
        return found
    try:
        import playwright
    except ImportError:
        missing("node on the path, or playwright, which carries one")
    return str(Path(playwright.__file__).parent / "driver/node")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Start one browser for all tests of a worker."""
    path = shutil.which("chromium")
    if path is None:
        missing("chromium on the path")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright: pip install 'rmsnorm_ref[test]'")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page_of(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page of a built site; an error in its scripts fails the test.

    `page_of(site, "index.html", width=400, dark=True, javascript=False, reduced_motion=True)`
    """
    contexts, errors = [], []

    def open_page(
        site: Path,
        path: str = "index.html",
        *,
        width: int = 900,
        height: int = 900,
        dark: bool = False,
        javascript: bool = True,
        reduced_motion: bool = False,
        frozen: bool = False,
    ) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if reduced_motion else "no-preference",
            java_script_enabled=javascript,
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        if frozen:
            page.clock.install(time=0)
        page.goto((site / path).as_uri())
        if frozen:  # time stands still, an hour on, until the test calls page.clock.run_for
            page.clock.pause_at(3_600_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
