"""The command line: `python -m rmsnorm_ref check | bench | review`."""

import argparse
import os
import sys
from importlib import import_module
from typing import Any

from . import check

# What a shell gives for SIGINT and SIGPIPE.
STOPPED, NOBODY_READS = 130, 141


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code.

    2 where the machine or a word does not allow it, 130 where it was stopped by SIGINT, 141 where
    nobody reads what it prints any more.
    """
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
    _add_bench(commands)
    # Not before it is asked for: `check` needs none of it, and `--help` lists every command.
    import_module("rmsnorm_ref.review.command").add(commands)
    options = parser.parse_args(arguments)
    try:
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has gone, as `head` goes; what is left is not to fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except KeyboardInterrupt:
        print("rmsnorm_ref: stopped", file=sys.stderr)
        return STOPPED
    except (RuntimeError, ValueError) as error:
        print(f"rmsnorm_ref: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    return code


def _run(options: argparse.Namespace) -> int:
    if options.command == "review":
        return int(import_module("rmsnorm_ref.review.command").run(options))
    if options.command == "bench":
        # Not before it is asked for: `check` needs none of it.
        bench = import_module("rmsnorm_ref.measure.bench")
        names = bench.Options._fields
        return int(bench.run(bench.Options(*(getattr(options, name) for name in names))))
    return check.run(full=options.full, as_json=options.json)


def _add_bench(commands: Any) -> None:
    timing = commands.add_parser(
        "bench",
        help="time the kernels, their ceilings and their peers on this GPU",
        description=(
            "Time both passes beside the kernels that only move the bytes and beside other "
            "implementations, write one recording, print a table. Exit code 0: done. 2: an option "
            "is wrong or the GPU failed. 3: no GPU. 4: nothing was measured. 130, 143: stopped by "
            "SIGINT or SIGTERM, what was measured is saved."
        ),
    )
    timing.add_argument(
        "--cells",
        default="seed",
        help="comma-separated: seed, narrow, wide, few, sizes, widths (kernel times of shapes), "
        "cold, configs, ablations, host, errors, counters, eager, scaling (two GPUs), or all "
        "(default: %(default)s)",
    )
    timing.add_argument(
        "--dtype",
        help="comma-separated: float16, bfloat16, float32 (default: bfloat16; seed and errors also "
        "float16)",
    )
    timing.add_argument(
        "--passes", default="forward,backward", help="one or both (default: %(default)s)"
    )
    timing.add_argument(
        "--peers",
        default="all",
        help="all, none, or a comma-separated list of eager, eager_fp32, F.rms_norm, "
        "torch.compile, liger, fla, flash_attn, quack (default: %(default)s)",
    )
    timing.add_argument(
        "--out",
        help="file to write, a new one (default: ./rmsnorm_ref-<gpu>-<date>.json)",
    )
    timing.add_argument(
        "--against",
        help="an earlier recording, shipped or a file: how far the medians moved since is noted",
    )


if __name__ == "__main__":
    sys.exit(main())
