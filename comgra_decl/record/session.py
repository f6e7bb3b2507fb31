"""The session of a run, which connects the hooks to the statistics and the store."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from comgra_decl.errors import NoMemoryError, RunGoneError
from comgra_decl.record.memory_guard import LEFT, Room, demand
from comgra_decl.record.secrets import stored_spec, without_login
from comgra_decl.records import (
    AUTOMATIC,
    MESH,
    PERTURBATIONS,
    Note,
    RawStep,
    ScalarBatch,
    StepBatch,
)

if TYPE_CHECKING:
    from comgra_decl.hooks import HookManager
    from comgra_decl.hooks.hook_lists import Placed
    from comgra_decl.hooks.probing.samples import KeptSamples
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
    from comgra_decl.sinks.live import LiveSink
    from comgra_decl.spec import Spec
    from comgra_decl.stats.gradient_norm import GradientNorm
    from comgra_decl.store import RunMeta, RunWriter, WriterThread
    from comgra_decl.store.appending import Past
    from comgra_decl.store.location import Location

_log = logging.getLogger("comgra_decl")

_CLOSE_TIMEOUT = 60.0
"""The maximum time, in seconds, to wait at the end of training until the last records are
stored."""

_INTERRUPTED_TIMEOUT = 5.0
"""The same after an interruption: the user wants the program to end, and a device may hang."""

_LINK_TIMEOUT = 20.0
"""The maximum time, in seconds, to wait at the end until all sinks have created their tools'
runs."""


class Session:
    """A run while it is being recorded.

    Attributes:
        path: the run's folder, or its location in a bucket (a `Remote`); None if the spec is
            disabled or this rank is not recorded.
    """

    _in_batch_order = False
    """Whether samples of categories keep the order of the batch."""

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
        self._ending: Placed | None = None  # the hook that may stop the program
        self._breakpoint: Breakpoint | None = None  # stops it in a debugger, if requested
        self._say: Callable[[ScalarBatch], None] = lambda _: None
        self._pid = os.getpid()
        self._place: Place | None = None
        self._uuid = ""
        self._settled = False  # whether the rank of this process is final
        self._fault: BaseException | None = None  # the error that ended tracing
        self._resumes = False
        self._past: Past | None = None  # the content of the resumed run
        self._sinks: list[LiveSink] = []
        self._gradient: GradientNorm | None = None  # if all gradients are recorded
        self._unplaced = True  # whether the place in a mesh has to be stored with the next record
        self._tokens: list[str] | None = None  # of a tokenizer, stored with the first record
        self._late_facts: dict[str, Any] | None = None  # of a rank, stored with the next record
        self._late_documents: dict[str, Any] = {}  # known only after the last record
        self._post_mortem: dict[str, Any] | None = None  # of the error that ended the program
        self._interrupted = False  # whether the user ended the program
        self.path: Location | None = None

    def start(self) -> None:
        """Create the run's folder and attach to the program.

        Raises:
            StoreError: the folder cannot be created, or there is not enough memory.
            SpecError: the file with the tokens is unreadable, or the declared mesh is not that of
                the job.
        """
        if not self._spec.enabled or self._hooks is not None:
            return
        if self._spec.tokens is not None and self._spec.tokens.file is not None:
            from comgra_decl.record.token_file import read_tokens

            self._tokens = read_tokens(self._spec.tokens.file)
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
            scalars=self._put_scalars,
            meter=self._meter,
            ready=room.for_a_step,
        )
        self._attend()
        if self._past is not None:
            self._go_on(self._hooks, self._past)
        if self._spec.interventions:
            from comgra_decl.record.recalling import Recalling

            self._hooks.recall(Recalling(self.path))
        self._hooks.attach()
        atexit.register(self._finish_at_exit)
        _log.info("recording to %s", self.path)

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the module call during which the session was started."""
        if self._hooks is not None:
            self._hooks.enter(module, args, kwargs)

    def enter_direct(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        """Record the direct call to `forward` during which the session was started.

        Returns:
            A function to call with the output, or None if the call is not followed.
        """
        return None if self._hooks is None else self._hooks.enter_direct(module, args, kwargs)

    def failed(self, error: BaseException) -> None:
        """Examine the error that ended the program; `finish` stores the result.

        An interruption (Ctrl-C) is not examined: only the step and the place are stored.

        The error and its traceback remain unchanged. A program that exits by itself, or is stopped
        by a finding, has not failed.
        """
        if self._hooks is None or isinstance(error, (SystemExit, GeneratorExit)):
            return
        if os.getpid() != self._pid or self._was_stopped(error):
            return
        try:
            from comgra_decl.record.crash.post_mortem import post_mortem

            self._interrupted = isinstance(error, KeyboardInterrupt)
            self._post_mortem = post_mortem(error, self._hooks.place())
            if self._keeper is not None and not self._interrupted:
                self._keeper.keep_ring("the program failed")
        except Exception as own:  # noqa: BLE001  (must not hide the program's error)
            _log.error("the error that ended the program could not be examined", exc_info=own)

    def _was_stopped(self, error: BaseException | None) -> bool:
        """Whether an error, or one from which it follows, is that with which a finding stops."""
        raised = None if self._actions is None else self._actions.raised
        for _ in range(_CHAIN):
            if error is None or error is raised:
                break
            error = error.__cause__ or error.__context__
        return raised is not None and error is raised

    def _finish_at_exit(self) -> None:
        """Finish when Python exits, possibly because of an unhandled error."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        asked = hasattr(sys, "ps1") or sys.flags.interactive or "ipykernel" in sys.modules
        if isinstance(error, BaseException) and not asked:  # else an error of an earlier command
            self.failed(error)
        self.finish()

    def _finish_before_tools(self) -> None:
        """Move the exit hook behind those that a tool has added, because the last one runs first.

        Runs on a sink's thread.
        """
        if self._hooks is not None:
            atexit.unregister(self._finish_at_exit)
            atexit.register(self._finish_at_exit)

    def finish(self) -> None:
        """Detach from the program and wait until all records are stored. Idempotent."""
        if os.getpid() != self._pid:  # a forked child inherits neither the thread nor the run
            return
        hooks, self._hooks = self._hooks, None
        if self._attendant is not None:
            self._attendant.stop()
        if hooks is not None:
            hooks.detach()
            self._late_documents = hooks.late_documents
            if self._post_mortem is not None:
                self._late_documents |= {"post_mortem": self._post_mortem}
            self._examine(hooks)
        writer, self._writer = self._writer, None
        if self._ending is not None:
            self._ending.remove()
        if writer is not None:
            timeout = _INTERRUPTED_TIMEOUT if self._interrupted else _CLOSE_TIMEOUT
            failed = self._post_mortem is not None and not self._interrupted
            writer.close(timeout, failed=failed)
        self._close_sinks()
        if self._actions is not None:
            self._actions.close(_INTERRUPTED_TIMEOUT if self._interrupted else None)
        self._forget_last_seen()
        if self._breakpoint is not None:  # no call follows at which it could stop
            self._breakpoint.remove()
        if self._room is not None:
            self._room.give_back()
        atexit.unregister(self._finish_at_exit)

    def _examine(self, hooks: HookManager) -> None:
        """Experiment with the models after the training, unless it failed; store what was found."""
        failed = self._post_mortem is not None or self._fault is not None or self._interrupted
        if failed or self._rules is None or (self._place is not None and not self._place.leads):
            hooks.release_copies()
            return
        found = hooks.perturbations()
        if found:
            self._late_documents |= {PERTURBATIONS: found}

    def _closing_documents(self) -> dict[str, Any]:
        """Return the documents that changed after the last record; runs on the writer thread."""
        deadline = time.monotonic() + (0.0 if self._interrupted else _LINK_TIMEOUT)
        links = {}
        for sink in self._sinks:
            link = sink.link_within(max(0.0, deadline - time.monotonic()))
            if link is None and sink.begun_late:
                _log.warning(
                    "%s had not created its run %.0f s after the end of the training; it still "
                    "receives what was recorded, but the run has no link to it",
                    sink.name,
                    _LINK_TIMEOUT,
                )
            if link is not None:
                links[sink.name] = {key: without_login(where) for key, where in link.items()}
        return self._late_documents | ({"links": links} if links else {})

    def _close_sinks(self) -> None:
        """End the sinks after the last commit."""
        sinks, self._sinks = self._sinks, []
        if not sinks:
            return
        from comgra_decl.sinks.live import close_sinks

        state = "stopped" if self._post_mortem or self._fault else "finished"
        close_sinks(sinks, state, wait=_INTERRUPTED_TIMEOUT if self._interrupted else None)

    def _forget_last_seen(self) -> None:
        """Remove the file that a killed process would leave behind."""
        if self._place is None or not isinstance(self._place.path, Path):
            return
        from comgra_decl.store.last_seen import remove_last_seen

        if self._attendant is not None:
            self._attendant.wait()
        remove_last_seen(self._place.path)

    # -- location and writer -------------------------------------------------------------------

    def _rank(self) -> Rank | None:
        """Return the rank of this process; None if it trains alone or the rank is not known yet.

        If the recorded ranks depend on a mesh that the program creates, no rank is known before the
        first record.
        """
        from comgra_decl.record.mesh import waits_for_mesh
        from comgra_decl.record.placement import demand_mesh
        from comgra_decl.record.ranks import current_rank

        rank, run = current_rank(), self._spec.run
        if rank is None or self._settled or not waits_for_mesh(run):
            return rank
        demand_mesh(run, self._context)
        return None

    def _records(self, rank: Rank | None) -> bool:
        """Return whether the spec selects this rank for recording."""
        from comgra_decl.record.mesh import recorded_ranks

        run = self._spec.run
        if rank is None or rank.number in recorded_ranks(run, rank.world_size):
            return True
        _log.info("rank %d of %d is not recorded (run.ranks)", rank.number, rank.world_size)
        return False

    def _new_place(self, rank: Rank | None, own: Location | None = None) -> Place:
        from comgra_decl.record.placement import place_of_rank, place_run, resumed_folder

        run = self._spec.run
        folder = resumed_folder(run, self._context, rank) if own is None else None
        self._resumes = folder is not None
        if folder is not None:
            return place_of_rank(folder, run, rank)
        return place_run(run, self._context, rank=rank, own=own)

    def _open(self) -> None:
        """Start the writer at this process's location."""
        from comgra_decl.store import WriterThread

        assert self._place is not None
        self._be_seen(self._place.path)
        if _reads_all_gradients(self._spec):
            from comgra_decl.stats.gradient_norm import GradientNorm

            self._gradient = GradientNorm()
        meta = self._meta()
        self.path, self._uuid = self._place.run, meta.uuid
        self._writer = WriterThread(
            self._make_writer(self._place.path, meta),
            transform=self._transform,
            commit_interval=self._commit_interval(self._place.path),
            queue_bytes=self._spec.store.queue_mb * 2**20,
            on_error=self._store_failed,
            flush=self._new_keeper(),
            last=_at_last(self._new_rules(), self._closing_documents),
            committed=self._new_sinks(meta),
        )
        self._say = self._writer.add_scalars
        if self._fault is not None:
            self._writer.lack(self._fault)

    def _be_seen(self, path: Location) -> None:
        """Leave a sign of life before the run can be opened, in case the process is killed."""
        if not isinstance(path, Path):
            return
        from comgra_decl.store.last_seen import write_last_seen

        with suppress(OSError):  # the writer reports it if the folder cannot be written
            write_last_seen(path, _seen(0 if self._hooks is None else self._hooks.place().step))

    def _commit_interval(self, path: Location) -> float:
        """Return the minimum number of seconds between commits, longer for a bucket.

        Each commit sends requests to a bucket.
        """
        from comgra_decl.store.remote import INTERVAL

        asked = self._spec.store.commit_interval
        return asked if isinstance(path, Path) or not asked else max(asked, INTERVAL)

    def _make_writer(self, path: Location, meta: RunMeta) -> Callable[[], RunWriter]:
        """Return a function for the writer thread that creates a new run or opens a resumed one."""
        from comgra_decl.store import RunWriter
        from comgra_decl.store.database import database_exists

        if not self._resumes or not database_exists(path):
            return lambda: RunWriter.create(path, meta)
        from comgra_decl.store.appending import append_to

        writer, self._past = append_to(path, meta)
        return lambda: writer

    def _go_on(self, hooks: HookManager, past: Past) -> None:
        """Prepare the rules and the hooks to continue a resumed run."""
        from comgra_decl.hooks.schedule.resuming import Resumption

        if self._rules is not None:
            self._rules.resume(past.slots, self._stored)
        if self._gradient is not None:
            self._gradient.add(past.slots)
        resumption = Resumption(self._spec.run.resume_step, past.step)
        hooks.resume(past.slots, resumption, samples=self._probe_samples(past))

    def _probe_samples(self, past: Past) -> dict[str, KeptSamples | str]:
        """Return the samples of the resumed run's probes."""
        if not self._spec.probes:
            return {}
        from comgra_decl.record.probe_samples import kept_samples

        return kept_samples(self._spec, past.view)

    def _stored(self) -> Run:
        """Open the part of the run that this process has stored."""
        from comgra_decl.query import Run

        assert self._place is not None
        rank = self._place.rank
        return Run(self._place.run, rank=None if rank is None else rank.number)

    def _attend(self) -> None:
        """Start monitoring the run's spec file and size."""
        from comgra_decl.record.live_spec import Attendant

        assert self._place is not None
        assert self._writer is not None
        assert self._hooks is not None
        hooks = self._hooks
        self._attendant = Attendant(
            self._place.path,
            self._spec,
            meter=self._meter,
            writer=self._writer.thread,
            change=self._replace,
            look=self._hooks.look,
            run=self._place.run,
            seen=lambda: _seen(hooks.place().step),
        )
        self._attendant.start()

    def _put(self, raw: RawStep) -> None:
        """Pass a record to the writer; runs on the training thread."""
        if not self._settled:
            self._settle()
        if self._late_facts is not None:
            raw.documents["ranks"], self._late_facts = self._late_facts, None
        if self._unplaced:
            self._unplaced = False
            raw.documents |= self._coordinates()
        if self._tokens is not None:
            raw.documents["tokens"], self._tokens = self._tokens, None
        if self._writer is not None:
            self._writer.put(raw)
            try:
                demand(LEFT)
            except NoMemoryError as error:
                self._writer.fail(error)

    def _put_scalars(self, batch: ScalarBatch) -> None:
        """Pass metrics and notes to the rules and the writer; runs on the training thread."""
        if not self._settled:
            self._settle()
        self._expect_in_sinks()
        if self._rules is not None:
            self._rules.attach(batch)
        if self._writer is not None:
            self._writer.put_scalars(batch)

    def _settle(self) -> None:
        """Check the rank again before storing anything, as it may have become known only now."""
        self._settled = True
        place = self._place
        if place is None or place.rank is not None or self._past is not None:
            return
        try:
            rank = self._rank()
            if rank is not None:
                self._turn_out_as(rank, place)
        except Exception as error:  # noqa: BLE001  (this process continues as a separate run)
            _log.error("the ranks of this job could not be joined into one run", exc_info=error)

    def _coordinates(self) -> dict[str, Any]:
        """Return the document with the coordinates of this rank in a mesh; empty without one."""
        from comgra_decl.record.mesh import coordinates_of

        if self._place is None or self._place.rank is None:
            return {}
        found = coordinates_of(self._spec.run, self._place.rank)
        return {} if found is None else {MESH: found}

    def _turn_out_as(self, rank: Rank, place: Place) -> None:
        """Join the run of all ranks as one of them, before anything has been recorded."""
        wanted = self._records(rank)
        new = self._new_place(rank, place.path) if wanted else None
        if new is not None and new.path == place.path:
            self._place, self._late_facts = new, new.facts
            return
        from comgra_decl.store.appending import discard_unused

        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(_CLOSE_TIMEOUT)
        self._close_sinks()
        if self._attendant is not None:
            self._attendant.stop()
        assert isinstance(place.path, Path)  # a bucket refuses late ranks
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
        """Create the hook manager."""
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
            spacing="linear" if spec.histogram is None else spec.histogram.spacing,
            spec=stored_spec(spec).model_dump(mode="json"),
            config=self._context.config,
            facts=facts,
            started=facts["started"],
        )

    def _new_keeper(self) -> Callable[[], list[StepBatch]] | None:
        """Create the keeper, if the spec sets `keep`; return a function that closes it."""
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
        return lambda: self._with_findings(keeper.close())

    def _new_rules(self) -> _LastFindings | None:
        """Create the rules, unless the spec disables them; return a function that closes them."""
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
            raises=partial(_raised_by, self._spec),
            interrupt=None if self._breakpoint is None else self._breakpoint.request,
            loud=loud,
        )
        self._actions = actions
        self._rules = rules = LiveRules(self._spec, act=actions)
        if self._spec.on_finding.stop != "never":
            from comgra_decl.hooks.hook_lists import before_steps

            self._ending = before_steps.add(actions.stop_if_due)
        return rules.close

    def _new_sinks(
        self, meta: RunMeta
    ) -> Callable[[list[StepBatch], list[ScalarBatch]], None] | None:
        """Start the sinks of the spec; return the function that passes on what is committed."""
        place = self._place
        if not self._spec.sinks or place is None or not place.leads:
            return None
        from comgra_decl.sinks.live import LiveSink
        from comgra_decl.sinks.making import about_of, maker_of, selection_of

        about = about_of(place.run, meta.config, meta.started, self._spec.statistics)
        self._sinks = sinks = [
            LiveSink(
                sink.tool,
                maker_of(sink, about, base=self._context.base),
                about=about,
                selection=selection_of(sink.options),
                slots=[] if self._past is None else self._past.slots,
                artifact=getattr(sink.options, "artifact", False),
                points=sink.tensorboard is not None,
                spacing=meta.spacing,
                begun=self._finish_before_tools,
            )
            for sink in self._spec.sinks
        ]

        def pass_on(batches: list[StepBatch], scalars: list[ScalarBatch]) -> None:
            for sink in sinks:
                sink.put(batches, scalars)

        return pass_on

    def _expect_in_sinks(self) -> None:
        """Have the tools create their runs: the last commit may be the first, and tells where."""
        for sink in self._sinks:
            sink.expect()

    def _note(self, note: Note) -> None:
        """Store a note from the writer thread."""
        self._say(ScalarBatch(np.empty(0, np.int64), np.empty(0), [], [], [note]))

    def _transform(self, steps: list[RawStep]) -> list[StepBatch]:
        """Reduce raw sums to batches to store; runs on the writer thread."""
        from comgra_decl.stats.sample_selection import choose_samples

        demand(LEFT)
        for step in steps:
            if step.wait is not None:
                step.wait()
                step.wait = None
            step.kpis.update({name: step.only(i) for name, i in step.kpi_tensors.items()})
            if self._spec.samples.by is not None:
                count = self._spec.samples.count
                choose_samples(step, count, in_batch_order=self._in_batch_order)
        self._tell_norms(steps)
        batches = self._reduce(steps) if self._keeper is None else self._keeper(steps)
        return self._with_findings(batches)

    def _replace(self, spec: Spec | None, note: str) -> None:
        """Use an edited spec from the next step on; see `HookManager.replace`."""
        assert self._hooks is not None
        if spec is not None and not _reads_all_gradients(spec):
            self._gradient = None  # the norm of some gradients would pass as that of all
        self._hooks.replace(spec, note)

    def _tell_norms(self, steps: list[RawStep]) -> None:
        """Store the gradient norms of training steps; runs on the writer thread."""
        gradient = self._gradient  # a live edit may remove it on another thread
        if gradient is None:
            return
        infos, norms = [], []
        for step, norm in zip(steps, gradient.of(steps), strict=True):
            if norm is not None and step.info.mode == "train":
                infos.append(step.info)
                norms.append(norm)
        if not norms:
            return
        told = ScalarBatch(
            np.array([info.step for info in infos]),
            np.array(norms),
            [f"{AUTOMATIC}grad_norm"] * len(norms),
            [info.type for info in infos],
        )
        if self._rules is not None:
            self._rules.look_at_numbers(told)
        self._say(told)

    def _with_findings(self, batches: list[StepBatch]) -> list[StepBatch]:
        """Return the batches to store now, including new findings."""
        if any(batch.steps for batch in batches):
            self._expect_in_sinks()
        if self._rules is None:
            return batches
        watched = self._spec.on_finding.keep != "never"
        return self._rules.publish(batches) if watched else self._rules.take(batches)

    def _watch(self, batches: list[StepBatch]) -> list[Request]:
        """Run the rules on records; return which steps the findings request to keep."""
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
            "tracing has stopped because of an error in comgra_decl itself; training continues "
            f"unaffected, and {self._remains('recorded')}",
            error,
        )

    def _store_failed(self, error: BaseException) -> None:
        if self._room is not None:
            self._room.give_back()
        if self._hooks is not None:
            self._hooks.stop()
        lacks = isinstance(error, NoMemoryError)
        why = "not enough memory is available" if lacks else "the store cannot be written"
        reason = (str(error) or type(error).__name__).rstrip(".")
        text = f"recording has stopped because {why} ({reason}); training continues unaffected"
        # While the run's folder is being deleted, it is unknown what will remain.
        remains = "" if isinstance(error, RunGoneError) else f", and {self._remains('committed')}"
        _report(text + remains)

    def _remains(self, what: str) -> str:
        """Return a clause about the data that remains in the run; there may be none."""
        from comgra_decl.store.database import database_place
        from comgra_decl.store.folder import MANIFEST

        place = None if self._place is None else self._place.path
        database = None if place is None else database_place(place)
        if isinstance(database, Path) and not (database / MANIFEST).exists():
            return f"there is no run in {self.path}"
        return f"everything {what} so far is kept in {self.path}"


