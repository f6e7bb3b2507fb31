"""Facts about calls whose arguments alone reveal a mistake, in the first records of a run.

A view that should be a permutation, a softmax over the wrong axis, a mask without effect, or a last
step that is padding does not change the magnitude of any tensor, so statistics do not reveal it.
The calls do. See `records.TELLING`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import isfinite, prod
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch

from comgra_decl.hooks.frames import OUR_FOLDER, TORCH_FOLDER
from comgra_decl.hooks.graph.bootstraps import Bootstraps
from comgra_decl.hooks.graph.calls import tensors_of
from comgra_decl.hooks.graph.choices import Choices
from comgra_decl.hooks.graph.unused import Results
from comgra_decl.hooks.limits import is_capturing
from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.hooks.tensors.loss_calls import RESHAPING, function_name, shape_of
from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.support import is_readable

_MOST_FACTS = 64
_MOST_ROWS = 64  # whose lengths are stored
_MOST_ELEMENTS = 1 << 22  # of what is read per call
_HOSTS = ("cpu", "meta")  # devices on which nobody waits
_UNIT = 1e-3  # rounding of a cosine similarity, also in half precision
_HIDDEN = -1e4  # an added score, or one that replaces a score, below which no weight is left
_RATE = 0.8  # of dropout, from which on it is noted
_CLAMPED = 0.9  # share of clamped elements that is noted
_LEAST_WIDTH = 16  # of queries and keys; narrower ones have small scores
_SCALES = ("ExpBackward0", "SoftplusBackward0", "SqrtBackward0")
_ELEMENTWISE = frozenset(
    {"Mul", "Div", "Add", "Sub", "Neg", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Sigmoid"}
    | {"Tanh", "Exp", "Clone", "Expand", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze"}
    | {"Squeeze", "NativeDropout"}
)
"""Autograd's names for functions by which a row of a message depends only on the same row."""
_MOST_FACTORS = 64
_DEPTH = 30  # frames between a call and the program's line
_NOT_THE_PROGRAM = (TORCH_FOLDER, OUR_FOLDER)

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class _Gathered(NamedTuple):
    """Rows of a tensor, chosen by an index."""

    chosen: torch.Tensor
    among: int  # number of the rows from which they were chosen
    node: Any  # autograd's, of the result
    width: int  # elements of each


@dataclass
class _Weights:
    """A softmax: the dimension that it now runs over, and what is known about its mask."""

    tensor: weakref.ref[torch.Tensor]
    shape: tuple[int, ...]
    axis: int
    mask: dict[str, Any] | None = None


