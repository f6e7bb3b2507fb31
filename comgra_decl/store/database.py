"""Open a run's OCDBT database with a single spec and context, and convert TensorStore errors.

All handles of a database must share one Context, and their specs must be byte-identical. Otherwise,
an "atomic" transaction silently becomes two commits. Specs are therefore built only here.
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

from comgra_decl.errors import AccessError, ComgraError, DamagedRunError, RunGoneError, StoreError

from .folder import MANIFEST, largest_file, strange_file
from .layout import DATABASE, NODE_BYTES, ArrayForm
from .location import Location, Remote, Where, location
from .locking import keep_files
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
"""Prefix of TensorStore errors about missing files and folders."""

_COALESCED = {
    "experimental_read_coalescing_threshold_bytes": 1 << 16,
    "experimental_read_coalescing_merged_bytes": 1 << 24,
    "experimental_read_coalescing_interval": "5ms",
}
"""In a bucket, reads of one object that begin within five milliseconds of each other, with less
than 64 kB between them, are one request of up to 16 MB: a commit is one object with all its keys.
Sixty ranks that are read at once begin their reads up to some milliseconds apart."""

_MOST_JSON = 128 << 20
"""Maximum size of a JSON key, in bytes."""

_MOST_PARTS = 4 << 20
"""Maximum total number of lists, mappings and items in a key. Each takes up to 200 bytes of
memory."""


class TransientStoreError(StoreError):
    """A temporary failure, such as a full disk; the same call may succeed later."""


def database_place(run: Where) -> Location:
    """Return the location of a run's database, normalised: TensorStore rejects `./` and `../`."""
    place = location(run)
    return (place if isinstance(place, Remote) else place.resolve()) / DATABASE


def database_path(run: str | os.PathLike[str]) -> str:
    """Return the absolute path of the database of a run on this machine."""
    return str(Path(run).resolve() / DATABASE)


