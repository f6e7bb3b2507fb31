"""The calls that compare a prediction with a target: the actual inputs of a loss function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from comgra_decl.records import LOSS_CALLS, SlotKey

LOGITS_OF_CLASSES = frozenset({"cross_entropy", "cross_entropy_loss", "multi_margin_loss"})
"""Functions that take one logit per class and integer targets."""

BINARY_LOGITS = frozenset(
    {"binary_cross_entropy_with_logits", "multilabel_soft_margin_loss", "soft_margin_loss"}
)
"""Functions that take one logit per binary decision."""

PROBABILITIES = frozenset({"binary_cross_entropy"})

CLASSIFICATION = LOGITS_OF_CLASSES | {"nll_loss", "nll_loss_nd", "nll_loss2d"}
"""Functions whose integer targets are classes, which are never negative in correct use."""

ELEMENTWISE = frozenset(
    {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "sub", "rsub", "__sub__", "__rsub__"}
)
"""Functions that compare a prediction with a target element by element, broadcasting both."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as it was passed to a function.

    Attributes:
        shape: its shape.
        dtype: its dtype, such as "float32".
        slot: the iteration of the `prediction` or `target` node that records it; None if it is not
            recorded under that name.
        made_by: the function that computed its values, by its name in autograd, such as "Softmax"
            or "Addmm"; empty if unknown. Only for predictions.
        dim: the dimension of a softmax; None for other functions.
    """

    shape: tuple[int, ...]
    dtype: str
    slot: int | None
    made_by: str = ""
    dim: int | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers."""
        return "int" in self.dtype

    @property
    def is_floating(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return "float" in self.dtype


_OPERATORS = frozenset(
    f"{prefix}{name}"
    for name in ("add", "sub", "mul", "div", "truediv", "pow", "matmul")
    for prefix in ("", "r", "i")
)


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call that compares a prediction with a target.

    Attributes:
        function: name of the function. For a loss written by hand, the name of the operator, such
            as "sub".
        arguments: the other arguments, sorted by name. Only numbers, strings and None are included;
            a tensor is represented by `True`.
        prediction: the tensor that is compared.
        target: the tensor that it is compared with.
        weights: the weight of each class, or of positive samples; empty if unknown.
    """

    function: str
    arguments: tuple[tuple[str, Any], ...]
    prediction: Operand
    target: Operand
    weights: tuple[float, ...] = ()

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument of the call by name, or `default` if the call lacks it."""
        return dict(self.arguments).get(name, default)

    @property
    def is_operator(self) -> bool:
        """Whether the function is an arithmetic operator, as in a loss written by hand."""
        return self.function.strip("_") in _OPERATORS

    @property
    def chooses(self) -> bool:
        """Whether integers choose among predictions, such as the actions of a policy."""
        known = CLASSIFICATION | BINARY_LOGITS | PROBABILITIES | ELEMENTWISE
        return self.target.is_integer and self.function not in known

    @property
    def measures_distance(self) -> bool:
        """Whether the call measures how far predictions are from targets, as in supervised losses.

        Other calls combine a prediction with what the program computes or chooses, such as the
        actions of a policy or the weights of samples.
        """
        if self.target.is_integer:
            return self.function in CLASSIFICATION
        return not self.is_operator or self.function in ELEMENTWISE

    @property
    def classes(self) -> int:
        """Number of classes of a classification; 0 for other losses."""
        shape = self.prediction.shape
        if self.function not in CLASSIFICATION or not shape:
            return 0
        return shape[1] if len(shape) > 1 else shape[0]

    @property
    def prediction_key(self) -> SlotKey | None:
        """Slot that records the prediction; None if a model returned it."""
        at = self.prediction.slot
        return None if at is None else SlotKey("prediction", "output", at, "forward")

    @property
    def target_key(self) -> SlotKey | None:
        """Slot that records the target; None if there is none."""
        at = self.target.slot
        return None if at is None else SlotKey("target", "target", at, "forward")


def loss_calls(facts: Mapping[str, Any]) -> Iterator[LossCall]:
    """Yield the calls described by a record's facts, skipping malformed entries."""
    for call in facts.get(LOSS_CALLS) or ():
        try:
            yield LossCall(
                str(call["function"]),
                tuple(sorted((str(k), v) for k, v in dict(call["arguments"]).items())),
                _operand(call["prediction"]),
                _operand(call["target"]),
                tuple(float(w) for w in call.get("weights") or ()),
            )
        except (KeyError, TypeError, ValueError):
            continue


def _operand(form: Mapping[str, Any]) -> Operand:
    slot = form["slot"]
    shape = tuple(int(n) for n in form["shape"])
    dim = form.get("dim")
    return Operand(
        shape,
        str(form["dtype"]),
        None if slot is None else int(slot),
        str(form.get("made_by", "")),
        None if dim is None else int(dim),
    )
