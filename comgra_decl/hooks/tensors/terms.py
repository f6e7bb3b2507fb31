"""What the terms of a loss are and how much each weighs, read from autograd's graph.

A loss is a sum of terms. A policy gradient, a bonus for entropy, a posterior's divergence and a
reconstruction can be recognised by the functions that compute them. Their signs and weights reveal
mistakes that no tensor's magnitude reveals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isfinite, nan, prod
from typing import Any

import torch

from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.hooks.tensors.loss_calls import RESHAPING, function_name, nodes_behind
from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.support import is_readable

Pair = tuple[Any, int]
"""An autograd node, and the index of one of its outputs."""

_MOST_PAIRS = 4_000
_MOST_NODES = 20_000
_MOST_HOPS = 32
_MOST_ELEMENTS = 1 << 20  # of a factor that is read
_FEWEST = 8  # actions of a loop
_KEPT = 256  # elements of a factor or a residual that are stored
_MONOTONE = frozenset(
    {*RESHAPING, "Sum", "Cat", "Stack", "Clamp", "Where"}
    | {"Minimum", "Maximum", "Amin", "Amax", "Min", "Max"}
)
"""Functions that pass on the direction in which a loss pushes their inputs."""
_OF_A_RATIO = frozenset({"Pow", "Div", "Expand", *RESHAPING})
_DISTANCES = frozenset({"MseLoss", "SmoothL1Loss", "HuberLoss", "L1Loss"})
_BINARY = frozenset({"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"})
_CHOOSING = frozenset({"Gather", "Index", "Select", "IndexSelect", "TakeAlongDim"})
_PRODUCTS = frozenset({"Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Linear"})
_STEPS = frozenset({"Round", "Floor", "Ceil", "Trunc", "Sign", "Heaviside"})
_BOUNDED = {"Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "Tanh": (-1.0, 1.0)}
"""The ranges of functions whose results autograd saves."""
_OTHER_FACTORS = {
    ("Mul", 0): "other",
    ("Mul", 1): "self",
    ("Addcmul", 1): "tensor2",
    ("Addcmul", 2): "tensor1",
}
"""Under which name autograd saves what an input of a product is multiplied by."""
_MEANT = frozenset("Unsqueeze View Reshape UnsafeView Expand Transpose T Permute".split())
"""Functions that prepare a tensor for being compared with every element of another."""
_LEAF = "torch::autograd::AccumulateGrad"
_MEAN, _SUM = 1, 2  # values of torch.nn._reduction


def terms_of(loss: torch.Tensor) -> list[dict[str, Any]]:
    """Return facts about the terms of a loss.

    A weight is the factor by which an element of a term enters the loss: a mean of n elements
    divides by n.

    Returns:
        Dicts with "kind" and, depending on it:

        - "policy": a sum of log-probabilities of chosen actions (or of ratios of probabilities)
          times a "factor" without a gradient. "sign" is 1 if the loss grows with them, "weight" its
          size, "form" is "categorical", "gaussian" or "bernoulli", "ratio" is whether the
          probabilities are divided by others, "labels" whether a cross-entropy selects them,
          "elements" their number. "factor" holds the first 256 elements.
          "twice" is whether a softmax is applied to the result of another one.
        - "clipping": a term chooses between a ratio times a factor and a clipped ratio times it;
          "wrong" if it chooses the larger gain.
        - "attached factor": the factor of such a term has a gradient and contains a difference of
          data and an output.
        - "attached ratio": both probabilities of a ratio carry gradients; "same" if they are the
          same tensor, so that the gradient is zero.
        - "entropy": an entropy of probabilities, with "sign" and "weight".
        - "residual": "values" are the first 256 elements of target - prediction of a regression
          with "elements" elements. If the prediction is "made by" a sigmoid, a softmax or a tanh,
          "range" holds the limits of that function, and "target" those of the target.
        - "broadcast": a "prediction" of shape [n, 1] or [n] minus data has the "result" [n, n].
        - "pairwise": outputs are compared with each other: their difference is [n, n].
        - "divergence": the divergence of a Gaussian posterior from the standard one. Its "weight"
          is 1 for the sum over all elements. "variance as scale" is whether samples are scaled by
          the variance rather than by its root, and "deterministic" whether nothing but the
          divergence uses the variance.
        - "reconstruction": an elementwise loss with "weight" and "elements".
        - "output": the loss consists only of sums of outputs of layers; "sign" is 1 if it grows
          with them, and 0 if with some of them only.
        - "step": "count" of "parameters" receive gradients only through a "function" whose
          derivative is zero, such as "Round".

        Empty if autograd has no information.
    """
    start = gradient_function(loss)
    if start is None:
        return []
    with quiet():
        weights = _weights((start, 0))
        policies = [*_policies(weights), *_clippings(weights)]
        found = [*policies, *_residuals(weights), *_entropies(weights)]
        if any(term.get("form") == "gaussian" for term in policies):
            found += _gaussian_entropies(weights)
        found += [*_posteriors(loss, weights), *_outputs(weights)]
        found += [*_broadcasts(loss), *_without_derivative(loss)]
    return found


# -- the weight of every tensor that is added up ---------------------------------------------------


def _weights(start: Pair) -> dict[Pair, float]:
    """Return the weight of each tensor that the loss adds up; NaN if its sign differs."""
    weights: dict[Pair, float] = {start: 1.0}
    waiting = [start]
    for pair in waiting:
        for part, factor in _parts(pair):
            weight = weights[pair] * factor
            if part not in weights:
                weights[part] = weight
                if len(waiting) < _MOST_PAIRS:
                    waiting.append(part)
            elif weights[part] * weight > 0:
                weights[part] += weight if _shape(part) != () else 0.0
            else:
                weights[part] = nan
    return weights


def _parts(pair: Pair) -> Iterator[tuple[Pair, float]]:
    """Yield the tensors that a node adds up, with their factors."""
    node = pair[0]
    name = function_name(node)
    given = [(at, each) for at, each in enumerate(node.next_functions) if each[0] is not None]
    if name in _MONOTONE:
        yield from ((each, 1.0) for _, each in given)
    elif name == "Mean" and given:
        inside, outside = prod(_shape(given[0][1])), prod(_shape(pair))
        yield given[0][1], outside / inside if inside else nan
    elif name == "Neg":
        yield from ((each, -1.0) for _, each in given)
    elif name in ("Add", "Sub", "Rsub"):
        alpha = float(getattr(node, "_saved_alpha", None) or 1)
        for at, each in given:
            factor = alpha if at == (0 if name == "Rsub" else 1) else 1.0
            minus = at == {"Add": None, "Sub": 1, "Rsub": 0}[name]
            yield each, -factor if minus else factor
    elif name in ("Mul", "Div") and len(given) == 1 and (name == "Mul" or given[0][0] == 0):
        at, each = given[0]
        value = _constant(_saved(node, "self" if at else "other"))
        yield each, value if name == "Mul" or not value else 1 / value


def _saved(node: Any, name: str) -> torch.Tensor | None:
    """Return a tensor that autograd has saved, without unpacking it; None if there is none.

    A checkpoint would recompute its part to unpack a tensor.
    """
    try:
        saved = getattr(node, f"_raw_saved_{name}")
        if saved.unpack_hook is None and isinstance(saved.data, torch.Tensor):
            tensor: torch.Tensor = saved.data
            return tensor if is_readable(tensor) and not tensor.is_complex() else None
    except (AttributeError, RuntimeError):  # of an older torch, or freed
        pass
    return None


def _constant(factor: torch.Tensor | None) -> float:
    """Return a factor with one element; the mean of one whose elements have one sign; else NaN."""
    if factor is None or not 0 < factor.numel() <= _MOST_ELEMENTS:
        return nan
    low, high = (float(x) for x in factor.detach().aminmax())
    if not isfinite(low) or not isfinite(high) or low < 0 < high:
        return nan
    return low if low == high else float(factor.detach().to(torch.float32).mean())


def _shape(pair: Pair) -> tuple[int, ...]:
    node, at = pair
    variable = getattr(node, "variable", None)
    if variable is not None:
        return tuple(variable.shape)
    outputs = getattr(node, "_input_metadata", None) or ()
    return tuple(int(n) for n in outputs[at].shape) if at < len(outputs) else ()


def _first_elements(tensor: torch.Tensor) -> list[float]:
    flat = tensor.detach().reshape(-1)[:_KEPT].to(torch.float32)
    return [round(x, 6) if isfinite(x) else 0.0 for x in flat.tolist()]


# -- policies --------------------------------------------------------------------------------------


@dataclass
class _Probability:
    """How a tensor depends on the log-probabilities of actions.

    Attributes:
        form: "categorical", "gaussian" or "bernoulli".
        sign: 1 if it grows with them.
        ratio: whether it is a ratio of probabilities.
        labels: whether a loss of a classification selects them.
        twice: whether a softmax is applied to probabilities.
    """

    form: str
    sign: int
    ratio: bool
    labels: bool
    twice: bool


@dataclass
class _Walk:
    """The state of a search for log-probabilities."""

    sign: int = 1
    ratio: bool = False
    chosen: bool = False
    labels: bool = False
    twice: bool = False
    hops: int = field(default=0)

    def found(self, form: str, sign: int) -> _Probability | None:
        if not self.chosen and form != "gaussian":
            return None
        return _Probability(form, sign, self.ratio, self.labels, self.twice)


def _probability(pair: Pair, walk: _Walk | None = None) -> _Probability | None:
    """Return how a tensor depends on log-probabilities of chosen actions; None if it does not."""
    walk = walk or _Walk()
    while pair[0] is not None and walk.hops < _MOST_HOPS:
        walk.hops += 1
        node, name = pair[0], function_name(pair[0])
        given = [(at, each) for at, each in enumerate(node.next_functions) if each[0] is not None]
        walk.chosen |= name in _CHOOSING
        found = _end_of(node, name, walk) if given else None
        if found is not None or not given:
            return found
        if name in ("Add", "Sub", "Rsub"):
            return _of_a_sum(name, given, walk)
        if not _passes(node, name, given, walk):
            return None
        pair = given[0][1]
    return None


def _end_of(node: Any, name: str, walk: _Walk) -> _Probability | None:
    """Return the probability that a node computes from a model's output; None if it is none."""
    if name in ("LogSoftmax", "Softmax"):
        walk.twice = _is_softmax(node.next_functions[0])
        return walk.found("categorical", walk.sign)
    if name == "Pow":  # a density falls with the distance
        return walk.found("gaussian", -walk.sign)
    if name in _BINARY and getattr(node, "_saved_reduction", 0) == 0:
        walk.chosen = True
        return walk.found("bernoulli", -walk.sign)
    return None


