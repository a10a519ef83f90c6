"""Properties that no single result shows, each as the few lines that test it.

What runs is what a report prints: lines that make the input, then a probe's own, in which an
assertion that fails is the finding. `f`, `leaves` (the inputs that get a gradient) and `close` are
given.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm_ref import oracle

from .cases import Case, source
from .judge import raised
from .rules import FAIL, NOTE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .candidate import Call

FINE = ""  # a probe that raises where this stands was refused, which is right


class Probe(NamedTuple):
    """Hold one property: its rule, its lines, and what a failure or an exception means."""

    rule: str
    text: str
    if_not: str = FAIL
    if_raised: str = FAIL
    needs: str = ""  # gradients without which there is nothing to probe
    least_m: int = 1
    dtypes: tuple[str, ...] = ()  # empty: all that are reviewed


PROBES = {
    "alone": Probe("r-independent-calls", """
y = f(x, w, eps)
first = y.clone()
f(2 * x + 1, w, eps)
assert torch.equal(y, first), "the second call changed the y of the first"
"""),
    "graphs": Probe("r-independent-calls", """
expected = torch.autograd.grad(f(x, w, eps), leaves, dy)
y = f(x, w, eps)
f(2 * x.detach() + 1, w, eps).sum()
found = torch.autograd.grad(y, leaves, dy)
assert all(map(close, found, expected)), "a second forward changed the gradients of the first"
""", needs="x"),
    "twice": Probe("r-two-backwards", """
y = f(x, w, eps)
once = torch.autograd.grad(y, leaves, dy, retain_graph=True)
once = [gradient.clone() for gradient in once]
again = torch.autograd.grad(y, leaves, dy)
assert all(map(close, once, again)), "the second backward gave other gradients than the first"
""", if_raised=NOTE, needs="x"),
    "kept": Probe("r-two-backwards", """
y = f(x, w, eps)
first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
before = [gradient.clone() for gradient in first]
torch.autograd.grad(y, leaves, 2 * dy)
assert all(map(close, first, before)), "the second backward changed what the first had given"
""", if_raised=NOTE, needs="x"),
    "stale": Probe("r-independent-calls", """
x, w = x.detach(), w.detach()
def right():
    return close(f(x, w, eps), oracle.truth(x, w, eps))

was = right()
x.copy_(x.flip(0, 1))  # in place, as an optimizer changes a weight
w.copy_(w.flip(0))
assert right() or not was, "x and w were changed in place, and y is not that of the new values"
w = w.to(torch.float32 if w.dtype != torch.float32 else torch.bfloat16)
was = right()
w.copy_(w.flip(0))
assert right() or not was, "w was changed in place, and y is not that of the new values"
""", if_raised=FINE),
    "stale_grads": Probe("r-independent-calls", """
def right():
    found = torch.autograd.grad(f(x, w, eps), leaves, dy)
    dx, dw = oracle.truth_backward(dy, x.detach(), w.detach(), eps)
    return all(close(a, dx if leaf is x else dw) for a, leaf in zip(found, leaves))

was = right()
with torch.no_grad():  # in place, as an optimizer changes a weight
    x.copy_(x.flip(0, 1))
    w.copy_(w.flip(0))
assert right() or not was, "x and w were changed in place; a gradient is not that of the new values"
""", if_raised=FINE, needs="x"),
    "no_grad": Probe("r-no-grad", """
y = f(x, w, eps)
with torch.no_grad():
    quiet = f(x, w, eps)
assert close(quiet, y.detach()), "y differs when nothing is recorded"
"""),
    "inference": Probe("r-no-grad", """
y = f(x, w, eps)
with torch.inference_mode():
    quiet = f(x, w, eps)
assert close(quiet, y.detach()), "y differs in inference mode"
""", if_raised=NOTE),
    "state": Probe("r-global-state", """
changed = changes(lambda: f(x, w, eps))
severity = "fail" if changed & HARMFUL else "note"
assert not changed, f"the forward changed {', '.join(sorted(changed))}"
""", if_raised=FINE),
    "state_grads": Probe("r-global-state", """
graphs = [f(x, w, eps), f(x, w, eps)]
changed = changes(lambda: torch.autograd.grad(graphs.pop(), leaves, dy))
severity = "fail" if changed & HARMFUL else "note"
assert not changed, f"the backward changed {', '.join(sorted(changed))}"
""", if_raised=FINE, needs="x"),
    "same": Probe("r-same-twice", """
assert torch.equal(f(x, w, eps), f(x, w, eps)), "y has other bits at the second call"
""", if_not=NOTE, if_raised=NOTE),
    "same_grads": Probe("r-same-twice", """
runs = [torch.autograd.grad(f(x, w, eps), leaves, dy) for _ in range(2)]
assert all(map(torch.equal, *runs)), "a gradient has other bits at the second call"
""", if_not=NOTE, if_raised=NOTE, needs="x"),
    "batch": Probe("r-batch-invariance", """
