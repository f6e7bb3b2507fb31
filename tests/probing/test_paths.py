"""What a change does through certain receivers alone is what arithmetic by hand gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.probing.attention import HEADS, TOKENS, WIDTH, Language, hooked
from tests.probing.test_effects import loss_of

COUNT, LENGTH = 4, 6
PER_HEAD = WIDTH // HEADS
OUT = ["blocks.0.attn.out", "blocks.1.attn.out"]
READERS = ["blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "head"]
HEADS_TO_READERS: dict[str, Any] = {
    "select": OUT,
    "role": "input",
    "do": {"patch": "other"},
    "into": ["blocks.*.attn", "blocks.*.mlp", "head"],
}
WRITERS: dict[str, Any] = {
    "select": ["embed", "blocks.*.attn", "blocks.*.mlp"],
    "do": {"patch": "other"},
    "into": ["blocks.*.attn", "blocks.*.mlp", "head"],
}
TOKENS_IN = torch.randint(TOKENS, (COUNT, LENGTH), generator=torch.Generator().manual_seed(3))


def recorded(root: Path, model: nn.Module, declared: dict[str, Any], **probe: Any) -> Run:
    """Record the interventions at one step of a training."""
    spec = {
        "nodes": {"all": {"select": "**"}},
        "probes": {"eyes": {"batch": {"tokens": TOKENS_IN.tolist()}, **probe}},
        "interventions": {name: {"of": "eyes", **each} for name, each in declared.items()},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with comgra.trace(spec, root=root) as session:
        model(TOKENS_IN).square().mean().backward()
        optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


def samples_of(table: pd.DataFrame) -> np.ndarray[Any, Any]:
    return table[[*range(COUNT)]].to_numpy()


# -- an oracle in plain arithmetic ----------------------------------------------------------------


class ByHand:
    """The transformer's residual stream, written out."""

    def __init__(self, model: Language) -> None:
        self.model = cast(Any, model)
        self.b0, self.b1 = self.model.blocks
        self.inputs: dict[str, Tensor] = {}

        def keep(path: str) -> Callable[[Tensor], Tensor]:
            return lambda x: self.inputs.setdefault(path, x.detach().clone())

        with hooked(model, [(path, "input", keep(path)) for path in OUT]), torch.no_grad():
            model(TOKENS_IN)
        with torch.no_grad():
            self.e: Tensor = self.model.embed(TOKENS_IN)
            self.a0: Tensor = self.b0.attn(self.b0.norm(self.e))
            self.m0: Tensor = self.b0.mlp(self.e + self.a0)
            self.a1: Tensor = self.b1.attn(self.b1.norm(self.e + self.a0 + self.m0))
            self.m1: Tensor = self.b1.mlp(self.e + self.a0 + self.m0 + self.a1)

    def head_output(self, layer: int, head: int, amount: float | Tensor) -> Tensor:
        """Return the attention's output if a head moves towards the next sample's value."""
        z = self.inputs[OUT[layer]]
        moved = torch.zeros_like(z)
        columns = slice(head * PER_HEAD, (head + 1) * PER_HEAD)
        moved[..., columns] = (z.roll(-1, 0) - z)[..., columns]
        return self.model.blocks[layer].attn.out(z + amount * moved)

    def through(self, receiver: str, **new: Tensor) -> Tensor:
        """Return the logits if only the receiver reads other values than e, a0, m0, a1 and m1."""
        e, a0, m0, a1, m1 = self.e, self.a0, self.m0, self.a1, self.m1
        given = {"e": e, "a0": a0, "m0": m0, "a1": a1, "m1": m1, **new}
        e_, a0_, m0_, a1_, m1_ = given.values()
        if receiver == "blocks.0.attn":
            a0 = self.b0.attn(self.b0.norm(e_))
        if receiver in READERS[:1]:
            m0 = self.b0.mlp(e + a0)
        if receiver == "blocks.0.mlp":
            m0 = self.b0.mlp(e_ + a0_)
        if receiver in READERS[:2]:
            a1 = self.b1.attn(self.b1.norm(e + a0 + m0))
        if receiver == "blocks.1.attn":
            a1 = self.b1.attn(self.b1.norm(e_ + a0_ + m0_))
        if receiver in READERS[:3]:
            m1 = self.b1.mlp(e + a0 + m0 + a1)
        if receiver == "blocks.1.mlp":
            m1 = self.b1.mlp(e_ + a0_ + m0_ + a1_)
        if receiver == "head":
            return self.model.head(e_ + a0_ + m0_ + a1_ + m1_)
        return self.model.head(e + a0 + m0 + a1 + m1)


