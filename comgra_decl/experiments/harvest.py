"""Store the activations of a data set: one array per module, with a row for each position.

The arrays are zarr v3 and are written with TensorStore. `harvest.json` states what is in them. It
is replaced after each block of rows, so that a harvest that was interrupted can go on.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import ml_dtypes
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from comgra_decl.errors import HarvestError, UnknownNameError, did_you_mean, shown
from comgra_decl.spec.nodes import Selectors
from comgra_decl.spec.selectors import is_selected, misses
from comgra_decl.store.locking import taken_if_free

if TYPE_CHECKING:
    import torch
    from torch import nn

FILE = "harvest.json"
LOCK = "harvest.lock"
"""The file that names the process that is harvesting."""

ORIGINS = "@origins"
"""The array with the number of the batch, the sample and the position of each row, [rows, 3]."""

_ROOT = "@model"
"""The array of the model itself, whose path is "". Other names do not contain `@`."""

_BLOCK_BYTES = 8 << 20
_FEWEST, _MOST = 256, 65_536
"""Rows of a block, which is written and read at once."""

_WINDOW = 8
"""Blocks that are shuffled together."""

Rows = slice | Sequence[int] | NDArray[Any] | None
"""A slice, numbers of rows, a bool mask, or None for all rows."""

_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass
class _State:
    """The content of `harvest.json`.

    Attributes:
        nodes: the number of features of each module, in the order of the model.
        dtype: the dtype of the arrays.
        role: "output" or "input".
        features: the dim of the activations that becomes the columns.
        block: rows of a block.
        rows: rows that can be read.
        batch: the batch that contains the next row, and how many of its rows are stored.
        complete: whether the data set has no more rows.
    """

    nodes: dict[str, Annotated[int, Field(ge=1)]]
    dtype: str
    role: str
    features: int
    block: Annotated[int, Field(ge=1)]
    rows: Annotated[int, Field(ge=0)] = 0
    batch: tuple[int, int] = (0, 0)
    complete: bool = False

    def save(self, folder: Path) -> None:
        draft = folder / f"{FILE}.draft"
        draft.write_text(json.dumps(asdict(self), indent=1))
        draft.replace(folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> _State:
        """Return the state of a folder.

        Raises:
            HarvestError: it contains no harvest.
        """
        try:
            return TypeAdapter(cls).validate_json((folder / FILE).read_text())
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise HarvestError(f"{folder} contains no harvest ({why})") from None


class Harvest:
    """The activations of a data set, as `comgra.open_harvest` returns them.

    Attributes:
        path: the folder.
        rows: the number of rows.
        nodes: the number of features of each module.
        complete: whether the data set had no more rows.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        state = _State.load(self.path)
        self.rows, self.nodes, self.complete = state.rows, dict(state.nodes), state.complete
        self._block, self.dtype = state.block, state.dtype
        self._arrays: dict[str, ts.TensorStore] = {}

    def __repr__(self) -> str:
        nodes = ", ".join(f"{node} {size}" for node, size in self.nodes.items())
        return f"<Harvest of {self.rows} rows, {self.dtype}: {nodes}>"

    def read(self, node: str, rows: Rows = None) -> NDArray[Any]:
        """Return rows of a module, [rows, features]; bfloat16 is that of ml_dtypes.

        Args:
            node: path of the module.
            rows: a slice, numbers of rows, or a bool mask; by default, all.

        Raises:
            UnknownNameError: the module was not harvested.
            IndexError: there is no such row.
        """
        return self._read(self._array(node), rows)

    def origins(self, rows: Rows = None) -> NDArray[np.int64]:
        """Return the number of the batch, the sample and the position of rows, [rows, 3].

        Args:
            rows: a slice or numbers of rows; by default, all.
        """
        return self._read(_open(self.path, ORIGINS), rows)

    def _read(self, array: ts.TensorStore, rows: Rows) -> NDArray[Any]:
        chosen = slice(0, self.rows) if rows is None else rows
        if isinstance(chosen, slice):
            begin, end, step = chosen.indices(self.rows)
            if step != 1:
                return np.asarray(array[np.arange(begin, end, step)].read().result())
            return np.asarray(array[begin : max(begin, end)].read().result())
        places = np.asarray(chosen)
        if places.dtype == bool:
            if places.shape != (self.rows,):
                raise IndexError(f"the mask has the shape {places.shape}, not ({self.rows},)")
            places = np.flatnonzero(places)
        places = places.astype(np.int64)
        if places.size and not -self.rows <= places.min() <= places.max() < self.rows:
            raise IndexError(f"there are rows 0 to {self.rows - 1}, got {places.tolist()[:5]}")
        return np.asarray(array[places % max(self.rows, 1)].read().result())

    def batches(
        self, node: str, size: int, *, shuffle: int | None = None
    ) -> Iterator[NDArray[Any]]:
        """Yield all rows of a module in batches, [size, features]; the last one may be smaller.

        The next blocks are read while a batch is used.

        Args:
            node: path of the module.
            size: rows in a batch.
            shuffle: a seed; None keeps the order. Blocks are drawn at random, and the rows of eight
                blocks are shuffled together.
        """
        if size < 1:
            raise HarvestError(f"size must be at least 1, got {size}")
        array = self._array(node)
        starts = np.arange(0, self.rows, self._block)
        random = None if shuffle is None else np.random.default_rng(shuffle)
        if random is not None:
            random.shuffle(starts)
        together = 1 if random is None else _WINDOW
        windows = [starts[i : i + together] for i in range(0, len(starts), together)]
        reading: deque[list[Any]] = deque()
        rest: NDArray[Any] | None = None
        for number in range(len(windows) + 1):
            if number < len(windows):
                reading.append([self._reading(array, int(start)) for start in windows[number]])
            if number == 0:
                continue
            rows = np.concatenate([future.result() for future in reading.popleft()])
            if random is not None:
                random.shuffle(rows)
            rows = rows if rest is None else np.concatenate([rest, rows])
            whole = len(rows) // size * size
            for begin in range(0, whole, size):
                yield rows[begin : begin + size]
            rest = rows[whole:]
        if rest is not None and len(rest):
            yield rest

    def _reading(self, array: ts.TensorStore, start: int) -> Any:
        return array[start : min(start + self._block, self.rows)].read()

    def _array(self, node: str) -> ts.TensorStore:
        if node not in self.nodes:
            hint = did_you_mean(node, self.nodes) or "."
            there = ", ".join(map(repr, self.nodes))
            raise UnknownNameError(f"{shown(node)} was not harvested{hint} There are {there}.")
        if node not in self._arrays:
            self._arrays[node] = _open(self.path, node)
        return self._arrays[node]


