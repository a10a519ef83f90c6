"""The command line: `python -m rmsnorm_ref check`."""

import argparse
import sys

from . import check


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code (2 where the machine cannot run the kernels)."""
    parser = argparse.ArgumentParser(
        prog="python -m rmsnorm_ref", description="Fused RMSNorm in Triton: the reference kernels."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser(
        "check",
        help="hold the kernels against the oracle on this machine",
        description=(
            "Run both passes, compare y, dx and dw with the float64 truth, print the largest error "
            "of each in ulp and as a share of its bound. Exit code 0: all within. 1: one is not. "
            "2: the kernels cannot run here."
        ),
    )
    checking.add_argument(
        "--full",
        action="store_true",
        help="all 24 cells of the sweep (on a machine without a GPU: some minutes)",
    )
    checking.add_argument("--json", action="store_true", help="print one JSON object, no table")
    options = parser.parse_args(arguments)
    try:
        return check.run(full=options.full, as_json=options.json)
    except (RuntimeError, ValueError) as error:
        print(f"rmsnorm_ref: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
