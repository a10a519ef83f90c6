"""The ids that may have been cited. `python docs/_ext/published.py site` adds those that are new.

docs/published-ids.txt holds one `page#id` a line. A line is only ever added: a test fails if one is
no longer in the built site, and if an id of the site is not in the list yet.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LIST = Path(__file__).parents[1] / "published-ids.txt"
# Decisions, rules of the oracle and of a review, claims, equations, recordings.
CITABLE = re.compile(
    r'\bid="(d\d+|o\d+|[cr](?:-[a-z0-9]+)+|equation-eq-[a-z0-9-]+|recording-[^"]+)"'
)


def published() -> list[str]:
    """Return the ids that were published, as page#id."""
    return LIST.read_text(encoding="utf-8").split()


def built(site: Path) -> list[str]:
    """Return the ids of a built site, as page#id."""
    found = []
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site).as_posix()
        found += [f"{name}#{id_}" for id_ in CITABLE.findall(page.read_text(encoding="utf-8"))]
    return found


def main(site: Path) -> None:
    """Add what is new."""
    LIST.touch()
    lines = sorted({*published(), *built(site)})
    LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
