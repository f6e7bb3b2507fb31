"""Find out which data files of a database its newest index needs, in a process of its own.

TensorStore's `ocdbt.dump` keeps up to 28 kB of memory for every index node that it has read. This
file is therefore also a program, which reads a part of the index and ends. It imports nothing of
ours and inherits nothing of the training, neither threads nor CUDA.

A data file holds the values of keys, nodes of the index, or both. The index is a tree: its leaves
contain keys and the places of their values, the other nodes contain the places of nodes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_NODES = 4096
"""Nodes that one process reads, which take up to 115 MB."""

_PLACE = re.compile(r"(d/[0-9a-f]{32}):\d+:(\d+)")


@dataclass(frozen=True)
class Part:
    """What was found in a part of the index.

    Attributes:
        keys: keys to write again, so that the old files are no longer needed.
        size: bytes of their values.
        after: the first key of the next part; None if there is none.
        version: the version of the database whose index it is.
        lists: files that contain the lists of old versions.
    """

    keys: list[bytes]
    size: int
    after: bytes | None
    version: int
    lists: frozenset[str]


def question_of(
    database: Path,
    *,
    after: bytes = b"",
    old: Collection[str],
    kept: Collection[str] = (),
    keys: int,
    size: int,
) -> dict[str, Any]:
    """Return the question of a search, as JSON.

    Args:
        database: the folder of the database.
        after: the first key of the part.
        old: files that are to be replaced.
        kept: files that refer to none of them. What is below nodes in them is left out.
        keys: number of keys after which the part ends.
        size: number of bytes after which it ends.
    """
    return {
        "database": str(database),
        "path": [os.fspath(each) for each in sys.path],
        "after": after.decode("latin-1"),
        "old": [*old],
        "kept": [*kept],
        "keys": keys,
        "size": size,
        "nodes": MOST_NODES,
    }


def part_of(answer: Mapping[str, Any]) -> Part:
    """Return the part that an answer, as JSON, describes."""
    after = answer["after"]
    return Part(
        keys=[key.encode("latin-1") for key in answer["keys"]],
        size=answer["size"],
        after=None if after is None else after.encode("latin-1"),
        version=answer["version"],
        lists=frozenset(answer["lists"]),
    )


class Search:
    """A search in the newest index for what is in files that are to be replaced."""

    def __init__(self, question: dict[str, Any]) -> None:
        """Start the process.

        Args:
            question: see `question_of`.

        Raises:
            OSError: it could not be started.
        """
        if getattr(sys, "frozen", False) or "python" not in Path(sys.executable or "").name.lower():
            raise OSError("another program contains Python")  # which would be started again
        with ExitStack() as stack, tempfile.TemporaryFile() as file:
            # a pipe could be full
            self._answer = stack.enter_context(tempfile.TemporaryFile())
            file.write(json.dumps(question).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).resolve())],
                stdin=file,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
            )
            stack.pop_all()  # `stop` closes it

    def ended(self, *, wait: bool = False) -> bool:
        """Return whether the process has ended.

        Args:
            wait: whether to wait for its end.
        """
        if wait:
            self._process.wait()
        return self._process.poll() is not None

    def found(self) -> Part:
        """Return what was found, once the process has ended.

        Raises:
            OSError: the process failed, for example because a file is damaged.
        """
        self._process.wait()
        self._answer.seek(0)
        text = self._answer.read()
        self.stop()
        if self._process.returncode or not text:
            raise OSError(f"the search ended with {self._process.returncode}")
        return part_of(json.loads(text))

    def stop(self) -> None:
        """End the process. Idempotent."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        self._answer.close()


# -- in the process --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the index whose keys may be in files that are to be replaced.

    Attributes:
        prefix: beginning of all its keys.
        entries: its keys and where their values are.
        end: first key that is not in it; None for the last leaf.
        touched: whether one of its keys must be written again even if all its values can stay,
            because it, or a node above it, is in a replaced file.
    """

    prefix: bytes
    entries: list[Any]
    end: bytes | None
    touched: bool


class _Index:
    """Reads the leaves of the newest index with keys from `after` on, in order."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        import tensorstore as ts

        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "data_copy_concurrency": {"limit": 1},
                "file_io_concurrency": {"limit": 1},
            }
        )
        base = {"driver": "file", "path": asked["database"] + "/"}
        self._store = ts.KvStore.open(base, context=self._context).result()
        self._dump = ts.ocdbt.dump
        self._old, self._kept = frozenset(asked["old"]), frozenset(asked["kept"])
        self._after: bytes = asked["after"].encode("latin-1")
        self.manifest = self._read(None)
        self.nodes = 0

    def leaves(self) -> Iterator[_Leaf]:
        """Yield the leaves."""
        root = self.manifest["versions"][-1].get("root", {}).get("location")
        if root is not None:
            yield from self._below(self._read(root), b"", None, _file(root) in self._old)

    def _below(
        self, content: Any, prefix: bytes, end: bytes | None, touched: bool
    ) -> Iterator[_Leaf]:
        """Yield the leaves below a node, or the node itself; the arguments are as in `_Leaf`."""
        self.nodes += 1
        entries = content["entries"]
        if not content["height"]:
            yield _Leaf(prefix, entries, end, touched)
            return
        ends = [prefix + entry["key"] for entry in entries[1:]] + [end]
        for at, (entry, until) in enumerate(zip(entries, ends, strict=True)):
            first = touched and not at
            file = _file(entry["location"])
            if (until is None or until > self._after) and (first or file not in self._kept):
                inner = prefix + entry["subtree_common_prefix"]
                node = self._read(entry["location"])
                yield from self._below(node, inner, until, first or file in self._old)

    def _read(self, place: str | None) -> Any:
        """Read a node of the index; None: the manifest."""
        return self._dump(self._store, place, context=self._context).result()


def answer_to(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a question, as JSON; see `question_of` and `part_of`."""
    old = frozenset(asked["old"])
    index = _Index(asked)
    keys: list[str] = []
    size, after = 0, None
    for leaf in index.leaves():
        here = []
        for entry in leaf.entries:
            place = _PLACE.search(entry.get("indirect_value", ""))
            if place is not None and place[1] in old:
                here.append(entry["key"])
                size += int(place[2])
        if leaf.touched and not here:
            here = [entry["key"] for entry in leaf.entries][:1]
        keys += [(leaf.prefix + key).decode("latin-1") for key in here]
        if size >= asked["size"] or len(keys) >= asked["keys"] or index.nodes >= asked["nodes"]:
            after = leaf.end
            break
    lists = [_file(node["location"]) for node in index.manifest["version_tree_nodes"]]
    return {
        "keys": keys,
        "size": size,
        "after": None if after is None else after.decode("latin-1"),
        "version": index.manifest["versions"][-1]["generation_number"],
        "lists": lists,
    }


def _file(location: str) -> str:
    found = _PLACE.search(location)
    return "" if found is None else found[1]


def _main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    sys.path.extend(asked["path"])
    if hasattr(os, "nice"):
        os.nice(10)
    sys.stdout.write(json.dumps(answer_to(asked)))


if __name__ == "__main__":
    _main()
