"""Waits, in a program that has just imported torch, until there is a training to record.

A process that neither calls a model nor lets an optimizer step leaves no run: a launcher, a
tokenizer's helper, a worker that loads data, a program whose children train. Nothing is attached
to them but three stand-ins and two hooks, which go away when the recording begins.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from comgra_decl.doors import environment
from comgra_decl.doors.environment import RECORDED_BY
from comgra_decl.hooks.call_context import is_no_step, torch_variable
from comgra_decl.hooks.direct_calls import DirectCalls
from comgra_decl.hooks.hook_lists import Placed, after_steps
from comgra_decl.hooks.module_tree import has_parameters
from comgra_decl.hooks.objects import watch_freezing
from comgra_decl.hooks.patches import Patch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.record.context import RunContext
    from comgra_decl.record.session import Session

_LAUNCHED = 1.0
"""Seconds of processor time of child processes, from which on they are what the program is for."""

_IMPORT = "<frozen importlib._bootstrap>"
"""The file name of the code that imports."""

_waiting: Waiting | None = None


def wait_for_training(spec: str, overrides: list[str]) -> None:
    """Records, from the moment a training begins, in this process or in one forked from it."""
    global _waiting
    if _waiting is None:
        _waiting = Waiting(spec, overrides)
        _waiting.begin()
        atexit.register(_end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_begin_in_child)


def stand_down() -> None:
    """Leaves this process to a session that the program itself, or its command line, has begun."""
    if _waiting is not None:
        _waiting.stop()


def _begin_in_child() -> None:
    """Is held by the interpreter to its very end, so it must hold no class of the program."""
    if _waiting is not None:
        _waiting.begin()


def _end() -> None:
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is not None:
        waiting.end()


class Waiting:
    """What is attached to a program until it trains.

    Args:
        spec: a preset or file.
        overrides: changes to it.
    """

    def __init__(self, spec: str, overrides: list[str]) -> None:
        self._spec = spec
        self._overrides = overrides
        self._base = Path.cwd()
        self._owner = os.getpid()
        self._construction = Patch(Optimizer, "__init__", self._construct)
        self._compilation = Patch(torch, "compile", self._compile)
        self._freezing = watch_freezing(on_fault=_give_up)
        self._direct = DirectCalls(before=self._called_directly, after=self._returned)
        self._leaves: dict[int, Callable[[Any], None]] = {}  # told the output of such a call
        self._calls: RemovableHandle | None = None
        self._steps: Placed | None = None
        self._compiled = False  # whether there may be compiled code, which no hook may be seen by
        self._starting = threading.Lock()
        self._session: Session | None = None

    def begin(self) -> None:
        """Waits, in the process that calls it, for a model's call or an optimizer's step.

        In a child of a process that is recorded, a model's call is no sign of a training (a data
        loader may embed what it loads) before an optimizer has been made.
        """
        self.stop()
        self._session = None
        self._construction.apply()
        self._compilation.apply()
        self._freezing.apply()
        if RECORDED_BY not in os.environ:
            self._await_call()
        self._steps = after_steps.add(lambda *_: self._start())

    def stop(self) -> None:
        """Waits no longer."""
        self._construction.restore()
        self._compilation.leave()
        self._freezing.restore()
        self._direct.remove()
        for handle in (self._calls, self._steps):
            if handle is not None:
                handle.remove()
        self._calls = self._steps = None

    def _await_call(self) -> None:
        if self._calls is None and not self._compiled:
            self._calls = register_module_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or is_no_step() or not has_parameters(module):
            return
        kwargs = torch_variable(sys._getframe(1), "kwargs") or {}  # noqa: SLF001
        self._start()
        if self._session is not None:
            self._session.enter(module, args, kwargs)

    def _called_directly(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """`module.forward(x)` is called, which runs no hook of modules."""
        if not has_parameters(module):
            return
        self._start()
        leave = None if self._session is None else self._session.enter_direct(module, args, kwargs)
        if leave is not None:
            self._leaves[id(module)] = leave

    def _returned(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        leave = self._leaves.pop(id(module), None)
        if leave is not None:
            leave(output)

    def _construct(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._construction.restore()
        if self._compiled:
            self._start()
        else:
            self._await_call()
            self._direct.install(all_classes=True)

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What is compiled will be called; a library that compiles as it is imported may not be.

        Compiled code must find no hook of ours when it runs for the first time.
        """
        if _is_importing():
            self._compiled = True
            self._direct.remove()
            if self._calls is not None:
                self._calls.remove()
                self._calls = None
        else:
            self._start()
        return original(*args, **kwargs)

    def _start(self) -> None:
        """Begins to record; what goes wrong is said and is no matter of the program."""
        if not self._starting.acquire(blocking=False):
            return  # another thread has
        try:
            self.stop()
            in_worker = torch.utils.data.get_worker_info() is not None
            if self._session is None and not in_worker:
                self._record()
        finally:
            self._starting.release()

    def _record(self) -> None:
        from comgra_decl.doors.checked_spec import load_spec, require_functions
        from comgra_decl.doors.start import start_session, wrong_spec
        from comgra_decl.errors import SpecError

        try:
            spec = load_spec(self._spec, self._overrides)
            require_functions(spec)
            session = start_session(spec, program_context(self._base))
        except SpecError as error:  # functions of the program's: only now it has all its modules
            environment.taken()  # nobody need say that there was nothing to record
            raise SystemExit(
                f"{wrong_spec(error)}\n  (from {environment.VARIABLE} in the environment)"
            ) from None
        except Exception as error:  # noqa: BLE001  (never into the program's own call)
            _say(f"nothing is recorded because of an error in it: {error!r}")
            return
        self._session = session
        if multiprocessing.parent_process() is not None:  # such a process skips functions at exit
            multiprocessing.util.Finalize(None, self._finish, exitpriority=0)
        if session.path is not None and not spec.dry_run:
            _say(f"recording to {session.path}")

    def _finish(self) -> None:
        from comgra_decl.doors.start import finish_session

        if self._session is not None:
            finish_session(self._session)

    def end(self) -> None:
        """Says so if the program has ended and there was nothing to record."""
        waited, mine = self._session is None, self._owner == os.getpid()
        self.stop()
        # What stays on torch (`leave`) outlives the program's classes, which it would keep alive.
        self._direct.forget()
        self._session = None
        elsewhere = environment.was_taken() or RECORDED_BY in os.environ
        if waited and mine and not elsewhere and not _launched():
            _say(
                "nothing was recorded: this program has called no torch module that has "
                "parameters, and no optimizer of torch.optim has stepped"
            )


def program_context(base: Path) -> RunContext:
    """Returns the circumstances of the program that this process runs.

    Args:
        base: the folder that the program was started in.
    """
    from comgra_decl.record.context import RunContext

    program = base / (sys.argv[0] if sys.argv else "")
    if program.stem in ("ipykernel_launcher", "colab_kernel_launcher"):
        notebook = os.environ.get("JPY_SESSION_NAME")
        return RunContext(job=Path(notebook).stem if notebook else "notebook", base=base)
    if not program.is_file():
        return RunContext(base=base)
    job = program.parent.name if program.stem == "__main__" else program.stem
    return RunContext(job=job, script=program.resolve(), base=base)


def _is_importing() -> bool:
    """Whether the program is importing a module."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


def _launched() -> bool:
    """Whether the program has started others that have worked, as a launcher does."""
    times = os.times()
    return times.children_user + times.children_system > _LAUNCHED


def _give_up(error: BaseException) -> None:
    """Reports an error in what notes the modules of a program that freezes its objects."""
    _say(f"names of modules may lack their paths because of an error in it: {error!r}")


def _say(text: str) -> None:
    sys.stderr.write(f"comgra: {text}\n")