@dataclass
class Telling:
    """Collects the facts about a step.

    Attributes:
        tokens: the integer input [batch, positions] of the model; None if it has none.
        bootstraps: follows discounted values.
        results: collects results that nothing uses.
        choices: collects what sampled actions are used for.
    """

    tokens: weakref.ref[torch.Tensor] | None = None
    bootstraps: Bootstraps = field(default_factory=Bootstraps)
    results: Results = field(default_factory=Results)
    choices: Choices = field(default_factory=Choices)
    _found: dict[str, dict[str, Any]] = field(default_factory=dict)
    _weights: dict[int, _Weights] = field(default_factory=dict)
    _logarithms: dict[int, _Weights] = field(default_factory=dict)  # results of `log_softmax`
    # scores, some of which a mask has set to a number: the tensor, the mask and the number
    _masked: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, float]] = field(
        default_factory=dict
    )
    _states: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # final states
    _unrolled: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # all states
    _joined: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    # products of two activations, and what was multiplied by a number below 1
    _scores: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    _scaled: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    _uniform: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # random numbers
    # indices by which rows were gathered, and the number of rows to choose from
    _gathered: list[_Gathered] = field(default_factory=list)
    # positions read from sequences, and where the last one was read
    _read_at: dict[int, tuple[weakref.ref[torch.Tensor], set[int], str]] = field(
        default_factory=dict
    )

    def take(self, loss: torch.Tensor) -> list[dict[str, Any]]:
        """Return the facts so far, and clear them.

        Args:
            loss: the loss of the step.
        """
        for choice in self.choices.fresh:
            self._keep({"kind": "fresh choices", "shape": choice.shape, "where": choice.where})
        self._take_positions()
        for unused in self.results.unused(loss):
            self._keep({"kind": "unused", **asdict(unused), "shape": [*unused.shape]})
        found = [*self._found.values()]
        self._found = {}
        self.release()
        return found

    def release(self) -> None:
        """Release all tensors."""
        self._weights, self._logarithms, self._masked = {}, {}, {}
        self._states, self._unrolled, self._joined = {}, {}, {}
        self._scores, self._scaled, self._uniform = {}, {}, {}
        self._gathered, self._read_at = [], {}
        self.choices.release()
        self.bootstraps.release()
        self.results.release()
        self.tokens = None

    def see(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Store the facts about a call. Torch function modes must be disabled."""
        read = _READ.get(name)
        if self._states and any(_is(self._states, t) for t in tensors_of(args)):
            with quiet():
                self._note("final state", padded=self._padded())
            self._states.clear()
        self.results.receive(args, kwargs)
        if not args and "input" in kwargs:
            args = tuple(kwargs[key] for key in ("input", "other") if key in kwargs)
        if not args or _is_odd(args[0]) or _is_odd(result):
            return
        self.choices.follow(name, args, kwargs, result)
        if self._scaled and any(_is(self._scaled, t) for t in tensors_of(args)):
            for tensor in tensors_of((result,)):
                self._scaled[id(tensor)] = weakref.ref(tensor)
        with quiet():
            if self.results.wants(name, args, result):
                self.results.add(name, result, _where())
            self.bootstraps.see(name, args, kwargs, result, self._note)
            if read is not None:
                read(self, name, args, kwargs, result)

    def _note(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Store a fact once per line of the program; return the stored fact."""
        return self._keep({"kind": kind, **facts, "where": _where()})

    def _keep(self, fact: dict[str, Any]) -> dict[str, Any]:
        if len(self._found) < _MOST_FACTS:
            return self._found.setdefault(repr(fact), fact)
        return fact

    # -- views ---------------------------------------------------------------------------------

    def _reshape(self, _name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        given = args[0]
        if _is(self._joined, given):  # padded and viewed to shift rows: relative positions
            return
        if isinstance(result, torch.Tensor) and given.shape != result.shape:
            source, target = _bounds(given.shape), _bounds(result.shape)
            if not (source <= target or target <= source):  # more than a split or a merge
                self._note("reshape", source=[*given.shape], target=[*result.shape])

    def _join(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        if not isinstance(result, torch.Tensor):
            return
        self._joined[id(result)] = weakref.ref(result)
        parts = args[0] if isinstance(args[0], (list, tuple)) else ()
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if name != "pad" and len(parts) > 1 and isinstance(dim, int) and result.requires_grad:
            first = parts[0]
            if all(part is first for part in parts[1:]):
                self._note(
                    "doubled", shape=[*first.shape], dim=dim % result.dim(), count=len(parts)
                )

    def _normalise(self, _name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Note batch norms whose frozen layers still update their running statistics."""
        running = kwargs.get("running_mean", args[1] if len(args) > 1 else None)
        weight = kwargs.get("weight")  # F.batch_norm gets it by name, torch.batch_norm does not
        frozen = isinstance(weight, torch.Tensor) and not weight.requires_grad
        if isinstance(running, torch.Tensor) and frozen and kwargs.get("training") is True:
            values = result.numel() // max(1, running.numel())
            self._note("frozen batch norm", channels=running.numel(), values=values)

    def _root(self, name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        """Note roots of elements that are exactly zero, where the derivative is infinite."""
        given, power = args[0], args[1] if len(args) > 1 else 0.5
        root = name == "sqrt" or (isinstance(power, float) and 0 < power < 1)
        if not root or not isinstance(given, torch.Tensor) or not given.requires_grad:
            return
        if 0 < given.numel() <= _MOST_ELEMENTS and not given.is_complex() and not is_capturing():
            zeros = int((given == 0).sum())
            if zeros:
                self._note("root of zero", zeros=zeros, shape=[*given.shape])

    # -- softmaxes and what they weigh ------------------------------------------------------------

    def _softmax(self, _name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(result, torch.Tensor) or not isinstance(dim, int) or not result.dim():
            return
        shape = tuple(result.shape)
        axis = dim % len(shape)
        if axis == len(shape) - 1 and _is(self._scores, args[0]):
            self._note("unscaled", shape=[*shape])
        if shape[axis] == 1 and max(shape[1:], default=1) > 1:
            self._note("single", shape=[*shape], dim=axis)
        weights = _Weights(weakref.ref(result), shape, axis)
        masked = self._masked.get(id(args[0]))
        if masked is not None and masked[0]() is args[0]:
            weights.mask = self._weight_of(masked[1], masked[2], result.detach())
        self._weights[id(result)] = weights

    def _log_softmax(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        before = self._logarithms.get(id(args[0]))
        if before is not None and before.tensor() is args[0]:  # normalized in turns
            return
        self._softmax(name, args, kwargs, result)
        if isinstance(result, torch.Tensor) and (known := self._weights.pop(id(result), None)):
            self._logarithms[id(result)] = known

    def _exp(self, _name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        """Read the exponentials of log-probabilities as a softmax."""
        known = self._logarithms.get(id(args[0]))
        if known is not None and known.tensor() is args[0] and isinstance(result, torch.Tensor):
            self._weights[id(result)] = replace(known, tensor=weakref.ref(result))

    def _weight_of(self, mask: torch.Tensor, number: float, result: torch.Tensor) -> Any:
        """Return the fact about the weight that a softmax gives to elements that a mask hides."""
        if result.numel() > _MOST_ELEMENTS:
            return None
        hidden = mask.expand(result.shape) if mask.dim() <= result.dim() else None
        total = float(result.sum())
        if hidden is None or not total > 0:
            return None
        return self._note(
            "mask",
            shape=[*result.shape],
            fill=number,
            hidden=round(float(hidden.to(torch.float32).mean()), 4),
            weight=round(float(result[hidden].sum()) / total, 4),
        )

    def _fill(self, _name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        names = ("input", "mask", "value")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        mask, value = given.get("mask"), given.get("value")
        self._hide(args[0], mask, value, result)

    def _choose(self, _name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        """Read `torch.where(keep, scores, constant)` and the reverse."""
        if len(args) != 3 or not isinstance(args[0], torch.Tensor):
            return
        keep, a, b = args
        if keep.dtype != torch.bool or _is_odd(a) or _is_odd(b):
            return
        if isinstance(a, torch.Tensor) and a.requires_grad:
            self._hide(a, keep, _constant(b), result, inverted=True)
        elif isinstance(b, torch.Tensor) and b.requires_grad:
            self._hide(b, keep, _constant(a), result)

    def _hide(
        self, scores: Any, mask: Any, value: Any, result: Any, *, inverted: bool = False
    ) -> None:
        value = _constant(value)
        self._keep_scores(scores, result)
        low = value is not None and value < _HIDDEN
        if low and isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
            self._compare_with_padding(~mask if inverted else mask)
        if isinstance(scores, torch.Tensor) and id(scores) in self._weights:
            self._mask_again(scores)  # what is hidden after the softmax
        if (
            value is None
            or not isfinite(value)
            or not isinstance(mask, torch.Tensor)
            or mask.dtype != torch.bool
            or mask.numel() > _MOST_ELEMENTS
        ):
            return
        if isinstance(result, torch.Tensor) and result.requires_grad and not mask.requires_grad:
            hidden = ~mask if inverted else mask
            self._masked[id(result)] = weakref.ref(result), hidden, value

    def _compare_with_padding(self, hidden: torch.Tensor) -> None:
        """Note a mask that hides all tokens and shows the padding."""
        tokens = None if self.tokens is None else self.tokens()
        sizes = tuple(size for size in hidden.shape if size != 1)
        if tokens is None or sizes != tuple(tokens.shape) or is_capturing():
            return
        if padded_share(tokens) > 0:
            real = tokens != tokens[:, -1].mode().values
            if torch.equal(hidden.reshape(tokens.shape), real):
                self._note("inverted mask", shape=[*hidden.shape])

    def _attend(self, name: str, args: Args, kwargs: Kwargs, _result: Any) -> None:
        """Read the mask of padding that an attention function receives."""
        if name == "multi_head_attention_forward":
            mask, shows = kwargs.get("key_padding_mask"), False
        else:
            mask, shows = kwargs.get("attn_mask", args[3] if len(args) > 3 else None), True
        if not isinstance(mask, torch.Tensor) or _is_odd(mask):
            return
        hidden = mask < _HIDDEN if mask.is_floating_point() else (~mask if shows else mask)
        self._compare_with_padding(hidden)

    def _multiply(self, name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        """Read products of scores, or of weights, with a mask of zeros and ones."""
        if len(args) < 2 or not isinstance(result, torch.Tensor):
            return
        for value, other in (args[:2], args[1::-1]):
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                continue
            if isinstance(other, (int, float)):
                self._temper(value, float(other))
                self._scale(float(other), result)
                self._inherit(name, (value,), {}, result)
            elif _is(self._uniform, other) and type(gradient_function(value)).__name__ in _SCALES:
                self._note("uniform noise", use="scale", shape=[*other.shape])
            elif isinstance(other, torch.Tensor) and not other.requires_grad and not _is_odd(other):
                self._mask_again(value)
                mask = _zeros_of(other) if value.dim() >= 2 else None
                if mask is not None and result.requires_grad:
                    self._masked[id(result)] = weakref.ref(result), mask, 0.0

    def _temper(self, similarities: torch.Tensor, factor: float) -> None:
        """Note cosine similarities of samples to each other that are multiplied by less than 1."""
        shape = similarities.shape
        square = len(shape) == 2 and shape[0] == shape[1] > 2
        if not square or not 0 < factor < 1 or similarities.numel() > _MOST_ELEMENTS:
            return
        if similarities.is_complex() or is_capturing():
            return
        diagonal = similarities.detach().diagonal()
        low, high = (float(x) for x in similarities.detach().aminmax())
        if float((diagonal - 1).abs().max()) < _UNIT and low > -1 - _UNIT and high < 1 + _UNIT:
            self._note("temperature", factor=factor, shape=[*shape])

    def _mask_again(self, weights: torch.Tensor) -> None:
        known = self._known(weights)
        if known is not None and known.mask is not None:
            known.mask["masked again"] = True

    def _inherit(self, _name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        """Transfer what is known to a result with the same layout."""
        given = args[0]
        if not isinstance(result, torch.Tensor) or not isinstance(given, torch.Tensor):
            return
        known, masked = self._known(given), self._masked.get(id(given))
        if known is not None and result.shape == given.shape:
            self._weights[id(result)] = _Weights(
                weakref.ref(result), known.shape, known.axis, known.mask
            )
        if masked is not None and masked[0]() is given and result.shape == given.shape:
            self._masked[id(result)] = weakref.ref(result), masked[1], masked[2]

    def _drop(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
        rate = given.get("p", 0.5)
        if given.get("training", True) and isinstance(rate, (int, float)) and _RATE <= rate < 1:
            self._note("dropout", rate=float(rate), shape=[*args[0].shape])
        self._inherit(name, args, kwargs, result)

    def _divide(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        if len(args) > 1 and isinstance(args[1], (int, float)):
            if args[1]:
                self._scale(1 / args[1], result)
            self._inherit(name, args, kwargs, result)
        elif isinstance(result, torch.Tensor):
            self._scale(0.0, result)  # normalized, or divided by a scale that is a tensor

    def _scale(self, factor: float, result: torch.Tensor) -> None:
        if abs(factor) < 1 and result.requires_grad:
            self._scaled[id(result)] = weakref.ref(result)

    def _keep_scores(self, scores: Any, result: Any) -> None:
        """Transfer that scores are not scaled to scores that are masked or shifted."""
        if isinstance(result, torch.Tensor) and _is(self._scores, scores):
            self._scores[id(result)] = weakref.ref(result)

    def _add(self, _name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        if len(args) < 2 or not isinstance(result, torch.Tensor) or not result.requires_grad:
            return
        if args[0] is args[1] and result.dim() > 1:
            self._note("added to itself", shape=[*result.shape])
        for each in args[:2]:
            self._keep_scores(each, result)
            if self.tokens is not None and isinstance(each, torch.Tensor) and _hides(each):
                self._compare_with_padding(each < _HIDDEN)

    def _clamp(self, _name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Note elements that are cut off, through which no gradient flows."""
        given = {**dict(zip(("input", "min", "max"), args, strict=False)), **kwargs}
        low = given.get("min", given.get("min_val"))
        high = given.get("max", given.get("max_val"))
        limits = [x for x in (low, high) if isinstance(x, (int, float))]
        if not isinstance(result, torch.Tensor) or not result.requires_grad or not limits:
            return
        if is_capturing() or result.is_complex() or not 1 < result.numel() <= _MOST_ELEMENTS:
            return
        before, within = args[0].detach(), args[0] is result  # in place: cut elements are limits
        below, above = (before.le, before.ge) if within else (before.lt, before.gt)
        cut = sum(below(x).sum() if x is low else above(x).sum() for x in limits)
        share = float(cut) / result.numel()
        if share >= _CLAMPED:
            self._note("clamped", share=round(share, 4), limits=limits, shape=[*result.shape])

    def _pool(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Note sums of rows into fewer rows, and whether the index of the rows is sorted."""
        names = ("input", "dim", "index", "source")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        index, source = given.get("index"), given.get("source", given.get("src"))
        if given.get("dim") not in (0, -2) or not isinstance(index, torch.Tensor):
            return
        if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
            return
        if not source.requires_grad or source.dim() < 2 or not index.numel():
            return
        rows = index if index.dim() == 1 else index.flatten(1)[:, 0]
        if is_capturing() or rows.numel() > _MOST_ELEMENTS:
            return
        ordered = bool((rows.diff() >= 0).all())
        into = result.shape[0]
        gathered = [each for each in self._gathered if each.chosen.numel() == rows.numel()]
        others = [each for each in gathered if not torch.equal(each.chosen, rows)]
        for each in others:
            if each.among == into:
                self._note("messages", **_messages(each.chosen, rows, into))
                break
        # a sorted index may also be that of a pooling within groups
        sent = _sent(source, gathered) if others or ordered else gathered
        if sent and all(torch.equal(each.chosen, rows) for each in sent):
            self._note("own messages", rows=rows.numel(), into=into, function=name)
        self._note("pooled", rows=rows.numel(), into=into, sorted=ordered, function=name)

    def _gather(self, given: Any, index: Any, result: Any) -> None:
        """Store the index by which rows with a gradient are gathered."""
        if not isinstance(index, torch.Tensor) or not isinstance(result, torch.Tensor):
            return
        if index.dim() == 1 and index.dtype == torch.int64 and result.requires_grad:
            width = result[:1].numel()
            node = gradient_function(result)
            self._gathered.append(_Gathered(index, given.shape[0], node, width))

    def _pick_rows(self, _name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
        self._gather(given.get("input"), given.get("index"), result)

    def _sample(self, _name: str, _args: Args, _kwargs: Kwargs, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result.numel() > 1:
            self.choices.sample(result, _where())

    def _randomize(self, _name: str, _args: Args, _kwargs: Kwargs, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result.dim() > 1:
            self._uniform[id(result)] = weakref.ref(result)

    def _classify(self, _name: str, args: Args, kwargs: Kwargs, _result: Any) -> None:
        """Note similarities of samples to each other among which the own one is a candidate."""
        given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
        rows, target = given.get("input"), given.get("target")
        if not isinstance(rows, torch.Tensor) or not isinstance(target, torch.Tensor):
            return
        if not rows.is_floating_point():
            return
        square = rows.dim() == 2 and rows.shape[0] == rows.shape[1] > 3
        if not square or target.shape != rows.shape[:1] or target.dtype != torch.int64:
            return
        if is_capturing():
            return
        own, best = torch.arange(len(rows), device=rows.device), rows.detach().argmax(1)
        if rows.numel() <= _MOST_ELEMENTS and bool(((best == own) & (target != own)).all()):
            self._note("own candidate", shape=[*rows.shape])

    def _pick_pairs(self, rows: Any, at: Any, columns: Any) -> None:
        """Read `log_probabilities[arange(n), classes]` as a classification."""
        if isinstance(at, torch.Tensor) and isinstance(rows, torch.Tensor) and rows.dim() == 2:
            each = at.dtype == torch.int64 and at.shape == rows.shape[:1] and not is_capturing()
            if each and torch.equal(at, torch.arange(len(rows), device=at.device)):
                self._classify("", (rows, columns), {}, None)

    def _measure(self, name: str, args: Args, kwargs: Kwargs, _result: Any) -> None:
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if _is(self._uniform, target):
            self._note("uniform noise", use="target", shape=[*args[0].shape], function=name)

    def _known(self, tensor: Any) -> _Weights | None:
        known = self._weights.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def _contract(self, _name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        """Determine which axis of the softmax weights a matrix product sums over."""
        first = args[0]
        if isinstance(first, torch.Tensor):
            self._score(args, first.shape[-1] if first.dim() > 2 else 0, result)
        for position, tensor in enumerate(args[:2]):
            known = self._known(tensor)
            if known is not None and len(known.shape) > 1:
                axis = len(known.shape) - 1 - position
                self._note("weighs", shape=[*known.shape], dim=known.axis, summed=[axis])

    def _score(self, operands: Args, width: int, result: Any) -> None:
        """Store products of two activations of a width, neither of which has been scaled."""
        tensors = [t for t in operands[:2] if isinstance(t, torch.Tensor)]
        if width < _LEAST_WIDTH or len(tensors) != 2 or not isinstance(result, torch.Tensor):
            return
        if any(gradient_function(t) is None or _is(self._scaled, t) for t in tensors):
            return
        if not any(self._known(t) for t in tensors):
            self._scores[id(result)] = weakref.ref(result)

    def _einsum(self, _name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        equation, *given = args
        if not isinstance(equation, str) or "." in equation or "->" not in equation:
            return
        tensors = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        inputs, output = equation.replace(" ", "").split("->")
        if inputs and isinstance(tensors[0], torch.Tensor):
            sizes = zip(inputs.split(",")[0], tensors[0].shape, strict=False)
            self._score(
                tuple(tensors), prod(n for letter, n in sizes if letter not in output), result
            )
        for letters, tensor in zip(inputs.split(","), tensors, strict=False):
            known = self._known(tensor)
            if known is not None and len(letters) == len(known.shape):
                summed = [at for at, letter in enumerate(letters) if letter not in output]
                self._note("weighs", shape=[*known.shape], dim=known.axis, summed=summed)

    # -- waiting for a device --------------------------------------------------------------------

    def _read_out(self, name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        """Count calls that make the host wait until the device has computed a tensor."""
        given = args[0]
        if isinstance(given, torch.Tensor) and given.device.type not in _HOSTS:
            fact = self._note("waits", function=name, device=given.device.type)
            fact["count"] = fact.get("count", 0) + 1

    def _move(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        arrives = isinstance(result, torch.Tensor) and result.device.type in ("cpu", *_HOSTS)
        if arrives and not kwargs.get("non_blocking"):
            self._read_out(name, args, kwargs, result)
        if name != "cpu":
            self._inherit(name, args, kwargs, result)

    def _squash(self, name: str, args: Args, _kwargs: Kwargs, _result: Any) -> None:
        """Note a sigmoid of a sigmoid."""
        made = gradient_function(args[0]) if isinstance(args[0], torch.Tensor) else None
        while made is not None and function_name(made) in RESHAPING:
            made = made.next_functions[0][0]
        if made is not None and function_name(made) == "Sigmoid":
            self._note("sigmoid twice", function=name, shape=[*args[0].shape])

    # -- losses ---------------------------------------------------------------------------------

    def _rate(self, name: str, args: Args, kwargs: Kwargs, _result: Any) -> None:
        """Note a rate in place of its logarithm."""
        names = ("input", "target", "log_input")
        given = {"log_input": True, **dict(zip(names, args, strict=False)), **kwargs}
        rate = given.get("input")
        made = gradient_function(rate) if isinstance(rate, torch.Tensor) else None
        while made is not None:
            scaled = function_name(made) in ("Mul", "Add") and len(made.next_functions) == 2
            computed = [node for node, _ in made.next_functions if node is not None]
            # times an exposure, or plus a small number
            if function_name(made) not in RESHAPING and not (scaled and len(computed) == 1):
                break
            made = computed[0] if computed else None
        made_by = "" if made is None else function_name(made)
        if rate is not None and given["log_input"] and made_by in ("Exp", "Softplus"):
            self._note("rate as log", function=name, made_by=made_by, shape=[*rate.shape])

    def _align(self, _name: str, args: Args, kwargs: Kwargs, _result: Any) -> None:
        """Count blanks among the targets of a CTC loss, which are within the target lengths.

        Also notes a softmax that is not over the classes.
        """
        names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank")
        given = {"blank": 0, **dict(zip(names, args, strict=False)), **kwargs}
        scores = given.get("log_probs")
        if isinstance(scores, torch.Tensor):
            dim = _normalized(scores)
            if dim not in (None, scores.dim() - 1):
                self._note("ctc softmax", dim=dim, shape=[*scores.shape])
        targets, lengths, blank = given.get("targets"), given.get("target_lengths"), given["blank"]
        self._compare_lengths(given.get("input_lengths"), lengths)
        if not isinstance(targets, torch.Tensor) or not 0 < targets.numel() <= _MOST_ELEMENTS:
            return
        if targets.dim() == 2:
            sizes = torch.as_tensor(lengths, device=targets.device)[:, None]
            targets = targets[torch.arange(targets.shape[1], device=targets.device) < sizes]
        share = int(targets.eq(blank).sum()) / max(1, targets.numel())
        if share:
            self._note("blank target", blank=int(blank), share=round(share, 4))

    def _compare_lengths(self, inputs: Any, targets: Any) -> None:
        """Store the lengths of the inputs and targets of a batch that is sorted by length."""
        own, others = (n.tolist() if isinstance(n, torch.Tensor) else n for n in (inputs, targets))
        if not isinstance(own, (list, tuple)) or not isinstance(others, (list, tuple)):
            return
        falls = own == sorted(own, reverse=True) or own == sorted(own)
        if falls and len(own) == len(others) <= _MOST_ROWS and len({*own}) > 3:
            self._note("ctc lengths", rows=len(own), input=[*own], target=[*others])

    # -- the last step -------------------------------------------------------------------------

    def _padded(self) -> float:
        """Return the share of samples whose last token is padding."""
        tokens = None if self.tokens is None else self.tokens()
        return 0.0 if tokens is None else round(padded_share(tokens), 4)

    def _index(self, _name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        given, index = args[0], args[1] if len(args) > 1 else None
        self._gather(given, index, result)
        if isinstance(index, tuple) and len(index) == 2 and not _is_all(index[0]):
            self._pick_pairs(given, *index)
        if isinstance(index, tuple) and len(index) > 1 and _is_all(index[0]):
            self._last(given, index[1], result, dim=1)
        self._last(given, index[0] if isinstance(index, tuple) and index else index, result, dim=0)

    def _select(self, _name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
        if given.get("dim") in (0, 1):
            self._last(args[0], given.get("index"), result, dim=given["dim"])

    def _last(self, given: Any, at: Any, result: Any, *, dim: int) -> None:
        """Store that a position of a tensor [batch, positions, ...], or the reverse, is read."""
        tokens = None if self.tokens is None else self.tokens()
        if tokens is None or type(at) is not int or not isinstance(given, torch.Tensor):
            return
        read = isinstance(result, torch.Tensor) and result.requires_grad and given.dim() > 2
        shape = tokens.shape if dim else tokens.shape[::-1]
        if not read or given.shape[:2] != shape or (not dim and shape[0] == shape[1]):
            return
        known = self._read_at.get(id(given))
        positions, where = (set(), "") if known is None or known[0]() is not given else known[1:]
        positions.add(at % tokens.shape[1])
        where = _where() if at % tokens.shape[1] == tokens.shape[1] - 1 else where
        self._read_at[id(given)] = weakref.ref(given), positions, where

    def _take_positions(self) -> None:
        """Note tensors of which only the last position is read, or both ends, but no loop's."""
        tokens = None if self.tokens is None else self.tokens()
        if tokens is None:
            return
        padded = self._padded()
        if padded and not padded_share(tokens.T):
            self._keep({"kind": "padded tokens", "shape": [*tokens.shape], "share": padded})
        for reference, positions, where in self._read_at.values():
            if {tokens.shape[1] - 1} <= positions <= {0, tokens.shape[1] - 1}:
                tensor = reference()
                made = None if tensor is None else gradient_function(tensor)
                stacked = made is not None and function_name(made) == "Stack"
                stacked &= tensor is not None and not _is(self._unrolled, tensor)
                fact = {"kind": "last step", "padded": padded, "stacked": stacked}
                self._keep({**fact, "where": where})

    def _recur(self, name: str, args: Args, _kwargs: Kwargs, result: Any) -> None:
        """Store the final state of a recurrent call on padded sequences that were not packed."""
        sizes = args[1] if len(args) > 1 else None  # of the batch, of packed sequences
        packed = isinstance(sizes, torch.Tensor) and not sizes.is_floating_point()
        rate = args[5] if len(args) > 6 and not packed else 0.0
        several = len(args) > 6 and isinstance(args[4], int) and args[4] > 1 and args[6] is True
        if several and isinstance(rate, float) and _RATE <= rate < 1:
            self._note("dropout", rate=rate, shape=[*args[0].shape])
        if isinstance(result, tuple) and isinstance(result[0], torch.Tensor):
            self._unrolled[id(result[0])] = weakref.ref(result[0])
        if packed or self._padded() == 0 or not isinstance(result, tuple):
            return
        state = result[1]
        if isinstance(state, torch.Tensor) and state.requires_grad:
            self._states[id(state)] = weakref.ref(state)


def _sent(source: torch.Tensor, gathered: list[_Gathered]) -> list[_Gathered]:
    """Return the gathered rows of which messages are made element by element.

    Narrower ones, such as weights of edges, are left out. Empty if anything else as wide as the
    messages contributes to them, such as the result of a layer.
    """
    known = {each.node: each for each in gathered if each.node is not None}
    width = source[:1].numel()
    found: list[_Gathered] = []
    waiting = [gradient_function(source)]
    for node in waiting:
        its = known.get(node)
        if its is not None:
            found += [its] if its.width >= width else []
            continue
        shape = shape_of(node)
        if len(shape) > 0 and shape[0] == len(source) and prod(shape[1:]) < width:
            continue
        if function_name(node) not in _ELEMENTWISE or len(waiting) > _MOST_FACTORS:
            return []
        waiting += [each for each, _ in node.next_functions if each not in (None, *waiting)]
    return found


def _messages(sources: torch.Tensor, targets: torch.Tensor, nodes: int) -> dict[str, Any]:
    """Return the facts about the edges of a graph along which messages are passed."""
    pairs = torch.stack([sources, targets])[:, sources != targets]
    count = pairs.shape[1]
    return {
        "edges": count,
        "nodes": nodes,
        "reached": int(pairs.max()) + 1 if count else 0,
        "upwards": int((pairs[0] < pairs[1]).sum()),
    }


def _is_all(index: Any) -> bool:
    """Whether an index is `:`. An array in its place would be compared element by element."""
    return isinstance(index, slice) and index == slice(None)


def padded_share(tokens: torch.Tensor) -> float:
    """Return the share of samples that end with padding; 0 if nothing looks like padding.

    A token counts as padding if it ends several samples in runs of different lengths, at least one
    of them longer than one, and occurs nowhere else.

    Args:
        tokens: integers [batch, positions].
    """
    if tokens.dim() != 2 or min(tokens.shape) < 2 or tokens.numel() > _MOST_ELEMENTS:
        return 0.0
    last = tokens[:, -1]
    pad = last.mode().values
    is_pad = tokens == pad
    runs = is_pad.flip(1).to(torch.int64).cumprod(1).sum(1)
    ends = runs > 0
    lengths = runs[ends].unique()
    elsewhere = int(is_pad.sum() - runs.sum())
    if int(ends.sum()) < 2 or len(lengths) < 2 or int(lengths.max()) < 2 or elsewhere:
        return 0.0
    return float(ends.to(torch.float32).mean())


def _normalized(tensor: torch.Tensor) -> int | None:
    """Return the dimension over which `log_softmax` normalized a tensor; None if unknown.

    Dimensions may have been exchanged since.
    """
    at: list[int] = [
        *range(tensor.dim())
    ]  # where the dimensions of the result of `log_softmax` are now
    node = gradient_function(tensor)
    for _ in range(_DEPTH):
        name = "" if node is None else function_name(node)
        if name == "LogSoftmax":
            return at[_signed(getattr(node, "_saved_dim", -1)) % len(at)]
        if name == "Transpose":
            one, other = (_signed(getattr(node, f"_saved_dim{i}", 0)) for i in (0, 1))
            at[one], at[other] = at[other], at[one]
        elif name == "Permute":
            order = [_signed(n) % len(at) for n in getattr(node, "_saved_dims", ())]
            if len(order) != len(at):
                return None
            before = [0] * len(at)
            for new, old in enumerate(order):
                before[old] = at[new]
            at = before
        elif name not in ("Clone", "Alias", "ToCopy", "Contiguous"):
            return None
        node = node.next_functions[0][0]
    return None


def _signed(number: Any) -> int:
    """Return a number that autograd shows as an unsigned one."""
    signed = int(number)
    return signed - (1 << 64) if signed >> 63 == 1 else signed


def _bounds(shape: torch.Size) -> set[int]:
    """Return where the dimensions of a contiguous tensor end, counted in elements."""
    return {*accumulate(shape, mul)}


def _zeros_of(mask: torch.Tensor) -> torch.Tensor | None:
    """Return where a mask of zeros and ones is zero; None for any other tensor."""
    if mask.dim() < 2 or mask.numel() > _MOST_ELEMENTS:
        return None
    zero = mask == 0
    share = float(zero.to(torch.float32).mean())
    return zero if 0 < share < 1 and bool((zero | (mask == 1)).all()) else None


def _constant(value: Any) -> float | None:
    """Return the value of a number or of a one-element tensor."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, torch.Tensor) or value.requires_grad or not value.numel():
        return None
    if value.numel() > _MOST_ELEMENTS or value.is_complex() or not is_readable(value):
        return None
    low, high = value.aminmax()
    return float(low) if bool(low == high) else None


def _hides(mask: torch.Tensor) -> bool:
    """Whether a tensor without a gradient may be added to scores to hide some of them."""
    if mask.requires_grad or not mask.is_floating_point() or not is_readable(mask):
        return False
    if is_capturing():  # reading numbers would break the capture of a CUDA graph
        return False
    return 0 < mask.numel() <= _MOST_ELEMENTS and float(mask.min()) < _HIDDEN


def _is(where: Mapping[int, weakref.ref[torch.Tensor]], tensor: torch.Tensor) -> bool:
    known = where.get(id(tensor))
    return known is not None and known() is tensor


def _is_odd(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_readable(value)


def _where() -> str:
    """Return the function and line in the program that made the call."""
    for frame in _frames():
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_THE_PROGRAM):
            return f"{frame.f_code.co_qualname} ({Path(path).name}:{frame.f_lineno})"
    return ""


def _frames() -> Iterator[Any]:
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        yield frame
        if frame.f_back is None:
            return
        frame = frame.f_back


_Reader = Callable[[Telling, str, Args, Kwargs, Any], None]
_READ: dict[str, _Reader] = {
    **dict.fromkeys(("view", "reshape"), Telling._reshape),
    **dict.fromkeys(("pad", "cat", "concat"), Telling._join),
    "batch_norm": Telling._normalise,
    **dict.fromkeys(("sqrt", "pow", "__pow__"), Telling._root),
    "softmax": Telling._softmax,
    **dict.fromkeys(("masked_fill", "masked_fill_"), Telling._fill),
    "where": Telling._choose,
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), Telling._multiply),
    **dict.fromkeys(("div", "__truediv__"), Telling._divide),
    **dict.fromkeys(("contiguous", "type_as", "float"), Telling._inherit),
    **dict.fromkeys(
        ("dropout", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d"),
        Telling._drop,
    ),
    **dict.fromkeys(("to", "cpu"), Telling._move),
    **dict.fromkeys(
        ("item", "tolist", "nonzero", "__bool__", "__float__", "__int__", "masked_select"),
        Telling._read_out,
    ),
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), Telling._contract),
    "einsum": Telling._einsum,
    **dict.fromkeys(("add", "__add__", "__radd__"), Telling._add),
    **dict.fromkeys(("clamp", "clip", "hardtanh", "clamp_", "clip_", "hardtanh_"), Telling._clamp),
    **dict.fromkeys(("rand", "rand_like", "uniform_"), Telling._randomize),
    **dict.fromkeys(("cross_entropy", "nll_loss"), Telling._classify),
    **dict.fromkeys(("sigmoid", "sigmoid_", "logsigmoid"), Telling._squash),
    "log_softmax": Telling._log_softmax,
    "exp": Telling._exp,
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), Telling._measure),
    **dict.fromkeys(
        (
            "index_add",
            "index_add_",
            "scatter_add",
            "scatter_add_",
            "scatter_reduce",
            "index_reduce",
        ),
        Telling._pool,
    ),
    **dict.fromkeys(
        ("scaled_dot_product_attention", "multi_head_attention_forward"), Telling._attend
    ),
    "index_select": Telling._pick_rows,
    "multinomial": Telling._sample,
    "ctc_loss": Telling._align,
    "poisson_nll_loss": Telling._rate,
    "__getitem__": Telling._index,
    "select": Telling._select,
    **dict.fromkeys(("gru", "lstm", "rnn_tanh", "rnn_relu"), Telling._recur),
}
"""The reader for each function, by the function's name."""
