"""Kernels that search for their launch: reviewed without a clock, each config among what is met."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from paths import DEVICE
from reviewed import small

from rmsnorm_ref import review
from rmsnorm_ref.review import tuners
from rmsnorm_ref.review.rules import NOTE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rmsnorm_ref.review.cases import Case

TUNED = """
import torch
import triton
import triton.language as tl

@triton.autotune([triton.Config({{"TILES": n}}) for n in (1, 2, 3, 4)], key={key}{caches})
@triton.jit
def scale_rows(x, w, y, N, eps, BLOCK: tl.constexpr, TILES: tl.constexpr):
    tl.static_assert({fits})
    total = 0.0
    for first in tl.static_range(0, BLOCK * TILES, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        at = tl.program_id(0).to(tl.int64) * N + cols
        row = tl.load(x + at, mask=cols < N, other=0.0).to(tl.float32)
        total += tl.sum(row * row, 0)
    rstd = tl.rsqrt(total / N + eps)
    for first in tl.static_range(0, BLOCK * TILES, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        at = tl.program_id(0).to(tl.int64) * N + cols
        row = tl.load(x + at, mask=cols < N, other=0.0).to(tl.float32)
        gain = tl.load(w + cols, mask=cols < N, other=0.0).to(tl.float32)
        if {skips}:
            gain += 1
        tl.store(y + at, (row * rstd * gain).to(y.dtype.element_ty), mask=cols < N)

def f(x, w, eps):
    x, w = x.detach().contiguous(), w.detach().contiguous()
    y = torch.empty_like(x)
    if len(x):
        scale_rows[(x.numel() // x.shape[-1],)](
            x, w, y, x.shape[-1], eps, triton.next_power_of_2(x.shape[-1])
        )
    return y
"""


def write(
    path: Path, *, skips: str = "False", caches: str = "", key: str = "['N']", fits: str = "True"
) -> str:
    """Write a kernel with four configs, wrong with those where `skips` holds; return its name."""
    path.write_text(TUNED.format(skips=skips, caches=caches, key=key, fits=fits))
    return f"{path}:f"


def few(case: Case) -> bool:
    """Keep shapes at which every config is met, and little else."""
    return small(case) and "packed" == case.x_layout == case.dy_layout


def reviewed(name: str, **options: Any) -> review.Report:
    """Review where the tests run, on inputs that take little time."""
    dtypes = ("float32",)
    return review.review(name, **({"device": DEVICE, "dtypes": dtypes, "only": few} | options))


@pytest.mark.parametrize("fits", ["True", "TILES != 3"])
def test_a_kernel_that_searches_is_not_accused(fits: str, tmp_path: Path) -> None:
    """No clock is needed for it; a config that does not compile is passed over; all are counted."""
    report = reviewed(write(tmp_path / "tuned.py", fits=fits))
    assert report.rules() == set()
    assert not report.rules(NOTE) & {"r-same-twice", "r-batch-invariance", "r-history"}
    assert report.told["tuned"] == {"scale_rows": 4}
    assert report.provenance["configs"].endswith("scale_rows of 4")


@pytest.mark.parametrize("key", ["['N']", "[]"])
def test_one_wrong_config_is_found_each_time(key: str, tmp_path: Path) -> None:
    """A config that is wrong is met, at the same widths in two reviews, and the code shows it."""
    name = write(tmp_path / "wrong.py", skips="TILES == 3", key=key)
    first, second = reviewed(name), reviewed(name)
    assert "r-value-y" in first.rules()
    assert [f.json() for f in first.findings] == [f.json() for f in second.findings]
    found = next(f for f in first.findings if f.rule == "r-value-y")
    ended = subprocess.run(  # what a report tells its reader to do
        [sys.executable, "-c", found.code], capture_output=True, text=True, check=False
    )
    assert ended.stderr.strip().splitlines()[-1].startswith("AssertionError: y")


def test_no_time_that_nobody_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuner that keeps its times in files writes none in a review."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    name = write(tmp_path / "caches.py", caches=", cache_results=True")
    assert reviewed(name).told["tuned"] == {"scale_rows": 4}
    assert not list((tmp_path / "cache").rglob("*autotune*"))


class Kernel:
    """Stand for a compiled kernel: it runs with some configs and does not fit with others."""

    def __init__(self, fitting: set[int]) -> None:
        self.fitting = fitting
        self.ran: list[int] = []

    @staticmethod
    def fn(N: int) -> None:
        """Name the arguments."""

    def run(self, *args: Any, **options: Any) -> None:
        """Launch."""
        from triton.runtime.errors import OutOfResources

        del args
        if options["TILES"] not in self.fitting:
            raise OutOfResources(2, 1, "shared memory")
        self.ran.append(options["TILES"])


def tuner_of(kernel: Kernel) -> Any:
    """Make a search over four configs, keyed by N."""
    import triton
    from triton.runtime.autotuner import Autotuner

    configs = [triton.Config({"TILES": n}) for n in (1, 2, 3, 4)]
    return Autotuner(kernel, ["N", "TILES"], configs, ["N"], None, None)


@pytest.mark.parametrize("fitting", [{1, 2, 3, 4}, {2}, {1, 4}])
def test_what_does_not_fit_is_passed_over(fitting: set[int]) -> None:
    """Each width takes a config that fits the GPU, and over many widths all of them are met."""
    kernel, seen = Kernel(fitting), {}
    tuner = tuner_of(kernel)
    with tuners.drawn(seen):
        for N in range(64):
            tuner.run(N)
    assert set(kernel.ran) == fitting
    assert seen == {"fn": 4}


def test_a_search_is_its_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drawn is forgotten at the end: the next search times, and keeps what it kept."""
    from triton.runtime.autotuner import Autotuner

    own = Autotuner.prune_configs  # another test of this process may have loaded a candidate
    monkeypatch.setattr(Autotuner, "prune_configs", getattr(own, "undrawn", own))
    tuner = tuner_of(Kernel({1, 2, 3, 4}))
    tuner.cache["kept"] = tuner.configs[0]
    before = dict(vars(tuner)), dict(tuner.cache)
    with tuners.drawn({}):
        tuner.run(7)
        assert len(tuner.cache) == 2
    assert tuner.cache == before[1]
    assert "do_bench" not in vars(tuner)
    assert vars(tuner).keys() <= before[0].keys() | {"nargs"}
    assert tuner.cache_results == before[0]["cache_results"]
    timed = []

    def do_bench(kernel_call: Callable[[], None], quantiles: Any) -> list[float]:
        del quantiles
        timed.append(kernel_call())
        return [1.0, 1.0, 1.0]

    tuner.do_bench = do_bench
    tuner.run(7)
    assert len(timed) == 4


def test_a_search_that_fails_without_us_fails_with_us() -> None:
    """Where no config fits, the kernel's own error is told."""
    from triton.runtime.errors import OutOfResources

    tuner = tuner_of(Kernel(set()))
    with tuners.drawn({}), pytest.raises(OutOfResources):
        tuner.run(7)


def test_one_block_in_another_draws_once() -> None:
    """A process that loads a candidate and then reviews it draws as each of the two does."""
    once, twice = Kernel({1, 2, 3, 4}), Kernel({1, 2, 3, 4})
    for kernel, n_blocks in ((once, 1), (twice, 2)):
        tuner = tuner_of(kernel)
        with contextlib.ExitStack() as blocks:
            for _ in range(n_blocks):
                blocks.enter_context(tuners.drawn({}))
            for N in range(32):
                tuner.run(N)
    assert once.ran == twice.ran


def test_a_key_is_the_same_in_every_process() -> None:
    """What has an address in its text, such as a function in a key, is known by its name."""
    found = []
    for _ in range(2):
        kernel = Kernel({1, 2, 3, 4})
        with tuners.drawn({}):
            tuner_of(kernel).run(type("activation", (), {})())
        found.append(kernel.ran)
    assert found[0] == found[1]
