"""Where runs lie: a folder of this machine, or a place in a bucket that a URL names.

A `Location` is a `pathlib.Path` or a `Remote`, which can be joined and asked for its name like one.
Nothing here reaches out; `requests` does.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from comgra_decl.errors import StoreError

SCHEMES = ("s3", "gs")
"""What the URL of a place may begin with."""

_URL = re.compile(r"(?P<scheme>\w[\w+.-]+):(?P<slashes>//?)(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True, order=True)
class Remote:
    """A place in a bucket, `scheme://bucket/key`: a run, a group, or a root of groups.

    Attributes:
        scheme: one of `SCHEMES`.
        bucket: its name.
        key: what the names of all objects of the place begin with, without a slash at its ends.
    """

    scheme: str
    bucket: str
    key: str = ""

    @property
    def name(self) -> str:
        """The last part, as of a path."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> Remote:
        """The place that holds this one; a bucket's is itself."""
        return Remote(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def __truediv__(self, part: str | PurePath) -> Remote:
        """Returns a place within this one."""
        text = part.as_posix() if isinstance(part, PurePath) else part
        return Remote(self.scheme, self.bucket, "/".join(filter(None, (self.key, *_parts(text)))))

    def absolute(self) -> Remote:
        """Returns itself: there is no current folder in a bucket."""
        return self

    def relative_to(self, other: Remote) -> PurePosixPath:
        """Returns the way from another place to this one; ValueError if it is not within it."""
        if (self.scheme, self.bucket) != (other.scheme, other.bucket):
            raise ValueError(f"{str(self)!r} is not within {str(other)!r}")
        return PurePosixPath(self.key or ".").relative_to(other.key or ".")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + f"/{self.key}" * bool(self.key)


Location = Path | Remote
Where = str | os.PathLike[str] | Remote
"""How a place may be said: a path, a URL, or a `Remote`."""


def location(where: Where) -> Location:
    """Returns the place that a path or a URL names.

    Raises:
        StoreError: it is a URL, but not of a bucket; or it is empty.
    """
    if isinstance(where, Remote):
        return where
    text = require_path(os.fspath(where))
    found = _URL.match(text)
    # pathlib makes one slash of two, and a command line hands over paths
    if found is None or not (found["scheme"] in SCHEMES or len(found["slashes"]) > 1):
        return Path(text)
    bucket, _, key = found["rest"].partition("/")
    if found["scheme"] not in SCHEMES or not bucket:
        raise StoreError(
            f"{text!r} is no place for runs; choose a folder, s3://BUCKET/PREFIX or "
            "gs://BUCKET/PREFIX"
        )
    return Remote(found["scheme"], bucket, "/".join(_parts(key)))


def require_path(text: str) -> str:
    """Returns what was given as a path, unless it is empty: pathlib would take that for `.`.

    Raises:
        StoreError: it is.
    """
    if not text:
        raise StoreError(
            "a path must be a non-empty string, got '' (a variable of the shell that is not set?); "
            "write '.' for the current folder"
        )
    return text


def joined(base: Path, where: str) -> Location:
    """Returns the place that is meant by `where` in the folder `base`."""
    place = location(where or ".")
    return place if isinstance(place, Remote) else base.absolute() / place.expanduser()


def _parts(text: str) -> list[str]:
    """Returns the parts of a key; `..` has no meaning there, and is refused."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise StoreError(f"{text!r} names no place in a bucket: it has a '..'")
    return parts
