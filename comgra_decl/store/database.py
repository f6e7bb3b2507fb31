"""Opens the OCDBT database of a run: one spec, one context, one place for TensorStore's errors.

Every handle of a database must share one Context and one byte-identical spec; otherwise an
"atomic" transaction silently becomes two commits. That is why nothing else builds specs.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorstore as ts

from comgra_decl.errors import ComgraError, DamagedRunError, StoreError

from .layout import DATABASE, NODE_BYTES, ArrayForm

_RETRYABLE = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED")
_RAISED = (
    ValueError,
    LookupError,
    RuntimeError,
    OSError,
    NotImplementedError,
    OverflowError,
    MemoryError,
)
_LONGEST_REASON = 200
_opened_in: int | None = None


class TransientStoreError(StoreError):
    """Writing failed for now (disk full, remote store away); the same commit may succeed later."""


def database_path(run: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a run's database; TensorStore rejects `./` and `../`."""
    return str(Path(run).resolve() / DATABASE)


def new_context(*, cache_bytes: int, copy_threads: int = 1) -> ts.Context:
    """Returns a context; `copy_threads` bounds the cores taken from the training."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": cache_bytes},
            "cache_pool#none": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": copy_threads},
        }
    )


class Database:
    """One run's key-value store and its arrays."""

    def __init__(
        self,
        run: str | os.PathLike[str],
        context: ts.Context,
        *,
        version: int | None = None,
        uuid: str | None = None,
    ) -> None:
        """Opens the database of a run.

        Args:
            run: the run's folder.
            context: caches and threads.
            version: read it as of this version, for good; None: the newest one.
            uuid: the identity that a new database gets; None: one of its own.
        """
        _refuse_forked_child()
        self.path = database_path(run)
        _refuse_pipe(Path(self.path) / "manifest.ocdbt")
        self.context = context
        self.spec: dict[str, Any] = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": self.path + "/"},
            "config": {"max_decoded_node_bytes": NODE_BYTES},
        }
        if version is not None:
            self.spec["version"] = version
        if uuid is not None:
            self.spec["config"]["uuid"] = uuid
        with self.reading("manifest.ocdbt"):
            self.kv = ts.KvStore.open(self.spec, context=context).result()

    @property
    def uuid(self) -> str:
        """The identity of the database, by which TensorStore knows it again."""
        return str(self.kv.spec().to_json()["config"]["uuid"])

    def array(
        self,
        form: ArrayForm,
        *,
        create: bool = False,
        transaction: ts.Transaction | None = None,
        recheck: float | bool = True,
        cached: bool = True,
    ) -> ts.TensorStore:
        """Opens (or creates) an array.

        Args:
            form: what the array looks like, from the array table.
            create: write its metadata within `transaction`; such a handle keeps no chunk cache,
                because written buffers may be referenced, and must not outlive the commit.
            transaction: bind the handle to it.
            recheck: unix time; cached state younger than this needs no revalidation.
            cached: keep chunks; not for writing, see `create`.
        """
        spec: dict[str, Any] = {
            "driver": "zarr3",
            "kvstore": {**self.spec, "path": form.name + "/"},
            "metadata": form.metadata(),
            "recheck_cached_data": recheck,
            # a missing chunk below head.n is damage, never a fill value
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
        if create or not cached:
            spec["cache_pool"] = "cache_pool#none"
        if not create:
            spec["assume_metadata"] = True
        return ts.open(spec, context=self.context, create=create, transaction=transaction).result()

    def read_json(self, key: str) -> Any:
        """Reads a JSON key that must exist, else raises DamagedRunError."""
        value = self.read_bytes(key)
        if value is None:
            raise DamagedRunError(f"{self.path}: key {key!r} is missing although head counts it.")
        return self.parse(key, value)

    def read_bytes(self, key: str) -> bytes | None:
        """Reads a key; None if there is no such key."""
        with self.reading(key):
            result = self.kv.read(key).result()
        return None if result.state == "missing" else bytes(result.value)

    def read_all(self, keys: Sequence[str]) -> list[bytes]:
        """Reads keys that must exist, side by side, else raises DamagedRunError."""
        with self.reading(f"{keys[0]} and others" if keys else "nothing"):
            found = [future.result() for future in [self.kv.read(key) for key in keys]]
        for key, result in zip(keys, found, strict=True):
            if result.state == "missing":
                raise DamagedRunError(
                    f"{self.path}: key {key!r} is missing although head counts it."
                )
        return [bytes(result.value) for result in found]

    def keys(self, low: str, high: str) -> list[str]:
        """Returns the keys from `low` on that are smaller than `high`, ascending."""
        with self.reading(low):
            found = self.kv.list(ts.KvStore.KeyRange(low, high)).result()
        return sorted(key.decode() for key in found)

    def parse(self, key: str, value: bytes) -> Any:
        """Returns what `encode` has made bytes of; DamagedRunError if they are not the same.

        A deleted data file reads as empty bytes.
        """
        text, _, seal = value.rpartition(b"\n")
        try:
            if not value:
                raise ValueError("it is empty (a data file was deleted?)")
            if seal != _seal(text):
                raise ValueError("its checksum does not fit")
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = str(error)[:_LONGEST_REASON]
            raise DamagedRunError(f"{self.path}: key {key!r} is damaged: {reason}") from error

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Turns TensorStore's errors while reading `what` into DamagedRunError."""
        try:
            yield
        except ComgraError:
            raise
        except _RAISED as error:
            raise DamagedRunError(f"{self.path}: cannot read {what!r}: {_text(error)}") from error

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Turns TensorStore's errors while writing `what` into StoreError."""
        try:
            yield
        except ComgraError:
            raise
        except _RAISED as error:
            kind = TransientStoreError if _text(error).startswith(_RETRYABLE) else StoreError
            raise kind(f"{self.path}: writing {what} failed: {_text(error)}") from error


def encode(value: Any) -> bytes:
    """Encodes JSON compactly; what JSON does not know (paths, dates) becomes its text.

    A line with the checksum follows: nothing below would notice a flipped bit.
    """
    text = json.dumps(value, separators=(",", ":"), default=str).encode()
    return text + b"\n" + _seal(text)


def _seal(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def database_exists(run: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a run's database, whole or not."""
    return Path(database_path(run)).is_dir()


def no_files(run: str | os.PathLike[str]) -> list[str]:
    """Returns the names of data files that are no files: reading a named pipe would wait for ever.

    Looked for where all of a run is read; opening one looks at its manifest only.
    """
    try:
        with os.scandir(Path(database_path(run)) / "d") as entries:
            return sorted(entry.name for entry in entries if not entry.is_file())
    except OSError:
        return []


def _refuse_pipe(manifest: Path) -> None:
    if manifest.exists() and not manifest.is_file():
        raise DamagedRunError(f"{str(manifest)!r} is no file.")


def _text(error: BaseException) -> str:
    """TensorStore's message without the spec and the C++ lines that it appends."""
    text = str(error.args[0]) if error.args else type(error).__name__
    return re.split(r" \[(?:tensorstore_spec|source locations)=", text)[0]


def _refuse_forked_child() -> None:
    """TensorStore's threads do not survive a fork: using it in the child aborts the process."""
    global _opened_in
    if _opened_in is not None and _opened_in != os.getpid():
        raise StoreError(
            "a run cannot be opened in a forked child of a process that already used one; "
            "start the child with the multiprocessing start method 'spawn'."
        )
    _opened_in = os.getpid()
