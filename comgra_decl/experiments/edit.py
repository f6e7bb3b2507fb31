"""Make interventions permanent: `comgra.edit` writes them into a model's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comgra_decl.errors import EditError, ProbeError, SpecError, near_paths, needed
from comgra_decl.experiments.folding import (
    SUMS,
    Affine,
    Event,
    Flow,
    Place,
    affine,
    feature_dim,
    fold,
    is_known,
    refusal,
)
from comgra_decl.hooks.probing.changes import Sampled
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.probing.passes import Call, Edit, Study
from comgra_decl.hooks.probing.places import Modules
from comgra_decl.hooks.probing.samples import Samples
from comgra_decl.hooks.probing.seclusion import secluded
from comgra_decl.hooks.probing.subject import Subject
from comgra_decl.hooks.pytree import first_batch_size, tensors_in
from comgra_decl.spec.interventions import ChangeSpec, changes_from, needs_labels

_SAME = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest difference from the intervened model, relative to its output; 1e-4 otherwise."""


@dataclass(frozen=True)
class Edited:
    """A model whose weights contain interventions.

    Attributes:
        state_dict: its state dict, with the names of the model.
        changes: a sentence for each parameter that has changed.
        difference: the largest difference between its output and that of the model with the
            interventions, on the batch.
    """

    state_dict: dict[str, Any]
    changes: list[str]
    difference: float

    def save(self, path: str | Path) -> Path:
        """Write the state dict to a file.

        Args:
            path: a `.safetensors` file, in which tied weights are stored under each of their names,
                or a file of any other name in the format of `torch.save`, such as `.pt`.

        Raises:
            EditError: the file exists, its folder does not, or it cannot contain the state dict.
            MissingPackageError: safetensors is not installed.
        """
        target = Path(path)
        check_target(target)
        if target.suffix == ".safetensors":
            library = needed("safetensors.torch", "safetensors")
            tensors = {n: v for n, v in self.state_dict.items() if isinstance(v, torch.Tensor)}
            if len(tensors) < len(self.state_dict):
                raise EditError("the state dict has entries that are no tensors; save it as .pt")
            library.save_file({n: v.clone().contiguous() for n, v in tensors.items()}, str(target))
        else:
            torch.save(self.state_dict, target)
        return target


def edit(
    model: nn.Module,
    batch: Any,
    changes: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    labels: Sequence[Any] | None = None,
) -> Edited:
    """Return the weights with which a model does by itself what interventions do to it.

        edited = comgra.edit(
            model, tokens, {"select": "h.3.attn.c_proj", "role": "input", "parts": {"head": [1]},
                            "do": "zero"}
        )
        edited.save("without-head.safetensors")

    This is possible where a change is a linear function of features that a linear layer, a
    convolution, an embedding or a norm produces, or that only such layers receive. Then the edited
    model is equal to the intervened one, up to rounding, on every input that takes the same
    branches of `forward` as the batch. The model itself does not change.

    Args:
        model: the model; it is called in evaluation mode.
        batch: samples, from which means are taken and with which the result is checked. A tensor is
            passed as `model(batch)`, a mapping as `model(**batch)`, a tuple or list as
            `model(*batch)`.
        changes: one or several, with the keys of an intervention: `select`, `exclude`, `role`,
            `parts` and `do`.
        labels: the label of each sample, for `{difference: [A, B]}`.

    Raises:
        EditError: a change cannot be expressed by weights, or matches nothing; the message states
            the reason.
    """
    specs = _specs(changes)
    for number, each in enumerate(specs):
        if labels is None and needs_labels(each.do):
            raise EditError(f"changes[{number}].do: difference needs `labels`, one for each sample")
    try:
        copy = CleanCopy(model, {})
    except ProbeError as error:
        raise EditError(f"the model cannot be copied: {error}") from error
    copy.set_mode(False)
    args, kwargs = _arguments(batch)
    count = first_batch_size(args, kwargs)
    if not count:
        raise EditError("the batch contains no tensor with samples in dimension 0")
    names = [] if labels is None else [*map(str, labels)]
    samples = Samples(args, kwargs, [*range(count)], names, None)
    try:
        with secluded(copy.device), torch.no_grad():
            return _Editor(copy, samples, specs, names or None).made()
    except ProbeError as error:
        raise EditError(str(error)) from error
    finally:
        copy.close()


def check_target(target: Path) -> None:
    """Raise EditError unless a file can be created."""
    if target.exists():
        raise EditError(f"{target} already exists; choose another file")
    if not target.absolute().parent.is_dir():
        raise EditError(f"{target.parent} is not a folder{near_paths(target.parent)}")


def _specs(changes: Any) -> list[ChangeSpec]:
    try:
        found = changes_from(changes)
    except SpecError as error:
        raise EditError(str(error)) from None
    if not found:
        raise EditError("changes: there is none")
    for number, spec in enumerate(found):
        if spec.batch_dim:
            raise EditError(f"changes[{number}].batch_dim: an edit needs the samples first")
    return found


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


