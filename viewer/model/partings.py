"""Finds, on a background thread, where the displayed run and another one diverge."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from comgra_decl.query import Parting, part
from comgra_decl.viewer.model.runview import RunView


@dataclass(slots=True)
class Search:
    """The search for the first difference between two runs; `found` and `problem` are its result.

    Attributes:
        there: The other run; weak, because a run keeps its search.
        found: The result; None while searching, or after an error.
        problem: Why there is no result; "" without an error.
    """

    there: ref[RunView]
    found: Parting | None = None
    problem: str = ""

    @property
    def over(self) -> bool:
        """Whether the search has ended."""
        return self.found is not None or self.problem != ""


_searches: WeakKeyDictionary[RunView, Search] = WeakKeyDictionary()
_ended: WeakKeyDictionary[RunView, int] = WeakKeyDictionary()
_turn = threading.Lock()  # one search at a time per process


def search(here: RunView, there: RunView) -> None:
    """Start a search; sessions notice its end through `ended`."""
    new = _searches[here] = Search(ref(there))
    threading.Thread(
        target=_work, args=(new, here, there), name="comgra_decl parting", daemon=True
    ).start()


def search_of(here: RunView, there: RunView | None) -> Search | None:
    """Return the last search that compared these runs, or None."""
    known = _searches.get(here)
    return known if known is not None and known.there() is there else None


def ended(here: RunView) -> int:
    """Return the number of searches of a run that have ended."""
    return _ended.get(here, 0)


def _work(search: Search, here: RunView, there: RunView) -> None:
    try:
        with _turn:
            search.found = part(here.run, there.run)
    except Exception as error:  # noqa: BLE001 - the page that asked shows it
        search.problem = str(error) or type(error).__name__
    finally:
        _ended[here] = _ended.get(here, 0) + 1
