"""Tracing from code, for example in notebooks: `with comgra.trace("debug"):`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.doors.start import finish_session, start_session
from comgra_decl.errors import SpecError
from comgra_decl.record.context import RunContext
from comgra_decl.record.secrets import plain

if TYPE_CHECKING:
    from comgra_decl.record.session import Session
    from comgra_decl.spec import Spec


@contextmanager
def trace(
    spec: str | Path | Mapping[str, Any] | Spec = "debug",
    *,
    root: str | Path | None = None,
    group: str | None = None,
    name: str | None = None,
    overrides: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
) -> Iterator[Session]:
    """Trace everything trained inside the `with` block, or inside a decorated function.

    Args:
        spec: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec.
        root: folder that contains all groups; defaults to the spec's, or "runs".
        group: name of the folder that contains the runs to be compared; defaults to the script's
            name.
        name: name of the run's own folder; defaults to the current time.
        overrides: changes to the spec, such as "schedule.every=10".
        config: the program's own settings, such as {"lr": 0.1}, by which runs are compared. Values
            that JSON cannot hold are stored as text, and those of secret names are masked.

    Yields:
        The session; its `path` is the run's folder, or None if nothing is recorded.

    Raises:
        SpecError: the spec is invalid; lists every problem, one per line. Or `config` is
            no mapping.
    """
    from comgra_decl.doors.checked_spec import declared

    place = {"root": root, "group": group, "name": name}
    resolved = declared(spec, overrides, place=place)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    context = RunContext.of_script(script)
    if config is not None:
        given: object = config
        if not isinstance(given, Mapping):
            kind = type(given).__name__
            raise SpecError(
                [f"config must be a mapping of settings, got {kind}; pass vars(args) for arguments"]
            )
        context = replace(context, config=plain(given))
    session = start_session(resolved, context)
    try:
        yield session
    except BaseException as error:
        finish_session(session, error)
        raise
    finish_session(session)
