"""One traced execution: wires the hooks to the statistics and the store."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from comgra_decl.records import Note, Raw, RawStep, Said, StepBatch

if TYPE_CHECKING:
    from comgra_decl.hooks import HookManager
    from comgra_decl.keep import Keeper
    from comgra_decl.launch.context import RunContext
    from comgra_decl.launch.live import Attendant
    from comgra_decl.spec import Spec
    from comgra_decl.store import RunMeta, WriterThread

_log = logging.getLogger("comgra_decl")

_CLOSE_TIMEOUT = 60.0
"""Seconds a finished training waits for its last records to reach the disk."""


class Session:
    """A run while it is being recorded.

    Attributes:
        path: the run's folder; None when the spec is switched off.
    """

    def __init__(self, spec: Spec, *, context: RunContext) -> None:
        self._spec = spec
        self._extra = tuple(statistic.name for statistic in spec.opt_in)
        self._context = context
        self._hooks: HookManager | None = None
        self._attendant: Attendant | None = None
        self._writer: WriterThread | None = None
        self._keeper: Keeper | None = None
        self._say: Callable[[Said], None] = lambda _: None
        self._pid = os.getpid()
        self.path: Path | None = None

    def start(self) -> None:
        """Creates the run's folder and attaches to the program.

        Raises:
            StoreError: the folder cannot be created.
        """
        if not self._spec.enabled or self._hooks is not None:
            return
        from comgra_decl.hooks.when.budget import Meter
        from comgra_decl.launch.folders import create_run_folder
        from comgra_decl.launch.live import Attendant
        from comgra_decl.store import RunWriter, WriterThread

        self.path = create_run_folder(self._spec.run, self._context)
        path, meta = self.path, self._meta()
        self._writer = WriterThread(
            lambda: RunWriter.create(path, meta),
            transform=self._transform,
            commit_interval=self._spec.store.commit_interval,
            queue_bytes=self._spec.store.queue_mb * 2**20,
            on_error=self._store_failed,
            flush=self._new_keeper(),
        )
        self._say = self._writer.say
        meter = Meter()
        self._hooks = self._manager(
            sink=self._writer.put,
            on_fault=self._tracing_failed,
            scalars=self._writer.put_said,
            meter=meter,
        )
        self._attendant = Attendant(
            path, self._spec, meter=meter, writer=self._writer.thread, change=self._hooks.replace
        )
        self._attendant.start()
        self._hooks.attach()
        atexit.register(self.finish)
        _log.info("recording to %s", self.path)

    def finish(self) -> None:
        """Detaches and waits until everything recorded is on disk; harmless when repeated."""
        if os.getpid() != self._pid:  # a forked child inherits neither the thread nor the run
            return
        hooks, self._hooks = self._hooks, None
        writer, self._writer = self._writer, None
        if self._attendant is not None:
            self._attendant.stop()
        if hooks is not None:
            hooks.detach()
        if writer is not None:
            writer.close(_CLOSE_TIMEOUT)
        atexit.unregister(self.finish)

    def _manager(self, **arguments: Any) -> HookManager:
        """Returns what follows the program."""
        from comgra_decl.hooks import HookManager

        return HookManager(self._spec, **arguments)

    def _meta(self) -> RunMeta:
        from comgra_decl.launch.context import gather_facts
        from comgra_decl.store import RunMeta

        spec = self._spec
        facts = gather_facts(self._context)
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

        self._keeper = Keeper(
            self._spec.keep,
            finalise=self._finalise,
            look=self._look,
            statistics=self._spec.statistics,
            note=self._note,
            exhausted=lambda: self._hooks.stop_keeping() if self._hooks is not None else None,
        )
        return self._keeper.close

    def _note(self, note: Note) -> None:
        """Writes down what the writer thread found."""
        nothing = np.empty(0)
        self._say(Said(nothing.astype(np.int64), nothing, [], [], [note]))

    def _transform(self, steps: list[RawStep]) -> list[StepBatch]:
        """Turns raw sums into what is stored, on the writer thread."""
        from comgra_decl.stats.choosing import choose_samples

        balanced = self._spec.samples.by is not None
        for step in steps:
            if step.wait is not None:
                step.wait()
                step.wait = None
            step.kpis.update({name: _only(step, i) for name, i in step.kpi_tensors.items()})
            if balanced:
                choose_samples(step, self._spec.samples.count)
        return self._finalise(steps) if self._keeper is None else self._keeper(steps)

    def _finalise(self, steps: list[RawStep]) -> list[StepBatch]:
        """Turns raw sums into statistics."""
        from comgra_decl.stats import finalise

        return finalise(
            steps,
            statistics=self._spec.statistics,
            extra=self._extra,
            sample_count=self._spec.samples.count,
            bins=None if self._spec.histogram is None else self._spec.histogram.bins,
        )

    def _look(self, steps: list[RawStep], statistics: tuple[str, ...]) -> list[StepBatch]:
        """Turns raw sums into a few statistics, without samples and histograms."""
        from comgra_decl.stats import finalise

        return finalise(steps, statistics=statistics, extra=self._extra, sample_count=0, bins=None)

    def _tracing_failed(self, error: BaseException) -> None:
        _log.error(
            "tracing has stopped because of an error in comgra_decl itself; the training goes on "
            "untouched, and what was recorded until now is kept in %s",
            self.path,
            exc_info=error,
        )

    def _store_failed(self, error: BaseException) -> None:
        if self._hooks is not None:
            self._hooks.stop()
        _log.error(
            "recording has stopped because the store cannot be written (%s); the training goes "
            "on untouched, and what was committed until now is kept in %s",
            error,
            self.path,
        )


def _only(step: RawStep, tensor: int) -> float:
    """Returns the value of a one-element tensor from its raw sums."""
    row = step.raw[step.layout.starts[tensor]]
    return float(row[Raw.PIVOT] + row[Raw.SUM])
