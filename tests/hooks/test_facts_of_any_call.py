"""No call of a program ends tracing, however odd its arguments are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from comgra_decl.hooks.graph.bootstraps import _MASKING, _PICKING, _PRODUCTS, _REDUCING, _SUMS
from comgra_decl.hooks.graph.choices import _COMPARING, _PASSING
from comgra_decl.hooks.graph.telling import _READ, Telling
from tests.support.shortened import shortened

OF_RETURNS = (*_MASKING, *_PICKING, *_PRODUCTS, *_REDUCING, *_SUMS)
NAMES = sorted({*_READ, *OF_RETURNS, *_PASSING, *_COMPARING, "stack", "addcmul", "full", "ones"})


def values() -> dict[str, Any]:
    """Arguments that fit each other, or nearly so."""
    four, six = torch.randint(0, 4, (4,)), torch.randint(0, 4, (6,))
    square = torch.randn(4, 4, requires_grad=True) * 1
    return {
        "square": square,
        "wide": torch.randn(4, 6, requires_grad=True) * 1,
        "column": torch.randn(4, 1, requires_grad=True) * 1,
        "batch": torch.randn(2, 4, 4, requires_grad=True) * 1,
        "images": torch.randn(2, 4, 4, 4, requires_grad=True) * 1,
        "volumes": torch.randn(2, 4, 4, 4, 4, requires_grad=True) * 1,
        "number": torch.tensor(0.5),
        "data": torch.randn(4, 4),
        "row": torch.randn(4),
        "discount": torch.full((4,), 0.9),
        "hiding": torch.full((4, 6), float("-inf")),
        "mask": torch.rand(4, 4) < 0.5,
        "indices": torch.randint(0, 4, (4, 4)),
        "lengths": [2, 2],
        "name": "mean",
        "four": four,
        "six": six,
        "each": torch.arange(4),
        "pairs": (four, four),
        "more pairs": (six, six),
        "own pairs": (torch.arange(4), four),
        "unlike pairs": (torch.arange(4), torch.randint(0, 4, (1,))),
        "masked pairs": (torch.arange(4), torch.rand(4) < 2),
        "all of one": (slice(None), 0),
        "list": [square[0], square[1]],
        "empty": torch.zeros(0, 4),
        "one": 1,
        "minus": -1,
        "half": 0.5,
        "low": float("-inf"),
        "none": None,
        "equation": "ij,jk->ik",
    }


FEW = ("square", "row", "mask", "four", "indices", "pairs", "hiding", "one", "half")
FEWER = ("square", "four", "indices", "one")


def arguments() -> Iterator[tuple[str, ...]]:
    every = [*values()]
    for count, names in ((1, every), (2, every), (3, FEW), (4, FEWER)):
        yield from product(names, repeat=count)
    for start in ("square", "data"):
        for index in ("four", "indices"):
            yield from ((start, "one", index, "data", *more) for more in ((), ("name",)))


def function_called(name: str) -> Callable[..., Any]:
    owners = (F, torch.Tensor) if "dropout" in name else (torch.Tensor, F)
    found: Callable[..., Any] = next(getattr(o, name) for o in owners if hasattr(o, name))
    return (lambda x: x.T) if name == "T" else found


@pytest.mark.parametrize("name", [n for n in NAMES if hasattr(torch.Tensor, n) or hasattr(F, n)])
@pytest.mark.parametrize("every", shortened([5, 1], tried=1))
def test_facts_are_read_from_each_call_that_torch_accepts(name: str, every: int) -> None:
    function, accepted = function_called(name), 0
    given = values()
    tokens = torch.randint(0, 4, (4, 6))
    for chosen in islice(arguments(), 0, None, every):
        if name.endswith("_"):  # it changes its arguments
            given = values()
        args = tuple(given[each] for each in chosen)
        try:
            result = function(*args)
        except Exception:  # noqa: BLE001  (torch refuses them)
            continue
        accepted += 1
        telling = Telling(tokens=weakref.ref(tokens))
        telling.bootstraps.computed_sources = lambda tensor: frozenset(
            {1} if tensor.requires_grad else ()
        )
        with torch._C.DisableTorchFunction():
            telling.see(name, args, {}, result)
            telling.see("softmax", (result, -1), {}, result)  # what others make of it
    assert accepted or every > 1 or name in NEED_MORE, "no such call was tried"


NEED_MORE = frozenset({"batch_norm", "ctc_loss", "multi_head_attention_forward"})
"""Functions that accept none of these arguments."""
