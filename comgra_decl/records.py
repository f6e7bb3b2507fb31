"""Plain data passed from the hooks to the store; needs neither torch nor TensorStore.

The training thread produces `RawStep` objects, which contain only raw sums to keep the cost low.
The writer thread turns one or more of these objects into a `StepBatch`, which the store writes to
disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

ENDED = ("finished", "failed", "stopped")
"""States of a run that has ended: normally, by an exception of the program, or because the process
disappeared or recording stopped early."""

RAW_STATISTICS = 8
"""Number of raw sums per row; see `Raw`."""


class Raw(IntEnum):
    """Columns of a raw-sum row (one row = one sample of one slot), all float64."""

    PIVOT = 0  # subtracted before summing, so that std stays accurate for a large mean
    SUM = 1  # sum of (x - pivot)
    SQUARES = 2  # sum of (x - pivot)^2
    ABS_SUM = 3  # sum of |x|
    MIN = 4
    MAX = 5
    NONZERO = 6  # count of x != 0 (NaN counts as non-zero, as in numpy)
    NONFINITE = 7  # count of NaN and infinities


EARLIER_STEP = " (earlier step)"
"""Suffix of the role of a graph node that represents a tensor from an earlier step."""


class SlotKey(NamedTuple):
    """Key of one series of records."""

    node: str
    role: str
    iteration: int
    pass_: str


class Piece(NamedTuple):
    """The part of a tensor held by one rank: its offset and shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Normalised(NamedTuple):
    """How a tensor of images was normalised, for each channel or for all: (x - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


SAMPLE = "sample"
"""The axis of the batch dimension, which always comes first."""

POOLED = frozenset({"depth", "height", "width", "length", "time", "query", "key"})
"""Axes that previews average over, because neighbouring entries are similar."""

AXIS_NAME = re.compile(r"[^\W\d][\w .-]{0,39}")
"""The form of an axis name."""


class Axis(NamedTuple):
    """An axis of a preview: `size` entries of the tensor, of which those in `how` were kept.

    "all": unchanged; "first": the first ones; "mean": entry i of m is the mean of the entries from
    floor(i size / m) to ceil((i + 1) size / m) - 1 (adaptive average pooling).
    """

    name: str
    how: str
    size: int


@dataclass(frozen=True, eq=False, slots=True)
class StoredPreview:
    """A small part of a tensor, [samples, ...], or without a sample dim if it has no batch dim."""

    axes: tuple[Axis, ...]
    values: NDArray[Any]


PREVIEW_BYTES = 4096
"""Maximum size of a preview."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One row of the slot table, written once when the slot first appears.

    `shape` is the full shape in the first record, including the batch dim. If the tensor has a
    different shape in a record, the record stores that shape. `batch_dim` is the batch dimension or
    None. `names` are all names of a shared tensor. `piece` is the part that this process holds;
    None if it holds the whole tensor. `axes` are names of the value
    dims, and `image` says how images were normalised, both from the spec.
    """

    id: int
    key: SlotKey
    kind: str  # input | parameter | buffer | computed | target | loss
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    batch_dim: int | None
    module_class: str
    names: tuple[str, ...] = ()
    piece: Piece | None = None
    axes: tuple[str, ...] = ()
    image: Normalised | None = None


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions of each slot's rows in `RawStep.raw`; steps with the same layout share one object.

    Per slot (n): `slots` int32 ids, in any order, and `tensors` int64, the index of each slot's
    reduced tensor (shared by two slots if the same tensor was seen under two names). Per reduced
    tensor (m): `starts` int64 first row, `rows` int64 number of rows, `samples` int64 (1 without a
    batch dim; equal to `rows`, unless there are too many samples to give each its own row),
    `elements` int64 elements per row, `batched` bool. `shapes`: full shape of each slot's tensor;
    None if it is known only from the slot table.
    """

    slots: NDArray[np.int32]
    tensors: NDArray[np.int64]
    starts: NDArray[np.int64]
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    elements: NDArray[np.int64]
    batched: NDArray[np.bool_]
    shapes: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(slots=True)
