"""Run the code of a page as its reader would: `python guide_page.py PAGE LINE ...` in a folder.

The blocks that begin at the given lines run in order, as one session:

- `python` runs in a namespace that the page's blocks share, and so does a `{run}` directive, whose
  output the page shows when it is built;
- `sh` runs in bash, which stops at the first command that fails;
- a `code-block` with a caption is written to the file of that name, for later blocks to run;
- `text` right after a block is what that block prints; "..." stands for anything.

A line `% gpu: reason` or `% two gpus: reason` above a block says that it needs them.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

CODE = ("python", "sh")
DATA = ("text", "bibtex")
_BLOCK = re.compile(
    r"(?:^% (?P<needs>two gpus|gpu): (?P<reason>[^\n]+)\n)?"
    r"^(?P<fence>`{3,}|:{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """Hold one block of code: where it is, what it says, what it prints and what it needs."""

    line: int
    language: str
    code: str
    file: str  # to write it to, instead of running it
    printed: str | None
    needs: str  # "", "gpu" or "two gpus"
    reason: str


def blocks(page: str) -> list[Block]:
    """Return the code of a page; ValueError where a fence is neither code, data nor a directive."""
    found: list[Block] = []
    for match in _BLOCK.finditer(page):
        line = page.count("\n", 0, match.start("fence")) + 1
        info, body, file = match["info"].strip(), match["body"], ""
        if captioned := re.fullmatch(r"\{code-block\} (\w+)", info):
            option, _, body = body.partition("\n\n")
            info, file = captioned[1], option.removeprefix(":caption: ").strip()
            if not option.startswith(":caption: "):
                raise ValueError(f"line {line}: a code-block needs a caption, the file's name")
        if info == "{run}":
            info = "python"
        if info == "text" and found:
            found[-1] = found[-1]._replace(printed=body)
        elif info in CODE:
            needs, reason = match["needs"] or "", match["reason"] or ""
            found.append(Block(line, info, body, file, None, needs, reason))
        elif info not in DATA and (not info.startswith("{") or "```" in body):
            raise ValueError(f"line {line}: a block of {info or 'nothing'} is not run by any test")
    return found


def run(name: str, block: Block, namespace: dict[str, Any]) -> None:
    """Run one block; AssertionError where it prints something else than the page says."""
    if block.file:
        Path(block.file).write_text(block.code, encoding="utf-8")
        return
    if block.language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        printed = done.stdout
        assert done.returncode == 0, f"{name}, line {block.line}: exit {done.returncode}\n{printed}"
    else:
        path = str(Path(f"{name}-{block.line}.py").resolve())
        source = "\n" * block.line + block.code  # errors then name the line of the page
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            exec(compile(source, path, "exec"), namespace)  # noqa: S102  # our own page
        printed = stream.getvalue()
    if block.printed is not None:
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(block.printed, printed, flags), (
            f"{name}, line {block.line}: the page says\n{block.printed}\nand it prints\n{printed}"
        )


def main(page: Path, lines: list[int]) -> None:
    """Run the blocks of a page that begin at these lines."""
    sys.path.insert(0, "")  # the files that blocks write can be imported
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.line in lines:
            run(page.stem, block, namespace)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(line) for line in sys.argv[2:]])
