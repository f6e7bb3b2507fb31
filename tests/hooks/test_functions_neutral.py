"""Recording function calls changes nothing in the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from comgra_decl.hooks import modes
from tests.hooks.layers import SOFTMAX, Layer, linear, softmaxed, stack
from tests.support.recording import recording
from tests.support.traced import train


class Encoder(nn.Module):
    """Uses a native kernel in evaluation, next to a softmax of its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.encoder(x)), -1)


def trained(*, steps: int = 6) -> tuple[list[float], dict[str, Any], Any]:
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with torch.device("cpu"):  # one of the program's modes, entered before ours
        for step in range(steps):
            loss = model(torch.randn(4, 5, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 2:
                model.eval()
                with torch.no_grad():
                    losses.append(model(torch.randn(4, 5, 8)).sum().item())
                model.train()
    return losses, model.state_dict(), torch.get_rng_state()


FUNCTIONS = {
    "all": {"select": "**"},
    "calls": {
        "select": {"function": ["torch.softmax", "F.dropout", "torch.add", "torch.matmul"]},
        "capture": ["input", "input_grad", "output", "output_grad"],
        "values": True,
    },
    "fused": {"select": "**.self_attn", "attention": {"recompute": True}},
}


@pytest.mark.parametrize("graph", [False, True])
def test_training_and_evaluation_stay_bit_for_bit_the_same(graph: bool) -> None:
    losses, state, rng = trained()
    with recording({"nodes": FUNCTIONS}, graph=graph, schedule={"first": 4, "every": 2}) as run:
        same_losses, same_state, same_rng = trained()
    assert run.faults == []
    assert losses == same_losses
    assert torch.equal(rng, same_rng)
    assert all(torch.equal(state[name], same_state[name]) for name in state)
    assert run.has("Encoder.softmax", step=len(run.steps) - 1)
    evaluations = [i for i, step in enumerate(run.steps) if step.info.mode == "eval"]
    assert evaluations
    assert all(run.has("Encoder.softmax", step=i) for i in evaluations)


def watched() -> tuple[Any, ...]:
    """Everything that is replaced while calls are followed."""
    functions = F.softmax, F.scaled_dot_product_attention, F.dropout
    return *functions, torch._C._len_torch_function_stack()


def test_nothing_is_left_behind() -> None:
    before = watched()
    with recording({"nodes": FUNCTIONS}, schedule={"first": 1, "every": 1000}) as run:
        trained()
        assert watched() == before
    assert len(run.of("train")) == 1


class Doubling(TorchFunctionMode):
    """A mode of the program, which changes a result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.softmax else result


def test_modes_of_the_program_stay_above_ours() -> None:
    model, x = stack(softmaxed, depth=1), torch.randn(4, 3)
    expected = torch.softmax(linear(model, 0)(x), 1).detach().numpy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording({"nodes": SOFTMAX}) as run:
        mode = Doubling()
        with mode:
            out = model(x)
            assert torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1) is mode
        out.sum().backward()
        optimizer.step()
    assert not modes.is_active(mode)
    np.testing.assert_array_equal(run.value("0.softmax"), expected)


def test_a_call_that_raises_is_the_programs_own_business() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.softmax(x, dim=7)
        except IndexError:
            return torch.softmax(x, dim=1)

    with recording({"nodes": SOFTMAX}) as run:
        train(stack(compute, depth=1), torch.randn(4, 3))
    assert run.faults == []
    assert run.has("0.softmax", iteration=1)
    assert not run.has("0.softmax", iteration=0), "the call that failed has no result"


def test_recomputed_code_is_no_further_call() -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer(softmaxed)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

    with recording({"nodes": SOFTMAX}) as run:
        train(Net(), torch.randn(4, 3))
    assert run.has("inner.softmax", pass_="grad")
    assert not run.has("inner.softmax", iteration=1)


def test_calls_inside_a_transform_are_left_out_and_said() -> None:
    model = stack(lambda x: torch.vmap(lambda row: row.softmax(0))(x), depth=1)
    with recording({"nodes": SOFTMAX}) as run:
        train(model, torch.randn(4, 3))
    assert run.faults == []
    assert not run.has("0.softmax")
    assert "functorch" in run.report["refused"]["0.softmax output"]


def test_a_compiled_model_is_followed_on_recorded_steps_only() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = stack(softmaxed, depth=1)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording({"nodes": SOFTMAX}, schedule={"first": 1, "every": 3}) as run:
        for _ in range(7):
            compiled(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert run.faults == []
    assert [step.info.step for step in run.steps] == [0, 3, 6]
    assert all(run.has("0.softmax", step=i) for i in range(3))
    assert len(graphs) == 1


class Frozen(nn.Module):
    """A trained head on top of an untrained encoder that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False).eval()
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.encoder(x)), -1)


@pytest.mark.parametrize("nodes", [SOFTMAX, {"head": {"select": "head"}}], ids=["calls", "modules"])
def test_a_frozen_encoder_computes_as_without_us(nodes: dict[str, Any]) -> None:
    def trained_head(*, follow: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = Frozen()
        if follow:
            with recording({"nodes": nodes}) as run:
                train(model, torch.randn(8, 9, 16), steps=5)
            assert run.faults == []
            assert ("input", "head") in run.edges() or ("input", "Frozen.softmax") in run.edges()
        else:
            train(model, torch.randn(8, 9, 16), steps=5)
        return model.head.weight.detach()

    assert torch.equal(trained_head(follow=False), trained_head(follow=True))
    assert torch._C._len_torch_function_stack() == 0