def _passes(node: Any, name: str, given: list[tuple[int, Pair]], walk: _Walk) -> bool:
    """Follow a node to its first input; return False if it computes no probability."""
    if name in ("NllLoss", "NllLoss2D"):
        walk.sign, walk.chosen, walk.labels = -walk.sign, True, True
        return getattr(node, "_saved_reduction", 0) == 0
    if name == "Neg":
        walk.sign = -walk.sign
        return True
    if name == "Exp":
        first, walk.ratio = not walk.ratio, True
        return first
    if name in ("Mul", "Div"):
        factor = _saved(node, "self" if given[0][0] else "other") if len(given) == 1 else None
        walk.sign *= -1 if _constant(factor) < 0 else 1
        if name == "Mul":
            walk.chosen |= _selects(factor)
        elif len(given) == 2:
            walk.ratio |= _probability(given[1][1]) is not None
        else:
            walk.ratio |= _are_probabilities(factor)
        return len(given) == 1 or name == "Div"
    if name == "Bmm" and len(given) == 1:  # as `einsum` computes it
        walk.chosen |= _selects(_saved(node, "self" if given[0][0] else "mat2"))
        return walk.chosen
    return name in _MONOTONE or name in ("Log", "Expand")


def _selects(factor: torch.Tensor | None) -> bool:
    """Whether a factor selects one action of each row, as a one-hot encoding does."""
    if factor is None or factor.dim() < 2 or not 1 < factor.numel() <= _MOST_ELEMENTS:
        return False
    dim = next((at for at in (-1, -2) if factor.shape[at] > 1), None)
    if dim is None:
        return False
    values = factor.detach()
    binary = bool(((values == 0) | (values == 1)).all())
    return binary and bool((values.sum(dim) == 1).all())