_CHAIN = 20
"""Longest chain of exceptions, each raised while the one before it was handled, that is followed.
"""


def _raised_by(spec: Spec) -> type[BaseException]:
    """Return the exception class with which a finding stops the program; called when it does."""
    declared = spec.on_finding.raises
    if declared is not None:
        from comgra_decl.hooks.probing.samples import imported

        with suppress(Exception):  # the class of a script may be gone; it was checked at the start
            found: type[BaseException] = imported(declared.target)
            if issubclass(found, BaseException):
                return found
    return SystemExit


def _reads_all_gradients(spec: Spec) -> bool:
    """Return whether the gradients of all parameters are recorded, so that their norm is known."""
    from comgra_decl.spec.nodes import Selector

    everything = Selector.model_validate({"path": ["**"]})
    whole = any(
        everything in entry.select and "parameter_grad" in entry.capture and not entry.exclude
        for entry in spec.nodes.values()
    )
    return spec.kpis.automatic and whole and not spec.exclude


def _seen(step: int) -> dict[str, Any]:
    """Return the step and memory use that a killed process leaves behind."""
    from comgra_decl.hooks.memory_use import device_bytes, memory_limit

    facts = {"time": time.time(), "step": step, "device": device_bytes()}
    return {**facts, **memory_limit()}


