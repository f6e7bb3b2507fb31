"""Changes of attention patterns are those of attention written out, for softmax and fused calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.query import Run
from tests.probing.attention import HEADS, TOKENS, WIDTH, Language

COUNT, LENGTH = 3, 5
Change = Callable[[Tensor], Tensor]


class Eager(nn.Module):
    """Attention written out, in which a test may change the pattern."""

    def __init__(self, *, by_head: bool = True) -> None:
        super().__init__()
        self.n_heads, self.by_head = HEADS, by_head
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change: Change = lambda weights: weights
        self.pattern: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        if self.by_head:
            weights = scores.softmax(-1)
        else:  # as many libraries for fewer dimensions do
            weights = F.softmax(scores.flatten(0, 1), dim=-1).unflatten(0, (-1, HEADS))
        self.pattern = weights = self.change(weights)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class Grouped(Eager):
    """Fused attention with two heads of keys and values for four of queries."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        k, v = k[:, :2], v[:, :2]
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(-2))


class Torchs(Eager):
    """The function of torch that `nn.MultiheadAttention` calls."""

    needed = True

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x.transpose(0, 1)
        found, _ = F.multi_head_attention_forward(
            x, x, x, WIDTH, HEADS, self.qkv.weight, self.qkv.bias, None, None, False, 0.0,
            self.out.weight, self.out.bias, need_weights=self.needed, attn_mask=later,
        )  # fmt: skip
        return found.transpose(0, 1)


class Unreturned(Torchs):
    """The same without weights, which then uses fused attention."""

    needed = False


