"""Record a training run in a store, or drop the records where the store's packages are missing.

Without tensorstore or pandas, a separate thread reduces records to statistics, as the writer does,
and then drops them. The training thread and the device do the same work.
"""

from __future__ import annotations

import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from comgra_decl.records import RawStep, ScalarBatch
    from comgra_decl.spec import Spec

_STORE_NEEDS = ("tensorstore", "pandas", "ml_dtypes")

CAPTURE = ("output", "output_grad", "parameter_grad")
EVERY: tuple[str, ...] = ("schedule.first=1", "schedule.every=1", "schedule.backoff=1.0")


def has_store() -> bool:
    """Whether the packages that a run on disk needs can be imported."""
    try:
        for name in _STORE_NEEDS:
            import_module(name)
    except ImportError:
        return False
    return True


@dataclass(frozen=True)
class Declared:
    """What to record: `source` and `overrides` are arguments of `comgra_decl.trace`.

    With `every`, every step is recorded, otherwise only the first one.
    """

    source: str | Mapping[str, Any]
    overrides: Sequence[str] = ()
    every: bool = True

    def with_steps(self, steps: Sequence[int]) -> Declared:
        """Return a copy that records exactly these steps and the first one."""
        return Declared(self.source, (f"schedule.steps={sorted({0, *steps})}",))


def _spec(**schedule: Any) -> dict[str, Any]:
    return {
        "nodes": {"all": {"select": "**", "capture": [*CAPTURE]}},
        "rules": "off",
        "graph": False,
        "histogram": None,
        "schedule": schedule,
    }


RECORD = Declared(_spec(first=1, every=1))
OBSERVED = Declared({**_spec(first=1, every=1), "compile": "observed"})
EVERY_OTHER = Declared(_spec(first=1, every=2))
BUDGETED = Declared(_spec(first=1, every=1, budget={"time": "3%"}))
IDLE = Declared(_spec(steps=[0, 10**9]), every=False)
LIGHT = Declared("light", EVERY)
DEBUG = Declared("debug", EVERY)


@dataclass
class Recording:
    """The result of a recording.

    Attributes:
        records: number of records received.
        faults: errors of comgra_decl; must be empty.
        raw: the records themselves, if requested.
    """

    records: int = 0
    faults: list[str] = field(default_factory=list)
    raw: list[RawStep] = field(default_factory=list)

    def check(self, expected: int | None) -> None:
        """Check that the recording succeeded and, unless `expected` is None, has that many records.

        Raises:
            RuntimeError: the check failed, so the timings are meaningless.
        """
        if self.faults:
            raise RuntimeError(f"tracing failed: {self.faults[0]}")
        if expected is not None and self.records != expected:
            raise RuntimeError(f"expected {expected} records, got {self.records}")


@contextmanager
def recorded(what: Declared, *, store: bool) -> Iterator[Recording]:
    """Record the training in this context; `Recording` is complete on exit."""
    with _stored(what) if store else reduced(what) as recording:
        yield recording


@contextmanager
def _stored(what: Declared) -> Iterator[Recording]:
    import comgra_decl

    recording, folder = Recording(), Path(tempfile.mkdtemp(prefix="benchmark-"))
    try:
        with comgra_decl.trace(what.source, root=folder, overrides=what.overrides) as session:
            yield recording
        if session.path is not None:
            run = comgra_decl.open_run(session.path)
            recording.records = len(run.steps)
            recording.faults += [run.error] if run.error else []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def reduced(what: Declared, *, keep: bool = False, later: bool = False) -> Iterator[Recording]:
    """Record without a store.

    Args:
        what: what to record.
        keep: whether to keep the records as they leave the training thread, without reducing them.
        later: whether to reduce them only on exit.
    """
    from comgra_decl.hooks import HookManager
    from comgra_decl.spec import load_spec

    spec = load_spec(what.source, [*what.overrides])
    recording = Recording()
    writer = _Writer(spec, recording)
    manager = HookManager(
        spec,
        recording.raw.append if keep else writer.put,
        on_fault=lambda error: recording.faults.append(f"{type(error).__name__}: {error}"),
        scalars=lambda item: None if keep else writer.put(item),
    )
    if not (keep or later):
        writer.start()
    manager.attach()
    try:
        yield recording
    finally:
        manager.detach()
        if keep:
            recording.records = len(recording.raw)
        else:
            writer.finish()


class _Writer:
    """Processes records like the writer thread, without storing them."""

    def __init__(self, spec: Spec, recording: Recording) -> None:
        from comgra_decl.record.session import Reduction

        _stand_in_for_dtypes()
        self._reduce = Reduction(spec)
        self._recording = recording
        self._queue: queue.SimpleQueue[RawStep | ScalarBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="benchmark-writer", daemon=True)
        self.put: Callable[[RawStep | ScalarBatch], None] = self._queue.put

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def finish(self) -> None:
        """Process the remaining items and join the thread."""
        self._queue.put(None)
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join()

    def _run(self) -> None:
        from comgra_decl.records import RawStep

        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, RawStep):
                    self._reduce([item])
                    self._recording.records += 1
                elif item.settle is not None:
                    item.settle()
            except Exception as error:  # noqa: BLE001 - reported when the records are requested
                self._recording.faults.append(f"{type(error).__name__}: {error}")


def _stand_in_for_dtypes() -> None:
    """Allow bfloat16 values to be copied without ml_dtypes; the benchmark never reads them."""
    if find_spec("ml_dtypes") is None:
        stand_in = ModuleType("ml_dtypes")
        stand_in.__spec__ = ModuleSpec("ml_dtypes", None)  # `find_spec` raises without one
        vars(stand_in).update(bfloat16=np.uint16)
        sys.modules["ml_dtypes"] = stand_in
