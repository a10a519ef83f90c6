"""Processes that compile for a test file: each imports torch once, and the disk keeps kernels."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from offline import Compiled

if TYPE_CHECKING:
    from offline import Job

N_PROCESSES = 2


class Compiler:
    """One process of `offline.py`, which Triton's interpreter has not reached."""

    def __init__(self, cache: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("offline.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def compile(self, jobs: list[Job]) -> list[list[Compiled]]:
        """Compile jobs, or say why the process ended."""
        answer = ""
        if self.process.poll() is None:
            print(json.dumps(jobs), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise AssertionError(self._errors.read()[-4000:])
        return [[Compiled(*kernel) for kernel in kernels] for kernels in json.loads(answer)]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()
        self._errors.close()


class Compilers:
    """Start compilers when they are needed, and anew where one has ended."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._kept: dict[str, list[Compiler]] = {}

    def compile(self, jobs: list[Job]) -> list[list[Compiled]]:
        """Compile jobs for one target; those of one width and dtype, which share kernels, in turn.

        AMD has processes of its own: for the package, a process has one kind of GPU.
        """
        kept = self._kept.setdefault(jobs[0].target[:3], [])
        for ended in [compiler for compiler in kept if compiler.process.poll() is not None]:
            kept.remove(ended)
            ended.close()
        kept += [Compiler(self._cache) for _ in range(N_PROCESSES - len(kept))]
        idle: queue.SimpleQueue[Compiler] = queue.SimpleQueue()
        for compiler in kept:
            idle.put(compiler)

        def compile_share(share: list[Job]) -> list[list[Compiled]]:
            compiler = idle.get()
            try:
                return compiler.compile(share)
            finally:
                idle.put(compiler)

        shares = [list(share) for _, share in itertools.groupby(jobs, lambda j: (j.N, j.dtype))]
        with ThreadPoolExecutor(N_PROCESSES) as pool:
            return list(itertools.chain.from_iterable(pool.map(compile_share, shares)))

    def close(self) -> None:
        """End all processes."""
        for compiler in itertools.chain.from_iterable(self._kept.values()):
            compiler.close()
