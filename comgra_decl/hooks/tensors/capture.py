"""Capture the tensors in one step and reduce them: the hot path of the training thread."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from comgra_decl.hooks.module_tree import in_training
from comgra_decl.hooks.tensors.categories import categories
from comgra_decl.hooks.tensors.gradients import Backwards
from comgra_decl.records import TRAINING_WITHOUT_GRADIENT, Layout, RawStep, StepInfo
from comgra_decl.stats import OVERWRITTEN, CannotReduceError, Reducer, ordinary

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from numpy.typing import NDArray
    from torch import nn

    from comgra_decl.hooks.probing.probing import Probing
    from comgra_decl.hooks.tensors.categories import Categories
    from comgra_decl.hooks.tensors.opt_in_statistics import Measured
    from comgra_decl.hooks.tensors.previewing import Previewing
    from comgra_decl.hooks.tensors.slots import Slot, SlotTable
    from comgra_decl.spec import Spec
    from comgra_decl.stats import Reduced

_EVERY_SAMPLE = 1 << 30

WITHOUT_GRADIENT = "no_grad"
"""The pass for tensors that a training step computes while the whole model runs under
`torch.no_grad()`.
"""

_MAX_LAYOUTS = 256  # step layouts kept for reuse; bounded, since they may keep changing


class StepCapture:
    """Collects (slot, tensor) pairs during a step and turns them into a `RawStep` at its end."""

    def __init__(
        self,
        reducer: Reducer,
        *,
        max_value_elements: int,
        sample_count: int,
        followed: bool,
        spare_values: bool = False,
    ) -> None:
        self.max_iterations: int | None = None
        self.cut: dict[str, None] = {}  # nodes with more iterations than are recorded in a step
        self.uneven: dict[str, None] = {}  # nodes with one row per sample only in some records
        self.followed = followed  # whether the dependency graph is built from these calls
        self._spare_values = spare_values  # whether to copy values not requested, for later use
        self._spare: set[Slot] = set()  # slots whose values are not requested
        self._reducer = reducer
        self._max_value_elements = max_value_elements
        self._sample_count = sample_count
        # One list of pairs: autograd may call from several threads, and one append is atomic.
        self._entries: list[tuple[Slot, int]] = []
        self._layouts: dict[Hashable, tuple[Layout, int]] = {}  # each with its signature
        self._signature = 0
        self.batch_size: int | None = None
        self.open = False
        self.epoch = 0  # counts steps, so that a hook of an earlier step can detect that it is late
        self.calls: defaultdict[object, int] = defaultdict(int)  # per module plan, in this step
        self.root_calls = 0
        self.aside = False  # whether the current call runs without gradients
        self.backwards = Backwards()
        self.reads_together = False  # whether the clock is read once for several tensors
        self.cost = 0.0  # seconds that the training thread has spent on this record so far
        self.once = 0.0  # seconds spent compiling kernels for the last record; not in `cost`
        self.kpi_tensors: dict[str, int] = {}
        self.skipped = False  # whether mixed precision skipped an optimizer step
        self.facts: defaultdict[str, list[Any]] = defaultdict(list)  # by name, see `records`
        self.modes: dict[str, bool] = {}  # whether each model was called in training mode
        self.said: dict[str, Any] = {}  # values that the program logged for the step, for triggers
        self.refused: dict[str, str] = {}  # slot name -> why its tensor cannot be reduced
        self.measured: Measured | None = None  # opt-in statistics
        self.previewing: Previewing | None = None
        self._previews: Previewing | None = None  # the same, in records that have previews
        self.categories: Categories | None = None  # of the samples, if the spec requests them
        self.probing: Probing | None = None  # the probes, if the spec declares any

    def begin(self) -> None:
        """Start an empty step."""
        self._reducer.clear()
        if self.measured is not None:
            self.measured.clear()
        if self.previewing is not None:
            self._previews = self.previewing.begin()
        if self.categories is not None:
            self.categories.restart()
        if self.probing is not None:
            self.probing.drop()
        self._entries.clear()
        self._spare.clear()
        self.calls.clear()
        self.backwards.begin_step()
        self.root_calls = 0
        self.aside = False
        self.epoch += 1
        self.kpi_tensors = {}
        self.said = {}
        self.skipped = False
        self.facts = defaultdict(list)
        self.modes = {}
        self.batch_size = None
        self.cost = 0.0
        self.open = True

    def drop(self) -> None:
        """Discard the step without recording it."""
        self._reducer.clear()
        if self.probing is not None:
            self.probing.drop()
        self.open = False

    def count(self, what: object) -> int:
        """Count `what` in this step; return its previous count, which is its iteration.

        Calls without gradients are counted separately. The first iteration of a node is therefore
        the one that is trained, even if calls without gradients came before it.
        """
        key = (what, WITHOUT_GRADIENT) if self.aside else what
        number = self.calls[key]
        self.calls[key] = number + 1
        return number

    def note_mode(self, model: str, called: nn.Module, *, of_model: bool) -> None:
        """Store whether a model is in training mode when it is called."""
        if not of_model:
            return
        if self.followed and not self.aside:
            self.modes[model] = self.modes.get(model, False) or in_training(called)
        elif in_training(called) and model not in self.facts[TRAINING_WITHOUT_GRADIENT]:
            self.facts[TRAINING_WITHOUT_GRADIENT].append(model)

    def upcoming(self, what: object) -> int:
        """Return the iteration that `count` would return next, without counting."""
        return self.calls.get((what, WITHOUT_GRADIENT) if self.aside else what, 0)

    def iteration(self, what: object, name: str | Callable[[], str]) -> int | None:
        """Count a call; return its iteration, or None if the limit per step is exceeded.

        Without the limit, an optimizer closure that loops over thousands of time steps and is
        evaluated repeatedly would create tens of thousands of series.
        """
        key = (what, WITHOUT_GRADIENT) if self.aside else what
        number = self.calls[key]  # same as `count`, without the extra call for each output
        self.calls[key] = number + 1
        if self.max_iterations is None or number < self.max_iterations:
            return number
        if number == self.max_iterations:
            self.cut[name if isinstance(name, str) else name()] = None
        return None

    def in_pass(self, slot: Slot) -> Slot:
        """Return the slot for the current call: the given one, or its `no_grad` pass."""
        return slot.in_pass(WITHOUT_GRADIENT) if self.aside else slot

    def as_evaluation(self) -> None:
        """Move 'no_grad' entries to the forward pass, because the step was an evaluation."""
        taken = {slot for slot, _ in self._entries}
        self._entries = [(_forward(slot, taken), index) for slot, index in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self, slot: Slot, tensor: torch.Tensor, *, batch_dim: int | None, values: bool
    ) -> int | None:
        """Read the tensor now; return its index in this step, or None if it cannot be reduced.

        `batch_dim` is a dimension of the tensor, as returned by the `batch_dim` method.
        """
        alone = not self.reads_together
        started = time.perf_counter() if alone else 0.0
        keep = (values or self._spare_values) and self._small_enough(tensor, batch_dim)
        index = None if keep else self._reducer.add_known(tensor, batch_dim)
        if index is None:
            try:
                index = self._reducer.add_anew(tensor, batch_dim, values=keep)
            except CannotReduceError as error:
                return self._add_written_out(slot, tensor, batch_dim, values, str(error))
        if slot.id < 0 and not slot.dtype:
            slot.describe(tensor, batch_dim)
        if keep and not values:
            self._spare.add(slot)
        if self.measured is not None:
            self.measured.add(index, slot, tensor, batch_dim)
        if self._previews is not None and not (keep and values):
            self._previews.add(index, slot, tensor, batch_dim)
        self._entries.append((slot, index))
        if alone:
            self.cost += time.perf_counter() - started
        return index

    def together(self) -> AbstractContextManager[None]:
        """Read all tensors added in the context with few GPU launches; must not run user code."""
        return _Together(self, self._reducer)

    def _add_written_out(
        self, slot: Slot, tensor: torch.Tensor, dim: int | None, values: bool, why: str
    ) -> int | None:
        """Read a sparse, nested or quantised tensor as a dense one; report other types."""
        whole = ordinary(tensor)
        if whole is None:
            self.refused[f"{slot.node()} {slot.role}"] = why
            return None
        return self.add(slot, whole, batch_dim=dim, values=values)

    def batch_dim(
        self, tensor: torch.Tensor, declared: int | str | None, slot: Slot | None = None
    ) -> int | None:
        """Return the declared batch dimension, or for "auto" dim 0 if it has the batch's size.

        Once a series has started, its batch dimension is fixed. It does not change even if a later
        record has different sizes, because the statistics of the series would then change meaning.
        """
        if tensor.is_nested:
            return None
        shape = tensor.shape
        if declared != "auto":
            fits = isinstance(declared, int) and -len(shape) <= declared < len(shape)
            return declared if fits else None  # type: ignore[return-value]
        per_sample = len(shape) > 0 and shape[0] == self.batch_size
        decided = 0 if per_sample else None
        if slot is None or slot.batch_dim == decided or not slot.dtype or not shape:
            return decided  # nearly always
        if 0 in slot.shape or 0 in shape:
            return decided  # undecided for empty tensors
        self.uneven[slot.node()] = None
        return slot.batch_dim

    def _small_enough(self, tensor: torch.Tensor, dim: int | None) -> bool:
        samples = 1 if dim is None else max(1, tensor.shape[dim])
        return tensor.numel() <= samples * self._max_value_elements

    @property
    def slots(self) -> list[Slot]:
        """The recorded slots of this step, in order."""
        return [slot for slot, _ in self._entries]

    def signature(self) -> int:
        """Return a hash of the sequence of forward slots in the step that was closed last.

        Steps with the same execution path have the same hash.
        """
        return self._signature

    def close(self, info: StepInfo, table: SlotTable) -> RawStep:
        """End the step: assign ids to new slots, reduce pending tensors, return the record."""
        started = time.perf_counter()
        reduced = self._reducer.finish()
        known, new_slots = self._layouts.get((*self._entries, reduced.signature)), []
        if known is None or reduced.lost:
            new_slots = table.settle([slot for slot, _ in self._entries if slot.id < 0])
            if reduced.lost:
                self._leave_out(reduced.lost)
            known = self._new_layout(reduced)
        layout, self._signature = known
        info.batch_size = self.batch_size
        info.samples = list(range(min(self._sample_count, self.batch_size or 1)))
        step = RawStep(
            info=info,
            layout=layout,
            raw=reduced.raw,
            aggregates=reduced.aggregates,
            new_slots=new_slots,
            histogram_values=reduced.histogram_values,
            histogram_starts=reduced.histogram_starts,
            values=self._values(reduced, spare=False),
            spare_values=self._values(reduced, spare=True) if self._spare else {},
            kpi_tensors=self.kpi_tensors,
            logged=self.said,
            labels=None if self.categories is None else self.categories.take(),
            wait=reduced.wait,
        )
        if self.measured is not None:
            step.extra, settle = self.measured.finish(reduced)
            step.wait = settle if reduced.wait is None else partial(_both, reduced.wait, settle)
        if self.previewing is not None:
            info.previews, copied = self.previewing.finish(self._entries)
            if copied is not None:
                step.wait = copied if step.wait is None else partial(_both, step.wait, copied)
        self.open = False
        self.once = self._reducer.take_compiling()
        info.cost = max(self.cost + time.perf_counter() - started - self.once, 0.0)
        return step

    def _leave_out(self, lost: Collection[int]) -> None:
        for slot, index in self._entries:
            if index in lost:
                self.refused[f"{slot.node()} {slot.role}"] = OVERWRITTEN
        self._entries = [(slot, index) for slot, index in self._entries if index not in lost]
        self.kpi_tensors = {n: index for n, index in self.kpi_tensors.items() if index not in lost}

    def _new_layout(self, reduced: Reduced) -> tuple[Layout, int]:
        """Return the layout and the signature of a step whose slots all have ids."""
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        layout = Layout(
            slots=np.array([slot.id for slot, _ in self._entries], np.int32),
            tensors=np.array([index for _, index in self._entries], np.int64),
            starts=reduced.starts,
            rows=reduced.rows,
            samples=reduced.samples,
            elements=reduced.elements,
            batched=reduced.batched,
            shapes=tuple(
                # only the local part of a shard is reduced; only its first full shape is known
                None if slot.piece is not None else reduced.shapes[index]
                for slot, index in self._entries
            ),
        )
        forward = [slot.id for slot, _ in self._entries if slot.pass_ == "forward"]
        known = self._layouts[(*self._entries, reduced.signature)] = layout, hash(tuple(forward))
        return known

    def _values(self, reduced: Reduced, *, spare: bool) -> dict[int, NDArray[np.generic]]:
        kept = reduced.values
        if not kept:
            return {}
        chosen = [(s.id, i) for s, i in self._entries if i in kept and (s in self._spare) == spare]
        return {slot: kept[index] for slot, index in chosen}


class _Together:
    """The context of `StepCapture.together`; a generator would take three times as long."""

    __slots__ = ("_capture", "_reading", "_reducer", "_started")

    def __init__(self, capture: StepCapture, reducer: Reducer) -> None:
        self._capture = capture
        self._reducer = reducer

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._reading = self._reducer.together()
        self._reading.__enter__()
        self._capture.reads_together = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._capture.reads_together = False
        try:
            self._reading.__exit__(kind, error, trace)
        finally:
            self._capture.cost += time.perf_counter() - self._started


def new_capture(
    spec: Spec,
    *,
    training: bool,
    warn: Callable[[str], None],
    left: Callable[[int], float | None] = lambda _: None,
) -> StepCapture:
    """Return the capture for training steps or for evaluations.

    Args:
        spec: selects what is stored for each tensor.
        training: whether it is for training steps.
        warn: called once with the reason why a sample has no category.
        left: returns the bytes that the disk budget leaves, see `Declared.left`.
    """
    histogram = None if spec.histogram is None else spec.histogram.elements
    # values of all samples are kept until the recorded ones are chosen
    samples = spec.samples.count if spec.samples.by is None else _EVERY_SAMPLE
    capture = StepCapture(
        Reducer(histogram_elements=histogram, sample_count=samples),
        max_value_elements=spec.values.max_elements,
        sample_count=spec.samples.count,
        followed=training,
        spare_values=training and spec.keep is not None and spec.keep.values,
    )
    if spec.opt_in:
        from comgra_decl.hooks.tensors.opt_in_statistics import Measured

        refuse = capture.refused.setdefault
        capture.measured = Measured(spec.opt_in, refuse=refuse, complete=training)
    if spec.preview is not None:
        from comgra_decl.hooks.tensors.previewing import previewing

        capture.previewing = previewing(spec, refuse=capture.refused.setdefault, left=left)
    capture.categories = categories(spec.samples, warn=warn, training=training)
    return capture


def _forward(slot: Slot, taken: Container[Slot]) -> Slot:
    forward = slot.forward if slot.pass_ == WITHOUT_GRADIENT else None
    if forward is None or forward in taken:
        return slot
    forward.take_form_of(slot)
    return forward


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()
