"""Send requests to buckets: configure TensorStore, and access objects next to a database.

The endpoint and credentials are read from the environment, as the cloud vendors' own tools do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorstore as ts

from comgra_decl.errors import ComgraError, DamagedRunError, MissingPackageError, StoreError

from .layout import DATABASE
from .location import Location, Remote

DRIVERS = {"s3": "s3", "gs": "gcs"}
"""TensorStore's drivers by URL scheme."""

TRANSIENT = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED")
"""Prefixes of error messages after which a retry may succeed."""

RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}
"""TensorStore's retries per request. A bucket counts as unreachable after about ten seconds."""

AT_ONCE = 64
"""Maximum number of requests in flight, and of ranks that are read together."""

INTERVAL = 10.0
"""Minimum seconds between commits to a bucket. Each commit takes two or more requests and one
object."""

REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL: Failed to get credentials")
"""Prefixes of error messages that report denied access."""

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), AWS_REGION, and "
    "AWS_ENDPOINT_URL for a store other than Amazon's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the login of `gcloud auth application-default login`",
}
_OPENED = (ValueError, LookupError, RuntimeError, OSError, NotImplementedError)
_FROM_ENVIRONMENT = "environment"
_opened_in: int | None = None


def refuse_forked_child() -> None:
    """Raise StoreError in a forked child: TensorStore's threads do not survive a fork."""
    global _opened_in
    if _opened_in is not None and _opened_in != os.getpid():
        raise StoreError(
            "a run cannot be opened in a forked child of a process that has already used one; "
            "start the child with the multiprocessing start method 'spawn'."
        )
    _opened_in = os.getpid()


def base_spec(place: Location) -> dict[str, Any]:
    """Return TensorStore's spec for all keys below a location.

    The spec must not contain values that differ between calls, such as credentials. Transactions
    across two handles are atomic only if the specs of the handles are identical.

    Raises:
        MissingPackageError: this build of TensorStore lacks the driver.
    """
    if not isinstance(place, Remote):
        return {"driver": "file", "path": f"{place}/"}
    driver = DRIVERS[place.scheme]
    if not _has(driver):
        raise MissingPackageError(
            f"{str(place)!r} cannot be reached: this build of tensorstore lacks the "
            f"{driver!r} driver, which the wheels on PyPI include: pip install tensorstore"
        )
    path = f"{place.key}/" if place.key else ""
    spec = {"driver": driver, "bucket": place.bucket, "path": path}
    return spec | _s3() if driver == "s3" else spec


def _s3() -> dict[str, str]:
    """Return the S3 endpoint settings, read as Amazon's own tools do."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint and not region:
        region = "us-east-1"  # the default region of S3-compatible stores
    found = {"endpoint": endpoint, "aws_region": region}
    return {name: value for name, value in found.items() if value}


@cache
def _has(driver: str) -> bool:
    try:
        ts.KvStore.Spec({"driver": driver, "bucket": "a-bucket"})
    except ValueError:
        return False
    return True


def resources() -> dict[str, Any]:
    """Return context resources: the retry policy and the source of credentials.

    If the environment holds keys, only the environment is queried. Otherwise, Amazon's library
    would log every missing credentials file to the terminal.
    """
    drivers = [driver for driver in DRIVERS.values() if _has(driver)]
    found: dict[str, Any] = {f"{driver}_request_retries": RETRIES for driver in drivers}
    found |= {f"{driver}_request_concurrency": {"limit": AT_ONCE} for driver in drivers}
    if os.environ.get("AWS_ACCESS_KEY_ID") and _knows(_FROM_ENVIRONMENT):
        found["aws_credentials"] = {"type": _FROM_ENVIRONMENT}
    return found


@cache
def _knows(credentials: str) -> bool:
    """Whether this TensorStore version supports that credentials source."""
    try:
        ts.Context({"aws_credentials": {"type": credentials}})
    except ValueError:
        return False
    return True


def message(error: BaseException, place: Location) -> str:
    """Return TensorStore's message without details, but with the source of credentials."""
    text = str(error.args[0]) if error.args else type(error).__name__
    for mark in (" [tensorstore_spec=", " [source locations="):
        text = text.partition(mark)[0]
    if isinstance(place, Remote) and text.startswith(REFUSED):
        text += f" (credentials are read from {_CREDENTIALS[place.scheme]})"
    return text


