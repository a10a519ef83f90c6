"""The shipped table: what the search chose on an NVIDIA H200, and what fixed mode takes.

How a path's choice is looked up, and what stands in where a device cannot launch it, is in
`tuning.shipped`.
"""

from typing import NamedTuple


class Config(NamedTuple):
    """How one kernel is launched: what the search may choose."""

    num_warps: int
    num_stages: int = 1


# By path and by elements per tile or chunk; what the search chose on an NVIDIA H200.
SHIPPED = {
    "forward": {2048: Config(4), 4096: Config(8), 8192: Config(8)},
    "backward": {4096: Config(4, 3), 8192: Config(8, 3)},
    "wide_forward": {8192: Config(16), 16384: Config(32)},
    "wide_backward": {1024: Config(1)},
}
REDUCE = Config(4)  # the dw reduction, a few microseconds
# Where the table is more than the noise away from the best: (path, BLOCK_SIZE, bytes per element).
EXCEPTIONS = {
    ("forward", 1, 2): Config(1), ("forward", 64, 2): Config(8), ("forward", 1, 4): Config(16),
    ("forward", 4, 4): Config(16), ("forward", 1024, 4): Config(8),
    ("forward", 8192, 4): Config(16),
    ("wide_forward", 16384, 4): Config(32),
    ("backward", 1, 2): Config(16, 1), ("backward", 2, 2): Config(8, 1),
    ("backward", 256, 2): Config(16, 3), ("backward", 1, 4): Config(32, 1),
    ("backward", 2, 4): Config(8, 1), ("backward", 16, 4): Config(16, 1),
    ("backward", 32, 4): Config(16, 1), ("backward", 64, 4): Config(4, 1),
    ("backward", 128, 4): Config(16, 1), ("backward", 256, 4): Config(8, 1),
    ("backward", 512, 4): Config(4, 1), ("backward", 1024, 4): Config(8, 1),
    ("wide_backward", 16384, 4): Config(2), ("wide_backward", 32768, 4): Config(2),
    ("wide_backward", 65536, 4): Config(2),
}  # fmt: skip