@dataclass
class _Fold:
    """What happens at one side of a module.

    Attributes:
        order: when it happens in a pass.
        change: what happens.
        call: in which call of the module.
        why: the number of the change.
    """

    order: int
    change: Affine
    call: int
    why: int


class _Editor:
    """Edits a copy.

    Args:
        copy: the copy, in evaluation mode.
        samples: the samples.
        specs: the changes.
        labels: the label of each sample.
    """

    def __init__(
        self,
        copy: CleanCopy,
        samples: Samples,
        specs: Sequence[ChangeSpec],
        labels: Sequence[str] | None,
    ) -> None:
        self._copy, self._samples, self._specs = copy, samples, specs
        self._modules = modules = Modules(copy)
        problems = [
            problem
            for number, spec in enumerate(specs)
            for problem in modules.problems(spec, f"changes[{number}]")
        ]
        if problems:
            raise EditError("\n".join(problems))
        self._edits = [Edit(spec, spec.parts, modules.selected(spec)) for spec in specs]
        wanted: dict[str, set[str]] = {}
        for each in self._edits:
            for path in () if each.spec.of_parameters else each.paths:
                wanted.setdefault(path, set()).add(each.spec.role)
        self._study = Study(Subject(copy, samples), wanted, labels=labels)
        self._flow = Flow(self._edits)
        self._folds: dict[tuple[str, str], list[_Fold]] = {}

    def made(self) -> Edited:
        """Return the edited model."""
        study, copy = self._study, self._copy
        study.observe()
        study.rewind()
        args, kwargs = self._samples.to(copy.device)
        with self._flow:
            copy.run(args, kwargs, watch=self._flow)
        with study.changed(self._edits) as output:
            expected = [t.clone() for _, t in tensors_in(output) if t.is_floating_point()]
        for number, each in enumerate(self._edits):
            if not each.tally.tensors:
                where = ", ".join(path or "the model" for path in each.paths[:4])
                raise EditError(
                    f"changes[{number}]: no call of a selected module ({where}) has "
                    f"{each.spec.role!r}"
                )
        before = {name: p.clone() for name, p in copy.module.named_parameters()}
        self._change_parameters()
        for number, place in self._flow.places:
            self._resolve(number, place)
        for (path, side), folds in self._folds.items():
            self._fold(path, side, folds)
        study.rewind()
        args, kwargs = self._samples.to(copy.device)
        found = [t for _, t in tensors_in(copy.run(args, kwargs)) if t.is_floating_point()]
        difference = _difference(found, expected)
        said = [
            _said(name, old, parameter)
            for (name, parameter), old in zip(
                copy.module.named_parameters(), before.values(), strict=True
            )
            if not torch.equal(parameter, old)
        ]
        return Edited(dict(copy.module.state_dict()), said, difference)

    def _change_parameters(self) -> None:
        single = Sampled(len(self._samples), None)
        for edit in self._edits:
            for path in edit.paths if edit.spec.of_parameters else ():
                for _, parameter in self._modules.parameters(path, edit.spec):
                    old = parameter.detach().clone()
                    heads = self._modules.heads
                    call = Call(path, edit.spec.role, 0)
                    new = edit.applied(old, call, old, heads=heads, samples=single)
                    parameter.copy_(new)

    # -- where a change goes -------------------------------------------------------------------

    def _resolve(self, number: int, place: Place) -> None:
        """Find the weights that can express a change."""
        reasons: list[str] = []
        side = "input" if self._edits[number].spec.role.startswith("input") else "output"
        if side == "input":
            done = self._try(number, place, [(place.path, place.call, "input")], reasons)
        else:
            done = self._resolve_output(number, place, reasons)
        if not done:
            spec = self._edits[number].spec
            where = f"{place.path or 'the model'}, {spec.role}"
            raise EditError(
                f"changes[{number}] ({where}) cannot be made permanent in weights: "
                + "; ".join(dict.fromkeys(reasons))
            )

    def _resolve_output(self, number: int, place: Place, reasons: list[str]) -> bool:
        flow, key = self._flow, id(place.tensor)
        made, uses = flow.producer(place.tensor, place.order), flow.uses.get(key, [])
        since = 0 if made is None else made.order
        early = [use for use in uses if since < use.order < place.order]
        late = [use for use in uses if use.order > place.order]
        if made is not None and made.module is not None and early:
            reasons.append(f"{made.module!r}, which makes it, is also used by {_names(early)}")
        elif made is not None and made.module is not None:
            goal = (made.module, made.call, "output")
            if self._try(number, place, [goal], reasons):
                return True
        if late and all(use.module is not None for use in late):
            goals = [(str(use.module), use.call, "input") for use in late]
            if self._try(number, place, goals, reasons):
                return True
        elif late:
            reasons.append(f"it is used by {_names(late)}, not only by linear layers")
        return made is not None and not early and self._into_sum(number, place, made, reasons)

    def _into_sum(self, number: int, place: Place, made: Event, reasons: list[str]) -> bool:
        """Add a vector to a sum by adding it to one of the terms, which only this sum uses."""
        for term in made.operands if made.name in SUMS else ():
            source = self._flow.producer(term, made.order)
            uses = self._flow.uses.get(id(term), [])
            if source is None or source.module is None or term.shape != place.tensor.shape:
                continue
            if [use.order for use in uses] != [made.order]:
                continue
            goal = (source.module, source.call, "output")
            if self._try(number, place, [goal], reasons, only_shift=True):
                return True
        return False

    def _try(
        self,
        number: int,
        place: Place,
        goals: Sequence[tuple[str, int, str]],
        reasons: list[str],
        *,
        only_shift: bool = False,
    ) -> bool:
        """Plan the change for sides of modules, all of which must be able to express it."""
        planned: list[tuple[tuple[str, str], _Fold]] = []
        for path, call, side in goals:
            module = self._modules.by_path.get(path)
            name = path or "the model"
            if module is None or not is_known(module):
                kind = type(module).__name__
                reasons.append(f"{name} is a {kind}, of which it is not known what is linear")
                return False
            try:
                change = self._affine(number, place, feature_dim(module))
            except EditError as error:
                reasons.append(str(error))
                return False
            why = refusal(module, side, change)
            if only_shift and not change.only_shifts:
                why = "one term of a sum, to which only vectors can be added"
            shared = self._shared(module)
            if why is not None or shared is not None:
                reasons.append(f"{name} is {why}" if why is not None else str(shared))
                return False
            planned.append(((path, side), _Fold(place.order, change, call, number)))
        for key, fold_ in planned:
            self._folds.setdefault(key, []).append(fold_)
        return True

    def _affine(self, number: int, place: Place, dim: int) -> Affine:
        edit, study = self._edits[number], self._study
        clean = study.clean.get(Call(place.path, edit.spec.role, place.call))
        return affine(
            edit,
            place.path,
            place.tensor,
            clean,
            dim=dim,
            heads=self._modules.heads,
            samples=study.samples,
        )

    def _shared(self, module: nn.Module) -> str | None:
        """Return a sentence if another module has the same parameters."""
        own = {id(p): name for name, p in module.named_parameters(recurse=False)}
        for path, other in self._modules.by_path.items():
            for name, parameter in other.named_parameters(recurse=False):
                if other is not module and id(parameter) in own:
                    return f"its {own[id(parameter)]} is shared with {path}.{name}"
        return None

    # -- into the weights ----------------------------------------------------------------------

    def _fold(self, path: str, side: str, folds: Sequence[_Fold]) -> None:
        """Fold what happens at one side of a module, in the order of the pass."""
        by_change: dict[int, list[_Fold]] = {}
        for each in folds:
            by_change.setdefault(each.why, []).append(each)
        calls = {*range(self._flow.calls[path] + 1)}
        for number, same in by_change.items():
            first = same[0].change
            differs = any(not _equal(first, each.change) for each in same)
            if {each.call for each in same} != calls or differs:
                raise EditError(
                    f"changes[{number}] cannot be made permanent in weights: {path} is called "
                    f"{len(calls)} times with the same weights, and not all calls are changed alike"
                )
        ordered = sorted((same[0] for same in by_change.values()), key=lambda each: each.order)
        # what happens last to an input is closest to the weights
        for each in ordered if side == "output" else reversed(ordered):
            fold(self._modules.by_path[path], side, each.change)


def _equal(one: Affine, other: Affine) -> bool:
    return torch.equal(one.matrix, other.matrix) and torch.equal(one.shift, other.shift)


def _names(uses: Iterable[Event]) -> str:
    return ", ".join(dict.fromkeys(use.module or use.name for use in uses))


def _difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of two outputs.

    Raises:
        EditError: it is more than rounding.
    """
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        if not one.numel():
            continue
        gap = float((one.double() - other.double()).abs().max())
        allowed = _SAME.get(one.dtype, 1e-4) * max(1.0, float(other.double().abs().max()))
        if not gap <= allowed:
            raise EditError(
                f"the edited model differs from the intervened one by {gap:.3g}, so that the "
                "changes are not linear in the way in which this model uses them"
            )
        largest = max(largest, gap)
    return largest


def _said(name: str, old: torch.Tensor, new: torch.Tensor) -> str:
    gap = (new.double() - old.double()).abs()
    return (
        f"{name}: {int((new != old).sum()):,} of {new.numel():,} elements changed, by up to "
        f"{float(gap.max()):.3g}"
    )