_TRIAL = "trial"


class Objects:
    """Objects below a location in a bucket, named relative to it."""

    def __init__(self, place: Remote) -> None:
        """Raise StoreError if the location cannot be opened; send no request yet."""
        refuse_forked_child()
        self.place = place
        with self._converted_errors():
            self._kv = ts.KvStore.open(base_spec(place), context=ts.Context(resources())).result()

    def exists(self, name: str) -> bool:
        """Whether an object exists."""
        with self._converted_errors():
            found = self._kv.read(name, byte_range=slice(0, 0)).result()
        return bool(found.state == "value")

    def read(self, name: str, *, most: int) -> bytes | None:
        """Return an object; None if missing. Raises DamagedRunError if it is too large."""
        with self._converted_errors():
            found = self._kv.read(name).result()
        if found.state != "value":
            return None
        if len(found.value) > most:
            raise DamagedRunError(f"{self.place / name} is larger than the maximum of {most} bytes")
        return bytes(found.value)

    def write(self, name: str, content: bytes) -> None:
        """Write an object."""
        with self._converted_errors():
            self._kv.write(name, content).result()

    def claim(self, name: str, content: bytes) -> bool:
        """Create an object unless it exists. Return whether it was created.

        The content must differ from that of others who claim the same name: if the answer to the
        request is lost, it tells who has created the object.
        """
        with self._converted_errors():
            found = self._kv.read(name).result()
            if found.state == "value":
                return False
            stamp = self._kv.write(name, content, if_equal=found.stamp.generation).result()
            if stamp.generation:
                return True
            there = self._kv.read(name).result()
        if there.state != "value":
            raise self._no_bucket()
        return bool(there.value == content)

    def try_writing(self) -> None:
        """Write and remove a test object. Raises StoreError if that fails.

        Call this before writing a database, because TensorStore 0.1.86 ends the process if it
        commits to a missing bucket.
        """
        with self._converted_errors():
            stamp = self._kv.write(_TRIAL, b"").result()
            if not stamp.generation:
                raise self._no_bucket()
            self._kv.write(_TRIAL, None).result()

    def _no_bucket(self) -> StoreError:
        text = f"{self.place}: cannot write to this location; does the bucket exist?"
        return StoreError(text)

    def names(self) -> list[str]:
        """Return the sorted names of all objects; takes one request per thousand names."""
        with self._converted_errors():
            return sorted(name.decode() for name in self._kv.list().result())

    def remove(self, prefix: str) -> None:
        """Remove all objects whose names start with `prefix`."""
        with self._converted_errors():
            self._kv.delete_range(ts.KvStore.KeyRange(prefix, _after(prefix))).result()

    @contextmanager
    def _converted_errors(self) -> Iterator[None]:
        try:
            yield
        except ComgraError:
            raise
        except _OPENED as error:
            raise StoreError(f"{self.place}: {message(error, self.place)}") from error


def databases_within(place: Remote) -> list[Remote]:
    """Return all database locations at or below a location, by listing all names."""
    return databases_among(place, Objects(place).names())


def databases_among(place: Remote, names: Iterable[str]) -> list[Remote]:
    """Return all database locations at or below a location, given the names of all its objects."""
    mark = f"{DATABASE}/manifest.ocdbt"
    found = [name for name in names if f"/{name}".endswith(f"/{mark}")]
    return [place / name.removesuffix(mark) for name in found]


def written_bytes() -> int:
    """Return the number of bytes that this process has written to buckets."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    wanted = {f"/tensorstore/kvstore/{driver}/bytes_written" for driver in DRIVERS.values()}
    return sum(int(m["values"][0]["value"]) for m in found if m["name"] in wanted and m["values"])


def _after(prefix: str) -> str:
    """Return the first name after all names that start with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
