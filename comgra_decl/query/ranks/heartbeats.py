"""The last sign of life of each rank, and which rank stopped first."""

from __future__ import annotations

import time
from dataclasses import dataclass

from comgra_decl.errors import ComgraError, shown
from comgra_decl.store import Reader
from comgra_decl.store.last_seen import last_seen

from .reader import JoinedReader
from .side_by_side import side_by_side

SILENT = 60.0
"""Seconds without a sign of life after which a rank counts as silent. A process reports its step at
least every ten seconds, also while it waits for other ranks, unless it is suspended or its machine
cannot be reached."""

ENDED_EARLY = ("failed", "stopped")
"""States of a rank whose program an error has ended, or whose process has disappeared."""


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of one rank.

    Attributes:
        rank: the rank.
        state: "waiting", "live", "silent", "finished", "failed" or "stopped".
        step: the last step that it reported or recorded; None before the first.
        seen: when it did so, in Unix seconds.
        machine: the name of its machine; "" if unknown.
    """

    rank: int
    state: str
    step: int | None
    seen: float
    machine: str = ""


def heartbeat_of(rank: int, reader: Reader, now: float | None = None) -> Heartbeat:
    """Return the last sign of life of a rank.

    Args:
        rank: the rank.
        reader: of the rank's own database.
        now: the time in Unix seconds; by default, the current time.
    """
    head, state = reader.head, reader.state
    recorded = [step for step in (head.get("step"),) if type(step) is int]
    seen, steps = float(head["time"]), recorded
    try:
        reported = last_seen(reader.path)
    except (ComgraError, OSError):  # the folder is being deleted, or cannot be read
        reported = None
    if reported is not None and reported["time"] >= seen:
        seen, steps = float(reported["time"]), [*recorded, int(reported["step"])]
    if state == "live" and (time.time() if now is None else now) - seen > SILENT:
        state = "silent"
    machine = str(reader.writer.get("host", ""))
    return Heartbeat(rank, state, max(steps, default=None), seen, machine)


def heartbeats(reader: Reader | JoinedReader) -> list[Heartbeat]:
    """Return the last sign of life of each rank; of a single process, one with rank 0."""
    now = time.time()
    readers = reader.readers if isinstance(reader, JoinedReader) else {0: reader}
    far = isinstance(reader, JoinedReader) and reader.far
    return side_by_side(lambda each: heartbeat_of(*each, now), readers.items(), far=far)


def first_stopped(found: list[Heartbeat]) -> Heartbeat | None:
    """Return the rank that failed or stopped first; None if all are running or have finished.

    A rank whose process has ended comes before one that is merely silent. If all ranks are silent,
    none of them is known to be the cause.
    """
    for states in (ENDED_EARLY, ("silent",)):
        those = [each for each in found if each.state in states]
        if those and (states is ENDED_EARLY or len(those) < len(found)):
            return min(those, key=lambda each: each.seen)
    return None


def stopped_text(found: list[Heartbeat]) -> str | None:
    """Return a sentence about the rank that stopped first; None for a single process, and for none.

    For example: "rank 1 of 8 stopped first, at or after step 2, 14 s before rank 0". If the ranks
    are on several machines, its machine is named, too.
    """
    first = first_stopped(found)
    if first is None or len(found) < 2:
        return None
    others = [each for each in found if each is not first]
    several = len({each.machine for each in found}) > 1
    where = f"on {shown(first.machine)} " if several and first.machine else ""
    text = f"rank {first.rank} of {len(found)} {where}"
    early = first.state in ENDED_EARLY
    text += f"{first.state} first" if early else "no longer responds"
    if first.step is not None:
        text += f", at or after step {first.step}"
    if early:
        following = min(others, key=lambda each: each.seen)
        gap = following.seen - first.seen
        return f"{text}, {gap:.0f} s before rank {following.rank}" if gap >= 1 else text
    last = max(others, key=lambda each: each.seen)
    return f"{text}; rank {last.rank} was seen {last.seen - first.seen:.0f} s later"
