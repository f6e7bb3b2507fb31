"""All kinds of parameters: frozen, tied, later unfrozen, computed from others, pruned, faked."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import comgra_decl as comgra
from tests.support import freezing
from tests.support.recording import recording
from tests.support.shortened import combined
from tests.ways.models import Net, batches
from tests.ways.proof import FULL, Outcome, Told, known, outcome, prove


def train(
    told: Told,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *names: str,
    steps: int = 4,
    between: Callable[[int], Any] = lambda _: None,
) -> list[float]:
    """A plain loop that stores what the modules called `names` return."""
    losses = []
    for number, (x, y) in enumerate(batches(steps)):
        between(number)
        told.modules(model, *names)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.end()
        losses.append(loss.item())
    return losses


def test_frozen_layers_stay_frozen() -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        model.stem.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        losses = train(told, model, optimizer, "stem", "head")
        assert model.stem.weight.grad is None
        return outcome(losses, model, optimizers=[optimizer])

    traced = prove(training)
    assert not [name for name in known(traced) if name.startswith("stem weight 0 grad")]


def test_layers_that_are_thawed_on_the_way() -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        model.stem.requires_grad_(False)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)

        def thaw(number: int) -> None:
            if number == 2:
                model.stem.requires_grad_(True)
                optimizer.add_param_group({"params": model.stem.parameters(), "lr": 0.01})

        losses = train(told, model, optimizer, "stem", "norm", "head", between=thaw)
        return outcome(losses, model, optimizers=[optimizer])

    traced = prove(training)
    for number in range(4):
        assert traced.has("stem", "weight", pass_="grad", step=number) == (number >= 2)
        assert traced.has("stem", pass_="grad", step=number) == (number >= 2)


def test_tied_parameters_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 6)
            self.other = nn.Linear(6, 6)
            self.other.weight = self.stem.weight
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.other(torch.tanh(self.stem(x)))))

    def training(told: Told) -> Outcome:
        model = Tied()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for x, y in batches(3):
            told.modules(model, "stem", "other")
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            told("stem", model.stem.weight.grad, "weight", pass_="grad")
            optimizer.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, model, optimizers=[optimizer])

    traced = prove(training)
    names = {info.names for key, info in traced.slots.items() if key.role == "weight"}
    assert ("stem.weight", "other.weight") in names
    assert not [name for name in known(traced) if name.startswith("other weight")]


PARAMETRIZED: dict[str, Callable[[Net], Any]] = {
    "weight_norm": lambda m: parametrizations.weight_norm(m.stem),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m.stem),
    "orthogonal": lambda m: parametrizations.orthogonal(m.stem),
    "pruned": lambda m: prune.l1_unstructured(m.stem, "weight", amount=0.5),
}


@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_weights_that_are_computed_from_others(kind: str) -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        PARAMETRIZED[kind](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(told, model, optimizer, "stem", "head")
        return outcome(losses, model, optimizers=[optimizer])

    prove(training)


def test_the_older_norms_with_hooks() -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(model.stem)
        nn.utils.spectral_norm(model.head)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(told, model, optimizer, "stem", "head")
        return outcome(losses, *(m for m in (model.stem, model.norm)), optimizers=[optimizer])

    prove(training)


def test_pruning_on_the_way() -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def cut(number: int) -> None:
            if number == 2:
                prune.random_unstructured(model.stem, "weight", amount=0.5)
            if number == 4:
                prune.remove(model.stem, "weight")

        losses = train(told, model, optimizer, "stem", "head", steps=6, between=cut)
        return outcome(losses, model)

    prove(training)


def test_training_for_quantised_weights() -> None:
    """Fake quantisation: observers that change their buffers in each forward pass."""
    from torch.ao import quantization

    def training(told: Told) -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(
                quantization.QuantStub(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
            )
            model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
            quantization.prepare_qat(model.train(), inplace=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(told, model, optimizer, "1", "3")
        return outcome(losses, model)

    prove(training)


def test_modules_added_and_replaced_on_the_way() -> None:
    def training(told: Told) -> Outcome:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        losses: list[float] = []
        for phase in range(3):
            if phase == 1:
                model[1] = nn.ReLU()
                model[2] = nn.Linear(8, 5)
            if phase == 2:
                model.append(nn.Linear(5, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            names = [str(i) for i in range(len(model))]
            losses += train(told, model, optimizer, *names, steps=2)
        return outcome(losses, model)

    prove(training)


def test_one_model_after_another() -> None:
    """Each has its own nodes: the same names, prefixed with a number."""

    def training(told: Told) -> Outcome:
        losses: list[float] = []
        models = [Net()]
        for phase in range(3):
            optimizer = torch.optim.SGD(models[-1].parameters(), lr=0.1)
            names = ["stem", "head"] if phase == 0 else []
            losses += train(told, models[-1], optimizer, *names, steps=2)
            models.append(copy.deepcopy(models[-1]))
        return outcome(losses, *models)

    traced = prove(training)
    assert len(traced.steps) == 6
    for step, node in ((0, "head"), (2, "Net#2.head"), (4, "Net#3.head")):
        assert traced.has(node, step=step)
        assert traced.has(node, step=step + 1)


def test_a_module_that_builds_its_layers_when_it_is_first_called() -> None:
    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "inner"):
                self.inner = nn.Linear(x.shape[1], 8)
            return self.inner(x)

    def training(told: Told) -> Outcome:
        model = nn.Sequential(Late(), nn.LazyLinear(3))
        model(torch.randn(2, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(told, model, optimizer, steps=1)  # whose iterations that call has shifted
        losses += train(told, model, optimizer, "0.inner", "1", steps=3)
        return outcome(losses, model)

    prove(training)


@pytest.mark.slow
def test_a_model_that_the_garbage_collector_must_not_touch_is_known() -> None:
    """A program that forks workers freezes its objects, so a later scan cannot find them."""
    model = Net()
    frozen = nn.Sequential(model, nn.Linear(3, 3))
    optimizer = torch.optim.SGD(frozen.parameters(), lr=0.1)
    gc.freeze()
    with recording(FULL) as run:
        for _ in range(2):
            output = frozen(torch.randn(4, 6))
            model.norm.eval()  # part of a trained model, so this is not an evaluation
            output.sum().backward()
            optimizer.step()
    assert [step.info.mode for step in run.steps] == ["train", "train"]
    assert {("0.norm", "0.drop"), ("0.drop", "0.head")} <= run.edges()


class Task(nn.Module):
    """Never called itself, so only its owner knows the names of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"encoder": nn.Linear(6, 4), "decoder": nn.Linear(4, 6)})

    def use(self) -> None:
        self.net["decoder"](self.net["encoder"](torch.randn(4, 6))).sum().backward()
        comgra.step()


