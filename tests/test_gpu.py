"""What only a GPU can show: graphs, streams, devices, the search, a memory checker's verdict."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from paths import (
    PATHS,
    Results,
    assert_same_bits,
    check,
    make,
    on_every_kernel,
    on_every_path,
    run,
    shapes,
)

from rmsnorm_ref import rmsnorm, tiling, tuning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

pytestmark = pytest.mark.gpu

FP16, BF16 = torch.float16, torch.bfloat16
MOST_SEARCH_TIME_S = 5.0  # of a first call, most of it the compilation of some 16 kernels


@pytest.fixture(params=["fixed", "search"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose how configs are found, with nothing found yet, and put it back afterwards."""
    tuning.set_mode(request.param)
    yield request.param
    tuning.set_mode(None)


@pytest.fixture
def search() -> Iterator[None]:
    """Search from here on, with nothing found yet."""
    tuning.set_mode("search")
    yield
    tuning.set_mode(None)


@pytest.fixture
def fixed() -> Iterator[None]:
    """Take the shipped table from here on."""
    tuning.set_mode("fixed")
    yield
    tuning.set_mode(None)


def capture(x: Tensor, w: Tensor, dy: Tensor) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Record both passes on these very tensors; return the graph and what it writes to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(x, w, dy)
    return graph, results


@pytest.mark.usefixtures("fixed")
@on_every_kernel
def test_a_cuda_graph_replays_on_new_data(N: int, M: int, device: str) -> None:
    """Both passes, captured once, give eager's bits for whatever is copied into their inputs."""
    static = make(M, N, BF16, device=device)
    run(*static)  # compiles, as any program has before it captures
    graph, results = capture(*static)
    for seed in (1, 2):
        new = make(M, N, BF16, device=device, seed=seed)
        for tensor, values in zip(static, new, strict=True):
            tensor.copy_(values)
        graph.replay()
        assert_same_bits(results, run(*new))


@pytest.mark.usefixtures("search")
@pytest.mark.parametrize("tuned", ["nothing", "forward"])
@on_every_kernel
def test_a_capture_that_would_search_is_refused(N: int, M: int, tuned: str, device: str) -> None:
    """A capture before the first call of a width raises, and says what to do before it."""
    x, w, dy = make(M, N, BF16, device=device)
    if tuned == "forward":
        rmsnorm(x, w)
    with pytest.raises(RuntimeError, match=rf"N = {N} .*before the capture.*=fixed"):
        capture(x, w, dy)
    check(x, w, dy)


@on_every_kernel
def test_launches_go_to_the_current_stream(N: int, M: int, device: str) -> None:
    """On another stream both passes wait for what that stream still has to write."""
    x, w, dy = make(M, N, BF16, device=device)
    expected = run(x, w, dy)
    late_x, late_dy = torch.zeros_like(x), torch.zeros_like(dy)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock cycles, tens of milliseconds
        late_x.copy_(x)
        late_dy.copy_(dy)
        found = run(late_x, w, late_dy)
    stream.synchronize()
    assert_same_bits(found, expected)


@pytest.mark.parametrize("current", [0, 1])
@on_every_kernel
def test_a_second_device(N: int, M: int, current: int) -> None:
    """Tensors on any GPU are right whichever GPU is current, and it stays current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = (make(M, N, BF16, device=f"cuda:{index}") for index in (0, 1))
    with torch.cuda.device(current):
        found = check(*second)
        expected = check(*first)
        assert torch.cuda.current_device() == current
    assert_same_bits((t.cpu() for t in found), (t.cpu() for t in expected))


@on_every_kernel
def test_both_modes_are_right(N: int, M: int, mode: str, device: str) -> None:
    """Searched or shipped, the config that is launched meets the bounds, and was a candidate."""
    check(*make(M, N, BF16, device=device))
    found = tuning.chosen()
    assert len(found) == 2
    for (path, *_), config in found.items():
        shipped = tuning.shipped(path, N, BF16)
        candidates = {c for c, reason in tuning.pruned(path, N, BF16).items() if reason is None}
        assert config in ({shipped} if mode == "fixed" else candidates | {shipped})


@pytest.mark.usefixtures("search")
@on_every_path
def test_the_first_search_is_short(N: int, device: str) -> None:
    """The first call of a width, with both searches and all their compilations, takes seconds."""
    x, w, dy = make(64, N - 1, BF16, device=device)  # a width nothing else has compiled
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    run(x, w, dy)
    torch.cuda.synchronize()
    assert time.perf_counter() - start_s < MOST_SEARCH_TIME_S


@pytest.mark.usefixtures("search")
@on_every_path
def test_the_choice_ignores_the_batch(N: int, device: str) -> None:
    """The first call's number of rows leaves no trace: one search serves all."""
    run(*make(1, N, BF16, device=device))
    first = tuning.chosen()
    run(*make(700, N, BF16, device=device))
    assert tuning.chosen() == first


