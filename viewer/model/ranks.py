"""How one rank of a distributed run is called, where a run is."""

from __future__ import annotations

_MARK = "//rank-"  # no path of a run has two slashes in a row


def with_rank(run: str, rank: int | None) -> str:
    """Returns the name of one rank of a run, or for None the run's own."""
    base = without_rank(run)
    return base if rank is None else f"{base}{_MARK}{rank}"


def without_rank(run: str) -> str:
    """Returns the name of the run to which a rank belongs."""
    return run.partition(_MARK)[0]


def rank_in(run: str) -> int | None:
    """Returns the rank that a name tells; untrusted, so None for nonsense."""
    number = run.partition(_MARK)[2]
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 9 else None


def spoken(run: str) -> str:
    """Returns a name as people read it."""
    rank = rank_in(run)
    return without_rank(run) + ("" if rank is None else f" \u00b7 rank {rank}")
