"""Recomputed weights are those that the fused call must have used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.hooks.functions.attention import FusedCall, recomputed_weights
from comgra_decl.spec.axes import RECOMPUTED as ROLE
from tests.support.recording import recording
from tests.support.traced import roles, traced, train

NONE: dict[str, Any] = {}


def by_hand(
    query: NDArray[Any], key: NDArray[Any], mask: NDArray[Any] | None, scale: float
) -> NDArray[Any]:
    """softmax(q k^T scale + mask) in float64; a row that may not attend to anything is 0."""
    scores = np.einsum("nhqe,nhke->nhqk", query.astype(float), key.astype(float)) * scale
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    highest = scores.max(-1, keepdims=True)
    raised = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    total = raised.sum(-1, keepdims=True)
    return np.divide(raised, total, out=np.zeros_like(raised), where=total > 0)


def blind_row() -> torch.Tensor:
    mask = torch.rand(5, 7) > 0.3
    mask[2] = False
    return mask


@pytest.mark.parametrize(
    "options",
    [
        NONE,
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.rand(5, 7) > 0.3},
        {"attn_mask": torch.rand(3, 1, 1, 7) > 0.3},
        {"attn_mask": torch.randn(4, 5, 7)},
        {"attn_mask": blind_row()},
        {"dropout_p": 0.0},
    ],
    ids="plain causal scale mask padding bias blind dropout".split(),
)
def test_weights_equal_those_of_numpy_and_give_the_fused_result(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 4, n, 8, requires_grad=True) for n in (5, 7, 7))
    weights = recomputed_weights(FusedCall(query, key, value, **options), samples=3, most=10_000)
    mask = options.get("attn_mask")
    mask = np.tri(5, 7, dtype=bool) if options.get("is_causal") else mask
    expected = by_hand(
        query.detach().numpy(),
        key.detach().numpy(),
        np.asarray(mask) if mask is not None else None,
        options.get("scale", 8**-0.5),
    )
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-6)
    fused = F.scaled_dot_product_attention(query, key, value, **options)
    np.testing.assert_allclose((weights @ value).detach(), fused.detach(), atol=1e-5)


@pytest.mark.parametrize(
    ("query", "key", "shape"),
    [
        ((5, 8), (7, 8), (1, 1, 5, 7)),
        ((3, 5, 8), (3, 7, 8), (3, 1, 5, 7)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 12, 5, 7)),
    ],
    ids=["no batch", "no heads", "more dimensions"],
)
def test_any_number_of_dimensions_becomes_samples_and_heads(
    query: tuple[int, ...], key: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    call = FusedCall(torch.randn(query), torch.randn(key), torch.randn(key))
    weights = recomputed_weights(call, samples=9, most=10_000)
    assert tuple(weights.shape) == shape
    fused = F.scaled_dot_product_attention(*call[:3])
    applied = weights @ call.value.reshape(*shape[:2], *key[-2:])
    np.testing.assert_allclose(applied.reshape(fused.shape), fused, atol=1e-5)


def test_heads_may_share_their_keys() -> None:
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    weights = recomputed_weights(
        FusedCall(query, key, value, enable_gqa=True), samples=2, most=10_000
    )
    fused = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    applied = weights @ value.repeat_interleave(2, dim=1)
    np.testing.assert_allclose(applied, fused, atol=1e-5)


def test_low_precision_and_autocast_do_not_reach_the_weights() -> None:
    query, key = torch.randn(2, 2, 5, 8).bfloat16(), torch.randn(2, 2, 5, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        weights = recomputed_weights(FusedCall(query, key, key), samples=2, most=10_000)
    expected = by_hand(query.float().numpy(), key.float().numpy(), None, 8**-0.5)
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-6)


class Model(nn.Module):
    """One of torch's attention layers, and a hand-written one."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.own = Own()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.mha(x, x, x, need_weights=False)
        return self.own(y)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)


ATTENTION = {"attn": {"select": ["mha", "own"], "attention": {"recompute": True}}}


