"""Append-only tables of JSON rows, one of which stores interned names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from comgra_decl.records import Normalised, Piece, SlotInfo, SlotKey

from .commit import Commit
from .layout import log_key

_ROWS_OF_KEY = 100_000
"""Maximum number of rows per key, because readers reject keys that are too large."""


class Stage(Protocol):
    """Writer state changed by a commit; final only after the commit has succeeded."""

    def accept(self) -> None:
        """Make the staged state final."""

    def discard(self) -> None:
        """Revert the staged state after a failed commit, which will be retried."""


class Log:
    """Writer side of a table: rows are staged, flushed in a transaction, then accepted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self._staged: list[Any] = []

    def stage(self, row: Any) -> int:
        """Stage a row for the next commit. Return its number."""
        self._staged.append(row)
        return self.count + len(self._staged) - 1

    def flush(self, commit: Commit) -> int:
        """Write the staged rows. Return the row count after the commit."""
        for first in range(0, len(self._staged), _ROWS_OF_KEY):
            rows = self._staged[first : first + _ROWS_OF_KEY]
            commit.put_json(log_key(self.name, self.count + first), rows)
        return self.count + len(self._staged)

    def accept(self) -> None:
        """Mark the staged rows as written."""
        self.count += len(self._staged)
        self._staged = []

    def discard(self) -> None:
        """Drop the staged rows of a failed commit; the retry stages them again."""
        self._staged = []


class Names:
    """Interned strings (types, modes, structures, KPIs); each name's code is its table index."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._codes: dict[str, dict[str, int]] = {}
        self._staged: list[tuple[str, str]] = []

    def resume(self, names: Mapping[str, Sequence[str]]) -> None:
        """Restore the names of a resumed run, by table."""
        self._codes = {
            table: {name: code for code, name in enumerate(rows)} for table, rows in names.items()
        }

    def code(self, table: str, name: str) -> int:
        """Return the code of a name; stage new names."""
        codes = self._codes.setdefault(table, {})
        known = codes.get(name)
        if known is not None:
            return known
        self._log.stage([table, name])
        self._staged.append((table, name))
        codes[name] = len(codes)
        return codes[name]

    def codes(self, table: str, names: Iterable[str]) -> list[int]:
        """Return the code of each name; stage new names."""
        known = self._codes.setdefault(table, {})
        return [known[name] if name in known else self.code(table, name) for name in names]

    def size(self, table: str) -> int:
        """Return the number of names in a table."""
        return len(self._codes.get(table, ()))

    def accept(self) -> None:
        """Mark the staged names as written."""
        self._staged = []

    def discard(self) -> None:
        """Remove the names staged by the failed commit."""
        for table, name in self._staged:
            del self._codes[table][name]
        self._staged = []


class Facts:
    """JSON facts of records, stored only when they change, which is rare."""

    def __init__(self) -> None:
        self.first = 0  # number of the record under which the current facts are stored
        self._last: dict[str, Any] | None = None
        self._before: tuple[int, dict[str, Any] | None] = (0, None)

    def stage(self, record: int, runs: dict[str, list[list[Any]]]) -> bool:
        """Stage run-length encoded facts from `record` on. Return whether to store them."""
        self._before = (self.first, self._last)
        starts = {name: run[0][1] for name, run in runs.items()}
        if starts == self._last and all(len(run) == 1 for run in runs.values()):
            return False
        self.first, self._last = record, {name: run[-1][1] for name, run in runs.items()}
        return True

    def accept(self) -> None:
        """Mark the staged facts as written."""
        self._before = (self.first, self._last)

    def discard(self) -> None:
        """Revert the staged facts after a failed commit."""
        self.first, self._last = self._before


def slot_row(slot: SlotInfo) -> dict[str, Any]:
    """Return a slot as a row of the slot table; its id equals the row number."""
    key = slot.key
    return {
        "node": key.node,
        "role": key.role,
        "iteration": key.iteration,
        "pass": key.pass_,
        "kind": slot.kind,
        "dtype": slot.dtype,
        "shape": list(slot.shape),
        "batch_dim": slot.batch_dim,
        "module_class": slot.module_class,
        "names": list(slot.names),
        **({} if slot.piece is None else {"piece": list(map(list, slot.piece))}),
        **({"axes": list(slot.axes)} if slot.axes else {}),
        **({} if slot.image is None else {"image": list(map(list, slot.image))}),
    }


def read_slot(number: int, row: dict[str, Any]) -> SlotInfo:
    """Return the slot in a row of the slot table."""
    key = SlotKey(row["node"], row["role"], int(row["iteration"]), row["pass"])
    return SlotInfo(
        id=number,
        key=key,
        kind=row["kind"],
        dtype=row["dtype"],
        shape=tuple(row["shape"]),
        batch_dim=row["batch_dim"],
        module_class=row["module_class"],
        names=tuple(row["names"]),
        piece=Piece(*map(tuple, row["piece"])) if "piece" in row else None,
        axes=tuple(row.get("axes", ())),
        image=Normalised(*map(tuple, row["image"])) if "image" in row else None,
    )