def _are_probabilities(divisor: torch.Tensor | None) -> bool:
    """Whether a divisor may be the probabilities of actions."""
    if divisor is None or not 1 < divisor.numel() <= _MOST_ELEMENTS:
        return False
    low, high = (float(x) for x in divisor.detach().aminmax())
    return 0 < low < high <= 1


def _is_softmax(pair: Pair) -> bool:
    """Whether a tensor is the result of a softmax, which may be written as exp(x) / sum(exp(x))."""
    node = pair[0]
    while node is not None and function_name(node) in RESHAPING:
        node = node.next_functions[0][0]
    if node is None or function_name(node) != "Div":
        return node is not None and function_name(node) == "Softmax"
    above, below = node.next_functions[0], node.next_functions[1]
    if below[0] is None or function_name(below[0]) != "Sum":
        return False
    return function_name(above[0]) == "Exp" and below[0].next_functions[0] == above


def _of_a_sum(name: str, given: list[tuple[int, Pair]], walk: _Walk) -> _Probability | None:
    minus = {"Add": None, "Sub": 1, "Rsub": 0}[name]
    if len(given) == 2 and name == "Sub" and function_name(given[1][1][0]) == "Logsumexp":
        walk.twice = _is_softmax(given[0][1])
        return walk.found("categorical", walk.sign)
    for at, each in given:
        sign = -walk.sign if at == minus else walk.sign
        branch = replace(walk, sign=sign)
        found = _probability(each, branch)
        if found is not None:
            return found
    return None


