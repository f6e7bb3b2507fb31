"""The reducer: the part of the statistics computed on the training thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Lock
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from comgra_decl.records import RAW_STATISTICS, Raw
from comgra_decl.stats.batch import Batch, strided_sample
from comgra_decl.stats.device import AWAY, DeviceStep, Fetch, Held, device_step, is_same
from comgra_decl.stats.kernel import kernel_for
from comgra_decl.stats.moments import CHUNK_ROWS, joined, moments
from comgra_decl.stats.quiet import HIDDEN_KEYS, copy_memory
from comgra_decl.stats.ring import MOST_BYTES, STEP_BYTES, Ring
from comgra_decl.stats.sums import LargeSums, Rows, compiled_at
from comgra_decl.stats.support import (
    PLAIN,
    CannotReduceError,
    as_rows,
    check,
    memory_address,
    plain,
    real,
    to_numpy,
    with_memory,
    work_dtype,
)
from comgra_decl.stats.trie import Form, Node
from comgra_decl.torch_private import (
    function_modes,
    is_functorch_wrapped,
    without_functions,
    without_keys,
)

ARENA_ELEMENTS = 32_000
"""Maximum size of a tensor that is copied and reduced later. Copying a larger one costs more than
it saves, and a row must be shorter than `batch.SERIAL_ELEMENTS`.
"""
_REMEMBERED = 4
"""Maximum number of tensors that are recognised when added again. It is small, because writes to
`.data` are not counted.
"""
_AS_USUAL = nullcontext()
MOST_NODES = 20_000
"""Maximum number of known tensor sequences. If there are more, because shapes change in every step,
all of them are dropped.
"""


@dataclass(slots=True)
class Reduced:
    """Everything captured in one step, as plain arrays; n reduced tensors, numbered by `add`.

    `raw` float64 [rows, 8] (columns `records.Raw`); tensor i owns `rows[i]` rows from `starts[i]`,
    each over `elements[i]` elements; `batched[i]` tells whether rows are samples or the whole
    tensor; `shapes[i]` is its full shape. If it has more samples than rows, `aggregates[i]` holds
    mean, std and abs-max of each statistic over all `samples[i]` of them (`moments`). Tensor i's
    histogram elements are `histogram_values[histogram_starts[i]:histogram_starts[i + 1]]` (both
    None without histograms). `values[i]`: [samples, *value dims] in the tensor's dtype, if
    requested.

    The contents of `raw`, `aggregates`, `histogram_values` and `values` are valid only after
    `wait()` if that is not None; it is idempotent and callable from any thread. The contents do not
    change afterwards. `lost` lists the tensors that were written to before they could be read. They
    have no statistics. Steps with equal `signature` share the same layout: `starts` to `shapes`,
    and `histogram_starts`.
    """

    raw: NDArray[np.float64]
    starts: NDArray[np.int64]
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    elements: NDArray[np.int64]
    batched: NDArray[np.bool_]
    shapes: Sequence[tuple[int, ...]]
    histogram_values: NDArray[np.float32] | None
    histogram_starts: NDArray[np.int64] | None
    values: dict[int, NDArray[Any]]
    aggregates: dict[int, NDArray[np.float64]]
    wait: Callable[[], None] | None
    signature: Hashable
    lost: Sequence[int] = ()


class _Seen:
    """Recognises a tensor already reduced in this step, without keeping it alive."""

    __slots__ = ("_batch_dim", "_ref", "_values", "_version", "index")

    def __init__(self, tensor: Tensor, batch_dim: int | None, values: bool, index: int) -> None:
        self._ref = ref(tensor)
        self.index = index
        # inference-mode tensors have no version counter: never recognise them
        self._version = -1 if tensor.is_inference() else tensor._version
        self._batch_dim, self._values = batch_dim, values

    def shows(self, tensor: Tensor, batch_dim: int | None, values: bool) -> bool:
        return (
            self._ref() is tensor
            and self._version >= 0
            and self._version == tensor._version
            and self._batch_dim == batch_dim
            and self._values == values
        )


_Which = tuple[int, Hashable]
"""The number of a repetition within a step, counting from 0, and the kind of its tensor."""


class _Repeats:
    """Recognises accelerator memory that was already read in this step.

    A tensor is identified by its storage, version, shape and strides. Storages are referenced
    weakly. Their memory can be freed, but as long as the reference exists, no other storage gets
    the same address.

    The version reflects only writes that torch counts. When the n-th repetition in a step occurs
    for the first time, it is therefore read again. Later steps skip the second read only if both
    reads gave the same values.
    """

    __slots__ = ("_found", "_number", "_read", "_storages", "_trusted", "trials")

    def __init__(self) -> None:
        self._trusted: dict[_Which, bool] = {}
        self.restart()

    def restart(self) -> None:
        """Start a step."""
        self.forget()
        self._number = 0
        # repetitions that were read again: which, and the numbers of both tensors
        self.trials: list[tuple[_Which, int, int]] = []

    def forget(self) -> None:
        """Forget everything read so far."""
        self._read: dict[Hashable, int] = {}
        self._storages: list[StorageWeakRef] = []
        # what `known` found: a new tensor and its storage, or a repetition and its first number
        self._found: tuple[Any, Any] | None = None

    def known(self, tensor: Tensor, kind: Hashable) -> int | None:
        """Return the number of the same tensor; None if the caller must read it and call `kept`.

        Args:
            tensor: not created in inference mode, not negated or conjugated lazily.
            kind: its shape, dtype, device and how it is reduced.
        """
        storage = tensor.untyped_storage()
        where = storage._cdata, tensor.storage_offset(), tensor.stride(), tensor._version, kind
        first = self._read.get(where)
        if first is None:
            self._found = where, storage
            return None
        which = self._number, kind
        self._number += 1
        trusted = self._trusted.get(which)
        if trusted:
            return first
        self._found = (which, first) if trusted is None else None
        return None

    def kept(self, index: int) -> None:
        """Store the number of a tensor that was read because `known` found no number for it."""
        found, self._found = self._found, None
        if found is None:
            return
        what, other = found
        if isinstance(other, int):
            self.trials.append((what, other, index))
        else:
            self._read[what] = index
            self._storages.append(StorageWeakRef(other))

    def judge(self, which: _Which, *, same: bool) -> None:
        """Store whether both reads of a repetition gave the same numbers."""
        if len(self._trusted) >= MOST_NODES:
            self._trusted.clear()
        self._trusted[which] = same and self._trusted.get(which, True)


class Reducer:
    """Turns a step's tensors into raw sums at the lowest cost for the training thread.

    Every tensor is read or copied within `add`. Later changes to it have no effect, and it is not
    kept alive. Small tensors are copied and reduced later (`ring`, `batch`). Large tensors are
    reduced immediately, on the host (`sums.LargeSums`). Tensors on an accelerator are reduced there
    (`device`). Thread-safe, because autograd uses a thread per device.

    Args:
        histogram_elements: maximum number of elements in a tensor's histogram; None: no histograms.
        sample_count: samples per tensor whose values are kept, where requested.
    """

    _host = torch.device("cpu")
    _away: tuple[str, ...] = AWAY

    def __init__(self, *, histogram_elements: int | None, sample_count: int) -> None:
        self._histogram = histogram_elements
        self._sample_count = sample_count
        self._lock = Lock()
        # reused under the lock: creating guards takes as long as entering them
        self._no_functions, self._no_keys = without_functions(), without_keys(HIDDEN_KEYS)
        self._signatures = count()
        self._large = LargeSums()
        self._ring = Ring(self._host)
        self._root = Node()
        self._nodes = 0
        self._node = self._root
        self._seen: dict[int, _Seen | Held] = {}
        self._repeats = _Repeats()
        self._devices: dict[torch.device, DeviceStep] = {}
        self._restart()

    def add(self, tensor: Tensor, *, batch_dim: int | None, values: bool = False) -> int:
        """Read a tensor of the current step; return its number within the step.

        If the same tensor is added twice, both calls may return the same number, provided that its
        version counter shows no change. This applies to calls that are close together or, on an
        accelerator, any distance apart. Examples are a tensor that both a `Sequential` and its last
        module return, and a gradient that passes unchanged through a sum.

        Args:
            tensor: real, complex (reduced by magnitude), integer or boolean; on any device.
            batch_dim: the dimension of the samples; None makes the whole tensor one sample.
            values: whether to keep the values of the first samples, too.

        Raises:
            CannotReduceError: the tensor cannot be reduced; the step continues without it.
        """
        index = None if values else self.add_known(tensor, batch_dim)
        return self.add_anew(tensor, batch_dim, values=values) if index is None else index

    def add_anew(self, tensor: Tensor, batch_dim: int | None, *, values: bool) -> int:
        """Read a tensor as `add` does, after `add_known` has returned None for it."""
        if type(tensor) not in PLAIN or is_functorch_wrapped(tensor):
            tensor = plain(tensor)
        with self._lock, self._no_functions, self._no_keys:
            seen = self._seen.get(id(tensor))
            if seen is not None and seen.shows(tensor, batch_dim, values):
                return seen.index
            try:
                key = (tensor.shape, tensor.dtype, tensor.layout, tensor.device, batch_dim, values)
            except RuntimeError as error:
                raise CannotReduceError("cannot reduce a nested tensor: no single shape") from error
            node = self._node.children.get(key) or self._grow(key, tensor)
            tensor = with_memory(tensor)
            if node.size is not None and _is_counted(tensor):
                index = self._repeats.known(tensor, key)
                if index is not None:
                    return index
            self._read(node, tensor, batch_dim, values)
            self._node = node
            return node.index

    def _read(self, node: Node, tensor: Tensor, batch_dim: int | None, values: bool) -> None:
        if values:
            self._values[node.index] = self._first_samples(node, tensor)
        if node.direct:
            node.view(self._ring.slot).copy_(tensor)
        else:
            self._reduce(node, tensor)
            self._repeats.kept(node.index)
            self._remember(tensor, _Seen(tensor, batch_dim, values, node.index))

    def _remember(self, tensor: Tensor, seen: _Seen | Held) -> None:
        if len(self._seen) >= _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._seen[id(tensor)] = seen

    def add_known(self, tensor: Tensor, batch_dim: int | None) -> int | None:
        """Read a tensor as `add` does, if an earlier step had the same one at this point.

        Most tensors in most steps are known. Reading them this way takes half the time of `add`: a
        tensor's memory is copied as bytes, or deferred on an accelerator. This calls no torch
        operation, so no mode or hook can observe it.

        Returns:
            The tensor's number; None if nothing was read, so that `add` must be called.
        """
        if type(tensor) not in PLAIN or function_modes():
            return None
        with self._lock:
            try:
                node = self._node.following
                if (  # usually the same tensor as in the last step: compare instead of hashing
                    node is None
                    or node.full != tensor.shape
                    or node.given != batch_dim
                    or node.dtype is not tensor.dtype
                    or not tensor.is_cpu
                    or tensor.layout is not torch.strided
                ):
                    device = tensor.device
                    key = (tensor.shape, tensor.dtype, tensor.layout, device, batch_dim, False)
                    node = self._node.children.get(key)
                    if node is None or is_functorch_wrapped(tensor):
                        return None
                    if not node.copied:
                        return self._put_off(node, tensor, key)
                if not tensor.is_contiguous() or tensor.is_neg():
                    return None
                source = memory_address(tensor)
                if not source or node.version != node.group.version:  # type: ignore[union-attr]
                    return None
                copy_memory(node.addresses[self._ring.slot], source, node.copied)
            except RuntimeError:  # no single shape (nested), or no memory (within a transform)
                return None
            self._node.following = self._node = node
            return node.index

    def _put_off(self, node: Node, tensor: Tensor, key: Hashable) -> int | None:
        """Defer a known tensor on an accelerator; None if it must be read immediately."""
        if node.holder is None or id(tensor) in self._seen:
            return None
        held = node.holder.hold(node, tensor)
        if held is None:
            return None
        index = self._repeats.known(tensor, key)
        if index is not None:
            node.holder.let_go(held)
            return index
        self._repeats.kept(node.index)
        self._remember(tensor, held)
        self._node = node
        return node.index

    def together(self) -> AbstractContextManager[None]:
        """Reduce tensors added in this context before other code runs; needs few GPU launches."""
        with self._lock:
            self._seen.clear()  # the program may have written to gradients, uncounted
            self._repeats.forget()
            if not self._devices:
                return _AS_USUAL
            steps = [step for step in self._devices.values() if step.launcher is not None]
        return self._in_few_launches(steps) if steps else _AS_USUAL

    @contextmanager
    def _in_few_launches(self, steps: list[DeviceStep]) -> Iterator[None]:
        with ExitStack() as stack:
            for step in steps:
                stack.enter_context(self._quietly(step))
            yield

    @contextmanager
    def _quietly(self, step: DeviceStep) -> Iterator[None]:
        with self._lock, self._no_functions, self._no_keys:
            step.begin_together()
        try:
            yield
        finally:
            with self._lock, self._no_functions, self._no_keys:
                step.end_together()

    def finish(self) -> Reduced:
        """End the step and return its results; the next `add` starts another step."""
        with self._lock, self._no_functions, self._no_keys:
            form = self._node.form or self._new_form()
            batch = self._ring.batch_for(form)
            reduced = self._collect(form, batch)
            self._ring.advance(form)
            if self._nodes > MOST_NODES or self._ring.nbytes > MOST_BYTES:
                self._ring.forget()
                self._root, self._nodes = Node(), 0
            self._restart()
            return reduced

    def take_compiling(self) -> float:
        """Return the seconds spent compiling kernels in `add` and `finish` since the last call."""
        return sum(step.take_compiling() for step in self._devices.values())

    def clear(self) -> None:
        """Drop the current step."""
        nothing = self._node is self._root and not (self._values or self._aggregates)
        if nothing and not (self._rows or self._seen or self._devices):
            return  # the last step has been finished
        with self._lock, self._no_functions, self._no_keys:
            self._restart()

    def _restart(self) -> None:
        self._node = self._root
        self._seen.clear()
        self._repeats.restart()
        self._rows: list[Rows] = []
        self._picks: dict[int, NDArray[np.float32]] = {}
        self._values: dict[int, NDArray[Any]] = {}
        self._aggregates: dict[int, NDArray[np.float64]] = {}
        for step in self._devices.values():
            step.restart()

    def _grow(self, key: Hashable, tensor: Tensor) -> Node:
        """Return a new node for a tensor not seen at this point of a step before."""
        batch_dim: int | None = key[4]  # type: ignore[index]
        check(tensor, batch_dim)
        away = tensor.device.type in self._away and self._can_reduce(tensor)
        node = Node(self._node)
        device = tensor.device if away else self._host
        node.describe(tensor, batch_dim, device=device, histogram=self._histogram)
        fused = away and self._device(tensor.device).launcher is not None
        if away:
            self._device(tensor.device).describe(node, tensor)
        if 0 < tensor.numel() <= ARENA_ELEMENTS and node.bytes < STEP_BYTES and not fused:
            self._ring.place(node, work_dtype(tensor.dtype))
            node.direct = tensor.device.type == "cpu" and not (away or tensor.is_complex())
            same = tensor.layout is torch.strided and tensor.dtype is work_dtype(tensor.dtype)
            if node.direct and same and not node.shape.batch_dim:
                node.copied = tensor.numel() * tensor.element_size()
                node.full, node.dtype, node.given = tensor.shape, tensor.dtype, batch_dim
        elif tensor.numel() and tensor.device.type == "cpu" and not (away or node.shape.batch_dim):
            node.kernel = kernel_for(tensor.dtype)
        self._node.children[key] = node
        self._nodes += 1
        return node

    def _can_reduce(self, tensor: Tensor) -> bool:
        """Whether the tensor's device supports the precision that it needs."""
        step = self._device(tensor.device)
        return step.wide is torch.float64 or work_dtype(tensor.dtype) is not torch.float64

    def _reduce(self, node: Node, tensor: Tensor) -> None:
        """Handle everything beyond a copy: other devices, complex, large or empty tensors."""
        away = None if node.device == self._host else self._device(node.device)
        if away is None and tensor.device.type != "cpu":
            tensor = tensor.cpu()  # a device without streams or float64
        if node.group is not None:
            view = node.view(self._ring.slot if away is None else 0)
            view.copy_(real(tensor))
        elif tensor.numel() == 0:
            self._empty(node, away)
        elif away is None:
            self._reduce_large(node, tensor)
        elif away.must_copy_much(tensor, node.shape.batch_dim):
            away.reduce_in_parts(node, tensor)
        else:
            away.reduce(node, as_rows(real(tensor), node.shape.batch_dim), tensor)

    def _reduce_large(self, node: Node, tensor: Tensor) -> None:
        shape, sums = node.shape, None
        rows = tensor.detach()
        if node.is_pooled:
            rows = as_rows(real(tensor), shape.batch_dim).view(shape.samples, shape.elements)
            sums = self._pool(node, rows)
        elif node.kernel is not None and tensor.is_contiguous() and not tensor.is_neg():
            sums = compiled_at(node.kernel, tensor, shape.samples, shape.elements)
        else:
            rows = as_rows(real(tensor), shape.batch_dim)
        if sums is None:
            sums = self._large(rows.view(shape.samples, shape.elements))
        if node.count:
            self._picks[node.index] = strided_sample(rows, node.stride, node.count)
        self._rows.append(sums)

    def _pool(self, node: Node, rows: Tensor) -> NDArray[np.float64]:
        """Aggregate a tensor with very many samples. Return the rows of the first ones."""
        sums = (self._large(chunk) for chunk in rows.split(CHUNK_ROWS))
        first = np.empty(0)
        parts: list[NDArray[np.float64]] = []
        for chunk in sums:
            first = first if parts else chunk[: node.kept].copy()
            parts.append(moments(chunk.T, rows.shape[1]))
        self._aggregates[node.index] = joined(np.stack(parts))
        return first

    def _empty(self, node: Node, away: DeviceStep | None) -> None:
        """Record samples without elements: all sums 0, the minimum inf and the maximum -inf."""
        sums = np.zeros((node.shape.samples, RAW_STATISTICS))
        sums[:, Raw.MIN], sums[:, Raw.MAX] = np.inf, -np.inf
        if away is None:
            self._rows.append(sums)
        else:
            away.add_rows(node, torch.from_numpy(sums).to(node.device, away.wide))

    def _device(self, device: torch.device) -> DeviceStep:
        step = self._devices.get(device)
        if step is None:
            step = self._devices[device] = device_step(device)
        step.follow()
        return step

    def _first_samples(self, node: Node, tensor: Tensor) -> NDArray[Any]:
        batch_dim = node.shape.batch_dim
        if batch_dim is None:
            first = tensor.unsqueeze(0)
        else:
            number = min(node.kept, self._sample_count)
            first = tensor.narrow(batch_dim, 0, number).movedim(batch_dim, 0)
        if node.device == self._host:
            return to_numpy(first)
        return self._device(node.device).to_host(first)

    def _new_form(self) -> Form:
        self._node.form = Form(next(self._signatures), self._node.path(), self._host)
        return self._node.form

    def _judge(
        self,
        wait: Callable[[], None] | None,
        form: Form,
        raw: Rows,
        trials: list[tuple[_Which, int, int]],
    ) -> None:
        """Wait for a step and compare the tensors that were read twice in it."""
        assert wait is not None
        wait()
        unjudged, trials[:] = trials[:], []  # `wait` may be called again
        for which, first, again in unjudged:
            one, other = (
                raw[form.starts[i] : form.starts[i] + form.kept[i]] for i in (first, again)
            )
            lost = np.isnan(one[:, Raw.PIVOT]).any()
            same = not lost and is_same(one, other, int(form.elements[first]))
            self._repeats.judge(which, same=same)

    def _collect(self, form: Form, batch: Batch) -> Reduced:
        """Assemble the step's results; some of them are still pending."""
        number = batch.finished
        raw, histogram = batch.raw[number], batch.histogram[number]
        part = form.parts[self._host]
        if self._rows:
            np.concatenate(self._rows, out=raw[part.start : part.stop])
        for index, sample in self._picks.items():
            start = form.histogram_starts[index]
            histogram[start : start + len(sample)] = sample
        fetches = [
            self._devices[device].launch(form, part)
            for device, part in form.parts.items()
            if part.nodes and device != self._host
        ]
        wait: Callable[[], None] | None = None
        if batch.deferred or fetches:
            wait = partial(_wait, batch, number, fetches, self._aggregates)
        if fetches and self._repeats.trials:
            wait = partial(self._judge, wait, form, raw, self._repeats.trials)
        has_histogram = self._histogram is not None
        return Reduced(
            raw=raw,
            starts=form.starts,
            rows=form.kept,
            samples=form.samples,
            elements=form.elements,
            batched=form.batched,
            shapes=form.shapes,
            histogram_values=histogram if has_histogram else None,
            histogram_starts=form.histogram_starts if has_histogram else None,
            values=self._values,
            aggregates=self._aggregates,
            wait=wait,
            signature=form.signature,
            lost=[index for step in self._devices.values() for index in step.lost],
        )


def _is_counted(tensor: Tensor) -> bool:
    """Whether a tensor's version counts its writes, and its memory holds its numbers."""
    return not (tensor.is_inference() or tensor.is_neg() or tensor.is_conj())


def _wait(
    batch: Batch, number: int, fetches: list[Fetch], aggregates: dict[int, NDArray[np.float64]]
) -> None:
    """Make the results of step `number` of `batch` valid."""
    batch.settle(number + 1, writer=True)
    for fetch in fetches:
        fetch.wait(batch.raw[number], batch.histogram[number], aggregates)