# What a head of each layer cannot reach, because the reader comes before it.
EARLIER = {0: READERS[:1], 1: READERS[:3]}


@pytest.fixture
def model() -> Language:
    torch.manual_seed(0)
    return Language()


def frozen_copy(model: Language) -> Language:
    other = Language()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("batch", [1, 3 * COUNT, 256])
def test_each_head_reaches_each_reader_of_the_stream(
    batch: int, model: Language, tmp_path: Path
) -> None:
    hand = ByHand(frozen_copy(model))
    sweep = ["node", "head", "into"]
    run = recorded(tmp_path, model, {"heads": {**HEADS_TO_READERS, "sweep": sweep, "batch": batch}})
    table = run.effects("heads", 0)
    assert table.index.names == ["step", *sweep]
    places = [(0, path, h, reader) for path in OUT for h in range(HEADS) for reader in READERS]
    assert table.index.to_list() == places
    with torch.no_grad():
        base = loss_of(hand.through("head"), TOKENS_IN)
        for _, path, head, reader in places:
            found = samples_of(table.loc[[(0, path, head, reader)]])[0]
            layer = OUT.index(path)
            if reader in EARLIER[layer]:
                assert not found.any()
                continue
            new = {f"a{layer}": hand.head_output(layer, head, 1.0)}
            wanted = (loss_of(hand.through(reader, **new), TOKENS_IN) - base).numpy()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
            assert np.abs(wanted).max() > 1e-5


def test_the_estimate_is_the_slope_of_the_path(model: Language, tmp_path: Path) -> None:
    hand = ByHand(frozen_copy(model))
    declared = {**HEADS_TO_READERS, "sweep": ["node", "head", "into"], "estimate": "gradient"}
    table = recorded(tmp_path, model, {"guess": declared}).effects("guess", 0)
    assert len(table) == 2 * HEADS * len(READERS)
    for layer, path in enumerate(OUT):
        for head in range(HEADS):
            for reader in READERS:
                found = samples_of(table.loc[[(0, path, head, reader)]])[0]
                if reader in EARLIER[layer]:
                    assert not found.any()
                    continue
                amounts = torch.zeros(COUNT, 1, 1, requires_grad=True)
                new = {f"a{layer}": hand.head_output(layer, head, amounts)}
                total = loss_of(hand.through(reader, **new), TOKENS_IN).sum()
                (slope,) = torch.autograd.grad(total, amounts)
                np.testing.assert_allclose(found, slope[:, 0, 0].numpy(), rtol=1e-4, atol=1e-6)


def test_estimates_of_all_paths_of_a_writer_add_up_to_its_own(
    model: Language, tmp_path: Path
) -> None:
    """By the chain rule, as each way from a writer first meets exactly one of the readers."""
    whole = {key: value for key, value in WRITERS.items() if key != "into"}
    declared = {
        "paths": {**WRITERS, "sweep": ["node", "into"], "estimate": "gradient"},
        "whole": {**whole, "sweep": "node", "estimate": "gradient"},
    }
    run = recorded(tmp_path, model, declared)
    summed = run.effects("paths", 0).groupby(["step", "node"], sort=False).sum()
    whole_effects = samples_of(run.effects("whole", 0))
    np.testing.assert_allclose(samples_of(summed), whole_effects, rtol=1e-4, atol=1e-6)
    assert np.abs(whole_effects).max() > 1e-2


