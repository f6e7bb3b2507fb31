"""What interventions change and curvatures are of: one number per sample of a model's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.passes import parts_of
from comgra_decl.hooks.probing.places import with_copies
from comgra_decl.hooks.probing.samples import Samples, call_named, widened
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.spec.interventions import DifferenceMeasure, FunctionMeasure, Measure

_IGNORED = -100
"""Targets with this number are not part of the loss, as in torch and transformers."""


class Measured(Protocol):
    """The part of a spec that says what is measured."""

    @property
    def measure(self) -> Measure:
        """What is measured."""

    @property
    def position(self) -> int:
        """The position that is measured."""


class Gauge:
    """Measures outputs of a model.

    Args:
        spec: says what is measured.
        samples: the samples, with their classes if they are known.
        clean: the output of the unchanged pass.

    Raises:
        ProbeError: outputs of this form cannot be measured this way; the message states why.
    """

    def __init__(self, spec: Measured, samples: Samples, clean: Any) -> None:
        self._spec = spec
        self._count = len(samples)
        self._samples = samples
        self._top: torch.Tensor | None = None
        if spec.measure == "top":
            scores = self._scores(clean)
            self._top = None if scores.dim() == 1 else self._placed(scores).argmax(1)
        self.name = _name(spec)

    def __call__(self, output: Any, replicas: int = 1) -> torch.Tensor:
        """Return the measure, [replicas, samples], at least in float32.

        Raises:
            ProbeError: the output cannot be measured.
        """
        parts = parts_of(output, count=self._count, times=replicas)
        values = torch.stack([self._one(part) for part in parts])
        return widened(values) if values.is_floating_point() else values.double()

    def _one(self, output: Any) -> torch.Tensor:
        measure = self._spec.measure
        if isinstance(measure, FunctionMeasure):
            return self._called(measure, output)
        scores = self._scores(output)
        if measure == "loss":
            return self._loss(scores)
        if isinstance(measure, DifferenceMeasure):
            placed = self._classes_at(scores, "difference")
            first, second = (self._wanted(each) for each in measure.difference)
            return _at(placed, first) - _at(placed, second)
        if scores.dim() == 1:
            return scores
        placed = self._placed(scores)
        if measure == "label":
            classes = self._labels().to(placed.device)
            return _without(classes, _at(placed, classes.clamp(min=0)))
        if measure == "top":
            assert self._top is not None  # the outputs have classes
            return _at(placed, self._top)
        assert isinstance(measure, int)
        return _at(placed, self._wanted(measure))

    def _called(self, measure: FunctionMeasure, output: Any) -> torch.Tensor:
        found = call_named(measure, with_copies(output))
        if not isinstance(found, torch.Tensor) or found.shape != (self._count,):
            shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ProbeError(
                f"{measure.target} must return one number per sample, [{self._count}], not {shape}"
            )
        return found

    def _scores(self, output: Any) -> torch.Tensor:
        for _, tensor in tensors_in(output):
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == self._count:
                if tensor.dim() > 3:
                    raise ProbeError(
                        f"the model returns {list(tensor.shape)}; outputs that can be measured are "
                        "[samples], [samples, classes] and [samples, positions, classes]. Use "
                        "`measure: {_target_: ...}`"
                    )
                return tensor[:, 0] if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor
        raise ProbeError("the model returns no tensor with one entry per sample")

    def _placed(self, scores: torch.Tensor) -> torch.Tensor:
        """Return [samples, classes], at the position that the spec names, at least in float32."""
        if scores.dim() < 3:
            return widened(scores)
        position, size = self._spec.position, scores.shape[1]
        if not -size <= position < size:
            raise ProbeError(f"position {position} does not exist; the model returns {size}")
        return widened(scores[:, position])

    def _classes_at(self, scores: torch.Tensor, what: str) -> torch.Tensor:
        if scores.dim() == 1:
            raise ProbeError(f"the model returns one number per sample; {what} needs classes")
        return self._placed(scores)

    def _wanted(self, classes: int | Sequence[int]) -> torch.Tensor:
        if isinstance(classes, int):
            return torch.full((self._count,), classes)
        if len(classes) != self._count:
            raise ProbeError(f"{len(classes)} classes are given for {self._count} samples")
        return torch.tensor(classes)

    def _labels(self) -> torch.Tensor:
        if self._samples.classes is None:
            raise ProbeError(
                "the classes of the samples are unknown, because no loss received one integer per "
                "sample. Use `measure: top`, a number or a function, or give the probe `labels`"
            )
        return self._samples.classes

    def _loss(self, scores: torch.Tensor) -> torch.Tensor:
        if scores.dim() == 1:
            raise ProbeError(
                "the model returns one number per sample, whose loss is unknown. Use `measure: "
                "top` for the number itself, or a function"
            )
        if scores.dim() == 3 and self._samples.classes is None:
            return self._loss_of_tokens(scores)
        placed, classes = self._placed(scores), self._labels().to(scores.device)
        _check(placed, classes.clamp(min=0))
        return _without(classes, F.cross_entropy(placed, classes.clamp(min=0), reduction="none"))

    def _loss_of_tokens(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the next tokens, [samples]."""
        tokens = self._tokens(scores.shape[:2]).to(scores.device)[:, 1:]
        logits = widened(scores[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(logits, tokens, reduction="none", ignore_index=_IGNORED)
        return losses.sum(1) / (tokens != _IGNORED).sum(1)

    def _tokens(self, shape: Sequence[int]) -> torch.Tensor:
        """Return the tokens, [samples, positions]: the argument `labels`, or the input."""
        given = [*tensors_in(self._samples.args), *tensors_in(self._samples.kwargs)]
        usable = [(p, t) for p, t in given if t.dtype == torch.int64 and t.shape == tuple(shape)]
        if not usable:
            raise ProbeError(
                f"the model returns {list(shape)} positions but receives no tokens of this shape, "
                "so that their loss is unknown. Use another `measure`"
            )
        return dict(usable).get(".labels", usable[0][1])


def _at(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    _check(scores, classes)
    return scores.gather(1, classes.to(scores.device)[:, None])[:, 0]


def _without(classes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the values of samples, NaN for those without a class."""
    return torch.where(classes < 0, torch.nan, values)


def _check(scores: torch.Tensor, classes: torch.Tensor) -> None:
    if int(classes.max()) >= scores.shape[1] or int(classes.min()) < 0:
        raise ProbeError(
            f"class {int(classes.max())} does not exist; the model has {scores.shape[1]} classes"
        )


def _name(spec: Measured) -> str:
    measure = spec.measure
    if isinstance(measure, FunctionMeasure):
        return measure.target
    if isinstance(measure, DifferenceMeasure):
        first, second = measure.difference
        return f"output {first} - output {second}"
    return f"output {measure}" if isinstance(measure, int) else measure
