"""The words of `python -m rmsnorm_ref review`, and its exit codes.

0: pass, with notes or without. 1: fail. 2: a word is wrong. 3: passed, and `--bench` found no GPU
to time on; the rest of the review was made, and its report says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .plan import ALL_DTYPES
from .process import Target
from .report import EXIT_CODES
from .run import Options, review

if TYPE_CHECKING:
    import argparse

NO_GPU = 3


def run(words: argparse.Namespace) -> int:
    """Review, print what a terminal shows, save the report; return the exit code.

    Raises:
        ValueError: a word of the command line is wrong.
    """
    dtypes = tuple(words.dtype.split(",")) if words.dtype else ALL_DTYPES
    device = words.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check(words, dtypes, device)
    target = Target(words.target, words.signature or "", words.init or "")
    options: dict[str, Any] = {
        name: getattr(words, name)
        for name in ("full", "bench", "huge", "seed", "strict", "one_plus_w")
    }
    report = review(
        Options(target, device, dtypes, limit_s=words.time_limit, progress=True, **options)
    )
    print(report.text())  # noqa: T201  # a command's output is what it prints
    for out in words.out:
        report.save(out)
    code = EXIT_CODES[report.verdict]
    return NO_GPU if code == 0 and "left_out" in (report.told.get("bench") or {}) else code


def _check(words: argparse.Namespace, dtypes: tuple[str, ...], device: str) -> None:
    """Raise ValueError for a word that is wrong, before anything is run."""
    if unknown := set(dtypes) - set(ALL_DTYPES):
        raise ValueError(f"--dtype {', '.join(sorted(unknown))}: expected {', '.join(ALL_DTYPES)}")
    for out in words.out:
        if Path(out).suffix not in {".md", ".html", ".json"}:
            raise ValueError(f"--out {out}: a report ends in .md, .html or .json")
        if not Path(out).resolve().parent.is_dir():
            raise ValueError(f"--out {out}: there is no folder {Path(out).resolve().parent}")
    _check_target(words.target)
    if not 0 < words.time_limit < float("inf"):
        raise ValueError(f"--time-limit {words.time_limit:g}: expected a number of seconds above 0")
    if torch.device(device).type not in {"cpu", "cuda"}:
        raise ValueError(f"--device {device}: expected cpu or cuda")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no GPU")
    if words.huge and device == "cpu":
        raise ValueError("--huge needs a GPU: it makes tensors of more than 2^31 elements")


def _check_target(target: str) -> None:
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise ValueError(f"{target!r}: expected path/to/file.py:function or package:function")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"{target!r}: there is no file {place}")


def add(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser = commands.add_parser(
        "review",
        help="audit somebody's RMSNorm kernel against oracle, contract and ceiling",
        description=(
            "Run a kernel f(x, w, eps) -> y in a child process on many small inputs, hold y, dx "
            "and dw against the float64 truth, find out what it computes, report what was fed and "
            "what came out. Exit code 0: pass, with notes or without. 1: fail. 2: a word is wrong. "
            "3: passed, but --bench found no GPU."
        ),
    )
    parser.add_argument("target", help="path/to/file.py:function or package.module:function")
    parser.add_argument("--signature", help='how it is called, say "w, x, eps" or "x, weight=w"')
    parser.add_argument("--init", help='how a module class is made (default: "N, eps=eps")')
    parser.add_argument("--one-plus-w", action="store_true",
                        help="the gain is 1 + w, as Gemma stores it")  # fmt: skip
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument(
        "--dtype", help="comma-separated: float16, bfloat16, float32 (default: all)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="several hundred inputs (the default)")
    size.add_argument("--full", action="store_true", help="more shapes, in every dtype")
    parser.add_argument("--huge", action="store_true", help="also more than 2^31 elements")
    parser.add_argument("--bench", action="store_true", help="time it beside reference and eager")
    parser.add_argument(
        "--strict", action="store_true", help="roundings and bits that are notes fail"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="SECONDS",
                        help="for one input (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="FILE",
        help="report.md, report.html or report.json; may be repeated",
    )
