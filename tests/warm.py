"""A Python that has imported what is slow to import, and forks for each command that it is given.

`warm("torch").run("script.py", "argument")` does what `python script.py argument` does, and takes
"-m", "module" and "-c", "source" too: in a process of its own, from its own folder, with its own
environment. Only the imports are done: seconds of every process that would do them again. So it is
for what a script does after them, and says nothing of the imports themselves; Triton, which reads
its switch when it is imported, is never among them.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, NamedTuple

LONGEST_S = 600


class Done(NamedTuple):
    """Say how a command ended, what it printed, and what it took of the processor."""

    returncode: int
    stdout: str
    stderr: str
    cpu_s: float


def environment(**variables: str) -> dict[str, str]:
    """Return this process's variables without those that the tests need for themselves."""
    ours = {"TRITON_INTERPRET", "MASTER_PORT"}
    return {name: v for name, v in os.environ.items() if name not in ours} | variables


def fresh(*command: str, folder: Path | str = ".", **variables: str) -> Done:
    """Run `python *command` in a Python that has imported nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_S,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Done(done.returncode, done.stdout, done.stderr, cpu_s(after) - cpu_s(before))


def cpu_s(used: resource.struct_rusage) -> float:
    """Return the processor's seconds, of the user and of the system."""
    return used.ru_utime + used.ru_stime


class Warm:
    """Start the Python and have it run commands, one at a time; it ends with this process."""

    def __init__(self, modules: tuple[str, ...], variables: dict[str, str]) -> None:
        self._variables = variables  # those that an import reads are set from the start
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env=environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, folder: Path | str = ".", **variables: str) -> Done:
        """Run `python *command` in a folder, with variables that no import has read yet."""
        with tempfile.TemporaryDirectory() as kept:
            asked = {
                "command": command,
                "folder": str(folder),
                "environment": environment(**self._variables | variables),
                "outputs": [f"{kept}/stdout", f"{kept}/stderr"],
            }
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            returncode, seconds = json.loads(self._process.stdout.readline())
            stdout, stderr = (Path(path).read_text() for path in asked["outputs"])
        return Done(returncode, stdout, stderr, seconds)


@functools.cache
def warm(*modules: str, **variables: str) -> Warm:
    """Return the one such Python of this process that has imported these modules."""
    return Warm(modules, variables)


# ---- What runs in that Python -------------------------------------------------------------------


def serve() -> dict[str, Any] | None:
    """Answer each request by how its fork ended; return the request in a fork, None at the end."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            return json.loads(line)  # type: ignore[no-any-return]
        _, status, used = os.wait4(pid, 0)
        sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(status), cpu_s(used)]) + "\n")
        sys.stdout.flush()
    return None


def become(folder: str, environment: dict[str, str], outputs: list[str]) -> None:
    """Give this fork a folder, variables and outputs of its own, and an empty input."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.alarm(LONGEST_S)
    places = [(os.devnull, os.O_RDONLY), *((path, os.O_CREAT | os.O_WRONLY) for path in outputs)]
    for number, (path, flags) in enumerate(places):
        place = os.open(path, flags)
        os.dup2(place, number)
        os.close(place)


def start(first: str, *rest: str) -> None:
    """Do what `python first *rest` does, up to its end, which is that of this process."""
    if first == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))  # noqa: S102  # a test's own source
    else:
        sys.path[0] = str(Path(first).parent)
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if asked := serve():
        command = asked.pop("command")
        become(**asked)
        start(*command)