class Structure:
    """A dependency graph between slots, as indices into `keys`; stored once, keyed by its `hash`.

    Each edge is (source, sink, carries_gradient). `cuts` names the places beyond which the graph
    could not be followed, such as calls to `.item()` or numpy.
    """

    hash: str
    keys: list[SlotKey]
    kinds: list[str]
    edges: list[tuple[int, int, bool]]
    cuts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StepInfo:
    """Facts about one record, stored as JSON (and partly as columns)."""

    step: int
    time: float  # Unix seconds
    type: str  # type of execution
    mode: str  # "train" | "eval"
    structure: str | None = None  # hash of the dependency graph valid at this step
    batch_size: int | None = None
    samples: list[int] = field(default_factory=list)  # batch indices recorded individually
    cost: float = 0.0  # seconds that the training thread spent on this record
    extra: dict[str, Any] = field(default_factory=dict)
    previews: dict[int, StoredPreview] = field(default_factory=dict)  # by slot; stored as values


def _bytes_of_previews(info: StepInfo) -> int:
    if not info.previews:
        return 0
    return sum(preview.values.nbytes for preview in info.previews.values())


@dataclass(slots=True)
class RawStep:
    """One recorded step, as produced by the training thread.

    `raw` float64 [rows, RAW_STATISTICS]. `aggregates`: for each reduced tensor with more samples
    than rows, float64 [formulas + e, 3], mean, std and abs-max of each statistic.
    `histogram_values`: float32, the strided elements of all reduced tensors; those of tensor i of
    the layout are `histogram_values[histogram_starts[i]:histogram_starts[i + 1]]`. `values`: per
    slot id, an array [samples, *value dims] in the tensor's own dtype (bfloat16 as
    ml_dtypes.bfloat16). `kpi_tensors`: for each KPI, the index of the one-element reduced tensor
    that holds it; read into `kpis` on the writer thread, where waiting does not delay training.
    `documents`: JSON-serialisable documents by name ("modules", "report"), of which only the newest
    versions are kept. `extra`: float64 [rows, e], the opt-in statistics of each row, NaN where one
    does not apply. `scheduled`: False for a step that was captured only because it may be kept
    later. `spare_values`: values stored only if such a step is kept. `labels`: called on the writer
    thread; returns the category of each sample in the batch. If it is set, values contain all
    samples until a subset is selected: `chosen`, int64 [c] indices into the batch. `logged`: values
    that the program logged for the step, for triggers (they are stored as scalars). The arrays are
    valid only after `wait()`, which is called on the writer thread.
    """

    info: StepInfo
    layout: Layout
    raw: NDArray[np.float64]
    new_slots: list[SlotInfo] = field(default_factory=list)
    structure: Structure | None = None  # only if it is new to this run
    histogram_values: NDArray[np.float32] | None = None
    histogram_starts: NDArray[np.int64] | None = None
    values: dict[int, NDArray[Any]] = field(default_factory=dict)
    kpis: dict[str, float] = field(default_factory=dict)
    kpi_tensors: dict[str, int] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)
    extra: NDArray[np.float64] | None = None
    aggregates: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    scheduled: bool = True
    spare_values: dict[int, NDArray[Any]] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    labels: Callable[[], Sequence[Any]] | None = None
    chosen: NDArray[np.int64] | None = None
    wait: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held while queued."""
        histogram = 0 if self.histogram_values is None else self.histogram_values.nbytes
        extra = 0 if self.extra is None else self.extra.nbytes
        values = _bytes_of_previews(self.info)
        if self.values or self.spare_values:
            values += sum(v.nbytes for v in (*self.values.values(), *self.spare_values.values()))
        return self.raw.nbytes + extra + histogram + values + 512

    def only(self, tensor: int) -> float:
        """Return the value of a one-element tensor of the layout, computed from its raw sums."""
        row = self.raw[self.layout.starts[tensor]]
        return float(row[Raw.PIVOT] + row[Raw.SUM])


@dataclass(slots=True)
class StepBatch:
    """`k` consecutive records over the same `n` slots, ready to be stored.

    `aggregates` float32 [k, n, len(statistics), 3]: each statistic's mean, std, abs-max over the
    batch (AGGREGATES). `samples` float32 [k, n, c, len(statistics)]: the same statistics of the
    recorded samples, NaN where a slot has fewer than c. `counts` uint32 [k, n, bins] and `ranges`
    float32 [k, n, 2] (lowest and highest edge), or None. `rows` [n] or [k, n]: the number of
    samples aggregated, used as the weight when the aggregates of multiple ranks are joined; None if
    unknown. `shapes`: shape of each slot in these records; empty, or None for a slot, if the shapes
    are those in the slot table.
    """

    steps: list[StepInfo]
    slots: NDArray[np.int32]
    aggregates: NDArray[np.float32]
    samples: NDArray[np.float32]
    counts: NDArray[np.uint32] | None
    ranges: NDArray[np.float32] | None
    values: list[dict[int, NDArray[Any]]]
    kpis: list[dict[str, float]]
    new_slots: list[SlotInfo]
    new_structures: list[Structure]
    documents: dict[str, Any] = field(default_factory=dict)
    rows: NDArray[Any] | None = None
    shapes: Sequence[tuple[int, ...] | None] = ()

    @classmethod
    def of_documents(cls, documents: dict[str, Any]) -> StepBatch:
        """Return a batch with documents and no records."""
        empty = np.empty((0, 0, 0, 0), np.float32)
        slots = np.empty(0, np.int32)
        return cls([], slots, empty, empty, None, None, [], [], [], [], documents)

    @property
    def nbytes(self) -> int:
        """Bytes held until stored."""
        arrays = (self.aggregates, self.samples, self.counts, self.ranges)
        values = sum(v.nbytes for by_slot in self.values for v in by_slot.values())
        values += sum(map(_bytes_of_previews, self.steps))
        return sum(a.nbytes for a in arrays if a is not None) + values + 512 * len(self.steps)


AUTOMATIC = "auto:"
"""Prefix of the stored names of automatic metrics, to keep them apart from the program's own."""

