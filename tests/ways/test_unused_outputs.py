"""Unused outputs of compiled code receive zero gradients, even when recorded eagerly.

The expected results come from the same training untraced: zero and missing gradients differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from tests.support.recording import recording
from tests.support.shortened import combined, shortened

# torch's own imports for compiling raise warnings
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

STEPS = 6
SPEC = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["output", "output_grad", "parameter_grad"],
            "values": True,
        }
    },
    "schedule": {"first": 1, "every": 2},
}
Ended = list[Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Heads(nn.Module):
    """A trunk and three heads, the second of which uses the first; some layers are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.never = nn.Linear(4, 4), nn.Linear(4, 4)
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        one = self.one(hidden)
        return {"one": one, "two": self.two(torch.relu(one)), "three": self.three(x)}


def gradients(net: nn.Module) -> list[Any]:
    return [
        (name, None if p.grad is None else p.grad.clone()) for name, p in net.named_parameters()
    ]


def train(
    learn: Callable[[Any, Any, torch.Tensor], None],
    *,
    compile_it: Callable[[nn.Module], Any],
    wrap: Callable[[Any], Any] = lambda called: called,
) -> Ended:
    torch.manual_seed(0)
    torch.compiler.reset()
    net = Heads()
    called = wrap(compile_it(net))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    found: Ended = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        learn(net, called, torch.randn(3, 4))
        found += gradients(net)
        optimizer.step()
    return [*found, *((name, p.detach().clone()) for name, p in net.named_parameters())]


def assert_same(one: Ended, other: Ended, *, exactly: bool = True) -> None:
    assert [name for name, _ in one] == [name for name, _ in other]
    for (name, here), (_, there) in zip(one, other, strict=True):
        assert (here is None) == (there is None), name
        if here is not None:
            rtol, atol = (0.0, 0.0) if exactly else (1e-4, 1e-5)
            torch.testing.assert_close(here, there, rtol=rtol, atol=atol, msg=name)


def first_alone(_net: Any, called: Any, x: torch.Tensor) -> None:
    called(x)["one"].square().mean().backward()


def last_alone(_net: Any, called: Any, x: torch.Tensor) -> None:
    outputs = called(x)
    three = outputs.pop("three")
    del outputs
    three.square().mean().backward()


def all_of_them(_net: Any, called: Any, x: torch.Tensor) -> None:
    sum(out.square().mean() for out in called(x).values()).backward()


def one_after_the_other(_net: Any, called: Any, x: torch.Tensor) -> None:
    outputs = called(x)
    outputs["two"].square().mean().backward(retain_graph=True)
    outputs["three"].square().mean().backward()


def accumulated(_net: Any, called: Any, x: torch.Tensor) -> None:
    called(x)["one"].square().mean().backward()
    called(x * 2)["three"].square().mean().backward()


def two_calls(_net: Any, called: Any, x: torch.Tensor) -> None:
    (called(x)["one"] + called(x * 2)["one"]).square().mean().backward()


def some_inputs(net: Any, called: Any, x: torch.Tensor) -> None:
    called(x)["two"].square().mean().backward(inputs=[net.two.weight, net.one.weight])


def asked_for(net: Any, called: Any, x: torch.Tensor) -> None:
    (net.one.weight.grad,) = torch.autograd.grad(called(x)["one"].square().mean(), net.one.weight)


def ascending(net: Any, called: Any, x: torch.Tensor) -> None:
    """Each parameter is updated, and its gradient freed, as soon as the gradient has arrived."""

    def update(parameter: Any) -> None:
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in net.parameters()]
    called(x)["one"].square().mean().backward()
    for handle in handles:
        handle.remove()


LEARN = [
    *(first_alone, last_alone, all_of_them, one_after_the_other, accumulated, two_calls),
    *(some_inputs, asked_for, ascending),
]


def as_model(net: nn.Module) -> Any:
    return torch.compile(net, backend="aot_eager")


def as_method(net: nn.Module) -> Any:
    net.compile(backend="aot_eager")
    return net