y = f(x, w, eps).detach()
alone = torch.cat([f(row, w, eps).detach() for row in x.detach().split(1)])
n = int((y != alone).sum())
assert n == 0, f"{n} of {y.numel()} elements of y have other bits when rows are run one by one"
""", if_not=NOTE, if_raised=NOTE, least_m=2),
    "batch_dx": Probe("r-batch-invariance", """
def dx_of(x, dy):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x, w, eps), x, dy)[0]

dx = dx_of(x, dy)
alone = torch.cat([dx_of(*rows) for rows in zip(x.split(1), dy.split(1))])
n = int((dx != alone).sum())
assert n == 0, f"{n} of {dx.numel()} elements of dx have other bits when rows are run one by one"
""", if_not=NOTE, if_raised=NOTE, needs="x", least_m=2),
    "nan": Probe("r-nan-contained", """
x = x.detach()
clean = f(x, w, eps).clone()
x[1, -1], x[2, 0] = float("nan"), float("inf")
y = f(x, w, eps)
others = [0, *range(3, len(x))]
assert close(y[others], clean[others]), "a NaN and an infinity in rows 1 and 2 changed other rows"
assert y[1].isnan().all(), "a row that holds a NaN came out finite"
assert not y[2, 0].isfinite(), "an infinity in x came out finite"
""", least_m=4),
    "nan_dx": Probe("r-nan-contained", """
clean = torch.autograd.grad(f(x, w, eps), x, dy)[0].clone()
dy[1, -1] = float("nan")
dx = torch.autograd.grad(f(x, w, eps), x, dy)[0]
others = [0, *range(2, len(x))]
assert close(dx[others], clean[others]), "a NaN in row 1 of dy changed other rows of dx"
assert dx[1, -1].isnan(), "a NaN in dy came out finite in dx"
""", needs="x", least_m=4),
    "nan_x_dx": Probe("r-nan-contained", """
clean = torch.autograd.grad(f(x, w, eps), x, dy)[0].clone()
with torch.no_grad():
    x[1, -1] = float("nan")
dx = torch.autograd.grad(f(x, w, eps), x, dy)[0]
others = [0, *range(2, len(x))]
assert close(dx[others], clean[others]), "a NaN in row 1 of x changed other rows of dx"
assert dx[1].isnan().all(), "dx came out finite in a row of x that holds a NaN"
""", needs="x", least_m=4),
    "loss_scale": Probe("r-scales", """
with torch.no_grad():  # as under a loss scale: float16 holds dx and dw, and not all of dy * w
    x.mul_(8)
    w.mul_(16)
    dy.mul_(1024)
y = f(x, w, eps)
found = torch.autograd.grad(y, leaves, dy)
dx, dw = oracle.truth_backward(dy, x.detach(), w.detach(), eps)
# Eager code multiplies in float16 both ways: it overflows as well.
in_fp32 = (y == oracle.truth(x.detach(), w.detach(), eps).to(y.dtype)).double().mean() > 0.9
severity = "fail" if in_fp32 else "note"
for leaf, a in zip(leaves, found):
    name, b = ("dx", dx) if leaf is x else ("dw", dw)
    assert close(a, b), f"{name} is off where dy * w is beyond float16's range, and {name} is not"
""", needs="x", dtypes=("float16",)),
    "double": Probe("r-double-backward", """
dx = torch.autograd.grad(f(x, w, eps), x, dy, create_graph=True)[0]
if dx.requires_grad:
    found = torch.autograd.grad(dx.square().sum(), leaves, allow_unused=True)
    own = [leaf.detach().double().requires_grad_() for leaf in leaves]
    gain = own[-1] if len(own) > 1 else w
    y64 = oracle.truth(own[0], gain, eps)
    dx64 = torch.autograd.grad(y64, own[0], dy.double(), create_graph=True)[0]
    expected = torch.autograd.grad(dx64.square().sum(), own)
    for name, a, b in zip("xw", found, expected):
        error = 1.0 if a is None else float((a - b).norm() / b.norm())
        assert error < 1e-2, f"a second derivative, by {name}, is off by {100 * error:.0f} %"
""", if_raised=FINE, needs="x", dtypes=("float32",)),
    "double_vanishes": Probe("r-double-backward", """
dx = torch.autograd.grad(f(x, w, eps), x, dy, create_graph=True)[0]
assert dx.requires_grad, "with create_graph=True dx comes without a graph: a penalty on it vanishes"
""", if_not=NOTE, if_raised=FINE, needs="x", dtypes=("float32",)),
    "size": Probe("r-size", """
x = x.detach()
M = 2**31 // len(w) + 3
large = torch.zeros(M, len(w), dtype=x.dtype, device=x.device)
large[-1] = x[-1]
y = f(large, w, eps)
assert close(y[-1:], f(x[-1:], w, eps)), f"the last of {M} rows of y is not what it is alone"
"""),
    "size_dx": Probe("r-size", """
def dx_of(x, dy):
    return torch.autograd.grad(f(x.requires_grad_(), w, eps), x, dy)[0]

