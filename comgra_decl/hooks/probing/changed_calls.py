"""Changes in a copy that is called like any model, made by hooks like those of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from comgra_decl.errors import SpecError
from comgra_decl.hooks.probing.changes import Recorded, Sampled, needs_clean
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.probing.passes import (
    Call,
    Edit,
    Editing,
    Numbered,
    Remembering,
    Rewind,
    tensors_of,
)
from comgra_decl.hooks.probing.patterns import Patterns
from comgra_decl.hooks.probing.places import Modules, Named, Region, picked
from comgra_decl.spec.interventions import (
    ATTENTION,
    ChangeSpec,
    InterventionSpec,
    PartSpec,
    RecordedSpec,
)

_SHOWN = 4


class _Shapes(Numbered):
    """Keeps the shapes of tensors, for the places of a sweep."""

    def __init__(self, edits: Sequence[Edit], inner: Numbered) -> None:
        super().__init__(inner)
        self.found: dict[Call, torch.Tensor] = {}
        self._edits = edits

    def handled(self, path: str, number: int, side: str, value: Any) -> Any:
        """Keep the shapes of the selected tensors of a call."""
        tensors: Sequence[Named] | None = None
        for edit in self._edits:
            if edit.means(path, number, side):
                tensors = tensors_of(side, value) if tensors is None else tensors
                found = picked(edit.spec.role, tensors)
                if found is not None:
                    shape = torch.empty(found.tensor.shape, device="meta")
                    self.found[Call(path, edit.spec.role, number)] = shape
        return value


class ChangedCalls:
    """Makes changes in a copy while it is called.

    Args:
        clean: the copy, whose modules call hooks (`traceable`).
        specs: the changes, in their order.
        recall: reads what other runs have recorded.
        names: what to call them in messages; None: `changes[0]` and so on.

    Attributes:
        edits: the changes.
        modules: the modules of the copy.
        shapes: tensors on the meta device with the shapes of those that are changed, from the calls
            without changes.
        rewind: puts the copy and all generators back into their first state.

    Raises:
        SpecError: a pattern, a parameter or a role does not exist.
    """

    def __init__(
        self,
        clean: CleanCopy,
        specs: Sequence[ChangeSpec],
        *,
        recall: Callable[[RecordedSpec, Call], Recorded],
        names: Sequence[str] | None = None,
    ) -> None:
        self.modules = modules = Modules(clean)
        self._names = [f"changes[{i}]" for i in range(len(specs))] if names is None else names
        found = [modules.problems(s, name) for s, name in zip(specs, self._names, strict=True)]
        problems = [problem for each in found for problem in each]
        if problems:
            raise SpecError(problems)
        self.edits = [
            Edit(
                spec,
                spec.swept_parts if isinstance(spec, InterventionSpec) else spec.parts,
                modules.selected(spec),
                recall=recall,
            )
            for spec in specs
        ]
        self.shapes: dict[Call, torch.Tensor] = {}
        self._clean: dict[Call, torch.Tensor] = {}
        self._samples = Sampled(1, None)
        self._running: Editing | None = None
        self._patterns: Patterns | None = None
        self.rewind = Rewind(clean)

    @property
    def needs_unchanged(self) -> bool:
        """Whether a change depends on what the same calls compute without changes."""
        return any(needs_clean(e.spec.do) for e in self.edits if not e.spec.of_parameters)

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
        for edit in self.edits:
            for path in edit.paths if needs_clean(edit.spec.do) else ():
                wanted.setdefault(path, set()).add(edit.spec.role)
        watch = Remembering(wanted)
        shapes = _Shapes(self.edits, watch)
        with self._watched(shapes):
            yield
        self._clean, self.shapes = watch.values, shapes.found
        self.rewind()

    @contextmanager
    def made(self, edits: Sequence[Edit] | None = None) -> Iterator[None]:
        """Make the changes in all calls.

        Args:
            edits: what to make instead, for a sweep; they may be made nowhere.

        Raises:
            SpecError: a change was made nowhere.
        """
        self._running = editing = Editing(
            self.edits if edits is None else edits,
            modules=self.modules,
            clean=self._clean,
            samples=self._samples,
        )
        try:
            with editing.parameters(), self._watched(editing):
                yield
        finally:
            self._running = None
        if edits is None:
            self.require()

    def require(self) -> None:
        """Raise a SpecError if a change was made nowhere."""
        never = [self._never(i, e) for i, e in enumerate(self.edits) if not e.tally.tensors]
        if never:
            raise SpecError(never)

    def placed(self, region: Region, *, counted: bool) -> list[Edit]:
        """Return the changes with the last one made in a single place, and the others as they are.

        Args:
            region: the place.
            counted: whether the changes before the last one are counted.
        """
        *first, last = self.edits
        before = first if counted else [each.uncounted() for each in first]
        return [*before, replace(last, regions=[region])]

    def said(self) -> list[str]:
        """Return a sentence about what each change has changed."""
        return [
            f"{edit.tally.changed:,} of {edit.tally.elements:,} elements in {edit.tally.tensors} "
            f"tensor{'s' if edit.tally.tensors != 1 else ''} by up to {edit.tally.largest:.3g}"
            for edit in self.edits
        ]

    @contextmanager
    def _watched(self, watch: Numbered) -> Iterator[None]:
        """Pass the calls of the selected modules to a watch."""
        changed = [edit for edit in self.edits if not edit.spec.of_parameters]
        paths = dict.fromkeys(path for edit in changed for path in edit.paths)
        with ExitStack() as stack:
            for path in paths:
                module = self.modules.by_path[path]
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
        parts = f" and {' and '.join(map(_part, spec.parts.items()))}" if spec.parts else ""
        return (
            f"{self._names[number]}: no selected module ({where}{more}) has {asked} with {role!r}"
            f"{parts}"
        )


def _part(named: tuple[str, PartSpec]) -> str:
    name, part = named
    return name if part.only is None else f"{name} {', '.join(map(str, part.only))}"


def _before(
    watch: Numbered, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return watch.before(path, module, args, kwargs)


def _after(watch: Numbered, path: str, module: nn.Module, _args: Any, output: Any) -> Any:
    return watch.after(path, module, output)
