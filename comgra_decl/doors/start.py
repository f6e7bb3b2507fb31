"""What all ways of starting a traced program share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from comgra_decl.doors import environment
from comgra_decl.errors import ComgraError, SpecError

if TYPE_CHECKING:
    from comgra_decl.record.context import RunContext
    from comgra_decl.record.session import Session
    from comgra_decl.spec import Spec

_log = logging.getLogger("comgra_decl")


def start_session(spec: Spec, context: RunContext) -> Session:
    """Returns a session that has started, or one that records nothing if it could not.

    A folder that cannot be written or a fault of ours is said once, and the training goes on.
    """
    from comgra_decl.record.session import Session

    environment.taken()
    session = _rehearsal(spec, context) if spec.dry_run else Session(spec, context=context)
    try:
        session.start()
    except (ComgraError, OSError) as error:
        _log.error("nothing is recorded: %s", error)
        finish_session(session)
    except Exception as error:  # noqa: BLE001  (a fault of ours must not stop a training)
        _log.error("nothing is recorded because of an error in comgra_decl", exc_info=error)
        finish_session(session)
    if session.path is not None:
        environment.recorded(session, True)
    return session


def _rehearsal(spec: Spec, context: RunContext) -> Session:
    from comgra_decl.experiments.dry_run import Rehearsal

    return Rehearsal(spec, context=context)


def finish_session(session: Session) -> None:
    """Finishes a session; a fault of ours is said, and hides no error of the training."""
    environment.recorded(session, False)
    try:
        session.finish()
    except Exception as error:  # noqa: BLE001  (the training's own error is the one to be seen)
        _log.error("the end of the run in %s is missing", session.path, exc_info=error)


def wrong_spec(error: SpecError) -> str:
    """Returns what a program prints before it ends because its spec is wrong."""
    count = len(error.problems)
    problems = "1 problem" if count == 1 else f"{count} problems"
    return "\n".join([f"comgra: the spec has {problems}:", *(f"  {p}" for p in error.problems)])
