"""The tutorial and the how-to pages: every block of code on them runs, and prints what they say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from guide_page import Block, blocks
from warm import warm

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(page for folder in ("tutorial", "howto") for page in (DOCS / folder).glob("*.md"))
BLOCKS = {page: blocks(page.read_text(encoding="utf-8")) for page in PAGES}
WITH_CODE = [page for page in PAGES if any(not block.needs for block in BLOCKS[page])]
CONDITIONAL = [(page, block) for page in PAGES for block in BLOCKS[page] if block.needs]
N_GPUS = {"": 0, "gpu": 1, "two gpus": 2}


def name(page: Path) -> str:
    """Name a page as its address does."""
    return page.relative_to(DOCS).with_suffix("").as_posix()


def run(page: Path, chosen: list[Block], folder: Path) -> None:
    """Run blocks of a page in an empty folder, in a Python for which only torch is imported."""
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")]),
        "MPLBACKEND": "agg",
    }
    runner = Path(__file__).with_name("guide_page.py")
    lines = [str(block.line) for block in chosen]
    done = warm("torch", **variables).run(str(runner), str(page), *lines, folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_a_pages_code_runs(page: Path, tmp_path: Path) -> None:
    """The blocks of a page run in order on any machine, and print what the page says."""
    run(page, [block for block in BLOCKS[page] if not block.needs], tmp_path)


@pytest.mark.parametrize(
    ("page", "block"),
    CONDITIONAL,
    ids=[f"{name(page)}:{block.line}" for page, block in CONDITIONAL],
)
def test_a_block_that_needs_a_gpu_runs(page: Path, block: Block, tmp_path: Path) -> None:
    """A block marked for a GPU, or two, runs there after the blocks before it."""
    if torch.cuda.device_count() < N_GPUS[block.needs]:
        pytest.skip(f"{block.reason} (this machine has {torch.cuda.device_count()} GPUs)")
    before = [each for each in BLOCKS[page] if not each.needs and each.line < block.line]
    run(page, [*before, block], tmp_path)


def test_both_guides_are_there() -> None:
    """There are pages with code in both folders, so that the tests above test something."""
    assert {page.parent.name for page in WITH_CODE} == {"tutorial", "howto"}


PAGE = """
```python
a = 1
print("one", a)
```

```text
one ...
```

% gpu: needs a GPU
```sh
exit 3
```

```{code-block} python
:caption: two.py

b = 2
```

```python
import two
assert two.b + a == 3
```

:::{note}
No code.
:::
"""


def test_blocks_are_found() -> None:
    """Code, what it prints, files and conditions are read from a page as they are meant."""
    one, needy, file, last = blocks(PAGE)
    assert (one.line, one.printed, one.needs) == (2, "one ...\n", "")
    assert (needy.language, needy.needs, needy.reason) == ("sh", "gpu", "needs a GPU")
    assert (file.file, file.code) == ("two.py", "b = 2\n")
    assert last.printed is None


@pytest.mark.parametrize("info", ["", "console", "py", "{note}\n```python"])
def test_code_that_no_test_runs_is_refused(info: str) -> None:
    """A block in a language that is not run cannot stand on a page."""
    with pytest.raises(ValueError, match="line 2: a block of"):
        blocks(f"Text.\n````{info}\nx\n````\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [("a = 1", "a = 2"), ("one ...", "two"), ("b = 2", "b = 3"), ("exit 3", "exit 3")],
)
def test_a_wrong_page_fails(old: str, new: str, tmp_path: Path) -> None:
    """A changed value, output or file fails the page, and so does a command that fails."""
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(old, new))
    chosen = [block for block in blocks(PAGE) if not block.needs or old == "exit 3"]
    with pytest.raises(AssertionError, match=r"AssertionError|exit 3"):
        run(page, chosen, tmp_path)


def test_a_right_page_passes(tmp_path: Path) -> None:
    """The page that the wrong ones are made from is itself right."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    run(page, [block for block in blocks(PAGE) if not block.needs], tmp_path)
