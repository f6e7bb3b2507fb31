"""What the rules say of a run: as it was stored, or looked at again on a thread of its own."""

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
    """What is known of a run by now.

    Attributes:
        diagnosis: the findings; None where no rule has looked yet.
        correlations: what goes together; None until somebody has looked for it.
        source: whether `diagnosis` was stored while the run was recorded or worked out since.
        looking: whether it is being worked out just now.
        problem: why the last attempt failed, "" if it did not.
    """

    diagnosis: Diagnosis | None
    correlations: tuple[Correlation, ...] | None = None
    source: Source = "recorded"
    looking: bool = False
    problem: str = ""


@dataclass
class _Look:
    """The `number`-th attempt to look at a whole run; of `revision` of its view."""

    revision: int
    number: int = 1
    over: threading.Event = field(default_factory=threading.Event)
    diagnosis: Diagnosis | None = None
    correlations: tuple[Correlation, ...] | None = None
    problem: str = ""


_looks: WeakKeyDictionary[RunView, _Look] = WeakKeyDictionary()
_turn = threading.Lock()  # one run at a time, whoever asks: it takes processor and memory


def found(view: RunView) -> Found:
    """Returns what is known: the newest look if nothing was recorded since, else what is stored."""
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


def look(view: RunView) -> threading.Event:
    """Begins to look at all of a run, unless somebody has begun; returns what tells the end.

    It is read through another object, on a thread of its own, so that the page goes on. Sessions
    learn from `looks` that it is over, whoever began.
    """
    known = _looks.get(view)
    if known is not None and not known.over.is_set():
        return known.over
    attempt = _Look(view.revision)
    if known is not None:  # stays on screen meanwhile
        attempt.diagnosis, attempt.correlations = known.diagnosis, known.correlations
        attempt.number = known.number + 1
    _looks[view] = attempt
    arguments = (attempt, view.run.path, view.number)
    threading.Thread(target=_work, args=arguments, name="comgra-look", daemon=True).start()
    return attempt.over


def looks(view: RunView) -> int:
    """Returns how often somebody has looked at a run by now, to the end."""
    look = _looks.get(view)
    return 0 if look is None else look.number - (not look.over.is_set())


def looked_at(view: RunView) -> bool:
    """Whether somebody has looked, or tried to."""
    return view in _looks


def _work(attempt: _Look, path: object, rank: int | None) -> None:
    try:
        with _turn:
            run = open_run(str(path))
            run = run if rank is None else run.rank(rank)
            attempt.diagnosis = diagnose(run)
            attempt.correlations = tuple(correlate(run))
    except Exception as error:  # noqa: BLE001  (it is shown where it was asked for)
        attempt.problem = f"{type(error).__name__}: {error}"
    finally:
        attempt.over.set()