def test_a_run_holds_the_weights_of_its_samples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 6, 8)
    _, weights = model.mha(x, x, x, average_attn_weights=False)
    run = traced(tmp_path, ATTENTION, lambda: train(model, x), samples={"count": 3})
    assert roles(run, "mha") == [ROLE, "output[0]"]
    stored = run.slot("mha", role=ROLE).value(0)
    assert stored.dtype == np.float32
    np.testing.assert_allclose(stored, weights.detach()[:3], atol=1e-6)
    own = run.slot("own", role=ROLE).value(0)
    assert own.shape == (3, 2, 6, 6)
    np.testing.assert_allclose(own.sum(-1), 1, atol=1e-6)
    assert not np.triu(own, 1).any(), "causal"
    assert run.slot("own", role=ROLE).series("max")[0] == pytest.approx(own.max((1, 2, 3)).mean())


def test_a_function_entry_can_ask_for_weights_too() -> None:
    name = "F.scaled_dot_product_attention"
    entry = {"select": {"function": name, "within": "own"}, "attention": {"recompute": True}}
    with recording({"nodes": {"sdpa": entry}}) as run:
        train(Model(), torch.randn(5, 6, 8))
    assert run.has("own.scaled_dot_product_attention", ROLE)
    assert run.has("own.scaled_dot_product_attention", "output", pass_="grad")
    assert not run.has("mha.scaled_dot_product_attention", ROLE)


def test_weights_that_are_too_many_are_left_out_and_said() -> None:
    with recording({"nodes": ATTENTION}, values={"max_elements": 71}) as run:
        train(Model(), torch.randn(5, 6, 8))
    assert not run.has("mha", ROLE)
    reason = run.report["refused"][f"mha {ROLE}"]
    assert reason == "72 weights per sample exceed `values.max_elements`, 71"


def test_recomputing_changes_nothing_of_the_training() -> None:
    def run_once(*, follow: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Model(), torch.randn(5, 6, 8)
        if follow:
            with recording({"nodes": ATTENTION}) as recorded:
                train(model, x, steps=4)
            assert recorded.faults == []
        else:
            train(model, x, steps=4)
        return [*model.parameters(), torch.get_rng_state()]

    pairs = zip(run_once(follow=False), run_once(follow=True), strict=True)
    assert all(torch.equal(plain, followed) for plain, followed in pairs)


def test_the_preset_finds_attention_of_any_making(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(5, 6, 8)
    with comgra.trace("attention", root=tmp_path) as session:
        train(model, x, steps=2)
    assert session.path is not None
    run = comgra.open_run(session.path)
    for node in ("mha", "own"):
        name = f"{node}.scaled_dot_product_attention"
        assert run.slot(name, role=ROLE).value(1).shape == (2, 2, 6, 6)
    assert run.report["unmatched"] == []  # one of the two functions suffices


def bert(transformers: Any) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=16,
        vocab_size=31, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.BertModel(config)
    return model


def llama(transformers: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=16, vocab_size=31, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.LlamaModel(config)
    return model


def gpt2(transformers: Any) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=31, n_positions=8, bos_token_id=0,
        eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.GPT2Model(config)
    return model


@pytest.mark.parametrize("make", [bert, llama, gpt2])
@pytest.mark.parametrize("padded", [True, False])
def test_weights_equal_those_of_eager_attention(make: Any, padded: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make(transformers).eval()
    given: dict[str, Any] = {"input_ids": torch.randint(5, 30, (4, 7))}
    mask = torch.ones(4, 7, dtype=torch.int64)
    mask[0, 4:] = mask[2, 5:] = 0
    if padded:
        given["attention_mask"] = mask
    found = comgra.look(model, spec="attention", **given)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(**given, output_attentions=True).attentions
    slots = found.slots[found.slots["role"] == ROLE]
    assert len(slots) == len(eager) == 2
    for node, wanted in zip(slots["node"], eager, strict=True):
        weights = found.slot(node, role=ROLE).value(0)
        np.testing.assert_allclose(weights, wanted.numpy(), atol=1e-6)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
        if padded:
            assert not weights[0, :, :, 4:].any()
            assert not weights[2, :, :, 5:].any()