def _policies(weights: dict[Pair, float]) -> Iterator[dict[str, Any]]:
    """Yield the policy terms, and what is wrong with their gradients."""
    single: list[tuple[float, float, _Probability]] = []  # of a loop over actions
    for pair, weight in weights.items():
        node = pair[0]
        if function_name(node) not in ("Mul", "Dot") or not weight:
            continue
        given = [(at, each) for at, each in enumerate(node.next_functions) if each[0] is not None]
        if len(given) == 1:
            at, each = given[0]
            other = "tensor" if function_name(node) == "Dot" else "other"
            factor = _saved(node, "self" if at else other)
            found = None if factor is None else _probability(each)
            if found is None or factor is None or _is_plain_weight(factor, found):
                continue
            if _selects(factor):  # it is the choice of an action, not its advantage
                continue
            if factor.numel() == 1:
                single.append((weight, float(factor), found))
                continue
            yield _policy(weight, factor, found)
            yield from _ratios(each)
        elif len(given) == 2:
            yield from _attached(given[0][1], given[1][1])
            yield from _attached(given[1][1], given[0][1])

    if len(single) >= _FEWEST and len({weight > 0 for weight, _, _ in single}) == 1:
        weight, _, found = single[0]
        yield _policy(weight, torch.tensor([factor for _, factor, _ in single]), found)


