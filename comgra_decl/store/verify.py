"""Verify a run: read everything below `head` and describe any damage.

Reads and decodes every chunk and key. The checksums of zstd and zlib detect flipped bits, and
TensorStore detects truncated files. A deleted file reads as empty bytes, which are not a valid
chunk. If anything is damaged, verification searches for the newest intact version of the database.
Data is written only once, so a version from before the damage contains everything that was
committed until then. Versions from before the last merge of files are gone (`merging.py`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import tensorstore as ts

from comgra_decl.errors import DamagedRunError

from .checks import file_of, noted_checks
from .database import Database, new_context, newest_version
from .inventory import Region, regions
from .layout import HEAD_KEY, SCALAR_BLOCK, RecordColumn, scalar_block_key, scalar_piece_key
from .location import Location, Where, location
from .merging import oldest_version
from .reader import Reader
from .scalars import MOST_BYTES, unpacked
from .sums import SumsReader
from .view import View

Progress = Callable[[str, int, int], None]
"""Called with the current action, the amount done, and the total."""

_ELEMENTS = 4 << 20
"""Number of elements per read: 16 MB of float32."""

_SPEC = re.compile(r" \[(?:tensorstore_spec|source locations)=")
_PLACE = re.compile(r'Error reading "[^"]*" in version v\d+ of OCDBT database at [^:]*: ')
_QUOTED = "cannot read "

_TABLES = {
    "notes": "notes",
    "lanes": "recorded values: their locations are lost",
    "record": "an entire record, since its facts are lost",
    "records": "entire records, since their facts are lost",
}
"""Tables that are not essential for reading a run, and what they contain."""

_MOST_LISTED = 200
"""Maximum number of damaged parts to list. If a folder is lost, a run could have a million damaged
parts."""


@dataclass(frozen=True)
class Damage:
    """An unreadable part of a run.

    Attributes:
        where: key or array.
        lost: description of the lost data.
        reason: error message of the read.
        records: first and last affected record; None if the damage does not concern records.
        steps: their steps.
        heals: whether the data is also in a block, which compaction retains.
    """

    where: str
    lost: str
    reason: str
    records: tuple[int, int] | None = None
    steps: tuple[int, int] | None = None
    heals: bool = False


@dataclass
class Verdict:
    """Result of a verification.

    Attributes:
        path: the run's folder.
        state: state of the run; None if unknown.
        records: number of records according to `head`.
        checked: number of chunks and keys read.
        damages: unreadable parts, limited to a few hundred.
        more: whether further damaged parts were found.
        version: database version that was checked, counted from 1.
        whole_version: newest version without damage; None if every version is damaged.
        whole_records: number of records in it.
        whole_step: its last training step.
    """

    path: Location
    state: str | None = None
    records: int = 0
    checked: int = 0
    damages: list[Damage] = field(default_factory=list)
    more: bool = False
    version: int | None = None
    whole_version: int | None = None
    whole_records: int | None = None
    whole_step: int | None = None

    @property
    def whole(self) -> bool:
        """Whether everything is readable."""
        return not self.damages


def verify(path: Where, *, progress: Progress | None = None) -> Verdict:
    """Read an entire run as of the call, even while the run is being written.

    Args:
        path: the run's folder, or its location in a bucket.
        progress: called with the progress.

    Raises:
        RunNotFoundError: there is no run.
        FormatError: the run has a newer format.
        StoreError: the run is in an unreachable bucket.
    """
    verdict = Verdict(location(path), version=newest_version(path))
    report = progress or _silent
    check = _Check(verdict, report)
    for damage in check.damages():
        joined = _joined(verdict.damages[-1], damage) if verdict.damages else None
        if joined is not None:
            verdict.damages[-1] = joined
        elif len(verdict.damages) == _MOST_LISTED:
            verdict.more = True
            break
        else:
            verdict.damages.append(damage)
    if check.reader is not None and verdict.whole:
        verdict.whole_version, verdict.whole_records = verdict.version, verdict.records
        verdict.whole_step = check.reader.head["step"]
    elif verdict.version is not None:
        _find_whole(verdict, report)
    return verdict


def damages_beside(run: Location) -> list[Damage]:
    """Return the damaged files next to a run's databases."""
    return [
        Damage(file_of(name), f"the verdict of {name}", why)
        for name, why in noted_checks(run).damaged.items()
    ]