def harvest(
    model: nn.Module,
    batches: Iterable[Any],
    path: str | Path,
    *,
    select: Any,
    role: str = "output",
    rows: int | None = None,
    mask: Callable[[Any], torch.Tensor] | str | None = None,
    dtype: str | None = None,
    features: int = -1,
) -> Harvest:
    """Run a model on a data set and store the activations of modules.

        >>> comgra.harvest(model, loader, "activations", select="blocks.*", rows=1_000_000)
        <Harvest of 1000000 rows, float32: blocks.0 768, blocks.1 768>

    The model is called without gradients and is otherwise left as it is: call `model.eval()` first.
    All dims of an activation except `features` become rows, sample by sample. If a module is called
    several times in a pass, its first call counts.

    If the folder already contains a part of the same harvest, it goes on where that part ends: the
    batches before are skipped, so the data set must have the same order.

    Args:
        model: the model.
        batches: the data set. A tensor is passed as `model(batch)`, a mapping as `model(**batch)`,
            a tuple or list as `model(*batch)`.
        path: the folder to create or to continue.
        select: the modules, as in `nodes` of the spec: globs over paths, or mappings.
        role: "output", the first floating-point tensor in the output; or "input".
        rows: the largest number of rows; by default, all.
        mask: which rows to keep: a function of the batch that returns a bool tensor with the dims
            of the activations except `features`, or the key of such a tensor in each batch, such as
            "attention_mask".
        dtype: "bfloat16", "float16", "float32" or "float64"; by default, that of the activations.
        features: the dim of the activations that becomes the columns; 1 for convolutions.

    Raises:
        HarvestError: an argument is invalid, nothing is selected, activations do not fit together
            or to the folder, a module returns no floating-point tensor, or another process is
            harvesting into the folder.
    """
    _check_arguments(role=role, dtype=dtype, rows=rows)
    given: object = batches
    if not isinstance(given, Iterable):
        raise HarvestError(f"batches must be a data loader or a list, got {shown(batches)}")
    folder = Path(path)
    modules = _selected(model, select)
    if folder.exists() and not folder.is_dir():
        raise HarvestError(f"{folder} is a file, not a folder")
    kind = {"nodes": [*modules], "role": role, "dtype": dtype, "features": features}
    if _existing(folder, rows=rows, **kind)[1]:
        return Harvest(folder)
    with _alone(folder):
        state, done = _existing(folder, rows=rows, **kind)
        if not done:
            _harvest(model, batches, folder, state, modules, mask=mask, rows=rows, kind=kind)
        return Harvest(folder)