def _policy(weight: float, factor: torch.Tensor, found: _Probability) -> dict[str, Any]:
    return {
        "kind": "policy",
        "sign": (1 if weight > 0 else -1) * found.sign if isfinite(weight) else 0,
        "weight": abs(weight) if isfinite(weight) else 0.0,
        "form": found.form,
        "ratio": found.ratio,
        "labels": found.labels,
        "twice": found.twice,
        "elements": factor.numel(),
        "factor": _first_elements(factor),
    }


def _is_plain_weight(factor: torch.Tensor, found: _Probability) -> bool:
    """Whether a factor may be the weight of a sample: nonnegative, or no advantage of an action."""
    if factor.numel() > _MOST_ELEMENTS:
        return True
    if found.form == "categorical":
        return False
    return bool((factor >= 0).all()) or bool((factor <= 0).all())


def _clippings(weights: dict[Pair, float]) -> Iterator[dict[str, Any]]:
    """Yield the choices between a gain and a clipped gain.

    The loss -min(r A, clip(r) A), which is max(-r A, -clip(r) A), is pessimistic.
    """
    for pair, weight in weights.items():
        node, name = pair[0], function_name(pair[0])
        if name in ("Amin", "Amax", "Min", "Max"):
            node = node.next_functions[0][0]
            if node is None or function_name(node) not in ("Stack", "Cat"):
                continue
        elif name not in ("Minimum", "Maximum"):
            continue
        sides = [each for each in node.next_functions if each[0] is not None]
        if len(sides) != 2 or not isfinite(weight):
            continue
        found = [_probability(_without_factor(side)) for side in sides]
        if all(each is not None and each.ratio for each in found):
            smaller = name in ("Minimum", "Amin", "Min")
            yield {"kind": "clipping", "wrong": smaller == (weight > 0)}


def _without_factor(pair: Pair) -> Pair:
    """Return what is multiplied by a tensor without a gradient, if anything is."""
    while pair[0] is not None and function_name(pair[0]) in {*RESHAPING, "Neg", "Mul"}:
        given = [each for each in pair[0].next_functions if each[0] is not None]
        if len(given) != 1:
            break
        pair = given[0]
    return pair


def _attached(one: Pair, other: Pair) -> Iterator[dict[str, Any]]:
    found = _probability(one)
    if found is None or function_name(other[0]) in ("Exp", "Softmax", "LogSoftmax"):
        return
    if _probability(other) is None and _is_a_residual(other):
        yield {"kind": "attached factor", "ratio": found.ratio}


def _is_a_residual(pair: Pair) -> bool:
    """Whether a tensor is data minus an output, or the reverse, possibly normalized."""
    waiting = [pair[0]]
    for node in waiting:
        name = function_name(node)
        inner = [each[0] for each in node.next_functions]
        known = [each for each in inner if each is not None]
        if name == "Sub" and len(known) == 1 and len(inner) == 2:
            return True
        if name in ("Sub", "Div", *RESHAPING) and known and len(waiting) < 8:
            waiting.append(known[0])
    return False


def _ratios(pair: Pair) -> Iterator[dict[str, Any]]:
    """Yield a ratio of probabilities that both carry gradients."""
    node = pair[0]
    for _ in range(_MOST_HOPS):
        if node is None:
            return
        name = function_name(node)
        given = [each for each in node.next_functions if each[0] is not None]
        if name in ("Sub", "Div") and len(given) == 2:
            if all(_probability(each) is not None for each in given):
                yield {"kind": "attached ratio", "same": given[0] == given[1]}
            return
        if name not in (*_MONOTONE, "Exp") or not given:
            return
        node = given[0][0]