def _joined(one: Damage, next_: Damage) -> Damage | None:
    """Return the union of two adjacent damaged parts; None if they are not adjacent."""
    if one.records is None or next_.records is None or one.steps is None or next_.steps is None:
        return None
    same = (one.where, one.lost, one.reason) == (next_.where, next_.lost, next_.reason)
    if not same or next_.records[0] > one.records[1] + 1:
        return None
    records = one.records[0], max(one.records[1], next_.records[1])
    return replace(one, records=records, steps=(one.steps[0], max(one.steps[1], next_.steps[1])))


class _Check:
    """Reads one version of a run in pieces."""

    def __init__(self, verdict: Verdict, progress: Progress, *, version: int | None = None) -> None:
        self._verdict = verdict
        self._progress = progress
        self._version = verdict.version if version is None else version
        self.reader: Reader | None = None

    def damages(self) -> Iterator[Damage]:
        """Yield unreadable parts."""
        # no cache, so that all data is read from disk
        context = new_context(cache_bytes=0, copy_threads=2)
        try:
            reader = Reader(self._verdict.path, version=self._version, context=context)
            view = reader.view
        except DamagedRunError as error:
            yield Damage(_key_in(error), "everything: the run cannot be opened", _reason(error))
            return
        self.reader = reader
        self._verdict.records, self._verdict.state = view.n, reader.state
        yield from self._keys(view)
        yield from _scalars(reader.database, int(reader.head.get("scalars", 0)), self._count)
        yield from self._arrays(reader.database, view)

    def _keys(self, view: View) -> Iterator[Damage]:
        """Read JSON keys that opening the run does not read."""
        for loss in view.damage:
            table = loss.partition(" ")[0]
            yield Damage(table, _TABLES.get(table, "a part of the run"), loss.partition(": ")[2])
        facts = np.unique(view.records[:, RecordColumn.FACTS]).astype(int).tolist()
        reads: list[tuple[str, Callable[[], object]]] = [
            *(
                (f"facts and values of records from {at} on", partial(view.check_json_facts, at))
                for at in facts
            ),
            *(
                (f"the document {name!r}", partial(view.read_document, name))
                for name in view.documents
            ),
            *((f"the graph {d}", partial(view.read_structure, d)) for d in view.names("structure")),
        ]
        for lost, read in reads:
            self._count(1)
            try:
                read()
            except DamagedRunError as error:
                yield Damage(_key_in(error), lost, _reason(error))

    def _arrays(self, database: Database, view: View) -> Iterator[Damage]:
        boxes = list(regions(view))
        total, done = sum(box.elements for box in boxes), 0
        handles: dict[str, ts.TensorStore] = {}
        for box in boxes:
            handle = handles.get(box.form.name)
            if handle is None:
                handle = handles[box.form.name] = database.array(box.form)
            for part in box.parts(_ELEMENTS):
                for broken, reason in _unreadable(database, handle, part, view.sums):
                    yield _described(broken, reason, view)
                self._count(part.chunks)
                done += part.elements
                self._progress("checking", done, total)

    def _count(self, pieces: int) -> None:
        self._verdict.checked += pieces


def _unreadable(
    database: Database, handle: ts.TensorStore, part: Region, sums: SumsReader | None
) -> Iterator[tuple[Region, str]]:
    """Yield the unreadable chunks of a region and the reasons."""
    try:
        data = handle[part.index].read().result()
        if sums is not None:
            sums.compare(part.form, tuple(zip(part.low, part.high, strict=True)), data)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        database.refuse_out_of_reach(error)
        if part.chunks == 1:
            yield part, _reason(error)
        else:
            for half in part.halves():
                yield from _unreadable(database, handle, half, sums)


