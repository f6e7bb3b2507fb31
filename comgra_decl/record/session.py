"""One traced execution: wires the hooks to the statistics and the store."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from comgra_decl.errors import NoMemoryError, RunGoneError
from comgra_decl.record.memory_guard import LEFT, Room, demand
from comgra_decl.records import Note, RawStep, Said, StepBatch

if TYPE_CHECKING:
    from comgra_decl.hooks import HookManager
    from comgra_decl.hooks.hook_lists import Placed
    from comgra_decl.hooks.schedule.budget import Meter
    from comgra_decl.keep import Keeper, Request
    from comgra_decl.query import Run
    from comgra_decl.record.context import RunContext
    from comgra_decl.record.debugger import Breakpoint
    from comgra_decl.record.live_spec import Attendant
    from comgra_decl.record.placement import Place
    from comgra_decl.record.ranks import Rank
    from comgra_decl.rules.actions import Actions
    from comgra_decl.rules.live import LiveRules
    from comgra_decl.spec import Spec
    from comgra_decl.store import RunMeta, RunWriter, WriterThread
    from comgra_decl.store.appending import Past
    from comgra_decl.store.location import Location

_log = logging.getLogger("comgra_decl")

_CLOSE_TIMEOUT = 60.0
"""Seconds a finished training waits for its last records to reach the disk."""


class Session:
    """A run while it is being recorded.

    Attributes:
        path: the run's folder, or its place in a bucket (a `Remote`); None when the spec is
            switched off, or this rank not recorded.
    """

    def __init__(self, spec: Spec, *, context: RunContext) -> None:
        self._spec = spec
        self._reduce = Reduction(spec)
        self._context = context
        self._hooks: HookManager | None = None
        self._attendant: Attendant | None = None
        self._writer: WriterThread | None = None
        self._meter: Meter
        self._room: Room | None = None
        self._keeper: Keeper | None = None
        self._rules: LiveRules | None = None
        self._actions: Actions | None = None
        self._ending: Placed | None = None  # what may end the program
        self._breakpoint: Breakpoint | None = None  # what may stop it in a debugger
        self._say: Callable[[Said], None] = lambda _: None
        self._pid = os.getpid()
        self._place: Place | None = None
        self._uuid = ""
        self._settled = False  # whether it is known which rank this process is
        self._fault: BaseException | None = None  # which has ended the tracing
        self._past: Past | None = None  # what the run holds that is gone on with
        self._late_facts: dict[str, Any] | None = None  # of a rank, told with the next record
        self._late_documents: dict[str, Any] = {}  # what was known only after the last record
        self.path: Location | None = None

    def start(self) -> None:
        """Creates the run's folder and attaches to the program.

        Raises:
            StoreError: the folder cannot be created, or there is no memory left.
        """
        if not self._spec.enabled or self._hooks is not None:
            return
        self._room = room = Room()
        rank = self._rank()
        if not self._records(rank):
            return
        from comgra_decl.hooks.schedule.budget import Meter

        self._place = self._new_place(rank)
        self._open()
        self._meter = Meter()
        self._hooks = self._manager(
            sink=self._put,
            on_fault=self._tracing_failed,
            scalars=self._put_said,
            meter=self._meter,
            ready=room.for_a_step,
        )
        self._attend()
        if self._past is not None:
            self._go_on(self._hooks, self._past)
        self._hooks.attach()
        atexit.register(self.finish)
        _log.info("recording to %s", self.path)

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records the call of a module, too, in which the session has begun."""
        if self._hooks is not None:
            self._hooks.enter(module, args, kwargs)

    def enter_direct(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        """The same for a call of `forward` alone; returns what is to be told of its output."""
        return None if self._hooks is None else self._hooks.enter_direct(module, args, kwargs)

    def finish(self) -> None:
        """Detaches and waits until everything recorded is on disk; harmless when repeated."""
        if os.getpid() != self._pid:  # a forked child inherits neither the thread nor the run
            return
        hooks, self._hooks = self._hooks, None
        if self._attendant is not None:
            self._attendant.stop()
        if hooks is not None:
            hooks.detach()
            self._late_documents = hooks.late_documents
        writer, self._writer = self._writer, None
        if self._ending is not None:
            self._ending.remove()
        if writer is not None:
            writer.close(_CLOSE_TIMEOUT)
        if self._breakpoint is not None:  # what is found at the very end has no call to stop at
            self._breakpoint.remove()
        if self._room is not None:
            self._room.give_back()
        atexit.unregister(self.finish)

    # -- where it records ----------------------------------------------------------------------

    def _rank(self) -> Rank | None:
        """Returns what this process is in a distributed training, as far as is known now."""
        from comgra_decl.record.ranks import current_rank

        return current_rank()

    def _records(self, rank: Rank | None) -> bool:
        """Whether the spec wants this process to be recorded."""
        if rank is None or rank.number in self._spec.run.recorded(rank.world_size):
            return True
        _log.info("rank %d of %d is not recorded (run.ranks)", rank.number, rank.world_size)
        return False

    def _new_place(self, rank: Rank | None, own: Location | None = None) -> Place:
        from comgra_decl.record.placement import place_of_rank, place_run, resumed_folder

        run = self._spec.run
        folder = resumed_folder(run, self._context) if own is None else None
        if folder is not None:
            return place_of_rank(folder, run, rank)
        return place_run(run, self._context, rank=rank, own=own)

    def _open(self) -> None:
        """Starts writing at the place that is ours."""
        from comgra_decl.store import WriterThread

        assert self._place is not None
        meta = self._meta()
        self.path, self._uuid = self._place.run, meta.uuid
        self._writer = WriterThread(
            self._make_writer(self._place.path, meta),
            transform=self._transform,
            commit_interval=self._commit_interval(self._place.path),
            queue_bytes=self._spec.store.queue_mb * 2**20,
            on_error=self._store_failed,
            flush=self._new_keeper(),
            last=_at_last(self._new_rules(), lambda: self._late_documents),
        )
        self._say = self._writer.say
        if self._fault is not None:
            self._writer.lack(self._fault)

    def _commit_interval(self, path: Location) -> float:
        """Returns the least seconds between commits: each of them is requests to a bucket."""
        from comgra_decl.store.remote import INTERVAL

        asked = self._spec.store.commit_interval
        return asked if isinstance(path, Path) or not asked else max(asked, INTERVAL)

    def _make_writer(self, path: Location, meta: RunMeta) -> Callable[[], RunWriter]:
        """Returns what makes, on the writer thread, a new run, or hands over one to go on with."""
        from comgra_decl.store import RunWriter
        from comgra_decl.store.database import database_exists

        if self._spec.run.resume is False or not database_exists(path):
            return lambda: RunWriter.create(path, meta)
        from comgra_decl.store.appending import append_to

        writer, self._past = append_to(path, meta)
        return lambda: writer

    def _go_on(self, hooks: HookManager, past: Past) -> None:
        """Tells what follows the program that it goes on with a run."""
        from comgra_decl.hooks.schedule.resuming import Resumption

        if self._rules is not None:
            self._rules.resume(past.slots, self._stored)
        hooks.resume(past.slots, Resumption(self._spec.run.resume_step, past.step))

    def _stored(self) -> Run:
        """Opens what this process has stored of the run."""
        from comgra_decl.query import Run

        assert self._place is not None
        rank = self._place.rank
        return Run(self._place.run, rank=None if rank is None else rank.number)

    def _attend(self) -> None:
        """Starts to look after the run's spec and its size."""
        from comgra_decl.record.live_spec import Attendant

        assert self._place is not None
        assert self._writer is not None
        assert self._hooks is not None
        self._attendant = Attendant(
            self._place.path,
            self._spec,
            meter=self._meter,
            writer=self._writer.thread,
            change=self._hooks.replace,
            look=self._hooks.look,
            run=self._place.run,
        )
        self._attendant.start()

    def _put(self, raw: RawStep) -> None:
        """Takes a record, on the training thread."""
        if not self._settled:
            self._settle()
        if self._late_facts is not None:
            raw.documents["ranks"], self._late_facts = self._late_facts, None
        if self._writer is not None:
            self._writer.put(raw)
            try:
                demand(LEFT)
            except NoMemoryError as error:
                self._writer.fail(error)

    def _put_said(self, said: Said) -> None:
        """Takes what was said of steps, on the training thread."""
        if not self._settled:
            self._settle()
        if self._rules is not None:
            self._rules.attach(said)
        if self._writer is not None:
            self._writer.put_said(said)

    def _settle(self) -> None:
        """The first thing is to be stored: only now a program may have said what rank it is."""
        self._settled = True
        place = self._place
        if place is None or place.rank is not None or self._past is not None:
            return
        try:
            rank = self._rank()
            if rank is not None:
                self._turn_out_as(rank, place)
        except Exception as error:  # noqa: BLE001  (what was begun goes on as a run of its own)
            _log.error("the ranks of this training are not joined in one run", exc_info=error)

    def _turn_out_as(self, rank: Rank, place: Place) -> None:
        """Takes a rank's place in the run of all ranks; nothing has been recorded yet."""
        wanted = self._records(rank)
        new = self._new_place(rank, place.path) if wanted else None
        if new is not None and new.path == place.path:
            self._place, self._late_facts = new, new.facts
            return
        from comgra_decl.store.appending import discard_unused

        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(_CLOSE_TIMEOUT)
        if self._attendant is not None:
            self._attendant.stop()
        assert isinstance(place.path, Path)  # a bucket has refused a rank that is known late
        discard_unused(place.path, self._uuid)
        self._place = new
        if new is not None:
            self._open()
            self._attend()
            _log.info("this is rank %d; recording to %s", rank.number, self.path)
        elif self._hooks is not None:
            self.path = None
            self._hooks.stop()

    def _manager(self, **arguments: Any) -> HookManager:
        """Returns what follows the program."""
        from comgra_decl.hooks import HookManager

        return HookManager(self._spec, **arguments)

    def _meta(self) -> RunMeta:
        from comgra_decl.record.context import gather_facts
        from comgra_decl.store import RunMeta

        spec = self._spec
        facts = gather_facts(self._context)
        if self._place is not None and self._place.facts is not None:
            facts |= {"ranks": self._place.facts}
        return RunMeta(
            statistics=spec.statistics,
            sample_count=spec.samples.count,
            bins=None if spec.histogram is None else spec.histogram.bins,
            spec=spec.model_dump(mode="json"),
            config=self._context.config,
            facts=facts,
            started=facts["started"],
        )

    def _new_keeper(self) -> Callable[[], list[StepBatch]] | None:
        """Makes what decides after the step, if the spec asks for it; returns its end."""
        if self._spec.keep is None:
            return None
        from comgra_decl.keep import Keeper

        self._keeper = keeper = Keeper(
            self._spec.keep,
            finalise=self._reduce,
            look=self._reduce.look,
            statistics=self._spec.statistics,
            note=self._note,
            exhausted=lambda: self._hooks.stop_keeping() if self._hooks is not None else None,
            watch=None if self._spec.on_finding.keep == "never" else self._watch,
        )
        return lambda: self._looked_at(keeper.close())

    def _new_rules(self) -> Callable[[], list[StepBatch]] | None:
        """Makes what watches the run, if the spec asks for it; returns its end."""
        if self._spec.rules == "off":
            return None
        from comgra_decl.rules.actions import Actions
        from comgra_decl.rules.live import LiveRules

        loud = self._place is None or self._place.leads
        if self._spec.on_finding.break_ != "never" and loud:
            from comgra_decl.record.debugger import Breakpoint

            self._breakpoint = Breakpoint()
        actions = Actions(
            self._spec.on_finding,
            run=str(self.path),
            note=self._note,
            interrupt=None if self._breakpoint is None else self._breakpoint.request,
            loud=loud,
        )
        self._actions = actions
        self._rules = rules = LiveRules(self._spec, act=actions)
        if self._spec.on_finding.stop != "never":
            from comgra_decl.hooks.hook_lists import before_steps

            self._ending = before_steps.add(actions.stop_if_due)
        return rules.close

    def _note(self, note: Note) -> None:
        """Writes down what the writer thread found."""
        self._say(Said(np.empty(0, np.int64), np.empty(0), [], [], [note]))

    def _transform(self, steps: list[RawStep]) -> list[StepBatch]:
        """Turns raw sums into what is stored, on the writer thread."""
        from comgra_decl.stats.choosing import choose_samples

        demand(LEFT)
        for step in steps:
            if step.wait is not None:
                step.wait()
                step.wait = None
            step.kpis.update({name: step.only(i) for name, i in step.kpi_tensors.items()})
            if self._spec.samples.by is not None:
                choose_samples(step, self._spec.samples.count)
        batches = self._reduce(steps) if self._keeper is None else self._keeper(steps)
        return self._looked_at(batches)

    def _looked_at(self, batches: list[StepBatch]) -> list[StepBatch]:
        """Returns what is stored now, with what rules have found by now."""
        if self._rules is None:
            return batches
        watched = self._spec.on_finding.keep != "never"
        return self._rules.publish(batches) if watched else self._rules.take(batches)

    def _watch(self, batches: list[StepBatch]) -> list[Request]:
        """Shows records to the rules; returns which steps findings want to be kept."""
        assert self._rules is not None
        assert self._actions is not None
        self._rules.watch(batches)
        return self._actions.requests()

    def _tracing_failed(self, error: BaseException) -> None:
        if isinstance(error, NoMemoryError) and self._writer is not None:
            self._writer.fail(error)
            return
        self._fault = error
        if self._writer is not None:
            self._writer.lack(error)
        _report(
            "tracing has stopped because of an error in comgra_decl itself; the training goes on "
            f"untouched, and {self._remains('recorded')}",
            error,
        )

    def _store_failed(self, error: BaseException) -> None:
        if self._room is not None:
            self._room.give_back()
        if self._hooks is not None:
            self._hooks.stop()
        lacks = isinstance(error, NoMemoryError)
        why = "memory is short" if lacks else "the store cannot be written"
        reason = (str(error) or type(error).__name__).rstrip(".")
        said = f"recording has stopped because {why} ({reason}); the training goes on untouched"
        # While a folder is being removed, what is still there says nothing of what will be.
        remains = "" if isinstance(error, RunGoneError) else f", and {self._remains('committed')}"
        _report(said + remains)

    def _remains(self, what: str) -> str:
        """Says what there is of the run: somebody may have removed it, or nothing was written."""
        from comgra_decl.store.database import database_place
        from comgra_decl.store.folder import MANIFEST

        place = None if self._place is None else self._place.path
        database = None if place is None else database_place(place)
        if isinstance(database, Path) and not (database / MANIFEST).exists():
            return f"there is no run in {self.path}"
        return f"what was {what} until now is kept in {self.path}"


def _report(text: str, error: BaseException | None = None) -> None:
    """Logs why nothing more is recorded; past the program's logging if that fails."""
    try:
        _log.error("%s", text, exc_info=error)
    except BaseException:  # noqa: BLE001  (a handler, a filter, a clock of the program's may raise)
        with suppress(Exception):
            sys.stderr.write(f"comgra: {text}\n")


_Last = Callable[[], list[StepBatch]]


def _at_last(rules: _Last | None, documents: Callable[[], dict[str, Any]]) -> _Last:
    """Returns what gives, once, all that is stored when no more records come.

    Args:
        rules: gives what they have found at last; None: there are none.
        documents: gives those of the tracer that have changed after the last record.
    """

    def last() -> list[StepBatch]:
        found = rules() if rules is not None else []
        late = documents()
        return [*found, StepBatch.of_documents(late)] if late else found

    return last


class Reduction:
    """Turns raw sums into statistics, on the writer thread."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._extra = tuple(statistic.name for statistic in spec.opt_in)

    def __call__(self, steps: list[RawStep]) -> list[StepBatch]:
        """Returns everything that is stored of these steps."""
        from comgra_decl.stats import finalise

        spec = self._spec
        return finalise(
            steps,
            statistics=spec.statistics,
            extra=self._extra,
            sample_count=spec.samples.count,
            bins=None if spec.histogram is None else spec.histogram.bins,
        )

    def look(self, steps: list[RawStep], statistics: tuple[str, ...]) -> list[StepBatch]:
        """Returns a few statistics only, without samples and histograms."""
        from comgra_decl.stats import finalise

        return finalise(steps, statistics=statistics, extra=self._extra, sample_count=0, bins=None)
