"""Waits, in a program that has just imported torch, until there is a training to record.

A process that neither calls a model nor lets an optimizer step leaves no run: a launcher, a
tokenizer's helper, a worker that loads data, a program whose children train. Nothing is attached
to them but two wrappers and a hook, which go away when the recording begins.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from comgra_decl.hooks.patches import Patch
from comgra_decl.hooks.tree import has_parameters
from comgra_decl.launch import environment
from comgra_decl.launch.environment import RECORDED_BY

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.launch.context import RunContext
    from comgra_decl.launch.session import Session

_LAUNCHED = 1.0
"""Seconds of processor time of child processes, from which on they are what the program is for."""

_waiting: Waiting | None = None


def wait_for_training(spec: str, overrides: list[str]) -> None:
    """Records, from the moment a training begins, in this process or in one forked from it."""
    global _waiting
    if _waiting is None:
        _waiting = Waiting(spec, overrides)
        _waiting.begin()
        atexit.register(_waiting.end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_waiting.begin)


def stand_down() -> None:
    """Leaves this process to a session that the program itself, or its command line, has begun."""
    if _waiting is not None:
        _waiting.stop()


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
        self._construction = Patch(Optimizer, "__init__", self._watched_construction)
        self._call = Patch(nn.Module, "__call__", self._watched_call)
        self._steps: RemovableHandle | None = None
        self._session: Session | None = None

    def begin(self) -> None:
        """Waits, in the process that calls it, for a model's call or an optimizer's step.

        In a child of a process that is recorded, a model's call is no sign of a training (a data
        loader may embed what it loads) before an optimizer has been made.
        """
        self.stop()
        self._session = None
        self._construction.apply()
        if RECORDED_BY not in os.environ:
            self._call.apply()
        self._steps = register_optimizer_step_post_hook(lambda *_: self._start())

    def stop(self) -> None:
        """Waits no longer."""
        self._construction.restore()
        self._call.restore()
        if self._steps is not None:
            self._steps.remove()
            self._steps = None

    def _watched_construction(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            compiles = "torch._dynamo" in sys.modules  # afterwards it always is
            original(optimizer, *args, **kwargs)
            self._construction.restore()
            if compiles:
                self._start()  # a compiled function may call the model, and must not find a wrapper
            else:
                self._call.apply()

        return __init__

    def _watched_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if not torch.compiler.is_compiling() and has_parameters(module):
                self._start()
            return original(module, *args, **kwargs)

        return __call__

    def _start(self) -> None:
        """Begins to record; what goes wrong is said and is no matter of the program."""
        self.stop()
        if torch.utils.data.get_worker_info() is not None:
            return
        from comgra_decl.launch.door import start_session
        from comgra_decl.spec import load_spec

        try:
            spec = load_spec(self._spec, self._overrides)
            session = start_session(spec, program_context(self._base))
        except Exception as error:  # noqa: BLE001  (never into the program's own call)
            _say(f"nothing is recorded because of an error in it: {error!r}")
            return
        self._session = session
        if multiprocessing.parent_process() is not None:  # such a process skips functions at exit
            multiprocessing.util.Finalize(None, self._finish, exitpriority=0)
        if session.path is not None and not spec.dry_run:
            _say(f"recording to {session.path}")

    def _finish(self) -> None:
        from comgra_decl.launch.door import finish_session

        if self._session is not None:
            finish_session(self._session)

    def end(self) -> None:
        """Says so if the program has ended and there was nothing to record."""
        waited, mine = self._session is None, self._owner == os.getpid()
        self.stop()
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
    from comgra_decl.launch.context import RunContext

    program = base / (sys.argv[0] if sys.argv else "")
    if program.stem in ("ipykernel_launcher", "colab_kernel_launcher"):
        notebook = os.environ.get("JPY_SESSION_NAME")
        return RunContext(job=Path(notebook).stem if notebook else "notebook", base=base)
    if not program.is_file():
        return RunContext(base=base)
    job = program.parent.name if program.stem == "__main__" else program.stem
    return RunContext(job=job, script=program.resolve(), base=base)


def _launched() -> bool:
    """Whether the program has started others that have worked, as a launcher does."""
    times = os.times()
    return times.children_user + times.children_system > _LAUNCHED


def _say(text: str) -> None:
    sys.stderr.write(f"comgra: {text}\n")
