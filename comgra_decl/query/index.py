"""An index of the runs below a folder, so that those that have ended need not be opened again.

The index is a Parquet file in that folder, with one line per run that has ended: what lists and
tables show about it, and by which it is recognised. It is derived from the runs and can be deleted
at any time. A line is used only while the run's database is the one that was read, and a run
without a line is opened. So an index that is missing, old or damaged changes nothing but the time.
Without pyarrow, what has been read is kept in memory only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.errors import StoreError, needed
from comgra_decl.records import SEVERITIES
from comgra_decl.store.folder import MANIFEST, read_file
from comgra_decl.store.layout import DATABASE
from comgra_decl.store.location import Location, Remote
from comgra_decl.store.plausible import check_summary
from comgra_decl.store.remote import Objects

if TYPE_CHECKING:
    from .overview import RunRow

FILE = ".comgra-index.parquet"

_log = logging.getLogger("comgra_decl")

_FORMAT = "comgra_decl index 3"
"""Stored with an index. One with another mark is ignored and replaced."""

SUMMARY = ("state", "records", "last_step", "started", "error")
"""Fields of a `RunSummary` that an index keeps: all but the location."""

_KEPT, _ROW = "_kept", "_row"
"""The columns that are read back, as JSON. The others are for people and other tools."""

_WORTH = 20
"""Number of new lines from which the file is written unasked."""

_MOST_BYTES = 256 << 20
"""Largest size of the file, and of the lines in it. A line with its row takes some 3 kB."""

_AT_ONCE = 256
"""Number of lines that are read at once."""


@dataclass(frozen=True, slots=True)
class Line:
    """What the index knows about a run that has ended.

    Attributes:
        identity: of its database, see `identity_of` and `identity_of_names`.
        ranks: the ranks in folders of their own.
        summary: fields of its `RunSummary` that are not part of its location.
        row: its row in a table of runs, which is None if it has not been computed, or that row as
            the JSON in the file: a thousand rows take a second to decode.
    """

    identity: str
    ranks: tuple[int, ...]
    summary: Mapping[str, Any]
    row: RunRow | str | None = None


class Index:
    """The lines of an index, by a run's path relative to its folder. Thread-safe.

    Args:
        place: the folder or the location in a bucket that contains the runs.

    Attributes:
        cut: why the last search for runs was incomplete; "" if it was not.
        creating: a sentence about each run that was being created when the runs were last listed.
    """

    def __init__(self, place: Location) -> None:
        self.place = place
        self.cut = ""
        self.creating: list[str] = []
        self._lines: dict[str, Line] = {}
        self._listed: dict[str, str] = {}  # identities in a bucket
        self._stamp: object = None
        self._new = 0
        self._lock = threading.Lock()
        self._mute = False  # whether the file cannot be written

    def load(self) -> None:
        """Read the file if it has changed since. Lines that are not stored yet are kept."""
        stamp = None if isinstance(self.place, Remote) else _stamp(self.place / FILE)
        with self._lock:
            if isinstance(self.place, Path) and (stamp is None or stamp == self._stamp):
                return
            if isinstance(self.place, Remote) and self._stamp is not None:
                return
            self._stamp = stamp or "read"
            for name, line in _read(self.place).items():
                known = self._lines.get(name)
                if known is None or known.identity != line.identity or known.row is None:
                    self._lines[name] = line

    def listed(self, names: Mapping[str, Iterable[str]]) -> None:
        """Take the names of all objects of each run in a bucket, by which they are recognised."""
        self._listed = {run: identity_of_names(each) for run, each in names.items()}

    def known(self, name: str) -> Line | None:
        """Return the line of a run if its database is still the one that was read."""
        with self._lock:
            line = self._lines.get(name)
        if line is None or line.identity != self.identity(name, line.ranks):
            return None
        return line

    def identity(self, name: str, ranks: Sequence[int]) -> str | None:
        """Return by what the database of a run is recognised now; None if it has none."""
        if isinstance(self.place, Remote):
            return self._listed.get(name)
        return identity_of(self.place / name, ranks)

    def put(self, name: str, line: Line) -> None:
        """Add a line, or replace it."""
        with self._lock:
            self._lines[name] = line
            self._new += 1

    def drop(self, name: str) -> None:
        """Remove the line of a run, which has changed."""
        with self._lock:
            self._lines.pop(name, None)

    def put_row(self, name: str, identity: str | None, row: RunRow) -> None:
        """Add the row of a run that has a line.

        Args:
            name: the run.
            identity: of its database before the row was computed.
            row: its row.
        """
        with self._lock:
            line = self._lines.get(name)
            if line is not None and line.identity == identity:
                self._lines[name] = replace(line, row=row)
                self._new += 1

    def row(self, name: str) -> RunRow | None:
        """Return the row of a run whose line is known; None if it has not been computed."""
        line = self.known(name)
        if line is None or line.row is None:
            return None
        if not isinstance(line.row, str):
            return line.row
        row = _decoded(line.row)
        with self._lock:
            if self._lines.get(name) is line:
                self._lines[name] = replace(line, row=row)
        return row

    def keep(self, names: Iterable[str]) -> None:
        """Drop the lines of all other runs."""
        with self._lock:
            wanted = set(names)
            self._lines = {name: line for name, line in self._lines.items() if name in wanted}

    def save(self, *, least: int = _WORTH) -> None:
        """Write the file if at least `least` lines are new.

        Nothing is written without pyarrow, or where the folder cannot be written.
        """
        with self._lock:
            if self._mute or not self._lines or self._new < least:
                return
            lines, self._new = dict(self._lines), 0
        try:
            _write(self.place, encoded(lines))
        except Exception as error:  # noqa: BLE001 - lists need no index
            self._mute = True
            _log.debug("comgra: the index of %s cannot be written: %s", self.place, error)
            return
        if isinstance(self.place, Path):
            with self._lock:
                self._stamp = _stamp(self.place / FILE)

    def write(self, to: Location, others: Mapping[str, Line]) -> str:
        """Write all lines to a file; return where it is.

        Args:
            to: the file.
            others: runs that have not ended, with an identity of "". They are in the table, but not
                read back.

        Raises:
            MissingPackageError: pyarrow is not installed.
            StoreError: the file cannot be written.
        """
        with self._lock:
            lines = {**others, **self._lines}
        try:
            _write(to.parent, encoded(lines), name=to.name)
        except OSError as error:
            raise StoreError(f"{str(to)!r} cannot be written: {error.strerror or error}") from error
        return str(to)


def identity_of(folder: Path, ranks: Sequence[int]) -> str | None:
    """Return by what the database of a run is recognised: each commit replaces its manifest.

    Args:
        folder: the run's folder.
        ranks: the ranks in folders of their own. Others that appear change the identity, too.
    """
    own = _seen(folder / DATABASE / MANIFEST)
    others = [_seen(folder / "ranks" / str(rank) / DATABASE / MANIFEST) for rank in ranks]
    if own == _ABSENT and not ranks:
        return None
    return ";".join([own, _seen(folder / "ranks"), *others])


def identity_of_names(names: Iterable[str]) -> str:
    """Return by what a run in a bucket is recognised: each commit adds an object of a new name."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