def test_positions_on_both_sides_and_another_measure(model: Language, tmp_path: Path) -> None:
    """What the first block's attention writes at one position, another head reads elsewhere."""
    hand = ByHand(frozen_copy(model))
    declared = {
        "select": "blocks.0.attn",
        "do": "zero",
        "into": {"select": "blocks.1.norm"},
        "frozen": "blocks.*.mlp",
        "sweep": ["into.position", "position"],
        "measure": {"difference": [3, 4]},
        "position": 2,
    }
    table = recorded(tmp_path, model, {"at": declared}).effects("at", 0)
    assert table.index.names == ["step", "into.position", "position"]

    def measured(logits: Tensor) -> Tensor:
        return logits[:, 2, 3] - logits[:, 2, 4]

    with torch.no_grad():
        stream = hand.e + hand.a0 + hand.m0
        for i, (_, reads, writes) in enumerate(table.index.to_list()):
            changed = stream.clone()
            if reads == writes:
                changed[:, reads] = (hand.e + hand.m0)[:, reads]
            a1 = hand.b1.attn(hand.b1.norm(changed))
            m1 = hand.b1.mlp(stream + a1)
            wanted = measured(hand.model.head(stream + a1 + m1)) - measured(hand.through("head"))
            np.testing.assert_allclose(samples_of(table)[i], wanted.numpy(), rtol=0, atol=1e-6)
            assert (np.abs(wanted.numpy()).max() > 1e-5) == (reads == writes and reads < 3)


def test_frozen_modules_decide_what_counts_as_direct(model: Language, tmp_path: Path) -> None:
    hand = ByHand(frozen_copy(model))
    head = {"select": OUT[0], "role": "input", "parts": {"head": 1}, "do": {"patch": "other"}}
    declared = {
        "stream": {**head, "into": "head", "frozen": ["blocks.*.attn", "blocks.*.mlp"]},
        "mlps": {**head, "into": "head", "frozen": "blocks.*.attn"},
        "all": {**head, "into": "head"},
    }
    run = recorded(tmp_path, model, declared)
    with torch.no_grad():
        base = loss_of(hand.through("head"), TOKENS_IN)
        a0 = hand.head_output(0, 1, 1.0)
        m0 = hand.b0.mlp(hand.e + a0)
        m1 = hand.b1.mlp(hand.e + a0 + m0 + hand.a1)
        a1 = hand.b1.attn(hand.b1.norm(hand.e + a0 + m0))
        again = hand.b1.mlp(hand.e + a0 + m0 + a1)
        expected = {
            "stream": hand.through("head", a0=a0),
            "mlps": hand.through("head", a0=a0, m0=m0, m1=m1),
            "all": hand.through("head", a0=a0, m0=m0, a1=a1, m1=again),
        }
    for name, logits in expected.items():
        wanted = (loss_of(logits, TOKENS_IN) - base).numpy()
        found = samples_of(run.effects(name, 0))[0]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
        # The record is that of the second pass.
        value = run.value("head", 0, type=f"intervention:{name}")
        np.testing.assert_allclose(value, logits.numpy(), rtol=0, atol=1e-5)
        before = run.value("blocks.1.mlp", 0, type=f"intervention:{name}")
        assert before.tobytes() == run.value("blocks.1.mlp", 0, type="probe:eyes").tobytes()


def test_other_changes_come_first_on_all_ways(model: Language, tmp_path: Path) -> None:
    """Restoring one head directly, in a network without its last perceptron."""
    hand = ByHand(frozen_copy(model))
    declared = {
        "first": [{"select": "blocks.1.mlp", "do": "zero"}, {"select": "embed", "do": "mean"}],
        "select": OUT[0],
        "role": "input",
        "do": {"patch": "clean"},
        "into": "head",
        "sweep": ["head"],
        "frozen": ["blocks.*.mlp", "blocks.*.attn"],
    }
    found = samples_of(recorded(tmp_path, model, {"one": declared}).effects("one", 0))
    with torch.no_grad():
        e = hand.e.mean(0, keepdim=True).expand_as(hand.e)
        held: dict[str, Tensor] = {}
        keep = ("blocks.0.attn.out", "input", lambda x: held.setdefault("z", x))
        with hooked(hand.model, [keep]):
            a0 = hand.b0.attn(hand.b0.norm(e))
        m0 = hand.b0.mlp(e + a0)
        a1 = hand.b1.attn(hand.b1.norm(e + a0 + m0))
        base = loss_of(hand.model.head(e + a0 + m0 + a1), TOKENS_IN)
        for head in range(HEADS):
            z, columns = held["z"].clone(), slice(head * PER_HEAD, (head + 1) * PER_HEAD)
            z[..., columns] = hand.inputs[OUT[0]][..., columns]
            logits = hand.model.head(e + hand.b0.attn.out(z) + m0 + a1)
            wanted = (loss_of(logits, TOKENS_IN) - base).numpy()
            np.testing.assert_allclose(found[head], wanted, rtol=0, atol=1e-6)
            assert np.abs(wanted).max() > 1e-5