def _existing(folder: Path, *, rows: int | None, **kind: Any) -> tuple[_State | None, bool]:
    """Return what a folder contains of a harvest, and whether that is all of it."""
    state = _State.load(folder) if (folder / FILE).exists() else None
    if state is None:
        if folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
            raise HarvestError(
                f"{folder} is not empty and contains no harvest; choose another folder"
            )
        return None, False
    _check(state, folder, **kind)
    return state, state.complete or (rows is not None and state.rows >= rows)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from harvesting into a folder, which is created if necessary.

    The lock ends with the process. A data loader's processes may outlive it by seconds and hold the
    lock, so that the process that has it is looked up, too.
    """
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / LOCK
    with taken_if_free(folder) as free:
        if not free and (holder := _living(note)) is not None:
            raise HarvestError(
                f"{folder} is being harvested by {holder}. Wait until it ends, or choose another "
                "folder"
            )
        note.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        try:
            yield
        finally:
            note.unlink(missing_ok=True)
            if created:
                with suppress(OSError):  # it contains a harvest
                    folder.rmdir()


def _living(note: Path) -> str | None:
    """Return the process that holds a lock; None if it has ended."""
    try:
        found = json.loads(note.read_text())
        pid, host = int(found["pid"]), str(found["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which is about to write the note, or to remove it
    if pid <= 0:  # a group of processes
        return None
    if host != socket.gethostname():
        return f"process {pid} on {host}"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:  # of another user
        pass
    return f"process {pid}"


def _harvest(
    model: nn.Module,
    batches: Iterable[Any],
    folder: Path,
    state: _State | None,
    modules: Mapping[str, nn.Module],
    *,
    mask: Callable[[Any], torch.Tensor] | str | None,
    rows: int | None,
    kind: Mapping[str, Any],
) -> None:
    """Run the model on the batches that are not stored yet."""
    role, dtype, features = kind["role"], kind["dtype"], kind["features"]
    first = (0, 0) if state is None else state.batch
    writer = None if state is None else _Writer(folder, state, most=rows)
    for number, batch in enumerate(batches):
        if number < first[0]:
            continue
        if batch is None or isinstance(batch, (str, bytes, bool, int, float)):
            raise HarvestError(
                f"batch {number} is {shown(batch)}, not a tensor, or a tuple or mapping of tensors"
            )
        found = _called(model, modules, batch, role)
        table, index = _rows(found, number, features=features, mask=_mask_of(mask, batch))
        if writer is None:
            state = _described(table, role=role, dtype=dtype, features=features)
            writer = _Writer(folder, state, most=rows)
        if writer.add(number, table, index, skip=first[1] if number == first[0] else 0):
            writer.end(complete=False)
            return
    if writer is None:
        raise HarvestError("the data set has no batch")
    writer.end(complete=True)


def _check_arguments(*, role: str, dtype: str | None, rows: Any) -> None:
    if role not in ("output", "input"):
        raise HarvestError(f"role must be 'output' or 'input', got {role!r}")
    if dtype is not None and dtype not in _DTYPES:
        raise HarvestError(f"dtype must be one of {', '.join(map(repr, _DTYPES))}, got {dtype!r}")
    if rows is not None and (not isinstance(rows, int) or rows < 1):
        raise HarvestError(f"rows must be a whole number of at least 1, got {rows!r}")


def open_harvest(path: str | Path) -> Harvest:
    """Open a harvest, finished or not.

    Raises:
        HarvestError: the folder contains no harvest.
    """
    return Harvest(path)


# -- running the model -------------------------------------------------------------------------


def _selected(model: nn.Module, select: Any) -> dict[str, nn.Module]:
    from comgra_decl.hooks.plans import facts_of

    try:
        selectors = TypeAdapter(Selectors).validate_python(select)
    except ValidationError as error:
        why = "; ".join(each["msg"] for each in error.errors())
        raise HarvestError(f"select: {why}, got {select!r}") from None
    modules = dict(model.named_modules())
    facts = [facts_of(path, module) for path, module in modules.items()]
    found = {f.path: modules[f.path] for f in facts if is_selected(selectors, f)}
    if not found:
        why = "; ".join(misses("select", selectors, facts)) or "select: matches no module"
        raise HarvestError(why)
    return found


def _called(
    model: nn.Module, modules: Mapping[str, nn.Module], batch: Any, role: str
) -> dict[str, torch.Tensor]:
    """Return the activation of each module in one call of the model."""
    import torch

    found: dict[str, torch.Tensor] = {}
    args, kwargs = _arguments(batch)
    with _hooked(modules, role, found), torch.no_grad():
        model(*args, **kwargs)
    for path in modules:
        if path not in found:
            raise HarvestError(f"{path!r} was not called, or has no floating-point {role}")
    return {path: found[path] for path in modules}


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


@contextmanager
def _hooked(
    modules: Mapping[str, nn.Module], role: str, found: dict[str, torch.Tensor]
) -> Iterator[None]:
    from comgra_decl.hooks.pytree import tensors_in

    own = get_ident()

    def keep(path: str, value: Any) -> None:
        if get_ident() != own:  # another thread uses the model as well
            return
        tensors = (tensor for _, tensor in tensors_in(value))
        first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if first is not None and path not in found:
            found[path] = first.detach().clone()  # the next module may change it in place

    def before(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs: keep(path, (args, kwargs))

    def after(path: str) -> Callable[..., None]:
        return lambda _, __, output: keep(path, output)

    handles = [
        module.register_forward_pre_hook(before(path), with_kwargs=True)
        if role == "input"
        else module.register_forward_hook(after(path))
        for path, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mask_of(mask: Callable[[Any], torch.Tensor] | str | None, batch: Any) -> Any:
    if mask is None:
        return None
    if callable(mask):
        return mask(batch)
    if not isinstance(batch, Mapping) or mask not in batch:
        raise HarvestError(f"a batch has no {mask!r}, which `mask` names")
    return batch[mask]


def _rows(
    found: Mapping[str, torch.Tensor], number: int, *, features: int, mask: Any
) -> tuple[dict[str, torch.Tensor], NDArray[np.int64]]:
    """Return the rows of each module, [rows, features], and their origins, [rows, 3]."""
    import torch

    table: dict[str, torch.Tensor] = {}
    places: tuple[int, ...] | None = None
    where = ""
    for path, value in found.items():
        if features in (0, -value.dim()):
            raise HarvestError(f"{path!r}: dim {features} contains the samples, not features")
        if not -value.dim() <= features < value.dim() or value.dim() < 2:
            raise HarvestError(f"{path!r} has the shape {list(value.shape)}: no dim {features}")
        value = value.movedim(features, -1)
        shape = tuple(value.shape[:-1])
        if places is not None and shape != places:
            raise HarvestError(
                f"{path!r} has rows of the shape {list(shape)}, but {where!r} of {list(places)}; "
                "harvest them separately"
            )
        places, where = shape, path
        table[path] = value.reshape(-1, value.shape[-1])
    assert places is not None  # at least one module is selected
    kept = np.arange(int(np.prod(places)))
    if mask is not None:
        chosen = torch.as_tensor(mask)
        if chosen.is_floating_point():
            raise HarvestError("the mask must contain bools or whole numbers, got floats")
        if tuple(chosen.shape) != places:
            raise HarvestError(
                f"the mask has the shape {list(chosen.shape)}, but there are rows of {list(places)}"
            )
        flags = chosen.bool().reshape(-1)
        kept = np.flatnonzero(flags.cpu().numpy())
        table = {path: value[flags.to(value.device)] for path, value in table.items()}
    positions = int(np.prod(places[1:]))
    origin = [np.full(len(kept), number), kept // positions, kept % positions]
    return table, np.stack(origin, axis=1).astype(np.int64)


# -- writing -----------------------------------------------------------------------------------


def _check(
    state: _State,
    folder: Path,
    *,
    nodes: list[str],
    role: str,
    dtype: str | None,
    features: int,
) -> None:
    """Raise HarvestError if a folder contains another harvest."""
    asked = {"modules": nodes, "role": role, "features": features}
    there = {"modules": [*state.nodes], "role": state.role, "features": state.features}
    if dtype is not None:
        asked, there = asked | {"dtype": dtype}, there | {"dtype": state.dtype}
    for name, value in asked.items():
        if value != there[name]:
            raise HarvestError(
                f"{folder} contains a harvest with {name} {there[name]}, not {value}; choose "
                "another folder"
            )


class _Writer:
    """Collects rows and writes them in blocks; the next block is collected meanwhile.

    Args:
        folder: the folder.
        state: what it contains, or will contain.
        most: the largest number of rows.
    """

    def __init__(self, folder: Path, state: _State, *, most: int | None) -> None:
        self._folder, self._state, self._most = folder, state, most
        if not (folder / FILE).exists():
            folder.mkdir(parents=True, exist_ok=True)
            for node, size in state.nodes.items():
                _create(folder, node, state.dtype, size, state.block)
            _create(folder, ORIGINS, "int64", 3, state.block)
            state.save(folder)
        self._arrays = {n: _resized(_open(folder, n), _LARGE) for n in [*state.nodes, ORIGINS]}
        self._held: dict[str, list[NDArray[Any]]] = {node: [] for node in self._arrays}
        self._count = self._begun = state.rows  # rows taken so far, and handed to TensorStore
        self._origins: list[tuple[int, int, int]] = []  # row, its batch, its number in the batch
        self._writing: list[Any] = []

    def add(
        self,
        number: int,
        table: Mapping[str, torch.Tensor],
        index: NDArray[np.int64],
        *,
        skip: int,
    ) -> bool:
        """Take the rows of a batch; return whether there are enough.

        Args:
            number: the number of the batch.
            table: rows of each module, [rows, features].
            index: the origin of each row, [rows, 3].
            skip: how many of the rows are stored already.
        """
        state, end = self._state, len(index)
        if skip > end:
            raise HarvestError(
                f"batch {number} has {end} rows, but {skip} of it are stored: the data set is not "
                "the one with which this harvest began"
            )
        if self._most is not None:
            end = min(end, skip + self._most - self._count)
        for node, value in table.items():
            if value.shape[1] != state.nodes[node]:
                raise HarvestError(
                    f"{node!r} has {value.shape[1]} features, but {state.nodes[node]} before"
                )
            self._held[node].append(_array_of(value[skip:end], state.dtype))
        self._held[ORIGINS].append(index[skip:end])
        self._origins.append((self._count, number, skip))
        self._count += max(0, end - skip)
        while self._count - self._begun >= (take := state.block - self._begun % state.block):
            self._write(take)
        return self._most is not None and self._count >= self._most

    def _write(self, rows: int) -> None:
        self._settle()
        begin, end = self._begun, self._begun + rows
        for node, array in self._arrays.items():
            whole = np.concatenate(self._held[node])
            self._held[node] = [whole[rows:]]
            # Nothing writes to `whole`, so that it need not be copied once more.
            write = array[begin:end].write(
                whole[:rows], can_reference_source_data_indefinitely=True
            )
            self._writing.append(write)
        self._begun = end

    def _settle(self) -> None:
        """Wait for the block that is being written, and state that it can be read."""
        if not self._writing:
            return
        for future in self._writing:
            future.result()
        self._writing = []
        self._state.rows = end = self._begun
        row, number, skip = next(o for o in reversed(self._origins) if o[0] <= end)
        self._state.batch = number, skip + end - row
        self._origins = [o for o in self._origins if o[0] >= row]
        self._state.save(self._folder)

    def end(self, *, complete: bool) -> None:
        """Write the rest."""
        if self._count > self._begun:
            self._write(self._count - self._begun)
        self._settle()
        for array in self._arrays.values():
            _resized(array, self._state.rows)
        self._state.complete = complete
        self._state.save(self._folder)


def _described(
    table: Mapping[str, torch.Tensor], *, role: str, dtype: str | None, features: int
) -> _State:
    """Return the state of a new harvest whose first batch has these rows."""
    own = str(next(iter(table.values())).dtype).removeprefix("torch.")
    kind = dtype or (own if own in _DTYPES else "float32")
    sizes = {node: int(value.shape[1]) for node, value in table.items()}
    rows = _BLOCK_BYTES // max(1, max(sizes.values()) * _numpy(kind).itemsize)
    block = min(max(1 << max(rows.bit_length() - 1, 0), _FEWEST), _MOST)
    return _State(sizes, kind, role, features, block)


def _numpy(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _array_of(value: torch.Tensor, dtype: str) -> NDArray[Any]:
    """Return the values as an array, which may share the memory of `value`."""
    import torch

    value = value.to("cpu", getattr(torch, dtype)).contiguous()
    if dtype == "bfloat16":
        return value.view(torch.int16).numpy().view(_numpy(dtype))
    return value.numpy()


# -- arrays ------------------------------------------------------------------------------------

_LARGE = 1 << 40
"""Rows of an array while it is written."""


def _name(node: str) -> str:
    """Return the name of an array's folder; that of a module may contain any character."""
    return node if node == ORIGINS else quote(node, safe="") or _ROOT


def _open(folder: Path, node: str) -> ts.TensorStore:
    return ts.open(_spec(folder, node), open=True).result()


def _resized(array: ts.TensorStore, rows: int) -> ts.TensorStore:
    # Metadata only: otherwise, TensorStore looks for every block that may have to be deleted.
    return array.resize(exclusive_max=[rows, None], resize_metadata_only=True).result()


def _spec(folder: Path, node: str) -> dict[str, Any]:
    path = str((folder / _name(node)).absolute())
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}, "context": _CONTEXT}


_CONTEXT = {"file_io_sync": False}
"""A block is not forced to the disk: a harvest survives a kill, but not a power cut."""


def _create(folder: Path, node: str, dtype: str, size: int, block: int) -> None:
    metadata = {
        "shape": [_LARGE, size],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [block, size]}},
        "dimension_names": ["row", "feature"],
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    ts.open({**_spec(folder, node), "metadata": metadata}, create=True).result()
