"""A dry run: records a few steps to a temporary folder, reports the result and ends the program."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.experiments.plan import Measured, Plan, make_plan
from comgra_decl.hooks.schedule.laps import Laps
from comgra_decl.record.session import Session
from comgra_decl.records import RawStep, StepBatch

if TYPE_CHECKING:
    from comgra_decl.hooks import HookManager
    from comgra_decl.hooks.hook_lists import Placed
    from comgra_decl.record.context import RunContext
    from comgra_decl.record.ranks import Rank
    from comgra_decl.spec import Spec

_log = logging.getLogger("comgra_decl")

RECORDED = (0, 2, 4, 6)
"""Steps that a dry run records. The first one discovers the model; the others are timed."""

PATIENCE = 30.0
"""Once a dry run has taken this many seconds, one timed step of each kind is enough."""

_FAILED = 1
_COMMIT_WAIT = 10.0


class Rehearsal(Session):
    """The session used when the spec contains `dry_run: true`.

    The program runs, and trains, for at most seven steps. Then `show` receives the plan, and the
    optimizer step raises `SystemExit` to end the program. The program's `finally` blocks and exit
    functions run. If the program catches the exception, the next optimizer step raises it again.

    Args:
        spec: the declared spec.
        context: how the program was started.
        show: receives the plan, once; None prints it.
    """

    def __init__(
        self, spec: Spec, *, context: RunContext, show: Callable[[Plan], None] | None = None
    ) -> None:
        self.declared = spec
        self._folder = Path(tempfile.mkdtemp(prefix="comgra-plan-"))
        super().__init__(_rehearsed(spec, self._folder), context=context)
        self._show = show or _print
        self._measured = Measured()
        self._laps = Laps()
        self._timed: set[str] = set()  # kinds of steps timed so far
        self._began = time.perf_counter()
        self._step = 0
        self._over = False
        self._refusal: Placed | None = None
        self.exit_code = _FAILED

    def finish(self) -> None:
        """Show the plan if the program ended before the dry run did; remove the folder."""
        if os.getpid() != self._pid:  # a forked child owns neither the folder nor the plan
            return
        if self._over:
            self._leave()
            return
        self._over = True
        failed = _is_failure(sys.exc_info()[1])  # do not obscure the program's own error
        try:
            super().finish()
            if not failed:
                self._present()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _rank(self) -> Rank | None:
        """Return None: each process in a distributed training job does its own dry run."""
        return None

    def _manager(self, **arguments: Any) -> HookManager:
        from comgra_decl.hooks import HookManager

        return HookManager(self._spec, ended=self._note_step, **arguments)

    def _note_step(self) -> None:
        try:
            self.step_ended()
        except Exception as error:  # noqa: BLE001  (training must not continue)
            self.give_up(error)

    def step_ended(self) -> None:
        """Measure the step that has ended; end the program after the last step."""
        if self._over:
            return
        kind = "recorded" if self._step in RECORDED else "plain"
        if self._laps.end(time.perf_counter(), record=kind).host is not None:
            self._timed.add(kind)
        self._step += 1
        if self._enough:
            self._end_program()
        if self._step == RECORDED[0] + 2:  # the first record is being written
            self._measured.first_bytes = self._settled_size()
        self._laps.begin(time.perf_counter())

    @property
    def _enough(self) -> bool:
        if self._step > RECORDED[-1]:
            return True
        return len(self._timed) > 1 and time.perf_counter() - self._began > PATIENCE

    def _end_program(self) -> None:
        self.finish()
        self._refusal = _refuse_further_steps(self.exit_code)
        raise SystemExit(self.exit_code)

    def _leave(self) -> None:
        """Clean up when the traced program has ended, as later code in a notebook may train."""
        from comgra_decl.hooks.hook_lists import tidy

        super().finish()
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None
        tidy()  # the program was stopped inside its optimizer's hooks

    def _present(self) -> None:
        self._read_laps()
        self._measured.last_bytes = _size(self._folder)
        plan = make_plan(self.declared, self.path, self._measured)
        self.exit_code = plan.exit_code
        self._show(plan)

    def _read_laps(self) -> None:
        """Read the durations of the steps, once the device has finished the last one."""
        _finish_on_devices()
        kinds = {"plain": self._measured.plain, "recorded": self._measured.recorded}
        for lap in self._laps.known():
            kinds[lap.record].add(lap.host, lap.device)

    def _settled_size(self) -> int:
        """Return the size of the folder once the first record has been written."""
        from comgra_decl.query import open_run

        end = time.monotonic() + _COMMIT_WAIT
        while self.path is not None and time.monotonic() < end:
            try:
                if len(open_run(self.path).records):
                    break
            except OSError:  # not created yet
                pass
            time.sleep(0.05)
        return _size(self._folder)

    def _transform(self, steps: list[RawStep]) -> list[StepBatch]:
        batches = super()._transform(steps)
        for batch in batches:
            self._measured.count(batch)
        return batches

    def _tracing_failed(self, error: BaseException) -> None:
        self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """End the program after an internal error, because it was not meant to train."""
        _log.error("the dry run failed because of an error in comgra_decl", exc_info=error)
        self._over = True
        shutil.rmtree(self._folder, ignore_errors=True)
        self._refusal = _refuse_further_steps(_FAILED)
        raise SystemExit(_FAILED)


def _rehearsed(spec: Spec, folder: Path) -> Spec:
    """Return the declared spec, limited to a few steps and stored elsewhere.

    Options that take effect after a step (`keep`, `rules`, `on_finding`) are switched off.
    """
    from comgra_decl.spec import load_spec

    content = spec.model_dump(mode="json")
    content["run"] = {"root": str(folder), "group": "plan", "name": "plan"}
    content["schedule"] |= {"steps": list(RECORDED), "windows": [], "seconds": None}
    content["schedule"]["budget"] = {"time": None, "disk": None}
    content["store"]["commit_interval"] = 0
    content["keep"] = None
    content["on_finding"] = {}
    content["rules"] = "off"
    content["dry_run"] = True
    return load_spec(content)


def _refuse_further_steps(exit_code: int) -> Placed:
    """End the program at its next optimizer step, in case it caught the first exit."""
    from comgra_decl.hooks.hook_lists import before_steps

    def refuse(*_: Any) -> None:
        raise SystemExit(exit_code)

    return before_steps.add(refuse)


def _finish_on_devices() -> None:
    """Wait until all work submitted to the devices is done."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # the device has failed: the program will report it
            torch.cuda.synchronize()


def _is_failure(error: BaseException | None) -> bool:
    ended = isinstance(error, SystemExit) and error.code in (None, 0)
    return error is not None and not ended


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _print(plan: Plan) -> None:
    from comgra_decl.experiments.plan import print_plan

    print_plan(plan)
