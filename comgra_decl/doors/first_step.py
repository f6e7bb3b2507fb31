"""Wait, in a program that has just imported torch, until training starts.

A process that neither calls a model nor steps an optimizer creates no run. Examples are a launcher,
a tokenizer's helper, a data-loading worker, and a program that trains in child processes. While a
process waits, only three wrappers and two hooks are attached to it. They are removed when recording
starts.
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
"""If child processes use more CPU seconds than this, the program counts as a launcher."""

_IMPORT = "<frozen importlib._bootstrap>"
"""The file name of frames that belong to the import machinery."""

_waiting: Waiting | None = None


def wait_for_training(spec: str, overrides: list[str]) -> None:
    """Record once training starts, in this process or in one forked from it."""
    global _waiting
    if _waiting is None:
        _waiting = Waiting(spec, overrides)
        _waiting.begin()
        atexit.register(_end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_begin_in_child)


def stand_down() -> None:
    """Stop waiting, because the program itself, or its command line, has started a session."""
    if _waiting is not None:
        _waiting.stop()


def _begin_in_child() -> None:
    """Resume waiting in a forked child.

    The interpreter references this function until it exits, so it must not refer to the program's
    classes.
    """
    if _waiting is not None:
        _waiting.begin()


def _end() -> None:
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is not None:
        waiting.end()


class Waiting:
    """The hooks attached to a program until it trains.

    Args:
        spec: a preset or file.
        overrides: overrides of the spec.
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
        self._leaves: dict[int, Callable[[Any], None]] = {}  # by module id; receive the output
        self._calls: RemovableHandle | None = None
        self._steps: Placed | None = None
        self._compiled = False  # whether compiled code may exist, which must not see any hook
        self._starting = threading.Lock()
        self._session: Session | None = None

    def begin(self) -> None:
        """Wait, in the calling process, for a model call or an optimizer step.

        In a child of a recorded process, a model call does not indicate training until an optimizer
        exists, because a data loader may compute embeddings of its data.
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
        """Stop waiting."""
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
        """Handle a direct call to `module.forward(x)`, which bypasses module hooks."""
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
        """Start recording before a compiled model is called; during an import, only set a flag.

        A library that compiles code while it is imported may never call that code. Compiled code
        must not see any of comgra's hooks when it first runs.
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
        """Start recording; errors are logged and never reach the program."""
        if not self._starting.acquire(blocking=False):
            return  # another thread is starting
        try:
            self.stop()
            in_worker = torch.utils.data.get_worker_info() is not None
            if self._session is None and not in_worker:
                self._record()
        finally:
            self._starting.release()

    def _record(self) -> None:
        from comgra_decl.doors.checked_spec import load_spec, require_functions
        from comgra_decl.doors.start import start_session
        from comgra_decl.errors import SpecError, wrong_spec

        try:
            spec = load_spec(self._spec, self._overrides)
            require_functions(spec)
            session = start_session(spec, program_context(self._base))
        except SpecError as error:  # user functions, importable only now
            environment.taken()  # suppress the report that nothing was recorded
            raise SystemExit(
                f"{wrong_spec(error)}\n  (from {environment.VARIABLE} in the environment)"
            ) from None
        except Exception as error:  # noqa: BLE001  (never into the program's own call)
            _say(f"nothing is recorded because of an internal error: {error!r}")
            return
        self._session = session
        if multiprocessing.parent_process() is not None:  # atexit is skipped in child processes
            multiprocessing.util.Finalize(None, self._finish, exitpriority=0)
        if session.path is not None and not spec.dry_run:
            _say(f"recording to {session.path}")

    def _finish(self) -> None:
        from comgra_decl.doors.start import finish_session

        if self._session is not None:
            finish_session(self._session)

    def end(self) -> None:
        """Remove the hooks; log a message if the program has ended with nothing to record."""
        waited, mine = self._session is None, self._owner == os.getpid()
        self.stop()
        # The hooks that remain on torch (see `leave`) would keep references to the program's
        # classes.
        self._direct.forget()
        self._session = None
        elsewhere = environment.was_taken() or RECORDED_BY in os.environ
        if waited and mine and not elsewhere and not _launched():
            _say(
                "nothing was recorded: the program called no torch module with parameters, and "
                "no torch.optim optimizer took a step"
            )


def program_context(base: Path) -> RunContext:
    """Return the run context of the program in this process.

    Args:
        base: the program's initial working directory.
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
    """Return whether a module is being imported."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


def _launched() -> bool:
    """Return whether child processes have used notable CPU time, as a launcher's do."""
    times = os.times()
    return times.children_user + times.children_system > _LAUNCHED


def _give_up(error: BaseException) -> None:
    """Report an error in the patch that stores a program's modules before they are frozen."""
    _say(f"names of modules may lack their paths because of an error in it: {error!r}")


def _say(text: str) -> None:
    sys.stderr.write(f"comgra: {text}\n")