GROWING = "growing/"
"""Prefix, after `AUTOMATIC`, of metrics that count what a growing container gains per step, such as
tensors or hooks."""

GROWING_BYTES = "growing_bytes/"
"""The same for tensors that grow, in bytes per step."""

STALLED = "stalled"
"""Automatic metric: how many seconds a stalled step had taken when it was reported."""

PROFILE = "profile"
"""Name of the document that contains what each node used in the profiled steps."""

MODULE_TIMES = "module_times"
"""Name of the document with the forward times of modules in steps that were timed."""

MEMORY = "memory"
"""Name of the document that contains what each node held in the measured steps."""

TIMELINE = "timeline"
"""Name of the document that contains the events of the profiled steps."""

PROGRAM = "(program)"
"""Node, in measurements, of everything outside of modules."""

OTHER = "(other)"
"""Node, in the memory measurement, of all memory on devices that belongs to no node: neither a
parameter, a buffer, a gradient nor the state of an optimizer."""

GRAD_SCALE = "grad_scale"
"""Name of the metric for the mixed-precision loss scale of recorded and skipped steps."""

SKIPPED_STEP = "skipped_step"
"""Name of the metric that is set to 1 if mixed precision skipped a step; also set in the step's
record."""

LOSS_CALLS = "loss_calls"
"""Fact stored in a record: the calls that compare a prediction with a target, in order, at most 16.

Each is a dict: "function" (its name or, for a hand-written loss, that of an operator such as
"sub"), "arguments" (numbers, strings or None; `True` for a tensor), "prediction" and "target" (each
with "shape", "dtype" and "slot"). "slot" is the iteration of the `target` or `prediction` node. It
is None for a prediction that a model returned, in any shape, and for a target that was not
recorded. "made_by" of a prediction is the function that computed its values, as named by autograd
("Softmax", "Addmm"). "dim" is the dimension of a softmax whose result is passed to the call
unchanged. "weights" are the class weights, if they are in host memory. They are missing if they
differ from those in an earlier, otherwise equal call.
"""