class Repeated(Eager):
    """The same as `Grouped`, written out."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        k, v = (t[:, :2].repeat_interleave(2, 1) for t in (k, v))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        weights = self.change(scores.softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


def model_with(kind: Callable[[], nn.Module] | None) -> Language:
    """Return the same weights with another attention; None for fused attention."""
    torch.manual_seed(0)
    model = Language()
    blocks: Any = model.blocks if kind is not None else ()
    for block in blocks:
        assert kind is not None
        own, block.attn = block.attn, kind()
        block.attn.load_state_dict(own.state_dict())
    return model


def attention(model: Language, block: int) -> Any:
    blocks: Any = model.blocks
    return blocks[block].attn


DO: dict[str, dict[str, Any]] = {
    "zero": {"do": "zero"},
    "head": {"do": "zero", "parts": {"head": [1]}},
    "uniform": {"do": {"clamp": [0.2, 0.2]}, "parts": {"query": [4]}},
    "other": {"do": {"patch": "other"}, "parts": {"head": [0, 3], "key": [0]}},
    "nothing": {"do": {"patch": "clean"}},
}
PLAIN: dict[str, Change] = {
    "zero": torch.zeros_like,
    "head": lambda w: torch.where(torch.arange(HEADS)[:, None, None] == 1, 0.0, w),
    "uniform": lambda w: torch.where(torch.arange(LENGTH)[:, None] == 4, 0.2, w),
    "other": lambda w: torch.where(
        (torch.arange(HEADS) % 3 == 0)[:, None, None] & (torch.arange(LENGTH) == 0),
        w.roll(-1, 0),
        w,
    ),
    "nothing": lambda w: w,
}


def traced(root: Path, model: nn.Module, interventions: dict[str, Any]) -> Run:
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output", "input"]}},
        "probes": {"eyes": {"samples": {"count": COUNT}}},
        "interventions": {k: {"of": "eyes", "role": "attention", **v} for k, v in
                          interventions.items()},
    }  # fmt: skip
    tokens = torch.randint(TOKENS, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    with comgra_decl.trace(spec, root=root) as session:
        logits = model(tokens)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert session.path is not None
    return comgra_decl.open_run(session.path)


def written_out(run: Run, change: Change, kind: Callable[[], nn.Module] = Eager) -> Tensor:
    """Return the logits with the pattern of the first block changed by the test."""
    model = model_with(kind).eval()
    tokens = torch.from_numpy(run.slot("embed", role="input").value(0, type="probe:eyes"))
    attention(model, 0).change = change
    with torch.no_grad():
        return model(tokens)


def changed(run: Run, name: str) -> Any:
    return run.slot("head").value(0, type=f"intervention:{name}")


FIRST = {"select": "blocks.0.attn"}


@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        (Eager, True),
        (lambda: Eager(by_head=False), True),
        (None, False),
        (Torchs, False),
        (Unreturned, False),
    ],
    ids=["softmax", "flat softmax", "fused", "of torch", "of torch, fused"],
)
def test_a_changed_pattern_is_that_of_attention_written_out(
    kind: Callable[[], nn.Module] | None, exact: bool, tmp_path: Path
) -> None:
    run = traced(tmp_path, model_with(kind), {k: {**FIRST, **v} for k, v in DO.items()})
    for name, change in PLAIN.items():
        wanted = written_out(run, change).numpy()
        if exact:
            np.testing.assert_array_equal(changed(run, name), wanted)
        else:
            np.testing.assert_allclose(changed(run, name), wanted, atol=1e-6)
    base = run.slot("head").value(0, type="probe:eyes")
    np.testing.assert_array_equal(changed(run, "nothing"), base)  # to the last bit
    (warning,) = (each for each in run.report["warnings"] if "not called" not in each)
    assert warning == "intervention 'nothing' did nothing: every element kept its value"
    facts = run.intervention_facts("head")["changes"][0]
    assert (facts["tensors"], facts["elements"]) == (1, COUNT * LENGTH * LENGTH)
    assert facts["changed"] == COUNT * LENGTH * (LENGTH + 1) // 2  # the mask has zeros already


def test_grouped_heads_have_a_pattern_for_each_head_of_queries(tmp_path: Path) -> None:
    run = traced(tmp_path, model_with(Grouped), {k: {**FIRST, **v} for k, v in DO.items()})
    for name, change in PLAIN.items():
        wanted = written_out(run, change, Repeated).numpy()
        np.testing.assert_allclose(changed(run, name), wanted, atol=1e-6)


@pytest.mark.parametrize("kind", [Eager, None], ids=["softmax", "fused"])
def test_sweeps_and_estimates_are_those_of_each_place(
    kind: Callable[[], nn.Module] | None, tmp_path: Path
) -> None:
    places = ["node", "head", "query"]
    sweep = {"select": "blocks.*.attn", "do": "zero", "sweep": places, "measure": 5}
    run = traced(
        tmp_path, model_with(kind), {"swept": sweep, "guess": {**sweep, "estimate": "gradient"}}
    )
    model = model_with(Eager).eval()
    tokens = torch.from_numpy(run.slot("embed", role="input").value(0, type="probe:eyes"))
    base = model(tokens)[:, -1, 5]
    swept, guess = run.effects("swept", 0), run.effects("guess", 0)
    assert len(swept) == 2 * HEADS * LENGTH
    for block, head, query in ((0, 1, 4), (1, 3, 4), (0, 2, 0)):
        place = [(0, f"blocks.{block}.attn", head, query)]
        here = torch.zeros(HEADS, LENGTH, 1, dtype=torch.bool)
        here[head, query] = True
        attn = attention(model, block)
        attn.change = lambda w, here=here: torch.where(here, 0.0, w)
        with torch.no_grad():
            effect = model(tokens)[:, -1, 5] - base
        samples = [*range(COUNT)]
        np.testing.assert_allclose(swept.loc[place, samples].to_numpy()[0], effect, atol=1e-6)
        attn.change = lambda w: w
        measure = model(tokens)[:, -1, 5].sum()
        (gradient,) = torch.autograd.grad(measure, attn.pattern)
        estimate = (gradient * -attn.pattern * here).sum((1, 2, 3)).detach()
        np.testing.assert_allclose(guess.loc[place, samples].to_numpy()[0], estimate, atol=1e-6)


@pytest.mark.parametrize("kind", [Eager, None], ids=["softmax", "fused"])
def test_the_training_is_the_same_to_the_last_bit(
    kind: Callable[[], nn.Module] | None, tmp_path: Path
) -> None:
    results: list[list[Tensor]] = []
    sweep = {"select": "blocks.*.attn", "do": "zero", "sweep": ["node", "head"]}
    declared: list[dict[str, Any]] = [{}, {"blind": {**FIRST, **DO["head"]}, "swept": sweep}]
    for interventions in declared:
        model = model_with(kind)
        traced(tmp_path / str(len(results)), model, interventions)
        results.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


class Torch(nn.Module):
    """Contains torch's own attention, and a layer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.attn(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"select": "head", "do": "zero"}, "no selected module (head) computes an attention"),
        ({"select": "attn", "do": "zero", "parts": {"feature": [1]}}, "only head, query, key"),
        ({"select": "attn", "do": "zero", "into": "head"}, "not at an attention pattern"),
        ({"select": "head", "do": "zero", "role": "output_grad"}, "'output_grad' is a gradient"),
        ({"select": "head", "do": "zero", "role": "weight.grad"}, "'weight.grad' is a gradient"),
    ],
)
def test_what_has_no_pattern_is_refused(wrong: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises((SystemExit, ValueError)) as raised:
        traced(tmp_path, Torch(), {"wrong": wrong})
    assert why in str(raised.value)


class Crossing(nn.Module):
    """torch's own attention between two sequences; the model returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        mixed, weights = self.attn(x[:, :2], x, x, average_attn_weights=False)
        return self.head(mixed), weights


def test_a_changed_pattern_of_torchs_attention_is_what_it_returns() -> None:
    torch.manual_seed(0)
    model, tokens = Crossing(), torch.randint(TOKENS, (COUNT, LENGTH))
    cut = {"select": "attn", "role": "attention", "do": "zero", "parts": {"head": [1], "key": [0]}}
    plain = model(tokens)[1].detach().numpy()
    record = comgra_decl.look(model, tokens, changes=cut)
    changed = record.slot("attn", role="output[1]").value(0)
    wanted = plain.copy()
    wanted[:, 1, :, 0] = 0
    np.testing.assert_allclose(changed, wanted, atol=1e-7)
    softmax, fused = F.softmax, F.scaled_dot_product_attention
    assert (softmax.__module__, fused.__name__) == (
        "torch.nn.functional", "scaled_dot_product_attention"
    )  # fmt: skip
    np.testing.assert_array_equal(model(tokens)[1].detach().numpy(), plain)