NAMED = {"net.encoder", "net.decoder"}
UNNAMED = {"Linear", "Linear#2"}


@pytest.mark.parametrize(
    "where", ["not frozen", pytest.param("main module", marks=pytest.mark.slow), "function"]
)
def test_parts_of_a_model_frozen_before_tracing_keep_its_names_or_are_reported(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = {"tasks": [Task()]}
    if where == "main module":
        monkeypatch.setattr(sys.modules["__main__"], "holder", holder, raising=False)
    if where != "not frozen":
        gc.freeze()
    with recording(FULL) as run:
        holder["tasks"][0].use()
    hidden = where == "function" and sys.version_info < (3, 13)
    assert (UNNAMED if hidden else NAMED) <= run.nodes()
    warned = [line for line in run.report["warnings"] if "gc.freeze()" in line]
    assert len(warned) == hidden
    if hidden:
        assert "if Linear is part of a larger module, its node names lack" in warned[0]
        assert "Start tracing before gc.freeze()" in warned[0]


@pytest.mark.parametrize(
    ("built", "earlier"), combined(["constructed", "copied"], [True, False], rounds=1)
)
def test_parts_of_a_model_frozen_during_tracing_keep_its_names(built: str, earlier: bool) -> None:
    tasks: list[Task] = []

    def build() -> None:
        tasks.append(Task() if built == "constructed" else copy.deepcopy(Task()))

    if earlier:
        build()
    with recording(FULL) as run:
        if not earlier:
            build()
        gc.freeze()
        tasks[0].use()
    assert run.nodes() >= NAMED
    assert not [line for line in run.report["warnings"] if "gc.freeze()" in line]


@pytest.mark.slow
def test_what_was_noted_of_a_frozen_model_does_not_keep_it_alive() -> None:
    task = Task()
    reference = weakref.ref(task)
    with recording(FULL):
        gc.freeze()
        task.use()
        del task
    gc.unfreeze()
    gc.collect()
    freezing.freeze()
    assert reference() is None
