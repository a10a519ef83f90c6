"""One kernel, its constants fixed, launched again and again at little host time.

Triton looks its compiled kernel up at every launch, from the type and value of every argument; that
takes longer than the launch. Here all it looks at is fixed once per N and dtypes (`layout.py` gives
all tensors one alignment; integers are 64 bits and not specialised on). So the first launch goes
through Triton, and the later ones hand their arguments straight to what it compiled.
"""

import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import triton
from triton import knobs
from triton.runtime import driver

from .table import Config

_ONE_AT_A_TIME = threading.Lock()
_compiles_only = contextvars.ContextVar("compiles_only", default=False)


def compile_together(calls: Iterable[Callable[[], object]]) -> None:
    """Compile the kernels that some calls would launch, side by side on all cores; launch none.

    A search has some 16 kernels to compile, which one after the other take longer than all its
    timing. What compiled here is found again, by Triton's own key, when it is launched. One that
    does not compile says so when it is launched.
    """

    def compile_all() -> None:
        _compiles_only.set(True)
        with (
            concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as executor,
            triton.AsyncCompileMode(executor, ignore_errors=True),
        ):
            for call in calls:
                call()

    # What is set in a copy of the context ends with it, whatever is raised.
    contextvars.copy_context().run(compile_all)


def _listens(hook: Any) -> bool:
    """Tell whether a launch hook of Triton's would do anything: a chain of calls, or one call."""
    return bool(getattr(hook, "calls", hook))


class Launch:
    """A kernel with its compile-time arguments, its config and its device.

    Args:
        kernel: a `triton.jit` function whose compile-time parameters come last.
        constants: values of those parameters, in order.
        config: `num_warps` for the launch; `num_stages` is a constant of the kernels that have one.
        device: where all launches go.
        options: further launch options, such as `maxnreg`.
    """

    def __init__(
        self,
        kernel: Any,
        constants: tuple[int | str, ...],
        config: Config,
        device: torch.device,
        **options: int,
    ) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = {"num_warps": config.num_warps, **options}
        self._device = device.index
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Launch `grid` programs on the current stream of the device, which must be current."""
        compiled = self._compiled
        if _compiles_only.get():
            self._kernel.warmup(*args, *self._constants, grid=grid, **self._options)
        elif compiled is None or torch.version.hip:
            # None again where the kernel is interpreted: the interpreter keeps its grid in globals,
            # so one thread at a time, and numpy warns of what masked lanes hold. On AMD Triton also
            # looks at the size of each tensor's storage, which no key here knows.
            with _ONE_AT_A_TIME, np.errstate(all="ignore"):
                self._compiled = self._kernel[grid](*args, *self._constants, **self._options)
        elif _listens(knobs.runtime.launch_enter_hook) or _listens(knobs.runtime.launch_exit_hook):
            # A profiler listens: the long way, which tells it (14 us against 9 on an H200's host).
            compiled[grid](*args, *self._constants)
        else:
            stream = driver.active.get_current_stream(self._device)
            compiled.run(
                *grid,
                stream,
                compiled.function,
                compiled.packed_metadata,
                None,
                None,
                None,
                *args,
                *self._constants,
            )
