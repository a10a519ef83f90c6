"""What a review asks of a kernel: one table of rules, each with an id that stays.

The site's page of rules is made from this table, so an id in a report is a link that works.
"""

from __future__ import annotations

from typing import NamedTuple

SITE = "https://rmsnorm-ref.readthedocs.io/en"  # the published site, less the version

FAIL, NOTE = "fail", "note"


class Rule(NamedTuple):
    """Hold one rule: its id, the group it is listed under, what it asks, why, and what it costs.

    `breach` says what breaking it does to the verdict, in words; the code decides per finding.
    """

    id: str
    group: str
    asks: str
    why: str
    breach: str

    @property
    def url(self) -> str:
        """Return the rule's permalink."""
        return f"{SITE}/latest/reference/rules.html#{self.id}"


_FAILS = "Fails."
_NOTE = "A note; fails under `--strict`."
_VALUE = (
    "Fails beyond what the usual eager code in the same dtype does; between that and the bound of "
    "`rmsnorm_ref.oracle` it is `r-rounding-{0}`, a note."
)

_TABLE = (
    # ---- value
    ("r-value-y", "Value", "Every element of y lies within its tolerance around the float64 truth.",
     "The bound allows fp32 arithmetic and one rounding, element by element.", _VALUE.format("y")),
    ("r-value-dx", "Value", "Every element of dx lies within its tolerance around the truth.",
     "dx subtracts two terms; the bound knows what was cancelled.", _VALUE.format("dx")),
    ("r-value-dw", "Value", "Every element of dw lies within its tolerance around the truth.",
     "dw sums over all rows: a row lost, counted twice or added in a narrow dtype shows here.",
     _VALUE.format("dw")),
    ("r-rounding-y", "Value", "y is computed in fp32 and rounded once.",
     "An intermediate kept in 16 bits costs up to a unit in the last place each time.", _NOTE),
    ("r-rounding-dx", "Value", "dx is computed in fp32 and rounded once.",
     "An intermediate kept in 16 bits costs as much here, and the mean term adds its own.", _NOTE),
    ("r-rounding-dw", "Value", "dw is summed in fp32 and rounded once.",
     "Terms or partial sums kept in 16 bits lose what the sum was to collect.", _NOTE),
    # ---- semantics
    ("r-eps", "Semantics", "eps is added to the mean square, inside the root, as it was passed.",
     "Outside the root, absent or fixed it looks the same until x is as small as its root.",
     _FAILS),
    ("r-statistic", "Semantics", "The statistic is the mean of squares over the N columns.",
     "A sum, a mean over a padded width, a variance or a mean of |x| is another function.",
     _FAILS),
    ("r-weight", "Semantics", "The normalised row is multiplied by w.",
     "A weight of ones hides 1 + w, no w and w squared; one without a 0 hides a division by w.",
     _FAILS),
    # ---- contract
    ("r-runs", "Contract", "Packed matrices of ordinary size run, in both passes.",
     "Everything else rests on it.",
     "Fails. To refuse a dtype or a width by an error is a note, refusing a number of rows fails."),
    ("r-layout-x", "Contract", "Any strides of x give what the packed copy gives.",
     "A slice, a transpose, an offset: x.stride(0) is not N, x.stride(-1) not 1.",
     "Fails where the result is wrong in silence; an error is a note: the caller can pack x."),
    ("r-layout-dy", "Contract", "Any strides of dy give what the packed copy gives.",
     "Autograd chooses them: the backward of a sum sends a dy whose strides are all 0.",
     "Fails, also by an error: no caller chooses dy's strides."),
    ("r-layout-w", "Contract", "Any stride of w gives what the packed copy gives.",
     "w[::2] has N elements that do not lie side by side.",
     "Fails where the result is wrong in silence; an error is a note."),
    ("r-rank", "Contract", "Any number of leading dimensions, none included.",
     "Rows are what is left when the last dimension is taken away.",
     "Fails where the result is wrong in silence; an error is a note."),
    ("r-zero-rows", "Contract", "No rows give an empty y and dx, and a dw of zeros.",
     "An empty batch is what a router or a filter leaves. A launch of an empty grid is an error.",
     "Fails where something wrong comes out or the backward raises; refused forwards are a note."),
    ("r-shape", "Contract", "y and dx have the shape of x, dw that of w.", "So they can be used.",
     _FAILS),
    ("r-dtypes", "Contract", "y has the dtype of x, whatever that of w.",
     "A promoted y doubles the traffic of all that follows.",
     "Fails where w has the dtype of x; where it has another, a note that fails under `--strict`."),
    ("r-mixed-dtype", "Contract", "w may have another dtype than x.",
     "fp32 weights beside 16-bit activations are common.",
     "Fails where the result is wrong, or taken by the forward and refused by the backward."),
    ("r-inputs-untouched", "Contract",
     "x, w and dy keep their bits, gaps between rows included; in the backward, so does y.",
     "dy may be shared with another branch of the graph; x is what the backward still reads.",
     _FAILS),
    ("r-outside", "Contract", "Nothing is written outside of what was allocated.",
     "A store without a mask overwrites a neighbour; nothing repairs the last row's.", _FAILS),
    ("r-reads-outside", "Contract", "Nothing outside of the tensors reaches a result.",
     "NaN lies around each input: a load without a mask brings it in.", _FAILS),
    ("r-alias", "Contract", "y shares no memory with x.",
     "Writing to y later would change x behind autograd's back.", _FAILS),
    ("r-independent-calls", "Contract", "One call leaves the results and the graph of another be.",
     "A buffer that is kept is overwritten while it is needed; a kept cast of w outlives its step.",
     _FAILS),
    ("r-two-backwards", "Contract", "A graph that is kept gives the same gradients twice.",
     "What the first backward overwrites, the second reads.",
     "Fails where they differ, or the second changes what the first gave; an error is a note."),
    ("r-who-needs-grad", "Contract", "A gradient comes exactly when it is asked for.",
     "A frozen weight or a first layer must not change the other gradient.", _FAILS),
    ("r-no-grad", "Contract", "Without recording, y is the same.",
     "Inference and training must agree.",
     "Fails where y differs; an error under `inference_mode` is a note."),
    ("r-global-state", "Contract", "A call changes nothing that the whole process shares.",
     "A default dtype or a seed that is set, or recording that stays off, changes other code.",
     "Fails for those; random numbers that are drawn, threads and their like are a note."),
    ("r-forward-only", "Contract", "The function is differentiable.",
     "A fact about the kernel, and no fault.", "A note."),
    ("r-no-x-gradient", "Contract", "x gets a gradient.",
     "A fact about the kernel: it can only be a first layer.", "A note."),
    ("r-no-weight-gradient", "Contract", "w gets a gradient.",
     "A fact about the kernel: its gain cannot be trained.", "A note."),
    ("r-double-backward", "Contract", "A second derivative is right or refused.",
     "A gradient penalty that vanishes in silence trains another loss.",
     "Fails where it is wrong; where it vanishes it is a note. Refusing is right."),
    ("r-short-weight", "Contract", "A w that is no [N] is refused.",
     "Read without a check, it continues into whatever lies behind.", "A note."),
    ("r-float64", "Contract", "float64 is computed in float64 or refused.",
     "Rounded in silence it makes every gradient check lie.", "A note."),
    # ---- extremes
    ("r-scales", "Extremes", "Rows that are small or large come out as well as others.",
     "The bounds are relative to each element: no scale is special within fp32's range.", _FAILS),
    ("r-accumulation", "Extremes", "Sums do not stall at the storage dtype's precision.",
     "In bf16, 256 + 1 is 256: of 4096 ones the sum is 256.",
     "Fails, except for the drift of fp32 where equal terms are added one by one: then a note."),
    ("r-fp16-squares", "Extremes", "A square that float16 cannot hold does no harm.",
     "From |x| = 256 on it overflows, and the row becomes zeros.",
     "Fails, except where all arithmetic is in float16, as in plain eager code: then a note."),
    ("r-zero-row", "Extremes", "A row of zeros gives zeros, and dx = dy * w / sqrt(eps).",
     "Padding is made of such rows; without eps they are 0/0.", _FAILS),
    ("r-nan-contained", "Extremes", "NaN and infinity stay in their row, and do not vanish there.",
     "One bad sample must not spoil a batch, nor pass unseen.", _FAILS),
    ("r-real-input", "Extremes", "Outlier channels of a trained model's activations do no harm.",
     "A few channels are tens of times larger and carry the mean square.", _FAILS),
    # ---- bits
    ("r-same-twice", "Bits", "The same input gives the same bits.",
     "Atomic additions change their order from run to run.", _NOTE),
    ("r-batch-invariance", "Bits", "A row's bits do not depend on the rows beside it.",
     "Otherwise an answer depends on who else is asking.", _NOTE),
    # ---- limits
    ("r-widest", "Limits", "Beyond its widest row a kernel says so.",
     "A tile of fixed size that drops the tail is right up to that size.",
     "Fails where a wider row is wrong in silence. A limit that raises is no fault."),
    ("r-size", "Limits", "More than 2^31 elements: the last row is right.",
     "A 32-bit product of row and stride wraps. Only on request, with `--huge`, on a GPU.", _FAILS),
    # ---- process
    ("r-crash", "Process", "The process survives.", "A segmentation fault ends a service.", _FAILS),
    ("r-hang", "Process", "A call ends in time.", "A loop with a wrong bound never does.", _FAILS),
    ("r-cuda-error", "Process", "The GPU's context survives.",
     "An illegal access poisons every later call of the process.", _FAILS),
    # ---- speed
    ("r-impossible-number", "Speed", "No pass is faster than moving its bytes.",
     "Above the ceiling, something was not done or not timed, or the ceiling is too low.",
     "A note."),
    ("r-slower-than-eager", "Speed", "No pass is slower than eager PyTorch.",
     "Fewer trips to memory are the point of a fused kernel.", "A note."),
)  # fmt: skip

RULES = {row[0]: Rule(*row) for row in _TABLE}
