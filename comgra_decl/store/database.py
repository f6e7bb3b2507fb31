"""Opens the OCDBT database of a run: one spec, one context, one place for TensorStore's errors.

Every handle of a database must share one Context and one byte-identical spec; otherwise an
"atomic" transaction silently becomes two commits. That is why nothing else builds specs.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorstore as ts

from comgra_decl.errors import ComgraError, DamagedRunError, RunGoneError, StoreError

from .folder import MANIFEST, largest_file, strange_file
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
_ABSENT = "NOT_FOUND"
"""How errors begin that say that a file or folder is not there."""

_MOST_JSON = 128 << 20
"""Bytes of a key of JSON."""

_MOST_PARTS = 4 << 20
"""Lists, mappings and what is in them: in memory each takes up to two hundred bytes."""


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
            _refuse_strange(self.place)
        self._largest = largest_file(self.place) if isinstance(self.place, Path) else None
        self.bound = True
        """Whether checksums are over key and content; in older runs they are over the content."""
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
        with self.reading(MANIFEST):
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

    def read_json(self, key: str, *, revision: int | None = None) -> Any:
        """Reads a JSON key that must exist, else raises DamagedRunError.

        Args:
            key: the key.
            revision: which content of a key that is written again and again.
        """
        value = self.read_bytes(key)
        if value is None:
            raise DamagedRunError(f"{self.path}: key {key!r} is missing although head counts it.")
        return self.parse(key, value, revision=revision)

    def read_bytes(self, key: str, *, most: int = _MOST_JSON) -> bytes | None:
        """Reads a key; None if there is no such key, DamagedRunError if it has more bytes."""
        self._refuse_large([key], most)
        with self.reading(key):
            result = self.kv.read(key).result()
        if result.state == "missing":
            return None
        if len(result.value) > most:
            self._refuse_size(key, most)
        return bytes(result.value)

    def _refuse_large(self, keys: Sequence[str], most: int) -> None:
        """Asks the index whether a key has so many bytes or more, by reading none from there on."""
        if isinstance(self.place, Remote) or (self._largest is not None and self._largest < most):
            return  # each would be a request more to a bucket
        reads = [self.kv.read(key, byte_range=slice(most, most)) for key in keys]
        for key, read in zip(keys, reads, strict=True):
            try:
                found = read.result()
            except _RAISED:  # there is no such byte; what else is wrong, reading the key says
                continue
            if found.state == "value":
                self._refuse_size(key, most)

    def _refuse_size(self, key: str, most: int) -> None:
        raise DamagedRunError(
            f"{self.path}: key {key!r} has more than the {most} bytes it may have."
        )

    def read_all(self, keys: Sequence[str], *, most: int | None = None) -> list[bytes]:
        """Reads keys that must exist, side by side, else raises DamagedRunError.

        Args:
            keys: the keys.
            most: bytes that each may have; None: any number.
        """
        if most is not None:
            self._refuse_large(keys, most)
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

    def encode(self, key: str, value: Any, *, revision: int | None = None) -> bytes:
        """Encodes JSON for a key of this database; see `encode`."""
        return encode(value, _named(key, revision) if self.bound else None)

    def parse(self, key: str, value: bytes, *, revision: int | None = None) -> Any:
        """Returns what `encode` has made bytes of; DamagedRunError if they are not the same.

        A deleted data file reads as empty bytes.
        """
        text, _, seal = value.rpartition(b"\n")
        name = _named(key, revision) if self.bound else None
        try:
            if not value:
                raise ValueError("it is empty (a data file was deleted?)")
            if seal != _seal(text, name):
                raise ValueError("its checksum does not fit")
            if sum(map(text.count, (b",", b"[", b"{"))) > _MOST_PARTS:
                raise ValueError(f"it has more than {_MOST_PARTS} parts")
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
            if isinstance(self.place, Path) and text.startswith(_ABSENT):
                raise self.gone() from error
            kind = TransientStoreError if text.startswith(TRANSIENT) else StoreError
            raise kind(f"{self.path}: writing {what} failed: {text}") from error

    def gone(self) -> RunGoneError:
        """Returns the error for a run that is no longer where it was."""
        run = self.path.rstrip("/").rpartition("/")[0]
        return RunGoneError(f"the run's folder {run!r} is gone: removed, moved or unmounted.")


def encode(value: Any, name: str | None) -> bytes:
    """Encodes JSON compactly; what JSON does not know (paths, dates) becomes its text.

    A line with the checksum follows: nothing below would notice a flipped bit, or the content of
    another key.

    Args:
        value: what JSON can hold.
        name: of the key, and its revision if it has one; None in runs of format version 2, where
            checksums are over the content alone.
    """
    text = json.dumps(value, separators=(",", ":"), default=str).encode()
    return text + b"\n" + _seal(text, name)


def is_bound(key: str, value: bytes) -> bool:
    """Whether the checksum of a JSON key is over its name as well."""
    text, _, seal = value.rpartition(b"\n")
    return seal == _seal(text, key)


def _named(key: str, revision: int | None) -> str:
    return key if revision is None else f"{key}@{revision}"


def _seal(text: bytes, name: str | None) -> bytes:
    return b"%08x" % zlib.crc32(text, 0 if name is None else zlib.crc32(name.encode()))


def database_exists(run: Where) -> bool:
    """Whether the place holds a run's database, whole or not.

    Raises:
        StoreError: a bucket cannot be asked.
    """
    place = database_place(run)
    if isinstance(place, Remote):
        return Objects(place).exists(MANIFEST)
    return place.is_dir()


def newest_version(path: Where) -> int | None:
    """Returns the number of the newest version of a run's database; None if it has none."""
    place = database_place(path)
    if isinstance(place, Remote):
        if not database_exists(path):
            return None
    elif not (place / MANIFEST).exists() or strange_file(place):
        return None
    try:
        base = ts.KvStore.open(base_spec(place), context=new_context(cache_bytes=0)).result()
        manifest: Mapping[str, Any] = ts.ocdbt.dump(base).result()
        return int(manifest["versions"][-1]["generation_number"])
    except (ValueError, KeyError, IndexError, RuntimeError, TypeError):
        return None


def _refuse_strange(database: Path) -> None:
    strange = strange_file(database)
    if strange is not None:
        raise DamagedRunError(
            f"{database}: {strange}; a run is made of plain files that lie in its folder."
        )