def _entropies(weights: dict[Pair, float]) -> Iterator[dict[str, Any]]:
    for pair, weight in weights.items():
        sides = [each for each in pair[0].next_functions if each[0] is not None]
        if function_name(pair[0]) != "Mul" or len(sides) != 2 or not isfinite(weight):
            continue
        names = [{*_names_down(each)} for each in sides]
        for mine, other in (names, names[::-1]):
            if mine & {"Exp", "Softmax"} and other & {"LogSoftmax", "Logsumexp", "Log"}:
                yield {
                    "kind": "entropy",
                    "sign": -1 if weight > 0 else 1,
                    "weight": abs(weight),
                    "elements": prod(_shape(pair)),
                }
                break


def _gaussian_entropies(weights: dict[Pair, float]) -> Iterator[dict[str, Any]]:
    """Yield the logarithms of scales that are added apart from log-probabilities."""
    for pair, weight in weights.items():
        if function_name(pair[0]) == "Log" and isfinite(weight) and weight:
            sign = 1 if weight > 0 else -1
            fact = {"weight": abs(weight), "elements": prod(_shape(pair))}
            yield {"kind": "entropy", "sign": sign, **fact}


def _names_down(pair: Pair) -> Iterator[str]:
    """Yield the functions that compute a tensor, up to the first that is neither view nor clamp."""
    node = pair[0]
    for _ in range(4):
        if node is None:
            return
        name = function_name(node)
        yield name
        if name == "Sub":
            yield from (function_name(n) for n, _ in node.next_functions[1:2] if n is not None)
        if name not in RESHAPING and name not in ("Clamp", "Add"):
            return
        node = node.next_functions[0][0]


# -- regressions and posteriors --------------------------------------------------------------------


def _residuals(weights: dict[Pair, float]) -> Iterator[dict[str, Any]]:
    for pair, weight in weights.items():
        node, name = pair[0], function_name(pair[0])
        if name in _DISTANCES or name in _BINARY:
            prediction, target = _saved(node, "self"), _saved(node, "target")
            if prediction is None or target is None or prediction.shape != target.shape:
                continue
            reduction = int(getattr(node, "_saved_reduction", _MEAN))
            scale = weight / prediction.numel() if reduction == _MEAN else weight
            fact = {"weight": abs(scale), "elements": prediction.numel()}
            if isfinite(scale):
                yield {"kind": "reconstruction", **fact}
            first = node.next_functions[0][0] is not None
            other = len(node.next_functions) > 1 and node.next_functions[1][0] is not None
            if name in _DISTANCES and first != other:
                left = (target - prediction) if first else (prediction - target)
                yield _residual(left, node.next_functions[0 if first else 1])
        elif name == "Pow":
            sides = _sides_of_difference(node)
            base = _saved(node, "self")
            if sides is not None and base is not None and sum(sides) == 1:
                yield _residual(-base if sides[0] else base, _prediction_of(node))
                fact = {"weight": abs(weight), "elements": base.numel()}
                if isfinite(weight):
                    yield {"kind": "reconstruction", **fact}


def _residual(left: torch.Tensor, prediction: Pair) -> dict[str, Any]:
    """Return the fact about target - prediction, with the limits of the two if known.

    Args:
        left: target - prediction.
        prediction: the prediction.
    """
    fact = {"kind": "residual", "elements": left.numel(), "values": _first_elements(left)}
    node = prediction[0]
    while node is not None and function_name(node) in {*RESHAPING} - {"Index", "Gather", "Select"}:
        node = node.next_functions[0][0]
    name = "" if node is None else function_name(node)
    answer = _saved(node, "result") if name in _BOUNDED else None
    if answer is not None and 0 < answer.numel() == left.numel() <= _MOST_ELEMENTS:
        target = answer.detach().reshape(-1) + left.detach().reshape(-1)
        low, high = (float(x) for x in target.aminmax())
        if isfinite(low) and isfinite(high):
            fact |= {"made by": name, "range": _BOUNDED[name], "target": (low, high)}
    return fact


