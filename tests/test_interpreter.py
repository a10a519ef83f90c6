"""No GPU: the switch to Triton's interpreter, and the interpreter's mended faults.

Triton reads its switch once per process, so each test of the switch starts an interpreter of its
own, with any GPU hidden from it.
"""

from __future__ import annotations

import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from paths import assert_same_bits, make, on_every_path, run
from warm import Done, fresh, warm

from rmsnorm_ref.interpreter import round_to_bf16

if TYPE_CHECKING:
    from collections.abc import Callable

CALL = "rmsnorm(torch.ones(2, 8), torch.ones(8))"


def python(source: str, **variables: str) -> str:
    """Run source in a Python that has torch, and neither Triton, GPU nor switch, as `printed`."""
    return printed(warm("torch").run, source, **variables)


def printed(run: Callable[..., Done], source: str, **variables: str) -> str:
    """Run source with any GPU hidden, and return what it prints."""
    done = run("-c", textwrap.dedent(source), **{"CUDA_VISIBLE_DEVICES": ""} | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_touches_neither_triton_nor_cuda() -> None:
    """Importing the package, its models and its module loads no Triton and starts no CUDA."""
    python("""
        import sys, torch, rmsnorm_ref
        from rmsnorm_ref import oracle, traffic, tuning
        rmsnorm_ref.RMSNorm(8)
        assert "triton" not in sys.modules
        assert not torch.cuda.is_initialized()
        """)


def test_the_first_call_switches_and_says_so_once() -> None:
    """The first call on CPU tensors turns the interpreter on, is right, and warns that one time."""
    python(f"""
        import os, warnings, torch
        from rmsnorm_ref import RMSNorm, oracle, rmsnorm
        x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = rmsnorm(x, w)
            y.sum().backward()
            {CALL}
            RMSNorm(8)(x)
        (only,) = [entry for entry in caught if "interpreter" in str(entry.message)]
        assert "correct, slow" in str(only.message)
        assert only.category is RuntimeWarning
        assert only.filename == "<string>"  # the caller's file, here the command line
        assert os.environ["TRITON_INTERPRET"] == "1"
        oracle.assert_within(y, oracle.truth(x, w).detach(), oracle.bound_y(x, w).detach(), "y")
        """)


@pytest.mark.parametrize("between", ["torch.optim.AdamW(m.parameters())", "import triton"])
def test_an_import_of_triton_after_the_module_does_no_harm(between: str) -> None:
    """A module made on the CPU works although an optimizer made torch import Triton meanwhile."""
    python(f"import torch, rmsnorm_ref\nm = rmsnorm_ref.RMSNorm(8)\n{between}\nm(torch.ones(2, 8))")


def test_threads_take_turns_in_the_interpreter(device: str) -> None:
    """Both passes from four threads at once give every thread the bits it gets alone."""
    inputs = [make(6, 1496, torch.float32, device=device, seed=seed) for seed in range(4)]
    alone = [run(*each) for each in inputs]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda each: run(*each), inputs * 3))
    for found, expected in zip(together, alone * 3, strict=True):
        assert_same_bits(found, expected)


def test_triton_imported_compiled_is_an_error_that_names_the_variable() -> None:
    """Once Triton compiles it cannot interpret, and the error says what to set and when."""
    said = python(f"""
        import triton, torch
        from rmsnorm_ref import rmsnorm
        try:
            {CALL}
        except RuntimeError as error:
            print(error)
        """)
    for part in ("x is on the CPU", "TRITON_INTERPRET=1", "before Python starts"):
        assert part in said


def test_the_variable_set_too_late_is_the_same_error() -> None:
    """Setting the variable after Triton's import changes nothing, and the error still says so."""
    said = python(f"""
        import os, triton, torch
        from rmsnorm_ref import rmsnorm
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            {CALL}
        except RuntimeError as error:
            print(error)
        """)
    assert "TRITON_INTERPRET=1" in said
    assert "before Python starts" in said


def test_the_variable_set_beforehand_is_enough() -> None:
    """With the variable in the environment Triton may be imported first, by anyone."""
    python(f"import triton, torch\nfrom rmsnorm_ref import rmsnorm\n{CALL}", TRITON_INTERPRET="1")


def test_without_triton_the_models_work_and_the_op_says_what_is_missing() -> None:
    """A machine with no Triton imports the package, uses both models, and gets a clear error."""
    said = printed(
        fresh,
        f"""
        import sys

        class NoTriton:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "triton":
                    raise ModuleNotFoundError("No module named 'triton'", name="triton")

        sys.meta_path.insert(0, NoTriton())
        import torch
        from rmsnorm_ref import RMSNorm, oracle, rmsnorm, traffic
        RMSNorm(8)
        assert oracle.rmsnorm(torch.ones(2, 8), torch.ones(8)).shape == (2, 8)
        assert traffic.forward(2, 8, torch.float16).obligatory_bytes == 64
        for _ in range(2):
            try:
                {CALL}
            except RuntimeError as error:
                print(error)
        """,
    )
    first, second = said.splitlines()
    assert first == second
    for part in ("needs Triton", "not installed", "install triton", "oracle.rmsnorm"):
        assert part in first


FLOATS = {
    "random bits": np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32),
    "ties": (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000),
    "just below ties": (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x7FFF),
    "just above ties": (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8001),
    "exact": np.arange(2**16, dtype=np.uint32) << np.uint32(16),
    "subnormal": np.arange(2**16, dtype=np.uint32) * np.uint32(127),
}


@pytest.mark.parametrize("kind", FLOATS)
def test_round_to_bf16_is_what_torch_rounds_to(kind: str) -> None:
    """Ties, overflow, subnormals, zeros and infinities round as in PyTorch; NaN stays NaN."""
    values = FLOATS[kind].view(np.float32)
    rounded = torch.from_numpy(round_to_bf16(values).view(np.int16)).view(torch.bfloat16)
    expected = torch.from_numpy(values).bfloat16()
    number = ~expected.isnan()
    assert torch.equal(rounded.isnan(), ~number)
    assert_same_bits([rounded[number]], [expected[number]])


def test_round_to_bf16_takes_any_shape() -> None:
    """A scalar, an empty array and a strided one keep their shapes, as Triton's blocks do."""
    strided = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    for values in (np.float32(1.5), np.zeros((0, 3), np.float32), strided):
        assert round_to_bf16(np.asarray(values)).shape == np.shape(values)
    back = torch.from_numpy(round_to_bf16(strided).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(back.float(), torch.from_numpy(strided.copy()))


@on_every_path
def test_kernels_round_bf16_to_nearest_even(N: int, device: str) -> None:
    """Interpreted kernels store bf16 as a GPU does: where x_hat is 1, y is w rounded, ties too."""
    if device != "cpu":
        pytest.skip("compiled kernels round in hardware; test_sweep.py holds them to the bounds")
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    w = 1 + half_ulp * torch.arange(N) % 3  # exact values and ties, both ways
    w[0], w[-1] = 3.4e38, -half_ulp * (1 + half_ulp)
    x = torch.ones(2, N, dtype=torch.bfloat16)
    y, dx, _ = run(x, w, torch.zeros_like(x), eps=0.0)
    assert_same_bits(y, w.bfloat16().expand(2, N))
    assert y[0, 0].isinf()
    assert not dx.any()
