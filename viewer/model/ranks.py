"""Names of the individual ranks of a distributed run."""

from __future__ import annotations

_MARK = "//rank-"  # run paths never contain a double slash


def with_rank(run: str, rank: int | None) -> str:
    """Return the name of one rank of a run, or the run's name for None."""
    base = without_rank(run)
    return base if rank is None else f"{base}{_MARK}{rank}"


def without_rank(run: str) -> str:
    """Return the name of a rank's run."""
    return run.partition(_MARK)[0]


def rank_in(run: str) -> int | None:
    """Return the rank in a name, which may be untrusted; None if it is missing or malformed."""
    number = run.partition(_MARK)[2]
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 9 else None


def spoken(run: str) -> str:
    """Return a run's or rank's display name."""
    rank = rank_in(run)
    return without_rank(run) + ("" if rank is None else f" \u00b7 rank {rank}")
