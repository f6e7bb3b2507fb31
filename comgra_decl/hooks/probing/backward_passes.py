"""Passes through a copy of the model in which gradients are changed, read and measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.copying import Watch
from comgra_decl.hooks.probing.measuring import Gauge
from comgra_decl.hooks.probing.passes import Call, Edit, Numbered, Study, tensors_of
from comgra_decl.hooks.probing.places import EVERY_PARAMETER, picked, with_tensor
from comgra_decl.hooks.probing.samples import widened
from comgra_decl.hooks.pytree import equal, tensors_in
from comgra_decl.spec.interventions import ATTENTION, GradientMeasure, Objective

GRAD = "grad"
"""The pass of gradients."""


@dataclass(frozen=True)
class Passed:
    """What a pass with gradients has given.

    Attributes:
        output: the output of the model, without history.
        gradients: the gradient of each parameter and each floating-point input that requires one,
            after all changes: by `id` for parameters, and in order for inputs. None where none
            arrived.
        measured: the norm of a gradient, [samples], or [1] for a parameter; None if nothing was to
            be measured.
    """

    output: Any
    gradients: Mapping[int, torch.Tensor | None]
    measured: torch.Tensor | None

    def equals(self, other: Passed) -> bool:
        """Return whether all outputs and gradients are the same to the last bit."""
        return equal(self.output, other.output) and equal(self.gradients, other.gradients)


class Grading(Numbered):
    """Changes gradients, as hooks on tensors do, and measures one of them.

    A change is made in what flows back from the uses of an output, or from one use of an input:
    between the tensor and what receives it. `inner` sees the tensor itself, and therefore the sum
    over all uses, as in any record.

    Args:
        edits: the changes of gradients of outputs and inputs.
        study: the samples and the copy.
        clean: the gradients without changes; None to remember them instead of changing them.
        measure: the gradient that is measured.
        inner: observes the same calls.

    Attributes:
        remembered: the gradients that were to be changed.
        squares: the sum of squares of the measured gradient, [samples]; None until one arrives.
        leaves: tensors that had no history.
    """

    def __init__(
        self,
        edits: Sequence[Edit],
        study: Study,
        *,
        clean: Mapping[Call, torch.Tensor] | None,
        measure: GradientMeasure | None,
        inner: Watch | None,
    ) -> None:
        super().__init__(inner)
        self._edits = edits
        self._study = study
        self._clean = clean
        self._measure = measure
        self.remembered: dict[Call, torch.Tensor] = {}
        self.squares: torch.Tensor | None = None
        self.leaves: list[torch.Tensor] = []

    def before(
        self, path: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Handle the beginning of a call; return its arguments."""
        number = self._calls[path]
        self._calls[path] += 1
        self._running.append(path)
        given: tuple[tuple[Any, ...], dict[str, Any]] = (args, dict(kwargs))
        given = self._begun(path, number, "input", given)
        if self._inner is not None:
            given = self._inner.before(path, module, *given) or given
        hooked: tuple[tuple[Any, ...], dict[str, Any]]
        hooked = self.handled(path, number, "input", given)
        return hooked

    def after(self, path: str, module: torch.nn.Module, output: Any) -> Any:
        """Handle the end of a call; return its output."""
        self._running.pop()
        number = self._calls[path] - 1
        output = self._begun(path, number, "output", output)
        if self._inner is not None:
            output = self._inner.after(path, module, output)
        return self.handled(path, number, "output", output)

    def _begun(self, path: str, number: int, side: str, value: Any) -> Any:
        """Give a history to the selected tensors that have none."""
        for role in self._roles(path, number, side):
            found = picked(role, tensors_of(side, value))
            if found is None or not found.tensor.is_floating_point() or found.tensor.requires_grad:
                continue
            leaf = found.tensor.detach().requires_grad_()
            self.leaves.append(leaf)
            value = with_tensor(value, found.tensor, leaf.clone())
        return value

    def _roles(self, path: str, number: int, side: str) -> Iterator[str]:
        """Yield the roles in this call that are changed or measured."""
        yield from (e.spec.role for e in self._edits if e.means(path, number, side))
        if self._measures(path, side):
            assert self._measure is not None
            yield self._measure.role

    def _measures(self, path: str, side: str) -> bool:
        measure = self._measure
        if measure is None or measure.of_parameters:
            return False
        return measure.gradient == path and measure.role.startswith(side)

    def handled(self, path: str, number: int, side: str, value: Any) -> Any:
        """Register hooks for the gradients of a call."""
        if side == ATTENTION:
            return value
        tensors = tensors_of(side, value)
        if self._measures(path, side):
            assert self._measure is not None
            found = picked(self._measure.role, tensors)
            if found is not None and found.tensor.requires_grad:
                found.tensor.register_hook(self._measured)
                value = with_tensor(value, found.tensor, found.tensor.clone())
                tensors = tensors_of(side, value)
        changes: dict[int, tuple[torch.Tensor, list[tuple[Edit, Call]]]] = {}
        for edit in (e for e in self._edits if e.means(path, number, side)):
            found = picked(edit.spec.role, tensors)
            if found is not None and found.tensor.requires_grad:
                call = Call(path, edit.spec.role, number, GRAD)
                changes.setdefault(id(found.tensor), (found.tensor, []))[1].append((edit, call))
        for tensor, made in changes.values():
            # Has the gradient of this use alone. The model may write to what it receives, and torch
            # would not call the hooks of a tensor that has been written to.
            hooked = tensor.clone()
            hooked.register_hook(partial(self._arrived, made))
            value = with_tensor(value, tensor, hooked.clone())
        return value

    def _arrived(
        self, changes: Sequence[tuple[Edit, Call]], gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Change a gradient, or remember it."""
        if gradient is None:  # behind layers without one, such as quantized ones
            return None
        for edit, call in changes:
            if self._clean is None:
                self.remembered[call] = gradient.detach().clone()
                continue
            gradient = edit.applied(
                gradient,
                call,
                self._clean.get(call),
                heads=self._study.modules.heads,
                samples=self._study.samples,
            )
        return gradient

    def _measured(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        count = self._study.samples.count
        if not gradient.dim() or len(gradient) != count:
            assert self._measure is not None
            raise ProbeError(
                f"measure: the gradient of {self._measure.gradient or 'the model'}, "
                f"{self._measure.role} needs samples in the first dimension, but the shape is "
                f"{list(gradient.shape)} for {count} samples"
            )
        square = widened(gradient.detach()).square().reshape(count, -1).sum(1)
        self.squares = square if self.squares is None else self.squares + square


class BackwardPasses:
    """Passes of the samples with the gradients of one objective.

    Args:
        study: the samples and the copy, after the unchanged pass.
        objective: what the gradients are of; None for the sum of the outputs, which needs no
            classes.
        edits: all changes of gradients that will be made, whose unchanged gradients are needed.

    Raises:
        ProbeError: the model's output cannot be measured this way, or has no gradients.
    """

    def __init__(self, study: Study, objective: Objective | None, edits: Sequence[Edit]) -> None:
        study.subject.check_gradients()
        self._study = study
        self._edits = edits
        samples = study.subject.samples
        self.gauge = None if objective is None else Gauge(objective, samples, study.output)
        self._clean: Mapping[Call, torch.Tensor] | None = None
        self._unchanged: Passed | None = None
        self._norms: torch.Tensor | None = None  # those of the unchanged pass
        self._missing: torch.Tensor | None = None  # samples without a measure in the last pass

    def unchanged(self, measure: GradientMeasure | None, watch: Watch | None = None) -> Passed:
        """Make a pass without changes.

        Args:
            measure: the gradient that is measured.
            watch: observes the calls.
        """
        if measure is None and watch is None and self._unchanged is not None:
            return self._unchanged
        found = self._passed(self._edits, measure, watch, remember=True)
        self._unchanged = found
        return found

    def made(
        self, edits: Sequence[Edit], measure: GradientMeasure | None, watch: Watch | None = None
    ) -> Passed:
        """Make a pass with changes.

        Args:
            edits: the changes of values and of gradients, in order.
            measure: the gradient that is measured.
            watch: observes the calls, and sees the changed tensors and gradients.

        Raises:
            ProbeError: a change is not possible, or no gradient arrives.
        """
        if self._clean is None:
            self.unchanged(measure)
        return self._passed(edits, measure, watch, remember=False)

    def _passed(
        self,
        edits: Sequence[Edit],
        measure: GradientMeasure | None,
        watch: Watch | None,
        *,
        remember: bool,
    ) -> Passed:
        study = self._study
        of_gradients = [edit for edit in edits if edit.spec.of_gradients]
        grading = Grading(
            [edit for edit in of_gradients if not edit.spec.of_parameters],
            study,
            clean=None if remember else self._clean,
            measure=measure,
            inner=watch,
        )
        forward = [] if remember else [edit for edit in edits if not edit.spec.of_gradients]
        inputs: list[torch.Tensor] = []
        with (
            torch.enable_grad(),
            study.changed(forward, watch=grading, inputs=inputs) as output,
        ):
            of = self._of(output)
            if not of.requires_grad:
                raise ProbeError(
                    "what the gradients are of has none: no parameter requires a gradient, or the "
                    "output is detached"
                )
            parameters = [p for p in study.subject.copy.module.parameters() if p.requires_grad]
            leaves = [*parameters, *inputs, *grading.leaves]
            found = torch.autograd.grad(of, leaves, allow_unused=True)
            # Named by order, because the inputs of each pass are tensors of their own.
            own: dict[int, torch.Tensor | None] = {
                id(p): g for p, g in zip(parameters, found, strict=False)
            }
            rest = found[len(parameters) : len(parameters) + len(inputs)]
            gradients = {**own, **{-1 - at: g for at, g in enumerate(rest)}}
            returned = _detached(output)
        with torch.no_grad():
            of_parameters = [edit for edit in of_gradients if edit.spec.of_parameters]
            if remember:
                self._clean = {**grading.remembered, **self._shared(of_parameters, gradients)}
            else:
                self._change(of_parameters, gradients)
            measured = None if measure is None else self._norm(measure, grading, gradients)
            if remember and measured is not None:
                self._norms = measured
        return Passed(returned, gradients, measured)

    def _of(self, output: Any) -> torch.Tensor:
        """Return what the gradients are of: the mean over the samples that have a measure."""
        if self.gauge is None:
            floating = [t.sum() for _, t in tensors_in(output) if t.is_floating_point()]
            if not floating:
                raise ProbeError("the model returns no floating-point tensor")
            return torch.stack([*floating]).sum()
        measures = self.gauge(output)[0]
        self._missing = torch.isnan(measures.detach())
        classes = self._study.subject.samples.classes
        if classes is not None:  # samples without a class have no loss
            missing = torch.isnan(measures.detach()) & (classes < 0).to(measures.device)
            measures = measures[~missing]
            if not len(measures):
                raise ProbeError("no sample has a class")
        return measures.mean()

    def _parameters(
        self, edits: Sequence[Edit], gradients: Mapping[int, torch.Tensor | None]
    ) -> Iterator[tuple[Edit, Call, int, torch.Tensor]]:
        """Yield the gradients of parameters that are changed, with their keys."""
        modules = self._study.modules
        for edit in edits:
            seen = set()
            for path in edit.paths:
                for name, parameter in modules.parameters(path, edit.spec):
                    key = id(parameter)
                    gradient = gradients.get(key)
                    if gradient is not None and key not in seen:  # a tied one has one gradient
                        seen.add(key)
                        yield edit, Call(path, name, 0, GRAD), key, gradient

    def _shared(
        self, edits: Sequence[Edit], gradients: Mapping[int, torch.Tensor | None]
    ) -> dict[Call, torch.Tensor]:
        return {
            call: gradient.clone() for _, call, _, gradient in self._parameters(edits, gradients)
        }

    def _change(self, edits: Sequence[Edit], gradients: dict[int, torch.Tensor | None]) -> None:
        """Change the gradients of parameters."""
        clean, study = self._clean or {}, self._study
        for edit, call, key, gradient in self._parameters(edits, gradients):
            gradients[key] = edit.applied(
                gradient,
                call,
                clean.get(call),
                heads=study.modules.heads,
                samples=study.samples,
            )

    def _norm(
        self,
        measure: GradientMeasure,
        grading: Grading,
        gradients: Mapping[int, torch.Tensor | None],
    ) -> torch.Tensor:
        """Return the norm of the measured gradient; 0 if only a change keeps it from arriving.

        Samples without a measure have no norm (NaN).
        """
        if not measure.of_parameters:
            norms = self._none(measure) if grading.squares is None else grading.squares.sqrt()
            if self._missing is None:
                return norms
            return norms.masked_fill(self._missing.to(norms.device), torch.nan)
        held = self._study.modules.by_path[measure.gradient]._parameters
        found = [
            gradients.get(id(parameter))
            for name, parameter in held.items()
            if measure.role in (EVERY_PARAMETER, name)
        ]
        known = [widened(g).square().sum() for g in found if g is not None]
        return torch.stack(known).sum().sqrt()[None] if known else self._none(measure)

    def _none(self, measure: GradientMeasure) -> torch.Tensor:
        if self._norms is None:
            raise ProbeError(f"no gradient reaches {_named(measure)}")
        return torch.zeros_like(self._norms)


def _named(measure: GradientMeasure) -> str:
    return f"{measure.gradient or 'the model'}, {measure.role}"


def measured_name(measure: GradientMeasure, of: str) -> str:
    """Return what is measured in words.

    Args:
        measure: the gradient.
        of: what it is of.
    """
    return f"norm of the gradient of {of} at {_named(measure)}"


def _detached(output: Any) -> Any:
    for _, tensor in tensors_in(output):
        output = with_tensor(output, tensor, tensor.detach().clone())
    return output
