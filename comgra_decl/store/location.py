"""Locations of runs: a local folder, or a bucket URL.

A `Location` is a `pathlib.Path` or a `Remote`, which also supports joining and `name`. Requests are
sent only by the `remote` module.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from comgra_decl.errors import StoreError

SCHEMES = ("s3", "gs")
"""Valid URL schemes."""

_URL = re.compile(r"(?P<scheme>\w[\w+.-]+):(?P<slashes>//?)(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True, order=True)
class Remote:
    """A location in a bucket, `scheme://bucket/key`: a run, a group, or a root of groups.

    Attributes:
        scheme: one of `SCHEMES`.
        bucket: name of the bucket.
        key: common prefix of all object names, without leading or trailing slash.
    """

    scheme: str
    bucket: str
    key: str = ""

    @property
    def name(self) -> str:
        """Last path component."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> Remote:
        """Parent location; a bucket is its own parent."""
        return Remote(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def __truediv__(self, part: str | PurePath) -> Remote:
        """Return a location below this one."""
        text = part.as_posix() if isinstance(part, PurePath) else part
        return Remote(self.scheme, self.bucket, "/".join(filter(None, (self.key, *_parts(text)))))

    def absolute(self) -> Remote:
        """Return itself: buckets have no current folder."""
        return self

    def relative_to(self, other: Remote) -> PurePosixPath:
        """Return the relative path from another location; ValueError if it is not within it."""
        if (self.scheme, self.bucket) != (other.scheme, other.bucket):
            raise ValueError(f"{str(self)!r} is not within {str(other)!r}")
        return PurePosixPath(self.key or ".").relative_to(other.key or ".")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + f"/{self.key}" * bool(self.key)


Location = Path | Remote
Where = str | os.PathLike[str] | Remote
"""A location as given by users: a path, a URL, or a `Remote`."""


def location(where: Where) -> Location:
    """Return the location of a path or URL.

    Raises:
        StoreError: the URL does not refer to a bucket, or the text is empty.
    """
    if isinstance(where, Remote):
        return where
    text = require_path(os.fspath(where))
    found = _URL.match(text)
    # pathlib merges two slashes into one, and command lines pass paths
    if found is None or not (found["scheme"] in SCHEMES or len(found["slashes"]) > 1):
        return Path(text)
    bucket, _, key = found["rest"].partition("/")
    if found["scheme"] not in SCHEMES or not bucket:
        raise StoreError(
            f"{text!r} is not a valid location for runs; choose a folder, s3://BUCKET/PREFIX or "
            "gs://BUCKET/PREFIX"
        )
    return Remote(found["scheme"], bucket, "/".join(_parts(key)))


def require_path(text: str) -> str:
    """Return a path unchanged; reject an empty one, which pathlib would treat as `.`.

    Raises:
        StoreError: the path is empty.
    """
    if not text:
        raise StoreError(
            "a path must be a non-empty string, got '' (unset shell variable?); "
            "write '.' for the current folder"
        )
    return text


def joined(base: Path, where: str) -> Location:
    """Return the location of a path or URL relative to the folder `base`."""
    place = location(where or ".")
    return place if isinstance(place, Remote) else base.absolute() / place.expanduser()


def _parts(text: str) -> list[str]:
    """Return the parts of a key; reject `..`, which has no meaning in buckets."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise StoreError(f"{text!r} is not a location in a bucket: it contains '..'")
    return parts
