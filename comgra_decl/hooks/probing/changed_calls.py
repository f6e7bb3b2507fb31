"""Changes in a copy that is called like any model, made by hooks like those of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from comgra_decl.errors import SpecError
from comgra_decl.hooks.probing.changes import Recorded, Sampled, needs_clean
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.probing.passes import Call, Edit, Editing, Numbered, Remembering, Rewind
from comgra_decl.hooks.probing.patterns import Patterns
from comgra_decl.hooks.probing.places import Modules
from comgra_decl.spec.interventions import ATTENTION, ChangeSpec, RecordedSpec

_SHOWN = 4


class ChangedCalls:
    """Makes changes in a copy while it is called.

    Args:
        clean: the copy, whose modules call hooks (`traceable`).
        specs: the changes, in their order.
        recall: reads what other runs have recorded.

    Raises:
        SpecError: a pattern, a parameter or a role does not exist.
    """

    def __init__(
        self,
        clean: CleanCopy,
        specs: Sequence[ChangeSpec],
        *,
        recall: Callable[[RecordedSpec, Call], Recorded],
    ) -> None:
        self._modules = modules = Modules(clean)
        found = [modules.problems(spec, f"changes[{i}]") for i, spec in enumerate(specs)]
        problems = [problem for each in found for problem in each]
        if problems:
            raise SpecError(problems)
        self._edits = [
            Edit(spec, spec.parts, modules.selected(spec), recall=recall) for spec in specs
        ]
        self._clean: dict[Call, torch.Tensor] = {}
        self._samples = Sampled(1, None)
        self._running: Editing | None = None
        self._patterns: Patterns | None = None
        self._rewind = Rewind(clean)

    @property
    def needs_unchanged(self) -> bool:
        """Whether a change depends on what the same calls compute without changes."""
        return any(needs_clean(e.spec.do) for e in self._edits if not e.spec.of_parameters)

    def begin(self, rows: int, start: int | None) -> None:
        """Prepare for the next call.

        Args:
            rows: the number of samples.
            start: the first position that it computes, in the sequence that is generated; None if
                there is none.
        """
        self._samples = Sampled(rows, None, start=start)
        if self._running is not None:
            self._running.begin(self._samples)
        if self._patterns is not None:
            self._patterns.samples = rows

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Remember what calls compute without changes; then restore the state of the copy."""
        wanted: dict[str, set[str]] = {}
        for edit in self._edits:
            for path in edit.paths if needs_clean(edit.spec.do) else ():
                wanted.setdefault(path, set()).add(edit.spec.role)
        watch = Remembering(wanted)
        with self._watched(watch):
            yield
        self._clean = watch.values
        self._rewind()

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the changes in all calls.

        Raises:
            SpecError: a change was made nowhere.
        """
        self._running = editing = Editing(
            self._edits, modules=self._modules, clean=self._clean, samples=self._samples
        )
        try:
            with editing.parameters(), self._watched(editing):
                yield
        finally:
            self._running = None
        never = [self._never(i, e) for i, e in enumerate(self._edits) if not e.tally.tensors]
        if never:
            raise SpecError(never)

    def said(self) -> list[str]:
        """Return a sentence about what each change has changed."""
        return [
            f"{edit.tally.changed:,} of {edit.tally.elements:,} elements in {edit.tally.tensors} "
            f"tensor{'s' if edit.tally.tensors != 1 else ''} by up to {edit.tally.largest:.3g}"
            for edit in self._edits
        ]

    @contextmanager
    def _watched(self, watch: Numbered) -> Iterator[None]:
        """Pass the calls of the selected modules to a watch."""
        changed = [edit for edit in self._edits if not edit.spec.of_parameters]
        paths = dict.fromkeys(path for edit in changed for path in edit.paths)
        with ExitStack() as stack:
            for path in paths:
                module = self._modules.by_path[path]
                before, after = partial(_before, watch, path), partial(_after, watch, path)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
            if any(edit.spec.role == ATTENTION for edit in changed):
                self._patterns = Patterns(watch, self._samples.count)
                stack.enter_context(self._patterns)
            yield

    def _never(self, number: int, edit: Edit) -> str:
        where = ", ".join(path or "the model" for path in edit.paths[:_SHOWN])
        more = ", ..." if len(edit.paths) > _SHOWN else ""
        role, spec = edit.spec.role, edit.spec
        asked = f"{spec.iteration + 1} calls" if spec.iteration is not None else "a call"
        parts = f" and the parts {', '.join(spec.parts)}" if spec.parts else ""
        return (
            f"changes[{number}]: no selected module ({where}{more}) has {asked} with {role!r}"
            f"{parts}"
        )


def _before(
    watch: Numbered, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return watch.before(path, module, args, kwargs)


def _after(watch: Numbered, path: str, module: nn.Module, _args: Any, output: Any) -> Any:
    return watch.after(path, module, output)