M = 2**31 // len(w) + 3
large, large_dy = (torch.zeros(M, len(w), dtype=x.dtype, device=x.device) for _ in range(2))
large[-1], large_dy[-1] = x.detach()[-1], dy[-1]
dx = dx_of(large, large_dy)
expected = dx_of(x.detach()[-1:].clone(), dy[-1:])
assert close(dx[-1:], expected), f"the last of {M} rows of dx is not what it is alone"
""", needs="x"),
    "short_w": Probe("r-short-weight", """
y = f(x, w.detach()[: (len(w) + 1) // 2].clone(), eps)
assert y is None, f"w is [{(len(w) + 1) // 2}], x is {list(x.shape)}, and nothing was raised"
""", if_not=NOTE, if_raised=FINE),
    "float64": Probe("r-float64", """
x, w = x.detach().double() / 3, w.detach().double() / 3
y = f(x, w, eps)
error = float((y - oracle.truth(x, w, eps)).abs().max())
assert error < 1e-9, f"with x and w in float64, y is {y.dtype} and off by {error:.1e}"
""", if_not=NOTE, if_raised=FINE, dtypes=("float32",)),
}  # fmt: skip

HUGE = {"size", "size_dx"}  # only on request: each takes some 20 GB and 2^31 elements

# What `changes` looks at, and which of it spoils what runs later.
STATE = """
HARMFUL = {"the default dtype", "whether gradients are recorded", "the seed of random numbers"}

def state():
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return {
        "the default dtype": torch.get_default_dtype(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the use of deterministic algorithms": torch.get_deterministic_debug_mode(),
        "the state of random numbers": torch.cat([torch.get_rng_state(), *gpu]).tolist(),
    }

def changes(call):
    ends, changed = [], set()
    for seed in (1, 2):
        torch.set_default_dtype(torch.float32)  # an earlier call may have left another one
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        torch.set_deterministic_debug_mode(0)
        torch.manual_seed(seed)
        before = state()
        call()
        ends.append(state())
        changed |= {name for name, value in before.items() if ends[-1][name] != value}
    random = "the state of random numbers"
    if ends[0][random] == ends[1][random]:  # whatever it was before
        changed = changed - {random} | {"the seed of random numbers"}
    return changed
"""
# What `close` allows for: two ways to the same number, not two numbers.
CLOSE = """
def close(a, b):
    unit = 8 * max(torch.finfo(t.dtype).eps for t in (a, b))
    a, b = a.double(), b.double()
    size = float(b.abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(a, b, unit, unit * size, equal_nan=True)
"""


def text(name: str, case: Case, gives: str, device: str = "cpu") -> str:
    """Write all lines of a probe but those that find the candidate."""
    wanted = [leaf for leaf in "xw" if leaf in gives]
    lines = [source(case, device)]
    body = PROBES[name].text
    if case.one_plus:
        body = re.sub(r"(oracle\.truth\w*\((?:dy, )?[\w.\[\]()]+?), (w|gain)", r"\1, 1 + \2", body)
    if PROBES[name].needs:
        lines += [f"{leaf}.requires_grad_()" for leaf in wanted]
    if "leaves" in body:
        lines.append(f"leaves = [{', '.join(wanted)}]")
    if "close" in body:
        lines.append(CLOSE)
    if "changes" in body:
        lines.append(STATE)
    return "\n".join([*lines, body.strip()])


def run(f: Call, name: str, case: Case, gives: str, device: str = "cpu") -> dict[str, Any]:
    """Run one probe; return {} where the property holds, else what was seen and its severity."""
    probe = PROBES[name]
    names: dict[str, Any] = {"torch": torch, "oracle": oracle, "f": f}
    if probe.rule != "r-global-state":
        names["f"] = _leaving_grad_mode(f)
    try:
        with state_kept():
            exec(compile(text(name, case, gives, device), f"<{name}>", "exec"), names)  # noqa: S102
    except AssertionError as error:
        # An assertion of the candidate's own is an exception like others.
        if error.__traceback__ and _is_ours(error, name):
            return {"severity": names.get("severity", probe.if_not), "said": str(error)}
        said = raised("", error)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # a kernel may raise whatever it likes
        said = raised("", error)
    else:
        return {}
    if probe.if_raised == FINE:
        return {"refused": f"{said['type']}: {said['text']}"}
    return {"severity": probe.if_raised, "said": f"{said['type']}: {said['text']}", "raised": True}


def _leaving_grad_mode(f: Call) -> Call:
    """Keep one fault one: a candidate that turns recording off breaks the rule on that alone."""

    def call(x: Tensor, w: Tensor, eps: float) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return f(x, w, eps)

    return call


@contextlib.contextmanager
def state_kept() -> Iterator[None]:
    """Put back what a probe, or a candidate, changes for the whole process."""
    dtype, n_threads = torch.get_default_dtype(), torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    cuda: Any = torch.cuda
    gpu = [cuda.current_device()] if cuda.is_initialized() else []
    try:
        with torch.enable_grad(), torch.random.fork_rng(gpu):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(n_threads)
        torch.set_deterministic_debug_mode(mode)


def _is_ours(error: AssertionError, name: str) -> bool:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_filename == f"<{name}>"
