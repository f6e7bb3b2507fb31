"""Start and finish runs on behalf of a framework; shared by the callbacks of all frameworks."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.annotations import kpi
from comgra_decl.doors.start import finish_session, start_session
from comgra_decl.record.context import RunContext
from comgra_decl.record.secrets import plain

if TYPE_CHECKING:
    from comgra_decl.record.session import Session
    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location


class Recording:
    """Starts and finishes runs; its arguments are checked on construction.

    Args:
        spec: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec.
        root: folder that contains all groups; defaults to the spec's.
        group: name of the folder that contains the runs to be compared; defaults to the script's
            name.
        name: name of the run's own folder; defaults to the current time. If the name already
            exists, a number is appended.
        overrides: changes to the spec, such as "schedule.every=10".

    Raises:
        SpecError: the spec is invalid; lists every problem, one per line.
    """

    def __init__(
        self,
        spec: str | Path | Mapping[str, Any] | Spec,
        *,
        root: str | Path | None,
        group: str | None,
        name: str | None,
        overrides: Sequence[str],
    ) -> None:
        from comgra_decl.doors.checked_spec import declared

        place = {"root": root, "group": group, "name": name}
        self._spec = declared(spec, overrides, place=place)
        self._session: Session | None = None
        self.path: Location | None = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start a run; finish the current one first, if any.

        Args:
            config: the settings of the framework and the model, saved with the run.
        """
        self.end()
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        context = replace(RunContext.of_script(script), config=plain(config))
        self._session = start_session(self._spec, context)
        self.path = self._session.path

    def end(self, error: BaseException | None = None) -> None:
        """Finish the current run, if any; after an error, the run includes the post-mortem."""
        session, self._session = self._session, None
        if session is not None:
            finish_session(session, error)

    @property
    def open(self) -> bool:
        """Whether a run is being recorded."""
        return self._session is not None

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Record metrics as `trainer/NAME`, because their `loss` is rarely the loss of a step."""
        if self._session is not None:
            log_numbers(metrics, prefix="trainer/")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_session": None}  # a session belongs to its process


def log_numbers(metrics: Mapping[str, Any], *, prefix: str = "") -> None:
    """Log the numbers among what a framework logs, if a run is being recorded.

    A metric called `loss` becomes `logged/loss`, because the loss of each step has this name.
    """
    for name, value in metrics.items():
        if _is_number(value):
            kpi("logged/loss" if prefix + name == "loss" else f"{prefix}{name}", value)


def _is_number(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
