"""What is searched, pruned and shipped; the compiler's own view is in test_compile.py."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from paths import DEVICE, in_every_dtype, on_every_path, on_every_width

from rmsnorm_ref import interpreter, table, tiling, tuning
from rmsnorm_ref.table import Config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")
BLOCK_SIZES = tuple(2**i for i in range(17))
MANY = 2**20  # rows, more than any threshold


@pytest.fixture(autouse=True)
def _no_mode_left_behind() -> Iterator[None]:
    """Follow the environment again after each test, with nothing remembered."""
    tuning.set_mode(None)
    yield
    tuning.set_mode(None)


def paths_of(N: int) -> tuple[str, str]:
    """Name the searches that rows of N columns start; few rows take the choice for many."""
    forward = "forward" if N <= tiling.ONE_TILE_MAX else "wide_forward"
    return forward, tiling.backward_path(MANY, N, CPU, BF16)


# ---- Searched and pruned ----------------------------------------------------------------------


@on_every_width
@in_every_dtype
def test_every_config_is_tried_or_has_a_reason(N: int, dtype: torch.dtype) -> None:
    """The search covers all warps and stages, and leaves something to try on every path."""
    space = {Config(w, s) for w, s in itertools.product(tuning.WARPS, tuning.STAGES)}
    assert {Config(w, s) for w in (1, 2, 4, 8, 16, 32) for s in (1, 2, 4)} <= space
    for path in paths_of(N):
        reasons = tuning.pruned(path, N, dtype)
        assert set(reasons) == space
        assert None in reasons.values()


@pytest.mark.parametrize(
    ("path", "N", "dtype", "config", "limits", "reason"),
    [
        ("forward", 2048, FP16, Config(4, 2), {}, "no pipelined loop"),
        ("wide_backward", 20000, FP16, Config(16, 2), {}, "no pipelined loop"),
        ("forward", 8192, FP16, Config(32), {"warp_size": 64}, "2048 threads"),
        ("forward", 2048, FP16, Config(16), {}, "4 elements per thread: less than one 16-byte"),
        ("backward", 512, FP16, Config(32), {}, "4 elements per thread: less than one 16-byte"),
        ("forward", 8192, FP16, Config(2), {}, "128 elements per thread: live values spill"),
        ("wide_backward", 40000, FP16, Config(2), {}, "64 threads: not all programs"),
        ("wide_backward", 40000, FP32, Config(4), {}, "128 threads: not all programs"),
        ("backward", 8192, FP32, Config(8, 4), {"shared_bytes": 166912}, "196608 bytes of shared"),
    ],
)
def test_pruning_gives_the_reason(
    path: str, N: int, dtype: torch.dtype, config: Config, limits: dict[str, int], reason: str
) -> None:
    """Each rule names the number that breaks it, and the nearest config it allows is tried."""
    found = tuning.pruned(path, N, dtype, **limits)[config]
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("path", "N", "dtype", "config"),
    [
        ("forward", 2048, FP16, Config(8)),
        ("forward", 2048, FP32, Config(16)),
        ("forward", 8192, FP16, Config(4)),
        ("wide_backward", 40000, FP16, Config(1)),
        ("wide_backward", 40000, FP32, Config(2)),
        ("backward", 8192, FP32, Config(8, 4)),
    ],
)
def test_pruning_stops_at_its_threshold(
    path: str, N: int, dtype: torch.dtype, config: Config
) -> None:
    """The last config on the right side of each rule is tried."""
    assert tuning.pruned(path, N, dtype)[config] is None


@on_every_width
@in_every_dtype
def test_no_program_has_more_than_1024_threads(N: int, dtype: torch.dtype) -> None:
    """With 64-wide warps no config that is tried or taken asks for more than 1024 threads."""
    for path in paths_of(N):
        tried = [c for c, r in tuning.pruned(path, N, dtype, warp_size=64).items() if r is None]
        taken = tuning.shipped(path, N, dtype, warp_size=64)
        assert taken in tried or (taken == Config(1) and not tried), "a team of single warps"
        assert max(config.num_warps for config in [*tried, taken]) * 64 <= 1024


# ---- Shipped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@in_every_dtype
def test_shipped_config_is_one_that_the_search_would_try(
    block_size: int, dtype: torch.dtype
) -> None:
    """Fixed mode launches nothing that search mode has a reason to refuse."""
    for N in {block_size // 2 + 1, block_size}:
        for path in paths_of(N):
            config = tuning.shipped(path, N, dtype)
            assert tuning.pruned(path, N, dtype)[config] is None, (path, N, config)


def test_every_exception_can_be_reached() -> None:
    """No line of the table is dead: its width takes its path, and it differs from the rule."""
    for (path, block_size, n_bytes), config in table.EXCEPTIONS.items():
        assert block_size in BLOCK_SIZES
        assert path in paths_of(block_size)
        assert n_bytes in {2, 4}
        assert config != table.SHIPPED[path][tuning.SPACES[path].tile_elements(block_size)]


# ---- Choosing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["", "search", "fixed"])
def test_mode_follows_the_variable_until_it_is_set(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """An empty variable means search; set_mode wins over it, and None gives it back."""
    monkeypatch.setenv("RMSNORM_REF_TUNING", word)
    assert tuning.mode() == (word or "search")
    for new in ("fixed", "search"):
        tuning.set_mode(new)
        assert tuning.mode() == new
    tuning.set_mode(None)
    assert tuning.mode() == (word or "search")


def test_a_wrong_mode_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is no mode is refused, whether it comes from the variable or from a call."""
    monkeypatch.setenv("RMSNORM_REF_TUNING", "fast")
    with pytest.raises(ValueError, match=r"RMSNORM_REF_TUNING is 'fast'.*'search' or 'fixed'"):
        tuning.mode()
    with pytest.raises(ValueError, match=r"mode is 'fast'.*'search', 'fixed' or None"):
        tuning.set_mode("fast")


