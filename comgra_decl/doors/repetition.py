"""Record a step of a program again, with the weights of a checkpoint: `comgra-decl look`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.errors import CallError, ComgraError
from comgra_decl.hooks.hook_lists import before_steps, tidy
from comgra_decl.hooks.probing.copying import unwrapped
from comgra_decl.hooks.probing.loading import load
from comgra_decl.query.checkpoints import Checkpoint, all_tensors
from comgra_decl.record.session import Session

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks import HookManager
    from comgra_decl.hooks.hook_lists import Placed
    from comgra_decl.record.context import RunContext
    from comgra_decl.record.ranks import Rank
    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location, Where


class Stopped(SystemExit):
    """Ends a program whose first training step has been recorded."""


class Repetition(Session):
    """Records the first training step of a program, with the weights of a checkpoint.

    The weights replace those of the model when it is first called, before any of it has run. After
    its first training step, `Stopped` ends the program. The record has the step of the checkpoint
    and is kept in a temporary folder until `save`.

    Args:
        spec: the declared spec.
        context: how the program was started.
        checkpoint: the parameters and buffers.
    """

    def __init__(self, spec: Spec, *, context: RunContext, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._folder = Path(tempfile.mkdtemp(prefix="comgra-look-"))
        self._loaded = False
        self._refusal: Placed | None = None
        self._called: list[str] = []  # the models called outside evaluations
        super().__init__(_repeated(spec, self._folder), context=context)

    @property
    def incomplete(self) -> str | None:
        """Why the program has no training step with these weights; None if it has one."""
        if self._fault is not None or (self._loaded and self._refusal is not None):
            return None
        called = ", ".join(dict.fromkeys(self._called)) or "none"
        return (
            f"the script ended without a training step of {self._checkpoint.model} (models "
            f"called outside evaluations: {called}). Pass the script that recorded the run"
        )

    def save(self, path: Where) -> Location:
        """Write the record to `path` as a run, and remove the temporary folder.

        Args:
            path: the folder of the new run, or its location in a bucket.

        Raises:
            CallError: there is no record; the message says why.
            StoreError: the folder cannot be written.
        """
        from comgra_decl.store.copying import copy_run

        try:
            self._check()
            assert self.path is not None
            return copy_run(self.path, path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the temporary folder, and let the program train again."""
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None
        tidy()  # the program was stopped inside its optimizer's hooks
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self) -> None:
        if isinstance(self._fault, ComgraError):
            raise self._fault
        if self._fault is not None:
            raise CallError(f"the step could not be recorded: {self._fault}") from self._fault
        if self.incomplete is not None:
            raise CallError(self.incomplete)

    def _rank(self) -> Rank | None:
        """Return None: each process of a distributed job repeats the step on its own."""
        return None

    def _manager(self, **arguments: Any) -> HookManager:
        from comgra_decl.hooks import HookManager

        manager = HookManager(self._spec, ended=self._end, **arguments)
        manager.begin_at(self._checkpoint.step)
        manager.before_models(self._load)
        return manager

    def _load(self, node: str, model: nn.Module) -> None:
        """Replace the weights of a model that is about to be called."""
        self._called.append(node)
        if node == self._checkpoint.model and not self._loaded:
            load(unwrapped(model), all_tensors(self._checkpoint))
            self._loaded = True

    def _end(self) -> None:
        self.finish()
        self._refusal = before_steps.add(_stop)
        raise Stopped(0)

    def _tracing_failed(self, error: BaseException) -> None:
        self._fault = error
        raise Stopped(0)

    def _store_failed(self, error: BaseException) -> None:
        self._fault = error


def _stop(*_: Any) -> None:
    """End the program at its next optimizer step, in case it caught the first `Stopped`."""
    raise Stopped(0)


def _repeated(spec: Spec, folder: Path) -> Spec:
    """Return the declared spec, limited to one step and stored elsewhere.

    Probes run in this step. What takes effect only later is switched off.
    """
    from comgra_decl.spec import load_spec

    content = spec.model_dump(mode="json", by_alias=True)
    for probe in content["probes"].values():
        probe["schedule"] = {}
    ends = content["schedule"]["step"]
    content["schedule"] = {"first": 1, "every": None, "eval": None, "step": ends}
    content["run"] = {"root": str(folder), "group": "look", "name": "look"}
    content |= {"keep": None, "checkpoints": None, "profile": None, "memory": None, "rules": "off"}
    content |= {"on_finding": {}, "types": {}, "sinks": [], "perturbations": False}
    content |= {"dry_run": False, "enabled": True, "kpis": {"loss": True, "automatic": False}}
    return load_spec(content)