def _difference(node: Any) -> Any:
    """Return the node of the difference that is squared; None if it is none."""
    inner = node.next_functions[0][0]
    while inner is not None and function_name(inner) in RESHAPING:
        inner = inner.next_functions[0][0]
    known = inner is not None and function_name(inner) == "Sub" and len(inner.next_functions) == 2
    return inner if known else None


def _prediction_of(node: Any) -> Pair:
    """Return the side of a squared difference that carries a gradient."""
    sides: tuple[Pair, ...] = _difference(node).next_functions
    return next(each for each in sides if each[0] is not None)


def _sides_of_difference(node: Any) -> tuple[bool, bool] | None:
    """Return which sides of a difference that is squared carry gradients; None if it is not one."""
    inner = _difference(node)
    if inner is None:
        return None
    first, second = (each[0] is not None for each in inner.next_functions)
    return first, second


def _broadcasts(loss: torch.Tensor) -> list[dict[str, Any]]:
    """Return differences of [n, 1] (or [n]) and data that have the shape [n, n].

    Where outputs are also compared with each other, as in distances between samples, all pairs are
    meant.
    """
    found: list[dict[str, Any]] = []
    start = gradient_function(loss)
    waiting, seen = [start], {start}
    for node in waiting:
        given = [each for each in node.next_functions if each[0] is not None]
        after = _shape((node, 0)) if function_name(node) in ("Sub", "Rsub", "Mul") else ()
        if function_name(node) == "Mul" and not _multiplies_a_column(node, given):
            after = ()
        if len(after) == 2 and after[0] == after[1] > 1:
            expanded = [each for each in given if _shape(each) in ((after[0], 1), (after[0],))]
            if len(given) == 2 and all(prod(_shape(each)) == after[0] for each in given):
                return [{"kind": "pairwise"}]
            if len(given) == 1 and expanded and function_name(expanded[0][0]) not in _MEANT:
                before = [*_shape(expanded[0])]
                found.append({"kind": "broadcast", "prediction": before, "result": [*after]})
        for following, _ in given:
            stops = function_name(following) in _PRODUCTS
            if following not in seen and not stops and len(seen) < _MOST_PAIRS:
                seen.add(following)
                waiting.append(following)
    return found


def _multiplies_a_column(node: Any, given: list[Pair]) -> bool:
    """Whether a product has one factor without a gradient, of shape [n, 1] or [n].

    A factor [n, n] is a mask, or weights.
    """
    if len(given) != 1:
        return False
    factor = _saved(node, "other") if node.next_functions[0][0] is not None else None
    factor = _saved(node, "self") if factor is None else factor
    return factor is not None and factor.numel() > 1 and factor.numel() == max(factor.shape)


def _posteriors(loss: torch.Tensor, weights: dict[Pair, float]) -> Iterator[dict[str, Any]]:
    """Yield divergences of the form -0.5 (1 + s - mu^2 - exp(s)), with s the log-variance."""
    users: dict[Pair, list[Any]] = {}
    for node in nodes_behind(loss):
        for each in node.next_functions:
            if each[0] is not None:
                users.setdefault(each, []).append(node)
    yield from _of_distributions(weights, users)
    for pair, weight in weights.items():
        if function_name(pair[0]) != "Exp" or not isfinite(weight):
            continue
        base = pair[0].next_functions[0]
        added = weights.get(base, nan)
        if not isfinite(added) or abs(added + weight) > 0.01 * abs(weight):
            continue
        if _probability(base) is not None:
            continue  # r - 1 - log r, an estimate of the divergence of policies
        exponentials = [n for n in users.get(base, ()) if function_name(n) == "Exp"]
        scaled = any(_scales_noise(n, users) for n in exponentials)
        sums = {"Add", "Sub", "Rsub", "Sum", "Mean", "Exp"}
        others = {function_name(n) for n in users.get(base, ())} - sums
        others |= {function_name(u) for n in exponentials for u in users.get((n, 0), ())} - sums
        yield {
            "kind": "divergence",
            "weight": 2 * abs(weight),
            "elements": prod(_shape(pair)),
            "variance as scale": scaled,
            "deterministic": not others and not scaled,
        }