PREDICTION = "prediction"
"""Node of the tensors that losses compare with targets, if no model returned them."""

BATCH_SOFTMAXES = "batch_softmaxes"
"""Fact stored in the first records: shapes of tensors that a softmax normalised over the batch."""

ATTENTIONS = "attentions"
"""Fact stored in the first records: the attention calls in a step, in order, at most 16.

Each is a dict: "function" (`softmax` over the last of two dimensions of equal size,
`scaled_dot_product_attention` or `multi_head_attention_forward`) and "shape" of its weights,
[batch, heads, queries, keys] or the shape of the softmax's input. If there are as many queries as
keys, "future" and "past" are the shares of the weight, or of what the mask allows, at positions
after and before the query's. If the model's input is tokens at the same positions, "tokens_seen" is
the number of different tokens that any query sees, and "tokens_unseen" is the number of different
tokens at positions that no query sees.
"""

TELLING = "telling"
"""Fact stored in the first records: calls whose arguments can reveal a mistake, at most 64, one per
line of code.

Each is a dict with "kind" and "where", the function and line of the program. The kinds are:

- "reshape": a view of shape "source" as "target" that neither only splits nor only merges
  dimensions.
- "frozen batch norm": a batch norm whose weight needs no gradient normalizes "channels" over the
  "values" of a batch, and updates its running statistics.
- "root of zero": a root of a tensor of "shape", of which "zeros" elements are exactly 0.
- "temperature": cosine similarities of samples to each other, of "shape", are multiplied by a
  "factor" below 1.
- "doubled": `cat` joins "count" times the same tensor of "shape" along "dim".
- "single": a softmax of "shape" over its dimension "dim", which has size 1.
- "weighs": a matrix product or einsum with the result of a softmax of "shape" over "dim", and the
  dimensions that it sums over, "summed".
- "mask": a softmax of "shape" over scores of which a mask has set the share "hidden" to the number
  "fill", and their share of the "weight". "masked again" is True if the result is masked, too.
- "stale gradient": an "optimizer" (its class) steps right after a backward pass before which
  "count" of its parameters, of which some have these "shapes", already had a gradient from before
  the previous optimizer step. Without "where".
- "cleared gradient": the same about parameters to which the backward pass gave gradients, all of
  which are None or zero when the optimizer steps.
- "outside": "count" tensors, of which some have these "shapes", have gradients but belong to no
  model and to no optimizer that has stepped. Without "where".
- "detached prediction": the "function" of a loss whose prediction of "shape" is a detached output,
  while its target, data plus a multiple of an output, carries a gradient. Without "where".
- "recreated": the loss depends on "count" parameters, of which some have these "shapes", that no
  longer exist after the backward pass. Without "where".
- "own candidate": `cross_entropy` compares each row of a square matrix of "shape" with all columns,
  and the largest element of each row is on the diagonal, which is the target of no row.
- "waits": "function" is called "count" times on a tensor on a "device", which makes the host wait.
- "padded tokens": the model's input "shape" [batch, positions] of tokens, of which a "share" of
  the samples ends with padding. Without "where".
- "row ends": the ends of the "rows" of an integer target of "shape" and of an input of tokens of
  that shape. "beyond" is the number of rows whose target goes on beyond the end of the input, and
  "fits" whether none would in another order of the rows. Without "where".
- "other rows": "rows" of a prediction were chosen by an index and the target is a slice of a tensor
  with as many rows as that from which they were chosen, but "wrong" of its rows are others. Without
  "where".
- "turned": the number of images of a batch that fit the map which is target number "target" as it
  is ("aligned"), and if it is flipped or turned ("turned", by the name of the position). Without
  "where".
- "ctc lengths": the "rows" of a batch are sorted by the length of their input, and "input" and
  "target" are their lengths.
- "sigmoid twice": a "function", a sigmoid or its logarithm, of the result of a sigmoid of "shape".
- "interleaved": an "input" of "shape" [batch, channels, height, width] whose elements along the
  width are much more similar at a distance of one per channel than to their neighbours; "ratio" is
  that of the mean squared differences. Without "where".
- "rate as log": a "function" that expects the logarithm of a rate receives a tensor of "shape" that
  is "made_by" a function with positive results.
- "ctc softmax": the log-probabilities of a CTC loss, of "shape", are normalized over "dim", which
  is not the last one.
- "blank target": the "share" of the targets of a CTC loss that are its "blank".
- "bootstrap": a tensor of "elements" that a model computed without gradients is multiplied by a
  "factor" and added to data, or to what the program computed from other outputs; "masked" is
  whether some elements may have been set to zero, "index" whether it consists of integers, "kept"
  the share of its elements that a mask does not set to zero, or None, and
  "negative" whether any element it is added to is negative.
- "returns": a loop writes sums of data and the discounted previous sum in an "order".
- "unused": the result of a "function", of "shape", that nothing uses.
- "clamped": a clamp to "limits" changes the "share" of the elements of a tensor of "shape".
- "dropout": a dropout function is called with a high "rate" on a tensor of "shape".
- "inverted mask": a mask of "shape" hides all tokens and shows the padding.
- "own messages": rows are gathered by the index by which their sum, of "rows" into fewer rows, is
  written, and by no other; or only narrower rows, such as weights, are gathered by others.
- "fresh choices": actions of "shape" that are sampled and used only for log-probabilities.
- "trains nothing": "count" parameters receive the gradients of a loss, and no optimizer holds any
  of them.
- "idle term": a term of a loss depends on "count" parameters, of which some have these "shapes".
  They all belong to an optimizer that never steps after this loss, but after losses of its own.
  Without "where".
- "added to itself": a tensor of "shape" is added to itself.
- "unscaled": a softmax of "shape" over products of two activations that were not scaled.
- "uniform noise": uniform random numbers of "shape" are multiplied by a scale or are the target of
  a regression ("use").
- "messages": rows of a tensor with as many rows as there are "nodes" are gathered and added to such
  rows along "edges" without self-loops. "reached" is the largest index plus 1, and
  "upwards" the number of edges from a smaller to a larger index.
- "pooled": a "function" adds "rows" into fewer rows, "into"; "sorted" is whether their index is.
- "written": the program, not its optimizer, has written to the parameter "role" of a "node" in
  place, "count" times between training steps so far. Stored in the record after the second time,
  for the first parameter of each optimizer that counts its steps. Without "where".
- "last step", "final state": the last position of a sequence, or the final state of a recurrent
  module, is read. "padded" is the share of samples that end with padding, and "stacked" whether the
  program has stacked the positions itself.
"""

