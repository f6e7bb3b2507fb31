"""What the rules say of a run: as it was stored, or looked at again on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
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
    """One attempt to look at a whole run; of `revision` of its view."""

    revision: int
    running: bool = True
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
        look.running,
        look.problem,
    )


def look(view: RunView, done: Callable[[], None]) -> None:
    """Begins to look at all of a run; nothing happens if somebody else has begun.

    Args:
        view: of the run; read through another object, so that the page goes on.
        done: called when it is over, on a thread of its own.
    """
    known = _looks.get(view)
    if known is not None and known.running:
        return
    attempt = _Look(view.revision)
    if known is not None:  # stays on screen meanwhile
        attempt.diagnosis, attempt.correlations = known.diagnosis, known.correlations
    _looks[view] = attempt
    path = view.run.path
    arguments = (attempt, path, done)
    threading.Thread(target=_work, args=arguments, name="comgra-look", daemon=True).start()


def looked_at(view: RunView) -> bool:
    """Whether somebody has looked, or tried to."""
    return view in _looks


def _work(attempt: _Look, path: object, done: Callable[[], None]) -> None:
    try:
        with _turn:
            run = open_run(str(path))
            attempt.diagnosis = diagnose(run)
            attempt.correlations = tuple(correlate(run))
    except Exception as error:  # noqa: BLE001  (it is shown where it was asked for)
        attempt.problem = f"{type(error).__name__}: {error}"
    finally:
        attempt.running = False
        done()
