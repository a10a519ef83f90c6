"""Which backward a kernel computes, found by fitting, as `semantics` finds the forward.

What is tried is dx = outer * (direct - factor * mean) and a dw summed over rows, with the usual
slips in each place. In a name {g} stands for the gain and {h} for x_hat, or x where it was
forgotten.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

PADDED = 8  # the power of two above the width of the fit
Words = tuple[str, ...]
Given = tuple[Tensor, Tensor, Tensor]  # x, gain and dy in float64
Spelled = tuple[Tensor, Tensor]  # a gradient, and the size of the terms that it is made of
RSTDS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "": lambda s, e: (s + e).rsqrt(),
    ", rstd without eps": lambda s, _: s.rsqrt(),
    ", rstd = 1 / (sqrt(mean(x^2)) + eps)": lambda s, e: 1 / (s.sqrt() + e),
}
MEANS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean(dy * {g} * {h})": lambda dy, g, h: (dy * g * h).mean(-1, keepdim=True),
    "mean(dy * {h})": lambda dy, _, h: (dy * h).mean(-1, keepdim=True),
    "sum(dy * {g} * {h})": lambda dy, g, h: (dy * g * h).sum(-1, keepdim=True),
    "sum(dy * {g} * {h}) / next_power_of_2(N)": lambda dy, g, h: (
        (dy * g * h).sum(-1, keepdim=True) / PADDED
    ),
    "": lambda dy, *_: torch.zeros_like(dy),
}
SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum(dy * {h})": lambda dy, _, h: dy * h,
    "sum(dy * {g} * {h})": lambda dy, g, h: dy * g * h,
    "sum(dy)": lambda dy, *_: dy,
    "mean(dy * {h})": lambda dy, _, h: dy * h / len(dy),
    "sum(dy * {h}) without the last row": lambda dy, _, h: torch.cat([(dy * h)[:-1], 0 * dy[-1:]]),
}
_PLACES = (tuple(RSTDS), tuple(MEANS), ("x_hat", "x"), ("x_hat", "x"), ("dy * {g}", "dy"),
           ("-", "+"), ("rstd", "1"))  # fmt: skip
# Few slips first; without a mean there is nothing to get wrong in it.
DX = sorted(
    (
        words
        for words in itertools.product(*_PLACES)
        if words[1] or words[2:4] == ("x_hat", "x_hat")
    ),
    key=lambda words: sum(word != place[0] for word, place in zip(words, _PLACES, strict=True)),
)
DW = list(itertools.product(RSTDS, SUMS, ("x_hat", "x")))


def spell_dx(words: Words, given: Given, eps: float) -> Spelled:
    """Compute one spelling of dx."""
    (rstd, mean, inner, factor, direct, sign, outer), (x, g, dy) = words, given
    r = RSTDS[rstd](x.square().mean(-1, keepdim=True), eps)
    h = {"x_hat": x * r, "x": x}
    one, two = dy * g if "{g}" in direct else dy, h[factor] * MEANS[mean](dy, g, h[inner])
    scale = r if outer == "rstd" else torch.ones_like(r)
    return scale * (one - two if sign == "-" else one + two), scale * (one.abs() + two.abs())


def _dx_says(words: Words) -> str:
    rstd, mean, inner, factor, direct, sign, outer = words
    inside = f"{direct} {sign} {factor} * {mean.replace('{h}', inner)}" if mean else direct
    return (f"rstd * ({inside})" if outer == "rstd" else inside) + rstd


def spell_dw(words: Words, given: Given, eps: float) -> Spelled:
    """Compute one spelling of dw."""
    (rstd, total, inner), (x, g, dy) = words, given
    r = RSTDS[rstd](x.square().mean(-1, keepdim=True), eps)
    terms = SUMS[total](dy, g, x * r if inner == "x_hat" else x)
    return terms.sum(0), terms.abs().sum(0)


def _dw_says(words: Words) -> str:
    return words[1].replace("{h}", words[2]) + words[0]


def fit(
    given: Given, runs: list[tuple[float, dict[str, Tensor]]], gain: str, tolerance: float
) -> dict[str, str]:
    """Return what each gradient is, in words, "" where nothing fits.

    Args:
        given: what was fed.
        runs: for each eps that was passed, the gradients by name.
        gain: what x_hat is multiplied by, in words.
        tolerance: relative to the sizes of the terms.
    """
    found: dict[str, str] = {}
    for name, spellings, spell, says in (
        ("dx", DX, spell_dx, _dx_says),
        ("dw", DW, spell_dw, _dw_says),
    ):
        if name not in runs[0][1]:
            continue
        found[name] = ""
        for words in spellings:
            made = [(*spell(words, given, eps), results[name]) for eps, results in runs]
            if all(bool(((a - b).abs() <= tolerance * size + 1e-30).all()) for b, size, a in made):
                found[name] = says(words).format(g=gain)
                break
    return found


RIGHT = {"dx": _dx_says(DX[0]), "dw": _dw_says(DW[0])}
