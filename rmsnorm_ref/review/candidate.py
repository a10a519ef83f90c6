"""How somebody's kernel is found and called: a target, and the words of its signature.

A target is `path/to/file.py:function` or `package.module:function`. A signature says what is passed
where, as in a call: "x, w, eps" (the default), "w, x, eps", "x, w", "x, weight=w, epsilon=eps",
"x, w, eps, 0.0, 'llama', False". `N` is the width. A module class is made by `init`, "N, eps=eps"
if nothing else is said, and called on x with its one parameter of N elements set to w.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm_ref import interpreter

from . import tuners

Call = Callable[[Tensor, Tensor, float], Tensor]

_NAMES = {
    "x": {"x", "X", "input", "inputs", "inp", "hidden_states", "hidden", "t"},
    "w": {"w", "W", "weight", "weights", "gamma", "gain", "g", "scale"},
    "eps": {"eps", "epsilon", "variance_epsilon", "layer_norm_eps", "norm_eps"},
    "N": {"N", "n", "dim", "hidden_size", "normalized_shape", "d", "dims", "size", "d_model"},
}


class Candidate(NamedTuple):
    """Hold what is called as `call(x, w, eps)`, and how that reaches the kernel."""

    call: Call
    signature: str
    takes_eps: bool


def load(target: str, signature: str = "", init: str = "") -> Call:
    """Return `f(x, w, eps)` for a target, as a review calls it; what a report's code calls."""
    call = find(target, signature, init).call
    tuners.draw_for_good()
    interpreter.mend_for_others()
    return call


def find(target: str, signature: str = "", init: str = "") -> Candidate:
    """Import a target and adapt it.

    Raises:
        ValueError: the target has no colon, or a signature is no list of arguments.
        Whatever importing it raises.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(
            f"{target!r}: expected path/to/file.py:function or package.module:function"
        )
    # A kernel is often built where torch sees no GPU: then it is interpreted, if it is Triton's.
    interpreter.expect(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found: Any = _import(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{place} has no {name!r}")
        found = getattr(found, part)
    return adapt(found, signature, init)


def _import(place: str) -> Any:
    path = Path(place)
    if path.suffix != ".py":
        return importlib.import_module(place)
    if not path.is_file():
        raise ValueError(f"there is no file {place}")
    # Its neighbours can be imported, as if it had been run.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def adapt(found: Any, signature: str = "", init: str = "") -> Candidate:
    """Make `call(x, w, eps)` out of a function or a module class."""
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        init = init or _guess(found, ("N",), "N, eps=eps")
        make, names = _caller(init)
        return Candidate(_as_function(found, make), f"{found.__name__}({init})(x)", "eps" in names)
    if not callable(found):
        raise TypeError(f"the target is a {type(found).__name__}, which cannot be called")
    signature = signature or _guess(found, ("x", "w"), "x, w, eps")
    arguments, names = _caller(signature)
    if not {"x", "w"} <= names:
        raise ValueError(f"signature {signature!r} passes no {' and no '.join({'x', 'w'} - names)}")

    def call(x: Tensor, w: Tensor, eps: float) -> Tensor:
        tuners.fed(x.shape[-1])
        return _first(arguments(found, x=x, w=w, eps=eps, N=x.shape[-1]))

    return Candidate(call, f"f({signature})", "eps" in names)


def _first(result: Any) -> Tensor:
    """Return y, where a kernel returns what it saved as well."""
    found: Tensor = result[0] if isinstance(result, tuple | list) and result else result
    return found


def _as_function(made: Any, make: Callable[..., Any]) -> Call:
    @functools.lru_cache(maxsize=32)
    def module(N: int, eps: float, device: torch.device) -> tuple[Any, str]:
        with torch.inference_mode(mode=False):  # it is kept, and may be trained later
            built = make(made, N=N, eps=eps).to(device)
        names = [name for name, p in built.named_parameters() if p.numel() == N]
        if len(names) != 1:
            raise ValueError(f"{made.__name__} has {len(names)} parameters of N elements, not one")
        return built, names[0]

    def call(x: Tensor, w: Tensor, eps: float) -> Tensor:
        tuners.fed(x.shape[-1])
        built, name = module(x.shape[-1], eps, x.device)
        return _first(torch.func.functional_call(built, {name: w}, (x,)))

    return call


def _caller(signature: str) -> tuple[Callable[..., Any], set[str]]:
    """Return `g(f, x=, w=, eps=, N=)`, which calls f as the words say, and the names they use."""
    try:
        tree = ast.parse(f"f({signature})", mode="eval")
    except SyntaxError as error:
        raise ValueError(f"signature {signature!r} is no list of arguments") from error
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"f"}
    if not names <= {"x", "w", "eps", "N"}:
        unknown = ", ".join(sorted(names - {"x", "w", "eps", "N"}))
        raise ValueError(f"signature {signature!r} uses {unknown}: it may use x, w, eps and N")
    # The words come from whoever started the review, like the kernel itself. What is called looks
    # at its caller's builtins where it is C++ that imports Python, as TorchScript does: they stay.
    text = f"lambda f, x=None, w=None, eps=None, N=None: f({signature})"
    return eval(text, {}), names  # noqa: S307


def _guess(found: Any, needed: tuple[str, ...], default: str) -> str:
    """Read a signature from the names of parameters, where all that are needed have known ones."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return default
    words: list[str] = []
    seen: set[str] = set()
    by_keyword = False
    for p in parameters:
        meant = next((m for m, names in _NAMES.items() if p.name in names), None)
        if meant is None or meant in seen or p.kind in {p.VAR_KEYWORD, p.VAR_POSITIONAL}:
            if p.default is p.empty and p.kind not in {p.VAR_KEYWORD, p.VAR_POSITIONAL}:
                return default
            by_keyword = True
            continue
        seen.add(meant)
        by_keyword = by_keyword or p.kind is p.KEYWORD_ONLY
        word = "(N,)" if p.name == "normalized_shape" else meant
        words.append(f"{p.name}={word}" if by_keyword else word)
    return ", ".join(words) if set(needed) <= seen else default
