"""A tracker for Accelerate: `Accelerator(log_with=TraceTracker())`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from comgra_decl.annotations import note
from comgra_decl.errors import MissingPackageError
from comgra_decl.integrations.recording import log_numbers
from comgra_decl.record.secrets import plain

if TYPE_CHECKING:

    class GeneralTracker:
        """Accelerate's, whose module has no annotations."""

        def __init__(self) -> None: ...

else:
    try:
        from accelerate.tracking import GeneralTracker
    except ImportError:
        raise MissingPackageError(
            "comgra_decl.integrations.accelerate needs the 'accelerate' package, which is not "
            "installed: pip install 'comgra-decl[transformers]'"
        ) from None


class TraceTracker(GeneralTracker):
    """Store what the program logs with `accelerator.log` in the run that is being recorded.

    Numbers become metrics and strings notes, at the step in progress or, if logged after the
    optimizer step, at the step that has just ended. The configuration passed to `init_trackers`
    becomes a note, because the settings of a run are saved when it starts. The tracker starts no
    run, because Accelerate calls it in one process only: use it with `COMGRA=debug` or another
    entry point. Without a run, it does nothing.
    """

    name = "comgra"
    requires_logging_directory = False

    @property
    def tracker(self) -> None:
        """None: Accelerate asks for the object that a tracker wraps."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add a note with the configuration; passwords and keys are masked."""
        note(f"config: {json.dumps(plain(values))}")

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log each number and string; Accelerate's own step is not used."""
        log_numbers(values)
        for name, value in values.items():
            if isinstance(value, str):
                note(f"{name}: {value}")
