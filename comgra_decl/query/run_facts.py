"""Facts about a run as a whole: location, state, sessions, spec and report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import pandas as pd

from comgra_decl.errors import DamagedRunError
from comgra_decl.records import ENDED, MESH
from comgra_decl.store.checks import NotedChecks, noted_checks
from comgra_decl.store.location import Location, Where, location

from .ranks.differences import differences_table
from .ranks.heartbeats import heartbeats, stopped_text
from .ranks.reader import JoinedReader, open_reader
from .ranks.view import JoinedView
from .snapshot import Snapshot
from .tables import sessions_table

if TYPE_CHECKING:
    from comgra_decl.spec import Spec

_log = logging.getLogger("comgra_decl")


class RunFacts:
    """Facts about a run that do not require its records; `Run` adds the records."""

    def __init__(self, path: Where, *, rank: int | None = None) -> None:
        """Use `open_run`; use `rank` for a run written by multiple processes."""
        self.path: Location = location(path)
        self._reader = open_reader(self.path, rank)
        self._current: Snapshot | None = None
        self._noted: tuple[Snapshot | None, NotedChecks | None] = None, None
        self._rank = rank

    # -- identity and state

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
        """State of the run: "waiting" (no record yet), "live", "finished", "failed" or "stopped".

        A run is "failed" if an exception other than an interruption (Ctrl-C) has ended the program;
        see `ending`. It is "stopped" if its writer ended without closing the run, or if recording
        stopped early; see `error`.
        """
        return self._reader.state

    @property
    def error(self) -> str | None:
        """Why recording stopped before training ended; None if recording did not stop early."""
        error = self._reader.head.get("error")
        return None if error is None else str(error)

    @property
    def started(self) -> float:
        """Start of the run in Unix seconds."""
        return self._reader.meta.started

    @property
    def ranks(self) -> list[int]:
        """Recorded ranks of a distributed training job; [0] for a single process.

        If there are several ranks, the run combines their records. A record appears as soon as all
        ranks have written it.
        """
        reader = self._reader
        if isinstance(reader, JoinedReader):
            return list(reader.readers)
        return [(reader.meta.facts.get("ranks") or {"rank": self._rank or 0})["rank"]]

    @property
    def coordinates(self) -> pd.DataFrame:
        """The coordinates of each rank in the device mesh of the training job.

                  dp  tp
            rank
            0      0   0
            1      0   1
            2      1   0

        One row per recorded rank, with int64 coordinates; <NA> for a rank that has not stored
        them. No columns if the job has no mesh with names; see docs/ranks.md.
        """
        reader, ranks = self._reader, self.ranks
        if isinstance(reader, JoinedReader):
            known = reader.coordinates
        else:
            own = reader.view.document(MESH)
            known = {} if own is None else {ranks[0]: own}
        names = dict.fromkeys(name for own in known.values() for name in own)
        columns = {name: [known.get(rank, {}).get(name) for rank in ranks] for name in names}
        return pd.DataFrame(columns, index=pd.Index(ranks, name="rank"), dtype="Int64")

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that should have been recorded but left no data."""
        return self._reader.missing if isinstance(self._reader, JoinedReader) else []

    @property
    def heartbeats(self) -> pd.DataFrame:
        """The last sign of life of each rank, also of those that are still running.

                     state  step          seen machine
            rank
            0      stopped    14  1.763719e+09  node-1
            1      stopped    12  1.763719e+09  node-2

        `state` is that of the rank, as for `state`, or "silent" if the process exists but has not
        reported anything for a minute. `step` is the last step that it reported or recorded; <NA>
        before the first. `seen` is when it did so, in Unix seconds. `machine` is the name of the
        rank's machine.
        """
        found = heartbeats(self._reader)
        return pd.DataFrame(
            {
                "state": [each.state for each in found],
                "step": pd.array([each.step for each in found], dtype="Int64"),
                "seen": [each.seen for each in found],
                "machine": [each.machine for each in found],
            },
            index=pd.Index([each.rank for each in found], name="rank"),
        )

    @property
    def first_stopped(self) -> str | None:
        """A sentence about the rank that stopped first, or that no longer responds.

        None for a single process, and if no rank has stopped. All ranks usually stop soon after the
        first one, because they wait for it.
        """
        return stopped_text(heartbeats(self._reader))

    def rank(self, number: int) -> Self:
        """Return one rank of the run, with everything that rank recorded.

        Raises:
            UnknownNameError: the rank was not recorded.
        """
        return type(self)(self.path, rank=number)

    @property
    def sessions(self) -> pd.DataFrame:
        """The sessions that wrote the run, one row per session; several if it was resumed.

                          started  step  first_record
            session
            0        1.763719e+09  <NA>             0
            1        1.763805e+09   200            20

        `started` is in Unix seconds. `step` is the session's first step. It is <NA> for the session
        that created the run, and for sessions that never trained. `first_record` is the number of
        the session's first record.
        """
        return sessions_table(self._snapshot.view.sessions, self.started)

    def rank_differences(self) -> pd.DataFrame:
        """Return the tensors that should be identical on all ranks but differ, one row per tensor.

                 node    role  iteration     pass  first_step  difference
            0    head  weight          0  forward         120    0.000313

        In up to 16 records, compares the parameters of data parallel training, their gradients as
        used by the optimizer, the optimizer state and the updates, and the shards that several
        ranks hold. All else reads such copies from the first rank. `first_step` is the step of the
        first such record with a difference. `difference` is the largest relative difference of any
        statistic at that step. The table is usually empty.
        """
        view = self._snapshot.view
        return differences_table(view.differences if isinstance(view, JoinedView) else [])

    @property
    def spec(self) -> Spec:
        """The spec with which the run was recorded."""
        from comgra_decl.spec import Spec

        try:
            return Spec.model_validate(self._reader.meta.spec)
        except (ValueError, RecursionError) as error:
            lines = str(error).splitlines()
            raise DamagedRunError(
                f"{str(self.path)!r}: the spec in 'meta/run.json' is invalid: {' '.join(lines[:3])}"
            ) from error

    @property
    def config(self) -> dict[str, Any] | None:
        """The traced program's own configuration; None if it had none."""
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
    def tokens(self) -> tuple[str, ...]:
        """The tokens that ids in inputs stand for, in the order of the ids; () if not declared."""
        declared = self.spec.tokens
        if declared is None:
            return ()
        stored = declared.alphabet or self._snapshot.view.document("tokens") or ()
        return tuple(stored)

    @property
    def report(self) -> dict[str, Any]:
        """The modules and series that each entry of the spec matched and stored, and the warnings.

        `keep`, if the spec has that section: how often each trigger fired, and which steps were
        stored as a result. `writer`: CPU time spent on writing in seconds (`cpu`), duration of the
        run (`wall`), their ratio (`share`), and the time that training waited for the writer
        (`waited`). `damage`, if there is any: the data omitted because of damage.
        """
        view = self._snapshot.view
        documents = {
            "keep": view.document("keep"),
            "writer": self._reader.head.get("usage"),
            "damage": self.damage,
        }
        present = {name: document for name, document in documents.items() if document}
        report = (view.document("report") or {}) | present
        if self.state in ENDED and (troubles := _troubles(report.get("keep") or {})):
            report["warnings"] = [*report.get("warnings", []), *troubles]
        return report

    @property
    def damage(self) -> list[str]:
        """Data omitted because of damage, one sentence per part; empty if nothing is damaged.

        Lists damage found when the run was opened, damaged documents (such as "findings"), and
        damage found in what has been read since, such as series and graphs. Results lack the
        damaged parts. `comgra-decl verify` checks everything. Unreadable verdicts of experiments
        are included; see `experiments`.
        """
        snapshot, checks = self._noted
        if checks is None or snapshot is not self._snapshot:
            checks = self.noted()
        view = self._snapshot.view
        view.look_for_damage()
        return [*view.damage, *checks.damage]

    def noted(self) -> NotedChecks:
        """Read the verdicts stored next to the run, and the reasons why some are unreadable."""
        _, before = self._noted
        checks = noted_checks(self.path)
        for loss in checks.damage:
            if before is None or loss not in before.damage:
                _log.warning("comgra: %s: left out because it is damaged: %s", self.path, loss)
        self._noted = self._snapshot, checks
        return checks

    def refresh(self) -> bool:
        """Poll for new records; return whether anything is new."""
        return self._reader.poll()

    # -- display

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


def _troubles(keep: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each trigger in `keep.when` that could not work."""
    return [
        f"keep.when: {trigger['name']} {'stopped' if trigger.get('fired') else 'never fired'}: "
        f"{trigger['trouble']}"
        for trigger in keep.get("triggers", [])
        if trigger.get("trouble")
    ]
