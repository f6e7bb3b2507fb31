"""Opens the OCDBT database of a run: one spec, one context, one place for TensorStore's errors.

Every handle of a database must share one Context and one byte-identical spec; otherwise an
"atomic" transaction silently becomes two commits. That is why nothing else builds specs.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorstore as ts

from comgra_decl.errors import ComgraError, DamagedRunError, StoreError

from .layout import DATABASE, NODE_BYTES, ArrayForm
from .location import Location, Remote, Where, location
from .remote import REFUSED, TRANSIENT, Objects, base_spec, message, refuse_forked_child, resources

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
_MANIFEST = "manifest.ocdbt"


class TransientStoreError(StoreError):
    """It failed for now (disk full, bucket out of reach); the same call may succeed later."""


def database_place(run: Where) -> Location:
    """Returns where a run's database is; TensorStore rejects `./` and `../`."""
    place = location(run)
    return (place if isinstance(place, Remote) else place.resolve()) / DATABASE


def database_path(run: str | os.PathLike[str]) -> str:
    """Returns the absolute path of the database of a run on this machine."""
    return str(Path(run).resolve() / DATABASE)


def new_context(*, cache_bytes: int, copy_threads: int = 1) -> ts.Context:
    """Returns a context; `copy_threads` bounds the cores taken from the training."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": cache_bytes},
            "cache_pool#none": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": copy_threads},
            **resources(),
        }
    )


class Database:
    """One run's key-value store and its arrays."""

    def __init__(
        self,
        run: Where,
        context: ts.Context,
        *,
        version: int | None = None,
        uuid: str | None = None,
    ) -> None:
        """Opens the database of a run.

        Args:
            run: the run's folder, or its place in a bucket.
            context: caches and threads.
            version: read it as of this version, for good; None: the newest one.
            uuid: the identity that a new database gets; None: one of its own.
        """
        refuse_forked_child()
        self.place = database_place(run)
        self.path = str(self.place)
        if isinstance(self.place, Path):
            _refuse_pipe(self.place / _MANIFEST)
        self.context = context
        self.spec: dict[str, Any] = {
            "driver": "ocdbt",
            "base": base_spec(self.place),
            "config": {"max_decoded_node_bytes": NODE_BYTES},
        }
        if version is not None:
            self.spec["version"] = version
        if uuid is not None:
            self.spec["config"]["uuid"] = uuid
        with self.reading(_MANIFEST):
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
        """Turns TensorStore's errors while reading `what` into DamagedRunError.

        A bucket that cannot be reached is no damage: TransientStoreError, or StoreError where it
        does not let us.
        """
        try:
            yield
        except ComgraError:
            raise
        except _RAISED as error:
            self.refuse_out_of_reach(error)
            text = message(error, self.place)
            raise DamagedRunError(f"{self.path}: cannot read {what!r}: {text}") from error

    def refuse_out_of_reach(self, error: BaseException) -> None:
        """Raises if an error of TensorStore says nothing of what is stored, only of a bucket."""
        text = message(error, self.place)
        if not isinstance(self.place, Remote) or not text.startswith((*TRANSIENT, *REFUSED)):
            return
        kind = TransientStoreError if text.startswith(TRANSIENT) else StoreError
        raise kind(f"{self.path}: cannot be read now: {text}") from error

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Turns TensorStore's errors while writing `what` into StoreError."""
        try:
            yield
        except ComgraError:
            raise
        except _RAISED as error:
            text = message(error, self.place)
            kind = TransientStoreError if text.startswith(TRANSIENT) else StoreError
            raise kind(f"{self.path}: writing {what} failed: {text}") from error


def encode(value: Any) -> bytes:
    """Encodes JSON compactly; what JSON does not know (paths, dates) becomes its text.

    A line with the checksum follows: nothing below would notice a flipped bit.
    """
    text = json.dumps(value, separators=(",", ":"), default=str).encode()
    return text + b"\n" + _seal(text)


def _seal(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def database_exists(run: Where) -> bool:
    """Whether the place holds a run's database, whole or not.

    Raises:
        StoreError: a bucket cannot be asked.
    """
    place = database_place(run)
    if isinstance(place, Remote):
        return Objects(place).exists(_MANIFEST)
    return place.is_dir()


def no_files(run: Where) -> list[str]:
    """Returns the names of data files that are no files: reading a named pipe would wait for ever.

    Looked for where all of a run is read; opening one looks at its manifest only.
    """
    place = database_place(run)
    if isinstance(place, Remote):
        return []
    try:
        with os.scandir(place / "d") as entries:
            return sorted(entry.name for entry in entries if not entry.is_file())
    except OSError:
        return []


def _refuse_pipe(manifest: Path) -> None:
    if manifest.exists() and not manifest.is_file():
        raise DamagedRunError(f"{str(manifest)!r} is no file.")
