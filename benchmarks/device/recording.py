"""Recording a training: into a store, or, where its packages are absent, into nothing.

Without tensorstore or pandas, records are reduced to statistics on a thread of their own, as the
writer does, and then dropped. What the training thread and the device do is the same.
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
    """Whether the packages can be imported that a run on disk needs."""
    try:
        for name in _STORE_NEEDS:
            import_module(name)
    except ImportError:
        return False
    return True


@dataclass(frozen=True)
class Declared:
    """What is recorded: `source` and `overrides` as `comgra_decl.trace` takes them.

    `every` selects every step; otherwise the first one.
    """

    source: str | Mapping[str, Any]
    overrides: Sequence[str] = ()
    every: bool = True

    def with_steps(self, steps: Sequence[int]) -> Declared:
        """Returns the same for exactly these steps, and the first one."""
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
    """What has come of a recording.

    Attributes:
        records: how many records have arrived.
        faults: errors of ours; there must be none.
        raw: the records themselves, if they were asked for.
    """

    records: int = 0
    faults: list[str] = field(default_factory=list)
    raw: list[RawStep] = field(default_factory=list)

    def check(self, expected: int | None) -> None:
        """Makes sure that what was measured has happened.

        Raises:
            RuntimeError: It has not, so the time taken is meaningless.
        """
        if self.faults:
            raise RuntimeError(f"tracing has failed: {self.faults[0]}")
        if expected is not None and self.records != expected:
            raise RuntimeError(f"{self.records} records where {expected} were expected")


@contextmanager
def recorded(what: Declared, *, store: bool) -> Iterator[Recording]:
    """Records what is trained in this context; `Recording` is complete when it is left."""
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
    """Records into nothing.

    Args:
        what: is recorded.
        keep: keep the records, as they leave the training thread, and reduce none of them.
        later: reduce them only when the context is left.
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
        scalars=lambda said: None if keep else writer.put(said),
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
    """Does what the writer thread does with records, but for storing them."""

    def __init__(self, spec: Spec, recording: Recording) -> None:
        from comgra_decl.record.session import Reduction

        _stand_in_for_dtypes()
        self._reduce = Reduction(spec)
        self._recording = recording
        self._queue: queue.SimpleQueue[RawStep | ScalarBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="benchmark-writer", daemon=True)
        self.put: Callable[[RawStep | ScalarBatch], None] = self._queue.put

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    def finish(self) -> None:
        """Works off what is left."""
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
    """Lets bfloat16 values be copied without ml_dtypes; the benchmark never reads them."""
    if find_spec("ml_dtypes") is None:
        stand_in = ModuleType("ml_dtypes")
        stand_in.__spec__ = ModuleSpec("ml_dtypes", None)  # else it could not be looked for
        vars(stand_in).update(bfloat16=np.uint16)
        sys.modules["ml_dtypes"] = stand_in
