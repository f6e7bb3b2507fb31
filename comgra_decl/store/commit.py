"""One atomic transaction: keys and array pieces that become visible together."""

from __future__ import annotations

from typing import Any

import tensorstore as ts
from numpy.typing import NDArray

from .database import Database
from .layout import ArrayForm
from .sums import SumsOfCommit, SumsReader, packed


class Commit:
    """Collects writes; nothing is visible or durable before `finish`."""

    def __init__(self, database: Database) -> None:
        # repeatable_read fails the commit if anything it read has changed
        self.transaction = ts.Transaction(atomic=True, repeatable_read=True)
        self._db = database
        self._sums = SumsOfCommit()
        self._kv = database.kv.with_transaction(self.transaction)
        self._futures: list[Any] = []  # discarding a write's future silently cancels the write

    def read(self, key: str) -> bytes | None:
        """Read a key within this transaction; None if it does not exist."""
        found = self._kv.read(key).result()
        return bytes(found.value) if found.state == "value" else None

    def put(self, key: str, value: bytes) -> None:
        """Write a key."""
        self._futures.append(self._kv.write(key, value))

    def put_json(self, key: str, value: Any, *, revision: int | None = None) -> None:
        """Write a JSON key; `revision` identifies the content of a key written repeatedly."""
        self.put(key, self._db.encode(key, value, revision=revision))

    def write(
        self,
        array: ts.TensorStore,
        form: ArrayForm,
        first: int,
        data: NDArray[Any],
        lane: int = 0,
    ) -> None:
        """Write `data` [records, slots or lanes, ...], whole chunks, at (first, lane) of an array.

        `data` is referenced, not copied, so it must not change before `finish` returns.
        """
        target = array[first : first + len(data), lane : lane + data.shape[1]]
        self._futures.append(target.write(data, can_reference_source_data_indefinitely=True))
        if self._db.bound:
            self._sums.add(form, first, data, lane)

    def join_sums(self, others: SumsReader) -> set[str]:
        """Merge the checksums already stored under the same keys into those of this commit.

        Returns:
            The merged keys.
        """
        return self._sums.join(others)

    def finish(self) -> None:
        """Make all writes visible and durable, atomically."""
        for key, known in self._sums:
            self.put(key, packed(key, known))
        self.transaction.commit_async().result()
        for future in self._futures:
            future.result()
