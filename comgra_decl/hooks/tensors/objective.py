"""Facts about the structure of a loss, read from autograd's graph; see `records.OBJECTIVES`.

A loss is a sum of terms. The terms and their signs reveal mistakes that no tensor's magnitude
reveals: a log-determinant that is added instead of subtracted, a loss that only compares two
outputs of a network, or a bootstrapped target that carries the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.hooks.tensors.loss_calls import RESHAPING, function_name, nodes_behind
from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.support import is_readable

_MOST_PAIRS = 4_000  # of the sum of terms
_MOST_ELEMENTS = 1 << 20  # of a factor whose sign is read
_COMPARING = frozenset({"MseLoss", "SmoothL1Loss", "HuberLoss", "L1Loss", "Mul"})
_OF_A_DIFFERENCE = frozenset({"Pow", "Abs", "LinalgVectorNorm", "Norm"})

_LEAF = "torch::autograd::AccumulateGrad"
_MOST_LEAVES = 16

Pair = tuple[Any, int]
"""An autograd node, and the index of one of its outputs."""


def objective_of(loss: torch.Tensor) -> dict[str, Any]:
    """Return the structure of a loss.

    Returns:
        A dict with the following counts; empty if autograd has no information.

        - "along": tensors s for which exp(s) (or s for log(s)) scales other values while the loss
          pushes s in the direction in which the scaled values shrink: the sign of a log-determinant
          is wrong. Reported only if every use of s agrees.
        - "against": such tensors with the right sign.
        - "pairs": terms that compare two computed tensors, with gradients to both.
        - "predicted": pairs in which one side uses further parameters, as a predictor does.
        - "alike": pairs whose sides use the same parameters.
        - "others": all other terms.
        - "bootstrapped": pairs in which one side is data plus a multiple of an output, and both
          sides use common parameters.
    """
    start = gradient_function(loss)
    if start is None:
        return {}
    with quiet():
        signs, terms = _sum_of((start, 0))
        consumers = _consumers(loss)
        found = _scales(signs, terms, consumers)
        for node, _ in terms:
            for name in _kinds(node):
                found[name] = found.get(name, 0) + 1
    return found


def leaves_behind(loss: Any) -> list[torch.Tensor]:
    """Return the tensors to which the backward pass of a loss leads, such as parameters.

    Args:
        loss: a tensor, or an autograd node.
    """
    return [n.variable for n in nodes_behind(loss) if function_name(n) == _LEAF]


def terms_behind(start: Any) -> list[Any]:
    """Return the autograd nodes of the terms that the loss computed by a node adds up."""
    with quiet():
        return [node for node, _ in _sum_of((start, 0))[1]]


def with_gradients(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors whose gradient is nonzero; check at most 16."""
    chosen = leaves[:: max(1, len(leaves) // _MOST_LEAVES)]
    with quiet():
        gradients = [(p, p.grad) for p in chosen]
        return [p for p, g in gradients if g is not None and is_readable(g) and bool(g.any())]


def is_bootstrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the sum of data and a multiple of something with a gradient."""
    node = gradient_function(tensor)
    return node is not None and _is_bootstrapped((node, 0))


# -- the sum of terms --------------------------------------------------------------------------


def _sum_of(start: Pair) -> tuple[dict[Pair, int], list[tuple[Any, int]]]:
    """Return the sign of each tensor that is only added up, and the terms that are not sums.

    A sign is 1 or -1; tensors added with both signs, or with a factor of unknown sign, have 0.
    """
    signs: dict[Pair, int] = {start: 1}
    waiting, terms = [start], []
    for pair in waiting:
        parts = [*_parts(pair[0])]
        if not parts:
            terms.append((pair[0], signs[pair]))
        for part, sign in parts:
            sign *= signs[pair]
            if part not in signs:
                signs[part] = sign
                if len(waiting) < _MOST_PAIRS:
                    waiting.append(part)
            elif signs[part] != sign:
                signs[part] = 0
    return signs, terms


def _parts(node: Any) -> Iterator[tuple[Pair, int]]:
    """Yield the tensors that a node adds up, with their signs; nothing for a term."""
    name = function_name(node)
    given = [(at, pair) for at, pair in enumerate(node.next_functions) if pair[0] is not None]
    if name in RESHAPING or name in ("Sum", "Mean", "Cat", "Stack"):
        yield from ((pair, 1) for _, pair in given)
    elif name == "Neg":
        yield from ((pair, -1) for _, pair in given)
    elif name in ("Add", "Sub", "Rsub"):
        alpha = -1 if (getattr(node, "_saved_alpha", 1) or 1) < 0 else 1
        minus = {"Add": None, "Sub": 1, "Rsub": 0}[name]
        for at, pair in given:
            scaled = alpha if at == (0 if name == "Rsub" else 1) else 1
            yield pair, (-scaled if at == minus else scaled)
    elif name in ("Mul", "Div") and len(given) == 1:
        at, pair = given[0]
        if name == "Mul" or at == 0:
            yield pair, _sign(_saved(node, at))


def _saved(node: Any, at: int) -> torch.Tensor | None:
    """Return the factor of a product, or the divisor, next to its input `at`, if autograd has it.

    A saved tensor is not unpacked, because a checkpoint would then recompute its part.
    """
    try:
        saved = node._raw_saved_self if at else node._raw_saved_other
        if saved.unpack_hook is None and isinstance(saved.data, torch.Tensor):
            factor: torch.Tensor = saved.data
            return factor
    except (AttributeError, RuntimeError):  # of an older torch, or freed
        pass
    return None


def _sign(factor: torch.Tensor | None) -> int:
    """Return the sign that all elements of a factor have, or 0; negative ones must be equal."""
    if factor is None or not 0 < factor.numel() <= _MOST_ELEMENTS:
        return 0
    if factor.is_complex() or not is_readable(factor):
        return 0
    low, high = (float(x) for x in factor.detach().aminmax())
    if high <= 0 and low < high:  # returns of actions, all of which happen to be negative
        return 0
    return 1 if low >= 0 else -1 if high <= 0 else 0


# -- scales ------------------------------------------------------------------------------------


def _consumers(loss: torch.Tensor) -> dict[Pair, list[tuple[Any, int]]]:
    found: dict[Pair, list[tuple[Any, int]]] = {}
    for node in nodes_behind(loss):
        for at, pair in enumerate(node.next_functions):
            if pair[0] is not None:
                found.setdefault(pair, []).append((node, at))
    return found


def _scales(
    signs: dict[Pair, int],
    terms: list[tuple[Any, int]],
    consumers: dict[Pair, list[tuple[Any, int]]],
) -> dict[str, int]:
    """Count the logarithms of scales that the loss pushes along and against their use."""
    directions: dict[Pair, set[int]] = {}
    for pair, found in (*_exponents(signs, consumers), *_logarithms(terms, consumers)):
        directions.setdefault(pair, set()).update(found)
    counts = {"along": 0, "against": 0}
    for found in directions.values():
        if len(found) == 1:
            counts["along" if found == {1} else "against"] += 1
    return {name: count for name, count in counts.items() if count}


def _exponents(
    signs: dict[Pair, int], consumers: dict[Pair, list[tuple[Any, int]]]
) -> Iterator[tuple[Pair, set[int]]]:
    """Yield each added tensor s with the directions of exp(s)."""
    added = {pair[0] for pair in signs}
    for node in {pair[0]: None for pair in consumers}:
        if function_name(node) != "Exp":
            continue
        base = next((each for each in _chain(node.next_functions[0]) if signs.get(each[0])), None)
        if base is not None:
            pair, sign = base
            if _only(consumers[pair], {"Exp", "Mul", "Div", "Neg", *RESHAPING}, added):
                use = _use((node, 0), consumers)
                yield pair, {each * sign * signs[pair] for each in use}


def _logarithms(
    terms: list[tuple[Any, int]], consumers: dict[Pair, list[tuple[Any, int]]]
) -> Iterator[tuple[Pair, set[int]]]:
    """Yield each tensor whose logarithm is added, with its directions."""
    logs = {node for node, _ in terms}
    scales = [
        (node.next_functions[0], sign)
        for node, sign in terms
        if function_name(node) == "Log" and node.next_functions[0][0] is not None
    ]
    unknown = {pair for pair, sign in scales if not sign}  # of a policy, which returns weigh
    for pair, sign in scales:
        users = {"Mul", "Div", "Pow", "Reciprocal", *RESHAPING}
        if pair not in unknown and _only(consumers[pair], users, logs):
            yield pair, {each * sign for each in _use(pair, consumers)}


def _only(users: list[tuple[Any, int]], names: set[str], nodes: set[Any]) -> bool:
    """Whether a tensor is used only by certain functions and nodes.

    A policy's entropy pushes the log-scale, which its log-probabilities use as well, in a way that
    depends on the data.
    """
    return all(node in nodes or function_name(node) in names for node, _ in users)


def _chain(pair: Pair) -> Iterator[tuple[Pair, int]]:
    """Yield the tensors that a tensor is a multiple of, with the sign of the factor."""
    sign = 1
    while pair[0] is not None:
        yield pair, sign
        node = pair[0]
        parts = [*_parts(node)] if function_name(node) in {*RESHAPING, "Mul", "Div", "Neg"} else []
        if len(parts) != 1:
            return
        pair, factor = parts[0]
        sign *= factor


def _use(pair: Pair, consumers: dict[Pair, list[tuple[Any, int]]]) -> set[int]:
    """Return whether a scale multiplies (1) or divides (-1) other values."""
    found, waiting = set(), [pair]
    for one in waiting:
        for node, at in consumers.get(one, ()):
            name = function_name(node)
            both = all(given[0] is not None for given in node.next_functions[:2])
            own = len(node.next_functions) > 1 and node.next_functions[0] == node.next_functions[1]
            if name == "Div" and at == 1:
                found.add(-1)
            elif (name == "Pow" or name in RESHAPING or own) and len(waiting) < 64:
                waiting.append((node, 0))
            elif name == "Mul" and (both or _is_tensor(node, at)):
                found.add(1)
            elif name == "Mul" and len(waiting) < 64:
                waiting.append((node, 0))
            elif name == "Reciprocal":
                found.add(-1)
    return found


def _is_tensor(node: Any, at: int) -> bool:
    """Whether the other factor of a product has several elements."""
    other = _saved(node, at)
    return other is not None and other.numel() > 1


# -- pairs -------------------------------------------------------------------------------------


def _kinds(node: Any) -> list[str]:
    """Return the names under which a term is counted."""
    sides = _sides(node)
    if sides is None:
        return ["others"]
    (first, first_nodes), (second, second_nodes) = ((s, _behind(s)) for s in sides)
    if first[0] in second_nodes or second[0] in first_nodes:
        return ["others"]
    one, two = _parameters(first_nodes), _parameters(second_nodes)
    if not one or not two:
        return ["others"]
    if one & two and _is_bootstrapped(first) != _is_bootstrapped(second):
        return ["pairs", "bootstrapped"]
    if any(function_name(node) != _LEAF for node in first_nodes & second_nodes):
        return ["others"]  # two functions of one output, such as the factors of a focal loss
    if one == two:
        return ["pairs", "alike"]
    return ["pairs", "predicted"] if one < two or two < one else ["pairs"]


def _sides(node: Any) -> tuple[Pair, Pair] | None:
    name = function_name(node)
    if name in _OF_A_DIFFERENCE:
        inner = node.next_functions[0][0]
        while inner is not None and function_name(inner) in RESHAPING:
            inner = inner.next_functions[0][0]
        if inner is None or function_name(inner) != "Sub":
            return None
        node = inner
    elif name not in _COMPARING:
        return None
    sides = [pair for pair in node.next_functions[:2] if pair[0] is not None]
    return (sides[0], sides[1]) if len(sides) == 2 and sides[0] != sides[1] else None


def _behind(pair: Pair) -> set[Any]:
    waiting, seen = [pair[0]], {pair[0]}
    for node in waiting:
        for following, _ in node.next_functions:
            if following is not None and following not in seen and len(seen) < _MOST_PAIRS:
                seen.add(following)
                waiting.append(following)
    return seen


def _parameters(nodes: set[Any]) -> set[int]:
    return {id(node.variable) for node in nodes if function_name(node) == _LEAF}


def _is_bootstrapped(pair: Pair) -> bool:
    node = pair[0]
    while node is not None and function_name(node) in RESHAPING:
        node = node.next_functions[0][0]
    if node is None or function_name(node) != "Add":
        return False
    given = [part[0] for part in node.next_functions if part[0] is not None]
    if len(given) != 1 or len(node.next_functions) != 2:
        return False
    inner = given[0]
    while function_name(inner) in RESHAPING and inner.next_functions[0][0] is not None:
        inner = inner.next_functions[0][0]
    factors = [part[0] for part in inner.next_functions if part[0] is not None]
    return function_name(inner) == "Mul" and len(factors) == 1