def new_context(*, cache_bytes: int, copy_threads: int = 1) -> ts.Context:
    """Return a context; `copy_threads` limits the number of cores taken from training."""
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
        """Open the database of a run.

        Args:
            run: the run's folder, or its location in a bucket.
            context: caches and threads.
            version: version to read permanently; None for the newest.
            uuid: identity of a new database; None for a random one.
        """
        refuse_forked_child()
        self.place = database_place(run)
        self.path = str(self.place)
        if isinstance(self.place, Path):
            _refuse_strange(self.place)
        self._largest = largest_file(self.place) if isinstance(self.place, Path) else None
        self.bound = True
        """Whether checksums cover a key and its content; in older runs, they cover only the
        content."""
        self.head_read: float | None = None
        """When the newest head was read, in Unix seconds. In a bucket, keys that it lists are read
        without asking again for a newer version; None: ask for each key."""
        self._newest: dict[str, ts.KvStore.ReadResult] = {}
        self.context = context
        self.spec: dict[str, Any] = {
            "driver": "ocdbt",
            "base": base_spec(self.place),
            "config": {"max_decoded_node_bytes": NODE_BYTES},
        }
        if isinstance(self.place, Remote):
            self.spec |= _COALESCED
        if version is not None:
            self.spec["version"] = version
        if uuid is not None:
            self.spec["config"]["uuid"] = uuid
        self._merged = version is None and isinstance(self.place, Path)
        """Whether the writer may remove files that only an older version needs (`merging.py`)."""
        if version is not None and isinstance(self.place, Path):
            keep_files(self, self.place / "d")
        with self.reading(MANIFEST):
            self.kv = ts.KvStore.open(self.spec, context=context).result()

    @property
    def uuid(self) -> str:
        """Identity by which TensorStore recognises the database."""
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
        """Open (or create) an array.

        Args:
            form: form of the array from the array table.
            create: whether to write its metadata within `transaction`. If so, the handle has no
            chunk cache, because written buffers may be referenced, and the handle must not outlive
            the commit.
            transaction: transaction of the handle.
            recheck: a time in Unix seconds; state cached after that time is not revalidated.
            cached: whether to cache chunks; must be False for writing, see `create`.
        """
        spec: dict[str, Any] = {
            "driver": "zarr3",
            "kvstore": {**self.spec, "path": form.name + "/"},
            "metadata": form.metadata(),
            "recheck_cached_data": recheck,
            # a missing chunk below head.n is damage and must not be read as a fill value
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
        if create or not cached:
            spec["cache_pool"] = "cache_pool#none"
        if not create:
            spec["assume_metadata"] = True
        return ts.open(spec, context=self.context, create=create, transaction=transaction).result()

    def read_json(self, key: str, *, revision: int | None = None) -> Any:
        """Read a JSON key. Raises DamagedRunError if it is missing.

        Args:
            key: the key.
            revision: revision of a key that is written more than once.
        """
        value = self.read_bytes(key)
        if value is None:
            raise DamagedRunError(f"{self.path}: key {key!r} is missing, but the head lists it.")
        return self.parse(key, value, revision=revision)

    def read_bytes(self, key: str, *, most: int = _MOST_JSON, newest: bool = False) -> bytes | None:
        """Read a key; None if it does not exist. Raises DamagedRunError if it is too large.

        Args:
            key: the key.
            most: maximum size, in bytes.
            newest: whether to ask for a version that is newer than the head.
        """
        self._refuse_large([key], most)
        with self.reading(key):
            result = self._newest_of(key) if newest else self._result(key, self._read(key))
        if result.state == "missing":
            return None
        if len(result.value) > most:
            self._refuse_size(key, most)
        return bytes(result.value)

    def read_together(self, keys: Sequence[str], *, most: int) -> list[bytes | None]:
        """Read keys concurrently, in their newest version; None for those that do not exist.

        Raises:
            DamagedRunError: one of them cannot be read, or has more than `most` bytes.
        """
        self._refuse_large(keys, most)
        with self.reading(f"{keys[0]} and others"):
            reads = [self.kv.read(key) for key in keys]
            found = [read.result() for read in reads]
        self._newest |= zip(keys, found, strict=True)
        for key, result in zip(keys, found, strict=True):
            if len(result.value) > most:
                self._refuse_size(key, most)
        return [bytes(r.value) if r.state == "value" else None for r in found]

    def _read(self, key: str) -> ts.Future[ts.KvStore.ReadResult]:
        """Start reading a key that is not newer than the head."""
        since = self.head_read if isinstance(self.place, Remote) else None
        return self.kv.read(key, staleness_bound=since)

    def _result(self, key: str, read: ts.Future[ts.KvStore.ReadResult]) -> ts.KvStore.ReadResult:
        """Return what `_read` found; if it is not there, what the newest index leads to.

        The writer of a run merges files, and removes those that only an older index refers to.
        """
        try:
            found = read.result()
            if not self._merged or found.state != "value" or found.value:
                return found
        except _RAISED:
            if not self._merged:
                raise
        return self.kv.read(key).result()

    def manifest_state(self) -> tuple[int, int, int] | None:
        """Return what changes with every commit; None if no file that is read can be gone.

        That is so if the version is fixed, and in a bucket.
        """
        if not self._merged or not isinstance(self.place, Path):
            return None
        try:
            found = (self.place / MANIFEST).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _newest_of(self, key: str) -> ts.KvStore.ReadResult:
        """Read the newest version of a key; in a bucket, only if it has changed since."""
        if not isinstance(self.place, Remote):
            return self.kv.read(key).result()
        before = self._newest.get(key)
        unless = None if before is None or before.state != "value" else before.stamp.generation
        found = self.kv.read(key, if_not_equal=unless).result()
        if before is None or found.state != "unspecified":
            self._newest[key] = found
        return self._newest[key]

    def _refuse_large(self, keys: Sequence[str], most: int) -> None:
        """Reject keys of more than `most` bytes; an empty read returns the size from the index."""
        if isinstance(self.place, Remote) or (self._largest is not None and self._largest < most):
            return  # the check would cost a request per key
        reads = [self.kv.read(key, byte_range=slice(most, most)) for key in keys]
        for key, read in zip(keys, reads, strict=True):
            try:
                found = read.result()
            except _RAISED:  # too short, as expected; reading reports other errors
                continue
            if found.state == "value":
                self._refuse_size(key, most)

    def _refuse_size(self, key: str, most: int) -> None:
        raise DamagedRunError(
            f"{self.path}: key {key!r} is larger than the maximum of {most} bytes."
        )

    def read_all(self, keys: Sequence[str], *, most: int | None = None) -> list[bytes]:
        """Read existing keys concurrently. Raises DamagedRunError if one is missing.

        Args:
            keys: the keys.
            most: maximum size of each, in bytes; None: no limit.
        """
        if most is not None:
            self._refuse_large(keys, most)
        with self.reading(f"{keys[0]} and others" if keys else "nothing"):
            reads = [self._read(key) for key in keys]
            found = [self._result(key, read) for key, read in zip(keys, reads, strict=True)]
        for key, result in zip(keys, found, strict=True):
            if result.state == "missing":
                raise DamagedRunError(
                    f"{self.path}: key {key!r} is missing, but the head lists it."
                )
        return [bytes(result.value) for result in found]

    def read_derived(self, keys: Sequence[str], *, most: int) -> list[bytes | None]:
        """Read keys concurrently that can be computed anew; None for those that cannot be read.

        Args:
            keys: the keys.
            most: maximum size of each, in bytes.
        """
        try:
            self._refuse_large(keys, most)
        except DamagedRunError:
            return [None] * len(keys)
        found: list[bytes | None] = []
        for read in [self._read(key) for key in keys]:
            try:
                result = read.result()
            except _RAISED as error:
                self.refuse_out_of_reach(error)
                found.append(None)
                continue
            found.append(bytes(result.value) if result.state == "value" else None)
        return found

    def keys(self, low: str, high: str) -> list[str]:
        """Return the keys from `low` (included) to `high` (excluded), ascending."""
        with self.reading(low):
            found = self.kv.list(ts.KvStore.KeyRange(low, high)).result()
        return sorted(key.decode() for key in found)

    def encode(self, key: str, value: Any, *, revision: int | None = None) -> bytes:
        """Encode JSON for a key of this database; see `encode`."""
        return encode(value, _named(key, revision) if self.bound else None)

    def parse(self, key: str, value: bytes, *, revision: int | None = None) -> Any:
        """Decode a key written by `encode`. Raises DamagedRunError if the bytes differ.

        A deleted data file reads as empty bytes.
        """
        text, _, seal = value.rpartition(b"\n")
        name = _named(key, revision) if self.bound else None
        try:
            if not value:
                raise ValueError("it is empty (a data file was deleted?)")
            if seal != _seal(text, name):
                raise ValueError("its checksum does not match")
            if sum(map(text.count, (b",", b"[", b"{"))) > _MOST_PARTS:
                raise ValueError(f"it has more than {_MOST_PARTS} parts")
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = str(error)[:_LONGEST_REASON]
            raise DamagedRunError(f"{self.path}: key {key!r} is damaged: {reason}") from error

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Convert TensorStore errors raised while reading `what` to DamagedRunError.

        An unreachable bucket is not damage: raises TransientStoreError, or StoreError if access is
        denied.
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
        """Raise an error if an unreachable bucket, not the data, caused a TensorStore error."""
        text = message(error, self.place)
        if not isinstance(self.place, Remote) or not text.startswith((*TRANSIENT, *REFUSED)):
            return
        kind = TransientStoreError if text.startswith(TRANSIENT) else StoreError
        raise kind(f"{self.path}: cannot be read now: {text}") from error

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Convert TensorStore errors raised while writing `what` to StoreError."""
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
        """Return the error for a run whose folder no longer exists."""
        run = self.path.rstrip("/").rpartition("/")[0]
        return RunGoneError(f"the run's folder {run!r} was removed, moved or unmounted.")


def encode(value: Any, name: str | None) -> bytes:
    """Encode compact JSON; other objects (paths, dates) are converted to strings.

    Appends a line with a checksum, which detects flipped bits and swapped keys.

    Args:
        value: JSON-serialisable object.
        name: key, and its revision if any; None for runs of format version 2, whose checksums cover
            only the content.
    """
    text = json.dumps(value, separators=(",", ":"), default=str).encode()
    return text + b"\n" + _seal(text, name)


def is_bound(key: str, value: bytes) -> bool:
    """Whether the checksum of a JSON key covers its name."""
    text, _, seal = value.rpartition(b"\n")
    return seal == _seal(text, key)


def _named(key: str, revision: int | None) -> str:
    return key if revision is None else f"{key}@{revision}"


def _seal(text: bytes, name: str | None) -> bytes:
    return b"%08x" % zlib.crc32(text, 0 if name is None else zlib.crc32(name.encode()))


def database_exists(run: Where) -> bool:
    """Whether a location contains a run's database, complete or not.

    Raises:
        AccessError: this user may not read the folder.
        StoreError: a bucket cannot be reached.
    """
    place = database_place(run)
    if isinstance(place, Remote):
        return Objects(place).exists(MANIFEST)
    try:
        return place.is_dir()
    except PermissionError as error:
        raise AccessError(
            f"{str(place.parent)!r} cannot be read: permission denied. Ask its owner to allow it, "
            "for example with `chmod -R go+rX`."
        ) from error


def newest_version(path: Where) -> int | None:
    """Return the newest version number of a run's database; None if there is none."""
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
            f"{database}: {strange}; a run consists of plain files in its folder."
        )
