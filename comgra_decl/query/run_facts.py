"""A run as a whole: where it is, who wrote it, and with what."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import pandas as pd

from comgra_decl.errors import DamagedRunError
from comgra_decl.store.checks import NotedChecks, noted_checks
from comgra_decl.store.location import Location, Where, location

from .ranks.differences import differences_table
from .ranks.reader import JoinedReader, open_reader
from .ranks.view import JoinedView
from .snapshot import Snapshot
from .tables import sessions_table

if TYPE_CHECKING:
    from comgra_decl.spec import Spec

_log = logging.getLogger("comgra_decl")


class RunFacts:
    """What is known of a run before any of its records is read; `Run` adds the records."""

    def __init__(self, path: Where, *, rank: int | None = None) -> None:
        """Use `open_run`, and `rank` of a run that several processes have written."""
        self.path: Location = location(path)
        self._reader = open_reader(self.path, rank)
        self._current: Snapshot | None = None
        self._noted: tuple[Snapshot | None, NotedChecks | None] = None, None
        self._rank = rank

    # -- what it is

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.path.absolute().name

    @property
    def group(self) -> str:
        """Name of the folder that holds the run."""
        return self.path.absolute().parent.name

    @property
    def state(self) -> str:
        """Returns "waiting" (no record yet), "live", "finished" or "stopped".

        A stopped run's writer is gone without having closed the run, or gave up: see `error`.
        """
        return self._reader.state

    @property
    def error(self) -> str | None:
        """Why the recording stopped before the training did, if it did."""
        error = self._reader.head.get("error")
        return None if error is None else str(error)

    @property
    def started(self) -> float:
        """Start of the run in unix seconds."""
        return self._reader.meta.started

    @property
    def ranks(self) -> list[int]:
        """The ranks of a distributed training that were recorded; [0] where there was one process.

        A run of several shows them joined: a record is there once all ranks have it.
        """
        reader = self._reader
        if isinstance(reader, JoinedReader):
            return list(reader.readers)
        return [(reader.meta.facts.get("ranks") or {"rank": self._rank or 0})["rank"]]

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that were to be recorded and left nothing."""
        return self._reader.missing if isinstance(self._reader, JoinedReader) else []

    def rank(self, number: int) -> Self:
        """Returns one rank of the run, with all that it has recorded.

        Raises:
            UnknownNameError: that rank was not recorded.
        """
        return type(self)(self.path, rank=number)

    @property
    def sessions(self) -> pd.DataFrame:
        """The programs that wrote the run, one after another; more than one if it was resumed.

        `started` (unix seconds), `step` (the first one; <NA> for the session that began the run, or
        if it never trained), `first_record`.
        """
        return sessions_table(self._snapshot.view.sessions, self.started)

    def rank_differences(self) -> pd.DataFrame:
        """Returns tensors that ought to be the same on all ranks and are not: usually none.

        Parameters of data parallel training, their gradients as the optimizer used them, its
        states and updates. Up to 16 records are looked at; `first_step` is the first of them that
        differed, `difference` the largest relative one of any statistic then.
        """
        view = self._snapshot.view
        return differences_table(view.differences if isinstance(view, JoinedView) else [])

    @property
    def spec(self) -> Spec:
        """The spec the run was recorded with."""
        from comgra_decl.spec import Spec

        try:
            return Spec.model_validate(self._reader.meta.spec)
        except (ValueError, RecursionError) as error:
            lines = str(error).splitlines()
            raise DamagedRunError(
                f"{str(self.path)!r}: the spec in 'meta/run.json' is none: {' '.join(lines[:3])}"
            ) from error

    @property
    def config(self) -> dict[str, Any] | None:
        """The traced program's own configuration, if it had one."""
        return self._reader.meta.config

    @property
    def facts(self) -> dict[str, Any]:
        """Versions, command, commit and host."""
        return self._reader.meta.facts

    @property
    def modules(self) -> list[dict[str, Any]]:
        """The modules of the traced models."""
        return list(self._snapshot.view.document("modules") or [])

    @property
    def report(self) -> dict[str, Any]:
        """What was matched, fired and written per entry of the spec, and the warnings.

        `keep`, where the spec has it: how often each trigger fired, and what was stored for that.
        `writer`: seconds of processor time that writing took (`cpu`), of the whole run (`wall`),
        their ratio (`share`), and for which the training waited for the writer (`waited`).
        `damage`: what is left out because it is damaged, where something is.
        """
        view = self._snapshot.view
        documents = {
            "keep": view.document("keep"),
            "writer": self._reader.head.get("usage"),
            "damage": self.damage,
        }
        said = {name: document for name, document in documents.items() if document}
        report = (view.document("report") or {}) | said
        if self.state in _ENDED and (troubles := _troubles(report.get("keep") or {})):
            report["warnings"] = [*report.get("warnings", []), *troubles]
        return report

    @property
    def damage(self) -> list[str]:
        """What is left out because it is damaged, a line each; empty where nothing is.

        Damage is found when it is met: by opening the run, and by each read of a series, of all
        tensors or of histograms, in which such records are missing. `comgra-decl verify` looks at
        everything. Verdicts of experiments count among it: see `experiments`.
        """
        snapshot, checks = self._noted
        if checks is None or snapshot is not self._snapshot:
            checks = self.noted()
        return [*self._snapshot.view.damage, *checks.damage]

    def noted(self) -> NotedChecks:
        """Looks for verdicts of experiments beside the run, and says why some cannot be read."""
        _, before = self._noted
        checks = noted_checks(self.path)
        for loss in checks.damage:
            if before is None or loss not in before.damage:
                _log.warning("comgra: %s: left out because it is damaged: %s", self.path, loss)
        self._noted = self._snapshot, checks
        return checks

    def refresh(self) -> bool:
        """Looks for new records; returns whether anything is new."""
        return self._reader.poll()

    # -- how it shows itself

    @property
    def _snapshot(self) -> Snapshot:
        view, current = self._reader.view, self._current
        if current is None or current.view is not view:
            current = self._current = Snapshot(view)
        return current

    def __repr__(self) -> str:
        head = self._reader.head
        one = "" if self._rank is None else f" rank {self._rank}"
        return f"<Run {str(self.path)!r}{one}: {self.state}, {head['n']} records>"


_ENDED = ("finished", "stopped")
"""States of runs of which it is known what never happened in them."""


def _troubles(keep: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each trigger of `keep.when` that could not work."""
    return [
        f"keep.when: {trigger['name']} {'stopped' if trigger.get('fired') else 'never fired'}: "
        f"{trigger['trouble']}"
        for trigger in keep.get("triggers", [])
        if trigger.get("trouble")
    ]
