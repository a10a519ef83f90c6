"""No GPU: run the same kernel source through Triton's interpreter.

Triton decides once, when it is first imported, whether `@triton.jit` compiles or interprets. So
the kernels are imported at the first call, and on a machine without a GPU the switch is set just
before, or when an `RMSNorm` is made there: torch imports Triton by itself, and an optimizer, which
comes between the module and its first call, is enough to make it.

Two faults of the interpreter are mended while it is switched on. It truncates fp32 to bf16 where
every GPU rounds to nearest even; and in Triton 3.6 with numpy 2.4 or newer it cannot run a loop
whose bound is a run-time value.
"""

import os
import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_switched = False


def expect(device: torch.device) -> None:
    """Set the switch for tensors of `device`, if it is needed and Triton has not read it yet."""
    global _switched
    undecided = "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ
    if device.type == "cpu" and undecided and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        _switched = True


def prepare(device: torch.device) -> None:
    """Make sure that kernels can run on tensors of `device`, before Triton is imported.

    Raises:
        RuntimeError: Triton is missing, or was imported compiled and the tensors are on the CPU.
    """
    expect(device)
    try:
        import triton  # noqa: F401  # reads the variable
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError(
            "rmsnorm needs Triton, which is not installed on this machine (it exists for Linux): "
            "install triton, or use rmsnorm_ref.oracle.rmsnorm, which needs torch alone"
        ) from None
    if _switched:
        warnings.warn(
            "no GPU: rmsnorm runs its kernels in Triton's interpreter, correct, slow",
            RuntimeWarning,
            stacklevel=_callers_level(),
        )
    if interprets():
        _mend()
    elif device.type == "cpu":
        way_out = "move x and w to a GPU, or " if torch.cuda.is_available() else ""
        raise RuntimeError(
            "x is on the CPU, but Triton was imported before (torch.compile or an optimizer is "
            "enough), to compile for a GPU, and can no longer switch: "
            f"{way_out}set TRITON_INTERPRET=1 in the environment before Python starts"
        )


def _callers_level() -> int:
    """Return the stack level, seen from `prepare`, of the line that called rmsnorm or a module."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("rmsnorm_ref", "torch")):
        level, frame = level + 1, frame.f_back
    return level


def interprets() -> bool:
    """Tell whether Triton was imported to interpret; its knob says only what the variable says."""
    import triton
    import triton.language as tl

    return not isinstance(tl.sum, triton.JITFunction)


def mend_for_others() -> None:
    """Mend the interpreter for kernels that are not ours, if Triton is here and interprets."""
    if "triton.language" in sys.modules and interprets():
        _mend()


def _mend() -> None:
    """Give the interpreter a GPU's bf16 rounding and loops with run-time bounds; once is enough."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder.cast_impl, "rounds_to_nearest", False):
        return
    original_cast = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(round_to_bf16(src.data), dst_type.scalar)
        return original_cast(self, src, dst_type)

    cast_impl.rounds_to_nearest = True  # type: ignore[attr-defined]  # the mark read above
    builder.cast_impl = cast_impl

    if triton.__version__.startswith("3.6."):
        original_patch = interpreter._patch_lang_tensor

        def patch_lang_tensor(tensor: Any, scope: Any) -> None:
            original_patch(tensor, scope)
            # numpy 2.4 refuses int() of a one-element array; .item() is what was meant.
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch_lang_tensor


def round_to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round fp32 to the nearest bf16, ties to even; bit patterns as uint16, NaN kept a NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).reshape(np.shape(x))
    half_and_tie = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half_and_tie) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)
