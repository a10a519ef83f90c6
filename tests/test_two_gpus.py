"""Two GPUs in one process: the right device, thread by thread and stream by stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from paths import Results, assert_same_bits, check, make, on_every_kernel, run

from rmsnorm_ref import rmsnorm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@on_every_kernel
def test_the_other_device_is_used_and_left_alone(N: int, M: int) -> None:
    """Tensors on cuda:1 are right while cuda:0 is current, which it still is afterwards."""
    torch.cuda.set_device(0)
    results = check(*make(M, N, torch.bfloat16, device="cuda:1"))
    assert all(result is not None and result.device.index == 1 for result in results)
    assert torch.cuda.current_device() == 0


def test_two_devices_in_one_call_are_refused() -> None:
    """One of x and w on another GPU raises, and names both devices and the way out."""
    x, w, _ = make(3, 64, torch.float32, device="cuda:1")
    with pytest.raises(ValueError, match=r"x is on cuda:1 and w is on cuda:0.*w\.to"):
        rmsnorm(x, w.to("cuda:0"))


@on_every_kernel
def test_two_threads_on_two_devices(N: int, M: int) -> None:
    """Threads that use a GPU each, at once, get the bits that each gets alone."""
    inputs = [make(M, N, torch.bfloat16, device=f"cuda:{index}") for index in (0, 1)]
    expected = [run(*each) for each in inputs]

    def work(index: int) -> list[Results]:
        torch.cuda.set_device(index)
        return [run(*inputs[index]) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for found, alone in zip(pool.map(work, (0, 1)), expected, strict=True):
            for each in found:
                assert_same_bits(each, alone)


@on_every_kernel
def test_a_stream_of_the_other_device(N: int, M: int) -> None:
    """On a stream of cuda:1 both passes wait for what that stream has still to write."""
    x, w, dy = make(M, N, torch.bfloat16, device="cuda:1")
    expected = run(x, w, dy)
    late = torch.full_like(x, float("nan"))
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        found = run(late, w, dy)
    stream.synchronize()
    assert_same_bits(found, expected)


@on_every_kernel
def test_both_devices_give_the_same_bits(N: int, M: int) -> None:
    """Two GPUs of a kind take the same shipped launch, and so give the same bits."""
    if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("needs two GPUs of one kind")
    inputs = make(M, N, torch.bfloat16, device="cuda:0")
    found = run(*(tensor.to("cuda:1") for tensor in inputs))
    assert_same_bits((result.to("cuda:0") for result in found if result is not None), run(*inputs))
