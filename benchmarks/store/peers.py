"""The same statistics in other formats: float32 [slots, columns] per recorded step."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.store.data import Numbers, Size, write
from comgra_decl.store import Reader

Table = NDArray[np.float32]
BLOCK = 64
_SHARE = 50  # formats with a file per step: a series reads every fiftieth file, times fifty


@dataclass
class Peer:
    """Readers of a written store: one step, and one column of one slot over some steps."""

    step: Callable[[int], Any]
    series: Callable[[int, int], Any]
    extrapolated: bool = False


def ours(folder: Path, size: Size) -> Peer:
    """A run of comgra_decl; the size determines the records per commit."""
    write(folder / "run", size)
    view = Reader(folder / "run").view
    return Peer(lambda r: view.row("agg", r), lambda s, c: view.series("agg", s, c))


def msgpack_files(folder: Path, size: Size) -> Peer:
    """The format of comgra: a msgpack file per step, one row of nine fields per number."""
    import msgpack  # type: ignore[import-untyped,unused-ignore]

    names = [f"node__blocks.{slot}" for slot in range(size.slots)]
    for record, table in _steps(size):
        rows = [
            ("train", "batch", 0, name, "forward", "mean", column, 0, float(value))
            for name, line in zip(names, table, strict=True)
            for column, value in enumerate(line)
        ]
        (folder / f"{record}.msgpack").write_bytes(msgpack.packb({record: rows}))

    def step(record: int) -> Any:
        return msgpack.unpackb((folder / f"{record}.msgpack").read_bytes(), strict_map_key=False)

    return Peer(step, _sampled(step, size), extrapolated=True)


def torch_files(folder: Path, size: Size) -> Peer:
    """A dictionary of tensors per step, saved by `torch.save`."""
    import torch

    for record, table in _steps(size):
        tensors = {str(slot): torch.from_numpy(line.copy()) for slot, line in enumerate(table)}
        torch.save(tensors, folder / f"{record}.pt")

    def step(record: int) -> Any:
        return torch.load(folder / f"{record}.pt", weights_only=True)

    return Peer(step, _sampled(step, size), extrapolated=True)


def zarr_append(folder: Path, size: Size) -> Peer:
    """zarr-python: a growing array with chunks of 64 steps."""
    import zarr

    first = next(_steps(size))[1]
    array: Any = zarr.create_array(
        folder / "a.zarr", shape=(0, *first.shape), chunks=(BLOCK, 64, first.shape[1]), dtype="f4"
    )
    for _, table in _steps(size):
        array.append(table[None])
    return Peer(lambda r: array[r], lambda s, c: array[:, s, c])


def hdf5(folder: Path, size: Size) -> Peer:
    """h5py in single-writer multiple-reader mode, flushed after every step."""
    import h5py  # type: ignore[import-untyped,unused-ignore]

    first = next(_steps(size))[1]
    file = h5py.File(folder / "a.h5", "w", libver="latest")
    data = file.create_dataset(
        "a", (0, *first.shape), "f4", maxshape=(None, *first.shape), chunks=(BLOCK, 64, 1)
    )
    file.swmr_mode = True
    for record, table in _steps(size):
        data.resize(record + 1, 0)
        data[record] = table
        data.flush()
    return Peer(lambda r: data[r], lambda s, c: data[:, s, c])


def sqlite(folder: Path, size: Size) -> Peer:
    """SQLite, durable, a transaction per step; blobs for the step and for blocks of columns."""
    base = sqlite3.connect(folder / "a.db")
    base.executescript(
        "pragma journal_mode=wal; pragma synchronous=full;"
        "create table row(step integer primary key, data blob);"
        "create table blk(column integer, block integer, data blob, primary key(column, block));"
    )
    pending: list[Table] = []
    for record, table in _steps(size):
        base.execute("insert into row values(?, ?)", (record, table.tobytes()))
        pending.append(table)
        if len(pending) == BLOCK:
            block = np.stack(pending)
            lines = [(c, record // BLOCK, block[:, :, c].tobytes()) for c in range(block.shape[2])]
            base.executemany("insert into blk values(?, ?, ?)", lines)
            pending.clear()
        base.commit()

    def series(slot: int, column: int) -> Any:
        found = base.execute("select data from blk where column=? order by block", (column,))
        blocks = [np.frombuffer(b, np.float32).reshape(BLOCK, -1)[:, slot] for (b,) in found]
        return np.concatenate(blocks)

    def step(record: int) -> Any:
        (blob,) = base.execute("select data from row where step=?", (record,)).fetchone()
        return np.frombuffer(blob, np.float32)

    return Peer(step, series)


PEERS: dict[str, Callable[[Path, Size], Peer]] = {
    "comgra_decl": ours,
    "comgra's msgpack": msgpack_files,
    "torch.save": torch_files,
    "zarr-python": zarr_append,
    "HDF5": hdf5,
    "SQLite": sqlite,
}


def measure(name: str, folder: Path, size: Size) -> dict[str, Any]:
    """Write and read one format; return milliseconds per written step and per read."""
    folder.mkdir(parents=True)
    for _ in _steps(size):
        pass
    start = time.perf_counter()
    for _ in _steps(size):
        pass
    making = time.perf_counter() - start  # generates the numbers; not part of writing
    start = time.perf_counter()
    peer = PEERS[name](folder, size)
    writing = max(0.0, time.perf_counter() - start - making)
    files = [path for path in folder.rglob("*") if path.is_file()]
    stored = sum(path.stat().st_size for path in files)
    rng = np.random.default_rng(0)
    return {
        "name": name,
        "write": 1e3 * writing / size.records,
        "ratio": stored / size.raw_bytes,
        "files": len(files),
        "step": _median(lambda: peer.step(int(rng.integers(size.records))), 20),
        "series": _median(lambda: peer.series(int(rng.integers(size.slots)), 3), 3),
        "extrapolated": peer.extrapolated,
    }


def _median(read: Callable[[], Any], count: int) -> float:
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        found = read()
        scale = found.scale if isinstance(found, _Part) else 1
        spent.append(1e3 * scale * (time.perf_counter() - start))
    return float(np.median(spent))


@dataclass
class _Part:
    scale: int


def _sampled(step: Callable[[int], Any], size: Size) -> Callable[[int, int], _Part]:
    """Read a series from one file per step, extrapolating from some of the files."""

    def series(_slot: int, _column: int) -> _Part:
        for record in range(0, size.records, _SHARE):
            step(record)
        return _Part(_SHARE)

    return series


def _steps(size: Size) -> Iterator[tuple[int, Table]]:
    numbers = Numbers(size.slots)
    for record in range(size.records):
        yield record, numbers.take(record, 1)[0]
