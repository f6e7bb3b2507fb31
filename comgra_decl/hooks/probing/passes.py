"""Passes through a copy of the model with changes in it, each from the same state."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from comgra_decl.errors import ProbeError, reason_of
from comgra_decl.hooks.probing.changes import Recorded, Sampled, changed
from comgra_decl.hooks.probing.copying import CleanCopy, Watch
from comgra_decl.hooks.probing.patterns import Patterns
from comgra_decl.hooks.probing.places import (
    Division,
    Modules,
    Named,
    Region,
    Target,
    chosen,
    chosen_in_sequence,
    mask,
    of_samples,
    picked,
    with_tensor,
)
from comgra_decl.hooks.probing.samples import mapped
from comgra_decl.hooks.probing.subject import Subject
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.tensors.boundaries import input_role
from comgra_decl.spec.interventions import (
    ATTENTION,
    KEY,
    OF_SEQUENCES,
    ChangeSpec,
    ProjectionChange,
    RecordedSpec,
)
from comgra_decl.torch_private import with_functions


class Call(NamedTuple):
    """A tensor in one call of a module, or its gradient (the pass `grad`).

    The role is that of the spec, such as "output".
    """

    path: str
    role: str
    iteration: int
    pass_: str = "forward"


class Rewind:
    """Puts a copy and all generators back into the state in which they were when this was made.

    Args:
        clean: the copy. Its parameters are left alone.
    """

    def __init__(self, clean: CleanCopy) -> None:
        self._modules = [*clean.module.modules()]
        self._attributes = [dict(vars(module)) for module in self._modules]
        self._buffers = [dict(module._buffers) for module in self._modules]
        held = [t for module in self._modules for t in _tensors_of(module)]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in held]
        found = (v for own in self._attributes for v in own.values())
        self._own = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
        self._python, self._numpy = random.getstate(), np.random.get_state()
        device = clean.device
        self._cuda = device if device.type == "cuda" else None
        self._torch = torch.default_generator.get_state()
        self._on_cuda = None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)

    def __call__(self) -> None:
        """Restore the state."""
        with torch.no_grad():
            for tensor, content in self._tensors:
                tensor.detach().copy_(content)
        for module, attributes, buffers in zip(
            self._modules, self._attributes, self._buffers, strict=True
        ):
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for generator, state in self._own:
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        if self._on_cuda is not None and self._cuda is not None:
            torch.cuda.set_rng_state(self._on_cuda, self._cuda)


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    for value in (*module._buffers.values(), *vars(module).values()):
        if isinstance(value, torch.Tensor):
            yield value


@dataclass
class Tally:
    """How much a change has changed.

    Attributes:
        elements: the number of elements that were to be changed, in all places.
    """

    elements: int = 0
    _tensors: set[Hashable] = field(default_factory=set)
    _changed: list[torch.Tensor] = field(default_factory=list)
    _largest: list[torch.Tensor] = field(default_factory=list)

    @property
    def tensors(self) -> int:
        """The number of tensors that were to be changed, each in one place or in several."""
        return len(self._tensors)

    def add(
        self, name: Hashable, old: torch.Tensor, new: torch.Tensor, where: torch.Tensor | None
    ) -> None:
        """Count the elements that differ.

        Args:
            name: says which tensor it is, in all passes.
            old: the tensor without the change.
            new: the tensor with the change.
            where: the elements that were to be changed; None for all.
        """
        self._tensors.add(name)
        differs = (new != old) & ~((new != new) & (old != old))
        if where is not None:
            differs = differs & where
        if where is None:
            self.elements += old.numel()
        else:
            covered = old.numel() // max(1, where.numel())
            self.elements += int(where.sum()) * covered
        self._changed.append(differs.sum())
        if old.numel():
            precise = torch.complex128 if new.is_complex() or old.is_complex() else torch.float64
            gap = (new.detach().to(precise) - old.detach().to(precise)).abs()
            self._largest.append(torch.where(differs, gap, 0.0).max())

    def clear(self) -> None:
        """Forget what has been counted."""
        self.elements = 0
        self._tensors.clear()
        self._changed.clear()
        self._largest.clear()

    @property
    def changed(self) -> int:
        """The number of elements that differ."""
        return sum(int(count) for count in self._changed)

    @property
    def largest(self) -> float:
        """The largest difference of an element."""
        return max((float(value) for value in self._largest), default=0.0)


@dataclass
class Edit(Target):
    """One change in a pass.

    Attributes:
        spec: the change.
        regions: where the change is made; None: in the parts that `spec` names, in all modules.
        recall: reads what a run has recorded of a call's tensor; None if that is not possible.
        tally: counts what it has changed.
    """

    spec: ChangeSpec
    regions: Sequence[Region] | None = None
    recall: Callable[[RecordedSpec, Call], Recorded] | None = None
    tally: Tally = field(default_factory=Tally)

    def uncounted(self) -> Edit:
        """Return the same change for a pass that repeats another one, and is not counted."""
        return replace(self, tally=Tally())

    def where(
        self, path: str, tensor: torch.Tensor, heads: Callable[[str], int | None]
    ) -> torch.Tensor | None:
        """Return which elements are changed in any of the places; None for all."""
        divisions = self.divisions(path, tensor, heads)
        regions = self._regions(path, tensor, heads, None)
        return mask(tensor.shape, divisions, regions, replicas=1, device=tensor.device)

    def applied(
        self,
        tensor: torch.Tensor,
        call: Call,
        clean: torch.Tensor | None,
        *,
        heads: Callable[[str], int | None],
        samples: Sampled,
    ) -> torch.Tensor:
        """Return the changed tensor; the same one if the change is not made in this module.

        Raises:
            ProbeError: the change is not possible for this tensor.
        """
        path, whole = call.path, tensor
        try:
            tensor = self.led(whole)
            regions = self._regions(path, tensor, heads, samples.start)
            if not regions:
                return whole
            divisions = self.divisions(path, tensor, heads)
            where = mask(
                tensor.shape,
                divisions,
                regions,
                replicas=samples.replicas,
                device=tensor.device,
            )
            self._check_direction(tensor)
            new = self.new(tensor, call, None if clean is None else self.led(clean), samples)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            role = f"gradient of {self.spec.role}" if self.spec.of_gradients else self.spec.role
            tensor_of, kind = f"{path or 'the model'}, {role}", type(whole)
            if self.spec.of_parameters and kind not in (torch.Tensor, nn.Parameter):
                raise ProbeError(
                    f"{tensor_of}: is a {kind.__name__}, as of quantized weights, in which this "
                    "change cannot be made; change the output or the input of the module"
                ) from error
            raise ProbeError(f"{tensor_of}: {reason_of(error)}") from error
        if where is not None:
            new = torch.where(where, new, tensor)
        with torch.no_grad():
            of_values = self.spec.of_parameters and not self.spec.of_gradients
            name = (call, whole.data_ptr()) if of_values else call
            self.tally.add(name, tensor, new, where)
        new = new.movedim(0, self.spec.batch_dim) if self.spec.batch_dim else new
        # The model may view it as it views the original, and may write to it.
        wanted = torch.empty_like(whole, device="meta").stride()
        own = where is not None and new.stride() == wanted
        return new if own else torch.empty_like(whole).copy_(new)

    def new(
        self, tensor: torch.Tensor, call: Call, clean: torch.Tensor | None, samples: Sampled
    ) -> torch.Tensor:
        """Return the tensor as if all of it were changed; see `changes.changed`.

        Both tensors have the samples first.
        """
        reader = self.recall
        recall = None if reader is None else lambda source: reader(source, call)
        return changed(self.spec.do, tensor, clean, samples, recall)

    def _check_direction(self, tensor: torch.Tensor) -> None:
        along = self.spec.do.dim if isinstance(self.spec.do, ProjectionChange) else None
        if along == -tensor.dim() and not self.spec.of_parameters:
            raise ProbeError(of_samples(along, tensor))

    def _regions(
        self,
        path: str,
        tensor: torch.Tensor,
        heads: Callable[[str], int | None],
        start: int | None,
    ) -> list[Region]:
        divisions = self.divisions(path, tensor, heads)
        if self.regions is not None:
            here = [region for region in self.regions if region.path in (None, path)]
            return here if start is None else _in_sequence(here, divisions, start)
        indices: dict[str, list[int]] = {}
        for name, each in divisions.items():
            part = self.parts[name]
            if start is None or name not in OF_SEQUENCES:
                indices[name] = chosen(name, part, each.count)
                continue
            first = 0 if name == KEY else start
            indices[name] = chosen_in_sequence(name, part, each.count, first)
            if not indices[name]:  # other calls compute these positions
                return []
        return [Region(None, None, indices)]


def _in_sequence(
    regions: Sequence[Region], divisions: Mapping[str, Division], start: int
) -> list[Region]:
    """Return the regions whose positions, counted in the sequence, are in a tensor."""
    found = []
    for region in regions:
        indices = dict(region.indices)
        for name in (name for name in indices if name in OF_SEQUENCES):
            first, count = 0 if name == KEY else start, divisions[name].count
            indices[name] = [i - first for i in indices[name] if first <= i < first + count]
        if all(indices.values()):
            found.append(region._replace(indices=indices))
    return found


class Numbered(ABC):
    """Counts the calls to each module, and may replace the tensors that they receive and return.

    Args:
        inner: observes the same calls, and sees the replaced tensors.
    """

    def __init__(self, inner: Watch | None = None) -> None:
        self._inner = inner
        self._calls: Counter[str] = Counter()
        self._patterns: Counter[str] = Counter()  # attention patterns so far, by module
        self._running: list[str] = []

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Handle the beginning of a call; return its arguments."""
        number = self._calls[path]
        self._calls[path] += 1
        self._running.append(path)
        given: tuple[tuple[Any, ...], dict[str, Any]]
        given = self.handled(path, number, "input", (args, dict(kwargs)))
        return given if self._inner is None else self._inner.before(path, module, *given) or given

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Handle the end of a call; return its output."""
        self._running.pop()
        output = self.handled(path, self._calls[path] - 1, "output", output)
        return output if self._inner is None else self._inner.after(path, module, output)

    def attended(self, weights: torch.Tensor) -> torch.Tensor:
        """Handle an attention pattern, as one of each module that is running."""
        for path in reversed(self._running):
            number = self._patterns[path]
            self._patterns[path] += 1
            weights = self.handled(path, number, ATTENTION, weights)
        inner = self._inner
        return inner.attended(weights) if isinstance(inner, Numbered) else weights

    @abstractmethod
    def handled(self, path: str, number: int, side: str, value: Any) -> Any:
        """Return what a call receives or returns, or a replacement.

        Args:
            path: the module.
            number: which of the module's calls, or of the attention patterns inside it, counted
                from 0.
            side: "input", "output" or "attention".
            value: (args, kwargs), the output, or the attention weights.
        """


class Remembering(Numbered):
    """Remembers tensors of the unchanged pass.

    Args:
        wanted: the roles to remember, by path.
        inner: observes the same calls.

    Attributes:
        values: a copy of each tensor.
        seen: the roles that calls of these modules had, by path.
    """

    def __init__(self, wanted: Mapping[str, set[str]], inner: Watch | None = None) -> None:
        super().__init__(inner)
        self.values: dict[Call, torch.Tensor] = {}
        self.seen: dict[str, set[str]] = {}
        self._wanted = wanted

    def handled(self, path: str, number: int, side: str, value: Any) -> Any:
        """Remember the tensors of a call."""
        for role in self._wanted.get(path, ()):
            if role.startswith(side):
                self._keep(Call(path, role, number), tensors_of(side, value))
        return value

    def _keep(self, call: Call, tensors: Sequence[Named]) -> None:
        self.seen.setdefault(call.path, set()).update(each.role for each in tensors)
        found = picked(call.role, tensors)
        if found is not None:
            self.values[call] = found.tensor.detach().clone()


class Editing(Numbered):
    """Makes changes in a pass, in the order in which they are listed.

    Args:
        edits: the changes.
        modules: the modules of the copy.
        clean: tensors of the unchanged pass.
        samples: the samples.
        inner: observes the same calls, and sees the changed tensors.
    """

    def __init__(
        self,
        edits: Sequence[Edit],
        *,
        modules: Modules,
        clean: Mapping[Call, torch.Tensor],
        samples: Sampled,
        inner: Watch | None = None,
    ) -> None:
        super().__init__(inner)
        self._edits = [edit for edit in edits if not edit.spec.of_parameters]
        self._of_parameters = [edit for edit in edits if edit.spec.of_parameters]
        self._modules = modules
        self._clean = clean
        self._samples = samples

    def handled(self, path: str, number: int, side: str, value: Any) -> Any:
        """Change the tensors of a call."""
        for edit in self._at(path, number, side):
            found = picked(edit.spec.role, tensors_of(side, value))
            if found is not None:
                new = self._applied(edit, found.tensor, Call(path, edit.spec.role, number))
                value = with_tensor(value, found.tensor, new)
        return value

    def begin(self, samples: Sampled) -> None:
        """Take the samples of the next call of the model, if there are several."""
        self._samples = samples

    def _at(self, path: str, number: int, side: str) -> Iterator[Edit]:
        for edit in self._edits:
            if edit.means(path, number, side):
                yield edit

    def _applied(self, edit: Edit, tensor: torch.Tensor, call: Call) -> torch.Tensor:
        return edit.applied(
            tensor,
            call,
            self._clean.get(call),
            heads=self._modules.heads,
            samples=self._samples,
        )

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """Change parameters, in place, because they may be tied or cached; then restore them."""
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        single = Sampled(self._samples.count, self._samples.labels)
        try:
            for edit in self._of_parameters:
                for path in edit.paths:
                    for _, parameter in self._modules.parameters(path, edit.spec):
                        value = parameter.detach()
                        saved.append((value, value.clone()))
                        heads = self._modules.heads
                        call = Call(path, edit.spec.role, 0)
                        new = edit.applied(value, call, saved[-1][1], heads=heads, samples=single)
                        value.copy_(new)
            yield
        finally:
            for value, content in reversed(saved):
                value.copy_(content)


def _with_gradient(tensor: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """Return an input with a gradient, and add the leaf that receives it."""
    if not tensor.is_floating_point():
        return tensor
    leaves.append(tensor.detach().requires_grad_())
    return leaves[-1].clone()  # to which the model may write


def tensors_of(side: str, value: Any) -> list[Named]:
    """Return the tensors that a call receives or returns, with their roles (see `Numbered`)."""
    if side == ATTENTION:
        return [Named(ATTENTION, value)]
    if side == "output":
        return [Named(f"output{path}", tensor) for path, tensor in tensors_in(value)]
    given = (found for part in value for found in tensors_in(part))
    return [Named(input_role(path), tensor) for path, tensor in given]


def repeated(given: Any, *, count: int, times: int) -> Any:
    """Return nested arguments in which each tensor with samples contains them several times."""
    for _, tensor in tensors_in(given):
        if times > 1 and tensor.dim() and len(tensor) == count:
            given = with_tensor(given, tensor, tensor.repeat(times, *[1] * (tensor.dim() - 1)))
    return given


def parts_of(output: Any, *, count: int, times: int) -> Iterator[Any]:
    """Yield a nested output once for each copy of the samples.

    Raises:
        ProbeError: the output contains no samples.
    """
    named = [t for _, t in tensors_in(output) if t.dim() and len(t) == count * times]
    if not named:
        raise ProbeError("the model returns no tensor with one entry per sample")
    for replica in range(times):
        part = output
        for tensor in named if times > 1 else ():
            part = with_tensor(part, tensor, tensor[replica * count : (replica + 1) * count])
        yield part


class Study:
    """The samples and the copy of the model at one record, for passes with and without changes.

    Args:
        subject: the copy and the samples.
        wanted: the roles of tensors to remember in the unchanged pass, by path.
        labels: the label of each sample; None if they are not known yet.

    Attributes:
        modules: the modules of the copy.
        clean: tensors of the unchanged pass.
        output: the output of the unchanged pass.
        seen: the roles that the calls of modules had, by path.
        rewind: puts the copy and all generators back into the state before the first pass.
    """

    def __init__(
        self,
        subject: Subject,
        wanted: Mapping[str, set[str]],
        *,
        labels: Sequence[str] | None,
    ) -> None:
        self.subject = subject
        self.samples = Sampled(len(subject.samples), labels)
        self.modules = Modules(subject.copy)
        self.clean: Mapping[Call, torch.Tensor] = {}
        self.seen: dict[str, set[str]] = {}
        self.output: Any = None
        self._wanted = wanted
        self._attention = any(ATTENTION in roles for roles in wanted.values())
        self.rewind = Rewind(subject.copy)

    @property
    def mixes_nothing(self) -> bool:
        """Whether all modules are in evaluation mode, in which samples rarely affect others."""
        return not any(module.training for module in self.subject.copy.module.modules())

    def observe(self, watch: Watch | None = None) -> None:
        """Make the unchanged pass."""
        remembering = Remembering(self._wanted, watch)
        with self._patterns_to(remembering, self.samples.count):
            self.output = self.subject.observe(remembering).output
        self.clean, self.seen = remembering.values, remembering.seen

    @contextmanager
    def changed(
        self,
        edits: Sequence[Edit],
        *,
        replicas: int = 1,
        watch: Watch | None = None,
        inputs: list[torch.Tensor] | None = None,
    ) -> Iterator[Any]:
        """Make a pass with changes; its output is valid, and has a gradient, within the context.

        Args:
            edits: the changes, in order.
            replicas: how many times the batch contains all samples.
            watch: observes the calls, and sees the changed tensors.
            inputs: receives the floating-point inputs, which then have gradients; None for none.
        """
        self.rewind()
        count = self.samples.count
        given = self.subject.samples.to(self.subject.copy.device)
        if inputs is not None:
            given = mapped(given, partial(_with_gradient, leaves=inputs))
        args, kwargs = repeated(given, count=count, times=replicas)
        editing = Editing(
            edits,
            modules=self.modules,
            clean=self.clean,
            samples=Sampled(count, self.samples.labels, replicas),
            inner=watch,
        )
        with editing.parameters():
            with self._patterns_to(editing, count * replicas):
                output = self.subject.copy.run(args, kwargs, watch=editing)
            yield output

    @contextmanager
    def _patterns_to(self, watch: Numbered, samples: int) -> Iterator[None]:
        """Pass attention patterns to a watch, if any are wanted."""
        if not self._attention:
            yield
            return
        # Before training, this runs within a call of the program that tracing handles without them.
        with with_functions(), Patterns(watch, samples):
            yield
