"""The `run` directive: Python that runs while the page is built, with what it prints below it.

    ```{run}
    from rmsnorm_ref.measure import choice
    print(choice.picked(section="seed")[1].id)
    ```

So what a page shows as output cannot be out of date. The blocks of a page are one session. Code
that raises stops the build; code that prints nothing shows no output.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SESSION = "run_code.names"  # in what Sphinx keeps while it reads one page


class RunDirective(SphinxDirective):
    """Show code and what it prints."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Run the code; return it as one block, and its output as another."""
        code = "\n".join(self.content)
        names: Any = self.env.temp_data.setdefault(SESSION, {"__name__": "__page__"})
        where = f"{self.env.docname}:{self.lineno}"
        try:
            printed = output(code, names, where)
        except Exception as error:
            raise self.error(f"run: {type(error).__name__}: {error}") from error
        blocks = [nodes.literal_block(code, code, language="python")]
        if printed:
            blocks.append(nodes.literal_block(printed, printed, language="text"))
        return list(blocks)


def output(code: str, names: dict[str, Any], where: str) -> str:
    """Run code among these names, and return what it prints."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        # The code stands in this repository, like any other code of it.
        exec(compile(code, where, "exec"), names)  # noqa: S102
    return stream.getvalue().rstrip("\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("run", RunDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