CODES = "codes"
"""Fact stored in the first training records and the first evaluations, for each integer input of
the first model call: a dict with "input" (its role), "rows", and "codes", which lists how many
codes appear in ascending order of their first use, for each column in which they all do (see
`hooks.tensors.arrangement`)."""

MESH = "mesh"
"""Document stored with the first record of a rank whose job has a device mesh: its coordinate by
dimension, such as {"dp": 0, "tp": 3}."""

PERTURBATIONS = "perturbations"
"""Document stored after the last record: for each small trained model, what experiments with a copy
of it showed. Each is a dict with "model", "step" (of the copy) and "batch" (the number of samples
in the program's batch), and what `hooks.probing.perturbations` describes."""

OBJECTIVES = "objectives"
"""Fact stored in the first records: the structure of each loss on which `backward` was called, a
dict of counts (see `hooks.tensors.objective`) and "terms", a list of dicts (see
`hooks.tensors.terms`). The first loss after an optimizer step also has "uncleared", the number of
parameters, among at most 16, that have nonzero gradients before its backward pass."""

MODES = "modes"
"""Fact stored in a record, by node: whether each model called with gradients was in training mode
in any of these calls."""

TRAINING_WITHOUT_GRADIENT = "training_without_gradient"
"""Fact stored in a record: the models that were called without gradients while they were in
training mode, as nodes."""

