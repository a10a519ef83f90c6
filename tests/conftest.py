"""Where the tests run: compiled on a GPU where there is one, else interpreted on the CPU."""

from __future__ import annotations

import gc
import os
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

# Triton reads its switch once, at its first import, which no test module may do before this line.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from browser import chromium, page_of  # noqa: F401  # fixtures for every test module
from paths import DEVICE
from ranks import WORLD, Ranks
from site_build import served, site, small  # noqa: F401  # fixtures of every site test

from rmsnorm_ref import tuning

if TYPE_CHECKING:
    from collections.abc import Iterator

# On a GPU the suite takes the shipped table: a search of a second for each width, dtype and kernel
# would outlast the tests. test_gpu.py searches on purpose, and a variable set outside wins.
if DEVICE == "cuda":
    os.environ.setdefault("RMSNORM_REF_TUNING", "fixed")
else:
    # Interpreted tensors are small: torch's own threads would only wait for each other, here and in
    # the processes that tests start, which take the number from this variable.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs a GPU and has none."""
    if DEVICE == "cuda":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and Triton's compiler, and has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Have Python's collector pass over all that was imported: interpreted kernels wake it often.

    What the tests make is still collected, if less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_unconfigure() -> None:
    """Let Python take it all apart in the end: Triton counts what is left, and complains."""
    gc.unfreeze()


@pytest.fixture
def device() -> str:
    """Name the device under test: "cuda" where kernels compile, "cpu" where interpreted."""
    return DEVICE


def _leave_a_lost_gpu() -> None:
    """End a process whose GPU an illegal access has made unusable, so that others are not blamed.

    A worker is replaced by its runner, which names the test that it was at.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"this process has lost its GPU: {error}", returncode=1)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Give every test the same random numbers, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # for libraries that draw from numpy's global generator
    torch.manual_seed(0)
    yield
    if DEVICE == "cuda":
        _leave_a_lost_gpu()
    # Several processes share one GPU, and what torch keeps for later nobody else can have.
    if DEVICE == "cuda" and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


def _forget_launches() -> None:
    tuning.set_mode(None)
    backward: Any = sys.modules.get("rmsnorm_ref.backward")  # not imported before a first launch
    if backward:
        backward._build_reduction.cache_clear()


@pytest.fixture
def unprepared() -> Iterator[None]:
    """Forget what was launched before, and afterwards what a test launched with another tiling."""
    _forget_launches()
    yield
    _forget_launches()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Hand out new memory full of NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(
        mode=True, warn_only=True
    )  # fills what is left uninitialised
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Keep two ranks of a process group for a test file: on the CPU, and on two GPUs."""
    if not torch.distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    if request.param == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip("needs two GPUs")
    both = Ranks(request.param)
    yield both
    both.close()