def _described(broken: Region, reason: str, view: View) -> Damage:
    first, last = broken.low[0], min(broken.high[0], view.n) - 1
    steps = view.records[[first, last], RecordColumn.STEP].astype(int).tolist()
    family, _, form = broken.form.name.partition("/")
    slots = f"slots {broken.low[1]} to {min(broken.high[1], len(view.slots)) - 1}"
    lost = {
        "kpi": "facts and KPIs",
        "records": "facts",
        "agg": "statistics",
        "smp": "statistics of individual samples",
        "hist": "histograms",
        "raw": "values",
    }.get(family, "data")
    if family == "raw":
        slots = f"shape {form}"
    if family in ("kpi", "records"):
        slots = "records"
    use = {"row": "; curves over steps are intact", "blk": "; single steps are intact"}
    twice = view.records[first, RecordColumn.FORM] == 0 and (form != "row" or last < _edge(view))
    text = f"{lost} of {slots}" + (use.get(form, "") if twice else "")
    heals = twice and form == "row"
    return Damage(broken.form.name, text, reason, (first, last), (steps[0], steps[1]), heals)


def _edge(view: View) -> int:
    block = view.tables.forms["kpi/blk"].chunk[0]
    return view.n // block * block


def _scalars(database: Database, count: int, count_read: Callable[[int], None]) -> Iterator[Damage]:
    """Read the scalars."""
    edge = count // SCALAR_BLOCK * SCALAR_BLOCK
    keys = [scalar_block_key(at) for at in range(0, edge, SCALAR_BLOCK)]
    try:
        keys += database.keys(scalar_piece_key(edge), scalar_piece_key(count))
    except DamagedRunError as error:
        yield Damage("scalars", "logged values of the newest steps", _reason(error))
    found = 0
    for key in keys:
        count_read(1)
        try:
            value = database.read_bytes(key, most=MOST_BYTES) or b""
            found += len(unpacked(value, key if database.bound else None))
        except (DamagedRunError, ValueError, zlib.error) as error:
            yield Damage(key, "logged values (losses, KPIs)", _reason(error))
            return
    if found != count:
        reason = f"the head lists {count}, but {found} exist"
        yield Damage("scalars", "logged values (losses, KPIs)", reason)


def _key_in(error: DamagedRunError) -> str:
    """Return the key named in an error message; every message contains a key."""
    parts = str(error).split("'")
    return parts[1] if len(parts) > 2 else "head"


def _reason(error: Exception) -> str:
    """Return an error's message without the parts that the damage already contains."""
    text = str(error.args[0] if error.args else error)
    text = _PLACE.sub("", _SPEC.split(text)[0])
    return text.rpartition(_QUOTED)[2].strip() if _QUOTED in text else text


def _find_whole(verdict: Verdict, progress: Progress) -> None:
    """Find the newest intact version by bisection, as later versions include earlier data."""
    high = verdict.version or 0  # damaged
    low = oldest_version(verdict.path, high) - 1  # intact, or no longer there
    tries = max(1, (high - low).bit_length())
    at = 0
    while high - low > 1:
        middle = (low + high) // 2
        at += 1
        progress("searching for the newest intact version", min(at, tries), tries)
        if _before_all(verdict.path, middle):
            low = middle
            continue
        found = _whole(verdict.path, middle)
        low, high = (middle, high) if found is not None else (low, middle)
        if found is not None:
            verdict.whole_version, verdict.whole_records = middle, found.view.n
            verdict.whole_step = found.head["step"]


def _before_all(path: Location, version: int) -> bool:
    """Whether a version has no head yet; copies and compactions write the head last."""
    try:
        found = Database(path, new_context(cache_bytes=0), version=version).read_bytes(HEAD_KEY)
    except DamagedRunError:
        return False
    return found is None


def _whole(path: Location, version: int) -> Reader | None:
    """Open a version if it is completely readable; return None otherwise."""
    check = _Check(Verdict(path), _silent, version=version)
    return check.reader if _is_empty(check.damages()) else None


def _is_empty(items: Iterable[object]) -> bool:
    return next(iter(items), None) is None


def _silent(what: str, done: int, total: int) -> None:
    """Ignore the progress."""