@pytest.mark.parametrize("N", [128, 2048, 8192])
def test_the_l2_policy_moves_no_bit(N: int, device: str) -> None:
    """Rows of a batch so large that it is marked for the L2 have the bits they have among few."""
    M = tiling.LARGE_BYTES // (2 * N)
    x, w, dy = make(M, N, BF16, device=device)
    assert tiling.eviction(x) != tiling.eviction(x[:1024])
    large, small = run(x, w, dy), run(x[:1024], w, dy[:1024])
    assert_same_bits((large.y[:1024], large.dx[:1024]), (small.y, small.dx))


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("N", [2048, 3000, 4096])
def test_the_cap_on_registers_moves_no_bit(N: int, dtype: torch.dtype, device: str) -> None:
    """A row has the same bits where a cap makes all rows one wave, and in other batches."""
    gpu = torch.device("cuda", 0)
    warps = tuning.shipped("forward", N, dtype).num_warps
    per_sm = tiling.threads_per_sm(gpu)
    wave = tiling.one_wave(N, dtype, warps, tiling.sm_count(gpu), per_sm)
    x, w, _ = make(wave.stop, N, dtype, device=device)
    with torch.no_grad():
        one, before, after = (rmsnorm(x[:M], w, 1e-6) for M in (wave[-1], wave[0] - 1, wave.stop))
    trained = run(x[: wave[-1]], w, torch.ones_like(x[: wave[-1]])).y
    assert_same_bits((one[: wave[0] - 1], one, one), (before, after[: wave[-1]], trained))


