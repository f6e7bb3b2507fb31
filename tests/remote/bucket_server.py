"""A bucket in this process that is slow and fails on demand, and counts what it is asked.

Speaks as much of S3's REST API and of Google Cloud Storage's JSON API as TensorStore uses:
https://docs.aws.amazon.com/AmazonS3/latest/API and
https://cloud.google.com/storage/docs/json_api/v1.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Fault = int | str
"""The status of an answer; "reset" for a connection that is closed before the request is carried
out, and "lost" for one that is closed after it."""


@dataclass
class Bucket:
    """The content of a bucket, and how it behaves.

    Attributes:
        objects: content and generation by name.
        asked: the number of requests of each method since the last reset.
        latency: seconds before each answer.
        fault: what happens to a request instead, given its method and its number; None: nothing.
        failed: the number of requests that it did not answer as asked.
        gathers: whether requests wait until no other arrives, and are then answered together.
        rounds: how often it has done so. One request after the other takes as many rounds.
    """

    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    latency: float = 0.0
    fault: Callable[[str, int], Fault | None] = lambda _method, _number: None
    failed: int = 0
    gathers: bool = False
    rounds: int = 0
    _generation: int = 0
    _waiting: int = 0
    _lock: threading.Condition = field(default_factory=threading.Condition)

    def arrive(self, method: str) -> Fault | None:
        """Count a request, wait, and return what happens to it instead of an answer."""
        with self._lock:
            self.asked[method] += 1
            found = self.fault(method, self.asked.total())
            self.failed += found is not None
        if self.gathers:
            self._gather()
        elif self.latency:
            time.sleep(self.latency)
        return found

    def _gather(self) -> None:
        """Wait until no request has arrived for a while."""
        with self._lock:
            own = self.rounds
            self._waiting += 1
            self._lock.notify_all()
            while self.rounds == own:
                before = self._waiting
                self._lock.wait(_QUIET)
                if self.rounds == own and self._waiting == before:
                    self.rounds += 1
                    self._waiting = 0
                    self._lock.notify_all()

    def get(self, name: str) -> tuple[bytes, int] | None:
        """Return the content and the generation of an object."""
        with self._lock:
            return self.objects.get(name)

    def put(self, name: str, content: bytes | None, allowed: Callable[[int], bool]) -> int | None:
        """Replace or remove an object if its generation, 0 without one, is allowed.

        Returns:
            The new generation; None if it is not allowed.
        """
        with self._lock:
            if not allowed(self.objects.get(name, (b"", 0))[1]):
                return None
            self._generation += 1
            if content is None:
                self.objects.pop(name, None)
            else:
                self.objects[name] = content, self._generation
            return self._generation

    def names(self, prefix: str) -> list[str]:
        """Return the names that start with a prefix."""
        with self._lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    def reset(self) -> None:
        """Forget what was asked, and answer at once again."""
        with self._lock:
            self.asked, self.failed, self.rounds = Counter(), 0, 0
            self.latency, self.gathers = 0.0, False
            self.fault = lambda _method, _number: None


_QUIET = 0.05
"""Seconds without another request after which those that wait are answered."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bucket: Bucket
    _lost = False  # whether the client gets no answer to the request

    def _answer_request(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(length)
        if self.headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
            content = _unchunked(content)
        fault = self.bucket.arrive(self.command)
        if fault == "reset":
            self.close_connection = True
            return
        self._lost = fault == "lost"
        if isinstance(fault, int):
            self._answer(fault, b"")
            return
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query, True).items()}
        if url.path.startswith(("/storage/v1/", "/upload/storage/v1/")):
            self._gcs(url.path, query, content)
        else:
            self._s3(url.path, query, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer_request  # noqa: N815

    def _answer(self, status: int, content: bytes, **headers: str) -> None:
        if self._lost:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _content(self, found: tuple[bytes, int] | None, **headers: str) -> None:
        """Answer with an object, or with the part that was asked for."""
        if found is None:
            self._answer(404, b"")
            return
        content, wanted = found[0], self.headers.get("Range")
        if wanted is None:
            self._answer(200, content, **headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        if not first:
            start, stop = max(0, len(content) - int(last)), len(content)
        else:
            start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
        if start >= len(content):
            self._answer(416, b"", Content_Range=f"bytes */{len(content)}")
            return
        span = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(206, content[start:stop], Content_Range=span, **headers)

    # -- S3

    def _s3(self, path: str, query: dict[str, str], content: bytes) -> None:
        _, _, name = unquote(path).removeprefix("/").partition("/")
        if not name and self.command == "GET":
            self._s3_list(query)
            return
        found = self.bucket.get(name)
        tag = "" if found is None else _tag(found[1])
        if self.command in ("GET", "HEAD"):
            if found is None:
                self._answer(404, b"")
            elif self.headers.get("If-None-Match") == tag:
                self._answer(304, b"", ETag=tag)
            elif self.headers.get("If-Match") not in (None, tag):
                self._answer(412, b"")
            else:
                self._content(found, ETag=tag)
            return

        def allowed(generation: int) -> bool:
            now = _tag(generation) if generation else None
            unless, only = self.headers.get("If-None-Match"), self.headers.get("If-Match")
            return (unless != "*" or now is None) and (only is None or only == now)

        written = self.bucket.put(name, content if self.command == "PUT" else None, allowed)
        if written is None:
            self._answer(412, b"")
        else:
            self._answer(200 if self.command == "PUT" else 204, b"", ETag=_tag(written))

    def _s3_list(self, query: dict[str, str]) -> None:
        names = [
            n
            for n in self.bucket.names(query.get("prefix", ""))
            if n > query.get("start-after", "")
        ]
        items = "".join(f"<Contents><Key>{escape(n)}</Key><Size>1</Size></Contents>" for n in names)
        text = f"<IsTruncated>false</IsTruncated><KeyCount>{len(names)}</KeyCount>{items}"
        xml = f"<ListBucketResult>{text}</ListBucketResult>"
        self._answer(200, xml.encode(), Content_Type="application/xml")

    # -- Google Cloud Storage

    def _gcs(self, path: str, query: dict[str, str], content: bytes) -> None:
        _, _, rest = path.partition("/o")
        name = query.get("name") or unquote(rest.removeprefix("/"))

        def allowed(generation: int) -> bool:
            only, unless = query.get("ifGenerationMatch"), query.get("ifGenerationNotMatch")
            return (only is None or int(only) == generation) and (
                unless is None or int(unless) != generation
            )

        if self.command == "GET" and not name:
            found = self.bucket.names(query.get("prefix", ""))
            first, last = query.get("startOffset", ""), query.get("endOffset")
            items = [{"name": n} for n in found if n >= first and (last is None or n < last)]
            self._json({"kind": "storage#objects", "items": items})
        elif self.command == "GET":
            one = self.bucket.get(name)
            if one is not None and not allowed(one[1]):
                self._answer(304 if "ifGenerationNotMatch" in query else 412, b"")
            elif one is not None and query.get("alt") != "media":
                self._json(_described(name, one))
            else:
                generation = "" if one is None else str(one[1])
                self._content(one, x_goog_generation=generation)
        elif (written := self.bucket.put(name, self._own(content), allowed)) is None:
            self._answer(412, b"")
        elif self.command == "DELETE":
            self._answer(204, b"")
        else:
            self._json(_described(name, (content, written)))

    def _own(self, content: bytes) -> bytes | None:
        return None if self.command == "DELETE" else content

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode(), Content_Type="application/json")

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Print nothing."""


def _described(name: str, found: tuple[bytes, int]) -> dict[str, str]:
    content, generation = found
    time_of_writing = "2026-01-01T00:00:00Z"
    return {
        "name": name,
        "size": str(len(content)),
        "generation": str(generation),
        "md5Hash": "",
        "timeCreated": time_of_writing,
        "updated": time_of_writing,
        "storageClass": "STANDARD",
    }


def _tag(generation: int) -> str:
    return f'"{hashlib.md5(str(generation).encode()).hexdigest()}"'


def _unchunked(content: bytes) -> bytes:
    """Return the content of a signed, chunked upload."""
    parts, at = [], 0
    while at < len(content):
        line = content.index(b"\r\n", at)
        size = int(content[at:line].partition(b";")[0], 16)
        if not size:
            break
        parts.append(content[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(parts)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing about clients that have gone."""


@contextmanager
def bucket_server() -> Iterator[tuple[str, Bucket]]:
    """Runs a server; yields its URL and its bucket, which any name refers to."""
    bucket = Bucket()

    class Handler(_Handler):
        """Answers for this bucket."""

    Handler.bucket = bucket
    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bucket
    finally:
        server.shutdown()
        server.server_close()
