"""Experiments with copies of the trained models: what they find, and what they leave unchanged."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import comgra_decl as comgra
from comgra_decl.hooks.probing.copying import is_larger_copy
from comgra_decl.rules import diagnose
from tests.support.shortened import shortened

WORDS, LENGTH, WIDTH = 12, 9, 16
SENTENCES = torch.randint(1, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(3))
EXPERIMENTS = {
    "samples_mixed",
    "ignored_input",
    "order_ignored",
    "padding_matters",
    "future_visible",
    "no_nonlinearity",
}


class Attention(nn.Module):
    """One head with a residual connection."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part[:, None] for part in self.project(x).chunk(3, -1))
        mask = None if mask is None else mask[:, None, None]
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return x + self.out(mixed[:, 0])


class Words(nn.Module):
    """A small language model or classifier.

    Args:
        between: what happens between the blocks.
        positions: whether it knows positions.
        causal: whether positions see only earlier ones.
        masked: whether padding (token 0) is hidden.
        pooled: whether it classifies the whole sequence.
    """

    def __init__(
        self,
        between: Callable[[Tensor], Tensor] = lambda x: x,
        *,
        positions: bool = True,
        causal: bool = True,
        masked: bool = False,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        self.between, self.masked, self.pooled = between, masked, pooled
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(4 * LENGTH, WIDTH) if positions else None
        self.blocks = nn.ModuleList(Attention(causal=causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens > 0 if self.masked else None
        x = self.embed(tokens)
        if self.place is not None:
            x = x + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = self.between(block(x, mask))
        if not self.pooled:
            return self.head(x)
        weight = torch.ones(tokens.shape) if mask is None else mask.float()
        return self.head((x * weight[..., None]).sum(1) / weight.sum(1, keepdim=True))


class Noised(nn.Module):
    """A denoiser that receives the noise level, and may ignore it or some columns."""

    def __init__(self, *, level: bool = True, columns: int = 6) -> None:
        super().__init__()
        self.level, self.columns = level, columns
        self.first, self.last = nn.Linear(columns + 1, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        level = t[:, None].float() if self.level else torch.zeros(len(x), 1)
        return self.last(torch.tanh(self.first(torch.cat([x[:, : self.columns], level], 1))))


def trained(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], steps: int = 30
) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def next_word(model: nn.Module) -> Tensor:
    words = torch.randint(1, WORDS, (8, LENGTH + 1))
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def kind(model: nn.Module) -> Tensor:
    """The class is the first word; sequences end with padding."""
    words = torch.randint(1, WORDS, (8, LENGTH))
    lengths = torch.randint(3, LENGTH - 1, (8,))
    lengths[0] = LENGTH
    words[torch.arange(LENGTH) >= lengths[:, None]] = 0
    return F.cross_entropy(model(words), words[:, 0])


def denoised(model: nn.Module) -> Tensor:
    x, t = torch.randn(8, 6), torch.randint(0, 10, (8,))
    return F.mse_loss(model(x * (1 + t[:, None]), t), x)


def time_first(model: nn.Module) -> Tensor:
    """[positions, batch], as torch's recurrent modules expect by default."""
    x = torch.randn(LENGTH, 8, 3)
    return F.mse_loss(model(x), x.cumsum(0).mean(-1, keepdim=True))


class Views(nn.Module):
    """Two views of the same samples; each output depends on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.encode(one), self.encode(other)


def agreement(model: nn.Module) -> Tensor:
    x = torch.randn(8, 5)
    one, other = model(x + 0.1 * torch.randn(8, 5), x + 0.1 * torch.randn(8, 5))
    return F.cross_entropy(one @ other.T, torch.arange(8))


class Gathered(nn.Module):
    """Attention over the positions that integers choose, as in a masked autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.mix = nn.Embedding(LENGTH, WIDTH), Attention(causal=False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        placed = x + self.place(torch.arange(LENGTH))
        kept = placed.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return self.head(self.mix(kept)).mean(1)


def masked_mean(model: nn.Module) -> Tensor:
    x = torch.randn(8, LENGTH, WIDTH)
    chosen = torch.stack([torch.randperm(LENGTH)[:5] for _ in range(8)])
    return F.mse_loss(model(x, chosen), x.mean((1, 2))[:, None])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class OnGraph(nn.Module):
    """Message passing over a graph that is not an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = torch.randint(0, 40, (2, 160))
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        gathered = torch.zeros(40, WIDTH).index_add(0, self.edges[1], h[self.edges[0]])
        return self.last(torch.relu(h + gathered))


def nodes(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(40, 5)), torch.randint(0, 3, (40,)))


def diagnosed(root: Path, train: Callable[[], object], **spec: Any) -> set[str]:
    """Return the rules about experiments that report something."""
    torch.manual_seed(0)
    with comgra.trace("debug", root=root, overrides=[f"{k}={v}" for k, v in spec.items()]) as made:
        train()
    assert made.path is not None
    run = comgra.open_run(made.path)
    live = set(run.findings()["rule"]) & EXPERIMENTS
    assert live == {f.rule for f in diagnose(run).findings} & EXPERIMENTS
    return live


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], set[str]]


class WithLoss(nn.Module):
    """Returns logits, the most likely words, and the loss, like many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.words(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, :-1].flatten())
        return logits, loss, logits.argmax(-1)


class TimeFirst(nn.Module):
    """A language model whose batch is the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x.T).transpose(0, 1)


class Layers(nn.Module):
    """A table of numbers and a category, through two layers."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.between, self.kind = between, nn.Embedding(3, 4)
        self.first, self.norm = nn.Linear(10, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        joined = torch.cat([x, self.kind(kind)], 1)
        return self.last(self.between(self.norm(self.first(joined))))


def of_a_table(model: nn.Module) -> Tensor:
    x, kind = torch.randn(16, 6), torch.randint(0, 3, (16,))
    return F.cross_entropy(model(x, kind), (x[:, 0] > 0).long())


def of_numbers(model: nn.Module) -> Tensor:
    x = torch.randn(16, 6)
    return F.mse_loss(model(x), x[:, :2])


class Heads(nn.Module):
    """Two linear layers in parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.other(x)], 1)


def positive(model: nn.Module) -> Tensor:
    x = torch.rand(16, 6)
    return F.mse_loss(model(x), x[:, :2])


def always_active() -> nn.Module:
    """A network whose ReLU has nothing to do, as all of its inputs are positive."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    for parameter in model[0].parameters():
        nn.init.constant_(parameter, 0.5)
    return model


class OfBatch(nn.Module):
    """Receives the whole batch, and uses the features in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layers(batch["x"]).squeeze(1)


def labelled(model: nn.Module, **more: Tensor) -> Tensor:
    x = torch.randn(16, 4)
    batch = {"x": x, "y": (x.sum(1) > 0).float(), **more}
    return F.binary_cross_entropy_with_logits(model(batch), batch["y"])


def entered(model: nn.Module) -> Tensor:
    return labelled(model, z=torch.randn(16))


CASES: dict[str, Case] = {
    "two layers in parallel": (Heads, of_numbers, set()),
    "a ReLU without an effect on this data": (always_active, positive, set()),
    "two layers without an activation": (Layers, of_a_table, {"no_nonlinearity"}),
    "two layers with a ReLU": (lambda: Layers(torch.relu), of_a_table, set()),
    "a linear model": (lambda: nn.Linear(6, 2), of_numbers, set()),
    "a language model": (Words, next_word, set()),
    "a mean over positions": (
        lambda: Words(lambda x: x + x.mean(1, keepdim=True)),
        next_word,
        {"future_visible"},
    ),
    "a mean over samples": (
        lambda: Words(lambda x: x - x.mean(0, keepdim=True)),
        next_word,
        {"samples_mixed"},
    ),
    "no positions": (
        lambda: Words(positions=False, causal=False, masked=True, pooled=True),
        lambda model: F.cross_entropy(model(SENTENCES), torch.arange(8) % 3),
        {"order_ignored"},
    ),
    "a classifier with a mask": (
        lambda: Words(causal=False, masked=True, pooled=True),
        kind,
        set(),
    ),
    "a classifier without a mask": (
        lambda: Words(causal=False, pooled=True),
        kind,
        {"padding_matters"},
    ),
    "a denoiser": (Noised, denoised, set()),
    "a denoiser without the level": (lambda: Noised(level=False), denoised, {"ignored_input"}),
    "a denoiser without columns": (lambda: Noised(columns=4), denoised, {"ignored_input"}),
    "a batch with its labels": (OfBatch, labelled, set()),
    "a batch with another entry": (OfBatch, entered, {"ignored_input"}),
    "two views": (Views, agreement, set()),
    "chosen positions": (Gathered, masked_mean, set()),
    "time first": (Recurrent, time_first, set()),
    "a graph": (OnGraph, nodes, set()),
    "words, time first": (
        TimeFirst,
        lambda model: F.cross_entropy(
            model(SENTENCES.T)[:-1].flatten(0, 1), SENTENCES.T[1:].ravel()
        ),
        set(),
    ),
    "a loss within": (WithLoss, lambda model: model(SENTENCES, SENTENCES.roll(-1, 1))[1], set()),
}


@pytest.mark.parametrize("name", shortened(CASES, tried=7))
def test_experiments_find_what_a_model_depends_on(tmp_path: Path, name: str) -> None:
    make, loss_of, expected = CASES[name]
    assert diagnosed(tmp_path, lambda: trained(make(), loss_of)) == expected


class Wrapper(torch.optim.SGD):
    """Like Lightning Fabric's: takes over the state of an optimizer, and has its own `step`."""

    inner: torch.optim.Optimizer

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.__dict__ = {**inner.__dict__, "inner": inner}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("held", [lambda o: o, lambda o: [o], lambda o: {"all": (o,)}])
def test_optimizers_that_a_model_holds_are_left_alone(
    tmp_path: Path, held: Callable[[Any], Any]
) -> None:
    def program() -> int:
        torch.manual_seed(0)
        model = Words()
        wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        model.optimizers = held(wrapper)
        ended = []
        handle = register_optimizer_step_post_hook(lambda *_: ended.append(1))
        for _ in range(8):
            wrapper.zero_grad()
            next_word(model).backward()
            wrapper.step()
        handle.remove()
        return len(ended)

    step = Wrapper.step
    assert diagnosed(tmp_path, program) == set()
    assert Wrapper.step is step
    assert program() == 8


def test_training_and_generators_are_unchanged(tmp_path: Path) -> None:
    def program() -> tuple[list[float], list[Any]]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        calls = []

        def count(x: Tensor) -> Tensor:
            calls.append(1)  # an effect outside the model
            return F.dropout(x, 0.3, training=True)

        losses = trained(Words(count), next_word)
        return losses, [len(calls), random.random(), np.random.rand(), float(torch.rand(()))]

    plain = program()
    with comgra.trace("debug", root=tmp_path) as session:
        traced = program()
    assert traced == plain
    assert session.path is not None
    assert comgra.open_run(session.path).state == "finished"


def test_the_models_are_released(tmp_path: Path) -> None:
    known: list[weakref.ref[nn.Module]] = []

    def train() -> None:
        model = Words()
        known.append(weakref.ref(model))
        trained(model, next_word, steps=5)

    assert diagnosed(tmp_path, train) == set()
    gc.collect()
    assert known[0]() is None


def test_without_perturbations_there_are_no_copies(tmp_path: Path) -> None:
    def train() -> None:
        trained(Noised(level=False), denoised)

    assert diagnosed(tmp_path, train, perturbations="false") == set()
    unchecked = {e.rule: e.reason for e in diagnose(comgra.open_run(tmp_path)).unchecked}
    assert "set `perturbations: true`" in unchecked["ignored_input"]


def test_a_model_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    class Drawing(Noised):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = (number for number in range(9))

    assert diagnosed(tmp_path, lambda: trained(Drawing(), denoised, steps=5)) == set()
    unchecked = {e.rule: e.reason for e in diagnose(comgra.open_run(tmp_path)).unchecked}
    assert unchecked["samples_mixed"].startswith("Drawing: Drawing cannot be copied (TypeError: ")


class Holder:
    """A plain object that holds something."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self) -> Any:
        return self.held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class OwnCopy(Holder):
    """An object that says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        return OwnCopy(copy.deepcopy(self.held, memo))


NUMBERS = 3 << 20  # 12 MiB of float32, so two of them are too large

PLACES: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.ones(NUMBERS) for _ in range(2)],
    "deque of tuples": lambda: deque((i, torch.ones(NUMBERS)) for i in range(2)),
    "dict of lists": lambda: {"seen": [torch.ones(NUMBERS)], "old": [torch.ones(NUMBERS)]},
    "object": lambda: Holder([torch.ones(2 * NUMBERS)]),
    "object with slots": lambda: Slotted(torch.ones(2 * NUMBERS)),
    "object with its own copy": lambda: OwnCopy(torch.ones(2 * NUMBERS)),
    "bound method": lambda: Holder(torch.ones(2 * NUMBERS)).method,
    "partial": lambda: partial(torch.add, torch.ones(2 * NUMBERS)),
    "small view of much": lambda: [torch.ones(2 * NUMBERS)[:4]],
    "gradient": lambda: [with_gradient(NUMBERS)],
    "hidden module": lambda: [nn.Linear(2 * NUMBERS // 4, 4, bias=False)],
    "array": lambda: [np.ones(NUMBERS)],
    "array of arrays": lambda: np.array([np.ones(NUMBERS), None], object),
    "bytes": lambda: bytearray(8 * NUMBERS),
    "many small tensors": lambda: [torch.ones(1) for _ in range(70_000)],
}

SMALL: dict[str, Callable[[], Any]] = {
    "the same tensor often": lambda: [torch.ones(NUMBERS)] * 8,
    "views of one tensor": lambda: [*torch.ones(8, NUMBERS // 8)],
    "a closure, which a copy shares": lambda: closure(torch.ones(2 * NUMBERS)),
    "itself": lambda: recursive(),
    "an optimizer, which a copy shares": lambda: [stepped(torch.ones(NUMBERS))],
}


def with_gradient(size: int) -> Tensor:
    tensor = torch.ones(size, requires_grad=True)
    tensor.sum().backward()
    return tensor


def closure(held: Tensor) -> Callable[[], Tensor]:
    return lambda: held


def recursive() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def stepped(parameter: Tensor) -> torch.optim.Optimizer:
    parameter.requires_grad_().sum().backward()
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    optimizer.step()
    return optimizer


def holding(held: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].extra = held
    return model


@pytest.mark.parametrize("place", PLACES)
def test_whatever_a_model_holds_counts_before_it_is_copied(place: str) -> None:
    model = holding(PLACES[place]())
    assert is_larger_copy(model, 16 << 20)
    assert not is_larger_copy(model, 64 << 20)


@pytest.mark.parametrize("place", SMALL)
def test_what_a_copy_shares_or_has_once_counts_no_more(place: str) -> None:
    assert not is_larger_copy(holding(SMALL[place]()), 16 << 20)


def test_a_model_that_holds_much_is_not_copied(tmp_path: Path) -> None:
    copies: list[int] = []

    class Cache(list[Tensor]):
        def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
            copies.append(len(self))
            return Cache(copy.deepcopy([*self], memo))

    def train() -> None:
        model = Noised()
        vars(model.first)["seen"] = Cache(PLACES["list"]())
        trained(model, denoised, steps=5)

    assert diagnosed(tmp_path, train) == set()
    assert not copies
    unchecked = {e.rule: e.reason for e in diagnose(comgra.open_run(tmp_path)).unchecked}
    assert "with all that its attributes hold, is larger than 16 MiB" in unchecked["samples_mixed"]
