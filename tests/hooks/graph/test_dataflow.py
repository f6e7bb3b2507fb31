"""Edges through ordinary tensor arithmetic match those that a person would draw from the code."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.hooks.graph.drawing import Forward, Net, arrows, follow

END = "c => Net => loss"


def flags(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = m.a(x)
    return m.c(hidden + m.b(x))


def inference(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        hidden = m.a(x)
    return m.c(hidden.clone() + m.b(x))


def recursion(m: Net, x: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(4, 3)
    for _ in range(3):
        state = m.a(state + x)
    return m.c(state)


def truncated_recursion(m: Net, x: torch.Tensor) -> torch.Tensor:
    state = m.a(x)
    return m.c(m.a(state.detach()))


def long_chain(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x)
    for _ in range(2000):
        hidden = hidden + 0
    return m.c(hidden)


def unpacked(m: Net, x: torch.Tensor) -> torch.Tensor:
    first, *others = m.a(x)
    return m.c(torch.stack([first, *others]))


def top_values(m: Net, x: torch.Tensor) -> torch.Tensor:
    values, places = m.a(x).topk(3)
    return m.c(values) + m.b(places.float())


def grown_list(m: Net, x: torch.Tensor) -> torch.Tensor:
    kept = [m.a(x)]
    kept.append(m.b(x))
    return m.c(torch.stack(kept).mean(0))


def sparse(m: Net, x: torch.Tensor) -> torch.Tensor:
    chosen = torch.eye(4).to_sparse()
    return m.c(torch.sparse.mm(chosen, m.a(x)))


SCENARIOS: dict[str, tuple[Forward, str]] = {
    "chain": (lambda m, x: m.c(m.a(x)), "input -> a => c"),
    "residual": (lambda m, x: m.c(x + m.a(x)), "input -> a => c, input -> c"),
    "functions in between": (
        lambda m, x: m.c(F.gelu(m.a(x)).mul(2).clone().contiguous()),
        "input -> a => c",
    ),
    "two branches": (
        lambda m, x: m.c(m.a(x) * m.b(x)),
        "input -> a => c, input -> b => c",
    ),
    "shared layer": (
        lambda m, x: m.c(m.a(m.a(x))),
        "input -> a => a:1 => c",
    ),
    "unused branch": (
        lambda m, x: (m.b(x), m.c(m.a(x)))[1],
        "input -> a => c, input -> b",
    ),
    "detach": (
        lambda m, x: m.c(m.a(x).detach() + m.b(x)),
        "input -> a -> c, input -> b => c",
    ),
    "both ways": (
        lambda m, x: m.c(m.a(x) + m.a(x).detach() + (h := m.b(x)) + h.detach()),
        "input -> a => c, input -> a:1 -> c, input -> b => c",
    ),
    "the data of a tensor": (
        lambda m, x: m.c(m.a(x).data * m.b(x)),
        "input -> a -> c, input -> b => c",
    ),
    "no_grad": (flags, "input -> a -> c, input -> b => c"),
    "inference mode": (inference, "input -> a -> c, input -> b => c"),
    "argmax and embedding": (
        lambda m, x: m.c(m.e(m.a(x).argmax(1))),
        "input -> a -> e => c",
    ),
    "rounding to integers": (
        lambda m, x: m.c(m.b(x)[(m.a(x)[:, 0].long() % 4).abs()]),
        "input -> a -> c, input -> b => c",
    ),
    "boolean mask": (
        lambda m, x: m.c(m.b(x)[m.a(x)[:, 0] > -100]),
        "input -> a -> c, input -> b => c",
    ),
    "where": (
        lambda m, x: m.c(torch.where(m.a(x) > 0, m.b(x), x)),
        "input -> a -> c, input -> b => c, input -> c",
    ),
    "masked_fill": (
        lambda m, x: m.c(m.b(x).masked_fill(m.a(x) > 0, 0.0)),
        "input -> a -> c, input -> b => c",
    ),
    "gather": (
        lambda m, x: m.c(m.b(x).gather(1, m.a(x).argsort(1))),
        "input -> a -> c, input -> b => c",
    ),
    "topk": (top_values, "input -> a => c, a -> b, b => Net"),
    "slices": (
        lambda m, x: m.c(torch.cat([m.a(x)[:2], m.b(x)[2:]])),
        "input -> a => c, input -> b => c",
    ),
    "split and chunk": (
        lambda m, x: m.c(torch.cat([m.a(x).split(1, 1)[0], *m.b(x).chunk(3, 1)[1:]], 1)),
        "input -> a => c, input -> b => c",
    ),
    "unpacking a tensor": (unpacked, "input -> a => c"),
    "views": (
        lambda m, x: m.c(m.a(x).view(2, 6).t().reshape(4, 3).T.mT.contiguous()),
        "input -> a => c",
    ),
    "einsum": (
        lambda m, x: m.c(torch.einsum("ij,kj->ik", m.a(x), m.b(x))[:, :3]),
        "input -> a => c, input -> b => c",
    ),
    "complex numbers": (
        lambda m, x: m.c(torch.fft.ifft(torch.fft.fft(m.a(x)) * 2j).real),
        "input -> a => c",
    ),
    "sparse": (sparse, "input -> a => c"),
    "another type": (
        lambda m, x: m.c(m.a(x).type(torch.float64).to(x.dtype).type_as(m.b(x))),
        "input -> a => c, input -> b",
    ),
    "list that grows": (grown_list, "input -> a => c, input -> b => c"),
    "only the shape": (
        lambda m, x: m.c(torch.zeros_like(m.a(x)) + m.b(x).new_ones(4, 3) + x),
        "input -> a, input -> b, input -> c",
    ),
    "a value given to full_like": (
        lambda m, x: m.c(torch.full_like(m.a(x), m.b(x).sum().detach())),
        "input -> a, input -> b -> c",
    ),
    "expand as": (
        lambda m, x: m.c(m.a(x).sum(0).expand_as(m.b(x))),
        "input -> a => c, input -> b",
    ),
    "broadcast together": (
        lambda m, x: m.c(torch.broadcast_tensors(m.a(x), m.b(x))[0]),
        "input -> a => c, input -> b",
    ),
    "the type of another": (
        lambda m, x: m.c(m.a(x).to(m.b(x))),
        "input -> a => c, input -> b",
    ),
    "random choice": (
        lambda m, x: m.c(m.b(x) * torch.bernoulli(m.a(x).sigmoid())),
        "input -> a => c, input -> b => c",
    ),
    "dropout": (lambda m, x: m.c(F.dropout(m.a(x), 0.5)), "input -> a => c"),
    "numbers on the left": (lambda m, x: m.c(2 ** (1 - m.a(x))), "input -> a => c"),
    "iterations": (
        recursion,
        "input -> a => a:1 => a:2 => c, input -> a:1, input -> a:2",
    ),
    "iterations without gradient": (truncated_recursion, "input -> a -> a:1 => c"),
    "two thousand calls": (long_chain, "input -> a => c"),
    "the input's gradient": (
        lambda m, x: m.c(m.a(x.clone().requires_grad_())),
        "input -> a => c",
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_edges(scenario: str) -> None:
    forward, expected = SCENARIOS[scenario]
    assert follow(forward) == arrows(expected) | arrows(END)
