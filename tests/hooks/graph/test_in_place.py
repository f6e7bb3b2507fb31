"""A write to memory is visible through every alias of that memory, and only from then on."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.hooks.graph.drawing import Forward, Net, arrows, follow

END = "c => Net => loss"


def plus_equals(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    hidden += m.b(x)
    return m.c(hidden)


def many_forms(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    hidden.mul_(2).clamp_(-1, 1).add_(1)
    hidden.addcmul_(m.b(x), m.b(x))
    return m.c(hidden)


def rows(m: Net, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 3)
    out[0] = m.a(x)[0]
    out[1:] = m.b(x)[1:]
    return m.c(out)


def chosen_rows(m: Net, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 3)
    out[m.a(x)[:, 0] > -100] = m.b(x)
    return m.c(out)


def scattered(m: Net, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 3)
    out.scatter_(1, m.a(x).argsort(1), m.b(x))
    return m.c(out)


def index_put(m: Net, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 3)
    out.index_put_((torch.tensor([0, 1]),), m.a(x)[:2], accumulate=True)
    return m.c(out.index_add_(0, torch.tensor([2, 3]), m.b(x)[:2]))


def masked(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.b(x) * 1
    hidden.masked_fill_(m.a(x) > 0, 0.0)
    return m.c(hidden)


def copied(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    return m.c(hidden.copy_(m.b(x)))


def copied_into_a_part(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    hidden[:2].copy_(m.b(x)[:2])
    return m.c(hidden)


def zeroed(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    hidden.zero_()
    return m.c(hidden + m.b(x))


def given_out(m: Net, x: torch.Tensor) -> torch.Tensor:
    out = m.c(x).detach()
    torch.add(m.a(x).detach(), 1, out=out)
    return m.c(out + m.b(x))


def view_before_write(m: Net, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4, 3)
    view = buffer[:2]
    buffer.add_(m.a(x))
    return m.c(view)


def view_after_write(m: Net, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4, 3)
    buffer.add_(m.a(x))
    return m.c(buffer[:2])


def write_through_view(m: Net, x: torch.Tensor) -> torch.Tensor:
    buffer = m.b(x) * 1
    buffer[:2].add_(m.a(x)[:2])
    return m.c(buffer)


def view_of_view(m: Net, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4, 3)
    early = buffer.view(12)[:6]
    buffer.t()[0].add_(m.a(x)[:, 0])
    return m.c(early.view(2, 3))


def use_before_write(m: Net, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4, 3)
    early = buffer + x
    buffer.add_(m.a(x))
    return m.c(early)


def alias_without_gradient(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    alias = hidden.detach()
    hidden.add_(m.b(x))
    return m.c(alias + m.b(x))


def write_behind_autograd(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    hidden.data.mul_(m.b(x).detach())
    return m.c(hidden)


def replaced_data(m: Net, x: torch.Tensor) -> torch.Tensor:
    holder = torch.zeros(4, 3)
    holder.data = m.a(x).detach()
    return m.c(holder + m.b(x))


def copy_behind_autograd(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    with torch.no_grad():
        hidden.copy_(m.b(x))
    return m.c(hidden)


def relu_in_place(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    early = hidden.view(-1)
    F.relu(hidden, inplace=True)
    return m.c(early.view(4, 3))


def traced_output_changed(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x)
    hidden += x
    return m.c(hidden)


def detached_in_place(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x) * 1
    hidden.detach_()
    return m.c(hidden + m.b(x))


def several_at_once(m: Net, x: torch.Tensor) -> torch.Tensor:
    left, right = torch.zeros(4, 3), torch.zeros(4, 3)
    torch._foreach_add_([left, right], [m.a(x), m.b(x)])
    return m.c(left)


def several_results(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.c(torch._foreach_mul([m.a(x), m.b(x)], 2.0)[1])


def shape_in_place(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = (m.a(x) * 1).unsqueeze_(0).squeeze_(0)
    return m.c(hidden)


def random_fill(m: Net, x: torch.Tensor) -> torch.Tensor:
    noise = (m.a(x) * 1).detach().normal_()
    return m.c(noise + m.b(x))


def state_of_an_accumulator(m: Net, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(4, 3)
    for layer in (m.a, m.b):
        total += layer(total + x)
    return m.c(total)


SCENARIOS: dict[str, tuple[Forward, str]] = {
    "+=": (plus_equals, "input -> a => c, input -> b => c"),
    "methods ending in _": (many_forms, "input -> a => c, input -> b => c, input -> b:1 => c"),
    "x[i] =": (rows, "input -> a => c, input -> b => c"),
    "x[mask] =": (chosen_rows, "input -> a -> c, input -> b => c"),
    "scatter_": (scattered, "input -> a -> c, input -> b => c"),
    "index_put_ and index_add_": (index_put, "input -> a => c, input -> b => c"),
    "masked_fill_": (masked, "input -> a -> c, input -> b => c"),
    "copy_ replaces everything": (copied, "input -> a, input -> b => c"),
    "copy_ into a part": (copied_into_a_part, "input -> a => c, input -> b => c"),
    "zero_ leaves nothing": (zeroed, "input -> a, input -> b => c"),
    "out=": (given_out, "input -> c:0, input -> a -> c:1, input -> b => c:1"),
    "view before the write": (view_before_write, "input -> a => c"),
    "view after the write": (view_after_write, "input -> a => c"),
    "write through a view": (write_through_view, "input -> a => c, input -> b => c"),
    "view of a view": (view_of_view, "input -> a => c"),
    "use before the write": (use_before_write, "input -> a, input -> c"),
    "a detached alias sees values only": (
        alias_without_gradient,
        "input -> a -> c, input -> b -> c, input -> b:1 => c",
    ),
    "a write through .data": (write_behind_autograd, "input -> a => c, input -> b -> c"),
    "another tensor as .data": (replaced_data, "input -> a -> c, input -> b => c"),
    "copy_ in no_grad": (copy_behind_autograd, "input -> a, input -> b -> c"),
    "inplace=True": (relu_in_place, "input -> a => c"),
    "an output changed later": (traced_output_changed, "input -> a => c, input -> c"),
    "detach_": (detached_in_place, "input -> a -> c, input -> b => c"),
    "lists in place": (several_at_once, "input -> a => c, input -> b"),
    "lists": (several_results, "input -> a, input -> b => c"),
    "shape in place": (shape_in_place, "input -> a => c"),
    "random numbers replace": (random_fill, "input -> a, input -> b => c"),
    "an accumulator": (
        state_of_an_accumulator,
        "input -> a => b, input -> b, a => c, b => c",
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_edges(scenario: str) -> None:
    forward, expected = SCENARIOS[scenario]
    end = END.replace("c =", "c:1 =") if "c:1" in expected else END
    assert follow(forward) == arrows(expected.replace("c:0", "c")) | arrows(end)
