"""Requests to buckets: how TensorStore reaches them, and the few objects beside a database.

Where a bucket is and who may use it is read from the environment, as the clouds' own programs do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorstore as ts

from comgra_decl.errors import ComgraError, DamagedRunError, MissingPackageError, StoreError

from .layout import DATABASE
from .location import Location, Remote

DRIVERS = {"s3": "s3", "gs": "gcs"}
"""What TensorStore calls the kinds of buckets."""

TRANSIENT = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED")
"""What an error begins with if the same call may succeed later."""

RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}
"""Of each request, by TensorStore: about ten seconds until a bucket counts as out of reach."""

INTERVAL = 10.0
"""Least seconds between two commits to a bucket: each is at least two requests and one object."""

REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL: Failed to get credentials")
"""What an error begins with if a bucket does not let us."""

_WAYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), AWS_REGION, and "
    "AWS_ENDPOINT_URL for a store other than Amazon's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or what `gcloud auth application-default login` left",
}
_OPENED = (ValueError, LookupError, RuntimeError, OSError, NotImplementedError)
_FROM_ENVIRONMENT = "environment"
_opened_in: int | None = None


def refuse_forked_child() -> None:
    """Raises StoreError in a forked child: TensorStore's threads do not survive a fork."""
    global _opened_in
    if _opened_in is not None and _opened_in != os.getpid():
        raise StoreError(
            "a run cannot be opened in a forked child of a process that already used one; "
            "start the child with the multiprocessing start method 'spawn'."
        )
    _opened_in = os.getpid()


def base_spec(place: Location) -> dict[str, Any]:
    """Returns TensorStore's spec of all keys within a place.

    Nothing in it may be made anew with each call, such as credentials: two stores are one, and
    their transactions atomic, only where all of it is the same.

    Raises:
        MissingPackageError: this build of TensorStore does not know such places.
    """
    if not isinstance(place, Remote):
        return {"driver": "file", "path": f"{place}/"}
    driver = DRIVERS[place.scheme]
    if not _has(driver):
        raise MissingPackageError(
            f"{str(place)!r} cannot be reached: this build of tensorstore lacks the driver "
            f"{driver!r}, which the wheels of the package index have: pip install tensorstore"
        )
    path = f"{place.key}/" if place.key else ""
    spec = {"driver": driver, "bucket": place.bucket, "path": path}
    return spec | _s3() if driver == "s3" else spec


def _s3() -> dict[str, str]:
    """Returns where S3 is, read as Amazon's own programs do."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint and not region:
        region = "us-east-1"  # what other stores call theirs, if they care
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
    """Returns, for a context, how often requests are repeated, and where keys come from.

    Where the environment holds keys it is asked alone: Amazon's code would otherwise complain, on
    the terminal, of every file that it does not find.
    """
    drivers = [driver for driver in DRIVERS.values() if _has(driver)]
    found: dict[str, Any] = {f"{driver}_request_retries": RETRIES for driver in drivers}
    if os.environ.get("AWS_ACCESS_KEY_ID") and _knows(_FROM_ENVIRONMENT):
        found["aws_credentials"] = {"type": _FROM_ENVIRONMENT}
    return found


@cache
def _knows(credentials: str) -> bool:
    """Whether this version of TensorStore can be told so."""
    try:
        ts.Context({"aws_credentials": {"type": credentials}})
    except ValueError:
        return False
    return True


def message(error: BaseException, place: Location) -> str:
    """Returns TensorStore's message without what it appends; says where credentials come from."""
    text = str(error.args[0]) if error.args else type(error).__name__
    for mark in (" [tensorstore_spec=", " [source locations="):
        text = text.partition(mark)[0]
    if isinstance(place, Remote) and text.startswith(REFUSED):
        text += f" (who asks is read from {_WAYS[place.scheme]})"
    return text


_TRIAL = "trial"


class Objects:
    """The objects within a place of a bucket, named by what comes after it."""

    def __init__(self, place: Remote) -> None:
        """Raises StoreError if the place cannot be opened; asks nothing of the bucket yet."""
        refuse_forked_child()
        self.place = place
        with self._asking():
            self._kv = ts.KvStore.open(base_spec(place), context=ts.Context(resources())).result()

    def exists(self, name: str) -> bool:
        """Whether there is an object."""
        with self._asking():
            found = self._kv.read(name, byte_range=slice(0, 0)).result()
        return bool(found.state == "value")

    def read(self, name: str, *, most: int) -> bytes | None:
        """Returns an object; None if there is none, DamagedRunError if it has more bytes."""
        with self._asking():
            found = self._kv.read(name).result()
        if found.state != "value":
            return None
        if len(found.value) > most:
            raise DamagedRunError(f"{self.place / name} is larger than it may be")
        return bytes(found.value)

    def write(self, name: str, content: bytes) -> None:
        """Writes an object."""
        with self._asking():
            self._kv.write(name, content).result()

    def claim(self, name: str, content: bytes) -> bool:
        """Makes an object unless there is one; returns whether it did."""
        with self._asking():
            found = self._kv.read(name).result()
            if found.state == "value":
                return False
            stamp = self._kv.write(name, content, if_equal=found.stamp.generation).result()
        if stamp.generation:
            return True
        if self.exists(name):  # another was quicker
            return False
        raise self._no_bucket()

    def try_writing(self) -> None:
        """Writes an object and removes it; StoreError if that cannot be done.

        To be asked before a database is written: where there is no such bucket, a commit of
        TensorStore (0.1.86) ends the process.
        """
        with self._asking():
            stamp = self._kv.write(_TRIAL, b"").result()
            if not stamp.generation:
                raise self._no_bucket()
            self._kv.write(_TRIAL, None).result()

    def _no_bucket(self) -> StoreError:
        text = f"{self.place}: nothing can be written there; is there such a bucket?"
        return StoreError(text)

    def names(self) -> list[str]:
        """Returns the names of all objects, sorted; a request for each thousand."""
        with self._asking():
            return sorted(name.decode() for name in self._kv.list().result())

    def remove(self, prefix: str) -> None:
        """Removes the objects whose names begin so."""
        with self._asking():
            self._kv.delete_range(ts.KvStore.KeyRange(prefix, _after(prefix))).result()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except ComgraError:
            raise
        except _OPENED as error:
            raise StoreError(f"{self.place}: {message(error, self.place)}") from error


def databases_within(place: Remote) -> list[Remote]:
    """Returns the places at or within a place that hold a database: all names are looked at."""
    mark = f"{DATABASE}/manifest.ocdbt"
    names = [name for name in Objects(place).names() if f"/{name}".endswith(f"/{mark}")]
    return [place / name.removesuffix(mark) for name in names]


def written_bytes() -> int:
    """Returns the bytes that this process has written to buckets."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    wanted = {f"/tensorstore/kvstore/{driver}/bytes_written" for driver in DRIVERS.values()}
    return sum(int(m["values"][0]["value"]) for m in found if m["name"] in wanted and m["values"])


def _after(prefix: str) -> str:
    """Returns the first name after all that begin with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