_ABSENT = "-"


def _seen(path: Path) -> str:
    try:
        found = os.lstat(path)
    except OSError:
        return _ABSENT
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return f"{found.st_ino}:{found.st_mtime_ns}:{size}"


def _stamp(path: Path) -> object:
    seen = _seen(path)
    return None if seen == _ABSENT else seen


# -- the file


def _read(place: Location) -> dict[str, Line]:
    """Return the stored lines; none if there is no file, or one that cannot be used."""
    try:
        content = _content(place)
        if content is None:
            return {}
        pyarrow, parquet = needed("pyarrow", "parquet"), needed("pyarrow.parquet", "parquet")
        file = parquet.ParquetFile(pyarrow.BufferReader(content))
        if (file.schema_arrow.metadata or {}).get(b"comgra") != _FORMAT.encode():
            return {}
        found: dict[str, Line] = {}
        size, names = 0, ("run", _KEPT, _ROW)
        for batch in file.iter_batches(_AT_ONCE, columns=[*names]):
            size += batch.nbytes  # a small file may contain a long text many times
            if size > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")
            for name, text, row in zip(*(batch.column(n).to_pylist() for n in names), strict=True):
                if text is not None:
                    found[str(name)] = _line(text, row)
        return found
    except Exception as error:  # noqa: BLE001 - whatever the file contains, runs are listed
        _log.debug("comgra: the index of %s is not used: %s", place, error)
        return {}