def tensors(M: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make x [M, N] and w [N] of which only shape, dtype and device are looked at."""
    return torch.empty(M, N, dtype=FP16), torch.empty(N, dtype=FP16)


@on_every_path
def test_choice_is_made_once_whatever_the_rows(N: int) -> None:
    """Batches of 1, 7 and 64 rows share one launch, built once per set of wanted gradients."""
    interpreter.prepare(torch.device(DEVICE))
    tuning.set_mode("fixed")
    built: list[tuple[Any, ...]] = []

    def build(*key: Any) -> Callable[..., None]:
        built.append(key)
        return lambda *_: None

    path = tiling.backward_path(MANY, N, CPU, BF16)
    launches = [
        tuning.prepared(path, build, *tensors(M, N), lambda *_: (), *needs)
        for needs in ((True, True), (True, False))
        for M in (1, 7, 64)
    ]
    assert len({id(launch) for launch in launches}) == 2
    config = tuning.shipped(path, N, FP16)
    assert built == [
        (N, FP16, CPU, config, True, True),
        (N, FP16, CPU, config, True, False),
    ]
    assert tuning.chosen() == {(path, N, FP16, FP16, CPU): config}


@on_every_path
def test_trial_input_does_not_follow_the_caller(monkeypatch: pytest.MonkeyPatch, N: int) -> None:
    """What the search times has the same shapes for a call of 1 row and of 9."""
    interpreter.prepare(torch.device(DEVICE))
    from rmsnorm_ref import backward, forward

    monkeypatch.setattr(tuning, "TRIAL_BYTES", 2**18)
    for module in (forward, backward):
        shapes = [
            [getattr(argument, "shape", argument) for argument in module._trial(*tensors(M, N))]
            for M in (1, 9)
        ]
        assert shapes[0] == shapes[1]
        assert (max(1, 2**17 // N), N) in shapes[0]


@pytest.mark.parametrize(
    ("times_ms", "winner"),
    [
        ({Config(4): [1.00], Config(8): [1 - 0.5 * tuning.NOISE]}, Config(4)),
        ({Config(4): [1.00], Config(8): [1 - 1.5 * tuning.NOISE]}, Config(8)),
        ({Config(4): [1.00], Config(8): [0.5, *[1.0] * tuning.REMATCHES]}, Config(4)),
        ({Config(4): [1.00], Config(8): [*[0.5] * tuning.REMATCHES, 1.0]}, Config(4)),
        ({Config(8): [1.00], Config(2): [2.00]}, Config(8)),
        ({}, Config(4)),
    ],
)
def test_search_moves_only_for_more_than_noise(
    monkeypatch: pytest.MonkeyPatch, times_ms: dict[Config, list[float]], winner: Config
) -> None:
    """A challenger must win by more than the noise, and each time; one that cannot run is left."""
    interpreter.prepare(torch.device(DEVICE))
    import triton.testing
    from triton.runtime.errors import OutOfResources

    assert tuning.shipped("forward", 2048, FP16) == Config(4)
    built: list[Config] = []
    launched: list[Config] = []

    def build(*key: Any) -> Callable[..., None]:
        built.append(key[3])
        return lambda *_: launched.append(key[3])

    def do_bench(launch: Callable[[], None], **_: Any) -> float:
        launch()
        if launched[-1] not in times_ms:
            raise OutOfResources(2, 1, "shared memory")
        times = times_ms[launched[-1]]
        return times.pop(0) if len(times) > 1 else times[0]

    limits = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448})
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=limits))
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(warp_size=32)
    )
    assert tuning._search("forward", build, *tensors(1, 2048), lambda *_: ()) == winner
    reasons = tuning.pruned("forward", 2048, FP16)
    assert built == [config for config, reason in reasons.items() if reason is None]


def test_search_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing inside a capture would record the trial: the error names both ways out."""
    interpreter.prepare(torch.device(DEVICE))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match=r"N = 17 .*before the capture.*RMSNORM_REF_TUNING=fixed"
    ):
        tuning._search("forward", lambda *_: None, *tensors(1, 17), lambda *_: ())


def test_compiling_together_leaves_nothing_behind_when_it_fails() -> None:
    """An exception among calls that compile together ends the mode: the next launch launches."""
    interpreter.prepare(torch.device(DEVICE))
    import triton

    from rmsnorm_ref import launch

    def fail() -> None:
        raise LookupError("no such kernel")

    with pytest.raises(LookupError, match="no such kernel"):
        launch.compile_together([fail])
    assert not launch._compiles_only.get()
    with ThreadPoolExecutor(1) as executor, triton.AsyncCompileMode(executor):
        pass  # refuses to begin inside another
