"""Rule results of a run, stored while recording or computed on a background thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

from comgra_decl.query import open_run
from comgra_decl.rules import Correlation, Diagnosis, correlate, diagnose, stored
from comgra_decl.viewer.model.runview import RunView

Source = Literal["recorded", "looked"]


@dataclass(frozen=True, slots=True)
class Found:
    """Current rule results of a run.

    Attributes:
        diagnosis: The findings; None if no rules have run.
        correlations: The correlations; None if not computed yet.
        source: Whether `diagnosis` was stored during recording or computed afterwards.
        looking: Whether a check is running.
        problem: Error of the last check; "" if it succeeded.
    """

    diagnosis: Diagnosis | None
    correlations: tuple[Correlation, ...] | None = None
    source: Source = "recorded"
    looking: bool = False
    problem: str = ""


@dataclass
class _Look:
    """The `number`-th check of a whole run at a `revision` of its view."""

    revision: int
    number: int = 1
    over: threading.Event = field(default_factory=threading.Event)
    diagnosis: Diagnosis | None = None
    correlations: tuple[Correlation, ...] | None = None
    problem: str = ""


_looks: WeakKeyDictionary[RunView, _Look] = WeakKeyDictionary()
_turn = threading.Lock()  # one check at a time per process, because checks take CPU time and memory


def found(view: RunView) -> Found:
    """Return the latest check or, if records have been added since, the stored results."""
    look = _looks.get(view)
    kept: Diagnosis | None = view.now("stored findings", lambda: stored(view.run))
    if look is None:
        return Found(kept)
    current = look.diagnosis is not None and (look.revision == view.revision or kept is None)
    return Found(
        look.diagnosis if current else kept,
        look.correlations,
        "looked" if current else "recorded",
        not look.over.is_set(),
        look.problem,
    )


def may_be_behind(view: RunView) -> bool:
    """Return whether a program was killed before it could store the results for its last steps."""
    return view.run.state == "stopped" and not looked_at(view) and found(view).diagnosis is not None


def look(view: RunView) -> threading.Event:
    """Start a check of the whole run unless one is running; returns an event set at its end.

    Opens the run separately on a background thread, so that the page stays responsive. Sessions
    detect the end of the check through `looks`.
    """
    known = _looks.get(view)
    if known is not None and not known.over.is_set():
        return known.over
    attempt = _Look(view.revision)
    if known is not None:  # keep the previous result on screen
        attempt.diagnosis, attempt.correlations = known.diagnosis, known.correlations
        attempt.number = known.number + 1
    _looks[view] = attempt
    arguments = (attempt, view.run.path, view.number)
    threading.Thread(target=_work, args=arguments, name="comgra-look", daemon=True).start()
    return attempt.over


def looks(view: RunView) -> int:
    """Return the number of finished checks of a run."""
    look = _looks.get(view)
    return 0 if look is None else look.number - (not look.over.is_set())


def looked_at(view: RunView) -> bool:
    """Return whether a check has ever been started."""
    return view in _looks


def _work(attempt: _Look, path: object, rank: int | None) -> None:
    try:
        with _turn:
            run = open_run(str(path))
            run = run if rank is None else run.rank(rank)
            attempt.diagnosis = diagnose(run)
            attempt.correlations = tuple(correlate(run))
    except Exception as error:  # noqa: BLE001  (the page that requested it shows it)
        attempt.problem = f"{type(error).__name__}: {error}"
    finally:
        attempt.over.set()