@pytest.mark.usefixtures("unprepared", "fixed", "poisoned")
@pytest.mark.parametrize("N", [64, 128, 1024, 2048, 8192])
def test_an_early_reduction_waits_for_all_programs(
    N: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Put in place while the first kernel runs, it reads none of the sums before they are there.

    The buffer is full of NaN before they are.
    """
    M = 8 * 1024 * 1024 // N + 7
    gpu = torch.device("cuda", 0)
    if not tiling.overlaps(gpu):
        pytest.skip("this GPU starts no kernel before the one before it has ended")
    x, w, dy = make(M, N, BF16, device=device)
    assert tiling.reduces_early(tiling.n_programs(M, N, x.dtype, gpu), x)
    rows, cols = (tile(N, gpu, early=True) for tile in (tiling.reduce_rows, tiling.reduce_cols))
    monkeypatch.setattr(tiling, "reduce_rows", lambda *_, **__: rows)
    monkeypatch.setattr(tiling, "reduce_cols", lambda *_, **__: cols)
    with monkeypatch.context() as late:
        late.setattr(tiling, "reduces_early", lambda *_: False)
        expected = run(x, w, dy)
    for _ in range(50):
        assert_same_bits(run(x, w, dy), expected)


@pytest.mark.usefixtures("unprepared", "fixed")
@pytest.mark.parametrize("looks", [0, 1, 5])
@pytest.mark.parametrize(("M", "N"), [(1, 65521), (40, 9001), (301, 20000), (700, 65536)])
def test_a_part_that_another_makes_has_the_same_bits(
    M: int, N: int, looks: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A program that does not wait for the others of its team makes their parts as they would."""
    x, w, dy = make(M, N, BF16, device=device)
    expected = run(x, w, dy)
    monkeypatch.setattr(tiling, "PATIENCE", looks)
    tuning.set_mode("fixed")  # and forget the launch that waits
    for _ in range(5):
        assert_same_bits(run(x, w, dy), expected)


@pytest.mark.usefixtures("fixed")
def test_teams_of_many_launches_at_once(device: str) -> None:
    """Wide backwards on a dozen streams share the places, and each has its own bits."""
    x, w, dy = make(300, 65536, BF16, device=device)
    expected = run(x, w, dy)
    streams = [torch.cuda.Stream() for _ in range(12)]
    torch.cuda.synchronize()
    found = []
    for stream in 3 * streams:
        with torch.cuda.stream(stream):
            found.append(run(x, w, dy))
    torch.cuda.synchronize()
    for results in found:
        assert_same_bits(results, expected)


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_hears_of_every_launch(name: str, device: str) -> None:
    """A launch hook of Triton's is called for each kernel, the remembered ones too."""
    from triton import knobs

    x, w, dy = make(2000, 2048, BF16, device=device)
    expected = run(x, w, dy)
    heard: list[str] = []

    def listen(metadata: Any) -> None:
        heard.append(metadata.get()["name"])

    hook = getattr(knobs.runtime, name)
    hook.add(listen)
    try:
        assert_same_bits(run(x, w, dy), expected)
    finally:
        hook.remove(listen)
    run(x, w, dy)
    assert heard == ["rmsnorm_forward_kernel", "rmsnorm_backward_kernel", "reduce_dw_kernel"]


@pytest.mark.parametrize("N", [512, 2048, 8192, 12000, 20000, 40000])
def test_huge_offset(N: int, device: str) -> None:
    """Past 2**31 elements the last row is right in every kernel, and the zeros before it stay."""
    M = 2**31 // N + 2
    _need_memory(5 * M * N * 2)
    last_x, w, last_dy = make(1, N, BF16, torch.float32, device=device)
    x, dy = (torch.zeros(M, N, dtype=BF16, device=device) for _ in range(2))
    x[-1], dy[-1] = last_x[0], last_dy[0]
    expected, found = check(last_x, w, last_dy), run(x, w, dy)
    assert_same_bits((found.y[-1:], found.dx[-1:], found.dw), expected)
    for result, row in ((found.y, expected.y), (found.dx, expected.dx)):
        assert result.count_nonzero() == row.count_nonzero()


@pytest.mark.parametrize("row_stride", [2**30 + 16, 2**31 + 16])
@pytest.mark.parametrize("N", [512, 8192, 12000, 20000, 40000])
def test_huge_stride(N: int, row_stride: int, device: str) -> None:
    """Rows so far apart that the third starts past 2**31 elements, are read where they lie."""
    n_elements = 2 * row_stride + N
    _need_memory(2 * n_elements * 2)
    values, w, dy = make(3, N, BF16, device=device)
    expected = check(values, w, dy)  # first, so that what compiled for near rows meets far ones
    x = torch.zeros(n_elements, dtype=BF16, device=device).as_strided((3, N), (row_stride, 1))
    assert_same_bits(run(x.copy_(values), w, dy), expected)


def _need_memory(n_bytes: int) -> None:
    """Skip where the GPU is too small."""
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < n_bytes:
        pytest.skip(f"needs {n_bytes >> 30} GiB of GPU memory, {free_bytes >> 30} are free")


SANITIZED = f"""
import torch, paths
for N, M in {shapes(*PATHS)}:
    x, w, dy = paths.make(M + 1, N, torch.bfloat16)
    paths.run(x, w, dy)
    paths.run(x, w, dy, needs_dx=False)
    paths.run(x, w, dy, needs_dw=False)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_is_clean(tool: str) -> None:
    """No access out of bounds, and no race in shared memory, in any kernel."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on this machine's PATH")
    environment = os.environ | {
        "RMSNORM_REF_TUNING": "fixed",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # one allocation per tensor: its end is known
    }
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, "-c", SANITIZED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert any(clean in done.stdout for clean in (": 0 errors", ": 0 hazards"))