def _of_distributions(
    weights: dict[Pair, float], users: dict[Pair, list[Any]]
) -> Iterator[dict[str, Any]]:
    """Yield divergences of the form 0.5 (r + d^2 - 1 - log r), with r the ratio of variances.

    `torch.distributions.kl_divergence` computes them in this form.
    """
    for pair, weight in weights.items():
        if function_name(pair[0]) != "Log" or not isfinite(weight) or not weight:
            continue
        ratio = pair[0].next_functions[0]
        added = weights.get(ratio, nan)
        if not isfinite(added) or abs(added + weight) > 0.01 * abs(weight):
            continue
        scale = ratio
        while scale[0] is not None and function_name(scale[0]) in _OF_A_RATIO:
            scale = scale[0].next_functions[0]
        names = {function_name(user) for user in users.get(scale, ())}
        yield {
            "kind": "divergence",
            "weight": 2 * abs(weight),
            "elements": prod(_shape(pair)),
            "variance as scale": False,
            "deterministic": "Mul" not in names and names <= {*_OF_A_RATIO, "Log"},
        }


def _scales_noise(node: Any, users: dict[Pair, list[Any]]) -> bool:
    """Whether a tensor is multiplied by numbers of both signs, as noise is."""
    waiting = [node]
    for one in waiting:
        for user in users.get((one, 0), ()):
            name = function_name(user)
            if name in RESHAPING and len(waiting) < _MOST_HOPS:
                waiting.append(user)
                continue
            at = next((i for i, (n, _) in enumerate(user.next_functions) if n is one), 0)
            factor = _saved(user, _OTHER_FACTORS.get((name, at), ""))
            if factor is not None and 1 < factor.numel() <= _MOST_ELEMENTS:
                low, high = (float(x) for x in factor.detach().aminmax())
                if low < 0 < high:
                    return True
    return False


def _outputs(weights: dict[Pair, float]) -> Iterator[dict[str, Any]]:
    ends = [(pair, weight) for pair, weight in weights.items() if not [*_parts(pair)]]
    if ends and all(function_name(pair[0]) in _PRODUCTS for pair, _ in ends):
        signs = {(weight > 0) - (weight < 0) for _, weight in ends}
        yield {"kind": "output", "sign": signs.pop() if len(signs) == 1 else 0}


# -- functions without a derivative ----------------------------------------------------------------


def _without_derivative(loss: torch.Tensor) -> list[dict[str, Any]]:
    """Return the function through which alone gradients reach some parameters, as zeros."""
    every, functions = _leaves(loss, through=True)
    if not functions & _STEPS:
        return []
    cut = every - _leaves(loss, through=False)[0]
    function = sorted(functions & _STEPS)[0]
    return [{"kind": "step", "function": function, "count": len(cut)}] if cut else []


def _is_step(node: Any) -> bool:
    """Whether the derivative of a function is zero wherever it exists."""
    name = function_name(node)
    rounds = getattr(node, "_saved_rounding_mode", None) if name == "Div" else None
    return name in _STEPS or rounds is not None


def _leaves(loss: torch.Tensor, *, through: bool) -> tuple[set[int], set[str]]:
    """Return the leaves that gradients reach, and the functions met, beyond steps if `through`."""
    start = gradient_function(loss)
    waiting, seen = [start], {start}
    found: set[int] = set()
    names: set[str] = set()
    for node in waiting:
        name, step = function_name(node), _is_step(node)
        names.add("Floor" if step and name == "Div" else name)
        if name == _LEAF:
            found.add(id(node.variable))
        for following, _ in node.next_functions if through or not step else ():
            if following is not None and following not in seen and len(seen) < _MOST_NODES:
                seen.add(following)
                waiting.append(following)
    return found, names
