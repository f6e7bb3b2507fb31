"""A program's name for its loss is read from its code, never from its variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from comgra_decl.hooks.tensors.loss_names import calling_places, loss_name
from tests.hooks.tiny import net
from tests.support.recording import EVERYTHING, recording


class Loss:
    """A stand-in for a tensor; `backward` returns its caller's name for it."""

    def __init__(self) -> None:
        self.name: str | None = "backward was not called"

    def backward(self, *_: Any, **__: Any) -> None:
        self.name = loss_name(calling_places()[1:])  # without this function

    def scale(self, loss: Loss) -> Loss:
        return loss


def helper(loss: Loss) -> None:
    loss.backward()


def keyword_only(*, weight: float, loss: Loss) -> None:
    loss.backward(weight)


def passing_on(*args: Any, **kwargs: Any) -> None:
    helper(*args, **kwargs)


def after_another(_scale: float, *rest: Any) -> None:
    passing_on(*rest)


def renamed(objective: Loss, retain: bool = False) -> None:
    objective.backward(retain_graph=retain)


@contextlib.contextmanager
def _nothing() -> Any:
    yield


@_nothing()
def decorated(loss: Loss) -> None:
    loss.backward()


class Trainer:
    def __init__(self) -> None:
        self.loss_s = Loss()

    def manual_backward(self, loss: Loss, *args: Any) -> None:
        self.strategy(loss, None, *args)

    def strategy(self, closure_loss: Loss, _optimizer: None, *args: Any) -> None:
        type(self).precision(tensor=closure_loss)

    @staticmethod
    def precision(tensor: Loss) -> None:
        tensor.backward()

    @classmethod
    def of_class(cls, loss: Loss) -> None:
        loss.backward()


trainer, scaler = Trainer(), Loss()


@pytest.mark.parametrize(
    "call",
    [
        lambda loss_g: loss_g.backward(),
        lambda loss_g: helper(loss_g),
        lambda loss_g: helper(loss=loss_g),
        lambda loss_g: keyword_only(loss=loss_g, weight=0.5),
        lambda loss_g: renamed(loss_g, retain=True),
        lambda loss_g: passing_on(loss_g),
        lambda loss_g: passing_on(loss=loss_g),
        lambda loss_g: after_another(0.5, loss_g),
        lambda loss_g: decorated(loss_g),
        lambda loss_g: scaler.scale(loss_g).backward(),
        lambda loss_g: trainer.manual_backward(loss_g),
        lambda loss_g: trainer.of_class(loss_g),
        lambda loss_g: Trainer.of_class(loss_g),
        lambda loss_g: loss_g.backward(
            None,
        ),
        lambda loss_g: [f"{'ä' * 3}€", loss_g.backward()],  # columns count bytes
    ],
)
def test_the_outermost_name_is_found(call: Callable[[Loss], Any]) -> None:
    loss_g = Loss()
    call(loss_g)
    assert loss_g.name == "loss_g"


def test_the_name_is_that_of_whoever_called_the_function_with_it() -> None:
    def training_step(loss_of_this_step: Loss) -> None:
        helper(loss_of_this_step)

    outer = Loss()
    training_step(outer)
    assert outer.name == "outer"


def test_an_attribute_has_a_name() -> None:
    trainer.loss_s.backward()
    assert trainer.loss_s.name == "loss_s"
    helper(trainer.loss_s)
    assert trainer.loss_s.name == "loss_s"


def test_what_has_no_name_has_none() -> None:
    found: list[Loss] = []

    def made() -> Loss:
        found.append(Loss())
        return found[-1]

    made().backward()
    (made(), made())[1].backward()
    functools.partial(made().backward)()
    assert [loss.name for loss in found] == [None, "backward was not called", None, None]


def test_code_without_source_has_no_names() -> None:
    variables: dict[str, Any] = {"loss": Loss()}
    exec("loss.backward()", variables)
    assert variables["loss"].name is None


@pytest.mark.parametrize("spelling", ["list", "keyword"])
def test_backward_as_a_function(spelling: str) -> None:
    model = net()
    with recording() as run:
        for _ in range(2):
            out = model(torch.randn(4, 3))
            loss_a, loss_b = out.sum(), out.square().sum()
            torch.autograd.backward([loss_a], retain_graph=True)
            if spelling == "list":
                torch.autograd.backward([loss_b])
            else:
                torch.autograd.backward(tensors=loss_b)
    assert {k.node for k, info in run.slots.items() if info.kind == "loss"} == {
        "loss",
        "loss:loss_b",
    }


# -- what the program holds -----------------------------------------------------------------------


def test_a_dict_that_the_program_was_given_of_its_variables_stays_as_it_is() -> None:
    """Until Python 3.12, `locals()` returns one dict for all calls in a function."""
    held: list[dict[str, Any]] = []

    def backward_of(loss: torch.Tensor) -> None:
        held.append(locals())
        loss.backward()

    def train(model: nn.Module, lr: float = 0.1) -> dict[str, Any]:
        config = locals()
        config["lr"] = "changed by the program"
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(3):
            loss_a = model(torch.randn(4, 3)).sum()
            loss_b = model(torch.randn(4, 3)).square().sum()
            backward_of(loss_a)
            loss_b.backward()
            optimizer.step()
        return config

    with recording(EVERYTHING) as run:
        outer = locals()
        names = sorted(outer)
        config = train(net())
        assert sorted(outer) == names
    assert run.faults == []
    assert sorted(config) == ["backward_of", "lr", "model"]
    assert config["lr"] == "changed by the program"
    assert [sorted(variables) for variables in held] == [["held", "loss"]] * 3
    assert run.has("loss:loss_b", step=2)


class Handling(TorchFunctionMode):
    """One of the program's modes, which makes every call through a separate function."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return handled(func, args, kwargs or {})


def handled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


@pytest.mark.parametrize("graph", [True, False])
def test_a_mode_of_the_program_around_some_steps_leaves_a_loss_what_it_is(graph: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recording(EVERYTHING, graph=graph) as run:
        for step in range(4):
            with Handling() if step % 2 else contextlib.nullcontext():
                optimizer.zero_grad()
                loss = model(torch.randn(4, 3)).square().mean()
                loss.backward()
                optimizer.step()
    recorded = [{*step.layout.slots.tolist()} for step in run.steps]
    assert recorded == [recorded[0]] * 4
    losses = [(key.node, key.iteration) for key in run.slots if key.node.startswith("loss")]
    assert losses == [("loss", 0)]
    assert {key.pass_ for key in run.slots} == {"forward", "grad"}