def as_function(net: nn.Module) -> Any:
    return torch.compile(lambda x: net(x), backend="aot_eager")


def without_autograd(net: nn.Module) -> Any:
    """Only the forward is compiled: unused parts have no gradient."""
    return torch.compile(net, backend="eager")


def not_at_all(net: nn.Module) -> Any:
    return net


MODES = ["eager", "auto"]
WAYS = [as_model, as_method, as_function, without_autograd, not_at_all]


@pytest.mark.parametrize(
    ("learn", "way", "mode"),
    [
        *combined(LEARN[:5], WAYS, MODES, rounds=1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(LEARN[5:], WAYS, MODES)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_unused_has_the_gradient_that_it_has_untraced(
    learn: Any, way: Any, mode: str
) -> None:
    plain = train(learn, compile_it=way)
    with recording({**SPEC, "compile": mode}) as traced:
        found = train(learn, compile_it=way)
    assert traced.faults == []
    assert_same(plain, found)
    assert len(traced.steps) == STEPS // 2


def test_no_gradient_of_an_unused_output_is_recorded() -> None:
    with recording({**SPEC, "compile": "eager"}) as traced:
        train(first_alone, compile_it=as_model)
    names = {info.id: key for key, info in traced.slots.items()}
    for step in traced.steps:
        keys = [names[slot] for slot in step.values]
        reached = {key.node for key in keys if key.pass_ == "grad" and key.role == "output"}
        assert reached == {"trunk", "one"}
        held = {key.node for key in keys if key.pass_ == "grad" and key.role == "weight"}
        assert held == {"trunk", "one", "two", "three"}, "as compiled code has it"


def test_programs_that_need_those_zeros_go_on(tmp_path: Path) -> None:
    """DistributedDataParallel waits for a gradient of each parameter."""
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1)

    def learn(_net: Any, called: Any, x: torch.Tensor) -> None:
        outputs = called(x)
        (outputs["one"] + outputs["three"]).square().mean().backward()

    def without_the_last(net: nn.Module) -> Any:
        del net.never
        return as_model(net)

    try:
        plain = train(learn, compile_it=without_the_last, wrap=DistributedDataParallel)
        with recording({**SPEC, "compile": "eager"}) as traced:
            found = train(learn, compile_it=without_the_last, wrap=DistributedDataParallel)
    finally:
        dist.destroy_process_group()
    assert traced.faults == []
    assert_same(plain, found)


class Random(nn.Module):
    """Layers that compute from any earlier ones; some of their outputs are returned."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.before = [draw.sample(range(i + 1), draw.randint(1, min(2, i + 1))) for i in range(6)]
        self.returned = draw.sample(range(7), draw.randint(1, 4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        known = [x]
        for layer, before in zip(self.layers, self.before, strict=True):
            known.append(torch.tanh(layer(sum(known[i] for i in before))))
        return [known[i] for i in self.returned]


def train_randomly(seed: int) -> Ended:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    torch.compiler.reset()
    front, net = nn.Linear(4, 4), Random(draw)
    model = nn.Sequential(front, net)
    compile_front, retained = draw.random() < 0.3, draw.random() < 0.3
    called = torch.compile(net, backend="aot_eager")
    before = torch.compile(front, backend="aot_eager") if compile_front else front
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    found: Ended = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = [out for out in called(before(torch.randn(3, 4))) if out.requires_grad]
        used = draw.sample(outputs, draw.randint(1, len(outputs)))
        if retained:
            used[0].mean().backward(retain_graph=True)
        sum(out.square().mean() for out in used).backward()
        found += gradients(model)
        optimizer.step()
    return [*found, *((name, p.detach().clone()) for name, p in model.named_parameters())]


@pytest.mark.parametrize("seed", shortened(range(12), tried=1))
def test_random_models_have_the_gradients_that_they_have_untraced(seed: int) -> None:
    plain = train_randomly(seed)
    with recording({**SPEC, "compile": "eager"}) as traced:
        found = train_randomly(seed)
    assert traced.faults == []
    # compiled code may add up in another order what is computed once and used several times
    assert_same(plain, found, exactly=False)