class Mixing(nn.Module):
    """A linear network in which each sample also depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 4)
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        x = x + self.one(x)
        return self.three(x + self.two(x - 0.5 * x.sum(0)))


def test_in_a_linear_network_that_mixes_samples_the_estimate_is_the_effect(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixing()
    paths = {
        "select": ["embed", "one"],
        "do": {"patch": "other"},
        "into": ["one", "two", "three"],
        "sweep": ["node", "into"],
        "measure": "top",
    }
    declared = {"exact": paths, "guess": {**paths, "estimate": "gradient"}}
    weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
    run = recorded(tmp_path, model, declared)
    exact, guess = run.effects("exact", 0), run.effects("guess", 0)
    pd.testing.assert_frame_equal(exact, guess, atol=1e-6, rtol=0)
    model.load_state_dict(weights)
    with torch.no_grad():
        x = model.embed(TOKENS_IN).mean(1)
        change = (model.one(x).roll(-1, 0)) - model.one(x)
        wanted = (change - 0.5 * change.sum(0)) @ model.two.weight.T @ model.three.weight.T
    found = samples_of(exact.loc[[(0, "one", "two")]])[0]
    np.testing.assert_allclose(found, wanted[:, 0].numpy(), rtol=0, atol=1e-6)
    assert np.abs(found).max() > 1e-3
    assert not samples_of(exact.loc[[(0, "one", "one")]]).any()


def test_the_gradient_of_an_input_is_that_of_this_use_alone(tmp_path: Path) -> None:
    """The stream also goes on past the module that reads it."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.read = nn.Embedding(TOKENS, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens).mean(1)
            return self.head(x + self.read(x))

    torch.manual_seed(0)
    reads = {
        "select": "read",
        "role": "input",
        "do": {"patch": "other"},
        "sweep": "node",
        "measure": "top",
    }
    declared = {"exact": reads, "guess": {**reads, "estimate": "gradient"}}
    run = recorded(tmp_path, Stream(), declared)
    pd.testing.assert_frame_equal(
        run.effects("exact", 0), run.effects("guess", 0), atol=1e-6, rtol=0
    )
    assert np.abs(samples_of(run.effects("exact", 0))).max() > 1e-3


# -- what is wrong, and what does nothing ---------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"into": "haed"}, r"interventions\.x\.into\.select: .*'haed'.*head"),
        ({"into": "head", "frozen": "block.*"}, r"interventions\.x\.frozen: .*'block\.\*'"),
        ({"into": {"select": "head", "role": "input.mask"}}, r"into\.role: no call .*'input.mask'"),
        ({"into": {"select": "head", "iteration": 1}}, r"into\.iteration: .* called 2 times"),
        ({"into": {"select": "head", "parts": {"position": 9}}}, r"position: 9 does not exist"),
    ],
)
def test_a_mistake_ends_the_program_before_training(
    change: dict[str, Any], message: str, model: Language, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as raised:
        recorded(tmp_path, model, {"x": {"select": "blocks.0.attn", "do": "zero", **change}})
    assert re.search(message, str(raised.value))


def test_a_receiver_that_nothing_reaches_is_reported(model: Language, tmp_path: Path) -> None:
    declared = {"select": "blocks.1.attn", "do": "zero", "into": "blocks.0.mlp"}
    run = recorded(tmp_path, model, {"back": declared})
    (warning,) = run.document("report")["warnings"]
    assert warning.startswith("intervention 'back' did nothing: no receiver has another value")
    assert not samples_of(run.effects("back", 0)).any()