def _content(place: Location) -> bytes | None:
    if isinstance(place, Remote):
        return Objects(place).read(FILE, most=_MOST_BYTES)
    return read_file(place, FILE, most=_MOST_BYTES)


def _line(text: str, row: str | None) -> Line:
    found = json.loads(text)
    summary = found["summary"]
    check_summary(summary)
    checked = {field: summary[field] for field in SUMMARY}
    return Line(str(found["identity"]), tuple(map(int, found["ranks"])), checked, row)


def _decoded(row: str) -> RunRow | None:
    """Return a stored row; None if it is none."""
    from pydantic import TypeAdapter

    from .overview import RunRow

    try:
        found = TypeAdapter(RunRow).validate_python(json.loads(row))
        return found if isinstance(found.seed, str | int | float | None) else None
    except (ValueError, RecursionError):
        return None


def _write(place: Location, content: bytes, *, name: str = FILE) -> None:
    if isinstance(place, Remote):
        Objects(place).write(name, content)
        return
    new = place / f"{name}.{os.getpid()}.{threading.get_native_id()}"
    try:
        new.write_bytes(content)
        new.replace(place / name)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def encoded(lines: Mapping[str, Line]) -> bytes:
    """Return lines as a Parquet file, one row per run, oldest first.

    The columns are those of `Run` tables (`Group.overview`) with "run", the path of the run below
    the folder; they are null where a row has not been computed. Columns whose values have several
    types are JSON.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    pyarrow, parquet = needed("pyarrow", "parquet"), needed("pyarrow.parquet", "parquet")
    ordered = dict(sorted(lines.items(), key=lambda each: each[1].summary["started"] or 0.0))
    columns = {"run": pyarrow.array([*ordered], pyarrow.string())}
    for name, values in _columns(ordered).items():
        columns[name] = _typed(pyarrow, values, whole=name in _WHOLE)
    kept = [_text(line) if line.identity else None for line in ordered.values()]
    columns[_KEPT] = pyarrow.array(kept, pyarrow.string())
    columns[_ROW] = pyarrow.array(
        [_row_text(line.row) for line in ordered.values()], pyarrow.string()
    )
    table = pyarrow.table(columns).replace_schema_metadata({"comgra": _FORMAT})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def _columns(lines: Mapping[str, Line]) -> dict[str, list[Any]]:
    from .compare import differing
    from .overview import line_of

    found = {
        name: _decoded(line.row) if isinstance(line.row, str) else line.row
        for name, line in lines.items()
    }
    rows = {name: row for name, row in found.items() if row is not None}
    own = dict.fromkeys(
        key for row in rows.values() for key in row.settings if not key.startswith("spec.")
    )
    changed = dict.fromkeys([*own, *differing({n: row.settings for n, row in rows.items()})])
    flat = []
    for name, line in lines.items():
        path = Path(name)
        facts = {"name": path.name, "group": path.parent.name, **line.summary}
        row = rows.get(name)
        flat.append(facts if row is None else facts | line_of(row, changed, missing=None))
    names = dict.fromkeys(key for each in flat for key in each)
    return {name: [each.get(name) for each in flat] for name in names}


_WHOLE = ("records", "last_step", "steps", *(f"{name}s" for name in SEVERITIES))
"""Columns of whole numbers, also if all of them are missing."""


def _typed(pyarrow: Any, values: list[Any], *, whole: bool) -> Any:
    types = {type(value) for value in values} - {type(None)}
    if whole and types <= {int}:
        return pyarrow.array(values, pyarrow.int64())
    if types <= {str} or types == {bool} or types == {int}:
        with suppress(OverflowError, pyarrow.ArrowException):
            return pyarrow.array(values, pyarrow.string() if types <= {str} else None)
    if types <= {int, float}:
        return pyarrow.array([None if v is None else float(v) for v in values])
    return pyarrow.array([None if v is None else json.dumps(v, default=str) for v in values])


def _text(line: Line) -> str:
    plain = {
        "identity": line.identity,
        "ranks": list(line.ranks),
        "summary": dict(line.summary),
    }
    return json.dumps(plain, separators=(",", ":"))


def _row_text(row: RunRow | str | None) -> str | None:
    if row is None or isinstance(row, str):
        return row
    return json.dumps(asdict(row), separators=(",", ":"))