PROBE_PREFIX = "probe:"
"""Prefix of the type of execution in a probe's records; the name of the probe follows."""

PROBE_MODE = "probe"
"""Mode of a probe's records, which belong to neither training nor evaluation."""

PROBE_SAMPLES = "probe_samples"
"""Fact stored in a probe's record that contains the values of all samples from the first batch, so
that a later session can use the same samples: "declared" is the section of the spec that has
chosen them, and "classes" has the class of each, or is None."""

SHOWN = "shown"
"""Type of execution of the records with what the program shows (`comgra.image`, `figure` and
`text`), and pass of their slots. The node of a slot is the name, and the role is "image", "figure"
or "text"; the text's UTF-8 bytes are padded with zeros."""

CHECKPOINT = "checkpoint"
"""Type of execution of the records that contain checkpoints, pass of their slots, and the fact with
what is needed besides their tensors. The node of a slot is a model, the role is the name of a
parameter or buffer, and the slot's names are all its names. The fact maps each model to a dict:
"order" lists the names in the model's state dict, and "temporary" the names of buffers that are
not part of it."""

REPLAY = "replay"
"""Type of execution of the records with what it takes to repeat a step, pass of their slots, and
the fact that describes it (`hooks.probing.replays`). {"refused": reason} if it cannot be
repeated."""

NO_SERIES = frozenset({CHECKPOINT, REPLAY, SHOWN})
"""Types and passes whose tensors are no series of a network's tensors."""

PICTURE_PREFIX = "picture:"
"""Prefix of a picture's pass; the name of the picture follows."""

PICTURES = "pictures"
"""Fact stored in a probe's record: for each picture by name, a dict with "method" and its facts.

- "target": the class that each sample's picture explains, or "loss". For integrated gradients,
  "gap" and "difference": the completeness gap and the change in the target of each sample. For a
  logit lens, "norm" (may be None) and "head": their paths, and "translators": the file that makes
  it a tuned one.
- For a token: "position", "score" ("logit" or "log_probability") and, for a contrast, "rather_than"
  (the other token of each sample).
- For a Hessian: "measure" (what is averaged), "value" (its mean), "parameters" (their number),
  "trace" and "trace_error" (its standard error; None with one random vector).
- For a slice through a loss: "measure", "value" (at the step's own parameters), "directions" (their
  names) and "coordinates" (of the points along each direction).
- For inputs that maximise units: "units" (their numbers), "input" (its role), "points",
  "step_size", "decay" and "noise", as in the spec.
- "refused": the reason why there is no picture.
"""

PICTURE_CHECKS = "picture_checks"
"""Document with numbers about the pictures in the newest record of each probe, by probe: "step";
"pictures", by name, each with "method" and, where they apply, "outside" (the share of the magnitude
outside the probe's mask), "gap" and "difference" (mean magnitudes of the completeness gap and of
the change in the target); and "pairs", each of two names and their mean rank correlation."""

INTERVENTION_CHECKS = "intervention_checks"
"""Document about the newest record of each intervention, by intervention: "step"; "nothing", a
sentence about why it did nothing, or None if it had an effect; and "since", the first of the
records without an interruption after which this has not changed. "node" and "role" are those of the
first tensor that it changes."""

COMPUTED_PICTURES = (
    *("likeness", "likeness_over_steps", "confusion", "reliability", "linear_probe"),
    *("spectrum", "flow", "loss_cam", "feature_maps", "filters", "dead_units"),
    *("confident_errors", "foreign_auroc", "top_samples", "unit_effects", "unit_effects_of_types"),
    *("coactivation", "concept_vectors", "concept_derivatives", "separability"),
    "lens_from_records",
)
"""The pictures that can be computed from records alone; no declared picture has these names."""

