"""What is compiled, and how often, is the same with and without tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comgra_decl.doors.trace import trace
from tests.support.recording import recording
from tests.support.shortened import combined
from tests.ways.models import batches
from tests.ways.proof import FULL, Outcome, Told, attached, outcome, same, seeded
from tests.ways.test_compiled import model

# torch's own imports for compiling raise warnings
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

STEPS = 8
RECORDED = {"idle": [0], "recorded": [0, 3, 6]}
SPECS = {
    "idle": {**FULL, "schedule": {"first": 1, "every": 1_000}},
    "recorded": {**FULL, "schedule": {"first": 1, "every": 3}},
}
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Way = Callable[[nn.Module, torch.optim.Optimizer], Step]


class Broken(nn.Module):
    """Cannot be compiled in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.net[0](x)
        torch._dynamo.graph_break()
        result: torch.Tensor = self.net[2](self.net[1](hidden))
        return result


def eager(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compiled_model(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return eager(torch.compile(net, backend="eager"), optimizer)  # type: ignore[arg-type]


def compiled_loss(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), y)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compiled_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return torch.compile(eager(net, optimizer), backend="eager")


WAYS: dict[str, tuple[Callable[[], nn.Module], Way]] = {
    "model": (model, compiled_model),
    "graph break": (Broken, compiled_model),
    "loss": (model, compiled_loss),
    "whole step": (model, compiled_step),
}


COMPILED = [way for way in WAYS if way != "whole step"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(_: Told, way: str, eager_steps: Any = ()) -> Outcome:
    """Trains; `eager_steps` run like recorded steps."""
    make, compile_it = WAYS[way]
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step, losses = compile_it(net, optimizer), []
    for number, (x, y) in enumerate(batches(STEPS)):
        with torch.compiler.set_stance("force_eager" if number in eager_steps else "default"):
            losses.append(step(x, y).item())
    return outcome(losses, net, optimizers=[optimizer])


def counted(training: Callable[[Told], Outcome]) -> tuple[Outcome, dict[str, Any]]:
    """Trains with Dynamo's counters reset; returns them: graphs, breaks by reason, recompiles."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    found = seeded(training, Told(listening=False))
    names = ("stats", "graph_break", "recompiles", "unimplemented")
    return found, {name: dict(counters[name]) for name in names}


@pytest.mark.parametrize(
    ("way", "how"),
    [
        *combined(COMPILED, [*SPECS], rounds=1),
        *(pytest.param("whole step", how, marks=pytest.mark.slow) for how in SPECS),
    ],
)
def test_as_much_is_compiled_as_without_tracing(way: str, how: str) -> None:
    """Compared with the same training whose recorded steps are made to run eagerly.

    The traced one declares at each step how it should run, which takes effect once it is recorded.
    """
    recorded = RECORDED[how] if way != "whole step" else [0]
    plain, expected = counted(lambda told: train(told, way, recorded))
    before = attached()
    with recording(SPECS[how]) as traced:
        found, counts = counted(lambda told: train(told, way))
    same(plain, found)
    assert traced.faults == []
    assert attached() == before
    assert [step.info.step for step in traced.steps] == recorded
    assert counts == expected
    if way in COMPILED:
        assert counts["stats"]["unique_graphs"] == (2 if way == "graph break" else 1)


@pytest.mark.slow
def test_losses_are_heard_where_backward_is_called_by_compiled_code(tmp_path: Any) -> None:
    """Between its graphs, a compiled step calls `backward`, and therefore our wrapper around it."""
    import comgra_decl as comgra

    with trace(SPECS["idle"], root=tmp_path, group="g") as session:
        found = seeded(lambda told: train(told, "whole step"), Told(listening=False))
    assert session.path is not None
    kpis = comgra.open_run(session.path).kpis()
    heard = kpis[kpis.name.str.startswith("loss")]  # no step ends there, so they are numbered
    assert sorted(heard.value) == pytest.approx(sorted(found.losses), rel=1e-6)
