"""The hash of a dependency graph; identical graphs have identical hashes on any machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comgra_decl.records import SlotKey


def stable_hash(
    keys: Sequence[SlotKey], kinds: Sequence[str], edges: Sequence[tuple[int, int, bool]]
) -> str:
    """Return the BLAKE2b hash of the sorted names in 16 hex digits; stable, unlike `hash`."""
    digest = hashlib.blake2b(digest_size=8)
    for line in sorted(_lines(keys, kinds, edges)):
        digest.update(line.encode())
    return digest.hexdigest()


def _lines(
    keys: Sequence[SlotKey], kinds: Sequence[str], edges: Sequence[tuple[int, int, bool]]
) -> Iterator[str]:
    yield from (f"{tuple(key)} {kind}\n" for key, kind in zip(keys, kinds, strict=True))
    yield from (f"{tuple(keys[s])} -> {tuple(keys[t])} {grad}\n" for s, t, grad in edges)