EIGENVALUES = "eigenvalues"
"""Role of the ends of a Hessian's spectrum in the pass of its picture: the largest eigenvalues in
descending order, then the smallest, which end with the smallest of all. Beside it are ".residuals"
(the distance within which each one has an eigenvalue of the Hessian) and the density, a sum of
peaks for each random vector: ".nodes" and ".weights", both [vectors, points]."""

SLICE = "loss"
"""Role of a slice through a loss in the pass of its picture, [points] or [points, points]."""

MAXIMISED = "maximised"
"""Role of the inputs that maximise units, in the node of their layer and the pass of their picture:
[units, ...]. Beside it are ".value" and ".start", [units]: the value of each unit for this input,
and for the input from which the ascent began."""

LENS_TOKENS = ".tokens"
"""End of the role of the tokens that a logit lens predicts, [samples, positions] after each layer.
The role without it contains the log-probabilities of the explained tokens."""

LENS_RANKS = ".ranks"
"""End of the role of the ranks of the explained tokens in a logit lens, [samples, positions] after
each layer: 1 for the token with the highest output, 0 where no token is explained."""

INTERVENTION_PREFIX = "intervention:"
"""Prefix of the type of execution in an intervention's records; its name follows. Their mode is
that of probes."""

EFFECT_PREFIX = "effect:"
"""Prefix of the pass that contains the effects of an intervention, [samples, *places] in one
dimension; its name follows."""

INTERVENTION = "intervention"
"""Fact stored in an intervention's record, a dict.

- "changes": for each change, in order, "tensors" and "elements" (how many were to be changed),
  "changed" (how many elements differ afterwards) and "largest" (the largest difference).
- "axes": the names of the swept axes. "places": for each swept module, its node and, for each axis
  after "node", the swept parts. The places are all combinations, in order.
- "into", if the change reaches only receivers: the same for them. There is a place for each pair.
  "received": what the receivers received, with the keys of an entry of "changes".
- "measure": what was measured. "clean", "baseline": the measure of each sample in the unchanged
  pass, and in the pass with the changes of `first`. Missing if it cannot be measured, in which case
  "unmeasured" is the reason.
- "same": True if the model's output was the same as in the unchanged pass, and with "gradients",
  also the gradients of all parameters and inputs.
- "gradients": True if a backward pass followed, because gradients were changed or measured.
"""

OPTIMIZERS = "optimizers"
"""Fact stored in a record: the optimizers that stepped, in order.

Each is a dict: "class" and "groups", one dict per parameter group with "lr", "weight_decay",
"initial_lr", "momentum", "betas", "maximize" (where the optimizer has them and they are numbers)
and "parameters" (a count).
"""

RESUMED = "resume"
"""Type of the note that is written when a program resumes a run. The note's step is the first
resumed step."""


class Note(NamedTuple):
    """Text logged for a step; `time` is in Unix seconds."""

    step: int
    type: str
    time: float
    text: str


@dataclass(slots=True)
class ScalarBatch:
    """Values and notes logged for steps, whether recorded or not; `n` values in logging order.

    `steps` int64 [n], `values` float64 [n], `names` and `types`: name and type of execution of each
    value. If a value is still on a device, it is NaN until `settle()` is called on the writer
    thread.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    names: list[str]
    types: list[str]
    notes: list[Note] = field(default_factory=list)
    settle: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held until stored."""
        return 64 * len(self.names) + sum(100 + len(note.text) for note in self.notes) + 512


Severity = Literal["error", "warning", "hint"]
"""error: the training cannot work; warning: the training is impaired; hint: worth checking."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "hint")
"""All severities of findings, worst first."""

AGGREGATES = ("mean", "std", "abs_max")
"""How per-sample statistics are aggregated over the batch, in stored order."""

STATISTICS = (
    "mean",
    "abs_mean",
    "std",
    "min",
    "max",
    "abs_max",
    "l2",
    "zero_fraction",
    "nonfinite",
)
"""All statistics that a spec may name, computed over the value dims. `nonfinite` is always
stored."""
