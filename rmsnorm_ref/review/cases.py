"""What is fed: a case is a shape, a dtype, layouts and values, and its text is what runs.

`source` writes a case as a few lines of Python. The review executes those very lines, and a report
prints them, so that a finding reproduces by pasting it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

FENCE = 65536  # elements of NaN on either side; no tile reaches further
NAN_AROUND = "packed, NaN around"
UNEVEN = "uneven rows, 3-D"
HEADS = "heads transposed, 4-D"
EQUAL = {"ones", "equal in a row"}  # values of which a long fp32 sum drifts in one direction

# The same numbers laid out in other ways; {t} is a tensor, {M} and {N} its shape. All that lies
# between the elements is NaN.
LAYOUTS = {
    "packed": "",
    NAN_AROUND: (
        "{t} = torch.nn.functional.pad({t}.flatten(), (65536, 65536), value=float('nan'))"
        "[65536:-65536].view({shape})"
    ),
    "offset by one": (
        "{t} = torch.nn.functional.pad({t}.flatten(), (1, 0), value=float('nan'))[1:].view({shape})"
    ),
    "aligned slice": (
        "{t} = torch.nn.functional.pad({t}, (16, 16), value=float('nan'))[:, 16:-16]"
    ),
    "wider slice": "{t} = torch.nn.functional.pad({t}, (32, 64), value=float('nan'))[:, 32:-64]",
    "odd slice": "{t} = torch.nn.functional.pad({t}, (1, 2), value=float('nan'))[:, 1:-2]",
    "odd stride": "{t} = torch.nn.functional.pad({t}, (0, 1), value=float('nan'))[:, :-1]",
    "every other row": (
        "{t} = torch.stack([{t}, torch.full_like({t}, float('nan'))], 1).view(-1, {N})[::2]"
    ),
    "every other column": (
        "{t} = torch.stack([{t}, torch.full_like({t}, float('nan'))], 2).view({M}, -1)[:, ::2]"
    ),
    "transposed": "{t} = {t}.t().contiguous().t()",
    UNEVEN: (
        "{t} = torch.nn.functional.pad({t}.view(2, -1, {N}), (0, 0, 0, 1), value=float('nan'))"
        "[:, :-1]"
    ),
    # As the heads of attention: in memory positions come before heads.
    HEADS: ("{t} = {t}.view(2, 2, -1, {N}).transpose(1, 2).contiguous().transpose(1, 2)"),
    "row expanded": "{t} = {t}[:1].expand({M}, {N})",
    "one number expanded": "{t} = {t}[:1, :1].expand({M}, {N})",
    "one number a row": "{t} = {t}[:, :1].expand({M}, {N})",
}
# Layouts that bring leading dimensions along: all but the last of those.
_LEADS: dict[str, tuple[int, ...]] = {UNEVEN: (2,), HEADS: (2, 2)}
# x, w and dy before layouts; rows differ in scale, no mean is zero, w is far from 1.
_ROWS = "2.0 ** (torch.arange({M}) % 4 - 1)[:, None]"
_RANDOM = {
    "x": "(torch.randn({M}, {N}, generator=g) + 0.5) * " + _ROWS,
    "w": "1.5 + torch.randn({N}, generator=g) / 2",
    "dy": "torch.randn({M}, {N}, generator=g) + 0.5",
}
_ONES = {"x": "torch.ones({M}, {N})", "w": "torch.ones({N})", "dy": "torch.ones({M}, {N})"}
_REAL = "from rmsnorm_ref.data import hidden_states"
VALUES: dict[str, dict[str, str]] = {
    "random": _RANDOM,
    "ones": _ONES,
    "steps": {
        "x": "(torch.arange({M} * {N}).view({M}, {N}) % 7 + 1) / 4",
        "w": "(torch.arange({N}) % 3 + 2) / 2",
        "dy": "(torch.arange({M} * {N}).view({M}, {N}) % 5 - 1) / 4",
    },
    "equal in a row": _RANDOM | {
        "x": "((torch.rand({M}, 1, generator=g) + 1) * " + _ROWS + ").repeat(1, {N})",
    },
    "zeros": _RANDOM | {"x": "torch.zeros({M}, {N})"},
    "a row of zeros": _RANDOM | {
        "x": _RANDOM["x"] + " * (torch.arange({M}) != {M} // 2)[:, None]",
    },
    "one-hot": _ONES | dict.fromkeys(("x", "dy"), "torch.eye(1, {N}).repeat({M}, 1)"),
    "outlier channel": _RANDOM | {
        "x": "torch.randn({M}, {N}, generator=g) * (1 + 99 * (torch.arange({N}) == {N} // 3))",
    },
    "negative": _RANDOM | {"x": "-" + _RANDOM["x"], "w": "-(1.5 + torch.rand({N}, generator=g))"},
    "zeros in w": _RANDOM | {"w": "(" + _RANDOM["w"] + ") * (torch.arange({N}) % 3 != 1)"},
    "small dy": _RANDOM | {"dy": "(" + _RANDOM["dy"] + ") / 4096"},
    "large dy": _RANDOM | {"dy": "(" + _RANDOM["dy"] + ") * 8192"},  # too large for float16
    "dy like x": _RANDOM | {
        "dy": "torch.randn({M}, {N}, generator=g) / 4 + x.float().sign().cpu()",
    },
    "layer 0": _RANDOM | {
        "x": "hidden_states()['layer_0_x'][:{M}]",
        "w": "hidden_states()['layer_0_weight']",
    },
    "layer 5": _RANDOM | {
        "x": "hidden_states()['layer_5_x'][:{M}]",
        "w": "hidden_states()['layer_5_weight']",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Say what is fed to both passes; the defaults are the plainest of each kind."""

    M: int
    N: int
    dtype: str = "float32"
    w_dtype: str = ""  # empty: that of x
    lead: tuple[int, ...] | None = None  # leading dimensions; None: M
    x_layout: str = "packed"
    dy_layout: str = "packed"
    w_layout: str = "packed"
    values: str = "random"
    scale: float = 1.0
    eps: float = 1e-6
    needs: str = "xw"  # who asks for a gradient; empty: forward alone
    seed: int = 0
    one_plus: bool = False  # the gain is 1 + w

    def label(self) -> str:
        """Name the case in a table."""
        words = [f"[{', '.join(map(str, self.shape))}] {self.dtype}"]
        words += [f"w {self.w_dtype}"] if self.w_dtype not in {"", self.dtype} else []
        for tensor in ("x", "dy", "w"):
            layout = getattr(self, f"{tensor}_layout")
            words += [f"{tensor} {layout}"] if layout != "packed" else []
        words += [self.values] if self.values != "random" else []
        words += [f"scale {self.scale:g}"] if self.scale != 1 else []
        words += [f"eps {self.eps:g}"] if self.eps != 1e-6 else []
        if len(self.needs) == 1:
            words.append(f"gradient of {self.needs} alone")
        return ", ".join(words)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of x as the kernel is given it."""
        for layout in (self.x_layout, self.dy_layout):
            if layout in _LEADS:
                return (*_LEADS[layout], self.M // self.rows_in, self.N)
        return (self.M, self.N) if self.lead is None else (*self.lead, self.N)

    @property
    def rows_in(self) -> int:
        """Return what the number of rows must be a multiple of."""
        return max(math.prod(_LEADS.get(each, ())) for each in (self.x_layout, self.dy_layout))

    def json(self) -> dict[str, Any]:
        """Return what JSON holds; `Case.of` reads it."""
        return asdict(self)

    @staticmethod
    def of(found: dict[str, Any]) -> Case:
        """Read `json`."""
        known = {field.name for field in fields(Case)}
        words = {name: value for name, value in found.items() if name in known}
        lead = words.get("lead")
        return Case(**(words | {"lead": None if lead is None else tuple(lead)}))


def source(case: Case, device: str = "cpu") -> str:
    """Write the lines that make x, w, dy and eps."""
    M, N = case.M, case.N
    values = VALUES[case.values]
    lines = []
    if "hidden_states" in values["x"]:
        lines.append(_REAL)
    if any("generator" in text for text in values.values()):
        lines.append(f"g = torch.Generator().manual_seed({case.seed})")
    where = "" if device == "cpu" else f"{device!r}, "
    for name in ("x", "w", "dy"):
        text = values[name].format(M=M, N=N)
        if name == "x" and case.scale != 1:
            text = f"({text}) * {case.scale!r}"
        dtype = (case.w_dtype if name == "w" else "") or case.dtype
        plain = text.startswith(("torch.ones", "torch.zeros")) and not where and "*" not in text
        if plain:
            lines.append(f"{name} = {text[:-1]}, dtype=torch.{dtype})")
        else:
            lines.append(f"{name} = ({text}).to({where}torch.{dtype})")
    # Nothing is moved after it was laid out: a copy would be packed.
    for name in ("x", "dy"):
        layout = LAYOUTS[getattr(case, f"{name}_layout")]
        lines += [layout.format(t=name, M=M, N=N, shape=f"{M}, {N}")] if layout else []
        if case.shape != (M, N) and getattr(case, f"{name}_layout") not in _LEADS:
            lines.append(f"{name} = {name}.view({', '.join(map(str, case.shape))})")
    return "\n".join([*lines, *_finish_w(case), f"eps = {case.eps!r}"])


def _finish_w(case: Case) -> list[str]:
    lines = []
    if case.one_plus:
        lines.append("w = (w - 1) + 1 - 1  # the gain is 1 + w, and no rounding is left in it")
    if case.w_layout in {"offset by one", NAN_AROUND}:
        lines.append(LAYOUTS[case.w_layout].format(t="w", M=1, N=case.N, shape=case.N))
    elif case.w_layout != "packed":
        lines.append("w = w.repeat_interleave(2)[::2]")
    return lines


def make(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Run `source`; return its names."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(source(case, device), "<case>", "exec"), names)  # noqa: S102  # our own text
    return names