def _report(text: str, error: BaseException | None = None) -> None:
    """Log why recording has stopped; write to stderr if the program's logging fails."""
    try:
        _log.error("%s", text, exc_info=error)
    except BaseException:  # noqa: BLE001  (a handler, filter or clock of the program may raise)
        with suppress(Exception):
            sys.stderr.write(f"comgra: {text}\n")


_Last = Callable[[], list[StepBatch]]


_LastFindings = Callable[[Mapping[str, Any]], list[StepBatch]]


def _at_last(rules: _LastFindings | None, documents: Callable[[], dict[str, Any]]) -> _Last:
    """Return a function that returns the batches to store after the last record, once.

    Args:
        rules: given these documents, returns the last findings; None if there are no rules.
        documents: returns the documents that changed after the last record.
    """

    def last() -> list[StepBatch]:
        late = documents()
        found = rules(late) if rules is not None else []
        return [*found, StepBatch.of_documents(late)] if late else found

    return last


class Reduction:
    """Computes statistics from raw sums; runs on the writer thread."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._extra = tuple(statistic.name for statistic in spec.opt_in)

    def __call__(self, steps: list[RawStep]) -> list[StepBatch]:
        """Return the batches to store for these steps."""
        from comgra_decl.stats import finalise

        spec = self._spec
        return finalise(
            steps,
            statistics=spec.statistics,
            extra=self._extra,
            sample_count=spec.samples.count,
            bins=None if spec.histogram is None else (spec.histogram.bins, spec.histogram.spacing),
        )

    def look(self, steps: list[RawStep], statistics: tuple[str, ...]) -> list[StepBatch]:
        """Return only the given statistics, without samples and histograms."""
        from comgra_decl.stats import finalise

        return finalise(steps, statistics=statistics, extra=self._extra, sample_count=0, bins=None)
