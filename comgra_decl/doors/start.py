"""Start and finish sessions; shared by all ways of starting a traced program."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from comgra_decl.doors import environment
from comgra_decl.errors import ComgraError, MissingPackageError, SpecError, needed

if TYPE_CHECKING:
    from comgra_decl.record.context import RunContext
    from comgra_decl.record.session import Session
    from comgra_decl.spec import Spec

_log = logging.getLogger("comgra_decl")

_PLANNED = (
    "the program declares a spec of its own, which is ignored: comgra-decl plan uses the one on "
    "its command line, and stores nothing. To plan the program's own spec, set dry_run: true in it "
    "(in a Hydra application: python train.py +comgra=debug +comgra.dry_run=true)"
)


def start_session(spec: Spec, context: RunContext) -> Session:
    """Return a started session, or one that records nothing if starting failed.

    An unwritable folder or an internal error is logged once, and training continues. While
    `comgra-decl plan` runs the program, nothing else is recorded.
    """
    from comgra_decl.record.session import Session

    environment.taken()
    if environment.planned and spec.enabled:
        _log.warning(_PLANNED)
        spec = spec.model_copy(update={"enabled": False, "dry_run": False})
    session = _rehearsal(spec, context) if spec.dry_run else Session(spec, context=context)
    try:
        session.start()
    except (ComgraError, OSError) as error:
        _log.error("nothing is recorded: %s", error)
        finish_session(session)
    except Exception as error:  # noqa: BLE001  (an internal error must not stop training)
        _log.error("nothing is recorded because of an error in comgra_decl", exc_info=error)
        finish_session(session)
    else:
        if session.path is not None:
            environment.recorded(session, True)
    return session


def _rehearsal(spec: Spec, context: RunContext) -> Session:
    from comgra_decl.experiments.dry_run import Rehearsal

    try:
        needed("pandas", "read")
    except MissingPackageError as error:  # like any spec that cannot be fulfilled: before training
        raise SpecError([f"comgra.dry_run: {error}"]) from error
    return Rehearsal(spec, context=context)


def finish_session(session: Session, error: BaseException | None = None) -> None:
    """Finish a session; an internal error is logged and never hides an error in training.

    Args:
        session: the session.
        error: the error that ended the program, if any; the run then includes its post-mortem.
    """
    environment.recorded(session, False)
    try:
        if error is not None:
            session.failed(error)
        session.finish()
    except Exception as own:  # noqa: BLE001  (must not hide the training's own error)
        _log.error("the run in %s could not be finished", session.path, exc_info=own)
